"""The public entry to shared-score attention: one signature, several backends that agree."""

from collections.abc import Sequence

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
    window_only: bool | tuple[int, ...] = False,
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
            Or the KV heads of which that is so, whose q_distant and k_distant are not looked at; their gate is 1.
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
    if window_only and not isinstance(window_only, bool):
        options = {"sink_size": sink_size, "recent_size": recent_size, "scale": scale, "lengths": lengths}
        options |= {"document_ids": document_ids, "return_lse": return_lse, "return_gate": return_gate}
        return _by_heads(q, k, v, q_distant, k_distant, window_only, backend=backend, **options)
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
        window_only=bool(window_only),
        return_lse=return_lse,
        return_gate=return_gate,
    )
    training = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (q, k, v, q_distant, k_distant)
    )
    name = resolve_backend(backend, shape_class(q, "training" if training else "forward"))
    attend = custom_ops.attend if name == "composed" and torch.compiler.is_compiling() else BACKENDS[name]
    return problem.results(*attend(problem))


def _by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_distant: Tensor | None,
    k_distant: Tensor | None,
    windows: tuple[int, ...],
    **options,
) -> Tensor | tuple[Tensor, ...]:
    """`shared_score_attention` where the KV heads `windows` have no distant pairs, and the others have."""
    kv_heads = k.shape[1]
    others = tuple(head for head in range(kv_heads) if head not in windows)

    def part(heads: tuple[int, ...], distant: tuple[Tensor | None, ...]) -> list[Tensor]:
        mine = (None if x is None else _of_heads(x, heads, x.shape[1] // kv_heads) for x in (q, k, v, *distant))
        found = shared_score_attention(*mine, window_only=not distant, **options)
        return [found] if isinstance(found, Tensor) else list(found)

    parts = [part(windows, ())] + ([part(others, (q_distant, k_distant))] if others else [])
    back = [(*windows, *others).index(head) for head in range(kv_heads)]
    groups = q.shape[1] // kv_heads
    results = tuple(_of_heads(torch.cat(each, dim=1), back, groups) for each in zip(*parts, strict=True))
    return results[0] if len(results) == 1 else results


def _of_heads(x: Tensor, heads: Sequence[int], groups: int) -> Tensor:
    """The `groups` entries in [:, H] of each of some KV heads, by slices: no index has to come from the host."""
    return torch.cat([x[:, head * groups : (head + 1) * groups] for head in heads], dim=1)
