"""Slots beyond what is held: for the tokens up to `max_length` where that is known, else none at first, then some.

All segments get the same number more, so that they are full at the same step: `spare` of what they hold on average.
Places for own keys grow with them, by as many, up to what a row and head can need.

A method that evicts at every step never holds more than its budget: its slots are for that, once and for all.
"""

from dataclasses import dataclass


def spare(tokens: int) -> int:
    """Slots beyond so many tokens where storage grows and it is not known how many are to come.

    A part of them, so that n tokens cost O(n) copies: to copy takes about a hundredth of a step's time.
    """
    return min(tokens // 8, 8 + tokens // 32)


@dataclass
class Headroom:
    """Capacities of a cache that evicts.

    Attributes:
        max_length: tokens that each row will reach, None when unknown.
        every: decoded tokens between two evictions; 0: none while decoding.
        most_near: own keys of proximal tokens that a row and head has at most.
    """

    max_length: int | None
    every: int
    most_near: int

    def after(self, length: int) -> int | None:
        """Tokens still to come after `length`, None when unknown."""
        return None if self.max_length is None else max(0, self.max_length - length)

    def evicted(self, counts: list[list[int]], budgets: list[list[int]], length: int) -> list[list[int]]:
        """Slots of units' rows that were evicted down to `counts` tokens after `length` were seen."""
        headroom = self.after(length)
        if not self.every:
            return [[count + (headroom or 0) for count in unit] for unit in counts]
        most = [
            [max(count, budget) + self.every for count, budget in zip(*unit, strict=True)]
            for unit in zip(counts, budgets, strict=True)
        ]
        if headroom is None:
            return most
        return [
            [min(count + headroom, size) for count, size in zip(*unit, strict=True)]
            for unit in zip(counts, most, strict=True)
        ]

    def grown(self, held: list[list[int]], new: int, length: int) -> list[list[int]]:
        """Slots of units' rows that hold so many tokens and get `new` more, which make it `length` seen."""
        mean = sum(map(sum, held)) // sum(map(len, held))
        more = new + (self.after(length) or spare(mean))
        return [[count + more for count in unit] for unit in held]

    def near(self, held: int, widest: int, length: int, more: int = 0) -> int:
        """Places for own keys: `held` at most, and at least `more` to come; the largest unit has `widest` slots."""
        headroom = self.after(length)
        if headroom is None:
            headroom = self.most_near if self.every else 0
        return max(held, min(self.most_near, widest, held + max(headroom, more)))
