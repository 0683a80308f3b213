"""Where a cache keeps its vectors: packed segments of slots, one for each row and KV head.

Legend: B rows, H heads stored here, N slots of one, D head dimension, C capacity of a segment, S slots in all.

A rectangle (every capacity equal) lies in memory as [H, B, C, D]: a run of heads is then one contiguous piece, so that
a batched product over a run of heads reads the cache in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

# Logits that one chunk of queries may materialise; 2**25 float32 numbers are 128 MiB.
MAX_LOGITS = 2**25
# Numbers that one part of the work may materialise on a CPU: what fits its caches.
CPU_NUMBERS = 2**17


def on_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays of integers on a device, in one copy.

    The host does not wait for it. From memory that can be paged out it would, until a GPU has done all it was given.

    Args:
        arrays: of any shapes; numbers or truth values.

    Returns:
        int64 tensors of the same shapes, parts of one. Each begins at a multiple of 16 bytes: for other addresses
        Triton compiles a kernel anew.
    """
    lengths = [array.size + array.size % 2 for array in arrays]
    flat = np.zeros(sum(lengths), dtype=np.int64)
    for array, end, length in zip(arrays, accumulate(lengths), lengths, strict=True):
        flat[end - length : end - length + array.size] = array.reshape(-1)
    there = torch.from_numpy(flat)
    if device.type == "cuda":
        there = there.pin_memory().to(device, non_blocking=True)
    parts = there.to(device).split(lengths)
    return [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]


