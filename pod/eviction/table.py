"""The blocks anchored in a layer: how many slots each has, which position each slot holds, and how many may stay.

Legend: B rows, A blocks, N slots of the largest, S slots of all, T tokens of a forward.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pod.cache_rows import Step
from pod_kernels import Segments

FACTS = ("heads", "sizes", "held", "budgets", "room", "is_packed", "has_holes")
EMPTY = torch.iinfo(torch.int32).max


@dataclass
class Table:
    """The blocks anchored in one layer.

    Attributes:
        heads: their KV heads, in storage order.
        sizes: [A][B] slots of each; keys and values lie the same way.
        slots: [B, A] segments of positions, [S, 1] int32, -1 where a slot is empty; None: slot = position.
        scores: the same of float32, where scores are needed later.
        held: [A][B] tokens of each; known only until a token is decoded.
        budgets: [A][B] what decoding keeps of each; None until a prefill has decided.
        targets: [A][B] what a prefill leaves of each, once decided.
        room: empty slots that every segment has at least.
        is_packed: these are every segment's last slots, and all others hold a token.
        has_holes: slots are not in order of position.
        new_slots: [A, B, T] where the tokens of this forward are; an integer: the first of them, everywhere.
        received: [B, A, N] scores of this forward, a step, to be added to those that are carried.
        condemned: [A, B, N] slots that are given up when this forward ends.
    """

    heads: tuple[int, ...]
    sizes: list[list[int]]
    slots: Segments | None
    scores: Segments | None
    held: list[list[int]]
    budgets: list[list[int]] | None
    targets: list[list[int]] | None = None
    room: int = 0
    is_packed: bool = False
    has_holes: bool = False
    new_slots: Tensor | int | None = None
    received: Tensor | None = None
    condemned: Tensor | None = None
    _on_device: tuple[list[list[int]], Tensor] | None = field(init=False, default=None)  # budgets, and as a tensor

    def positions(self, units: Sequence[int] | None = None) -> Tensor:
        """[B, A, N] int64, -1 where a slot is empty; of some blocks, when told."""
        return _some(self.slots.padded(-1)[..., 0], units).transpose(0, 1).long()

    def carried(self, units: Sequence[int] | None = None) -> Tensor:
        """[B, A, N] float32, the scores; of some blocks, when told."""
        return _some(self.scores.padded(0)[..., 0], units).transpose(0, 1)

    def budget_counts(self) -> Tensor:
        """[B, A] int64, the budgets on the device."""
        if self._on_device is None or self._on_device[0] is not self.budgets:
            self._on_device = self.budgets, torch.tensor(self.budgets, device=self.slots.data.device).t()
        return self._on_device[1]

    def live(self) -> Tensor:
        """[A, B] int64, tokens of each."""
        return (self.slots.padded(-1)[..., 0] >= 0).sum(dim=-1)

    def add_scores(self, more: Tensor) -> None:
        """Add [B, A, N] to the scores."""
        for place, view in _views(self.scores):
            view += more.transpose(0, 1)[place]

    def over_target(self, index: int) -> bool:
        """A row of this block holds more than the prefill may leave of it."""
        if self.targets is None:
            return False
        return any(have > most for have, most in zip(self.held[index], self.targets[index], strict=True))

    def count_room(self, at_budget: bool = False) -> None:
        """Note how many empty slots every segment has; `at_budget`: none holds more than its budget."""
        held = self.budgets if at_budget else self.held
        spare = [
            size - have
            for sizes, counts in zip(self.sizes, held, strict=True)
            for size, have in zip(sizes, counts, strict=True)
        ]
        self.room = max(self.room, min(spare)) if at_budget else min(spare)
        self.is_packed = not (at_budget or self.has_holes) and len(set(spare)) == 1

    def place(self, step: Step, count: int) -> None:
        """Choose the slots of a forward's tokens, T of them; `write` then puts their positions there."""
        size = self.sizes[0][0]
        if self.slots is None:
            # A row of which nothing but padding was seen: what lands in its last slot is overwritten before it is read.
            self.new_slots = step.length - count if step.even else step.positions.remainder(size)[None]
            self.room = size - step.length
            return
        if count > 1:
            self.new_slots = self.live()[..., None] + (step.positions >= 0).cumsum(dim=1) - 1
        elif self.is_packed:
            self.new_slots = self.slots.capacities.t()[..., None] - self.room
        else:
            self.new_slots = self.slots.padded(EMPTY)[..., 0].argmin(dim=-1, keepdim=True)  # the first empty one
        self.room -= count
        self.is_packed &= step.all_real

    def write(self, step: Step, real: tuple[Tensor, Tensor] | None) -> None:
        """Note the positions of a forward's tokens, which have no score yet; see `Segments.write`."""
        if self.slots is None:
            return
        positions = step.positions.expand(len(self.heads), -1, -1)[..., None].int()
        self.slots.write(self.new_slots, positions, real)
        if self.scores is not None:
            self.scores.write(self.new_slots, torch.zeros_like(positions, dtype=torch.float32), real)

    def crop(self, lengths: Tensor, removed: int) -> None:
        """Forget the positions from `lengths` [B] on, `removed` of each row; 0: what a failed forward has left."""
        if self.slots is None:
            return
        for (_, rows, _), held in _views(self.slots):
            held.masked_fill_(held >= lengths[rows, None], -1)
        self.room += removed
        self.is_packed &= removed > 0

    def resize(self, sizes: list[list[int]]) -> None:
        """More slots; what is held stays in its slot."""
        self.sizes = sizes
        if self.slots is not None:
            self.slots = self.slots.resized(sizes, fill=-1)
        if self.scores is not None:
            self.scores = self.scores.resized(sizes)

    def drop_condemned(self) -> None:
        """Mark slots that a step gives up as empty."""
        for piece, held in _views(self.slots):
            held.masked_fill_(self.condemned[piece], -1)
        self.condemned = None
        self.has_holes = True
        self.count_room(at_budget=True)

    def of_rows(self, rows: Tensor) -> "Table":
        """The table of some rows [n] int64, in that order."""
        if self.slots is None:
            sizes = [[self.sizes[0][0]] * len(rows)] * len(self.sizes)
            return replace(self, sizes=sizes, held=sizes)
        chosen = rows.tolist()
        lists = {name: getattr(self, name) for name in FACTS[1:4] if getattr(self, name) is not None}
        lists = {name: [[head[row] for row in chosen] for head in held] for name, held in lists.items()}
        scores = None if self.scores is None else self.scores.of_rows(rows)
        return replace(self, slots=self.slots.of_rows(rows), scores=scores, **lists)

    def tensors(self) -> dict[str, Tensor]:
        """What is kept between two forwards, by name."""
        parts = {"slots": self.slots, "scores": self.scores}
        return {name: part.data for name, part in parts.items() if part is not None}

    def facts(self) -> dict[str, Any]:
        """What else there is to know, as JSON."""
        return {name: getattr(self, name) for name in FACTS}


def _some(rows: Tensor, chosen: Sequence[int] | None) -> Tensor:
    """Some of the first dimension's; a list as an index would be copied to the device."""
    return rows if chosen is None else torch.stack([rows[index] for index in chosen])


def _views(segments: Segments) -> Iterator[tuple[tuple[slice, slice, slice], Tensor]]:
    """Views [h, b, C] of segments of single numbers, each with its place in the padded [H, B, N]."""
    for piece in segments.pieces():
        heads, rows = slice(piece.head, piece.head + piece.heads), slice(piece.row, piece.row + piece.rows)
        yield (heads, rows, slice(piece.capacity)), segments.view(piece)[..., 0]
