"""Triton kernels of decoding: one query in each row, the cache's segments split among programs, merged by LSE.

Legend: B rows, H query heads, H_kv KV heads, G = H / H_kv, D head dimension, A anchor heads of the layer (stored
first), S = H_kv - A the others, W columns of the workspace, M places for own keys.

One program attends with the G query heads of one row and KV head to a part of what is stored. `_attend` runs over an
anchor's keys and values and leaves its distant scores in the workspace; over another head's distant values with those
scores (or with the anchor's keys, under `share: keys`); and over that head's proximal tokens with its own keys.
`_merge` adds up the parts in a fixed order, so that equal inputs give equal bits.

Early skip takes two launches more: the first knows the gate without a distant value (`_attend` in its phase 1), the
second decides on the device, each of its programs the same, and reads the distant values where they are needed.

Everything that a kernel computes follows from positions on the device, none of it from the host's lengths, so a CUDA
graph of a step stays right as rows grow.

This module imports triton, so `pod_kernels` imports it only where `backend.runs_triton` says so.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pod_kernels.packed import PackedLayer
from pod_kernels.segments import LayerSegments, Segments
from pod_kernels.skipping import SkipStats

# Tests on the interpreter take smaller ones: None chooses by head dimension and device.
BLOCK: int | None = None
SPLITS: int | None = None

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

WHOLE, LOGITS, VALUES = 0, 1, 2  # phases of `_attend`
NUMBERS = 5  # of each part: maximum, sum, its distant share; maximum and sum of what the output takes


@triton.jit
def _attend(
    q,
    q_distant,
    keys,
    values,
    near,
    near_positions,
    near_slots,
    held,
    scores,
    weights,
    positions,
    order,
    key_offsets,
    value_offsets,
    held_offsets,
    capacities,
    parts,
    numbers,
    counts,
    first_place,
    first_key,
    first_held,
    anchors,
    batch,
    near_places,
    sinks,
    recent,
    ring,
    scale,
    tau,
    score_mask,
    score_head,
    score_row,
    score_group,
    weight_width,
    key_row,
    key_head,
    value_row,
    value_head,
    held_row,
    held_head,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    ANCHOR: tl.constexpr,
    FROM_KEYS: tl.constexpr,
    PACKED: tl.constexpr,
    ORDERED: tl.constexpr,
    WRITES: tl.constexpr,
    WEIGHS: tl.constexpr,
    PHASE: tl.constexpr,
    NEAR_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM_2: tl.constexpr,
):
    """Grid (B, heads of this launch, SPLITS or, in phase 2, SPLITS - NEAR_SPLITS)."""
    row = tl.program_id(0).to(tl.int64)
    place = first_place + tl.program_id(1)
    split = tl.program_id(2)
    if PHASE == 2:
        split += NEAR_SPLITS
    kv_head = place
    if ORDERED:
        kv_head = tl.load(order + place).to(tl.int32)
    at = tl.load(positions + row).to(tl.int32)
    lane = tl.arange(0, LANES)
    dim = tl.arange(0, DIM_2)
    column = tl.arange(0, BLOCK)
    is_lane = lane < GROUPS
    lane_dim = is_lane[:, None] & (dim < DIM)[None, :]
    asked_at = ((row * KV_HEADS + kv_head) * GROUPS + lane)[:, None] * DIM + dim[None, :]
    value_base = tl.load(value_offsets + row * value_row + place * value_head)
    unit = row * KV_HEADS + place
    scores += kv_head.to(tl.int64) * score_head + row * score_row

    most = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.full([LANES], 0.0, tl.float32)
    total_distant = tl.full([LANES], 0.0, tl.float32)
    sums = tl.full([LANES, DIM_2], 0.0, tl.float32)

    if split < NEAR_SPLITS:
        asked = tl.load(q + asked_at, mask=lane_dim, other=0.0)
        first_seen = tl.minimum(sinks, at + 1)
        recent_first = tl.maximum(sinks, at + 1 - recent)
        count = first_seen + tl.maximum(at + 1 - recent_first, 0)
        if PACKED:
            count = near_places
        share = (count + NEAR_SPLITS * BLOCK - 1) // (NEAR_SPLITS * BLOCK) * BLOCK
        first = split * share
        last = tl.minimum(count, first + share)
        near_base = ((place - anchors) * batch + row) * near_places
        for start in range(first, last, BLOCK):
            index = start + column
            inside = index < last
            if PACKED:
                position = tl.load(near_positions + near_base + index, mask=inside, other=-1)
                slot = tl.load(near_slots + near_base + index, mask=inside, other=0)
                is_near = (position < sinks) | (at - position < recent)
                inside = inside & (position >= 0) & (position <= at) & is_near
                near_slot = index
            else:
                slot = tl.where(index < first_seen, index, recent_first + index - first_seen)
                near_slot = tl.where(slot < sinks, slot, sinks + (slot - sinks) % ring)
            taken = inside[:, None] & (dim < DIM)[None, :]
            key = tl.load(near + (near_base + near_slot)[:, None] * DIM + dim[None, :], mask=taken, other=0.0)
            value = tl.load(values + (value_base + slot)[:, None] * DIM + dim[None, :], mask=taken, other=0.0)
            logits = tl.dot(asked, tl.trans(key), input_precision="ieee") * (scale * LOG2_E)
            logits = tl.where(inside[None, :], logits, float("-inf"))
            highest = tl.maximum(most, tl.max(logits, 1))
            shift = tl.where(highest == float("-inf"), 0.0, highest)
            weight = tl.exp2(logits - shift[:, None])
            decay = tl.exp2(most - shift)
            total = total * decay + tl.sum(weight, 1)
            sums = sums * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
            most = highest
    else:
        first = 0
        last = at + 1
        if PACKED:
            last = tl.load(capacities + row * value_row + place * value_head).to(tl.int32)
        elif not ANCHOR:
            first = sinks
            last = at + 1 - recent
        together: tl.constexpr = (SPLITS - NEAR_SPLITS) * BLOCK
        share = (tl.maximum(last - first, 0) + together - 1) // together * BLOCK
        first += (split - NEAR_SPLITS) * share
        last = tl.minimum(last, first + share)
        is_skipped = lane < 0
        if PHASE == 2:
            # Every program of this row and head decides, each by the same numbers in the same order.
            part = tl.arange(0, SPLITS_2)
            known = (unit * SPLITS + part)[:, None] * (5 * GROUPS) + lane[None, :]
            is_part = (part < SPLITS)[:, None] & is_lane[None, :]
            part_most = tl.load(numbers + known, mask=is_part, other=float("-inf"))
            part_total = tl.load(numbers + known + GROUPS, mask=is_part, other=0.0)
            top = tl.max(part_most, 0)
            part_total *= tl.exp2(part_most - tl.where(top == float("-inf"), 0.0, top)[None, :])
            mass = tl.sum(part_total, 0)
            distant_mass = tl.sum(tl.where((part >= NEAR_SPLITS)[:, None], part_total, 0.0), 0)
            gate = 1.0 - distant_mass / tl.where(mass > 0, mass, 1.0)
            is_skipped = gate >= tau
            skipped = tl.sum((is_skipped & is_lane).to(tl.int32), 0)
            if split == NEAR_SPLITS:
                distant = tl.maximum(at + 1 - recent - sinks, 0)
                counted = distant > 0
                tally = counts + unit * 4
                tl.store(tally, tl.load(tally) + tl.where(counted, GROUPS, 0))
                tl.store(tally + 1, tl.load(tally + 1) + tl.where(counted, skipped, 0))
                tl.store(tally + 2, tl.load(tally + 2) + distant)
                tl.store(tally + 3, tl.load(tally + 3) + tl.where(skipped == GROUPS, distant, 0))
            last = tl.where(skipped == GROUPS, first, last)
        if FROM_KEYS:
            if ANCHOR:
                asked = tl.load(q + asked_at, mask=lane_dim, other=0.0)
            else:
                asked = tl.load(q_distant + asked_at, mask=lane_dim, other=0.0)
            index = first_key + tl.program_id(1)
            key_base = tl.load(key_offsets + row * key_row + index * key_head)
            if PACKED:
                index = first_held + tl.program_id(1)
                held_base = tl.load(held_offsets + row * held_row + index * held_head)
        for start in range(first, last, BLOCK):
            slot = start + column
            inside = slot < last
            score_at = lane[:, None].to(tl.int64) * score_group + slot[None, :]
            if FROM_KEYS:
                taken = inside[:, None] & (dim < DIM)[None, :]
                key = tl.load(keys + (key_base + slot)[:, None] * DIM + dim[None, :], mask=taken, other=0.0)
                logits = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
                position = slot
                seen = inside
                if PACKED:
                    position = tl.load(held + held_base + slot, mask=inside, other=-1)
                    seen = (position >= 0) & (position <= at)
                is_distant = seen & (position >= sinks) & (at - position >= recent)
                if WRITES:
                    if (score_mask >> kv_head) & 1:
                        if PACKED:
                            # The block's other layers have no table of positions: what is not distant counts nothing.
                            distant = tl.where(is_distant[None, :], logits, float("-inf"))
                            tl.store(scores + score_at, distant, mask=is_lane[:, None] & inside[None, :])
                        else:
                            tl.store(scores + score_at, logits, mask=is_lane[:, None] & is_distant[None, :])
                if not ANCHOR:
                    seen = is_distant
                logits = tl.where(seen[None, :], logits, float("-inf"))
                if WEIGHS:
                    into = ((place * batch + row) * GROUPS + lane)[:, None] * weight_width + slot[None, :]
                    tl.store(weights + into, logits, mask=is_lane[:, None] & inside[None, :])
            else:
                logits = tl.load(scores + score_at, mask=is_lane[:, None] & inside[None, :], other=float("-inf"))
                is_distant = inside
            logits *= LOG2_E
            if PHASE == 2:
                logits = tl.where(is_skipped[:, None], float("-inf"), logits)
            highest = tl.maximum(most, tl.max(logits, 1))
            shift = tl.where(highest == float("-inf"), 0.0, highest)
            weight = tl.exp2(logits - shift[:, None])
            decay = tl.exp2(most - shift)
            total = total * decay + tl.sum(weight, 1)
            total_distant = total_distant * decay + tl.sum(tl.where(is_distant[None, :], weight, 0.0), 1)
            most = highest
            if PHASE != 1:
                taken = inside[:, None] & (dim < DIM)[None, :]
                value = tl.load(values + (value_base + slot)[:, None] * DIM + dim[None, :], mask=taken, other=0.0)
                sums = sums * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")

    into = (unit * SPLITS + split) * (5 * GROUPS) + lane
    if PHASE != 2:
        tl.store(numbers + into, most, mask=is_lane)
        tl.store(numbers + into + GROUPS, total, mask=is_lane)
        tl.store(numbers + into + 2 * GROUPS, total_distant, mask=is_lane)
    if (PHASE != 1) | (split < NEAR_SPLITS):
        tl.store(numbers + into + 3 * GROUPS, most, mask=is_lane)
        tl.store(numbers + into + 4 * GROUPS, total, mask=is_lane)
        into_part = ((unit * SPLITS + split) * GROUPS + lane)[:, None] * DIM + dim[None, :]
        tl.store(parts + into_part, sums, mask=lane_dim)


@triton.jit
def _merge(
    parts,
    numbers,
    order,
    out,
    lse,
    gate,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    ORDERED: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    LANES: tl.constexpr,
    DIM_2: tl.constexpr,
):
    """Grid (B, H_kv): one row's query heads of one KV head, their parts in order."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    kv_head = place
    if ORDERED:
        kv_head = tl.load(order + place).to(tl.int32)
    lane = tl.arange(0, LANES)
    dim = tl.arange(0, DIM_2)
    part = tl.arange(0, SPLITS_2)
    is_lane = lane < GROUPS
    lane_dim = is_lane[:, None] & (dim < DIM)[None, :]
    unit = row * KV_HEADS + place
    known = (unit * SPLITS + part)[:, None] * (5 * GROUPS) + lane[None, :]
    is_part = (part < SPLITS)[:, None] & is_lane[None, :]
    head = (row * KV_HEADS + kv_head) * GROUPS + lane

    most = tl.load(numbers + known, mask=is_part, other=float("-inf"))
    top = tl.max(most, 0)
    factors = tl.exp2(most - tl.where(top == float("-inf"), 0.0, top)[None, :])
    mass = tl.sum(factors * tl.load(numbers + known + GROUPS, mask=is_part, other=0.0), 0)
    distant_mass = tl.sum(factors * tl.load(numbers + known + 2 * GROUPS, mask=is_part, other=0.0), 0)
    is_some = mass > 0
    mass = tl.where(is_some, mass, 1.0)
    tl.store(lse + head, tl.where(is_some, (top + tl.log2(mass)) * LN_2, float("-inf")), mask=is_lane)
    tl.store(gate + head, 1.0 - distant_mass / mass, mask=is_lane)

    top = tl.max(tl.load(numbers + known + 3 * GROUPS, mask=is_part, other=float("-inf")), 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.full([LANES], 0.0, tl.float32)
    sums = tl.full([LANES, DIM_2], 0.0, tl.float32)
    for index in range(0, SPLITS):
        at = (unit * SPLITS + index) * (5 * GROUPS) + lane
        factor = tl.exp2(tl.load(numbers + at + 3 * GROUPS, mask=is_lane, other=float("-inf")) - top)
        total += factor * tl.load(numbers + at + 4 * GROUPS, mask=is_lane, other=0.0)
        # A part that counts nothing is not read.
        taken = lane_dim & (factor > 0)[:, None]
        at_part = ((unit * SPLITS + index) * GROUPS + lane)[:, None] * DIM + dim[None, :]
        sums += factor[:, None] * tl.load(parts + at_part, mask=taken, other=0.0)
    sums /= tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + head[:, None] * DIM + dim[None, :], sums.to(out.dtype.element_ty), mask=lane_dim)


