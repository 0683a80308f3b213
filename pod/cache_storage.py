"""Storage of a cache that keeps every token: every layer's values, and distant keys in one layer of each block only.

Values are kept for every layer and KV head. Keys: the anchor heads keep all positions, the other heads keep the sinks
and a ring of the last `recent_size + crop_slack` tokens. With N tokens stored the bytes are exactly

    B * D * itemsize * sum over layers and KV heads of [ N + (N if anchor else min(N, sinks + recent + crop_slack)) ]

Under `share: kv` the anchor heads keep their values too, the others nothing at all: 2 * B * D * itemsize * N bytes for
each anchor head. A layer reads the segments of its anchors.

Blocks of one layer make this the storage of a dense model. Quantised, values and distant keys take what
`pod_kernels.quantized` says; with Quest the pages of distant keys lie beside them.
"""

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from pod.cache_rows import Rows, Step
from pod.eviction.base import runs_of
from pod.eviction.headroom import spare
from pod.eviction.quest import Quest
from pod_kernels import (
    LayerSegments,
    Quantization,
    QuantizedSegments,
    Segments,
    SkipStats,
    cached_attention,
    paged_attention,
    refresh_pages,
)
from pod_kernels.backend import runs_triton
from pod_kernels.quantized import in_full
from pod_kernels.transfer import KeptOnDevice

PAGES = 3  # the place of a layer's pages among its parts


