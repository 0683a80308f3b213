"""Storage of a cache that evicts by scores: when it decides, and when what it decided is done.

- The anchor's attention decides for all layers of a block (`decision`); what is kept of them lies in `units`.
- A prefill in one forward into an empty cache never stores the prompt: the anchor layer scores and chooses, and of it
  and of each further layer of the block only what was chosen is copied. Where layers share a budget, the units of
  earlier layers shrink at once.
- Any other prefill (a further turn, chunks inside `cache.prefill()`) first adds its tokens to the slots. A unit is then
  evicted from after its last layer, or, inside `prefill()`, when that ends; queries of the window are kept until then.
- While decoding, what a step gives up is condemned by its anchor layer and dropped when the forward ends.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from pod.cache_rows import Rows
from pod.eviction.base import Eviction
from pod.eviction.decision import Decision
from pod.eviction.headroom import Headroom
from pod.eviction.near import Layer
from pod.eviction.units import Unit, Units
from pod_kernels import Quantization, packed_attention
from pod_kernels.backend import runs_triton
from pod_kernels.repacking import Chosen

FLAGS = ("is_frozen", "is_settled", "decoded", "added")


class EvictingStorage:
    """Keys, values and positions of a `PodCache` with an eviction method; the cache calls what is public here.

    Args:
        config: the PoD model's config.
        method: the eviction method.
        rows: what the cache counts of its rows.
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
        rows: Rows,
        orders: list[tuple[int, ...]],
        num_anchors: list[int],
        max_length: int | None,
        crop_slack: int,
        quantization: Quantization | None = None,
    ) -> None:
        self.config, self.method, self.rows = config, method, rows
        self.evicts_at_steps = method.when > 0 and method.query_aware
        most_near = config.sink_size + config.recent_size + (0 if self.evicts_at_steps else crop_slack)
        every = method.when if self.evicts_at_steps else 0
        self._layout = orders, num_anchors, Headroom(max_length, every, most_near), quantization
        self.in_prefill = False
        self.reset()

    def reset(self) -> None:
        """Forget all tokens and free the storage."""
        self.units = Units(self.config, self.method, *self._layout)
        self.decision = Decision(self.config, self.method, self.units, self.rows)
        self.chosen: dict[Unit, Chosen] = {}  # of units whose later layers are still to come, what to copy of them
        self.step = None
        self.workspace: Tensor | None = None  # [H_kv, B, G, 1, W] float32, what anchors leave during one step
        self.is_frozen = False
        self.is_settled = False  # a step has evicted since the last prefill: every unit is within its budget
        self.decoded = 0
        self.added = 0  # columns since the last eviction: as many can be cropped

    # ------------------------------------------------------------------ what the cache asks

    def storages(self) -> list[Tensor]:
        """Every tensor that is kept between two forwards."""
        return self.units.storages()

    def positions(self, layer: int) -> Tensor:
        """[B, H_kv, n] int64 in ascending order, -1 behind them."""
        return self.units.positions(layer)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `restore` needs, between two forwards: tensors by name, and what else there is as JSON."""
        tensors, facts = self.units.state()
        return tensors, facts | {"flags": {name: getattr(self, name) for name in FLAGS}}

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Become the storage whose `state` this is; this one is empty and of the same method and model."""
        self.units.restore(tensors, facts)
        for name, value in facts["flags"].items():
            setattr(self, name, value)

    @property
    def repeats_steps(self) -> bool:
        """Whether a CUDA graph can repeat a step of decoding while nothing moves."""
        # A step that evicts is none like the next, a quantised layer is made full anew at every step, and storage that
        # is full moves.
        if self.evicts_at_steps or self.units.quantization is not None or self.units.is_full:
            return False
        return runs_triton(self.units.layers[0].values.data)

    def host_state(self) -> tuple:
        """What the host counts of the tokens stored."""
        return self.step, self.decoded, self.added, self.units.rooms()

    def set_host_state(self, state: tuple) -> None:
        """Put back what `host_state` said."""
        self.step, self.decoded, self.added, rooms = state
        self.units.set_rooms(rooms)

    def advance(self) -> None:
        """Count one token more in every row, which a CUDA graph stores."""
        self.decoded += 1
        self.added += 1
        self.units.set_rooms([room - 1 for room in self.units.rooms()])

    def open_prefill(self) -> None:
        """The forwards up to `close_prefill` are one prefill."""
        self.in_prefill = True
        self.decision.begin()

    def close_prefill(self, lengths: Tensor | None) -> None:
        """Evict after several forwards.

        Args:
            lengths: [B] tokens of each row so far; None when there was no forward.
        """
        self.in_prefill = False
        if not self.decision.windows or lengths is None:
            return
        for layer in sorted(self.decision.windows):
            self.decision.of_slots(layer, lengths - 1)
            self._settle(len(self.units.layers) - 1, lengths - 1, int(lengths.max()))
        self._end_prefill()

    def abandon_prefill(self) -> None:
        """A forward inside `prefill()` failed: nothing is evicted."""
        self.in_prefill = False
        self.decision.begin()

    def begin(self, step) -> None:
        """Take note of what one forward adds (`pod.cache.Step`)."""
        self.step = step
        self.count = step.positions.shape[1]
        self.is_direct = step.is_first and not self.in_prefill and not self.is_frozen
        self.is_decoding = self.count == 1 and not step.is_first and not self.in_prefill
        self.acts = not self.is_frozen and not self.is_decoding
        if not self.in_prefill:
            self.decision.begin()
        if self.count == 1 and not step.is_first:
            self.units.make_room_for_one(step.length)

    def finish(self) -> None:
        """The forward is through all layers."""
        self.added += self.count
        if self.is_decoding:
            self.decoded += 1
            self.is_settled |= self.units.drop_condemned()
        elif self.acts and not self.in_prefill:
            self._end_prefill()
        for table in self.units.tables.values():
            if table.received is not None:
                table.add_scores(table.received)
            table.new_slots = table.received = None
        self.step = None

    def take_back(self, step) -> bool:
        """Forget a forward that broke off, whose tokens are in some layers; False where that cannot be."""
        # A prefill adds to windows and scores, and evicts from the first blocks before the last have its tokens.
        if self.acts or self.units.quantization is not None:
            return False
        self.units.crop(step.before, 0)
        for table in self.units.tables.values():
            table.room += 0 if table.new_slots is None else self.count
            table.new_slots = table.received = table.condemned = None
        self.step = None
        return True

    def expect(self, length: int | None) -> None:
        """Rows will reach so many tokens; None: that is not known."""
        self.units.headroom.max_length = length

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
        step, anchors = self.step, self.units.num_anchors[layer]
        newest = step.positions[:, -1]
        stored_k, stored_v = self._ordered(k, layer), self._ordered(v, layer)
        seen = self.decision.seen(layer, q.detach(), step.positions, scale) if self.acts and anchors else None
        with self.units.in_full(layer):
            if not self.is_direct:
                recent = self.config.recent_size - 1
                self.units.append(layer, stored_k, stored_v, step, reach=recent if self.acts else None)
                if self.acts and anchors:
                    self.decision.look(layer, seen)
            if step.is_first:
                out = step.attend_prompt(self.config, q, k, v, q_distant, k_distant, scale)
            else:
                out = self._attend_slots(layer, q.detach(), q_distant, scale)
            if self.is_direct:
                if anchors:
                    decided = self.decision.of_prompt(layer, seen, stored_k[:anchors], step.positions)
                    self.units.add_table(layer, step.positions, step.length, *decided)
                    self.chosen |= zip(self.units.of(layer)[:anchors], decided[0], strict=True)
                units = self.units.of(layer)
                chosen = [self.chosen[unit] for unit in units]
                self.units.store(layer, stored_k, stored_v, step.positions, step.length, chosen)
                for unit in units:
                    if self.decision.last_layer[unit] == layer:
                        del self.chosen[unit]
            elif not self.is_decoding:
                if self.count > 1:
                    self.units.tidy_near(layer, newest, step.length)
                if self.acts and not self.in_prefill and anchors:
                    self.decision.of_slots(layer, newest)
            if self.acts and not self.in_prefill:
                self._settle(layer, newest, step.length)
        return out

    def select_rows(self, rows: Tensor) -> None:
        """Keep the rows `rows` [n] int64, in that order."""
        self.units.select_rows(rows)
        self.decision.select_rows(rows)

    def check_crop(self, removed: int) -> None:
        """Refuse to take back what eviction has acted on.

        Raises:
            ValueError: the method evicts at every step, or the last eviction lies within the `removed` last tokens.
        """
        name = type(self.method).__name__
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

    def crop(self, lengths: Tensor, removed: int) -> None:
        """Forget the positions from `lengths` [B] on."""
        self.added -= removed
        self.units.crop(lengths, removed)

    # ------------------------------------------------------------------ parts of a forward

    def _ordered(self, new: Tensor, layer: int) -> Tensor:
        """[B, H_kv, T, D] -> [H_kv, B, T, D] in storage order, a view where that is the order of the heads."""
        new, order = new.detach().transpose(0, 1), self.units.orders[layer]
        return new if order == tuple(range(len(order))) else new[self.units.index(layer, new.device)]

    def _settle(self, layer: int, newest: Tensor, length: int) -> None:
        """Evict from the units whose last layer is at most `layer` and which hold more than they may."""
        changes = self.decision.excess(layer, newest, length)
        if changes:
            self.units.repack(changes, newest, self.config.recent_size - 1, length)

    def _end_prefill(self) -> None:
        """Forget what only a prefill needs."""
        self.decision.begin()
        self.is_frozen = not self.method.query_aware
        self.is_settled = False
        self.decoded = self.added = 0
        for table in self.units.tables.values():
            table.targets = None
            if not (self.method.carries or self.method.lasting) or self.is_frozen:
                table.scores = None

    def _attend_slots(self, layer: int, q: Tensor, q_distant: Tensor | None, scale: float) -> Tensor:
        stored, units, places = self.units.layers[layer], self.units.of(layer), self.units.places(layer)
        anchors = stored.num_anchors
        uses_scores = self.count == 1 and self.config.share == "scores"
        distant_keys = ()
        if not uses_scores and anchors < len(units):
            q_distant = q if q_distant is None else q_distant.detach()
            distant_keys = tuple(
                self.units.key(anchor, place)
                for (anchor, _), (_, place) in zip(units[anchors:], places[anchors:], strict=True)
            )
        condemns = bool(self.is_decoding and self.evicts_at_steps and anchors)
        result = packed_attention(
            q,
            stored,
            positions=self.step.positions,
            slot_positions=tuple((table.slots, place) for table, place in places),
            scores=self._scores(q, stored) if uses_scores else None,
            score_heads=tuple(head for head in stored.order[:anchors] if self.decision.last_layer[layer, head] > layer),
            q_distant=q_distant,
            distant_keys=distant_keys,
            scale=scale,
            return_weights=condemns,
        )
        if not condemns:
            return result
        out, weights = result
        evicts = (self.decoded + 1) % self.method.when == 0
        self.decision.condemn(layer, weights, self.step.positions[:, -1], evicts, self.is_settled)
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
