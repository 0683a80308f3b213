"""PoD models: one attention layer for all families, and `convert`, which turns a Hugging Face LLM into one.

Legend: B rows, T tokens, H query heads, H_kv KV heads, G = H / H_kv, D head dimension.

The running anchors travel from layer to layer as explicit positional tensors, one pair per KV head: the query group
[B, G, T, D] and the key [B, T, D]; under `share: kv` the value [B, T, D] and the key. An anchor head whose block goes
on puts its own there, elsewhere a layer hands on what it was given, and where no later layer reads a pair it is None.
This form is exact under both kinds of gradient checkpointing, torch.compile and ZeRO-3. Positional it must be:
checkpointing closes over keyword arguments.

With a `SequenceShard`, T is the rank's part of the sequence outside attention and the whole sequence inside it, where
H and H_kv are the rank's own heads; so the anchors travel head-sharded.

A further family takes a config class in `pod.config` and an entry in `FAMILIES`, when its attention is q, k, v
projections, optional q/k norm, RoPE and an output projection, and its layer is the usual pre-norm pair.
docs/NEW_FAMILY.md walks through Phi-3, whose projections are one matrix.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    MistralModel,
    Phi3Config,
    Phi3ForCausalLM,
    Phi3Model,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, apply_rotary_pos_emb
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralDecoderLayer
from transformers.models.phi3.modeling_phi3 import Phi3Attention, Phi3DecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer

from pod.blocks import LayerBlocks
from pod.cache import PodCache
from pod.config import PodLlamaConfig, PodMistralConfig, PodPhi3Config, PodQwen2Config, PodQwen3Config, check_sizes
from pod.files import opening
from pod.graph import StepGraphs, step_graphs
from pod.sequence_parallel import SequenceShard
from pod_kernels import shared_score_attention

CHANGING_ROPES = ("dynamic", "longrope")  # kinds of RoPE scaling whose frequencies depend on the longest position

Anchors = tuple[Tensor | None, ...]  # (query group or value, key) of KV head 0, of KV head 1, ...


class PodAttention:
    """Self-attention whose distant logits come from the block's anchor layer (PoD, arXiv 2412.02252, Eq. 3 and 4).

    Under `share: kv` it is cross-layer attention (arXiv 2405.12981): plain causal attention to the anchor's keys and
    values. A layer without anchors then never uses its projections to keys and values (`unused_parameters`).

    Mixed into a family's attention, whose projections and norms it uses.
    """

    def plan(self, blocks: LayerBlocks) -> None:
        """Note which heads of this layer are anchors, and whose pair a later layer still reads.

        Args:
            blocks: the model's blocks.
        """
        anchors = blocks.anchors
        heads = range(anchors.shape[1])
        ends = self.layer_idx + 1 == anchors.shape[0]
        self.anchor_of = tuple(int(anchors[self.layer_idx, g]) for g in heads)
        self.is_anchor = tuple(anchor == self.layer_idx for anchor in self.anchor_of)
        self.has_keys = self.config.share != "kv" or any(self.is_anchor)
        self.measure_gate = False  # validation switches it on
        self.gate: Tensor | None = None  # mean share of the softmax on proximal tokens, of the last forward
        self.goes_on = tuple(not ends and int(anchors[self.layer_idx + 1, g]) == self.anchor_of[g] for g in heads)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """[B, T, hidden] -> queries [B, T, H * D], keys and values [B, T, H_kv * D], before norm and RoPE.

        Keys and values are None where the layer has none of its own.
        """
        q = self.q_proj(hidden_states)
        return (q, self.k_proj(hidden_states), self.v_proj(hidden_states)) if self.has_keys else (q, None, None)

    def unused_parameters(self) -> Iterator[nn.Parameter]:
        """What no output depends on: a checkpoint holds it, so that it loads as any of its family, and it never learns.

        Strategies that wait for every gradient (DDP, ZeRO) want it frozen.
        """
        for name in ("k_proj", "v_proj", "k_norm") if not self.has_keys else ():
            if hasattr(self, name):
                yield from getattr(self, name).parameters()

    def forward(
        self,
        hidden_states: Tensor,
        anchors: Anchors,
        position_embeddings: tuple[Tensor, Tensor] | None,
        past_key_values: PodCache | None = None,
        lengths: Tensor | None = None,
        document_ids: Tensor | None = None,
        sequence: SequenceShard | None = None,
    ) -> tuple[Tensor, Anchors]:
        """One layer of attention.

        Args:
            hidden_states: [B, T, hidden].
            anchors: the running anchors, 2 * H_kv entries (the rank's KV heads with `sequence`).
            position_embeddings: (cos, sin) of RoPE; None when the cache rotates.
            past_key_values: cache to write to and read from.
            lengths: [B] real tokens of left-padded rows.
            document_ids: [B, T] of packed documents.
            sequence: the rank's part of a sequence that several ranks share; lengths and document_ids are whole.

        Returns:
            [B, T, hidden], and the running anchors for the next layer.
        """
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = self.project(hidden_states)
        q = q.view(shape)
        k, v = (q.new_empty(*q.shape[:2], 0, self.head_dim) if x is None else x.view(shape) for x in (k, v))
        if hasattr(self, "q_norm"):
            q = self.q_norm(q)
            k = self.k_norm(k) if self.has_keys else k
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if position_embeddings is not None:
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
            # Under autocast the projections are half precision and the rotation of q and k is not.
            q, k = q.to(v.dtype), k.to(v.dtype)

        heads = range(len(self.is_anchor))
        if sequence is not None:
            heads = sequence.kv_heads(len(self.is_anchor))
            q, k, v = sequence.to_heads(q, k, v)

        travels = past_key_values is None or past_key_values.takes_anchors(q.shape[2])
        following = self._hand_on(q, k, v, anchors, heads) if travels else anchors
        q_distant = k_distant = None
        if travels and self.config.share == "kv":
            k, v = self._keys_and_values(k, v, anchors, heads)
        elif travels:
            q_distant, k_distant = self._distant(q, k, anchors, heads)
        if past_key_values is None:
            if self.measure_gate and q_distant is None and self.config.share != "window":
                q_distant, k_distant = q, k  # its own scores, split where the others split theirs
            out = shared_score_attention(
                q,
                k,
                v,
                q_distant,
                k_distant,
                sink_size=self.config.sink_size,
                recent_size=self.config.recent_size,
                scale=self.scaling,
                lengths=lengths,
                document_ids=document_ids,
                window_only=self.config.share == "window",
                return_gate=self.measure_gate,
            )
            if self.measure_gate:
                out, gate = out
                self.gate = gate.mean()
        else:
            out = past_key_values.attend(self.layer_idx, q, k, v, q_distant, k_distant, self.scaling)
        if sequence is not None:
            out = sequence.to_tokens(out)
        out = out.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)
        return self.o_proj(out), following

    def _distant(self, q: Tensor, k: Tensor, anchors: Anchors, heads: range) -> tuple[Tensor | None, Tensor | None]:
        # `heads` are the model's numbers of k's heads; everything else counts k's own.
        if all(self.is_anchor[heads.start : heads.stop]):
            return None, None
        groups = q.shape[1] // k.shape[1]
        queries, keys = [], []
        for head, is_anchor in enumerate(self.is_anchor[heads.start : heads.stop]):
            own = q[:, head * groups : (head + 1) * groups]
            takes_own = is_anchor or self.config.share == "keys"
            queries.append(own if takes_own else anchors[2 * head])
            keys.append(k[:, head] if is_anchor else anchors[2 * head + 1])
        q_distant = q if self.config.share == "keys" else torch.cat(queries, dim=1)
        return q_distant, torch.stack(keys, dim=1)

    def _keys_and_values(self, k: Tensor, v: Tensor, anchors: Anchors, heads: range) -> tuple[Tensor, Tensor]:
        """Each head's anchor's, its own or handed on, [B, len(heads), T, D] each."""
        own = self.is_anchor[heads.start : heads.stop]
        if all(own):
            return k, v
        keys = [k[:, head] if is_anchor else anchors[2 * head + 1] for head, is_anchor in enumerate(own)]
        values = [v[:, head] if is_anchor else anchors[2 * head] for head, is_anchor in enumerate(own)]
        return torch.stack(keys, dim=1), torch.stack(values, dim=1)

    def _hand_on(self, q: Tensor, k: Tensor, v: Tensor, anchors: Anchors, heads: range) -> Anchors:
        groups = q.shape[1] // len(heads)
        following: list[Tensor | None] = []
        for head, number in enumerate(heads):
            is_anchor, goes_on = self.is_anchor[number], self.goes_on[number]
            if not goes_on:
                following += [None, None]
            elif not is_anchor:
                following += [anchors[2 * head], anchors[2 * head + 1]]
            else:
                first = {"scores": q[:, head * groups : (head + 1) * groups], "kv": v[:, head]}.get(self.config.share)
                # Copied out: a view would keep all heads' queries and keys alive as long as this pair travels.
                following += [
                    None if part is None else part.clone(memory_format=torch.contiguous_format)
                    for part in (first, k[:, head])
                ]
        return tuple(following)


class PodDecoderLayer:
    """A pre-norm decoder layer that takes the running anchors and hands them on; mixed into a family's layer.

    Attributes:
        mlp_tiles: in training, the MLP runs on so many parts of the tokens, one after the other, and each part again
            in the backward: its inner activations take 1 / mlp_tiles of their memory.
    """

    mlp_tiles = 1

    def forward(
        self,
        hidden_states: Tensor,
        *anchors: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor] | None,
        past_key_values: PodCache | None = None,
        lengths: Tensor | None = None,
        document_ids: Tensor | None = None,
        sequence: SequenceShard | None = None,
    ) -> tuple[Tensor | None, ...]:
        """[B, T, hidden] and the anchors in; the same out."""
        attended, anchors = self.self_attn(
            self.input_layernorm(hidden_states),
            anchors,
            position_embeddings=position_embeddings,
            past_key_values=past_key_values,
            lengths=lengths,
            document_ids=document_ids,
            sequence=sequence,
        )
        hidden_states = hidden_states + attended
        normed = self.post_attention_layernorm(hidden_states)
        if self.mlp_tiles == 1 or not self.training:
            return hidden_states + self.mlp(normed), *anchors
        # As many tiles on every rank, whatever is in them: under ZeRO-3 each gathers the MLP's parameters.
        tiles = normed.tensor_split(self.mlp_tiles, dim=1)
        mapped = torch.cat([checkpoint(self.mlp, tile, use_reentrant=False) for tile in tiles], dim=1)
        return hidden_states + mapped, *anchors


class PodModel:
    """The decoder stack; mixed into a family's base model.

    Class attributes:
        pod_layer, pod_attention: what the family's decoder layers and their attention become.

    Attributes:
        offload_checkpoints: with gradient checkpointing, what is kept for each layer's recomputation (hidden states and
            anchors) waits in the CPU's memory.
    """

    pod_layer: type[nn.Module]
    pod_attention: type[nn.Module]
    offload_checkpoints = False

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.become_pod()

    def become_pod(self) -> None:
        """Give the family's layers, which are built already, PoD's forward.

        PoD adds no parameter, so changing the class is all there is to it; building the layers a second time would
        double the time and memory of loading.
        """
        blocks = self.config.blocks
        for layer in self.layers:
            layer.__class__ = self.pod_layer
            layer.self_attn.__class__ = self.pod_attention
            layer.self_attn.plan(blocks)

    @contextmanager
    def unshared(self) -> Iterator[None]:
        """Inside, every layer has its own scores: the forward is that of the dense model on the same weights."""
        share, self.config.share = self.config.share, "scores"
        dense = LayerBlocks.dense(self.config.num_hidden_layers, self.config.num_key_value_heads)
        for layer in self.layers:
            layer.self_attn.plan(dense)
        try:
            yield
        finally:
            self.config.share = share
            blocks = self.config.blocks
            for layer in self.layers:
                layer.self_attn.plan(blocks)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: PodCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        document_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        sequence: SequenceShard | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast | tuple:
        """Run the decoder.

        Args:
            input_ids: [B, T] int64; or `inputs_embeds` [B, T, hidden].
            attention_mask: [B, tokens so far] with 0 for padding. Left padding is exact, sinks and recency count from
                each row's first real token; right padding without a cache too.
            position_ids: [B, T] or [1, T] for RoPE. Where they start again and there is neither mask nor cache, a new
                packed document begins, as in transformers.
            past_key_values: a `PodCache`.
            use_cache: return a cache; config.use_cache when None, never in training.
            document_ids: [B, T] int64, non-decreasing, -1 padding: packed documents, without a cache.
            output_hidden_states: also return every layer's input and the last output.
            sequence: the part of the sequence that this rank runs, where the ranks of a group share one; without a
                cache. All other arguments are whole sequences, the same on every rank; the hidden states that are
                returned are the rank's part, [B, t, hidden].

        Raises:
            ValueError: an argument that PoD does not support, by name and with the remedy.
        """
        _check_devices(self)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise ValueError(
                "output_attentions is not supported: PoD never holds the [T, T] weights. Use "
                "pod.similarity.attention_similarity, or the dense model, to look at attention."
            )
        if self.training and self.config.attention_dropout:
            raise ValueError(
                f"attention_dropout={self.config.attention_dropout} is not supported: PoD never holds "
                "the [T, T] weights it would act on. Set config.attention_dropout = 0.0 to train."
            )
        if self.training and getattr(self.config, "resid_pdrop", 0):
            raise ValueError(
                f"resid_pdrop={self.config.resid_pdrop} is not supported: PoD's layers add what they computed without "
                "dropout. Set config.resid_pdrop = 0.0 to train."
            )
        if sequence is not None:
            if past_key_values is not None or use_cache:
                raise ValueError("a sequence shared by several ranks is for training without a cache: use_cache=False")
            use_cache = False
            if getattr(self.rotary_emb, "rope_type", "default") in CHANGING_ROPES:
                raise ValueError(
                    f"rope_type {self.rotary_emb.rope_type!r} takes its frequencies from the longest position at hand, "
                    "which differs from rank to rank where a sequence is shared: train with sequence_parallel_size=1"
                )
            if input_ids is not None:
                input_ids = sequence.take(input_ids)
            else:
                inputs_embeds = sequence.take(inputs_embeds)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        batch, count = inputs_embeds.shape[0], inputs_embeds.shape[1] if sequence is None else sequence.length
        checkpoints = self.gradient_checkpointing and self.training
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if past_key_values is None and use_cache and not checkpoints:
            past_key_values = PodCache(self.config)
        if past_key_values is not None:
            _check_cache(past_key_values, self.training)
            if document_ids is not None:
                raise ValueError("document_ids are for training without a cache: pass use_cache=False")
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        mask = _token_mask(attention_mask, batch, seen, count)
        lengths = None
        if mask is not None and past_key_values is None:
            if document_ids is not None:
                raise ValueError("pass attention_mask or document_ids, not both: document_ids mark padding with -1")
            lengths = _lengths_of(mask)
        if position_ids is None:
            position_ids = torch.arange(seen, seen + count, device=inputs_embeds.device)[None]
        elif document_ids is None and attention_mask is None:
            if past_key_values is None:
                document_ids = _documents_of(position_ids, batch)
            elif count > 1 and bool((position_ids[:, 1:] <= position_ids[:, :-1]).any()):
                raise ValueError(
                    "position_ids start again within a row: packed documents are for training without a cache, pass "
                    "use_cache=False"
                )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        kwargs = {"past_key_values": past_key_values, "lengths": lengths, "document_ids": document_ids}
        kwargs["sequence"] = sequence
        pieces = past_key_values.strides(count, mask, inputs_embeds.device) if past_key_values is not None else []
        if not pieces:
            all_states = self._run(inputs_embeds, position_ids, mask, output_hidden_states, **kwargs)
        else:
            all_states = []
            rows = torch.arange(batch, device=inputs_embeds.device)[:, None]
            for columns, is_real in pieces:
                part, at = inputs_embeds[rows, columns], position_ids.expand(batch, -1)[rows, columns]
                part_states = self._run(part, at, is_real, output_hidden_states, **kwargs)
                all_states = all_states or [torch.zeros_like(inputs_embeds) for _ in part_states]
                place = (rows, columns)
                if is_real is not None:
                    place = is_real.nonzero(as_tuple=True)[0], columns.expand(is_real.shape)[is_real]
                for states, new in zip(all_states, part_states, strict=True):
                    states[place] = new if is_real is None else new[is_real]
        output = BaseModelOutputWithPast(
            last_hidden_state=all_states[-1],
            past_key_values=past_key_values if use_cache or past_key_values is not None else None,
            hidden_states=tuple(all_states) if output_hidden_states else None,
        )
        return output if return_dict is None or return_dict else output.to_tuple()

    def _run(
        self,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        mask: Tensor | None,
        output_hidden_states: bool,
        past_key_values: PodCache | None,
        lengths: Tensor | None,
        document_ids: Tensor | None,
        sequence: SequenceShard | None,
    ) -> list[Tensor]:
        """Run all layers once: every layer's input where these are wanted, then the normed output, [B, T, hidden]."""
        if past_key_values is not None:
            past_key_values.begin(self.config, inputs_embeds, mask, self.rotary_emb)
        kv_heads = self.config.num_key_value_heads
        if sequence is not None:
            position_ids = sequence.take(position_ids)
            kv_heads = len(sequence.kv_heads(kv_heads))
        # A cache that rotates has asked for the angles it needs; asking for others would change a dynamic RoPE's state.
        rotates = past_key_values is not None and past_key_values.rotates
        position_embeddings = None if rotates else self.rotary_emb(inputs_embeds, position_ids=position_ids)
        states: Anchors = (inputs_embeds, *([None] * (2 * kv_heads)))
        all_states = []
        offloads = self.gradient_checkpointing and self.training and self.offload_checkpoints
        with kept_on_cpu() if offloads else nullcontext():
            for layer in self.layers:
                if output_hidden_states:
                    all_states.append(states[0])
                states = layer(
                    *states,
                    position_embeddings=position_embeddings,
                    past_key_values=past_key_values,
                    lengths=lengths,
                    document_ids=document_ids,
                    sequence=sequence,
                )
        if past_key_values is not None:
            past_key_values.finish()
        return [*all_states, self.norm(states[0])]