class KeptOnDevice:
    """Integers of the host as tensors, each copied to its device once: layers and steps ask for the same ones."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}

    def __call__(self, numbers: tuple[int, ...], device: torch.device) -> Tensor:
        """[n] int64 on the device, not to be written to."""
        key = numbers, device
        if key not in self._tensors:
            [self._tensors[key]] = on_device([np.array(numbers, dtype=np.int64)], device)
        return self._tensors[key]


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
        data: [S, D], all segments after one another in the order head, row.
        offsets: [B, H] int64, the first slot of each segment.
        capacities: [B, H] int64, the slots of each segment.
        is_rectangle: all capacities are equal.
        sizes: [H, B] the capacities on the host: they are sliced without asking the device.
    """

    data: Tensor
    offsets: Tensor
    capacities: Tensor
    is_rectangle: bool
    sizes: np.ndarray

    @classmethod
    def packed(
        cls,
        sizes: ArrayLike,
        batch: int,
        dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        fill: float = 0,
    ) -> "Segments":
        """Empty segments of any capacities, one after another: head, row, slot.

        Args:
            sizes: [H, B], the capacity of each segment.
            batch: B, as there may be no head.
            dim: D.
            fill: what unwritten slots hold.
        """
        sizes = np.array(sizes, dtype=np.int64).reshape(-1, batch)
        data = torch.full((int(sizes.sum()), dim), fill, dtype=dtype, device=device)
        is_rectangle = not sizes.size or sizes.min() == sizes.max()
        if is_rectangle:  # nothing has to come from the host
            capacities = torch.full(sizes.shape, int(sizes.max(initial=0)), dtype=torch.long, device=data.device)
            offsets = torch.arange(sizes.size, device=data.device).view(sizes.shape) * capacities
        else:
            offsets, capacities = on_device([_starts(sizes), sizes], data.device)
        return cls(data, offsets.t(), capacities.t(), bool(is_rectangle), sizes)

    @classmethod
    def of(cls, sizes: ArrayLike, batch: int, data: Tensor) -> "Segments":
        """Segments of capacities [H, B] that hold a copy of `data` [S, D]."""
        new = cls.packed(sizes, batch, data.shape[1], dtype=data.dtype, device=data.device)
        new.data.copy_(data)
        return new

    @classmethod
    def rectangular(
        cls, heads: int, batch: int, capacity: int, dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> "Segments":
        """Empty segments of one capacity; arguments as `packed`, H heads, which may be 0."""
        return cls.packed([[capacity] * batch] * heads, batch, dim, dtype=dtype, device=device)

    def __getstate__(self) -> dict[str, Any]:
        """Without the view of `data`, of which a pickle would make a tensor of its own."""
        return {name: value for name, value in vars(self).items() if name != "rectangle"}

    def full(self) -> "Segments":
        """Itself: the vectors are in full precision, as `QuantizedSegments.full` makes its own."""
        return self

    def like(self, sizes: ArrayLike, batch: int, fill: float = 0) -> "Segments":
        """Empty segments of vectors of the same kind; arguments as `packed`."""
        return Segments.packed(
            sizes, batch, self.data.shape[1], dtype=self.data.dtype, device=self.data.device, fill=fill
        )

    @cached_property
    def widest(self) -> int:
        """The largest capacity."""
        return int(self.sizes.max(initial=0))

    @cached_property
    def _first(self) -> list[list[int]]:
        """[H][B] the first slot of each segment, on the host."""
        return _starts(self.sizes).tolist()

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The segments as the fewest rectangles."""
        found: list[Piece] = []
        for head, sizes in enumerate(self.sizes.tolist()):
            last = found[-1] if found else None
            if len(set(sizes)) > 1:
                found += [Piece(head, 1, row, 1, size) for row, size in enumerate(sizes)]
            elif last and last.rows == len(sizes) and last.capacity == sizes[0]:
                found[-1] = last._replace(heads=last.heads + 1)
            else:
                found.append(Piece(head, 1, 0, len(sizes), sizes[0]))
        return tuple(found)

    def view(self, piece: Piece) -> Tensor:
        """[heads, rows, C, D] view of a piece."""
        start = self._first[piece.head][piece.row]
        part = self.data[start : start + piece.heads * piece.rows * piece.capacity]
        return part.view(piece.heads, piece.rows, piece.capacity, self.data.shape[1])

    def run(self, head: int, row: int | None = None) -> Tensor:
        """[n, D] view of the slots of one head, of all its rows or of one."""
        first, sizes = self._first[head][row or 0], self.sizes[head]
        return self.data[first : first + int(sizes.sum() if row is None else sizes[row])]

    def padded(self, fill: float) -> Tensor:
        """[H, B, C, D] with C the largest capacity: a view of a rectangle, else a copy with `fill` beyond the ends."""
        if self.is_rectangle:
            return self.rectangle
        column = torch.arange(self.widest, device=self.data.device)
        index = self.offsets.t()[..., None] + column
        beyond = column >= self.capacities.t()[..., None]
        return self.data[index.masked_fill(beyond, 0)].masked_fill(beyond[..., None], fill)

    def write(self, slots: Tensor | int, new: Tensor, real: tuple[Tensor, Tensor] | None) -> None:
        """Put vectors into slots.

        Args:
            slots: [h or 1, B, T] int64, of the first h heads, counted from each segment's first; of a rectangle the
                first of T slots that follow one another.
            new: [h, B, T, D].
            real: rows and tokens, [n] int64 each, of those that are stored; None: all.
        """
        if not len(new):
            return
        if isinstance(slots, int):
            self.rectangle[: len(new), :, slots : slots + new.shape[2]] = new
            return
        index = self.offsets.t()[: len(new), :, None] + slots
        if real is not None:
            rows, tokens = real
            index, new = index[:, rows, tokens], new[:, rows, tokens]
        self.data[index.flatten()] = new.flatten(0, -2)

    def taken(self, at: Tensor) -> Tensor:
        """[h, B, R, D] the vectors of the h heads of a rectangle in the slots [h, B, R] int64."""
        return self.rectangle.gather(2, at[..., None].expand(*at.shape, self.data.shape[1]))

    def resized(self, sizes: ArrayLike, fill: float = 0) -> "Segments":
        """A copy with capacities [H, B] that are no smaller; each slot keeps its number."""
        new = self.like(sizes, self.sizes.shape[1], fill)
        if self.is_rectangle and new.is_rectangle:
            new.rectangle[:, :, : self.rectangle.shape[2]] = self.rectangle
            return new
        shift = (new.offsets - self.offsets).t().flatten()
        # With its size told, torch has not to ask the device for it.
        shift = shift.repeat_interleave(self.capacities.t().flatten(), output_size=len(self.data))
        new.data[torch.arange(len(self.data), device=self.data.device) + shift] = self.data
        return new

    def of_rows(self, rows: Tensor) -> "Segments":
        """A copy of some rows [n] int64, in that order."""
        if self.is_rectangle:  # the host need not know which
            sizes = self.sizes[:, :1].repeat(len(rows), axis=1)
            return Segments.of(sizes, len(rows), self.rectangle[:, rows].flatten(0, 2))
        rows = rows.tolist()
        new = self.like(self.sizes[:, rows], len(rows))
        for head in range(len(self.sizes) if rows else 0):
            torch.cat([self.run(head, row) for row in rows], out=new.run(head))
        return new

    @cached_property
    def rectangle(self) -> Tensor:
        """[H, B, C, D] view of the storage.

        Raises:
            ValueError: the segments have different capacities.
        """
        if not self.is_rectangle:
            raise ValueError("these segments have different capacities and cannot be viewed as [H, B, C, D]")
        return self.data.view(*self.sizes.shape, self.widest, self.data.shape[1])

    def part(self, head: int, heads: int) -> "Segments":
        """A view of the segments of `heads` heads from `head` on."""
        mine = slice(head, head + heads)
        first, sizes = self._first[head][0], self.sizes[mine]
        data = self.data[first : first + int(sizes.sum())]
        return Segments(data, self.offsets[:, mine] - first, self.capacities[:, mine], self.is_rectangle, sizes)

    def named(self, name: str) -> dict[str, Tensor]:
        """The vectors under `name`."""
        return {name: self.data}

    def nbytes(self) -> int:
        """Bytes of the storage, used or not."""
        return self.data.untyped_storage().nbytes()


@dataclass
class Chosen:
    """Tokens of one head that are kept: where they come from and where they go.

    Attributes:
        rows, sources, slots: [n] int64 each, ordered by row and position; slots count from each row's first.
        counts: [B] tokens of each row, on the host.
    """

    rows: Tensor
    sources: Tensor
    slots: Tensor
    counts: np.ndarray

    @classmethod
    def of(cls, keep: Tensor, positions: Tensor) -> "Chosen":
        """What `keep` [B, N] says, in the order of `positions` [B, N]."""
        last = torch.iinfo(torch.long).max
        order = torch.where(keep, positions, last).argsort(dim=-1)
        counts = keep.sum(dim=-1)
        rows, slots = (torch.arange(keep.shape[1], device=keep.device) < counts[:, None]).nonzero(as_tuple=True)
        return cls(rows, order[rows, slots], slots, np.array(counts.tolist()))

    def put(self, segments: Segments, head: int, data: Tensor) -> None:
        """Write the tokens' `data` [n, D] into one head of packed segments."""
        segments.data[segments.offsets[self.rows, head] + self.slots] = data


Change = tuple[Chosen, np.ndarray]  # tokens of a head, and how many slots each of its rows [B] gets


def _starts(sizes: np.ndarray) -> np.ndarray:
    """[H, B] the first slot of each of packed segments."""
    return (sizes.cumsum() - sizes.reshape(-1)).reshape(sizes.shape)


def repacked(segments: Segments, changes: dict[int, Change], fill: float = 0) -> Segments:
    """The same segments with those of some heads chosen from and resized; the other heads' are copied whole.

    Args:
        segments: packed ones.
        changes: by head.
        fill: what unwritten slots hold.
    """
    data, sizes = segments.data, segments.sizes.copy()
    for head, (_, wanted) in changes.items():
        sizes[head] = wanted
    new = segments.like(sizes, sizes.shape[1], fill)
    for head in range(len(sizes)):
        if head in changes:
            chosen = changes[head][0]
            chosen.put(new, head, data[segments.offsets[chosen.rows, head] + chosen.sources])
        else:
            new.run(head).copy_(segments.run(head))
    return new


def ring_places(positions: Tensor, sink_size: int, ring_size: int) -> Tensor:
    """The place of each position: those below `sink_size` stand still, the others go round behind them."""
    ring = sink_size + (positions - sink_size).remainder(ring_size)
    return torch.where(positions < sink_size, positions, ring)


def ring_positions(lengths: Tensor, places: int, sink_size: int, ring_size: int) -> Tensor:
    """The position that each of the first `places` of sinks and ring holds.

    Args:
        lengths: [B] int64, tokens written to each row.

    Returns:
        [B, places] int64, -1 where a place is empty.
    """
    place = torch.arange(places, device=lengths.device)
    last = lengths[:, None] - 1 - sink_size
    age = (last - (place - sink_size)).remainder(ring_size)
    ring = torch.where(last - age >= 0, sink_size + last - age, -1)
    sinks = torch.where(place < lengths[:, None], place, -1)
    return torch.where(place < sink_size, sinks, ring)


@cache
def has_half_products() -> bool:
    """Whether the processor multiplies matrices of half precision; of others than x86 that is supposed."""
    able = torch.cpu.get_capabilities()
    return able.get("architecture") != "x86_64" or able["avx512_bf16"] or able["amx_bf16"]


def _multiplies_slowly(x: Tensor) -> bool:
    """Float32 is then faster, conversion included: on a CPU without such instructions three to four times."""
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) and not has_half_products()


