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

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pod_kernels.segments import HeadOf, Segments
from pod_kernels.skipping import SkipStats
from pod_kernels.triton.reading import begin, portion, segments_of, vectors
from pod_kernels.triton.softmax import LOG2_E, gather, nothing, soften
from pod_kernels.triton.splits import Parts, all_numbers, asked_at, leave

if TYPE_CHECKING:
    from pod_kernels.cached import _Asked

WHOLE, LOGITS, VALUES = 0, 1, 2  # phases of `_attend`


class Role(NamedTuple):
    """What the programs of a head do in a launch of `_attend`.

    Attributes:
        is_anchor: of the heads' own keys; else proximal tokens have their own, and distant ones the anchor's.
        from_keys: logits are multiplied; else read from the workspace.
        is_packed: slots hold any positions.
        phase: all of it; or no distant value, then these values alone.
        near_splits: how many parts of the work are proximal.
    """

    is_anchor: bool
    from_keys: bool
    is_packed: bool
    phase: int
    near_splits: int


@triton.jit
def _proximal(q, values, near, unit, value_base, split, at, sizes, ROLE: tl.constexpr, CUT: tl.constexpr):
    """A part of the proximal tokens, with the head's own keys, which begin at the `unit`-th's."""
    sinks, recent, scale, _ = sizes
    near_keys, near_positions, near_slots, places, ring = near
    first_seen = tl.minimum(sinks, at + 1)
    recent_first = tl.maximum(sinks, at + 1 - recent)
    count = first_seen + tl.maximum(at + 1 - recent_first, 0)
    if ROLE.is_packed:
        count = places
    share = portion(count, ROLE.near_splits, CUT.block)
    first = split * share
    last = tl.minimum(count, first + share)
    most, total, sums = nothing(CUT.lanes, CUT.dim_2)
    for start in range(first, last, CUT.block):
        index = start + tl.arange(0, CUT.block)
        inside = index < last
        if ROLE.is_packed:
            position = tl.load(near_positions + unit * places + index, mask=inside, other=-1)
            slot = tl.load(near_slots + unit * places + index, mask=inside, other=0)
            is_near = (position < sinks) | (at - position < recent)
            inside = inside & (position >= 0) & (position <= at) & is_near
            near_slot = index
        else:
            slot = tl.where(index < first_seen, index, recent_first + index - first_seen)
            near_slot = tl.where(slot < sinks, slot, sinks + (slot - sinks) % ring)
        key = vectors(near_keys, (unit * places + near_slot) * CUT.dim, inside, CUT.dim, CUT.dim_2)
        value = vectors(values[0], (value_base + slot) * CUT.dim, inside, CUT.dim, CUT.dim_2)
        logits = tl.dot(q, tl.trans(key), input_precision="ieee") * (scale * LOG2_E)
        logits = tl.where(inside[None, :], logits, float("-inf"))
        most, total, sums = gather(most, total, sums, logits, value)
    return most, total, sums


@triton.jit
def _skips(numbers, counts, unit, split, distant, tau, ROLE: tl.constexpr, CUT: tl.constexpr):
    """[LANES] which query heads skip, and how many; each program of a row and head decides, by the same numbers."""
    most = all_numbers(numbers, unit, 0, float("-inf"), CUT)
    top = tl.max(most, 0)
    totals = all_numbers(numbers, unit, 1, 0.0, CUT)
    totals *= tl.exp2(most - tl.where(top == float("-inf"), 0.0, top)[None, :])
    mass = tl.sum(totals, 0)
    is_distant = (tl.arange(0, CUT.splits_2) >= ROLE.near_splits)[:, None]
    gate = 1.0 - tl.sum(tl.where(is_distant, totals, 0.0), 0) / tl.where(mass > 0, mass, 1.0)
    skips = gate >= tau
    skipped = tl.sum((skips & (tl.arange(0, CUT.lanes) < CUT.groups)).to(tl.int32), 0)
    if split == ROLE.near_splits:  # one of them counts
        tally = counts + unit * 4
        tl.store(tally, tl.load(tally) + tl.where(distant > 0, CUT.groups, 0))
        tl.store(tally + 1, tl.load(tally + 1) + tl.where(distant > 0, skipped, 0))
        tl.store(tally + 2, tl.load(tally + 2) + distant)
        tl.store(tally + 3, tl.load(tally + 3) + tl.where(skipped == CUT.groups, distant, 0))
    return skips, skipped


