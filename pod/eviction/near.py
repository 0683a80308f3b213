"""Own keys of proximal tokens, which heads that are no anchors keep beside their block's slots.

Where nothing is evicted they lie in sinks and a ring. Else each has its position and its slot beside it: first those
that are kept and still recent or sinks, later those of new tokens. A new one takes an empty place, else that of the
oldest which is no sink, which by then is not recent any more. So a block of N tokens has at most
min(N, sinks + recent + crop_slack) for each row, head and layer.

Legend: B rows, S heads of the layer that are no anchors, M places of each, T tokens of a forward, D head dimension.
"""

from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from pod.cache_rows import Step
from pod.eviction.headroom import Headroom
from pod_kernels import LayerSlots


@dataclass
class Layer(LayerSlots):
    """A layer's slots and own keys.

    Attributes:
        headroom: how many places for own keys are allocated.
        near_room: places that every row and head has empty at least; below 0 where tokens took those of older ones.
    """

    headroom: Headroom = field(kw_only=True)
    near_room: int = 0

    @property
    def reach(self) -> int:
        """How far behind the newest token own keys are kept, so that cropped ones need not be computed again."""
        return self.headroom.most_near - self.sink_size - 1

    def add_own(self, keys: Tensor, step: Step, slots: Tensor | None) -> None:
        """The own keys of one new token in each row.

        Args:
            keys: [S, B, 1, D].
            step: what the forward adds.
            slots: [S, B, 1] of the values; not read with a ring.
        """
        self.near_room -= 1
        if self.ring_size:
            self._put_in_ring(keys, step)
            return
        is_sink = (self.near_positions >= 0) & (self.near_positions < self.sink_size)
        place = self.near_positions.masked_fill(is_sink, torch.iinfo(torch.int32).max).argmin(dim=-1, keepdim=True)
        self.near_positions.scatter_(2, place, step.positions.expand(slots.shape).int())
        self.near_slots.scatter_(2, place, slots.int())
        self.near_keys.scatter_(2, place[..., None].expand(*place.shape, keys.shape[-1]), keys)

    def with_own(self, keys: Tensor, step: Step, slots: Tensor | None) -> "Layer":
        """The layer as several queries see it: all old own keys, and those of their own tokens; see `add_own`."""
        seen = copy(self)
        if self.ring_size:
            known = step.positions
            if not step.is_first:
                known = torch.cat([self.ring_positions(step.before), known], dim=1)
            seen.near_positions = seen.near_slots = known[None]
        else:
            positions = step.positions.expand(slots.shape).int()
            seen.near_positions = torch.cat([self.near_positions, positions], dim=2)
            seen.near_slots = torch.cat([self.near_slots, slots.int()], dim=2)
        seen.near_keys = keys if step.is_first else torch.cat([self.near_keys, keys], dim=2)
        return seen

    def keep_own(self, seen: "Layer", step: Step) -> None:
        """After several queries, which saw `seen`: keep the own keys that a later token can need."""
        if self.ring_size:
            places = self.near_keys.shape[2]
            self.widen_own(step.length - (places - self.near_room), step.length)
            self._put_in_ring(seen.near_keys[:, :, -step.positions.shape[1] :], step)
            self.near_room = self.near_keys.shape[2] - step.length
        else:
            newest = step.positions[:, -1]
            self.pack_own(seen.near_keys, seen.near_positions, seen.near_slots, newest, self.reach, step.length)

    def _put_in_ring(self, keys: Tensor, step: Step) -> None:
        """The last `ring_size` of new [S, B, T, D], and sinks."""
        positions = step.positions
        if keys.shape[2] == 1 and step.even:
            place = step.length - 1
            if place >= self.sink_size:
                place = self.sink_size + (place - self.sink_size) % self.ring_size
            self.near_keys[:, :, place : place + 1] = keys
        elif keys.shape[2] == 1 and not step.is_first:
            rows = torch.arange(keys.shape[1], device=keys.device)
            self.near_keys[:, rows, self.ring_places(positions[:, 0])] = keys[:, :, 0]
        else:
            rows, columns = step.near(self.sink_size, self.ring_size)
            self.near_keys[:, rows, self.ring_places(positions[rows, columns])] = keys[:, rows, columns]

    @property
    def is_own_full(self) -> bool:
        """One more token's own key needs a place that is not there yet."""
        heads, _, places, _ = self.near_keys.shape
        return heads > 0 and self.near_room < 1 and places < self.headroom.most_near and places < self._widest

    def widen_own(self, room: int, length: int) -> None:
        """See to empty places for `room` more tokens, while there may be more of them; `length` are seen."""
        places = self.near_keys.shape[2]
        held = places - max(0, self.near_room)
        short = self.headroom.near(held, self._widest, length, room) - places
        if short > 0:
            if self.near_positions is not None:
                self.near_positions = pad(self.near_positions, (0, short), value=-1)
                self.near_slots = pad(self.near_slots, (0, short))
            self.near_keys = pad(self.near_keys, (0, 0, 0, short))
            self.near_room = places + short - held

    def pack_own(self, keys: Tensor, positions: Tensor, slots: Tensor, newest: Tensor, reach: int, length: int) -> None:
        """Keep of own keys [S, B, M, D] the sinks and those at most `reach` behind the newest, rows have
        `length` tokens at most."""
        keep = (positions >= 0) & (slots >= 0)
        keep &= (positions < self.sink_size) | (positions >= newest[:, None] - reach)
        most = int(keep.sum(dim=-1).max()) if keep.numel() else 0
        capacity = self.headroom.near(most, self._widest, length)
        order = torch.where(keep, positions, torch.iinfo(positions.dtype).max).argsort(dim=-1, stable=True)
        order = order[..., :capacity]
        short = capacity - order.shape[-1]
        held = positions.gather(2, order).masked_fill(~keep.gather(2, order), -1)
        self.near_positions = pad(held, (0, short), value=-1).int()
        self.near_slots = pad(slots.gather(2, order).clamp(min=0), (0, short)).int()
        packed = keys.gather(2, order[..., None].expand(*order.shape, keys.shape[-1]))
        self.near_keys = pad(packed, (0, 0, 0, short)).contiguous()
        self.near_room = capacity - most

    def relink_own(self, held: list[Tensor], newest: Tensor, reach: int | None, length: int) -> None:
        """Find the slots of own keys again, and drop those whose token is gone.

        Args:
            held: for each of the S heads the positions [B, N] of its slots.
            newest: [B].
            reach: as `pack_own`; None as far as they may be cropped.
            length: above every position.
        """
        positions, spare = self.near_positions.long(), length
        slots = torch.empty_like(positions)
        for place, row in enumerate(held):
            found = torch.full((row.shape[0], spare + 1), -1, device=row.device)
            index = torch.arange(row.shape[1], device=row.device).expand(row.shape)
            found.scatter_(1, torch.where(row < 0, spare, row), index)
            found[:, spare] = -1
            slots[place] = found.gather(1, torch.where(positions[place] < 0, spare, positions[place]))
        self.pack_own(self.near_keys, positions, slots, newest, self.reach if reach is None else reach, length)

    @property
    def _widest(self) -> int:
        return max((max(head) for head in self.values.sizes), default=0)
