"""Attention of a few queries to a cache: decoding, and prefill in chunks; nothing evicted, or tokens of any positions.

Legend: B rows, H query heads, H_kv KV heads, G = H / H_kv, T queries, D head dimension, C slots of a segment, A anchor
heads of the layer, S = H_kv - A its other heads, M places for own keys.

At decode an anchor head leaves the logits of its query in the cache's workspace. The block's other layers read those
numbers for distant positions, put their own logits in the place of the proximal ones, and never touch a distant key
(PoD, arXiv 2412.02252, section 2.3). With several queries the workspace would be [H, T, C], so the logits are computed
again from the anchor's queries and keys, a few queries at a time. Positions are those of the text (RoPE is absolute),
so proximal and distant mean the same whether tokens were evicted or not.

`reference_cached_attention` is the truth: plain loops over rows and heads. `cached_attention` is the same, batched:
segments of one size at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from pod_kernels.dispatch import runs_triton
from pod_kernels.segments import MAX_LOGITS, HeadOf, LayerSlots, Piece, products, weighted
from pod_kernels.skipping import SkipStats, attend_skipping

LOWEST = torch.finfo(torch.float32).min
Masks = dict[str | tuple[str, int], Tensor]  # masks and indices that all layers of one forward share


def reference_cached_attention(q: Tensor, layer: LayerSlots, **options) -> Tensor | tuple[Tensor, ...]:
    """The same as `cached_attention`, one row and one head at a time. See there for the arguments (no `by_kernels`)."""
    asked = _Asked(q, layer, **options)
    positions, table, scores, scale = asked.positions, asked.table, asked.scores, asked.scale
    batch, heads, count, _ = q.shape
    groups = heads // layer.kv_heads
    out = torch.zeros_like(q)
    lse = torch.full((batch, heads, count), -torch.inf, device=q.device)
    gate = torch.ones(batch, heads, count, device=q.device)
    anchor_weights = asked.no_weights()

    def stored(part: HeadOf, row: int) -> Tensor:
        segments, head = part
        offset = int(segments.offsets[row, head])
        return segments.data[offset : offset + int(segments.capacities[row, head])]

    def own_keys(row: int, shared: int) -> list[tuple[int, Tensor]]:
        """(position, key) of the proximal tokens that one of the other heads knows."""
        known = layer.near_positions
        known = layer.ring_positions(positions[:, 0] + 1)[None] if known is None else known
        near = known.expand(len(layer.near_keys), -1, -1)[shared, row]
        return list(zip(near.tolist(), layer.near_keys[shared, row].float(), strict=True))

    for row in range(batch):
        for place, kv_head in enumerate(layer.order):
            shared = place - layer.num_anchors
            values = stored((layer.values, place), row).float()
            held = range(len(values)) if table is None else stored(table[place], row)[:, 0].tolist()
            skips = []
            for head in range(kv_head * groups, (kv_head + 1) * groups):
                for query in range(count):
                    position = int(positions[row, query])
                    if position < 0:
                        continue
                    own = q[row, head, query].float()
                    seen = [slot for slot, at in enumerate(held) if 0 <= at <= position]
                    slot_of = {held[slot]: index for index, slot in enumerate(seen)}
                    if shared < 0:
                        logits = stored((layer.keys, place), row)[seen].float() @ own * scale
                        if scores is not None and kv_head in asked.score_heads:
                            scores[kv_head, row, head % groups, query, seen] = logits
                    elif scores is not None:
                        logits = scores[kv_head, row, head % groups, query, seen].float().clone()
                    else:
                        keys = stored(asked.distant_keys[shared], row)[seen].float()
                        logits = keys @ asked.q_distant[row, head, query].float() * scale
                    near = [at < layer.sink_size or position - at < layer.recent_size for at in slot_of]
                    for at, key in own_keys(row, shared) if shared >= 0 else ():
                        if at in slot_of and near[slot_of[at]]:
                            logits[slot_of[at]] = key @ own * scale
                    weights = torch.softmax(logits, dim=0)
                    if asked.return_weights and shared < 0:
                        anchor_weights[place, row, head % groups, query, seen] = weights
                    lse[row, head, query] = torch.logsumexp(logits, dim=0)
                    is_distant = ~torch.tensor(near, dtype=torch.bool, device=q.device)
                    gate[row, head, query] = 1 - weights[is_distant].sum()
                    if shared >= 0 and count == 1 and asked.tau is not None:
                        skips.append(bool(gate[row, head, query] >= asked.tau))
                        if skips[-1]:
                            weights = torch.softmax(logits.masked_fill(is_distant, -torch.inf), dim=0)
                    out[row, head, query] = (weights @ values[seen]).to(q.dtype)
            if skips and asked.stats is not None:
                asked.stats.add(skips, int(is_distant.sum()))
    return asked.results(out, lse, gate, anchor_weights)


def cached_attention(
    q: Tensor,
    layer: LayerSlots,
    *,
    positions: Tensor,
    table: tuple[HeadOf, ...] | None = None,
    unused: int = 0,
    sees_all: bool = False,
    scores: Tensor | None = None,
    score_heads: tuple[int, ...] = (),
    q_distant: Tensor | None = None,
    distant_keys: tuple[HeadOf, ...] = (),
    scale: float | None = None,
    masks: Masks | None = None,
    tau: float | None = None,
    stats: SkipStats | None = None,
    return_lse: bool = False,
    return_gate: bool = False,
    return_weights: bool = False,
    by_kernels: bool | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Attention of T queries to everything that the cache holds up to each of them.

    The queries' own keys and values are in the cache already. Several queries need own keys with their positions: in a
    ring, the last ones would have pushed out entries that the first ones still need.

    Args:
        q: [B, H, T, D].
        layer: the layer's slots.
        positions: [B, T] int64, each query's position in its row, -1 for padding.
        table: for each KV head in storage order, where the positions of its slots lie ([S, 1] int32, -1 for an empty
            slot); None: slot = position.
        unused: so many last slots of every segment hold nothing.
        sees_all: the one query of every row sees all slots but these: it then needs neither mask nor index.
        scores: the cache's workspace [H_kv, B, G, 1, >= C - unused] float32. Anchor heads write their logits into it,
            the other heads read those of their anchor. None: they compute them from `q_distant` and `distant_keys`.
        score_heads: the KV heads among the anchors whose logits a later layer reads.
        q_distant: [B, H, T, D] queries for distant logits (the anchor's; the layer's own under `share: keys`).
        distant_keys: for each of the S other heads, in storage order, the anchor's key segments and the head in them.
        scale: factor on every logit; D ** -0.5 when None.
        masks: what all layers of a forward have in common is kept here: an empty dictionary for every forward.
        tau: with one query and no table, heads that are no anchors leave distant tokens out where the gate is at least
            tau; see `pod_kernels.skipping`. None leaves out none.
        stats: what tau decided is added to it.
        return_lse, return_gate: also return [B, H, T] float32 each, as `shared_score_attention` does, whatever tau is.
        return_weights: also return the anchor heads' weights.
        by_kernels: whether Triton's kernels run, as far as they can; None asks `dispatch.runs_triton`.

    Returns:
        out [B, H, T, D] in q's dtype, zero at padding (+ lse, gate, weights [A, B, G, T, C] float32 in storage order
        with C the largest capacity, zero for slots that are not seen).

    Source:
        PoD (arXiv 2412.02252), Eq. 3, 4 and section 2.3; over the tokens that are kept.
    """
    by_kernels = q.shape[2] == 1 and (runs_triton(q) if by_kernels is None else by_kernels)
    is_plain = sees_all and layer.num_anchors == layer.kv_heads and not (score_heads and scores is not None)
    if is_plain and not (by_kernels or return_lse or return_gate or return_weights):
        return _plain_attention(q, layer, unused, scale)
    read = positions, table, unused, sees_all, scores, score_heads, q_distant, distant_keys
    options = scale, masks, tau, stats, return_lse, return_gate, return_weights
    asked = _Asked(q, layer, *read, *options)
    if by_kernels:
        from pod_kernels.triton.decode import cached_decode  # imports triton

        return asked.results(*cached_decode(asked))
    return asked.results(*_attend(asked))


