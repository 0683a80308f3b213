"""What one forward adds to a store of fixed slots: counts, places, angles, the plan of its insertion, own keys.

All but the own keys depends on token counts only: it is made once for all layers, and numbers for several steps of
decoding ahead.

Own keys of proximal tokens, which heads that are no anchors keep beside their block's slots, lie in sinks and a ring of
the recent ones by position; or, where that is no smaller, in the slots of their values.

Legend: B rows, T tokens of a forward, F slots in use, P slots in all, S sinks, D head dimension; of `OwnRing`, S heads
of the layer that are no anchors, R places of a head's own keys.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from pod.cache.storage import Rotary, Step
from pod_kernels import Segments
from pod_kernels.cascade import Cascades, Plan
from pod_kernels.segments import on_device, ring_places
from pod_kernels.slots import Capped, OwnKeys, rotated_pieces

# Steps of decoding whose numbers go to the device at once.
STEPS_AHEAD = 64


@dataclass
class FarSinks:
    """Sinks from which a query may be farther than the window, as which their distance then counts.

    Source: LM-Infinite (arXiv 2308.16137).

    Attributes:
        columns: [B, S] which of the keys of slots and new tokens each is.
        place: [B, S] the place of a new one among the new tokens.
        positions: [B, S], -1 where there is none.
        used: F.
        ceiling: tokens.
    """

    columns: Tensor
    place: Tensor
    positions: Tensor
    used: int
    ceiling: int

    def capped(
        self,
        queries: Tensor,
        held: Segments,
        new: Tensor,
        slots: Tensor | None = None,
        near: tuple[int, int] | None = None,
    ) -> Capped:
        """The sinks of h heads, at the window's distance from the queries.

        Args:
            queries: [h, B, G, T, D] turned to place `ceiling`.
            held, new: segments of the heads' keys in the slots, and [h, B, T, D] of the forward.
            slots: [S] of the sinks in `held`; None: the first ones.
            near: see `Capped`.
        """
        count = self.columns.shape[1]
        sink = torch.arange(count, device=new.device)
        keys = torch.cat([held.rectangle[:, :, sink if slots is None else slots], new], dim=2)
        index = torch.where(self.columns < self.used, sink, count + self.place).clamp(0, keys.shape[2] - 1)
        index = index.expand(len(new), -1, -1)
        keys = keys.gather(2, index[..., None].expand(*index.shape, new.shape[-1]))
        own = OwnKeys(keys, self.columns.expand(index.shape), self.positions.expand(index.shape))
        return Capped(queries, own, self.ceiling, near)


@dataclass
class Numbers:
    """What follows from token counts alone, for the rows of one forward or of several to come; n rows in all.

    Attributes:
        cascades: sinks, slots and sub-caches.
        seen_rows, new_rows: [n] int64 on the host, a row's tokens before a forward and its real tokens in it.
        columns: T.
        seen, counts: [n] int64, the same on the device.
        oldest: [n, N] int64 each, of `Cascades.oldest`; none without rotation.
    """

    cascades: Cascades
    seen_rows: np.ndarray
    new_rows: np.ndarray
    columns: int
    seen: Tensor
    counts: Tensor
    oldest: list[Tensor]

    @classmethod
    def of(
        cls, cascades: Cascades, rotates: bool, seen: np.ndarray, new: np.ndarray, columns: int, device: torch.device
    ) -> "Numbers":
        """All of them, in one copy to the device."""
        arrays = [seen, new, *(cascades.oldest(seen) if rotates else ())]
        there = on_device(arrays, device)
        return cls(cascades, seen, new, columns, there[0], there[1], there[2:])

    @cached_property
    def plan(self) -> Plan:
        """Of the insertions, in a further copy; the kernels do without for a single token."""
        return self.cascades.plan(self.seen_rows, self.new_rows, self.columns, self.seen.device)


@dataclass
class ChainStep:
    """What one forward adds beside `pod.cache.storage.Step`, the same for all layers.

    What has [B or 1] rows has one when all rows are alike.

    Attributes:
        numbers: what follows from token counts, of this forward's rows and perhaps of others.
        rows: first and last (excluded) of this forward's among them.
        positions: [B, T] int64 of the new tokens in their rows, -1 for padding.
        is_even: no padding.
        used: F, slots in use in the fullest row.
        kept: [B or 1] slots in use.
        seen: [B or 1] tokens before the forward.
        counts: [B or 1] real tokens.
        angles: cos and sin [B or 1, T, D / 2] of the new tokens; None without rotation.
        table: cos and sin [.., D / 2] by place; None without rotation.
        decay: [T] each query's factor in the scores; None without scores.
        held: [B, F] positions of the tokens in the slots; None without a window.
        sinks: where rotated keys have a window; None where no query is farther from them than it.
    """

    numbers: Numbers
    rows: tuple[int, int]
    positions: Tensor
    is_even: bool
    used: int
    kept: Tensor
    seen: Tensor
    counts: Tensor
    angles: tuple[Tensor, Tensor] | None = None
    table: tuple[Tensor, Tensor] | None = None
    decay: Tensor | None = None
    held: Tensor | None = None
    sinks: FarSinks | None = None

    @cached_property
    def ranks(self) -> Tensor:
        """[B or 1, N, c] of `Cascades.ranks`."""
        return self.numbers.cascades.ranks(*(part[slice(*self.rows)] for part in self.numbers.oldest))

    @cached_property
    def plan(self) -> Plan:
        """Of the insertion."""
        return self.numbers.plan.rows(*self.rows)


class Steps:
    """Makes one store's steps, and keeps what several have in common.

    Args:
        cascades: sinks, slots and sub-caches.
        rotates: keys are stored before RoPE and rotated to their place among the kept tokens.
        gamma: of the scores; None without.
        has_window: a query sees a window, however many are processed at once.

    Attributes:
        table: cos and sin [.., D / 2] by place; None before the first rotation.
    """

    def __init__(self, cascades: Cascades, rotates: bool, gamma: float | None, has_window: bool) -> None:
        self.cascades, self.rotates, self.gamma, self.has_window = cascades, rotates, gamma, has_window
        self.table: tuple[Tensor, Tensor] | None = None
        self._ahead: Numbers | None = None

    def of(self, step: Step, inputs: Tensor, held: Tensor | None, rotary: Rotary) -> ChainStep:
        """What one forward adds.

        Args:
            step: the same, as the cache counts it.
            inputs: [B, T, hidden]; gives tokens, dtype and device.
            held: [B, P] positions of the tokens in the slots; None before the first forward.
            rotary: the model's rotary embedding.
        """
        cascades, device, seen, new = self.cascades, inputs.device, step.seen, step.new
        batch, count = inputs.shape[:2]
        column = torch.arange(count, device=device)
        # Rows that are alike, the usual case, share one plan.
        is_alike = len(set(seen)) == 1 and len(set(new)) == 1
        rows = slice(0, 1) if is_alike else slice(None)
        seen_rows, new_rows = np.array(seen[rows]), np.array(new[rows])
        used, longest = min(max(seen), cascades.slots), max(seen) + count
        if count == 1 == min(new):
            numbers, part = self._one_token(seen_rows, device)
        else:
            numbers = Numbers.of(cascades, self.rotates, seen_rows, new_rows, count, device)
            part = 0, len(seen_rows)
        before, counts = numbers.seen[slice(*part)], numbers.counts[slice(*part)]
        kept = before.clamp(max=cascades.slots)
        place = column - (count - counts)[:, None]
        made = ChainStep(numbers, part, step.positions, step.all_real, used, kept, before, counts)
        if self.rotates:
            made.table = self._rotary_table(inputs, used + count, rotary)
            at = (kept[:, None] + place).clamp(min=0)
            made.angles = made.table[0][at], made.table[1][at]
        if self.gamma is not None:
            exponents = torch.arange(count - 1, -1, -1, device=device, dtype=torch.float32)
            made.decay = (1 - self.gamma) * self.gamma**exponents
        if self.has_window:
            # Copied: layer by layer, several tokens are written over what the slots hold.
            made.held = step.positions[:, :0] if held is None else held[:, :used].clone()
            if self.rotates and cascades.sinks and longest - 1 > cascades.budget:
                made.sinks = self._far_sinks(used, count, *(part.expand(batch)[:, None] for part in (before, counts)))
        return made

    def _one_token(self, seen: np.ndarray, device: torch.device) -> tuple[Numbers, tuple[int, int]]:
        """Numbers of one token in each row, made for several steps of decoding at once, and which rows are this one's.

        So most steps take nothing from the host.
        """
        rows, known, found = len(seen), self._ahead, ()
        if known is not None and known.seen.device == device and len(known.seen_rows) == STEPS_AHEAD * rows:
            found = np.flatnonzero((known.seen_rows.reshape(STEPS_AHEAD, rows) == seen).all(axis=1))
        if not len(found):
            each, found = (np.arange(STEPS_AHEAD)[:, None] + seen).reshape(-1), (0,)
            self._ahead = Numbers.of(self.cascades, self.rotates, each, np.ones_like(each), 1, device)
        first = int(found[0]) * rows
        return self._ahead, (first, first + rows)

    def _far_sinks(self, used: int, count: int, seen: Tensor, counts: Tensor) -> FarSinks:
        """Of rows with [B, 1] tokens seen and new."""
        sink = torch.arange(self.cascades.sinks, device=seen.device)
        place = count - counts + sink - seen  # of a new one
        positions = torch.where(sink < seen + counts, sink, -1)
        columns = torch.where(positions < 0, used + count, torch.where(sink < seen, sink, used + place))
        return FarSinks(columns, place, positions, used, self.cascades.budget)

    def _rotary_table(self, inputs: Tensor, length: int, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """cos and sin [length or more, D / 2] of the first places."""
        kind = getattr(rotary, "rope_type", "")
        # These change their frequencies with the longest position in use.
        changes = "dynamic" in kind or kind == "longrope"
        held = 0 if self.table is None else len(self.table[0])
        if held < length or (changes and held != length) or self.table[0].dtype != inputs.dtype:
            if not changes:
                length = max(length, self.cascades.slots + 1)
            places = torch.arange(length, device=inputs.device)[None]
            self.table = tuple(part[0].chunk(2, dim=-1)[0] for part in rotary(inputs, places))
        return self.table


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
