"""Shared-score attention of a batch of requests whose cache lies in blocks, as serving engines keep it (vLLM).

Legend: R requests, T tokens of all requests one behind the other, H query heads, H_kv KV heads, G = H / H_kv, D head
dimension, N tiles of Q queries, C columns (blocks of one request), b tokens of a block.

A layer's vectors lie in a `Store`: blocks of b tokens, and for each request a table of its blocks. The queries of a
step, one for a request that decodes, a chunk for one that is being prefilled, are cut into `Tiles` of as many queries,
and all tiles run at once: over the blocks of their proximal pairs, then over those of their distant ones, with one
running softmax (Dao et al., arXiv 2205.14135, Algorithm 1). The only loops are over pieces of the context, which bound
the memory, and over the stores that a layer's anchors lie in. Where `dispatch.runs_triton` says so, a kernel reads the
blocks where they lie (`triton/block_tables.py`); here, each step copies those that it reads.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pod_kernels.dispatch import runs_triton
from pod_kernels.tables import Part, Tiles

PIECE = 2**21  # elements of one piece's logits, or of its keys, at most: 8 MB stay in a cache, and in the heap


class _Softmax:
    """A softmax over keys that come in pieces: maximum, sum and weighted values of N * H_kv * G * Q queries so far."""

    def __init__(self, shape: Sequence[int], dim: int, device: torch.device) -> None:
        # The lowest finite number, not -inf, which less itself is NaN: a query may not have met a key yet.
        self.top = torch.full(shape, torch.finfo(torch.float32).min, device=device)
        self.sum = torch.zeros(shape, device=device)
        self.out = torch.zeros(*shape, dim, device=device)

    def add(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> None:
        """Take in keys k and values v [n, H_kv, K, D] of the first n tiles.

        q [n, H_kv, G * Q, D]; visible [n, Q, K], which pairs count.
        """
        count, width = visible.shape[:2]
        logits = torch.matmul(q, k.transpose(2, 3)).float().mul_(scale)
        by_query = logits.unflatten(2, (-1, width))
        by_query.masked_fill_(~visible[:, None, None], float("-inf"))
        top = torch.maximum(self.top[:count], logits.amax(dim=-1))
        kept = torch.exp(self.top[:count] - top)
        weights = logits.sub_(top[..., None]).exp_()
        self.top[:count] = top
        self.sum[:count] = self.sum[:count] * kept + weights.sum(dim=-1)
        self.out[:count] = self.out[:count] * kept[..., None] + torch.matmul(weights.to(v.dtype), v).float()


def _read(parts: Sequence[Part], rows: Tensor, columns: Tensor) -> Tensor:
    """[N, H_kv, C * b, D], head after head, of parts that hold all KV heads between them."""
    if len(parts) == 1:
        return parts[0].store.read(rows, columns, parts[0].slots)
    found = [part.store.read(rows, columns, part.slots) for part in parts]
    every = found[0].new_empty(len(rows), sum(len(part.heads) for part in parts), *found[0].shape[2:])
    for part, vectors in zip(parts, found, strict=True):
        every[:, part.heads] = vectors
    return every


def _pairs(tiles: Tiles, count: int, columns: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Of the first `count` tiles: positions of the keys in `columns` [n, C], and how far each query is behind them.

    Returns:
        [n, 1, C * b] and [n, Q, C * b].
    """
    keys = (columns[:, :, None] * block + torch.arange(block, device=columns.device)).flatten(1)[:, None]
    queries = tiles.first[:count, None] + torch.arange(tiles.tokens.shape[1], device=columns.device)
    queries = torch.minimum(queries, tiles.last[:count, None])  # a repeated query sees no more than the one it repeats
    return keys, queries[:, :, None] - keys


