"""Slots beyond what is held: for the tokens up to `max_length` where that is known, else none at first, then an eighth.

All segments get the same number more, so that they are full at the same step: an eighth of what they hold on average.
Places for own keys grow with them, by as many, up to what a row and head can need.

A method that evicts at every step never holds more than its budget: its slots are for that, once and for all.
"""

from dataclasses import dataclass

from pod_kernels import Quantization


@dataclass(frozen=True)
class Headroom:
    """Capacities of a cache that evicts.

    Attributes:
        max_length: tokens that each row will reach, None when unknown.
        every: decoded tokens between two evictions; 0: none while decoding.
        most_near: own keys of proximal tokens that a row and head has at most.
        quantization: capacities are multiples of its groups; None as they come.
    """

    max_length: int | None
    every: int
    most_near: int
    quantization: Quantization | None

    def after(self, length: int) -> int | None:
        """Tokens still to come after `length`, None when unknown."""
        return None if self.max_length is None else max(0, self.max_length - length)

    def evicted(self, counts: list[int], budgets: list[int], length: int) -> list[int]:
        """Slots of a unit's rows that were evicted down to `counts` tokens after `length` were seen."""
        headroom = self.after(length)
        if not self.every:
            return [self._whole(count + (headroom or 0)) for count in counts]
        needed = [max(0, budget - count) + self.every for count, budget in zip(counts, budgets, strict=True)]
        return [
            count + (more if headroom is None else min(headroom, more))
            for count, more in zip(counts, needed, strict=True)
        ]

    def grown(self, held: list[list[int]], new: int, length: int) -> list[list[int]]:
        """Slots of units' rows that hold so many tokens and get `new` more, which make it `length` seen."""
        mean = sum(map(sum, held)) // sum(map(len, held))
        more = new + (self.after(length) or mean // 8)
        return [[self._whole(count + more) for count in unit] for unit in held]

    def near(self, held: int, widest: int, length: int, more: int = 0) -> int:
        """Places for own keys: `held` at most, and at least `more` to come; the largest unit has `widest` slots."""
        headroom = self.after(length)
        if headroom is None:
            headroom = self.most_near if self.every else 0
        return max(held, min(self.most_near, widest, held + max(headroom, more)))

    def _whole(self, size: int) -> int:
        return size if self.quantization is None else self.quantization.rounded(size)
