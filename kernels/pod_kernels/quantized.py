"""Vectors of a cache in 8 or 4 bits: keys per channel, values per token, the last tokens as they are (KIVI).

Legend: H heads, B rows, n = H * B segments in the order head, row; S slots of all segments, D head dimension, g tokens
of a group, P groups of a segment that may be open.

A segment's slots are cut into groups of g. A group whose tokens all lie at least `residual` tokens back is closed: its
vectors are codes, with a scale and a lowest value for each of its channels (keys) or for each token and g channels
(values). The groups behind it are open: full precision, in a ring of P groups, so that no capacity is kept twice.

Source: KIVI (arXiv 2402.02750), sections 3.2 and 3.3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pod_kernels.segments import Segments


@dataclass(frozen=True)
class Quantization:
    """How a cache stores values and distant keys.

    Args:
        bits: 8 or 4.
        group: tokens whose keys share a channel's scale; and channels whose values share a token's scale, the whole
            head where they do not divide it.
        residual: the last tokens of each row and head, at least, that stay in full precision.

    Raises:
        ValueError: a value is out of range; names it.
    """

    bits: int = 8
    group: int = 32
    residual: int = 128

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits must be 8 or 4, got {self.bits!r}")
        for name in ("group", "residual"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 token, got {getattr(self, name)!r}")

    @property
    def open_groups(self) -> int:
        """P: the most groups that tokens which are not closed can lie in."""
        return (self.residual + self.group - 2) // self.group + 1

    def rounded(self, tokens: int) -> int:
        """Slots of whole groups for so many tokens."""
        return -(-tokens // self.group) * self.group

    def channels(self, dim: int) -> int:
        """Channels of a value that share a scale."""
        return self.group if dim % self.group == 0 else dim

    def nbytes(self, capacity: int, dim: int, itemsize: int, is_key: bool) -> int:
        """Bytes of a segment of so many slots, a multiple of `group`."""
        scales = capacity // self.group * dim if is_key else capacity * (dim // self.channels(dim))
        full = self.open_groups * self.group * dim + 2 * scales
        return capacity * dim * self.bits // 8 + full * itemsize + 8

    def encode(self, vectors: Tensor, is_key: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Quantise whole groups.

        Args:
            vectors: [m, g, D].
            is_key: per channel; else per token.

        Returns:
            codes [m, g, D * bits / 8] uint8; scales and lowest values in the vectors' dtype, [m, D] or
            [m, g, D / channels].
        """
        levels, dtype = 2**self.bits - 1, vectors.dtype
        spread = vectors.float() if is_key else vectors.float().unflatten(-1, (-1, self.channels(vectors.shape[-1])))
        over = 1 if is_key else -1
        low = spread.amin(dim=over, keepdim=True).to(dtype)
        scale = ((spread.amax(dim=over, keepdim=True) - low.float()) / levels).to(dtype)
        # A scale of 0 stands for vectors that are all alike.
        divisor = scale.float().masked_fill(scale == 0, 1)
        codes = ((spread - low.float()) / divisor).round().clamp(0, levels).to(torch.uint8)
        codes = codes if is_key else codes.flatten(2)
        if self.bits == 4:
            first, second = codes.chunk(2, dim=-1)
            codes = first | (second << 4)
        return codes, scale.squeeze(over), low.squeeze(over)

    def decode(self, codes: Tensor, scales: Tensor, lows: Tensor, is_key: bool) -> Tensor:
        """[m, g, D] from what `encode` gave, in the scales' dtype."""
        if self.bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], dim=-1)
        vectors = codes.to(scales.dtype)
        if is_key:
            return vectors.mul_(scales[:, None]).add_(lows[:, None])
        vectors = vectors.unflatten(-1, (scales.shape[-1], -1))
        return vectors.mul_(scales[..., None]).add_(lows[..., None]).flatten(2)


