"""PoD: proximal tokens over distant tokens. `import pod` registers the PoD models with transformers' Auto classes."""

from pod import similarity
from pod.blocks import LayerBlocks
from pod.cache import PodCache
from pod.config import PodLlamaConfig, PodQwen3Config
from pod.model import PodLlamaForCausalLM, PodQwen3ForCausalLM, convert

__all__ = [
    "LayerBlocks",
    "PodCache",
    "PodLlamaConfig",
    "PodLlamaForCausalLM",
    "PodQwen3Config",
    "PodQwen3ForCausalLM",
    "convert",
    "similarity",
]
