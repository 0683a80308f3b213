"""vLLM's own models with PoD's attention in them, by the names that a PoD export's config has."""

from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.phi3 import Phi3ForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from pod.serving.attention import PodAttention


class PodForCausalLM(nn.Module):
    """Mixed into one of vLLM's causal LMs: projections, norms, RoPE, weights and all else stay vLLM's."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **options) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **options)
        config = vllm_config.model_config.hf_config
        caches = vllm_config.compilation_config.static_forward_context
        placed: list[PodAttention] = []
        for number, layer in enumerate(self.model.layers):
            stock = layer.self_attn.attn
            first = get_tensor_model_parallel_rank() * stock.num_kv_heads
            heads = range(first, first + stock.num_kv_heads)
            del caches[stock.layer_name]  # a cache of all keys and values, which is not to be
            scale = layer.self_attn.scaling
            placed.append(PodAttention(config, number, heads, scale, stock.layer_name, placed))
            layer.self_attn.attn = placed[-1]


class PodLlamaForCausalLM(PodForCausalLM, LlamaForCausalLM):
    """A Llama that shares the scores of distant tokens between neighbouring layers."""


class PodMistralForCausalLM(PodForCausalLM, MistralForCausalLM):
    """The same of a Mistral."""


class PodPhi3ForCausalLM(PodForCausalLM, Phi3ForCausalLM):
    """The same of a Phi-3 (or Phi-4)."""


class PodQwen2ForCausalLM(PodForCausalLM, Qwen2ForCausalLM):
    """The same of a Qwen2."""


class PodQwen3ForCausalLM(PodForCausalLM, Qwen3ForCausalLM):
    """The same of a Qwen3."""
