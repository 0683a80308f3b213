"""Triton kernels of decoding: one query in each row, the cache's segments split among programs, merged by LSE.

Legend: B rows, H query heads, H_kv KV heads, G = H / H_kv, D head dimension, A anchor heads of the layer (stored
first), S = H_kv - A the others, W columns of the workspace, M places for own keys.

One program attends with the G query heads of one row and KV head to a part of what is stored. `_attend` runs over an
anchor's keys and values and leaves its distant scores in the workspace; over another head's distant values with those
scores (or with the anchor's keys, under `share: keys`); and over that head's proximal tokens with its own keys.
`Parts` adds up what the programs leave.

Early skip takes two launches more: the first knows the gate without a distant value (`_attend` in its phase 1), the
second decides on the device, each of its programs the same, and reads the distant values where they are needed.

Everything that a kernel computes follows from positions on the device, none of it from the host's lengths, so a CUDA
graph of a step stays right as rows grow.

This module imports triton, so `pod_kernels` imports it only where `dispatch.runs_triton` says so.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pod_kernels.segments import HeadOf, LayerSlots, Segments
from pod_kernels.skipping import SkipStats
from pod_kernels.softmax import LOG2_E, soften
from pod_kernels.splits import Parts

WHOLE, LOGITS, VALUES = 0, 1, 2  # phases of `_attend`


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
            most, total, weight, decay = soften(most, total, logits)
            sums = sums * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
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
            most, total, weight, decay = soften(most, total, logits)
            total_distant = total_distant * decay + tl.sum(tl.where(is_distant[None, :], weight, 0.0), 1)
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


def head_runs(first: int, keys: tuple[HeadOf, ...], held: tuple[HeadOf, ...] | None = None) -> list[HeadRun]:
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


def cached_decode(
    q: Tensor,
    layer: LayerSlots,
    *,
    positions: Tensor,
    table: tuple[HeadOf, ...] | None,
    scores: Tensor | None,
    score_heads: tuple[int, ...],
    q_distant: Tensor | None,
    distant_keys: tuple[HeadOf, ...],
    scale: float,
    tau: float | None,
    stats: SkipStats | None,
    return_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`pod_kernels.cached_attention` of one query in each row; see there for the arguments.

    Returns:
        out [B, H, 1, D], lse and gate [B, H, 1] float32, and weights [A, B, G, 1, C] float32 where they are wanted.
    """
    batch, heads, _, dim = q.shape
    anchors, kv_heads = layer.num_anchors, len(layer.order)
    groups = heads // kv_heads
    q, positions = q.contiguous(), positions.contiguous()
    widest = max(max(sizes) for sizes in layer.values.sizes)
    split = Parts(q, kv_heads, widest, layer.sink_size + layer.recent_size)
    cut = split.tiles
    if scores is not None:
        shared_runs = [HeadRun(anchors, kv_heads - anchors)] if anchors < kv_heads else []
    else:
        shared_runs = head_runs(anchors, distant_keys, None if table is None else table[anchors:])
    if table is None:
        anchor_runs = [HeadRun(0, anchors, layer.keys)] if anchors else []
    else:
        anchor_runs = head_runs(0, tuple((layer.keys, head) for head in range(anchors)), table[:anchors])
    skips = tau is not None and bool(shared_runs)
    counts = stats.counter(batch, kv_heads, q.device) if skips and stats is not None else None
    if skips and counts is None:
        counts = torch.zeros(batch, kv_heads, 4, dtype=torch.long, device=q.device)
    score_mask = sum(1 << head for head in score_heads)
    if skips and scores is None:
        # The second launch reads what the first has multiplied.
        scores = torch.empty(kv_heads, batch, groups, 1, widest, dtype=torch.float32, device=q.device)
        score_mask = (1 << kv_heads) - 1
    weights = None
    if return_weights:
        width = max((max(sizes) for sizes in layer.keys.sizes), default=0)
        weights = torch.full((anchors, batch, groups, width), -torch.inf, dtype=torch.float32, device=q.device)

    def launch(run: HeadRun, is_anchor: bool, phase: int) -> None:
        from_keys = run.keys is not None and phase != VALUES
        near_splits = 0 if is_anchor else cut.near_splits
        writes = from_keys and scores is not None and score_mask != 0
        grid = (batch, run.count, cut.splits - near_splits if phase == VALUES else cut.splits)
        values, keys, held = layer.values, run.keys or layer.values, run.held or layer.values
        _attend[grid](
            q,
            q if q_distant is None else q_distant,
            keys.data,
            values.data,
            layer.near_keys,
            layer.near_positions,
            layer.near_slots,
            held.data,
            q if scores is None else scores,
            weights,
            positions,
            q if layer.index is None else layer.index,
            keys.offsets,
            values.offsets,
            held.offsets,
            values.capacities,
            split.sums,
            split.numbers,
            counts,
            run.first,
            run.first_key,
            run.first_held,
            anchors,
            batch,
            layer.near_keys.shape[2],
            layer.sink_size,
            layer.recent_size,
            layer.ring_size or 1,
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
            PACKED=table is not None,
            WRITES=writes,
            WEIGHS=is_anchor and weights is not None,
            PHASE=phase,
            NEAR_SPLITS=near_splits,
            BLOCK=cut.block,
            num_stages=2,
            ORDERED=layer.index is not None,
            SPLITS_2=split.splits_2,
            **split.sizes,
        )

    if q_distant is not None:
        q_distant = q_distant.contiguous()
    for run in anchor_runs:
        launch(run, True, WHOLE)
    for run in shared_runs:
        for phase in (LOGITS, VALUES) if skips else (WHOLE,):
            launch(run, False, phase)
    out, lse, gate = split.merged(q, layer.index)
    if weights is not None:
        anchor_lse = layer.stored(lse.view(batch, kv_heads, -1, 1).transpose(0, 1))[:anchors]
        # A padded row sees nothing: -inf - inf, and so weights of zero.
        weights = weights.sub_(anchor_lse.masked_fill(anchor_lse == -torch.inf, torch.inf)).exp_()[..., None, :]
    return out, lse, gate, weights
