"""Triton kernels of many queries' attention to a cache, and of what each key received from them.

Legend: B rows, H_kv KV heads, A of them anchors, G query heads per KV head, T queries, F slots in use, N keys (of a
chunk M = F + T), D head dimension.

The Cascading KV cache scores a token by the attention that it receives (arXiv 2406.17808, Algorithm 3). A key's sum
needs every query's normaliser, so it is taken in a second pass over the logits: one program for each tile of keys adds
up the queries in order. The sums are exact and, having no atomic addition, the same bits every time. The same two
passes, the first split over the keys, give what methods like SnapKV and CAKE ask of the last queries of a prefill.

A query sees the keys that are not empty and lie at no later position than its own. The slots that a chunk attends to
stand at position 0 and its tokens at their columns, which says the same.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pod_kernels.flash import unit_stride
from pod_kernels.triton.reading import portion, strided, vectors
from pod_kernels.triton.softmax import LN_2, LOG2_E, gather, nothing, soften

# Tests on the interpreter take smaller ones: queries and keys of a tile, and parts of the keys.
TILE: tuple[int, int] | None = None
SPLITS: int | None = None


class Tiles(NamedTuple):
    """How the work is cut.

    Attributes:
        dim: D.
        rows, block: queries and keys of a tile.
        splits: parts of the keys that a query's normaliser is summed in.
        dim_2: D as kernels take it, a power of two.
    """

    dim: int
    rows: int
    block: int
    splits: int
    dim_2: int


@triton.jit
def _place(strided, head, row, token):
    """Where a token's vector, or number, begins in a tensor that is given with its strides of head, row and token."""
    return head * strided[1] + row * strided[2] + token.to(tl.int64) * strided[3]


@triton.jit
def _keys(keys, held, head, row, key, last, CUT: tl.constexpr):
    """A tile's keys and their positions."""
    known = vectors(keys[0], _place(keys, head, row, key), key < last, CUT.dim, CUT.dim_2)
    return known, tl.load(held[0] + _place(held, head, row, key), mask=key < last, other=-1)


@triton.jit
def _queries(q, positions, row, query, count, CUT: tl.constexpr):
    """A tile's queries of one head of one unit, their positions, and where the head's numbers begin."""
    head = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * count
    asked = vectors(q, (head + query) * CUT.dim, query < count, CUT.dim, CUT.dim_2)
    return asked, tl.load(positions + row * count + query, mask=query < count, other=-1), head


@triton.jit
def _weigh(asked, at, known, place, scale):
    """Logits of queries at positions `at` and of keys at `place`, in powers of two, -inf where one is not seen."""
    products = tl.dot(asked, tl.trans(known), input_precision="ieee") * (scale * LOG2_E)
    seen = (place >= 0)[None, :] & (place[None, :] <= at[:, None])
    return tl.where(seen, products, float("-inf"))


@triton.jit
def _masses(q, keys, values, held, positions, out, masses, sizes, scale, CUT: tl.constexpr):
    """Grid (tiles of queries * splits, G, A * B): the normalisers of a part of the keys, and the attention if asked."""
    batch, count, width, used = sizes
    # Of a chunk the last queries have most to do, so they come first.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tile, split = program // CUT.splits, program % CUT.splits
    unit = tl.program_id(2).to(tl.int64)
    head, row = unit // batch, unit % batch
    query = tile * CUT.rows + tl.arange(0, CUT.rows)
    asked, at, base = _queries(q, positions, row, query, count, CUT)
    most, total, sums = nothing(CUT.rows, CUT.dim_2)
    seen = tl.minimum(width, used + (tile + 1) * CUT.rows)
    share = portion(seen, CUT.splits, CUT.block)
    last = tl.minimum(seen, (split + 1) * share)
    for start in range(split * share, last, CUT.block):
        key = start + tl.arange(0, CUT.block)
        known, place = _keys(keys, held, head, row, key, last, CUT)
        products = _weigh(asked, at, known, place, scale)
        if values is None:
            most, total, _, _ = soften(most, total, products)
        else:
            value = vectors(values[0], _place(values, head, row, key), key < last, CUT.dim, CUT.dim_2)
            most, total, sums = gather(most, total, sums, products, value)
    is_query, divisor = query < count, tl.where(total > 0, total, 1.0)
    mass = tl.where(total > 0, most + tl.log2(divisor), float("-inf"))
    tl.store(masses + base * CUT.splits + split * count + query, mass, mask=is_query)
    if values is not None:
        dim = tl.arange(0, CUT.dim_2)
        sums = (sums / divisor[:, None]).to(out.dtype.element_ty)
        into = out + (base + query)[:, None] * CUT.dim + dim[None, :]
        tl.store(into, sums, mask=is_query[:, None] & (dim < CUT.dim)[None, :])


