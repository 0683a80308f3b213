"""Recipes: what a run does, as one documented YAML file, checked before anything is loaded.

The dataclasses below are the schema; the text under each field is its help. A run's recipe is
`schema <- recipes/NAME.yaml <- key=value` from the command line, later ones winning:

    recipe = load_recipe(["recipe=tiny", "trainer.max_steps=20", "model.config.hidden_size=64"])

`recipe=` is the name of a file in the recipes folder (that of the repository, or $POD_RECIPES) or a path. Values are
YAML; `1e3` and `1_000` are fine where an int is meant, and `${key}` takes another key's value. Whatever is wrong with
a recipe is a RecipeError, whose message names the key, the value, and what to write instead.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import os
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException


class RecipeError(ValueError):
    """A recipe, or an override of it, that cannot be run; the message says what to write instead."""


@dataclass
class Model:
    """The model to train."""

    base: str | None = None
    """The Hugging Face model to start from: a directory or a hub id. null: start from scratch, from `model.config`."""
    config: dict[str, Any] | None = None
    """The fields of a Hugging Face config, `model_type` among them, of a model trained from scratch. Any field may be
    set from the command line: model.config.hidden_size=64."""
    initialization: str = "transformers"
    """How a model from scratch is drawn: `transformers` (normal, `initializer_range`), or `torch` (its defaults, whose
    embeddings of unit variance stay visible through a deep and narrow stack; for untied heads, without DeepSpeed)."""
    rope_theta: float | None = None
    """The base of the rotary position embedding, raised for longer contexts. null: that of the model."""
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
    """Stop, with a checkpoint, after this wall-clock time: DD:HH:MM:SS. null: no limit."""


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
    "blocks.method": ("greedy", "sum", "worst"),
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


def _closest(name: str, valid: Sequence[str]) -> str:
    """` Did you mean X?`, or nothing when no valid name is like this one.

    Keys are also compared by their last part, so that `max_steps` and `optimizer.max_steps` find trainer.max_steps.
    """

    def alike(a: str, b: str) -> float:
        return SequenceMatcher(None, a, b, autojunk=False).ratio()

    name = name.lstrip("-+").lower()[:100]
    last = name.rpartition(".")[2]
    score, best = max(
        ((max(alike(name, other), 0.95 * alike(last, other.rpartition(".")[2])), other) for other in valid),
        default=(0.0, ""),
    )
    return f" Did you mean {best}?" if score >= 0.5 else ""


# Loading


def load_recipe(arguments: Sequence[str]) -> Recipe:
    """Build a recipe from command-line arguments: one `recipe=NAME|PATH` and any number of `key=value`, in any order.

    Raises:
        RecipeError: anything that is wrong with the arguments, the file, a value, or how they go together.
    """
    names, overrides = [], []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            hint = f" Did you mean recipe={argument}?" if argument in _recipe_files() else ""
            raise RecipeError(f"expected key=value, got {argument!r}.{hint}")
        if key == "recipe":
            names.append(value)
        else:
            overrides.append((key, value))
    if len(names) != 1:
        given = f"{len(names)} recipes are given ({', '.join(names)})" if names else "no recipe is given"
        raise RecipeError(f"{given}; write recipe=NAME once. {_available()}")
    path = _find(names[0])
    leaves = [leaf for key, value in _read(path).items() for leaf in _leaves(key, value, f"{path}: ")]
    for key, text in overrides:
        leaves += _leaves(key, _override_value(key, text), "")
    return _build(leaves)


def save(recipe: Recipe, path: str | os.PathLike) -> None:
    """Write a recipe as YAML that `recipe=PATH` reads back to an equal one. Folders are made; a file is replaced."""
    from pod.files import write_text  # here: the schema is read without torch

    write_text(path, to_yaml(recipe))


def to_yaml(recipe: Recipe) -> str:
    """The recipe as YAML, every key written out."""
    return yaml.dump(dataclasses.asdict(recipe), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def recipes() -> dict[str, str]:
    """The recipes of the recipes folder: name -> description (or what is wrong with the file), sorted by name."""
    listed = {}
    for name, path in _recipe_files().items():
        try:
            listed[name] = str(_read(path).get("description", ""))
        except RecipeError as error:
            listed[name] = f"cannot be read: {error}"
    return listed


def _build(leaves: Sequence[tuple[str, Any]]) -> Recipe:
    """A checked recipe from (key, value) pairs, of which later ones win; mappings under `model.config` are merged."""
    values: dict[str, Any] = {}
    for key, value in leaves:
        _merge(values, _nested(key, value))
    try:
        config = OmegaConf.merge(OmegaConf.structured(Recipe), values)
        missing = OmegaConf.missing_keys(config)
        if missing:
            named = [f"{key} ({entry.doc})" for key, entry in schema().items() if key in missing]
            raise RecipeError("required, but not given: " + ("; ".join(named) or ", ".join(sorted(missing))))
        recipe = OmegaConf.to_object(config)
    except RecipeError:
        raise
    except (OmegaConfBaseException, RecursionError, TypeError, ValueError) as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        raise RecipeError(f"the recipe's values cannot be put together: {reason}") from error
    validate(recipe)
    return recipe


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _leaves(key: str, value: Any, source: str) -> Iterator[tuple[str, Any]]:
    """The schema's keys that `key: value` sets, with values of the schema's types.

    Args:
        key: dotted, of a field, of a section (then the value is a mapping), or inside the free mapping.
        source: what messages start with, such as the file.
    """
    if key in sections():
        if not isinstance(value, dict):
            raise RecipeError(f"{source}{key} is a group of keys, not a value: write {key}.KEY=value; got {value!r}")
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner, source)
    elif key in schema():
        yield key, _converted(schema()[key], value, source)
    elif key.startswith(FREE + ".") and all(key.split(".")):
        _check_free(key, value, source)
        yield FREE, _nested(key.removeprefix(FREE + "."), value)
    else:
        hint = _closest(key, [*schema(), *sections()])
        raise RecipeError(f"{source}unknown key {key!r}.{hint or ' --help lists the keys.'}")


def _converted(entry: Field, value: Any, source: str) -> Any:
    """The value as the field's type; text with an interpolation is left alone until it is resolved."""
    problem = RecipeError(f"{source}{entry.key}: wanted {entry.wanted}, got {value!r} ({type(value).__name__})")
    if value is None:
        if entry.optional:
            return None
        raise problem
    if _interpolated(value):
        return value
    if entry.type is list:
        if not isinstance(value, list):
            raise problem
        if entry.element is str:
            if not all(isinstance(element, str) for element in value):
                raise problem
            return value
        return [element if _interpolated(element) else _number(element, entry.element, problem) for element in value]
    if entry.type in (int, float):
        return _number(value, entry.type, problem)
    if not isinstance(value, entry.type):
        if entry.type is str and isinstance(value, int | float):
            raise RecipeError(f"{problem}; put it in quotes")
        raise problem
    if entry.type is dict:
        _check_free(entry.key, value, source)
    return value


