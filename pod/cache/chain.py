"""The storage of methods that keep tokens by their places: a fixed number of slots per KV head, sinks and sub-caches.

Inside PoD's blocks the anchor decides: a block of heads keeps one set of positions, in the same slots of every layer.
Its other layers hold the values of what is kept, and own keys of the sinks and of what is recent by its position in
the row; to the other tokens they attend with the anchor's keys.

Legend: B rows, H_kv KV heads, A anchor heads of a layer (stored first), G query heads per KV head, T tokens of a
forward, F slots in use, P slots in all, D head dimension.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from pod.cache.chain_step import ChainStep, OwnRing, Steps
from pod.cache.storage import Anchors, Pieces, Rotary, Rows, Step, Storage, oldest_first, strides
from pod.eviction import ChainPolicy
from pod_kernels import Segments
from pod_kernels.cascade import Cascades, CascadeState
from pod_kernels.dispatch import runs_triton
from pod_kernels.segments import on_device
from pod_kernels.slots import BlockAnchor, OwnKeys, put_own, rotated, rotated_pieces, slot_attention

PARTS = ("values", "keys", "own")


@dataclass
class OpenBlock:
    """What an anchor head leaves for the later layers of its block, during one forward.

    Attributes:
        anchor: its queries, keys or logits.
        positions: [B, F] the tokens in the slots, as the forward found them.
        ranks: [B, F] their places among the kept ones; None without rotation.
        slots: [B, T] where the new tokens go, -1 for nowhere; None while that is open (one query).
        keys: [B, T, D] its new keys, not stored yet: the block's layers still read what they will overwrite.
    """

    anchor: BlockAnchor
    positions: Tensor
    ranks: Tensor | None
    slots: Tensor | None
    keys: Tensor


@dataclass
class Pending:
    """One layer's new token until the forward ends.

    Attributes:
        keys, values: [H_kv, B, 1, D] in storage order, keys as they are stored.
        sums: [A, B, G, M] its anchor heads' attention; None without scores.
    """

    keys: Tensor
    values: Tensor
    sums: Tensor | None


@dataclass
class HeadOrder:
    """How one layer's heads are stored, [H_kv] on the device.

    Attributes:
        order: int64, the heads in storage order, anchors first.
        inverse: int64, from storage order back.
        units: int64, where their anchors are in the state of all layers, in storage order.
        ends: bool, in storage order, whether the head's block ends in this layer.
    """

    order: Tensor
    inverse: Tensor
    units: Tensor
    ends: Tensor


@dataclass
class ChainLayer:
    """What is stored of one layer; heads in storage order, anchors first.

    Attributes:
        values: [B, H_kv] segments of P slots.
        keys: [B, A] segments of P slots, the anchor heads'.
        own: [B, H_kv - A] segments of the other heads' own keys.
        state: which tokens the anchor heads' slots hold, a view of all layers' state; None without anchor heads.
    """

    values: Segments
    keys: Segments
    own: Segments
    state: CascadeState | None


class ChainStorage(Storage):
    """Sinks and sub-caches of fixed size; memory does not grow with the tokens seen. Arguments as `Storage`.

    A single token is stored when the forward ends, for all layers at once: on a device most of an update's time is
    that of starting its operations. Several tokens are stored layer by layer, so that not all of them have to be held.

    Raises:
        ValueError: the method and the model do not go together.
    """

    is_fixed = True

    def __init__(self, config: PreTrainedConfig, rows: Rows, method: ChainPolicy) -> None:
        self.chain = chain = method.chain(config)
        self.rotates = chain.rotates
        self.cascades = Cascades(chain.sinks, chain.tokens, chain.num_cascades)
        layout = config.blocks.layout()
        self._anchors, self._orders = layout.anchors, layout.orders
        self._num_anchors, self._ends = layout.num_anchors, layout.ends
        self._first_units = [0, *accumulate(self._num_anchors)]
        self._head_orders: list[HeadOrder] = []  # made where the storage is
        self._ring = OwnRing(config.sink_size, config.recent_size, self.cascades.slots)
        super().__init__(config, rows, method)

    # ------------------------------------------------------------------ one forward of the model

    def pieces(self, mask: Tensor | None, count: int, device: torch.device) -> Pieces:
        return strides(mask, count, [self.method.at_once], device)

    def begin(self, step: Step, inputs: Tensor, rotary: Rotary) -> None:
        held = self._state.positions[0] if self._layers else None
        self.step, self._step = step, self._steps.of(step, inputs, held, rotary)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, anchors: Anchors, scale: float) -> Tensor:
        step, order, num_anchors = self._step, self._orders[layer], self._num_anchors[layer]
        if self.by_kernels is None:
            self.by_kernels = runs_triton(v)
        if not self._layers:
            self._allocate_all(v)
        stored = self._layers[layer]
        placed = self._head_orders[layer]
        q = q.detach().unflatten(1, (len(order), -1)).transpose(0, 1)[placed.order]  # [H_kv, B, G, T, D], as stored
        new_k, v = (states.detach().transpose(0, 1)[placed.order] for states in (k, v))
        blocks = [self._open[self._anchors[layer][head], head] for head in order[num_anchors:]]
        k, far, capped = new_k, None, (None, None)
        if step.sinks is not None:
            far = rotated(q, *(part[step.sinks.ceiling] for part in step.table))
            proximal = self.config.sink_size, self.config.recent_size
            of_own = self._ring.sinks(self.cascades.sinks, far.device), proximal
            capped = (
                step.sinks.capped(far[:num_anchors], stored.keys, new_k[:num_anchors]) if num_anchors else None,
                step.sinks.capped(far[num_anchors:], stored.own, new_k[num_anchors:], *of_own) if blocks else None,
            )
        if self.rotates:
            cos, sin = step.angles
            q, k = rotated(q, cos[:, None], sin[:, None]), rotated(new_k, cos, sin)

        goes_on = [place for place in range(num_anchors) if not self._ends[layer][order[place]]]
        keeps_logits = bool(goes_on) and q.shape[3] == 1 and self.config.share == "scores"
        ranks = None
        if num_anchors and self.rotates:
            ranks = stored.state.ranks(self.cascades, step.ranks)[..., : step.used]
        own = self._own_keys(stored, k[num_anchors:], blocks) if blocks else None
        window = None if self.chain.window is None else (step.held, *self.chain.window)
        options = dict(
            kept=step.kept,
            positions=step.positions,
            sink_size=self.config.sink_size,
            recent_size=self.config.recent_size,
            scale=scale,
            return_logits=keeps_logits,
        )
        keys: list[Tensor] = []
        is_one = q.shape[3] == 1 and keeps_logits == bool(goes_on) and self.config.share != "keys"
        if is_one and far is None and not (blocks and window) and self.by_kernels:
            if window is not None:
                options |= dict(zip(("window", "sink_size", "recent_size"), window, strict=True))
            out, sums, logits = self._attend_one(layer, q, k, v, ranks, own, blocks, options)
        else:
            keys = [stored.keys.rectangle[:, :, : step.used]] if num_anchors else []
            if ranks is not None:
                keys = rotated_pieces(keys[0], ranks, *step.table)
            keys = chain(keys, [k[:num_anchors]])
            if goes_on and not keeps_logits:
                keys = list(keys)  # the block's other layers read them too
            out, sums, logits = slot_attention(
                q,
                keys,
                (stored.values.rectangle[:, :, : step.used], v),
                anchors=[block.anchor for block in blocks],
                own=own,
                share=self.config.share,
                decay=step.decay if num_anchors else None,
                window=window,
                capped=capped,
                **options,
            )

        found = None
        if goes_on:
            # Several tokens are inserted now, while later layers still read what the slots held.
            found = stored.state.positions[..., : step.used]
            found = found if q.shape[3] == 1 else found.clone()
        chosen = self.write(layer, new_k, v, sums)
        for place in goes_on:
            read_again = [] if keeps_logits else [piece[place] for piece in keys]
            self._open[layer, order[place]] = OpenBlock(
                BlockAnchor(
                    q[place],
                    read_again,
                    logits[place] if keeps_logits else None,
                    None if far is None or keeps_logits else capped[0].head(place),
                ),
                found[place],
                ranks[place] if self.rotates else None,
                None if chosen is None else chosen[place],
                new_k[place],
            )
        for head in order[num_anchors:]:
            if chosen is not None and self._ends[layer][head]:
                self._close(self._anchors[layer][head], head)
        return out[placed.inverse].transpose(0, 1).flatten(1, 2)

    def _attend_one(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ranks: Tensor | None,
        own: OwnKeys | None,
        blocks: list[OpenBlock],
        options: dict,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`slot_attention` of one query in each row, by kernels."""
        from pod_kernels.triton.slot_decode import slot_decode  # imports triton

        step, stored, num_anchors = self._step, self._layers[layer], self._num_anchors[layer]
        shared = None
        if blocks:
            shared = torch.stack([block.anchor.logits for block in blocks])
            sizes = self.config.sink_size, self.config.recent_size
            put_own(shared, q[num_anchors:], own, step.positions, *sizes, options["scale"])
        scored = num_anchors and self.chain.gamma is not None
        return slot_decode(
            q,
            stored.keys.rectangle,
            stored.values.rectangle,
            k,
            v,
            used=step.used,
            shared_logits=shared,
            ranks=ranks,
            table=step.table if ranks is not None else None,
            decay=1 - self.chain.gamma if scored else None,
            **options,
        )

    def write(self, layer: int, k: Tensor, v: Tensor, sums: Tensor | None) -> Tensor | None:
        """Insert and store the new tokens of one layer, a single one when the forward ends; `attend` calls it.

        Args:
            layer: index of the layer.
            k, v: [H_kv, B, T, D] in storage order, keys as they are stored.
            sums: [A, B, G, M] float32, what slots and new tokens received from the queries; None without scores.

        Returns:
            [A, B, T] int64, the anchor heads' slots of the new tokens, -1 for those dropped; None for a single token.
        """
        if not self._layers:
            self._allocate_all(v)
        if sums is not None and (self.chain.is_homogeneous or self.chain.head_reduction == "median"):
            sums = self._reduced(sums)
        if k.shape[2] == 1:
            self._pending.append(Pending(k, v, sums))
            return None
        stored, num_anchors = self._layers[layer], self._num_anchors[layer]
        others = self._orders[layer][num_anchors:]
        slots = [self._open[self._anchors[layer][head], head].slots[None] for head in others]
        chosen = None
        if num_anchors:
            chosen = self._insert(stored.state, sums)
            slots.insert(0, chosen)
            # Where the block goes on, its layers still read the keys that the new ones will overwrite.
            if any(self._ends[layer][head] for head in self._orders[layer][:num_anchors]):
                ends = self._head_orders[layer].ends[:num_anchors, None, None]
                self._put(stored.keys.rectangle, k[:num_anchors], chosen.masked_fill(~ends, -1))
        slots = torch.cat(slots)
        self._put(stored.values.rectangle, v, slots)
        if others:
            self._put_own(stored, k[num_anchors:], slots[num_anchors:])
        return slots[:num_anchors]

    def finish(self) -> None:
        scored = [part.sums for part in self._pending if part.sums is not None]
        sums = torch.cat(scored) if scored else None
        if self._pending and self.by_kernels:
            self._store_one(sums)
        elif self._pending:
            chosen = self._insert(self._state, sums)
            for layer, (stored, new) in enumerate(zip(self._layers, self._pending, strict=True)):
                num_anchors = self._num_anchors[layer]
                slots = chosen[self._first_units[layer] : self._first_units[layer + 1]]
                if num_anchors < len(new.keys):
                    slots = chosen[self._head_orders[layer].units]
                    self._put_own(stored, new.keys[num_anchors:], slots[num_anchors:])
                if num_anchors:
                    self._put(stored.keys.rectangle, new.keys[:num_anchors], slots[:num_anchors])
                self._put(stored.values.rectangle, new.values, slots)
        self._pending, self._open = [], {}
        self.step = self._step = None

    # ------------------------------------------------------------------ rows

    def positions(self, layer: int) -> Tensor:
        used = min(self.rows.longest, self.cascades.slots)
        kept = []
        for head, anchor in enumerate(self._anchors[layer]):
            kept.append(self._layers[anchor].state.positions[self._orders[anchor].index(head), :, :used])
        return oldest_first(torch.stack(kept, dim=1))

    def storages(self) -> list[Tensor]:
        return list(self.state()[0].values())

    def select_rows(self, rows: Tensor) -> None:
        self._state = self._state.part(slice(None), rows)
        for index, old in enumerate(self._layers):
            parts = {name: getattr(old, name).of_rows(rows) for name in PARTS}
            self._layers[index] = ChainLayer(**parts, state=self._state_of(index))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {
            f"layers.{index}.{name}": getattr(stored, name).data
            for index, stored in enumerate(self._layers)
            for name in PARTS
        }
        counts = self._state.tensors() if self._layers else []
        return tensors | {f"state.{index}": tensor for index, tensor in enumerate(counts)}, {}

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self._allocate_all(tensors["layers.0.values"])
        for name, tensor in self.state()[0].items():
            tensor.copy_(tensors[name])

    def reset(self) -> None:
        super().reset()
        self._layers: list[ChainLayer] = []
        self._step: ChainStep | None = None
        self._state: CascadeState | None = None
        self._pending: list[Pending] = []
        self._steps = Steps(self.cascades, self.rotates, self.chain.gamma, self.chain.window is not None)
        self._open: dict[tuple[int, int], OpenBlock] = {}

    # ------------------------------------------------------------------ parts of a forward

    def _store_one(self, sums: Tensor | None) -> None:
        """Insert and store the token of every row, one kernel for all units and one for each layer."""
        from pod_kernels.triton.cascade import average, insert  # imports triton
        from pod_kernels.triton.update import append_slots

        step, state, scores = self._step, self._state, None
        if self.chain.gamma is not None:
            factors = self.chain.gamma ** step.counts.float()
            scores = average(state.scores, sums, factors, self.chain.head_reduction)
        elif state.scores is not None:
            scores = _by_age(state, step.positions)
        chosen = insert(state, self.cascades, step.positions, scores)
        for layer, (stored, new) in enumerate(zip(self._layers, self._pending, strict=True)):
            held = stored.keys, stored.values, stored.own
            units = self._head_orders[layer].units
            sinks, by_slot = self.config.sink_size, self._ring.is_by_slot
            append_slots(*held, new.keys, new.values, step.positions, chosen, units, sinks, by_slot)

    def _insert(self, state: CascadeState, sums: Tensor | None) -> Tensor:
        """Update the scores of the anchor heads of `state`, then add the new tokens; their slots [A, B, T]."""
        step, scores = self._step, None
        if self.chain.gamma is not None:
            sums = self._over_heads(sums)
            held = state.scores[..., : step.used]
            held.mul_((self.chain.gamma ** step.counts.float())[:, None]).add_(sums[..., : step.used])
            scores = sums[..., step.used :]
        elif state.scores is not None:
            scores = _by_age(state, step.positions)
        return state.insert(self.cascades, step.plan, step.positions, scores)

    def _over_heads(self, sums: Tensor) -> Tensor:
        """[A, B, G, M] -> [A, B, M], over the query heads."""
        if self.chain.head_reduction == "median":
            return sums.median(dim=2).values
        return (torch.amax if self.chain.head_reduction == "max" else torch.mean)(sums, dim=2)

    def _reduced(self, sums: Tensor) -> Tensor:
        """[A, B, G, M] of one layer -> [A, B, 1, M], what is reduced before layers are put together."""
        if self.chain.is_homogeneous:
            every = sums.transpose(0, 1).flatten(1, 2)[None]  # [1, B, A G, M]
            return self._over_heads(every)[:, :, None].expand(len(sums), -1, -1, -1)
        return self._over_heads(sums)[:, :, None]

    def _own_keys(self, stored: ChainLayer, new: Tensor, blocks: list[OpenBlock]) -> OwnKeys:
        """The other heads' own keys, of slots and chunk: where they belong among all keys."""
        found = torch.stack([block.positions for block in blocks])
        ranks = torch.stack([block.ranks for block in blocks]) if self.rotates else None
        return self._ring.keys(stored.own.rectangle, found, ranks, new, self._step)

    def _put_own(self, stored: ChainLayer, new: Tensor, slots: Tensor) -> None:
        self._put(stored.own.rectangle, new, self._ring.places(self._step.positions, slots))

    def _close(self, layer: int, head: int) -> None:
        """Store the new keys of a block whose last layer has attended."""
        block = self._open.pop((layer, head))
        place = self._orders[layer].index(head)
        self._put(self._layers[layer].keys.rectangle[place : place + 1], block.keys[None], block.slots[None])

    def _put(self, held: Tensor, new: Tensor, slots: Tensor) -> None:
        """Write new [h, B, T, D] into their slots [h, B, T] of held [h, B, P, D], -1 for nowhere.

        In each row and head the last token goes somewhere, or none does.
        """
        if new.shape[2] > 1 or not self._step.is_even:
            # What goes nowhere writes once more what the last token writes, or what is in a slot already: so no
            # index has to be found on the device, for which the host would wait.
            goes, last = slots >= 0, slots[..., -1:]
            spare = torch.where((last >= 0)[..., None], new[:, :, -1:], held[:, :, :1])
            new = torch.where(goes[..., None], new, spare)
            slots = torch.where(goes, slots, last.clamp(min=0))
        held.scatter_(2, slots[..., None].expand(new.shape), new)

    def _order_heads(self, device: torch.device) -> list[HeadOrder]:
        """Of every layer, in one copy."""
        tables = []
        for layer, order in enumerate(self._orders):
            blocks = self.layout.units[layer]
            units = [self._first_units[unit[0]] + self.layout.places[unit] for unit in blocks]
            tables += [order, np.argsort(order), units, [self._ends[layer][head] for head in order]]
        tables = on_device([np.array(table) for table in tables], device)
        return [HeadOrder(*tables[first : first + 3], tables[first + 3].bool()) for first in range(0, len(tables), 4)]

    def _allocate_all(self, like: Tensor) -> None:
        batch, scored = len(self.rows.seen), self.cascades.num_cascades > 1 or self.chain.gamma is not None
        self._head_orders = self._order_heads(like.device)
        self._state = CascadeState.allocate(self.cascades, self._first_units[-1], batch, scored, like.device)
        empty = partial(Segments.rectangular, batch=batch, dim=like.shape[-1], dtype=like.dtype, device=like.device)
        for layer, (order, anchors) in enumerate(zip(self._orders, self._num_anchors, strict=True)):
            values, keys = (empty(heads, capacity=self.cascades.slots) for heads in (len(order), anchors))
            own = empty(len(order) - anchors, capacity=self._ring.capacity)
            self._layers.append(ChainLayer(values, keys, own, self._state_of(layer)))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickle makes tensors of their own of what are views."""
        vars(self).update(state)
        self._layers = [replace(stored, state=self._state_of(index)) for index, stored in enumerate(self._layers)]

    def _state_of(self, layer: int) -> CascadeState | None:
        """Of the blocks anchored in a layer, a view."""
        first, last = self._first_units[layer : layer + 2]
        return self._state.part(slice(first, last)) if last > first else None


def _by_age(state: CascadeState, positions: Tensor) -> Tensor:
    """[A, B, T] scores of new tokens by which an older one never yields to a newer one: nothing is selected."""
    return -positions.float().expand(len(state.positions), -1, -1)
