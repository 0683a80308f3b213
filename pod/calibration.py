"""What was measured of a model once for all, and methods read: head scores and filters, one safetensors file.

    scores = head_scores("calibration.safetensors", "razor", model.config)    # [L, H_kv] float32, higher: needs it more

`python -m pod.calibrate` writes it, beside a model's blocks. The fields of the model's config that a measurement
depends on are in it and are compared, so that no other model reads it. A PoD model and the dense one that it was made
of read the same file: a block goes by its anchor's entry, or, where it is asked whether a head needs the past at all,
by the maximum over the block's layers; that is up to who reads.

Legend: L layers, H_kv KV heads, D head dimension.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from pod.files import replacing

FORMAT, VERSION = "pod-calibration", 1
# [L, H_kv], between 0 and 1, higher where a head needs the distant past more; what they are is said in `pod.calibrate`.
HEAD_SCORES = ("echo", "induction", "razor", "kvzip", "duo")
# [L, H_kv, D], of keys after RoPE.
FILTERS = "filters"
# What keys and queries depend on, beside the weights.
FIELDS = ("model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
FIELDS += ("vocab_size", "rope_parameters")


@dataclass(frozen=True, eq=False)
class Calibration:
    """What a file holds.

    Attributes:
        path: of the file.
        tensors: by name, float32 on the CPU: HEAD_SCORES and FILTERS, or some of them.
        config: the FIELDS of the model that was measured.
        made: by name, how it was measured, as JSON.
    """

    path: str
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    made: dict[str, Any]

    def of(self, name: str, config: PreTrainedConfig) -> Tensor:
        """A tensor, for the model of a config.

        Raises:
            ValueError: the model has another config, or this was not measured; names the field, or what there is.
        """
        ours = described(config)
        for field, theirs in self.config.items():
            if ours[field] != theirs:
                raise ValueError(
                    f"{self.path}: the model that was measured has {field} = {json.dumps(theirs)}, this one has "
                    f"{json.dumps(ours[field])}. Measure this one: python -m pod.calibrate"
                )
        if name not in self.tensors:
            raise ValueError(
                f"{self.path}: has no {name}, only {', '.join(sorted(self.tensors))}. Measure the rest: python -m "
                "pod.calibrate"
            )
        return self.tensors[name]


def described(config: PreTrainedConfig) -> dict[str, Any]:
    """The FIELDS of a config, a PoD model's being those of its family, as JSON."""
    found = {name: getattr(config, name, None) for name in FIELDS}
    found["model_type"] = config.model_type.removeprefix("pod_")
    found["head_dim"] = found["head_dim"] or config.hidden_size // config.num_attention_heads
    return json.loads(json.dumps(found))


def head_scores(path: str | os.PathLike[str], name: str, config: PreTrainedConfig) -> Tensor:
    """How much each KV head needs the distant past.

    Args:
        path: of the calibration file.
        name: one of HEAD_SCORES.
        config: of the model, dense or PoD, that the scores are for.

    Returns:
        [L, H_kv] float32 on the CPU, between 0 and 1; a copy.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: damaged or no such file, of another model, without these scores, or there are none of that name.
    """
    if name not in HEAD_SCORES:
        raise ValueError(f"head scores are {', '.join(HEAD_SCORES)}; got {name!r}")
    return load(path).of(name, config).clone()


def save(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], config: PreTrainedConfig, made: Mapping[str, Any]
) -> None:
    """Write a calibration file, whole or not at all; folders are made.

    Args:
        path: of the file.
        tensors: HEAD_SCORES and FILTERS, or some of them, by name; kept as float32.
        config: of the model that was measured.
        made: by name, how it was measured, what JSON takes.

    Raises:
        ValueError: an unknown name, or another shape than the model's.
        OSError: it cannot be written.
    """
    fields = described(config)
    shape = [fields[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")]
    for name, tensor in tensors.items():
        wanted = shape[:2] if name in HEAD_SCORES else shape if name == FILTERS else None
        if list(tensor.shape) != wanted:
            raise ValueError(f"{path}: {name} of shape {list(tensor.shape)}, wanted {wanted or 'no such name'}")
    held = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()}
    content = json.dumps({"version": VERSION, "config": fields, "made": dict(made)})
    with replacing(path) as aside:
        save_file(held, aside, {"format": FORMAT, "content": content, "sha256": _digest(held, content)})


def load(path: str | os.PathLike[str]) -> Calibration:
    """Read a calibration file; one that has not changed is read once.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: truncated, damaged, or no calibration file of this version; names it.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such calibration file; python -m pod.calibrate writes one")
    return _load(str(path), os.stat(path).st_mtime_ns)


@lru_cache(maxsize=8)
def _load(path: str, changed: int) -> Calibration:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path}: not a calibration file (format {metadata.get('format')!r})")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dictionary
        if _digest(tensors, metadata["content"]) != metadata["sha256"]:
            raise ValueError(f"{path} is damaged: its sha256 is not the one that it names. Calibrate again")
        content = json.loads(metadata["content"])
        if content["version"] != VERSION:
            raise ValueError(
                f"{path}: version is {content['version']}, this library reads version {VERSION}. Calibrate again"
            )
        return Calibration(path, tensors, content["config"], content["made"])
    except SafetensorError as error:
        raise ValueError(f"{path}: truncated, damaged or no calibration file ({error}). Calibrate again") from error
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: the metadata is damaged: {error!r}. Calibrate again") from error


def _digest(tensors: Mapping[str, Tensor], content: str) -> str:
    found = hashlib.sha256(content.encode())
    for name in sorted(tensors):
        found.update(f"{name} {list(tensors[name].shape)}".encode() + tensors[name].numpy().tobytes())
    return found.hexdigest()