def _interpolated(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _number(value: Any, kind: type, problem: RecipeError) -> int | float:
    """An int or a float from a YAML number or its text: 1e3, "1e3" and 1_000 are ints; 1.5 and true are not."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise problem
    try:
        if kind is int and not isinstance(value, float):
            try:
                number = int(value)
            except ValueError:
                number = float(value)
        else:
            number = float(value)
    except (ValueError, OverflowError):
        raise problem from None
    if not math.isfinite(number) or abs(number) >= 2**63 or (kind is int and number != int(number)):
        raise problem
    return kind(number)


def _check_free(key: str, value: Any, source: str) -> None:
    """Refuse what JSON, and so a config.json, cannot hold."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise RecipeError(f"{source}{key}: the key {name!r} is not a string; put it in quotes")
            _check_free(f"{key}.{name}", inner, source)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_free(f"{key}.{index}", inner, source)
    elif not (value is None or isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value))):
        raise RecipeError(f"{source}{key}: wanted a value of JSON, got {value!r} ({type(value).__name__})")


# Checks


def validate(recipe: Recipe) -> None:
    """Check a recipe that was built or changed in code; `load_recipe` has done so.

    Raises:
        RecipeError: a value of the wrong type, outside its choices or its interval, or two that contradict each other.
    """
    for key, entry in schema().items():
        value = _get(recipe, key)
        converted = _converted(entry, value, "")
        if "${" in str(value):
            raise RecipeError(f"{key}: {value!r} holds ${{, which only an interpolation may")
        if key in CHOICES and value not in CHOICES[key]:
            hint = _closest(value, CHOICES[key])
            raise RecipeError(f"{key} must be one of {', '.join(CHOICES[key])}; got {value!r}.{hint}")
        if key in INTERVALS:
            for element in value if isinstance(value, list) else [value]:
                if element is not None and not _inside(element, INTERVALS[key]):
                    raise RecipeError(f"{key} must be in {INTERVALS[key]}, got {element!r}")
        _set(recipe, key, converted)
    _check_texts(recipe)
    _check_together(recipe)


