"""Rows over one context: the context's tokens are stored once and read once, each row's own lie beside them.

Attention to the context is one product of all rows' queries with each of its keys and values, attention to a row's own
tokens is that of any cache; both are put together by their log-sum-exp (Hydragen, arXiv 2402.05099; ChunkAttention,
arXiv 2402.15220). This is exact: where a query's keys lie does not change which of them are proximal to it. The
context's storage, evicted from or not, is left as it is; with N tokens of it the own tokens of a row are those of a
plain storage that begins at position N: `sink_size - N` sinks, if any, and the same ring.

Attention here is torch's: no kernel of Triton's reads it, and no CUDA graph repeats a step.

Legend: B rows, H query heads, H_kv KV heads, T tokens of a forward, D head dimension, N tokens of the context.
"""

from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pod.cache.layer import Layer
from pod.cache.slots import SlotStorage
from pod.cache.storage import Anchors, Rotary, Rows, Step, Storage, oldest_first

PREFIX = "prefix."  # before the names of the context's tensors in a file


def refusal(storage: Storage) -> str | None:
    """Why rows cannot share what a storage holds, or will hold; None where they can."""
    has = None
    if isinstance(storage, SharedPrefix):
        has = "rows that share a context already"
    elif not isinstance(storage, SlotStorage):
        has = f"{type(storage.method).__name__}, which keeps tokens by their places"
    elif storage.tau is not None:
        has = f"tau={storage.tau}"
    elif storage.quantization is not None:
        has = f"{storage.quantization}"
    elif storage.selector is not None:
        has = f"{type(storage.selector).__name__}, whose pages are a row's own"
    elif any(storage.streams):
        has = "heads that stream"
    elif storage.policy is not None and storage.policy.query_aware:
        has = f"{type(storage.policy).__name__}, which evicts again (query_aware=False evicts once, and is taken)"
    return has and f"this cache has {has}: cache.batch_repeat_interleave(n) copies a row instead"


