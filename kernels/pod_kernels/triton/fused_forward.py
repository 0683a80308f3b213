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
    out,
    peak,
    total,
    q,
    columns,
    starts,
    k_head,
    v_head,
    length,
    S,
    R,
    scale,
    runs,
    MASKED: tl.constexpr,
    DISTANT: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """The online softmax of a tile of queries over three runs of tiles of keys."""
    for index in tl.range(0, runs[1] + runs[3] + runs[5]):
        first = tile_of(index, runs) * KEY_TILE
        keys = first + tl.arange(0, KEY_TILE)
        k = load(k_head, first, keys < length, KEY_TILE, DIM, PADDED, MASKED)
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
        v = load(v_head, first, keys < length, KEY_TILE, DIM, PADDED, MASKED)
        out = tl.dot(weights.to(v.dtype), v, out * fade[:, None], input_precision="ieee")
        peak = new_peak
    return out, peak, total


@triton.jit(do_not_specialize=ANY)
def forward_kernel(
    q,
    k,
    v,
    q_distant,
    k_distant,
    spans,
    out,
    lse,
    gate,
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
    """out, lse and gate of a tile of queries."""
    tiles = tl.cdiv(length, QUERY_TILE)
    tile, flat_head = program_of(tiles, batch * heads, section)
    begin = (tiles - 1 - tile) * QUERY_TILE  # the longest rows of tiles first
    row, head = flat_head // heads, flat_head % heads
    b, h, h_kv = row.to(tl.int64), head.to(tl.int64), (head // groups).to(tl.int64)
    k_head, v_head = head_of(k, b, h_kv), head_of(v, b, h_kv)
    queries = tokens(spans, row, begin, length, QUERY_TILE, SPANS)
    columns, starts, real = queries[0], queries[1], queries[2]
    scale *= LOG2_E

    sums = tl.zeros([QUERY_TILE, PADDED], tl.float32)
    peak = tl.full([QUERY_TILE], -float("inf"), tl.float32)
    total = tl.zeros([QUERY_TILE], tl.float32)
    if DISTANT:
        asked = load(head_of(q_distant, b, h), begin, real, QUERY_TILE, DIM, PADDED, True)
        far_head = head_of(k_distant, b, h_kv)
        masked, plain = distant_keys(queries, S, R, KEY_TILE, SPANS)
        sums, peak, total = _attend(
            sums, peak, total, asked, columns, starts, far_head, v_head, length, S, R, scale,
            masked, True, True, DIM, PADDED, KEY_TILE,
        )  # fmt: skip
        sums, peak, total = _attend(
            sums, peak, total, asked, columns, starts, far_head, v_head, length, S, R, scale,
            plain, False, True, DIM, PADDED, KEY_TILE,
        )  # fmt: skip
    distant_peak, distant_total = peak, total
    asked = load(head_of(q, b, h), begin, real, QUERY_TILE, DIM, PADDED, True)
    masked, plain = proximal_keys(queries, S, R, KEY_TILE, SPANS)
    sums, peak, total = _attend(
        sums, peak, total, asked, columns, starts, k_head, v_head, length, S, R, scale,
        plain, False, False, DIM, PADDED, KEY_TILE,
    )  # fmt: skip
    sums, peak, total = _attend(
        sums, peak, total, asked, columns, starts, k_head, v_head, length, S, R, scale,
        masked, True, False, DIM, PADDED, KEY_TILE,
    )  # fmt: skip

    # Rows of padding saw nothing or, in an unmasked loop, what is not theirs.
    total = tl.where(real, total, 1.0)
    sums = tl.where(real[:, None], sums / total[:, None], 0.0)
    store(head_of(out, b, h), begin, length, sums, QUERY_TILE, DIM, PADDED)
    offsets = flat_head.to(tl.int64) * length + columns
    log_sum = tl.where(real, (peak + tl.log2(total)) * LN_2, -float("inf"))
    tl.store(lse + offsets, log_sum, mask=columns < length)
    if GATE:
        share = 1.0 - distant_total * tl.exp2(distant_peak - tl.where(real, peak, 0.0)) / total
        tl.store(gate + offsets, tl.where(real, tl.maximum(share, 0.0), 1.0), mask=columns < length)
