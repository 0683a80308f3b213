"""The forward kernel of fused shared-score attention: one online softmax over two sources of logits.

The peak and the sum of the online softmax go on from one source to the next, and what the first left is the distant
share that the gate needs. One source at a time also means that only its accumulators occupy registers.
"""

import triton
import triton.language as tl

from pod_kernels.triton.fused_tiles import (
    ANY,
    distant_keys,
    head_of,
    load,
    program_of,
    proximal_keys,
    store,
    tile_of,
    tokens,
    wanted,
)
from pod_kernels.triton.softmax import LN_2, LOG2_E


@triton.jit
def _attend(
    state, q, queries, k_head, v_head, sizes, runs, MASKED: tl.constexpr, DISTANT: tl.constexpr, CUT: tl.constexpr
):
    """The online softmax of a tile of queries over three runs of tiles of keys."""
    out, peak, total = state
    columns, starts = queries[0], queries[1]
    length, S, R, scale = sizes
    for index in tl.range(0, runs[1] + runs[3] + runs[5]):
        first = tile_of(index, runs) * CUT.key_tile
        keys = first + tl.arange(0, CUT.key_tile)
        k = load(k_head, first, keys < length, CUT.key_tile, CUT, MASKED)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = wanted(columns[:, None], keys[None, :], starts[:, None], S, R, DISTANT)
            logits = tl.where(seen, logits, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1) * scale)
        # A query that has seen no key yet: -inf - -inf would be NaN.
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak) if MASKED else new_peak
        weights = tl.exp2(logits * scale - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weights, 1)
        v = load(v_head, first, keys < length, CUT.key_tile, CUT, MASKED)
        out = tl.dot(weights.to(v.dtype), v, out * fade[:, None], input_precision="ieee")
        peak = new_peak
    return out, peak, total


@triton.jit(do_not_specialize=ANY)
def forward_kernel(
    inputs,
    spans,
    results,
    batch,
    heads,
    groups,
    length,
    section,
    S,
    R,
    scale,
    CUT: tl.constexpr,
    DISTANT: tl.constexpr,
    SPANS: tl.constexpr,
    GATE: tl.constexpr,
):
    """The results out, lse and gate of a tile of queries."""
    q, k, v, q_distant, k_distant = inputs
    out, lse, gate = results
    tiles = tl.cdiv(length, CUT.query_tile)
    tile, flat_head = program_of(tiles, batch * heads, section)
    begin = (tiles - 1 - tile) * CUT.query_tile  # the longest rows of tiles first
    row, head = flat_head // heads, flat_head % heads
    b, h, h_kv = row.to(tl.int64), head.to(tl.int64), (head // groups).to(tl.int64)
    k_head, v_head = head_of(k, b, h_kv), head_of(v, b, h_kv)
    queries = tokens(spans, row, begin, length, CUT.query_tile, SPANS)
    columns, real = queries[0], queries[2]
    sizes = length, S, R, scale * LOG2_E

    sums = tl.full([CUT.query_tile, CUT.padded], 0.0, tl.float32)
    peak = tl.full([CUT.query_tile], -float("inf"), tl.float32)
    state = sums, peak, tl.full([CUT.query_tile], 0.0, tl.float32)
    if DISTANT:
        asked = load(head_of(q_distant, b, h), begin, real, CUT.query_tile, CUT, True)
        far_head = head_of(k_distant, b, h_kv)
        masked, plain = distant_keys(queries, S, R, CUT.key_tile, SPANS)
        state = _attend(state, asked, queries, far_head, v_head, sizes, masked, True, True, CUT)
        state = _attend(state, asked, queries, far_head, v_head, sizes, plain, False, True, CUT)
    _, distant_peak, distant_total = state
    asked = load(head_of(q, b, h), begin, real, CUT.query_tile, CUT, True)
    masked, plain = proximal_keys(queries, S, R, CUT.key_tile, SPANS)
    state = _attend(state, asked, queries, k_head, v_head, sizes, plain, False, False, CUT)
    state = _attend(state, asked, queries, k_head, v_head, sizes, masked, True, False, CUT)

    sums, peak, total = state
    # Rows of padding saw nothing or, in an unmasked loop, what is not theirs.
    total = tl.where(real, total, 1.0)
    sums = tl.where(real[:, None], sums / total[:, None], 0.0)
    store(head_of(out, b, h), begin, length, sums, CUT.query_tile, CUT)
    offsets = flat_head.to(tl.int64) * length + columns
    log_sum = tl.where(real, (peak + tl.log2(total)) * LN_2, -float("inf"))
    tl.store(lse + offsets, log_sum, mask=columns < length)
    if GATE:
        share = 1.0 - distant_total * tl.exp2(distant_peak - tl.where(real, peak, 0.0)) / total
        tl.store(gate + offsets, tl.where(real, tl.maximum(share, 0.0), 1.0), mask=columns < length)
