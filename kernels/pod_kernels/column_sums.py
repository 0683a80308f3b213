"""Triton kernels of a chunk's attention to fixed slots and to itself, and of what each key received from it.

Legend: B rows, H_kv KV heads, G query heads per KV head, T queries, F slots in use, M = F + T keys, D head dimension.

The Cascading KV cache scores a token by the attention that it receives (arXiv 2406.17808, Algorithm 3). A key's sum
needs every query's normaliser, so it is taken in a second pass over the logits: one program for each tile of keys adds
up the queries in order. The sums are exact and, having no atomic addition, the same bits every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tests on the interpreter take smaller ones: queries and keys of a tile.
TILE: tuple[int, int] | None = None

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend_chunk(
    q,
    keys,
    values,
    kept,
    counts,
    out,
    lse,
    batch,
    count,
    used,
    kept_row,
    scale,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM_2: tl.constexpr,
):
    """Grid (tiles of queries, G, H_kv * B). The last queries have most to do, so they come first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    unit = tl.program_id(2).to(tl.int64)
    row = tl.program_id(2) % batch
    query = tile * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_2)
    column = tl.arange(0, BLOCK)
    here = tl.load(kept + row * kept_row).to(tl.int32)
    padding = count - tl.load(counts + row).to(tl.int32)  # columns before a row's first real token
    width = used + count
    query_at = (unit * GROUPS + tl.program_id(1)) * count + query
    query_dim = (query < count)[:, None] & (dim < DIM)[None, :]
    asked = tl.load(q + query_at[:, None] * DIM + dim[None, :], mask=query_dim, other=0.0)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    sums = tl.full([ROWS, DIM_2], 0.0, tl.float32)
    last = used + tl.minimum(count, (tile + 1) * ROWS)
    for start in range(0, last, BLOCK):
        key = start + column
        key_dim = (key < last)[:, None] & (dim < DIM)[None, :]
        key_at = (unit * width + key)[:, None] * DIM + dim[None, :]
        products = tl.dot(asked, tl.trans(tl.load(keys + key_at, mask=key_dim, other=0.0)), input_precision="ieee") * (
            scale * LOG2_E
        )
        token = key - used
        is_key = (key < here) | (token >= padding)
        seen = is_key[None, :] & (token[None, :] <= query[:, None]) & (query >= padding)[:, None]
        products = tl.where(seen, products, float("-inf"))
        highest = tl.maximum(most, tl.max(products, 1))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(products - shift[:, None])
        decay = tl.exp2(most - shift)
        value = tl.load(values + key_at, mask=key_dim, other=0.0)
        total = total * decay + tl.sum(weight, 1)
        sums = sums * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        most = highest
    mass = tl.where(total > 0, total, 1.0)
    sums /= mass[:, None]
    tl.store(out + query_at[:, None] * DIM + dim[None, :], sums.to(out.dtype.element_ty), mask=query_dim)
    # A padded query gives nothing: its normaliser is without bound.
    tl.store(lse + query_at, tl.where(total > 0, most + tl.log2(mass), float("inf")), mask=query < count)


@triton.jit
def _column_sums(
    q,
    keys,
    kept,
    counts,
    lse,
    decay,
    sums,
    batch,
    count,
    used,
    kept_row,
    scale,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM_2: tl.constexpr,
):
    """Grid (tiles of keys, G, A * B)."""
    unit = tl.program_id(2).to(tl.int64)
    row = tl.program_id(2) % batch
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, DIM_2)
    line = tl.arange(0, ROWS)
    here = tl.load(kept + row * kept_row).to(tl.int32)
    padding = count - tl.load(counts + row).to(tl.int32)
    width = used + count
    key_dim = (key < width)[:, None] & (dim < DIM)[None, :]
    held = tl.load(keys + (unit * width + key)[:, None] * DIM + dim[None, :], mask=key_dim, other=0.0)
    token = key - used
    is_key = (key < here) | (token >= padding)
    received = tl.full([BLOCK], 0.0, tl.float32)
    base = (unit * GROUPS + tl.program_id(1)) * count
    # No query before a tile's first token sees any of it.
    first = tl.maximum(tl.program_id(0) * BLOCK - used, 0) // ROWS * ROWS
    for start in range(first, count, ROWS):
        query = start + line
        inside = query < count
        query_at = (base + query)[:, None] * DIM + dim[None, :]
        asked = tl.load(q + query_at, mask=inside[:, None] & (dim < DIM)[None, :], other=0.0)
        products = tl.dot(asked, tl.trans(held), input_precision="ieee") * (scale * LOG2_E)
        mass = tl.load(lse + base + query, mask=inside, other=float("inf"))
        seen = is_key[None, :] & (token[None, :] <= query[:, None])
        weight = tl.where(seen, tl.exp2(products - mass[:, None]), 0.0)
        received += tl.sum(weight * tl.load(decay + query, mask=inside, other=0.0)[:, None], 0)
    tl.store(sums + (unit * GROUPS + tl.program_id(1)) * width + key, received, mask=key < width)


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
    heads, batch, groups, count, dim = q.shape
    q, keys, values = q.contiguous(), keys.contiguous(), values.contiguous()
    width = triton.next_power_of_2(max(16, dim))
    wide = width > 128
    rows, block = TILE or ((32, 32) if q.element_size() > 2 else (64, 32) if wide else (128, 64))
    if wide and q.element_size() > 2:
        rows, block = TILE or (16, 16)
    sizes = {"GROUPS": groups, "DIM": dim, "ROWS": rows, "BLOCK": block, "DIM_2": width}
    sizes |= {"num_warps": 8 if rows == 128 else 4, "num_stages": 2}
    kept_row = 0 if len(kept) == 1 else 1
    out = torch.empty_like(q)
    lse = torch.empty(heads, batch, groups, count, dtype=torch.float32, device=q.device)
    _attend_chunk[(triton.cdiv(count, rows), groups, heads * batch)](
        q, keys, values, kept, counts, out, lse, batch, count, used, kept_row, scale, **sizes
    )
    if decay is None:
        return out, None
    sums = torch.empty(heads, batch, groups, used + count, dtype=torch.float32, device=q.device)
    _column_sums[(triton.cdiv(used + count, block), groups, heads * batch)](
        q, keys, kept, counts, lse, decay, sums, batch, count, used, kept_row, scale, **sizes
    )
    return out, sums
