"""Attention to a cache from which tokens were evicted: a slot may hold any position, and heads may hold different ones.

Legend: B rows, H query heads, H_kv KV heads, G = H / H_kv, T queries, D head dimension, C slots of a segment, A anchor
heads of the layer, S = H_kv - A its other heads, M slots for own keys.

The slots of a KV head's values in every layer of its block, and of its key in the anchor layer, hold the same tokens:
one table of positions serves them all. The other layers' own keys of proximal tokens lie apart, each with its position
and with the slot of the values that it belongs to. Positions are those of the text (RoPE is absolute), so proximal and
distant mean what they mean without eviction.

`reference_packed_attention` is the truth: plain loops. `packed_attention` is the same, segments of one size at once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pod_kernels.backend import runs_triton
from pod_kernels.cached import MAX_LOGITS
from pod_kernels.segments import Ordered, Piece, Segments

HeadOf = tuple[Segments, int]  # segments, and one head in them


@dataclass
class PackedLayer(Ordered):
    """What the cache holds for one layer.

    Attributes:
        order: the KV heads in the order in which they are stored: the layer's anchor heads first, then the others.
        num_anchors: A.
        values: [B, H_kv] packed segments in that order.
        keys: [B, A] packed segments of the anchor heads' keys, of the same capacities.
        near_keys: [S, B, M, D] the other heads' own keys of proximal tokens.
        near_positions: [S, B, M] int32, -1 where there is none.
        near_slots: [S, B, M] int32, the slot in `values` of each.
        sink_size, recent_size: tokens.
    """

    order: tuple[int, ...]
    num_anchors: int
    values: Segments
    keys: Segments
    near_keys: Tensor
    near_positions: Tensor
    near_slots: Tensor
    sink_size: int
    recent_size: int

    def __post_init__(self) -> None:
        self.put_order(self.order, self.values.tensors()[0].device)


def reference_packed_attention(
    q: Tensor,
    layer: PackedLayer,
    *,
    positions: Tensor,
    slot_positions: tuple[HeadOf, ...],
    q_distant: Tensor | None = None,
    distant_keys: tuple[HeadOf, ...] = (),
    scale: float | None = None,
) -> Tensor:
    """The same as `packed_attention` without `scores`, one query of one head at a time. See there for the arguments."""
    batch, heads, count, dim = q.shape
    groups = heads // len(layer.order)
    scale = dim**-0.5 if scale is None else scale
    out = torch.zeros_like(q)

    def stored(part: HeadOf, row: int) -> Tensor:
        segments, head = part
        offset = int(segments.offsets[row, head])
        return segments.data[offset : offset + int(segments.capacities[row, head])]

    for row in range(batch):
        for place, kv_head in enumerate(layer.order):
            other = place - layer.num_anchors
            held = stored(slot_positions[place], row)[:, 0].tolist()
            values = stored((layer.values, place), row).float()
            keys = stored((layer.keys, place) if other < 0 else distant_keys[other], row).float()
            own = {}
            if other >= 0:
                for slot, position, key in zip(
                    layer.near_slots[other, row].tolist(),
                    layer.near_positions[other, row].tolist(),
                    layer.near_keys[other, row].float(),
                    strict=True,
                ):
                    if position >= 0:
                        assert held[slot] == position
                        own[slot] = key
            for head in range(kv_head * groups, (kv_head + 1) * groups):
                for query in range(count):
                    at = int(positions[row, query])
                    seen = [slot for slot, position in enumerate(held) if 0 <= position <= at]
                    if not seen:
                        continue
                    logits = torch.empty(len(seen))
                    for index, slot in enumerate(seen):
                        is_near = held[slot] < layer.sink_size or at - held[slot] < layer.recent_size
                        if other < 0 or is_near:
                            key = keys[slot] if other < 0 else own[slot]
                            logits[index] = q[row, head, query].float() @ key * scale
                        else:
                            logits[index] = q_distant[row, head, query].float() @ keys[slot] * scale
                    out[row, head, query] = (torch.softmax(logits, dim=0) @ values[seen]).to(q.dtype)
    return out


def packed_attention(
    q: Tensor,
    layer: PackedLayer,
    *,
    positions: Tensor,
    slot_positions: tuple[HeadOf, ...],
    scores: Tensor | None = None,
    score_heads: tuple[int, ...] = (),
    q_distant: Tensor | None = None,
    distant_keys: tuple[HeadOf, ...] = (),
    scale: float | None = None,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of T queries to what their rows still hold; the queries' own keys and values are stored already.

    Args:
        q: [B, H, T, D].
        layer: the layer's slots.
        positions: [B, T] int64, each query's position in its row, -1 for padding.
        slot_positions: for each KV head in storage order, where the positions of its slots lie ([S, 1] int32 data).
        scores: workspace [H_kv, B, G, 1, >= C] float32 for the logits of one query. Anchor heads put theirs in, the
            other heads read those of their anchor. None: these compute them from the two that follow.
        score_heads: the KV heads among the anchors whose logits a later layer reads.
        q_distant: [B, H, T, D] queries for distant logits (the anchor's; the layer's own under `share: keys`).
        distant_keys: for each of the S other heads, in storage order, the anchor's key segments and the head in them.
        scale: factor on every logit; D ** -0.5 when None.
        return_weights: also return the anchor heads' weights.

    Returns:
        out [B, H, T, D] in q's dtype, zero at padding (+ weights [A, B, G, T, C] float32, C the largest capacity).

    Source:
        PoD (arXiv 2412.02252), Eq. 3, 4 and section 2.3; over the tokens that are kept.
    """
    batch, heads, count, dim = q.shape
    kv_heads, anchors = len(layer.order), layer.num_anchors
    groups = heads // kv_heads
    scale = dim**-0.5 if scale is None else scale
    if count == 1 and runs_triton(q):
        from pod_kernels.decode import packed_decode  # imports triton

        return packed_decode(
            q,
            layer,
            positions=positions,
            slot_positions=slot_positions,
            scores=scores,
            score_heads=score_heads,
            q_distant=q_distant,
            distant_keys=distant_keys,
            scale=scale,
            return_weights=return_weights,
        )

    def grouped(tensor: Tensor) -> Tensor:  # [B, H, T, D] -> [H_kv, B, G, T, D] in storage order
        return layer.stored(tensor.view(batch, kv_heads, groups, count, dim).transpose(0, 1))

    q = grouped(q)
    q_distant = grouped(q_distant) if q_distant is not None else None
    out = torch.zeros_like(q)
    weights = None
    if return_weights:
        widest = max((max(head) for head in layer.keys.sizes), default=0)
        weights = torch.zeros(anchors, batch, groups, count, widest, device=q.device)
    for piece in layer.values.pieces(anchors):
        where = slice(piece.head, piece.head + piece.heads), slice(piece.row, piece.row + piece.rows)
        values = layer.values.view(piece)
        held = _gathered(slot_positions[where[0]], piece)[..., 0]
        is_anchor = piece.head < anchors
        others = slice(piece.head - anchors, piece.head - anchors + piece.heads)
        if is_anchor:
            keys = layer.keys.view(piece)
        else:
            near = layer.near_keys[others, where[1]]
            near_positions, near_slots = layer.near_positions[others, where[1]], layer.near_slots[others, where[1]]
            keys = None if scores is not None else [_gathered((part,), piece) for part in distant_keys[others]]
        chunk = max(1, min(count, MAX_LOGITS // max(1, piece.heads * piece.rows * groups * piece.capacity)))
        for first in range(0, count, chunk):
            part = slice(first, first + chunk)
            at = positions[where[1], part]
            if is_anchor:
                logits = _products(q[where][:, :, :, part], keys).float() * scale
                for index, head in enumerate(layer.order[where[0]]):
                    if scores is not None and head in score_heads:
                        scores[head, where[1], ..., : piece.capacity] = logits[index]
            else:
                if scores is not None:
                    mine = where[0] if layer.index is None else layer.index[where[0]]
                    logits = scores[mine, where[1], ..., : piece.capacity]
                else:
                    query = q_distant[where][:, :, :, part]
                    products = [_products(query[index : index + 1], one) for index, one in enumerate(keys)]
                    logits = torch.cat(products).float() * scale
                own = _products(q[where][:, :, :, part], near).float() * scale
                logits = _with_proximal(logits, own, at, near_positions, near_slots, layer)
            seen = (held[:, :, None] >= 0) & (held[:, :, None] <= at[..., None])
            logits = logits.masked_fill(~seen[:, :, None], torch.finfo(torch.float32).min)
            softmax = torch.softmax(logits, dim=-1)
            attended = (softmax.to(values.dtype).flatten(2, 3) @ values).unflatten(2, (groups, -1))
            out[where[0], where[1], :, part] = attended.masked_fill((at < 0)[None, :, None, :, None], 0)
            if weights is not None and is_anchor:
                weights[where[0], where[1], :, part, : piece.capacity] = softmax
    out = layer.by_head(out).transpose(0, 1).flatten(1, 2)
    return out if weights is None else (out, weights)


def attention_weights(q: Tensor, keys: Tensor, key_positions: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Softmax weights of a few queries over all keys at or before them, in float32.

    Args:
        q: [A, B, G, T, D] queries.
        keys: [A, B, N, D].
        key_positions: [A, B, N], -1 where a slot is empty.
        positions: [B, T], -1 for padding.
        scale: factor on every logit.

    Returns:
        [A, B, G, T, N] float32, zero for a padded query and for keys that it does not see.
    """
    logits = _products(q, keys).float() * scale
    held = key_positions[:, :, None]
    unseen = ~((held >= 0) & (held <= positions[..., None]))[:, :, None]
    return torch.softmax(logits.masked_fill_(unseen, torch.finfo(torch.float32).min), dim=-1).masked_fill_(unseen, 0)


def _gathered(parts: tuple[HeadOf, ...], piece: Piece) -> Tensor:
    """[heads, rows, C, D] of heads that lie in any segments: a view where they lie as in `piece`."""
    segments, first = parts[0]
    if all(other is segments and head == first + index for index, (other, head) in enumerate(parts)):
        return segments.view(piece._replace(head=first, heads=len(parts)))
    return torch.cat([other.view(piece._replace(head=head, heads=1)) for other, head in parts])


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """[h, B, G, t, D] queries with [h, B, N, D] keys -> [h, B, G, t, N], the keys read in place."""
    return (queries.flatten(2, 3) @ keys.transpose(2, 3)).unflatten(2, queries.shape[2:4])


def _with_proximal(
    logits: Tensor, own: Tensor, positions: Tensor, near_positions: Tensor, near_slots: Tensor, layer: PackedLayer
) -> Tensor:
    """`logits` [h, B, G, t, C] with the layer's own [h, B, G, t, M] in the slots of proximal tokens."""
    key, query = near_positions[:, :, None, :], positions[..., None]
    is_used = (key >= 0) & (key <= query) & ((key < layer.sink_size) | (query - key < layer.recent_size))
    # What is not used is written to one spare column, so that no mask has to be turned into indices.
    spare = logits.shape[-1]
    index = torch.where(is_used, near_slots[:, :, None, :].long(), spare)[:, :, None].expand(own.shape)
    return torch.nn.functional.pad(logits, (0, 1)).scatter_(-1, index, own)[..., :spare]
