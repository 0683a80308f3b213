"""A cache as one file: safetensors, with what is no tensor as JSON in the file's metadata.

Only tensors and JSON are written and read, never pickles, so a file from elsewhere can do no harm.

A checksum of all of it is in the metadata. It is there for a disk's flipped bits, not against forgery, so it is CRC-32:
the standard library's quickest (6 gigabytes a second on one core of a server, sha256 2), which sees every change of up
to 32 neighbouring bits. Files of version 1 had none; those of version 2 did not name the hyper-parameters that were
defaults, and these have changed since; those of version 3 count their rows otherwise. All are refused.
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from pod.files import replacing

FORMAT, VERSION = "pod-cache", 4

# What keys and values depend on beside the weights, which the caller answers for.
FIELDS = (
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "rope_parameters",
    "sink_size",
    "recent_size",
    "share",
)


def described(config: PreTrainedConfig) -> dict[str, Any]:
    """What of a config must be the same for a cache to be used again, as JSON."""
    fields = {name: getattr(config, name, None) for name in FIELDS} | {"anchors": config.blocks.anchors.tolist()}
    return json.loads(json.dumps(fields))


def checksum(tensors: dict[str, Tensor], content: str) -> str:
    """CRC-32, in hexadecimal digits, of the metadata's content and of each tensor's name, type, shape and bytes.

    Args:
        tensors: by name, on the CPU and contiguous.
        content: the metadata as JSON.
    """
    found = zlib.crc32(content.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy(), found)
    return f"{found:08x}"


def write_cache(
    path: str | os.PathLike[str], tensors: dict[str, Tensor], facts: dict[str, Any], config: PreTrainedConfig
) -> None:
    """Write a cache's state; folders are made as needed.

    Args:
        path: of the file, which is there whole or not at all.
        tensors: by name.
        facts: what else there is to know: what JSON takes, and arrays of numpy.
        config: of the model.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    whole = {"version": VERSION, "config": described(config), "facts": facts}
    content = json.dumps(whole, default=np.ndarray.tolist)
    contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"format": FORMAT, "content": content, "crc32": checksum(contiguous, content)}
    with replacing(path) as aside:
        save_file(contiguous, aside, metadata=metadata)


def read_cache(
    path: str | os.PathLike[str], config: PreTrainedConfig, device: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_cache` wrote.

    Args:
        path: of the file.
        config: of the model that will use the cache.
        device: where the tensors go.

    Returns:
        The tensors and the facts.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: truncated, damaged, no cache of this version, of a model with another config (names what differs),
            or `config` is none of a PoD model.
    """
    if not hasattr(config, "blocks"):
        raise ValueError(
            f"{path}: a cache of a PoD model, and the given config is a {type(config).__name__}, of a dense one. Load "
            "it with the config of the model that filled it, such as pod.convert makes it"
        )
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such cache file; PodCache.save writes one")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path}: not a cache that PodCache.save wrote (format {metadata.get('format')!r})")
            content = json.loads(metadata["content"])
            if content["version"] != VERSION:
                raise ValueError(
                    f"{path}: version is {content['version']}, this library reads version {VERSION}. Fill the cache "
                    "again, and save it"
                )
            ours = described(config)
            for name, theirs in content["config"].items():
                if ours.get(name) != theirs:
                    raise ValueError(
                        f"{path}: the cache was made with {name} = {_shortened(theirs)}, the model's config has "
                        f"{_shortened(ours.get(name))}. Load it with the config of the model that filled it."
                    )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dictionary
        if checksum(tensors, metadata["content"]) != metadata["crc32"]:
            raise ValueError(
                f"{path} is damaged: its bytes do not give the checksum {metadata['crc32']} that it names. Fill the "
                "cache again, and save it"
            )
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file, truncated or damaged: {error}") from error
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: the metadata is damaged: {error!r}") from error
    return {name: tensor.to(device) for name, tensor in tensors.items()}, content["facts"]


def _shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
