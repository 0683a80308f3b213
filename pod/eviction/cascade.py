"""The Cascading KV cache (arXiv 2406.17808): sub-caches that pass on every second token, the better of two."""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

from transformers.configuration_utils import PreTrainedConfig

from pod.eviction.base import Chain, ChainPolicy, check_choice, check_policy


@dataclass(frozen=True)
class Cascade(ChainPolicy):
    """Keep sinks, recent tokens, and ever sparser older ones, chosen by a moving average of their attention.

    Sub-cache i accepts every 2^i-th token; where it does not, the token offered and its newest contest by their
    scores. The kept tokens so reach back about `(budget - sinks) / num_cascades * (2^num_cascades - 1)` tokens (Eq. 4).
    Until the cache is full it keeps everything. A prompt is processed in strides: the queries of one stride attend to
    what is kept and to the stride itself, so that the work grows linearly with the prompt.

    Args:
        budget: tokens kept per layer and KV head, the sinks included, which the paper counts apart; or a share, see
            `Method`. The sub-caches share what is left beside the sinks evenly, rounded down to a multiple of their
            number: up to `num_cascades - 1` tokens fewer than the budget are kept.
        sinks: first tokens that stay for ever. In a model with blocks of more than one layer at least its `sink_size`.
        num_cascades: sub-caches, newest first.
        gamma: weight of the past in the scores' moving average, in (0, 1), per query.
        stride: queries processed at once. None: a quarter of the budget, the paper's 4K of 16K. Above the budget it
            warns.
        head_reduction: "max", "mean" or "median" (of an even number the lower one), over the query heads of a KV head.
        heads: "independent", or "homogeneous": over all query heads of the KV heads that a layer decides for (all of
            them in a dense model), so that these keep the same tokens (the paper's Figure 13).
        select: False: what a sub-cache does not accept is dropped uncompared (Table 3); gamma and heads mean nothing.
        rule: what a budget that is a share comes to. "tokens": see `Method`. "power_of_two", the paper's LongBench with
            0.25: the largest power of two that is not above the share is kept beside the sinks, which come on top.

    Raises:
        ValueError: a value is out of range; names it.
    """

    sinks: int = 64
    num_cascades: int = 4
    gamma: float = 0.9999
    stride: int | None = None
    head_reduction: str = "max"
    heads: str = "independent"
    select: bool = True
    rule: str = "tokens"

    positions: ClassVar[str] = "cache"

    def __post_init__(self) -> None:
        check_policy(self)
        if self.num_cascades < 1:
            raise ValueError(f"num_cascades must be at least 1, got {self.num_cascades}")
        self._check_room(self.sinks, f"the {self.sinks} sinks")
        if not 0 < self.gamma < 1:
            raise ValueError(f"gamma must be between 0 and 1, both excluded; got {self.gamma}")
        check_choice(self, "head_reduction", ("max", "mean", "median"))
        check_choice(self, "heads", ("independent", "homogeneous"))
        check_choice(self, "rule", ("tokens", "power_of_two"))
        if self.rule != "tokens" and not self.is_share:
            raise ValueError(
                f"Cascade: rule={self.rule} is of a budget that is a share of the prompt, such as 0.25; "
                f"got {self.budget}"
            )

    def _check_room(self, sinks: int, named: str) -> None:
        least = sinks + self.num_cascades
        if not self.is_share and self.budget < least:
            raise ValueError(
                f"budget must hold {named} and a token of each of the {self.num_cascades} sub-caches; got "
                f"{self.budget}. Use at least {least}."
            )

    def least(self, sinks: int, groups: int) -> int:
        return max(self.sinks, sinks) + self.num_cascades

    def with_budget(self, budget: int) -> "Cascade":
        return replace(self, budget=budget, rule="tokens")

    def tokens_of(self, prompt: int, sinks: int, groups: int) -> int:
        if self.rule == "tokens":
            return super().tokens_of(prompt, sinks, groups)
        share = int(Fraction(str(self.budget)) * prompt)
        largest = 1 << share.bit_length() - 1 if share else 0
        return max(largest + max(self.sinks, sinks), self.least(sinks, groups))

    def chain(self, config: PreTrainedConfig) -> Chain:
        """Sinks and sub-caches in a model.

        Raises:
            ValueError: the model's sinks leave no token for each sub-cache.
        """
        sinks = self.sinks if config.blocks.is_dense else max(self.sinks, config.sink_size)
        self._check_room(
            sinks, f"the model's sink_size of {sinks} tokens, which blocks of more than one layer always keep,"
        )
        rest = self.budget - sinks
        tokens = rest - rest % self.num_cascades
        gamma, is_homogeneous = self.gamma if self.select else None, self.heads == "homogeneous"
        return Chain(sinks, tokens, self.num_cascades, True, gamma, self.head_reduction, is_homogeneous)
