"""CriticalKV (arXiv 2502.03805): half by attention, half by what attention makes of the values."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pod.eviction.base import Observation, ranks
from pod.eviction.snapkv import SnapKV


@dataclass(frozen=True)
class CriticalKV(SnapKV):
    """SnapKV's scores for half of the budget; the rest by these times what a token's value adds to the output.

    Of a budget B, the window and the tokens before it with the highest scores, B // 2 together, are kept. All others
    compete by (score + `epsilon`) * norm: the score is SnapKV's in the mean over the window's queries, the norm the L1
    norm of the value behind each query head's part of the output projection, in the mean over the KV head's query
    heads. In a block those of its anchor's layer decide. `adakv*criticalkv:budget=4096` shares a layer's budget between
    its heads.

    Args:
        epsilon: what is added to the attention, so that it does not decide alone.

    Raises:
        ValueError: epsilon negative.
    """

    epsilon: float = 1e-4

    reads_outputs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.epsilon >= 0:
            raise ValueError(f"CriticalKV: epsilon must not be negative, got {self.epsilon:g}")

    def score(self, seen: Observation) -> Tensor:
        asked = seen.count if seen.asked is None else seen.asked.clamp(min=1)[:, None, None]
        scores = super().score(seen) / asked
        # By rank, above all others: tokens outside the prefix come last and are always kept anyway.
        place = ranks(scores.masked_fill(~seen.prefix(self.window), -1))
        is_first = place >= place.shape[-1] - max(0, self.budget // 2 - self.window)
        rest = (scores + self.epsilon) * seen.output_norms()
        return torch.where(is_first, rest.amax() + 1 + place, rest)
