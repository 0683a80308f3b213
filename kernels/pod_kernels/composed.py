"""Shared-score attention composed of plain attention pieces (`pieces.py`), merged by their log-sum-exps; never [T, T].

The backward runs each piece's own backward with the *merged* output and log-sum-exp. A flash backward recomputes the
weights as exp(logit - lse) and subtracts rowsum(grad_out * out); with the merged two, these are the weights and the
correction of the whole softmax, so the sum over pieces is exact and no gradient has to flow through any log-sum-exp.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pod_kernels.attention import Group, Problem, Sizes, sequence_groups
from pod_kernels.flash import Kernel, backward_piece, band_mask, choose_kernel, forward_piece, head_splits
from pod_kernels.pieces import Piece, plan

# What runs the window. cuDNN has none in torch: its squares took less time than flash attention's window on an H200
# with 4,080 recent of 32,768 tokens, more with 1,024 of these, and with 4,080 of 8,192 (eval/RESULTS.md).
WINDOWS = {"flash_cuda": "native", "cudnn": "squares"}
SMALLEST_SQUARE, FEWEST_SQUARES = 2048, 4

Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]  # q, k, v, q_distant, k_distant


def _cut(inputs: Inputs, sizes: Sizes) -> tuple[Kernel, tuple[Piece, ...], list[tuple[slice, slice]], Tensor | None]:
    """What runs the pieces of full sequences, the pieces, the heads of each call, and the bands' mask."""
    q, k, v, q_distant, _ = inputs
    kernel = choose_kernel(q, v)
    sink_size, recent_size, _, window_only = sizes
    window = WINDOWS.get(kernel, "bands")
    if window == "squares" and (recent_size < SMALLEST_SQUARE or q.shape[2] < FEWEST_SQUARES * recent_size):
        window = "native"
    pieces = plan(q.shape[2], sink_size, recent_size, q_distant is not None, window, window_only)
    splits = head_splits(kernel, q.shape[1], k.shape[1])
    return kernel, pieces, splits, band_mask(pieces, recent_size, q.dtype, q.device)


def _chunks(tensor: Tensor, width: int, step: int) -> Tensor:
    """[h, T, ..] -> [n, h, width, ..], a view: so many tokens from every `step`-th on."""
    return tensor.unfold(1, width, step).movedim(1, 0).movedim(-1, 2)


