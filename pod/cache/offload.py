"""Values in CPU memory, and a pool on the device of those that were read last.

For methods that choose what a decoded token reads (`pod.eviction.ReadSelector`). Keys, by which they choose, stay on
the device; of the values a step reads `budget` tokens, most of which the step before read (ShadowKV, arXiv 2410.21465;
ClusterKV, arXiv 2412.03213). What is not in the pool is copied there and takes the place of what was read longest ago.
Inside blocks of layers the anchor's choice is that of the block's later layers: their values are fetched when the
anchor has chosen, before these layers compute. Forwards of several tokens read all values, brought to the device for
one layer at a time.

Copies here are the plain ones of torch, which the host waits for; pinned memory and a stream of their own are not here.

Legend: B rows, H KV heads of a layer in storage order, R tokens that are read, C places of the pool, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pod_kernels import Segments


class Offloaded(NamedTuple):
    """What lies in CPU memory: bytes of values, and how many vectors of them were copied to the device so far."""

    nbytes: int
    copied: int


@dataclass
class OffloadedValues:
    """The values of one layer, where slot = position.

    Attributes:
        host: [B, H] segments of all of them, in CPU memory.
        pool: [H, B, C, D] those on the device.
        held: [H, B, C] int32, the position that each place of the pool holds, -1 where it is empty.
        read: [H, B, C] int32, the step that read it last.
        steps: forwards begun; what one reads makes no room in it.
        copied: values that were copied from `host` to the pool.
    """

    host: Segments
    pool: Tensor
    held: Tensor
    read: Tensor
    steps: int = 0
    copied: int = 0

    @classmethod
    def of(cls, values: Segments, places: int, device: torch.device) -> "OffloadedValues":
        """Values that are in CPU memory, and an empty pool of so many places on the device."""
        pool = torch.zeros(*values.sizes.shape, places, values.data.shape[1], dtype=values.data.dtype, device=device)
        empty = torch.full(pool.shape[:3], -1, dtype=torch.int32, device=device)
        return cls(values, pool, empty, empty.clone())

    # ------------------------------------------------------------------ as `Segments`

    @property
    def sizes(self) -> np.ndarray:
        """[H, B] as that of `Segments`."""
        return self.host.sizes

    @property
    def is_rectangle(self) -> bool:
        """As that of `Segments`."""
        return self.host.is_rectangle

    @property
    def widest(self) -> int:
        """As that of `Segments`."""
        return self.host.widest

    @property
    def rectangle(self) -> Tensor:
        """[H, B, N, D] view of all values, in CPU memory."""
        return self.host.rectangle

    def full(self) -> Segments:
        """All values, on the device."""
        sizes, device = self.host.sizes, self.pool.device
        return self.host if device.type == "cpu" else Segments.of(sizes, sizes.shape[1], self.host.data.to(device))

    def named(self, name: str) -> dict[str, Tensor]:
        """What is on the device."""
        return {f"{name}.{part}": getattr(self, part) for part in ("pool", "held", "read")}

    def resized(self, sizes: np.ndarray) -> "OffloadedValues":
        """As `Segments.resized`."""
        return replace(self, host=self.host.resized(sizes))

    def of_rows(self, rows: Tensor) -> "OffloadedValues":
        """As `Segments.of_rows`."""
        pool = {name: getattr(self, name)[:, rows] for name in ("pool", "held", "read")}
        return replace(self, host=self.host.of_rows(rows.cpu()), **pool)

    # ------------------------------------------------------------------ tokens

    def write(self, slots: Tensor | int, new: Tensor, real: tuple[Tensor, Tensor] | None) -> None:
        """Put new values into CPU memory, that of one token into the pool too; arguments as `Segments.write`."""
        here = None if real is None else tuple(index.cpu() for index in real)
        self.host.write(slots if isinstance(slots, int) else slots.cpu(), new.cpu(), here)
        if new.shape[2] > 1:  # whatever it held of these positions is not theirs any more
            self.held.fill_(-1)
            return
        shape = new.shape[:3]
        at = new.new_full(shape, slots, dtype=torch.long) if isinstance(slots, int) else slots.expand(shape)
        place, is_held = self._places(self.held, at)
        place = torch.where(is_held, place, self.read.masked_fill(self.held < 0, -1).argmin(dim=-1, keepdim=True))
        self.held.scatter_(2, place, at.int())
        self.read.scatter_(2, place, self.steps)
        self.pool.scatter_(2, place[..., None].expand(new.shape), new)

    def fetch(self, heads: Sequence[int], wanted: Tensor) -> Tensor:
        """See to it that what a step reads is in the pool.

        Args:
            heads: h of them, by their place.
            wanted: [h, B, R] int64, positions, -1 for none; others than -1 at most once, or in the pool already.

        Returns:
            [h, B, R] int64, the place of each in the pool; without meaning where there is none.

        Raises:
            ValueError: they are more than the pool has places for.
        """
        heads = torch.tensor(heads, device=wanted.device)
        held, read = self.held[heads], self.read[heads]
        place, is_held = self._places(held, wanted)
        # Those that stay are marked first, so that none of them makes room.
        read.scatter_reduce_(2, place, torch.where(is_held, self.steps, -1).int(), "amax")
        is_missing = (wanted >= 0) & ~is_held
        if is_missing.any():
            free = ((held < 0) | (read < self.steps)).sum(dim=-1)
            if (is_missing.sum(dim=-1) > free).any():
                most = int((wanted >= 0).sum(dim=-1).max())
                raise ValueError(
                    f"value_pool={held.shape[-1]} tokens are fewer than the {most} that a step reads: make the cache "
                    "with a larger one"
                )
            oldest = read.masked_fill(held < 0, -1).argsort(dim=-1, stable=True)
            number = (is_missing.cumsum(dim=-1) - 1).clamp(0, held.shape[-1] - 1)
            place = torch.where(is_missing, oldest.gather(-1, number), place)
            head, row, column = is_missing.nonzero(as_tuple=True)
            there, source = place[head, row, column], wanted[head, row, column]
            held[head, row, there], read[head, row, there] = source.int(), self.steps
            found = self.host.rectangle[heads[head].cpu(), row.cpu(), source.cpu()]
            self.pool[heads[head], row, there] = found.to(self.pool.device)
            self.copied += len(source)
        self.held[heads], self.read[heads] = held, read
        return place

    def taken(self, at: Tensor) -> Tensor:
        """[H, B, R, D] the values at [H, B, R], as `Segments.taken`."""
        place = self.fetch(range(len(at)), at)
        return self.pool.gather(2, place[..., None].expand(*place.shape, self.pool.shape[-1]))

    @staticmethod
    def _places(held: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """[h, B, R] where [h, B, C] holds what is wanted, and whether it does."""
        order = held.argsort(dim=-1)
        ordered = held.gather(-1, order).long()
        found = torch.searchsorted(ordered, wanted.contiguous()).clamp(max=held.shape[-1] - 1)
        return order.gather(-1, found), (ordered.gather(-1, found) == wanted) & (wanted >= 0)