@triton.jit
def _multiplied(
    asked, keys, held, scores, weights, key_base, held_base, kv_head, unit, slot, inside, at, sizes, ROLE: tl.constexpr,
    CUT: tl.constexpr,
):  # fmt: skip
    """Logits of a tile of keys, -inf where unseen, and which of them are distant; leaves them where they are wanted."""
    sinks, recent, scale, _ = sizes
    lane = tl.arange(0, CUT.lanes)
    is_lane = (lane < CUT.groups)[:, None]
    key = vectors(keys[0], (key_base + slot) * CUT.dim, inside, CUT.dim, CUT.dim_2)
    logits = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
    position = slot
    seen = inside
    if ROLE.is_packed:
        position = tl.load(held[0] + held_base + slot, mask=inside, other=-1)
        seen = (position >= 0) & (position <= at)
    is_distant = seen & (position >= sinks) & (at - position >= recent)
    if scores is not None:
        if (scores[1] >> kv_head) & 1:
            score_at = scores[0] + lane[:, None].to(tl.int64) * scores[2] + slot[None, :]
            if ROLE.is_packed:
                # The block's other layers have no table of positions: what is not distant counts nothing.
                distant = tl.where(is_distant[None, :], logits, float("-inf"))
                tl.store(score_at, distant, mask=is_lane & inside[None, :])
            else:
                tl.store(score_at, logits, mask=is_lane & is_distant[None, :])
    if not ROLE.is_anchor:
        seen = is_distant
    logits = tl.where(seen[None, :], logits, float("-inf"))
    if weights is not None:
        into = (unit * CUT.groups + lane)[:, None] * weights[1] + slot[None, :]
        tl.store(weights[0] + into, logits, mask=is_lane & inside[None, :])
    return logits, is_distant


@triton.jit
def _distant(
    asked, keys, values, held, scores, weights, bases, kv_head, unit, start, stop, skips, at, sizes, ROLE: tl.constexpr,
    CUT: tl.constexpr,
):  # fmt: skip
    """Slots `start` to `stop` of an anchor, or the distant ones among them of another head."""
    lane = tl.arange(0, CUT.lanes)
    value_base, key_base, held_base = bases
    most, total, sums = nothing(CUT.lanes, CUT.dim_2)
    total_distant = tl.full([CUT.lanes], 0.0, tl.float32)
    for first in range(start, stop, CUT.block):
        slot = first + tl.arange(0, CUT.block)
        inside = slot < stop
        if ROLE.from_keys:
            logits, is_distant = _multiplied(
                asked, keys, held, scores, weights, key_base, held_base, kv_head, unit, slot, inside, at, sizes, ROLE,
                CUT,
            )  # fmt: skip
        else:
            score_at = scores[0] + lane[:, None].to(tl.int64) * scores[2] + slot[None, :]
            is_inside = (lane < CUT.groups)[:, None] & inside[None, :]
            logits = tl.load(score_at, mask=is_inside, other=float("-inf"))
            is_distant = inside
        logits *= LOG2_E
        if ROLE.phase == 2:
            logits = tl.where(skips[:, None], float("-inf"), logits)
        most, total, weight, decay = soften(most, total, logits)
        total_distant = total_distant * decay + tl.sum(tl.where(is_distant[None, :], weight, 0.0), 1)
        if ROLE.phase != 1:
            value = vectors(values[0], (value_base + slot) * CUT.dim, inside, CUT.dim, CUT.dim_2)
            sums = sums * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    return most, total, total_distant, sums