class PodForCausalLM:
    """What `generate` needs to know; mixed into a family's causal LM.

    Class attributes:
        pod_base: what the family's base model becomes.
    """

    pod_base: type[PreTrainedModel]
    _in_generate = False
    _graphs: StepGraphs | None = None  # of the `generate` call that is running

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.model.__class__ = self.pod_base
        self.model.become_pod()

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ) -> None:
        # The PoD cache is the default. Another implementation would store what PoD drops, or cannot hold two sizes.
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} is not supported by PoD models: "
                "leave it out, and generate uses pod.PodCache, which allocates once as a static cache does"
            )
        if generation_config.use_cache is False:
            return
        cache = model_kwargs.get("past_key_values")
        if cache is None:
            cache = PodCache(self.config, max_length=max_cache_length)
            cache.may_grow = True  # the limit is this call's: a further turn on the cache may go beyond it
            model_kwargs["past_key_values"] = cache
        else:
            _check_cache(cache, training=False)
            cache._is_user_defined = True

    def generate(self, *args, **kwargs):
        """transformers' generate; on a CUDA device its steps are one CUDA graph (`pod.graph`)."""
        outer, self._graphs, self._in_generate = (self._graphs, self._in_generate), None, True
        try:
            return super().generate(*args, **kwargs)
        finally:
            self._graphs, self._in_generate = outer

    def _step_by_graph(self, input_ids: Tensor, position_ids: Tensor | None, cache: PodCache) -> Tensor | None:
        """Logits of one step of `generate`, None where it has to run as it is."""
        if self._graphs is None or self._graphs.cache is not cache:

            def step(tokens: Tensor, positions: Tensor) -> Tensor:
                # Every row's new token is real: only a prompt has padding.
                options = {"position_ids": positions, "past_key_values": cache, "use_cache": True}
                return super(PodForCausalLM, self).forward(input_ids=tokens, **options).logits

            self._graphs = step_graphs(step, cache, input_ids.device)
        if self._graphs is None:
            return None
        if position_ids is None:
            position_ids = torch.full((1, 1), cache.get_seq_length(), device=input_ids.device)
        return self._graphs(input_ids, position_ids)

    def _prefill(self, input_ids, generation_config, model_kwargs, is_first_iteration=True):
        cache = model_kwargs.get("past_key_values")
        if cache is None or generation_config.prefill_chunk_size is None:  # in one piece: nothing has to wait
            return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)
        with cache.prefill():
            return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)

    def _assisted_decoding(self, input_ids, logits_processor, stopping_criteria, generation_config, *args, **kwargs):
        # It begins with all ids, whatever the cache holds, and those would be fed a second time.
        cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
        length = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
        if cache is not None and length == input_ids.shape[1]:
            cache.fed_before = cache.get_seq_length()
        return super()._assisted_decoding(
            input_ids, logits_processor, stopping_criteria, generation_config, *args, **kwargs
        )

    def prepare_inputs_for_generation(self, input_ids, next_sequence_length=None, **kwargs):
        cache = kwargs.get("past_key_values")
        if next_sequence_length is None and getattr(cache, "fed_before", 0):
            next_sequence_length, cache.fed_before = input_ids.shape[1] - cache.fed_before, 0
        return super().prepare_inputs_for_generation(input_ids, next_sequence_length, **kwargs)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: PodCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ):
        """The family's forward; see `PodModel.forward` for what PoD adds and refuses.

        The arguments are spelled out because `generate` reads them off the signature: what it does not find there
        (attention_mask, position_ids, logits_to_keep) it would not pass.
        """
        _check_devices(self)
        if labels is not None and kwargs.get("sequence") is not None:
            raise ValueError("a rank has the logits of its own tokens only: leave labels out, and sum over the ranks")
        is_step = self._in_generate and input_ids is not None and input_ids.shape[1] == 1 and not self.training
        if is_step and past_key_values is not None and set(kwargs) <= {"return_dict"} and labels is None:
            if not self.config.output_hidden_states:
                logits = self._step_by_graph(input_ids, position_ids, past_key_values)
                if logits is not None:
                    return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )


