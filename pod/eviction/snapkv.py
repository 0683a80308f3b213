"""SnapKV (arXiv 2404.14469): keep what the prompt's last queries attend to, and its neighbours."""

from dataclasses import dataclass

from torch import Tensor

from pod.eviction.base import Eviction, Observation, check_choice, check_window


@dataclass(frozen=True)
class SnapKV(Eviction):
    """After a prefill, each layer and KV head keeps the window and the tokens before it with the highest scores.

    A token's score is the sum of its attention weights over the window's queries, averaged over the KV head's query
    heads (which keeps GQA's saving), then pooled over its neighbours. A prompt of at most `budget` tokens, and so one
    that is shorter than the window, loses nothing.

    Args:
        budget: tokens kept per layer and KV head, the window included; or a share, see `Method`.
        window: the last tokens, which are always kept and whose queries score the others. A later turn of fewer
            tokens scores with the queries it has.
        kernel_size: tokens that are pooled, odd.
        pooling: "max" or "avg".

    Raises:
        ValueError: budget below window, or a value that means nothing.
    """

    window: int = 32
    kernel_size: int = 7
    pooling: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_window(self)
        check_choice(self, "pooling", ("max", "avg"))

    @property
    def observed(self) -> int:
        return self.window

    def score(self, seen: Observation) -> Tensor:
        summed = seen.sums().mean(dim=2)
        return seen.pooled(summed, self.window, self.kernel_size, self.pooling)
