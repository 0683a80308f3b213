"""The table of a layer's units: which position each of their slots holds, with what score, and how many may stay.

Legend: B rows, A units, N slots of the largest, S slots of all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pod_kernels import Segments

FACTS = ("heads", "held", "budgets", "room", "has_holes")


@dataclass
class Table:
    """The units anchored in one layer.

    Attributes:
        heads: their KV heads, in storage order.
        slots: [B, A] packed segments of positions, [S, 1] int32, -1 where a slot is empty; keys lie the same way.
        scores: the same of float32, where scores are needed later.
        held: [A][B] tokens of each; known only until a token is decoded.
        budgets: [A][B] what decoding keeps of each; None until a prefill has decided.
        targets: [A][B] what a prefill leaves of each, once decided.
        room: empty slots that every segment has at least.
        has_holes: slots are not in order of position.
        new_slots: [A, B, T] where the tokens of this forward are.
        received: [B, A, N] scores of this forward, a step, to be added to those that are carried.
        condemned: [A, B, N] slots that are given up when this forward ends.
    """

    heads: tuple[int, ...]
    slots: Segments
    scores: Segments | None
    held: list[list[int]]
    budgets: list[list[int]] | None
    targets: list[list[int]] | None = None
    room: int = 0
    has_holes: bool = False
    new_slots: Tensor | None = None
    received: Tensor | None = None
    condemned: Tensor | None = None
    _on_device: tuple[list[list[int]], Tensor] | None = field(init=False, default=None)  # budgets, and as a tensor

    def positions(self, units: Sequence[int] | None = None) -> Tensor:
        """[B, A, N] int64, -1 where a slot is empty; of some units, when told."""
        return _some(self.slots.padded(-1)[..., 0], units).transpose(0, 1).long()

    def carried(self, units: Sequence[int] | None = None) -> Tensor:
        """[B, A, N] float32, the scores; of some units, when told."""
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
        """A row of this unit holds more than the prefill may leave of it."""
        if self.targets is None:
            return False
        return any(have > most for have, most in zip(self.held[index], self.targets[index], strict=True))

    def count_room(self, at_budget: bool = False) -> None:
        """Note how many empty slots every segment has; `at_budget`: none holds more than its budget."""
        held = self.budgets if at_budget else self.held
        spare = [
            size - have
            for sizes, counts in zip(self.slots.sizes, held, strict=True)
            for size, have in zip(sizes, counts, strict=True)
        ]
        self.room = max(self.room, min(spare)) if at_budget else min(spare)

    def crop(self, lengths: Tensor, removed: int) -> None:
        """Forget the positions from `lengths` [B] on, `removed` of each row."""
        for (_, rows, _), held in _views(self.slots):
            held.masked_fill_(held >= lengths[rows, None], -1)
        self.room += removed

    def drop_condemned(self) -> None:
        """Mark slots that a step gives up as empty."""
        for piece, held in _views(self.slots):
            held.masked_fill_(self.condemned[piece], -1)
        self.condemned = None
        self.has_holes = True
        self.count_room(at_budget=True)

    def of_rows(self, rows: list[int]) -> "Table":
        """The table of some rows, in that order."""
        return replace(
            self,
            slots=self.slots.of_rows(rows),
            scores=None if self.scores is None else self.scores.of_rows(rows),
            held=[[head[row] for row in rows] for head in self.held],
            budgets=None if self.budgets is None else [[head[row] for row in rows] for head in self.budgets],
        )

    def tensors(self) -> dict[str, Tensor]:
        """What is kept between two forwards, by name."""
        scores = {} if self.scores is None else {"scores": self.scores.data}
        return {"slots": self.slots.data} | scores

    def facts(self) -> dict[str, Any]:
        """What else there is to know, as JSON."""
        return {name: getattr(self, name) for name in FACTS}


def _some(rows: Tensor, chosen: Sequence[int] | None) -> Tensor:
    """Some of the first dimension's; a list as an index would be copied to the device."""
    return rows if chosen is None else torch.stack([rows[index] for index in chosen])


def _views(segments: Segments) -> Iterator[tuple[tuple[slice, slice, slice], Tensor]]:
    """Views [h, b, C] of segments of single numbers, each with its place in the padded [H, B, N]."""
    for piece in segments.pieces(0):
        heads, rows = slice(piece.head, piece.head + piece.heads), slice(piece.row, piece.row + piece.rows)
        yield (heads, rows, slice(piece.capacity)), segments.view(piece)[..., 0]
