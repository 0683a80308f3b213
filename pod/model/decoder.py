"""PoD models: attention and decoder layer of all families, decoder stack and causal LM, mixed into a family's classes.

Legend: B rows, T tokens, H query heads, H_kv KV heads, G = H / H_kv, D head dimension.

The running anchors travel from layer to layer as explicit positional tensors, one pair per KV head: the query group
[B, G, T, D] and the key [B, T, D]; under `share: kv` the value [B, T, D] and the key. An anchor head whose block goes
on puts its own there, elsewhere a layer hands on what it was given, and where no later layer reads a pair it is None,
as of a head that streams.
This form is exact under both kinds of gradient checkpointing, torch.compile and ZeRO-3. Positional it must be:
checkpointing closes over keyword arguments.

With a `SequenceShard`, T is the rank's part of the sequence outside attention and the whole sequence inside it, where
H and H_kv are the rank's own heads; so the anchors travel head-sharded.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.generation import CandidateGenerator, GenerationConfig, GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from pod.blocks import FIXED, LayerBlocks, whole_number
from pod.cache import PodCache
from pod.cache.storage import Pieces
from pod.eviction import ReadSelector
from pod.model.graph import StepGraphs, step_graphs
from pod.model.inputs import (
    CACHE,
    check_cache,
    check_supported,
    check_tokens,
    check_turn,
    documents_of,
    lengths_of,
    token_mask,
)
from pod.model.offload import kept_on_cpu
from pod.model.placement import GivenMap, check_spread_cache, current, layer_devices, place
from pod.model.sequence_parallel import SequenceShard
from pod.model.speculation import SelfDraft, check_draft, drafting, with_draft
from pod_kernels import shared_score_attention

CHANGING_ROPES = ("dynamic", "longrope")  # kinds of RoPE scaling whose frequencies depend on the longest position

Anchors = tuple[Tensor | None, ...]  # (query group or value, key) of KV head 0, of KV head 1, ...


def one_cache(past_key_values: PodCache | None, cache: PodCache | None) -> PodCache | None:
    """What was passed as a cache, by either of its names.

    Raises:
        ValueError: both were.
    """
    if past_key_values is not None and cache is not None:
        raise ValueError("past_key_values and cache are two names of one argument: pass one of them")
    return cache if past_key_values is None else past_key_values


class PodAttention(nn.Module):
    """Self-attention whose distant logits come from the block's anchor layer (PoD, arXiv 2412.02252, Eq. 3 and 4).

    Under `share: kv` it is cross-layer attention (arXiv 2405.12981): plain causal attention to the anchor's keys and
    values. A layer without anchors then never uses its projections to keys and values (`unused_parameters`).

    A family's attention becomes one, with the projections and norms that it has (`PodModel.become_pod`).
    """

    def plan(self, blocks: LayerBlocks) -> None:
        """Note which heads of this layer are anchors, and whose pair a later layer still reads.

        Args:
            blocks: the model's blocks.
        """
        layout, layer = blocks.layout(), self.layer_idx
        self.is_anchor = tuple(anchor == layer for anchor in layout.anchors[layer])
        self.streams = layout.streams[layer]
        self.has_keys = self.config.share != "kv" or any(self.is_anchor)
        self.measure_gate = False  # validation switches it on
        self.gate: Tensor | None = None  # mean share of the softmax on proximal tokens, of the last forward
        self.goes_on = tuple(not ends for ends in layout.ends[layer])

    def project(self, hidden_states: Tensor, has_keys: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """[B, T, hidden] -> queries [B, T, H * D], keys and values [B, T, H_kv * D], before norm and RoPE.

        Keys and values are None unless the layer is to have its own.
        """
        q = self.q_proj(hidden_states)
        return (q, self.k_proj(hidden_states), self.v_proj(hidden_states)) if has_keys else (q, None, None)

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
        unshared: bool = False,
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
            unshared: plain causal attention with the layer's own queries, keys and values; without a cache.

        Returns:
            [B, T, hidden], and the running anchors for the next layer.
        """
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        has_keys = self.has_keys or unshared
        q, k, v = self.project(hidden_states, has_keys)
        q = q.view(shape)
        k, v = (q.new_empty(*q.shape[:2], 0, self.head_dim) if x is None else x.view(shape) for x in (k, v))
        if hasattr(self, "q_norm"):
            q = self.q_norm(q)
            k = self.k_norm(k) if has_keys else k
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if position_embeddings is not None:
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
            # Under autocast the projections are half precision and the rotation of q and k is not.
            q, k = q.to(v.dtype), k.to(v.dtype)

        heads = range(len(self.is_anchor))
        if sequence is not None:
            heads = sequence.kv_heads(len(self.is_anchor))
            q, k, v = sequence.to_heads(q, k, v)

        travels = not unshared and (past_key_values is None or past_key_values.takes_anchors(q.shape[2]))
        following, q_distant, k_distant = anchors, None, None
        if travels:
            pairs = self._pairs(q, k, v, anchors, heads)
            following = self._hand_on(pairs, heads)
            if not all(self.is_anchor[number] or number in self.streams for number in heads):
                firsts, keys = zip(*pairs, strict=True)
                if self.config.share == "kv":
                    k, v = torch.stack(keys, dim=1), torch.stack(firsts, dim=1)
                else:
                    q_distant = q if self.config.share == "keys" else torch.cat(firsts, dim=1)
                    k_distant = torch.stack(keys, dim=1)
        if past_key_values is None:
            measures, windows = self.measure_gate and not unshared, ()
            if not unshared:
                windows = tuple(head for head, number in enumerate(heads) if number in self.streams)
                windows = windows or self.config.share == "window"
            if measures and q_distant is None and windows is not True:
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
                window_only=windows,
                return_gate=measures,
            )
            if measures:
                out, gate = out
                real = torch.ones_like(gate) if document_ids is None else (document_ids >= 0)[:, None].expand_as(gate)
                self.gate = (gate * real).sum() / real.sum().clamp(min=1)
        else:
            out = past_key_values.attend(self.layer_idx, q, k, v, q_distant, k_distant, self.scaling)
        if sequence is not None:
            out = sequence.to_tokens(out)
        out = out.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)
        return self.o_proj(out), following

    def _pairs(self, q: Tensor, k: Tensor, v: Tensor, anchors: Anchors, heads: range) -> list[Anchors]:
        """Each head's pair: an anchor's own, else what was handed on; `heads` are the model's numbers of k's heads.

        A head that streams has its own too, which nobody looks at.
        """
        groups, pairs = q.shape[1] // len(heads), []
        for head, number in enumerate(heads):
            if self.is_anchor[number] or number in self.streams:
                first = {"scores": q[:, head * groups : (head + 1) * groups], "kv": v[:, head]}.get(self.config.share)
                pairs.append((first, k[:, head]))
            else:
                pairs.append(anchors[2 * head : 2 * head + 2])
        return pairs

    def _hand_on(self, pairs: list[Anchors], heads: range) -> Anchors:
        following: list[Tensor | None] = []
        for pair, number in zip(pairs, heads, strict=True):
            if not self.goes_on[number]:
                pair = (None, None)
            elif self.is_anchor[number]:
                # Copied out: a view would keep all heads' queries and keys alive as long as this pair travels.
                pair = (x if x is None else x.clone(memory_format=torch.contiguous_format) for x in pair)
            following += pair
        return tuple(following)


