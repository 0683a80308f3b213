"""What an eviction method says: which tokens are kept, where and when; and what it is shown.

There are three kinds. `Eviction` gives scores to tokens, made of what a layer's last queries attended to
(`Observation`). `ChainPolicy` keeps tokens by their places: first tokens, and behind them a chain of sub-caches (one: a
window). `ReadSelector` keeps all, and chooses what a step reads.

Legend: B rows, A KV heads anchored in a layer (all of them in a dense model), G query heads per KV head, q queries, N
slots, D head dimension.
"""

import types
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import lru_cache
from itertools import groupby
from typing import ClassVar, Literal, Self, get_args, get_type_hints

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from pod.blocks import LayerBlocks

POSITIONS = ("cache", "absolute")
NORM_NUMBERS = 2**24  # of outputs of values in memory at once
# Tokens beyond all addresses: with more, sums of sizes would be no numbers of 64 bits.
BEYOND_MEMORY = 2**48


@dataclass(frozen=True)
class Method(ABC):
    """What every method has, a dataclass of hyper-parameters: a budget.

    Attributes:
        budget: an int: tokens that each layer and KV head keeps (on average, where they share), every kept token
            counted. A float between 0 and 1: a share of the first prefill's real tokens, in each row of its own,
            rounded down and not below `least`; that many tokens are the row's budget from then on.
    """

    budget: int | float

    @property
    def is_share(self) -> bool:
        """The budget is a share of a prompt that is not known yet; what is made of the budget has no meaning."""
        return isinstance(self.budget, float)

    def least(self, sinks: int, groups: int) -> int:
        """The fewest tokens that a share comes to.

        Args:
            sinks: first tokens that the model's blocks always keep.
            groups: query heads per KV head.
        """
        return 1

    def with_budget(self, budget: int) -> Self:
        """The same method with so many tokens as its budget."""
        return replace(self, budget=budget)

    def tokens_of(self, prompt: int, sinks: int, groups: int) -> int:
        """What a share comes to in a row whose first prefill has `prompt` tokens; arguments else as `least`."""
        # A share counts as it is written: 0.29 of 100 tokens are 29, though the float is a little less.
        return max(int(Fraction(str(self.budget)) * prompt), self.least(sinks, groups))


def runs_of(method: Method, budgets: Sequence[int] | None) -> Sequence[tuple[Method, slice]]:
    """The method as rows have it, a share come to tokens, for each run of rows with one budget.

    Args:
        method: of all rows.
        budgets: [B] tokens; None where the method's own is of all rows, or a share is still to come to something.
    """
    return [(method, slice(None))] if budgets is None else _runs_of(method, tuple(budgets))


