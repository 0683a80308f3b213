"""PoD's attention inside vLLM: where a layer's keys and values lie in vLLM's blocks, and what a step is told.

There are two kinds of caches, each with block tables of its own. A layer's far one holds the values of its KV heads,
and the keys of those that are anchors, for all tokens. The near one is of all layers together: the other heads' own
keys, of sinks and recent tokens, and keys and values of heads that stream.
Under tensor parallelism a rank has its own KV heads of both.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheLayout

from pod.grouping import STREAMS
from pod.serving.near_keys import NearKeysSpec
from pod_kernels.block_tables import block_table_attention
from pod_kernels.tables import Part, Store, Tiles

RUNNING = "pod"  # the running anchors' queries, in the context of a forward


@dataclass(frozen=True)
class Step:
    """What the caches of one block table are told of a step.

    Attributes:
        table: [R, blocks] int32.
        places: [T] where the new tokens go.
        tiles: the step's queries.
    """

    table: Tensor
    places: Tensor
    tiles: list[Tiles]


class StepBuilder(AttentionMetadataBuilder):
    """Makes a `Step` of vLLM's metadata."""

    def __init__(self, *arguments: Any) -> None:  # abstract in vLLM
        super().__init__(*arguments)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        common, count = common_attn_metadata, common_attn_metadata.num_reqs
        lengths = common.seq_lens_cpu_upper_bound  # exact where nothing is speculated
        lengths = common.seq_lens.cpu() if lengths is None else lengths
        return Step(
            common.block_table_tensor,
            common.slot_mapping[: common.num_actual_tokens],
            Tiles.of(common.query_start_loc_cpu[: count + 1].numpy(), lengths[:count].numpy(), self.device),
        )


class BlockTables(AttentionBackend):
    """The backend, as vLLM asks for it: PoD's attention writes and reads the blocks by itself."""

    supported_dtypes = [torch.float32, torch.float16, torch.bfloat16]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return AttentionImpl

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Blocks outermost: layers of unequal pages then share one pool."""
        return (KVCacheLayout.BLHNC,)


class CacheLayer(nn.Module, AttentionLayerBase):
    """One cache of one layer, or of several: vLLM asks it for its spec, and gives it its blocks.

    Args:
        name: by which vLLM knows it.
        vectors: of each token; `take` adds to them.
        near: (sink_size, recent_size) where only these tokens are kept; None: all.
    """

    def __init__(self, name: str, vectors: int, num_kv_heads: int, near: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.layer_name, self.vectors, self.num_kv_heads, self.near = name, vectors, num_kv_heads, near
        self.kv_cache = torch.empty(0)
        self.impl = None
        vllm_config = get_current_vllm_config()
        self.num_heads = vllm_config.model_config.hf_config.num_attention_heads
        vllm_config.compilation_config.static_forward_context[name] = self

    def take(self, vectors: int) -> int:
        """See to so many vectors more of each token; the first one's number."""
        self.vectors += vectors
        return self.vectors - vectors

    def get_attn_backend(self) -> type[AttentionBackend]:
        return BlockTables

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        """`vectors` of head_dim numbers for each token."""
        model = vllm_config.model_config
        head_dim = model.hf_config.head_dim
        fields: dict[str, Any] = {
            "block_size": vllm_config.cache_config.block_size,
            "num_kv_heads": self.num_kv_heads,
            "head_size": head_dim,
            "dtype": model.dtype,
            "num_head_slots": self.vectors,
            "state_content_bytes": head_dim * model.dtype.itemsize,
            "dcp_sharded": False,
        }
        if self.near is None:
            return FullAttentionSpec(**fields)
        return NearKeysSpec(sink_size=self.near[0], sliding_window=self.near[1], **fields)

    def store(self, context: ForwardContext) -> Store:
        """Its blocks [blocks, vectors, tokens of a block, head_dim], and this step's tables."""
        return Store(self.kv_cache, context.attn_metadata[self.layer_name].table)

    def write(self, context: ForwardContext, vectors: Tensor, first: int = 0) -> None:
        """[T, n, head_dim] of the step's tokens, to its vectors from `first` on."""
        step = context.attn_metadata[self.layer_name]
        store = Store(self.kv_cache[:, first : first + vectors.shape[1]], step.table)
        store.write(vectors[: len(step.places)].to(self.kv_cache.dtype), step.places)