class PodDecoderLayer(GradientCheckpointingLayer):
    """A pre-norm decoder layer that takes the running anchors and hands them on; a family's layer becomes one.

    Attributes:
        mlp_tiles: in training, the MLP runs on so many parts of the tokens, one after the other, and each part again
            in the backward: its inner activations take 1 / mlp_tiles of their memory.
    """

    mlp_tiles = 1

    def forward(self, hidden_states: Tensor, *anchors: Tensor | None, **options: Any) -> tuple[Tensor | None, ...]:
        """[B, T, hidden] and the anchors in; the same out. Options are those of `PodAttention.forward`."""
        attended, anchors = self.self_attn(self.input_layernorm(hidden_states), anchors, **options)
        hidden_states = hidden_states + attended
        normed = self.post_attention_layernorm(hidden_states)
        if self.mlp_tiles == 1 or not self.training:
            return hidden_states + self.mlp(normed), *anchors
        # As many tiles on every rank, whatever is in them: under ZeRO-3 each gathers the MLP's parameters.
        tiles = normed.tensor_split(self.mlp_tiles, dim=1)
        mapped = torch.cat([checkpoint(self.mlp, tile, use_reentrant=False) for tile in tiles], dim=1)
        return hidden_states + mapped, *anchors


class Capabilities:
    """What transformers asks of a model beside its forward: here is the truth, whatever the family's classes say."""

    # PoD's attention is its own: none of transformers' is dispatched to, and a cache that evicts breaks a graph.
    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _can_compile_fullgraph = False
    # The plans split projections over devices; anchors are handed on among a layer's KV heads as they are in one.
    _tp_plan = None
    _pp_plan = None

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args, **kwargs) -> str:
        """What transformers sets in the config: "eager", whatever is asked for, after a warning where that is more."""
        if attn_implementation not in (None, "eager"):
            warnings.warn(
                f"attn_implementation={attn_implementation!r} has no effect on {type(self).__name__}, whose attention "
                "is PoD's own: leave it out; the environment variable POD_ATTENTION_BACKEND chooses a backend",
                stacklevel=2,
            )
        return "eager"

    @classmethod
    def from_pretrained(cls, *args, device_map=None, **kwargs) -> PreTrainedModel:
        """transformers' `from_pretrained`; whole blocks lie on one device (`pod.model.placement`)."""
        if isinstance(device_map, dict):
            device_map = GivenMap(device_map)
        return super().from_pretrained(*args, device_map=device_map, **kwargs)

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        # Here the map is known and nothing is loaded yet; what dispatches the model later has the same object.
        if load_config.device_map is not None:
            place(model, load_config.device_map)
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    def set_attn_implementation(self, attn_implementation: str, *args, **kwargs) -> None:
        """Changes nothing, and says so: see `_check_and_adjust_attn_implementation`."""
        self._check_and_adjust_attn_implementation(attn_implementation)