@lru_cache(maxsize=16)
def _runs_of(method: Method, budgets: tuple[int, ...]) -> list[tuple[Method, slice]]:
    runs, first = [], 0
    for budget, rows in groupby(budgets):
        last = first + len(list(rows))
        runs.append((method.with_budget(budget), slice(first, last)))
        first = last
    return runs


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
        stored: "keys" or "values" -> [B, A, N, D] of the anchor, as they are stored; behind `keys` and `values`. Also
            "output" -> [A, G, C, D], each query head's part of the anchor's output projection, for methods that
            `reads_outputs`; and "table" -> [A, ..], of `Eviction.table`.
    """

    weights: Tensor
    positions: Tensor
    newest: Tensor
    in_order: bool
    decoding: bool
    asked: Tensor | None = None
    stored: Callable[[str], Tensor] | None = None

    @property
    def keys(self) -> Tensor:
        """[B, A, N, D] float32, the tokens' keys after RoPE; of an empty slot without meaning."""
        return self.stored("keys").float()

    @property
    def values(self) -> Tensor:
        """[B, A, N, D] float32, likewise; in a block those of its anchor's layer."""
        return self.stored("values").float()

    @property
    def table(self) -> Tensor:
        """[A, ..] float32, the anchors' entries of `Eviction.table`."""
        return self.stored("table")

    def output_norms(self) -> Tensor:
        """[B, A, N] float32: the L1 norm of values behind a query head's part of the output projection.

        In the mean over the KV head's query heads, whose parts differ; for methods that `reads_outputs`.
        """
        values, heads = self.values, self.stored("output").float().unbind(dim=1)
        # A token's outputs are as long as the residual stream: a few tokens' at once.
        few = max(1, NORM_NUMBERS // (values.shape[:2].numel() * heads[0].shape[1]))
        parts = [sum((part @ head.mT).abs().sum(dim=-1) for head in heads) for part in values.split(few, dim=2)]
        return torch.cat(parts, dim=2) / len(heads)

    def expected_logits(self, future: int) -> Tensor:
        """[B, A, G, N] float32: log of the mean exponential logit of queries at the next `future` positions.

        They are drawn like the prefill's own, of the moments from `Eviction.moments_from` on, and rotated to the mean
        of these positions. Of a prefill alone.
        """
        raise ValueError("the moments of queries are known after a prefill alone")

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


@dataclass
class Stage:
    """One layer's part in sharing the budget; a prefill goes through one for each layer that has anchors.

    Attributes:
        layer: its index.
        heads: the KV heads anchored there, A of them.
        held: [A, B] tokens that each holds, on the host.
        scores: [B, A, N] of the layer whose stage it is, in order of position; None for the layers before it.
        candidates: [B, A, N] bool, the tokens that are not always kept; None for the layers before it.
        preference: [B] what `Eviction.preference` said; None for methods without.
        budgets: [A, B] what `Eviction.allocate` said last; None for the layer whose stage it is.
    """

    layer: int
    heads: tuple[int, ...]
    held: np.ndarray
    scores: Tensor | None
    candidates: Tensor | None
    preference: list[float] | None
    budgets: np.ndarray | None = None

    def of_rows(self, rows: slice) -> "Stage":
        """The same of some rows."""
        lines = {"scores": self.scores, "candidates": self.candidates, "preference": self.preference}
        units = {"held": self.held, "budgets": self.budgets}
        return replace(
            self,
            **{name: None if line is None else line[rows] for name, line in lines.items()},
            **{name: None if heads is None else heads[:, rows] for name, heads in units.items()},
        )


@dataclass
class Sharing:
    """What `Eviction.allocate` sees; its B rows have one budget.

    Attributes:
        blocks: the model's blocks; of one layer each in a dense model.
        always: tokens that a block (its anchor layer, its KV head) always keeps: last ones and, if it shares, sinks.
        seen: [B] tokens of each row so far, evicted ones included.
        spared: [B] rows of which this prefill evicts nothing: they are not above the method's threshold.
        stages: the layers with anchors up to now, the newest last.
    """

    blocks: LayerBlocks
    always: dict[tuple[int, int], int]
    seen: list[int]
    spared: list[bool]
    stages: list[Stage]


@dataclass(frozen=True)
class Eviction(Method):
    """Base of the eviction methods: hyper-parameters, and hooks that the cache calls.

    The hooks of a method whose budget is a share are called on one of as many tokens as it came to.

    Attributes:
        budget: see `Method`.
        query_aware: False: the first prefill, the context, is evicted once and what comes later is only added; many
            questions can then be put to one cache inside `cache.peek()`, or after `crop`, and none of them is in
            anyone's observation window. True: every prefill ends with an eviction, so a question at the end of
            the prompt is in the window and helps to choose, which is unfair where several questions share a context.

    Class attributes:
        positions: "absolute": a key keeps the rotation of its position in the text.
        when: 0 evicts after a prefill only, n also after every n-th decoded token.
        scores_stay: with their tokens, where a further eviction finds them. "sum": those of every query are added, and
            the budget has no part in them. "prefill": a prefill's decide at steps too; a new token's is 0, and what a
            step scores is added for that step only. None: every eviction scores anew.
        per_layer: all KV heads anchored in a layer keep the same positions.
        reads_outputs: `score` asks for `Observation.output_norms`.
        recent_in_blocks: in a block of several layers, the share of its budget beside the sinks that goes to the last
            tokens first, up to the model's recent ones: its later layers attend to these by keys of their own, of which
            the anchor's scores know nothing.
        window: the last tokens that are always kept, of methods that need not count the query heads.
        waits: the first prefill evicts nothing, and `PodCache.evict` is to say its scores before anything follows.
            `allocate` is then called once more, with scores and candidates of all stages.
    """

    query_aware: bool = field(default=True, kw_only=True)

    positions: ClassVar[str] = "absolute"
    when: ClassVar[int] = 0
    scores_stay: ClassVar[Literal["sum", "prefill"] | None] = None
    per_layer: ClassVar[bool] = False
    reads_outputs: ClassVar[bool] = False
    recent_in_blocks: ClassVar[float] = 0.0
    window: ClassVar[int] = 0
    waits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_types(self)
        check_budget(self)
        if not self.is_share and self.budget < self.protected():
            raise ValueError(
                f"{type(self).__name__}: budget ({self.budget} tokens) is below the {self.protected()} last tokens "
                "that are always kept: raise budget, or keep fewer"
            )

    def protected(self, groups: int = 1) -> int:
        """The last tokens of each row that are always kept, with `groups` query heads per KV head."""
        return self.window

    def least(self, sinks: int, groups: int) -> int:
        return max(1, sinks + self.protected(groups))

    @property
    def observed(self) -> int:
        """How many of a prefill's last queries `score` looks at; all where scores are summed."""
        return 1

    @property
    def moments_from(self) -> int | None:
        """The position from which on a prefill's queries are in the moments of `Observation.expected_logits`.

        None where a method does not ask for them.
        """
        return None

    def table(self, config: PreTrainedConfig) -> Tensor | None:
        """[L, H_kv, ..] float32, what was measured of the model and `Observation.table` is part of.

        None where a method reads none.

        Raises:
            FileNotFoundError, ValueError: there is no such file, or it is of another model.
        """
        return None

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

    def preference(self, seen: Observation) -> Tensor | None:
        """[B] how much a layer wants of a budget that layers share, by the queries of the `protected` last tokens.

        None, and not asked for, where a method leaves this as it is.
        """
        return None

    @property
    def has_preference(self) -> bool:
        """The method defines `preference`."""
        return type(self).preference is not Eviction.preference

    def allocate(self, sharing: Sharing) -> list[np.ndarray]:
        """How many tokens each layer and KV head may keep, those always kept included.

        Called at every layer that has anchors; what it says about the layers before may only shrink, and the cache
        then evicts from them again.

        Returns:
            [A, B] for each stage.
        """
        budget, rows = min(self.budget, BEYOND_MEMORY), len(sharing.seen)
        return [np.full((len(stage.heads), rows), budget) for stage in sharing.stages]


class ReadSelector(Method):
    """A method that keeps every token, in pages, and chooses at each decoded token which of them are read.

    It chooses by an index of the anchors' keys that the storage keeps for it: some numbers for each page.

    Attributes:
        dense_layers: so many first layers read everything.
    """

    dense_layers: int

    @abstractmethod
    def pages(self, length: int | np.ndarray) -> int | np.ndarray:
        """Pages of `length` tokens, or of each of several lengths."""

    @abstractmethod
    def index_width(self, dim: int) -> int:
        """Numbers of a page in the index, of the keys' dtype; keys have `dim`."""

    @abstractmethod
    def refresh(self, index: Tensor, keys: Tensor, before: Tensor, after: Tensor, most: int) -> None:
        """Bring the index up to date for the tokens at positions before .. after - 1 of each row.

        Args:
            index: [A, B, P, index_width]; written in place.
            keys: [A, B, N, D], slot = position.
            before, after: [B] int64.
            most: the most tokens between them.
        """

    @abstractmethod
    def choose(self, q: Tensor, index: Tensor, positions: Tensor) -> Tensor:
        """The positions that one query reads.

        Args:
            q: [A, B, G, D].
            index: [A, B, P, index_width], the pages of the longest row.
            positions: [B, 1] int64, the query's position in each row, -1 for padding.

        Returns:
            [A, B, R] int64, each position at most once; -1 for none.
        """


@dataclass(frozen=True)
class Chain:
    """What a method keeps of a model's tokens, in each layer and KV head.

    Attributes:
        sinks: first tokens that stay for ever.
        tokens: of all sub-caches together, a multiple of their number.
        num_cascades: sub-caches, newest first; each passes on every second token.
        rotates: keys are stored before RoPE and rotated to their place among the kept tokens.
        gamma: of the moving average of attention by which tokens contest a place, mu <- gamma mu + (1 - gamma) s for
            every query; None for one sub-cache, which needs none, and where what is not accepted is dropped uncompared.
        head_reduction: "max", "mean" or "median" (of an even number the lower one) over a KV head's query heads.
        is_homogeneous: over those of all KV heads that a layer decides for, which then keep the same tokens.
        window: how many first and how many last tokens, itself included, a query sees, however many are processed at
            once; None: all that is kept, and its stride. Where keys are rotated, no sink then counts as farther than
            the window's first token.
    """

    sinks: int
    tokens: int
    num_cascades: int = 1
    rotates: bool = False
    gamma: float | None = None
    head_reduction: str = "max"
    is_homogeneous: bool = False
    window: tuple[int, int] | None = None

    @property
    def slots(self) -> int:
        """All that is kept at most."""
        return self.sinks + self.tokens


class ChainPolicy(Method):
    """Hyper-parameters of a method that keeps a chain; many caches can be made with one.

    Attributes:
        positions: "absolute" (keys come after RoPE and keep the angle of their position) or "cache" (queries and keys
            come before RoPE, and each is rotated to its place among the kept tokens).
        stride: queries that are processed at once; a longer forward is cut into strides. None: a quarter of the budget,
            at least 1.

    Class attributes:
        sees_stride: a query attends to its whole stride up to itself, so that results depend on the stride.
    """

    positions: str
    stride: int | None

    sees_stride: ClassVar[bool] = True

    @property
    def at_once(self) -> int:
        """Queries that are processed at once."""
        return max(1, self.budget // 4) if self.stride is None else self.stride

    @abstractmethod
    def chain(self, config: PreTrainedConfig) -> Chain:
        """What is kept of a PoD model's tokens; not of a budget that is a share, but of what it comes to.

        Raises:
            ValueError: the policy and the model do not go together.
        """


def ranks(scores: Tensor) -> Tensor:
    """[.., N] int64, 0 for the lowest; of equal scores, which are in order of position, the later ranks higher."""
    order = scores.argsort(dim=-1, stable=True)
    return torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )


def check_budget(method: Method) -> None:
    """Refuse a budget that is neither a number of tokens nor a share of the prompt.

    Raises:
        ValueError: names the method and the value.
    """
    name = type(method).__name__
    if method.is_share and not 0 < method.budget < 1:
        raise ValueError(
            f"{name}: budget must be a whole number of tokens, or a share of the prompt between 0 and 1 such as 0.25; "
            f"got {method.budget}"
        )
    if method.budget < 1 and not method.is_share:
        raise ValueError(f"{name}: budget must be at least 1 token, got {method.budget}")


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


def check_choice(method: Method, name: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is none of the choices.

    Raises:
        ValueError: names the value and the choices.
    """
    value = getattr(method, name)
    if value not in choices:
        raise ValueError(f"{type(method).__name__}: {name} must be one of {', '.join(choices)}; got {value!r}")


def accepted_types(method: type) -> dict[str, tuple[type, ...]]:
    """The types of each field of a dataclass, `int | None` taken apart."""
    hints = get_type_hints(method)
    return {one.name: get_args(hints[one.name]) or (hints[one.name],) for one in fields(method)}


def check_types(method: object) -> None:
    """Refuse hyper-parameters, the fields of a dataclass, of another type than they are declared with.

    Raises:
        ValueError: names the method, the field and the value.
    """
    for field_name, accepted in accepted_types(type(method)).items():
        value = getattr(method, field_name)
        fits = isinstance(value, (*accepted, int) if float in accepted else accepted)
        if not fits or (isinstance(value, bool) and bool not in accepted):
            names = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in accepted)
            raise ValueError(f"{type(method).__name__}: {field_name} must be {names}, got {value!r}")


def check_policy(policy: ChainPolicy) -> None:
    """Refuse fields of a policy with slots that mean nothing, and warn of a stride that makes it another method.

    Raises:
        ValueError: names the value and what it may be.
    """
    check_types(policy)
    check_budget(policy)
    if policy.sinks < 0:
        raise ValueError(f"sinks must be >= 0 tokens, got {policy.sinks}")
    if policy.positions not in POSITIONS:
        raise ValueError(f"positions must be one of {', '.join(map(repr, POSITIONS))}; got {policy.positions!r}")
    if policy.stride is not None and policy.stride < 1:
        raise ValueError(f"stride must be at least 1 query, got {policy.stride}")
    if policy.sees_stride and not policy.is_share and (policy.stride or 0) > policy.budget:
        warnings.warn(
            f"{type(policy).__name__}: a stride of {policy.stride} queries is above the budget of {policy.budget} "
            "tokens: a prompt up to the stride is attended to as without eviction. Left out, it is a quarter of budget",
            stacklevel=4,
        )