@triton.jit
def _weights(q, positions, masses, row, query, count, known, place, scale, CUT: tl.constexpr):
    """Weights [ROWS, BLOCK] of a tile of queries and a tile of keys."""
    asked, at, base = _queries(q, positions, row, query, count, CUT)
    mass = tl.load(masses + base + query, mask=query < count, other=float("inf"))
    # A query that sees nothing gives nothing.
    mass = tl.where(mass == float("-inf"), float("inf"), mass)
    return tl.exp2(_weigh(asked, at, known, place, scale) - mass[:, None])


@triton.jit
def _columns(q, keys, held, positions, masses, decay, sums, spreads, sizes, scale, CUT: tl.constexpr):
    """Grid (tiles of keys, G, A * B)."""
    batch, count, width, used = sizes
    unit = tl.program_id(2).to(tl.int64)
    head, row = unit // batch, unit % batch
    key = tl.program_id(0) * CUT.block + tl.arange(0, CUT.block)
    line = tl.arange(0, CUT.rows)
    known, place = _keys(keys, held, head, row, key, width, CUT)
    received = tl.full([CUT.block], 0.0, tl.float32)
    # Of a chunk no query before a tile's first token sees any of it.
    first = tl.maximum(tl.program_id(0) * CUT.block - used, 0) // CUT.rows * CUT.rows
    for start in range(first, count, CUT.rows):
        weight = _weights(q, positions, masses, row, start + line, count, known, place, scale, CUT)
        if decay is not None:
            weight *= tl.load(decay + start + line, mask=start + line < count, other=0.0)[:, None]
        received += tl.sum(weight, 0)
    into = (unit * tl.num_programs(1) + tl.program_id(1)) * width + key
    tl.store(sums + into, received, mask=key < width)
    if spreads is not None:
        variances, entropies = spreads
        mean = received / count
        spread = tl.full([CUT.block], 0.0, tl.float32)
        entropy = tl.full([CUT.block], 0.0, tl.float32)
        for start in range(0, count, CUT.rows):
            weight = _weights(q, positions, masses, row, start + line, count, known, place, scale, CUT)
            away = tl.where((start + line < count)[:, None], weight - mean[None, :], 0.0)
            spread += tl.sum(away * away, 0)
            entropy -= tl.sum(weight * tl.log(weight + 1e-10), 0)
        tl.store(variances + into, spread / tl.maximum(count - 1, 1), mask=key < width)
        tl.store(entropies + into, entropy, mask=key < width)


def _tiles(q: Tensor, width: int | None) -> tuple[Tiles, dict[str, int]]:
    """Tiles for q [A, B, G, T, D], by what they take of a processor's own memory, and how they are run.

    `width`: keys that are split among programs; None: one takes all of a query's.
    """
    heads, batch, groups, count, dim = q.shape
    dim_2 = triton.next_power_of_2(max(16, dim))
    if q.element_size() > 2:
        rows, block = (16, 16) if dim_2 > 128 else (32, 32)
    else:
        rows, block = (64, 32) if dim_2 > 128 else (128, 64)
    rows, block = TILE or (min(rows, triton.next_power_of_2(max(16, count))), block)
    splits = 1 if width is None else SPLITS
    if splits is None:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        units = groups * heads * batch * triton.cdiv(count, rows)
        splits = max(1, min(triton.cdiv(4 * processors, units), triton.cdiv(width, block)))
    return Tiles(dim, rows, block, splits, dim_2), {"num_warps": 8 if rows == 128 else 4, "num_stages": 2}