@contextmanager
def kept_on_cpu() -> Iterator[None]:
    """What autograd saves inside waits in the CPU's memory, pinned where it comes from a GPU.

    Unlike `torch.autograd.graph.save_on_cpu` this copies a tensor once, however often it is saved: a running anchor is
    saved by every layer of its block.
    """
    copies: dict[tuple, tuple[StorageWeakRef, Tensor]] = {}

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        storage = tensor.untyped_storage()
        place = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version, tensor.dtype)
        # A weak reference that is alive says that the address still belongs to the tensor that was copied.
        if place not in copies or copies[place][0].expired():
            copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            copies[place] = StorageWeakRef(storage), copy.copy_(tensor, non_blocking=tensor.is_cuda)
        return tensor.device, copies[place][1]

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        device, copy = packed
        return copy.to(device, non_blocking=True)

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        copies.clear()  # from here on autograd alone keeps the copies


def _check_devices(model: PreTrainedModel) -> None:
    devices = set(getattr(model, "hf_device_map", {}).values())
    if len(devices) > 1:
        raise ValueError(
            f"the model lies on several devices ({', '.join(sorted(map(str, devices)))}): the layers of a block share "
            "keys, and no device_map keeps them together. Load it with device_map={'': 0} (or {'': 'disk'}, which "
            "runs on one device), or use ZeRO-3 to train it."
        )


