"""The backward kernels of fused shared-score attention.

Deterministic: one kernel owns a tile of queries (dq, dq_distant), the other a tile of keys (dk, dv, dk_distant) and
sums over the query heads that share it; nothing is added atomically. Each recomputes the weights as exp(logit - lse)
with the log-sum-exp of both sources together, so that no gradient flows through it.
"""

import triton
import triton.language as tl

from pod_kernels.triton.fused_tiles import (
    ANY,
    distant_keys,
    distant_queries,
    group_of,
    head_of,
    load,
    program_of,
    proximal_keys,
    proximal_queries,
    store,
    tile_of,
    tokens,
    wanted,
)
from pod_kernels.triton.softmax import LOG2_E


@triton.jit
def _query_grad(
    dq, q, given, queries, k_head, v_head, sizes, runs, MASKED: tl.constexpr, DISTANT: tl.constexpr, CUT: tl.constexpr
):
    """The gradient of a tile of queries over three runs of tiles of keys; the factor `scale` is still to come."""
    grad_out, lse, correction = given
    columns, starts = queries[0], queries[1]
    length, S, R, scale = sizes
    for index in tl.range(0, runs[1] + runs[3] + runs[5]):
        first = tile_of(index, runs) * CUT.key_tile
        keys = first + tl.arange(0, CUT.key_tile)
        k = load(k_head, first, keys < length, CUT.key_tile, CUT, MASKED)
        v = load(v_head, first, keys < length, CUT.key_tile, CUT, MASKED)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        grad_weights = tl.dot(grad_out, tl.trans(v), input_precision="ieee")
        weights = tl.exp2(logits * scale - lse[:, None])
        if MASKED:
            weights = tl.where(wanted(columns[:, None], keys[None, :], starts[:, None], S, R, DISTANT), weights, 0.0)
        grad_logits = weights * (grad_weights - correction[:, None])
        dq = tl.dot(grad_logits.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=ANY)
