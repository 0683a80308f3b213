"""Which tokens of a unit stay, by what an eviction method says: scores, counts, and those that are always kept.

The anchor's attention decides for all layers of a block. A prefill goes from the lowest layer up; where layers share a
budget, each further one shrinks the targets of those before it. Queries of the observation window are kept until the
prefill that they belong to is decided on.

Ties are broken the same way everywhere: of two tokens with equal scores the more recent one is kept.

Legend: B rows, A units anchored in a layer, G query heads per KV head, T queries, N slots, D head dimension.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from pod.blocks import Unit
from pod.eviction import Eviction, Observation, Sharing, Stage
from pod.eviction.base import BEYOND_MEMORY, runs_of
from pod_kernels import attention_weights
from pod_kernels.dispatch import runs_triton
from pod_kernels.segments import MAX_LOGITS, Change, Chosen
from pod_kernels.slots import rotated

if TYPE_CHECKING:
    from pod.cache.slots import SlotStorage


@dataclass
class Window:
    """The last queries of a prefill's anchor heads, until they are looked at: [A, B, G, T, D] and [B, T]."""

    queries: Tensor
    positions: Tensor
    scale: float
    moments: "Moments | None" = None

    def part(self, part: slice) -> "Window":
        """Some of its queries."""
        return Window(self.queries[..., part, :], self.positions[:, part], self.scale, self.moments)

    def of_rows(self, rows: slice | Tensor) -> "Window":
        """The queries of some rows."""
        moments = None if self.moments is None else self.moments.of_rows(rows)
        return Window(self.queries[:, rows], self.positions[rows], self.scale, moments)


@dataclass
class Moments:
    """Sums over a prefill's queries before RoPE: count [B], first [A, B, G, D] and second [A, B, G, D, D], float32.

    Attributes:
        rotary: positions [B, T] -> cos and sin [B, T, D], of the model.
    """

    count: Tensor
    first: Tensor
    second: Tensor
    rotary: Callable[[Tensor], tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, queries: Tensor, positions: Tensor, rotary: Callable, start: int) -> "Moments":
        """Of queries [A, B, G, T, D] after RoPE at [B, T], those from position `start` on."""
        counts = positions >= start
        cos, sin = (part.float()[None, :, None] for part in rotary(positions.clamp(min=0)))
        # Turned back; a rotary that scales (YaRN) has scaled twice then.
        states = _turned(queries.float(), cos, -sin) / (cos.square() + sin.square())
        states = states * counts[None, :, None, :, None]
        return cls(counts.sum(dim=1), states.sum(dim=3), states.mT @ states, rotary)

    def __add__(self, other: "Moments") -> "Moments":
        parts = ((getattr(self, name) + getattr(other, name)) for name in ("count", "first", "second"))
        return Moments(*parts, other.rotary)

    def of_rows(self, rows: slice | Tensor) -> "Moments":
        """The same of some rows."""
        return Moments(self.count[rows], self.first[:, rows], self.second[:, rows], self.rotary)

    def expected_logits(self, keys: Tensor, newest: Tensor, future: int, scale: float) -> Tensor:
        """As `Observation.expected_logits`, of keys [A, B, N, D]: [A, B, G, N]."""
        count = self.count.clamp(min=1)[None, :, None, None]
        mean = self.first / count
        spread = self.second / count[..., None] - mean[..., :, None] * mean[..., None, :]
        ahead = newest[:, None] + 1 + torch.arange(future, device=newest.device)
        cos, sin = (part.float().mean(dim=1)[None, :, None] for part in self.rotary(ahead))
        mean = _turned(mean, cos, sin)
        cos, sin = cos[..., None, :], sin[..., None, :]
        spread = _turned(_turned(spread, cos, sin).mT, cos, sin)
        keys = keys.float()[:, :, None]
        linear = (keys @ mean[..., None])[..., 0]
        return linear * scale + ((keys @ spread) * keys).sum(dim=-1) * (scale**2 / 2)