class HeadRun(NamedTuple):
    """Heads of a layer that one launch takes: they lie one after the other wherever they have keys or positions.

    Attributes:
        first, count: their places in the layer's storage order.
        keys, first_key: segments of the keys that their (distant) logits come from, and the first head in them.
        held, first_held: the same of the slots' positions; None where slot = position.
    """

    first: int
    count: int
    keys: Segments | None = None
    first_key: int = 0
    held: Segments | None = None
    first_held: int = 0


def head_runs(
    first: int, keys: tuple[tuple[Segments, int], ...], held: tuple[tuple[Segments, int], ...] | None = None
) -> list[HeadRun]:
    """The fewest runs of heads from place `first` on, whose keys and positions lie where `keys` and `held` say."""
    runs: list[HeadRun] = []
    for place, (segments, index) in enumerate(keys, start=first):
        table, table_index = (None, 0) if held is None else held[place - first]
        last = runs[-1] if runs else None
        if (
            last is not None
            and (last.keys is segments and last.first_key + last.count == index)
            and (last.held is table and (table is None or last.first_held + last.count == table_index))
        ):
            runs[-1] = last._replace(count=last.count + 1)
        else:
            runs.append(HeadRun(place, 1, segments, index, table, table_index))
    return runs


class Tiles(NamedTuple):
    """How the work is cut: slots of a tile, parts of a head's work, and how many of these are proximal."""

    block: int
    splits: int
    near_splits: int


