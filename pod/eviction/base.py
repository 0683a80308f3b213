"""What an eviction method says: how important each token is, how many are kept where, and when.

Legend: B rows, A KV heads anchored in a layer (all of them in a dense model), N slots.
"""

import types
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import lru_cache
from itertools import groupby
from typing import ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from torch import Tensor

from pod.blocks import LayerBlocks
from pod.eviction.observation import Observation


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

    def of_rows(self, rows: slice) -> "Stage":
        """The same of some rows."""
        lines = {"scores": self.scores, "candidates": self.candidates, "preference": self.preference}
        units = {"held": self.held, "budgets": self.budgets}
        return replace(
            self,
            **{name: None if line is None else line[rows] for name, line in lines.items()},
            **{name: None if heads is None else [head[rows] for head in heads] for name, heads in units.items()},
        )


@dataclass
class Sharing:
    """What `Eviction.allocate` sees; its B rows have one budget.

    Attributes:
        blocks: the model's blocks; of one layer each in a dense model.
        always: tokens that a block (its anchor layer, its KV head) always keeps: window and, if it shares, sinks.
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
            questions can then be put to copies (`copy.deepcopy`) of one cache, or after `crop`, and none of them is
            in anyone's observation window. True: every prefill ends with an eviction, so a question at the end of
            the prompt is in the window and helps to choose, which is unfair where several questions share a context.

    Class attributes:
        positions: "absolute": a key keeps the rotation of its position in the text.
        when: 0 evicts after a prefill only, n also after every n-th decoded token.
        scores_stay: with their tokens, where a further eviction finds them. "sum": those of every query are added, and
            the budget has no part in them. "prefill": a prefill's decide at steps too; a new token's is 0, and what a
            step scores is added for that step only. None: every eviction scores anew.
        per_layer: all KV heads anchored in a layer keep the same positions.
    """

    budget: int | float
    query_aware: bool = field(default=True, kw_only=True)

    positions: ClassVar[str] = "absolute"
    when: ClassVar[int] = 0
    scores_stay: ClassVar[Literal["sum", "prefill"] | None] = None
    per_layer: ClassVar[bool] = False

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
        return 0

    def least(self, sinks: int, groups: int) -> int:
        return max(1, sinks + self.protected(groups))

    @property
    def observed(self) -> int:
        """How many of a prefill's last queries `score` looks at; all where scores are summed."""
        return 1

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

    def allocate(self, sharing: Sharing) -> list[list[list[int]]]:
        """How many tokens each layer and KV head may keep, those always kept included.

        Called at every layer that has anchors; what it says about the layers before may only shrink, and the cache
        then evicts from them again.

        Returns:
            [stages][A][B].
        """
        rows = len(sharing.seen)
        return [[[self.budget] * rows for _ in stage.heads] for stage in sharing.stages]


class ReadSelector(Method):
    """A method that keeps every token, in pages, and chooses at each decoded token which of them are read.

    Attributes:
        page_size: tokens of a page.
        dense_layers: so many first layers read everything.
    """

    page_size: int
    dense_layers: int

    def pages(self, length: int) -> int:
        """Pages of `length` tokens."""
        return -(-length // self.page_size)

    @abstractmethod
    def choose(self, bounds: Tensor, positions: Tensor) -> Tensor:
        """The positions that one query reads.

        Args:
            bounds: [A, B, P] float32, how large the product of a page's keys and the query can be at most.
            positions: [B, 1] int64, the query's position in each row, -1 for padding.

        Returns:
            [A, B, R] int64, best page first; -1 for none.
        """


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


def check_types(method: object) -> None:
    """Refuse hyper-parameters, the fields of a dataclass, of another type than they are declared with.

    Raises:
        ValueError: names the method, the field and the value.
    """
    hints = get_type_hints(type(method))
    for one in fields(method):
        value, accepted = getattr(method, one.name), accepted_types(hints[one.name])
        fits = isinstance(value, (*accepted, int) if float in accepted else accepted)
        if not fits or (isinstance(value, bool) and bool not in accepted):
            names = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in accepted)
            raise ValueError(f"{type(method).__name__}: {one.name} must be {names}, got {value!r}")