class PodModel(Capabilities):
    """The decoder stack; mixed into a family's base model.

    Class attributes:
        pod_attention: what the attention of the family's decoder layers becomes.

    Attributes:
        offload_checkpoints: with gradient checkpointing, what is kept for each layer's recomputation (hidden states and
            anchors) waits in the CPU's memory.
    """

    pod_attention = PodAttention
    offload_checkpoints = False

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.become_pod()

    def become_pod(self) -> None:
        """Give the family's layers, which are built already, PoD's forward.

        PoD adds no parameter, so changing the class is all there is to it; building the layers a second time would
        double the time and memory of loading.
        """
        for layer in self.layers:
            layer.__class__ = PodDecoderLayer
            layer.self_attn.__class__ = self.pod_attention
            layer.self_attn.plan(self.config.blocks)
        self._made_by = copy.deepcopy(self.config.fixed())
        self._no_split_modules = {PodDecoderLayer.__name__}

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
        unshared: bool = False,
        cache: PodCache | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast | tuple:
        """Run the decoder.

        Args:
            input_ids: [B, T] int64; or `inputs_embeds` [B, T, hidden].
            attention_mask: [B, tokens so far] with 0 for padding. Left padding is exact, sinks and recency count from
                each row's first real token; right padding without a cache too.
            position_ids: [B, T] or [1, T] for RoPE. Where they start again and there is neither mask nor cache, a new
                packed document begins, as in transformers.
            past_key_values, cache: a `PodCache`, by the name that transformers had for it before 5.24 or has since.
            use_cache: return a cache; config.use_cache when None, never in training.
            document_ids: [B, T] int64, non-decreasing, -1 padding: packed documents, without a cache.
            output_hidden_states: also return every layer's input and the last output.
            sequence: the part of the sequence that this rank runs, where the ranks of a group share one; without a
                cache. All other arguments are whole sequences, the same on every rank; the hidden states that are
                returned are the rank's part, [B, t, hidden].
            unshared: every layer has its own scores, keys and values: the forward is that of the dense model on the
                same weights; without a cache.

        Raises:
            ValueError: an argument that PoD does not support, by name and with the remedy.
        """
        past_key_values = one_cache(past_key_values, cache)
        devices = layer_devices(self) if hasattr(self.layers[0], "_hf_hook") else None
        if [vars(self.config)[name] for name in FIXED] != self._made_by:
            self.config.check_unchanged(self._made_by, "the model")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if self.training or output_attentions or self.config.output_attentions:
            check_supported(self.config, self.training, output_attentions)
        if unshared:
            if past_key_values is not None or use_cache:
                raise ValueError("a cache stores what layers share: with unshared=True pass use_cache=False")
            use_cache = False
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
        if not batch * count:
            check_tokens(batch, count)
        checkpoints = self.gradient_checkpointing and self.training
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if past_key_values is None and use_cache and not checkpoints:
            past_key_values = PodCache(self.config)
        if past_key_values is not None:
            if self.training or not isinstance(past_key_values, PodCache):
                check_cache(past_key_values, self.training)
            if document_ids is not None:
                raise ValueError("document_ids are for training without a cache: pass use_cache=False")
            if devices is not None:
                check_spread_cache(past_key_values)
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        mask = None if attention_mask is None else token_mask(attention_mask, batch, seen, count)
        lengths = None
        if mask is not None and past_key_values is None:
            if document_ids is not None:
                raise ValueError("pass attention_mask or document_ids, not both: document_ids mark padding with -1")
            lengths = lengths_of(mask)
        if position_ids is None:
            position_ids = torch.arange(seen, seen + count, device=inputs_embeds.device)[None]
        elif document_ids is None and attention_mask is None:
            if past_key_values is None:
                document_ids = documents_of(position_ids, batch)
            elif count > 1 and bool((position_ids[:, 1:] <= position_ids[:, :-1]).any()):
                raise ValueError(
                    "position_ids start again within a row: packed documents are for training without a cache, pass "
                    "use_cache=False"
                )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        kwargs = {"past_key_values": past_key_values, "lengths": lengths, "document_ids": document_ids}
        kwargs |= {"sequence": sequence, "unshared": unshared, "devices": devices}
        pieces = [(None, None)] if past_key_values is None else past_key_values.open(inputs_embeds, mask)
        all_states = self._run_pieces(pieces, inputs_embeds, position_ids, output_hidden_states, **kwargs)
        output = BaseModelOutputWithPast(
            last_hidden_state=all_states[-1],
            hidden_states=tuple(all_states) if output_hidden_states else None,
            **{CACHE: past_key_values},
        )
        return output if return_dict is None or return_dict else output.to_tuple()

    def _run_pieces(
        self, pieces: Pieces, inputs_embeds: Tensor, position_ids: Tensor, *args, **options
    ) -> list[Tensor]:
        """As `_run`, of all columns of a forward that is cut into pieces; zero where a column is in none."""
        all_states: list[Tensor] = []
        for columns, is_real in pieces:
            if columns is None:  # the one piece is the whole
                return self._run(inputs_embeds, position_ids, is_real, *args, **options)
            batch = len(inputs_embeds)
            rows = torch.arange(batch, device=inputs_embeds.device)[:, None]
            part, at = inputs_embeds[rows, columns], position_ids.expand(batch, -1)[rows, columns]
            part_states = self._run(part, at, is_real, *args, **options)
            all_states = all_states or [torch.zeros_like(inputs_embeds) for _ in part_states]
            place = (rows, columns)
            if is_real is not None:
                place = is_real.nonzero(as_tuple=True)[0], columns.expand(is_real.shape)[is_real]
            for states, new in zip(all_states, part_states, strict=True):
                states[place] = new if is_real is None else new[is_real]
        return all_states

    def _run(
        self,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        mask: Tensor | None,
        output_hidden_states: bool,
        devices: list[torch.device] | None,
        **options: Any,
    ) -> list[Tensor]:
        """Run all layers once: every layer's input where these are wanted, then the normed output, [B, T, hidden].

        Options are those of `PodAttention.forward`, but for the angles.
        """
        past_key_values: PodCache | None = options["past_key_values"]
        sequence: SequenceShard | None = options["sequence"]
        if past_key_values is not None:
            past_key_values.begin(
                self.config,
                inputs_embeds,
                mask,
                self.rotary_emb,
                outputs=lambda layer: self.layers[layer].self_attn.o_proj.weight,
            )
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
            for number, layer in enumerate(self.layers):
                if output_hidden_states:
                    all_states.append(states[0])
                # Accelerate has moved what the layer is given.
                with nullcontext() if devices is None else current(devices[number]):
                    states = layer(*states, position_embeddings=position_embeddings, **options)
        if past_key_values is not None:
            past_key_values.finish()
        return [*all_states, self.norm(states[0])]


