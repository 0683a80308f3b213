"""Recipes: what a run does, as dataclasses. They are the schema; the text under each field is its help.

`pod/recipe/loading.py` makes a recipe of a YAML file and a command line; `pod/recipe/checks.py` says if it can be run.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import MISSING


class RecipeError(ValueError):
    """A recipe, or an override of it, that cannot be run; the message says what to write instead."""


@dataclass
class Model:
    """The model to train."""

    base: str | None = None
    """The model to start from: a directory, a hub id or a GGUF file. null: start from scratch, from `model.config`."""
    config: dict[str, Any] | None = None
    """The fields of a Hugging Face config, `model_type` among them, of a model trained from scratch. Any field may be
    set from the command line: model.config.hidden_size=64."""
    initialization: str = "transformers"
    """How a model from scratch is drawn: `transformers` (normal, `initializer_range`), or `torch` (its defaults, whose
    embeddings of unit variance stay visible through a deep and narrow stack; for untied heads, without DeepSpeed)."""
    rope_theta: float | None = None
    """The base of the rotary position embedding, raised for longer contexts. null: that of the model or its config."""
    tokenizer: str | None = None
    """A directory, a hub id, or `bytes` (one token per byte, no file needed). null: the tokenizer of `model.base`."""
    dtype: str = "float32"
    """What the weights are loaded as: float32 or bfloat16. An optimiser that keeps no float32 copy of bfloat16 weights
    loses small updates to rounding."""
    sink_size: int = 16
    """Tokens at the start of a sequence that each layer always attends to with its own scores (the paper's n_s)."""
    recent_size: int = 4080
    """Last tokens, the current one included, that each layer attends to with its own scores (the paper's n_r)."""
    share: str = "scores"
    """What a block's layers take from their anchor for distant tokens: `scores` (q_a . k_a, the paper's Eq. 3) or
    `keys` (q_l . k_a: the same memory, scores computed again). `kv`: its keys and values, for near tokens too, whatever
    `model.sink_size` and `model.recent_size` are (cross-layer attention); with `blocks.size` or `blocks.file`.
    `window`: there are no distant tokens; every layer attends to sinks and recent ones alone, without blocks."""
    gradient_checkpointing: bool = False
    """Compute the activations of each layer again in the backward pass instead of keeping them."""
    offload_checkpoints: bool = False
    """With `model.gradient_checkpointing`: what each layer's activations are computed from again (its input, and the
    anchors' queries and keys) waits in the CPU's memory, not the device's."""
    compile: bool = False
    """Run the layers through torch.compile; the first steps, and the first ones of another shape, then take minutes.
    Not with DeepSpeed or `model.offload_checkpoints`, whose hooks a graph cannot hold."""
    mlp_tiles: int = 1
    """Parts of the tokens on which each layer's MLP runs one after the other, and once more in the backward: its inner
    activations take so much less memory."""


@dataclass
class Blocks:
    """Which layers share distant scores, and how that is found."""

    file: str | None = None
    """A blocks.json to use. null: analyse the model first, unless it stays dense."""
    size: int | None = None
    """Layers of each block, from the lowest layer up, the same for every KV head, without looking at the model: wins
    over `blocks.kv_saving`. Cross-layer attention (`model.share=kv`) takes 2. null: the blocks are found."""
    kv_saving: float = 0.35
    """Share of the dense KV cache's bytes that is not stored, as length grows; the blocks are the most alike ones that
    save this. 0: the model stays dense. Only keys are shared, so 0.5 is the limit."""
    threshold: float | None = None
    """The similarity from which layers share (the paper's delta), instead of a wanted saving: wins over
    `blocks.kv_saving` when given."""
    method: str = "greedy"
    """How layers are grouped for `blocks.kv_saving`: `greedy` (the paper's Algorithm 1), or the best of all partitions:
    `damage` (the least measured change of what layers give out, at `model.sink_size` and `model.recent_size`),
    `sum` (the largest summed similarity of sharing layers to their anchors), `worst` (the largest least one)."""
    samples: int = 1000
    """Training samples whose attention is compared to find the blocks."""
    last_q: int = 16
    """Last query tokens of each sample whose attention is compared."""
    distant_only: bool = False
    """Compare the attention to distant tokens alone, the only scores that are shared, instead of to all tokens."""


@dataclass
class Data:
    """What the model learns from."""

    path: str = MISSING
    """A directory of prepared samples (see data/)."""
    validation_path: str | None = None
    """A directory of prepared samples to validate on. null: the held-out documents of `data.path`."""
    sequence_length: int = MISSING
    """Tokens in a sample."""
    length_intervals: list[int] | None = None
    """The lengths in tokens that part the documents into intervals of which each gives equally many tokens; the data
    must have been prepared with them. null: as the data was prepared."""
    micro_batch_size: int = 1
    """Samples in one forward and backward pass of a process."""
    num_workers: int = 0
    """Processes that load samples. 0: the training process does."""
    shuffle: bool = True
    """Visit the training samples in an order drawn from `seed`; false: in the order they are stored."""


@dataclass
class Optimizer:
    """AdamW, and a cosine schedule of its learning rate with linear warm-up."""

    lr: float = 1e-5
    """The highest learning rate, reached at the end of the warm-up."""
    min_lr: float = 0.0
    """The learning rate at the last step, where the cosine ends: a rate, not a share of `optimizer.lr`."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's decay rates of the running means of the gradient and of its square."""
    weight_decay: float = 0.1
    """AdamW's weight decay; norms and embeddings are left out."""
    warmup_steps: int | None = None
    """Optimiser steps in which the learning rate rises from 0. Or give `optimizer.warmup_tokens`; neither: no
    warm-up."""
    warmup_tokens: int | None = None
    """Tokens during which the learning rate rises from 0, rounded up to whole steps."""
    gradient_clip: float = 1.0
    """The largest norm of the whole gradient; a larger one is scaled down to it. 0: never."""


@dataclass
class Distill:
    """Learning from the model as it was: the dense base, frozen, teaches the one that shares."""

    weight: float = 0.0
    """Share of the training loss that is the divergence from the dense base's next-token distribution; the rest is the
    cross-entropy. 0: no teacher. It takes another forward pass and, without `lora.rank`, a second copy of the
    weights."""
    temperature: float = 1.0
    """What both models' logits are divided by before they are compared: above 1, unlikely tokens count for more."""


@dataclass
class Lora:
    """Adapters of low rank, trained in the place of all weights (LoRA); `pod.export` merges them."""

    rank: int = 0
    """The rank of the adapters; the model's own weights stay frozen, and neither their gradients nor the optimiser's
    state for them exist. 0: no adapters, all weights are trained."""
    alpha: float = 16.0
    """An adapter's output is scaled by alpha / rank."""
    dropout: float = 0.0
    """Share of an adapter's inputs that are set to 0 in training."""
    targets: list[str] = field(default_factory=lambda: ["q", "k", "v", "o"])
    """Which projections of each layer have adapters: of q, k, v, o (attention), gate, up, down (MLP)."""


@dataclass
class Trainer:
    """How long, on what, and what is written when."""

    max_steps: int | None = None
    """Optimiser steps to train for. Give this or `trainer.max_tokens`."""
    max_tokens: int | None = None
    """Tokens to train on, rounded up to whole optimiser steps."""
    tokens_per_batch: int = MISSING
    """Tokens of one optimiser step over all processes. A multiple of micro_batch_size * sequence_length * processes
    that read samples of their own (devices * num_nodes / sequence_parallel_size): the rest is made up by accumulating
    gradients."""
    devices: int = 1
    """Processes of one machine, each with its device."""
    num_nodes: int = 1
    """Machines, each with so many devices."""
    strategy: str = "auto"
    """How processes work together. auto: alone, or as ddp where there are several; ddp: each holds the whole model;
    deepspeed: ZeRO shards the model over all of them, also with `trainer.sequence_parallel_size`."""
    zero_stage: int = 3
    """What ZeRO shards over the processes, with deepspeed: 1 the optimiser's state, 2 also the gradients, 3 also the
    parameters."""
    sequence_parallel_size: int = 1
    """Processes that share a sample, each with its part of the sequence (Ulysses), with deepspeed. A divisor of the
    number of processes, of the model's query heads, and a divisor or multiple of its KV heads."""
    offload: str = "nothing"
    """What waits in the CPU's memory, with deepspeed: nothing, the optimizer's state, or, with `trainer.zero_stage` 3,
    the parameters too. AdamW then runs on the CPU."""
    accelerator: str = "auto"
    """Lightning's name of the kind of device: auto, cpu, gpu, ..."""
    precision: str = "32-true"
    """Lightning's name of what is computed in: 32-true, bf16-mixed (weights stay as they are) or bf16-true."""
    validate_every: int = 100
    """Optimiser steps between two validations."""
    validation_batches: int = 16
    """Batches of `data.micro_batch_size` samples in one validation."""
    checkpoint_every: int = 100
    """Optimiser steps between two checkpoints."""
    keep_checkpoints: int = 2
    """The last so many checkpoints are kept; the best one by validation loss is kept beside them."""
    log_every: int = 1
    """Optimiser steps between two lines of the log."""
    loss_chunk: int = 1024
    """Positions whose logits are in memory at once while the loss is computed."""
    answer_weight: float = 0.0
    """Weight of the mean loss over the answers that the data marks (the demo's asked digits), added to the loss. A new
    model learns to look back only when that pays; 0: answers count as any other token."""
    time_limit: str | None = None
    """Stop, with a checkpoint, at the end of the step in which training has taken this wall-clock time: DD:HH:MM:SS. A
    resumed run has it anew. null: no limit."""


@dataclass
class Recipe:
    """One run, from model and data to what is written."""

    name: str = MISSING
    """The run's name: letters, digits, dot, dash and underscore."""
    description: str = MISSING
    """One line that says what the run is for."""
    seed: int = 0
    """Decides everything random: initial weights, order of samples."""
    output: str | None = None
    """Where the run writes. null: checkpoints/NAME."""
    resume: str = "never"
    """never: start anew; auto: continue from the run's last whole checkpoint, if there is one; or a checkpoint's
    path."""
    logger: str = "csv"
    """Where metrics go beside the CSV file that is always written: csv (nowhere else), wandb or tensorboard."""
    model: Model = field(default_factory=Model)
    blocks: Blocks = field(default_factory=Blocks)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    distill: Distill = field(default_factory=Distill)
    lora: Lora = field(default_factory=Lora)
    trainer: Trainer = field(default_factory=Trainer)


CHOICES = {
    "logger": ("csv", "wandb", "tensorboard"),
    "model.dtype": ("float32", "bfloat16"),
    "model.initialization": ("transformers", "torch"),
    "model.share": ("scores", "keys", "kv", "window"),
    "blocks.method": ("greedy", "damage", "sum", "worst"),
    "trainer.precision": ("32-true", "bf16-mixed", "bf16-true"),
    "trainer.strategy": ("auto", "ddp", "deepspeed"),
    "trainer.offload": ("nothing", "optimizer", "parameters"),
}
# Of a list, every element; null is always inside.
INTERVALS = {
    "seed": "[0, 4294967295]",
    "model.rope_theta": "(0, inf)",
    "model.sink_size": "[0, inf)",
    "model.recent_size": "[1, inf)",
    "model.mlp_tiles": "[1, inf)",
    "blocks.size": "[1, inf)",
    "blocks.kv_saving": "[0, 0.5]",
    "blocks.threshold": "[0, 1]",
    "blocks.samples": "[1, inf)",
    "blocks.last_q": "[1, inf)",
    "data.sequence_length": "[2, inf)",
    "data.length_intervals": "[1, inf)",
    "data.micro_batch_size": "[1, inf)",
    "data.num_workers": "[0, inf)",
    "optimizer.lr": "(0, inf)",
    "optimizer.min_lr": "[0, inf)",
    "optimizer.betas": "[0, 1)",
    "optimizer.weight_decay": "[0, inf)",
    "optimizer.warmup_steps": "[0, inf)",
    "optimizer.warmup_tokens": "[0, inf)",
    "optimizer.gradient_clip": "[0, inf)",
    "distill.weight": "[0, 1]",
    "distill.temperature": "(0, inf)",
    "lora.rank": "[0, inf)",
    "lora.alpha": "(0, inf)",
    "lora.dropout": "[0, 1)",
    "trainer.max_steps": "[1, inf)",
    "trainer.max_tokens": "[1, inf)",
    "trainer.tokens_per_batch": "[1, inf)",
    "trainer.devices": "[1, inf)",
    "trainer.num_nodes": "[1, inf)",
    "trainer.zero_stage": "[1, 3]",
    "trainer.sequence_parallel_size": "[1, inf)",
    "trainer.validate_every": "[1, inf)",
    "trainer.validation_batches": "[1, inf)",
    "trainer.checkpoint_every": "[1, inf)",
    "trainer.keep_checkpoints": "[1, inf)",
    "trainer.log_every": "[1, inf)",
    "trainer.loss_chunk": "[1, inf)",
    "trainer.answer_weight": "[0, inf)",
}
TYPE_NAMES = {int: "int", float: "float", bool: "true or false", str: "string", dict: "mapping"}
TYPE_NAMES |= {list[int]: "list of ints", list[float]: "list of floats", list[str]: "list of strings"}
LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")  # projections of a layer's attention, and of its MLP
FREE = "model.config"  # the one field that is a mapping: its keys are a Hugging Face config's, not ours


# What a run derives from its recipe


def output_folder(recipe: Recipe) -> Path:
    """Where the run writes: `output`, or checkpoints/NAME."""
    return Path(recipe.output) if recipe.output is not None else Path("checkpoints") / recipe.name


def steps(recipe: Recipe) -> int:
    """Optimiser steps of the whole run: `trainer.max_steps`, or `trainer.max_tokens` rounded up to whole steps."""
    if recipe.trainer.max_steps is not None:
        return recipe.trainer.max_steps
    return -(-recipe.trainer.max_tokens // recipe.trainer.tokens_per_batch)


def warmup_steps(recipe: Recipe) -> int:
    """Optimiser steps of the warm-up: `optimizer.warmup_steps`, or `optimizer.warmup_tokens` rounded up, or 0."""
    if recipe.optimizer.warmup_tokens is not None:
        return -(-recipe.optimizer.warmup_tokens // recipe.trainer.tokens_per_batch)
    return recipe.optimizer.warmup_steps or 0


def data_parallel_size(recipe: Recipe) -> int:
    """Processes that each read samples of their own; those that share a sample count as one."""
    return recipe.trainer.devices * recipe.trainer.num_nodes // recipe.trainer.sequence_parallel_size


def accumulate(recipe: Recipe, num_processes: int | None = None) -> int:
    """Forward and backward passes of each process in one optimiser step.

    Args:
        num_processes: processes that each read samples of their own; None: the recipe's `data_parallel_size`.

    Raises:
        RecipeError: `trainer.tokens_per_batch` is not a multiple of the tokens of one pass of all processes.
    """
    if num_processes is None:
        num_processes = data_parallel_size(recipe)
    micro, length = recipe.data.micro_batch_size, recipe.data.sequence_length
    wanted, one_pass = recipe.trainer.tokens_per_batch, micro * length * num_processes
    if wanted % one_pass:
        lower = wanted // one_pass * one_pass
        closest = f"{lower} or {lower + one_pass}" if lower else f"{one_pass}"
        raise RecipeError(
            f"trainer.tokens_per_batch={wanted} is not a multiple of {one_pass} = data.micro_batch_size ({micro}) * "
            f"data.sequence_length ({length}) * processes ({num_processes}); the closest is {closest}"
        )
    return wanted // one_pass


# The schema, read from the dataclasses


@dataclass(frozen=True)
class Field:
    """One key of the schema: its base type (int, float, bool, str, list or dict), of a list what is in it, whether null
    is allowed, its help."""

    key: str
    type: type
    element: type | None
    optional: bool
    default: Any
    doc: str

    @property
    def wanted(self) -> str:
        """The type in words."""
        return TYPE_NAMES[list[self.element] if self.type is list else self.type] + (
            " or null" if self.optional else ""
        )


@cache
def schema() -> dict[str, Field]:
    """Every key that can be set, dotted, in the order of the dataclasses."""
    return {entry.key: entry for entry in _fields(Recipe, "")}


@cache
def sections() -> dict[str, str]:
    """The names of the groups of keys, and what each is about."""
    hints = typing.get_type_hints(Recipe)
    return {name: inspect.getdoc(hint) for name, hint in hints.items() if dataclasses.is_dataclass(hint)}


def _fields(cls: type, prefix: str) -> Iterator[Field]:
    hints, docs = typing.get_type_hints(cls), _field_docs(cls)
    for entry in dataclasses.fields(cls):
        hint = hints[entry.name]
        if dataclasses.is_dataclass(hint):
            yield from _fields(hint, f"{prefix}{entry.name}.")
            continue
        optional = isinstance(hint, types.UnionType)
        if optional:
            (hint,) = set(typing.get_args(hint)) - {types.NoneType}
        made = entry.default_factory is not dataclasses.MISSING
        default = entry.default_factory() if made else entry.default
        kind = typing.get_origin(hint) or hint
        element = typing.get_args(hint)[0] if kind is list else None
        yield Field(prefix + entry.name, kind, element, optional, default, docs.get(entry.name, ""))


def _field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass, from its source, on one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    docs = {}
    for above, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[above.target.id] = " ".join(below.value.value.split())
    return docs
