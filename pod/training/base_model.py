"""What training begins with: a stock model, from a directory, from the hub, or from the fields of a config."""

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pod.files import opening
from pod.model.families import FAMILIES
from pod.model.gguf import local
from pod.model.weights import load_causal_lm, pod_base
from pod.recipe.errors import RecipeError, closest

# What is read beside the fields of a config: older names of parts of rope_parameters and of dtype, and the size of a
# head, which is no field of some families.
_READ = ("rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype", "_name_or_path", "head_dim")
_POSITIVE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_POSITIVE += ("num_key_value_heads", "head_dim", "max_position_embeddings")


def first_config(
    base: str | None, model_config: dict[str, Any] | None, rope_theta: float | None = None
) -> PreTrainedConfig:
    """The stock config of what training begins with.

    Args:
        base: a directory, a hub id or a GGUF file; None: the config is made of the fields `model_config`.
        rope_theta: replaces the RoPE base.

    Raises:
        ValueError: there is no config at `base`, it is that of quantised weights, or an adapter lies there.
        RecipeError: as `new_config`.
    """
    if base is None:
        config = new_config(model_config)
    elif (below := pod_base(base)) is not None:
        raise ValueError(
            f"model.base={base} is an adapter: to train on from it, model.base={below} lora.adapter={base} "
            f"blocks.file={base}/blocks.json"
        )
    else:
        try:
            with opening(base):
                config = AutoConfig.from_pretrained(local(base))
        except OSError as error:
            kind = "directory" if Path(base).exists() else "directory or hub model"
            raise ValueError(f"no model at {base!r}: it is no {kind} with a config.json ({error})") from error
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(
                f"the weights at {base!r} are quantised: name the model that they were made from; "
                "model.load_in_4bit=true trains adapters on it in 4 bits"
            )
    if rope_theta is not None:
        config.rope_parameters = {**config.rope_parameters, "rope_theta": float(rope_theta)}
    return config


def new_config(model_config: Mapping[str, Any]) -> PreTrainedConfig:
    """The stock config of these fields, `model_type` among them.

    Raises:
        RecipeError: a family that PoD does not have, a field that the family does not have, a value that no model can
            be made with; names the key.
    """
    fields = copy.deepcopy(dict(model_config))  # transformers completes rope_parameters in place
    family = fields.pop("model_type")
    if family not in FAMILIES:
        raise RecipeError(
            f"model.config.model_type={family}: the supported families are {', '.join(FAMILIES)}."
            f"{closest(str(family), list(FAMILIES))}"
        )
    known = [field.name for field in dataclasses.fields(CONFIG_MAPPING[family])]
    for name in fields:
        if name not in known and name not in _READ:
            hint = closest(name, known) or f" Its fields are {', '.join(known)}."
            raise RecipeError(f"model.config.{name}: a config of {family} has no such field.{hint}")
    for name in _POSITIVE:
        value = fields.get(name)
        if isinstance(value, int) and value < 1:
            raise RecipeError(f"model.config.{name}={value}: wanted at least 1")
    try:
        config = AutoConfig.for_model(family, **fields)
    except StrictDataclassError as error:
        raise RecipeError(f"model.config: {_reason(error, fields)}") from error
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise RecipeError(f"model.config: no {family} can be made of it ({type(error).__name__}: {error})") from error
    if config.hidden_act not in ACT2FN:
        raise RecipeError(
            f"model.config.hidden_act={config.hidden_act}: transformers has no such activation."
            f"{closest(config.hidden_act, list(ACT2FN)) or ' The families have silu.'}"
        )
    kinds = ("default", *ROPE_INIT_FUNCTIONS)
    rope = config.rope_parameters
    if rope["rope_type"] not in kinds:
        raise RecipeError(
            f"model.config.rope_parameters.rope_type={rope['rope_type']}: must be one of {', '.join(kinds)}."
            f"{closest(str(rope['rope_type']), kinds)}"
        )
    theta = rope.get("rope_theta")
    if not isinstance(theta, int | float) or not theta > 0:
        raise RecipeError(f"model.config.rope_parameters.rope_theta={theta!r}: wanted a positive number")
    return config


def _reason(error: StrictDataclassError, fields: Mapping[str, Any]) -> str:
    """What of transformers' message says what is wrong, on one line, and the fields that it names."""
    text = " ".join(str(error).split())
    text = text.partition("Error: ")[2] or text
    named = [
        f"{name}={value!r}" for name, value in fields.items() if f"'{name}'" in text or name.replace("_", " ") in text
    ]
    return f"{', '.join(named)}: {text}" if named else text


def load_stock(base: str, rope_theta: float | None, dtype: torch.dtype) -> PreTrainedModel:
    """The model at `base`, with another RoPE base when wanted.

    Raises:
        ValueError: nothing can be loaded from there, or not all of its weights, or they are not finite.
    """
    with opening(base):
        return load_causal_lm(base, finite=True, config=first_config(base, None, rope_theta), dtype=dtype)