@dataclass(eq=False)
class KeepingStorage:
    """Keys and values of a `PodCache` that keeps every token; the cache calls what is public here.

    Args:
        config: the PoD model's config.
        rows: what the cache counts.
        orders: for each layer its KV heads in storage order, anchors first; under `share: kv` these alone.
        num_anchors: of each layer.
        max_length: tokens that each row will reach, None when unknown.
        crop_slack: how many of the last tokens can be taken back.
        tau: of early skip; None skips nothing.
        quest: chooses the pages that a decoded token reads; None reads all.
        quantization: how values and distant keys are stored; None as they come.

    Attributes:
        segments: of each layer; empty before the first forward.
        full: the layer that attends, in full precision, where the others are quantised.
        workspace: [H_kv, B, G, 1, C] float32, the distant scores that anchors leave during one step.
        stats: what tau decided and left unread.
    """

    config: PreTrainedConfig
    rows: Rows
    orders: list[tuple[int, ...]]
    num_anchors: list[int]
    max_length: int | None
    crop_slack: int
    tau: float | None
    quest: Quest | None
    quantization: Quantization | None

    def __post_init__(self) -> None:
        config = self.config
        self.anchors: list[list[int]] = config.blocks.anchors.tolist()
        self.shares_kv = config.share == "kv"
        self.num_kv_heads = config.blocks.num_kv_heads
        self.groups = config.num_attention_heads // config.num_key_value_heads
        followed = [{(anchor, head) for head, anchor in enumerate(row)} for row in self.anchors]
        later = [set().union(*followed[layer + 1 :]) for layer in range(len(followed))]
        # The heads of each layer whose distant scores a later layer reads.
        self.score_heads = [
            tuple(head for head in range(self.num_kv_heads) if (layer, head) in later[layer])
            for layer in range(len(followed))
        ]
        self.reset()

    def reset(self) -> None:
        """Forget all tokens and free the storage."""
        self.segments: list[LayerSegments] = []
        self.full: LayerSegments | None = None
        self.workspace: Tensor | None = None
        self.step: Step | None = None
        self.capacity = 0
        self.stats = SkipStats()
        self._on_device = KeptOnDevice()

    # ------------------------------------------------------------------ what the cache asks

    def storages(self) -> list[Tensor]:
        """Every tensor that is kept between two forwards, the workspace left out."""
        return [one for segments in self.segments for part in _parts(segments) for one in part.tensors()]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `restore` needs, between two forwards: tensors by name, and what else there is as JSON."""
        tensors = {}
        for index, segments in enumerate(self.segments):
            for number, part in enumerate(_parts(segments)):
                name = f"layers.{index}.{number}"
                if isinstance(part, QuantizedSegments):
                    tensors |= part.named(name)
                else:
                    used = self.quest.pages(self.rows.longest) if number == PAGES else self.rows.longest
                    tensors[name] = part.rectangle[:, :, :used]
        return tensors, {"capacity": self.capacity}

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Become the storage whose `state` this is, of the rows that the cache has restored; this one is empty."""
        # What grew is not written where slots are positions; groups are written whole.
        self.capacity = facts["capacity"] if self.quantization else max(self.max_length or 0, self.rows.longest)
        self.segments = [self._allocate(layer, tensors[f"layers.{layer}.2"]) for layer in range(len(self.orders))]
        for index, segments in enumerate(self.segments):
            for number, part in enumerate(_parts(segments)):
                name = f"layers.{index}.{number}"
                if isinstance(part, QuantizedSegments):
                    for own, held in zip(part.tensors(), part.named(name), strict=True):
                        own.copy_(tensors[held])
                    continue
                held = tensors[name]
                if part.data.numel():
                    part.rectangle[:, :, : held.shape[2]].copy_(held)

    def positions(self, layer: int) -> Tensor:
        """[B, H_kv, n] int64 in ascending order, -1 behind them."""
        column = torch.arange(self.rows.longest, device=self.rows.lengths.device)
        kept = torch.where(column < self.rows.lengths[:, None], column, -1)
        return kept[:, None].expand(-1, self.num_kv_heads, -1)

    def begin(self, step: Step) -> None:
        """Take note of what one forward adds."""
        self.step = step

    def finish(self) -> None:
        """The forward is through all layers."""
        self.step = None

    def take_back(self, step: Step) -> bool:
        """Forget a forward that broke off, whose tokens are in some layers; False where that cannot be."""
        if self.quantization is not None:
            return False
        self.crop(step.before, step.positions.shape[1])
        return True

    def expect(self, length: int | None) -> None:
        """Rows will reach so many tokens; None: that is not known."""
        self.max_length = length

    def select_rows(self, rows: Tensor) -> None:
        """Keep the rows `rows` [n] int64, in that order; the cache counts them already."""
        self._rebuild(lambda old, new: new.copy_(old[:, rows]), None if self.quantization is None else rows.tolist())

    def crop(self, lengths: Tensor, removed: int) -> None:
        """Forget the positions from `lengths` [B] on: they are overwritten, but pages have their keys in them."""
        for segments in self.segments if self.quest is not None else ():
            self._refresh_pages(segments, (lengths - 1).clamp(min=0), lengths, 1)

    @property
    def repeats_steps(self) -> bool:
        """Whether a CUDA graph can repeat a step of decoding while nothing moves."""
        # A quantised layer is made full anew at every step, and the host chooses pages and the anchors' segments.
        if self.quantization is not None or self.quest is not None or self.shares_kv:
            return False
        if not self.segments or self.rows.longest >= self.capacity:
            return False
        return runs_triton(self.segments[0].values.data)

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
        """Store keys and values, and attend to everything stored; arguments as `PodCache.attend`."""
        step = self.step
        # Several queries of a filled cache still need ring entries that their own keys will push out.
        new_keys = self.write(layer, k, v, near=q.shape[2] == 1 or step.is_first)
        if step.is_first:
            out = step.attend_prompt(self.config, q, k, v, q_distant, k_distant, scale)
        elif self.shares_kv:
            out = self._attend_anchors(layer, q.detach(), scale)
        else:
            out = self._attend_stored(layer, q.detach(), q_distant, new_keys, scale)
        if self.quantization is not None:
            self._put_to_rest(layer)
        return out

    def write(self, layer: int, k: Tensor, v: Tensor, near: bool = True) -> Tensor | None:
        """Store one layer's keys and values of the forward that `begin` opened.

        Args:
            layer: index of the layer.
            k, v: [B, H_kv, T, D].
            near: also the other heads' own keys, the last ones of which push out older ones.

        Returns:
            [S, B, T, D] the own keys of the heads that are no anchors where these are still to be stored, else None.
        """
        step = self.step
        self._reserve(step.length, k)
        segments = self.segments[layer]
        if self.shares_kv and segments.num_anchors < k.shape[1]:
            heads = self._on_device(self.orders[layer], k.device)
            k, v = k[:, heads], v[:, heads]
        if self.quantization is not None:
            segments = self.full = replace(segments, values=in_full(segments.values), keys=in_full(segments.keys))
        is_plain = self.quantization is None and segments.pages is None
        if near and is_plain and k.shape[2] == 1 and not step.is_first and runs_triton(v):
            from pod_kernels.update import append  # imports triton

            append(segments, k.detach(), v.detach(), step.positions)
            return None
        stored_k = segments.stored(k.detach().transpose(0, 1))  # [H_kv, B, T, D]
        own = stored_k[segments.num_anchors :]
        _write(segments.values, segments.stored(v.detach().transpose(0, 1)), step)
        _write(segments.keys, stored_k[: segments.num_anchors], step)
        if near:
            _write_near(segments, own, step)
        if segments.pages is not None:
            after = torch.maximum(step.before, step.positions[:, -1] + 1)
            self._refresh_pages(segments, step.before, after, step.positions.shape[1])
        return None if near else own

    # ------------------------------------------------------------------ attention to a filled cache

    def _attend_stored(
        self, layer: int, q: Tensor, q_distant: Tensor | None, new_keys: Tensor | None, scale: float
    ) -> Tensor:
        """Attention of q [B, H, T, D] to what the layer and its anchors have stored."""
        step, segments, is_single = self.step, self.full or self.segments[layer], q.shape[2] == 1
        shared = segments.order[segments.num_anchors :]
        uses_scores = is_single and self.config.share == "scores"
        scores = self._scores(q) if uses_scores else None
        distant_keys = () if uses_scores else tuple(self._anchor_keys(layer, head) for head in shared)
        if self.quest is not None and is_single and not step.in_prefill:
            self._choose_pages(layer, q)
            if layer >= self.quest.dense_layers:
                return paged_attention(
                    q,
                    segments,
                    torch.stack([step.read[self.anchors[layer][head], head] for head in segments.order]),
                    positions=step.positions,
                    scores=scores,
                    score_heads=self.score_heads[layer],
                    distant_keys=distant_keys,
                    scale=scale,
                )
        out = cached_attention(
            q,
            segments,
            positions=step.positions,
            lengths=step.positions[:, -1] + 1 if is_single else step.before,
            length=step.length,
            is_even=step.even,
            scores=scores,
            score_heads=self.score_heads[layer],
            q_distant=None if uses_scores or not shared else (q if q_distant is None else q_distant.detach()),
            distant_keys=distant_keys,
            new_keys=None if is_single or not shared else new_keys.transpose(0, 1),
            scale=scale,
            masks=step.masks,
            tau=self.tau,
            stats=self.stats,
        )
        if not is_single:
            _write_near(segments, new_keys, step)
        return out

    def _attend_anchors(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Attention of q [B, H, T, D] to the keys and values of the layer's anchors, which are stored (`share: kv`)."""
        step, parts, first = self.step, [], 0
        # Heads in a row with one anchor layer are stored side by side.
        for anchor, run in groupby(self.anchors[layer]):
            segments, heads = self.segments[anchor], len(list(run))
            if heads < segments.num_anchors:
                segments = segments.part(self.orders[anchor].index(first), heads)
            parts.append(
                cached_attention(
                    q[:, first * self.groups : (first + heads) * self.groups],
                    segments,
                    positions=step.positions,
                    lengths=step.before,
                    length=step.length,
                    is_even=step.even,
                    scale=scale,
                    masks=step.masks,
                )
            )
            first += heads
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _scores(self, q: Tensor) -> Tensor:
        if self.workspace is None or self.workspace.shape[-1] < self.capacity:
            shape = self.num_kv_heads, q.shape[0], self.groups, 1, self.capacity
            self.workspace = torch.empty(shape, dtype=torch.float32, device=q.device)
        return self.workspace

    def _anchor_keys(self, layer: int, head: int) -> tuple[Segments, int]:
        anchor = self.anchors[layer][head]
        keys, place = self.segments[anchor].keys, self.segments[anchor].order.index(head)
        return (keys.full(place), 0) if isinstance(keys, QuantizedSegments) else (keys, place)

    def _choose_pages(self, layer: int, q: Tensor) -> None:
        """Note what the blocks anchored in `layer` read for the queries q [B, H, 1, D]."""
        segments, step = self.segments[layer], self.step
        anchors = segments.num_anchors
        if anchors:
            asked = segments.stored(q.unflatten(1, (self.num_kv_heads, -1))[:, :, :, 0].transpose(0, 1))[:anchors]
            pages = segments.pages.rectangle
            parts = [
                method.choose(asked[:, rows], pages[:, rows], step.positions[rows], step.length)
                for method, rows in runs_of(self.quest, self.rows.budgets)
            ]
            read, widest = parts[0], max(part.shape[2] for part in parts)
            if len(parts) > 1:  # rows whose shares of their prompts differ
                parts = [torch.nn.functional.pad(part, (0, widest - part.shape[2]), value=-1) for part in parts]
                read = torch.cat(parts, dim=1)
            step.read.update({(layer, head): read[place] for place, head in enumerate(segments.order[:anchors])})

    def _refresh_pages(self, segments: LayerSegments, before: Tensor, after: Tensor, most: int) -> None:
        if segments.num_anchors:
            keys, pages = segments.keys.rectangle, segments.pages.rectangle
            refresh_pages(pages, keys, before, after, self.quest.page_size, most)

    def _put_to_rest(self, layer: int) -> None:
        """Quantise what the forward has written, and let go of the layer in full precision."""
        step, full, segments = self.step, self.full, self.segments[layer]
        used = torch.maximum(step.before, step.positions[:, -1] + 1)
        for rest, written in ((segments.values, full.values), (segments.keys, full.keys)):
            if isinstance(rest, QuantizedSegments):
                rest.absorb(written, used.repeat(len(rest.sizes)), step.positions.shape[1])
        self.full = None

    # ------------------------------------------------------------------ memory

    def _allocate(self, layer: int, like: Tensor) -> LayerSegments:
        lengths, batch, dim = self.rows.lengths, self.rows.lengths.shape[0], like.shape[-1]
        where = {"dtype": like.dtype, "device": like.device}
        order, anchors = self.orders[layer], self.num_anchors[layer]
        ring = self.config.recent_size + self.crop_slack

        def plain(heads: int, capacity: int, dim: int = dim) -> Segments:
            return Segments.allocate(heads, capacity, dim, lengths, **where)

        def stored(heads: int, is_key: bool) -> Segments | QuantizedSegments:
            spec = self.quantization
            if spec is None or not spec.pays([self.capacity], dim, like.dtype.itemsize):
                return plain(heads, self.capacity)
            sizes = [[spec.rounded(self.capacity)] * batch] * heads
            return QuantizedSegments.allocate(spec, is_key, sizes, batch, dim, **where)

        return LayerSegments(
            order=tuple(range(anchors)) if self.shares_kv else order,
            num_anchors=anchors,
            values=stored(len(order), is_key=False),
            keys=stored(anchors, is_key=True),
            near=plain(len(order) - anchors, min(self.capacity, self.config.sink_size + ring)),
            sink_size=self.config.sink_size,
            recent_size=self.config.recent_size,
            ring_size=ring,
            pages=None if self.quest is None else plain(anchors, self.quest.pages(self.capacity), 2 * dim),
        )

    def _reserve(self, length: int, like: Tensor) -> None:
        wanted = max(length, self.max_length or 0)
        if not self.segments:
            self.capacity = wanted
            self.segments = [self._allocate(layer, like) for layer in range(len(self.orders))]
        elif wanted > self.capacity:
            self.capacity = wanted if wanted > length else length + spare(length)
            self._rebuild(lambda old, new: new[:, :, : old.shape[2]].copy_(old))

    def _rebuild(self, fill, rows: list[int] | None = None) -> None:
        """Allocate anew, layer by layer, and fill each part from its predecessor; `rows` when these are chosen."""
        for index, old in enumerate(self.segments):
            new = self._allocate(index, old.near.data)
            for old_part, new_part in zip(_parts(old), _parts(new), strict=True):
                if isinstance(old_part, QuantizedSegments):
                    new_part.take(old_part, rows)
                elif isinstance(new_part, QuantizedSegments):  # it has grown so far that this takes fewer bytes
                    full = new_part.full()
                    if len(full.data):
                        fill(old_part.rectangle, full.rectangle)
                    new_part.absorb(full, self.rows.lengths.repeat(len(new_part.sizes)))
                elif old_part.data.numel():
                    fill(old_part.rectangle, new_part.rectangle)
            self.segments[index] = new
        self.workspace = None


def _parts(segments: LayerSegments) -> tuple[Segments | QuantizedSegments, ...]:
    parts = segments.values, segments.keys, segments.near
    return parts if segments.pages is None else (*parts, segments.pages)


def _write(part: Segments, new: Tensor, step: Step) -> None:
    """Put new [h, B, T, D] at their positions."""
    if not new.shape[0]:
        return
    data = part.rectangle
    count = new.shape[2]
    if step.even:
        data[:, :, step.length - count : step.length] = new
    elif count == 1 and not step.is_first:
        # No index has to be found on the device. A row of which nothing but padding was seen has position -1: what
        # lands in its last slot is overwritten before it is read.
        data[:, torch.arange(new.shape[1], device=new.device), step.positions[:, 0]] = new[:, :, 0]
    else:
        rows, columns = step.real
        data[:, rows, step.positions[rows, columns]] = new[:, rows, columns]


def _write_near(segments: LayerSegments, new: Tensor, step: Step) -> None:
    """Put the other heads' own keys [S, B, T, D] into sinks and ring, the last `ring_size` tokens only."""
    if not new.shape[0]:
        return
    data = segments.near.rectangle
    positions = step.positions
    if new.shape[2] == 1 and step.even:
        place = step.length - 1
        slot = place
        if place >= segments.sink_size:
            slot = segments.sink_size + (place - segments.sink_size) % segments.ring_size
        data[:, :, slot : slot + 1] = new
        return
    if new.shape[2] == 1 and not step.is_first:
        rows = torch.arange(new.shape[1], device=new.device)
        data[:, rows, segments.near_slots(positions[:, 0])] = new[:, :, 0]
        return
    rows, columns = step.near(segments.sink_size, segments.ring_size)
    data[:, rows, segments.near_slots(positions[rows, columns])] = new[:, rows, columns]