def _calls(piece: Piece, asked: list[Tensor], held: list[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Views of what each call of a piece takes: all of it, but of one in chunks a row, its chunks as the rows.

    Args:
        asked: [B, h, Tq, ..] each, by query.
        held: [B, h_kv, Tk, D] each, by key.

    Returns:
        [n, h, .., ..] and [n, h_kv, .., D] for n chunks.
    """
    if piece.chunks == 1:
        yield asked, held
        return
    for row in range(len(held[0])):
        yield tuple(
            [_chunks(x[row], width, piece.step) for x in given]
            for given, width in zip((asked, held), piece.widths, strict=True)
        )


def _add_chunks(total: Tensor, grads: Tensor, step: int) -> None:
    """Add what chunks give [n, h, w, D] to the tokens [h, .., D] from which `_calls` took them.

    As many tokens of all chunks at once as no two chunks have in common.
    """
    for first in range(0, grads.shape[2], step):
        part = grads[:, :, first : first + step]
        windows = _chunks(total[:, first:], part.shape[2], step)[: len(grads)]
        windows += part


def _forward(inputs: Inputs, sizes: Sizes, want_gate: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """out in q's dtype, lse, and the proximal keys' own lse, of full sequences."""
    q, k, v, q_distant, k_distant = inputs
    kernel, pieces, splits, mask = _cut(inputs, sizes)
    if len(pieces) == len(splits) == pieces[0].chunks == 1:
        out, lse = forward_piece(kernel, pieces[0], q, k, v, None, sizes.recent_size, sizes.scale)
        return out.to(q.dtype), lse, lse if want_gate else None
    accumulate = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:3], v.shape[-1], dtype=accumulate)
    lse = q.new_empty(q.shape[:3], dtype=accumulate)
    lse_proximal = lse if want_gate else None
    for piece in pieces:
        rows, columns = slice(*piece.queries), slice(*piece.keys)
        if piece.distant and want_gate:
            lse_proximal = lse.clone()
        queries, keys = (q_distant, k_distant) if piece.distant else (q, k)
        for query_heads, kv_heads in splits:
            asked = [x[:, query_heads, rows] for x in (queries, out, lse)]
            held = [x[:, kv_heads, columns] for x in (keys, v)]
            for (mine, running_out, running_lse), seen in _calls(piece, asked, held):
                piece_out, piece_lse = forward_piece(kernel, piece, mine, *seen, mask, sizes.recent_size, sizes.scale)
                if piece.first:
                    running_out.copy_(piece_out)
                    running_lse.copy_(piece_lse)
                else:
                    merged = torch.logaddexp(running_lse, piece_lse)
                    running_out.mul_((running_lse - merged).exp_()[..., None])
                    running_out.addcmul_(piece_out, (piece_lse - merged).exp_()[..., None])
                    running_lse.copy_(merged)
    return out.to(q.dtype), lse, lse_proximal


def _backward(
    grad_out: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, sizes: Sizes, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of the inputs of full sequences, None where not needed."""
    q, k, v, q_distant, k_distant = inputs
    kernel, pieces, splits, mask = _cut(inputs, sizes)
    grads = [
        torch.zeros(tensor.shape, dtype=lse.dtype, device=q.device) if need else None
        for tensor, need in zip(inputs, needed, strict=True)
    ]
    for piece in pieces:
        rows, columns = slice(*piece.queries), slice(*piece.keys)
        queries, keys = (q_distant, k_distant) if piece.distant else (q, k)
        buffers = (*(grads[3:5] if piece.distant else grads[0:2]), grads[2])
        if all(buffer is None for buffer in buffers):
            continue
        for query_heads, kv_heads in splits:
            asked = [x[:, query_heads, rows] for x in (grad_out, queries, out, lse)]
            held = [x[:, kv_heads, columns] for x in (keys, v)]
            sums = [
                None if buffer is None else buffer[:, heads, tokens]
                for buffer, heads, tokens in zip(
                    buffers, (query_heads, kv_heads, kv_heads), (rows, columns, columns), strict=True
                )
            ]
            for row, ((mine_grad, mine, *merged), seen) in enumerate(_calls(piece, asked, held)):
                piece_grads = backward_piece(
                    kernel, piece, mine_grad, mine, *seen, *merged, mask, sizes.recent_size, sizes.scale
                )
                for total, piece_grad in zip(sums, piece_grads, strict=True):
                    if total is not None and piece.chunks == 1:
                        total += piece_grad
                    elif total is not None:
                        _add_chunks(total[row], piece_grad, piece.step)
    # One at a time, so that a float32 buffer is freed as soon as it is cast.
    for index, tensor in enumerate(inputs):
        if grads[index] is not None:
            grads[index] = grads[index].to(tensor.dtype)
    return grads


def _columns(inputs: Inputs, rows: slice | Tensor, start: int, stop: int) -> Inputs:
    return tuple(None if tensor is None else tensor[rows, :, start:stop] for tensor in inputs)


def forward_sequences(
    inputs: Inputs, sizes: Sizes, groups: list[Group] | None, want_gate: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out in q's dtype, lse as it was accumulated, and the gate in float32 where it is wanted.

    Args:
        groups: from `sequence_groups`.
    """
    q, v = inputs[0], inputs[2]
    if groups is None:
        out, lse, lse_proximal = _forward(inputs, sizes, want_gate)
        return out, lse, torch.exp(lse_proximal - lse).float() if want_gate else None
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    gate = q.new_ones(q.shape[:3], dtype=torch.float32) if want_gate else None
    for rows, start, stop in groups:
        cut_out, cut_lse, cut_proximal = _forward(_columns(inputs, rows, start, stop), sizes, want_gate)
        out[rows, :, start:stop] = cut_out
        lse[rows, :, start:stop] = cut_lse
        if want_gate:
            gate[rows, :, start:stop] = torch.exp(cut_proximal - cut_lse).float()
    return out, lse, gate


def backward_sequences(
    grad_out: Tensor,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    sizes: Sizes,
    groups: list[Group] | None,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of the inputs from what `forward_sequences` returned, None where not needed."""
    if groups is None:
        return _backward(grad_out, inputs, out, lse, sizes, needed)
    grads = [torch.zeros_like(tensor) if need else None for tensor, need in zip(inputs, needed, strict=True)]
    for rows, start, stop in groups:
        cut_grad_out, cut_out, cut_lse = (tensor[rows, :, start:stop] for tensor in (grad_out, out, lse))
        cut_grads = _backward(cut_grad_out, _columns(inputs, rows, start, stop), cut_out, cut_lse, sizes, needed)
        for grad, cut_grad in zip(grads, cut_grads, strict=True):
            if grad is not None:
                grad[rows, :, start:stop] = cut_grad
    return grads


class _ComposedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, q_distant, k_distant, sizes, groups, want_gate):
        inputs = (q, k, v, q_distant, k_distant)
        out, lse, gate = forward_sequences(inputs, sizes, groups, want_gate)
        ctx.save_for_backward(*inputs, out, lse)
        ctx.sizes, ctx.groups = sizes, groups
        ctx.set_materialize_grads(False)
        public_lse = lse.float()
        ctx.mark_non_differentiable(*(tensor for tensor in (public_lse, gate) if tensor is not None))
        return out, public_lse, gate

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_lse, grad_gate):
        if grad_out is None:
            return (None,) * 8
        *inputs, out, lse = ctx.saved_tensors
        needed = tuple(tensor is not None and need for tensor, need in zip(inputs, ctx.needs_input_grad, strict=False))
        grads = backward_sequences(grad_out, tuple(inputs), out, lse, ctx.sizes, ctx.groups, needed)
        return (*grads, None, None, None)


@torch.library.custom_op("pod::shared_score_attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_distant: Tensor | None,
    k_distant: Tensor | None,
    lengths: Tensor | None,
    document_ids: Tensor | None,
    sink_size: int,
    recent_size: int,
    scale: float,
    window_only: bool,
    want_gate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse as accumulated, gate (empty unless wanted)."""
    sizes, groups = Sizes(sink_size, recent_size, scale, window_only), sequence_groups(q, lengths, document_ids)
    out, lse, gate = forward_sequences((q, k, v, q_distant, k_distant), sizes, groups, want_gate)
    return out.contiguous(), lse.contiguous(), gate.contiguous() if want_gate else lse.new_empty(0, dtype=torch.float32)


@_attention.register_fake
def _(q, k, v, q_distant, k_distant, lengths, document_ids, sink_size, recent_size, scale, window_only, want_gate):
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    gate = q.new_empty(q.shape[:3] if want_gate else (0,), dtype=torch.float32)
    return q.new_empty(*q.shape[:3], v.shape[-1]), lse, gate


@torch.library.custom_op("pod::shared_score_attention_backward", mutates_args=())
def _attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_distant: Tensor | None,
    k_distant: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lengths: Tensor | None,
    document_ids: Tensor | None,
    sink_size: int,
    recent_size: int,
    scale: float,
    window_only: bool,
    needed: list[bool],
) -> list[Tensor]:
    """The gradients of q, k, v, q_distant and k_distant; empty where not needed."""
    sizes, groups = Sizes(sink_size, recent_size, scale, window_only), sequence_groups(q, lengths, document_ids)
    grads = backward_sequences(grad_out, (q, k, v, q_distant, k_distant), out, lse, sizes, groups, needed)
    return [q.new_empty(0) if grad is None else grad.contiguous() for grad in grads]


@_attention_backward.register_fake
def _(grad_out, q, k, v, q_distant, k_distant, out, lse, lengths, document_ids, sink_size, recent_size, scale,
      window_only, needed):  # fmt: skip
    inputs = (q, k, v, q_distant, k_distant)
    return [
        tensor.new_empty(tensor.shape) if need and tensor is not None else q.new_empty(0)
        for tensor, need in zip(inputs, needed, strict=True)
    ]


def _save(ctx, inputs, output) -> None:
    *tensors, sink_size, recent_size, scale, window_only, _ = inputs
    out, lse, gate = output
    ctx.save_for_backward(*tensors, out, lse)
    ctx.sizes = Sizes(sink_size, recent_size, scale, window_only)
    ctx.mark_non_differentiable(lse, gate)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_out, grad_lse, grad_gate):
    if grad_out is None:
        return (None,) * 12
    q, k, v, q_distant, k_distant, lengths, document_ids, out, lse = ctx.saved_tensors
    inputs = (q, k, v, q_distant, k_distant)
    needed = [tensor is not None and need for tensor, need in zip(inputs, ctx.needs_input_grad, strict=False)]
    grads = _attention_backward(grad_out, *inputs, out, lse, lengths, document_ids, *ctx.sizes, needed)
    return (*(grad if need else None for grad, need in zip(grads, needed, strict=True)), *(None,) * 7)


_attention.register_autograd(_differentiate, setup_context=_save)


def attend_in_graph(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """`attend` as one operation, which torch.compile puts into its graph whole.

    Tracing into it would take a graph of all pieces, and `lengths` and `document_ids` are read on the host, which no
    graph can hold. An operation's own code runs as it is, and reads them when the graph runs.
    """
    placement = (problem.lengths, problem.document_ids)
    out, lse, gate = _attention(*problem.sources, *placement, *problem.sizes, problem.return_gate)
    return out, lse.float(), gate


def attend(problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse, and the gate where it is asked for.

    Accumulates in float32 (float64 for float64 inputs). Once differentiable. With `lengths` or `document_ids`,
    sequences that lie in the same columns are one call, so these two are read on the host.
    """
    if torch.compiler.is_compiling():
        return attend_in_graph(problem)
    groups = sequence_groups(problem.q, problem.lengths, problem.document_ids)
    return _ComposedAttention.apply(*problem.sources, problem.sizes, groups, problem.return_gate)
