"""Calibration files for methods that read one, of numbers that numpy's frozen generator draws, for any model."""

import json
import tempfile
from dataclasses import fields, replace
from functools import cache as memoized
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedConfig

from pod import calibration
from pod.eviction import Eviction, Method, QFilters

FOLDER = tempfile.TemporaryDirectory()  # goes with the process


def with_filters(method: Method | None, config: PreTrainedConfig) -> Method | None:
    """The method, and its parts, with the file of the config's model where it reads one."""
    if not isinstance(method, Eviction):
        return method
    parts = {one.name: getattr(method, one.name) for one in fields(method)}
    parts = {name: with_filters(part, config) for name, part in parts.items() if isinstance(part, Eviction)}
    if isinstance(method, QFilters):
        parts["filters"] = _file(json.dumps(calibration.described(config)))
    return replace(method, **parts)


class _Described:
    def __init__(self, config: str) -> None:
        vars(self).update(json.loads(config))


@memoized
def _file(config: str) -> str:
    described, path = _Described(config), Path(FOLDER.name) / f"{abs(hash(config))}.safetensors"
    shape = (described.num_hidden_layers, described.num_key_value_heads, described.head_dim)
    filters = torch.from_numpy(np.random.RandomState(0).standard_normal(shape))
    calibration.save(path, {"filters": filters}, described, {"filters": {"samples": 0}})
    return str(path)