def _turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`states` [.., D], rotated by a model's cos and sin [.., D], whose halves are alike."""
    return rotated(states, *(part.chunk(2, dim=-1)[0] for part in (cos, sin)))


@dataclass
class Stored:
    """What there is of the units anchored in a layer, fetched when it is asked for.

    Attributes:
        storage: holds it.
        layer: its index.
        width: N.
        rows: of keys and values.
    """

    storage: "SlotStorage"
    layer: int
    width: int
    rows: slice = field(default_factory=lambda: slice(None))

    @cached_property
    def keys(self) -> Tensor:
        """[A, B, N, D] of the rows."""
        return self.storage.keys(self.layer)[:, self.rows]

    def __call__(self, name: str) -> Tensor:
        """As `Observation.stored`."""
        if name in ("keys", "values"):
            states = self.keys if name == "keys" else self.storage.values(self.layer)[:, self.rows, : self.width]
            return states.transpose(0, 1)
        heads = list(self.storage.tables[self.layer].heads)
        if name == "output":
            return self.storage.output(self.layer)[heads]
        return self.storage.decision.table[self.layer, heads].to(self.storage.rows.lengths.device)


class Seen(Observation):
    """What queries of a prefill attend to, computed when it is asked for; kernels add it up without the weights.

    Args:
        window: the queries.
        stored, positions: keys and values, and [B, A, N], in order of position.
        newest: [B].
    """

    def __init__(self, window: Window, stored: Stored, positions: Tensor, newest: Tensor) -> None:
        self.stored, self._moments = stored, window.moments
        self._given = window.queries, stored.keys, positions.transpose(0, 1), window.positions, window.scale
        self.positions, self.newest = positions, newest
        self.in_order, self.decoding = True, False
        self.asked = (window.positions >= 0).sum(dim=1)
        self._by_kernel = runs_triton(stored.keys)
        self._columns: tuple[Tensor | None, ...] = (None,)

    @cached_property
    def weights(self) -> Tensor:
        return attention_weights(*self._given).transpose(0, 1)

    def expected_logits(self, future: int) -> Tensor:
        return self._moments.expected_logits(self._given[1], self.newest, future, self._given[-1]).transpose(0, 1)

    @property
    def count(self) -> int:
        return self._given[0].shape[3]

    def sums(self) -> Tensor:
        return self._column(0) if self._by_kernel else super().sums()

    def _spread(self) -> Tensor:
        return self._column(1) if self._by_kernel else super()._spread()

    def entropies(self) -> Tensor:
        return self._column(2) if self._by_kernel else super().entropies()

    def _column(self, which: int) -> Tensor:
        from pod_kernels.triton.column_sums import column_statistics  # imports triton

        if which >= len(self._columns) or self._columns[which] is None:
            self._columns = column_statistics(*self._given, with_spread=which > 0)
        return self._columns[which].transpose(0, 1)


