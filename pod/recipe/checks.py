"""Whether a recipe can be run: each value against its key's type and interval, then the values against each other."""

import math
import os
import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from operator import attrgetter
from typing import Any

from pod.recipe.schema import CHOICES, INTERVALS, LORA_TARGETS, Field, Recipe, RecipeError, accumulate, schema
from pod.recipe.yaml import one_line


def validate(recipe: Recipe) -> None:
    """Check a recipe that was built or changed in code; `load_recipe` has done so.

    Raises:
        RecipeError: a value of the wrong type, outside its choices or its interval, or two that contradict each other.
    """
    for key, entry in schema().items():
        owner, _, name = key.rpartition(".")
        section = getattr(recipe, owner) if owner else recipe
        value = getattr(section, name)
        set_to = converted(entry, value, "")
        if "${" in str(value):
            raise RecipeError(f"{key}: {value!r} holds ${{, which only an interpolation may")
        if key in CHOICES and value not in CHOICES[key]:
            raise RecipeError(
                f"{key} must be one of {', '.join(CHOICES[key])}; got {value!r}.{closest(value, CHOICES[key])}"
            )
        if key in INTERVALS:
            for element in value if isinstance(value, list) else [value]:
                if element is not None and not _inside(element, INTERVALS[key]):
                    raise RecipeError(f"{key} must be in {INTERVALS[key]}, got {element!r}")
        setattr(section, name, set_to)
    _check_texts(recipe)
    _check_beginning(recipe)
    _check_schedule(recipe)
    _check_processes(recipe)
    _check_sharing(recipe)
    _check_learning(recipe)
    _check_unread(recipe)
    accumulate(recipe)


def _check_texts(recipe: Recipe) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", recipe.name):
        raise RecipeError(f"name must be letters, digits, dot, dash and underscore; got {recipe.name!r}")
    if "\n" in recipe.description.strip():
        raise RecipeError(f"description must be one line, got {recipe.description!r}")
    # A word that names no file is a typo; a path may belong to a checkpoint that has gone since the recipe was saved.
    if recipe.resume not in ("never", "auto") and not re.search(r"[/\\]", recipe.resume):
        if not os.path.exists(recipe.resume):
            hint = closest(recipe.resume, ("never", "auto"))
            raise RecipeError(f"resume must be never, auto or a checkpoint's path; got {recipe.resume!r}.{hint}")
    if recipe.trainer.time_limit is not None and not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", recipe.trainer.time_limit):
        raise RecipeError(f"trainer.time_limit must be DD:HH:MM:SS, got {recipe.trainer.time_limit!r}")
    for key in ("output", "model.base", "model.tokenizer", "blocks.file", "data.path", "data.validation_path"):
        if attrgetter(key)(recipe) == "":
            raise RecipeError(f"{key} is empty")


def _want_one(key: str, value: Any, other_key: str, other: Any) -> None:
    if (value is None) == (other is None):
        given = "neither is" if value is None else "both are"
        raise RecipeError(f"{key} or {other_key}: {given} given, wanted one; set the other to null")


def _check_beginning(recipe: Recipe) -> None:
    """What the model begins as."""
    model = recipe.model
    _want_one("model.base (start from a trained model)", model.base, "model.config (start from scratch)", model.config)
    if model.config is not None and not isinstance(model.config.get("model_type"), str):
        raise RecipeError("model.config.model_type is required: the family's name, such as llama or qwen3")
    if model.initialization == "torch" and model.config is not None:
        if model.config.get("tie_word_embeddings"):
            raise RecipeError(
                "model.initialization=torch draws embeddings of unit variance, which as a head give logits far too "
                "large: set model.config.tie_word_embeddings=false"
            )
        if recipe.trainer.strategy == "deepspeed":
            raise RecipeError(
                "model.initialization=torch cannot draw weights that trainer.strategy=deepspeed shards while they are "
                "made: set model.initialization=transformers"
            )
    if model.config is not None and model.tokenizer is None:
        raise RecipeError("model.tokenizer is required with model.config: a path, a hub id, or bytes")


