"""Early skip at decode: where a query's softmax mass is proximal, a layer leaves its distant values unread.

A layer that shares its anchor's distant scores knows the gate (the share of a query's softmax mass on proximal tokens)
before it reads any distant value. Where the gate is at least tau, per row and query head, the output is attention to
the proximal tokens alone. The values of a KV head's distant tokens are unread where all of its query heads skip (PoD,
arXiv 2412.02252, section 2.3).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pod_kernels.segments import LayerSlots


@dataclass
class SkipStats:
    """What early skip decided and saved, summed over decoded tokens.

    Attributes:
        decisions: (row, query head, layer) that are no anchors and had distant tokens.
        skipped: those of them that read no distant token.
        distant_values: value vectors of the distant tokens of those layers' rows and KV heads.
        unread_values: those of them that no query head of their group needed: unread on a CPU and by the kernels.
    """

    decisions: int = 0
    skipped: int = 0
    distant_values: int = 0
    unread_values: int = 0

    _counts: ClassVar[Tensor | None] = None  # [B, H_kv, 4] int64, an instance's own once kernels count

    def counter(self, batch: int, kv_heads: int, device: torch.device) -> Tensor:
        """[B, H_kv, 4] int64 on the device, the four counts of each row and KV head: kernels add to it."""
        if self._counts is None or self._counts.shape[:2] != (batch, kv_heads) or self._counts.device != device:
            self.collect()
            self._counts = torch.zeros(batch, kv_heads, 4, dtype=torch.long, device=device)
        return self._counts

    def collect(self) -> "SkipStats":
        """These counts with what kernels have counted since; the one moment that waits for the device."""
        if self._counts is not None:
            more = self._counts.sum(dim=(0, 1)).tolist()
            for name, count in zip(("decisions", "skipped", "distant_values", "unread_values"), more, strict=True):
                setattr(self, name, getattr(self, name) + count)
            self._counts.zero_()  # in its place: a CUDA graph may go on adding to it
        return self

    def add(self, skips: list[bool], distant: int) -> None:
        """Count one row and KV head of a layer.

        Args:
            skips: of each query head of the group.
            distant: its distant tokens; with none there is nothing to decide.
        """
        if distant <= 0:
            return
        self.decisions += len(skips)
        self.skipped += sum(skips)
        self.distant_values += distant
        self.unread_values += distant * all(skips)


def attend_skipping(
    logits: Tensor, values: Tensor, positions: Tensor, layer: LayerSlots, tau: float, stats: SkipStats | None
) -> Tensor:
    """Apply one query's softmax to the values, distant ones left out where the gate is at least tau.

    Args:
        logits: [H_kv, B, G, 1, N] float32 in storage order, the lowest number where the query does not see.
        values: [H_kv, B, N, D].
        positions: [B, 1] int64, the query's position in its row, -1 for padding.
        layer: says which heads are anchors (they never skip) and which tokens are proximal.
        tau: 0 to 1.
        stats: is added to, when given.

    Returns:
        [H_kv, B, G, D] in the dtype of the values.
    """
    anchors = layer.num_anchors
    column = torch.arange(logits.shape[-1], device=logits.device)
    is_distant = (column >= layer.sink_size) & (column <= positions - layer.recent_size)
    is_distant = is_distant[:, None, None]
    gate = 1 - (torch.softmax(logits[anchors:], dim=-1) * is_distant).sum(dim=-1, keepdim=True)
    skips = gate >= tau
    lowest = torch.finfo(logits.dtype).min
    weights = torch.cat([logits[:anchors], logits[anchors:].masked_fill(skips & is_distant, lowest)])
    weights = torch.softmax(weights, dim=-1)[..., 0, :].to(values.dtype)
    if values.device.type != "cpu":  # the host would have to wait for what was decided: torch reads what is not needed
        if stats is not None:
            distant = is_distant[:, 0, 0].sum(dim=-1)  # [B]
            decided = skips[..., 0, 0] & (distant > 0)[:, None]
            heads = decided.shape[-1] * (distant > 0).expand(decided.shape[:2])
            each = [heads, decided.sum(dim=-1), distant.expand(heads.shape), distant * decided.all(dim=-1)]
            counts = stats.counter(values.shape[1], len(values), values.device)
            counts[:, anchors:] += torch.stack(each, dim=-1).transpose(0, 1)
        return weights @ values
    out = values.new_zeros(*weights.shape[:-1], values.shape[-1])
    out[:anchors] = weights[:anchors] @ values[:anchors]
    decided, newest = skips[..., 0, 0].tolist(), positions[:, 0].tolist()
    for place, rows in enumerate(decided, start=anchors):
        for row, heads in enumerate(rows):
            seen = newest[row] + 1
            distant = range(layer.sink_size, max(layer.sink_size, seen - layer.recent_size))
            if stats is not None:
                stats.add(heads, len(distant))
            weight, value = weights[place, row], values[place, row]
            if distant and all(heads):
                sinks, recent = slice(distant.start), slice(distant.stop, seen)
                out[place, row] = weight[:, sinks] @ value[sinks] + weight[:, recent] @ value[recent]
            else:
                out[place, row] = weight[:, :seen] @ value[:seen]
    return out
