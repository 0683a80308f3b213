"""AdaKV (arXiv 2407.11550): the KV heads of a layer compete for its budget."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pod.eviction.base import Sharing, Stage
from pod.eviction.snapkv import SnapKV


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """SnapKV, with more tokens for heads whose scores are spread and fewer for those whose are concentrated.

    With P = budget - window, n_h is how many of the P * heads highest pooled scores of a layer lie in head h, which
    keeps round(n_h * (1 - alpha) + P * alpha) tokens and the window. What rounding leaves over, or takes too much, is
    made up one token each from the first head on, so that the layer's total is exact. Of equal scores the more recent
    token's comes first, then the lower head's. Heads hold different numbers of tokens and are stored so.

    Under PoD those heads compete that are anchored in the same layer and whose blocks have equally many layers, so
    that the bytes stay the same; the sinks of blocks of several layers come off P.

    Args:
        budget: tokens kept per layer and KV head on average, the window included; or a share, see `Method`.
        window, kernel_size, pooling: as `SnapKV`.
        alpha: the part of the budget that every head gets in any case, 0 to 1.
        normalize: before heads compete, each one's scores are multiplied by the part of their sum that its P highest
            make up, so that a head of spread scores wins less. Off in the authors' code.

    Raises:
        ValueError: budget below window, or a value that means nothing.
    """

    alpha: float = 0.2
    normalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"AdaKV: alpha must be between 0 and 1, got {self.alpha}")

    def allocate(self, sharing: Sharing) -> list[np.ndarray]:
        stage = sharing.stages[-1]
        counts = [earlier.budgets for earlier in sharing.stages[:-1]] + super().allocate(sharing)[-1:]
        sizes = [sharing.blocks.layout().sizes[stage.layer, head] for head in stage.heads]
        for size in sorted(set(sizes)):
            rivals = [index for index, other in enumerate(sizes) if other == size]
            always = sharing.always[stage.layer, stage.heads[rivals[0]]]
            each = self.budget - always
            wins = _wins(stage, rivals, each, self.normalize)
            room = stage.candidates[:, rivals].sum(dim=-1)
            for row in range(len(sharing.seen)):
                if sharing.spared[row]:
                    continue
                shares = share_out(each, wins[row].tolist(), room[row].tolist(), self.alpha)
                for index, share in zip(rivals, shares, strict=True):
                    counts[-1][index, row] = always + share
        return counts


def _wins(stage: Stage, rivals: list[int], each: int, normalize: bool) -> Tensor:
    """[B, heads] how many of the `each` times their number highest scores of the heads `rivals` lie in each."""
    scores, candidates = stage.scores[:, rivals], stage.candidates[:, rivals]
    if normalize:
        counted = scores.masked_fill(~candidates, 0)
        best = counted.topk(min(each, counted.shape[-1]), dim=-1).values.sum(dim=-1)
        scores = scores * (best / counted.sum(dim=-1).clamp(min=torch.finfo(best.dtype).tiny))[..., None]
    scores = scores.masked_fill(~candidates, -torch.inf)
    # Slots are in order of position: the more recent first, and of one position the lower head.
    line = scores.flip(-1).transpose(1, 2).flatten(1)
    best = line.argsort(dim=1, descending=True, stable=True)[:, : each * len(rivals)]
    best_heads = torch.where(line.gather(1, best).isneginf(), len(rivals), best % len(rivals))
    return (best_heads[..., None] == torch.arange(len(rivals), device=line.device)).sum(dim=1)


def share_out(each: int, wins: Iterable[int], room: list[int], alpha: float) -> list[int]:
    """Tokens for each head, together `each` times their number, or all there are.

    Args:
        each: tokens that a head gets on average.
        wins: how many of the highest scores lie in each.
        room: the most that each can take.
        alpha: the part of `each` that every head gets in any case.

    Returns:
        One count for each head.
    """
    counts = [min(round(won * (1 - alpha) + each * alpha), most) for won, most in zip(wins, room, strict=True)]
    left = min(each * len(room), sum(room)) - sum(counts)
    while left:
        step = 1 if left > 0 else -1
        for head, most in enumerate(room):
            if left and 0 <= counts[head] + step <= most:
                counts[head] += step
                left -= step
    return counts