@dataclass
class _Asked:
    """The arguments of `cached_attention`, where they are documented, in its order; no `scale` or `masks` is None."""

    q: Tensor
    layer: LayerSlots
    positions: Tensor
    table: tuple[HeadOf, ...] | None = None
    unused: int = 0
    sees_all: bool = False
    scores: Tensor | None = None
    score_heads: tuple[int, ...] = ()
    q_distant: Tensor | None = None
    distant_keys: tuple[HeadOf, ...] = ()
    scale: float | None = None
    masks: Masks | None = None
    tau: float | None = None
    stats: SkipStats | None = None
    return_lse: bool = False
    return_gate: bool = False
    return_weights: bool = False

    def __post_init__(self) -> None:
        self.scale = self.q.shape[-1] ** -0.5 if self.scale is None else self.scale
        self.masks = {} if self.masks is None else self.masks

    def grouped(self, tensor: Tensor) -> Tensor:
        """[B, H, T, D] -> [H_kv, B, G, T, D] in storage order."""
        return self.layer.stored(tensor.unflatten(1, (self.layer.kv_heads, -1)).transpose(0, 1))

    def no_weights(self) -> Tensor | None:
        """[A, B, G, T, C] float32 zeros for the anchor heads' weights, where they are wanted."""
        if not self.return_weights:
            return None
        batch, heads, count, _ = self.q.shape
        shape = self.layer.num_anchors, batch, heads // self.layer.kv_heads, count, self.layer.keys.widest
        return self.q.new_zeros(shape, dtype=torch.float32)

    def results(
        self, out: Tensor, lse: Tensor | None, gate: Tensor | None, weights: Tensor | None
    ) -> Tensor | tuple[Tensor, ...]:
        """What the caller asked for, of what an implementation returned."""
        wanted = [*[lse] * self.return_lse, *[gate] * self.return_gate, *[weights] * self.return_weights]
        return (out, *wanted) if wanted else out

    def logits(
        self, q: Tensor, q_distant: Tensor | None, piece: Piece, num_own: int, part: slice, width: int, in_runs: bool
    ) -> Tensor:
        """Logits of some queries in the first `width` slots of a piece, proximal ones and then the others in place.

        Args:
            q, q_distant: [H_kv, B, G, T, D] in storage order.
            piece: of the values.
            num_own: how many of its heads, the first ones, are anchors.
            part: the queries.
            width: slots in use.
            in_runs: the proximal keys of the one query lie in runs of the ring, or the piece has anchors alone.

        Returns:
            [h, b, G, t, width] float32, or a spare column more: without runs, what is no proximal key of its query is
            written there, so that no mask has to be turned into indices.
        """
        layer, scores = self.layer, self.scores
        rows, anchors = slice(piece.row, piece.row + piece.rows), layer.num_anchors
        first, last = piece.head + num_own, piece.head + piece.heads  # of the other heads
        q = q[piece.head : last, rows, :, part]
        logits = q.new_empty(*q.shape[:4], width + (not in_runs), dtype=torch.float32)
        if num_own:
            keys = layer.keys.view(piece._replace(heads=num_own))[:, :, :width]
            products(q[:num_own], keys, self.scale, logits[:num_own])
            for place, head in enumerate(layer.order[piece.head : first]):
                if scores is not None and head in self.score_heads:
                    scores[head, rows, ..., part, :width] = logits[place, ..., :width]
        if num_own == piece.heads:
            return logits
        if scores is not None:
            left, here = scores[:, rows, ..., part, :width], logits[num_own:, ..., :width]
            if layer.index is None:
                here.copy_(left[first:last])
            else:  # in a third of the time of an index among slices
                torch.index_select(left, 0, layer.index[first:last], out=here)
        for place in range(first, last) if scores is None else ():
            keys = _gathered((self.distant_keys[place - anchors],), piece)[:, :, :width]
            query = q_distant[place : place + 1, rows, :, part]
            products(query, keys, self.scale, logits[place - piece.head][None])
        others = slice(first - anchors, last - anchors)
        near = products(q[num_own:], layer.near_keys[others, rows], self.scale)
        if in_runs:
            for position, place, run in layer.proximal_runs(width):
                logits[num_own:, ..., position : position + run] = near[..., place : place + run]
        else:
            index = self._proximal_index(others, rows, part, width)
            logits[num_own:].scatter_(-1, index.expand(near.shape), near)
        return logits

    def _proximal_index(self, others: slice, rows: slice, part: slice, spare: int) -> Tensor:
        """[h, b, 1, t, M] int64, the slot of each own key that is proximal to a query, else `spare`."""
        layer, at = self.layer, self.positions[rows, part]
        key, slots = layer.near_positions, layer.near_slots
        if key is None:
            key = slots = layer.ring_positions(self.positions[:, 0] + 1)[None]
        is_in_order = self.table is None  # slot = position, in all layers
        is_common = is_in_order and at.shape == self.positions.shape
        # A forward that broke off may have widened the rings of its first layers alone.
        name = "index", key.shape[-1]
        if is_common and name in self.masks:
            return self.masks[name]
        if not is_in_order:
            key, slots = key[others], slots[others]
        key, query = key[:, rows, None], at[..., None]
        is_used = (key > (query - layer.recent_size).clamp_(min=-1)) | ((key >= 0) & (key < layer.sink_size))
        if self.q.shape[2] > 1:  # a single one has seen all that is stored
            is_used &= key <= query
        index = torch.where(is_used, slots[:, rows, None].long(), spare)[:, :, None]
        if is_common:
            self.masks[name] = index
        return index