class SharedPrefix(SlotStorage):
    """The own tokens of rows whose first ones lie in one row of another storage, of which `refusal` says nothing.

    Args:
        prefix: that storage, to which nothing is added from now on.
        shared: its one row.
        rows: what the cache counts: these tokens and the rows' own.
        max_length: tokens that each row will reach, those of the context included; None when unknown.
    """

    repeats_steps = False

    def __init__(self, prefix: SlotStorage, shared: Rows, rows: Rows, max_length: int | None) -> None:
        self.prefix, self.whole, self.shared = prefix, rows, shared.longest
        prefix.rows, prefix.workspace = shared, None
        prefix.count_room()
        prefix.by_kernels = prefix.is_decoding = False
        found: dict[tuple, Tensor] = {}
        self.known = [None if layer is None else self._with_positions(layer, found) for layer in prefix.layers]
        config = copy(prefix.config)
        config.sink_size = max(0, config.sink_size - self.shared)
        own = Rows(rows.lengths - self.shared, [seen - self.shared for seen in rows.seen])
        own.columns, own.most_columns = rows.columns - shared.columns, rows.most_columns - shared.columns
        super().__init__(config, own, None, None, None, None, prefix.crop_slack)
        self.expect(max_length)

    def _with_positions(self, layer: Layer, found: dict[tuple, Tensor]) -> Layer:
        """A layer of the context as any queries see it; layers share what is `found` of where their own keys are."""
        known = copy(layer)
        if known.near_positions is None and len(known.near_keys):
            key = known.near_keys.shape[2], known.near_keys.device
            if key not in found:
                found[key] = layer.ring_positions(self.prefix.rows.lengths.to(key[1]))[None]
            known.near_positions = known.near_slots = found[key]
        return known

    def reset(self) -> None:
        super().reset()
        self.by_kernels = False

    def cleared(self) -> Storage:
        prefix = copy(self.prefix)  # inside `peek` the cache's own is the same
        prefix.rows, prefix.headroom = self.whole, copy(prefix.headroom)
        return prefix.cleared()

    def apart(self, rows: Rows, lends: bool = True) -> Storage:
        made = super().apart(self.rows.apart(), lends)
        made.whole = rows
        return made

    def lent(self) -> list[object]:
        return [self.prefix, self.known, *super().lent()]

    # ------------------------------------------------------------------ what is held

    def storages(self) -> list[Tensor]:
        return [*self.prefix.storages(), *super().storages()]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        held, prefix = self.prefix.state()
        own, facts = super().state()
        facts |= {"prefix": prefix, "shared": self.prefix.rows.host_counts()}
        return {PREFIX + name: tensor for name, tensor in held.items()} | own, facts

    @classmethod
    def restored(cls, empty: SlotStorage, tensors: dict[str, Tensor], facts: dict[str, Any]) -> "SharedPrefix":
        """What `state` was of, of the rows that the cache has restored.

        Args:
            empty: the storage that the cache has made for them.
            tensors, facts: the state.
        """
        rows, max_length, counts = empty.rows, empty.headroom.max_length, facts["shared"]
        empty.rows = Rows(**counts, lengths=rows.lengths.new_tensor(counts["seen"]))
        empty.expect(empty.rows.longest)
        held = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
        empty.restore(held, facts["prefix"])
        made = cls(empty, empty.rows, rows, max_length)
        made.restore(tensors, facts)
        return made

    def positions(self, layer: int) -> Tensor:
        held = self.prefix.positions(layer).expand(len(self.rows.seen), -1, -1)
        if self.rows.columns:
            own = super().positions(layer)
            held = oldest_first(torch.cat([held, torch.where(own < 0, own, own + self.shared)], dim=-1))
        return held[..., : int((held >= 0).sum(dim=-1).max())]

    def keys(self, layer: int) -> Tensor:
        held = self.prefix.keys(layer).expand(-1, len(self.rows.seen), -1, -1)
        return torch.cat([held, super().keys(layer)], dim=2) if self.rows.columns else held

    # ------------------------------------------------------------------ between two forwards

    def select_rows(self, rows: Tensor) -> None:
        self.rows.select(rows)
        super().select_rows(rows)

    def expect(self, length: int | None) -> None:
        super().expect(None if length is None else max(0, length - self.shared))

    def check_crop(self, removed: int) -> None:
        own = min(self.rows.seen)
        if removed > own:
            raise ValueError(
                f"cannot take back {removed} tokens: the shortest row has {own} since cache.fork, and those before are "
                "shared by all rows. Fork a copy (copy.deepcopy, or inside cache.peek()) and go on with the other"
            )

    def crop(self, removed: int) -> None:
        self.rows.crop(removed)
        super().crop(removed)

    def rollback(self) -> None:
        if self.rows.columns:
            super().rollback()
            self.whole.most_columns = max(self.whole.most_columns, self.whole.columns + self.count)
        else:
            self.reset()

    # ------------------------------------------------------------------ one forward

    def begin(self, step: Step, inputs: Tensor, rotary: Rotary) -> None:
        flat = {"positions": step.positions.reshape(1, -1), "before": step.before[:1], "seen": [self.shared]}
        new = [flat["positions"].shape[1] if step.all_real else sum(step.new)]
        alone = {"masks": {}, "read": {}, "_near": {}, "_by_device": {}}
        self.prefix.step, self.prefix.count = replace(step, **flat, new=new, **alone), step.positions.shape[1]
        own = {"before": step.before - self.shared, "seen": self.rows.seen, "is_first": self.rows.columns == 0}
        own["positions"] = torch.where(step.positions < 0, step.positions, step.positions - self.shared)
        super().begin(replace(step, **own), inputs, rotary)

    def finish(self) -> None:
        step = self.step
        super().finish()
        self.rows.add(step)
        self.prefix.step = None

    @torch.no_grad()
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, anchors: Anchors, scale: float) -> Tensor:
        # Without a history: the context's part has none, and a backward through the other alone would be wrong.
        return super().attend(layer, q, k, v, anchors, scale)

    def _attended(
        self, layer: int, known: Layer | None, new: tuple[Tensor, ...], anchors: Anchors, scale: float
    ) -> Tensor:
        own, own_lse = super()._attended(layer, known, new, anchors, scale, return_lse=True)
        q, prefix = new[0], self.prefix
        prefix.step = prefix.step.on(q.device)
        # The rows' queries are those of one row.
        asked, distant = (None if x is None else x.transpose(0, 1).flatten(1, 2)[None] for x in (q, anchors[0]))
        found = prefix._attended(layer, self.known[layer], (asked,), (distant, None), scale, return_lse=True)
        held, held_lse = (part[0].unflatten(1, (len(q), -1)).transpose(0, 1) for part in found)
        # The context's share of the softmax's mass; padding has none of either part.
        share = torch.sigmoid(held_lse - own_lse).nan_to_num_()[..., None]
        return torch.lerp(own.to(share.dtype), held.to(share.dtype), share).to(q.dtype)
