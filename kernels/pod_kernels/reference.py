"""The eager truth of shared-score attention: every pair at once, in the order of the equations.

Shapes: B rows, H query heads, H_kv key/value heads, G = H / H_kv query heads per group, T tokens, D head dimension.

For a query at position i and a key at position j <= i, both counted inside their own sequence, the pair is proximal
when j < sink_size or i - j < recent_size, and distant otherwise (PoD, arXiv 2412.02252, Eq. 3 and 4):

    logit(i, j) = q(i) . k(j) * scale                       proximal
                  q_distant(i) . k_distant(j) * scale       distant
    out(i)      = softmax over j <= i of logit(i, .), applied to v

The paper's gate is the share of this one softmax that falls on proximal keys.
"""

import torch
from torch import Tensor


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_distant: Tensor | None,
    k_distant: Tensor | None,
    sink_size: int,
    recent_size: int,
    lengths: Tensor | None,
    document_ids: Tensor | None,
    window_only: bool = False,
) -> None:
    """Refuse shapes and sizes that no backend can serve.

    Raises:
        ValueError: names the argument, what it was and what it must be.
    """
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"q and k must be [B, heads, T, D]; got shapes {tuple(q.shape)} and {tuple(k.shape)}")
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    if heads % kv_heads:
        raise ValueError(f"query heads ({heads}) must be a multiple of key/value heads ({kv_heads})")
    if window_only and q_distant is not None:
        raise ValueError("window_only leaves distant pairs out: pass no q_distant and k_distant with it")
    if (q_distant is None) != (k_distant is None):
        raise ValueError("q_distant and k_distant come together: pass both, or None for both (plain causal attention)")
    for name, tensor, shape in (
        ("k", k, (batch, kv_heads, length, dim)),
        ("v", v, (batch, kv_heads, length, v.shape[-1])),
        ("q_distant", q_distant, (batch, heads, length, dim)),
        ("k_distant", k_distant, (batch, kv_heads, length, dim)),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape} to go with q {tuple(q.shape)}; got {tuple(tensor.shape)}")
        if tensor is not None and tensor.dtype != q.dtype:
            raise ValueError(f"{name} is {tensor.dtype} but q is {q.dtype}: cast them to one dtype")
    if sink_size < 0:
        raise ValueError(f"sink_size must be >= 0, got {sink_size}")
    if recent_size < 1:
        raise ValueError(f"recent_size must be >= 1 (the current token is recent), got {recent_size}")
    if lengths is not None and tuple(lengths.shape) != (batch,):
        raise ValueError(f"lengths must have shape ({batch},), one per row; got {tuple(lengths.shape)}")
    if document_ids is not None and tuple(document_ids.shape) != (batch, length):
        raise ValueError(f"document_ids must have shape {(batch, length)}; got {tuple(document_ids.shape)}")
    if lengths is not None and document_ids is not None:
        raise ValueError("pass lengths or document_ids, not both: document_ids mark padding with -1")


def positions_and_documents(
    batch: int, length: int, lengths: Tensor | None, document_ids: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Where each token stands in its own sequence, and in which sequence.

    Args:
        lengths: [B], real tokens of each row, right-aligned; or None.
        document_ids: [B, T], non-decreasing among real tokens, -1 for padding; or None.

    Returns:
        positions [B, T] int64, counted from the first token of the row or document; documents [B, T] int64, -1 for
        padding.
    """
    column = torch.arange(length, device=device).expand(batch, length)
    if document_ids is not None:
        documents = document_ids.to(device=device, dtype=torch.long)
        is_start = torch.ones_like(documents, dtype=torch.bool)
        is_start[:, 1:] = documents[:, 1:] != documents[:, :-1]
        start = torch.where(is_start, column, 0).cummax(dim=1).values
        return column - start, documents
    if lengths is not None:
        positions = column - (length - lengths.to(device=device, dtype=torch.long))[:, None]
        return positions.clamp(min=0), torch.where(positions >= 0, 0, -1)
    return column, torch.zeros_like(column)


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
    """Causal attention whose distant logits come from another layer's queries and keys.

    Materialises [B, H, T, T]; inputs below float32 are computed in float32 and the output is cast back.

    Args:
        q: [B, H, T, D] queries, after RoPE.
        k, v: [B, H_kv, T, D] keys (after RoPE) and values.
        q_distant, k_distant: [B, H, T, D] and [B, H_kv, T, D], the anchor layer's, for distant pairs; None for both is
            plain causal attention.
        sink_size: number of first tokens that are always proximal, >= 0.
        recent_size: number of last tokens, the current one included, that are proximal, >= 1.
        scale: factor on every logit; D ** -0.5 when None.
        lengths: [B] real tokens of each row, right-aligned (left padding).
        document_ids: [B, T] non-decreasing, -1 padding; tokens see their own document only.
        window_only: distant pairs do not count at all: window attention with sinks.
        return_lse, return_gate: also return these, in this order.

    Returns:
        out [B, H, T, D] in q's dtype, zero at padding. lse [B, H, T] float32: log of the sum of exp of the logits, -inf
        at padding. gate [B, H, T] float32: the share of the softmax on proximal keys, 1 at padding. Neither lse nor
        gate carries a gradient.

    Raises:
        ValueError: shapes, dtypes or sizes do not fit; says which.
    """
    check_inputs(q, k, v, q_distant, k_distant, sink_size, recent_size, lengths, document_ids, window_only)
    batch, heads, length, dim = q.shape
    groups = heads // k.shape[1]
    scale = dim**-0.5 if scale is None else scale
    accumulate = torch.promote_types(q.dtype, torch.float32)

    def repeated(tensor: Tensor) -> Tensor:
        return tensor.to(accumulate).repeat_interleave(groups, dim=1)

    positions, documents = positions_and_documents(batch, length, lengths, document_ids, q.device)
    column = torch.arange(length, device=q.device)
    visible = (column[:, None] >= column) & (documents[:, :, None] == documents[:, None, :]) & (documents >= 0)[:, None]
    visible = visible[:, None]
    proximal = (positions[:, None, :] < sink_size) | (positions[:, :, None] - positions[:, None, :] < recent_size)
    proximal = proximal[:, None]
    if window_only:
        visible = visible & proximal

    logits = torch.matmul(q.to(accumulate), repeated(k).transpose(2, 3)) * scale
    if q_distant is not None:
        distant = torch.matmul(q_distant.to(accumulate), repeated(k_distant).transpose(2, 3)) * scale
        logits = torch.where(proximal, logits, distant)
    # The lowest finite number, not -inf: a padded query sees nothing, and its softmax must not become NaN.
    logits = logits.masked_fill(~visible, torch.finfo(accumulate).min)
    weights = torch.softmax(logits, dim=-1)
    out = torch.matmul(weights, repeated(v))
    is_padding = (documents < 0)[:, None, :]
    if lengths is not None or document_ids is not None:
        out = out.masked_fill(is_padding[..., None], 0.0)
    results: list[Tensor] = [out.to(q.dtype)]
    if return_lse:
        lse = torch.logsumexp(logits.detach(), dim=-1).float()
        results.append(lse.masked_fill(is_padding, -torch.inf))
    if return_gate:
        # One minus the distant part, so that a query without distant keys has a gate of exactly 1.
        gate = 1 - weights.detach().masked_fill(proximal | ~visible, 0.0).sum(dim=-1).float()
        results.append(gate.masked_fill(is_padding, 1.0))
    return results[0] if len(results) == 1 else tuple(results)