def _attend(asked: _Asked) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Segments of one size at once; lse, gate and weights where they are wanted."""
    layer, positions, unused, sees_all = asked.layer, asked.positions, asked.unused, asked.sees_all
    q, q_distant = (None if part is None else asked.grouped(part) for part in (asked.q, asked.q_distant))
    groups, count = q.shape[2:4]
    out, weights = torch.empty_like(q), asked.no_weights()
    lse, gate = (
        q.new_empty(out.shape[:4], dtype=torch.float32) if wanted else None
        for wanted in (asked.return_lse, asked.return_gate)
    )
    for piece in layer.values.pieces:
        heads_here, rows = slice(piece.head, piece.head + piece.heads), slice(piece.row, piece.row + piece.rows)
        num_own = min(max(layer.num_anchors - piece.head, 0), piece.heads)  # anchor heads of this piece
        # One query that sees all there is needs no index where its proximal keys lie in the runs of a ring.
        in_runs = num_own == piece.heads or (sees_all and layer.near_positions is None)
        width = piece.capacity - unused
        values = layer.values.view(piece)[:, :, :width]
        held = None
        if asked.table is not None and (asked.return_gate or not sees_all):
            held = pad(_gathered(asked.table[heads_here], piece)[:, :, :width, 0], (0, 1), value=-1)
        chunk = max(1, min(count, MAX_LOGITS // max(1, piece.heads * piece.rows * groups * width)))
        for first in range(0, count, chunk):
            part = slice(first, first + chunk)
            here, at = (heads_here, rows, slice(None), part), positions[rows, part]
            logits = asked.logits(q, q_distant, piece, num_own, part, width, in_runs)
            columns = logits.shape[-1]
            seen = None if held is None else held[..., :columns]
            if not sees_all:
                logits.masked_fill_(_hidden(at, columns, seen, asked.masks, chunk == count), LOWEST)
            if columns > width:
                logits[..., width:].fill_(LOWEST)
            softmax = torch.softmax(logits, dim=-1)
            if asked.tau is None or count > 1 or num_own == piece.heads:
                attended = weighted(softmax[..., :width].flatten(2, 3), values)
            else:
                attended = attend_skipping(logits[..., :width], values, at, layer, asked.tau, asked.stats)
            attended, is_padding = attended.unflatten(2, (groups, -1)), (at < 0)[None, :, None]
            out[here] = attended if sees_all else attended.masked_fill_(is_padding[..., None], 0)
            if asked.return_lse:
                lse[here] = torch.logsumexp(logits, dim=-1).masked_fill(is_padding, -torch.inf)
            if asked.return_gate:
                known = torch.arange(columns, device=q.device) if seen is None else seen[:, :, None, None]
                is_distant = (known >= layer.sink_size) & (known <= at[:, None, :, None] - layer.recent_size)
                gate[here] = 1 - (softmax * is_distant).sum(dim=-1)
            if asked.return_weights and num_own:
                own = slice(piece.head, piece.head + num_own)
                weights[own, rows, :, part, :width] = softmax[:num_own, ..., :width]
    # [H_kv, B, G, T, ..] in storage order -> [B, H, T, ..]
    parts = [None if part is None else layer.by_head(part).transpose(0, 1).flatten(1, 2) for part in (out, lse, gate)]
    return *parts, weights


def _plain_attention(q: Tensor, layer: LayerSlots, unused: int, scale: float | None) -> Tensor:
    """Of one query that sees all slots but the last ones, in a layer of anchors whose logits no other layer reads."""
    batch, _, _, dim = q.shape
    asked = q.view(batch, len(layer.order), -1, dim)  # a KV head's query heads as that many queries
    out, pieces = torch.empty_like(asked), layer.values.pieces
    with _without_cudnn(q):
        for piece in pieces:
            here = slice(piece.row, piece.row + piece.rows), slice(piece.head, piece.head + piece.heads)
            held = (part.view(piece)[:, :, : piece.capacity - unused] for part in (layer.keys, layer.values))
            found = scaled_dot_product_attention(asked[here], *(part.transpose(0, 1) for part in held), scale=scale)
            if len(pieces) == 1:
                return found.flatten(1, 2)[:, :, None]
            out[here] = found
    return out.flatten(1, 2)[:, :, None]


@contextmanager
def _without_cudnn(q: Tensor) -> Iterator[None]:
    """In the block torch does not ask cuDNN for attention, which plans anew for each number of keys.

    The newest GPUs are asked that first: on an H200 with torch 2.11 a token took 66 ms so (eval/RESULTS.md).
    """
    asks = q.is_cuda and torch.backends.cuda.cudnn_sdp_enabled()
    if asks:
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        if asks:
            torch.backends.cuda.enable_cudnn_sdp(True)


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
    unseen = _hidden(positions, keys.shape[2], key_positions, {}, keep=False)
    logits = products(q, keys, scale).masked_fill_(unseen, LOWEST)
    return torch.softmax(logits, dim=-1).masked_fill_(unseen, 0)


def _gathered(parts: tuple[HeadOf, ...], piece: Piece) -> Tensor:
    """[heads, rows, C, D] of heads that lie in any segments: a view where they lie as in `piece`."""
    segments, first = parts[0]
    if all(other is segments and head == first + index for index, (other, head) in enumerate(parts)):
        return segments.view(piece._replace(head=first, heads=len(parts)))
    return torch.cat([other.view(piece._replace(head=head, heads=1)) for other, head in parts])


def _hidden(positions: Tensor, width: int, held: Tensor | None, masks: Masks, keep: bool) -> Tensor:
    """[h, B, 1, t, width] bool, the slots that queries at `positions` [B, t] do not see.

    `held` [h, B, width]: the positions in the slots, -1 where there is none; None: slot = position, and h is 1. `keep`:
    these are all queries of the forward, of which layers have the mask in common.
    """
    if held is not None:
        held = held[:, :, None]
        return ~((held >= 0) & (held <= positions[..., None]))[:, :, None]
    hidden = masks.get(("hidden", width)) if keep else None
    if hidden is None:
        column = torch.arange(width, device=positions.device)
        hidden = (column > positions[..., None])[None, :, None]
        if keep:
            masks["hidden", width] = hidden
    return hidden
