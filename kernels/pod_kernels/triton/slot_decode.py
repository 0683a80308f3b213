"""Triton kernel of decoding from fixed slots: one query in each row, keys turned to their places as they are read.

Legend: B rows, H_kv KV heads, A anchor heads of the layer (stored first), S = H_kv - A the others, G query heads per KV
head, D head dimension, P slots, F of them in use.

Imports triton, so it is imported only where `dispatch.runs_triton` says so.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pod_kernels.triton.reading import portion, vectors
from pod_kernels.triton.softmax import LOG2_E, gather, nothing
from pod_kernels.triton.splits import Parts, asked_at, leave


@triton.jit
def _keys(
    keys, new_keys, turns, place, row, base, new_at, slot, in_slots, is_new, CUT: tl.constexpr, HALF_2: tl.constexpr
):
    """Both halves of a tile's keys: those in slots turned to their places, the new token's as it is."""
    half: tl.constexpr = CUT.dim // 2
    key_at = (base + slot) * CUT.dim
    first_key = vectors(keys, key_at, in_slots, half, HALF_2)
    second_key = vectors(keys, key_at + half, in_slots, half, HALF_2)
    if turns is not None:
        ranks, rank_head, rank_row, cos, sin = turns
        rank = tl.load(ranks + place * rank_head + row * rank_row + slot, mask=in_slots, other=0) * half
        cosine = vectors(cos, rank, in_slots, half, HALF_2).to(tl.float32)
        sine = vectors(sin, rank, in_slots, half, HALF_2).to(tl.float32)
        first, second = first_key.to(tl.float32), second_key.to(tl.float32)
        first_key = (first * cosine - second * sine).to(keys.dtype.element_ty)
        second_key = (second * cosine + first * sine).to(keys.dtype.element_ty)
    new_at += slot * 0
    first_key += vectors(new_keys, new_at, is_new, half, HALF_2)
    second_key += vectors(new_keys, new_at + half, is_new, half, HALF_2)
    return first_key, second_key


@triton.jit
def _attend_slots(
    q, keys, values, new, turns, window, logits, rows, parts, sizes, scale, CUT: tl.constexpr, HALF_2: tl.constexpr
):
    """Grid (B, heads of this launch, the parts): fixed slots, and behind them the new token, which has no slot yet."""
    row, index, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    new_keys, new_values = new
    positions, kept, kept_row = rows
    first_place, places, used = sizes
    half: tl.constexpr = CUT.dim // 2
    batch, place = tl.num_programs(0), first_place + index
    lane = tl.arange(0, CUT.lanes)
    is_lane = lane < CUT.groups
    at = tl.load(positions + row).to(tl.int32)
    here = tl.where(at >= 0, tl.load(kept + row * kept_row).to(tl.int32), 0)
    own = tl.where(at >= 0, used, -1)  # a padded row sees nothing
    unit, head = row * CUT.kv_heads + place, place * batch + row
    base, new_at = head * places, head * CUT.dim
    if logits is not None:
        logits += (index * batch + row) * CUT.groups * (used + 1)
    first_at = asked_at(row, place, CUT)
    first_asked = vectors(q, first_at, is_lane, half, HALF_2)
    second_asked = vectors(q, first_at + half, is_lane, half, HALF_2)
    most, total, sums = nothing(CUT.lanes, CUT.dim_2)
    share = portion(used + 1, CUT.splits, CUT.block)
    last = tl.minimum(used + 1, (split + 1) * share)
    for start in range(split * share, last, CUT.block):
        slot = start + tl.arange(0, CUT.block)
        in_slots = (slot < last) & (slot < here)
        is_new = (slot < last) & (slot == own)
        if window is not None:
            held_at, held_row, sinks, recent = window
            held = tl.load(held_at + row * held_row + slot, mask=in_slots, other=0).to(tl.int32)
            in_slots = in_slots & ((held < sinks) | (at - held < recent))
        seen = (in_slots | is_new)[None, :]
        logits_at = lane[:, None] * (used + 1) + slot[None, :]
        inside = is_lane[:, None] & (slot < last)[None, :]
        if keys is not None:
            first_key, second_key = _keys(
                keys, new_keys, turns, place, row, base, new_at, slot, in_slots, is_new, CUT, HALF_2
            )
            products = tl.dot(first_asked, tl.trans(first_key), input_precision="ieee")
            products = tl.dot(second_asked, tl.trans(second_key), products, input_precision="ieee") * scale
            products = tl.where(seen, products, float("-inf"))
            if logits is not None:
                tl.store(logits + logits_at, products, mask=inside)
        else:
            products = tl.load(logits + logits_at, mask=inside, other=float("-inf"))
            products = tl.where(seen, products, float("-inf"))
        value = vectors(values, (base + slot) * CUT.dim, in_slots, CUT.dim, CUT.dim_2)
        value += vectors(new_values, new_at + slot * 0, is_new, CUT.dim, CUT.dim_2)
        most, total, sums = gather(most, total, sums, products * LOG2_E, value)
    leave(parts, unit, split, most, total, total * 0.0, sums, True, True, CUT)


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
    turns = None if table is None else (ranks, *ranks.stride()[:2], *(part.contiguous() for part in table))
    new = new_keys.contiguous(), new_values.contiguous()
    seen = None if window is None else (window, window.stride(0), sink_size, recent_size)
    rows, parts = (positions.contiguous(), kept, 0 if len(kept) == 1 else 1), (split.sums, split.numbers)
    options = {"CUT": split.tiles, "HALF_2": triton.next_power_of_2(max(16, dim // 2)), "num_warps": 4, "num_stages": 2}
    launches = (0, anchors, keys, logits), (anchors, kv_heads - anchors, None, shared_logits)
    for first, count, read, products in launches:
        if count:
            sizes = first, values.shape[2], used
            _attend_slots[batch, count, split.tiles.splits](
                asked, read, values, new, turns, seen, products, rows, parts, sizes, scale, **options
            )
    out, lse, _ = split.merged(by_row, None)
    sums = None
    if decay is not None:
        # A padded row sees nothing: -inf - inf, and so sums of zero.
        lse = lse.view(batch, kv_heads, groups, 1).transpose(0, 1)[:anchors]
        sums = (logits - lse.masked_fill(lse == -torch.inf, torch.inf)).exp_().mul_(decay)
    return out.view(asked.shape).transpose(0, 1), sums, logits[..., None, :] if return_logits else None