def query_grad_kernel(
    inputs,
    spans,
    known,
    grads,
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
):
    """dq and dq_distant of a tile of queries; also leaves rowsum(grad_out * out) to the kernel of the keys."""
    q, k, v, q_distant, k_distant = inputs
    out, grad_out, lse, correction = known
    dq, dq_distant = grads
    tiles = tl.cdiv(length, CUT.query_tile)
    tile, flat_head = program_of(tiles, batch * heads, section)
    begin = (tiles - 1 - tile) * CUT.query_tile
    row, head = flat_head // heads, flat_head % heads
    b, h, h_kv = row.to(tl.int64), head.to(tl.int64), (head // groups).to(tl.int64)
    k_head, v_head = head_of(k, b, h_kv), head_of(v, b, h_kv)
    queries = tokens(spans, row, begin, length, CUT.query_tile, SPANS)
    columns, real = queries[0], queries[2]

    result = load(head_of(out, b, h), begin, real, CUT.query_tile, CUT, True)
    grad = load(head_of(grad_out, b, h), begin, real, CUT.query_tile, CUT, True)
    row_sum = tl.sum(result.to(tl.float32) * grad.to(tl.float32), 1)
    offsets = flat_head.to(tl.int64) * length + columns
    tl.store(correction + offsets, row_sum, mask=columns < length)
    # A row of padding: every weight is exp2(logit - inf) = 0.
    log_sum = tl.load(lse + offsets, mask=columns < length, other=0.0)
    log_sum = tl.where(real, log_sum * LOG2_E, float("inf"))
    given, sizes = (grad, log_sum, row_sum), (length, S, R, scale * LOG2_E)

    if DISTANT:
        asked = load(head_of(q_distant, b, h), begin, real, CUT.query_tile, CUT, True)
        far_head = head_of(k_distant, b, h_kv)
        masked, plain = distant_keys(queries, S, R, CUT.key_tile, SPANS)
        sums = tl.full([CUT.query_tile, CUT.padded], 0.0, tl.float32)
        sums = _query_grad(sums, asked, given, queries, far_head, v_head, sizes, masked, True, True, CUT)
        sums = _query_grad(sums, asked, given, queries, far_head, v_head, sizes, plain, False, True, CUT)
        store(head_of(dq_distant, b, h), begin, length, sums * scale, CUT.query_tile, CUT)
    asked = load(head_of(q, b, h), begin, real, CUT.query_tile, CUT, True)
    masked, plain = proximal_keys(queries, S, R, CUT.key_tile, SPANS)
    sums = tl.full([CUT.query_tile, CUT.padded], 0.0, tl.float32)
    sums = _query_grad(sums, asked, given, queries, k_head, v_head, sizes, plain, False, False, CUT)
    sums = _query_grad(sums, asked, given, queries, k_head, v_head, sizes, masked, True, False, CUT)
    store(head_of(dq, b, h), begin, length, sums * scale, CUT.query_tile, CUT)


@triton.jit
def _key_grad(
    state, tile, given, sizes, runs, MASKED: tl.constexpr, DISTANT: tl.constexpr, CUT: tl.constexpr, SPANS: tl.constexpr
):
    """Gradients of a tile of keys and values over three runs of tiles of queries, for every query head of the group."""
    dk, dv = state
    k, v, keys = tile
    q, grad_out, lse, correction, spans = given
    groups, length, S, R, scale = sizes
    count = runs[1] + runs[3] + runs[5]
    # One loop over heads and tiles, so that the next head's loads are under way before this one's tiles end.
    for index in tl.range(0, groups * count):
        member = (index // tl.maximum(count, 1)).to(tl.int64)
        first = tile_of(index % tl.maximum(count, 1), runs) * CUT.query_tile
        columns = first + tl.arange(0, CUT.query_tile)
        offsets = member * length + columns
        starts = columns * 0
        real = columns < length
        if MASKED:
            if SPANS:
                starts = tl.load(spans + columns, mask=real, other=length)
                real = starts < length
            # A row of padding: every weight is exp2(logit - inf) = 0.
            log_sum = tl.load(lse + offsets, mask=real, other=float("inf"))
            row_sum = tl.load(correction + offsets, mask=real, other=0.0)
        else:
            log_sum = tl.load(lse + offsets)
            row_sum = tl.load(correction + offsets)
        asked = load((q[0] + member * q[1], q[2]), first, real, CUT.query_tile, CUT, MASKED)
        grad = load((grad_out[0] + member * grad_out[1], grad_out[2]), first, real, CUT.query_tile, CUT, MASKED)
        logits = tl.dot(k, tl.trans(asked), input_precision="ieee")
        weights = tl.exp2(logits * scale - (log_sum * LOG2_E)[None, :])
        if MASKED:
            weights = tl.where(wanted(columns[None, :], keys[:, None], starts[None, :], S, R, DISTANT), weights, 0.0)
        dv = tl.dot(weights.to(asked.dtype), grad, dv, input_precision="ieee")
        grad_weights = tl.dot(v, tl.trans(grad), input_precision="ieee")
        grad_logits = weights * (grad_weights - row_sum[None, :])
        dk = tl.dot(grad_logits.to(asked.dtype), asked, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=ANY)
def key_grad_kernel(
    inputs,
    spans,
    known,
    grads,
    batch,
    kv_heads,
    groups,
    length,
    section,
    S,
    R,
    scale,
    CUT: tl.constexpr,
    DISTANT: tl.constexpr,
    SPANS: tl.constexpr,
):
    """dk, dv and dk_distant of a tile of keys."""
    q, k, v, q_distant, k_distant = inputs
    grad_out, lse, correction = known
    dk, dv, dk_distant = grads
    tile, flat_head = program_of(tl.cdiv(length, CUT.key_tile), batch * kv_heads, section)
    begin = tile * CUT.key_tile  # the first keys are seen by most queries
    row, head = flat_head // kv_heads, flat_head % kv_heads
    b, h, h_query = row.to(tl.int64), head.to(tl.int64), (head * groups).to(tl.int64)
    grad_group = group_of(grad_out, b, h_query)
    lse += flat_head.to(tl.int64) * groups * length
    correction += flat_head.to(tl.int64) * groups * length
    held = tokens(spans, row, begin, length, CUT.key_tile, SPANS)
    keys, real = held[0], held[2]
    stops, stop = keys, length
    if SPANS:
        stops = tl.load(spans + (batch + row).to(tl.int64) * length + keys, mask=keys < length, other=0)
        stop = tl.max(stops, 0)
        spans += row.to(tl.int64) * length
    sizes = groups, length, S, R, scale * LOG2_E

    value = load(head_of(v, b, h), begin, real, CUT.key_tile, CUT, True)
    value_sums = tl.full([CUT.key_tile, CUT.padded], 0.0, tl.float32)
    if DISTANT:
        given = group_of(q_distant, b, h_query), grad_group, lse, correction, spans
        key = load(head_of(k_distant, b, h), begin, real, CUT.key_tile, CUT, True)
        masked, plain = distant_queries(held, stops, stop, S, R, CUT.query_tile, SPANS)
        state = tl.full([CUT.key_tile, CUT.padded], 0.0, tl.float32), value_sums
        state = _key_grad(state, (key, value, keys), given, sizes, masked, True, True, CUT, SPANS)
        state = _key_grad(state, (key, value, keys), given, sizes, plain, False, True, CUT, SPANS)
        key_sums, value_sums = state
        key_sums = tl.where(real[:, None], key_sums * scale, 0.0)
        store(head_of(dk_distant, b, h), begin, length, key_sums, CUT.key_tile, CUT)
    given = group_of(q, b, h_query), grad_group, lse, correction, spans
    key = load(head_of(k, b, h), begin, real, CUT.key_tile, CUT, True)
    masked, plain = proximal_queries(held, stop, S, R, CUT.query_tile)
    state = tl.full([CUT.key_tile, CUT.padded], 0.0, tl.float32), value_sums
    state = _key_grad(state, (key, value, keys), given, sizes, plain, False, False, CUT, SPANS)
    state = _key_grad(state, (key, value, keys), given, sizes, masked, True, False, CUT, SPANS)
    key_sums, value_sums = state
    # In the unmasked loops padded keys met the queries of their tile.
    key_sums, value_sums = tl.where(real[:, None], key_sums * scale, 0.0), tl.where(real[:, None], value_sums, 0.0)
    store(head_of(dk, b, h), begin, length, key_sums, CUT.key_tile, CUT)
    store(head_of(dv, b, h), begin, length, value_sums, CUT.key_tile, CUT)