@dataclass(frozen=True)
class Source:
    """Vectors `slots` [K] of a cache are the keys, or values, of the rank's KV heads `heads` [K]."""

    cache: CacheLayer
    slots: Tensor
    heads: Tensor

    @classmethod
    def of(cls, cache: CacheLayer, slots: Iterable[int], heads: Iterable[int]) -> "Source":
        return cls(cache, torch.tensor(list(slots)), torch.tensor(list(heads)))

    def part(self, context: ForwardContext) -> Part:
        """The same of this step's tables."""
        return Part(self.cache.store(context), self.slots, self.heads)


@dataclass(frozen=True)
class Heads:
    """KV heads `places` of the rank that are attended to alike; of the sources, the heads are counted among them.

    Attributes:
        values, near_keys, distant_keys: where these are, by `block_table_attention`'s rules.
    """

    places: list[int]
    values: list[Source]
    near_keys: list[Source] | None
    distant_keys: list[Source] | None

    def of(self, states: Tensor, count: int) -> Tensor:
        """[T, H, D] of all `count` KV heads -> the same of these."""
        if len(self.places) == count:
            return states
        return states.unflatten(1, (count, -1))[:, self.places].flatten(1, 2)


class PodAttention(nn.Module):
    """Takes the place of vLLM's `Attention` in a layer: queries, keys and values after RoPE in, the output out.

    The anchors' queries travel in the context of the forward, from the anchor to the last layer that reads them.

    Args:
        config: the PoD config.
        layer: its number.
        heads: the rank's KV heads.
        scale: of the logits.
        name: the layer's own, as vLLM has it.
        below: the attention of the layers below.
    """

    def __init__(
        self, config: PreTrainedConfig, layer: int, heads: range, scale: float, name: str, below: list["PodAttention"]
    ) -> None:
        super().__init__()
        layout, count = config.blocks.layout(), len(heads)
        self.layer, self.share, self.scale = layer, config.share, scale
        self.head_dim, self.count = config.head_dim, count
        self.sizes = {"sink_size": config.sink_size, "recent_size": config.recent_size}
        # Under `share: window` no token is distant to any head.
        anchors = [STREAMS if self.share == "window" else layout.anchors[layer][head] for head in heads]
        self.own = [place for place, anchor in enumerate(anchors) if anchor == layer]
        self.others = [place for place, anchor in enumerate(anchors) if anchor not in (layer, STREAMS)]
        self.streams = [place for place, anchor in enumerate(anchors) if anchor == STREAMS]
        self.readers = [place for place in self.own if not layout.ends[layer][heads[place]]]
        self.last_reader = max((layout.last_layers[layer, heads[place]] for place in self.own), default=layer)
        # What is stored: under `share: kv` keys and values of anchors, and of other heads nothing.
        self.held = self.own if self.share == "kv" else sorted(self.own + self.others)
        self.apart = [] if self.share == "kv" else self.others
        self.far = self.near = None
        if self.held:
            self.far = CacheLayer(f"{name}.far", len(self.held) + len(self.own), count)
        if vectors := len(self.apart) + 2 * len(self.streams):
            # One for all layers: vLLM parts caches of windows whose blocks have unequal sizes, and loses some.
            self.near = next((one.near for one in below if one.near is not None), None) or CacheLayer(
                f"{name}.near", 0, count, (config.sink_size, config.recent_size)
            )
            self.first = self.near.take(vectors)
        of_layer = {layer: self} | {anchor: below[anchor] for anchor in set(anchors) - {layer, STREAMS}}
        # Lists, so that the layers below do not become modules of this one.
        self.by_anchor = [
            (one, [place for place, anchor in enumerate(anchors) if anchor == number])
            for number, one in sorted(of_layer.items())
            if number in anchors
        ]
        self.parts = [self._looking_far()] if self.by_anchor else []
        self.parts += [self._streaming()] if self.streams else []

    def _looking_far(self) -> Heads:
        """The heads that see all tokens."""
        places = sorted(self.own + self.others)
        number = {place: among for among, place in enumerate(places)}

        def anchors_of(first: Callable[[PodAttention], int]) -> list[Source]:
            return [
                Source.of(one.far, (first(one) + one.own.index(place) for place in some), map(number.get, some))
                for one, some in self.by_anchor
            ]

        distant = anchors_of(lambda one: len(one.held))
        if self.share == "kv":
            return Heads(places, anchors_of(lambda one: 0), None, distant)
        values = [Source.of(self.far, range(len(places)), range(len(places)))]
        if not self.others:  # plain causal attention
            return Heads(places, values, None, distant)
        slots = range(self.first, self.first + len(self.others))
        near = [Source.of(self.near, slots, map(number.get, self.others))]
        if self.own:
            slots = range(len(places), len(places) + len(self.own))
            near.append(Source.of(self.far, slots, map(number.get, self.own)))
        return Heads(places, values, near, distant)

    def _streaming(self) -> Heads:
        """The heads that see sinks and recent tokens alone."""
        count, first = len(self.streams), self.first + len(self.apart)
        values, keys = (
            [Source.of(self.near, range(start, start + count), range(count))] for start in (first, first + count)
        )
        return Heads(self.streams, values, keys, None)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H * D], k and v [T, H_kv * D] -> [T, H * D]; zeros where vLLM only measures the memory."""
        context = get_forward_context()
        if context.attn_metadata is None:
            return torch.zeros_like(q)
        q, k, v = (states.unflatten(-1, (-1, self.head_dim)) for states in (q, k, v))
        if self.far is not None:
            self.far.write(context, torch.cat([v[:, self.held], k[:, self.own]], dim=1))
        if self.near is not None:
            mine = (k[:, self.apart], v[:, self.streams], k[:, self.streams])
            self.near.write(context, torch.cat(mine, dim=1), self.first)
        distant = self._distant_queries(context, q) if self.share == "scores" else None
        outs = [self._attend(context, heads, q, distant) for heads in self.parts]
        if len(outs) == 1:
            return outs[0].flatten(1)
        out = torch.empty_like(q).unflatten(1, (self.count, -1))
        for heads, found in zip(self.parts, outs, strict=True):
            out[:, heads.places] = found.unflatten(1, (len(heads.places), -1))
        return out.flatten(1)

    def _attend(self, context: ForwardContext, heads: Heads, q: Tensor, distant: Tensor | None) -> Tensor:
        """[T, H, D] of some KV heads; q and, where others' queries are read, `distant` are of all."""

        def parts(sources: list[Source] | None) -> list[Part] | None:
            return sources and [source.part(context) for source in sources]

        return block_table_attention(
            heads.of(q, self.count),
            None if distant is None or heads.distant_keys is None else heads.of(distant, self.count),
            parts(heads.near_keys),
            parts(heads.distant_keys),
            parts(heads.values),
            context.attn_metadata[heads.values[0].cache.layer_name].tiles,
            **self.sizes,
            scale=self.scale,
        )

    def _distant_queries(self, context: ForwardContext, q: Tensor) -> Tensor | None:
        """[T, H, D]: each head's anchor's; None where all heads are anchors. Hands on what layers above will read."""
        running = context.additional_kwargs.setdefault(RUNNING, {})
        by_head = q.unflatten(1, (self.count, -1))  # [T, H_kv, G, D]
        if self.readers:
            running[self.layer] = by_head[:, self.readers]  # a copy: q is a view of all that the layer projected
        if not self.others:
            return None
        distant = by_head.clone()
        for one, places in self.by_anchor:
            if one is not self:
                distant[:, places] = running[one.layer][:, [one.readers.index(place) for place in places]]
                if one.last_reader == self.layer:
                    del running[one.layer]
        return distant.flatten(1, 2)