def _check_cache(cache: object, training: bool) -> None:
    if not isinstance(cache, PodCache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}: PoD models need pod.PodCache(model.config), or no cache at "
            "all, then generate makes one"
        )
    if training:
        raise ValueError("gradients do not flow through a cache: call model.eval(), or train without past_key_values")


def _token_mask(attention_mask: Tensor | None, batch: int, seen: int, count: int) -> Tensor | None:
    """The [B, T] bool mask of the new tokens, None when there is no mask."""
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        shape = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            f"attention_mask must be [B, tokens] with 0 for padding; got {shape}. A 4-D mask cannot say which keys are "
            "distant: pass document_ids for packed documents."
        )
    if attention_mask.shape[0] != batch or attention_mask.shape[1] not in (count, seen + count):
        raise ValueError(
            f"attention_mask must be [{batch}, {seen + count}] (tokens in the cache and new ones); got "
            f"{tuple(attention_mask.shape)}"
        )
    return attention_mask[:, -count:].bool()


def _lengths_of(mask: Tensor) -> Tensor | None:
    """[B] real tokens of left-padded rows; None when no row has padding on the left.

    Padding on the right needs nothing: no real token sees what comes after it, and sinks count from the left.
    """
    if bool(mask.all()):
        return None
    column = torch.arange(mask.shape[1], device=mask.device)
    real = mask.sum(dim=1)
    is_left = (mask == (column >= mask.shape[1] - real[:, None])).all(dim=1)
    is_right = (mask == (column < real[:, None])).all(dim=1)
    if bool(is_right.all()):
        return None
    if not bool(is_left.all()):
        row = int((~is_left).nonzero()[0])
        raise ValueError(
            f"row {row} of attention_mask is not left-padded while other rows are, or has a hole. Pad all rows on one "
            "side (tokenizer.padding_side = 'left')."
        )
    return real


