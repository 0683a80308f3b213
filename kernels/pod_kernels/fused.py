"""Shared-score attention in one online softmax over two sources of logits: Triton kernels, forward and backward.

Never imported before it is used: importing it imports triton (`pod_kernels.attention` does so when it runs it).

The pairs (query i, key j) are taken in tiles. With the positions of PoD (arXiv 2412.02252, Eq. 3 and 4), a tile that
holds visible pairs is one of four kinds, and each kind has a loop of its own:

    far        all pairs are visible and distant: one product, q_distant . k_distant, no mask
    near       all pairs are visible and proximal: one product, q . k, no mask
    diagonal   all visible pairs are proximal: one product, the causal mask
    border     anything else: the edge of the sinks, of the window, or of a document. Both products, all masks

Along one row of tiles of a long sequence, left to right, these are: border (the end of the sinks), far (nearly all),
border (the start of the window), near, diagonal. `key_segments` and `query_segments` find where one kind ends and the
next begins from the first and last token of a tile, so that no empty tile is visited. The kernels visit far tiles
first and near tiles last, so that the distant accumulators need no registers beside the proximal loops.

The backward is deterministic: one kernel owns a tile of queries (dq, dq_distant), the other a tile of keys (dk, dv,
dk_distant) and sums over the query heads that share it; nothing is added atomically. Each recomputes the weights as
exp(logit - lse) with the log-sum-exp of both sources together, so that no gradient flows through it.

With padding or documents a tensor `spans` [2, B, T] holds, for each token, the first column of its sequence and the
column after the last one; a padded token has the first at T and the last at 0, so that it sees nothing.
"""

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pod_kernels import reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # as it was when the kernels below were made

FAR = tl.constexpr(0)
NEAR = tl.constexpr(1)
DIAGONAL = tl.constexpr(2)
BORDER = tl.constexpr(3)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


# Which tiles are visited, and as what


