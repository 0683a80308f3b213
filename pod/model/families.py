"""The model families: each one's classes with PoD mixed in, and `convert`, which turns a Hugging Face LLM into one.

A further family takes a config, two classes and an entry in `FAMILIES`, when its attention is q, k, v projections,
optional q/k norm, RoPE and an output projection, and its layer is the usual pre-norm pair.
docs/NEW_FAMILY.md walks through Phi-3, whose projections are one matrix.
"""

from pathlib import Path

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
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

from pod.blocks import LayerBlocks, PodConfigMixin, check_sizes
from pod.files import opening
from pod.model.decoder import PodAttention, PodForCausalLM, PodModel
from pod.model.inputs import check_devices
from pod.model.weights import load_causal_lm


@strict
class PodLlamaConfig(PodConfigMixin, LlamaConfig):
    """Config of a Llama with shared distant scores; the PoD fields are those of `PodConfigMixin`."""

    model_type = "pod_llama"


@strict
class PodMistralConfig(PodConfigMixin, MistralConfig):
    """Config of a Mistral with shared distant scores; the PoD fields are those of `PodConfigMixin`."""

    model_type = "pod_mistral"

    sliding_window: int | None = None


@strict
class PodPhi3Config(PodConfigMixin, Phi3Config):
    """Config of a Phi-3 (or Phi-4) with shared distant scores; the PoD fields are those of `PodConfigMixin`."""

    model_type = "pod_phi3"

    head_dim: int | None = None  # no field of the family's

    def __post_init__(self, **kwargs) -> None:
        super().__post_init__(**kwargs)
        if self.rope_parameters["rope_type"] != "default" or self.rope_parameters["partial_rotary_factor"] != 1:
            raise ValueError(
                f"rope_parameters is {self.rope_parameters}: a Phi-3 with LongRoPE computes its whole cache again "
                "where the text outgrows original_max_position_embeddings, and one with partial_rotary_factor rotates "
                "a part of each head; PoD does neither. Use a model with plain RoPE, such as Phi-4."
            )


@strict
class PodQwen2Config(PodConfigMixin, Qwen2Config):
    """Config of a Qwen2 (or Qwen2.5) with shared distant scores; the PoD fields are those of `PodConfigMixin`."""

    model_type = "pod_qwen2"

    head_dim: int | None = None  # no field of the family's


@strict
class PodQwen3Config(PodConfigMixin, Qwen3Config):
    """Config of a Qwen3 with shared distant scores; the PoD fields are those of `PodConfigMixin`."""

    model_type = "pod_qwen3"


class PodLlamaModel(PodModel, LlamaModel):
    """Llama's decoder stack with running anchors."""

    config: PodLlamaConfig


class PodLlamaForCausalLM(PodForCausalLM, LlamaForCausalLM):
    """A Llama that shares the scores of distant tokens between neighbouring layers."""

    config: PodLlamaConfig
    pod_base = PodLlamaModel


class PodMistralModel(PodModel, MistralModel):
    """Mistral's decoder stack with running anchors."""

    config: PodMistralConfig


class PodMistralForCausalLM(PodForCausalLM, MistralForCausalLM):
    """A Mistral that shares the scores of distant tokens between neighbouring layers."""

    config: PodMistralConfig
    pod_base = PodMistralModel