def _documents_of(position_ids: Tensor, batch: int) -> Tensor | None:
    """[B, T] documents of packed samples, whose positions start again; None when they do not."""
    starts = torch.zeros_like(position_ids)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if not bool(starts.any()):
        return None
    return starts.cumsum(dim=1).expand(batch, -1)


@dataclass(frozen=True)
class Family:
    """The classes of one model family, stock and PoD."""

    stock_config: type[PreTrainedConfig]
    pod_config: type[PreTrainedConfig]
    pod_base: type[PreTrainedModel]
    pod_causal_lm: type[PreTrainedModel]


class PodLlamaAttention(PodAttention, LlamaAttention):
    """Llama's attention with shared distant scores."""


class PodLlamaDecoderLayer(PodDecoderLayer, LlamaDecoderLayer):
    """Llama's decoder layer with running anchors."""


class PodLlamaModel(PodModel, LlamaModel):
    """Llama's decoder stack with running anchors."""

    config_class = PodLlamaConfig
    config: PodLlamaConfig
    pod_layer = PodLlamaDecoderLayer
    pod_attention = PodLlamaAttention


class PodLlamaForCausalLM(PodForCausalLM, LlamaForCausalLM):
    """A Llama that shares the scores of distant tokens between neighbouring layers."""

    config_class = PodLlamaConfig
    config: PodLlamaConfig
    pod_base = PodLlamaModel


