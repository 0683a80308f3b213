"""One method's scores under another's allocation."""

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from pod.eviction.base import Eviction, Observation, Sharing


@dataclass(frozen=True)
class Combined(Eviction):
    """The scores of one method under the allocation of another, as CAKE's paper puts H2O and SnapKV under its own.

    On command lines `cake*snapkv:budget=256`: CAKE's allocation, SnapKV's scores, and every hyper-parameter given goes
    to the parts that have it.

    Args:
        budget: that of both, as is `query_aware`.
        scorer: gives scores, what is always kept, when, and up to which length a prompt loses nothing.
        allocator: gives preferences and counts.

    Raises:
        ValueError: the budgets or `query_aware` differ, they always keep different numbers of last tokens, or one is
            KVzip.
    """

    scorer: Eviction
    allocator: Eviction

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in (self.scorer, self.allocator):
            if part.waits:
                raise ValueError(f"Combined: {type(part).__name__} scores all layers at once, and goes alone")
        for part in (self.scorer, self.allocator):
            if part.budget != self.budget:
                raise ValueError(f"Combined: budget is {self.budget} but {type(part).__name__} has {part.budget}")
            if part.query_aware != self.query_aware:
                raise ValueError(
                    f"Combined: query_aware is {self.query_aware} but {type(part).__name__} has {part.query_aware}: "
                    "give all three the same"
                )
        if self.scorer.protected() != self.allocator.protected():
            raise ValueError(
                f"Combined: {type(self.scorer).__name__} always keeps {self.scorer.protected()} last tokens and "
                f"{type(self.allocator).__name__} {self.allocator.protected()}: give both the same window"
            )
        for name in ("when", "scores_stay", "per_layer", "reads_outputs"):
            object.__setattr__(self, name, getattr(self.scorer, name))

    observed = property(lambda self: self.scorer.observed)
    has_preference = property(lambda self: self.allocator.has_preference)
    moments_from = property(lambda self: self.scorer.moments_from)
    threshold = property(lambda self: self.scorer.threshold)

    def protected(self, groups: int = 1) -> int:
        return self.scorer.protected(groups)

    def least(self, sinks: int, groups: int) -> int:
        return max(part.least(sinks, groups) for part in (self.scorer, self.allocator))

    def with_budget(self, budget: int) -> "Combined":
        parts = {name: getattr(self, name).with_budget(budget) for name in ("scorer", "allocator")}
        return replace(self, budget=budget, **parts)

    def table(self, config: PreTrainedConfig) -> Tensor | None:
        return self.scorer.table(config)

    def score(self, seen: Observation) -> Tensor:
        return self.scorer.score(seen)

    def preference(self, seen: Observation) -> Tensor:
        return self.allocator.preference(seen)

    def allocate(self, sharing: Sharing) -> list[np.ndarray]:
        return self.allocator.allocate(sharing)
