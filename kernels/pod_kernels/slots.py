"""Attention of a chunk of queries to a cache of fixed slots and to the chunk itself.

Legend: B rows, H_kv KV heads, A of them anchors (they come first), S = H_kv - A the others, G query heads per KV head,
T queries, F slots in use, M = F + T keys, R slots of a head's own keys, D head dimension.

The slots hold tokens in any order: a softmax does not mind. Where keys are rotated to their place among the kept tokens
(StreamingLLM, arXiv 2309.17453, section 3.2), that has happened before.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pod_kernels.dispatch import runs_triton
from pod_kernels.segments import CPU_NUMBERS, MAX_LOGITS, products, weighted

# Logits that one part of the work may materialise on a CPU: what fits its caches.
CPU_LOGITS = 2**20


@dataclass
class BlockAnchor:
    """What an anchor head leaves for the later layers of its block (PoD, arXiv 2412.02252, Eq. 3).

    Attributes:
        queries: [B, G, T, D] the anchor's queries.
        keys: its keys in pieces [B, .., D], slots first; not read when there are logits.
        logits: [B, G, 1, M] float32, their products; None where they are computed (again).
        capped: its sinks where distances have a ceiling; None where they have none, or with logits.
    """

    queries: Tensor
    keys: list[Tensor]
    logits: Tensor | None = None
    capped: "Capped | None" = None


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


@dataclass
class Capped:
    """Sinks of h heads, whose distance counts as `ceiling` where it is larger (LM-Infinite, arXiv 2308.16137).

    Attributes:
        queries: [h, B, G, T, D] turned to place `ceiling`.
        sinks: their keys [h, B, R, D] at place 0, i.e. not turned; columns and positions as of `OwnKeys`.
        ceiling: tokens.
        near: sink_size and recent_size where proximal pairs alone are meant; None: all.
    """

    queries: Tensor
    sinks: OwnKeys
    ceiling: int
    near: tuple[int, int] | None = None

    def head(self, place: int) -> "Capped":
        """One head's."""
        part, sinks = slice(place, place + 1), self.sinks
        own = OwnKeys(sinks.keys[part], sinks.columns[part], sinks.positions[part])
        return Capped(self.queries[part], own, self.ceiling)

    def put(self, logits: Tensor, at: Tensor, part: slice, scale: float, queries: Tensor | None = None) -> None:
        """Overwrite what is farther than the ceiling in logits [h, B, G, t, M] of the queries `part`.

        Args:
            at: [B, t] positions of these queries.
            queries: other queries than its own.
        """
        queries = self.queries if queries is None else queries
        key, query = self.sinks.positions[:, :, None], at[None, :, :, None]
        is_used = (key >= 0) & (query - key > self.ceiling)
        if self.near is not None:
            is_used &= (key < self.near[0]) | (query - key < self.near[1])
        _put(logits, queries[:, :, :, part], self.sinks, is_used, scale)


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (arXiv 2104.09864) in the half-split layout of Hugging Face's models: pair (i, i + D/2) turns together.

    Args:
        states: [.., D].
        cos, sin: [.., D / 2] of each pair's angle; they broadcast.
    """
    first, second = states.chunk(2, dim=-1)
    out = torch.empty_like(states)
    turned_first, turned_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned_second).addcmul_(first, sin)
    return out


def rotated_pieces(keys: Tensor, places: Tensor, cos: Tensor, sin: Tensor) -> Iterator[Tensor]:
    """Keys turned to their places, piece by piece, so that on a CPU each is used while it is in the processor's caches.

    Args:
        keys: [A, B, F, D].
        places: [A, B, F] int64.
        cos, sin: [.., D / 2] by place.
    """
    heads, batch, used, dim = keys.shape
    piece = used if keys.is_cuda else max(1, CPU_NUMBERS // max(1, heads * batch * dim))
    for first in range(0, used, max(1, piece)):
        part = places[:, :, first : first + piece]
        yield rotated(keys[:, :, first : first + piece], cos[part], sin[part])


def slot_attention(
    q: Tensor,
    keys: Iterable[Tensor],
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
    window: tuple[Tensor, int, int] | None = None,
    capped: tuple[Capped | None, Capped | None] = (None, None),
    return_logits: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention of T queries to F slots and, causally, to their own T tokens.

    Args:
        q: [H_kv, B, G, T, D], the anchor heads' first.
        keys: the anchor heads' M keys in pieces [A, B, .., D], slots first; read once, and one piece at a time when
            there is one query.
        values: [H_kv, B, F, D] and [H_kv, B, T, D].
        kept: [B or 1] int64, slots in use in each row, from the first on.
        positions: [B, T] int64, each query's position in its row, -1 for padding.
        anchors: for each of the S other heads, what its anchor left.
        own: the S other heads' own keys; None when S is 0.
        share: "scores" (distant logits are the anchor's) or "keys" (of the head's own queries and the anchor's keys).
        sink_size, recent_size: which pairs are proximal, by the tokens' positions.
        scale: factor on every logit.
        decay: [T] float32, the factor of each query in `sums`; None for no sums.
        window: [B, F] int64 positions of the tokens in the slots, and how many first and how many last tokens (itself
            included) a query sees; the others then do not count. None: all do.
        capped: of the anchor heads and of the others, the sinks where distances have a ceiling.
        return_logits: give the anchor heads' logits back, for one query.

    Returns:
        out [H_kv, B, G, T, D], zero at padding; sums [A, B, G, M] float32, each key's attention summed over the queries
        with `decay`; the anchor heads' logits [A, B, G, 1, M] float32.
    """
    heads, batch, groups, count, _ = q.shape
    num_anchors = heads - len(anchors)
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
        keys, values = ((torch.cat(list(pieces), dim=2),) for pieces in (keys, values))
    if count > 1 and not anchors and window is None and capped[0] is None and runs_triton(q):
        from pod_kernels.triton.column_sums import chunk_attention  # imports triton

        counts = is_real.sum(dim=1)
        out, sums = chunk_attention(
            q, keys[0], values[0], used=used, kept=kept, counts=counts, scale=scale, decay=decay
        )
        return out, sums, None

    if window is not None:
        held, first_tokens, last_tokens = window
        key = torch.cat([held, positions], dim=1)[:, None]

    def seen(part: slice) -> Tensor:
        """[B, t, M] bool, the keys that count for the queries `part`."""
        counts = has_key[:, None] & (column - used <= order[part, None])
        if window is not None:
            query = positions[:, part, None]
            counts &= (key < first_tokens) | (query - key < last_tokens)
        return counts

    if count > 1 and decay is None and not anchors and capped[0] is None:
        out = _fused(q, keys[0], values[0], seen(slice(None)), scale)
        return out.masked_fill(~is_real[:, None, :, None], 0), None, None
    # On a CPU the logits of one part should stay in its caches.
    most = MAX_LOGITS if q.is_cuda else CPU_LOGITS
    chunk = max(1, min(count, most // max(1, batch * heads * groups * width)))
    sums = q.new_zeros(num_anchors, batch, groups, width, dtype=torch.float32) if decay is not None else None
    pieces, kept_logits = [], None
    for first in range(0, count, chunk):
        part = slice(first, first + chunk)
        asked = q[:, :, :, part]
        at = positions[:, part]
        all_logits = [_products(asked[:num_anchors], keys, scale)] if num_anchors else []
        if num_anchors and capped[0] is not None:
            capped[0].put(all_logits[0], at, part, scale)
        if return_logits:
            kept_logits = all_logits[0].clone()
        for place, anchor in enumerate(anchors, start=num_anchors):
            if anchor.logits is not None:
                all_logits.append(anchor.logits[None])
                continue
            queries = anchor.queries[:, :, part] if share == "scores" else asked[place]
            all_logits.append(_products(queries[None], [piece[None] for piece in anchor.keys], scale))
            if anchor.capped is not None:
                own_queries = None if share == "scores" else capped[1].queries[place - num_anchors][None]
                anchor.capped.put(all_logits[-1], at, part, scale, own_queries)
        logits = all_logits[0] if len(all_logits) == 1 else torch.cat(all_logits)
        if own is not None:
            put_own(logits[num_anchors:], asked[num_anchors:], own, at, sink_size, recent_size, scale)
        if anchors and capped[1] is not None:
            capped[1].put(logits[num_anchors:], at, part, scale)
        logits.masked_fill_(~seen(part)[None, :, None], torch.finfo(torch.float32).min)
        weights = torch.softmax(logits, dim=-1)
        weights.masked_fill_(~is_real[:, part][None, :, None, :, None], 0)
        if sums is not None:
            sums += decay[part] @ weights[:num_anchors]
        parts = weights.flatten(2, 3).split([piece.shape[2] for piece in values], dim=-1)
        out = sum(weighted(part, piece) for part, piece in zip(parts, values, strict=True))
        pieces.append(out.unflatten(2, (groups, -1)))
    return torch.cat(pieces, dim=3), sums, kept_logits


def _products(queries: Tensor, keys: Iterable[Tensor], scale: float) -> Tensor:
    """[h, B, G, t, M] float32 logits of queries [h, B, G, t, D] and keys in pieces [h, B, .., D]."""
    logits = [products(queries, piece, scale) for piece in keys]
    return logits[0] if len(logits) == 1 else torch.cat(logits, dim=-1)


def _fused(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Plain attention [H_kv, B, G, T, D] with the mask seen [B, T, M]."""
    heads, batch = q.shape[:2]
    mask = seen.expand(heads, -1, -1, -1).flatten(0, 1)[:, None]
    q, keys, values = q.flatten(0, 1), keys.flatten(0, 1)[:, None], values.flatten(0, 1)[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, mask, scale=scale, enable_gqa=True)
    return out.unflatten(0, (heads, batch))


def put_own(
    logits: Tensor, queries: Tensor, own: OwnKeys, at: Tensor, sink_size: int, recent_size: int, scale: float
) -> None:
    """Overwrite the proximal columns of logits [S, B, G, t, M] with the heads' own."""
    key, query = own.positions[:, :, None], at[None, :, :, None]
    is_used = (key >= 0) & (key <= query) & ((key < sink_size) | (query - key < recent_size))
    _put(logits, queries, own, is_used, scale)


def _put(logits: Tensor, queries: Tensor, own: OwnKeys, is_used: Tensor, scale: float) -> None:
    """Overwrite columns of logits [h, B, G, t, M] where `is_used` [h, B, t, R]."""
    values = products(queries, own.keys, scale)
    # What is not used is written to one spare column, so that no mask has to be turned into indices.
    spare = logits.shape[-1]
    index = torch.where(is_used, own.columns[:, :, None], spare)[:, :, None]
    padded = torch.nn.functional.pad(logits, (0, 1))
    logits.copy_(padded.scatter_(-1, index.expand(values.shape), values)[..., :spare])