@dataclass
class QuantizedSegments:
    """Packed segments (`Segments.packed`) at rest. To be read or written they are made full, one layer at a time.

    Attributes:
        spec: how.
        is_key: per channel; else per token.
        sizes: [H][B] slots of each segment, multiples of g.
        batch: B.
        codes: [S / g, g, D * bits / 8] uint8.
        scales, lows: [S / g, D] of keys, [S / g, g, D / channels] of values.
        open: [n, P, g, D], the open groups; group j of a segment is at j mod P.
        closed: [n] int64, closed groups of each segment.
    """

    NAMES: ClassVar[tuple[str, ...]] = ("codes", "scales", "lows", "open", "closed")

    spec: Quantization
    is_key: bool
    sizes: tuple[tuple[int, ...], ...]
    batch: int
    codes: Tensor
    scales: Tensor
    lows: Tensor
    open: Tensor
    closed: Tensor

    @classmethod
    def allocate(
        cls,
        spec: Quantization,
        is_key: bool,
        sizes: Sequence[Sequence[int]],
        batch: int,
        dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "QuantizedSegments":
        """Empty segments; arguments as the attributes, and D."""
        sizes = tuple(tuple(head) for head in sizes)
        count, groups = len(sizes) * batch, sum(map(sum, sizes)) // spec.group
        scales = (groups, dim) if is_key else (groups, spec.group, dim // spec.channels(dim))
        return cls(
            spec,
            is_key,
            sizes,
            batch,
            codes=torch.zeros(groups, spec.group, dim * spec.bits // 8, dtype=torch.uint8, device=device),
            scales=torch.zeros(scales, dtype=dtype, device=device),
            lows=torch.zeros(scales, dtype=dtype, device=device),
            open=torch.zeros(count, spec.open_groups, spec.group, dim, dtype=dtype, device=device),
            closed=torch.zeros(count, dtype=torch.long, device=device),
        )

    def named(self, name: str) -> dict[str, Tensor]:
        """All of it, each under `name.` and the attribute's name."""
        return {f"{name}.{part}": getattr(self, part) for part in self.NAMES}

    def tensors(self) -> list[Tensor]:
        """All of it."""
        return list(self.named("").values())

    def nbytes(self) -> int:
        """Bytes of the storages, used or not."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors())

    def full(self, head: int | None = None) -> Segments:
        """The vectors in full precision, in segments of the same sizes; of one head alone when told."""
        chosen = self.sizes if head is None else self.sizes[head : head + 1]
        first = 0 if head is None else head
        start = sum(map(sum, self.sizes[:first])) // self.spec.group
        groups = slice(start, start + sum(map(sum, chosen)) // self.spec.group)
        vectors = self.spec.decode(self.codes[groups], self.scales[groups], self.lows[groups], self.is_key)
        part = slice(first * self.batch, (first + len(chosen)) * self.batch)
        begin, end = self._bounds()
        number = self.closed[part, None] + torch.arange(self.spec.open_groups, device=vectors.device)
        is_there = begin[part, None] + number < end[part, None]
        number = number[is_there]
        segment = is_there.nonzero()[:, 0]
        vectors[begin[part][segment] - start + number] = self.open[part][segment, number % self.spec.open_groups]
        made = Segments.packed(chosen, self.batch, 0, dtype=vectors.dtype, device=vectors.device)
        made.data = vectors.flatten(0, 1)
        return made

    def absorb(self, full: Segments, used: Tensor) -> None:
        """Take over what was written.

        Args:
            full: as `full` gave it, with further vectors behind those that were there.
            used: [n] int64, slots in use of each segment, the first ones.
        """
        if not full.data.shape[0]:
            return
        spec, vectors = self.spec, full.data.unflatten(0, (-1, self.spec.group))
        begin, _ = self._bounds()
        closed = torch.maximum(self.closed, (used - spec.residual).clamp(min=0) // spec.group)
        number = self.closed[:, None] + torch.arange(int((closed - self.closed).max()), device=used.device)
        at = (begin[:, None] + number)[number < closed[:, None]]
        if len(at):
            self.codes[at], self.scales[at], self.lows[at] = spec.encode(vectors[at], self.is_key)
        self.closed = closed
        number = closed[:, None] + torch.arange(spec.open_groups, device=used.device)
        # Beyond a segment's end there is nothing; what is copied there is never read.
        at = (begin[:, None] + number).clamp(max=len(vectors) - 1)
        place = (number % spec.open_groups)[..., None, None].expand(*number.shape, *vectors.shape[1:])
        self.open.scatter_(1, place, vectors[at])

    def take(self, other: "QuantizedSegments", rows: Sequence[int] | None = None) -> None:
        """Fill these segments, which are empty, from others of as many heads.

        Args:
            other: its segments are no larger than these.
            rows: which of its rows these are; None: all of them, in order.
        """
        rows = range(self.batch) if rows is None else rows
        device = self.codes.device
        segments = [head * other.batch + row for head in range(len(self.sizes)) for row in rows]
        (mine, _), (begin, end) = ([bound.tolist() for bound in one._bounds()] for one in (self, other))
        pairs = [
            (start + group - begin[source], group)
            for start, source in zip(mine, segments, strict=True)
            for group in range(begin[source], end[source])
        ]
        at, source = torch.tensor(pairs, dtype=torch.long, device=device).view(-1, 2).unbind(1)
        for name in ("codes", "scales", "lows"):
            getattr(self, name)[at] = getattr(other, name)[source]
        segments = torch.tensor(segments, dtype=torch.long, device=device)
        self.open, self.closed = other.open[segments], other.closed[segments]

    def resized(self, sizes: Sequence[Sequence[int]]) -> "QuantizedSegments":
        """A copy in segments [H][B] that are no smaller; what is closed stays as it is."""
        return self._taken(sizes, list(range(self.batch)))

    def of_rows(self, rows: list[int]) -> "QuantizedSegments":
        """A copy of some rows, in that order."""
        return self._taken([[head[row] for row in rows] for head in self.sizes], rows)

    def _taken(self, sizes: Sequence[Sequence[int]], rows: list[int]) -> "QuantizedSegments":
        options = {"dtype": self.open.dtype, "device": self.open.device}
        new = self.allocate(self.spec, self.is_key, sizes, len(rows), self.open.shape[-1], **options)
        new.take(self, rows)
        return new

    def _bounds(self) -> tuple[Tensor, Tensor]:
        """[n] each, the first group of each segment and the one behind its last."""
        sizes = torch.tensor(self.sizes, dtype=torch.long, device=self.codes.device).flatten() // self.spec.group
        end = sizes.cumsum(dim=0)
        return end - sizes, end


def quantized(full: Segments, used: Tensor, spec: Quantization, is_key: bool) -> QuantizedSegments:
    """Packed segments put to rest.

    Args:
        full: of sizes that are multiples of the group.
        used: [n] int64, slots in use of each segment, the first ones.
    """
    data, batch = full.data, full.offsets.shape[0]
    made = QuantizedSegments.allocate(
        spec, is_key, full.sizes, batch, data.shape[1], dtype=data.dtype, device=data.device
    )
    made.absorb(full, used)
    return made