def _near_columns(tiles: Tiles, block: int, sink_size: int, recent_size: int) -> Tensor:
    """[N, C]: the blocks of each tile's sinks, and those of its window; -1 where a tile needs fewer."""
    device = tiles.first.device
    firsts = np.maximum(tiles.firsts - recent_size + 1, 0) // block
    sinks = min(-(-sink_size // block), -(-int(tiles.ends[0]) // block))
    window = int(((tiles.ends - 1) // block - firsts).max()) + 1
    start = (tiles.first - recent_size + 1).clamp(min=0) // block
    recent = start[:, None] + torch.arange(window, device=device)
    recent = torch.where(recent < sinks, -1, recent)  # there already
    return torch.cat([torch.arange(sinks, device=device).expand(len(start), -1), recent], dim=1)


def block_table_attention(
    q: Tensor,
    q_distant: Tensor | None,
    near_keys: Sequence[Part] | None,
    distant_keys: Sequence[Part] | None,
    values: Sequence[Part],
    tiles: Sequence[Tiles],
    *,
    sink_size: int,
    recent_size: int,
    scale: float,
) -> Tensor:
    """Attention of a step's queries to all that the cache holds of their requests, their own keys and values written.

    Args:
        q: [T, H, D], after RoPE.
        q_distant: [T, H, D], the queries of the layers' anchors; None: q, which is what `share: keys` means.
        near_keys: the layer's own keys, of proximal tokens at least. None: there is one kind of pair, every j <= i,
            and `distant_keys` are the keys (a layer of anchors; cross-layer attention).
        distant_keys: the anchors' keys of all tokens. None: there are proximal pairs alone (window attention).
        values: of all tokens, of proximal ones where `distant_keys` is None. Either one part, of all KV heads in their
            order, or as many as `distant_keys`, each of the same heads as the one there, and no `near_keys`.
        tiles: from `Tiles.of`.
        sink_size, recent_size: proximal tokens.
        scale: of the logits.

    Returns:
        [T, H, D] in q's dtype, zeros where no request's query is. Logits and sums are float32, products the dtype's.

    Raises:
        ValueError: POD_ATTENTION_BACKEND asks for Triton's kernels, and they cannot run here, with the reason.
    """
    out = torch.zeros_like(q)
    attend = _of_tiles
    if runs_triton(q, "serving"):
        from pod_kernels.triton.block_tables import tiles_attention as attend  # imports triton
    for some in tiles:
        out[some.queries] = attend(
            q, q_distant, near_keys, distant_keys, values, some, sink_size, recent_size, scale
        ).to(q.dtype)[some.places]
    return out


def _of_tiles(
    q: Tensor,
    q_distant: Tensor | None,
    near_keys: Sequence[Part] | None,
    distant_keys: Sequence[Part] | None,
    values: Sequence[Part],
    tiles: Tiles,
    sink_size: int,
    recent_size: int,
    scale: float,
) -> Tensor:
    """`block_table_attention` of tiles of one width: [N * Q, H, D] float32."""
    (count, width), (_, heads, dim) = tiles.tokens.shape, q.shape
    kv_heads, block = sum(len(part.heads) for part in values), values[0].store.blocks.shape[2]
    groups = heads // kv_heads
    running = _Softmax((count, kv_heads, groups * width), dim, q.device)
    piece = max(1, PIECE // (count * block * max(heads * width, 2 * kv_heads * dim)))  # in blocks

    def add(queries: Tensor, keys: Sequence[Part], columns: Tensor, visible: Tensor) -> None:
        rows = tiles.rows[: len(columns)]
        v = _read(values, rows, columns)
        # Weights of 0 do not undo what is no number in a block's unwritten rest.
        v.masked_fill_(~visible.any(dim=1)[:, None, :, None], 0)
        running.add(queries[: len(columns)], _read(keys, rows, columns), v, visible, scale)

    if near_keys is None:
        sink_size = recent_size = 0
    else:
        mine = tiles.grouped(q, kv_heads)
        for columns in _near_columns(tiles, block, sink_size, recent_size).split(piece, dim=1):
            keys, distance = _pairs(tiles, count, columns, block)
            add(
                mine,
                near_keys,
                columns,
                (distance >= 0) & (keys >= 0) & ((keys < sink_size) | (distance < recent_size)),
            )
    if distant_keys is not None:
        theirs = tiles.grouped(q if q_distant is None else q_distant, kv_heads)
        last = -(-(int(tiles.ends[0]) - recent_size) // block)
        for start in range(sink_size // block, last, piece):
            # Tiles that look less far are done: the others come first.
            n = int((tiles.ends - recent_size > start * block).sum())
            columns = torch.arange(start, min(start + piece, last), device=q.device).expand(n, -1)
            keys, distance = _pairs(tiles, n, columns, block)
            add(theirs, distant_keys, columns, (keys >= sink_size) & (distance >= recent_size))
    result = running.out / running.sum[..., None]
    return result.unflatten(2, (groups, width)).permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
