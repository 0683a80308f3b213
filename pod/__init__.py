"""PoD: proximal tokens over distant tokens. `import pod` registers the PoD models with transformers' Auto classes.

terminal.py            which warnings the commands leave out, how they end when interrupted
exit_status.py         how a command ends: errors in one line
files.py               files that are whole or not there, checksums, errors that name the file
blocks.py              LayerBlocks: the greedy grouping, the saving, JSON, a picture
similarity.py          how alike two layers' attention is
config.py              PodLlamaConfig, PodMistralConfig, PodPhi3Config, PodQwen2Config, PodQwen3Config
layer.py               one decoder layer for all families: attention with running anchors
inputs.py              padding and packed documents read off a call; what is refused
offload.py             activations kept in the CPU's memory
model.py               the decoder stack and the causal LM, mixed into every family's
families.py            the families' classes; convert
graph.py               one CUDA graph for the decode steps of a generate call
recipe.py              the schema of the recipes: every key with its default and help
recipe_yaml.py         reads and writes their YAML
recipe_checks.py       whether a recipe can be run; the closest name
recipe_loading.py      from a file and key=value to a recipe; the list of recipes, --help
analyze.py             python -m pod.analyze: similarity, blocks, pictures
prepared.py            the format of prepared data: memory-mapped samples of one length
sample_writer.py       writes it, shard by shard
data.py                PodDataModule: batches, and the position that a resumed run goes on from
loss.py                next-token loss, and a teacher's, in chunks of the sequence
lora.py                adapters by peft, merged at export
stock.py               the stock model or config that training begins with
tokenizer.py           the tokenizer that a run names, and whether data were prepared with it
weights.py             all of a model's weights loaded, or refused by name; what tells them from others
module.py              PodModule: one step of learning
sequence_parallel.py   the exchange around attention: whole sequences of a rank's own heads
strategy.py            UlyssesDeepSpeedStrategy: ZeRO and sequence-parallel groups under Lightning
shape.py               a model's sizes from its config: parameters, FLOPs
training_memory.py     what a training step takes of a GPU, by kind; the longest sample
plan.py                plan=true: memory, FLOPs, hours of a recipe on a kind of GPU
checkpoints.py         a run's checkpoints: written whole, found again
fit.py                 python -m pod.fit: training
export.py              python -m pod.export: a Hugging Face directory
generate.py            python -m pod.generate: text, speed, cache bytes
cache/                 the one cache
eviction/              what a method of eviction says
evaluation/            what the scripts in eval/ share
"""

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
