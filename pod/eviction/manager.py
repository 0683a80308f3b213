"""Storage of a cache that evicts by scores.

- A *unit* is one block of one KV head: its layers' values and its anchor's keys are of the same tokens. The anchor's
  attention decides for all of them. In a dense model a unit is one layer and KV head.
- Each unit has, per row, its own number of slots: what is kept and headroom for what will come, the tokens up to
  `max_length` where that is known, else nothing at first and an eighth whenever it is full. A layer's values are one
  tensor of all its heads' segments (`Segments.packed`), so are an anchor layer's keys, and the table beside them that
  says which position each slot holds. Where capacities agree, attention reads them as one rectangle.
- Other layers' own keys of proximal tokens (`near`) lie apart with their positions and slots: first those that are kept
  and still recent or sinks, later those of new tokens. A new one takes an empty place, else that of the oldest which is
  no sink, which by then is not recent any more. So a unit of N tokens has at most min(N, sinks + recent + crop_slack).
- A prefill in one forward into an empty cache never stores the prompt: the anchor layer scores and chooses, and of it
  and of each further layer of the block only what was chosen is copied. Where layers share a budget, the units of
  earlier layers shrink at once.
- Any other prefill (a further turn, chunks inside `cache.prefill()`) first adds its tokens to the slots. A unit is then
  evicted from after its last layer, or, inside `prefill()`, when that ends; queries of the window are kept until then.
- Evicting after a prefill packs anew, in order of position, and frees. Evicting at a step marks slots as empty and the
  next token is written there, so decoding allocates no storage, and slots are in no order.
- With quantization a layer's keys and values are at rest in fewer bits (`pod_kernels.quantized`) and are made full
  while the layer attends; capacities are then multiples of its groups. What an eviction repacks is quantised anew.
- `nbytes` counts keys, values, positions and (for methods that carry them) scores, capacity included.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from pod.blocks import LayerBlocks
from pod.eviction.base import Eviction, Observation, Sharing, Stage, kept, lowest
from pod_kernels import (
    PackedLayer,
    Quantization,
    QuantizedSegments,
    Segments,
    attention_weights,
    packed_attention,
    shared_score_attention,
)
from pod_kernels.backend import runs_triton
from pod_kernels.cached import MAX_LOGITS
from pod_kernels.quantized import quantized

Unit = tuple[int, int]  # anchor layer, KV head
NEAR = ("near_keys", "near_positions", "near_slots")


@dataclass
class Chosen:
    """Tokens of a unit that are stored: where they come from and where they go.

    Attributes:
        rows, sources, slots: [n] int64 each, ordered by row and position; slots count from each row's first.
        counts: tokens of each row.
    """

    rows: Tensor
    sources: Tensor
    slots: Tensor
    counts: list[int]

    @classmethod
    def of(cls, keep: Tensor, positions: Tensor) -> "Chosen":
        """What `keep` [B, N] says, in the order of `positions` [B, N]."""
        last = torch.iinfo(torch.long).max
        order = torch.where(keep, positions, last).argsort(dim=-1)
        counts = keep.sum(dim=-1)
        rows, slots = (torch.arange(keep.shape[1], device=keep.device) < counts[:, None]).nonzero(as_tuple=True)
        return cls(rows, order[rows, slots], slots, counts.tolist())


@dataclass
class Table:
    """The units anchored in one layer.

    Attributes:
        heads: their KV heads, in storage order.
        slots: [B, A] packed segments of positions, [S, 1] int32, -1 where a slot is empty; keys lie the same way.
        scores: the same of float32, where scores are needed later.
        held: [A][B] tokens of each; known only until a token is decoded.
        budgets: [A][B] what decoding keeps of each.
        targets: [A][B] what a prefill leaves of each, once decided.
        room: empty slots that every segment has at least.
        has_holes: slots are not in order of position.
        new_slots: [A, B, T] where the tokens of this forward are.
        condemned: [A, B, C] slots that are given up when this forward ends.
    """

    heads: tuple[int, ...]
    slots: Segments
    scores: Segments | None
    held: list[list[int]]
    budgets: list[list[int]]
    targets: list[list[int]] | None = None
    room: int = 0
    has_holes: bool = False
    new_slots: Tensor | None = None
    condemned: Tensor | None = None


@dataclass
class Window:
    """The last queries of a prefill's anchor heads, until they are looked at: [A, B, G, q, D] and [B, q]."""

    queries: Tensor
    positions: Tensor


@dataclass
class Layer(PackedLayer):
    """A layer's slots, and how many of its `near` places every row and head has empty at least."""

    near_room: int = 0


@dataclass
class Prefill:
    """What is known only while a prefill runs.

    Attributes:
        windows: of each layer with anchors.
        stages: see `Sharing`.
        chosen: of units whose later layers are still to come, what to copy of them.
    """

    windows: dict[int, Window] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)
    chosen: dict[Unit, Chosen] = field(default_factory=dict)


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
        self._columns: tuple[Tensor | None, ...] = (None,)

    @cached_property
    def weights(self) -> Tensor:
        return attention_weights(*self._given).transpose(0, 1)

    @property
    def count(self) -> int:
        return self._given[0].shape[3]

    def sums(self) -> Tensor:
        return self._column(0)

    def variances(self) -> Tensor:
        return self._column(1)

    def entropies(self) -> Tensor:
        return self._column(2)

    def _column(self, which: int) -> Tensor:
        from pod_kernels.column_sums import column_statistics  # imports triton

        if which >= len(self._columns) or self._columns[which] is None:
            self._columns = column_statistics(*self._given, with_spread=which > 0)
        return self._columns[which].transpose(0, 1)


