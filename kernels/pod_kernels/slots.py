"""Attention of a chunk of queries to a cache of fixed slots and to the chunk itself.

Legend: B rows, H_kv KV heads, A of them anchors (they come first), S = H_kv - A the others, G query heads per KV head,
T queries, F slots in use, M = F + T keys, R slots of a head's own keys, D head dimension.

The slots hold tokens in any order: a softmax does not mind. Where keys are rotated to their place among the kept tokens
(StreamingLLM, arXiv 2309.17453, section 3.2), that has happened before.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pod_kernels.cached import MAX_LOGITS


@dataclass
class BlockAnchor:
    """What an anchor head leaves for the later layers of its block (PoD, arXiv 2412.02252, Eq. 3).

    Attributes:
        queries: [B, G, T, D] the anchor's queries.
        keys: its keys, [B, F, D] of the slots and [B, T, D] of the chunk.
        logits: [B, G, T, M] float32 their products; None where they are computed again.
    """

    queries: Tensor
    keys: tuple[Tensor, Tensor]
    logits: Tensor | None = None


@dataclass
class OwnKeys:
    """The keys that the S other heads have of their own, for proximal pairs.

    Attributes:
        keys: [S, B, R + T, D].
        columns: [S, B, R + T] int64, which of the M keys each of them is; M for none.
        positions: [S, B, R + T] int64, their tokens' positions in the rows.
    """

    keys: Tensor
    columns: Tensor
    positions: Tensor


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (arXiv 2104.09864) in the half-split layout of Hugging Face's models.

    Args:
        states: [.., D].
        cos, sin: the same shape, or one that broadcasts to it.
    """
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


def slot_attention(
    q: Tensor,
    keys: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],
    *,
    kept: Tensor,
    positions: Tensor,
    anchors: list[BlockAnchor],
    own: OwnKeys | None,
    share: str,
    sink_size: int,
    recent_size: int,
    scale: float,
    decay: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
    """Attention of T queries to F slots and, causally, to their own T tokens.

    Args:
        q: [H_kv, B, G, T, D], the anchor heads' first.
        keys: [A, B, F, D] of the slots and [A, B, T, D] of the chunk, the anchor heads'.
        values: [H_kv, B, F, D] and [H_kv, B, T, D].
        kept: [B or 1] int64, slots in use in each row, from the first on.
        positions: [B, T] int64, each query's position in its row, -1 for padding.
        anchors: for each of the S other heads, what its anchor left.
        own: the S other heads' own keys; None when S is 0.
        share: "scores" (distant logits are the anchor's) or "keys" (of the head's own queries and the anchor's keys).
        sink_size, recent_size: which pairs are proximal, by the tokens' positions.
        scale: factor on every logit.
        decay: [T] float32, the factor of each query in `sums`; None for no sums.

    Returns:
        out [H_kv, B, G, T, D], zero at padding; sums [A, B, G, M] float32, each key's attention summed over the queries
        with `decay`; the anchor heads' logits [A, B, G, T, M] for one query, else None; how many (query, key) pairs
        were multiplied.
    """
    heads, batch, groups, count, _ = q.shape
    num_anchors = keys[0].shape[0]
    used = values[0].shape[2]
    width = used + count
    is_real = positions >= 0
    column = torch.arange(width, device=q.device)
    # A query sees the slots in use, and the chunk's real tokens up to itself.
    in_slots = column[:used] < kept[:, None]
    has_key = torch.cat([in_slots.expand(batch, -1), is_real], dim=1)
    order = torch.arange(count, device=q.device)
    chunk = max(1, min(count, MAX_LOGITS // max(1, batch * heads * groups * width)))
    sums = q.new_zeros(num_anchors, batch, groups, width, dtype=torch.float32) if decay is not None else None
    pieces, kept_logits, pairs = [], None, 0
    for first in range(0, count, chunk):
        part = slice(first, first + chunk)
        asked = q[:, :, :, part]
        at = positions[:, part]
        logits = q.new_empty(heads, batch, groups, at.shape[1], width, dtype=torch.float32)
        pairs += _multiply(logits[:num_anchors], asked[:num_anchors], keys, scale)
        if count == 1:
            kept_logits = logits[:num_anchors].clone()
        for place, anchor in enumerate(anchors, start=num_anchors):
            if share == "scores" and anchor.logits is not None:
                logits[place] = anchor.logits
                continue
            queries = anchor.queries[:, :, part] if share == "scores" else asked[place]
            distant = tuple(piece[None] for piece in anchor.keys)
            pairs += _multiply(logits[place : place + 1], queries[None], distant, scale)
        if own is not None:
            pairs += _put_own(logits[num_anchors:], asked[num_anchors:], own, at, sink_size, recent_size, scale)
        seen = has_key[:, None] & (column - used <= order[part, None])
        logits.masked_fill_(~seen[None, :, None], torch.finfo(torch.float32).min)
        weights = torch.softmax(logits, dim=-1)
        weights = weights.masked_fill(~is_real[:, part][None, :, None, :, None], 0)
        if sums is not None:
            sums += decay[part] @ weights[:num_anchors]
        weights = weights.to(values[0].dtype).flatten(2, 3)
        out = weights[..., :used] @ values[0] + weights[..., used:] @ values[1]
        pieces.append(out.unflatten(2, (groups, -1)))
    return torch.cat(pieces, dim=3), sums, kept_logits, pairs


def _multiply(logits: Tensor, queries: Tensor, keys: tuple[Tensor, ...], scale: float) -> int:
    """Fill logits [h, B, G, t, M] from queries [h, B, G, t, D] and keys in pieces [h, B, .., D]; how many pairs."""
    first = 0
    pairs = 0
    for piece in keys:
        products = queries.flatten(2, 3) @ piece.transpose(2, 3)
        last = first + piece.shape[2]
        logits[..., first:last] = products.unflatten(2, queries.shape[2:4]).float() * scale
        pairs += products.numel()
        first = last
    return pairs


def _put_own(
    logits: Tensor, queries: Tensor, own: OwnKeys, at: Tensor, sink_size: int, recent_size: int, scale: float
) -> int:
    """Overwrite the proximal columns of logits [S, B, G, t, M] with the heads' own; how many pairs."""
    products = queries.flatten(2, 3) @ own.keys.transpose(2, 3)
    key, query = own.positions[:, :, None], at[None, :, :, None]
    is_used = (key >= 0) & (key <= query) & ((key < sink_size) | (query - key < recent_size))
    # What is not used is written to one spare column, so that no mask has to be turned into indices.
    spare = logits.shape[-1]
    index = torch.where(is_used, own.columns[:, :, None], spare)[:, :, None]
    values = products.unflatten(2, queries.shape[2:4]).float() * scale
    padded = torch.nn.functional.pad(logits, (0, 1))
    logits.copy_(padded.scatter_(-1, index.expand(values.shape), values)[..., :spare])
    return products.numel()
