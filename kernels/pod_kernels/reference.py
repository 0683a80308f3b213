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

from pod_kernels.attention import Problem


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


def shared_score_attention(*tensors: Tensor | None, **options) -> Tensor | tuple[Tensor, ...]:
    """`pod_kernels.shared_score_attention` by this backend: the same arguments (no `backend`), results and errors."""
    problem = Problem(*tensors, **options)
    return problem.results(*attend(problem))


def attend(problem: Problem) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """out, lse and gate, the last two where they are asked for.

    Materialises [B, H, T, T]; inputs below float32 are computed in float32 and the output is cast back.
    """
    q, k, v, q_distant, k_distant = problem.q, problem.k, problem.v, problem.q_distant, problem.k_distant
    sink_size, recent_size, scale, window_only = problem.sizes
    batch, heads, length, dim = q.shape
    groups = heads // k.shape[1]
    accumulate = torch.promote_types(q.dtype, torch.float32)

    def repeated(tensor: Tensor) -> Tensor:
        return tensor.to(accumulate).repeat_interleave(groups, dim=1)

    positions, documents = positions_and_documents(batch, length, problem.lengths, problem.document_ids, q.device)
    column = torch.arange(length, device=q.device)
    visible = (column[:, None] >= column) & (documents[:, :, None] == documents[:, None, :]) & (documents >= 0)[:, None]
    visible = visible[:, None]
    proximal = (positions[:, None, :] < sink_size) | (positions[:, :, None] - positions[:, None, :] < recent_size)
    proximal = proximal[:, None]
    if window_only:
        visible = visible & proximal

    def products(queries: Tensor, keys: Tensor) -> Tensor:
        # Under autocast they come in half precision, which has no number as low as the one below.
        return torch.matmul(queries.to(accumulate), repeated(keys).transpose(2, 3)).to(accumulate) * scale

    logits = products(q, k)
    if q_distant is not None:
        distant = products(q_distant, k_distant)
        logits = torch.where(proximal, logits, distant)
    # The lowest finite number, not -inf: a padded query sees nothing, and its softmax must not become NaN.
    logits = logits.masked_fill(~visible, torch.finfo(accumulate).min)
    weights = torch.softmax(logits, dim=-1)
    out = torch.matmul(weights, repeated(v))
    is_padding = (documents < 0)[:, None, :]
    if problem.lengths is not None or problem.document_ids is not None:
        out = out.masked_fill(is_padding[..., None], 0.0)
    lse = gate = None
    if problem.return_lse:
        lse = torch.logsumexp(logits.detach(), dim=-1).float().masked_fill(is_padding, -torch.inf)
    if problem.return_gate:
        # One minus the distant part, so that a query without distant keys has a gate of exactly 1.
        gate = 1 - weights.detach().masked_fill(proximal | ~visible, 0.0).sum(dim=-1).float()
        gate = gate.masked_fill(is_padding, 1.0)
    return out.to(q.dtype), lse, gate
