"""ClusterKV's choice (arXiv 2412.03213): tokens whose keys point the same way are read together, wherever they are."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pod.eviction.base import ReadSelector, check_budget, check_types

COSINES = 2**24  # of tokens and centroids in memory at once


@dataclass(frozen=True)
class ClusterKV(ReadSelector):
    """Keep every token, and at each decoded token read the clusters of keys whose centroids the query is most along.

    The keys of a prompt are clustered by their cosines, k-means with a cluster for every `cluster_size` tokens, which
    begins from the keys that stand so far apart; a centroid is the mean of its keys (section 3.2). A query ranks the
    clusters by its product with their centroids, the largest over a KV head's query heads, and reads their tokens
    until the budget is full; of the last one that fits in part, the most recent tokens (section 3.3). First and last
    tokens are always read; a row of at most `budget` tokens is read whole.

    Later tokens join the cluster with the nearest centroid, which stays as it is; every `cluster_size`-th begins one of
    its own, and a further turn, or chunk of a prefill, clusters its tokens among themselves and those that are there.
    The authors cluster 320 decoded tokens at a time into 4 new clusters; their random first centroids are evenly spaced
    ones here, so that results repeat. After `crop` the last token that stays joins anew, and those of a cluster that is
    gone count to the newest one.

    All keys and values stay where they are (values in CPU memory with `PodCache(.., value_pool=N)`); beside them lie a
    centroid for each cluster and two numbers for each token.

    Args:
        budget: tokens read per layer and KV head, `sinks` and `recent` among them; or a share, see `Method`.
        cluster_size: tokens of a cluster, on average.
        dense_layers: so many first layers read everything; an anchor there still chooses for its block's later layers.
        sinks: first tokens that are always read.
        recent: last tokens that are always read, the query's own among them.
        rounds: of k-means.

    Raises:
        ValueError: a value is out of range; names it.
    """

    cluster_size: int = 80
    dense_layers: int = 2
    sinks: int = 16
    recent: int = 32
    rounds: int = 20

    def __post_init__(self) -> None:
        check_types(self)
        check_budget(self)
        if not 1 <= self.cluster_size or self.recent < 1:
            raise ValueError(f"cluster_size ({self.cluster_size}) and recent ({self.recent}) must be at least 1 token")
        if min(self.sinks, self.dense_layers, self.rounds) < 0:
            raise ValueError(
                f"sinks ({self.sinks}), dense_layers ({self.dense_layers}) and rounds ({self.rounds}) must be >= 0"
            )
        if not self.is_share and self.budget < (least := self.least(0, 1)):
            raise ValueError(
                f"budget {self.budget} leaves no token to choose beside the sinks={self.sinks} first and recent="
                f"{self.recent} last ones: it must be at least {least}. Raise it, or lower these."
            )

    def least(self, sinks: int, groups: int) -> int:
        return self.sinks + self.recent + 1

    def pages(self, length):
        return -(-length // self.cluster_size)

    def index_width(self, dim: int) -> int:
        # A cluster's centroid, and of the tokens of a page their clusters: in 16 bits, numbers up to 256 are exact.
        return dim + 2 * self.cluster_size

    def refresh(self, index: Tensor, keys: Tensor, before: Tensor, after: Tensor, most: int) -> None:
        heads, _, _, dim = keys.shape
        device = keys.device

        def taken(slots: Tensor) -> Tensor:
            """[A, B, n, D] float32 of [B, n]."""
            slots = slots.clamp(0, keys.shape[2] - 1)
            return keys.gather(2, slots[None, :, :, None].expand(heads, -1, -1, dim)).float()

        # Beyond a row's end stands its last token again, with the same result.
        number = torch.arange(most, device=device)
        place = torch.minimum(before[:, None] + number, (after - 1).clamp(min=0)[:, None])  # [B, n]
        is_new = (number < (after - before)[:, None])[None, :, :, None]
        first = (torch.arange(index.shape[2], device=device) * self.cluster_size).expand(len(before), -1)  # [B, P]
        exists = first < after[:, None]
        is_born = (exists & (first >= before[:, None]))[None, :, :, None]
        new, centroids = taken(place), torch.where(is_born, taken(first), index[..., :dim].float())
        for _ in range(self.rounds if most > 1 else 0):
            near = nearest(new, centroids, exists)[..., None]
            counts = torch.zeros_like(centroids[..., :1]).scatter_add_(2, near, is_new.float().expand_as(near))
            sums = torch.zeros_like(centroids).scatter_add_(2, near.expand_as(new), new * is_new)
            centroids = torch.where(is_born & (counts > 0), sums / counts.clamp(min=1), centroids)
        near = nearest(new, centroids, exists)
        index[..., :dim] = torch.where(is_born, centroids.to(index.dtype), index[..., :dim])
        row, page = torch.arange(len(before), device=device)[:, None], place // self.cluster_size
        for part, column in zip((near // 256, near % 256), (dim, dim + self.cluster_size), strict=True):
            column = column + place % self.cluster_size
            held = index[:, row, page, column]
            index[:, row, page, column] = torch.where((after > before)[:, None], part.to(index.dtype), held)

    def choose(self, q: Tensor, index: Tensor, positions: Tensor) -> Tensor:
        centroids, high, low = index.float().split([q.shape[-1], self.cluster_size, self.cluster_size], dim=-1)
        newest = positions.clamp(min=0).div(self.cluster_size, rounding_mode="floor")
        clusters = (high * 256 + low).flatten(2).long().clamp(min=0).minimum(newest)  # [A, B, N]
        scores = (q.float() @ centroids.mT).amax(dim=2).gather(2, clusters)
        number = torch.arange(scores.shape[2], device=q.device)
        is_read = (number < self.sinks) | (number > positions - self.recent)
        scores = scores.masked_fill(is_read, torch.inf).masked_fill(number > positions, -torch.inf)
        recent_first = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
        read = len(number) - 1 - recent_first[..., : min(len(number), self.budget)]
        return read.masked_fill(read > positions, -1)


def nearest(keys: Tensor, centroids: Tensor, exists: Tensor) -> Tensor:
    """[A, B, n] the centroid [A, B, P, D] with the largest cosine for each of keys [A, B, n, D]; exists: [B, P]."""
    directions = F.normalize(centroids, dim=-1).mT
    found = [
        (part @ directions).masked_fill(~exists[:, None], -torch.inf).argmax(dim=-1)
        for part in keys.split(max(1, COSINES // (exists.numel() * len(keys))), dim=2)
    ]
    return torch.cat(found, dim=2)