@triton.jit
def _attend_as(
    queries, keys, values, held, near, scores, weights, parts, rows, firsts, sizes, ROLE: tl.constexpr,
    CUT: tl.constexpr,
):  # fmt: skip
    """What one program of `_attend` does in its head's role."""
    row, index, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    q, far = queries
    positions, order, capacities = rows
    first_place, first_key, first_held, anchors = firsts
    sinks, recent, _, tau = sizes
    if ROLE.phase == 2:
        split += ROLE.near_splits
    place = first_place + index
    kv_head = place
    if order is not None:
        kv_head = tl.load(order + place).to(tl.int32)
    at = tl.load(positions + row).to(tl.int32)
    is_lane = tl.arange(0, CUT.lanes) < CUT.groups
    unit = row * CUT.kv_heads + place
    value_base = begin(values, row, place)
    total_distant = tl.full([CUT.lanes], 0.0, tl.float32)
    if split < ROLE.near_splits:
        own_query = vectors(q, asked_at(row, kv_head, CUT), is_lane, CUT.dim, CUT.dim_2)
        own = (place - anchors) * tl.num_programs(0) + row
        most, total, sums = _proximal(own_query, values, near, own, value_base, split, at, sizes, ROLE, CUT)
    else:
        start, stop = 0, at + 1
        if ROLE.is_packed:
            stop = tl.load(capacities + row * values[2] + place * values[3]).to(tl.int32)
        elif not ROLE.is_anchor:
            start, stop = sinks, at + 1 - recent
        share = portion(tl.maximum(stop - start, 0), CUT.splits - ROLE.near_splits, CUT.block)
        start += (split - ROLE.near_splits) * share
        stop = tl.minimum(stop, start + share)
        skips = tl.arange(0, CUT.lanes) < 0
        if ROLE.phase == 2:
            distant = tl.maximum(at + 1 - recent - sinks, 0)
            skips, skipped = _skips(parts[1], parts[2], unit, split, distant, tau, ROLE, CUT)
            stop = tl.where(skipped == CUT.groups, start, stop)
        left = scores
        if scores is not None:
            left = (scores[0] + kv_head.to(tl.int64) * scores[3] + row * scores[4], scores[1], scores[2])
        asked, key_base, held_base = None, 0, 0
        if ROLE.from_keys:
            asked = vectors(far, asked_at(row, kv_head, CUT), is_lane, CUT.dim, CUT.dim_2)
            key_base = begin(keys, row, first_key + index)
            if ROLE.is_packed:
                held_base = begin(held, row, first_held + index)
        bases, into = (value_base, key_base, held_base), place * tl.num_programs(0) + row
        most, total, total_distant, sums = _distant(
            asked, keys, values, held, left, weights, bases, kv_head, into, start, stop, skips, at, sizes, ROLE, CUT
        )
    has_sums = (ROLE.phase != 1) | (split < ROLE.near_splits)
    leave(parts, unit, split, most, total, total_distant, sums, ROLE.phase != 2, has_sums, CUT)


