"""What a layer's last queries attended to: that is what eviction methods make their scores of.

Legend: B rows, A KV heads anchored in a layer (all of them in a dense model), G query heads per KV head, q queries, N
slots, D head dimension.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from pod_kernels import attention_weights
from pod_kernels.backend import runs_triton


@dataclass
class Observation:
    """What a layer's last queries attended to, which is what scores are made of.

    Where kernels run, no weights are stored after a prefill: a method should ask for `sums`, `variances` or `entropies`
    where these say it, as `weights` is then computed only for who asks.

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


class SeenByKernels(Observation):
    """What queries of a prefill attended to, as kernels add it up: weights are computed only for who asks for them.

    Args:
        queries, query_positions: [A, B, G, q, D] and [B, q].
        keys, positions: [A, B, N, D] and [B, A, N], in order of position.
        newest: [B].
        scale: factor on every logit.
    """

    def __init__(
        self, queries: Tensor, query_positions: Tensor, keys: Tensor, positions: Tensor, newest: Tensor, scale: float
    ) -> None:
        self._given = queries, keys, positions.transpose(0, 1), query_positions, scale
        self.positions, self.newest = positions, newest
        self.in_order, self.decoding = True, False
        self.asked = (query_positions >= 0).sum(dim=1)
        self._columns: tuple[Tensor | None, ...] = (None,)

    @cached_property
    def weights(self) -> Tensor:
        return attention_weights(*self._given).transpose(0, 1)

    @property
    def count(self) -> int:
        return self._given[0].shape[3]

    def sums(self) -> Tensor:
        return self._column(0)

    def _spread(self) -> Tensor:
        return self._column(1)

    def entropies(self) -> Tensor:
        return self._column(2)

    def _column(self, which: int) -> Tensor:
        from pod_kernels.column_sums import column_statistics  # imports triton

        if which >= len(self._columns) or self._columns[which] is None:
            self._columns = column_statistics(*self._given, with_spread=which > 0)
        return self._columns[which].transpose(0, 1)


def observe(
    queries: Tensor, query_positions: Tensor, keys: Tensor, positions: Tensor, newest: Tensor, scale: float
) -> Observation:
    """What queries of a prefill attend to; arguments as `SeenByKernels`, which it is where kernels run."""
    if runs_triton(keys):
        return SeenByKernels(queries, query_positions, keys, positions, newest, scale)
    weights = attention_weights(queries, keys, positions.transpose(0, 1), query_positions, scale)
    asked = (query_positions >= 0).sum(dim=1)
    return Observation(weights.transpose(0, 1), positions, newest, in_order=True, decoding=False, asked=asked)
