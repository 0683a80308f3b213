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
    dq,
    q,
    grad_out,
    lse,
    correction,
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
    """The gradient of a tile of queries over three runs of tiles of keys; the factor `scale` is still to come."""
    for index in tl.range(0, runs[1] + runs[3] + runs[5]):
        first = tile_of(index, runs) * KEY_TILE
        keys = first + tl.arange(0, KEY_TILE)
        k = load(k_head, first, keys < length, KEY_TILE, DIM, PADDED, MASKED)
        v = load(v_head, first, keys < length, KEY_TILE, DIM, PADDED, MASKED)
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
    q,
    k,
    v,
    q_distant,
    k_distant,
    spans,
    out,
    grad_out,
    lse,
    correction,
    dq,
    dq_distant,
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
    tile, flat_head = program_of(tiles, batch * heads, section)
    begin = (tiles - 1 - tile) * QUERY_TILE
    row, head = flat_head // heads, flat_head % heads
    b, h, h_kv = row.to(tl.int64), head.to(tl.int64), (head // groups).to(tl.int64)
    k_head, v_head = head_of(k, b, h_kv), head_of(v, b, h_kv)
    queries = tokens(spans, row, begin, length, QUERY_TILE, SPANS)
    columns, starts, real = queries[0], queries[1], queries[2]

    given = load(head_of(out, b, h), begin, real, QUERY_TILE, DIM, PADDED, True)
    grad = load(head_of(grad_out, b, h), begin, real, QUERY_TILE, DIM, PADDED, True)
    row_sum = tl.sum(given.to(tl.float32) * grad.to(tl.float32), 1)
    offsets = flat_head.to(tl.int64) * length + columns
    tl.store(correction + offsets, row_sum, mask=columns < length)
    # A row of padding: every weight is exp2(logit - inf) = 0.
    log_sum = tl.load(lse + offsets, mask=columns < length, other=0.0)
    log_sum = tl.where(real, log_sum * LOG2_E, float("inf"))
    log2_scale = scale * LOG2_E

    if DISTANT:
        asked = load(head_of(q_distant, b, h), begin, real, QUERY_TILE, DIM, PADDED, True)
        far_head = head_of(k_distant, b, h_kv)
        masked, plain = distant_keys(queries, S, R, KEY_TILE, SPANS)
        sums = tl.zeros([QUERY_TILE, PADDED], tl.float32)
        sums = _query_grad(
            sums, asked, grad, log_sum, row_sum, columns, starts, far_head, v_head, length, S, R, log2_scale,
            masked, True, True, DIM, PADDED, KEY_TILE,
        )  # fmt: skip
        sums = _query_grad(
            sums, asked, grad, log_sum, row_sum, columns, starts, far_head, v_head, length, S, R, log2_scale,
            plain, False, True, DIM, PADDED, KEY_TILE,
        )  # fmt: skip
        store(head_of(dq_distant, b, h), begin, length, sums * scale, QUERY_TILE, DIM, PADDED)
    asked = load(head_of(q, b, h), begin, real, QUERY_TILE, DIM, PADDED, True)
    masked, plain = proximal_keys(queries, S, R, KEY_TILE, SPANS)
    sums = tl.zeros([QUERY_TILE, PADDED], tl.float32)
    sums = _query_grad(
        sums, asked, grad, log_sum, row_sum, columns, starts, k_head, v_head, length, S, R, log2_scale,
        plain, False, False, DIM, PADDED, KEY_TILE,
    )  # fmt: skip
    sums = _query_grad(
        sums, asked, grad, log_sum, row_sum, columns, starts, k_head, v_head, length, S, R, log2_scale,
        masked, True, False, DIM, PADDED, KEY_TILE,
    )  # fmt: skip
    store(head_of(dq, b, h), begin, length, sums * scale, QUERY_TILE, DIM, PADDED)


@triton.jit
def _key_grad(
    dk,
    dv,
    k,
    v,
    keys,
    spans,
    q,
    grad_out,
    lse,
    correction,
    groups,
    length,
    S,
    R,
    scale,
    runs,
    MASKED: tl.constexpr,
    DISTANT: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Gradients of a tile of keys and values over three runs of tiles of queries, for every query head of the group."""
    count = runs[1] + runs[3] + runs[5]
    # One loop over heads and tiles, so that the next head's loads are under way before this one's tiles end.
    for index in tl.range(0, groups * count):
        member = (index // tl.maximum(count, 1)).to(tl.int64)
        first = tile_of(index % tl.maximum(count, 1), runs) * QUERY_TILE
        columns = first + tl.arange(0, QUERY_TILE)
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
        asked = load((q[0] + member * q[1], q[2]), first, real, QUERY_TILE, DIM, PADDED, MASKED)
        grad = load((grad_out[0] + member * grad_out[1], grad_out[2]), first, real, QUERY_TILE, DIM, PADDED, MASKED)
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
    q,
    k,
    v,
    q_distant,
    k_distant,
    spans,
    grad_out,
    lse,
    correction,
    dk,
    dv,
    dk_distant,
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
    tile, flat_head = program_of(tl.cdiv(length, KEY_TILE), batch * kv_heads, section)
    begin = tile * KEY_TILE  # the first keys are seen by most queries
    row, head = flat_head // kv_heads, flat_head % kv_heads
    b, h, h_query = row.to(tl.int64), head.to(tl.int64), (head * groups).to(tl.int64)
    grad_group = group_of(grad_out, b, h_query)
    lse += flat_head.to(tl.int64) * groups * length
    correction += flat_head.to(tl.int64) * groups * length
    held = tokens(spans, row, begin, length, KEY_TILE, SPANS)
    keys, real = held[0], held[2]
    stops, stop = keys, length
    if SPANS:
        stops = tl.load(spans + (batch + row).to(tl.int64) * length + keys, mask=keys < length, other=0)
        stop = tl.max(stops, 0)
        spans += row.to(tl.int64) * length
    log2_scale = scale * LOG2_E

    value = load(head_of(v, b, h), begin, real, KEY_TILE, DIM, PADDED, True)
    value_sums = tl.zeros([KEY_TILE, PADDED], tl.float32)
    if DISTANT:
        far_group = group_of(q_distant, b, h_query)
        key = load(head_of(k_distant, b, h), begin, real, KEY_TILE, DIM, PADDED, True)
        masked, plain = distant_queries(held, stops, stop, S, R, QUERY_TILE, SPANS)
        key_sums = tl.zeros([KEY_TILE, PADDED], tl.float32)
        key_sums, value_sums = _key_grad(
            key_sums, value_sums, key, value, keys, spans, far_group, grad_group, lse, correction,
            groups, length, S, R, log2_scale, masked, True, True, DIM, PADDED, QUERY_TILE, SPANS,
        )  # fmt: skip
        key_sums, value_sums = _key_grad(
            key_sums, value_sums, key, value, keys, spans, far_group, grad_group, lse, correction,
            groups, length, S, R, log2_scale, plain, False, True, DIM, PADDED, QUERY_TILE, SPANS,
        )  # fmt: skip
        key_sums = tl.where(real[:, None], key_sums * scale, 0.0)
        store(head_of(dk_distant, b, h), begin, length, key_sums, KEY_TILE, DIM, PADDED)
    near_group = group_of(q, b, h_query)
    key = load(head_of(k, b, h), begin, real, KEY_TILE, DIM, PADDED, True)
    masked, plain = proximal_queries(held, stop, S, R, QUERY_TILE)
    key_sums = tl.zeros([KEY_TILE, PADDED], tl.float32)
    key_sums, value_sums = _key_grad(
        key_sums, value_sums, key, value, keys, spans, near_group, grad_group, lse, correction,
        groups, length, S, R, log2_scale, plain, False, False, DIM, PADDED, QUERY_TILE, SPANS,
    )  # fmt: skip
    key_sums, value_sums = _key_grad(
        key_sums, value_sums, key, value, keys, spans, near_group, grad_group, lse, correction,
        groups, length, S, R, log2_scale, masked, True, False, DIM, PADDED, QUERY_TILE, SPANS,
    )  # fmt: skip
    # In the unmasked loops padded keys met the queries of their tile.
    key_sums, value_sums = tl.where(real[:, None], key_sums * scale, 0.0), tl.where(real[:, None], value_sums, 0.0)
    store(head_of(dk, b, h), begin, length, key_sums, KEY_TILE, DIM, PADDED)
    store(head_of(dv, b, h), begin, length, value_sums, KEY_TILE, DIM, PADDED)