class PodMistralAttention(PodAttention, MistralAttention):
    """Mistral's attention with shared distant scores."""


class PodMistralDecoderLayer(PodDecoderLayer, MistralDecoderLayer):
    """Mistral's decoder layer with running anchors."""


class PodMistralModel(PodModel, MistralModel):
    """Mistral's decoder stack with running anchors."""

    config_class = PodMistralConfig
    config: PodMistralConfig
    pod_layer = PodMistralDecoderLayer
    pod_attention = PodMistralAttention


class PodMistralForCausalLM(PodForCausalLM, MistralForCausalLM):
    """A Mistral that shares the scores of distant tokens between neighbouring layers."""

    config_class = PodMistralConfig
    config: PodMistralConfig
    pod_base = PodMistralModel


class PodPhi3Attention(PodAttention, Phi3Attention):
    """Phi-3's attention with shared distant scores."""

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """[B, T, hidden] -> queries, keys and values, which one matrix gives."""
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        sizes = [count * self.head_dim for count in (heads, kv_heads, kv_heads)]
        q, k, v = self.qkv_proj(hidden_states).split(sizes, dim=-1)
        return (q, k, v) if self.has_keys else (q, None, None)


class PodPhi3DecoderLayer(PodDecoderLayer, Phi3DecoderLayer):
    """Phi-3's decoder layer with running anchors."""


