"""Quest (arXiv 2406.10774): keep every token, and at each step read the pages that may matter most to the query."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pod.eviction.base import ReadSelector, check_budget, check_types
from pod_kernels.pages import extremes, page_bounds, refresh_pages


@dataclass(frozen=True)
class Quest(ReadSelector):
    """Keep every token, and at each decoded token read the pages of keys whose products with its query may be highest.

    A page is `page_size` consecutive tokens of a row; beside it lie the minimum and the maximum of its keys in each
    channel. They bound the query's product with any of its keys, sum over d of max(q_d min_d, q_d max_d); a KV head
    takes the maximum over its query heads and reads the budget // page_size pages with the highest bounds, the newest
    page always among them; of equal bounds the more recent page. A row of at most `budget` tokens is read whole.
    Forwards of several tokens (prefill, further turns, drafts) read everything.

    Nothing is freed: it saves reads and costs two more vectors for each page of stored distant keys. Inside blocks of
    more than one layer the anchor's query chooses, and all layers of the block read what it chose.

    Args:
        budget: tokens read per layer and KV head, at least `page_size`; or a share, see `Method`.
        page_size: tokens of a page.
        dense_layers: so many first layers read everything; an anchor there still chooses for its block's later layers.

    Raises:
        ValueError: a value is out of range; names it.
    """

    page_size: int = 16
    dense_layers: int = 2

    def __post_init__(self) -> None:
        check_types(self)
        check_budget(self)
        if self.page_size < 1:
            raise ValueError(f"page_size must be at least 1 token, got {self.page_size}")
        if not self.is_share and self.budget < self.page_size:
            raise ValueError(
                f"budget must be at least one page of page_size={self.page_size} tokens, got {self.budget}. Raise "
                "budget, or make pages smaller."
            )
        if self.dense_layers < 0:
            raise ValueError(f"dense_layers must be >= 0, got {self.dense_layers}")

    def least(self, sinks: int, groups: int) -> int:
        return self.page_size

    def pages(self, length: int | np.ndarray) -> int | np.ndarray:
        return -(-length // self.page_size)

    def index_width(self, dim: int) -> int:
        return 2 * dim

    def refresh(self, index: Tensor, keys: Tensor, before: Tensor, after: Tensor, most: int) -> None:
        refresh_pages(index, keys, before, after, self.page_size, most, extremes)

    def scores(self, q: Tensor, index: Tensor, newest: Tensor) -> Tensor:
        """[A, B, P] float32 of each page, inf for those that are read whatever the query; newest: [B, 1] pages."""
        return page_bounds(q, index).masked_fill(torch.arange(index.shape[2], device=q.device) == newest, torch.inf)

    def choose(self, q: Tensor, index: Tensor, positions: Tensor) -> Tensor:
        used = index.shape[2]
        number = torch.arange(used, device=q.device)
        newest = positions.div(self.page_size, rounding_mode="floor")  # [B, 1]
        scores = self.scores(q, index, newest).masked_fill(number > newest, -torch.inf)
        most = min(used, self.pages(self.budget))
        recent_first = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
        best = used - 1 - recent_first[..., :most]
        count = torch.where(positions < self.budget, newest + 1, self.budget // self.page_size)
        read = best[..., None] * self.page_size + torch.arange(self.page_size, device=q.device)
        is_read = (number[:most] < count)[..., None] & (read <= positions[..., None])
        return read.masked_fill(~is_read, -1).flatten(2)
