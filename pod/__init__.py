"""PoD: proximal tokens over distant tokens. `import pod` registers the PoD models with transformers' Auto classes."""

import importlib

from pod import eviction, similarity
from pod.blocks import LayerBlocks
from pod.cache import PodCache
from pod.config import PodLlamaConfig, PodMistralConfig, PodPhi3Config, PodQwen2Config, PodQwen3Config
from pod.families import (
    PodLlamaForCausalLM,
    PodMistralForCausalLM,
    PodPhi3ForCausalLM,
    PodQwen2ForCausalLM,
    PodQwen3ForCausalLM,
    convert,
)
from pod_kernels import Quantization

# These bring lightning: loaded when first used, so that `import pod` stays light.
_LAZY = {"PodDataModule": "pod.data", "PodModule": "pod.module", "UlyssesDeepSpeedStrategy": "pod.strategy"}


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'pod' has no attribute {name!r}")


__all__ = [
    "LayerBlocks",
    "PodCache",
    "PodDataModule",
    "PodLlamaConfig",
    "PodLlamaForCausalLM",
    "PodMistralConfig",
    "PodMistralForCausalLM",
    "PodModule",
    "PodPhi3Config",
    "PodPhi3ForCausalLM",
    "PodQwen2Config",
    "PodQwen2ForCausalLM",
    "PodQwen3Config",
    "PodQwen3ForCausalLM",
    "Quantization",
    "UlyssesDeepSpeedStrategy",
    "convert",
    "eviction",
    "similarity",
]