class PodForCausalLM(Capabilities):
    """What `generate` needs to know; mixed into a family's causal LM.

    Class attributes:
        pod_base: what the family's base model becomes.
    """

    pod_base: type[PreTrainedModel]
    _in_generate = False
    _graphs: StepGraphs | None = None  # of the `generate` call that is running
    _draft: ReadSelector | None = None  # likewise

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.model.__class__ = self.pod_base
        self.model.become_pod()
        self._no_split_modules = self.model._no_split_modules

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ) -> None:
        if self._draft is not None:
            check_draft(self, generation_config, generation_mode)
        # The PoD cache is the default. Another implementation would store what PoD drops, or cannot hold two sizes.
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} is not supported by PoD models: "
                "leave it out, and generate uses pod.PodCache, which allocates once as a static cache does"
            )
        cache = model_kwargs.get(CACHE)
        if cache is None and generation_config.use_cache is False:
            return
        # Whoever passes a cache wants it, whatever a model's generation_config says: without, all ids would be fed to
        # it at every token.
        generation_config.use_cache = True
        if cache is None:
            cache = PodCache(self.config, max_length=max_cache_length)
            cache.may_grow = True  # the limit is this call's: a further turn on the cache may go beyond it
            model_kwargs[CACHE] = cache
        else:
            check_cache(cache, training=False)
            if model_kwargs.get("attention_mask") is None and cache.has_padding:  # generate drops a mask of ones
                raise ValueError(
                    "the cache holds rows with padding, and attention_mask has none: pass the mask that they were "
                    "stored with, with ones for the tokens since"
                )
            held, length = cache.get_seq_length(), _columns(model_kwargs.get("attention_mask"), generation_config)
            if 0 <= length <= held:  # generate would feed all of it, or a part, a second time
                raise ValueError(
                    f"the cache holds {held} tokens and generate is given {length}, none of them new: pass the text "
                    "that the cache holds and at least one token behind it, or only what is new with an attention_mask "
                    "of both; or take tokens back with cache.crop, or all of them with cache.reset()"
                )
            cache.expect(max_cache_length)
            cache._is_user_defined = True

    def init_continuous_batching(self, *args, **kwargs):
        """Refused: it stores keys and values of all layers alike, in pages. `generate_batch` begins here too.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "continuous batching (generate_batch, cache_implementation='paged') is not supported by PoD models, whose "
            "layers store different tokens' keys: call generate with prompts padded on the left"
        )

    def generate(
        self,
        *args,
        draft: ReadSelector | None = None,
        past_key_values: PodCache | None = None,
        cache: PodCache | None = None,
        **kwargs,
    ):
        """transformers' generate; on a CUDA device its steps are one CUDA graph (`pod.model.graph`).

        Args:
            draft: a method that chooses what is read, such as `pod.eviction.Quest(budget=256)`: the model drafts
                `num_assistant_tokens` (4) for itself, each reading that much of the cache, and verifies them in one
                forward that reads everything. Greedy text and the distribution of samples are those without it.
            past_key_values, cache: a `PodCache`, by either of its names; a new one when None.

        Raises:
            ValueError: no such method, a second way to draft, several rows or beams, a cache that does not keep and
                read every token; a mask that is neither of the input nor of the tokens held and the input.
        """
        if (given := one_cache(past_key_values, cache)) is not None:
            kwargs[CACHE] = given
        if draft is not None:
            kwargs = with_draft(self, kwargs)
        ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        if isinstance(ids, Tensor) and not ids.numel() and kwargs.get("inputs_embeds") is None:
            check_tokens(ids.shape[0], ids.shape[-1])
        embeds, mask = kwargs.get("inputs_embeds"), kwargs.get("attention_mask")
        text = ids if embeds is None else embeds
        if isinstance(given, PodCache) and isinstance(text, Tensor) and isinstance(mask, Tensor):
            check_turn(given.get_seq_length(), text.shape[1], mask.shape[-1], embeds is not None)
        outer = self._graphs, self._in_generate, self._draft
        self._graphs, self._in_generate, self._draft = None, True, draft
        try:
            return super().generate(*args, **kwargs)
        finally:
            self._graphs, self._in_generate, self._draft = outer

    def _step_by_graph(self, input_ids: Tensor, position_ids: Tensor | None, cache: PodCache) -> Tensor | None:
        """Logits of one step of `generate`, None where it has to run as it is."""
        # A graph is of one device, and its weights lie there.
        if len(set(getattr(self, "hf_device_map", {}).values())) > 1:
            return None
        if self._graphs is None or self._graphs.cache is not cache:

            def step(tokens: Tensor, positions: Tensor) -> Tensor:
                # Every row's new token is real: only a prompt has padding.
                options = {"position_ids": positions, CACHE: cache, "use_cache": True}
                return super(PodForCausalLM, self).forward(input_ids=tokens, **options).logits

            self._graphs = step_graphs(step, cache, input_ids.device)
        if self._graphs is None:
            return None
        if position_ids is None:
            position_ids = torch.full((1, 1), cache.get_seq_length(), device=input_ids.device)
        return self._graphs(input_ids, position_ids)

    def _prefill(self, input_ids, generation_config, model_kwargs, is_first_iteration=True):
        cache = model_kwargs.get(CACHE)
        copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        # On a CUDA device copied rows decode by kernels and a CUDA graph, which forked ones do not.
        if copies == len(input_ids) > 1 and isinstance(cache, PodCache) and input_ids.device.type != "cuda":
            if cache.batch_size in (-1, 1) and cache.forks:
                return self._prefill_one(copies, input_ids, generation_config, model_kwargs, is_first_iteration)
        size = generation_config.prefill_chunk_size
        if cache is None or size is None:  # in one piece: nothing has to wait
            return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)
        whole_number("prefill_chunk_size", size, "at least 1 token, or None", 1)
        if model_kwargs.get("inputs_embeds") is not None:
            raise ValueError("prefill_chunk_size cuts input_ids, not inputs_embeds: leave it out, or pass input_ids")
        with cache.prefill():
            return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)

    def _prefill_one(self, copies: int, input_ids: Tensor, generation_config, model_kwargs: dict, *args):
        """Prefill one of rows that are copies of it, and fork its cache."""
        cache, fed = model_kwargs[CACHE], model_kwargs.get("inputs_embeds")
        length = cache.max_length
        if cache.batch_size < 0 and cache.may_grow:  # no room in this row for what will be each row's own
            cache._expect((input_ids if fed is None else fed).shape[1])
        kwargs = {name: value[:1] if isinstance(value, Tensor) else value for name, value in model_kwargs.items()}
        outputs = self._prefill(input_ids[:1], generation_config, kwargs, *args)
        cache.fork(copies)
        cache.expect(length or 0)
        outputs.logits = outputs.logits.expand(copies, -1, -1)
        if outputs.hidden_states is not None:
            outputs.hidden_states = tuple(states.expand(copies, -1, -1) for states in outputs.hidden_states)
        return outputs

    def _assisted_decoding(self, input_ids, logits_processor, stopping_criteria, generation_config, *args, **kwargs):
        # It begins with all ids, whatever the cache holds, and those would be fed a second time.
        cache = kwargs.get(CACHE)
        if self._draft is None and cache is not None:
            cache.check_croppable()
        length = _columns(kwargs.get("attention_mask"), generation_config)
        if cache is not None and length == input_ids.shape[1]:
            cache.fed_before = cache.get_seq_length()
        with nullcontext() if self._draft is None else drafting(self._draft, cache, input_ids):
            return super()._assisted_decoding(
                input_ids, logits_processor, stopping_criteria, generation_config, *args, **kwargs
            )

    def _get_candidate_generator(self, **options) -> CandidateGenerator:
        # transformers changes the number of layers in the config for a draft, and leaves it so after an error.
        if options["generation_config"].assistant_early_exit is not None:
            raise ValueError(
                "assistant_early_exit is not supported by PoD models: leave it out, and draft with an assistant_model, "
                "prompt_lookup_num_tokens, or draft=pod.eviction.Quest(budget=256)"
            )
        if self._draft is None:
            return super()._get_candidate_generator(**options)
        names = ("input_ids", "generation_config", "logits_processor", "model_kwargs")
        return SelfDraft(self, *(options[name] for name in names))

    def prepare_inputs_for_generation(self, input_ids, next_sequence_length=None, inputs_embeds=None, **kwargs):
        # `generate` looks for inputs_embeds in the signature.
        cache = kwargs.get(CACHE)
        if next_sequence_length is None and getattr(cache, "fed_before", 0):
            next_sequence_length, cache.fed_before = input_ids.shape[1] - cache.fed_before, 0
        # The usual: Phi-3's own drops the cache at `original_max_position_embeddings`, for LongRoPE's sake.
        inputs = GenerationMixin.prepare_inputs_for_generation(
            self, input_ids, next_sequence_length, inputs_embeds=inputs_embeds, **kwargs
        )
        tokens = inputs.get("input_ids")
        is_step = self._in_generate and tokens is not None and tokens.shape[1] == 1
        if is_step and isinstance(cache, PodCache) and cache.get_seq_length():
            # Only a prompt has padding; to look for it in a step would be to wait for the device. Of a prompt's chunks
            # transformers before 5.23 does not say that they are the first iteration.
            if not (cache.in_prefill or kwargs.get("is_first_iteration")):
                inputs["attention_mask"] = None
        return inputs

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
        cache: PodCache | None = None,
        **kwargs,
    ):
        """The family's forward; see `PodModel.forward` for what PoD adds and refuses.

        The arguments are spelled out because `generate` reads them off the signature: what it does not find there
        (attention_mask, position_ids, logits_to_keep) it would not pass.
        """
        past_key_values = one_cache(past_key_values, cache)
        if labels is not None and kwargs.get("sequence") is not None:
            raise ValueError("a rank has the logits of its own tokens only: leave labels out, and sum over the ranks")
        if labels is not None and getattr(past_key_values, "sparse_prefill", None) is not None:
            raise ValueError("a loss of sparse_prefill would not be the model's: leave labels out, or sparse_prefill")
        is_step = self._in_generate and input_ids is not None and input_ids.shape[1] == 1 and not self.training
        if is_step and past_key_values is not None and set(kwargs) <= {"return_dict"} and labels is None:
            if not self.config.output_hidden_states:
                logits = self._step_by_graph(input_ids, position_ids, past_key_values)
                if logits is not None:
                    return CausalLMOutputWithPast(logits=logits, **{CACHE: past_key_values})
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **{CACHE: past_key_values},
            **kwargs,
        )


def _columns(attention_mask: Tensor | None, generation_config: GenerationConfig) -> int:
    """Columns of the text that `generate` was given, which drops a mask of ones; -1 where it does not say."""
    return getattr(generation_config, "_mask_length", -1) if attention_mask is None else attention_mask.shape[1]
