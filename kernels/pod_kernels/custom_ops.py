"""The composed backend as one operation, which torch.compile puts into its graph whole.

Tracing into it would take a graph of all pieces, and `lengths` and `document_ids` are read on the host, which no graph
can hold. An operation's own code runs as it is.
"""

import torch
from torch import Tensor

from pod_kernels import composed
from pod_kernels.attention import Problem, Sizes, sequence_groups


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
    out, lse, gate = composed.forward_sequences((q, k, v, q_distant, k_distant), sizes, groups, want_gate)
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
    grads = composed.backward_sequences(grad_out, (q, k, v, q_distant, k_distant), out, lse, sizes, groups, needed)
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


def attend(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """`composed.attend` for graphs; `lengths` and `document_ids` are read when these run."""
    placement = (problem.lengths, problem.document_ids)
    out, lse, gate = _attention(*problem.sources, *placement, *problem.sizes, problem.return_gate)
    return out, lse.float(), gate
