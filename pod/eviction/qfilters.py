"""Q-Filters (arXiv 2503.02812): keep the keys that lie in the direction of a head's queries."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from pod import calibration
from pod.eviction.base import Observation
from pod.eviction.keys import KeyScores


@dataclass(frozen=True)
class QFilters(KeyScores):
    """Keys in the direction of the queries: tokens with the largest product with their head's filter stay.

    A filter is the first direction of a head's queries, measured once by `python -m pod.calibrate`; no query of the
    text at hand is looked at. A block goes by its anchor's filter. The authors' cache evicts at every step:
    `every=1`, with 64 of 128 tokens as the window.

    Args:
        window: last tokens that are always kept.
        filters: the calibration file.

    Raises:
        ValueError: window negative.
    """

    window: int = 64
    filters: str = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 0:
            raise ValueError(f"QFilters: window must not be negative, got {self.window}")

    def protected(self, groups: int = 1) -> int:
        return self.window

    def table(self, config: PreTrainedConfig) -> Tensor:
        return calibration.load(self.filters).of(calibration.FILTERS, config)

    def score(self, seen: Observation) -> Tensor:
        return torch.einsum("band,ad->ban", seen.keys, seen.table)