def _check_texts(recipe: Recipe) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", recipe.name):
        raise RecipeError(f"name must be letters, digits, dot, dash and underscore; got {recipe.name!r}")
    if "\n" in recipe.description.strip():
        raise RecipeError(f"description must be one line, got {recipe.description!r}")
    # A word that names no file is a typo; a path may belong to a checkpoint that has gone since the recipe was saved.
    if recipe.resume not in ("never", "auto") and not re.search(r"[/\\]", recipe.resume):
        if not os.path.exists(recipe.resume):
            hint = _closest(recipe.resume, ("never", "auto"))
            raise RecipeError(f"resume must be never, auto or a checkpoint's path; got {recipe.resume!r}.{hint}")
    if recipe.trainer.time_limit is not None and not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", recipe.trainer.time_limit):
        raise RecipeError(f"trainer.time_limit must be DD:HH:MM:SS, got {recipe.trainer.time_limit!r}")
    for key in ("output", "model.base", "model.tokenizer", "blocks.file", "data.path", "data.validation_path"):
        if _get(recipe, key) == "":
            raise RecipeError(f"{key} is empty")


def _check_together(recipe: Recipe) -> None:
    model, optimizer, trainer = recipe.model, recipe.optimizer, recipe.trainer
    if (model.base is None) == (model.config is None):
        given = "neither is" if model.base is None else "both are"
        raise RecipeError(
            f"model.base (start from a trained model) or model.config (start from scratch): {given} given, wanted one; "
            "set the other to null"
        )
    if model.config is not None and not isinstance(model.config.get("model_type"), str):
        raise RecipeError("model.config.model_type is required: the family's name, such as llama or qwen3")
    if model.initialization == "torch" and model.config is not None:
        if model.config.get("tie_word_embeddings"):
            raise RecipeError(
                "model.initialization=torch draws embeddings of unit variance, which as a head give logits far too "
                "large: set model.config.tie_word_embeddings=false"
            )
        if trainer.strategy == "deepspeed":
            raise RecipeError(
                "model.initialization=torch cannot draw weights that trainer.strategy=deepspeed shards while they are "
                "made: set model.initialization=transformers"
            )
    if model.config is not None and model.tokenizer is None:
        raise RecipeError("model.tokenizer is required with model.config: a path, a hub id, or bytes")
    if (trainer.max_steps is None) == (trainer.max_tokens is None):
        given = "neither is" if trainer.max_steps is None else "both are"
        raise RecipeError(f"trainer.max_steps or trainer.max_tokens: {given} given, wanted one; set the other to null")
    if optimizer.warmup_steps is not None and optimizer.warmup_tokens is not None:
        raise RecipeError(
            "optimizer.warmup_steps or optimizer.warmup_tokens: both are given, wanted one; set the other to null"
        )
    if len(optimizer.betas) != 2:
        raise RecipeError(f"optimizer.betas must be two floats, got {optimizer.betas}")
    if optimizer.min_lr > optimizer.lr:
        raise RecipeError(f"optimizer.min_lr ({optimizer.min_lr:g}) is above optimizer.lr ({optimizer.lr:g})")
    if model.offload_checkpoints and not model.gradient_checkpointing:
        raise RecipeError(
            "model.offload_checkpoints needs model.gradient_checkpointing=true: without it there are none"
        )
    if model.compile and (trainer.strategy == "deepspeed" or model.offload_checkpoints):
        other = "trainer.strategy=deepspeed" if trainer.strategy == "deepspeed" else "model.offload_checkpoints=true"
        raise RecipeError(f"model.compile=true does not go with {other}: set model.compile=false")
    if trainer.offload != "nothing" and trainer.strategy != "deepspeed":
        raise RecipeError(f"trainer.offload={trainer.offload} needs trainer.strategy=deepspeed, got {trainer.strategy}")
    if trainer.offload == "parameters" and trainer.zero_stage < 3:
        raise RecipeError(f"trainer.offload=parameters needs trainer.zero_stage=3, got {trainer.zero_stage}")
    size, processes = trainer.sequence_parallel_size, trainer.devices * trainer.num_nodes
    if size > 1 and trainer.strategy != "deepspeed":
        raise RecipeError(
            f"trainer.sequence_parallel_size={size} needs trainer.strategy=deepspeed, got {trainer.strategy!r}"
        )
    if processes % size:
        raise RecipeError(
            f"trainer.sequence_parallel_size={size} does not divide the {processes} processes (trainer.devices "
            f"{trainer.devices} * trainer.num_nodes {trainer.num_nodes})"
        )
    if recipe.data.sequence_length < size:
        raise RecipeError(
            f"trainer.sequence_parallel_size={size} is more than the tokens of a sample, data.sequence_length="
            f"{recipe.data.sequence_length}"
        )
    blocks = recipe.blocks
    named = [key for key in ("file", "size", "threshold") if getattr(blocks, key) is not None]
    if blocks.size is not None and len(named) > 1:
        raise RecipeError(f"blocks.{named[0]} and blocks.{named[1]} are both given, wanted one; set the other to null")
    if blocks.threshold is not None and blocks.method != "greedy":
        raise RecipeError(
            f"blocks.method={blocks.method} groups for blocks.kv_saving, not for a threshold: set "
            "blocks.threshold=null or blocks.method=greedy"
        )
    shares = bool(named) or blocks.kv_saving > 0
    if shares and model.share == "window":
        raise RecipeError(
            "model.share=window has no distant tokens to share: set blocks.kv_saving=0, blocks.file=null, "
            "blocks.size=null and blocks.threshold=null"
        )
    if shares and model.share == "kv" and blocks.size is None and blocks.file is None:
        raise RecipeError(
            "model.share=kv shares values too, of which the similarity of scores says nothing: set blocks.size=2 "
            "(neighbouring pairs) or blocks.file"
        )
    if recipe.distill.weight and not (shares or model.share == "window"):
        raise RecipeError(
            f"distill.weight={recipe.distill.weight:g}: a dense model is its own teacher; set distill.weight=0"
        )
    if recipe.distill.weight and model.base is None:
        raise RecipeError(
            f"distill.weight={recipe.distill.weight:g} needs model.base: a model from scratch has no teacher"
        )
    wrong = [target for target in recipe.lora.targets if target not in LORA_TARGETS]
    if wrong or len(set(recipe.lora.targets)) != max(1, len(recipe.lora.targets)):
        raise RecipeError(
            f"lora.targets must be some of {', '.join(LORA_TARGETS)}, none twice; got {recipe.lora.targets}"
        )
    if recipe.lora.rank and model.base is None:
        raise RecipeError(f"lora.rank={recipe.lora.rank} needs model.base: adapters change a trained model a little")
    if recipe.lora.rank and model.share == "kv" and {"k", "v"} & set(recipe.lora.targets):
        raise RecipeError(
            f"lora.targets={recipe.lora.targets}: with model.share=kv upper layers make no keys and values; set "
            "lora.targets=[q,o]"
        )
    if recipe.distill.weight and model.share == "kv" and trainer.strategy == "deepspeed":
        raise RecipeError(
            f"distill.weight={recipe.distill.weight:g}, model.share=kv and trainer.strategy=deepspeed: a sharded "
            "checkpoint leaves out what is frozen, the teacher and the unused projections alike; set distill.weight=0"
        )
    if shares and model.share != "kv" and model.sink_size + model.recent_size >= recipe.data.sequence_length:
        raise RecipeError(
            f"no token is distant: model.sink_size ({model.sink_size}) + model.recent_size ({model.recent_size}) cover "
            f"data.sequence_length ({recipe.data.sequence_length}). Lower them, lengthen the samples, or set "
            "blocks.kv_saving=0 for a dense model"
        )
    accumulate(recipe)


