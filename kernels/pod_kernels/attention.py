"""The public entry to shared-score attention: one signature, several backends that agree."""

import torch
from torch import Tensor

from pod_kernels import composed, custom_ops, reference
from pod_kernels.dispatch import resolve_backend, shape_class
from pod_kernels.problem import Problem


def _fused(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    try:
        from pod_kernels.triton import fused  # only here, since this imports triton
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError("backend 'fused' needs triton: pip install triton, or choose 'composed'") from error
    return fused.attend(problem)


BACKENDS = {"reference": reference.attend, "composed": composed.attend, "fused": _fused}


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
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Causal attention whose distant logits come from another layer's queries and keys.

    PoD, arXiv 2412.02252, Eq. 3 and 4. For a query at position i and a key at position j <= i of the same sequence,
    the pair is proximal when j < sink_size or i - j < recent_size, and distant otherwise:

        logit(i, j) = q(i) . k(j) * scale                       proximal
                      q_distant(i) . k_distant(j) * scale       distant
        out(i)      = softmax over j <= i of logit(i, .), applied to v

    Args:
        q: [B, H, T, D] queries, after RoPE; any floating dtype, one for all tensors.
        k, v: [B, H_kv, T, D] keys (after RoPE) and values; H is a multiple of H_kv.
        q_distant, k_distant: [B, H, T, D] and [B, H_kv, T, D], the anchor layer's, for distant pairs (q_distant = q
            shares keys instead of scores); None for both is plain causal attention.
        sink_size: number of first tokens that are always proximal, >= 0.
        recent_size: number of last tokens, the current one included, that are proximal, >= 1.
        scale: factor on every logit; D ** -0.5 when None.
        lengths: [B] real tokens of each row, right-aligned (left padding). Positions count from the first real token.
        document_ids: [B, T] non-decreasing, -1 padding; tokens see their own document only, positions count from its
            first token.
        window_only: distant pairs do not count at all: window attention with sinks, without q_distant and k_distant.
        return_lse, return_gate: also return these, in this order.
        backend: "auto", "reference" (eager, [T, T] in memory), "composed" (torch's flash attention, linear memory) or
            "fused" (one Triton kernel, linear memory; NVIDIA GPUs). "auto" is the environment variable
            POD_ATTENTION_BACKEND if set, else what `dispatch` has for the GPU and the shapes, else composed.

    Returns:
        out [B, H, T, D] in q's dtype, zero at padding. lse [B, H, T] float32: log of the sum of exp of the logits, -inf
        at padding. gate [B, H, T] float32: the share of the softmax on proximal keys, 1 at padding. Neither lse nor
        gate carries a gradient.

    Raises:
        ValueError: shapes, dtypes, sizes or lengths do not fit, no such backend, or it cannot run here; says which.
    """
    problem = Problem(
        q,
        k,
        v,
        q_distant,
        k_distant,
        sink_size=sink_size,
        recent_size=recent_size,
        scale=scale,
        lengths=lengths,
        document_ids=document_ids,
        window_only=window_only,
        return_lse=return_lse,
        return_gate=return_gate,
    )
    training = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (q, k, v, q_distant, k_distant)
    )
    name = resolve_backend(backend, shape_class(q, "training" if training else "forward"))
    attend = custom_ops.attend if name == "composed" and torch.compiler.is_compiling() else BACKENDS[name]
    return problem.results(*attend(problem))
