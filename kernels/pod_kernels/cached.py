"""Attention of a few queries to a cache: decoding, and prefill in chunks.

Legend: B rows, H query heads, H_kv KV heads, G = H / H_kv, T queries, D head dimension, N stored positions, A anchor
heads of the layer, S = H_kv - A its other heads.

At decode an anchor head leaves the logits of its query in the cache's workspace. The block's other layers read those
numbers for distant positions, put their own logits in the place of the proximal ones, and never touch a distant key
(PoD, arXiv 2412.02252, section 2.3). With several queries the workspace would be [H, T, N], so the logits are computed
again from the anchor's queries and keys, a few queries at a time.

`reference_cached_attention` is the truth: plain loops over rows and heads. `cached_attention` is the same, batched.
"""

import torch
from torch import Tensor

from pod_kernels.backend import runs_triton
from pod_kernels.segments import LayerSegments, Segments
from pod_kernels.skipping import SkipStats, attend_skipping

# Logits that one chunk of queries may materialise; 2**25 float32 numbers are 128 MiB.
MAX_LOGITS = 2**25

Masks = dict[str | tuple[str, int], Tensor]  # masks and indices that all layers of one forward share


def reference_cached_attention(
    q: Tensor,
    layer: LayerSegments,
    *,
    positions: Tensor,
    lengths: Tensor,
    length: int,
    scores: Tensor | None = None,
    score_heads: tuple[int, ...] = (),
    q_distant: Tensor | None = None,
    distant_keys: tuple[tuple[Segments, int], ...] = (),
    new_keys: Tensor | None = None,
    scale: float | None = None,
    tau: float | None = None,
    stats: SkipStats | None = None,
    return_lse: bool = False,
    return_gate: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """The same as `cached_attention`, one row and one head at a time. See there for the arguments."""
    batch, heads, count, dim = q.shape
    groups = heads // len(layer.order)
    scale = dim**-0.5 if scale is None else scale
    out = torch.zeros_like(q)
    lse = torch.full((batch, heads, count), -torch.inf, device=q.device)
    gate = torch.ones(batch, heads, count, device=q.device)

    def stored(segments: Segments, row: int, head: int) -> Tensor:
        offset = int(segments.offsets[row, head])
        return segments.data[offset : offset + int(segments.capacities[row, head])].float()

    for row in range(batch):
        near_positions = layer.near_positions(lengths)[row].tolist() if len(layer.order) > layer.num_anchors else []
        for place, kv_head in enumerate(layer.order):
            shared = place - layer.num_anchors
            skips = []
            for head in range(kv_head * groups, (kv_head + 1) * groups):
                for query in range(count):
                    position = int(positions[row, query])
                    if position < 0:
                        continue
                    own = q[row, head, query].float()
                    seen = position + 1
                    if shared < 0:
                        logits = stored(layer.keys, row, place)[:seen] @ own * scale
                        if scores is not None and kv_head in score_heads:
                            scores[kv_head, row, head % groups, query, :seen] = logits
                    elif scores is not None:
                        logits = scores[kv_head, row, head % groups, query, :seen].float().clone()
                    else:
                        segments, index = distant_keys[shared]
                        logits = stored(segments, row, index)[:seen] @ q_distant[row, head, query].float() * scale
                    if shared >= 0:
                        keys = list(zip(near_positions, stored(layer.near, row, shared), strict=True))
                        if new_keys is not None:
                            keys += list(zip(positions[row].tolist(), new_keys[row, shared].float(), strict=True))
                        for key_position, key in keys:
                            proximal = key_position < layer.sink_size or position - key_position < layer.recent_size
                            if 0 <= key_position <= position and proximal:
                                logits[key_position] = key @ own * scale
                    weights = torch.softmax(logits, dim=0)
                    lse[row, head, query] = torch.logsumexp(logits, dim=0)
                    distant = slice(layer.sink_size, max(layer.sink_size, seen - layer.recent_size))
                    gate[row, head, query] = 1 - weights[distant].sum()
                    if shared >= 0 and count == 1 and tau is not None:
                        skips.append(bool(gate[row, head, query] >= tau))
                        if skips[-1]:
                            logits[distant] = -torch.inf
                            weights = torch.softmax(logits, dim=0)
                    out[row, head, query] = (weights @ stored(layer.values, row, place)[:seen]).to(q.dtype)
            if skips and stats is not None:
                stats.add(skips, distant.stop - distant.start)
    return _results(out, lse, gate, return_lse, return_gate)


def _results(out: Tensor, lse: Tensor, gate: Tensor, return_lse: bool, return_gate: bool) -> Tensor | tuple:
    results = [out] + [lse] * return_lse + [gate] * return_gate
    return results[0] if len(results) == 1 else tuple(results)


def cached_attention(
    q: Tensor,
    layer: LayerSegments,
    *,
    positions: Tensor,
    lengths: Tensor,
    length: int,
    is_even: bool = False,
    scores: Tensor | None = None,
    score_heads: tuple[int, ...] = (),
    q_distant: Tensor | None = None,
    distant_keys: tuple[tuple[Segments, int], ...] = (),
    new_keys: Tensor | None = None,
    scale: float | None = None,
    masks: Masks | None = None,
    tau: float | None = None,
    stats: SkipStats | None = None,
    return_lse: bool = False,
    return_gate: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Attention of T queries to everything the cache holds up to each of them.

    The queries' own values, and the anchor heads' own keys, are in the cache already. The other heads' own keys are
    either in `layer.near` (one query: the ring has room for it) or in `new_keys` (several: writing them first would
    push out ring entries that the first queries still need).

    Args:
        q: [B, H, T, D].
        layer: the layer's segments.
        positions: [B, T] int64, each query's position in its row, -1 for padding.
        lengths: [B] int64, tokens that `layer.near` was written with.
        length: N, one more than the largest position.
        is_even: the last query of every row is at position N - 1. One query then needs neither mask nor index.
        scores: the cache's workspace [H_kv, B, G, T, >= N] float32. Anchor heads write their logits into it, the other
            heads read those of their anchor. None: the other heads compute them from `q_distant` and `distant_keys`.
        score_heads: the KV heads among the anchors whose logits a later layer reads.
        q_distant: [B, H, T, D] queries for distant logits (the anchor's; the layer's own under `share: keys`).
        distant_keys: for each of the S other heads, in storage order, the anchor's key segments and the head in them.
        new_keys: [B, S, T, D] the other heads' own keys of the queries' tokens, when not yet in `layer.near`.
        scale: factor on every logit; D ** -0.5 when None.
        masks: what all layers of a forward have in common is kept here: an empty dictionary for every forward.
        tau: with one query, heads that are no anchors leave distant tokens out where the gate is at least tau; see
            `pod_kernels.skipping`. None leaves out none.
        stats: what tau decided is added to it.
        return_lse, return_gate: also return [B, H, T] float32 each, as `shared_score_attention` does, whatever tau is.

    Returns:
        out [B, H, T, D] in q's dtype, zero at padding (+ lse, gate).

    Source:
        PoD (arXiv 2412.02252), Eq. 3, 4 and section 2.3.
    """
    batch, heads, count, dim = q.shape
    kv_heads, anchors = len(layer.order), layer.num_anchors
    groups = heads // kv_heads
    scale = dim**-0.5 if scale is None else scale
    if count == 1 and new_keys is None and runs_triton(q):
        from pod_kernels.decode import cached_decode  # imports triton

        out, lse, gate = cached_decode(
            q,
            layer,
            positions=positions,
            scores=scores,
            score_heads=score_heads,
            q_distant=q_distant,
            distant_keys=distant_keys,
            scale=scale,
            tau=tau,
            stats=stats,
        )
        return _results(out, lse, gate, return_lse, return_gate)
    masks = {} if masks is None else masks
    has_shared = anchors < kv_heads
    # One query that sees all there is: what is proximal lies in two or three runs.
    in_runs = is_even and count == 1 and new_keys is None

    def grouped(tensor: Tensor) -> Tensor:  # [B, H, T, D] -> [H_kv, B, G, T, D] in storage order
        return layer.stored(tensor.view(batch, kv_heads, groups, count, dim).transpose(0, 1))

    q = grouped(q)
    q_distant = grouped(q_distant)[anchors:] if q_distant is not None else None
    values = layer.values.rectangle[:, :, :length]
    near_keys = near_positions = None
    if has_shared:
        near_keys = layer.near.rectangle
        if new_keys is not None:
            near_keys = torch.cat([near_keys, new_keys.transpose(0, 1)], dim=2)
        if not in_runs:
            if "near" not in masks:
                known = layer.near_positions(lengths)
                masks["near"] = known if new_keys is None else torch.cat([known, positions], dim=1)
            near_positions = masks["near"]

    # What is no proximal key of its query is written to one spare column, so that no mask is turned into indices.
    width = length + (has_shared and not in_runs)
    chunk = max(1, min(count, MAX_LOGITS // max(1, batch * heads * length)))
    pieces = []
    for first in range(0, count, chunk):
        part = slice(first, first + chunk)
        at = positions[:, part]
        logits = q.new_empty(kv_heads, batch, groups, at.shape[1], width, dtype=torch.float32)
        if anchors:
            _products(q[:anchors, :, :, part], layer.keys.rectangle[:, :, :length], scale, logits[:anchors])
            for place in range(anchors):
                if scores is not None and layer.order[place] in score_heads:
                    scores[layer.order[place], ..., part, :length] = logits[place, ..., :length]
        if has_shared:
            if scores is None:
                for place, (segments, index) in enumerate(distant_keys):
                    keys = segments.rectangle[index : index + 1, :, :length]
                    query = q_distant[place : place + 1, :, :, part]
                    _products(query, keys, scale, logits[anchors + place : anchors + place + 1])
            else:
                for place in range(anchors, kv_heads):
                    logits[place, ..., :length] = scores[layer.order[place], ..., part, :length]
            own = _products(q[anchors:, :, :, part], near_keys, scale)
            if in_runs:
                for position, slot, run in layer.proximal_runs(length):
                    logits[anchors:, ..., position : position + run] = own[..., slot : slot + run]
            else:
                _put_proximal(logits[anchors:], own, at, near_positions, layer, masks, chunk == count)
        if not in_runs:
            logits.masked_fill_(_hidden(at, width, masks, chunk == count), torch.finfo(torch.float32).min)
        weights = torch.softmax(logits, dim=-1)
        if tau is None or count > 1 or anchors == kv_heads:
            out = weights[..., :length].to(values.dtype).flatten(2, 3) @ values
        else:
            out = attend_skipping(logits[..., :length], values, at, layer, tau, stats)
        out = out.unflatten(2, (groups, -1))
        if not in_runs:
            out = out.masked_fill((at < 0)[None, :, None, :, None], 0)
        lse = gate = out.new_empty(0)
        if return_lse:
            lse = torch.logsumexp(logits, dim=-1).masked_fill((at < 0)[None, :, None], -torch.inf)
        if return_gate:
            column = torch.arange(width, device=q.device)
            is_distant = (column >= layer.sink_size) & (column <= at[..., None] - layer.recent_size)
            gate = 1 - (weights * is_distant[None, :, None]).sum(dim=-1)
        pieces.append((out, lse, gate))

    def joined(tensors: list[Tensor], dim: int) -> Tensor:  # [H_kv, B, G, t, ..] pieces -> [B, H, T, ..]
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=dim)
        return layer.by_head(whole).transpose(0, 1).flatten(1, 2)

    out = joined([piece[0] for piece in pieces], 3)
    lse = joined([piece[1] for piece in pieces], 3) if return_lse else out
    gate = joined([piece[2] for piece in pieces], 3) if return_gate else out
    return _results(out, lse, gate, return_lse, return_gate)


def _products(queries: Tensor, keys: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """[h, B, G, t, D] queries with [h, B, N, D] keys -> [h, B, G, t, N] float32 logits, the keys read in place.

    `out` [h, B, G, t, N or more] takes them in its first columns.
    """
    products = (queries.flatten(2, 3) @ keys.transpose(2, 3)).unflatten(2, queries.shape[2:4])
    if out is None:
        return products.float().mul_(scale)
    return torch.mul(products.float(), scale, out=out[..., : keys.shape[2]])


def _hidden(positions: Tensor, width: int, masks: Masks, keep: bool) -> Tensor:
    """[1, B, 1, t, width] bool, the columns that a query at its position [B, t] does not see."""
    hidden = masks.get(("hidden", width))
    if hidden is None:
        column = torch.arange(width, device=positions.device)
        hidden = (column > positions[..., None])[None, :, None]
        if keep:
            masks["hidden", width] = hidden
    return hidden


def _put_proximal(
    logits: Tensor,
    own: Tensor,
    positions: Tensor,
    near_positions: Tensor,
    layer: LayerSegments,
    masks: Masks,
    keep: bool,
) -> None:
    """Overwrite the proximal columns of `logits` [S, B, G, t, N + 1] with the layer's own [S, B, G, t, M]."""
    index = masks.get("index")
    if index is None:
        key, query = near_positions[:, None, :], positions[..., None]
        proximal = (key < layer.sink_size) | (query - key < layer.recent_size)
        is_used = (key >= 0) & (key <= query) & proximal
        index = torch.where(is_used, key, logits.shape[-1] - 1)[None, :, None]
        if keep:
            masks["index"] = index
    logits.scatter_(-1, index.expand(own.shape), own)
