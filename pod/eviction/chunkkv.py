"""ChunkKV (arXiv 2502.00299): keep whole chunks of neighbouring tokens, those with the best mean score."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pod.eviction.base import Observation
from pod.eviction.snapkv import SnapKV


@dataclass(frozen=True)
class ChunkKV(SnapKV):
    """SnapKV's scores by chunks: neighbours stay together, the same ones for all heads of a layer.

    A row's tokens before the window are parted into chunks from its first token on. A chunk's score is the mean over
    its tokens of SnapKV's scores summed over the layer's KV heads; whole chunks are kept, best first, and what is left
    of the budget goes to the best tokens of the next one. The last chunk may be shorter. The paper's reuse of indices
    from one layer in the next is left out: blocks do that.

    Args:
        chunk_size: tokens of a chunk.

    Raises:
        ValueError: chunk_size below 1.
    """

    chunk_size: int = 20

    per_layer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_size < 1:
            raise ValueError(f"ChunkKV: chunk_size must be at least 1, got {self.chunk_size}")

    def score(self, seen: Observation) -> Tensor:
        prefix = seen.prefix(self.window)
        scores = super().score(seen).masked_fill(~prefix, 0).sum(dim=1, keepdim=True).expand(prefix.shape)
        # Chunks are numbered as they come: of a prefill, slots are in order of position.
        begins = (seen.positions // self.chunk_size).diff(dim=-1) != 0
        chunk = torch.nn.functional.pad(begins.cumsum(dim=-1), (1, 0))
        sums, sizes = torch.zeros_like(scores), torch.zeros_like(scores)
        sums.scatter_add_(2, chunk, scores)
        sizes.scatter_add_(2, chunk, prefix.to(scores.dtype))
        # A token's score is its chunk's rank and, below 1, its own rank in the row: chunks stay whole.
        ranks = (sums / sizes.clamp(min=1)).argsort(dim=-1, stable=True).argsort(dim=-1)
        own = scores.argsort(dim=-1, stable=True).argsort(dim=-1)
        return ranks.gather(2, chunk) + own / (2 * own.shape[-1])
