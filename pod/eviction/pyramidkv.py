"""PyramidKV (arXiv 2406.02069): SnapKV's scores under budgets that fall from layer to layer."""

from dataclasses import dataclass

import numpy as np

from pod.eviction.base import Sharing
from pod.eviction.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV, with more tokens in lower layers and fewer in upper ones; the mean over the layers is the budget.

    With P = budget - window, least = P // beta and most = 2 P - least (at most the tokens before the window; then
    least = 2 P - most), layer l keeps most - l * ((most - least) // (layers - 1)) tokens and the window. Rounding the
    step down makes these sum to more than P * layers; the excess is taken one token a layer, the last layer first,
    round by round. A prompt of fewer than 2 P tokens gets P in every layer, one of at most `budget` loses nothing.

    Under PoD the layers of a block keep the same tokens, as many as the mean of its layers' numbers, rounded down, and
    at least its sinks; the excess is then taken from blocks. A remainder that is smaller than a block is left over.

    Args:
        budget: tokens kept per layer and KV head on average, the window included; or a share, see `Method`.
        window, kernel_size, pooling: as `SnapKV`.
        beta: the last layer's share of the mean is about 1 / beta.

    Raises:
        ValueError: budget below window, or a value that means nothing.
    """

    window: int = 8
    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1:
            raise ValueError(f"PyramidKV: beta must be at least 1, got {self.beta}")

    def allocate(self, sharing: Sharing) -> list[np.ndarray]:
        counts = super().allocate(sharing)
        layout = sharing.blocks.layout()
        for row, seen in enumerate(sharing.seen):
            if sharing.spared[row] or seen < 2 * (self.budget - self.window):
                continue
            shares = self.layer_shares(sharing.blocks.num_layers, seen - self.window)
            for head in range(sharing.blocks.num_kv_heads):
                kept = self._block_counts(layout.column(head), shares, sharing.always, head)
                for stage, numbers in zip(sharing.stages, counts, strict=True):
                    if head in stage.heads:
                        numbers[stage.heads.index(head), row] = kept[stage.layer]
        return counts

    def layer_shares(self, layers: int, prefix: int) -> list[int]:
        """Tokens before the window that each of `layers` would keep of `prefix`; together perhaps too many."""
        mean = self.budget - self.window
        least = mean // self.beta
        most = min(2 * mean - least, prefix)
        least = 2 * mean - most
        step = (most - least) // max(1, layers - 1)
        return [most - layer * step for layer in range(layers)]

    def _block_counts(self, column: list[int], shares: list[int], always: dict, head: int) -> dict[int, int]:
        """What each block of one KV head keeps, by anchor layer, the window included."""
        blocks = sorted(set(column))
        sizes = {anchor: column.count(anchor) for anchor in blocks}
        floors = {anchor: always[anchor, head] - self.window for anchor in blocks}
        kept = {
            anchor: max(floors[anchor], sum(shares[anchor:][: sizes[anchor]]) // sizes[anchor]) for anchor in blocks
        }
        excess = sum(sizes[anchor] * kept[anchor] for anchor in blocks) - (self.budget - self.window) * len(column)
        while excess > 0:
            for anchor in reversed(blocks):
                if excess > 0 and kept[anchor] > floors[anchor]:
                    kept[anchor] -= 1
                    excess -= sizes[anchor]
        return {anchor: count + self.window for anchor, count in kept.items()}