@triton.jit
def _attend(
    queries, keys, values, held, near, scores, weights, parts, rows, firsts, sizes, OWN: tl.constexpr,
    OTHER: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Grid (B, heads of this launch, the parts; in phase 2 the distant ones alone).

    Anchors are in the role OWN, the others in OTHER; None where a launch has none of these.
    """
    if OTHER is None:
        _attend_as(queries, keys, values, held, near, scores, weights, parts, rows, firsts, sizes, OWN, CUT)
    elif OWN is None:
        _attend_as(queries, keys, values, held, near, scores, weights, parts, rows, firsts, sizes, OTHER, CUT)
    elif firsts[0] + tl.program_id(1) < firsts[3]:
        _attend_as(queries, keys, values, held, near, scores, weights, parts, rows, firsts, sizes, OWN, CUT)
    else:
        _attend_as(queries, keys, values, held, near, scores, weights, parts, rows, firsts, sizes, OTHER, CUT)


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


def cached_decode(asked: "_Asked") -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`pod_kernels.cached_attention` of one query in each row.

    Returns:
        out [B, H, 1, D], lse and gate [B, H, 1] float32, and weights [A, B, G, 1, C] float32 where they are wanted.
    """
    layer, table, scores, stats = asked.layer, asked.table, asked.scores, asked.stats
    q, positions = asked.q.contiguous(), asked.positions.contiguous()
    batch, heads, _, _ = q.shape
    anchors, kv_heads, stored = layer.num_anchors, layer.kv_heads, len(layer.order)
    groups, device = heads // kv_heads, q.device
    widest = layer.values.widest
    split = Parts(q, kv_heads, widest, layer.sink_size + layer.recent_size)
    cut = split.tiles
    if scores is not None:
        shared_runs = [HeadRun(anchors, stored - anchors)] if anchors < stored else []
    else:
        shared_runs = head_runs(anchors, asked.distant_keys, None if table is None else table[anchors:])
    if table is None:
        anchor_runs = [HeadRun(0, anchors, layer.keys)] if anchors else []
    else:
        anchor_runs = head_runs(0, tuple((layer.keys, head) for head in range(anchors)), table[:anchors])
    skips = asked.tau is not None and bool(shared_runs)
    counts = (stats or SkipStats()).counter(batch, kv_heads, device) if skips else None
    score_mask = sum(1 << head for head in asked.score_heads)
    if skips and scores is None:
        # The second launch reads what the first has multiplied.
        scores = torch.empty(kv_heads, batch, groups, 1, widest, dtype=torch.float32, device=device)
        score_mask = (1 << kv_heads) - 1
    weights = asked.no_weights()
    if weights is not None:
        weights.fill_(-torch.inf)
    far = q if asked.q_distant is None else asked.q_distant.contiguous()
    near = layer.near_keys, layer.near_positions, layer.near_slots, layer.near_keys.shape[2], layer.ring_size or 1
    sizes = layer.sink_size, layer.recent_size, float(asked.scale), float(asked.tau or 0)
    workspace = None
    if scores is not None:
        head_stride, row_stride, group_stride = scores.stride()[:3]
        workspace = scores, score_mask, group_stride, head_stride, row_stride

    def launch(run: HeadRun, phase: int, has_own: bool, has_other: bool) -> None:
        """Of anchors, of other heads, or of both where the others read what the anchors of earlier layers left."""
        from_keys = run.keys is not None and phase != VALUES
        is_packed, near_splits = table is not None, cut.near_splits
        own = Role(True, True, is_packed, phase, 0) if has_own else None
        other = Role(False, from_keys and not has_own, is_packed, phase, near_splits) if has_other else None
        _attend[batch, run.count, cut.splits - near_splits if phase == VALUES else cut.splits](
            (q, q if has_own else far),
            segments_of(run.keys or layer.values),
            segments_of(layer.values),
            segments_of(run.held or layer.values),
            near,
            workspace if score_mask or (has_other and not other.from_keys) else None,
            (weights, weights.shape[-1]) if has_own and weights is not None else None,
            (split.sums, split.numbers, counts),
            (positions, layer.index, layer.values.capacities),
            (run.first, run.first_key, run.first_held, anchors),
            sizes,
            OWN=own,
            OTHER=other,
            CUT=cut,
            num_warps=4,
            num_stages=2,
        )

    if scores is not None and not skips and shared_runs and len(anchor_runs) == 1:
        launch(anchor_runs[0]._replace(count=stored), WHOLE, True, True)
    else:
        for run in anchor_runs:
            launch(run, WHOLE, True, False)
        for run in shared_runs:
            for phase in (LOGITS, VALUES) if skips else (WHOLE,):
                launch(run, phase, False, True)
    out, lse, gate = split.merged(q, layer.index)
    if weights is not None:
        anchor_lse = asked.grouped(lse[..., None])[:anchors]
        # A padded row sees nothing: -inf - inf, and so weights of zero.
        weights = weights.sub_(anchor_lse.masked_fill(anchor_lse == -torch.inf, torch.inf)).exp_()
    return out, lse, gate, weights