class PodPhi3Attention(PodAttention):
    """Phi-3's attention with shared distant scores."""

    def project(self, hidden_states: Tensor, has_keys: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """[B, T, hidden] -> queries, keys and values, which one matrix gives."""
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        sizes = [count * self.head_dim for count in (heads, kv_heads, kv_heads)]
        q, k, v = self.qkv_proj(hidden_states).split(sizes, dim=-1)
        return (q, k, v) if has_keys else (q, None, None)


class PodPhi3Model(PodModel, Phi3Model):
    """Phi-3's decoder stack with running anchors."""

    config: PodPhi3Config
    pod_attention = PodPhi3Attention


class PodPhi3ForCausalLM(PodForCausalLM, Phi3ForCausalLM):
    """A Phi-3 (or Phi-4) that shares the scores of distant tokens between neighbouring layers."""

    config: PodPhi3Config
    pod_base = PodPhi3Model


class PodQwen2Model(PodModel, Qwen2Model):
    """Qwen2's decoder stack with running anchors."""

    config: PodQwen2Config


class PodQwen2ForCausalLM(PodForCausalLM, Qwen2ForCausalLM):
    """A Qwen2 that shares the scores of distant tokens between neighbouring layers."""

    config: PodQwen2Config
    pod_base = PodQwen2Model


class PodQwen3Model(PodModel, Qwen3Model):
    """Qwen3's decoder stack with running anchors."""

    config: PodQwen3Config


class PodQwen3ForCausalLM(PodForCausalLM, Qwen3ForCausalLM):
    """A Qwen3 that shares the scores of distant tokens between neighbouring layers."""

    config: PodQwen3Config
    pod_base = PodQwen3Model


# By the stock config's model_type.
FAMILIES = {
    "llama": PodLlamaForCausalLM,
    "mistral": PodMistralForCausalLM,
    "phi3": PodPhi3ForCausalLM,
    "qwen2": PodQwen2ForCausalLM,
    "qwen3": PodQwen3ForCausalLM,
}

for _causal_lm in FAMILIES.values():
    AutoConfig.register(_causal_lm.config_class.model_type, _causal_lm.config_class, exist_ok=True)
    AutoModel.register(_causal_lm.config_class, _causal_lm.pod_base, exist_ok=True)
    AutoModelForCausalLM.register(_causal_lm.config_class, _causal_lm, exist_ok=True)


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
        architectures=[FAMILIES[name].__name__],
        anchors=blocks.anchors.tolist(),
        sink_size=sink_size,
        recent_size=recent_size,
        share=share,
    )
    return FAMILIES[name].config_class.from_dict(fields)


def convert(
    model_or_path: PreTrainedModel | str | Path,
    blocks: LayerBlocks,
    sink_size: int = 16,
    recent_size: int = 4080,
    share: str = "scores",
) -> PreTrainedModel:
    """Turn a Hugging Face causal LM into a PoD model that shares its weights.

    Args:
        model_or_path: a causal LM of a supported family (or a PoD model, for other blocks), or where to load it from:
            a directory, a hub id, a GGUF file.
        blocks: which layers share distant scores, per KV head.
        sink_size, recent_size: proximal tokens.
        share: "scores" (the paper's Eq. 3) or "keys"; "kv" for cross-layer attention, which shares values too, where
            sink_size and recent_size mean nothing; "window" for window attention, with blocks of one layer.

    Returns:
        A PoD causal LM on the same parameters and buffers, none of them copied; training one trains the other. The
        given model stays usable.

    Raises:
        ValueError: unknown family, blocks for another model, sizes out of range, quantised weights, several devices;
            weights that are not all there.
    """
    model = model_or_path
    if isinstance(model, str | Path):
        with opening(model):
            model = load_causal_lm(model, dtype="auto")
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(
            "the model is quantised: load it without quantization_config, convert it and save it "
            "(save_pretrained); what was saved loads with quantization_config"
        )
    check_devices(model)
    if hasattr(model, "hf_device_map") and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"the model's weights are offloaded (device_map={model.hf_device_map}): load it with device_map={{'': 0}} "
            "or without one, convert it and save it; what was saved loads offloaded"
        )
    config = pod_config(model.config, blocks, sink_size, recent_size, share)
    if not hasattr(model, "lm_head"):
        raise ValueError(f"{type(model).__name__} has no lm_head: pass a causal LM, loaded by AutoModelForCausalLM")
    with torch.device("meta"):
        converted = FAMILIES[config.model_type.removeprefix("pod_")](config)
    # Parameters come as the very objects (keep_vars), so nothing is copied and tied weights stay tied. Assigning gives
    # them the requires_grad of what they replace: set that first, or frozen ones would thaw in both models.
    state = model.state_dict(keep_vars=True)
    for name, parameter in converted.named_parameters():
        parameter.requires_grad_(name not in state or state[name].requires_grad)
    converted.load_state_dict(state, assign=True)
    converted.model.rotary_emb = model.model.rotary_emb  # its frequencies are no part of the state
    converted.generation_config = model.generation_config
    return converted.train(model.training)
