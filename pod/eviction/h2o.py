"""H2O (arXiv 2306.14048): keep the recent tokens and those that collected the most attention."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pod.eviction.base import Eviction, Observation


@dataclass(frozen=True)
class H2O(Eviction):
    """Heavy hitters and recent tokens: evicts after a prefill and one token at every step.

    A token's score is the sum of its attention weights over all queries so far, never divided by its age, averaged over
    the KV head's query heads. While decoding, the softmax runs over kept keys, and the sum of an evicted token is gone.

    Args:
        budget: tokens kept per layer and KV head, the recent ones included; or a share, see `Method`.
        recent: the last tokens, the newest among them, that are always kept; half of the budget when None.

    Raises:
        ValueError: recent below 1 or above the budget.
    """

    recent: int | None = None

    when: ClassVar[int] = 1
    scores_stay: ClassVar[str] = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent is not None and self.recent < 1:
            raise ValueError(f"H2O: recent must be at least 1 (the newest token is recent), got {self.recent}")

    def protected(self, groups: int = 1) -> int:
        if self.recent is None and self.is_share:
            raise ValueError(f"H2O: recent, half of a budget of {self.budget}, is not known before the prompt: give it")
        return max(1, self.budget // 2) if self.recent is None else self.recent

    def least(self, sinks: int, groups: int) -> int:
        # Where half of the budget is recent, the sinks are in the other half.
        return max(sinks + 1, 2 * sinks - 1) if self.recent is None else super().least(sinks, groups)

    def score(self, seen: Observation) -> Tensor:
        return seen.sums().mean(dim=2)
