"""The PoD cache: every layer's values, and distant keys in one layer of each block only.

Values are kept for every layer and KV head. Keys: the anchor heads keep all positions, the other heads keep the sinks
and a ring of the last `recent_size + crop_slack` tokens. With N tokens stored the bytes are exactly

    B * D * itemsize * sum over layers and KV heads of [ N + (N if anchor else min(N, sinks + recent + crop_slack)) ]

Under `share: kv` the anchor heads keep their values too, the others nothing at all: 2 * B * D * itemsize * N bytes for
each anchor head. A layer reads the segments of its anchors.

Rows are packed: slot p of a row holds its p-th real token, so left padding is not stored, and sinks and recency count
from each row's first real token. Blocks of one layer make this an ordinary cache of a dense model. Quantised, values
and distant keys take what `pod_kernels.quantized` says.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from pod.blocks import LayerBlocks
from pod.cache_file import read_cache, write_cache
from pod.eviction import parse, unparse
from pod.eviction.base import Eviction
from pod.eviction.manager import EvictingStorage
from pod.eviction.quest import Quest
from pod.eviction.storage import Rotary, StoragePolicy, Store, strides
from pod.eviction.streaming import WindowAttention
from pod_kernels import (
    LayerSegments,
    Quantization,
    QuantizedSegments,
    Segments,
    SkipStats,
    cached_attention,
    paged_attention,
    refresh_pages,
    shared_score_attention,
)
from pod_kernels.backend import runs_triton
from pod_kernels.cached import Masks

PAGES = 3  # the place of a layer's pages among its parts


@dataclass
class Step:
    """What one forward adds to the cache; the same for all its layers.

    Attributes:
        positions: [B, T] int64, the position of each new token in its row, -1 for padding.
        before: [B] int64, real tokens of each row before the forward.
        length: the longest row after it.
        even: every row has the same tokens, none of them padding.
        is_first: the cache was empty.
        masks: what the layers' attention has in common.
        read: with Quest, the positions [B, R] that the blocks up to now read, by anchor layer and KV head.
    """

    positions: Tensor
    before: Tensor
    length: int
    even: bool
    is_first: bool
    masks: Masks = field(default_factory=dict)
    read: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class PodCache(Cache):
    """Key/value cache of a PoD model, the default of its `generate`.

    Args:
        config: the PoD model's config; says layers, heads, blocks, sink and recent sizes.
        max_length: tokens that each row will reach. Storage is then allocated once; without it, storage grows by an
            eighth when full. `generate` sets it. Methods that organise storage need none: theirs has a fixed size.
        eviction: a method of `pod.eviction`, such as `SnapKV(budget=4096)`; None keeps every token. What is stored then
            is described in `pod.eviction.manager` and `pod.eviction.storage`; with Quest it is everything, and pages.
        tau: early skip: at decode, in layers that are no anchors, a query head whose gate is at least tau leaves the
            distant tokens out, 0 to 1; the config's when None, and if that is None too, nothing is skipped.
        crop_slack: how many of the last tokens `crop` can take back (rejected draft tokens).
        quantization: stores values and distant keys in 8 or 4 bits, but for the last tokens, as
            `pod.Quantization(bits=4)` says; own keys of proximal tokens stay as they are. A forward of several tokens
            into an empty cache attends in full precision; every other one makes one layer at a time full and reads
            that. None stores all as it comes.

    Attributes:
        stats: what tau decided and left unread since the cache was empty, a `pod_kernels.SkipStats`.

    Raises:
        ValueError: `config` is not a PoD config; a size is out of range; the budget is below what is always kept; tau
            with eviction; tau, eviction or quantization with `share: kv`; quantization with tau, with a method that
            evicts while decoding, shares a budget between layers or organises storage, or with less than `crop_slack`
            tokens of `residual`.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        max_length: int | None = None,
        eviction: Eviction | StoragePolicy | None = None,
        tau: float | None = None,
        crop_slack: int = 64,
        quantization: Quantization | None = None,
    ) -> None:
        super().__init__(layers=[])
        if not hasattr(config, "share") or not hasattr(config, "blocks"):
            raise ValueError(
                f"PodCache needs the config of a PoD model, got {type(config).__name__}. Convert the model first: "
                "pod.convert(model, pod.LayerBlocks.dense(num_layers, num_kv_heads)) keeps it dense."
            )
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length must be at least 1 token, got {max_length}")
        if crop_slack < 0:
            raise ValueError(f"crop_slack must be >= 0 tokens, got {crop_slack}")
        self.tau = config.tau if tau is None else tau
        if self.tau is not None and not 0 <= self.tau <= 1:
            raise ValueError(f"tau must be between 0 and 1, or None; got {self.tau}")
        if self.tau is not None and eviction is not None:
            raise ValueError(
                f"tau={self.tau} cannot be combined with eviction: a method chooses what is read. Leave one of them out"
                + (" (the model's config sets tau: config.tau = None takes it away)" if tau is None else "")
            )
        self._shares_kv = config.share == "kv"
        choices = {"tau": self.tau, "eviction": eviction, "quantization": quantization}
        for name, value in choices.items() if self._shares_kv else ():
            if value is not None:
                raise ValueError(
                    f"{name} cannot be combined with share='kv', cross-layer attention, whose layers share keys and "
                    f"values and no scores. Make the cache without {name}"
                )
        self._stats = SkipStats()
        self.config = config
        self.max_length = max_length
        self.may_grow = max_length is None
        self.crop_slack = crop_slack
        self.blocks: LayerBlocks = config.blocks
        anchors = self.blocks.anchors
        self._num_layers, self._num_kv_heads = anchors.shape
        self._groups = config.num_attention_heads // config.num_key_value_heads
        layers = torch.arange(self._num_layers)[:, None]
        is_anchor = anchors == layers
        # Storage order of the heads: a layer's anchors first, so that each kind is one piece of memory.
        self._orders = [
            tuple(torch.argsort((~is_anchor[layer]).to(torch.int8), stable=True).tolist()) for layer in layers[:, 0]
        ]
        self._num_anchors = is_anchor.sum(dim=1).tolist()
        if self._shares_kv:
            self._orders = [order[:count] for order, count in zip(self._orders, self._num_anchors, strict=True)]
            self._runs = [_runs(layer) for layer in anchors.tolist()]
        followed = [{(int(anchors[i, g]), g) for g in range(self._num_kv_heads)} for i in range(self._num_layers)]
        later = [set().union(*followed[i + 1 :]) for i in range(self._num_layers)]
        self._score_heads = [
            tuple(g for g in range(self._num_kv_heads) if (i, g) in later[i]) for i in range(self._num_layers)
        ]
        self._segments: list[LayerSegments] = []
        self._full: LayerSegments | None = None  # the layer at hand, where the others are quantised
        self._workspace: Tensor | None = None
        self._lengths: Tensor | None = None  # [B] real tokens of each row; the segments share this tensor
        self._longest = 0
        self._columns = 0  # columns seen, padding included: what `generate` counts
        self._most_columns = 0  # the most there ever were: cropping does not bring back what they pushed out of a ring
        self._capacity = 0
        self._even = True
        self._in_prefill = False
        self.fed_before = 0  # columns that assisted decoding, which begins with all ids, must leave out once
        self._step: Step | None = None
        self._new_columns = self._left_out = 0  # what the next `finish` counts, with a store
        if eviction is not None and not isinstance(eviction, Eviction | StoragePolicy):
            raise ValueError(
                f"eviction must be a method such as pod.eviction.SnapKV(budget=256), got {eviction!r}; "
                "pod.eviction.parse makes one from text"
            )
        if config.share == "window":
            if eviction is not None:
                raise ValueError("a model with share='window' keeps its window alone: make its cache without eviction")
            eviction = WindowAttention()
        self.eviction = eviction
        self.quantization = quantization
        if quantization is not None:
            _check_quantization(quantization, self.tau, eviction, crop_slack)
        self._evicting: EvictingStorage | None = None
        self.store: Store | None = None
        self._quest = eviction if isinstance(eviction, Quest) else None
        if isinstance(eviction, StoragePolicy):
            # It organises storage itself and does all of the work: what follows here is then unused.
            self.store = eviction.make_store(config, self.blocks)
        elif eviction is not None:
            self._evicting = EvictingStorage(
                config, eviction, self._orders, self._num_anchors, max_length, crop_slack, quantization
            )

    # ------------------------------------------------------------------ what transformers asks

    is_compileable = False

    @property
    def is_croppable(self) -> bool:
        return self.store is None and (self._evicting is None or not self._evicting.evicts_at_steps)

    def __len__(self) -> int:
        return self._num_layers

    def __repr__(self) -> str:
        return f"PodCache(tokens={self._columns}, bytes={self.nbytes()}, {self.blocks})"

    @property
    def is_initialized(self) -> bool:
        return bool(self._segments) if self.store is None else self.store.batch_size > 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self._num_layers

    @property
    def batch_size(self) -> int:
        if self.store is not None:
            return self.store.batch_size
        return -1 if self._lengths is None else self._lengths.shape[0]

    @property
    def max_cache_len(self) -> int:
        return -1 if self.max_length is None else self.max_length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens that fit without growing, -1 when there is no limit."""
        return -1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen so far, left padding included, as `generate` counts them."""
        return self._columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._columns + query_length, 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs) -> tuple:
        raise ValueError(
            "PodCache belongs to PoD models: a dense model cannot use it, because distant keys are not stored in "
            "every layer. Convert the model with pod.convert(model, blocks) first, or use transformers' DynamicCache."
        )

    @property
    def stats(self) -> SkipStats:
        return self._stats.collect()

    # ------------------------------------------------------------------ size

    def nbytes(self) -> int:
        """Bytes of the storages, capacity included; the workspace of one step's distant scores is not in it."""
        if self._evicting is not None:
            return sum(storage.untyped_storage().nbytes() for storage in self._evicting.storages())
        if self.store is not None:
            return self.store.nbytes()
        return sum(part.nbytes() for segments in self._segments for part in self._parts(segments))

    def expected_nbytes(self, length: int, batch: int = 1, itemsize: int = 2) -> int:
        """Bytes by the formula of this module for `length` tokens in each of `batch` rows, none of them evicted.

        Quest's pages, two vectors each, are in it, and quantization's scales and open groups.
        """
        near = min(length, self.config.sink_size + self.config.recent_size + self.crop_slack)
        total = self._num_layers * self._num_kv_heads
        if self.config.share == "window":
            length = self.config.sink_size + self.config.recent_size - 1
        anchors = sum(self._num_anchors)
        if self._shares_kv:
            return batch * self.config.head_dim * itemsize * 2 * anchors * length
        vectors = total * length + anchors * length + (total - anchors) * near
        if self.quantization is not None:
            spec, dim = self.quantization, self.config.head_dim
            stored = total * spec.nbytes(spec.rounded(length), dim, itemsize, is_key=False)
            stored += anchors * spec.nbytes(spec.rounded(length), dim, itemsize, is_key=True)
            return batch * (stored + (total - anchors) * near * dim * itemsize)
        if self._quest is not None:
            vectors += 2 * anchors * self._quest.pages(length)
        return batch * self.config.head_dim * itemsize * vectors

    def storages(self) -> list[Tensor]:
        """Every tensor that `nbytes` counts."""
        if self._evicting is not None:
            return self._evicting.storages()
        if self.store is not None:
            return self.store.storages()
        return [one for segments in self._segments for part in self._parts(segments) for one in part.tensors()]

    def positions(self, layer: int) -> Tensor:
        """Positions whose values are kept, in the layer or, under `share: kv`, in its anchors.

        Returns:
            [B, H_kv, n] int64, counted from each row's first real token; -1 where a slot is empty.

        Raises:
            ValueError: nothing is stored yet.
        """
        if self.batch_size < 0:
            raise ValueError("the cache is empty: run the model with it first")
        if self._evicting is not None:
            return self._evicting.positions(layer)
        if self.store is not None:
            return self.store.positions(layer)
        column = torch.arange(self._longest, device=self._lengths.device)
        kept = torch.where(column < self._lengths[:, None], column, -1)
        return kept[:, None].expand(-1, self._num_kv_heads, -1)

    # ------------------------------------------------------------------ one forward of the model

    @contextmanager
    def prefill(self) -> Iterator[None]:
        """Several forwards inside are one prefill: whatever acts at the end of a prefill acts when the block ends."""
        if self._in_prefill:
            raise ValueError("cache.prefill() is already open: close it before opening another")
        self._in_prefill = True
        if self._evicting is not None:
            self._evicting.open_prefill()
        try:
            yield
            if self._evicting is not None:
                self._evicting.close_prefill(self._lengths)
        finally:
            self._in_prefill = False
            if self._evicting is not None:
                self._evicting.abandon_prefill()

    @property
    def rotates(self) -> bool:
        """Whether queries and keys are handed over before RoPE, and the cache rotates them."""
        return self.store is not None and self.store.rotates

    def takes_anchors(self, count: int) -> bool:
        """Whether `attend` needs the running anchors' queries and keys in a forward of `count` tokens."""
        # One query with a cache reads the scores that its anchors left here, and a store keeps its own. Keys and values
        # that are shared are read here by any number of queries.
        return self.store is None and ((count > 1 and not self._shares_kv) or self._columns == 0)

    def strides(self, count: int, mask: Tensor | None, device: torch.device) -> list[tuple[Tensor, Tensor | None]]:
        """Cut a forward of `count` tokens into what can be processed at once.

        Args:
            mask: [B, T] bool, False for padding tokens; None when all are real.

        Returns:
            [] when it is one piece, else for each piece its columns [B or 1, n] int64 and which of them are real
            [B, n] bool, None when all are.
        """
        self._left_out = 0
        if self.store is None or count <= self.eviction.stride:
            return []
        pieces = strides(mask, count, self.eviction.stride, device)
        # Columns that are padding in every row are in no piece, but they count.
        self._left_out = count - sum(columns.shape[1] for columns, _ in pieces)
        return pieces

    def begin(self, config: PreTrainedConfig, inputs: Tensor, mask: Tensor | None, rotary: Rotary) -> None:
        """Make room for the tokens of one forward; the model calls this before its layers.

        Args:
            config: the config of the calling model, which must be this cache's.
            inputs: [B, T, hidden] embeddings; gives rows, tokens and device.
            mask: [B, T] bool, False for padding tokens; None when all are real.
            rotary: the model's rotary embedding, (states, position_ids) -> cos and sin.

        Raises:
            ValueError: another model's cache, another number of rows, padding after a row's first token, more tokens
                than `max_length`.
        """
        theirs, ours = _shape_of(config), _shape_of(self.config)
        if config is not self.config and (theirs != ours or config.blocks != self.blocks):
            raise ValueError(
                f"this cache was made for another model: it has {ours} and {self.blocks}, the model has {theirs} and "
                f"{config.blocks}. Make one with pod.PodCache(model.config)."
            )
        if self.quantization is not None and self._step is not None:
            raise ValueError(
                "the last forward broke off, and some layers have quantised its tokens: call cache.reset()"
            )
        if self.store is not None:
            self.store.begin(inputs, mask, rotary)
            self._new_columns = inputs.shape[1]
            return
        batch, count = inputs.shape[:2]
        device = inputs.device
        is_first = self._columns == 0
        if self._lengths is None or (is_first and self._lengths.shape[0] != batch):
            self.reset()
            self._lengths = torch.zeros(batch, dtype=torch.long, device=device)
        if self._lengths.shape[0] != batch:
            raise ValueError(f"the cache holds {self._lengths.shape[0]} rows but the input has {batch}")
        if mask is not None and bool(mask.all()):
            mask = None
        step_index = torch.arange(count, device=device)
        even = self._even and mask is None
        if mask is None:
            positions = self._lengths[:, None] + step_index
            longest = self._longest + count
        else:
            real = mask.sum(dim=1)
            is_left_padded = (mask == (step_index >= count - real[:, None])).all(dim=1)
            is_allowed = is_left_padded & ((self._lengths == 0) | (real == count))
            if not bool(is_allowed.all()):
                row = int((~is_allowed).nonzero()[0])
                raise ValueError(
                    f"row {row} of attention_mask has padding after its first real token. The cache supports left "
                    "padding only: set tokenizer.padding_side = 'left', or pass use_cache=False."
                )
            positions = self._lengths[:, None] + step_index - (count - real[:, None])
            positions = positions.masked_fill(~mask, -1)
            longest = int((self._lengths + real).max())
        if longest > (self.max_length or longest) and not self.may_grow:
            raise ValueError(
                f"the cache was made for {self.max_length} tokens per row and {longest} are needed: pass a larger "
                "max_length to pod.PodCache, or none, and it grows"
            )
        self._step = Step(positions, self._lengths.clone(), longest, even, is_first)
        if self._evicting is not None:
            self._evicting.begin(self._step)

    def finish(self) -> None:
        """Count the tokens of the forward as stored; the model calls this after its last layer."""
        if self.store is not None:
            self.store.finish()
            self._columns += self._new_columns + self._left_out
            self._left_out = 0
            return
        step = self._step
        if self._evicting is not None:
            self._evicting.finish()
        self._lengths.copy_(torch.maximum(step.before, step.positions.amax(dim=1) + 1))
        self._longest = step.length
        self._columns += step.positions.shape[1]
        self._most_columns = max(self._most_columns, self._columns)
        self._even = step.even
        self._step = None

    def place_of_a_step(self) -> tuple | None:
        """Where all lies that a step of decoding reads and writes; None where a CUDA graph cannot repeat one.

        As long as this is the same, a step does the same on the device, but for what lies there.
        """
        stands_still = self.store is None and self._evicting is None and bool(self._segments) and self._columns > 0
        # A quantised layer is made full anew at every step, and the host chooses pages and the anchors' segments.
        if self.quantization is not None or self._quest is not None or self._shares_kv:
            return None
        if not stands_still or self._in_prefill or self._step is not None or self._longest >= self._capacity:
            return None
        if self._longest >= (self.max_length or self._capacity) and not self.may_grow:
            return None
        like = self._segments[0].values.data
        if not runs_triton(like):
            return None
        workspace = None if self._workspace is None else self._workspace.data_ptr()
        segments = tuple(part.data.data_ptr() for layer in self._segments for part in self._parts(layer))
        return (self._lengths.data_ptr(), tuple(self._lengths.shape), workspace, self.tau, *segments)

    def host_state(self) -> tuple:
        """What the host counts of the tokens stored."""
        return self._longest, self._columns, self._most_columns, self._even, self._step

    def set_host_state(self, state: tuple) -> None:
        """Put back what `host_state` said."""
        self._longest, self._columns, self._most_columns, self._even, self._step = state

    def advance(self) -> None:
        """Count one token more in every row, which a CUDA graph stores."""
        self._longest += 1
        self._columns += 1
        self._most_columns = max(self._most_columns, self._columns)

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
        """Store one layer's keys and values and attend to everything stored.

        Args:
            layer: index of the layer.
            q, k, v: [B, H, T, D] and [B, H_kv, T, D], after RoPE; q and k before it when the cache `rotates`. Under
                `share: kv`, where the cache takes anchors, heads that are no anchors have their anchor's k and v;
                elsewhere what they have is not looked at, and where no head is an anchor there may be none.
            q_distant, k_distant: the running anchors' [B, H, T, D] and [B, H_kv, T, D]; may be None for a layer of
                anchors, and where the cache does not take anchors.
            scale: factor on every logit.

        Returns:
            [B, H, T, D].
        """
        if self.store is not None:
            out = self.store.attend(layer, q, k, v, scale)
            return out if not v.requires_grad else _CacheBoundary.apply(out, v)
        step = self._step
        if self._evicting is not None:
            out = self._evicting.attend(layer, q, k, v, q_distant, k_distant, scale)
            return out if step.is_first or not v.requires_grad else _CacheBoundary.apply(out, v)
        out = self._attend(layer, q, k, v, q_distant, k_distant, scale)
        if self.quantization is not None:
            self._put_to_rest(layer)
        return out if step.is_first or not v.requires_grad else _CacheBoundary.apply(out, v)

    def _attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_distant: Tensor | None,
        k_distant: Tensor | None,
        scale: float,
    ) -> Tensor:
        """`attend` on the cache's own storage; quantised parts of this layer are left in full precision."""
        step = self._step
        count = q.shape[2]
        # Several queries of a filled cache still need ring entries that their own keys will push out.
        is_single = count == 1
        new_keys = self.write(layer, k, v, near=is_single or step.is_first)
        segments = self._full or self._segments[layer]
        if step.is_first:
            real = None if step.even else (step.positions >= 0).sum(dim=1)
            return shared_score_attention(
                q,
                k,
                v,
                q_distant,
                k_distant,
                sink_size=segments.sink_size,
                recent_size=segments.recent_size,
                scale=scale,
                lengths=real,
            )
        if self._shares_kv:
            out = self._attend_anchors(layer, q.detach(), scale)
            return out if not q.requires_grad else _CacheBoundary.apply(out, q)
        q = q.detach()
        shared = segments.order[segments.num_anchors :]
        uses_scores = is_single and self.config.share == "scores"
        if self._quest is not None and is_single and not self._in_prefill:
            self._choose_pages(layer, q)
            if layer >= self._quest.dense_layers:
                return paged_attention(
                    q,
                    segments,
                    torch.stack([step.read[int(self.blocks.anchors[layer, head]), head] for head in segments.order]),
                    positions=step.positions,
                    scores=self._scores(q) if uses_scores else None,
                    score_heads=self._score_heads[layer],
                    distant_keys=() if uses_scores else tuple(self._anchor_keys(layer, head) for head in shared),
                    scale=scale,
                )
        out = cached_attention(
            q,
            segments,
            positions=step.positions,
            lengths=step.positions[:, -1] + 1 if is_single else step.before,
            length=step.length,
            is_even=step.even,
            scores=self._scores(q) if uses_scores else None,
            score_heads=self._score_heads[layer],
            q_distant=None if uses_scores or not shared else (q if q_distant is None else q_distant.detach()),
            distant_keys=() if uses_scores else tuple(self._anchor_keys(layer, head) for head in shared),
            new_keys=None if is_single or not shared else new_keys.transpose(0, 1),
            scale=scale,
            masks=step.masks,
            tau=self.tau,
            stats=self._stats,
        )
        if not is_single:
            self._write_near(segments, new_keys, step)
        return out

    def write(self, layer: int, k: Tensor, v: Tensor, near: bool = True) -> Tensor | None:
        """Store one layer's keys and values of the forward that `begin` opened; `attend` calls it.

        Args:
            layer: index of the layer.
            k, v: [B, H_kv, T, D].
            near: also the other heads' own keys, the last ones of which push out older ones.

        Returns:
            [S, B, T, D] the own keys of the heads that are no anchors where these are still to be stored, else None.
        """
        step = self._step
        self._reserve(step.length, k)
        segments = self._segments[layer]
        if self._shares_kv and segments.num_anchors < k.shape[1]:
            k, v = k[:, self._orders[layer]], v[:, self._orders[layer]]
        if self.quantization is not None:
            segments = self._full = replace(segments, values=segments.values.full(), keys=segments.keys.full())
        is_plain = self.quantization is None and segments.pages is None
        if near and is_plain and k.shape[2] == 1 and not step.is_first and runs_triton(v):
            from pod_kernels.update import append  # imports triton

            append(segments, k.detach(), v.detach(), step.positions)
            return None
        stored_k = segments.stored(k.detach().transpose(0, 1))  # [H_kv, B, T, D]
        own = stored_k[segments.num_anchors :]
        self._write(segments.values, segments.stored(v.detach().transpose(0, 1)), step)
        self._write(segments.keys, stored_k[: segments.num_anchors], step)
        if near:
            self._write_near(segments, own, step)
        if segments.pages is not None:
            after = torch.maximum(step.before, step.positions[:, -1] + 1)
            self._refresh_pages(segments, step.before, after, step.positions.shape[1])
        return None if near else own

    # ------------------------------------------------------------------ rows

    def reset(self) -> None:
        """Forget all tokens and free the storage."""
        if self.store is not None:
            self.store.reset()
        self._segments = []
        self._full = None
        self._workspace = self._lengths = self._step = None
        self._longest = self._columns = self._most_columns = self._capacity = 0
        self._even = True
        self._stats = SkipStats()
        if self._evicting is not None:
            self._evicting.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put row `beam_idx[b]` in the place of row b (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        if self.batch_size < 0:
            return
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` [n], in that order."""
        if self.batch_size < 0:
            return
        rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        if self.store is not None:
            self.store.select(rows)
            return
        rows = rows.to(self._lengths.device)
        self._lengths = self._lengths[rows]
        if self._evicting is not None:
            self._evicting.select_rows(rows)
            return
        self._rebuild(lambda old, new: new.copy_(old[:, rows]), rows.tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens of every row (rejected drafts).

        Args:
            tokens_to_remove: a negative number of tokens, as transformers counts. Together with what was cropped and
                not written again, at most `crop_slack`.

        Raises:
            ValueError: positive, more than `crop_slack`, or more than a row holds.
        """
        removed = -tokens_to_remove
        if self.store is not None and removed:
            raise ValueError(
                f"{type(self.eviction).__name__} cannot take tokens back: what they pushed out is gone. Decode without "
                "draft tokens (no assistant_model, no prompt_lookup_num_tokens), or make the cache without eviction."
            )
        if removed < 0:
            raise ValueError(f"crop takes a negative number of tokens to remove, got {tokens_to_remove}")
        if removed == 0:
            return
        shortest = 0 if self._lengths is None else int(self._lengths.min())
        gone = self._most_columns - self._columns
        if gone + removed > self.crop_slack or removed > shortest:
            raise ValueError(
                f"cannot take back {removed} tokens: recent keys are kept for {self.crop_slack} (crop_slack), {gone} "
                f"are taken back already and the shortest row holds {shortest}. Make the cache with a larger "
                "crop_slack."
            )
        if self._evicting is not None:
            self._evicting.check_crop(removed)
        self._lengths -= removed
        self._longest -= removed
        self._columns -= removed
        if self._evicting is not None:
            self._evicting.crop(self._lengths, removed)
        for segments in self._segments if self._quest is not None else ():
            self._refresh_pages(segments, (self._lengths - 1).clamp(min=0), self._lengths, 1)

    # ------------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to one safetensors file, so that another process goes on where this one is.

        Tokens, settings (eviction method, tau, crop_slack, max_length) and counts are in it; the model's weights are
        not, and the file says nothing about them. Unused capacity is not written where slots are positions.

        Args:
            path: the file; written aside and renamed, so that a reader never meets half of it. Folders are made.

        Raises:
            ValueError: nothing is stored yet, `prefill()` is open, or a method that `pod.eviction.parse` does not know.
            OSError: it cannot be written.
        """
        if self.batch_size < 0 or self._in_prefill:
            raise ValueError("a cache is saved when it holds tokens, and outside cache.prefill()")
        is_window = self.config.share == "window"
        facts = {
            "max_length": self.max_length,
            "may_grow": self.may_grow,
            "crop_slack": self.crop_slack,
            "tau": self.tau,
            "quantization": None if self.quantization is None else asdict(self.quantization),
            "capacity": self._capacity,
            "eviction": None if self.eviction is None or is_window else unparse(self.eviction),
            "columns": self._columns,
            "most_columns": self._most_columns,
            "longest": self._longest,
            "even": self._even,
            "stats": asdict(self.stats),
        }
        tensors = {} if self._lengths is None else {"lengths": self._lengths}
        if self.store is not None or self._evicting is not None:
            more, facts["storage"] = (self.store or self._evicting).state()
            tensors |= more
        for index, segments in enumerate(self._segments):
            for number, part in enumerate(self._parts(segments)):
                used = self._quest.pages(self._longest) if number == PAGES else self._longest
                if isinstance(part, QuantizedSegments):
                    tensors |= part.named(f"layers.{index}.{number}")
                else:
                    tensors[f"layers.{index}.{number}"] = part.rectangle[:, :, :used]
        write_cache(path, tensors, facts, self.config)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], config: PreTrainedConfig, device: str | torch.device = "cpu"
    ) -> "PodCache":
        """A cache that `save` wrote, as it was.

        Args:
            path: the file.
            config: of the model that filled it.
            device: where the model is.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: truncated or no cache, or the config is another one; names the file and what differs.
        """
        tensors, facts = read_cache(path, config, device)
        try:
            eviction = None if facts["eviction"] is None else parse(facts["eviction"])
            quantization = facts["quantization"] and Quantization(**facts["quantization"])
            cache = cls(config, facts["max_length"], eviction, facts["tau"], facts["crop_slack"], quantization)
            cache._restore(tensors, facts)
        except (KeyError, IndexError, TypeError, RuntimeError) as error:
            raise ValueError(f"{path}: the tensors are not those that the metadata describes: {error!r}") from error
        return cache

    def _restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self.may_grow, self._even, self._longest = facts["may_grow"], facts["even"], facts["longest"]
        self._columns, self._most_columns = facts["columns"], facts["most_columns"]
        self._stats = SkipStats(**facts["stats"])
        self._lengths = tensors.get("lengths")
        if self.store is not None or self._evicting is not None:
            (self.store or self._evicting).restore(tensors, facts["storage"])
            return
        # What grew is not written where slots are positions; groups are written whole.
        self._capacity = facts["capacity"] if self.quantization else max(self.max_length or 0, self._longest)
        self._segments = [self._allocate(layer, tensors[f"layers.{layer}.2"]) for layer in range(self._num_layers)]
        for index, segments in enumerate(self._segments):
            for number, part in enumerate(self._parts(segments)):
                name = f"layers.{index}.{number}"
                if isinstance(part, QuantizedSegments):
                    for own, held in zip(part.tensors(), part.named(name), strict=True):
                        own.copy_(tensors[held])
                    continue
                held = tensors[name]
                if part.data.numel():
                    part.rectangle[:, :, : held.shape[2]].copy_(held)

    # ------------------------------------------------------------------ storage

    @staticmethod
    def _parts(segments: LayerSegments) -> tuple[Segments, ...]:
        parts = segments.values, segments.keys, segments.near
        return parts if segments.pages is None else (*parts, segments.pages)

    def _near_capacity(self) -> int:
        return min(self._capacity, self.config.sink_size + self.config.recent_size + self.crop_slack)

    def _allocate(self, layer: int, like: Tensor) -> LayerSegments:
        kwargs = {"dim": like.shape[-1], "lengths": self._lengths, "dtype": like.dtype, "device": like.device}
        order, anchors = self._orders[layer], self._num_anchors[layer]
        others = len(order) - anchors
        pages = None

        def stored(heads: int, is_key: bool) -> Segments | QuantizedSegments:
            if self.quantization is None:
                return Segments.allocate(heads=heads, capacity=self._capacity, **kwargs)
            batch = self._lengths.shape[0]
            sizes = [[self.quantization.rounded(self._capacity)] * batch] * heads
            where = {"dtype": like.dtype, "device": like.device}
            return QuantizedSegments.allocate(self.quantization, is_key, sizes, batch, like.shape[-1], **where)

        if self._quest is not None:
            paged = kwargs | {"dim": 2 * like.shape[-1]}
            pages = Segments.allocate(heads=anchors, capacity=self._quest.pages(self._capacity), **paged)
        return LayerSegments(
            order=tuple(range(anchors)) if self._shares_kv else order,
            num_anchors=anchors,
            values=stored(len(order), is_key=False),
            keys=stored(anchors, is_key=True),
            near=Segments.allocate(heads=others, capacity=self._near_capacity(), **kwargs),
            sink_size=self.config.sink_size,
            recent_size=self.config.recent_size,
            ring_size=self.config.recent_size + self.crop_slack,
            pages=pages,
        )

    def _reserve(self, length: int, like: Tensor) -> None:
        if self._segments and length <= self._capacity:
            return
        if not self._segments:
            self._capacity = self.max_length or length
            self._segments = [self._allocate(layer, like) for layer in range(self._num_layers)]
            return
        # An eighth more than is needed: n tokens then cost O(n) copies in all, and at most an eighth is unused.
        self._capacity = length + length // 8
        self._rebuild(lambda old, new: new[:, :, : old.shape[2]].copy_(old))

    def _rebuild(self, fill, rows: list[int] | None = None) -> None:
        """Allocate anew, layer by layer, and fill each part from its predecessor; `rows` when these are chosen."""
        for index, old in enumerate(self._segments):
            new = self._allocate(index, old.near.data)
            for old_part, new_part in zip(self._parts(old), self._parts(new), strict=True):
                if isinstance(old_part, QuantizedSegments):
                    new_part.take(old_part, rows)
                elif old_part.data.numel():
                    fill(old_part.rectangle, new_part.rectangle)
            self._segments[index] = new
        self._workspace = None

    def _scores(self, q: Tensor) -> Tensor:
        batch = q.shape[0]
        if self._workspace is None or self._workspace.shape[-1] < self._capacity:
            self._workspace = torch.empty(
                self._num_kv_heads, batch, self._groups, 1, self._capacity, dtype=torch.float32, device=q.device
            )
        return self._workspace

    def _attend_anchors(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Attention of q [B, H, T, D] to the keys and values of the layer's anchors, which are stored (`share: kv`)."""
        step, parts = self._step, []
        for anchor, head, heads in self._runs[layer]:
            segments = self._segments[anchor]
            if heads < segments.num_anchors:
                segments = segments.part(self._orders[anchor].index(head), heads)
            parts.append(
                cached_attention(
                    q[:, head * self._groups : (head + heads) * self._groups],
                    segments,
                    positions=step.positions,
                    lengths=step.before,
                    length=step.length,
                    is_even=step.even,
                    scale=scale,
                    masks=step.masks,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _choose_pages(self, layer: int, q: Tensor) -> None:
        """Note what the blocks anchored in `layer` read for the queries q [B, H, 1, D]."""
        segments, step = self._segments[layer], self._step
        anchors = segments.num_anchors
        if anchors:
            asked = segments.stored(q.unflatten(1, (self._num_kv_heads, -1))[:, :, :, 0].transpose(0, 1))[:anchors]
            read = self._quest.choose(asked, segments.pages.rectangle, step.positions, step.length)
            step.read.update({(layer, head): read[place] for place, head in enumerate(segments.order[:anchors])})

    def _refresh_pages(self, segments: LayerSegments, before: Tensor, after: Tensor, most: int) -> None:
        if segments.num_anchors:
            keys, pages = segments.keys.rectangle, segments.pages.rectangle
            refresh_pages(pages, keys, before, after, self._quest.page_size, most)

    def _anchor_keys(self, layer: int, head: int) -> tuple[Segments, int]:
        anchor = int(self.blocks.anchors[layer, head])
        keys, place = self._segments[anchor].keys, self._segments[anchor].order.index(head)
        return (keys, place) if self.quantization is None else (keys.full(place), 0)

    def _put_to_rest(self, layer: int) -> None:
        """Quantise what the forward has written, and let go of the layer in full precision."""
        step, full, segments = self._step, self._full, self._segments[layer]
        used = torch.maximum(step.before, step.positions[:, -1] + 1)
        for rest, written in ((segments.values, full.values), (segments.keys, full.keys)):
            rest.absorb(written, used.repeat(len(rest.sizes)))
        self._full = None

    @staticmethod
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
            rows, columns = (step.positions >= 0).nonzero(as_tuple=True)
            data[:, rows, step.positions[rows, columns]] = new[:, rows, columns]

    @staticmethod
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
        last = positions[:, -1:]
        kept = (positions >= 0) & ((positions < segments.sink_size) | (positions > last - segments.ring_size))
        rows, columns = kept.nonzero(as_tuple=True)
        data[:, rows, segments.near_slots(positions[rows, columns])] = new[:, rows, columns]


class _CacheBoundary(torch.autograd.Function):
    """Stored keys and values have no history: a backward through them would be silently partial, so it is refused."""

    @staticmethod
    def forward(ctx, out: Tensor, v: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        raise RuntimeError(
            "gradients do not flow through tokens that a cache holds: pass the whole sequence at once with "
            "use_cache=False, or decode under torch.no_grad()"
        )


def _runs(anchors: list[int]) -> list[tuple[int, int, int]]:
    """(anchor, first KV head, heads) of each run of heads with one anchor layer, which stores them side by side."""
    runs, first = [], 0
    for anchor, run in groupby(anchors):
        runs.append((anchor, first, len(list(run))))
        first += runs[-1][2]
    return runs


def _check_quantization(
    spec: Quantization, tau: float | None, eviction: Eviction | StoragePolicy | None, crop_slack: int
) -> None:
    if not isinstance(spec, Quantization):
        raise ValueError(f"quantization must be such as pod.Quantization(bits=4), got {spec!r}")
    if tau is not None:
        raise ValueError(f"tau={tau} cannot be combined with quantization: every value is read to be made full")
    name = type(eviction).__name__
    if isinstance(eviction, StoragePolicy):
        raise ValueError(f"quantization cannot be combined with {name}, which organises storage or pages itself")
    if eviction is not None and eviction.when and eviction.query_aware:
        raise ValueError(
            f"quantization cannot be combined with {name}, which evicts while decoding: a quantised token cannot be "
            "replaced by another. Make it with query_aware=False, or choose SnapKV, PyramidKV or AdaKV"
        )
    if eviction is not None and eviction.preference_window:
        raise ValueError(
            f"quantization cannot be combined with {name}, which takes tokens from layers that are quantised already"
        )
    if spec.residual < crop_slack:
        raise ValueError(
            f"quantization keeps {spec.residual} tokens in full precision (residual), but crop_slack is {crop_slack}: "
            "what is quantised cannot be taken back. Lower crop_slack, or raise residual"
        )


def _shape_of(config: PreTrainedConfig) -> str:
    return (
        f"{config.num_hidden_layers} layers, {config.num_attention_heads} heads, {config.num_key_value_heads} KV "
        f"heads of {config.head_dim}, sink_size {config.sink_size}, recent_size {config.recent_size}, "
        f"share {config.share}"
    )
