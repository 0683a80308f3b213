"""Shared-score attention in one online softmax over two sources of logits: Triton kernels, forward and backward.

Never imported before it is used: importing it imports triton (`pod_kernels.attention` does so when it runs it).

The pairs (query i, key j) of PoD (arXiv 2412.02252, Eq. 3 and 4) are taken in tiles, first those with distant pairs
(logits from q_distant and k_distant), then those with proximal ones (from q and k). In a plain tile all pairs belong
to the source and no mask is needed; the others, on a border (of the sinks, the window, the diagonal, a document), are
masked, and only these may be visited for both sources. Along one row of tiles of a long sequence, left to right:

    distant                   masked  plain ............... plain  masked
    proximal  masked (sinks)                                       masked (window)  plain .. plain  masked (diagonal)

Where each run begins and ends follows from the first and last token of a tile (`distant_keys`, `proximal_keys`, and
for a tile of keys `distant_queries`, `proximal_queries`), so that no empty tile is visited. The peak and the sum of the
online softmax go on from one source to the next, and what the first left is the distant share that the gate needs.
One source at a time also means that only its accumulators occupy registers.

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

from pod_kernels.problem import Problem
from pod_kernels.sequences import sequence_spans

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # as it was when the kernels below were made

# Numbers whose values are no reason to compile again.
ANY = ["batch", "heads", "kv_heads", "groups", "length", "section", "S", "R", "scale"]
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NEVER = tl.constexpr(2**30)


# Which tiles are visited: three runs of masked tiles and one of plain ones, each as (first tile, number of tiles).
# S is sink_size and R is recent_size. `first` and `last` are the columns of a tile's first and last real token (last is
# -1 where there is none), `low` and `high` the columns where the sequences of these two begin. Where the two differ,
# several documents meet in the tile, and all is masked; if it is more than twice as long as the tiles of the other
# side, one between two documents' pairs may be empty.


@triton.jit
def _clamp(value, low, high):
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit
def distant_keys(columns, starts, real, first, last, low, high, S, R, KEY_TILE: tl.constexpr, SPANS: tl.constexpr):
    """Tiles of keys with distant pairs for a tile of queries; `columns`, `starts`, `real` hold its queries."""
    last_low = last
    other_begin, other_end = 0, 0
    if SPANS:
        # The queries of the first sequence, whose keys may lie far back, and those of the others, which begin here.
        last_low = tl.max(tl.where(real & (starts == low), columns, -1), 0)
        is_other = real & (starts > low) & (columns - R >= starts + S)
        other_begin = tl.min(tl.where(is_other, starts + S, NEVER), 0) // KEY_TILE
        other_end = tl.cdiv(tl.max(tl.where(is_other, columns - R + 1, 0), 0), KEY_TILE)
    begin = (low + S) // KEY_TILE
    end = tl.where(last_low - R >= low + S, tl.cdiv(tl.maximum(last_low - R + 1, 0), KEY_TILE), begin)
    # All keys are past the sinks, and none is recent for any query.
    plain = tl.minimum(tl.where(low == high, tl.cdiv(low + S, KEY_TILE), end), end)
    plain_end = _clamp(tl.maximum(first - R + 1, 0) // KEY_TILE, plain, end)
    other_begin = tl.maximum(other_begin, end)
    other = tl.maximum(other_end - other_begin, 0)
    return begin, plain - begin, plain_end, end - plain_end, other_begin, other, plain, plain_end - plain


@triton.jit
def proximal_keys(columns, starts, real, first, last, low, high, S, R, KEY_TILE: tl.constexpr, SPANS: tl.constexpr):
    """Tiles of keys with proximal pairs for a tile of queries."""
    last_low = last
    if SPANS:
        last_low = tl.max(tl.where(real & (starts == low), columns, -1), 0)
    end = tl.cdiv(last + 1, KEY_TILE)
    begin = tl.minimum(low // KEY_TILE, end)
    sink_end = tl.cdiv(tl.minimum(low + S, last_low + 1), KEY_TILE)
    sink_end = tl.where(S > 0, _clamp(sink_end, begin, end), begin)
    window = _clamp(tl.maximum(first - R + 1, low) // KEY_TILE, sink_end, end)
    # All keys are in the window of every query, and in its sequence; then: seen by every query.
    plain = tl.maximum(tl.cdiv(tl.maximum(last - R + 1, 0), KEY_TILE), tl.cdiv(low, KEY_TILE))
    plain = tl.where(low == high, _clamp(plain, window, end), end)
    plain_end = _clamp((first + 1) // KEY_TILE, plain, end)
    return begin, sink_end - begin, window, plain - window, plain_end, end - plain_end, plain, plain_end - plain


@triton.jit
def distant_queries(
    columns,
    starts,
    stops,
    real,
    first,
    last,
    low,
    high,
    stop,
    S,
    R,
    QUERY_TILE: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Tiles of queries with distant pairs for a tile of keys; `stop` is the column after the last one's sequence."""
    other_begin, other_end = 0, 0
    if SPANS:
        # The keys of all sequences but the last, whose queries lie before the tile's end.
        is_other = real & (starts < high) & (columns >= starts + S) & (columns + R < stops)
        other_begin = tl.min(tl.where(is_other, columns + R, NEVER), 0) // QUERY_TILE
        other_end = tl.cdiv(tl.max(tl.where(is_other, stops, 0), 0), QUERY_TILE)
        other_begin = tl.minimum(other_begin, other_end)
    first_distant = tl.maximum(first, high + S)
    begin = tl.maximum((first_distant + R) // QUERY_TILE, other_end)
    any_distant = (first_distant <= last) & (first_distant + R < stop)
    end = tl.where(any_distant, tl.maximum(tl.cdiv(stop, QUERY_TILE), begin), begin)
    # No key is a sink, and none is recent for any query; then: no query is of a later sequence.
    is_plain = (low == high) & (first >= low + S)
    plain = tl.where(is_plain, _clamp(tl.cdiv(last + R, QUERY_TILE), begin, end), end)
    plain_end = _clamp(stop // QUERY_TILE, plain, end)
    other = other_end - other_begin
    return begin, plain - begin, plain_end, end - plain_end, other_begin, other, plain, plain_end - plain


@triton.jit
def proximal_queries(first, last, low, high, stop, S, R, QUERY_TILE: tl.constexpr):
    """Tiles of queries with proximal pairs for a tile of keys; `stop` is the column after the last one's sequence."""
    has_sinks = tl.maximum(first, high) < high + S
    end = tl.cdiv(tl.where(has_sinks, stop, tl.minimum(stop, last + R)), QUERY_TILE)
    begin = tl.minimum(first // QUERY_TILE, end)
    # All keys are seen by every query; then: in its window (or sinks), and no query is of a later sequence.
    plain = tl.where(low == high, _clamp(tl.cdiv(last, QUERY_TILE), begin, end), end)
    window = tl.where(last < low + S, NEVER, (first + R) // QUERY_TILE)
    plain_end = _clamp(tl.minimum(window, stop // QUERY_TILE), plain, end)
    return begin, plain - begin, plain_end, end - plain_end, 0, 0, plain, plain_end - plain


@triton.jit
def _tile_of(index, start_0, count_0, start_1, count_1, start_2):
    """The index-th tile of three runs, one after the other."""
    second = index - count_0
    third = second - count_1
    return tl.where(second < 0, start_0 + index, tl.where(third < 0, start_1 + second, start_2 + third))


@triton.jit
def _wanted(rows, columns, starts, S, R, DISTANT: tl.constexpr):
    """Which pairs are visible and of the source; all broadcast against one another."""
    if DISTANT:
        return (columns >= starts + S) & (rows - columns >= R)
    else:
        return (columns <= rows) & (columns >= starts) & ((columns < starts + S) | (rows - columns < R))


@triton.jit
def _program(tiles, heads, section):
    """(tile, head of all rows) of this program: `section` heads together, in each of these all heads of a tile."""
    program = tl.program_id(0)
    first = program // (section * tiles) * section
    width = tl.minimum(section, heads - first)
    rest = program - first * tiles
    return rest // width, first + rest % width


@triton.jit
def _tokens(spans, row, first, length, TILE: tl.constexpr, SPANS: tl.constexpr):
    """Columns and starts of a tile's tokens, which of them are real; first, last, low and high as above."""
    columns = first + tl.arange(0, TILE)
    if SPANS:
        starts = tl.load(spans + row.to(tl.int64) * length + columns, mask=columns < length, other=length)
        real = starts < length
        first_real = tl.min(tl.where(real, columns, length), 0)
        last_real = tl.max(tl.where(real, columns, -1), 0)
        return columns, starts, real, first_real, last_real, tl.min(starts, 0), tl.max(tl.where(real, starts, 0), 0)
    else:
        starts = tl.zeros([TILE], tl.int32)
        return columns, starts, columns < length, first, tl.minimum(first + TILE, length) - 1, 0, 0


@triton.jit
def _load(
    base, stride, first, wanted, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, CHECK: tl.constexpr
):
    """[ROWS, PADDED] from row `first` on; zero beyond DIM, and in rows not `wanted` where that is to be checked."""
    rows, dims = tl.arange(0, ROWS), tl.arange(0, PADDED)
    # 64 bits: a token's offset in a sequence of a million passes 2 ** 31.
    pointers = base + first.to(tl.int64) * stride + rows[:, None] * stride + dims[None, :]
    if CHECK and DIM != PADDED:
        return tl.load(pointers, mask=wanted[:, None] & (dims < DIM)[None, :], other=0.0)
    elif CHECK:
        return tl.load(pointers, mask=wanted[:, None], other=0.0)
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


# Forward


@triton.jit
def _attend(
    out,
    peak,
    total,
    q,
    columns,
    starts,
    k_ptr,
    v_ptr,
    k_t,
    v_t,
    length,
    S,
    R,
    scale,
    start_0,
    count_0,
    start_1,
    count_1,
    start_2,
    count_2,
    MASKED: tl.constexpr,
    DISTANT: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """The online softmax of a tile of queries over three runs of tiles of keys."""
    for index in tl.range(0, count_0 + count_1 + count_2):
        first = _tile_of(index, start_0, count_0, start_1, count_1, start_2) * KEY_TILE
        keys = first + tl.arange(0, KEY_TILE)
        k = _load(k_ptr, k_t, first, keys < length, KEY_TILE, DIM, PADDED, MASKED)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            wanted = _wanted(columns[:, None], keys[None, :], starts[:, None], S, R, DISTANT)
            logits = tl.where(wanted, logits, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1) * scale)
        # A query that has seen no key yet: -inf - -inf would be NaN.
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak) if MASKED else new_peak
        weights = tl.exp2(logits * scale - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weights, 1)
        v = _load(v_ptr, v_t, first, keys < length, KEY_TILE, DIM, PADDED, MASKED)
        out = tl.dot(weights.to(v.dtype), v, out * fade[:, None], input_precision="ieee")
        peak = new_peak
    return out, peak, total


@triton.jit(do_not_specialize=ANY)
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
    S,
    R,
    scale,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    DISTANT: tl.constexpr,
    SPANS: tl.constexpr,
    GATE: tl.constexpr,
):
    tiles = tl.cdiv(length, QUERY_TILE)
    tile, flat_head = _program(tiles, batch * heads, section)
    begin = (tiles - 1 - tile) * QUERY_TILE  # the longest rows of tiles first
    row, head = flat_head // heads, flat_head % heads
    b, h, h_kv = row.to(tl.int64), head.to(tl.int64), (head // groups).to(tl.int64)
    k_ptr += b * k_b + h_kv * k_h
    v_ptr += b * v_b + h_kv * v_h
    columns, starts, real, first, last, low, high = _tokens(spans_ptr, row, begin, length, QUERY_TILE, SPANS)
    scale *= LOG2_E

    out = tl.zeros([QUERY_TILE, PADDED], tl.float32)
    peak = tl.full([QUERY_TILE], -float("inf"), tl.float32)
    total = tl.zeros([QUERY_TILE], tl.float32)
    if DISTANT:
        k_distant_ptr += b * k_distant_b + h_kv * k_distant_h
        base = q_distant_ptr + b * q_distant_b + h * q_distant_h
        q_distant = _load(base, q_distant_t, begin, real, QUERY_TILE, DIM, PADDED, True)
        s0, n0, s1, n1, s2, n2, plain, count = distant_keys(
            columns, starts, real, first, last, low, high, S, R, KEY_TILE, SPANS
        )
        out, peak, total = _attend(
            out, peak, total, q_distant, columns, starts, k_distant_ptr, v_ptr, k_distant_t, v_t, length, S, R, scale,
            s0, n0, s1, n1, s2, n2, True, True, DIM, PADDED, KEY_TILE,
        )  # fmt: skip
        out, peak, total = _attend(
            out, peak, total, q_distant, columns, starts, k_distant_ptr, v_ptr, k_distant_t, v_t, length, S, R, scale,
            plain, count, 0, 0, 0, 0, False, True, DIM, PADDED, KEY_TILE,
        )  # fmt: skip
    distant_peak, distant_total = peak, total
    q = _load(q_ptr + b * q_b + h * q_h, q_t, begin, real, QUERY_TILE, DIM, PADDED, True)
    s0, n0, s1, n1, s2, n2, plain, count = proximal_keys(
        columns, starts, real, first, last, low, high, S, R, KEY_TILE, SPANS
    )
    out, peak, total = _attend(
        out, peak, total, q, columns, starts, k_ptr, v_ptr, k_t, v_t, length, S, R, scale,
        plain, count, 0, 0, 0, 0, False, False, DIM, PADDED, KEY_TILE,
    )  # fmt: skip
    out, peak, total = _attend(
        out, peak, total, q, columns, starts, k_ptr, v_ptr, k_t, v_t, length, S, R, scale,
        s0, n0, s1, n1, s2, n2, True, False, DIM, PADDED, KEY_TILE,
    )  # fmt: skip

    # Rows of padding saw nothing or, in an unmasked loop, what is not theirs.
    total = tl.where(real, total, 1.0)
    out = tl.where(real[:, None], out / total[:, None], 0.0)
    lse = tl.where(real, (peak + tl.log2(total)) * LN_2, -float("inf"))
    _store(out_ptr + b * out_b + h * out_h, out_t, begin, length, out, QUERY_TILE, DIM, PADDED)
    offsets = flat_head.to(tl.int64) * length + columns
    tl.store(lse_ptr + offsets, lse, mask=columns < length)
    if GATE:
        gate = 1.0 - distant_total * tl.exp2(distant_peak - tl.where(real, peak, 0.0)) / total
        tl.store(gate_ptr + offsets, tl.where(real, tl.maximum(gate, 0.0), 1.0), mask=columns < length)


# Backward


@triton.jit
def _query_grad(
    dq,
    q,
    grad_out,
    lse,
    correction,
    columns,
    starts,
    k_ptr,
    v_ptr,
    k_t,
    v_t,
    length,
    S,
    R,
    scale,
    start_0,
    count_0,
    start_1,
    count_1,
    start_2,
    count_2,
    MASKED: tl.constexpr,
    DISTANT: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """The gradient of a tile of queries over three runs of tiles of keys; the factor `scale` is still to come."""
    for index in tl.range(0, count_0 + count_1 + count_2):
        first = _tile_of(index, start_0, count_0, start_1, count_1, start_2) * KEY_TILE
        keys = first + tl.arange(0, KEY_TILE)
        k = _load(k_ptr, k_t, first, keys < length, KEY_TILE, DIM, PADDED, MASKED)
        v = _load(v_ptr, v_t, first, keys < length, KEY_TILE, DIM, PADDED, MASKED)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        grad_weights = tl.dot(grad_out, tl.trans(v), input_precision="ieee")
        weights = tl.exp2(logits * scale - lse[:, None])
        if MASKED:
            weights = tl.where(_wanted(columns[:, None], keys[None, :], starts[:, None], S, R, DISTANT), weights, 0.0)
        grad_logits = weights * (grad_weights - correction[:, None])
        dq = tl.dot(grad_logits.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=ANY)
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
    S,
    R,
    scale,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    DISTANT: tl.constexpr,
    SPANS: tl.constexpr,
):
    """dq and dq_distant of a tile of queries; also leaves rowsum(grad_out * out) to the kernel of the keys."""
    tiles = tl.cdiv(length, QUERY_TILE)
    tile, flat_head = _program(tiles, batch * heads, section)
    begin = (tiles - 1 - tile) * QUERY_TILE
    row, head = flat_head // heads, flat_head % heads
    b, h, h_kv = row.to(tl.int64), head.to(tl.int64), (head // groups).to(tl.int64)
    k_ptr += b * k_b + h_kv * k_h
    v_ptr += b * v_b + h_kv * v_h
    columns, starts, real, first, last, low, high = _tokens(spans_ptr, row, begin, length, QUERY_TILE, SPANS)

    out = _load(out_ptr + b * out_b + h * out_h, out_t, begin, real, QUERY_TILE, DIM, PADDED, True)
    base = grad_out_ptr + b * grad_out_b + h * grad_out_h
    grad_out = _load(base, grad_out_t, begin, real, QUERY_TILE, DIM, PADDED, True)
    correction = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
    offsets = flat_head.to(tl.int64) * length + columns
    tl.store(correction_ptr + offsets, correction, mask=columns < length)
    # A row of padding: every weight is exp2(logit - inf) = 0.
    lse = tl.load(lse_ptr + offsets, mask=columns < length, other=0.0)
    lse = tl.where(real, lse * LOG2_E, float("inf"))
    log2_scale = scale * LOG2_E

    if DISTANT:
        k_distant_ptr += b * k_distant_b + h_kv * k_distant_h
        base = q_distant_ptr + b * q_distant_b + h * q_distant_h
        q_distant = _load(base, q_distant_t, begin, real, QUERY_TILE, DIM, PADDED, True)
        s0, n0, s1, n1, s2, n2, plain, count = distant_keys(
            columns, starts, real, first, last, low, high, S, R, KEY_TILE, SPANS
        )
        dq_distant = tl.zeros([QUERY_TILE, PADDED], tl.float32)
        dq_distant = _query_grad(
            dq_distant, q_distant, grad_out, lse, correction, columns, starts,
            k_distant_ptr, v_ptr, k_distant_t, v_t, length, S, R, log2_scale,
            s0, n0, s1, n1, s2, n2, True, True, DIM, PADDED, KEY_TILE,
        )  # fmt: skip
        dq_distant = _query_grad(
            dq_distant, q_distant, grad_out, lse, correction, columns, starts,
            k_distant_ptr, v_ptr, k_distant_t, v_t, length, S, R, log2_scale,
            plain, count, 0, 0, 0, 0, False, True, DIM, PADDED, KEY_TILE,
        )  # fmt: skip
        base = dq_distant_ptr + b * dq_distant_b + h * dq_distant_h
        _store(base, dq_distant_t, begin, length, dq_distant * scale, QUERY_TILE, DIM, PADDED)
    q = _load(q_ptr + b * q_b + h * q_h, q_t, begin, real, QUERY_TILE, DIM, PADDED, True)
    s0, n0, s1, n1, s2, n2, plain, count = proximal_keys(
        columns, starts, real, first, last, low, high, S, R, KEY_TILE, SPANS
    )
    dq = tl.zeros([QUERY_TILE, PADDED], tl.float32)
    dq = _query_grad(
        dq, q, grad_out, lse, correction, columns, starts, k_ptr, v_ptr, k_t, v_t, length, S, R, log2_scale,
        plain, count, 0, 0, 0, 0, False, False, DIM, PADDED, KEY_TILE,
    )  # fmt: skip
    dq = _query_grad(
        dq, q, grad_out, lse, correction, columns, starts, k_ptr, v_ptr, k_t, v_t, length, S, R, log2_scale,
        s0, n0, s1, n1, s2, n2, True, False, DIM, PADDED, KEY_TILE,
    )  # fmt: skip
    _store(dq_ptr + b * dq_b + h * dq_h, dq_t, begin, length, dq * scale, QUERY_TILE, DIM, PADDED)


@triton.jit
def _key_grad(
    dk,
    dv,
    k,
    v,
    keys,
    spans_ptr,
    q_ptr,
    grad_out_ptr,
    lse_ptr,
    correction_ptr,
    q_h,
    q_t,
    grad_out_h,
    grad_out_t,
    groups,
    length,
    S,
    R,
    scale,
    start_0,
    count_0,
    start_1,
    count_1,
    start_2,
    count_2,
    MASKED: tl.constexpr,
    DISTANT: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Gradients of a tile of keys and values over three runs of tiles of queries, for every query head of the group."""
    count = count_0 + count_1 + count_2
    # One loop over heads and tiles, so that the next head's loads are under way before this one's tiles end.
    for index in tl.range(0, groups * count):
        member = (index // tl.maximum(count, 1)).to(tl.int64)
        first = _tile_of(index % tl.maximum(count, 1), start_0, count_0, start_1, count_1, start_2) * QUERY_TILE
        columns = first + tl.arange(0, QUERY_TILE)
        offsets = member * length + columns
        starts = columns * 0
        real = columns < length
        if MASKED:
            if SPANS:
                starts = tl.load(spans_ptr + columns, mask=real, other=length)
                real = starts < length
            # A row of padding: every weight is exp2(logit - inf) = 0.
            lse = tl.load(lse_ptr + offsets, mask=real, other=float("inf"))
            correction = tl.load(correction_ptr + offsets, mask=real, other=0.0)
        else:
            lse = tl.load(lse_ptr + offsets)
            correction = tl.load(correction_ptr + offsets)
        q = _load(q_ptr + member * q_h, q_t, first, real, QUERY_TILE, DIM, PADDED, MASKED)
        grad_out = _load(grad_out_ptr + member * grad_out_h, grad_out_t, first, real, QUERY_TILE, DIM, PADDED, MASKED)
        logits = tl.dot(k, tl.trans(q), input_precision="ieee")
        weights = tl.exp2(logits * scale - (lse * LOG2_E)[None, :])
        if MASKED:
            weights = tl.where(_wanted(columns[None, :], keys[:, None], starts[None, :], S, R, DISTANT), weights, 0.0)
        dv = tl.dot(weights.to(q.dtype), grad_out, dv, input_precision="ieee")
        grad_weights = tl.dot(v, tl.trans(grad_out), input_precision="ieee")
        grad_logits = weights * (grad_weights - correction[None, :])
        dk = tl.dot(grad_logits.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=ANY)
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
    S,
    R,
    scale,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    DISTANT: tl.constexpr,
    SPANS: tl.constexpr,
):
    """dk, dv and dk_distant of a tile of keys."""
    tile, flat_head = _program(tl.cdiv(length, KEY_TILE), batch * kv_heads, section)
    begin = tile * KEY_TILE  # the first keys are seen by most queries
    row, head = flat_head // kv_heads, flat_head % kv_heads
    b, h, h_query = row.to(tl.int64), head.to(tl.int64), (head * groups).to(tl.int64)
    q_ptr += b * q_b + h_query * q_h
    grad_out_ptr += b * grad_out_b + h_query * grad_out_h
    lse_ptr += flat_head.to(tl.int64) * groups * length
    correction_ptr += flat_head.to(tl.int64) * groups * length
    keys, starts, real, first, last, low, high = _tokens(spans_ptr, row, begin, length, KEY_TILE, SPANS)
    stops, stop = keys, length
    if SPANS:
        stops = tl.load(spans_ptr + (batch + row).to(tl.int64) * length + keys, mask=keys < length, other=0)
        stop = tl.max(stops, 0)
        spans_ptr += row.to(tl.int64) * length
    log2_scale = scale * LOG2_E

    v = _load(v_ptr + b * v_b + h * v_h, v_t, begin, real, KEY_TILE, DIM, PADDED, True)
    dv = tl.zeros([KEY_TILE, PADDED], tl.float32)
    if DISTANT:
        q_distant_ptr += b * q_distant_b + h_query * q_distant_h
        base = k_distant_ptr + b * k_distant_b + h * k_distant_h
        k_distant = _load(base, k_distant_t, begin, real, KEY_TILE, DIM, PADDED, True)
        s0, n0, s1, n1, s2, n2, plain, count = distant_queries(
            keys, starts, stops, real, first, last, low, high, stop, S, R, QUERY_TILE, SPANS
        )
        dk_distant = tl.zeros([KEY_TILE, PADDED], tl.float32)
        dk_distant, dv = _key_grad(
            dk_distant, dv, k_distant, v, keys, spans_ptr, q_distant_ptr, grad_out_ptr, lse_ptr, correction_ptr,
            q_distant_h, q_distant_t, grad_out_h, grad_out_t, groups, length, S, R, log2_scale,
            s0, n0, s1, n1, s2, n2, True, True, DIM, PADDED, QUERY_TILE, SPANS,
        )  # fmt: skip
        dk_distant, dv = _key_grad(
            dk_distant, dv, k_distant, v, keys, spans_ptr, q_distant_ptr, grad_out_ptr, lse_ptr, correction_ptr,
            q_distant_h, q_distant_t, grad_out_h, grad_out_t, groups, length, S, R, log2_scale,
            plain, count, 0, 0, 0, 0, False, True, DIM, PADDED, QUERY_TILE, SPANS,
        )  # fmt: skip
        base = dk_distant_ptr + b * dk_distant_b + h * dk_distant_h
        dk_distant = tl.where(real[:, None], dk_distant * scale, 0.0)
        _store(base, dk_distant_t, begin, length, dk_distant, KEY_TILE, DIM, PADDED)
    k = _load(k_ptr + b * k_b + h * k_h, k_t, begin, real, KEY_TILE, DIM, PADDED, True)
    s0, n0, s1, n1, s2, n2, plain, count = proximal_queries(first, last, low, high, stop, S, R, QUERY_TILE)
    dk = tl.zeros([KEY_TILE, PADDED], tl.float32)
    dk, dv = _key_grad(
        dk, dv, k, v, keys, spans_ptr, q_ptr, grad_out_ptr, lse_ptr, correction_ptr,
        q_h, q_t, grad_out_h, grad_out_t, groups, length, S, R, log2_scale,
        plain, count, 0, 0, 0, 0, False, False, DIM, PADDED, QUERY_TILE, SPANS,
    )  # fmt: skip
    dk, dv = _key_grad(
        dk, dv, k, v, keys, spans_ptr, q_ptr, grad_out_ptr, lse_ptr, correction_ptr,
        q_h, q_t, grad_out_h, grad_out_t, groups, length, S, R, log2_scale,
        s0, n0, s1, n1, s2, n2, True, False, DIM, PADDED, QUERY_TILE, SPANS,
    )  # fmt: skip
    # In the unmasked loops padded keys met the queries of their tile.
    dk, dv = tl.where(real[:, None], dk * scale, 0.0), tl.where(real[:, None], dv, 0.0)
    _store(dk_ptr + b * dk_b + h * dk_h, dk_t, begin, length, dk, KEY_TILE, DIM, PADDED)
    _store(dv_ptr + b * dv_b + h * dv_h, dv_t, begin, length, dv, KEY_TILE, DIM, PADDED)


# Launches


KERNELS = {"forward": _forward_kernel, "query_grad": _query_grad_kernel, "key_grad": _key_grad_kernel}


class Launch(NamedTuple):
    query_tile: int
    key_tile: int
    warps: int
    stages: int


# By (kernel, head dimension rounded up to 64, 128 or 256). None was timed, as no GPU was at hand. They were chosen by
# what the compiler makes of them without one: shared memory per block, spilled registers, and the instructions that the
# plain loops take per matrix product. A timed one replaces its entry.
#
# Half precision where a block has 227 KB of shared memory: compute capability 9.0 and 10.0.
HOPPER = {
    ("forward", 64): Launch(128, 128, 8, 2),
    ("forward", 128): Launch(128, 128, 8, 2),
    ("forward", 256): Launch(128, 32, 8, 3),
    ("query_grad", 64): Launch(128, 64, 8, 3),
    ("query_grad", 128): Launch(128, 64, 8, 3),
    ("query_grad", 256): Launch(128, 32, 8, 2),
    ("key_grad", 64): Launch(64, 128, 8, 2),
    ("key_grad", 128): Launch(64, 128, 8, 2),
    ("key_grad", 256): Launch(16, 64, 8, 2),
}
# Half precision on all others, where it is 99 KB or more.
OTHERS = {
    ("forward", 64): Launch(128, 64, 4, 3),
    ("forward", 128): Launch(128, 32, 8, 2),
    ("forward", 256): Launch(64, 32, 8, 1),
    ("query_grad", 64): Launch(64, 64, 4, 2),
    ("query_grad", 128): Launch(64, 32, 4, 2),
    ("query_grad", 256): Launch(32, 32, 8, 1),
    ("key_grad", 64): Launch(32, 128, 8, 2),
    ("key_grad", 128): Launch(32, 64, 4, 2),
    ("key_grad", 256): Launch(16, 32, 8, 2),
}
# float32, without tensor cores, as these round to less: registers are what limits.
SINGLE = {
    ("forward", 64): Launch(32, 32, 4, 2),
    ("forward", 128): Launch(32, 32, 8, 2),
    ("forward", 256): Launch(16, 16, 8, 2),
    ("query_grad", 64): Launch(32, 32, 8, 2),
    ("query_grad", 128): Launch(32, 32, 8, 2),
    ("query_grad", 256): Launch(16, 16, 8, 2),
    ("key_grad", 64): Launch(32, 32, 8, 2),
    ("key_grad", 128): Launch(16, 32, 8, 2),
    ("key_grad", 256): Launch(16, 16, 8, 2),
}


def launch_of(kernel: str, padded: int, itemsize: int, device: torch.device) -> Launch:
    """Tiles, warps and stages of a kernel ("forward", "query_grad" or "key_grad") on a device."""
    if INTERPRETED:
        return Launch(32, 32, 4, 1)
    if itemsize == 4:
        table = SINGLE
    else:
        table = HOPPER if torch.cuda.get_device_properties(device).major in (9, 10) else OTHERS
    return table[kernel, max(padded, 64)]


# Programs that stream the same keys and values (or queries and gradients) run together, and as many such groups at once
# as have theirs in the L2 cache.
SECTION_BYTES = 24 * 2**20


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


def _unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _empty_like(tensor: Tensor) -> Tensor:
    """Uninitialised, in the tensor's own layout where that has a head dimension of stride 1."""
    empty = torch.empty_like(tensor)
    return empty if empty.stride(-1) == 1 else _empty(tensor.shape, tensor.dtype, tensor.device)


class _Problem:
    """What all three kernels are told, from the arguments of the operations."""

    def __init__(self, q, k, v, q_distant, k_distant, spans, sink_size, recent_size, scale, window_only):
        self.batch, self.heads, self.length, self.dim = q.shape
        self.kv_heads = k.shape[1]
        self.is_empty = q.numel() == 0
        # Within the window and the sinks every pair is proximal. Without distant pairs, all count as recent.
        self.distant = q_distant is not None and self.length > sink_size + recent_size
        if not (self.distant or window_only):
            sink_size, recent_size = 0, self.length
        if not self.distant:
            q_distant, k_distant = q, k
        self.inputs = tuple(_unit_stride(tensor) for tensor in (q, k, v, q_distant, k_distant))
        self.spans = spans
        self.sizes = (min(sink_size, self.length), min(recent_size, self.length), scale)
        self.device, self.itemsize = q.device, q.itemsize

    def run(self, name: str, pointers: tuple, strides: tuple[int, ...], **constants: bool) -> None:
        padded = max(16, triton.next_power_of_2(self.dim))
        launch = launch_of(name, padded, self.itemsize, self.device)
        groups = self.heads // self.kv_heads
        # The kernel of the keys runs once per KV head, the others once per query head.
        own_tile, heads, together, streamed = launch.query_tile, self.heads, groups, 1
        if name == "key_grad":
            own_tile, heads, together, streamed = launch.key_tile, self.kv_heads, 1, groups
        streamed_bytes = 3 * streamed * self.length * self.dim * self.itemsize
        section = min(max(SECTION_BYTES // streamed_bytes, 1) * together, self.batch * heads)
        spans = self.spans if self.spans is not None else self.inputs[0]
        with torch.cuda.device_of(self.inputs[0]):
            KERNELS[name][(triton.cdiv(self.length, own_tile) * self.batch * heads,)](
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
        problem.run("forward", (out, lse, gate), strides, GATE=want_gate and problem.distant)
    return out, lse, gate


def _empty_results(q: Tensor, want_gate: bool) -> tuple[Tensor, Tensor, Tensor]:
    lse = _empty(q.shape[:3], torch.float32, q.device)
    gate = _empty(q.shape[:3] if want_gate else (0,), torch.float32, q.device)
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
        grad_out, out, lse = _unit_stride(grad_out), _unit_stride(out), lse.contiguous()
        correction = _empty(lse.shape, lse.dtype, lse.device)
        pointers = (out, grad_out, lse, correction, dq, dq_distant)
        strides = _strides(*problem.inputs, out, grad_out, dq, dq_distant)
        problem.run("query_grad", pointers, strides)
        pointers = (grad_out, lse, correction, dk, dv, dk_distant)
        strides = _strides(*problem.inputs, grad_out, dk, dv, dk_distant)
        problem.run("key_grad", pointers, strides)
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
    gpu = torch.cuda.get_device_properties(q.device)
    if gpu.major < 8:
        return f"it needs compute capability 8.0, and {gpu.name} has {gpu.major}.{gpu.minor}"
    return None


def attend(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and gate (empty unless it is asked for), in one kernel.

    Accumulates in float32. Once differentiable, deterministic. The host reads nothing from the device: `lengths` are
    clamped to 0..T, and every run of one document id is a document.

    Raises:
        ValueError: the kernels cannot run these tensors on this device; says why.
    """
    q, v, scale = problem.q, problem.v, problem.scale
    reason = unavailable(q)
    if reason is None and v.shape[-1] != q.shape[-1]:
        reason = f"values must have q's head dimension ({q.shape[-1]}), and have {v.shape[-1]}"
    if reason is None and not scale > 0:
        reason = f"scale must be positive, and is {scale}"
    if reason is not None:
        raise ValueError(f"backend 'fused' cannot run this: {reason}. Choose backend 'composed'")
    spans = sequence_spans(q.shape[0], q.shape[2], problem.lengths, problem.document_ids, q.device)
    out, lse, gate = _forward(*problem.sources, spans, *problem.sizes, problem.return_gate)
    return out, lse.detach(), gate.detach()
