"""PoD: proximal tokens over distant tokens. `import pod` registers the PoD models with transformers' Auto classes.

__main__.py     `pod fit ...` is `python -m pod.fit ...`, and so on
extras.py       what only some commands need, named with the extra that brings it
terminal.py     which warnings the commands leave out, and how they end: errors in one line
files.py        files that are whole or not there, checksums, errors that name the file
blocks.py       LayerBlocks: the table, JSON, a picture; the fields of a config that hold it
grouping.py     the search for blocks: greedy grouping, the best for a saving
heads.py        which KV heads need the distant past: head scores from files
similarity.py   how alike two layers' attention is, and what sharing it would cost
analyze.py      python -m pod.analyze: similarity, blocks, pictures
calibration.py  the file of what was measured of a model once: head scores, filters
calibrate.py    python -m pod.calibrate: RazorAttention's, KVzip's and Q-Filters' measurements
prepare.py      python -m pod.prepare: text into prepared samples
fit.py          python -m pod.fit: training
export.py       python -m pod.export: a Hugging Face directory
model_card.py   its README.md: what it is, on what it was trained, what was measured
generate.py     python -m pod.generate: text, speed, cache bytes
autotune.py     python -m pod.autotune: which kernels run on this GPU, checked and timed
serve.py        python -m pod.serve: OpenAI's protocol, one request at a time
eval.py         python -m pod.eval NAME: benchmarks and measurements
model/          the models
cache/          the one cache
eviction/       what a method of eviction says
training/       the LightningModule, its data, strategy, checkpoints
data/           from text to prepared samples
recipe/         the recipes and how they are read
evaluation/     one benchmark a file, and what runs them
serving/        a plugin for vLLM, and a small server
"""

import importlib
from typing import TYPE_CHECKING

from transformers import AutoConfig

from pod import eviction
from pod.blocks import LayerBlocks
from pod.extras import require
from pod_kernels import Quantization, TriangleMix

if TYPE_CHECKING:  # what is loaded later, for who reads without importing: editors, type checkers, the API reference
    from pod import similarity
    from pod.cache import PodCache
    from pod.model.adapter import load
    from pod.model.families import (
        PodLlamaConfig,
        PodLlamaForCausalLM,
        PodMistralConfig,
        PodMistralForCausalLM,
        PodPhi3Config,
        PodPhi3ForCausalLM,
        PodQwen2Config,
        PodQwen2ForCausalLM,
        PodQwen3Config,
        PodQwen3ForCausalLM,
        convert,
    )
    from pod.model.reconstruction import reconstruct
    from pod.training.data import PodDataModule
    from pod.training.module import PodModule
    from pod.training.strategy import UlyssesDeepSpeedStrategy

__version__ = "0.1.0"

# Loaded when first used, so that `import pod` stays light: the models bring transformers' own, which take seconds to
# import, and training brings lightning.
_LATER = {
    "PodCache": "pod.cache",
    "PodDataModule": "pod.training.data",
    "PodModule": "pod.training.module",
    "UlyssesDeepSpeedStrategy": "pod.training.strategy",
    "convert": "pod.model.families",
    "load": "pod.model.adapter",
    "reconstruct": "pod.model.reconstruction",
}
for _family in ("Llama", "Mistral", "Phi3", "Qwen2", "Qwen3"):
    _LATER |= {f"Pod{_family}{kind}": "pod.model.families" for kind in ("Config", "ForCausalLM")}


class _Later(type):
    """A class that stands for the config of its name until one is made; by then the models have registered it."""

    def __getattr__(cls, name: str):
        return getattr(__getattr__(cls.__name__), name)

    def __call__(cls, *args, **kwargs):
        return __getattr__(cls.__name__)(*args, **kwargs)


for _name in _LATER:
    if _name.endswith("Config"):
        AutoConfig.register(f"pod_{_name[3:-6].lower()}", _Later(_name, (), {}), exist_ok=True)


def __getattr__(name: str):
    if name == "similarity":
        return importlib.import_module("pod.similarity")
    if name not in _LATER:
        raise AttributeError(f"module 'pod' has no attribute {name!r}")
    if _LATER[name].startswith("pod.training"):
        require("train", "lightning", "torchdata", "torchmetrics", what=f"pod.{name}")
        return getattr(importlib.import_module(_LATER[name]), name)
    found = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)  # not asked for a second time
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


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
    "TriangleMix",
    "UlyssesDeepSpeedStrategy",
    "convert",
    "eviction",
    "load",
    "reconstruct",
    "similarity",
]
