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

BLOCK = 1024  # slots looked at together


@triton.jit
def _append(
    k,
    v,
    keys,
    values,
    near,
    positions,
    order,
    key_offsets,
    value_offsets,
    anchors,
    batch,
    near_places,
    sinks,
    ring,
    key_row,
    key_head,
    value_row,
    value_head,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ORDERED: tl.constexpr,
    DIM_2: tl.constexpr,
):
    """Grid (B, H_kv): slot = position, own keys in sinks and a ring."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    kv_head = place
    if ORDERED:
        kv_head = tl.load(order + place).to(tl.int32)
    position = tl.load(positions + row)
    dim = tl.arange(0, DIM_2)
    # A row of which nothing but padding was seen stores nothing.
    taken = dim < tl.where(position >= 0, DIM, 0)
    new = (row * KV_HEADS + kv_head) * DIM + dim
    value_base = tl.load(value_offsets + row * value_row + place * value_head)
    tl.store(values + (value_base + position) * DIM + dim, tl.load(v + new, mask=taken), mask=taken)
    if place < anchors:
        key_base = tl.load(key_offsets + row * key_row + place * key_head)
        tl.store(keys + (key_base + position) * DIM + dim, tl.load(k + new, mask=taken), mask=taken)
    else:
        slot = tl.where(position < sinks, position, sinks + (position - sinks) % ring)
        near_base = ((place - anchors) * batch + row) * near_places
        tl.store(near + (near_base + slot) * DIM + dim, tl.load(k + new, mask=taken), mask=taken)


def append(layer: LayerSlots, k: Tensor, v: Tensor, positions: Tensor) -> None:
    """Store one token of each row in all heads of a layer.

    Args:
        k, v: [B, H_kv, 1, D] by head.
        positions: [B, 1] int64, -1 for padding.
    """
    batch, kv_heads, _, dim = v.shape
    _append[(batch, kv_heads)](
        k.contiguous(),
        v.contiguous(),
        layer.keys.data,
        layer.values.data,
        layer.near_keys,
        positions.contiguous(),
        positions if layer.index is None else layer.index,
        layer.keys.offsets,
        layer.values.offsets,
        layer.num_anchors,
        batch,
        layer.near_keys.shape[2],
        layer.sink_size,
        layer.ring_size,
        *layer.keys.offsets.stride(),
        *layer.values.offsets.stride(),
        KV_HEADS=kv_heads,
        DIM=dim,
        ORDERED=layer.index is not None,
        DIM_2=triton.next_power_of_2(dim),
    )


@triton.jit
def _append_packed(
    k,
    v,
    keys,
    values,
    held,
    scores,
    near,
    near_positions,
    near_slots,
    positions,
    slots,
    found,
    key_offsets,
    value_offsets,
    held_offsets,
    capacities,
    anchors,
    batch,
    near_places,
    sinks,
    key_row,
    key_head,
    value_row,
    value_head,
    held_row,
    held_head,
    DIM: tl.constexpr,
    DIM_2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (B, H_kv): an anchor's token takes the first empty slot, the others follow where theirs went."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    dim = tl.arange(0, DIM_2)
    taken = dim < DIM
    largest: tl.constexpr = 2147483647
    unit = place * batch + row
    position = tl.load(positions + row).to(tl.int32)
    value_base = tl.load(value_offsets + row * value_row + place * value_head)
    key = tl.load(k + unit * DIM + dim, mask=taken)
    # The smallest position, of equal ones the first, as one number: position, then index.
    least = tl.full([BLOCK], 0x7FFFFFFFFFFFFFFF, tl.int64)
    if place < anchors:
        held_base = tl.load(held_offsets + row * held_row + place * held_head)
        capacity = tl.load(capacities + row * value_row + place * value_head).to(tl.int32)
        for start in range(0, capacity, BLOCK):
            index = start + column
            known = tl.load(held + held_base + index, mask=index < capacity, other=largest)
            least = tl.minimum(least, known.to(tl.int64) * (1 << 32) + index)
        slot = tl.min(least, 0) & 0xFFFFFFFF
        tl.store(found + unit, slot)
        tl.store(held + held_base + slot, position)
        if scores is not None:
            tl.store(scores + held_base + slot, 0.0)
        key_base = tl.load(key_offsets + row * key_row + place * key_head)
        tl.store(keys + (key_base + slot) * DIM + dim, key, mask=taken)
    else:
        slot = tl.load(slots + (place - anchors) * batch + row)
        near_base = ((place - anchors) * batch + row) * near_places
        for start in range(0, near_places, BLOCK):
            index = start + column
            known = tl.load(near_positions + near_base + index, mask=index < near_places, other=largest)
            known = tl.where((known >= 0) & (known < sinks), largest, known)
            least = tl.minimum(least, known.to(tl.int64) * (1 << 32) + index)
        into = near_base + (tl.min(least, 0) & 0xFFFFFFFF)
        tl.store(near_positions + into, position)
        tl.store(near_slots + into, slot.to(tl.int32))
        tl.store(near + into * DIM + dim, key, mask=taken)
    tl.store(values + (value_base + slot) * DIM + dim, tl.load(v + unit * DIM + dim, mask=taken), mask=taken)


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
    held = layer.values if held is None else held
    _append_packed[(batch, kv_heads)](
        k.contiguous(),
        v.contiguous(),
        layer.keys.data,
        layer.values.data,
        held.data,
        None if scores is None else scores.data,
        layer.near_keys,
        layer.near_positions,
        layer.near_slots,
        positions.contiguous(),
        found if slots is None else slots.contiguous(),
        found,
        layer.keys.offsets,
        layer.values.offsets,
        held.offsets,
        layer.values.capacities,
        layer.num_anchors,
        batch,
        layer.near_keys.shape[2],
        layer.sink_size,
        *layer.keys.offsets.stride(),
        *layer.values.offsets.stride(),
        *held.offsets.stride(),
        DIM=dim,
        DIM_2=triton.next_power_of_2(dim),
        BLOCK=BLOCK,
    )
    return found
