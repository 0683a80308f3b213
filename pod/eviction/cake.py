"""CAKE (arXiv 2503.12491): layers share one budget by how dispersed and how shifting their attention is."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from pod.eviction.base import Eviction, Observation, Sharing, Stage, check_choice, check_window


@dataclass(frozen=True)
class CAKE(Eviction):
    """Preference-prioritised budgets, cascading prefill, and an indicator that values attention that shifts.

    Indicator: mean + gamma * variance of a token's weights over the window's queries, average-pooled per query head,
    then averaged over the KV head's; while decoding, the newest query's weights, pooled the same way. Preference of a
    layer: H^(1/tau1) * V^(1/tau2) (Eq. 6), H the entropy and V the variance down the window, of the weights on tokens
    before the window, in the mean over its query heads. The tokens beside the window, (budget - window) * layers, are
    shared in proportion (Eq. 7), and shared anew after every layer (Algorithm 1), so that no more than the budget and
    the layer at hand is ever held. While decoding each layer keeps its share. Nothing is evicted by a prefill of at
    most budget + window tokens: as in the authors' code such a prompt stays whole, above the budget, until the first
    decoded token, which brings every layer down to it (its bytes stay allocated).

    Counts are whole: rounded down in the end, what is left goes one each to the layers in order. A layer never gets
    more than it still holds; what it cannot take is shared evenly by those that can. So where a layer's share is above
    its prompt, cascading is not evicting once (Theorem 1 fails): the authors' code gives the excess to earlier layers
    too, which here have dropped by then what they would have got, so that later ones take it. Under PoD the layers of a
    block keep the same tokens, each counts, the sinks of blocks of several layers come off the shared tokens, and each
    KV head shares its own; a remainder that is smaller than any block is left over.

    Args:
        budget: tokens kept per layer and KV head on average, the window included; or a share, see `Method`.
        window: the last tokens, always kept; their queries score the others.
        kernel_size: tokens that are pooled, odd.
        gamma: weight of the variance.
        indicator: of a token, by its weights over the window's queries (the paper's Table 3): "mean", "variance",
            "product" of both, or "mean+variance", with `gamma`. While decoding all are the newest query's weights.
        allocation: how layers share the budget (Tables 2 and 14): "preference", "entropy" or "variance" by H or V
            alone, "uniform", or "random", in proportion to numbers drawn from [0, 1) for each layer, the same for every
            row (the paper does not say how it drew them).
        seed: of the drawing.
        tau1, tau2: temperatures of H and V. The paper searched them per model and budget; `PRESETS` has what is known
            of that: `CAKE(1024, **CAKE.PRESETS["llama-3.1-8b-1024"])`, on command lines
            `cake:budget=1024,preset=llama-3.1-8b-1024`.

    Raises:
        ValueError: budget below window, window below 2 (a variance needs two queries), or a value that means nothing.
    """

    window: int = 32
    kernel_size: int = 5
    gamma: float = 200.0
    tau1: float = 1.0
    tau2: float = 1.0
    indicator: str = "mean+variance"
    allocation: str = "preference"
    seed: int = 0

    when: ClassVar[int] = 1
    # By model and tokens per layer.
    PRESETS: ClassVar[dict[str, dict[str, float]]] = {
        "llama-3.1-8b-1024": {"tau1": 1.6, "tau2": 0.4},
        "llama-3.1-8b-128": {"tau1": 1.6, "tau2": 0.6},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_window(self, smallest=2)
        for name in ("tau1", "tau2"):
            if not getattr(self, name) > 0:
                raise ValueError(f"CAKE: {name} must be > 0, got {getattr(self, name)}")
        if not self.gamma >= 0:
            raise ValueError(f"CAKE: gamma must be >= 0, got {self.gamma}")
        check_choice(self, "indicator", ("mean", "variance", "product", "mean+variance"))
        check_choice(self, "allocation", ("preference", "entropy", "variance", "uniform", "random"))

    @property
    def observed(self) -> int:
        return self.window

    @property
    def threshold(self) -> int:
        return self.budget + self.window

    def score(self, seen: Observation) -> Tensor:
        indicator = seen.means()
        if not seen.decoding and self.indicator != "mean":
            variances = seen.variances()
            indicator = {
                "variance": lambda: variances,
                "product": lambda: indicator * variances,
                "mean+variance": lambda: indicator + self.gamma * variances,
            }[self.indicator]()
        return seen.pooled(indicator, self.window, self.kernel_size, "avg").mean(dim=2)

    def dispersion_and_shift(self, seen: Observation) -> tuple[Tensor, Tensor]:
        """[B] float64 each: H and V of a layer, before the temperatures."""
        prefix = seen.prefix(self.window)[:, :, None]
        # In float64 from here: products of powers of small numbers.
        entropy = (seen.entropies() * prefix).sum(dim=3).double().mean(dim=(1, 2))
        shift = (seen.variances() * prefix).sum(dim=3).double().mean(dim=(1, 2))
        return entropy.clamp(min=0), shift

    def preference(self, seen: Observation) -> Tensor:
        entropy, shift = self.dispersion_and_shift(seen)
        entropy, shift = entropy ** (1 / self.tau1), shift ** (1 / self.tau2)
        return {"entropy": entropy, "variance": shift}.get(self.allocation, entropy * shift)

    def _wants(self, stage: Stage, row: int) -> float:
        """What a layer's share is in proportion to."""
        if self.allocation == "random":
            return random.Random(f"{self.seed} {stage.layer}").random()
        return 1.0 if self.allocation == "uniform" else stage.preference[row]

    def allocate(self, sharing: Sharing) -> list[np.ndarray]:
        return shared_by_preference(sharing, super().allocate(sharing), self.budget, self._wants)


