"""Own keys of proximal tokens in a store of fixed slots, which heads that are no anchors keep beside their block's.

Sinks, and a ring of the recent ones by position; or, where that is no smaller, the slots as they are.

Legend: B rows, S heads of the layer that are no anchors, T tokens of a forward, F slots in use, R places of a head's
own keys, D head dimension.
"""

import torch
from torch import Tensor

from pod.cache.chain_step import ChainStep
from pod_kernels.segments import ring_places
from pod_kernels.slots import OwnKeys, rotated_pieces


class OwnRing:
    """Where own keys are.

    Args:
        sink_size, recent_size: tokens.
        slots: of the store.

    Attributes:
        is_by_slot: they are in the slots of their values.
        capacity: R.
    """

    def __init__(self, sink_size: int, recent_size: int, slots: int) -> None:
        self._sink_size = sink_size
        self.is_by_slot = sink_size + recent_size >= slots
        self.capacity = min(sink_size + recent_size, slots)

    def sinks(self, count: int, device: torch.device) -> Tensor:
        """[count] int64, the places of the first tokens."""
        sink = torch.arange(count, device=device)
        return sink if self.is_by_slot else self._in_ring(sink)

    def places(self, positions: Tensor, slots: Tensor) -> Tensor:
        """[S, B, T] where own keys at positions [B, T] go, whose values went to `slots` [S, B, T]; -1: nowhere."""
        if self.is_by_slot:
            return slots
        recent = positions[:, -1:] - (self.capacity - self._sink_size)
        kept = (positions >= 0) & ((positions < self._sink_size) | (positions > recent))
        return torch.where(kept, self._in_ring(positions), -1).expand(slots.shape)

    def keys(self, held: Tensor, found: Tensor, ranks: Tensor | None, new: Tensor, step: ChainStep) -> OwnKeys:
        """All own keys, and where they belong among the keys of slots and chunk.

        Args:
            held: [S, B, R, D].
            found: [S, B, F] positions of the tokens in the slots of the heads' units.
            ranks: [S, B, F] their places among the kept ones; None without rotation.
            new: [S, B, T, D] of the chunk, rotated.
            step: the forward.
        """
        heads, batch, count = new.shape[:3]
        width = step.used + count
        columns = torch.arange(width, device=new.device).expand(heads, batch, -1)
        if self.is_by_slot:
            held, of_held = held[:, :, : step.used], columns[..., : step.used]
        else:
            last = step.seen[:, None] - (self.capacity - self._sink_size)
            is_own = (found >= 0) & ((found < self._sink_size) | (found >= last))
            index = torch.where(is_own, self._in_ring(found), self.capacity)
            of_held = torch.full((heads, batch, self.capacity + 1), width, device=new.device)
            of_held = of_held.scatter_(2, index, columns[..., : step.used])[..., :-1]
        inside = of_held.clamp(max=max(0, step.used - 1))
        known = found.gather(2, inside) if step.used else of_held.new_full(of_held.shape, -1)
        known = known.masked_fill(of_held >= width, -1)
        if ranks is not None and step.used:
            places = ranks.gather(2, inside).clamp(max=len(step.table[0]) - 1)
            held = torch.cat(list(rotated_pieces(held, places, *step.table)), dim=2)
        return OwnKeys(
            keys=torch.cat([held, new], dim=2),
            columns=torch.cat([of_held, columns[..., step.used :]], dim=2),
            positions=torch.cat([known, step.positions.expand(heads, -1, -1)], dim=2),
        )

    def _in_ring(self, positions: Tensor) -> Tensor:
        return ring_places(positions, self._sink_size, self.capacity - self._sink_size)