class EvictingStorage:
    """Keys, values and positions of a `PodCache` with an eviction method; the cache calls what is public here.

    Args:
        config: the PoD model's config.
        method: the eviction method.
        orders: for each layer its KV heads in storage order, anchors first.
        num_anchors: of each layer.
        max_length: tokens that each row will reach, None when unknown.
        crop_slack: how many of the last tokens `crop` can take back.
        quantization: how keys and values are stored; None as they come.

    Raises:
        ValueError: the budget is below what is always kept.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        method: Eviction,
        orders: list[tuple[int, ...]],
        num_anchors: list[int],
        max_length: int | None,
        crop_slack: int,
        quantization: Quantization | None = None,
    ) -> None:
        self.config = config
        self.quantization = quantization
        self.method = method
        self.orders = orders
        self.num_anchors = num_anchors
        self.max_length = max_length
        self.blocks: LayerBlocks = config.blocks
        self.anchors = self.blocks.anchors.tolist()
        self.last_layer = {(row[g], g): layer for layer, row in enumerate(self.anchors) for g in range(len(row))}
        self.protected = method.protected_with(config.num_attention_heads // config.num_key_value_heads)
        self.evicts_at_steps = method.when > 0 and method.query_aware
        self.near_limit = config.sink_size + config.recent_size + (0 if self.evicts_at_steps else crop_slack)
        self.sinks = {unit: config.sink_size if last > unit[0] else 0 for unit, last in self.last_layer.items()}
        if method.per_layer:
            for layer, head in self.sinks:
                self.sinks[layer, head] = max(s for (other, _), s in self.sinks.items() if other == layer)
        self.in_prefill = False
        most = max(self.sinks.values())
        if method.budget < most + self.protected:
            raise ValueError(
                f"{type(method).__name__}: budget ({method.budget} tokens) is below the {most + self.protected} that "
                f"are always kept: {self.protected} last ones and {most} sinks of blocks of several layers. Raise "
                "budget, or convert the model with a smaller sink_size"
            )
        self.reset()

    def reset(self) -> None:
        """Forget all tokens and free the storage."""
        self.layers: list[Layer | None] = [None] * len(self.orders)
        self.attending: int | None = None  # the layer that is full, with quantization
        self.resting: dict[tuple[int, str], QuantizedSegments] = {}  # what it was made full from
        self.tables: dict[int, Table] = {}
        self.prefill = Prefill()
        self.step = None
        self.workspace: Tensor | None = None  # [H_kv, B, G, 1, W] float32, what anchors leave during one step
        self.is_frozen = False
        self.is_settled = False  # a step has evicted since the last prefill: every unit is within its budget
        self.decoded = 0
        self.added = 0  # columns since the last eviction: as many can be cropped

    # ------------------------------------------------------------------ what the cache asks

    def storages(self) -> list[Tensor]:
        """Every tensor that is kept between two forwards."""
        tensors = []
        for layer in filter(None, self.layers):
            tensors += [*layer.values.tensors(), *layer.keys.tensors()]
            tensors += [layer.near_keys, layer.near_positions, layer.near_slots]
        for table in self.tables.values():
            tensors += [table.slots.data] + ([] if table.scores is None else [table.scores.data])
        return tensors

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `restore` needs, between two forwards: tensors by name, and what else there is as JSON."""
        tensors, layers, tables = {}, [], {}
        for index, layer in enumerate(self.layers):
            layers.append({"sizes": layer.values.sizes, "near_room": layer.near_room})
            for name in ("values", "keys"):
                tensors |= getattr(layer, name).named(f"layers.{index}.{name}")
            tensors |= {f"layers.{index}.{name}": getattr(layer, name) for name in NEAR}
        for index, table in self.tables.items():
            tables[index] = {name: getattr(table, name) for name in ("heads", "held", "budgets", "room", "has_holes")}
            tensors[f"tables.{index}.slots"] = table.slots.data
            if table.scores is not None:
                tensors[f"tables.{index}.scores"] = table.scores.data
        flags = {name: getattr(self, name) for name in ("is_frozen", "is_settled", "decoded", "added")}
        return tensors, {"layers": layers, "tables": tables, "flags": flags}

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Become the storage whose `state` this is; this one is empty and of the same method and model."""
        for index, layer in enumerate(facts["layers"]):
            near = {name: tensors[f"layers.{index}.{name}"] for name in NEAR}
            batch, anchors, sizes = near["near_positions"].shape[1], self.num_anchors[index], layer["sizes"]
            self.layers[index] = Layer(
                order=self.orders[index],
                num_anchors=anchors,
                values=self._restored(f"layers.{index}.values", sizes, batch, tensors),
                keys=self._restored(f"layers.{index}.keys", sizes[:anchors], batch, tensors, is_key=True),
                sink_size=self.config.sink_size,
                recent_size=self.config.recent_size,
                near_room=layer["near_room"],
                **near,
            )
        for name, table in facts["tables"].items():
            sizes = facts["layers"][int(name)]["sizes"][: len(table["heads"])]
            scores = tensors.get(f"tables.{name}.scores")
            self.tables[int(name)] = Table(
                heads=tuple(table["heads"]),
                slots=_restored(sizes, batch, tensors[f"tables.{name}.slots"]),
                scores=None if scores is None else _restored(sizes, batch, scores),
                held=table["held"],
                budgets=table["budgets"],
                room=table["room"],
                has_holes=table["has_holes"],
            )
        for name, value in facts["flags"].items():
            setattr(self, name, value)

    def _restored(
        self, name: str, sizes: list[list[int]], batch: int, tensors: dict[str, Tensor], is_key: bool = False
    ) -> Segments | QuantizedSegments:
        if self.quantization is None:
            return _restored(sizes, batch, tensors[name])
        parts = {part: tensors[f"{name}.{part}"] for part in QuantizedSegments.NAMES}
        return QuantizedSegments(self.quantization, is_key, tuple(map(tuple, sizes)), batch, **parts)

    def positions(self, layer: int) -> Tensor:
        """[B, H_kv, n] int64 in ascending order, -1 behind them."""
        last = torch.iinfo(torch.long).max
        rows = []
        for head, anchor in enumerate(self.anchors[layer]):
            table = self.tables[anchor]
            index = table.heads.index(head)
            rows.append(table.slots.padded(-1)[index, ..., 0].long())
        widest = max(row.shape[1] for row in rows)
        rows = [torch.nn.functional.pad(row, (0, widest - row.shape[1]), value=-1) for row in rows]
        held = torch.stack(rows, dim=1)
        held = torch.where(held < 0, last, held).sort(dim=-1).values
        held = held[..., : int((held != last).sum(dim=-1).max())]
        return held.masked_fill(held == last, -1)

    def open_prefill(self) -> None:
        """The forwards up to `close_prefill` are one prefill."""
        self.in_prefill = True
        self.prefill = Prefill()

    def close_prefill(self, lengths: Tensor | None) -> None:
        """Evict after several forwards.

        Args:
            lengths: [B] tokens of each row so far; None when there was no forward.
        """
        self.in_prefill = False
        if not self.prefill.windows or lengths is None:
            return
        for layer in sorted(self.prefill.windows):
            self._decide(layer, lengths - 1)
            self._settle(len(self.layers) - 1, int(lengths.max()))
        self._end_prefill()

    def abandon_prefill(self) -> None:
        """A forward inside `prefill()` failed: nothing is evicted."""
        self.in_prefill = False
        self.prefill = Prefill()

    def begin(self, step) -> None:
        """Take note of what one forward adds (`pod.cache.Step`)."""
        if self.step is not None:  # a forward that failed left its tokens in some layers
            self.crop(self.step.before, 0)
            for table in self.tables.values():
                table.condemned = table.targets = None
        self.step = step
        self.count = step.positions.shape[1]
        self.is_direct = step.is_first and not self.in_prefill and not self.is_frozen
        self.is_decoding = self.count == 1 and not step.is_first and not self.in_prefill
        self.acts = not self.is_frozen and not self.is_decoding
        if not self.in_prefill:
            self.prefill = Prefill()

    def finish(self) -> None:
        """The forward is through all layers."""
        self.added += self.count
        if self.is_decoding:
            self._drop_condemned()
        elif self.acts and not self.in_prefill:
            self._end_prefill()
        for table in self.tables.values():
            table.new_slots = None
        self.step = None

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_distant: Tensor | None,
        k_distant: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Attend, and keep what the method says; arguments as `PodCache.attend`."""
        step = self.step
        self.scale = scale
        stored_k = self._ordered(k, layer)
        stored_v = self._ordered(v, layer)
        # Only the queries that will be looked at: grouping copies.
        last = self.count if self.method.carries else max(self.method.observed, self.method.preference_window)
        queries = self._grouped(q.detach()[:, :, -last:], layer)
        self._make_full(layer)
        if not self.is_direct:
            self._append(layer, queries, stored_k, stored_v)
        if step.is_first:
            out = shared_score_attention(
                q,
                k,
                v,
                q_distant,
                k_distant,
                sink_size=self.config.sink_size,
                recent_size=self.config.recent_size,
                scale=scale,
                lengths=None if step.even else (step.positions >= 0).sum(dim=1),
            )
        else:
            out = self._attend_slots(layer, q.detach(), stored_k, q_distant)
        if self.is_direct:
            self._store_chosen(layer, queries, stored_k, stored_v)
        elif not self.is_decoding:
            self._tidy_near(layer)
            if self.acts and not self.in_prefill and self.num_anchors[layer]:
                self._decide(layer, step.positions[:, -1])
        if self.acts and not self.in_prefill:
            self._settle(layer, step.length)
        self.attending = None
        self._put_to_rest(layer)
        return out

    def select_rows(self, rows: Tensor) -> None:
        """Keep the rows `rows` [n] int64, in that order."""
        chosen = rows.tolist()
        for layer in filter(None, self.layers):
            layer.values, layer.keys = _rows_of(layer.values, chosen), _rows_of(layer.keys, chosen)
            layer.near_keys, layer.near_positions, layer.near_slots = (
                near[:, rows] for near in (layer.near_keys, layer.near_positions, layer.near_slots)
            )
        for table in self.tables.values():
            table.slots = _rows_of(table.slots, chosen)
            table.scores = None if table.scores is None else _rows_of(table.scores, chosen)
            table.held = [[head[row] for row in chosen] for head in table.held]
            table.budgets = [[head[row] for row in chosen] for head in table.budgets]
        for window in self.prefill.windows.values():
            window.queries, window.positions = window.queries[:, rows], window.positions[rows]

    def check_crop(self, removed: int) -> None:
        """Refuse to take back what eviction has acted on.

        Raises:
            ValueError: the method evicts at every step, or the last eviction lies within the `removed` last tokens.
        """
        name = type(self.method).__name__
        if self.prefill.windows:
            raise ValueError("cannot take back tokens inside cache.prefill(): close it first")
        if self.evicts_at_steps:
            raise ValueError(f"{name} evicts while decoding: what it dropped for the last tokens cannot be taken back")
        if removed > self.added and self.is_frozen:
            raise ValueError(
                f"cannot take back {removed} tokens: they were in the prefill that {name} evicted from, {self.added} "
                "tokens ago. With an assistant_model, whose first drafts come with the prompt, run the prompt through "
                "the model with this cache before generate"
            )
        if removed > self.added:
            raise ValueError(
                f"cannot take back {removed} tokens: {name} evicted after the prefill, {self.added} tokens ago, with "
                "the others in view. For draft tokens make the method with query_aware=False, which evicts only once"
            )

    def crop(self, lengths: Tensor, removed: int) -> None:
        """Forget the positions from `lengths` [B] on."""
        self.added -= removed
        for table in self.tables.values():
            for (_, rows, _), held in _views(table.slots):
                held.masked_fill_(held >= lengths[rows, None], -1)
            table.room += removed
        for layer in filter(None, self.layers):
            layer.near_positions.masked_fill_(layer.near_positions >= lengths[:, None], -1)

    # ------------------------------------------------------------------ a prefill that never stores the prompt

    def _store_chosen(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Choose for the units anchored here, and copy what is chosen of all heads."""
        step, anchors = self.step, self.num_anchors[layer]
        batch = keys.shape[1]
        newest = step.positions[:, -1]
        if anchors:
            held = step.positions[:, None].expand(batch, anchors, -1)
            scores, preference = self._scored(queries, step.positions, keys[:anchors], held, newest)
            heads = self.orders[layer][:anchors]
            live = [(newest + 1).tolist()] * anchors
            forced = self._forced(layer, heads, held, newest)
            stage = Stage(layer, heads, live, scores, (held >= 0) & ~forced, preference)
            budgets = self._allocated(stage, newest)
            targets = self._targets(live, budgets, newest)
            keep = kept(scores, held, forced, _counts(targets, newest.device))
            sizes = []
            for index, head in enumerate(heads):
                chosen = Chosen.of(keep[:, index], step.positions)
                self.prefill.chosen[layer, head] = chosen
                sizes.append(self._sizes(chosen.counts, budgets[index], step.length))
            table = Table(
                heads,
                Segments.packed(sizes, batch, 1, dtype=torch.int32, device=keys.device, fill=-1),
                Segments.packed(sizes, batch, 1, dtype=torch.float32, device=keys.device),
                [self.prefill.chosen[layer, head].counts for head in heads],
                budgets,
            )
            for index, head in enumerate(heads):
                chosen = self.prefill.chosen[layer, head]
                _fill(table.slots, index, chosen, step.positions[chosen.rows, chosen.sources, None].int())
                _fill(table.scores, index, chosen, scores[chosen.rows, index, chosen.sources, None])
            self.tables[layer] = table
            self._count_room(table)
        units = [(self.anchors[layer][head], head) for head in self.orders[layer]]
        others = len(units) - anchors
        self.layers[layer] = stored = self._empty_layer(layer, keys, values)
        for place, unit in enumerate(units):
            chosen = self.prefill.chosen[unit]
            _fill(stored.values, place, chosen, values[place, chosen.rows, chosen.sources])
            if place < anchors:
                _fill(stored.keys, place, chosen, keys[place, chosen.rows, chosen.sources])
        if others:
            # Of what is kept and proximal to the next token, the own keys.
            slots = torch.full((others, *step.positions.shape), -1, device=keys.device)
            for index, unit in enumerate(units[anchors:]):
                chosen = self.prefill.chosen[unit]
                slots[index, chosen.rows, chosen.sources] = chosen.slots
            positions = step.positions.expand(others, -1, -1)
            self._pack_near(stored, keys[anchors:], positions, slots, newest, self.config.recent_size - 1)
        for unit in units:
            if self.last_layer[unit] == layer:
                del self.prefill.chosen[unit]

    # ------------------------------------------------------------------ decisions

    def _ordered(self, new: Tensor, layer: int) -> Tensor:
        """[B, H_kv, T, D] -> [H_kv, B, T, D] in storage order, a view where that is the order of the heads."""
        new, order = new.detach().transpose(0, 1), self.orders[layer]
        return new if order == tuple(range(len(order))) else new[list(order)]

    def _grouped(self, q: Tensor, layer: int) -> Tensor:
        """[B, H, T, D] -> the anchor heads' [A, B, G, T, D] in storage order."""
        heads = list(self.orders[layer][: self.num_anchors[layer]])
        return q.unflatten(1, (len(self.orders[layer]), -1)).transpose(0, 1)[heads]

    def _scored(
        self,
        queries: Tensor,
        positions: Tensor,
        keys: Tensor,
        held: Tensor,
        newest: Tensor,
        carried: Tensor | None = None,
    ) -> tuple[Tensor, list[float] | None]:
        """Scores [B, A, N] by a prefill's queries, and the layer's preference [B].

        Args:
            queries, positions: [A, B, G, T, D] and [B, T].
            keys, held: [A, B, N, D] and [B, A, N], in order of position.
            newest: [B].
            carried: scores that earlier queries, and these, have added up to.
        """

        def observation(count: int) -> Observation:
            return self._observation(queries[..., -count:, :], positions[:, -count:], keys, held, newest)

        method = self.method
        seen = None
        if method.carries:
            scores = carried if carried is not None else self._summed(queries, positions, keys, held, newest)
        else:
            seen = observation(method.observed)
            scores = method.score(seen)
        preference = None
        if method.preference_window:
            if seen is None or method.preference_window != method.observed:
                seen = observation(method.preference_window)
            preference = method.preference(seen).tolist()
        return scores, preference

    def _observation(
        self, queries: Tensor, positions: Tensor, keys: Tensor, held: Tensor, newest: Tensor
    ) -> Observation:
        if runs_triton(keys):
            return SeenByKernels(queries, positions, keys, held, newest, self.scale)
        weights = attention_weights(queries, keys, held.transpose(0, 1), positions, self.scale)
        return Observation(weights.transpose(0, 1), held, newest, in_order=True, decoding=False)

    def _summed(self, queries: Tensor, positions: Tensor, keys: Tensor, held: Tensor, newest: Tensor) -> Tensor:
        """Scores [B, A, N] that add up over queries, a few of these at a time."""
        count = queries.shape[3]
        chunk = max(1, min(count, MAX_LOGITS // max(1, queries.shape[:3].numel() * keys.shape[2])))
        if runs_triton(keys):
            chunk = count  # kernels hold a tile of the weights at a time
        total = torch.zeros(held.shape, dtype=torch.float32, device=keys.device)
        for first in range(0, count, chunk):
            part = slice(first, first + chunk)
            seen = self._observation(queries[..., part, :], positions[:, part], keys, held, newest)
            total += self.method.score(seen)
        return total

    def _forced(self, layer: int, heads: tuple[int, ...], held: Tensor, newest: Tensor) -> Tensor:
        """[B, A, N] what is always kept: the last tokens, and sinks of units of several layers."""
        sinks = held.new_tensor([self.sinks[layer, head] for head in heads])[:, None]
        return (held >= 0) & ((held < sinks) | (held > newest[:, None, None] - self.protected))

    def _allocated(self, stage: Stage, newest: Tensor) -> list[list[int]]:
        """Enter the stage; budgets [A][B] of its units, and new targets of those before it."""
        stages = self.prefill.stages
        for earlier in stages:
            earlier.scores = earlier.candidates = None
            earlier.held = self.tables[earlier.layer].held
        stages.append(stage)
        always = {unit: sinks + self.protected for unit, sinks in self.sinks.items()}
        budgets = self.method.allocate(Sharing(self.blocks, always, (newest + 1).tolist(), stages))
        for earlier, counts in zip(stages[:-1], budgets, strict=False):
            earlier.budgets = counts
            table = self.tables[earlier.layer]
            table.budgets = counts
            table.targets = self._targets(table.held, counts, newest)
        stage.budgets = budgets[-1]
        return budgets[-1]

    def _targets(self, held: list[list[int]], budgets: list[list[int]], newest: Tensor) -> list[list[int]]:
        """[A][B] tokens that the prefill leaves: all of a row that is not above the method's threshold."""
        spared = (newest < self.method.threshold).tolist()
        return [
            [have if spare else min(have, most) for have, most, spare in zip(*head, spared, strict=True)]
            for head in zip(held, budgets, strict=True)
        ]

    def _decide(self, layer: int, newest: Tensor) -> None:
        """Score and allocate for the units anchored in `layer`, whose tokens are in their slots."""
        table, stored = self.tables[layer], self.layers[layer]
        window = self.prefill.windows[layer]
        held = table.slots.padded(-1)[..., 0].transpose(0, 1).long()
        carried = table.scores.padded(0)[..., 0].transpose(0, 1) if self.method.carries else None
        scores, preference = self._scored(
            window.queries, window.positions, _full(stored.keys).padded(0), held, newest, carried
        )
        if not self.method.carries:
            table.scores = Segments.packed(table.slots.sizes, held.shape[0], 1, dtype=torch.float32, device=held.device)
            _add(table.scores, scores)
        table.held = (held >= 0).sum(dim=-1).t().tolist()
        candidates = (held >= 0) & ~self._forced(layer, table.heads, held, newest)
        table.budgets = self._allocated(Stage(layer, table.heads, table.held, scores, candidates, preference), newest)
        table.targets = self._targets(table.held, table.budgets, newest)
        self.newest = newest

    def _settle(self, layer: int, length: int) -> None:
        """Evict from the units whose last layer is at most `layer` and which hold more than they may."""
        changes = {}
        for anchor, table in self.tables.items():
            if table.targets is None:
                continue
            over = [
                index
                for index, head in enumerate(table.heads)
                if self.last_layer[anchor, head] <= layer
                and any(have > most for have, most in zip(table.held[index], table.targets[index], strict=True))
            ]
            if not over:
                continue
            heads = tuple(table.heads[index] for index in over)
            held = table.slots.padded(-1)[over][..., 0].transpose(0, 1).long()
            scores = table.scores.padded(0)[over][..., 0].transpose(0, 1)
            newest = self.step.positions[:, -1] if self.step is not None else self.newest
            forced = self._forced(anchor, heads, held, newest)
            counts = _counts([table.targets[index] for index in over], held.device)
            keep = kept(scores, held, forced, counts)
            for column, (index, head) in enumerate(zip(over, heads, strict=True)):
                chosen = Chosen.of(keep[:, column], held[:, column])
                changes[anchor, head] = chosen, self._sizes(chosen.counts, table.budgets[index], length)
        if changes:
            self._repack(changes, newest)

    def _end_prefill(self) -> None:
        """Forget what only a prefill needs."""
        self.prefill = Prefill()
        self.is_frozen = not self.method.query_aware
        self.is_settled = False
        self.decoded = self.added = 0
        for table in self.tables.values():
            table.targets = None
            if not (self.method.carries or self.method.lasting) or self.is_frozen:
                table.scores = None

    def _condemn(self, layer: int, weights: Tensor) -> None:
        """Choose what a step gives up, from the newest query's weights [A, B, G, 1, C]."""
        table, newest = self.tables[layer], self.step.positions[:, -1]
        held = table.slots.padded(-1)[..., 0].transpose(0, 1).long()
        seen = Observation(weights.transpose(0, 1), held, newest, in_order=False, decoding=True)
        scores = self.method.score(seen)
        if self.method.carries:
            _add(table.scores, scores)
            scores = table.scores.padded(0)[..., 0].transpose(0, 1)
        elif self.method.lasting:
            scores = scores + table.scores.padded(0)[..., 0].transpose(0, 1)
        if (self.decoded + 1) % self.method.when:
            return
        forced = self._forced(layer, table.heads, held, newest)
        counts = _counts(table.budgets, held.device)
        if self.is_settled and self.method.when == 1:
            over = (held >= 0).sum(dim=-1) > counts
            given_up = torch.arange(held.shape[2], device=held.device) == lowest(scores, held, forced)[..., None]
            table.condemned = (given_up & over[..., None]).transpose(0, 1)
        else:
            table.condemned = (~kept(scores, held, forced, counts) & (held >= 0)).transpose(0, 1)

    def _drop_condemned(self) -> None:
        """Mark slots that a step gives up as empty, and own keys that lie apart with them."""
        self.decoded += 1
        evicting = [table for table in self.tables.values() if table.condemned is not None]
        if not evicting:
            return
        for index, layer in enumerate(self.layers):
            for place, head in enumerate(layer.order[layer.num_anchors :]):
                table = self.tables[self.anchors[index][head]]
                condemned = table.condemned[table.heads.index(head)]
                gone = condemned.gather(1, layer.near_slots[place].long())
                layer.near_positions[place].masked_fill_(gone, -1)
        for table in evicting:
            for piece, held in _views(table.slots):
                held.masked_fill_(table.condemned[piece], -1)
            table.condemned = None
            table.has_holes = True
            self._count_room(table, at_budget=True)
        self.is_settled = True

    # ------------------------------------------------------------------ tokens into slots

    def _append(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Give the tokens of this forward slots, and write keys and values there."""
        step, anchors, count = self.step, self.num_anchors[layer], self.count
        if anchors:
            self._make_room(layer, keys)
        if count == 1 and runs_triton(values):
            self._append_one(layer, queries, keys, values)
            return
        if anchors:
            table = self.tables[layer]
            held = table.slots.padded(torch.iinfo(torch.int32).max)[..., 0]
            if count == 1:
                table.new_slots = held.argmin(dim=-1, keepdim=True)  # the first empty one
            else:
                rank = (step.positions >= 0).cumsum(dim=1) - 1
                live = (held >= 0).sum(dim=-1) if table.slots.is_rectangle else self._live(table)
                table.new_slots = live[..., None] + rank
            table.room -= count
        stored = self.layers[layer]
        if stored is None:
            stored = self.layers[layer] = self._empty_layer(layer, keys, values)
        units = [(self.tables[self.anchors[layer][head]], head) for head in self.orders[layer]]
        if len(units) == anchors:
            slots = self.tables[layer].new_slots
        else:
            slots = torch.stack([table.new_slots[table.heads.index(head)] for table, head in units])
        # A row of which only padding was seen gets its token's content, but not its position: the slot stays empty.
        real = None if step.even or count == 1 else step.positions >= 0
        _write(stored.values, slots, values, real)
        if anchors:
            table = self.tables[layer]
            _write(stored.keys, slots[:anchors], keys[:anchors], real)
            positions = step.positions.expand(anchors, -1, -1)[..., None].int()
            _write(table.slots, slots[:anchors], positions, real)
            if (self.method.carries or self.method.lasting) and table.scores is not None:
                _write(table.scores, slots[:anchors], torch.zeros_like(positions, dtype=torch.float32), real)
            if self.acts:
                self._look(layer, queries)
        if anchors < len(units):
            self._write_near(stored, keys[anchors:], slots[anchors:])

    def _append_one(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """The same of one token in each row, by one kernel."""
        from pod_kernels.update import append_packed  # imports triton

        anchors, order = self.num_anchors[layer], self.orders[layer]
        table, stored = self.tables.get(layer), self.layers[layer]
        if stored is None:
            stored = self.layers[layer] = self._empty_layer(layer, keys, values)
        slots = None
        if anchors < len(order):
            tables = [(self.tables[self.anchors[layer][head]], head) for head in order[anchors:]]
            slots = torch.stack([table.new_slots[table.heads.index(head)] for table, head in tables])
            self._make_near_room(stored)
            stored.near_room -= 1
        held = scores = None
        if anchors:
            held = table.slots
            scores = table.scores if self.method.carries or self.method.lasting else None
            table.room -= 1
        new_slots = append_packed(stored, held, scores, keys, values, self.step.positions, slots)
        if anchors:
            table.new_slots = new_slots
            if self.acts:
                self._look(layer, queries)

    def _look(self, layer: int, queries: Tensor) -> None:
        """Add the chunk's attention to carried scores, and keep its last queries for the decision."""
        table, stored = self.tables[layer], self.layers[layer]
        if self.method.carries:
            held = table.slots.padded(-1)[..., 0].transpose(0, 1).long()
            positions = self.step.positions
            more = self._summed(queries, positions, stored.keys.padded(0), held, positions[:, -1])
            _add(table.scores, more)
        last = max(self.method.observed, self.method.preference_window)
        window = Window(queries[..., -last:, :], self.step.positions[:, -last:])
        if layer in self.prefill.windows:
            before = self.prefill.windows[layer]
            window = Window(
                torch.cat([before.queries, window.queries], dim=3)[..., -last:, :],
                torch.cat([before.positions, window.positions], dim=1)[:, -last:],
            )
        # Copied: a view would keep the queries of the whole forward.
        self.prefill.windows[layer] = Window(window.queries.clone(), window.positions)

    def _write_near(self, stored: Layer, keys: Tensor, slots: Tensor) -> None:
        """Other heads' own keys [S, B, T, D]; several queries need old ones until they are through (`_tidy_near`)."""
        step = self.step
        positions = step.positions.expand(keys.shape[0], -1, -1)
        if self.count > 1:
            stored.near_keys = torch.cat([stored.near_keys, keys], dim=2)
            stored.near_positions = torch.cat([stored.near_positions, positions.int()], dim=2)
            stored.near_slots = torch.cat([stored.near_slots, slots.int()], dim=2)
            return
        self._make_near_room(stored)
        stored.near_room -= 1
        is_sink = (stored.near_positions >= 0) & (stored.near_positions < stored.sink_size)
        place = stored.near_positions.masked_fill(is_sink, torch.iinfo(torch.int32).max).argmin(dim=-1, keepdim=True)
        stored.near_positions.scatter_(2, place, positions.int())
        stored.near_slots.scatter_(2, place, slots.int())
        stored.near_keys.scatter_(2, place[..., None].expand(*place.shape, keys.shape[-1]), keys)

    def _make_near_room(self, stored: Layer) -> None:
        """A place for one token's own key, while there may be more of them."""
        if stored.near_room < 1 and stored.near_keys.shape[2] < self._near_bound(stored):
            near = stored.near_keys, stored.near_positions, stored.near_slots
            self._pack_near(stored, *near, self.step.before - 1, self._near_reach(), least=1)

    def _tidy_near(self, layer: int) -> None:
        """After several queries, keep the own keys that a later one can need."""
        stored = self.layers[layer]
        if stored.near_keys.shape[0] and self.count > 1:
            near = stored.near_keys, stored.near_positions, stored.near_slots
            self._pack_near(stored, *near, self.step.positions[:, -1], self._near_reach())

    def _near_reach(self) -> int:
        """How far behind the newest token own keys are kept, so that cropped ones need not be computed again."""
        return self.near_limit - self.config.sink_size - 1

    def _near_bound(self, stored: Layer) -> int:
        widest = max((max(head) for head in stored.values.sizes), default=0)
        return min(self.near_limit, widest)

    def _pack_near(
        self,
        stored: Layer,
        keys: Tensor,
        positions: Tensor,
        slots: Tensor,
        newest: Tensor,
        reach: int,
        least: int = 0,
    ) -> None:
        """Keep of own keys [S, B, M, D] the sinks and those at most `reach` behind the newest, and `least` places."""
        keep = (positions >= 0) & (slots >= 0)
        keep &= (positions < stored.sink_size) | (positions >= newest[:, None] - reach)
        most = int(keep.sum(dim=-1).max()) if keep.numel() else 0
        headroom = self._headroom(int(newest.max()) + 1)
        if headroom is None:
            # A method that evicts at every step never holds more than its budget: enough for that, once and for all.
            headroom = self.near_limit if self.evicts_at_steps else (most // 8 + 1) * least
        capacity = max(most + least, min(self._near_bound(stored), most + headroom))
        order = torch.where(keep, positions, torch.iinfo(positions.dtype).max).argsort(dim=-1, stable=True)
        order = order[..., :capacity]
        short = capacity - order.shape[-1]
        pad = torch.nn.functional.pad
        held = positions.gather(2, order).masked_fill(~keep.gather(2, order), -1)
        stored.near_positions = pad(held, (0, short), value=-1).int()
        stored.near_slots = pad(slots.gather(2, order).clamp(min=0), (0, short)).int()
        packed = keys.gather(2, order[..., None].expand(*order.shape, keys.shape[-1]))
        stored.near_keys = pad(packed, (0, 0, 0, short)).contiguous()
        stored.near_room = capacity - most

    def _attend_slots(self, layer: int, q: Tensor, keys: Tensor, q_distant: Tensor | None) -> Tensor:
        stored, step = self.layers[layer], self.step
        anchors = stored.num_anchors
        others = stored.order[anchors:]
        units = [(self.tables[self.anchors[layer][head]], head) for head in stored.order]
        uses_scores = self.count == 1 and self.config.share == "scores"
        distant_keys = ()
        if not uses_scores and others:
            q_distant = q if q_distant is None else q_distant.detach()
            distant_keys = tuple(
                (self.layers[self.anchors[layer][head]].keys, self.tables[self.anchors[layer][head]].heads.index(head))
                for head in others
            )
            if self.quantization is not None:
                distant_keys = tuple((keys.full(place), 0) for keys, place in distant_keys)
        condemns = bool(self.is_decoding and self.evicts_at_steps and anchors)
        result = packed_attention(
            q,
            stored,
            positions=step.positions,
            slot_positions=tuple((table.slots, table.heads.index(head)) for table, head in units),
            scores=self._scores(q, stored) if uses_scores else None,
            score_heads=tuple(head for head in stored.order[:anchors] if self.last_layer[layer, head] > layer),
            q_distant=q_distant,
            distant_keys=distant_keys,
            scale=self.scale,
            return_weights=condemns,
        )
        if not condemns:
            return result
        out, weights = result
        self._condemn(layer, weights)
        return out

    def _scores(self, q: Tensor, stored: Layer) -> Tensor:
        """The workspace, wide enough for this layer; what anchors before it have left stays."""
        heads, batch = len(stored.order), q.shape[0]
        old, width = self.workspace, max(map(max, stored.values.sizes))
        if old is None or old.shape[1] != batch or old.shape[-1] < width or old.device != q.device:
            shape = (heads, batch, q.shape[1] // heads, 1, width)
            self.workspace = torch.empty(shape, dtype=torch.float32, device=q.device)
            if old is not None and old.shape[1] == batch and old.device == q.device:
                self.workspace[..., : old.shape[-1]] = old
        return self.workspace

    # ------------------------------------------------------------------ sizes

    def _headroom(self, length: int) -> int | None:
        """Tokens still to come after `length`, None when unknown."""
        return None if self.max_length is None else max(0, self.max_length - length)

    def _sizes(self, counts: list[int], budgets: list[int], length: int) -> list[int]:
        """Slots of a unit's rows that hold `counts` tokens after `length` were seen."""
        headroom = self._headroom(length)
        if not self.evicts_at_steps:
            return [self._whole(count + (headroom or 0)) for count in counts]
        needed = [max(0, budget - count) + self.method.when for count, budget in zip(counts, budgets, strict=True)]
        return [
            count + (more if headroom is None else min(headroom, more))
            for count, more in zip(counts, needed, strict=True)
        ]

    def _whole(self, size: int) -> int:
        """Slots in whole groups, where these are quantised."""
        return size if self.quantization is None else self.quantization.rounded(size)

    def _count_room(self, table: Table, at_budget: bool = False) -> None:
        """Note how many empty slots every segment has; `at_budget`: none holds more than its budget."""
        held = table.budgets if at_budget else table.held
        spare = [
            size - have
            for sizes, counts in zip(table.slots.sizes, held, strict=True)
            for size, have in zip(sizes, counts, strict=True)
        ]
        table.room = max(table.room, min(spare)) if at_budget else min(spare)

    def _live(self, table: Table) -> Tensor:
        return (table.slots.padded(-1)[..., 0] >= 0).sum(dim=-1)

    def _make_room(self, layer: int, keys: Tensor) -> None:
        """Slots for the tokens of this forward; several need them in order of position."""
        table, count = self.tables.get(layer), self.count
        headroom = self._headroom(self.step.length)
        if table is None:
            heads = self.orders[layer][: self.num_anchors[layer]]
            batch = keys.shape[1]
            size = self._whole(count + (headroom or 0))
            sizes = [[size] * batch for _ in heads]
            table = self.tables[layer] = Table(
                heads,
                Segments.packed(sizes, batch, 1, dtype=torch.int32, device=keys.device, fill=-1),
                None,
                [[0] * batch for _ in heads],
                [[self.method.budget] * batch for _ in heads],
                room=size,
            )
            if self.method.carries:
                table.scores = Segments.packed(sizes, batch, 1, dtype=torch.float32, device=keys.device)
            return
        if table.room >= count and not (count > 1 and table.has_holes):
            return
        held = table.slots.padded(-1)[..., 0].long()
        changes = {}
        for index, head in enumerate(table.heads):
            chosen = Chosen.of(held[index] >= 0, held[index])
            more = count + (headroom or max(chosen.counts) // 8)
            changes[layer, head] = chosen, [self._whole(have + more) for have in chosen.counts]
        self._repack(changes, self.step.before - 1)

    def _empty_layer(self, layer: int, keys: Tensor, values: Tensor) -> Layer:
        """Slots for a layer whose units have theirs."""
        anchors, batch = self.num_anchors[layer], keys.shape[1]
        options = {"dtype": keys.dtype, "device": keys.device}
        others = len(self.orders[layer]) - anchors
        tables = [(self.tables[self.anchors[layer][head]], head) for head in self.orders[layer]]
        sizes = [table.slots.sizes[table.heads.index(head)] for table, head in tables]
        return Layer(
            order=self.orders[layer],
            num_anchors=anchors,
            values=Segments.packed(sizes, batch, values.shape[-1], **options),
            keys=Segments.packed(sizes[:anchors], batch, keys.shape[-1], **options),
            near_keys=keys.new_empty(others, batch, 0, keys.shape[-1]),
            near_positions=torch.empty(others, batch, 0, dtype=torch.int32, device=keys.device),
            near_slots=torch.empty(others, batch, 0, dtype=torch.int32, device=keys.device),
            sink_size=self.config.sink_size,
            recent_size=self.config.recent_size,
        )

    def _repack(self, changes: dict[Unit, tuple[Chosen, list[int]]], newest: Tensor) -> None:
        """Give units new slots: what was chosen of their tokens, in order, in as many slots as said.

        Args:
            newest: [B] the newest token that all of their layers have.
        """
        batch = len(next(iter(changes.values()))[1])
        for anchor in {anchor for anchor, _ in changes}:
            table = self.tables[anchor]
            by_place = {table.heads.index(head): change for (a, head), change in changes.items() if a == anchor}
            table.slots = _repacked(table.slots, by_place, batch, fill=-1)
            if table.scores is not None:
                table.scores = _repacked(table.scores, by_place, batch)
            self.layers[anchor].keys = _repacked(_full(self.layers[anchor].keys), by_place, batch)
            self._put_to_rest(anchor)
            for place, (chosen, _) in by_place.items():
                table.held[place] = chosen.counts
            if len(by_place) == len(table.heads):
                table.has_holes = False
            table.held = list(table.held)
            self._count_room(table)
        for index, layer in enumerate(self.layers):
            if layer is None:
                continue
            units = [(self.anchors[index][head], head) for head in layer.order]
            by_place = {place: changes[unit] for place, unit in enumerate(units) if unit in changes}
            if not by_place:
                continue
            layer.values = _repacked(_full(layer.values), by_place, batch)
            self._put_to_rest(index)
            if layer.near_keys.numel():
                self._relink(layer, units[layer.num_anchors :], newest)

    def _make_full(self, layer: int) -> None:
        """Keys and values of the layer at hand in full precision."""
        stored, self.attending, self.resting = self.layers[layer], layer, {}
        if self.quantization is not None and stored is not None:
            self.resting = {(layer, "values"): stored.values, (layer, "keys"): stored.keys}
            stored.values, stored.keys = _full(stored.values), _full(stored.keys)

    def _put_to_rest(self, layer: int) -> None:
        """Quantise what is full of a layer; of the one that attends only when it is through, and anew if repacked."""
        if self.quantization is None:
            return
        if self.attending == layer:
            self.resting = {}
            return
        stored = self.layers[layer]
        for name in ("values", "keys"):
            full = getattr(stored, name)
            if isinstance(full, QuantizedSegments):
                continue
            used = self._used(layer, len(full.sizes), full.data.device)
            rest = self.resting.pop((layer, name), None)
            if rest is None:
                rest = quantized(full, used, self.quantization, is_key=name == "keys")
            else:
                rest.absorb(full, used)
            setattr(stored, name, rest)

    def _used(self, layer: int, heads: int, device: torch.device) -> Tensor:
        """[heads * B] int64, slots in use of the layer's first heads in storage order."""
        live = {anchor: self._live(self.tables[anchor]) for anchor in set(self.anchors[layer])}
        used = [
            live[self.anchors[layer][head]][self.tables[self.anchors[layer][head]].heads.index(head)]
            for head in self.orders[layer][:heads]
        ]
        return torch.cat(used) if used else torch.zeros(0, dtype=torch.long, device=device)

    def _relink(self, layer: Layer, units: list[Unit], newest: Tensor) -> None:
        """Find the slots of own keys again, and drop those whose token is gone."""
        tables = [(self.tables[anchor], head) for anchor, head in units]
        rows = [table.slots.padded(-1)[table.heads.index(head), ..., 0].long() for table, head in tables]
        positions = layer.near_positions.long()
        # Tables of other heads may have tokens of this forward that `newest` leaves out, or lack the newest one.
        spare = max(int(positions.max()), *(int(row.max()) for row in rows)) + 1
        slots = torch.empty_like(positions)
        for place, row in enumerate(rows):
            found = torch.full((row.shape[0], spare + 1), -1, device=row.device)
            index = torch.arange(row.shape[1], device=row.device).expand(row.shape)
            found.scatter_(1, torch.where(row < 0, spare, row), index)
            found[:, spare] = -1
            slots[place] = found.gather(1, torch.where(positions[place] < 0, spare, positions[place]))
        reach = self._near_reach() if self.step is not None and not self.acts else self.config.recent_size - 1
        self._pack_near(layer, layer.near_keys, positions, slots, newest, reach)


def _full(segments: Segments | QuantizedSegments) -> Segments:
    return segments.full() if isinstance(segments, QuantizedSegments) else segments


def _counts(counts: list[list[int]], device: torch.device) -> Tensor:
    """[A][B] -> [B, A] int64."""
    return torch.tensor(counts, device=device).t()


def _views(segments: Segments) -> Iterator[tuple[tuple[slice, slice, slice], Tensor]]:
    """Views [h, b, C] of segments of single numbers, each with its place in the padded [H, B, N]."""
    for piece in segments.pieces(0):
        heads, rows = slice(piece.head, piece.head + piece.heads), slice(piece.row, piece.row + piece.rows)
        yield (heads, rows, slice(piece.capacity)), segments.view(piece)[..., 0]


def _restored(sizes: list[list[int]], batch: int, data: Tensor) -> Segments:
    segments = Segments.packed(sizes, batch, data.shape[1], dtype=data.dtype, device=data.device)
    segments.data.copy_(data)
    return segments


def _add(segments: Segments, more: Tensor) -> None:
    """Add [B, H, N] to segments of single numbers."""
    for place, view in _views(segments):
        view += more.transpose(0, 1)[place]


def _fill(segments: Segments, head: int, chosen: Chosen, data: Tensor) -> None:
    segments.data[segments.offsets[chosen.rows, head] + chosen.slots] = data


def _write(segments: Segments, slots: Tensor, new: Tensor, real: Tensor | None) -> None:
    """Put new [h, B, T, D] into the slots [h, B, T]; only where `real` [B, T] says, when given."""
    index = segments.offsets.t()[: new.shape[0], :, None] + slots
    if real is None:
        segments.data[index.flatten()] = new.flatten(0, 2)
    else:
        real = real.expand(index.shape)
        segments.data[index[real]] = new[real]


def _repacked(
    segments: Segments, changes: dict[int, tuple[Chosen, list[int]]], batch: int, fill: float = 0
) -> Segments:
    """The same segments with those of some heads chosen from and resized; the other heads' are copied whole."""
    sizes = [changes[head][1] if head in changes else old for head, old in enumerate(segments.sizes)]
    data = segments.data
    new = Segments.packed(sizes, batch, data.shape[1], dtype=data.dtype, device=data.device, fill=fill)
    for head in range(len(sizes)):
        if head in changes:
            chosen = changes[head][0]
            _fill(new, head, chosen, data[segments.offsets[chosen.rows, head] + chosen.sources])
        else:
            new.run(head).copy_(segments.run(head))
    return new


def _rows_of(segments: Segments, rows: list[int]) -> Segments:
    """The segments of some rows, in that order."""
    sizes = [[head[row] for row in rows] for head in segments.sizes]
    if isinstance(segments, QuantizedSegments):
        where = {"dtype": segments.open.dtype, "device": segments.open.device}
        spec, dim = segments.spec, segments.open.shape[-1]
        new = QuantizedSegments.allocate(spec, segments.is_key, sizes, len(rows), dim, **where)
        new.take(segments, rows)
        return new
    data = segments.data
    new = Segments.packed(sizes, len(rows), data.shape[1], dtype=data.dtype, device=data.device)
    for head in range(len(sizes)):
        if not rows:
            continue
        torch.cat([segments.run(head, row) for row in rows], out=new.run(head))
    return new
