"""Pages of keys: what stands for each of them, and attention of one query to some positions only.

A page is `page_size` consecutive positions of one row and KV head. The channel-wise minimum and maximum of its keys
bound every product with one of them from above (Quest, arXiv 2406.10774, section 3.3); their mean is its landmark
(ShadowKV, arXiv 2410.21465, section 4.1).

Legend: B rows, H_kv KV heads, A of them anchors of the layer (they come first), G query heads per KV head, N stored
positions, P pages, R positions that are read, D head dimension.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pod_kernels.segments import HeadOf, LayerSlots, products, weighted


def extremes(keys: Tensor, is_held: Tensor) -> Tensor:
    """[A, B, W, 2 D]: the minima of pages of keys [A, B, W, page_size, D], then the maxima.

    is_held: [1, B, W, page_size, 1] bool, the page has such a token.
    """
    low, high = keys.masked_fill(~is_held, torch.inf).amin(dim=3), keys.masked_fill(~is_held, -torch.inf).amax(dim=3)
    return torch.cat([low, high], dim=-1)


def landmarks(keys: Tensor, is_held: Tensor) -> Tensor:
    """[A, B, W, D + 1]: the mean of each page's keys, and the smallest cosine of one of them with it; as `extremes`."""
    keys = keys.float()
    mean = (keys * is_held).sum(dim=3) / is_held.sum(dim=3).clamp(min=1)
    cosine = F.cosine_similarity(keys, mean[:, :, :, None], dim=-1).masked_fill(~is_held[..., 0], 1)
    return torch.cat([mean, cosine.amin(dim=3)[..., None]], dim=-1)


def refresh_pages(
    pages: Tensor,
    keys: Tensor,
    before: Tensor,
    after: Tensor,
    page_size: int,
    most: int,
    summary: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Bring what stands for pages up to date for the tokens at positions before .. after - 1 of each row.

    Args:
        pages: [A, B, P, width]; written in place.
        keys: [A, B, N, D], slot = position.
        before, after: [B] int64.
        page_size: tokens of a page.
        most: the most tokens between `before` and `after`.
        summary: `extremes` (of width 2 D) or `landmarks` (D + 1).
    """
    heads, batch, _, dim = keys.shape
    place = torch.arange((most + page_size - 2) // page_size + 1, device=keys.device)
    # Beyond a row's end its last page is computed again, with the same result.
    page = torch.minimum(before[:, None] // page_size + place, (after[:, None] - 1).clamp(min=0) // page_size)
    slot = page[..., None] * page_size + torch.arange(page_size, device=keys.device)  # [B, W, page_size]
    is_held = (slot < after[:, None, None])[None, ..., None]
    index = slot.clamp(max=keys.shape[2] - 1).flatten(1)[None, :, :, None].expand(heads, -1, -1, dim)
    held = keys.gather(2, index).unflatten(2, slot.shape[1:])
    new = summary(held, is_held).to(pages.dtype)
    pages.scatter_(2, page[None, :, :, None].expand(heads, -1, -1, new.shape[-1]), new)


def page_bounds(q: Tensor, pages: Tensor) -> Tensor:
    """The most that one query's product with a key of each page can be, the maximum over the KV head's query heads.

    Args:
        q: [A, B, G, D].
        pages: [A, B, P, 2 D].

    Returns:
        [A, B, P] float32: max over G of sum_d max(q_d low_d, q_d high_d).
    """
    low, high = pages.float().chunk(2, dim=-1)
    q = q.float()
    return (q.clamp(min=0) @ high.mT + q.clamp(max=0) @ low.mT).amax(dim=2)


def paged_attention(
    q: Tensor,
    layer: LayerSlots,
    read: Tensor,
    *,
    positions: Tensor,
    scores: Tensor | None,
    score_heads: tuple[int, ...],
    distant_keys: tuple[HeadOf, ...],
    scale: float,
) -> Tensor:
    """Attention of one query to the positions `read` alone; no other key or value is touched.

    Args:
        q: [B, H, 1, D].
        layer: the layer's slots; none of them is empty: slot = position.
        read: [H_kv, B, R] int64 in storage order, -1 for none.
        positions: [B, 1] int64, each query's position in its row, -1 for padding.
        scores, score_heads, distant_keys: as `cached_attention`; `scores` holds the anchors' logits at what they read.
        scale: factor on every logit.

    Returns:
        [B, H, 1, D], zero at padding.
    """
    anchors, kv_heads = layer.num_anchors, len(layer.order)
    q = layer.stored(q.unflatten(1, (layer.kv_heads, -1)).transpose(0, 1))  # [H_kv, B, G, 1, D] in storage order
    # Where there is nothing to read stands the query's own token, which is read anyway.
    at = torch.where(read < 0, positions, read).clamp(min=0)

    logits = []
    if anchors:
        logits.append(products(q[:anchors], layer.keys.taken(at[:anchors]), scale))
        for place, head in enumerate(layer.order[:anchors]):
            if scores is not None and head in score_heads:
                index = at[place][:, None, None].expand(logits[0].shape[1:])
                scores[head].scatter_(-1, index, logits[0][place])
    if anchors < kv_heads:
        if scores is not None:
            index = at[anchors:, :, None, None].expand(-1, -1, *scores.shape[2:4], -1)
            distant = [scores[head].gather(-1, one) for head, one in zip(layer.order[anchors:], index, strict=True)]
            distant = torch.stack(distant)
        else:
            keys = [
                part.part(head, 1).taken(at[anchors + place][None]) for place, (part, head) in enumerate(distant_keys)
            ]
            distant = products(q[anchors:], torch.cat(keys), scale)
        others = at[anchors:]
        is_near = (others < layer.sink_size) | (positions - others < layer.recent_size)
        place = torch.where(is_near, layer.ring_places(others), 0)[..., None]
        near_keys = layer.near_keys.gather(2, place.expand(*place.shape[:3], layer.near_keys.shape[-1]))
        own = products(q[anchors:], near_keys, scale)
        logits.append(torch.where(is_near[:, :, None, None], own, distant))
    logits = torch.cat(logits).masked_fill(read[:, :, None, None] < 0, torch.finfo(torch.float32).min)
    out = weighted(torch.softmax(logits, dim=-1).flatten(2, 3), layer.values.taken(at))[:, :, :, None]
    out = out.masked_fill((positions < 0)[None, :, None, :, None], 0)
    return layer.by_head(out).transpose(0, 1).flatten(1, 2)
