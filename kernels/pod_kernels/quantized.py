"""Vectors of a cache in 8 or 4 bits: keys per channel, values per token, the last tokens as they are (KIVI).

Legend: H heads, B rows, n = H * B segments in the order head, row; S slots of all segments, D head dimension, g tokens
of a group, P groups of a segment that may be open.

A segment's slots are cut into groups of g; the last may go beyond the slots. A group whose tokens all lie at least
`residual` tokens back is closed: its vectors are codes, with a scale and a lowest value for each of its channels (keys)
or for each token and g channels (values). The groups behind it are open: full precision, in a ring of P groups, so that
no capacity is kept twice.

Source: KIVI (arXiv 2402.02750), sections 3.2 and 3.3.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from pod_kernels.segments import Segments, on_device


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

    def rounded(self, tokens: int | np.ndarray) -> int | np.ndarray:
        """Slots of whole groups for so many tokens."""
        return -(-tokens // self.group) * self.group

    def channels(self, dim: int) -> int:
        """Channels of a value that share a scale."""
        return self.group if dim % self.group == 0 else dim

    def nbytes(self, slots: int | np.ndarray, dim: int, itemsize: int, is_key: bool) -> int | np.ndarray:
        """Bytes of a segment, or of each."""
        capacity = self.rounded(slots)
        scales = capacity // self.group * dim if is_key else capacity * (dim // self.channels(dim))
        full = self.open_groups * self.group * dim + 2 * scales
        return capacity * dim * self.bits // 8 + full * itemsize + 8

    def pays(self, sizes: ArrayLike, dim: int, itemsize: int) -> bool:
        """Whether segments of such sizes take fewer bytes than as they come, keys as well as values.

        Each has its open groups, however small it is, so small ones do not.
        """
        sizes = np.asarray(sizes, dtype=np.int64)
        plain = sizes.sum() * dim * itemsize
        return all(self.nbytes(sizes, dim, itemsize, is_key).sum() < plain for is_key in (True, False))

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
        sizes: [H, B] slots of each segment, on the host.
        codes: [M, g, D * bits / 8] uint8, of the M groups of all segments.
        scales, lows: [M, D] of keys, [M, g, D / channels] of values.
        open: [n, P, g, D], the open groups; group j of a segment is at j mod P.
        closed: [n] int64, closed groups of each segment.
    """

    NAMES: ClassVar[tuple[str, ...]] = ("codes", "scales", "lows", "open", "closed")

    spec: Quantization
    is_key: bool
    sizes: np.ndarray
    codes: Tensor
    scales: Tensor
    lows: Tensor
    open: Tensor
    closed: Tensor
    _layouts: "dict[int | None, Layout]" = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def allocate(
        cls,
        spec: Quantization,
        is_key: bool,
        sizes: ArrayLike,
        batch: int,
        dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "QuantizedSegments":
        """Empty segments; arguments as the attributes, and as `Segments.packed`."""
        sizes = np.array(sizes, dtype=np.int64).reshape(-1, batch)
        count, groups = sizes.size, int(spec.rounded(sizes).sum()) // spec.group
        scales = (groups, dim) if is_key else (groups, spec.group, dim // spec.channels(dim))
        return cls(
            spec,
            is_key,
            sizes,
            codes=torch.zeros(groups, spec.group, dim * spec.bits // 8, dtype=torch.uint8, device=device),
            scales=torch.zeros(scales, dtype=dtype, device=device),
            lows=torch.zeros(scales, dtype=dtype, device=device),
            open=torch.zeros(count, spec.open_groups, spec.group, dim, dtype=dtype, device=device),
            closed=torch.zeros(count, dtype=torch.long, device=device),
        )

    def named(self, name: str) -> dict[str, Tensor]:
        """All of it, each under `name.` and the attribute's name."""
        return {f"{name}.{part}": getattr(self, part) for part in self.NAMES}

    def nbytes(self) -> int:
        """Bytes of the storages, used or not."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.named("").values())

    def full(self, head: int | None = None) -> Segments:
        """The vectors in full precision, in segments of the same sizes; of one head alone when told."""
        layout = self._layout(head)
        codes, scales, lows = (part[layout.groups] for part in (self.codes, self.scales, self.lows))
        vectors = self.spec.decode(codes, scales, lows, self.is_key)
        if len(layout.segments):
            number = self.closed[layout.segments, None] + torch.arange(self.spec.open_groups, device=vectors.device)
            # The last group is never closed. Where there are fewer it is written several times, always the same: so
            # which there are need not be looked up, for which the host would wait.
            number = torch.minimum(number, layout.last[:, None])
            vectors[layout.begin[:, None] + number] = self.open[
                layout.segments[:, None], number % self.spec.open_groups
            ]
        vectors = vectors.flatten(0, 1)
        return replace(layout.empty, data=vectors if layout.shift is None else vectors[layout.slots()])

    def absorb(self, full: Segments, used: Tensor, new: int | None = None) -> None:
        """Take over what was written.

        Args:
            full: as `full` gave it, with further vectors behind those that were there.
            used: [n] int64, slots in use of each segment, the first ones.
            new: no segment has more vectors than this which were not there before; None where that is not known. The
                host then waits for the device, to learn how many groups have become full.
        """
        if not full.data.shape[0]:
            return
        spec, data, layout = self.spec, full.data, self._layout(None)
        if layout.shift is not None:
            data = data.new_zeros(len(self.codes) * spec.group, data.shape[1]).index_copy_(0, layout.slots(), data)
        vectors = data.unflatten(0, (-1, spec.group))
        closed = torch.maximum(self.closed, (used - spec.residual).clamp(min=0) // spec.group)
        most = int((closed - self.closed).max()) if new is None else -(-new // spec.group)
        begin, end = self._bounds
        if most:
            number = self.closed[:, None] + torch.arange(most, device=used.device)
            is_closed = number < closed[:, None]
            # The last group is never closed: what a segment closes less than another one leaves it as it is.
            at = torch.minimum(begin[:, None] + number, end[:, None] - 1)
            encoded = spec.encode(vectors[at.flatten()], self.is_key)
            for held, made in zip((self.codes, self.scales, self.lows), encoded, strict=True):
                made = made.unflatten(0, at.shape)
                held[at] = torch.where(is_closed.view(*at.shape, *[1] * (made.dim() - 2)), made, held[at])
        self.closed = closed
        number = closed[:, None] + torch.arange(spec.open_groups, device=used.device)
        # Beyond a segment's end there is nothing; what is copied there is never read.
        at = (begin[:, None] + number).clamp(max=len(vectors) - 1)
        place = (number % spec.open_groups)[..., None, None].expand(*number.shape, *vectors.shape[1:])
        self.open.scatter_(1, place, vectors[at])

    def resized(self, sizes: np.ndarray) -> "QuantizedSegments":
        """A copy in segments [H, B] that are no smaller; what is closed stays as it is."""
        return self._taken(sizes, slice(None))

    def of_rows(self, rows: Tensor) -> "QuantizedSegments":
        """A copy of some rows [n] int64, in that order."""
        rows = rows.tolist()
        return self._taken(self.sizes[:, rows], rows)

    def _taken(self, sizes: np.ndarray, rows: list[int] | slice) -> "QuantizedSegments":
        """A copy in segments of other sizes.

        Args:
            sizes: [H, n], none smaller than that of the segment which is copied.
            rows: which of the rows these are.
        """
        options = {"dtype": self.open.dtype, "device": self.open.device}
        new = self.allocate(self.spec, self.is_key, sizes, sizes.shape[1], self.open.shape[-1], **options)
        segments = np.arange(self.sizes.size).reshape(self.sizes.shape)[:, rows].reshape(-1)
        (mine, _), (begin, end) = new._group_bounds(), self._group_bounds()
        pairs = [
            (start + group - begin[source], group)
            for start, source in zip(mine, segments, strict=True)
            for group in range(begin[source], end[source])
        ]
        tables = *np.array(pairs, dtype=np.int64).reshape(-1, 2).T, segments
        at, source, segments = on_device(tables, self.codes.device)
        for name in ("codes", "scales", "lows"):
            getattr(new, name)[at] = getattr(self, name)[source]
        new.open, new.closed = self.open[segments], self.closed[segments]
        return new

    def _group_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """[n] int64 each on the host, the first group of each segment and the one behind its last."""
        groups = self.spec.rounded(self.sizes).reshape(-1) // self.spec.group
        end = groups.cumsum()
        return end - groups, end

    @cached_property
    def _bounds(self) -> list[Tensor]:
        """The same on the device."""
        return on_device(self._group_bounds(), self.codes.device)

    def _layout(self, head: int | None) -> "Layout":
        """Of the segments of one head, or of all; made once."""
        if head not in self._layouts:
            heads = slice(None) if head is None else slice(head, head + 1)
            part = np.arange(self.sizes.size).reshape(self.sizes.shape)[heads].reshape(-1)
            begin, end = (bound[part] for bound in self._group_bounds())
            groups = slice(int(begin[0]), int(end[-1])) if len(part) else slice(0, 0)
            there = end > begin
            tables = [part[there], begin[there] - groups.start, (end - begin)[there] - 1]
            device, sizes = self.codes.device, self.sizes[heads].reshape(-1)
            if (sizes % self.spec.group).any():
                tables.append((begin - groups.start) * self.spec.group - (sizes.cumsum() - sizes))
            empty = Segments.packed(self.sizes[heads], self.sizes.shape[1], 0, dtype=self.scales.dtype, device=device)
            self._layouts[head] = Layout(groups, empty, *on_device(tables, device))
        return self._layouts[head]


@dataclass
class Layout:
    """Where the vectors of some segments are, m of which have groups.

    Attributes:
        groups: theirs among all.
        empty: packed segments of their sizes without vectors.
        segments: [m] int64, which of all segments these are.
        begin: [m] int64, their first groups, counted from the first of `groups`.
        last: [m] int64, their last groups, counted from each one's first.
        shift: [n] int64, by how much each one's slots lie further back in whole groups; None: these have no others.
    """

    groups: slice
    empty: Segments
    segments: Tensor
    begin: Tensor
    last: Tensor
    shift: Tensor | None = None

    def slots(self) -> Tensor:
        """[S] int64, where their slots are among those of whole groups."""
        sizes, count = self.empty.capacities.t().flatten(), len(self.empty.data)
        shift = self.shift.repeat_interleave(sizes, output_size=count)
        return torch.arange(count, device=shift.device) + shift


def quantized(full: Segments, used: Tensor, spec: Quantization, is_key: bool) -> QuantizedSegments:
    """Packed segments put to rest.

    Args:
        full: the vectors.
        used: [n] int64, slots in use of each segment, the first ones.
    """
    data, batch = full.data, full.sizes.shape[1]
    made = QuantizedSegments.allocate(
        spec, is_key, full.sizes, batch, data.shape[1], dtype=data.dtype, device=data.device
    )
    made.absorb(full, used)
    return made