class PodPhi3Model(PodModel, Phi3Model):
    """Phi-3's decoder stack with running anchors."""

    config_class = PodPhi3Config
    config: PodPhi3Config
    pod_layer = PodPhi3DecoderLayer
    pod_attention = PodPhi3Attention


class PodPhi3ForCausalLM(PodForCausalLM, Phi3ForCausalLM):
    """A Phi-3 (or Phi-4) that shares the scores of distant tokens between neighbouring layers."""

    config_class = PodPhi3Config
    config: PodPhi3Config
    pod_base = PodPhi3Model

    def prepare_inputs_for_generation(self, *args, **kwargs) -> dict:
        """The usual: the family's own drops the cache at `original_max_position_embeddings`, for LongRoPE's sake."""
        return GenerationMixin.prepare_inputs_for_generation(self, *args, **kwargs)


class PodQwen2Attention(PodAttention, Qwen2Attention):
    """Qwen2's attention with shared distant scores."""


class PodQwen2DecoderLayer(PodDecoderLayer, Qwen2DecoderLayer):
    """Qwen2's decoder layer with running anchors."""


class PodQwen2Model(PodModel, Qwen2Model):
    """Qwen2's decoder stack with running anchors."""

    config_class = PodQwen2Config
    config: PodQwen2Config
    pod_layer = PodQwen2DecoderLayer
    pod_attention = PodQwen2Attention


class PodQwen2ForCausalLM(PodForCausalLM, Qwen2ForCausalLM):
    """A Qwen2 that shares the scores of distant tokens between neighbouring layers."""

    config_class = PodQwen2Config
    config: PodQwen2Config
    pod_base = PodQwen2Model


class PodQwen3Attention(PodAttention, Qwen3Attention):
    """Qwen3's attention with shared distant scores."""


class PodQwen3DecoderLayer(PodDecoderLayer, Qwen3DecoderLayer):
    """Qwen3's decoder layer with running anchors."""


class PodQwen3Model(PodModel, Qwen3Model):
    """Qwen3's decoder stack with running anchors."""

    config_class = PodQwen3Config
    config: PodQwen3Config
    pod_layer = PodQwen3DecoderLayer
    pod_attention = PodQwen3Attention


class PodQwen3ForCausalLM(PodForCausalLM, Qwen3ForCausalLM):
    """A Qwen3 that shares the scores of distant tokens between neighbouring layers."""

    config_class = PodQwen3Config
    config: PodQwen3Config
    pod_base = PodQwen3Model