class Decision:
    """What one cache keeps.

    Args:
        config: the PoD model's config.
        method: the eviction method.
        storage: what is held.

    Attributes:
        windows: by layer with anchors, of the prefill that runs.
        table: what `Eviction.table` says of the model.

    Raises:
        ValueError: the budget is below what is always kept.
    """

    def __init__(self, config: PreTrainedConfig, method: Eviction, storage: "SlotStorage") -> None:
        self.method, self.storage, self.blocks = method, storage, config.blocks
        self._sums = method.scores_stay == "sum"
        self.last_layer = self.blocks.layout().last_layers
        self.groups, self.recent_size = config.num_attention_heads // config.num_key_value_heads, config.recent_size
        self.sinks = {unit: config.sink_size if last > unit[0] else 0 for unit, last in self.last_layer.items()}
        if method.per_layer:
            for layer, head in self.sinks:
                self.sinks[layer, head] = max(s for (other, _), s in self.sinks.items() if other == layer)
        most = max(self.sinks.values())
        if not method.is_share and method.budget < most + (protected := method.protected(self.groups)):
            raise ValueError(
                f"{type(method).__name__}: budget ({method.budget} tokens) is below the {most + protected} that "
                f"are always kept: {protected} last ones and {most} sinks of blocks of several layers. Raise "
                "budget, or convert the model with a smaller sink_size"
            )
        kind = config.rope_parameters["rope_type"]
        if method.moments_from is not None and kind in ("dynamic", "longrope"):
            raise ValueError(
                f"{type(method).__name__} turns queries to other positions, and with RoPE of the type {kind} angles "
                "change with the longest position in use: choose another method"
            )
        self.table = method.table(config)
        self.begin()

    @property
    def _runs(self) -> list[tuple[Eviction, slice]]:
        """The method as runs of rows have it."""
        return runs_of(self.method, self.storage.rows.budgets)

    def _scored(self, score: Callable[[Eviction, slice], Tensor]) -> Tensor:
        """[B, ..] what `score` says of each run of rows."""
        parts = [score(method, rows) for method, rows in self._runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def begin(self) -> None:
        """A prefill begins: forget what only the last one needed."""
        self.windows: dict[int, Window] = {}
        self._stages: list[Stage] = []  # see `Sharing`

    def seen(self, layer: int, q: Tensor, positions: Tensor, scale: float) -> Window:
        """Of a forward's queries [B, H, T, D] at [B, T] those that will be looked at; more are not grouped (copied)."""
        sees_all = self._sums or self.method.moments_from is not None
        last = q.shape[2] if sees_all else self._window
        queries = q[:, :, -last:].unflatten(1, (self.blocks.num_kv_heads, -1)).transpose(0, 1)
        anchors, index = self.storage.num_anchors[layer], self.storage.index(layer, q.device)
        queries = queries[:anchors] if index is None else queries[index[:anchors]]
        window, moments = self._window, None
        if (start := self.method.moments_from) is not None:
            moments = Moments.of(queries, positions, self.storage.rotary, start)
            queries, positions = queries[..., -window:, :], positions[:, -window:]
        return Window(queries, positions[:, -last:], scale, moments)

    def select_rows(self, rows: Tensor) -> None:
        """Keep the rows `rows` [n] int64, in that order."""
        self.windows = {layer: window.of_rows(rows) for layer, window in self.windows.items()}

    @property
    def _window(self) -> int:
        return max(self.method.observed, self.method.protected(self.groups) if self.method.has_preference else 0)

    # ------------------------------------------------------------------ a prefill

    def observe(self, layer: int, window: Window) -> None:
        """Add the chunk's attention to carried scores, and keep its last queries for the decision."""
        table = self.storage.tables[layer]
        if self._sums:
            held = table.positions()
            sees = Stored(self.storage, layer, held.shape[2]), held, window.positions[:, -1]
            table.add_scores(self._scored(lambda method, rows: _summed(method, *_of_rows(rows, window, *sees))))
        if layer in self.windows:
            before = self.windows[layer]
            queries = torch.cat([before.queries, window.queries], dim=3)
            positions = torch.cat([before.positions, window.positions], dim=1)
            moments = None if window.moments is None else before.moments + window.moments
            window = Window(queries, positions, window.scale, moments)
        window = window.part(slice(-self._window, None))
        # Copied: a view would keep the queries of the whole forward.
        window.queries = window.queries.clone()
        self.windows[layer] = window

    def of_slots(self, layer: int, newest: Tensor) -> None:
        """Score and allocate for the units anchored in a layer, of what is in its table: tokens up to `newest` [B]."""
        for earlier in self._stages:
            earlier.scores = earlier.candidates = None
            earlier.held = self.storage.tables[earlier.layer].held
        table, window, preferences = self.storage.tables[layer], self.windows[layer], []
        held = table.positions()
        stored, carried = Stored(self.storage, layer, held.shape[2]), table.carried() if self._sums else None

        def score(method: Eviction, rows: slice) -> Tensor:
            mine, *sees = _of_rows(rows, window, stored, held, newest)
            seen = None
            if self._sums:
                scores = carried[rows]
            else:
                seen = Seen(mine.part(slice(-method.observed, None)), *sees)
                scores = method.score(seen)
            if method.has_preference:
                last = method.protected(self.groups)
                if seen is None or last != method.observed:
                    seen = Seen(mine.part(slice(-last, None)), *sees)
                preferences.extend(method.preference(seen).tolist())
            return scores

        self._enter(layer, held, newest, self._scored(score), preferences or None)
        self._allocate(newest, "threshold")

    def _enter(
        self, layer: int, held: Tensor, newest: Tensor, scores: Tensor, preference: list[float] | None = None
    ) -> None:
        """A further stage, whose tokens at `held` [B, A, N] get their scores."""
        table = self.storage.tables[layer]
        table.held = np.array(table.live().tolist())
        if not self._sums:
            table.set_scores(scores)
        candidates = (held >= 0) & ~self._forced(layer, table.heads, held, newest)
        self._stages.append(Stage(layer, table.heads, table.held, scores, candidates, preference))

    def excess(self, layer: int, newest: Tensor, length: int) -> dict[Unit, Change]:
        """What is to stay of units whose last layer is at most `layer` and which hold more than they may.

        Args:
            layer: its index.
            newest: [B].
            length: the longest row.
        """
        changes = {}
        for anchor, table in self.storage.tables.items():
            over = [
                index
                for index, head in enumerate(table.heads)
                if self.last_layer[anchor, head] <= layer and table.over_target(index)
            ]
            if over:
                units = [(anchor, table.heads[index]) for index in over]
                changes |= zip(units, self.staying(anchor, over, newest, length), strict=True)
        return changes

    def staying(self, layer: int, places: Sequence[int], newest: Tensor, length: int) -> list[Change]:
        """What stays of units anchored in a layer, by their places, and in how many slots; see `excess`."""
        table, places = self.storage.tables[layer], list(places)
        heads, held = tuple(table.heads[place] for place in places), table.positions(places)
        counts = torch.tensor(table.targets[places], device=held.device).t()
        keep = kept(table.carried(places), held, self._forced(layer, heads, held, newest), counts)
        chosen = [Chosen.of(*unit) for unit in zip(keep.unbind(dim=1), held.unbind(dim=1), strict=True)]
        counts = np.stack([one.counts for one in chosen])
        return list(zip(chosen, self.storage.headroom.evicted(counts, table.budgets[places], length), strict=True))

    def _forced(self, layer: int, heads: tuple[int, ...], held: Tensor, newest: Tensor) -> Tensor:
        """[B, A, N] what is always kept: the last tokens, and sinks of units of several layers."""
        sinks = self.storage.on_device(tuple(self.sinks[layer, head] for head in heads), held.device)[:, None]
        runs = [(tuple(self._last(method, (layer, head)) for head in heads), rows) for method, rows in self._runs]
        each = sum((lasts * len(range(len(held))[rows]) for lasts, rows in runs), ())  # [B * A]
        last = max(each, default=0)
        if len(set(each)) > 1:
            last = self.storage.on_device(each, held.device).view(len(held), -1, 1)
        return (held >= 0) & ((held < sinks) | (held > newest[:, None, None] - last))

    def _last(self, method: Eviction, unit: Unit) -> int:
        """How many last tokens a block always keeps."""
        last = method.protected(self.groups)
        if self.last_layer[unit] == unit[0] or not method.recent_in_blocks:
            return last
        most = int(method.recent_in_blocks * (method.budget - self.sinks[unit]))
        return max(last, min(most, self.recent_size))

    def _allocate(self, newest: Tensor, spares: str) -> None:
        """Budgets and targets of all stages' units, as `Eviction.allocate` says.

        Args:
            newest: [B].
            spares: the method's number of tokens up to which a row is spared: the prefill leaves all of it.
        """
        seen, every, parts = (newest + 1).tolist(), [], []
        for method, rows in self._runs:
            always = {unit: sinks + self._last(method, unit) for unit, sinks in self.sinks.items()}
            spared = [count <= getattr(method, spares) for count in seen[rows]]
            stages = self._stages if len(self._runs) == 1 else [stage.of_rows(rows) for stage in self._stages]
            parts.append(method.allocate(Sharing(self.blocks, always, seen[rows], spared, stages)))
            every += spared
        for stage, counts in zip(self._stages, zip(*parts, strict=True), strict=True):
            table = self.storage.tables[stage.layer]
            table.budgets = stage.budgets = np.concatenate(counts, axis=1)
            table.targets = np.where(every, table.held, np.minimum(table.held, table.budgets))

    def of_all(self, scores: Mapping[int, Tensor], newest: Tensor) -> None:
        """Allocate for all units at once, by scores [B, A, N] of each layer with anchors, of tokens in their slots."""
        self.begin()
        for layer, mine in sorted(scores.items()):
            held = self.storage.tables[layer].positions()
            mine = torch.nn.functional.pad(mine, (0, held.shape[2] - mine.shape[2]))
            self._enter(layer, held, newest, mine)
        # Slots of different layers may be differently many.
        widest = max(stage.scores.shape[2] for stage in self._stages)
        for stage in self._stages:
            more = (0, widest - stage.scores.shape[2])
            stage.scores = torch.nn.functional.pad(stage.scores, more)
            stage.candidates = torch.nn.functional.pad(stage.candidates, more)
        self._allocate(newest, "budget")

    # ------------------------------------------------------------------ a step

    def evict(self, layer: int, weights: Tensor, newest: Tensor, evicts: bool, is_settled: bool) -> None:
        """Choose what a step gives up.

        Args:
            layer: its index.
            weights: [A, B, G, 1, N] of the newest query.
            newest: [B].
            evicts: the method does at this step; else only what it carries is added.
            is_settled: units were within their budgets before the newest token.
        """
        table = self.storage.tables[layer]
        held, weights = table.positions(), weights.transpose(0, 1)

        def score(method: Eviction, rows: slice) -> Tensor:
            stored = Stored(self.storage, layer, held.shape[2], rows)
            seen = Observation(weights[rows], held[rows], newest[rows], False, decoding=True, stored=stored)
            return method.score(seen)

        scores = self._scored(score)
        if self._sums:
            table.received = scores
        if self.method.scores_stay:
            scores = scores + table.carried()
        if not evicts:
            return
        forced = self._forced(layer, table.heads, held, newest)
        if table.budgets is None:  # the prefill broke off before anything was decided
            table.budgets = np.full(
                table.sizes.shape, self.storage.rows.budgets or min(self.method.budget, BEYOND_MEMORY)
            )
        budgets = self.storage.on_device(tuple(table.budgets.reshape(-1).tolist()), held.device)
        counts = budgets.view(table.budgets.shape).t()
        if is_settled and self.method.when == 1:
            over = (held >= 0).sum(dim=-1) > counts
            given_up = torch.arange(held.shape[2], device=held.device) == lowest(scores, held, forced)[..., None]
            table.evicted = (given_up & over[..., None]).transpose(0, 1)
        else:
            table.evicted = (~kept(scores, held, forced, counts) & (held >= 0)).transpose(0, 1)


def _of_rows(rows: slice, window: Window, stored: Stored, held: Tensor, newest: Tensor) -> tuple:
    """Of a window, and of what is stored, `held` [B, A, N] and `newest` [B] that it is looked at with, some rows."""
    return window.of_rows(rows), replace(stored, rows=rows), held[rows], newest[rows]


def _summed(method: Eviction, window: Window, stored: Stored, held: Tensor, newest: Tensor) -> Tensor:
    """Scores [B, A, N] that add up over queries, a few of these at a time."""
    count = window.positions.shape[1]
    chunk = max(1, min(count, MAX_LOGITS // max(1, window.queries.shape[:3].numel() * held.shape[2])))
    if runs_triton(stored.keys):
        chunk = count  # kernels hold a tile of the weights at a time
    total = torch.zeros(held.shape, dtype=torch.float32, device=held.device)
    for first in range(0, count, chunk):
        total += method.score(Seen(window.part(slice(first, first + chunk)), stored, held, newest))
    return total


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