def _check_schedule(recipe: Recipe) -> None:
    """How long, and at which rate."""
    optimizer, trainer = recipe.optimizer, recipe.trainer
    _want_one("trainer.max_steps", trainer.max_steps, "trainer.max_tokens", trainer.max_tokens)
    if optimizer.warmup_steps is not None:
        _want_one("optimizer.warmup_steps", optimizer.warmup_steps, "optimizer.warmup_tokens", optimizer.warmup_tokens)
    if len(optimizer.betas) != 2:
        raise RecipeError(f"optimizer.betas must be two floats, got {optimizer.betas}")
    if optimizer.min_lr > optimizer.lr:
        raise RecipeError(f"optimizer.min_lr ({optimizer.min_lr:g}) is above optimizer.lr ({optimizer.lr:g})")


def _check_processes(recipe: Recipe) -> None:
    """What lies where, and who computes what."""
    model, trainer = recipe.model, recipe.trainer
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


def _check_sharing(recipe: Recipe) -> None:
    """Which layers share what."""
    blocks, model = recipe.blocks, recipe.model
    named = [key for key in ("file", "size", "threshold") if getattr(blocks, key) is not None]
    if blocks.size is not None and len(named) > 1:
        raise RecipeError(f"blocks.{named[0]} and blocks.{named[1]} are both given, wanted one; set the other to null")
    if blocks.threshold is not None and blocks.method != "greedy":
        raise RecipeError(
            f"blocks.method={blocks.method} groups for blocks.kv_saving, not for a threshold: set "
            "blocks.threshold=null or blocks.method=greedy"
        )
    shares = _shares(recipe)
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
    if shares and model.share != "kv" and model.sink_size + model.recent_size >= recipe.data.sequence_length:
        raise RecipeError(
            f"no token is distant: model.sink_size ({model.sink_size}) + model.recent_size ({model.recent_size}) cover "
            f"data.sequence_length ({recipe.data.sequence_length}). Lower them, lengthen the samples, or set "
            "blocks.kv_saving=0 for a dense model"
        )


def _shares(recipe: Recipe) -> bool:
    blocks = recipe.blocks
    return blocks.kv_saving > 0 or any(each is not None for each in (blocks.file, blocks.size, blocks.threshold))


def _check_learning(recipe: Recipe) -> None:
    """A teacher and adapters."""
    model = recipe.model
    if recipe.distill.weight and not (_shares(recipe) or model.share == "window"):
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
    if recipe.distill.weight and model.share == "kv" and recipe.trainer.strategy == "deepspeed":
        raise RecipeError(
            f"distill.weight={recipe.distill.weight:g}, model.share=kv and trainer.strategy=deepspeed: a sharded "
            "checkpoint leaves out what is frozen, the teacher and the unused projections alike; set distill.weight=0"
        )


def _check_unread(recipe: Recipe) -> None:
    """Settings that nothing would read, where another one says so; at their defaults they are nobody's wish."""
    blocks, trainer = recipe.blocks, recipe.trainer
    unread = {
        "trainer.zero_stage": (trainer.strategy != "deepspeed", "trainer.strategy=deepspeed"),
        "distill.temperature": (not recipe.distill.weight, "a distill.weight above 0"),
        "model.initialization": (recipe.model.base is not None, "model.config: it draws the weights of a new model"),
        "blocks.threshold": (blocks.file is not None, "blocks.file=null, which names the blocks already"),
    }
    unread |= dict.fromkeys(
        ("lora.alpha", "lora.dropout", "lora.targets"), (not recipe.lora.rank, "a lora.rank above 0")
    )
    for key, (ignored, needed) in unread.items():
        value, default = attrgetter(key)(recipe), schema()[key].default
        if ignored and value != default:
            raise RecipeError(f"{key}={one_line(value)} needs {needed}; set {key}={one_line(default)}")


def _inside(value: float, interval: str) -> bool:
    low, high = (float(end) for end in interval[1:-1].split(","))
    return (value > low or (value == low and interval[0] == "[")) and (
        value < high or (value == high and interval[-1] == "]")
    )


# One value


def converted(entry: Field, value: Any, source: str) -> Any:
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
        check_json(entry.key, value, source)
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
    if not abs(number) < 2**63 or (kind is int and number != int(number)):
        raise problem
    return kind(number)


def check_json(key: str, value: Any, source: str) -> None:
    """Refuse what JSON, and so a config.json, cannot hold."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise RecipeError(f"{source}{key}: the key {name!r} is not a string; put it in quotes")
            check_json(f"{key}.{name}", inner, source)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            check_json(f"{key}.{index}", inner, source)
    elif not (value is None or isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value))):
        raise RecipeError(f"{source}{key}: wanted a value of JSON, got {value!r} ({type(value).__name__})")


def closest(name: str, valid: Sequence[str]) -> str:
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
