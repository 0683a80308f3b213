"""Keys, values and positions of a cache that evicts, in the slots of its units.

- A *unit* is one block of one KV head: its layers' values and its anchor's keys are of the same tokens. In a dense
  model a unit is one layer and KV head.
- Each unit has, per row, its own number of slots: what is kept and headroom for what will come. A layer's values are
  one tensor of all its heads' segments (`Segments.packed`), so are an anchor layer's keys, and the table beside them
  that says which position each slot holds. Where capacities agree, attention reads them as one rectangle.
- Evicting after a prefill packs anew, in order of position, and frees. Evicting at a step marks slots as empty and the
  next token is written there, so decoding allocates no storage, and slots are in no order.
- The host counts how much room is left (`Table.room`, `Layer.near_room`), so that a step reads nothing back. Storage
  that grows for one token grows in all layers before the first of them attends: until it is full again, nothing moves.
- With quantization a layer's keys and values are at rest in fewer bits (`pod_kernels.quantized`) and are made full
  while the layer attends. What an eviction repacks is quantised anew. Where so few tokens are kept that this would
  take more bytes, they stay as they come.
- Keys, values, positions and (for methods that carry them) scores make up `nbytes`, capacity included.

Legend: B rows, H_kv KV heads, A units anchored in a layer, T tokens of a forward, D head dimension.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from pod.eviction.base import Eviction
from pod.eviction.headroom import Headroom
from pod.eviction.near import Layer
from pod.eviction.table import Table
from pod_kernels import Quantization, QuantizedSegments, Segments
from pod_kernels.backend import runs_triton
from pod_kernels.quantized import in_full, quantized
from pod_kernels.repacking import Change, Chosen, repacked
from pod_kernels.transfer import KeptOnDevice

Unit = tuple[int, int]  # anchor layer, KV head
NEAR = ("near_keys", "near_positions", "near_slots")


class Units:
    """What the units of one cache hold.

    Args:
        config: the PoD model's config.
        method: the eviction method.
        orders: for each layer its KV heads in storage order, anchors first.
        num_anchors: of each layer.
        headroom: how much is allocated.
        quantization: how keys and values are stored where it pays; None as they come.

    Attributes:
        layers: the slots of each layer; None before its first token.
        tables: by anchor layer.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        method: Eviction,
        orders: list[tuple[int, ...]],
        num_anchors: list[int],
        headroom: Headroom,
        quantization: Quantization | None,
    ) -> None:
        self.method, self.orders, self.num_anchors = method, orders, num_anchors
        self.headroom, self.quantization = headroom, quantization
        self.sink_size, self.recent_size = config.sink_size, config.recent_size
        self.anchors: list[list[int]] = config.blocks.anchors.tolist()
        self.layers: list[Layer | None] = [None] * len(orders)
        self.tables: dict[int, Table] = {}
        self.on_device = KeptOnDevice()
        self._attending: int | None = None  # the layer that is full, with quantization
        self._resting: dict[tuple[int, str], QuantizedSegments] = {}  # what it was made full from
        self._plain: dict[tuple[int, str], tuple] = {}  # sizes for which quantization does not pay

    def of(self, layer: int) -> list[Unit]:
        """The units of a layer's heads, in storage order."""
        return [(self.anchors[layer][head], head) for head in self.orders[layer]]

    def index(self, layer: int, device: torch.device) -> Tensor:
        """[H_kv] int64, the KV heads of a layer in storage order, where they can index without being copied there."""
        return self.on_device(self.orders[layer], device)

    def places(self, layer: int) -> list[tuple[Table, int]]:
        """Of each of a layer's heads, in storage order, its unit's table and place there."""
        return [(self.tables[anchor], self.tables[anchor].heads.index(head)) for anchor, head in self.of(layer)]

    def keys(self, layer: int) -> Tensor:
        """[A, B, N, D] of a layer's anchor heads, in full precision."""
        return in_full(self.layers[layer].keys).padded(0)

    def key(self, anchor: int, place: int) -> tuple[Segments, int]:
        """Segments of a unit's keys in full precision, and its head in them."""
        keys = self.layers[anchor].keys
        return (keys, place) if isinstance(keys, Segments) else (keys.full(place), 0)

    def positions(self, layer: int) -> Tensor:
        """[B, H_kv, n] int64 by head, in ascending order, -1 behind them."""
        last = torch.iinfo(torch.long).max
        rows = []
        for head, anchor in enumerate(self.anchors[layer]):
            table = self.tables[anchor]
            rows.append(table.positions([table.heads.index(head)])[:, 0])
        widest = max(row.shape[1] for row in rows)
        rows = [torch.nn.functional.pad(row, (0, widest - row.shape[1]), value=-1) for row in rows]
        held = torch.stack(rows, dim=1)
        held = torch.where(held < 0, last, held).sort(dim=-1).values
        held = held[..., : int((held != last).sum(dim=-1).max())]
        return held.masked_fill(held == last, -1)

    # ------------------------------------------------------------------ between two forwards

    def storages(self) -> list[Tensor]:
        """Every tensor that is kept between two forwards."""
        return list(self.state()[0].values())

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `restore` needs: tensors by name, and what else there is as JSON."""
        tensors, layers = {}, []
        for index, layer in enumerate(self.layers):
            if layer is None:
                continue
            layers.append({"sizes": layer.values.sizes, "near_room": layer.near_room})
            for name in ("values", "keys"):
                tensors |= getattr(layer, name).named(f"layers.{index}.{name}")
            tensors |= {f"layers.{index}.{name}": getattr(layer, name) for name in NEAR}
        for index, table in self.tables.items():
            tensors |= {f"tables.{index}.{name}": tensor for name, tensor in table.tensors().items()}
        return tensors, {"layers": layers, "tables": {index: table.facts() for index, table in self.tables.items()}}

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Become the units whose `state` this is; these are empty and of the same method and model."""
        for index, layer in enumerate(facts["layers"]):
            near = {name: tensors[f"layers.{index}.{name}"] for name in NEAR}
            batch, anchors, sizes = near["near_positions"].shape[1], self.num_anchors[index], layer["sizes"]
            values = self._restored(f"layers.{index}.values", sizes, batch, tensors)
            keys = self._restored(f"layers.{index}.keys", sizes[:anchors], batch, tensors, is_key=True)
            self.layers[index] = self._layer(index, values, keys, **near, near_room=layer["near_room"])
        for name, table in facts["tables"].items():
            sizes = facts["layers"][int(name)]["sizes"][: len(table["heads"])]
            slots, scores = tensors[f"tables.{name}.slots"], tensors.get(f"tables.{name}.scores")
            scores = None if scores is None else _restored(sizes, batch, scores)
            known = table | {"heads": tuple(table["heads"])}
            self.tables[int(name)] = Table(slots=_restored(sizes, batch, slots), scores=scores, **known)

    def _restored(
        self, name: str, sizes: list[list[int]], batch: int, tensors: dict[str, Tensor], is_key: bool = False
    ) -> Segments | QuantizedSegments:
        if f"{name}.codes" not in tensors:
            return _restored(sizes, batch, tensors[name])
        parts = {part: tensors[f"{name}.{part}"] for part in QuantizedSegments.NAMES}
        return QuantizedSegments(self.quantization, is_key, tuple(map(tuple, sizes)), batch, **parts)

    def select_rows(self, rows: Tensor) -> None:
        """Keep the rows `rows` [n] int64, in that order."""
        chosen = rows.tolist()
        for layer in filter(None, self.layers):
            layer.values, layer.keys = layer.values.of_rows(chosen), layer.keys.of_rows(chosen)
            for name in NEAR:
                setattr(layer, name, getattr(layer, name)[:, rows])
        self.tables = {anchor: table.of_rows(chosen) for anchor, table in self.tables.items()}

    def crop(self, lengths: Tensor, removed: int) -> None:
        """Forget the positions from `lengths` [B] on, `removed` of each row."""
        for table in self.tables.values():
            table.crop(lengths, removed)
        for layer in filter(None, self.layers):
            layer.near_positions.masked_fill_(layer.near_positions >= lengths[:, None], -1)

    # ------------------------------------------------------------------ tokens into slots

    def store(
        self, layer: int, keys: Tensor, values: Tensor, positions: Tensor, length: int, chosen: list[Chosen]
    ) -> None:
        """Copy what is chosen of a layer's first tokens.

        Args:
            layer: its index; the tables of its units are there.
            keys, values: [H_kv, B, T, D] in storage order.
            positions: [B, T].
            length: the longest row.
            chosen: of each head, in storage order.
        """
        anchors = self.num_anchors[layer]
        self.layers[layer] = stored = self._empty_layer(layer, keys, values)
        for place, one in enumerate(chosen):
            one.put(stored.values, place, values[place, one.rows, one.sources])
            if place < anchors:
                one.put(stored.keys, place, keys[place, one.rows, one.sources])
        if len(chosen) > anchors:
            # Of what is kept and proximal to the next token, the own keys.
            slots = torch.full((len(chosen) - anchors, *positions.shape), -1, device=keys.device)
            for own, one in zip(slots, chosen[anchors:], strict=True):
                own[one.rows, one.sources] = one.slots
            reach = self.recent_size - 1
            stored.pack_near(keys[anchors:], positions.expand(slots.shape), slots, positions[:, -1], reach, length)

    def append(self, layer: int, keys: Tensor, values: Tensor, step, reach: int | None) -> None:
        """Give the tokens of this forward slots, and write keys and values there.

        Args:
            layer: its index.
            keys, values: [H_kv, B, T, D] in storage order.
            step: what the forward adds (`pod.cache.Step`).
            reach: see `repack`.
        """
        anchors, count = self.num_anchors[layer], step.positions.shape[1]
        if anchors:
            self._make_room(layer, step, reach)
        if self.layers[layer] is None:
            self.layers[layer] = self._empty_layer(layer, keys, values)
        if count == 1 and not step.is_first and runs_triton(values):
            self._append_one(layer, keys, values, step)
            return
        stored, table = self.layers[layer], self.tables.get(layer)
        if anchors:
            if count == 1:
                held = table.slots.padded(torch.iinfo(torch.int32).max)[..., 0]
                table.new_slots = held.argmin(dim=-1, keepdim=True)  # the first empty one
            else:
                rank = (step.positions >= 0).cumsum(dim=1) - 1
                table.new_slots = table.live()[..., None] + rank
            table.room -= count
        others = self._new_slots(layer)
        # A row of which only padding was seen gets its token's content, but not its position: the slot stays empty.
        real = None if step.even or count == 1 else step.positions >= 0
        if others is None:
            slots = table.new_slots
        else:
            slots = torch.cat([table.new_slots, others]) if anchors else others
        stored.values.write(slots, values, real)
        if anchors:
            stored.keys.write(table.new_slots, keys[:anchors], real)
            positions = step.positions.expand(anchors, -1, -1)[..., None].int()
            table.slots.write(table.new_slots, positions, real)
            if self._scores_of_new(table) is not None:
                table.scores.write(table.new_slots, torch.zeros_like(positions, dtype=torch.float32), real)
        if others is not None:
            stored.add_near(keys[anchors:], step.positions, others)

    def _append_one(self, layer: int, keys: Tensor, values: Tensor, step) -> None:
        """The same of one token in each row, by one kernel."""
        from pod_kernels.update import append_packed  # imports triton

        stored, table, slots = self.layers[layer], self.tables.get(layer), self._new_slots(layer)
        if slots is not None:
            stored.near_room -= 1
        held = scores = None
        if table is not None:
            held, scores = table.slots, self._scores_of_new(table)
            table.room -= 1
        new_slots = append_packed(stored, held, scores, keys, values, step.positions, slots)
        if table is not None:
            table.new_slots = new_slots

    def _new_slots(self, layer: int) -> Tensor | None:
        """[S, B, T] where the anchors of a layer's other heads have put the forward's tokens; None if it has none."""
        others = self.places(layer)[self.num_anchors[layer] :]
        return torch.stack([table.new_slots[index] for table, index in others]) if others else None

    def _scores_of_new(self, table: Table) -> Segments | None:
        """Where new tokens get a score, which begins at 0."""
        return table.scores if self.method.carries or self.method.lasting else None

    def add_table(
        self, layer: int, positions: Tensor, length: int, chosen: list[Chosen], scores: Tensor, budgets: list[list[int]]
    ) -> None:
        """The table of a layer's units, which hold what is chosen of the first tokens.

        Args:
            layer: its index.
            positions: [B, T] of all tokens.
            length: the longest row.
            chosen: of each unit.
            scores: [B, A, T] of all tokens.
            budgets: [A][B] what decoding keeps.
        """
        counts = [one.counts for one in chosen]
        sizes = self.headroom.evicted(counts, budgets, length)
        table = self._new_table(layer, sizes, positions, counts, budgets, has_scores=True)
        for index, one in enumerate(chosen):
            one.put(table.slots, index, positions[one.rows, one.sources, None].int())
            one.put(table.scores, index, scores[one.rows, index, one.sources, None])

    @property
    def is_full(self) -> bool:
        """One more token in every row needs storage that is not there yet."""
        layers = filter(None, self.layers)
        return any(table.room < 1 for table in self.tables.values()) or any(layer.is_near_full for layer in layers)

    def rooms(self) -> list[int]:
        """What the host counts down with every token: the room of each table, and for own keys of each layer."""
        tables = [table.room for table in self.tables.values()]
        return tables + [layer.near_room for layer in self.layers if layer is not None and len(layer.near_keys)]

    def set_rooms(self, rooms: list[int]) -> None:
        """Put back what `rooms` said, of the same tables and layers."""
        left = iter(rooms)
        for table in self.tables.values():
            table.room = next(left)
        for layer in self.layers:
            if layer is not None and len(layer.near_keys):
                layer.near_room = next(left)

    def make_room_for_one(self, length: int) -> None:
        """Storage for one more token in every row, the longest of which gets `length`; in all layers at once."""
        if not self.is_full:
            return
        if any(table.room < 1 for table in self.tables.values()):
            self._grow(list(self.tables), 1, length)
        room = min(table.room for table in self.tables.values())
        for layer in filter(None, self.layers):
            layer.widen_near(room, length)

    def _make_room(self, layer: int, step, reach: int | None) -> None:
        """Slots for the tokens of this forward; several need them in order of position."""
        table, (batch, count) = self.tables.get(layer), step.positions.shape
        if table is None:
            anchors = self.num_anchors[layer]
            held = [[0] * batch for _ in range(anchors)]
            sizes = self.headroom.grown(held, count, step.length)
            has_scores = self.method.carries or self.method.lasting
            self._new_table(layer, sizes, step.positions, held, None, has_scores)
        elif count > 1 and table.has_holes:
            chosen = [Chosen.of(held >= 0, held) for held in table.positions().unbind(dim=1)]
            sizes = self.headroom.grown([one.counts for one in chosen], count, step.length)
            changes = zip(chosen, sizes, strict=True)
            changes = {(layer, head): change for head, change in zip(table.heads, changes, strict=True)}
            self.repack(changes, step.before - 1, reach, step.length)
        elif table.room < count:
            self._grow([layer], count, step.length)

    def _grow(self, anchors: list[int], count: int, length: int) -> None:
        """More slots for the units anchored in some layers; what they hold stays in the slots where it is."""
        tables = [self.tables[anchor] for anchor in anchors]
        held = torch.cat([table.live() for table in tables]).tolist()
        wanted = iter(zip(held, self.headroom.grown(held, count, length), strict=True))
        for anchor, table in zip(anchors, tables, strict=True):
            table.held, wider = map(list, zip(*islice(wanted, len(table.heads)), strict=True))
            sizes = [list(map(max, *pair)) for pair in zip(table.slots.sizes, wider, strict=True)]
            table.slots = table.slots.resized(sizes, fill=-1)
            if table.scores is not None:
                table.scores = table.scores.resized(sizes)
            self._resize(anchor, "keys", sizes)
            table.count_room()
        for index, layer in enumerate(self.layers):
            if layer is not None:
                self._resize(index, "values", [table.slots.sizes[place] for table, place in self.places(index)])

    def _resize(self, layer: int, name: str, sizes: list) -> None:
        """Give a layer's keys or values capacities that are no smaller, and what they were made full from."""
        segments, resting = getattr(self.layers[layer], name), self._resting.get((layer, name))
        if segments.sizes == tuple(map(tuple, sizes)):
            return
        setattr(self.layers[layer], name, segments.resized(sizes))
        if resting is not None:
            self._resting[layer, name] = resting.resized(sizes)

    def _new_table(
        self,
        layer: int,
        sizes: list[list[int]],
        like: Tensor,
        held: list[list[int]],
        budgets: list[list[int]] | None,
        has_scores: bool,
    ) -> Table:
        heads = self.orders[layer][: self.num_anchors[layer]]
        options = {"batch": like.shape[0], "dim": 1, "device": like.device}
        slots = Segments.packed(sizes, dtype=torch.int32, fill=-1, **options)
        scores = Segments.packed(sizes, dtype=torch.float32, **options) if has_scores else None
        table = self.tables[layer] = Table(heads, slots, scores, held, budgets)
        table.count_room()
        return table

    def _empty_layer(self, layer: int, keys: Tensor, values: Tensor) -> Layer:
        """Slots for a layer whose units have theirs."""
        anchors, batch = self.num_anchors[layer], keys.shape[1]
        options = {"dtype": keys.dtype, "device": keys.device}
        others = len(self.orders[layer]) - anchors
        sizes = [table.slots.sizes[index] for table, index in self.places(layer)]
        return self._layer(
            layer,
            values=Segments.packed(sizes, batch, values.shape[-1], **options),
            keys=Segments.packed(sizes[:anchors], batch, keys.shape[-1], **options),
            near_keys=keys.new_empty(others, batch, 0, keys.shape[-1]),
            near_positions=torch.empty(others, batch, 0, dtype=torch.int32, device=keys.device),
            near_slots=torch.empty(others, batch, 0, dtype=torch.int32, device=keys.device),
        )

    def _layer(self, layer: int, values: Segments, keys: Segments, **near: Any) -> Layer:
        known = {"sink_size": self.sink_size, "recent_size": self.recent_size, "headroom": self.headroom}
        return Layer(self.orders[layer], self.num_anchors[layer], values, keys, **near, **known)

    def tidy_near(self, layer: int, newest: Tensor, length: int) -> None:
        """After several queries, the last of them at `newest` [B], keep the own keys that a later one can need."""
        stored = self.layers[layer]
        if stored.near_keys.shape[0]:
            stored.tidy_near(newest, length)

    # ------------------------------------------------------------------ fewer tokens

    def repack(self, changes: dict[Unit, Change], newest: Tensor, reach: int | None, length: int) -> None:
        """Give units new slots: what was chosen of their tokens, in order, in as many slots as said.

        Args:
            changes: by unit.
            newest: [B] the newest token that all of their layers have.
            reach: how far behind it own keys are kept; None as far as they may be cropped.
            length: the longest row.
        """
        for anchor in {anchor for anchor, _ in changes}:
            table, layer = self.tables[anchor], self.layers[anchor]
            by_place = {table.heads.index(head): change for (a, head), change in changes.items() if a == anchor}
            table.slots = repacked(table.slots, by_place, fill=-1)
            if table.scores is not None:
                table.scores = repacked(table.scores, by_place)
            layer.keys = repacked(in_full(layer.keys), by_place)
            self._put_to_rest(anchor)
            for place, (chosen, _) in by_place.items():
                table.held[place] = chosen.counts
            if len(by_place) == len(table.heads):
                table.has_holes = False
            table.count_room()
        for index, layer in enumerate(self.layers):
            if layer is None:
                continue
            by_place = {place: changes[unit] for place, unit in enumerate(self.of(index)) if unit in changes}
            if not by_place:
                continue
            layer.values = repacked(in_full(layer.values), by_place)
            self._put_to_rest(index)
            if layer.near_keys.numel():
                places = self.places(index)[layer.num_anchors :]
                held = [table.positions([place])[:, 0] for table, place in places]
                layer.relink(held, newest, reach, length)

    def drop_condemned(self) -> bool:
        """Mark slots that a step gives up as empty, and own keys that lie apart with them; whether it gave up any."""
        evicting = [table for table in self.tables.values() if table.condemned is not None]
        if not evicting:
            return False
        for index, layer in enumerate(self.layers):
            for own, (table, place) in enumerate(self.places(index)[layer.num_anchors :]):
                gone = table.condemned[place].gather(1, layer.near_slots[own].long())
                layer.near_positions[own].masked_fill_(gone, -1)
        for table in evicting:
            table.drop_condemned()
        return True

    # ------------------------------------------------------------------ quantization

    @contextmanager
    def in_full(self, layer: int) -> Iterator[None]:
        """Keys and values of the layer at hand in full precision, and at rest again behind it."""
        stored, self._attending, self._resting = self.layers[layer], layer, {}
        if stored is not None:
            for name in ("values", "keys"):
                held = getattr(stored, name)
                if isinstance(held, QuantizedSegments):
                    self._resting[layer, name] = held
                    setattr(stored, name, held.full())
        yield
        self._attending = None
        self._put_to_rest(layer)

    def _put_to_rest(self, layer: int) -> None:
        """Quantise what is full of a layer; of the one that attends only when it is through, and anew if repacked."""
        if self.quantization is None:
            return
        if self._attending == layer:
            self._resting = {}
            return
        stored = self.layers[layer]
        for name in ("values", "keys"):
            full = getattr(stored, name)
            if isinstance(full, QuantizedSegments) or self._plain.get((layer, name)) is full.sizes:
                continue
            sizes, itemsize = [*chain(*full.sizes)], full.data.element_size()
            if not self.quantization.pays(sizes, full.data.shape[1], itemsize):
                self._plain[layer, name] = full.sizes
                continue
            used = self._used(layer, len(full.sizes), full.data.device)
            rest = self._resting.pop((layer, name), None)
            if rest is None:
                rest = quantized(full, used, self.quantization, is_key=name == "keys")
            else:
                rest.absorb(full, used)
            setattr(stored, name, rest)

    def _used(self, layer: int, heads: int, device: torch.device) -> Tensor:
        """[heads * B] int64, slots in use of the layer's first heads in storage order."""
        live = {anchor: self.tables[anchor].live() for anchor in set(self.anchors[layer])}
        used = [live[anchor][self.tables[anchor].heads.index(head)] for anchor, head in self.of(layer)[:heads]]
        return torch.cat(used) if used else torch.zeros(0, dtype=torch.long, device=device)


def _restored(sizes: list[list[int]], batch: int, data: Tensor) -> Segments:
    segments = Segments.packed(sizes, batch, data.shape[1], dtype=data.dtype, device=data.device)
    segments.data.copy_(data)
    return segments