FAMILIES = {
    "llama": Family(LlamaConfig, PodLlamaConfig, PodLlamaModel, PodLlamaForCausalLM),
    "mistral": Family(MistralConfig, PodMistralConfig, PodMistralModel, PodMistralForCausalLM),
    "phi3": Family(Phi3Config, PodPhi3Config, PodPhi3Model, PodPhi3ForCausalLM),
    "qwen2": Family(Qwen2Config, PodQwen2Config, PodQwen2Model, PodQwen2ForCausalLM),
    "qwen3": Family(Qwen3Config, PodQwen3Config, PodQwen3Model, PodQwen3ForCausalLM),
}

for _family in FAMILIES.values():
    AutoConfig.register(_family.pod_config.model_type, _family.pod_config, exist_ok=True)
    AutoModel.register(_family.pod_config, _family.pod_base, exist_ok=True)
    AutoModelForCausalLM.register(_family.pod_config, _family.pod_causal_lm, exist_ok=True)


def pod_config(
    config: PreTrainedConfig, blocks: LayerBlocks, sink_size: int, recent_size: int, share: str
) -> PreTrainedConfig:
    """The PoD config of a stock (or PoD) config.

    Raises:
        ValueError: the family is unknown, the blocks are for another model, a size means nothing.
    """
    check_sizes(sink_size, recent_size, share)
    name = config.model_type.removeprefix("pod_")
    if name not in FAMILIES:
        raise ValueError(
            f"model family {config.model_type!r} is not supported; supported are {', '.join(sorted(FAMILIES))}. "
            "docs/NEW_FAMILY.md says what a further family takes."
        )
    blocks.check(config.num_hidden_layers, config.num_key_value_heads)
    fields = config.to_dict()
    fields.pop("model_type", None)
    fields.update(
        architectures=[FAMILIES[name].pod_causal_lm.__name__],
        anchors=blocks.anchors.tolist(),
        sink_size=sink_size,
        recent_size=recent_size,
        share=share,
    )
    return FAMILIES[name].pod_config.from_dict(fields)


def convert(
    model_or_path: PreTrainedModel | str | Path,
    blocks: LayerBlocks,
    sink_size: int = 16,
    recent_size: int = 4080,
    share: str = "scores",
) -> PreTrainedModel:
    """Turn a Hugging Face causal LM into a PoD model that shares its weights.

    Args:
        model_or_path: a causal LM of a supported family (or a PoD model, for other blocks), or where to load it from.
        blocks: which layers share distant scores, per KV head.
        sink_size, recent_size: proximal tokens.
        share: "scores" (the paper's Eq. 3) or "keys"; "kv" for cross-layer attention, which shares values too, where
            sink_size and recent_size mean nothing; "window" for window attention, with blocks of one layer.

    Returns:
        A PoD causal LM on the same parameters and buffers, none of them copied; training one trains the other. The
        given model stays usable.

    Raises:
        ValueError: unknown family, blocks for another model, sizes out of range, quantised weights, several devices.
    """
    model = model_or_path
    if isinstance(model, str | Path):
        with opening(model):
            model = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(
            "the model is quantised: load it without quantization_config, convert it and save it "
            "(save_pretrained); what was saved loads with quantization_config"
        )
    _check_devices(model)
    if hasattr(model, "hf_device_map") and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"the model's weights are offloaded (device_map={model.hf_device_map}): load it with device_map={{'': 0}} "
            "or without one, convert it and save it; what was saved loads offloaded"
        )
    config = pod_config(model.config, blocks, sink_size, recent_size, share)
    family = FAMILIES[model.config.model_type.removeprefix("pod_")]
    if not hasattr(model, "lm_head"):
        raise ValueError(f"{type(model).__name__} has no lm_head: pass a causal LM, loaded by AutoModelForCausalLM")
    with torch.device("meta"):
        converted = family.pod_causal_lm(config)
    # Parameters come as the very objects (keep_vars), so nothing is copied and tied weights stay tied. Assigning gives
    # them the requires_grad of what they replace: set that first, or frozen ones would thaw in both models.
    state = model.state_dict(keep_vars=True)
    for name, parameter in converted.named_parameters():
        parameter.requires_grad_(name not in state or state[name].requires_grad)
    converted.load_state_dict(state, assign=True)
    converted.model.rotary_emb = model.model.rotary_emb  # its frequencies are no part of the state
    converted.generation_config = model.generation_config
    return converted.train(model.training)
