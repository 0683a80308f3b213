"""Load what `--ckpt` names, and measure what its cache holds."""

import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, PreTrainedModel, PreTrainedTokenizerBase

import pod  # noqa: F401  registers the PoD models
from pod.cache import PodCache


def load(ckpt: str, device: str | None = None, dtype: str = "auto") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer of an export, or of any causal LM that transformers opens.

    Args:
        ckpt: a directory or a hub id.
        device: "cpu", "cuda:1", ...; by default this process's GPU (torchrun's LOCAL_RANK), where there is one.
        dtype: "float32", "bfloat16", ...; "auto" is what the weights are stored in.

    Raises:
        ValueError: nothing can be loaded from there, or it is a training run that was not exported.
    """
    path = Path(ckpt)
    if (path / "steps").is_dir() and not (path / "config.json").is_file():
        raise ValueError(
            f"--ckpt {ckpt} is a training run: export it first (python -m pod.export --ckpt {ckpt} --out DIR)"
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(ckpt, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(ckpt)
    except (OSError, ValueError) as error:
        raise ValueError(f"--ckpt {ckpt}: no model and tokenizer can be loaded from there ({error})") from error
    if device is None:
        count = torch.cuda.device_count()
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % count}" if count else "cpu"
    return model.to(device).eval(), tokenizer


def cache_bytes(cache: Cache) -> int:
    """Bytes of the keys and values that a cache holds, measured on its tensors."""
    if isinstance(cache, PodCache):
        return cache.nbytes()
    return sum(part.untyped_storage().nbytes() for layer in cache.layers for part in (layer.keys, layer.values))
