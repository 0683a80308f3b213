"""Where a cache keeps its vectors: packed segments, one per row and KV head, each with an offset, a length, a capacity.

Legend: B rows, H heads stored here, D head dimension, C capacity of a segment, S segments' slots in all.

A rectangle (every capacity equal) lies in memory as [H, B, C, D]: a run of heads is then one contiguous piece, so that
a batched product over a run of heads reads the cache in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pod_kernels.transfer import on_device


class Piece(NamedTuple):
    """Segments of one capacity that lie one after another: a run of whole heads, or one row of one head."""

    head: int
    heads: int
    row: int
    rows: int
    capacity: int


@dataclass
class Segments:
    """Vectors of the tokens of B rows and H heads, packed into one tensor.

    Attributes:
        data: [S, D], all segments after one another.
        offsets: [B, H] int64, the first slot of each segment.
        lengths: [B, H] int64, how many tokens were written; a ring holds the last of them. None for packed segments,
            whose slots hold any tokens: the positions beside them say which.
        capacities: [B, H] int64, the slots of each segment.
        is_rectangle: all capacities are equal and the order is head, row, slot.
        sizes: the capacities as integers [H][B], of packed segments: they are sliced without asking the device.
    """

    data: Tensor
    offsets: Tensor
    lengths: Tensor | None
    capacities: Tensor
    is_rectangle: bool = True
    sizes: tuple[tuple[int, ...], ...] = ()
    _starts: tuple[tuple[int, ...], ...] = ()
    _pieces: dict[int, tuple[Piece, ...]] = field(default_factory=dict)

    @classmethod
    def allocate(
        cls, heads: int, capacity: int, dim: int, lengths: Tensor, *, dtype: torch.dtype, device: torch.device
    ) -> "Segments":
        """Empty segments of one capacity.

        Args:
            heads: H, may be 0.
            capacity: slots of each segment.
            dim: D.
            lengths: [B] int64; shared with the caller, who advances it in place.
        """
        batch = lengths.shape[0]
        data = torch.zeros(heads * batch * capacity, dim, dtype=dtype, device=device)
        offsets = torch.arange(heads * batch, device=device).view(heads, batch).t() * capacity
        capacities = torch.full((batch, heads), capacity, device=device, dtype=torch.long)
        return cls(data, offsets, lengths[:, None].expand(batch, heads), capacities)

    @classmethod
    def packed(
        cls,
        sizes: Sequence[Sequence[int]],
        batch: int,
        dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        fill: float = 0,
    ) -> "Segments":
        """Empty segments of any capacities, one after another: head, row, slot.

        Args:
            sizes: [H][B], the capacity of each segment.
            batch: B, as there may be no head.
            dim: D.
            fill: what unwritten slots hold.
        """
        sizes = tuple(tuple(head) for head in sizes)
        starts = (0, *accumulate(size for head in sizes for size in head))
        data = torch.full((starts[-1], dim), fill, dtype=dtype, device=device)
        shape = (len(sizes), batch)
        tables = [np.array(table, dtype=np.int64).reshape(shape) for table in (starts[:-1], sizes)]
        offsets, capacities = (table.t() for table in on_device(tables, data.device))
        is_rectangle = len({size for head in sizes for size in head}) <= 1
        rows = tuple(tuple(starts[head * batch : (head + 1) * batch]) for head in range(len(sizes)))
        return cls(data, offsets, None, capacities, is_rectangle, sizes, rows)

    def pieces(self, split: int) -> tuple[Piece, ...]:
        """Packed segments as the fewest rectangles, none of which crosses from head `split` - 1 to head `split`."""
        if split not in self._pieces:
            found: list[Piece] = []
            for head, sizes in enumerate(self.sizes):
                last = found[-1] if found else None
                if len(set(sizes)) > 1:
                    found += [Piece(head, 1, row, 1, size) for row, size in enumerate(sizes)]
                elif last and head != split and last.rows == len(sizes) and last.capacity == sizes[0]:
                    found[-1] = last._replace(heads=last.heads + 1)
                else:
                    found.append(Piece(head, 1, 0, len(sizes), sizes[0]))
            self._pieces[split] = tuple(found)
        return self._pieces[split]

    def view(self, piece: Piece) -> Tensor:
        """[heads, rows, C, D] view of a piece of packed segments."""
        start = self._starts[piece.head][piece.row]
        part = self.data[start : start + piece.heads * piece.rows * piece.capacity]
        return part.view(piece.heads, piece.rows, piece.capacity, self.data.shape[1])

    def run(self, head: int, row: int | None = None) -> Tensor:
        """[n, D] view of the slots of one head of packed segments, of all its rows or of one."""
        first = self._starts[head][row or 0]
        sizes = self.sizes[head]
        return self.data[first : first + (sum(sizes) if row is None else sizes[row])]

    def padded(self, fill: float) -> Tensor:
        """[H, B, C, D] with C the largest capacity: a view of a rectangle, else a copy with `fill` beyond the ends."""
        if self.is_rectangle:
            return self.rectangle
        column = torch.arange(int(max(map(max, self.sizes))), device=self.data.device)
        index = self.offsets.t()[..., None] + column
        beyond = column >= self.capacities.t()[..., None]
        return self.data[index.masked_fill(beyond, 0)].masked_fill(beyond[..., None], fill)

    def write(self, slots: Tensor, new: Tensor, real: Tensor | None) -> None:
        """Put vectors into slots of packed segments.

        Args:
            slots: [h, B, T] int64, of the first h heads, counted from each segment's first.
            new: [h, B, T, D].
            real: [B, T] bool, which of them; None: all.
        """
        index = self.offsets.t()[: new.shape[0], :, None] + slots
        if real is None:
            self.data[index.flatten()] = new.flatten(0, 2)
        else:
            real = real.expand(index.shape)
            self.data[index[real]] = new[real]

    def resized(self, sizes: Sequence[Sequence[int]], fill: float = 0) -> "Segments":
        """A copy of packed segments with capacities [H][B] that are no smaller; each slot keeps its number."""
        batch, heads = self.offsets.shape
        options = {"dtype": self.data.dtype, "device": self.data.device, "fill": fill}
        new = Segments.packed(sizes, batch, self.data.shape[1], **options)
        shift = (new.offsets - self.offsets).t().flatten()
        # With its size told, torch has not to ask the device for it.
        shift = shift.repeat_interleave(self.capacities.t().flatten(), output_size=len(self.data))
        new.data[torch.arange(len(self.data), device=self.data.device) + shift] = self.data
        return new

    def of_rows(self, rows: list[int]) -> "Segments":
        """A copy of some rows of packed segments, in that order."""
        sizes = [[head[row] for row in rows] for head in self.sizes]
        options = {"dtype": self.data.dtype, "device": self.data.device}
        new = Segments.packed(sizes, len(rows), self.data.shape[1], **options)
        for head in range(len(sizes) if rows else 0):
            torch.cat([self.run(head, row) for row in rows], out=new.run(head))
        return new

    @property
    def rectangle(self) -> Tensor:
        """[H, B, C, D] view of the storage.

        Raises:
            ValueError: the segments have different capacities.
        """
        if not self.is_rectangle:
            raise ValueError("these segments have different capacities and cannot be viewed as [H, B, C, D]")
        batch, heads = self.offsets.shape
        capacity = self.data.shape[0] // max(1, batch * heads)
        return self.data.view(heads, batch, capacity, self.data.shape[1])

    def part(self, head: int, heads: int) -> "Segments":
        """A view of the segments of `heads` heads from `head` on, of a rectangle.

        Raises:
            ValueError: the segments have different capacities.
        """
        data = self.rectangle[head : head + heads].flatten(0, 2)
        mine = slice(head, head + heads)
        offsets = self.offsets[:, mine] - head * data.shape[0] // max(1, heads)
        return Segments(data, offsets, self.lengths[:, mine], self.capacities[:, mine])

    def named(self, name: str) -> dict[str, Tensor]:
        """The vectors under `name`."""
        return {name: self.data}

    def tensors(self) -> list[Tensor]:
        """What the vectors lie in."""
        return [self.data]

    def nbytes(self) -> int:
        """Bytes of the storage, used or not."""
        return self.data.untyped_storage().nbytes()


@dataclass
class Ordered:
    """A layer whose heads are stored in an `order` of their own.

    Attributes:
        index, inverse: [H_kv] int64 from `order`, and back; None where the order is the heads' own.
    """

    index: Tensor | None = field(init=False, default=None)
    inverse: Tensor | None = field(init=False, default=None)

    def put_order(self, order: tuple[int, ...], device: torch.device) -> None:
        """Keep the order on the device, where states are put into it at every step."""
        if list(order) != sorted(order):
            [self.index] = on_device([np.array(order)], device)
            self.inverse = self.index.argsort()

    def stored(self, states: Tensor) -> Tensor:
        """[H_kv, ..] by head -> in storage order."""
        return states if self.index is None else states[self.index]

    def by_head(self, states: Tensor) -> Tensor:
        """[H_kv, ..] in storage order -> by head."""
        return states if self.inverse is None else states[self.inverse]


@dataclass
class LayerSegments(Ordered):
    """What the cache holds for one layer.

    Under `share: kv` that is the layer's anchor heads alone: heads are then counted among these.

    Attributes:
        order: the KV heads in the order in which they are stored: the layer's anchor heads first, then the others.
        num_anchors: how many of them are anchors of their block (a block of one layer counts).
        values: [B, H_kv] segments in that order: slot = position.
        keys: [B, num_anchors] segments of the anchor heads' keys: slot = position.
        near: [B, H_kv - num_anchors] segments of the other heads' own keys: sinks, then a ring of `ring_size`.
        sink_size, recent_size, ring_size: tokens; ring_size >= recent_size.
        pages: [B, num_anchors] segments of each page's minima and maxima [2 D]; None where pages are not used.
    """

    order: tuple[int, ...]
    num_anchors: int
    values: Segments
    keys: Segments
    near: Segments
    sink_size: int
    recent_size: int
    ring_size: int
    pages: Segments | None = None

    def __post_init__(self) -> None:
        self.put_order(self.order, self.near.data.device)

    def part(self, head: int, heads: int) -> "LayerSegments":
        """A view of `heads` heads from `head` on, of a layer whose heads are all anchors."""
        values, keys = self.values.part(head, heads), self.keys.part(head, heads)
        sizes = self.sink_size, self.recent_size, self.ring_size
        return LayerSegments(tuple(range(heads)), heads, values, keys, self.near, *sizes)

    def proximal_runs(self, length: int) -> list[tuple[int, int, int]]:
        """Where the proximal keys of the last of `length` tokens are in `near`.

        Returns:
            (first position, first slot, how many) of each run: sinks, and the ring in one or two.
        """
        recent = max(self.sink_size, length - self.recent_size)
        place = (recent - self.sink_size) % self.ring_size
        count = max(0, length - recent)
        until_wrap = min(count, self.ring_size - place)
        runs = [
            (0, 0, min(self.sink_size, length)),
            (recent, self.sink_size + place, until_wrap),
            (recent + until_wrap, self.sink_size, count - until_wrap),
        ]
        return [run for run in runs if run[2] > 0]

    def near_slots(self, positions: Tensor) -> Tensor:
        """The slot of each position in `near`: positions below `sink_size` stand still, the others go round."""
        ring = self.sink_size + (positions - self.sink_size).remainder(self.ring_size)
        return torch.where(positions < self.sink_size, positions, ring)

    def near_positions(self, lengths: Tensor) -> Tensor:
        """The position that each slot of `near` holds.

        Args:
            lengths: [B] int64, tokens written to each row.

        Returns:
            [B, C] int64, -1 where a slot is empty.
        """
        slots = torch.arange(self.near.rectangle.shape[2], device=lengths.device)
        last = lengths[:, None] - 1 - self.sink_size
        age = (last - (slots - self.sink_size)).remainder(self.ring_size)
        ring = torch.where(last - age >= 0, self.sink_size + last - age, -1)
        sinks = torch.where(slots < lengths[:, None], slots, -1)
        return torch.where(slots < self.sink_size, sinks, ring)
