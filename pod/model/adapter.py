"""A model by name, and an adapter of ours on top: `pod.load`; and how `pod.export --adapter` writes one.

An adapter is a folder in PEFT's format with the blocks beside it; `peft.PeftModel` reads it too, on a converted model.

    adapter_config.json          PEFT's: LoRA's rank, alpha, the matrices
    adapter_model.safetensors    PEFT's: A and B of each matrix
    blocks.json                  `LayerBlocks`; its metadata holds the rest of what `pod.convert` asks for:
                                 sink_size, recent_size, share
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from pod.blocks import LayerBlocks
from pod.extras import require
from pod.files import SUMS, announce_hub, opening
from pod.model.families import convert
from pod.model.weights import PodAdapterError, load_causal_lm

FILES = ("adapter_config.json", "adapter_model.safetensors", "blocks.json")
FIELDS = {"sink_size": int, "recent_size": int, "share": str}


def load(
    path: str | Path,
    adapter: str | Path | None = None,
    dtype: str | torch.dtype = "auto",
    device_map: str | dict[str, Any] | None = None,
) -> PreTrainedModel:
    """A causal LM by name, in evaluation mode; with an adapter, the PoD model that it was trained for.

    Args:
        path: an export, any directory that transformers opens, a hub id, or a GGUF file; or an adapter, whose base is
            then the one that its adapter_config.json names.
        adapter: a folder as above, or a hub id. Its matrices are added to the weights once, so the model is as quick as
            any other.
        dtype: of the weights; "auto" is what they are stored in. Sums with an adapter are rounded to it: float32
            where its results are to be those of the training.
        device_map: as transformers takes it; "auto" spreads an export over several GPUs (docs/GENERATE.md).

    Raises:
        FileNotFoundError: there is no such model or adapter.
        ImportError: the package peft is missing, or gguf for a GGUF file.
        ValueError: something is damaged or missing; the adapter is of another model; the device_map cuts a block, or
            spreads out what gets an adapter.
    """
    try:
        with opening(path):
            model = load_causal_lm(path, dtype=dtype, device_map=device_map).eval()
    except PodAdapterError as found:
        if adapter is not None:
            raise
        return load(found.base, path, dtype, device_map)
    return model if adapter is None else _adapted(model, _folder(adapter))


def save(
    folder: Path,
    base: str,
    weights: Mapping[str, Tensor],
    blocks: LayerBlocks,
    fields: Mapping[str, Any],
    lora: Mapping[str, Any],
) -> None:
    """Write an adapter's three files, as above.

    Args:
        folder: is made.
        base: the model that it belongs to, as `load` takes it.
        weights: A [r, in] and B [out, r] of each matrix, by PEFT's names.
        blocks, fields: what it was trained with; `fields` are those of `FIELDS`.
        lora: rank, alpha, dropout and targets (q, k, v, o, gate, up, down), as in a recipe.

    Raises:
        ImportError: the package peft is missing.
    """
    require("lora", "peft", what="an adapter")
    from peft import LoraConfig

    folder.mkdir(parents=True)
    targets = [f"{target}_proj" for target in lora["targets"]]
    LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        lora_dropout=lora["dropout"],
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    ).save_pretrained(folder)
    state = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    LayerBlocks(blocks.anchors, {**blocks.metadata, **fields}).save(folder / "blocks.json")


def _folder(adapter: str | Path) -> Path:
    """Where an adapter lies; one of the hub is downloaded first."""
    announce_hub(adapter)
    return Path(adapter if Path(adapter).exists() else snapshot_download(str(adapter), allow_patterns=[*FILES, SUMS]))


def _adapted(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise FileNotFoundError(f"{folder} is no adapter of PoD: it lacks {', '.join(missing)}")
    require("lora", "peft", what=f"the adapter {folder}")
    from peft import PeftModel, get_peft_model_state_dict

    blocks = LayerBlocks.load(folder / "blocks.json")
    fields = {name: blocks.metadata.get(name) for name in FIELDS}
    for name, kind in FIELDS.items():
        if not isinstance(fields[name], kind):
            raise ValueError(
                f"{folder}/blocks.json: metadata.{name} must be of type {kind.__name__}, got {fields[name]!r}"
            )
    model = convert(model, blocks, **fields)
    with opening(folder):
        try:
            adapted = PeftModel.from_pretrained(model, folder)
        except RuntimeError as error:  # shapes; its message lists every tensor
            raise ValueError(f"{folder}: an adapter of another model: {str(error).splitlines()[-1].strip()}") from error
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        wanted = get_peft_model_state_dict(adapted, save_embedding_layers=False)  # "auto" would ask where the base is
        if others := set(file.keys()) ^ set(wanted):
            raise ValueError(f"{folder}: an adapter of another model, or damaged: {min(others)} has no counterpart")
    return adapted.merge_and_unload(safe_merge=True).eval()
