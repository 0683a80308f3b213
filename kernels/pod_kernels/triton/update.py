"""Triton kernels of a cache's update: one decoded token in each row goes to all heads of a layer in one launch.

Legend: B rows, H_kv KV heads, A anchor heads of the layer (stored first), S = H_kv - A the others, D head dimension, M
places for own keys.

What is stored equals, bit for bit, what the torch path stores. This module imports triton, so it is imported only where
`dispatch.runs_triton` says so.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pod_kernels.segments import LayerSlots, Segments
from pod_kernels.triton.reading import begin, segments_of

BLOCK = 1024  # slots looked at together


@triton.jit
def _append(new, keys, values, own, order, chosen, anchors, DIM: tl.constexpr, DIM_2: tl.constexpr):
    """Grid (B, H_kv): a token whose slot is known; own keys in sinks and a ring, or in the slots of the values."""
    batch, row, place = tl.num_programs(0), tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, v, positions, new_row, new_head = new
    own_keys, own_places, sinks, ring = own
    kv_head = place
    if order is not None:
        kv_head = tl.load(order + place).to(tl.int32)
    position = tl.load(positions + row)
    slot = position
    if chosen is not None:
        slots, units = chosen
        slot = tl.load(slots + tl.load(units + place) * batch + row)
    dim = tl.arange(0, DIM_2)
    # A token may go nowhere, as of a row of which nothing but padding was seen.
    taken = dim < tl.where(slot >= 0, DIM, 0)
    new_at = row * new_row + kv_head * new_head + dim
    key, value = tl.load(k + new_at, mask=taken), tl.load(v + new_at, mask=taken)
    tl.store(values[0] + (begin(values, row, place) + slot) * DIM + dim, value, mask=taken)
    if place < anchors:
        tl.store(keys[0] + (begin(keys, row, place) + slot) * DIM + dim, key, mask=taken)
    else:
        if ring is not None:
            slot = tl.where(position < sinks, position, sinks + (position - sinks) % ring)
        tl.store(own_keys + (((place - anchors) * batch + row) * own_places + slot) * DIM + dim, key, mask=taken)


def append(layer: LayerSlots, k: Tensor, v: Tensor, positions: Tensor) -> None:
    """Store one token of each row in all heads of a layer.

    Args:
        k, v: [B, H_kv, 1, D] by head, those that are stored elsewhere too.
        positions: [B, 1] int64, -1 for padding.
    """
    batch, kv_heads, _, dim = v.shape
    new = k.contiguous(), v.contiguous(), positions.contiguous(), kv_heads * dim, dim
    held = segments_of(layer.keys), segments_of(layer.values)
    own = layer.near_keys, layer.near_keys.shape[2], layer.sink_size, layer.ring_size
    dims = dim, triton.next_power_of_2(dim)
    _append[batch, len(layer.order)](new, *held, own, layer.index, None, layer.num_anchors, *dims)


def append_slots(
    keys: Segments,
    values: Segments,
    own: Segments,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slots: Tensor,
    units: Tensor,
    sink_size: int,
    own_by_slot: bool,
) -> None:
    """Store one token of each row in all heads of a layer with fixed slots.

    Args:
        keys, values, own: [B, A] and [B, H_kv] segments of P slots, [B, S] ones of R, in storage order.
        k, v: [H_kv, B, 1, D] in storage order.
        positions: [B, 1] int64.
        slots: [U, B, 1] int64 of all units' new tokens, -1 for nowhere.
        units: [H_kv] int64, the unit of each of the layer's heads, in storage order.
        sink_size: sinks of the own keys, for which a ring follows.
        own_by_slot: own keys lie in the slots of the values instead.
    """
    kv_heads, batch, _, dim = v.shape
    new = k.contiguous(), v.contiguous(), positions.contiguous(), dim, batch * dim
    places = own.rectangle.shape[2]
    ring = own.data, places, sink_size, None if own_by_slot else places - sink_size
    dims = dim, triton.next_power_of_2(dim)
    _append[batch, kv_heads](
        new, segments_of(keys), segments_of(values), ring, None, (slots, units), len(keys.sizes), *dims
    )


@triton.jit
def _oldest(held, count, sinks, BLOCK: tl.constexpr):
    """Of `count` places the first with the smallest position (-1: empty), the first `sinks` positions left out."""
    largest: tl.constexpr = 2147483647
    # As one number: position, then index.
    least = tl.full([BLOCK], 0x7FFFFFFFFFFFFFFF, tl.int64)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        known = tl.load(held + index, mask=index < count, other=largest)
        known = tl.where((known >= 0) & (known < sinks), largest, known)
        least = tl.minimum(least, known.to(tl.int64) * (1 << 32) + index)
    return tl.min(least, 0) & 0xFFFFFFFF


@triton.jit
def _append_packed(
    new, keys, values, held, table, near, found, sizes, DIM: tl.constexpr, DIM_2: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (B, H_kv): an anchor's token takes the first empty slot, the others follow where theirs went."""
    batch, row, place = tl.num_programs(0), tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, v, positions = new
    capacities, scores = table
    anchors, sinks = sizes
    dim = tl.arange(0, DIM_2)
    taken = dim < DIM
    unit, other = place * batch + row, (place - anchors) * batch + row
    position = tl.load(positions + row).to(tl.int32)
    key = tl.load(k + unit * DIM + dim, mask=taken)
    if place < anchors:
        held_base = begin(held, row, place)
        capacity = tl.load(capacities + row * values[2] + place * values[3]).to(tl.int32)
        slot = _oldest(held[0] + held_base, capacity, 0, BLOCK)
        tl.store(found + unit, slot)
        tl.store(held[0] + held_base + slot, position)
        if scores is not None:
            tl.store(scores + held_base + slot, 0.0)
        tl.store(keys[0] + (begin(keys, row, place) + slot) * DIM + dim, key, mask=taken)
    else:
        near_keys, near_positions, near_slots, places, slots = near
        slot = tl.load(slots + other)
        into = other * places + _oldest(near_positions + other * places, places, sinks, BLOCK)
        tl.store(near_positions + into, position)
        tl.store(near_slots + into, slot.to(tl.int32))
        tl.store(near_keys + into * DIM + dim, key, mask=taken)
    value = tl.load(v + unit * DIM + dim, mask=taken)
    tl.store(values[0] + (begin(values, row, place) + slot) * DIM + dim, value, mask=taken)