@triton.jit
def _clamp(value, low, high):
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit
def key_segments(first, last, low, high, sink_size, recent_size, KEY_TILE: tl.constexpr, WINDOW_ONLY: tl.constexpr):
    """Tiles of keys for one tile of queries, as the borders b0 <= ... <= b7 of runs of tiles.

    [b0, b1), [b2, b3) and [b4, b5) are border tiles, [b1, b2) and [b5, b6) near, [b3, b4) far (not visited by window
    attention), [b6, b7) diagonal.

    Args:
        first, last: columns of the tile's first and last real query; last is -1 where there is none.
        low, high: first column of the sequence of the former and of the latter.
    """
    end = (last + KEY_TILE) // KEY_TILE
    is_mixed = low != high
    own = tl.cdiv(low, KEY_TILE)  # from here on, tiles hold no key of an earlier sequence
    seen = (first + 1) // KEY_TILE  # before it, all keys are seen by all queries
    any_recent = tl.maximum(first - recent_size + 1, 0) // KEY_TILE  # before it, no pair is recent
    all_recent = tl.cdiv(tl.maximum(last - recent_size + 1, 0), KEY_TILE)  # from here on, all pairs are

    b0 = tl.minimum(low // KEY_TILE, end)
    if WINDOW_ONLY:
        has_sinks = sink_size > 0
        b1 = tl.where(has_sinks, tl.minimum(own, end), b0)
        sink_end = tl.where(has_sinks, tl.cdiv(low + sink_size, KEY_TILE), b0)
    else:
        b1 = tl.minimum(own, end)
        sink_end = tl.cdiv(low + sink_size, KEY_TILE)
    b2 = tl.where(is_mixed, b1, _clamp((low + sink_size) // KEY_TILE, b1, tl.maximum(seen, b1)))
    b3 = _clamp(sink_end, b2, end)
    b4 = _clamp(any_recent, b3, end)
    if not WINDOW_ONLY:
        b4 = tl.where(is_mixed, b3, b4)
    b5 = tl.where(is_mixed, end, _clamp(tl.maximum(all_recent, own), b4, end))
    b6 = _clamp(seen, b5, end)
    return b0, b1, b2, b3, b4, b5, b6, end


@triton.jit
def query_segments(
    first, last, low, high, stop, sink_size, recent_size, QUERY_TILE: tl.constexpr, WINDOW_ONLY: tl.constexpr
):
    """Tiles of queries for one tile of keys, as the borders b0 <= ... <= b5 of runs of tiles.

    [b0, b1) are diagonal tiles, [b1, b2) near, [b2, b3) and [b4, b5) border, [b3, b4) far (not visited by window
    attention).

    Args:
        first, last: columns of the tile's first and last real key; last is -1 where there is none.
        low, high: first column of the sequence of the former and of the latter.
        stop: the column after the last one of the latter's sequence.
    """
    never = 2**30
    is_mixed = low != high
    all_sinks = last < low + sink_size
    no_sinks = tl.maximum(first, high) >= high + sink_size
    end = tl.cdiv(stop, QUERY_TILE)
    seeing = tl.cdiv(last, QUERY_TILE)  # from here on, all queries see all keys
    own = stop // QUERY_TILE  # before it, tiles hold no query of a later sequence
    all_recent = tl.where(all_sinks, never, (first + recent_size) // QUERY_TILE)  # before it, all pairs are proximal
    none_recent = tl.cdiv(last + recent_size, QUERY_TILE)  # from here on, no pair is recent
    if WINDOW_ONLY:
        end = tl.where(no_sinks, tl.minimum(end, none_recent), end)

    b0 = tl.minimum(first // QUERY_TILE, end)
    b1 = tl.where(is_mixed, b0, _clamp(tl.minimum(seeing, all_recent), b0, end))
    b2 = tl.where(is_mixed, b0, _clamp(tl.minimum(all_recent, own), b1, end))
    b3 = tl.where(is_mixed, end, _clamp(tl.where(no_sinks, none_recent, end), b2, end))
    b4 = tl.where(is_mixed, end, _clamp(own, b3, end))
    return b0, b1, b2, b3, b4, end


@triton.jit
def _tile_of(index, start_0, count_0, start_1, count_1, start_2):
    """The index-th tile of three runs, one after the other."""
    second = index - count_0
    third = second - count_1
    return tl.where(second < 0, start_0 + index, tl.where(third < 0, start_1 + second, start_2 + third))


@triton.jit
def _pairs(rows, columns, starts, sink_size, recent_size):
    """Which pairs are visible, and which of these proximal; all broadcast against one another."""
    visible = (columns <= rows) & (columns >= starts)
    proximal = (columns < starts + sink_size) | (rows - columns < recent_size)
    return visible, proximal


@triton.jit
def _program(tiles, heads, section):
    """(tile, head of all rows) of this program: `section` heads together, in each of these all heads of a tile."""
    program = tl.program_id(0)
    first = program // (section * tiles) * section
    width = tl.minimum(section, heads - first)
    rest = program - first * tiles
    return rest // width, first + rest % width


@triton.jit
def _load(
    base, stride, first, length, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, CHECK: tl.constexpr
):
    """[ROWS, PADDED] from row `first` on; zero beyond DIM, and beyond `length` where that is to be checked."""
    rows, dims = tl.arange(0, ROWS), tl.arange(0, PADDED)
    # 64 bits: a token's offset in a sequence of a million passes 2 ** 31.
    pointers = base + first.to(tl.int64) * stride + rows[:, None] * stride + dims[None, :]
    if CHECK and DIM != PADDED:
        return tl.load(pointers, mask=(first + rows < length)[:, None] & (dims < DIM)[None, :], other=0.0)
    elif CHECK:
        return tl.load(pointers, mask=(first + rows < length)[:, None], other=0.0)
    elif DIM != PADDED:
        return tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _store(base, stride, first, length, values, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    rows, dims = tl.arange(0, ROWS), tl.arange(0, PADDED)
    pointers = base + first.to(tl.int64) * stride + rows[:, None] * stride + dims[None, :]
    mask = (first + rows < length)[:, None] & (dims < DIM)[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _multiply(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _multiply_add(a, b, total):
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _query_tile(spans, row, first, length, QUERY_TILE: tl.constexpr, SPANS: tl.constexpr):
    """Columns and starts of a tile of queries, which of them are real, and what `key_segments` asks for."""
    columns = first + tl.arange(0, QUERY_TILE)
    if SPANS:
        starts = tl.load(spans + row.to(tl.int64) * length + columns, mask=columns < length, other=length)
        real = starts < length
        low, high = tl.min(starts, 0), tl.max(tl.where(real, starts, 0), 0)
        first_real = tl.min(tl.where(real, columns, length), 0)
        last_real = tl.max(tl.where(real, columns, -1), 0)
        return columns, starts, real, first_real, last_real, low, high
    else:
        starts = tl.zeros([QUERY_TILE], tl.int32)
        return columns, starts, columns < length, first, tl.minimum(first + QUERY_TILE, length) - 1, 0, 0


# Forward


@triton.jit
def _forward_tiles(
    out,
    peak,
    total,
    distant_total,
    q,
    q_distant,
    columns,
    starts,
    k_ptr,
    v_ptr,
    k_distant_ptr,
    k_t,
    v_t,
    k_distant_t,
    length,
    sink_size,
    recent_size,
    scale,
    start_0,
    count_0,
    start_1,
    count_1,
    start_2,
    count_2,
    KIND: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    KEY_TILE: tl.constexpr,
    DISTANT: tl.constexpr,
    WINDOW_ONLY: tl.constexpr,
    GATE: tl.constexpr,
):
    """The online softmax over runs of tiles of one kind."""
    CHECK: tl.constexpr = KIND == BORDER or KIND == DIAGONAL
    for index in tl.range(0, count_0 + count_1 + count_2):
        first = _tile_of(index, start_0, count_0, start_1, count_1, start_2) * KEY_TILE
        if KIND == FAR:
            k = _load(k_distant_ptr, k_distant_t, first, length, KEY_TILE, DIM, PADDED, CHECK)
            logits = _multiply(q_distant, tl.trans(k))
        else:
            k = _load(k_ptr, k_t, first, length, KEY_TILE, DIM, PADDED, CHECK)
            logits = _multiply(q, tl.trans(k))
        if CHECK:
            keys = first + tl.arange(0, KEY_TILE)
            visible, proximal = _pairs(columns[:, None], keys[None, :], starts[:, None], sink_size, recent_size)
            if KIND == BORDER and DISTANT:
                k = _load(k_distant_ptr, k_distant_t, first, length, KEY_TILE, DIM, PADDED, CHECK)
                logits = tl.where(proximal, logits, _multiply(q_distant, tl.trans(k)))
            if WINDOW_ONLY:
                visible = visible & proximal
            logits = tl.where(visible, logits, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1) * scale)
        # A query that has seen no key yet: -inf - -inf would be NaN.
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak) if CHECK else new_peak
        weights = tl.exp2(logits * scale - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weights, 1)
        if GATE:
            distant_total = distant_total * fade
            if KIND == FAR:
                distant_total += tl.sum(weights, 1)
            elif KIND == BORDER:
                distant_total += tl.sum(tl.where(proximal, 0.0, weights), 1)
        v = _load(v_ptr, v_t, first, length, KEY_TILE, DIM, PADDED, CHECK)
        out = _multiply_add(weights.to(v.dtype), v, out * fade[:, None])
        peak = new_peak
    return out, peak, total, distant_total


@triton.jit
def _forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_distant_ptr,
    k_distant_ptr,
    spans_ptr,
    out_ptr,
    lse_ptr,
    gate_ptr,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    q_distant_b,
    q_distant_h,
    q_distant_t,
    k_distant_b,
    k_distant_h,
    k_distant_t,
    out_b,
    out_h,
    out_t,
    batch,
    heads,
    groups,
    length,
    section,
    sink_size,
    recent_size,
    scale,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    DISTANT: tl.constexpr,
    WINDOW_ONLY: tl.constexpr,
    SPANS: tl.constexpr,
    GATE: tl.constexpr,
):
    tiles = tl.cdiv(length, QUERY_TILE)
    tile, flat_head = _program(tiles, batch * heads, section)
    first = (tiles - 1 - tile) * QUERY_TILE  # the longest rows of tiles first
    row, head = flat_head // heads, flat_head % heads
    b, h, h_kv = row.to(tl.int64), head.to(tl.int64), (head // groups).to(tl.int64)
    k_ptr += b * k_b + h_kv * k_h
    v_ptr += b * v_b + h_kv * v_h
    columns, starts, real, first_real, last_real, low, high = _query_tile(
        spans_ptr, row, first, length, QUERY_TILE, SPANS
    )
    b0, b1, b2, b3, b4, b5, b6, b7 = key_segments(
        first_real, last_real, low, high, sink_size, recent_size, KEY_TILE, WINDOW_ONLY
    )
    scale *= LOG2_E

    out = tl.zeros([QUERY_TILE, PADDED], tl.float32)
    peak = tl.full([QUERY_TILE], -float("inf"), tl.float32)
    total = tl.zeros([QUERY_TILE], tl.float32)
    distant_total = tl.zeros([QUERY_TILE], tl.float32)
    if DISTANT:
        k_distant_ptr += b * k_distant_b + h_kv * k_distant_h
        base = q_distant_ptr + b * q_distant_b + h * q_distant_h
        q_distant = _load(base, q_distant_t, first, length, QUERY_TILE, DIM, PADDED, True)
        out, peak, total, distant_total = _forward_tiles(
            out, peak, total, distant_total, q_distant, q_distant, columns, starts,
            k_ptr, v_ptr, k_distant_ptr, k_t, v_t, k_distant_t, length, sink_size, recent_size, scale,
            b3, b4 - b3, 0, 0, 0, 0, FAR, DIM, PADDED, KEY_TILE, DISTANT, WINDOW_ONLY, GATE,
        )  # fmt: skip
    q = _load(q_ptr + b * q_b + h * q_h, q_t, first, length, QUERY_TILE, DIM, PADDED, True)
    if not DISTANT:
        q_distant = q
    out, peak, total, distant_total = _forward_tiles(
        out, peak, total, distant_total, q, q_distant, columns, starts,
        k_ptr, v_ptr, k_distant_ptr, k_t, v_t, k_distant_t, length, sink_size, recent_size, scale,
        b0, b1 - b0, b2, b3 - b2, b4, b5 - b4, BORDER, DIM, PADDED, KEY_TILE, DISTANT, WINDOW_ONLY, GATE,
    )  # fmt: skip
    out, peak, total, distant_total = _forward_tiles(
        out, peak, total, distant_total, q, q, columns, starts,
        k_ptr, v_ptr, k_distant_ptr, k_t, v_t, k_distant_t, length, sink_size, recent_size, scale,
        b1, b2 - b1, b5, b6 - b5, 0, 0, NEAR, DIM, PADDED, KEY_TILE, DISTANT, WINDOW_ONLY, GATE,
    )  # fmt: skip
    out, peak, total, distant_total = _forward_tiles(
        out, peak, total, distant_total, q, q, columns, starts,
        k_ptr, v_ptr, k_distant_ptr, k_t, v_t, k_distant_t, length, sink_size, recent_size, scale,
        b6, b7 - b6, 0, 0, 0, 0, DIAGONAL, DIM, PADDED, KEY_TILE, DISTANT, WINDOW_ONLY, GATE,
    )  # fmt: skip

    # Rows of padding saw nothing or, in an unmasked loop, what is not theirs.
    total = tl.where(real, total, 1.0)
    out = tl.where(real[:, None], out / total[:, None], 0.0)
    lse = tl.where(real, (peak + tl.log2(total)) * LN_2, -float("inf"))
    _store(out_ptr + b * out_b + h * out_h, out_t, first, length, out, QUERY_TILE, DIM, PADDED)
    offsets = flat_head.to(tl.int64) * length + columns
    tl.store(lse_ptr + offsets, lse, mask=columns < length)
    if GATE:
        gate = tl.where(real, 1.0 - distant_total / total, 1.0)
        tl.store(gate_ptr + offsets, gate, mask=columns < length)


# Backward


@triton.jit
def _query_grad_tiles(
    dq,
    dq_distant,
    q,
    q_distant,
    grad_out,
    lse,
    correction,
    columns,
    starts,
    k_ptr,
    v_ptr,
    k_distant_ptr,
    k_t,
    v_t,
    k_distant_t,
    length,
    sink_size,
    recent_size,
    scale,
    start_0,
    count_0,
    start_1,
    count_1,
    start_2,
    count_2,
    KIND: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    KEY_TILE: tl.constexpr,
    DISTANT: tl.constexpr,
    WINDOW_ONLY: tl.constexpr,
):
    """Gradients of a tile of queries over runs of tiles of one kind; without the factor `scale`."""
    CHECK: tl.constexpr = KIND == BORDER or KIND == DIAGONAL
    for index in tl.range(0, count_0 + count_1 + count_2):
        first = _tile_of(index, start_0, count_0, start_1, count_1, start_2) * KEY_TILE
        if KIND == FAR:
            k = _load(k_distant_ptr, k_distant_t, first, length, KEY_TILE, DIM, PADDED, CHECK)
            logits = _multiply(q_distant, tl.trans(k))
        else:
            k = _load(k_ptr, k_t, first, length, KEY_TILE, DIM, PADDED, CHECK)
            logits = _multiply(q, tl.trans(k))
        if CHECK:
            keys = first + tl.arange(0, KEY_TILE)
            visible, proximal = _pairs(columns[:, None], keys[None, :], starts[:, None], sink_size, recent_size)
            if KIND == BORDER and DISTANT:
                k_distant = _load(k_distant_ptr, k_distant_t, first, length, KEY_TILE, DIM, PADDED, CHECK)
                logits = tl.where(proximal, logits, _multiply(q_distant, tl.trans(k_distant)))
            if WINDOW_ONLY:
                visible = visible & proximal
            logits = tl.where(visible, logits, -float("inf"))
        weights = tl.exp2(logits * scale - lse[:, None])
        v = _load(v_ptr, v_t, first, length, KEY_TILE, DIM, PADDED, CHECK)
        grad = weights * (_multiply(grad_out, tl.trans(v)) - correction[:, None])
        if KIND == FAR:
            dq_distant = _multiply_add(grad.to(k.dtype), k, dq_distant)
        elif KIND == BORDER and DISTANT:
            dq = _multiply_add(tl.where(proximal, grad, 0.0).to(k.dtype), k, dq)
            dq_distant = _multiply_add(tl.where(proximal, 0.0, grad).to(k.dtype), k_distant, dq_distant)
        else:
            dq = _multiply_add(grad.to(k.dtype), k, dq)
    return dq, dq_distant


@triton.jit
def _query_grad_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_distant_ptr,
    k_distant_ptr,
    spans_ptr,
    out_ptr,
    grad_out_ptr,
    lse_ptr,
    correction_ptr,
    dq_ptr,
    dq_distant_ptr,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    q_distant_b,
    q_distant_h,
    q_distant_t,
    k_distant_b,
    k_distant_h,
    k_distant_t,
    out_b,
    out_h,
    out_t,
    grad_out_b,
    grad_out_h,
    grad_out_t,
    dq_b,
    dq_h,
    dq_t,
    dq_distant_b,
    dq_distant_h,
    dq_distant_t,
    batch,
    heads,
    groups,
    length,
    section,
    sink_size,
    recent_size,
    scale,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    DISTANT: tl.constexpr,
    WINDOW_ONLY: tl.constexpr,
    SPANS: tl.constexpr,
):
    """dq and dq_distant of a tile of queries; also leaves rowsum(grad_out * out) to the kernel of the keys."""
    tiles = tl.cdiv(length, QUERY_TILE)
    tile, flat_head = _program(tiles, batch * heads, section)
    first = (tiles - 1 - tile) * QUERY_TILE
    row, head = flat_head // heads, flat_head % heads
    b, h, h_kv = row.to(tl.int64), head.to(tl.int64), (head // groups).to(tl.int64)
    k_ptr += b * k_b + h_kv * k_h
    v_ptr += b * v_b + h_kv * v_h
    columns, starts, real, first_real, last_real, low, high = _query_tile(
        spans_ptr, row, first, length, QUERY_TILE, SPANS
    )
    b0, b1, b2, b3, b4, b5, b6, b7 = key_segments(
        first_real, last_real, low, high, sink_size, recent_size, KEY_TILE, WINDOW_ONLY
    )

    out = _load(out_ptr + b * out_b + h * out_h, out_t, first, length, QUERY_TILE, DIM, PADDED, True)
    base = grad_out_ptr + b * grad_out_b + h * grad_out_h
    grad_out = _load(base, grad_out_t, first, length, QUERY_TILE, DIM, PADDED, True)
    correction = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
    offsets = flat_head.to(tl.int64) * length + columns
    tl.store(correction_ptr + offsets, correction, mask=columns < length)
    # All weights of a row of padding are exp2(logit - inf) = 0.
    lse = tl.load(lse_ptr + offsets, mask=columns < length, other=0.0) * LOG2_E
    lse = tl.where(real, lse, float("inf"))
    log2_scale = scale * LOG2_E

    dq_distant = tl.zeros([QUERY_TILE, PADDED], tl.float32)
    if DISTANT:
        k_distant_ptr += b * k_distant_b + h_kv * k_distant_h
        base = q_distant_ptr + b * q_distant_b + h * q_distant_h
        q_distant = _load(base, q_distant_t, first, length, QUERY_TILE, DIM, PADDED, True)
        _, dq_distant = _query_grad_tiles(
            dq_distant, dq_distant, q_distant, q_distant, grad_out, lse, correction, columns, starts,
            k_ptr, v_ptr, k_distant_ptr, k_t, v_t, k_distant_t, length, sink_size, recent_size, log2_scale,
            b3, b4 - b3, 0, 0, 0, 0, FAR, DIM, PADDED, KEY_TILE, DISTANT, WINDOW_ONLY,
        )  # fmt: skip
    q = _load(q_ptr + b * q_b + h * q_h, q_t, first, length, QUERY_TILE, DIM, PADDED, True)
    if not DISTANT:
        q_distant = q
    dq = tl.zeros([QUERY_TILE, PADDED], tl.float32)
    dq, dq_distant = _query_grad_tiles(
        dq, dq_distant, q, q_distant, grad_out, lse, correction, columns, starts,
        k_ptr, v_ptr, k_distant_ptr, k_t, v_t, k_distant_t, length, sink_size, recent_size, log2_scale,
        b0, b1 - b0, b2, b3 - b2, b4, b5 - b4, BORDER, DIM, PADDED, KEY_TILE, DISTANT, WINDOW_ONLY,
    )  # fmt: skip
    if DISTANT:
        base = dq_distant_ptr + b * dq_distant_b + h * dq_distant_h
        _store(base, dq_distant_t, first, length, dq_distant * scale, QUERY_TILE, DIM, PADDED)
    dq, _ = _query_grad_tiles(
        dq, dq, q, q, grad_out, lse, correction, columns, starts,
        k_ptr, v_ptr, k_distant_ptr, k_t, v_t, k_distant_t, length, sink_size, recent_size, log2_scale,
        b1, b2 - b1, b5, b6 - b5, 0, 0, NEAR, DIM, PADDED, KEY_TILE, DISTANT, WINDOW_ONLY,
    )  # fmt: skip
    dq, _ = _query_grad_tiles(
        dq, dq, q, q, grad_out, lse, correction, columns, starts,
        k_ptr, v_ptr, k_distant_ptr, k_t, v_t, k_distant_t, length, sink_size, recent_size, log2_scale,
        b6, b7 - b6, 0, 0, 0, 0, DIAGONAL, DIM, PADDED, KEY_TILE, DISTANT, WINDOW_ONLY,
    )  # fmt: skip
    _store(dq_ptr + b * dq_b + h * dq_h, dq_t, first, length, dq * scale, QUERY_TILE, DIM, PADDED)


@triton.jit
def _key_grad_tiles(
    dk,
    dv,
    dk_distant,
    k,
    v,
    k_distant,
    keys,
    spans_ptr,
    q_ptr,
    q_distant_ptr,
    grad_out_ptr,
    lse_ptr,
    correction_ptr,
    q_h,
    q_t,
    q_distant_h,
    q_distant_t,
    grad_out_h,
    grad_out_t,
    groups,
    length,
    sink_size,
    recent_size,
    scale,
    start_0,
    count_0,
    start_1,
    count_1,
    KIND: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    DISTANT: tl.constexpr,
    WINDOW_ONLY: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Gradients of a tile of keys over two runs of tiles of one kind, for every query head of the group."""
    CHECK: tl.constexpr = KIND == BORDER or KIND == DIAGONAL
    count = count_0 + count_1
    # One loop over heads and tiles, so that the loads of the next head are under way before this one's end.
    for index in tl.range(0, groups * count):
        member = (index // tl.maximum(count, 1)).to(tl.int64)
        first = _tile_of(index % tl.maximum(count, 1), start_0, count_0, start_1, count_1, 0) * QUERY_TILE
        columns = first + tl.arange(0, QUERY_TILE)
        if KIND == FAR:
            base = q_distant_ptr + member * q_distant_h
            q = _load(base, q_distant_t, first, length, QUERY_TILE, DIM, PADDED, CHECK)
            logits = _multiply(k_distant, tl.trans(q))
        else:
            q = _load(q_ptr + member * q_h, q_t, first, length, QUERY_TILE, DIM, PADDED, CHECK)
            logits = _multiply(k, tl.trans(q))
        offsets = member * length + columns
        if CHECK:
            lse = tl.load(lse_ptr + offsets, mask=columns < length, other=float("inf"))
            correction = tl.load(correction_ptr + offsets, mask=columns < length, other=0.0)
            if SPANS:
                starts = tl.load(spans_ptr + columns, mask=columns < length, other=length)
                lse = tl.where(starts < length, lse, float("inf"))
            else:
                starts = tl.zeros([QUERY_TILE], tl.int32)
            visible, proximal = _pairs(columns[None, :], keys[:, None], starts[None, :], sink_size, recent_size)
            if KIND == BORDER and DISTANT:
                base = q_distant_ptr + member * q_distant_h
                q_distant = _load(base, q_distant_t, first, length, QUERY_TILE, DIM, PADDED, CHECK)
                logits = tl.where(proximal, logits, _multiply(k_distant, tl.trans(q_distant)))
            if WINDOW_ONLY:
                visible = visible & proximal
            logits = tl.where(visible, logits, -float("inf"))
        else:
            lse = tl.load(lse_ptr + offsets)
            correction = tl.load(correction_ptr + offsets)
        weights = tl.exp2(logits * scale - (lse * LOG2_E)[None, :])
        grad_out = _load(grad_out_ptr + member * grad_out_h, grad_out_t, first, length, QUERY_TILE, DIM, PADDED, CHECK)
        dv = _multiply_add(weights.to(q.dtype), grad_out, dv)
        grad = weights * (_multiply(v, tl.trans(grad_out)) - correction[None, :])
        if KIND == FAR:
            dk_distant = _multiply_add(grad.to(q.dtype), q, dk_distant)
        elif KIND == BORDER and DISTANT:
            dk = _multiply_add(tl.where(proximal, grad, 0.0).to(q.dtype), q, dk)
            dk_distant = _multiply_add(tl.where(proximal, 0.0, grad).to(q.dtype), q_distant, dk_distant)
        else:
            dk = _multiply_add(grad.to(q.dtype), q, dk)
    return dk, dv, dk_distant


@triton.jit
def _key_grad_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_distant_ptr,
    k_distant_ptr,
    spans_ptr,
    grad_out_ptr,
    lse_ptr,
    correction_ptr,
    dk_ptr,
    dv_ptr,
    dk_distant_ptr,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    q_distant_b,
    q_distant_h,
    q_distant_t,
    k_distant_b,
    k_distant_h,
    k_distant_t,
    grad_out_b,
    grad_out_h,
    grad_out_t,
    dk_b,
    dk_h,
    dk_t,
    dv_b,
    dv_h,
    dv_t,
    dk_distant_b,
    dk_distant_h,
    dk_distant_t,
    batch,
    kv_heads,
    groups,
    length,
    section,
    sink_size,
    recent_size,
    scale,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    DISTANT: tl.constexpr,
    WINDOW_ONLY: tl.constexpr,
    SPANS: tl.constexpr,
):
    """dk, dv and dk_distant of a tile of keys."""
    tile, flat_head = _program(tl.cdiv(length, KEY_TILE), batch * kv_heads, section)
    first = tile * KEY_TILE  # the first keys are seen by most queries
    row, head = flat_head // kv_heads, flat_head % kv_heads
    b, h, h_query = row.to(tl.int64), head.to(tl.int64), (head * groups).to(tl.int64)
    q_ptr += b * q_b + h_query * q_h
    grad_out_ptr += b * grad_out_b + h_query * grad_out_h
    lse_ptr += flat_head.to(tl.int64) * groups * length
    correction_ptr += flat_head.to(tl.int64) * groups * length
    keys, _, real, first_real, last_real, low, high = _query_tile(spans_ptr, row, first, length, KEY_TILE, SPANS)
    stop = length
    if SPANS:
        stops = spans_ptr + (batch + row).to(tl.int64) * length + keys
        stop = tl.max(tl.load(stops, mask=keys < length, other=0), 0)
        spans_ptr += row.to(tl.int64) * length
    b0, b1, b2, b3, b4, b5 = query_segments(
        first_real, last_real, low, high, stop, sink_size, recent_size, QUERY_TILE, WINDOW_ONLY
    )
    log2_scale = scale * LOG2_E

    v = _load(v_ptr + b * v_b + h * v_h, v_t, first, length, KEY_TILE, DIM, PADDED, True)
    dv = tl.zeros([KEY_TILE, PADDED], tl.float32)
    dk_distant = tl.zeros([KEY_TILE, PADDED], tl.float32)
    if DISTANT:
        q_distant_ptr += b * q_distant_b + h_query * q_distant_h
        base = k_distant_ptr + b * k_distant_b + h * k_distant_h
        k_distant = _load(base, k_distant_t, first, length, KEY_TILE, DIM, PADDED, True)
        _, dv, dk_distant = _key_grad_tiles(
            dk_distant, dv, dk_distant, k_distant, v, k_distant, keys, spans_ptr,
            q_ptr, q_distant_ptr, grad_out_ptr, lse_ptr, correction_ptr,
            q_h, q_t, q_distant_h, q_distant_t, grad_out_h, grad_out_t,
            groups, length, sink_size, recent_size, log2_scale,
            b3, b4 - b3, 0, 0, FAR, DIM, PADDED, QUERY_TILE, DISTANT, WINDOW_ONLY, SPANS,
        )  # fmt: skip
    k = _load(k_ptr + b * k_b + h * k_h, k_t, first, length, KEY_TILE, DIM, PADDED, True)
    if not DISTANT:
        k_distant = k
    dk = tl.zeros([KEY_TILE, PADDED], tl.float32)
    dk, dv, dk_distant = _key_grad_tiles(
        dk, dv, dk_distant, k, v, k_distant, keys, spans_ptr,
        q_ptr, q_distant_ptr, grad_out_ptr, lse_ptr, correction_ptr,
        q_h, q_t, q_distant_h, q_distant_t, grad_out_h, grad_out_t,
        groups, length, sink_size, recent_size, log2_scale,
        b2, b3 - b2, b4, b5 - b4, BORDER, DIM, PADDED, QUERY_TILE, DISTANT, WINDOW_ONLY, SPANS,
    )  # fmt: skip
    if DISTANT:
        base = dk_distant_ptr + b * dk_distant_b + h * dk_distant_h
        dk_distant = tl.where(real[:, None], dk_distant * scale, 0.0)
        _store(base, dk_distant_t, first, length, dk_distant, KEY_TILE, DIM, PADDED)
    dk, dv, _ = _key_grad_tiles(
        dk, dv, dk, k, v, k, keys, spans_ptr,
        q_ptr, q_distant_ptr, grad_out_ptr, lse_ptr, correction_ptr,
        q_h, q_t, q_distant_h, q_distant_t, grad_out_h, grad_out_t,
        groups, length, sink_size, recent_size, log2_scale,
        b1, b2 - b1, 0, 0, NEAR, DIM, PADDED, QUERY_TILE, DISTANT, WINDOW_ONLY, SPANS,
    )  # fmt: skip
    dk, dv, _ = _key_grad_tiles(
        dk, dv, dk, k, v, k, keys, spans_ptr,
        q_ptr, q_distant_ptr, grad_out_ptr, lse_ptr, correction_ptr,
        q_h, q_t, q_distant_h, q_distant_t, grad_out_h, grad_out_t,
        groups, length, sink_size, recent_size, log2_scale,
        b0, b1 - b0, 0, 0, DIAGONAL, DIM, PADDED, QUERY_TILE, DISTANT, WINDOW_ONLY, SPANS,
    )  # fmt: skip
    # Padded keys met the queries of their tile in the unmasked loops.
    _store(dk_ptr + b * dk_b + h * dk_h, dk_t, first, length, tl.where(real[:, None], dk * scale, 0.0),
           KEY_TILE, DIM, PADDED)  # fmt: skip
    _store(dv_ptr + b * dv_b + h * dv_h, dv_t, first, length, tl.where(real[:, None], dv, 0.0),
           KEY_TILE, DIM, PADDED)  # fmt: skip


# Launches


class Launch(NamedTuple):
    query_tile: int
    key_tile: int
    warps: int
    stages: int


# By (kernel, head dimension rounded up to 64, 128 or 256, bytes of a number). Shared memory is what limits: the entries
# were compiled for compute capability 9.0, where a block has 227 KB, and are the largest tiles that neither pass it
# nor spill registers to speak of. None was timed: no GPU was at hand.
HOPPER = {
    ("forward", 64, 2): Launch(128, 64, 8, 3),
    ("forward", 128, 2): Launch(128, 64, 8, 3),
    ("forward", 256, 2): Launch(64, 32, 8, 2),
    ("query_grad", 64, 2): Launch(128, 64, 8, 2),
    ("query_grad", 128, 2): Launch(128, 64, 8, 2),
    ("query_grad", 256, 2): Launch(64, 32, 8, 2),
    ("key_grad", 64, 2): Launch(64, 128, 8, 2),
    ("key_grad", 128, 2): Launch(64, 64, 8, 2),
    ("key_grad", 256, 2): Launch(32, 32, 8, 2),
}


def launch_of(kernel: str, padded: int, itemsize: int, device: torch.device) -> Launch:
    """Tiles, warps and stages of a kernel ("forward", "query_grad" or "key_grad") on a device."""
    return HOPPER[kernel, max(padded, 64), itemsize]


# Heads whose keys and values fit here are computed together, so that the L2 cache serves their queries.
SECTION_BYTES = 24 * 2**20


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


def _unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _empty_like(tensor: Tensor) -> Tensor:
    """Uninitialised, in the tensor's own layout where that has a head dimension of stride 1."""
    empty = torch.empty_like(tensor)
    return empty if empty.stride(-1) == 1 else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


class _Problem:
    """What all three kernels are told, from the arguments of the operations."""

    def __init__(self, q, k, v, q_distant, k_distant, spans, sink_size, recent_size, scale, window_only):
        self.batch, self.heads, self.length, self.dim = q.shape
        self.kv_heads = k.shape[1]
        self.is_empty = q.numel() == 0
        # Within the window and the sinks every pair is proximal. Without distant pairs, all count as recent.
        self.distant = q_distant is not None and self.length > sink_size + recent_size
        self.window_only = window_only and self.length > sink_size + recent_size
        if not (self.distant or self.window_only):
            sink_size, recent_size = 0, self.length
        if not self.distant:
            q_distant, k_distant = q, k
        self.inputs = tuple(_unit_stride(tensor) for tensor in (q, k, v, q_distant, k_distant))
        self.spans = spans
        self.sizes = (sink_size, recent_size, scale)
        self.device, self.itemsize = q.device, q.itemsize

    def run(self, kernel, name: str, pointers: tuple, strides: tuple[int, ...], **constants: bool) -> None:
        padded = max(16, triton.next_power_of_2(self.dim))
        launch = launch_of(name, padded, self.itemsize, self.device)
        groups = self.heads // self.kv_heads
        # The kernel of the keys runs once per KV head, the others once per query head.
        own_tile, heads, unit = launch.query_tile, self.heads, groups
        if name == "key_grad":
            own_tile, heads, unit = launch.key_tile, self.kv_heads, 1
        head_bytes = 3 * self.length * self.dim * self.itemsize
        section = min(max(SECTION_BYTES // head_bytes, 1) * unit, self.batch * heads)
        spans = self.spans if self.spans is not None else self.inputs[0]
        with torch.device(self.device):
            kernel[(triton.cdiv(self.length, own_tile) * self.batch * heads,)](
                *self.inputs,
                spans,
                *pointers,
                *strides,
                self.batch,
                heads,
                groups,
                self.length,
                section,
                *self.sizes,
                DIM=self.dim,
                PADDED=padded,
                QUERY_TILE=launch.query_tile,
                KEY_TILE=launch.key_tile,
                DISTANT=self.distant,
                WINDOW_ONLY=self.window_only,
                SPANS=self.spans is not None,
                **constants,
                num_warps=launch.warps,
                num_stages=launch.stages,
                enable_fp_fusion=True,
            )


# The two operations: opaque to torch.compile, with results of known shape


@torch.library.custom_op("pod_kernels::fused_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_distant: Tensor | None,
    k_distant: Tensor | None,
    spans: Tensor | None,
    sink_size: int,
    recent_size: int,
    scale: float,
    window_only: bool,
    want_gate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    problem = _Problem(q, k, v, q_distant, k_distant, spans, sink_size, recent_size, scale, window_only)
    out, lse, gate = _empty_results(q, want_gate)
    if want_gate and not problem.distant:
        gate.fill_(1.0)
    if not problem.is_empty:
        strides = _strides(*problem.inputs, out)
        problem.run(_forward_kernel, "forward", (out, lse, gate), strides, GATE=want_gate and problem.distant)
    return out, lse, gate


def _empty_results(q: Tensor, want_gate: bool) -> tuple[Tensor, Tensor, Tensor]:
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    gate = torch.empty(q.shape[:3] if want_gate else (0,), dtype=torch.float32, device=q.device)
    return _empty_like(q), lse, gate


@_forward.register_fake
def _(q, k, v, q_distant, k_distant, spans, sink_size, recent_size, scale, window_only, want_gate):
    return _empty_results(q, want_gate)


@torch.library.custom_op("pod_kernels::fused_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_distant: Tensor | None,
    k_distant: Tensor | None,
    spans: Tensor | None,
    out: Tensor,
    lse: Tensor,
    sink_size: int,
    recent_size: int,
    scale: float,
    window_only: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    problem = _Problem(q, k, v, q_distant, k_distant, spans, sink_size, recent_size, scale, window_only)
    grads = dq, dk, dv, dq_distant, dk_distant = _empty_grads(q, k, v, q_distant, k_distant)
    if not problem.distant:
        dq_distant.zero_()
        dk_distant.zero_()
        dq_distant, dk_distant = dq, dk  # pointers that are not used
    if not problem.is_empty:
        grad_out = _unit_stride(grad_out)
        correction = torch.empty_like(lse)
        pointers = (out, grad_out, lse, correction, dq, dq_distant)
        strides = _strides(*problem.inputs, out, grad_out, dq, dq_distant)
        problem.run(_query_grad_kernel, "query_grad", pointers, strides)
        pointers = (grad_out, lse, correction, dk, dv, dk_distant)
        strides = _strides(*problem.inputs, grad_out, dk, dv, dk_distant)
        problem.run(_key_grad_kernel, "key_grad", pointers, strides)
    return grads


def _empty_grads(*inputs: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(inputs[0].new_empty(0) if tensor is None else _empty_like(tensor) for tensor in inputs)


@_backward.register_fake
def _(grad_out, q, k, v, q_distant, k_distant, spans, out, lse, sink_size, recent_size, scale, window_only):
    return _empty_grads(q, k, v, q_distant, k_distant)


def _keep(ctx, inputs, output) -> None:
    *tensors, sink_size, recent_size, scale, window_only, _ = inputs
    out, lse, _ = output
    ctx.save_for_backward(*tensors, out, lse)
    ctx.options = (sink_size, recent_size, scale, window_only)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_out, grad_lse, grad_gate):
    if grad_out is None:
        return (None,) * 11
    grads = _backward(grad_out, *ctx.saved_tensors, *ctx.options)
    needed = ctx.needs_input_grad[:5]
    return (*(grad if need else None for grad, need in zip(grads, needed, strict=True)), *(None,) * 6)


_forward.register_autograd(_differentiate, setup_context=_keep)


def sequence_spans(
    batch: int, length: int, lengths: Tensor | None, document_ids: Tensor | None, device: torch.device
) -> Tensor | None:
    """Where each token's sequence begins and ends, without a read on the host.

    Args:
        lengths: [B] real tokens of each row, right-aligned; taken as 0..T where they are outside.
        document_ids: [B, T]; each run of one id >= 0 is a document, -1 is padding.

    Returns:
        [2, B, T] int32: the first column of the sequence, T at padding; the column after its last, 0 at padding. None
        when every row is one sequence.
    """
    if lengths is None and document_ids is None:
        return None
    column = torch.arange(length, device=device).expand(batch, length)
    if lengths is not None:
        starts = (length - lengths.to(device=device, dtype=torch.long).clamp(0, length))[:, None].expand(batch, length)
        stops, is_padding = torch.full_like(column, length), column < starts
    else:
        document_ids = document_ids.to(device)
        changes = document_ids[:, 1:] != document_ids[:, :-1]
        begins = torch.nn.functional.pad(changes, (1, 0), value=True)
        ends = torch.nn.functional.pad(changes, (0, 1), value=True)
        starts = torch.where(begins, column, 0).cummax(dim=1).values
        stops = torch.where(ends, column + 1, length).flip(1).cummin(dim=1).values.flip(1)
        is_padding = document_ids < 0
    spans = torch.stack([starts.masked_fill(is_padding, length), stops.masked_fill(is_padding, 0)])
    return spans.to(torch.int32)


def unavailable(q: Tensor) -> str | None:
    """Why the kernels cannot run on tensors like this one; None when they can."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    if q.dtype not in dtypes:
        return f"it computes float32, float16 and bfloat16, and q is {q.dtype}"
    if q.shape[-1] > 256:
        return f"its head dimensions end at 256, and q has {q.shape[-1]}"
    if INTERPRETED:
        if q.dtype == torch.bfloat16:
            return "triton's interpreter (TRITON_INTERPRET=1) multiplies bfloat16 wrongly without an error"
        return None
    if q.device.type != "cuda":
        return f"it needs a CUDA device, and q is on {q.device} (TRITON_INTERPRET=1, set early, interprets it on a CPU)"
    if torch.version.hip is not None:
        return "it was written for NVIDIA GPUs, and this torch is built for AMD's"
    capability = torch.cuda.get_device_capability(q.device)
    if capability < (8, 0):
        return f"it needs compute capability 8.0, and {q.device} has {capability[0]}.{capability[1]}"
    return None


def shared_score_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_distant: Tensor | None = None,
    k_distant: Tensor | None = None,
    *,
    sink_size: int,
    recent_size: int,
    scale: float | None = None,
    lengths: Tensor | None = None,
    document_ids: Tensor | None = None,
    window_only: bool = False,
    return_lse: bool = False,
    return_gate: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Causal attention whose distant logits come from another layer's queries and keys, in one kernel.

    Same meaning as `reference.shared_score_attention`. Accumulates in float32. Once differentiable, deterministic. The
    host reads nothing from the device: `lengths` are clamped to 0..T, and every run of one document id is a document.

    Args:
        q: [B, H, T, D] queries, after RoPE; float32, float16 or bfloat16, D at most 256, any strides.
        k, v: [B, H_kv, T, D] keys (after RoPE) and values.
        q_distant, k_distant: [B, H, T, D] and [B, H_kv, T, D], the anchor layer's, for distant pairs; None for both is
            plain causal attention.
        sink_size: number of first tokens that are always proximal, >= 0.
        recent_size: number of last tokens, the current one included, that are proximal, >= 1.
        scale: factor on every logit, positive; D ** -0.5 when None.
        lengths: [B] real tokens of each row, right-aligned (left padding).
        document_ids: [B, T] non-decreasing, -1 padding; tokens see their own document only.
        window_only: distant pairs do not count at all: window attention with sinks.
        return_lse, return_gate: also return these, in this order.

    Returns:
        out [B, H, T, D] in q's dtype, zero at padding. lse [B, H, T] float32: log of the sum of exp of the logits, -inf
        at padding. gate [B, H, T] float32: the share of the softmax on proximal keys, 1 at padding. Neither lse nor
        gate carries a gradient.

    Raises:
        ValueError: shapes, dtypes or sizes do not fit, or the kernels cannot run on this device; says which.
    """
    reference.check_inputs(q, k, v, q_distant, k_distant, sink_size, recent_size, lengths, document_ids, window_only)
    reason = unavailable(q)
    if reason is None and v.shape[-1] != q.shape[-1]:
        reason = f"values must have q's head dimension ({q.shape[-1]}), and have {v.shape[-1]}"
    if reason is None and scale is not None and not scale > 0:
        reason = f"scale must be positive, and is {scale}"
    if reason is not None:
        raise ValueError(f"backend 'fused' cannot run this: {reason}. Choose backend 'composed'")
    if return_gate and q_distant is None and not window_only:
        q_distant, k_distant = q, k  # its own scores, split where shared ones are
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    spans = sequence_spans(q.shape[0], q.shape[2], lengths, document_ids, q.device)
    options = (sink_size, recent_size, scale, window_only, return_gate)
    out, lse, gate = _forward(q, k, v, q_distant, k_distant, spans, *options)
    results = [out]
    if return_lse:
        results.append(lse.detach())
    if return_gate:
        results.append(gate.detach())
    return results[0] if len(results) == 1 else tuple(results)
