"""SAGE-KV (arXiv 2503.08879): the prompt's last token chooses once, head by head; recent tokens slide from then on."""

from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from torch import Tensor

from pod.eviction.base import Eviction, Observation, ranks


@dataclass(frozen=True)
class SageKV(Eviction):
    """After a prefill: sinks, recent tokens, and of those between what the last token's query heads attend to most.

    Of a budget B, B // 4 are sinks. With G query heads per KV head, each chooses its k best tokens, k the largest power
    of two up to B / (2 G); all others are recent (B = 8192: k = 1024 for G = 4; k = 512, 2560 recent for G = 7). The KV
    head keeps the union; places that are left, where heads agree, go to the tokens with the next highest maximum over
    its query heads. While decoding, sinks and chosen tokens stay, and the oldest recent token gives way to the newest.

    Args:
        budget: tokens kept per layer and KV head, at least 4; or a share, see `Method`.

    Raises:
        ValueError: budget below 4.
    """

    when: ClassVar[int] = 1
    scores_stay: ClassVar[str] = "prefill"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.is_share and self.budget < 4:
            raise ValueError(f"SageKV: budget must be at least 4 tokens (a quarter of it are sinks), got {self.budget}")

    @property
    def sinks(self) -> int:
        return self.budget // 4

    def chosen_per_head(self, groups: int) -> int:
        """k: how many tokens each of `groups` query heads chooses."""
        most = self.budget // (2 * groups)
        return 1 << (most.bit_length() - 1) if most else 0

    def protected(self, groups: int = 1) -> int:
        return self.budget - self.sinks - groups * self.chosen_per_head(groups)

    def least(self, sinks: int, groups: int) -> int:
        budgets = map(self.with_budget, count(4))
        return next(one.budget for one in budgets if one.budget - one.protected(groups) >= sinks)

    def score(self, seen: Observation) -> Tensor:
        # Numbers that only order: recent tokens 0, those between by rank, the union above, sinks above all.
        length = seen.positions.shape[-1]
        is_sink = (seen.positions >= 0) & (seen.positions < self.sinks)
        if seen.decoding:  # what the prefill said lasts; a row that was shorter than its sinks goes on filling them
            return is_sink * 2.0**23
        weights = seen.weights[:, :, :, -1]
        groups = weights.shape[2]
        between = seen.prefix(self.protected(groups)) & ~is_sink
        places = ranks(weights.masked_fill(~between[:, :, None], -1))
        is_best = (places >= length - self.chosen_per_head(groups)).any(dim=2)
        order = 1 + ranks(weights.amax(dim=2).masked_fill(~between, -1))
        return ((order + is_best * length) * between).float() + is_sink * 2.0**23
