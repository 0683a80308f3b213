"""Attention of a prompt whose queries, but for the last ones, see sinks and recent keys alone (TriangleMix, tri-shape).

Legend: B rows, H query heads, H_kv KV heads, G = H / H_kv, T tokens, D head dimension.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pod_kernels.attention import sequence_groups
from pod_kernels.segments import MAX_LOGITS, products

CHUNK = 256  # queries of a window that look at keys together: each reads as many keys too many


@dataclass(frozen=True)
class TriangleMix:
    """A prompt is read sparsely in the upper layers: first and recent tokens alone, by all but the last queries.

    As in microsoft/MInference: TriangleMix has 8 sinks and a window of 512 from half of the layers on, and the last
    128 queries see everything. `TriangleMix(0, 128, 3968, 100)` is plain tri-shape. It is approximate: the prompt's
    hidden states and later layers' keys are no longer the model's.

    Args:
        starting_layer: the first layer that is read so; None: half of the layers are read whole.
        sinks: first tokens that every query sees.
        window: last tokens that every query sees, itself included.
        last: queries at the end of the prompt that see everything.

    Raises:
        ValueError: a value is out of range; names it.
    """

    starting_layer: int | None = None
    sinks: int = 8
    window: int = 512
    last: int = 128

    def __post_init__(self) -> None:
        for one in fields(self):
            value, least = getattr(self, one.name), int(one.name == "window")
            is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not is_whole and (value is not None or one.name != "starting_layer"):
                raise ValueError(f"TriangleMix: {one.name} must be a whole number from {least} on, got {value!r}")

    def acts(self, layer: int, layers: int) -> bool:
        """Whether a layer, of so many, is read sparsely."""
        return layer >= (layers // 2 if self.starting_layer is None else self.starting_layer)


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_distant: Tensor | None,
    k_distant: Tensor | None,
    shape: TriangleMix,
    *,
    sink_size: int,
    recent_size: int,
    scale: float,
    lengths: Tensor | None = None,
) -> Tensor:
    """`shared_score_attention` of those pairs alone that a `TriangleMix` leaves.

    A pair (i, j) of a row of n tokens is left when j <= i and one of j < sinks, i - j < window, i >= n - last is true;
    its logit is what it is there, proximal or distant by the model's own sizes.

    Args:
        q, k, v, q_distant, k_distant, sink_size, recent_size, scale, lengths: as there.
        shape: which pairs are left.

    Returns:
        [B, H, T, D], zero at padding.

    Source:
        TriangleMix and tri-shape as microsoft/MInference has them.
    """
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    groups = sequence_groups(q, lengths, None)
    for rows, start, stop in [(slice(None), 0, q.shape[2])] if groups is None else groups:
        parts = (None if x is None else x[rows, :, start:stop] for x in (q, k, v, q_distant, k_distant))
        out[rows, :, start:stop] = _of_rows(*parts, shape, sink_size, recent_size, scale)
    return out


def _of_rows(q, k, v, q_distant, k_distant, shape: TriangleMix, sinks: int, recent: int, scale: float) -> Tensor:
    """The same of rows without padding."""
    length, kv_heads, out = q.shape[2], k.shape[1], torch.empty_like(q)
    place = torch.arange(length, device=q.device)
    tail, first = max(0, length - shape.last), 0
    is_all_near = shape.sinks <= sinks and shape.window <= recent  # but for the last queries
    while first < length:
        start = 0 if first >= tail else max(0, first - shape.window + 1)  # of the keys, the sinks aside
        most = max(1, MAX_LOGITS // (q.shape[0] * q.shape[1] * (length if first >= tail else shape.window + CHUNK)))
        last = min(first + min(CHUNK, most), tail if first < tail else length)

        def seen(x: Tensor, start=start, last=last) -> Tensor:
            """The keys' entries; the queries of this chunk see none of the others."""
            return torch.cat([x[..., : min(shape.sinks, start), :], x[..., start:last, :]], dim=-2)

        query, key = place[first:last, None], seen(place[:, None]).T
        is_left = (key <= query) & ((key < shape.sinks) | (query - key < shape.window) | (query >= tail))
        keys, values, asked = seen(k), seen(v), q[:, :, first:last]
        if q_distant is None or (is_all_near and first < tail):
            is_grouped = {"enable_gqa": kv_heads != q.shape[1]}
            found = scaled_dot_product_attention(asked, keys, values, is_left, scale=scale, **is_grouped)
        else:
            is_near = (key < sinks) | (query - key < recent)
            own = products(asked.unflatten(1, (kv_heads, -1)), keys, scale)
            distant = products(q_distant[:, :, first:last].unflatten(1, (kv_heads, -1)), seen(k_distant), scale)
            logits = torch.where(is_near, own, distant).masked_fill(~is_left, -torch.inf)
            weights = torch.softmax(logits, dim=-1).to(values.dtype).flatten(2, 3)
            found = (weights @ values).unflatten(2, logits.shape[2:4]).flatten(1, 2)
        out[:, :, first:last] = found
        first = last
    return out
