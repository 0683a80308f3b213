"""Triton kernels of a chunk's attention to fixed slots and to itself, and of what each key received from it.

Legend: B rows, H_kv KV heads, G query heads per KV head, T queries, F slots in use, M = F + T keys, D head dimension.

The Cascading KV cache scores a token by the attention that it receives (arXiv 2406.17808, Algorithm 3). A key's sum
needs every query's normaliser, so it is taken in a second pass over the logits: one program for each tile of keys adds
up the queries in order. The sums are exact and, having no atomic addition, the same bits every time. The same two
passes, the first split over the keys, give what methods like SnapKV and CAKE ask of the last queries of a prefill.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pod_kernels.softmax import LN_2, LOG2_E, soften

# Tests on the interpreter take smaller ones: queries and keys of a tile, and parts of the keys.
TILE: tuple[int, int] | None = None
SPLITS: int | None = None


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
        most, total, weight, decay = soften(most, total, products)
        value = tl.load(values + key_at, mask=key_dim, other=0.0)
        sums = sums * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
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


def _sizes(q: Tensor) -> dict[str, int]:
    """Tiles for q [.., G, T, D], by what they take of a processor's own memory."""
    groups, count, dim = q.shape[-3:]
    width = triton.next_power_of_2(max(16, dim))
    if q.element_size() > 2:
        rows, block = (16, 16) if width > 128 else (32, 32)
    else:
        rows, block = (64, 32) if width > 128 else (128, 64)
    rows, block = TILE or (min(rows, triton.next_power_of_2(max(16, count))), block)
    sizes = {"GROUPS": groups, "DIM": dim, "ROWS": rows, "BLOCK": block, "DIM_2": width}
    return sizes | {"num_warps": 8 if rows == 128 else 4, "num_stages": 2}


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
    sizes = _sizes(q)
    rows, block = sizes["ROWS"], sizes["BLOCK"]
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


@triton.jit
def _weigh(
    q, keys, held, positions, key_base, held_base, query_base, position_base, key_token, held_token, query, count,
    key, width, scale, DIM: tl.constexpr, DIM_2: tl.constexpr,
):  # fmt: skip
    """Logits of a tile of queries and a tile of keys, in powers of two, -inf where a query does not see a key."""
    dim = tl.arange(0, DIM_2)
    is_dim = (dim < DIM)[None, :]
    asked_at = (query_base + query)[:, None] * DIM + dim[None, :]
    asked = tl.load(q + asked_at, mask=(query < count)[:, None] & is_dim, other=0.0)
    key_at = (key_base + key.to(tl.int64) * key_token)[:, None] + dim[None, :]
    known = tl.load(keys + key_at, mask=(key < width)[:, None] & is_dim, other=0.0)
    place = tl.load(held + held_base + key.to(tl.int64) * held_token, mask=key < width, other=-1)
    at = tl.load(positions + position_base + query, mask=query < count, other=-1)
    products = tl.dot(asked, tl.trans(known), input_precision="ieee") * (scale * LOG2_E)
    seen = (place >= 0)[None, :] & (place[None, :] <= at[:, None])
    return tl.where(seen, products, float("-inf"))


