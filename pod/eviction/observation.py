"""What a layer's last queries attended to: that is what eviction methods make their scores of.

Legend: B rows, A KV heads anchored in a layer (all of them in a dense model), G query heads per KV head, q queries, N
slots, D head dimension.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Observation:
    """What a layer's last queries attended to, which is what scores are made of.

    Of a prefill it is computed when it is asked for. Where kernels run, `sums`, `variances` and `entropies` are added
    up without the weights: a method should ask for these where they say it.

    Attributes:
        weights: [B, A, G, q, N] float32, softmax over all keys that a query sees; zero for padding.
        positions: [B, A, N] int64, the position that each slot holds, -1 where it is empty.
        newest: [B] int64, the position of each row's newest token.
        in_order: slots are in order of position (empty ones at either end).
        decoding: one new token, after a prefill.
        asked: [B] int64, how many of the queries are no padding; None where all are.
    """

    weights: Tensor
    positions: Tensor
    newest: Tensor
    in_order: bool
    decoding: bool
    asked: Tensor | None = None

    @property
    def count(self) -> int:
        """q, padding included."""
        return self.weights.shape[3]

    def sums(self) -> Tensor:
        """[B, A, G, N] the weights' sum over the queries."""
        return self.weights.sum(dim=3)

    def means(self) -> Tensor:
        """[B, A, G, N] the weights' mean over the queries that are no padding."""
        if self.asked is None:
            return self.sums() / self.count
        return self.sums() / self.asked.clamp(min=1)[:, None, None, None]

    def variances(self) -> Tensor:
        """[B, A, G, N] the weights' unbiased variance over the queries that are no padding, 0 for a single one."""
        spread = self._spread()
        if self.asked is None:
            return spread
        # Padding's weights are 0: they are in the mean that the spread is around, and in no sum of squares.
        count, asked, sums = self.count, self.asked[:, None, None, None], self.sums()
        squares = spread * (count - 1) + sums.square() / count
        own = (squares - sums.square() / asked.clamp(min=1)).clamp(min=0) / (asked - 1).clamp(min=1)
        return torch.where(asked == count, spread, own * (asked > 1))

    def _spread(self) -> Tensor:
        """[B, A, G, N] the variance with padding counted as queries."""
        return self.weights.var(dim=3) if self.count > 1 else torch.zeros_like(self.weights[..., 0, :])

    def entropies(self) -> Tensor:
        """[B, A, G, N] the sum of - w log(w + 1e-10) over the queries."""
        return -(self.weights * (self.weights + 1e-10).log()).sum(dim=3)

    def prefix(self, window: int) -> Tensor:
        """[B, A, N] bool: tokens before the last `window` of their row."""
        return (self.positions >= 0) & (self.positions <= self.newest[:, None, None] - window)

    def pooled(self, scores: Tensor, window: int, kernel_size: int, pooling: str) -> Tensor:
        """Pool scores over neighbours in the order of positions, the window left out.

        Args:
            scores: [B, A, N], or [B, A, G, N] to pool each query head.
            window: the last tokens of each row, which are no one's neighbours.
            kernel_size: an odd number of tokens; beyond the ends stands 0 for "avg" (counted), nothing for "max".
            pooling: "max" or "avg".

        Returns:
            The same shape; 0 outside the prefix.
        """
        prefix = self.prefix(window)
        order = None
        if not self.in_order:
            last = torch.iinfo(torch.long).max
            order = torch.where(prefix, self.positions, last).argsort(dim=-1)
        if scores.dim() == 4:
            prefix = prefix[:, :, None].expand(scores.shape)
            order = order if order is None else order[:, :, None].expand(scores.shape)
        flat = scores.masked_fill(~prefix, 0 if pooling == "avg" else -torch.inf)
        flat = flat if order is None else flat.gather(-1, order)
        pool = F.avg_pool1d if pooling == "avg" else F.max_pool1d
        lines = flat.flatten(0, -2)[:, None]
        flat = pool(lines, kernel_size, stride=1, padding=kernel_size // 2)[:, 0].view(flat.shape)
        if order is not None:
            flat = torch.empty_like(flat).scatter_(-1, order, flat)
        return flat.masked_fill(~prefix, 0)