def _in_cache(x: Tensor) -> tuple[Tensor, ...]:
    """Pieces of [h, B, N, D] along N that stay in a processor's caches when they are made float32."""
    heads, batch, _, dim = x.shape
    return x.split(max(1, CPU_NUMBERS // max(1, heads * batch * dim)), dim=2)


def weighted(weights: Tensor, values: Tensor) -> Tensor:
    """[h, B, n, N] float32 weights and [h, B, N, D] values -> [h, B, n, D] in the values' dtype."""
    if not _multiplies_slowly(values):
        return weights.to(values.dtype) @ values
    parts = _in_cache(values)
    sums = zip(weights.split(parts[0].shape[2], dim=-1), parts, strict=True)
    return sum(weight @ part.float() for weight, part in sums).to(values.dtype)


def products(queries: Tensor, keys: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """[h, B, G, t, D] queries with [h, B, N, D] keys -> [h, B, G, t, N] float32 logits, the keys read in place.

    `out` [h, B, G, t, N or more] takes them in its first columns.
    """
    asked = queries.flatten(2, 3)
    if _multiplies_slowly(keys):
        asked = asked.float()
        found = torch.cat([asked @ part.float().transpose(2, 3) for part in _in_cache(keys)], dim=-1)
    else:
        found = (asked @ keys.transpose(2, 3)).float()
    found = found.unflatten(2, queries.shape[2:4])
    return found.mul_(scale) if out is None else torch.mul(found, scale, out=out[..., : keys.shape[2]])


HeadOf = tuple[Segments, int]  # segments, and one head in them


@dataclass
class LayerSlots:
    """What the cache holds for one layer; of heads that share keys and values (`share: kv`) that of the anchors alone.

    A slot of a KV head holds the same token in the values of every layer of its block and in the keys of its anchor:
    slot = position where nothing was evicted, else one table of positions says which. The other layers' own keys of
    proximal tokens lie apart: in the first case sinks and then a ring, in the second anywhere, each with its position
    and its slot.

    Attributes:
        order: the KV heads in the order in which they are stored: the layer's anchor heads first, then the others.
            Heads that are stored elsewhere, as those that stream, are not among them.
        num_anchors: A, how many of them are anchors of their block (a block of one layer counts).
        values: [B, H_kv] segments in that order.
        keys: [B, A] segments of the anchor heads' keys, of the same capacities.
        near_keys: [S, B, M, D] the other heads' own keys.
        sink_size, recent_size: tokens.
        ring_size: of the ring, at least `recent_size`; 0 where there is none.
        near_positions: [S, B, M] int32, -1 where there is none; [1, B, M] where slot = position, for all heads. None:
            they lie in sinks and a ring.
        near_slots: the same, the slot in `values` of each.
        pages: [B, A] segments of a reader's index, one vector for each page; None where all is read.
        index: [H_kv] int64, `order` on the device; None where it is the heads' own. Copied there where it is not given.
        elsewhere: how many heads are stored elsewhere. Queries and outputs have them too.
    """

    order: tuple[int, ...]
    num_anchors: int
    values: Segments
    keys: Segments
    near_keys: Tensor
    sink_size: int
    recent_size: int
    ring_size: int = 0
    near_positions: Tensor | None = None
    near_slots: Tensor | None = None
    pages: Segments | None = None
    index: Tensor | None = None
    elsewhere: int = 0

    def __post_init__(self) -> None:
        if self.index is None and list(self.order) != list(range(self.kv_heads)):
            [self.index] = on_device([np.array(self.order)], self.near_keys.device)

    @property
    def kv_heads(self) -> int:
        """KV heads of the model."""
        return len(self.order) + self.elsewhere

    @cached_property
    def inverse(self) -> Tensor | None:
        """[H_kv] int64, back from that order to the heads' own."""
        return None if self.index is None else self.index.argsort()

    def stored(self, states: Tensor) -> Tensor:
        """[H_kv, ..] by head -> in storage order."""
        return states if self.index is None else states[self.index]

    def by_head(self, states: Tensor) -> Tensor:
        """[H_kv, ..] in storage order -> by head; 0 for heads that are stored elsewhere."""
        if self.elsewhere:
            found = states.new_zeros(self.kv_heads, *states.shape[1:])
            found[self.index] = states
            return found
        return states if self.inverse is None else states[self.inverse]

    def part(self, head: int, heads: int) -> "LayerSlots":
        """A view of `heads` heads from `head` on, of a layer whose heads are all anchors."""
        values, keys = self.values.part(head, heads), self.keys.part(head, heads)
        return replace(self, order=tuple(range(heads)), num_anchors=heads, values=values, keys=keys, index=None)

    def proximal_runs(self, length: int) -> list[tuple[int, int, int]]:
        """Where the proximal keys of the last of `length` tokens are in sinks and ring.

        Returns:
            (first position, first place, how many) of each run: sinks, and the ring in one or two.
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

    def ring_places(self, positions: Tensor) -> Tensor:
        """The place of each position, as `ring_places`."""
        return ring_places(positions, self.sink_size, self.ring_size)

    def ring_positions(self, lengths: Tensor) -> Tensor:
        """[B, M] int64, the position that each place of sinks and ring holds, as `ring_positions`."""
        return ring_positions(lengths, self.near_keys.shape[2], self.sink_size, self.ring_size)
