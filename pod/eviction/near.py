"""Own keys of proximal tokens, which heads that are no anchors keep beside their block's slots.

First those that are kept and still recent or sinks, later those of new tokens. A new one takes an empty place, else
that of the oldest which is no sink, which by then is not recent any more. So a unit of N tokens has at most
min(N, sinks + recent + crop_slack).

Legend: B rows, S heads of the layer that are no anchors, M places of each, T tokens of a forward, D head dimension.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from pod.eviction.headroom import Headroom
from pod_kernels import PackedLayer


@dataclass
class Layer(PackedLayer):
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

    def add_near(self, keys: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Own keys of new tokens; several queries need all old ones until they are through (`tidy_near`).

        Args:
            keys: [S, B, T, D].
            positions: [B, T], -1 for padding.
            slots: [S, B, T], of the values.
        """
        positions = positions.expand(slots.shape)
        if slots.shape[2] > 1 or not self.near_keys.shape[2]:
            self.near_keys = torch.cat([self.near_keys, keys], dim=2)
            self.near_positions = torch.cat([self.near_positions, positions.int()], dim=2)
            self.near_slots = torch.cat([self.near_slots, slots.int()], dim=2)
            return
        self.near_room -= 1
        is_sink = (self.near_positions >= 0) & (self.near_positions < self.sink_size)
        place = self.near_positions.masked_fill(is_sink, torch.iinfo(torch.int32).max).argmin(dim=-1, keepdim=True)
        self.near_positions.scatter_(2, place, positions.int())
        self.near_slots.scatter_(2, place, slots.int())
        self.near_keys.scatter_(2, place[..., None].expand(*place.shape, keys.shape[-1]), keys)

    @property
    def is_near_full(self) -> bool:
        """One more token's own key needs a place that is not there yet."""
        heads, _, places, _ = self.near_keys.shape
        return heads > 0 and self.near_room < 1 and places < self.headroom.most_near and places < self._widest

    def widen_near(self, room: int, length: int) -> None:
        """See to empty places for `room` more tokens, while there may be more of them; `length` are seen."""
        places = self.near_keys.shape[2]
        held = places - max(0, self.near_room)
        short = self.headroom.near(held, self._widest, length, room) - places
        if short > 0:
            self.near_positions = pad(self.near_positions, (0, short), value=-1)
            self.near_slots = pad(self.near_slots, (0, short))
            self.near_keys = pad(self.near_keys, (0, 0, 0, short))
            self.near_room = places + short - held

    def tidy_near(self, newest: Tensor, length: int) -> None:
        """Keep the own keys that a token after the `newest` [B] can need; rows have `length` tokens at most."""
        self.pack_near(self.near_keys, self.near_positions, self.near_slots, newest, self.reach, length)

    def pack_near(
        self, keys: Tensor, positions: Tensor, slots: Tensor, newest: Tensor, reach: int, length: int
    ) -> None:
        """Keep of own keys [S, B, M, D] the sinks and those at most `reach` behind the newest, as `tidy_near`."""
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

    def relink(self, held: list[Tensor], newest: Tensor, reach: int | None, length: int) -> None:
        """Find the slots of own keys again, and drop those whose token is gone.

        Args:
            held: for each of the S heads the positions [B, N] of its slots.
            newest: [B].
            reach: as `pack_near`; None as far as `tidy_near` keeps them.
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
        self.pack_near(self.near_keys, positions, slots, newest, self.reach if reach is None else reach, length)

    @property
    def _widest(self) -> int:
        return max((max(head) for head in self.values.sizes), default=0)
