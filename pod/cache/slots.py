"""The storage of a cache's tokens: slots, whether tokens are dropped or not.

- Every layer has values; of its keys those of its anchor heads, and of the others the *own keys* of proximal tokens.
- Where nothing is evicted, slot = position, own keys lie in sinks and a ring of `recent_size + crop_slack` tokens, and
  with N tokens stored the bytes are exactly

      B * D * itemsize * sum over layers and KV heads of [ N + (N if anchor else min(N, sinks + recent + crop_slack)) ]

  Blocks of one layer make this the storage of a dense model. Under `share: kv` the anchor heads keep keys and values,
  the others nothing: 2 * B * D * itemsize * N bytes for each anchor head.
- With an eviction method each block has, per row, its own number of slots: what is kept and headroom for what will
  come. A table beside the anchors' keys says which position each slot holds. Evicting after a prefill packs anew, in
  order of position, and frees; evicting at a step marks slots as empty and the next token is written there.
- A prefill in one forward into an empty cache is then never stored: the anchor layer decides, and of it and of each
  further layer of the block only what was chosen is copied. Any other prefill (a further turn, chunks inside
  `cache.prefill()`) first adds its tokens to the slots; a block is evicted from after its last layer.
- Storage that grows for one token grows in all layers before the first of them attends: until it is full again,
  nothing moves.
- Heads that stream have no slots: their keys and values lie in `pod.cache.streams`, 2 * B * D * itemsize *
  min(N, sinks + recent + crop_slack) bytes for each, whatever is evicted from the others.
- Quantised, values and anchors' keys are at rest in fewer bits and are made full while their layer attends. With Quest
  the pages of keys lie beside them. With `value_pool` the values lie in CPU memory (`pod.cache.offload`).

Legend: B rows, H_kv KV heads, A anchor heads of a layer (stored first), S the others, T tokens of a forward, D head
dimension.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from pod.blocks import STREAMS, Unit
from pod.cache.keep import Decision, Window
from pod.cache.layer import COUNTS, FACTS, OWN, Headroom, Layer, Table
from pod.cache.offload import OffloadedValues
from pod.cache.storage import Anchors, Rotary, Rows, Step, Storage, broken_off, oldest_first, widened
from pod.cache.streams import Streams
from pod.eviction import Eviction, Method, ReadSelector
from pod.eviction.base import runs_of
from pod_kernels import (
    Quantization,
    QuantizedSegments,
    Segments,
    TriangleMix,
    cached_attention,
    paged_attention,
    shared_score_attention,
)
from pod_kernels.dispatch import runs_triton
from pod_kernels.segments import Change, Chosen, KeptOnDevice
from pod_kernels.triangle import triangle_attention

FLAGS = ("is_frozen", "is_settled", "is_waiting", "decoded", "added")


class SlotStorage(Storage):
    """Slots of every layer and KV head; arguments and attributes beside those of `Storage`:

    Args:
        tau: of early skip; None skips nothing.
        quantization: how values and distant keys are stored; None as they come.
        max_length: tokens that each row will reach, None when unknown.
        crop_slack: how many of the last tokens can be taken back.
        value_pool: tokens of each layer and head whose values are on the device, the others' are in CPU memory; None
            keeps all on the device.

    Attributes:
        policy: what evicts; None where everything is kept.
        selector: what chooses the pages that a decoded token reads; None reads all.
        sparse: which pairs of a prompt are left, in which layers; None: all.
        reads: decoded tokens read what it chooses; where it is there for drafts, they do so in `drafting` alone.
        on_device: what the host knows, where the tokens are.
        layers: what each layer holds; None before its first token.
        tables: by anchor layer.
        workspace: [H_kv, B, G, 1, W] float32, the scores that anchors leave during one step.

    Raises:
        ValueError: the budget is below what is always kept.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        rows: Rows,
        method: Method | None,
        tau: float | None,
        quantization: Quantization | None,
        max_length: int | None,
        crop_slack: int,
        value_pool: int | None = None,
    ) -> None:
        self.tau, self.quantization, self.crop_slack = tau, quantization, crop_slack
        self.value_pool = value_pool
        self.policy = method if isinstance(method, Eviction) else None
        self.selector = method if isinstance(method, ReadSelector) else None
        self.reads = self.selector is not None
        self.sparse: TriangleMix | None = None
        self.shares_kv = config.share == "kv"
        layout = config.blocks.layout()
        self.orders, self.num_anchors = layout.orders, layout.num_anchors
        if self.shares_kv:  # the other heads have nothing to store
            self.orders = tuple(order[:count] for order, count in zip(layout.orders, layout.num_anchors, strict=True))
        self.evicts_at_steps = self.policy is not None and method.when > 0 and method.query_aware
        most_own = config.sink_size + config.recent_size + (0 if self.evicts_at_steps else crop_slack)
        self.streams = layout.streams
        self._all_heads = tuple(range(config.num_key_value_heads))
        self.leaves_scores = any(layout.score_heads)
        self.headroom = Headroom(max_length, method.when if self.evicts_at_steps else 0, most_own)
        super().__init__(config, rows, method)

    def reset(self) -> None:
        super().reset()
        self.layers: list[Layer | None] = [None] * len(self.orders)
        self.tables: dict[int, Table] = {}
        self.workspace: Tensor | None = None
        self.on_device = KeptOnDevice()
        self.decision = None if self.policy is None else Decision(self.config, self.policy, self)
        self.prompt: tuple[Tensor, Tensor] | None = None  # anchors' keys and values that are decided on unstored
        self.chosen: dict[Unit, Chosen] = {}  # of blocks whose later layers are still to come, what to copy of them
        self.is_frozen = False
        self.is_waiting = False  # a prefill has evicted nothing, and `evict` is to
        self.is_settled = False  # a step has evicted since the last prefill: every block is within its budget
        self.count = 0  # tokens of the last forward, padding included
        self.decoded = 0
        self.added = 0  # columns since the last eviction: as many can be cropped

    def apart(self, rows: Rows, lends: bool = True) -> Storage:
        made = super().apart(rows, lends)
        made.is_waiting = False
        return made

    def lent(self) -> list[object]:
        if self.quantization is not None or not (self.policy is None or self.is_frozen):
            return []
        # Where tokens are only added, they go to slots that are empty, and those held are shared.
        values = [layer.values for _, layer in self._stored()]
        slots = [each.host if isinstance(each, OffloadedValues) else each for each in values]
        return [*slots, *(layer.keys for _, layer in self._stored()), self.workspace, self.on_device]

    # ------------------------------------------------------------------ what is held

    def storages(self) -> list[Tensor]:
        return list(self._tensors().values())

    def _tensors(self, used: int | None = None) -> dict[str, Tensor]:
        """By name; where slot = position only the first `used` tokens of each row, when told."""
        pages = None if used is None or self.selector is None else self.selector.pages(used)
        held = {f"layers.{index}": layer.tensors(used, pages) for index, layer in self._stored()}
        held |= {f"tables.{index}": table.tensors() for index, table in self.tables.items()}
        return {f"{whose}.{name}": tensor for whose, parts in held.items() for name, tensor in parts.items()}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        layers = [{"sizes": layer.values.sizes, "near_room": layer.room} for _, layer in self._stored()]
        tables = {index: {name: getattr(table, name) for name in FACTS} for index, table in self.tables.items()}
        used = None
        if self.policy is None and self.quantization is None:  # what is not used is not written
            used = self.rows.longest
            for facts in (*layers, *tables.values()):
                facts["sizes"] = np.full_like(facts["sizes"], used)
        flags = {name: getattr(self, name) for name in FLAGS}
        return self._tensors(used), {"layers": layers, "tables": tables, "flags": flags}

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        batch = len(self.rows.seen)
        for index, layer in enumerate(facts["layers"]):
            name, anchors = f"layers.{index}", self.num_anchors[index]
            sizes = np.array(layer["sizes"], dtype=np.int64).reshape(-1, batch)
            own = {part: tensors[f"{name}.{part}"] for part in OWN if f"{name}.{part}" in tensors}
            if self._offloads(index):
                tensors[f"{name}.values"] = tensors[f"{name}.values"].cpu()
            parts = {"values": sizes, "keys": sizes[:anchors]}
            if self.selector is not None:
                parts["pages"] = self.selector.pages(sizes[:anchors])
            parts = {part: self._restored(f"{name}.{part}", each, tensors) for part, each in parts.items()}
            streams = self._streams(tensors.get(f"{name}.streams"))
            self.layers[index] = self._layer(index, **parts, **own, room=layer["near_room"], streams=streams)
        for name, table in facts["tables"].items():
            table |= {part: None if table[part] is None else np.array(table[part]) for part in COUNTS}
            slots = None if self.policy is None else tensors[f"tables.{name}.slots"]
            for part, held in (("slots", slots), ("scores", tensors.get(f"tables.{name}.scores"))):
                table[part] = None if held is None else Segments.of(table["sizes"], batch, held)
            self.tables[int(name)] = Table(**table | {"heads": tuple(table["heads"])})
        for name, value in facts["flags"].items():
            setattr(self, name, value)
        if self.policy is None and self.tables and (self.headroom.max_length or 0) > self.rows.longest:
            self._grow(list(self.tables), 0, self.rows.longest)

    def _restored(self, name: str, sizes: np.ndarray, tensors: dict[str, Tensor]) -> Segments | QuantizedSegments:
        if f"{name}.codes" not in tensors:
            return Segments.of(sizes, sizes.shape[1], tensors[name])
        parts = {part: tensors[f"{name}.{part}"] for part in QuantizedSegments.NAMES}
        return QuantizedSegments(self.quantization, name.endswith("keys"), sizes, **parts)

    def positions(self, layer: int) -> Tensor:
        anchors, streams = self.layout.anchors[layer], self.layers[layer].streams
        column = torch.arange(self.rows.longest, device=self.rows.lengths.device)
        cropped = self.rows.most_columns - self.rows.columns
        kept = torch.where(column < self.rows.lengths[:, None], column, -1)
        rows = []
        for head, anchor in enumerate(anchors):
            if anchor == STREAMS:
                rows.append(streams.held(self.rows.lengths, cropped))
            elif self.policy is None:
                rows.append(kept)
            else:
                rows.append(self.tables[anchor].positions([self.layout.places[anchor, head]])[:, 0])
        held = oldest_first(torch.stack(widened(rows), dim=1))
        return held[..., : int((held >= 0).sum(dim=-1).max())]

    def _stored(self) -> list[tuple[int, Layer]]:
        return [(index, layer) for index, layer in enumerate(self.layers) if layer is not None]

    def _places(self, layer: int) -> list[tuple[Table, int]]:
        """Of each of a layer's heads, in storage order, its block's table and place there."""
        units = self.layout.units[layer][: len(self.orders[layer])]
        return [(self.tables[unit[0]], self.layout.places[unit]) for unit in units]

    def _sizes(self, layer: int) -> np.ndarray:
        """[H_kv, B] slots of a layer's heads, in storage order."""
        sizes = [table.sizes[place] for table, place in self._places(layer)]
        return np.array(sizes, dtype=np.int64).reshape(-1, len(self.rows.seen))

    # ------------------------------------------------------------------ between two forwards

    def index(self, layer: int, device: torch.device) -> Tensor | None:
        """[H_kv] int64, the KV heads that a layer stores in their order there; None: as they are."""
        order = self.orders[layer]
        return None if order == self._all_heads else self.on_device(order, device)

    def select_rows(self, rows: Tensor) -> None:
        for _, layer in self._stored():
            layer.select_rows(rows.to(layer.near_keys.device))
        self.tables = {anchor: table.of_rows(rows) for anchor, table in self.tables.items()}
        self.workspace = None
        if self.decision is not None:
            self.decision.select_rows(rows)

    @property
    def is_croppable(self) -> bool:
        return not self.evicts_at_steps

    def check_crop(self, removed: int) -> None:
        if self.policy is None:
            return
        name = type(self.policy).__name__
        if self.decision.windows:
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

    def crop(self, removed: int) -> None:
        lengths = self.rows.lengths
        self.added -= removed
        self._forget(lengths, removed)

    def _forget(self, lengths: Tensor, removed: int) -> None:
        """Mark the positions from `lengths` [B] on as empty; `removed` as `Table.crop`."""
        for table in self.tables.values():
            table.crop(lengths, removed)
        for _, layer in self._stored():
            if layer.near_positions is not None:
                layer.near_positions.masked_fill_(layer.near_positions >= lengths[:, None], -1)
            self._refresh_pages(layer, (lengths - 1).clamp(min=0), lengths, 1)

    def rollback(self) -> None:
        rows, step = self.rows, self.step
        most = max(rows.most_columns, rows.columns + self.count)
        # Rings keep the keys that are recent to `crop_slack` tokens before the newest, and to that one.
        has_rings = not self.shares_kv and not self.config.blocks.is_dense
        if has_rings and most - rows.columns > self.crop_slack + 1:
            raise broken_off()
        # A prefill adds to windows and scores, and evicts from the first blocks before the last have its tokens.
        if self.acts or self.quantization is not None:
            raise broken_off()
        self._forget(step.before, 0)
        for table in self.tables.values():
            table.room += 0 if table.new_slots is None else self.count
            table.new_slots = table.received = table.evicted = None
        if self.policy is None and self.tables:  # where slot = position, the layers after those that grew follow
            widest = max(int(table.sizes.max()) for table in self.tables.values())
            for anchor, table in self.tables.items():
                self._resize(anchor, np.full_like(table.sizes, widest))
            self._follow()
        rows.most_columns, self.step = most, None

    def expect(self, length: int | None) -> None:
        self.headroom.max_length = length

    # ------------------------------------------------------------------ CUDA graphs

    @property
    def repeats_steps(self) -> bool:
        """Whether a CUDA graph can repeat a step of decoding while nothing moves."""
        # A step that evicts is none like the next, a quantised layer is made full anew at every step, the host chooses
        # pages and the anchors' segments, and storage that is full moves.
        if self.evicts_at_steps or self.quantization is not None or self.selector is not None or self.shares_kv:
            return False
        return self.layers[0] is not None and not self._is_full and bool(self.by_kernels)

    def host_state(self) -> tuple:
        """What the host counts of the tokens stored."""
        return self.step, self.decoded, self.added, [part.room for part in self._counted()]

    def set_host_state(self, state: tuple) -> None:
        """Put back what `host_state` said."""
        self.step, self.decoded, self.added, rooms = state
        for part, room in zip(self._counted(), rooms, strict=True):
            part.room = room

    def advance(self) -> None:
        """Count one token more in every row, which a CUDA graph stores."""
        self.decoded += 1
        self.added += 1
        for part in self._counted():
            part.room -= 1

    def _counted(self) -> list[Table | Layer]:
        """What has room that the host counts down with every token: for blocks, and for own keys."""
        return [*self.tables.values(), *(layer for _, layer in self._stored())]

    # ------------------------------------------------------------------ one forward

    def mark_prefill(self, is_open: bool) -> None:
        super().mark_prefill(is_open)
        if self.decision is not None:
            self.decision.begin()

    def close_prefill(self) -> None:
        if self.has_share and self.rows.budgets is None and self.rows.columns:
            self.take_share(self.rows.seen)
        if self.decision is None or not self.decision.windows:
            return
        newest = self.rows.lengths - 1
        for layer in sorted(self.decision.windows):
            self.decision.of_slots(layer, newest)
            self._settle(len(self.layers) - 1, newest, self.rows.longest)
        self._end_prefill()

    def takes_anchors(self, count: int) -> bool:
        # One query with a cache reads the scores that its anchors left here. Keys and values that are shared are read
        # here by any number of queries.
        return (count > 1 and not self.shares_kv) or self.rows.columns == 0

    def begin(self, step: Step, inputs: Tensor, rotary: Rotary) -> None:
        if self.is_waiting:
            raise ValueError(
                f"{type(self.policy).__name__} has not evicted from the context yet: call pod.reconstruct(model, "
                "cache, input_ids, tokenizer) before anything follows it"
            )
        if self.sparse is not None and step.is_first and step.in_prefill:
            raise ValueError(
                "sparse_prefill needs the whole prompt in one forward, as its last queries see everything: leave out "
                "cache.prefill() and prefill_chunk_size, or sparse_prefill"
            )
        self.step, self.count = step, step.positions.shape[1]
        for index, layer in self._stored() if self.value_pool is not None else ():
            if self._offloads(index):
                layer.values.steps += 1
        if self.has_share and self.rows.budgets is None and not self.in_prefill:
            self.take_share([seen + new for seen, new in zip(step.seen, step.new, strict=True)])
        self.is_decoding = self.count == 1 and not step.is_first and not self.in_prefill
        self.acts = self.policy is not None and not self.is_frozen and not self.is_decoding
        if self.acts and self.policy.moments_from is not None:
            # Copied: a view would keep the embeddings of the whole prompt.
            self.rotary = partial(rotary, inputs[:, :1].detach().clone())
        self.is_direct = self.acts and step.is_first and not self.in_prefill
        if self.policy is not None and not self.in_prefill and not self.is_decoding:
            self.decision.begin()
        self.count_room()  # what a failed forward left is overwritten
        if self.count == 1 and not step.is_first and self._is_full:
            self._make_room_for_one()

    def count_room(self) -> None:
        """Where slot = position, what is behind the longest row is free: tokens that were cropped, rows that went."""
        if self.policy is None:
            for table in self.tables.values():
                table.room = int(table.sizes[0, 0]) - self.rows.longest
            for _, layer in self._stored():
                layer.room = layer.near_keys.shape[2] - self.rows.longest

    def finish(self) -> None:
        self.added += self.count
        if self.is_decoding:
            self.decoded += 1
            self.is_settled |= self._drop_evicted()
        elif self.acts and not self.in_prefill:
            self._end_prefill()
        for table in self.tables.values():
            if table.received is not None:
                table.add_scores(table.received)
            table.new_slots = table.received = None
        self.step = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, anchors: Anchors, scale: float) -> Tensor:
        if self.by_kernels is None:
            self.by_kernels = runs_triton(v)
        if self.step.positions.device != q.device:  # the layers of a model on several devices
            self.step = self.step.on(q.device)
            if self.layers[layer] is not None and self.layers[layer].near_keys.device != q.device:
                raise ValueError(
                    f"layer {layer} computes on {q.device}, and the cache holds its tokens on "
                    f"{self.layers[layer].near_keys.device}: call cache.reset() and feed the whole text again"
                )
        step, num_anchors, decision = self.step, self.num_anchors[layer], self.decision
        streams = self.streams[layer]
        acts = self.acts and num_anchors > 0
        seen = decision.seen(layer, q.detach(), step.positions, scale) if acts else None
        with nullcontext() if self.quantization is None else self._in_full(layer):
            known = None if self.is_direct else self.write(layer, k, v)
            if known is not None and acts:
                decision.observe(layer, seen)
            out = self._attended(layer, known, (q, k, v), anchors, scale)
            if self.is_direct:
                self._store_prompt(layer, k, v, seen)
            if streams:
                out = self._attend_streams(layer, q, k, v, out, scale)
            if not self.is_direct:
                if known is not self.layers[layer]:
                    self.layers[layer].keep_own(known, step)
                if acts and not self.in_prefill:
                    decision.of_slots(layer, step.positions[:, -1])
            if self.acts and not self.in_prefill:
                self._settle(layer, step.positions[:, -1], step.length)
        return out

    def _end_prefill(self) -> None:
        """Forget what only a prefill needs."""
        self.decision.begin()
        self.is_frozen, self.is_waiting = not self.policy.query_aware, self.policy.waits
        self.is_settled = False
        self.decoded = self.added = 0
        for table in self.tables.values():
            table.targets = None
            if self.policy.scores_stay is None or self.is_frozen:
                table.scores = None

    def evict(self, scores: Mapping[int, Tensor]) -> None:
        if not self.is_waiting:
            super().evict(scores)
        newest = self.rows.lengths - 1
        self.decision.of_all(scores, newest)
        self._settle(len(self.layers) - 1, newest, self.rows.longest)
        self._end_prefill()
        self.is_waiting = False

    # ------------------------------------------------------------------ tokens into slots

    def write(self, layer: int, k: Tensor, v: Tensor) -> Layer:
        """Give the tokens of this forward slots, and write keys and values there.

        Args:
            layer: its index.
            k, v: [B, H_kv, T, D] by head.

        Returns:
            The layer as the forward's queries see it. Several queries need own keys that the last ones push out, so
            those of new tokens are in `Layer.keep_own`'s hands afterwards.
        """
        step, anchors = self.step, self.num_anchors[layer]
        if self.layers[layer] is None or self.count > 1:  # for one token more there is room in all layers
            self._make_room(layer, k)
        stored, table = self.layers[layer], self.tables.get(layer)
        if not stored.order:  # its anchors' layers store all there is (`share: kv`)
            return stored
        is_step = self.count == 1 and not step.is_first
        if is_step and self.quantization is None and stored.pages is None and self.by_kernels:
            self._append_by_kernel(layer, k, v)
            return stored
        keys, values = self._ordered(k, layer), self._ordered(v, layer)
        real = None if step.even or self.count == 1 else step.real
        if table is not None:
            table.place(step, self.count)
            table.write(step, real)
            stored.keys.write(table.new_slots, keys[:anchors], real)
        slots = self._slots(layer, stored.values.is_rectangle)
        stored.values.write(slots, values, real)
        if self.selector is not None:
            after = torch.maximum(step.before, step.positions[:, -1] + 1)
            self._refresh_pages(stored, step.before, after, self.count)
        if anchors == len(stored.order):
            return stored
        if isinstance(slots, int) and self.policy is not None:
            slots = torch.full((len(stored.order), *step.positions.shape), slots, device=v.device)
        own_slots = None if self.policy is None else slots[anchors:]
        if is_step:
            stored.add_own(keys[anchors:], step, own_slots)
            return stored
        return stored.with_own(keys[anchors:], step, own_slots)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """`write` a layer's keys and values without attention."""
        with nullcontext() if self.quantization is None else self._in_full(layer):
            known = self.write(layer, k, v)
            if known is not self.layers[layer]:
                self.layers[layer].keep_own(known, self.step)
        if self.streams[layer]:
            places = self._stream_places(self.step.length)
            self.layers[layer].streams.write(self._streamed(layer, k, v), self.step, places)

    def _append_by_kernel(self, layer: int, k: Tensor, v: Tensor) -> None:
        """One token in each row, where slots hold any positions."""
        from pod_kernels.triton.update import append, append_packed  # imports triton

        stored, table, held, scores, slots = self.layers[layer], self.tables.get(layer), None, None, None
        if table is not None:
            held, scores = table.slots, table.scores
            table.room -= 1
            table.is_packed &= self.step.all_real
        stored.room -= 1
        if self.policy is None:
            if self.shares_kv and len(stored.order) < k.shape[1]:
                index = self.index(layer, k.device)
                k, v = k[:, index], v[:, index]
            append(stored, k.detach(), v.detach(), self.step.positions)
            return
        if stored.num_anchors < len(stored.order):
            slots = torch.stack([one.new_slots[place] for one, place in self._places(layer)[stored.num_anchors :]])
        keys, values = self._ordered(k, layer), self._ordered(v, layer)
        new_slots = append_packed(stored, held, scores, keys, values, self.step.positions, slots)
        if table is not None:
            table.new_slots = new_slots

    def _slots(self, layer: int, is_rectangle: bool) -> Tensor | int:
        """[H_kv, B, T] where this forward's tokens go in a layer's values, or the first slot of them everywhere.

        Heads that are no anchors follow theirs, which have chosen; `is_rectangle`: all have as many slots.
        """
        slots = [(one.new_slots, place) for one, place in self._places(layer)]
        first = slots[0][0]
        if self.policy is None or (is_rectangle and all(isinstance(new, int) and new == first for new, _ in slots)):
            return first
        alike = self.step.positions
        return torch.stack(
            [torch.full_like(alike, new) if isinstance(new, int) else new[place] for new, place in slots]
        )

    def _ordered(self, new: Tensor, layer: int) -> Tensor:
        """[B, H_kv, T, D] -> [H_kv, B, T, D] in storage order, a view where that is the order of the heads."""
        new, index = new.detach().transpose(0, 1), self.index(layer, new.device)
        return new if index is None else new[index]

    def _refresh_pages(self, layer: Layer, before: Tensor, after: Tensor, most: int) -> None:
        if layer.num_anchors and layer.pages is not None:
            self.selector.refresh(layer.pages.rectangle, layer.keys.rectangle, before, after, most)

    def draft_by(self, reader: ReadSelector | None) -> None:
        self.selector = reader
        for index, layer in self._stored():
            like, lengths = layer.values.data, self.rows.lengths
            layer.pages = None if reader is None else self._empty_pages(index, like.dtype, like.device)
            self._refresh_pages(layer, torch.zeros_like(lengths), lengths, self.rows.longest)

    # ------------------------------------------------------------------ attention to a filled cache

    def _attended(
        self,
        layer: int,
        known: Layer | None,
        new: tuple[Tensor, ...],
        anchors: Anchors,
        scale: float,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of a forward's queries, of its q, k and v, to all that `known` holds, and its LSE where told."""
        step = self.step
        if step.is_first:
            sizes = {"sink_size": self.config.sink_size, "recent_size": self.config.recent_size}
            sizes |= {"scale": scale, "lengths": step.counts}
            if self.sparse is not None and self.sparse.acts(layer, len(self.layers)):
                return triangle_attention(*new, *anchors, self.sparse, **sizes)
            windows = self.streams[layer]
            return shared_score_attention(*new, *anchors, **sizes, window_only=windows, return_lse=return_lse)
        if self.shares_kv:
            return self._attend_anchors(layer, new[0].detach(), scale, return_lse)
        return self._attend_slots(layer, known, new[0].detach(), anchors[0], scale, return_lse)

    def _attend_slots(
        self, layer: int, known: Layer, q: Tensor, q_distant: Tensor | None, scale: float, return_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of q [B, H, T, D] to what the layer and its anchors hold, and its LSE where told."""
        if not known.order:  # all of its heads stream
            return torch.zeros_like(q)
        step, anchors, units = self.step, known.num_anchors, self.layout.units[layer]
        is_single = self.count == 1
        uses_scores = is_single and self.config.share == "scores"
        distant_keys = () if uses_scores else tuple(self._anchor_keys(unit) for unit in units[anchors:])
        common = {
            "positions": step.positions,
            "scores": self._scores(q, known) if uses_scores and self.leaves_scores else None,
            "score_heads": self.layout.score_heads[layer],
            "distant_keys": distant_keys,
            "scale": scale,
        }
        if self.reads and is_single and not step.in_prefill:
            self._choose_pages(layer, q)
            if layer >= self.selector.dense_layers:
                return paged_attention(q, known, torch.stack([step.read[unit] for unit in units]), **common)
        if isinstance(known.values, OffloadedValues):
            known, values = copy(known), known.values.full()
            known.values = values
        tables = self._places(layer)
        rooms = {one.room for one, _ in tables}
        if self.policy is None:
            table, sees_all = None, is_single and step.even
        else:
            table = tuple((one.slots, place) for one, place in tables)
            # Kernels ask the device which slots are in use: a CUDA graph repeats what the host knew.
            is_known = is_single and len(rooms) == 1 and all(one.is_packed for one, _ in tables)
            sees_all = is_known and not self.by_kernels
        unused = rooms.pop() if table is None or sees_all else 0
        if q_distant is None or uses_scores:
            q_distant = q
        evicts_now = bool(self.is_decoding and self.evicts_at_steps and anchors)
        result = cached_attention(
            q,
            known,
            table=table,
            unused=unused,
            sees_all=sees_all,
            q_distant=q_distant.detach() if distant_keys else None,
            masks=step.masks,
            tau=None if step.in_prefill else self.tau,
            stats=self.stats,
            return_lse=return_lse,
            return_weights=evicts_now,
            by_kernels=self.by_kernels,
            **common,
        )
        if not evicts_now:
            return result
        out, weights = result
        evicts = (self.decoded + 1) % self.policy.when == 0
        self.decision.evict(layer, weights, step.positions[:, -1], evicts, self.is_settled)
        return out

    def _attend_anchors(self, layer: int, q: Tensor, scale: float, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of q [B, H, T, D] to the keys and values of the layer's anchors, which are stored (`share: kv`)."""
        step, parts, first = self.step, [], 0
        # Heads in a row with one anchor layer are stored side by side.
        for anchor, run in groupby(self.layout.anchors[layer]):
            stored, heads = self.layers[anchor], len(list(run))
            if heads < stored.num_anchors:
                stored = stored.part(self.orders[anchor].index(first), heads)
            parts.append(
                cached_attention(
                    q[:, first * self.groups : (first + heads) * self.groups],
                    stored,
                    positions=step.positions,
                    unused=self.tables[anchor].room,
                    sees_all=self.count == 1 and step.even,
                    by_kernels=self.by_kernels,
                    scale=scale,
                    masks=step.masks,
                    return_lse=return_lse,
                )
            )
            first += heads
        if return_lse:
            return tuple(torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _attend_streams(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float) -> Tensor:
        """Store keys and values of the layer's heads that stream; `out` [B, H, T, D] with theirs, if it is not."""
        held, step = self.layers[layer].streams, self.step
        new, places = self._streamed(layer, k, v), self._stream_places(step.length)
        if step.is_first:
            held.write(new, step, places)
            return out
        mine = self.on_device(self.streams[layer], k.device)
        asked, found = q.detach().unflatten(1, (k.shape[1], -1)), out.unflatten(1, (k.shape[1], -1))
        attended = held.attend(asked[:, mine].flatten(1, 2), new, step, places, scale)
        found[:, mine] = attended.unflatten(1, (len(mine), -1))
        return out

    def _streamed(self, layer: int, k: Tensor, v: Tensor) -> Tensor:
        """[2, W, B, T, D] keys and values of the layer's heads that stream, of [B, H_kv, T, D]."""
        mine = self.on_device(self.streams[layer], k.device)
        return torch.stack([x.detach()[:, mine].transpose(0, 1) for x in (k, v)])

    def _stream_places(self, length: int, more: int = 0) -> int:
        """Places for heads that stream, whose rows have `length` tokens, and get at least `more`."""
        most = self.headroom.most_near
        return self.headroom.near(min(length, most), most, length, more)

    def _streams(self, vectors: Tensor | None) -> Streams | None:
        sinks, recent = self.config.sink_size, self.config.recent_size
        return None if vectors is None else Streams(vectors, sinks, recent, self.headroom.most_near - sinks)

    def _scores(self, q: Tensor, known: Layer) -> Tensor:
        """The workspace, wide enough for this layer; what anchors before it have left stays."""
        shape = (known.kv_heads, q.shape[0], self.groups, q.shape[2])
        old, width = self.workspace, known.values.widest
        is_alike = old is not None and old.shape[:4] == shape and old.device == q.device
        if not is_alike or old.shape[-1] < width:
            self.workspace = torch.empty(*shape, width, dtype=torch.float32, device=q.device)
            if is_alike:
                self.workspace[..., : old.shape[-1]] = old
        return self.workspace

    def keys(self, layer: int) -> Tensor:
        """[A, B, N, D] of a layer's anchor heads, in full precision."""
        return self.layers[layer].keys.full().padded(0) if self.prompt is None else self.prompt[0]

    def values(self, layer: int) -> Tensor:
        """[A, B, N, D] of a layer's anchor heads, in full precision; N is that of `keys` or more."""
        if self.prompt is not None:
            return self.prompt[1]
        return self.layers[layer].values.full().padded(0)[: self.num_anchors[layer]]

    def output(self, layer: int) -> Tensor:
        """[H_kv, G, hidden, D] the query heads' parts of a layer's output projection.

        Raises:
            ValueError: it is not there as a matrix of numbers.
        """
        weight, dim = None if self.outputs is None else self.outputs(layer), self.config.head_dim
        heads = (self.config.num_key_value_heads, self.groups, dim)
        if weight is None or not weight.is_floating_point() or weight.shape[1] != np.prod(heads):
            raise ValueError(
                f"{type(self.policy).__name__} needs the weights of the output projection as they are, and those of "
                f"layer {layer} are quantised, split or not there: choose another method"
            )
        return weight.detach().unflatten(1, heads).permute(1, 2, 0, 3)

    def _anchor_keys(self, unit: Unit) -> tuple[Segments, int]:
        """Segments of a block's keys in full precision, and its head in them."""
        keys, place = self.layers[unit[0]].keys, self.layout.places[unit]
        return (keys, place) if isinstance(keys, Segments) else (keys.full(place), 0)

    def _choose_pages(self, layer: int, q: Tensor) -> None:
        """Note what the blocks anchored in `layer` read for the queries q [B, H, 1, D]."""
        stored, step = self.layers[layer], self.step
        anchors = stored.num_anchors
        if anchors:
            asked = stored.stored(q.unflatten(1, (stored.kv_heads, -1))[:, :, :, 0].transpose(0, 1))[:anchors]
            pages, used = stored.pages.rectangle, self.selector.pages(step.length)
            parts = [
                method.choose(asked[:, rows], pages[:, rows, :used], step.positions[rows])
                for method, rows in runs_of(self.selector, self.rows.budgets)
            ]
            # Several parts are rows whose shares of their prompts differ.
            read = parts[0] if len(parts) == 1 else torch.cat(widened(parts), dim=1)
            step.read.update({(layer, head): read[place] for place, head in enumerate(stored.order[:anchors])})
            self._fetch_values(layer)

    def _fetch_values(self, anchor: int) -> None:
        """Fetch what the blocks anchored in a layer read of values in CPU memory, for their later layers."""
        step = self.step
        for layer in range(anchor + 1, len(self.layers)):
            places = [place for place, unit in enumerate(self.layout.units[layer]) if unit[0] == anchor]
            if places and self._offloads(layer):
                read = torch.stack([step.read[self.layout.units[layer][place]] for place in places])
                # The query's own token comes when its layer does.
                self.layers[layer].values.fetch(places, read.masked_fill(read >= step.before[:, None], -1))

    # ------------------------------------------------------------------ what a prompt leaves

    def _store_prompt(self, layer: int, k: Tensor, v: Tensor, seen: Window | None) -> None:
        """Of a prompt that is not stored, copy what its blocks keep."""
        step, anchors, units = self.step, self.num_anchors[layer], self.layout.units[layer]
        keys, values, newest = self._ordered(k, layer), self._ordered(v, layer), step.positions[:, -1]
        if anchors:
            # As if it lay in slots, each token in that of its column.
            held = np.full((anchors, len(step.before)), self.count)
            table = self._new_table(layer, held, held)
            table.slots.write(0, step.to_be_stored.expand(anchors, -1, -1, -1), None)
            self.prompt = keys[:anchors], values[:anchors]
            self.decision.observe(layer, seen)
            self.decision.of_slots(layer, newest)
            self.prompt = None
            changes = self.decision.staying(layer, range(anchors), newest, step.length)
            table.repack(dict(enumerate(changes)))
            self.chosen |= zip(units[:anchors], (chosen for chosen, _ in changes), strict=True)
        self.layers[layer] = stored = self._empty_layer(layer, keys)
        for place, unit in enumerate(units):
            one = self.chosen[unit]
            one.put(stored.values, place, values[place, one.rows, one.sources])
            if place < anchors:
                one.put(stored.keys, place, keys[place, one.rows, one.sources])
        if len(units) > anchors:
            stored.near_keys = keys[anchors:]
            stored.near_positions = step.positions.expand(len(units) - anchors, -1, -1)
            self._relink(layer, newest, self.config.recent_size - 1, step.length)
        for unit in units:
            if self.layout.last_layers[unit] == layer:
                del self.chosen[unit]

    # ------------------------------------------------------------------ room

    @property
    def _is_full(self) -> bool:
        """One more token in every row needs storage that is not there yet."""
        is_own_full = any(layer.is_own_full for _, layer in self._stored())
        wanted = self.rows.longest + 1
        is_own_full |= any(layer.streams is not None and layer.streams.is_full(wanted) for _, layer in self._stored())
        return is_own_full or any(table.room < 1 for table in self.tables.values())

    def _make_room_for_one(self) -> None:
        """Storage for one more token in every row, in all layers at once."""
        if any(table.room < 1 for table in self.tables.values()):
            self._grow(list(self.tables), 1, self.step.length)
        room = min(table.room for table in self.tables.values())
        for _, layer in self._stored():
            layer.widen_own(room, self.step.length)
            if layer.streams is not None:
                layer.streams.widen(self._stream_places(self.step.length, room))

    def _make_room(self, layer: int, like: Tensor) -> None:
        """Slots for the tokens of this forward; several need them in order of position."""
        step, table, anchors = self.step, self.tables.get(layer), self.num_anchors[layer]
        count = self.count if self.policy is not None else max(1, step.length - self.rows.longest)
        if anchors and table is None:
            held = np.zeros((anchors, len(step.before)), dtype=np.int64)
            self._new_table(layer, self.headroom.grown(held, count, step.length), held)
        elif anchors and self.count > 1 and table.has_holes:
            chosen = [Chosen.of(held >= 0, held) for held in table.positions().unbind(dim=1)]
            sizes = self.headroom.grown(np.stack([one.counts for one in chosen]), count, step.length)
            changes = zip(chosen, sizes, strict=True)
            changes = {(layer, head): change for head, change in zip(table.heads, changes, strict=True)}
            self._repack(changes, step.before - 1, self.config.recent_size - 1 if self.acts else None, step.length)
        elif anchors and table.room < count:
            self._grow([layer], count, step.length)
        if self.layers[layer] is None:
            self.layers[layer] = self._empty_layer(layer, self._ordered(like, layer))

    def _grow(self, anchors: list[int], count: int, length: int) -> None:
        """More slots for the blocks anchored in some layers; what they hold stays in the slots where it is."""
        tables = [self.tables[anchor] for anchor in anchors]
        if self.policy is None:
            held = np.full((sum(len(table.heads) for table in tables), len(self.rows.seen)), self.rows.longest)
        else:
            held = np.array(torch.cat([table.live() for table in tables]).tolist())
        ends = np.cumsum([len(table.heads) for table in tables])[:-1]
        parts = (np.split(each, ends) for each in (held, self.headroom.grown(held, count, length)))
        for anchor, table, mine, wanted in zip(anchors, tables, *parts, strict=True):
            table.held = mine
            self._resize(anchor, np.maximum(table.sizes, wanted))
            table.count_room()
        self._follow()

    def _resize(self, anchor: int, sizes: np.ndarray) -> None:
        """Give the blocks anchored in a layer [A, B] slots, in its table and its keys."""
        table, layer = self.tables[anchor], self.layers[anchor]
        table.resize(sizes)
        layer.resize("keys", table.sizes)
        if self.selector is not None:
            layer.resize("pages", self.selector.pages(table.sizes))

    def _follow(self) -> None:
        """Give the values of all layers the slots that their blocks have."""
        for index, layer in self._stored():
            layer.resize("values", self._sizes(index))

    def _new_table(self, layer: int, sizes: np.ndarray, held: np.ndarray) -> Table:
        table = self.tables[layer] = Table(self.layout.orders[layer][: self.num_anchors[layer]], sizes, held)
        batch, device = sizes.shape[1], self.step.positions.device
        if self.policy is not None:
            table.slots = Segments.packed(sizes, batch, 1, dtype=torch.int32, fill=-1, device=device)
            if self.policy.scores_stay is not None:
                table.scores = Segments.packed(sizes, batch, 1, dtype=torch.float32, device=device)
        table.count_room()
        return table

    def _empty_layer(self, layer: int, like: Tensor) -> Layer:
        """Slots for a layer whose blocks have theirs."""
        anchors, heads, own, pages = self.num_anchors[layer], len(self.orders[layer]), {}, None
        batch, dim = like.shape[1], like.shape[3]
        options = {"dtype": like.dtype, "device": like.device}
        sizes = self._sizes(layer)
        places, length = 0, self.step.length
        if self.policy is None:
            if heads > anchors:
                places = self.headroom.near(min(length, self.headroom.most_near), int(sizes[0, 0]), length)
        else:
            empty = torch.empty(heads - anchors, batch, 0, dtype=torch.int32, device=like.device)
            own = {"near_positions": empty, "near_slots": empty}
        if self.selector is not None:
            pages = self._empty_pages(layer, **options)
        near_keys = like.new_zeros(heads - anchors, batch, places, dim)
        if self.streams[layer]:
            own["streams"] = self._streams(like.new_zeros(2, len(self.streams[layer]), batch, 0, dim))
        keys = Segments.packed(sizes[:anchors], batch, dim, **options)
        if self._offloads(layer):
            options["device"] = torch.device("cpu")
        values = Segments.packed(sizes, batch, dim, **options)
        return self._layer(layer, values=values, keys=keys, near_keys=near_keys, pages=pages, **own)

    def _offloads(self, layer: int) -> bool:
        """The layer's values are in CPU memory."""
        return self.value_pool is not None and layer >= self.selector.dense_layers

    def _empty_pages(self, layer: int, dtype: torch.dtype, device: torch.device) -> Segments:
        sizes = self.selector.pages(self._sizes(layer)[: self.num_anchors[layer]])
        width = self.selector.index_width(self.config.head_dim)
        return Segments.packed(sizes, sizes.shape[1], width, dtype=dtype, device=device)

    def _layer(self, layer: int, **parts: Any) -> Layer:
        # Under `share: kv` the anchors' heads are the layer's.
        order = tuple(range(self.num_anchors[layer])) if self.shares_kv else self.orders[layer]
        index = None if self.shares_kv else self.index(layer, parts["near_keys"].device)
        ring_size = self.config.recent_size + self.crop_slack if self.policy is None else 0
        known = {"sink_size": self.config.sink_size, "recent_size": self.config.recent_size, "ring_size": ring_size}
        known |= {"headroom": self.headroom, "quantization": self.quantization}
        known |= {"elsewhere": len(self.streams[layer])}
        if self._offloads(layer):
            parts["values"] = OffloadedValues.of(parts["values"], self.value_pool, parts["near_keys"].device)
        return Layer(order, self.num_anchors[layer], **parts, **known, index=index)

    # ------------------------------------------------------------------ fewer tokens

    def _settle(self, layer: int, newest: Tensor, length: int) -> None:
        """Evict from the blocks whose last layer is at most `layer` and which hold more than they may."""
        changes = self.decision.excess(layer, newest, length)
        if changes:
            self._repack(changes, newest, self.config.recent_size - 1, length)

    def _repack(self, changes: dict[Unit, Change], newest: Tensor, reach: int | None, length: int) -> None:
        """Give blocks new slots: what was chosen of their tokens, in order, in as many slots as said.

        Args:
            changes: by block.
            newest: [B] the newest token that all of their layers have.
            reach: how far behind it own keys are kept; None as far as they may be cropped.
            length: the longest row.
        """
        for anchor in {anchor for anchor, _ in changes}:
            table, layer = self.tables[anchor], self.layers[anchor]
            by_place = {table.heads.index(head): change for (a, head), change in changes.items() if a == anchor}
            table.repack(by_place)
            layer.repack("keys", by_place)
            self._quantize(anchor)
        for index, layer in self._stored():
            units = self.layout.units[index]
            by_place = {place: changes[unit] for place, unit in enumerate(units) if unit in changes}
            if not by_place:
                continue
            layer.repack("values", by_place)
            self._quantize(index)
            if layer.near_keys.numel():
                self._relink(index, newest, reach, length)

    def _relink(self, layer: int, newest: Tensor, reach: int | None, length: int) -> None:
        """Find own keys' slots again; arguments else as `_repack`."""
        places = self._places(layer)[self.num_anchors[layer] :]
        held = [table.positions([place])[:, 0] for table, place in places]
        self.layers[layer].relink_own(held, newest, reach, length)

    def _drop_evicted(self) -> bool:
        """Mark slots that a step gives up as empty, and own keys that lie apart with them; whether it gave up any."""
        evicting = [table for table in self.tables.values() if table.evicted is not None]
        if not evicting:
            return False
        for index, layer in self._stored():
            for own, (table, place) in enumerate(self._places(index)[layer.num_anchors :]):
                gone = table.evicted[place].gather(1, layer.near_slots[own].long())
                layer.near_positions[own].masked_fill_(gone, -1)
        for table in evicting:
            table.drop_evicted()
        return True

    # ------------------------------------------------------------------ quantization

    @contextmanager
    def _in_full(self, layer: int) -> Iterator[None]:
        """Keys and values of the layer at hand in full precision, and at rest again behind it."""
        if self.layers[layer] is not None:
            self.layers[layer].dequantize()
        yield
        self._quantize(layer, is_through=True)

    def _quantize(self, layer: int, is_through: bool = False) -> None:
        self.layers[layer].quantize(partial(self._used, layer), self.count, is_through)

    def _used(self, layer: int, heads: int) -> Tensor:
        """[heads * B] int64, slots in use of the layer's first heads in storage order."""
        if self.policy is None:
            return torch.maximum(self.step.before, self.step.positions[:, -1] + 1).repeat(heads)
        units = self.layout.units[layer][:heads]
        live = {anchor: self.tables[anchor].live() for anchor, _ in units}
        used = [live[unit[0]][self.layout.places[unit]] for unit in units]
        return torch.cat(used) if used else self.rows.lengths.new_zeros(0)
