"""What an eviction method says: how important each token is, how many are kept where, and when.

Legend: B rows, A KV heads anchored in a layer (all of them in a dense model), G query heads per KV head, q queries, N
slots, L layers, C budget.

Ties are broken the same way everywhere: of two tokens with equal scores the more recent one is kept.
"""

import types
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import ClassVar, get_args, get_origin, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor

from pod.blocks import LayerBlocks


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
    """

    weights: Tensor
    positions: Tensor
    newest: Tensor
    in_order: bool
    decoding: bool

    @property
    def count(self) -> int:
        """q, padding included."""
        return self.weights.shape[3]

    def sums(self) -> Tensor:
        """[B, A, G, N] the weights' sum over the queries."""
        return self.weights.sum(dim=3)

    def variances(self) -> Tensor:
        """[B, A, G, N] the weights' unbiased variance over the queries, 0 for a single one."""
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


@dataclass
class Stage:
    """One layer's part in sharing the budget; a prefill goes through one for each layer that has anchors.

    Attributes:
        layer: its index.
        heads: the KV heads anchored there, A of them.
        held: [A][B] tokens that each holds.
        scores: [B, A, N] of the layer whose stage it is, in order of position; None for the layers before it.
        candidates: [B, A, N] bool, the tokens that are not always kept; None for the layers before it.
        preference: [B] what `Eviction.preference` said; None for methods without.
        budgets: [A][B] what `Eviction.allocate` said last; None for the layer whose stage it is.
    """

    layer: int
    heads: tuple[int, ...]
    held: list[list[int]]
    scores: Tensor | None
    candidates: Tensor | None
    preference: list[float] | None
    budgets: list[list[int]] | None = None


@dataclass
class Sharing:
    """What `Eviction.allocate` sees.

    Attributes:
        blocks: the model's blocks; of one layer each in a dense model.
        always: tokens that a block (its anchor layer, its KV head) always keeps: window and, if it shares, sinks.
        seen: [B] tokens of each row so far, evicted ones included.
        stages: the layers with anchors up to now, the newest last.
    """

    blocks: LayerBlocks
    always: dict[tuple[int, int], int]
    seen: list[int]
    stages: list[Stage]


@dataclass(frozen=True)
class Eviction(ABC):
    """Base of the eviction methods: hyper-parameters, and hooks that the cache calls.

    Attributes:
        budget: tokens that each layer and KV head keeps on average, everything included.
        query_aware: False: the first prefill, the context, is evicted once and what comes later is only added; many
            questions can then be put to copies (`copy.deepcopy`) of one cache, or after `crop`, and none of them is
            in anyone's observation window. True: every prefill ends with an eviction, so a question at the end of
            the prompt is in the window and helps to choose, which is unfair where several questions share a context.

    Class attributes:
        positions: "absolute": a key keeps the rotation of its position in the text.
        when: 0 evicts after a prefill only, n also after every n-th decoded token.
        carries: scores stay with their tokens, and those of further queries are added.
        lasting: a prefill's scores stay with their tokens and decide at steps too; a new token's is 0, and what a step
            scores is added for that step only.
        per_layer: all KV heads anchored in a layer keep the same positions.
    """

    budget: int
    query_aware: bool = field(default=True, kw_only=True)

    positions: ClassVar[str] = "absolute"
    when: ClassVar[int] = 0
    carries: ClassVar[bool] = False
    lasting: ClassVar[bool] = False
    per_layer: ClassVar[bool] = False

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for one in fields(self):
            _check_type(type(self).__name__, one.name, getattr(self, one.name), hints[one.name])
        if self.budget < 1:
            raise ValueError(f"{type(self).__name__}: budget must be at least 1 token, got {self.budget}")
        if self.budget < self.protected:
            raise ValueError(
                f"{type(self).__name__}: budget ({self.budget} tokens) is below the {self.protected} last tokens that "
                "are always kept: raise budget, or keep fewer"
            )

    @property
    def protected(self) -> int:
        """The last tokens of each row that are always kept."""
        return 0

    def protected_with(self, groups: int) -> int:
        """The same, for methods where it depends on the query heads per KV head."""
        return self.protected

    @property
    def observed(self) -> int:
        """How many of a prefill's last queries `score` looks at; all when `carries`."""
        return 1

    @property
    def preference_window(self) -> int:
        """How many of a prefill's last queries `preference` looks at; 0: the method has none."""
        return 0

    @property
    def threshold(self) -> int:
        """A prefill evicts nothing from rows of at most so many tokens."""
        return self.budget

    @abstractmethod
    def score(self, seen: Observation) -> Tensor:
        """How important each token is; those that are always kept need no meaningful score.

        Returns:
            [B, A, N] float32.
        """

    def preference(self, seen: Observation) -> Tensor:
        """[B] how much a layer wants of a budget that layers share; asked where there is a `preference_window`."""
        raise NotImplementedError(f"{type(self).__name__} has a preference_window, so it must define preference")

    def allocate(self, sharing: Sharing) -> list[list[list[int]]]:
        """How many tokens each layer and KV head may keep, those always kept included.

        Called at every layer that has anchors; what it says about the layers before may only shrink, and the cache
        then evicts from them again.

        Returns:
            [stages][A][B].
        """
        rows = len(sharing.seen)
        return [[[self.budget] * rows for _ in stage.heads] for stage in sharing.stages]


