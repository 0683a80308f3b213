"""Triton kernel of decoding from fixed slots: one query in each row, keys turned to their places as they are read.

Legend: B rows, H_kv KV heads, A anchor heads of the layer (stored first), S = H_kv - A the others, G query heads per KV
head, D head dimension, P slots, F of them in use.

Imports triton, so it is imported only where `dispatch.runs_triton` says so.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pod_kernels.softmax import LOG2_E, soften
from pod_kernels.splits import Parts


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
        most, total, weight, decay = soften(most, total, products)
        sums = sums * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")

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
    by_row = asked.view(batch, -1, 1, dim)
    split = Parts(by_row, kv_heads, values.shape[2] + 1, 0)
    keeps = return_logits or decay is not None
    logits = torch.empty(anchors, batch, groups, used + 1, dtype=torch.float32, device=q.device) if keeps else None
    cos, sin = (None, None) if table is None else (part.contiguous() for part in table)
    for first, count, products in ((0, anchors, logits), (anchors, kv_heads - anchors, shared_logits)):
        if not count:
            continue
        _attend_slots[(batch, count, split.tiles.splits)](
            asked,
            keys,
            values,
            new_keys.contiguous(),
            new_values.contiguous(),
            ranks,
            cos,
            sin,
            window,
            split.sums if products is None else products,
            kept,
            positions.contiguous(),
            split.sums,
            split.numbers,
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
            BLOCK=split.tiles.block,
            HALF_2=triton.next_power_of_2(max(16, dim // 2)),
            num_stages=2,
            **split.sizes,
        )
    out, lse, _ = split.merged(by_row, None)
    sums = None
    if decay is not None:
        # A padded row sees nothing: -inf - inf, and so sums of zero.
        lse = lse.view(batch, kv_heads, groups, 1).transpose(0, 1)[:anchors]
        sums = (logits - lse.masked_fill(lse == -torch.inf, torch.inf)).exp_().mul_(decay)
    return out.view(asked.shape).transpose(0, 1), sums, logits[..., None, :] if return_logits else None
