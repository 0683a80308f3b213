"""Expected Attention (arXiv 2510.00636): keep what queries to come are expected to attend to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pod.eviction.base import Eviction, Observation


@dataclass(frozen=True)
class ExpectedAttention(Eviction):
    """After a prefill: the attention that queries like the prompt's would pay from the next positions, times values.

    Queries before RoPE are taken for normally distributed, with the mean and covariance of the prompt's; rotated to the
    mean of the next `future` positions, their expected exponential attention is known in closed form. A token's score
    is that, in a softmax over all tokens but the sinks, averaged over the KV head's query heads, plus `epsilon`, times
    the norm of its value. No question needs to be in view. The published results share the budget between the heads of
    a layer: `adakv*expectedattention:budget=4096,window=1`.

    Args:
        budget: tokens kept per layer and KV head; or a share, see `Method`.
        sinks: first tokens, which are kept before all others and whose queries are left out.
        future: positions that queries are expected at.
        epsilon: what is added to the attention, so that it does not decide alone.
        window: last tokens that are always kept.

    Raises:
        ValueError: sinks or window negative, future below 1, epsilon negative.
    """

    sinks: int = 4
    future: int = 512
    epsilon: float = 0.01
    window: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks < 0 or self.window < 0 or self.future < 1 or self.epsilon < 0:
            raise ValueError(
                "ExpectedAttention: sinks, window and epsilon must not be negative and future must be at least 1, got "
                f"sinks={self.sinks}, window={self.window}, epsilon={self.epsilon:g}, future={self.future}"
            )

    @property
    def moments_from(self) -> int:
        return self.sinks

    def score(self, seen: Observation) -> Tensor:
        is_sink = (seen.positions >= 0) & (seen.positions < self.sinks)
        others = (seen.positions >= self.sinks)[:, :, None]
        logits = seen.expected_logits(self.future).masked_fill(~others, float("-inf"))
        # A row of sinks alone has no softmax.
        attention = logits.softmax(dim=-1).nan_to_num(0.0).mean(dim=2)
        scores = (attention + self.epsilon) * seen.values.norm(dim=-1)
        return torch.where(is_sink, 2 * scores.amax() + 1, scores)
