"""ShadowKV's choice (arXiv 2410.21465): pages by the mean of their keys, and always those that no mean stands for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pod.eviction.quest import Quest
from pod_kernels.pages import landmarks, refresh_pages


@dataclass(frozen=True)
class ShadowKV(Quest):
    """Keep every token, and at each decoded token read the pages whose mean key the query attends to most.

    Three kinds of pages are read, budget // page_size in all: the newest ones; the outliers, whose keys are least like
    their mean (by the smallest cosine of one of them with it); and of the others those to whose means the query
    attends most, the maximum over a KV head's query heads of the softmax over these means (section 4.1). Of equal ones
    the more recent page; a row of at most `budget` tokens is read whole.

    This is the choice alone: nothing is freed, and with `PodCache(..., value_pool=N)` values lie in CPU memory. The
    authors' low-rank keys are not here. Theirs chooses among the prompt's pages and reads all later tokens;
    here later pages are like the others once they are no longer among the newest.

    Args:
        budget: tokens read per layer and KV head, at least a page more than the newest ones; or a share, see `Method`.
        page_size: tokens of a page.
        dense_layers: so many first layers read everything; an anchor there still chooses for its block's later layers.
        outliers: the share of the pages read beside the newest ones that are outliers. The authors read 24 outliers
            and 128 others for 1,024 tokens.
        recent: newest pages, the one that grows among them.

    Raises:
        ValueError: a value is out of range; names it.
    """

    page_size: int = 8
    dense_layers: int = 0
    outliers: float = 0.15
    recent: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.outliers < 1:
            raise ValueError(f"outliers must be a share, 0 <= outliers < 1, got {self.outliers}")
        if self.recent < 1:
            raise ValueError(f"recent must be at least 1 page, got {self.recent}")
        if not self.is_share and self.budget < (least := self.least(0, 1)):
            raise ValueError(
                f"budget {self.budget} leaves no page of {self.page_size} tokens to choose beside the recent="
                f"{self.recent} newest ones: it must be at least {least}. Raise it, or lower recent."
            )

    def least(self, sinks: int, groups: int) -> int:
        return (self.recent + 1) * self.page_size

    def index_width(self, dim: int) -> int:
        return dim + 1

    def refresh(self, index: Tensor, keys: Tensor, before: Tensor, after: Tensor, most: int) -> None:
        refresh_pages(index, keys, before, after, self.page_size, most, landmarks)

    def scores(self, q: Tensor, index: Tensor, newest: Tensor) -> Tensor:
        means, cosines = index.float().split([q.shape[-1], 1], dim=-1)
        used = index.shape[2]
        is_old = torch.arange(used, device=q.device) <= newest - self.recent  # [B, P]
        cosines = cosines[..., 0].masked_fill(~is_old, torch.inf)
        count = min(used, int((self.budget // self.page_size - self.recent) * self.outliers))
        outliers = used - 1 - cosines.flip(-1).argsort(dim=-1, stable=True)[..., :count]
        is_read = torch.zeros_like(cosines, dtype=torch.bool).scatter_(-1, outliers, True) | ~is_old
        logits = (q.float() @ means.mT) * q.shape[-1] ** -0.5  # [A, B, G, P]
        logits = logits.masked_fill(is_read[:, :, None], torch.finfo(torch.float32).min)
        return logits.softmax(dim=-1).amax(dim=2).masked_fill(is_read, torch.inf)