def append_packed(
    layer: LayerSlots,
    held: Segments | None,
    scores: Segments | None,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slots: Tensor | None,
) -> Tensor:
    """Store one token of each row in all heads of a layer whose slots hold any positions.

    Args:
        held: the anchor heads' [B, A] segments of positions; None where there are none.
        scores: the same of float32, 0 for the new token; None for none.
        k, v: [H_kv, B, 1, D] in storage order.
        positions: [B, 1] int64, -1 for padding, which leaves its slot empty.
        slots: [S, B, 1] int64, where the anchors of the other heads have put the token; None where there are none.

    Returns:
        [A, B, 1] int64, the slots that the anchor heads' token went to.
    """
    kv_heads, batch, _, dim = v.shape
    found = torch.empty(layer.num_anchors, batch, 1, dtype=torch.long, device=v.device)
    new = k.contiguous(), v.contiguous(), positions.contiguous()
    parts = [segments_of(part) for part in (layer.keys, layer.values, layer.values if held is None else held)]
    table = layer.values.capacities, None if scores is None else scores.data
    near = layer.near_keys, layer.near_positions, layer.near_slots, layer.near_keys.shape[2]
    near += (found if slots is None else slots.contiguous(),)
    sizes, dims = (layer.num_anchors, layer.sink_size), (dim, triton.next_power_of_2(dim))
    _append_packed[batch, kv_heads](new, *parts, table, near, found, sizes, *dims, BLOCK)
    return found
