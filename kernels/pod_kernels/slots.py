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

# Logits that one part of the queries may materialise on a CPU; 2**20 float32 numbers are 4 MiB.
CPU_LOGITS = 2**20


@dataclass
class BlockAnchor:
    """What an anchor head leaves for the later layers of its block (PoD, arXiv 2412.02252, Eq. 3).

    Attributes:
        queries: [B, G, T, D] the anchor's queries.
        keys: its keys, [B, F, D] of the slots and [B, T, D] of the chunk.
        logits: [B, G, 1, M] float32, their products; None where they are computed (again).
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
    """RoPE (arXiv 2104.09864) in the half-split layout of Hugging Face's models: pair (i, i + D/2) turns together.

    Args:
        states: [.., D].
        cos, sin: [.., D / 2] of each pair's angle; they broadcast.
    """
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


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
    return_logits: bool = False,
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
        return_logits: give the anchor heads' logits back, for one query.

    Returns:
        out [H_kv, B, G, T, D], zero at padding; sums [A, B, G, M] float32, each key's attention summed over the queries
        with `decay`; the anchor heads' logits [A, B, G, 1, M] float32; how many (query, key) pairs were multiplied.
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
    if count > 1:
        # One query reads slots and chunk in place. For many, one product over both is worth the copy.
        keys, values = ((torch.cat(pieces, dim=2),) for pieces in (keys, values))
    if count > 1 and decay is None and not anchors:
        seen = has_key[:, None] & (column - used <= order[:, None])
        out = _fused(q, keys[0], values[0], seen, scale)
        return out.masked_fill(~is_real[:, None, :, None], 0), None, None, heads * batch * groups * count * width
    # On a CPU the logits of one part should stay in its caches.
    most = MAX_LOGITS if q.is_cuda else CPU_LOGITS
    chunk = max(1, min(count, most // max(1, batch * heads * groups * width)))
    sums = q.new_zeros(num_anchors, batch, groups, width, dtype=torch.float32) if decay is not None else None
    pieces, kept_logits, pairs = [], None, 0
    for first in range(0, count, chunk):
        part = slice(first, first + chunk)
        asked = q[:, :, :, part]
        at = positions[:, part]
        logits, multiplied = _products(asked[:num_anchors], keys, scale)
        pairs += multiplied
        if return_logits:
            kept_logits = logits.clone()
        if anchors:
            logits, multiplied = _with_shared(logits, asked, anchors, part, share, scale)
            pairs += multiplied
            pairs += _put_own(logits[num_anchors:], asked[num_anchors:], own, at, sink_size, recent_size, scale)
        seen = has_key[:, None] & (column - used <= order[part, None])
        logits.masked_fill_(~seen[None, :, None], torch.finfo(torch.float32).min)
        weights = torch.softmax(logits, dim=-1)
        weights.masked_fill_(~is_real[:, part][None, :, None, :, None], 0)
        if sums is not None:
            sums += decay[part] @ weights[:num_anchors]
        weights = weights.to(values[0].dtype).flatten(2, 3)
        out = sum(share @ piece for share, piece in zip(weights.split(_widths(values), dim=-1), values, strict=True))
        pieces.append(out.unflatten(2, (groups, -1)))
    return torch.cat(pieces, dim=3), sums, kept_logits, pairs


def _widths(pieces: tuple[Tensor, ...]) -> list[int]:
    return [piece.shape[-2] for piece in pieces]


def _products(queries: Tensor, keys: tuple[Tensor, ...], scale: float) -> tuple[Tensor, int]:
    """[h, B, G, t, M] float32 logits of queries [h, B, G, t, D] and keys in pieces [h, B, .., D]; how many pairs."""
    products = [queries.flatten(2, 3) @ piece.transpose(2, 3) for piece in keys]
    logits = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
    return logits.unflatten(2, queries.shape[2:4]).float().mul_(scale), logits.numel()


def _with_shared(
    logits: Tensor, asked: Tensor, anchors: list[BlockAnchor], part: slice, share: str, scale: float
) -> tuple[Tensor, int]:
    """The anchor heads' logits [A, B, G, t, M] and after them the other heads', all distant so far; how many pairs."""
    all_logits, pairs = [logits] if len(logits) else [], 0
    for place, anchor in enumerate(anchors, start=len(logits)):
        if anchor.logits is not None:
            all_logits.append(anchor.logits[None])
            continue
        queries = anchor.queries[:, :, part] if share == "scores" else asked[place]
        products, multiplied = _products(queries[None], tuple(piece[None] for piece in anchor.keys), scale)
        all_logits.append(products)
        pairs += multiplied
    return torch.cat(all_logits), pairs


def _fused(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Plain attention [H_kv, B, G, T, D] with the mask seen [B, T, M]."""
    heads, batch = q.shape[:2]
    mask = seen.expand(heads, -1, -1, -1).flatten(0, 1)[:, None]
    q, keys, values = q.flatten(0, 1), keys.flatten(0, 1)[:, None], values.flatten(0, 1)[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, mask, scale=scale, enable_gqa=True)
    return out.unflatten(0, (heads, batch))


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
