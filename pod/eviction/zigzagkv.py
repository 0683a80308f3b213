"""ZigZagKV (arXiv 2412.09036): layers whose attention is spread over more tokens keep more."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pod.eviction.base import Observation, Sharing
from pod.eviction.cake import shared_by_preference
from pod.eviction.snapkv import SnapKV


@dataclass(frozen=True)
class ZigZagKV(SnapKV):
    """SnapKV's scores; layers share one budget by how many tokens it takes to hold most of their attention.

    A layer's preference is that number, in the mean over its query heads: the fewest tokens that hold `held` of the
    window's attention, in the mean over the window's queries. Of the tokens beside the window every layer gets the
    part `alpha`; the rest is shared in proportion, and shared anew after every layer, as CAKE does. The paper's
    smallest part is not known.

    Args:
        alpha: the part of the budget beside the window that every layer gets in any case, 0 to 1.
        held: the part of the attention, above 0 and at most 1.

    Raises:
        ValueError: alpha or held out of range.
    """

    alpha: float = 0.2
    held: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.alpha <= 1 and 0 < self.held <= 1):
            raise ValueError(
                f"ZigZagKV: alpha must be between 0 and 1, and held above 0 and at most 1; got {self.alpha:g} and "
                f"{self.held:g}"
            )

    def preference(self, seen: Observation) -> Tensor:
        sums = seen.sums().double().sort(dim=-1, descending=True).values.cumsum(dim=-1)
        return ((sums < self.held * sums[..., -1:]).sum(dim=-1) + 1.0).mean(dim=(1, 2))

    def allocate(self, sharing: Sharing) -> list[np.ndarray]:
        counts = super().allocate(sharing)
        return shared_by_preference(sharing, counts, self.budget, lambda stage, row: stage.preference[row], self.alpha)
