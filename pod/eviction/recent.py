"""Sinks and recent tokens, read alone of all that is kept: the cheapest draft of self-speculation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pod.eviction.base import ReadSelector, check_budget, check_types


@dataclass(frozen=True)
class RecentReader(ReadSelector):
    """Keep every token, and at each decoded token read the first ones and the last ones alone.

    StreamingLLM's choice (arXiv 2309.17453) as MagicDec (arXiv 2408.11049) drafts by, at the angles of the text; it
    needs nothing beside the keys. For `generate(draft=RecentReader(256))`; as a cache's method it saves reads and frees
    nothing.

    Args:
        budget: tokens read per layer and KV head, the sinks included; or a share, see `Method`.
        sinks: first tokens that are always read.
        dense_layers: so many first layers read everything.

    Raises:
        ValueError: a value is out of range; names it.
    """

    sinks: int = 4
    dense_layers: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_budget(self)
        if min(self.sinks, self.dense_layers) < 0:
            raise ValueError(f"sinks ({self.sinks}) and dense_layers ({self.dense_layers}) must be >= 0")
        if not self.is_share and self.budget <= self.sinks:
            raise ValueError(f"budget must be larger than the {self.sinks} sinks, which it includes; got {self.budget}")

    def least(self, sinks: int, groups: int) -> int:
        return self.sinks + 1

    def pages(self, length):
        return 0 * length

    def index_width(self, dim):
        return 0

    def refresh(self, index, keys, before, after, most):
        pass

    def choose(self, q: Tensor, index: Tensor, positions: Tensor) -> Tensor:
        number = torch.arange(self.budget, device=positions.device)
        # A row's last tokens, newest first, and behind them the sinks that are not among these.
        recent, sinks = positions - number[: self.budget - self.sinks], number[: self.sinks].expand(len(positions), -1)
        recent = recent.masked_fill(recent < self.sinks, -1)
        return torch.cat([recent, sinks.masked_fill(sinks > positions, -1)], dim=1).expand(len(q), -1, -1)
