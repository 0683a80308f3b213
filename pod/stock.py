"""What training begins with: a stock model, from a directory, from the hub, or from the fields of a config."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pod.files import opening


def first_config(
    base: str | None, model_config: dict[str, Any] | None, rope_theta: float | None = None
) -> PreTrainedConfig:
    """The stock config of what training begins with.

    Args:
        base: a directory or a hub id; None: the config is made of the fields `model_config`.
        rope_theta: replaces the RoPE base.

    Raises:
        ValueError: there is no config at `base`.
    """
    if base is None:
        fields = dict(model_config)
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    else:
        try:
            with opening(base):
                config = AutoConfig.from_pretrained(base)
        except OSError as error:
            kind = "directory" if Path(base).exists() else "directory or hub model"
            raise ValueError(f"no model at {base!r}: it is no {kind} with a config.json ({error})") from error
    if rope_theta is not None:
        config.rope_parameters = {**config.rope_parameters, "rope_theta": float(rope_theta)}
    return config


def load_stock(base: str, rope_theta: float | None, dtype: torch.dtype) -> PreTrainedModel:
    """The model at `base`, with another RoPE base when wanted.

    Raises:
        ValueError: nothing can be loaded from there.
    """
    with opening(base):
        return AutoModelForCausalLM.from_pretrained(base, config=first_config(base, None, rope_theta), dtype=dtype)
