"""Methods that keep tokens by their places: first tokens, and behind them a chain of sub-caches (one: a window).

A further one takes a dataclass derived from `ChainPolicy` that says which chain, and a line in
`pod/eviction/__init__.py`; `pod.cache.chain` does the rest.
"""

import warnings
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from transformers.configuration_utils import PreTrainedConfig

from pod.eviction.base import Method, check_budget, check_types

POSITIONS = ("cache", "absolute")


@dataclass(frozen=True)
class Chain:
    """What a method keeps of a model's tokens, in each layer and KV head.

    Attributes:
        sinks: first tokens that stay for ever.
        tokens: of all sub-caches together, a multiple of their number.
        num_cascades: sub-caches, newest first; each passes on every second token.
        rotates: keys are stored before RoPE and rotated to their place among the kept tokens.
        gamma: of the moving average of attention by which tokens contest a place, mu <- gamma mu + (1 - gamma) s for
            every query; None for one sub-cache, which needs none.
        head_reduction: "max" or "mean" over a KV head's query heads.
        window: how many first and how many last tokens, itself included, a query sees, however many are processed at
            once; None: all that is kept, and its stride. Where keys are rotated, no sink then counts as farther than
            the window's first token.
    """

    sinks: int
    tokens: int
    num_cascades: int = 1
    rotates: bool = False
    gamma: float | None = None
    head_reduction: str = "max"
    window: tuple[int, int] | None = None

    @property
    def slots(self) -> int:
        """All that is kept at most."""
        return self.sinks + self.tokens


class ChainPolicy(Method):
    """Hyper-parameters of a method that keeps a chain; many caches can be made with one.

    Attributes:
        positions: "absolute" (keys come after RoPE and keep the angle of their position) or "cache" (queries and keys
            come before RoPE, and each is rotated to its place among the kept tokens).
        stride: queries that are processed at once; a longer forward is cut into strides. None: a quarter of the budget,
            at least 1.

    Class attributes:
        sees_stride: a query attends to its whole stride up to itself, so that results depend on the stride.
    """

    positions: str
    stride: int | None

    sees_stride: ClassVar[bool] = True

    @property
    def at_once(self) -> int:
        """Queries that are processed at once."""
        return max(1, self.budget // 4) if self.stride is None else self.stride

    @abstractmethod
    def chain(self, config: PreTrainedConfig) -> Chain:
        """What is kept of a PoD model's tokens; not of a budget that is a share, but of what it comes to.

        Raises:
            ValueError: the policy and the model do not go together.
        """


def check_policy(policy: ChainPolicy) -> None:
    """Refuse fields of a policy with slots that mean nothing, and warn of a stride that makes it another method.

    Raises:
        ValueError: names the value and what it may be.
    """
    check_types(policy)
    check_budget(policy)
    if policy.sinks < 0:
        raise ValueError(f"sinks must be >= 0 tokens, got {policy.sinks}")
    if policy.positions not in POSITIONS:
        raise ValueError(f"positions must be one of {', '.join(map(repr, POSITIONS))}; got {policy.positions!r}")
    if policy.stride is not None and policy.stride < 1:
        raise ValueError(f"stride must be at least 1 query, got {policy.stride}")
    if policy.sees_stride and not policy.is_share and (policy.stride or 0) > policy.budget:
        warnings.warn(
            f"{type(policy).__name__}: a stride of {policy.stride} queries is above the budget of {policy.budget} "
            "tokens: a prompt up to the stride is attended to as without eviction. Left out, it is a quarter of budget",
            stacklevel=4,
        )