def _inside(value: float, interval: str) -> bool:
    low, high = (float(end) for end in interval[1:-1].split(","))
    return (value > low or (value == low and interval[0] == "[")) and (
        value < high or (value == high and interval[-1] == "]")
    )


def _get(recipe: Recipe, key: str) -> Any:
    for part in key.split("."):
        recipe = getattr(recipe, part)
    return recipe


def _set(recipe: Recipe, key: str, value: Any) -> None:
    owner, _, name = key.rpartition(".")
    setattr(_get(recipe, owner) if owner else recipe, name, value)


# Files


class _Loader(yaml.SafeLoader):
    """YAML whose scalars mean what they look like, as in YAML 1.2: PyYAML's 1.1 reads `12:30:00` as an int, `no` as
    false, `1e3` as text and a date as an object. A key given twice is an error, and there are no aliases."""

    yaml_implicit_resolvers: typing.ClassVar[dict] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases (*) are not supported", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or `_Loader` would not read as text."""


_DIGITS = "[0-9]+(?:_[0-9]+)*"
for _kind, _pattern, _first in (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", f"[-+]?{_DIGITS}", "-+0123456789"),
    ("float", rf"[-+]?(?:\.[0-9]+|{_DIGITS}(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", "-+.0123456789"),
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    for _yaml in (_Loader, _Dumper):
        _yaml.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
_Loader.add_constructor(
    "tag:yaml.org,2002:float", lambda loader, node: float(node.value.replace(".inf", "inf").replace(".nan", "nan"))
)


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark and "\n" in text else ""
        raise RecipeError(f"{source}{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RecipeError(f"{source}: not valid YAML: {error}") from error


def _override_value(key: str, text: str) -> Any:
    """The value of `key=text`. For a string field that is the text itself, so that it needs no YAML quotes."""
    entry = schema().get(key)
    if entry is None or entry.type is not str:
        return _parse(text, f"{key}={text}")
    if text in ("", "~", "null"):
        return None
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return _parse(text, f"{key}={text}") if quoted else text


def _read(path: Path) -> dict[str, Any]:
    """The file's keys and values; a section with nothing in it counts as not given."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror or error}") from error
    content = _parse(text, str(path))
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: wanted a mapping of keys, got {type(content).__name__}")
    return {str(key): value for key, value in content.items() if value is not None or key not in sections()}


def _folder() -> Path:
    """$POD_RECIPES, else the repository's recipes/, else recipes/ where the command runs."""
    if os.environ.get("POD_RECIPES"):
        return Path(os.environ["POD_RECIPES"])
    beside = Path(__file__).resolve().parent.parent / "recipes"
    return beside if beside.is_dir() else Path("recipes")


def _recipe_files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(_folder().glob("*.yaml"), key=lambda path: path.stem)}


def _available() -> str:
    names = ", ".join(_recipe_files())
    return f"Recipes: {names}" if names else f"There are no recipes in {_folder()}; set POD_RECIPES to their folder"


def _find(name: str) -> Path:
    """The file of a recipe's name or path."""
    if name in _recipe_files():
        return _recipe_files()[name]
    if os.path.isfile(name):
        return Path(name)
    hint = _closest(Path(name).name.removesuffix(".yaml"), list(_recipe_files()))
    kind = "file" if re.search(r"[/\\]|\.ya?ml$", name) else "recipe"
    raise RecipeError(f"no {kind} {name!r}.{hint} {_available()}")


# The command line


def help_text(command: str = "pod.fit") -> str:
    """The schema as text: every key with its type, default, valid values and help."""
    lines = [f"usage: python -m {command} recipe=NAME|PATH [key=value ...]"]
    if command == "pod.fit":
        lines.append("       with plan=true [gpu=H100] [utilisation=0.4]: print memory, FLOPs and hours, train nothing")
    lines += ["", _available(), ""]
    section = None
    for key, entry in schema().items():
        if key.rpartition(".")[0] != section:
            section = key.rpartition(".")[0]
            lines += ["", f"{section}: {sections()[section]}", ""] if section else ["keys:", ""]
        default = "required" if entry.default == MISSING else f"default {_yaml_value(entry.default)}"
        valid = f", one of {', '.join(CHOICES[key])}" if key in CHOICES else ""
        valid = f", in {INTERVALS[key]}" if key in INTERVALS else valid
        lines.append(f"  {key}  ({entry.wanted}, {default}{valid})")
        lines += textwrap.wrap(entry.doc, 112, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _yaml_value(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def main_recipe(argv: Sequence[str], command_name: str) -> Recipe:
    """What every command that takes a recipe does first: load it and print it, as YAML, to stdout.

    Args:
        argv: the arguments without the program's name. None: print the recipes; with --help: print the schema.
        command_name: as in `python -m NAME`, such as pod.fit.

    Raises:
        SystemExit: 0 after the list or the help, 2 after a RecipeError, whose message went to stderr.
    """
    if {"--help", "-h"} & set(argv):
        print(help_text(command_name))
        raise SystemExit(0)
    if not argv:
        print(_listing(command_name))
        raise SystemExit(0)
    try:
        recipe = load_recipe(argv)
    except RecipeError as error:
        _fail(error)
    print(to_yaml(recipe), end="", flush=True)
    return recipe


def _fail(error: RecipeError) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2)


def _listing(command: str) -> str:
    listed = recipes()
    width = max(map(len, listed), default=0)
    lines = [f"  {name:<{width}}  {description}" for name, description in listed.items()]
    return "\n".join(
        [f"Recipes, in {_folder()}:" if lines else _available(), *lines, ""]
        + [
            f"Run one:       python -m {command} recipe=NAME [key=value ...]",
            f"All the keys:  python -m {command} --help",
        ]
    )