def shared_by_preference(
    sharing: Sharing,
    counts: list[np.ndarray],
    budget: int,
    wants: Callable[[Stage, int], float],
    alpha: float = 0.0,
) -> list[np.ndarray]:
    """What each layer and KV head may keep where the layers of a KV head share its budget by their preferences.

    Args:
        sharing: of all layers so far.
        counts: [A, B] for each stage, what spared rows keep; those of others are written over.
        budget: tokens kept per layer and KV head on average.
        wants: of a stage and a row, what the layer's share is in proportion to.
        alpha: the part of the budget, beside what is always kept, that every layer gets in any case.

    Returns:
        `counts`.
    """
    layout = sharing.blocks.layout()
    for head in range(sharing.blocks.num_kv_heads):
        column = layout.column(head)
        stages = zip(sharing.stages, counts, strict=True)
        blocks = [(stage, stage.heads.index(head), kept) for stage, kept in stages if head in stage.heads]
        least = {anchor: sharing.always[anchor, head] for anchor in column}
        least = {anchor: always + round(alpha * (budget - always)) for anchor, always in least.items()}
        total = sum(budget - least[anchor] for anchor in column)
        sizes = [layout.sizes[stage.layer, head] for stage, *_ in blocks]
        for row in range(len(sharing.seen)):
            if sharing.spared[row]:
                continue
            wanted = [wants(stage, row) for stage, *_ in blocks]
            room = [max(0, int(stage.held[index][row]) - least[stage.layer]) for stage, index, _ in blocks]
            shares = apportion(total, wanted, sizes, room, is_last=sum(sizes) == len(column))
            for (stage, index, kept), share in zip(blocks, shares, strict=True):
                kept[index, row] = least[stage.layer] + share
    return counts


def apportion(total: int, preferences: list[float], sizes: list[int], room: list[int], is_last: bool) -> list[int]:
    """Tokens for each block of layers, in proportion to the preferences, no block more than it has room for.

    Args:
        total: tokens of all layers together.
        preferences: of each block; all zero counts as all equal.
        sizes: layers of each block; a token of a block of two counts twice.
        room: the most that each can take.
        is_last: no layer is still to come. Before, counts are rounded up, so that the shares of later stages, which
            can only be smaller, still find their tokens (Theorem 1).

    Returns:
        One count for each block.
    """
    if not sum(preferences) > 0 or not math.isfinite(sum(preferences)):
        preferences = [1.0] * len(preferences)
    whole = sum(size * preference for size, preference in zip(sizes, preferences, strict=True))
    exact = [preference / whole * total for preference in preferences]
    counts = [
        min(math.floor(share) if is_last else math.ceil(share), most) for share, most in zip(exact, room, strict=True)
    ]
    left = total - sum(size * count for size, count in zip(sizes, counts, strict=True))
    while left > 0:
        takers = [i for i, size in enumerate(sizes) if counts[i] < room[i] and size <= left]
        if not takers:
            break
        each = left // sum(sizes[i] for i in takers)
        for i in takers:
            more = min(max(each, 1), room[i] - counts[i])
            if sizes[i] * more <= left:
                counts[i] += more
                left -= sizes[i] * more
    return counts
