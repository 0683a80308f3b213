"""PoD: proximal tokens over distant tokens. `import pod` registers the PoD models with transformers' Auto classes.

terminal.py    which warnings the commands leave out, and how they end: errors in one line
files.py        files that are whole or not there, checksums, errors that name the file
blocks.py       LayerBlocks: the greedy grouping, the saving, JSON, a picture
similarity.py   how alike two layers' attention is, and what sharing it would cost
analyze.py      python -m pod.analyze: similarity, blocks, pictures
prepare.py      python -m pod.prepare: text into prepared samples
fit.py          python -m pod.fit: training
export.py       python -m pod.export: a Hugging Face directory
generate.py     python -m pod.generate: text, speed, cache bytes
model/          the models
cache/          the one cache
eviction/       what a method of eviction says
training/       the LightningModule, its data, strategy, checkpoints
data/           from text to prepared samples
recipe/         the recipes and how they are read
evaluation/     what the scripts in eval/ share
"""

import importlib

from pod import eviction, similarity
from pod.blocks import LayerBlocks
from pod.cache import PodCache
from pod.model.adapter import load
from pod.model.config import PodLlamaConfig, PodMistralConfig, PodPhi3Config, PodQwen2Config, PodQwen3Config
from pod.model.families import (
    PodLlamaForCausalLM,
    PodMistralForCausalLM,
    PodPhi3ForCausalLM,
    PodQwen2ForCausalLM,
    PodQwen3ForCausalLM,
    convert,
)
from pod_kernels import Quantization

# These bring lightning: loaded when first used, so that `import pod` stays light.
_LAZY = {
    "PodDataModule": "pod.training.data",
    "PodModule": "pod.training.module",
    "UlyssesDeepSpeedStrategy": "pod.training.strategy",
}


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
    "load",
    "similarity",
]