def chunk_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    used: int,
    kept: Tensor,
    counts: Tensor,
    scale: float,
    decay: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of T queries to F slots and, causally, to their own T tokens.

    Args:
        q: [H_kv, B, G, T, D].
        keys, values: [H_kv, B, M, D], slots first.
        used: F.
        kept: [B or 1] int64, slots in use in each row, from the first on.
        counts: [B] int64, real tokens of each row, right-aligned in their T columns.
        scale: factor on every logit.
        decay: [T] float32, the factor of each query in the sums; None for no sums.

    Returns:
        out [H_kv, B, G, T, D], zero at padding; sums [H_kv, B, G, M] float32.
    """
    heads, batch, groups, count, _ = q.shape
    q, keys, values = q.contiguous(), keys.contiguous(), values.contiguous()
    column = torch.arange(max(used, count), device=q.device)
    tokens = torch.where(column[:count] >= (count - counts)[:, None], column[:count], -1)
    slots = torch.where(column[:used] < kept[:, None], 0, -1).expand(batch, -1)
    held = torch.cat([slots, tokens], dim=1).expand(heads, -1, -1)
    keys, values, held, sizes = strided(keys), strided(values), strided(held), (batch, count, used + count, used)
    out = torch.empty_like(q)
    masses = torch.empty(q.shape[:4], dtype=torch.float32, device=q.device)
    cut, options = _tiles(q, None)
    grid = triton.cdiv(count, cut.rows), groups, heads * batch
    _masses[grid](q, keys, values, held, tokens, out, masses, sizes, scale, CUT=cut, **options)
    if decay is None:
        return out, None
    sums = torch.empty(heads, batch, groups, used + count, dtype=torch.float32, device=q.device)
    grid = triton.cdiv(used + count, cut.block), groups, heads * batch
    _columns[grid](q, keys, held, tokens, masses, decay, sums, None, sizes, scale, CUT=cut, **options)
    return out, sums


def column_statistics(
    q: Tensor, keys: Tensor, key_positions: Tensor, positions: Tensor, scale: float, with_spread: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What each key received from some queries, without the weights ever being stored.

    Args:
        q, keys, key_positions, positions, scale: as for `pod_kernels.attention_weights`.
        with_spread: also the second and the third of what is returned.

    Returns:
        Of the weights [A, B, G, T, N], over the queries: their sum, their unbiased variance (0 of a single one), and
        the sum of - w log(w + 1e-10); each [A, B, G, N] float32.
    """
    heads, batch, groups, count, _ = q.shape
    width = keys.shape[2]
    q, positions = q.contiguous(), positions.contiguous()
    keys, held = strided(unit_stride(keys)), strided(key_positions)
    sizes = batch, count, width, width
    cut, options = _tiles(q, width)
    masses = torch.empty(heads, batch, groups, cut.splits, count, dtype=torch.float32, device=q.device)
    grid = triton.cdiv(count, cut.rows) * cut.splits, groups, heads * batch
    _masses[grid](q, keys, None, held, positions, None, masses, sizes, scale, CUT=cut, **options)
    masses = torch.logsumexp(masses * LN_2.value, dim=3) / LN_2.value  # in powers of two, as the parts are
    sums = torch.empty(heads, batch, groups, width, dtype=torch.float32, device=q.device)
    spreads = (torch.empty_like(sums), torch.empty_like(sums)) if with_spread else None
    grid = triton.cdiv(width, cut.block), groups, heads * batch
    _columns[grid](q, keys, held, positions, masses, None, sums, spreads, sizes, scale, CUT=cut, **options)
    return sums, *(spreads or (None, None))