@dataclass(frozen=True)
class Combined(Eviction):
    """The scores of one method under the allocation of another, as CAKE's paper puts H2O and SnapKV under its own.

    Args:
        budget: that of both.
        scorer: gives scores, what is always kept, and when.
        allocator: gives preferences and counts.

    Raises:
        ValueError: the budgets differ, or they always keep different numbers of last tokens.
    """

    scorer: Eviction
    allocator: Eviction

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in (self.scorer, self.allocator):
            if part.budget != self.budget:
                raise ValueError(f"Combined: budget is {self.budget} but {type(part).__name__} has {part.budget}")
        if self.scorer.protected != self.allocator.protected:
            raise ValueError(
                f"Combined: {type(self.scorer).__name__} always keeps {self.scorer.protected} last tokens and "
                f"{type(self.allocator).__name__} {self.allocator.protected}: give both the same window"
            )
        for name in ("when", "carries", "lasting", "per_layer"):
            object.__setattr__(self, name, getattr(self.scorer, name))

    protected = property(lambda self: self.scorer.protected)
    observed = property(lambda self: self.scorer.observed)
    preference_window = property(lambda self: self.allocator.preference_window)
    threshold = property(lambda self: self.allocator.threshold)

    def protected_with(self, groups: int) -> int:
        return self.scorer.protected_with(groups)

    def score(self, seen: Observation) -> Tensor:
        return self.scorer.score(seen)

    def preference(self, seen: Observation) -> Tensor:
        return self.allocator.preference(seen)

    def allocate(self, sharing: Sharing) -> list[list[list[int]]]:
        return self.allocator.allocate(sharing)


def kept(scores: Tensor, positions: Tensor, forced: Tensor, counts: Tensor) -> Tensor:
    """Which tokens stay: the forced ones, then the highest scores; among equal scores the most recent.

    Args:
        scores: [B, A, N] float32.
        positions: [B, A, N] int64, -1 where a slot is empty.
        forced: [B, A, N] bool.
        counts: [B, A] int64, how many stay, forced ones included; fewer where there are not so many.

    Returns:
        [B, A, N] bool.
    """
    is_live = positions >= 0
    scores = scores.masked_fill(forced, torch.inf).masked_fill(~is_live, -torch.inf)
    recent_first = positions.argsort(dim=-1, descending=True)
    best_first = scores.gather(-1, recent_first).argsort(dim=-1, descending=True, stable=True)
    order = recent_first.gather(-1, best_first)
    counts = torch.maximum(counts, (forced & is_live).sum(dim=-1))
    is_first = torch.arange(scores.shape[-1], device=scores.device) < counts[..., None]
    return torch.zeros_like(forced).scatter_(-1, order, is_first) & is_live


def lowest(scores: Tensor, positions: Tensor, forced: Tensor) -> Tensor:
    """[B, A] the one slot that `kept` gives up first: the lowest score, among equal ones the earliest position."""
    scores = scores.masked_fill(forced | (positions < 0), torch.inf)
    is_lowest = scores == scores.amin(dim=-1, keepdim=True)
    last = torch.iinfo(torch.long).max
    return torch.where(is_lowest & (positions >= 0), positions, last).argmin(dim=-1)


def check_window(method: Eviction, smallest: int = 1) -> None:
    """Refuse an observation window or a pooling that means nothing.

    Raises:
        ValueError: names the value and what it must be.
    """
    name = type(method).__name__
    if method.window < smallest:
        raise ValueError(f"{name}: window must be at least {smallest}, got {method.window}")
    if method.kernel_size < 1 or method.kernel_size % 2 == 0:
        raise ValueError(f"{name}: kernel_size must be an odd number of tokens, got {method.kernel_size}")


def check_choice(method: Eviction, name: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is none of the choices.

    Raises:
        ValueError: names the value and the choices.
    """
    value = getattr(method, name)
    if value not in choices:
        raise ValueError(f"{type(method).__name__}: {name} must be one of {', '.join(choices)}; got {value!r}")


def accepted_types(hint: type | types.UnionType) -> tuple[type, ...]:
    """The types of a field, `int | None` taken apart."""
    return get_args(hint) if get_origin(hint) is types.UnionType else (hint,)


def _check_type(method: str, name: str, value: object, hint: type | types.UnionType) -> None:
    accepted = accepted_types(hint)
    fits = isinstance(value, (*accepted, int) if float in accepted else accepted)
    if not fits or (isinstance(value, bool) and bool not in accepted):
        names = " or ".join("None" if one is types.NoneType else one.__name__ for one in accepted)
        raise ValueError(f"{method}: {name} must be {names}, got {value!r}")
