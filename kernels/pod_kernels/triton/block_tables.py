"""Triton kernel of attention over block tables: decoding and chunks of a prefill, proximal and distant pairs apart.

Legend: that of `pod_kernels.block_tables`; and L lanes, the queries that one program asks with: those of all G heads of
a KV head where a tile has one query (decoding: they share what is read), else a tile's Q of one head.

A launch is for the KV heads whose keys lie in one store, as `block_table_attention` is given them; a program goes over
a part of their proximal pairs, or of their distant ones, and the parts are merged as decoding's are.

Imports triton, so it is imported only where `dispatch.runs_triton` says so.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from pod_kernels.tables import Part, Tiles
from pod_kernels.triton.reading import portion, strided, vectors
from pod_kernels.triton.softmax import LOG2_E, gather, nothing
from pod_kernels.triton.splits import Parts, asked_at, leave


@triton.jit
def _begins(store, row, slot, position, inside, BLOCK: tl.constexpr):
    """Where the vectors `slot` of a request's tokens at `position` begin: block by block, as its table says."""
    _, block_stride, slot_stride, token_stride, numbers, row_stride = store
    number = tl.load(numbers + row * row_stride + position // BLOCK, mask=inside, other=0).to(tl.int64)
    return number * block_stride + slot * slot_stride + position % BLOCK * token_stride


@triton.jit
def _attend_blocks(
    q,
    keys,
    values,
    heads,
    tiles,
    parts,
    splits,
    sizes,
    CUT: tl.constexpr,
    WIDTH: tl.constexpr,
    REPEAT: tl.constexpr,
    BLOCK: tl.constexpr,
    DISTANT: tl.constexpr,
):
    """Grid (N, REPEAT * KV heads of this launch, parts).

    `heads`: the KV heads, and their slots in the stores of keys and of values. `splits`: the first part, and how many.
    """
    tile, index, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    rows, first_at, last_at = tiles
    sink_size, recent_size, scale = sizes
    row, first, last = tl.load(rows + tile), tl.load(first_at + tile).to(tl.int32), tl.load(last_at + tile).to(tl.int32)
    kv_head = tl.load(heads[0] + index // REPEAT).to(tl.int32)
    key_slot = tl.load(heads[1] + index // REPEAT).to(tl.int64)
    value_slot = tl.load(heads[2] + index // REPEAT).to(tl.int64)
    head = kv_head * REPEAT + index % REPEAT
    lane = tl.arange(0, CUT.lanes)
    # A query that repeats the last one sees no more than that.
    at = tl.minimum(first + lane % WIDTH, last)
    asked = vectors(q, asked_at(tile, head, CUT), lane < CUT.groups, CUT.dim, CUT.dim_2)
    # Positions that some query of the tile sees: [begin, begin + count), for proximal ones behind `sinks` more.
    if DISTANT:
        sinks = 0
        begin, count = sink_size, tl.maximum(last - recent_size + 1 - sink_size, 0)
    else:
        sinks = tl.minimum(sink_size, last + 1)
        begin = tl.maximum(first - recent_size + 1, sinks)
        count = sinks + last + 1 - begin
    most, total, sums = nothing(CUT.lanes, CUT.dim_2)
    share = portion(count, splits[1], CUT.block)
    end = tl.minimum(count, (split + 1) * share)
    for start in range(split * share, end, CUT.block):
        place = start + tl.arange(0, CUT.block)
        inside = place < end
        position = tl.where(place < sinks, place, begin + place - sinks)
        key_at = _begins(keys, row, key_slot, position, inside, BLOCK)
        key = vectors(keys[0], key_at, inside, CUT.dim, CUT.dim_2)
        distance = at[:, None] - position[None, :]
        if DISTANT:
            seen = distance >= recent_size
        else:
            seen = (distance >= 0) & ((position < sink_size)[None, :] | (distance < recent_size))
        logits = tl.dot(asked, tl.trans(key), input_precision="ieee") * (scale * LOG2_E)
        logits = tl.where(seen & inside[None, :], logits, float("-inf"))
        value_at = _begins(values, row, value_slot, position, inside, BLOCK)
        value = vectors(values[0], value_at, inside, CUT.dim, CUT.dim_2)
        most, total, sums = gather(most, total, sums, logits, value)
    leave(parts, tile * CUT.kv_heads + head, splits[0] + split, most, total, total * 0.0, sums, True, True, CUT)


def tiles_attention(
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
    """`pod_kernels.block_tables.block_table_attention` of tiles of one width.

    Args: as there.

    Returns:
        [N * Q, H, D] in q's dtype.
    """
    (count, width), (_, heads, dim) = tiles.tokens.shape, q.shape
    kv_heads = sum(len(part.heads) for part in values)
    groups = heads // kv_heads
    repeat = 1 if width == 1 else groups
    store = values[0].store
    capacity = store.table.shape[1] * store.blocks.shape[2]

    def by_lanes(queries: Tensor) -> Tensor:
        """[N, H_kv * G * Q, 1, D], contiguous."""
        return tiles.grouped(queries, kv_heads).reshape(count, -1, 1, dim)

    mine = by_lanes(q)
    split = Parts(mine, kv_heads * repeat, capacity, sink_size + recent_size + width)
    splits = split.tiles.splits
    near_splits = 0 if near_keys is None else splits if distant_keys is None else split.tiles.near_splits
    sizes = (0, 0, scale) if near_keys is None else (sink_size, recent_size, scale)
    places, left = (tiles.rows, tiles.first, tiles.last), (split.sums, split.numbers)
    options = {"CUT": split.tiles, "WIDTH": width, "REPEAT": repeat, "num_warps": 4, "num_stages": 2}
    kinds = (near_keys, (0, near_splits), False), (distant_keys, (near_splits, splits - near_splits), True)
    for keys, some, distant in kinds:
        asked = by_lanes(q_distant) if distant and q_distant is not None else mine
        for number, part in enumerate(keys or ()):
            # In one store, slot by slot for all heads; else beside the keys.
            held = values[0 if len(values) == 1 else number]
            value_slots = held.slots[part.heads] if len(values) == 1 else held.slots
            here = tuple(each.to(q.device) for each in (part.heads, part.slots, value_slots))
            stores = [(*strided(one.blocks), one.table, one.table.stride(0)) for one in (part.store, held.store)]
            options["BLOCK"] = part.store.blocks.shape[2]
            _attend_blocks[count, repeat * len(part.heads), some[1]](
                asked, *stores, here, places, left, some, sizes, DISTANT=distant, **options
            )
    out, _, _ = split.merged(mine, None)
    return out.view(count, heads, width, dim).transpose(1, 2).flatten(0, 1)