@triton.jit
def _masses(
    q,
    keys,
    held,
    positions,
    masses,
    batch,
    count,
    width,
    key_head,
    key_row,
    key_token,
    held_head,
    held_row,
    held_token,
    scale,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM_2: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (tiles of queries * SPLITS, G, A * B): the normalisers of a part of the keys."""
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    unit = tl.program_id(2).to(tl.int64)
    head, row = unit // batch, unit % batch
    query = tile * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    share = (width + SPLITS * BLOCK - 1) // (SPLITS * BLOCK) * BLOCK
    last = tl.minimum(width, (split + 1) * share)
    for start in range(split * share, last, BLOCK):
        products = _weigh(
            q, keys, held, positions, head * key_head + row * key_row, head * held_head + row * held_row,
            (unit * GROUPS + tl.program_id(1)) * count, row * count, key_token, held_token, query, count,
            start + column, last, scale, DIM, DIM_2,
        )  # fmt: skip
        most, total, _, _ = soften(most, total, products)
    mass = tl.where(total > 0, most + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    into = ((unit * GROUPS + tl.program_id(1)) * SPLITS + split) * count + query
    tl.store(masses + into, mass, mask=query < count)


@triton.jit
def _columns(
    q,
    keys,
    held,
    positions,
    masses,
    sums,
    variances,
    entropies,
    batch,
    count,
    width,
    key_head,
    key_row,
    key_token,
    held_head,
    held_row,
    held_token,
    scale,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM_2: tl.constexpr,
):
    """Grid (tiles of keys, G, A * B)."""
    unit = tl.program_id(2).to(tl.int64)
    head, row = unit // batch, unit % batch
    line = tl.arange(0, ROWS)
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    query_base = (unit * GROUPS + tl.program_id(1)) * count
    received = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, count, ROWS):
        query = start + line
        products = _weigh(
            q, keys, held, positions, head * key_head + row * key_row, head * held_head + row * held_row,
            query_base, row * count, key_token, held_token, query, count, key, width, scale, DIM, DIM_2,
        )  # fmt: skip
        mass = tl.load(masses + query_base + query, mask=query < count, other=float("inf"))
        received += tl.sum(tl.exp2(products - mass[:, None]), 0)
    into = (unit * GROUPS + tl.program_id(1)) * width + key
    tl.store(sums + into, received, mask=key < width)
    if variances is not None:
        mean = received / count
        spread = tl.full([BLOCK], 0.0, tl.float32)
        entropy = tl.full([BLOCK], 0.0, tl.float32)
        for start in range(0, count, ROWS):
            query = start + line
            products = _weigh(
                q, keys, held, positions, head * key_head + row * key_row, head * held_head + row * held_row,
                query_base, row * count, key_token, held_token, query, count, key, width, scale, DIM, DIM_2,
            )  # fmt: skip
            mass = tl.load(masses + query_base + query, mask=query < count, other=float("inf"))
            weight = tl.exp2(products - mass[:, None])
            away = tl.where((query < count)[:, None], weight - mean[None, :], 0.0)
            spread += tl.sum(away * away, 0)
            entropy -= tl.sum(weight * tl.log(weight + 1e-10), 0)
        tl.store(variances + into, spread / tl.maximum(count - 1, 1), mask=key < width)
        tl.store(entropies + into, entropy, mask=key < width)


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
    heads, batch, groups, count, dim = q.shape
    width = keys.shape[2]
    q, positions = q.contiguous(), positions.contiguous()
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    sizes = _sizes(q)
    units = groups * heads * batch * triton.cdiv(count, sizes["ROWS"])
    splits = SPLITS
    if splits is None:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        splits = max(1, min(triton.cdiv(4 * processors, units), triton.cdiv(width, sizes["BLOCK"])))
    shape = (batch, count, width, *keys.stride()[:3], *key_positions.stride(), scale)
    masses = torch.empty(heads, batch, groups, splits, count, dtype=torch.float32, device=q.device)
    _masses[(triton.cdiv(count, sizes["ROWS"]) * splits, groups, heads * batch)](
        q, keys, key_positions, positions, masses, *shape, SPLITS=splits, **sizes
    )
    # In powers of two, as the parts are; a padded query sees nothing and gives nothing.
    masses = torch.logsumexp(masses * LN_2.value, dim=3) / LN_2.value
    masses = masses.masked_fill(masses == -torch.inf, torch.inf)
    sums = torch.empty(heads, batch, groups, width, dtype=torch.float32, device=q.device)
    variances, entropies = (torch.empty_like(sums), torch.empty_like(sums)) if with_spread else (None, None)
    _columns[(triton.cdiv(width, sizes["BLOCK"]), groups, heads * batch)](
        q, keys, key_positions, positions, masses, sums, variances, entropies, *shape, **sizes
    )
    return sums, variances, entropies
