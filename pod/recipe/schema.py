"""Recipes: what a run does. The sections are in `pod/recipe/sections.py`; here is what goes together across them, what
a run derives from its recipe, and every key as --help and the messages show it.
"""

import inspect
import os
import re
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from pod.recipe.errors import RecipeError, closest
from pod.recipe.sections import Blocks, Data, Distill, Lora, Model, Optimizer, Section, Trainer
from pod.recipe.yaml import one_line

FREE = "model.config"  # the one key that is a mapping: what is in it are a Hugging Face config's keys, not ours


class Recipe(Section):
    """One run, from model and data to what is written."""

    name: str
    """The run's name: letters, digits, dot, dash and underscore."""
    description: str
    """One line that says what the run is for."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Decides everything random: initial weights, order of samples."""
    output: str | None = Field(None, min_length=1)
    """Where the run writes. null: checkpoints/NAME."""
    resume: str = "never"
    """never: start anew; auto: continue from the run's last whole checkpoint, if there is one; or a checkpoint's
    path."""
    logger: Literal["csv", "wandb", "tensorboard"] = "csv"
    """Where metrics go beside the CSV file that is always written: csv (nowhere else), wandb or tensorboard."""
    model: Model
    blocks: Blocks
    data: Data
    optimizer: Optimizer
    distill: Distill
    lora: Lora
    trainer: Trainer

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        for check in (self._texts, self._processes, self._sharing, self._learning, self._unread):
            check()
        accumulate(self)
        return self

    def _texts(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise RecipeError(f"name must be letters, digits, dot, dash and underscore; got {self.name!r}")
        if "\n" in self.description.strip():
            raise RecipeError(f"description must be one line, got {self.description!r}")
        # A word that names no file is a typo; a path may be that of a checkpoint that has gone since the recipe was
        # saved.
        if self.resume not in ("never", "auto") and not re.search(r"[/\\]", self.resume):
            if not os.path.exists(self.resume):
                hint = closest(self.resume, ("never", "auto"))
                raise RecipeError(
                    f"resume must be never, auto or a checkpoint's path; got {self.resume!r}, which is no file.{hint}"
                )

    def _processes(self) -> None:
        """What lies where, and who computes what."""
        model, trainer = self.model, self.trainer
        if model.config is not None and model.initialization == "torch" and trainer.strategy == "deepspeed":
            raise RecipeError(
                "model.initialization=torch cannot draw weights that trainer.strategy=deepspeed shards while they are "
                "made: set model.initialization=transformers"
            )
        if model.load_in_4bit and (trainer.strategy == "deepspeed" or model.compile):
            other = "model.compile=true" if model.compile else "trainer.strategy=deepspeed"
            remedy = "model.compile=false" if model.compile else "trainer.strategy=auto or ddp"
            raise RecipeError(
                f"model.load_in_4bit=true does not go with {other}: set {remedy}, or model.load_in_4bit=false"
            )
        if model.compile and (trainer.strategy == "deepspeed" or model.offload_checkpoints):
            sharded = trainer.strategy == "deepspeed"
            other = "trainer.strategy=deepspeed" if sharded else "model.offload_checkpoints=true"
            raise RecipeError(f"model.compile=true does not go with {other}: set model.compile=false")
        if self.data.sequence_length < trainer.sequence_parallel_size:
            raise RecipeError(
                f"trainer.sequence_parallel_size={trainer.sequence_parallel_size} is more than the tokens of a sample, "
                f"data.sequence_length={self.data.sequence_length}"
            )

    def _sharing(self) -> None:
        """Which layers share what."""
        blocks, model = self.blocks, self.model
        if not _shares(self):
            return
        if blocks.streaming and model.share in ("kv", "window"):
            raise RecipeError(
                f"blocks.streaming={blocks.streaming:g}: with model.share={model.share} no head has keys and values of "
                "its own to stream beside others; set model.share=scores or keys, or blocks.streaming=0 and "
                "blocks.head_scores=null"
            )
        if model.share == "window":
            raise RecipeError(
                "model.share=window has no distant tokens to share: set blocks.kv_saving=0, blocks.file=null, "
                "blocks.size=null and blocks.threshold=null"
            )
        if model.share == "kv" and blocks.size is None and blocks.file is None:
            raise RecipeError(
                "model.share=kv shares values too, of which the similarity of scores says nothing: set blocks.size=2 "
                "(neighbouring pairs) or blocks.file"
            )
        if model.share != "kv" and model.sink_size + model.recent_size >= self.data.sequence_length:
            raise RecipeError(
                f"no token is distant: model.sink_size ({model.sink_size}) + model.recent_size ({model.recent_size}) "
                f"cover data.sequence_length ({self.data.sequence_length}). Lower them, lengthen the samples, or set "
                "blocks.kv_saving=0 for a dense model"
            )

    def _learning(self) -> None:
        """A teacher and adapters."""
        model, weight, lora = self.model, self.distill.weight, self.lora
        if weight and not (_shares(self) or model.share == "window"):
            raise RecipeError(f"distill.weight={weight:g}: a dense model is its own teacher; set distill.weight=0")
        if weight and model.base is None:
            raise RecipeError(f"distill.weight={weight:g} needs model.base: a model from scratch has no teacher")
        if lora.rank and model.base is None:
            raise RecipeError(f"lora.rank={lora.rank} needs model.base: adapters change a trained model a little")
        if model.load_in_4bit and not lora.rank:
            raise RecipeError(
                "model.load_in_4bit=true needs lora.rank above 0: weights in 4 bits cannot be trained, adapters "
                "on them can; set lora.rank=16 or model.load_in_4bit=false"
            )
        if lora.adapter is not None and self.trainer.strategy == "deepspeed" and self.trainer.zero_stage == 3:
            raise RecipeError(
                f"lora.adapter={lora.adapter}: ZeRO-3 shards adapters as they are made; set trainer.zero_stage=2"
            )
        if lora.rank and model.share == "kv" and {"k", "v"} & set(lora.targets):
            raise RecipeError(
                f"lora.targets={lora.targets}: with model.share=kv upper layers make no keys and values; set "
                "lora.targets=[q,o]"
            )
        if weight and model.share == "kv" and self.trainer.strategy == "deepspeed":
            raise RecipeError(
                f"distill.weight={weight:g}, model.share=kv and trainer.strategy=deepspeed: a sharded checkpoint "
                "leaves out what is frozen, the teacher and the unused projections alike; set distill.weight=0"
            )

    def _unread(self) -> None:
        """Settings that nothing would read, where another one says so; at their defaults they are nobody's wish."""
        unread = {
            "trainer.zero_stage": (self.trainer.strategy != "deepspeed", "trainer.strategy=deepspeed"),
            "distill.temperature": (not self.distill.weight, "a distill.weight above 0"),
            "model.initialization": (self.model.base is not None, "model.config: it draws the weights of a new model"),
            "blocks.threshold": (self.blocks.file is not None, "blocks.file=null, which names the blocks already"),
        }
        unread |= dict.fromkeys(
            ("lora.alpha", "lora.dropout", "lora.targets", "lora.adapter"), (not self.lora.rank, "a lora.rank above 0")
        )
        for key, (ignored, needed) in unread.items():
            value, default = attrgetter(key)(self), schema()[key].default
            if ignored and value != default:
                raise RecipeError(f"{key}={one_line(value)} needs {needed}; set {key}={one_line(default)}")


def _shares(recipe: Recipe) -> bool:
    blocks = recipe.blocks
    return max(blocks.kv_saving, blocks.streaming) > 0 or any(
        each is not None for each in (blocks.file, blocks.size, blocks.threshold)
    )


# What a run derives from its recipe


def output_folder(recipe: Recipe) -> Path:
    """Where the run writes: `output`, or checkpoints/NAME."""
    return Path(recipe.output) if recipe.output is not None else Path("checkpoints") / recipe.name


def steps(trainer: Trainer) -> int:
    """Optimiser steps of the whole run: `trainer.max_steps`, or `trainer.max_tokens` rounded up to whole steps."""
    if trainer.max_steps is not None:
        return trainer.max_steps
    return -(-trainer.max_tokens // trainer.tokens_per_batch)


def warmup_steps(optimizer: Optimizer, trainer: Trainer) -> int:
    """Optimiser steps of the warm-up: `optimizer.warmup_steps`, or `optimizer.warmup_tokens` rounded up, or 0."""
    if optimizer.warmup_tokens is not None:
        return -(-optimizer.warmup_tokens // trainer.tokens_per_batch)
    return optimizer.warmup_steps or 0


def data_parallel_size(recipe: Recipe) -> int:
    """Processes that each read samples of their own; those that share a sample count as one."""
    return recipe.trainer.devices * recipe.trainer.num_nodes // recipe.trainer.sequence_parallel_size


def accumulate(recipe: Recipe) -> int:
    """Forward and backward passes of each process in one optimiser step.

    Raises:
        RecipeError: `trainer.tokens_per_batch` is not a multiple of the tokens of one pass of all processes.
    """
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


# Every key, as --help and the messages show it

REQUIRED = object()  # in the place of a default
_WORDS = {"integer": "int", "number": "float", "boolean": "true or false", "string": "string", "object": "mapping"}
_LOW, _HIGH = {"minimum": "[", "exclusiveMinimum": "("}, {"maximum": "]", "exclusiveMaximum": ")"}


@dataclass(frozen=True)
class Key:
    """A key that can be set: its type in words, its default or `REQUIRED`, its help, the words that are valid or the
    interval of its numbers (of a list, of each of them), as text."""

    wanted: str
    default: Any
    doc: str
    choices: tuple[str, ...]
    interval: str


@cache
def schema() -> dict[str, Key]:
    """Every key, dotted, in the order of the sections."""
    keys = {}
    for section, cls in {"": Recipe, **sections()}.items():
        for name, entry in cls.model_json_schema()["properties"].items():
            if section or name not in sections():
                keys[f"{section}.{name}".lstrip(".")] = _key(entry)
    return keys


@cache
def sections() -> dict[str, type[Section]]:
    """The groups of keys; the docstring of each says what it is about."""
    hints = {name: field.annotation for name, field in Recipe.model_fields.items()}
    return {name: hint for name, hint in hints.items() if inspect.isclass(hint) and issubclass(hint, Section)}


def _key(entry: dict[str, Any]) -> Key:
    """Of a property in JSON schema, as pydantic writes it."""
    kind, *null = entry.get("anyOf", [entry])
    element = kind.get("items", kind)
    wanted = f"list of {_WORDS[element['type']]}s" if "items" in kind else _WORDS[kind["type"]]
    low = "".join(f"{sign}{element[end]}" for end, sign in _LOW.items() if end in element)
    high = "".join(f"{element[end]}{sign}" for end, sign in _HIGH.items() if end in element)
    return Key(
        wanted=wanted + (" or null" if null else ""),
        default=entry.get("default", REQUIRED),
        doc=" ".join(entry.get("description", "").split()),
        choices=tuple(element.get("enum", ())),
        interval=f"{low}, {high or 'inf)'}" if low else "",
    )