def tiles(q: Tensor, kv_heads: int, length: int, near: int) -> Tiles:
    """Tiles for q [B, H, 1, D] and segments of `length` slots, `near` tokens of which are proximal.

    They follow from capacities, not from how much is stored: each other number of parts is a kernel to be compiled.
    """
    width = triton.next_power_of_2(max(16, q.shape[-1]))
    block = BLOCK or min(128, max(16, 16384 // (width * q.element_size())))
    splits = SPLITS
    if splits is None:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        # Many programs for each processor, so that the last wave is a small part; each has a few tiles to load ahead.
        splits = min(128, triton.cdiv(16 * processors, q.shape[0] * kv_heads), triton.cdiv(length, 4 * block) + 1)
        splits = triton.next_power_of_2(splits)
    splits = max(2, splits)
    # A proximal token costs a key and a value, a distant one a value.
    near = min(near, length)
    near_splits = round(splits * 2 * near / max(1, 2 * near + length - near))
    return Tiles(block, splits, min(splits - 1, max(1, near_splits)))


def decode_attention(
    q: Tensor,
    *,
    order: Tensor | None,
    anchors: int,
    anchor_runs: list[HeadRun],
    shared_runs: list[HeadRun],
    values: Segments,
    near: Tensor,
    near_positions: Tensor | None,
    near_slots: Tensor | None,
    positions: Tensor,
    length: int,
    sink_size: int,
    recent_size: int,
    ring_size: int,
    scale: float,
    scores: Tensor | None,
    score_heads: tuple[int, ...],
    q_distant: Tensor | None,
    weights: Tensor | None = None,
    tau: float | None = None,
    stats: SkipStats | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of one query in each row to a layer's segments.

    Args:
        q: [B, H, 1, D].
        order: [H_kv] int64, the KV head at each place of the storage order; None where they are the same.
        anchors: A.
        anchor_runs, shared_runs: the heads, as `head_runs` gives them.
        values: [B, H_kv] segments in storage order.
        near: [S, B, M, D] the other heads' own keys: sinks and a ring, or as the two that follow say.
        near_positions, near_slots: [S, B, M] int32, for slots of any position.
        positions: [B, 1] int64 of the queries, -1 for padding.
        length: slots of the longest segment; chooses tiles only.
        scores: [H_kv, B, G, 1, W] float32 workspace.
        score_heads: KV heads among the anchors whose distant logits are written there.
        q_distant: [B, H, 1, D] for `shared_runs` with keys.
        weights: [A, B, G, W] float32, takes the anchor heads' logits, -inf where unseen; None: not wanted.
        tau, stats: early skip.

    Returns:
        out [B, H, 1, D], lse and gate [B, H, 1] float32.
    """
    batch, heads, _, dim = q.shape
    kv_heads = values.offsets.shape[1]
    groups = heads // kv_heads
    q, positions = q.contiguous(), positions.contiguous()
    cut = tiles(q, kv_heads, length, sink_size + recent_size)
    sizes = {
        "KV_HEADS": kv_heads,
        "GROUPS": groups,
        "DIM": dim,
        "ORDERED": order is not None,
        "SPLITS": cut.splits,
        "SPLITS_2": triton.next_power_of_2(cut.splits),
        "LANES": max(16, triton.next_power_of_2(groups)),
        "DIM_2": triton.next_power_of_2(max(16, dim)),
        "num_warps": 4,
    }
    parts = torch.empty(batch, kv_heads, cut.splits, groups, dim, dtype=torch.float32, device=q.device)
    numbers = torch.empty(batch, kv_heads, cut.splits, NUMBERS, groups, dtype=torch.float32, device=q.device)
    order = q if order is None else order
    is_packed = near_positions is not None
    skips = tau is not None and bool(shared_runs)
    counts = stats.counter(batch, kv_heads, q.device) if skips and stats is not None else None
    if skips and counts is None:
        counts = torch.zeros(batch, kv_heads, 4, dtype=torch.long, device=q.device)
    score_mask = sum(1 << head for head in score_heads)
    if skips and scores is None:
        # The second launch reads what the first has multiplied.
        width = max(max(capacity) for capacity in values.sizes) if values.sizes else values.rectangle.shape[2]
        scores = torch.empty(kv_heads, batch, groups, 1, width, dtype=torch.float32, device=q.device)
        score_mask = (1 << kv_heads) - 1

    def launch(run: HeadRun, is_anchor: bool, phase: int) -> None:
        from_keys = run.keys is not None and phase != VALUES
        near_splits = 0 if is_anchor else cut.near_splits
        writes = from_keys and scores is not None and score_mask != 0
        grid = (batch, run.count, cut.splits - near_splits if phase == VALUES else cut.splits)
        keys, held = run.keys or values, run.held or values
        _attend[grid](
            q,
            q if q_distant is None else q_distant,
            keys.data,
            values.data,
            near,
            near_positions,
            near_slots,
            held.data,
            q if scores is None else scores,
            weights,
            positions,
            order,
            keys.offsets,
            values.offsets,
            held.offsets,
            values.capacities,
            parts,
            numbers,
            counts,
            run.first,
            run.first_key,
            run.first_held,
            anchors,
            batch,
            near.shape[2],
            sink_size,
            recent_size,
            ring_size,
            float(scale),
            0.0 if tau is None else float(tau),
            score_mask,
            *((0, 0, 0) if scores is None else scores.stride()[:3]),
            0 if weights is None else weights.shape[-1],
            *keys.offsets.stride(),
            *values.offsets.stride(),
            *held.offsets.stride(),
            ANCHOR=is_anchor,
            FROM_KEYS=from_keys,
            PACKED=is_packed,
            WRITES=writes,
            WEIGHS=is_anchor and weights is not None,
            PHASE=phase,
            NEAR_SPLITS=near_splits,
            BLOCK=cut.block,
            num_stages=2,
            **sizes,
        )

    if q_distant is not None:
        q_distant = q_distant.contiguous()
    for run in anchor_runs:
        launch(run, True, WHOLE)
    for run in shared_runs:
        for phase in (LOGITS, VALUES) if skips else (WHOLE,):
            launch(run, False, phase)
    out = torch.empty_like(q)
    lse = torch.empty(batch, heads, 1, dtype=torch.float32, device=q.device)
    gate = torch.empty_like(lse)
    _merge[(batch, kv_heads)](parts, numbers, order, out, lse, gate, **sizes)
    return out, lse, gate


def cached_decode(
    q: Tensor,
    layer: LayerSegments,
    *,
    positions: Tensor,
    scores: Tensor | None,
    score_heads: tuple[int, ...],
    q_distant: Tensor | None,
    distant_keys: tuple[tuple[Segments, int], ...],
    scale: float,
    tau: float | None,
    stats: SkipStats | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`pod_kernels.cached_attention` of one query in each row: out [B, H, 1, D], lse and gate [B, H, 1]."""
    anchors, kv_heads = layer.num_anchors, len(layer.order)
    if scores is not None:
        shared = [HeadRun(anchors, kv_heads - anchors)] if anchors < kv_heads else []
    else:
        shared = head_runs(anchors, distant_keys)
    return decode_attention(
        q,
        order=layer.index,
        anchors=anchors,
        anchor_runs=[HeadRun(0, anchors, layer.keys)] if anchors else [],
        shared_runs=shared,
        values=layer.values,
        near=layer.near.rectangle,
        near_positions=None,
        near_slots=None,
        positions=positions,
        length=layer.values.rectangle.shape[2],
        sink_size=layer.sink_size,
        recent_size=layer.recent_size,
        ring_size=layer.ring_size,
        scale=scale,
        scores=scores,
        score_heads=score_heads,
        q_distant=q_distant,
        tau=tau,
        stats=stats,
    )


def packed_decode(
    q: Tensor,
    layer: PackedLayer,
    *,
    positions: Tensor,
    slot_positions: tuple[tuple[Segments, int], ...],
    scores: Tensor | None,
    score_heads: tuple[int, ...],
    q_distant: Tensor | None,
    distant_keys: tuple[tuple[Segments, int], ...],
    scale: float,
    return_weights: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """`pod_kernels.packed_attention` of one query in each row; see there."""
    anchors, kv_heads = layer.num_anchors, len(layer.order)
    batch, heads = q.shape[:2]
    if scores is not None:
        shared = [HeadRun(anchors, kv_heads - anchors)] if anchors < kv_heads else []
    else:
        shared = head_runs(anchors, distant_keys, slot_positions[anchors:])
    weights = None
    widest = max(max(sizes) for sizes in layer.values.sizes)
    if return_weights:
        width = max((max(sizes) for sizes in layer.keys.sizes), default=0)
        shape = (anchors, batch, heads // kv_heads, width)
        weights = torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device)
    out, lse, _ = decode_attention(
        q,
        order=layer.index,
        anchors=anchors,
        anchor_runs=head_runs(0, tuple((layer.keys, head) for head in range(anchors)), slot_positions[:anchors]),
        shared_runs=shared,
        values=layer.values,
        near=layer.near_keys,
        near_positions=layer.near_positions,
        near_slots=layer.near_slots,
        positions=positions,
        length=widest,
        sink_size=layer.sink_size,
        recent_size=layer.recent_size,
        ring_size=1,
        scale=scale,
        scores=scores,
        score_heads=score_heads,
        q_distant=q_distant,
        weights=weights,
    )
    if weights is None:
        return out
    lse = lse.view(batch, kv_heads, -1, 1).transpose(0, 1)
    lse = (lse if layer.index is None else lse[layer.index])[:anchors]
    # A padded row sees nothing: -inf - inf, and so weights of zero.
    return out, weights.sub_(lse.masked_fill(lse == -torch.inf, torch.inf)).exp_()[..., None, :]


@triton.jit
def _attend_slots(
    q,
    keys,
    values,
    new_keys,
    new_values,
    ranks,
    cos,
    sin,
    window,
    logits,
    kept,
    positions,
    parts,
    numbers,
    first_place,
    batch,
    places,
    used,
    rank_head,
    rank_row,
    window_row,
    kept_row,
    sinks,
    recent,
    scale,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    FROM_KEYS: tl.constexpr,
    WRITES: tl.constexpr,
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM_2: tl.constexpr,
    HALF_2: tl.constexpr,
):
    """Grid (B, heads of this launch, SPLITS): fixed slots, and behind them the new token, which has no slot yet."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    place = first_place + index
    split = tl.program_id(2)
    half: tl.constexpr = DIM // 2
    lane = tl.arange(0, LANES)
    dim = tl.arange(0, DIM_2)
    pair = tl.arange(0, HALF_2)
    column = tl.arange(0, BLOCK)
    is_lane = lane < GROUPS
    lane_dim = is_lane[:, None] & (dim < DIM)[None, :]
    lane_pair = is_lane[:, None] & (pair < half)[None, :]
    at = tl.load(positions + row).to(tl.int32)
    here = tl.where(at >= 0, tl.load(kept + row * kept_row).to(tl.int32), 0)
    own = tl.where(at >= 0, used, -1)  # a padded row sees nothing
    unit = row * KV_HEADS + place
    base = (place * batch + row) * places
    new = (place * batch + row) * DIM
    logits += (index * batch + row) * GROUPS * (used + 1)
    asked_at = (unit * GROUPS + lane)[:, None] * DIM
    first_asked = tl.load(q + asked_at + pair[None, :], mask=lane_pair, other=0.0)
    second_asked = tl.load(q + asked_at + half + pair[None, :], mask=lane_pair, other=0.0)
    most = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.full([LANES], 0.0, tl.float32)
    sums = tl.full([LANES, DIM_2], 0.0, tl.float32)

    share = (used + SPLITS * BLOCK) // (SPLITS * BLOCK) * BLOCK
    last = tl.minimum(used + 1, (split + 1) * share)
    for start in range(split * share, last, BLOCK):
        slot = start + column
        in_slots = (slot < last) & (slot < here)
        is_new = (slot < last) & (slot == own)
        if window is not None:
            held = tl.load(window + row * window_row + slot, mask=in_slots, other=0).to(tl.int32)
            in_slots = in_slots & ((held < sinks) | (at - held < recent))
        seen = in_slots | is_new
        logits_at = lane[:, None] * (used + 1) + slot[None, :]
        inside = is_lane[:, None] & (slot < last)[None, :]
        if FROM_KEYS:
            key_at = (base + slot)[:, None] * DIM + pair[None, :]
            taken = in_slots[:, None] & (pair < half)[None, :]
            taken_new = is_new[:, None] & (pair < half)[None, :]
            first_key = tl.load(keys + key_at, mask=taken, other=0.0)
            second_key = tl.load(keys + key_at + half, mask=taken, other=0.0)
            if ranks is not None:
                rank = tl.load(ranks + place * rank_head + row * rank_row + slot, mask=in_slots, other=0)
                angle_at = rank[:, None] * half + pair[None, :]
                cosine = tl.load(cos + angle_at, mask=taken, other=0.0).to(tl.float32)
                sine = tl.load(sin + angle_at, mask=taken, other=0.0).to(tl.float32)
                first, second = first_key.to(tl.float32), second_key.to(tl.float32)
                first_key = (first * cosine - second * sine).to(q.dtype.element_ty)
                second_key = (second * cosine + first * sine).to(q.dtype.element_ty)
            new_at = new + (slot * 0)[:, None] + pair[None, :]
            first_key += tl.load(new_keys + new_at, mask=taken_new, other=0.0)
            second_key += tl.load(new_keys + new_at + half, mask=taken_new, other=0.0)
            products = tl.dot(first_asked, tl.trans(first_key), input_precision="ieee")
            products = tl.dot(second_asked, tl.trans(second_key), products, input_precision="ieee") * scale
            products = tl.where(seen[None, :], products, float("-inf"))
            if WRITES:
                tl.store(logits + logits_at, products, mask=inside)
        else:
            products = tl.load(logits + logits_at, mask=inside, other=float("-inf"))
            products = tl.where(seen[None, :], products, float("-inf"))
        products *= LOG2_E
        value_at = (base + slot)[:, None] * DIM + dim[None, :]
        value = tl.load(values + value_at, mask=in_slots[:, None] & (dim < DIM)[None, :], other=0.0)
        value_at = new + (slot * 0)[:, None] + dim[None, :]
        value += tl.load(new_values + value_at, mask=is_new[:, None] & (dim < DIM)[None, :], other=0.0)
        highest = tl.maximum(most, tl.max(products, 1))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(products - shift[:, None])
        decay = tl.exp2(most - shift)
        total = total * decay + tl.sum(weight, 1)
        sums = sums * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        most = highest

    into = (unit * SPLITS + split) * (5 * GROUPS) + lane
    for number in tl.static_range(0, 4, 3):
        tl.store(numbers + into + number * GROUPS, most, mask=is_lane)
        tl.store(numbers + into + (number + 1) * GROUPS, total, mask=is_lane)
    tl.store(numbers + into + 2 * GROUPS, total * 0.0, mask=is_lane)
    into_part = ((unit * SPLITS + split) * GROUPS + lane)[:, None] * DIM + dim[None, :]
    tl.store(parts + into_part, sums, mask=lane_dim)


def slot_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    *,
    used: int,
    kept: Tensor,
    positions: Tensor,
    shared_logits: Tensor | None,
    scale: float,
    ranks: Tensor | None = None,
    table: tuple[Tensor, Tensor] | None = None,
    window: Tensor | None = None,
    sink_size: int = 0,
    recent_size: int = 0,
    decay: float | None = None,
    return_logits: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`pod_kernels.slots.slot_attention` of one query in each row; keys are turned to their places as they are read.

    Args:
        q: [H_kv, B, G, 1, D] in storage order, turned to its place.
        keys, values: [A, B, P, D] and [H_kv, B, P, D], of which the first F = `used` slots are in use.
        new_keys, new_values: [H_kv, B, 1, D] of the queries' own tokens, keys turned to their places.
        kept: [B or 1] int64 slots in use in each row.
        positions: [B, 1] int64, -1 for padding.
        shared_logits: [S, B, G, 1, F + 1] float32 of the other heads, proximal ones in their places.
        ranks, table: [A, B, F] int64 places of the slots' keys, and cos and sin [.., D / 2] by place; None: keys are
            stored as they are used.
        window: [B, F] int64 positions of the slots where only proximal ones count, by `sink_size` and `recent_size`.
        decay: factor of the query in the sums; None for no sums.
        return_logits: also the anchor heads' logits.

    Returns:
        out [H_kv, B, G, 1, D], sums [A, B, G, F + 1] float32, logits [A, B, G, 1, F + 1] float32.
    """
    kv_heads, batch, groups, _, dim = q.shape
    anchors = len(keys)
    asked = q.transpose(0, 1).contiguous()
    cut = tiles(asked.view(batch, -1, 1, dim), kv_heads, values.shape[2] + 1, 0)
    sizes = {
        "KV_HEADS": kv_heads,
        "GROUPS": groups,
        "DIM": dim,
        "SPLITS": cut.splits,
        "LANES": max(16, triton.next_power_of_2(groups)),
        "DIM_2": triton.next_power_of_2(max(16, dim)),
    }
    options = {"dtype": torch.float32, "device": q.device}
    parts = torch.empty(batch, kv_heads, cut.splits, groups, dim, **options)
    numbers = torch.empty(batch, kv_heads, cut.splits, NUMBERS, groups, **options)
    keeps = return_logits or decay is not None
    logits = torch.empty(anchors, batch, groups, used + 1, **options) if keeps else None
    cos, sin = (None, None) if table is None else (part.contiguous() for part in table)
    for first, count, products in ((0, anchors, logits), (anchors, kv_heads - anchors, shared_logits)):
        if not count:
            continue
        _attend_slots[(batch, count, cut.splits)](
            asked,
            keys,
            values,
            new_keys.contiguous(),
            new_values.contiguous(),
            ranks,
            cos,
            sin,
            window,
            parts if products is None else products,
            kept,
            positions.contiguous(),
            parts,
            numbers,
            first,
            batch,
            values.shape[2],
            used,
            *((0, 0) if ranks is None else ranks.stride()[:2]),
            0 if window is None else window.stride(0),
            0 if len(kept) == 1 else 1,
            sink_size,
            recent_size,
            scale,
            FROM_KEYS=first == 0 and anchors > 0,
            WRITES=keeps,
            BLOCK=cut.block,
            HALF_2=triton.next_power_of_2(max(16, dim // 2)),
            num_warps=4,
            num_stages=2,
            **sizes,
        )
    out = torch.empty_like(asked)
    lse = torch.empty(batch, kv_heads, groups, 1, **options)
    gate = torch.empty_like(lse)
    _merge[(batch, kv_heads)](
        parts,
        numbers,
        asked,
        out,
        lse,
        gate,
        ORDERED=False,
        SPLITS_2=triton.next_power_of_2(cut.splits),
        num_warps=4,
        **sizes,
    )
    sums = None
    if decay is not None:
        # A padded row sees nothing: -inf - inf, and so sums of zero.
        lse = lse.transpose(0, 1)[:anchors]
        sums = (logits - lse.masked_fill(lse == -torch.inf, torch.inf)).exp_().mul_(decay)
    return out.transpose(0, 1), sums, logits[..., None, :] if return_logits else None
