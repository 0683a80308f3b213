"""A model by name, and an adapter of ours on top: `pod.load`.

An adapter is a folder in PEFT's format with the blocks beside it; `peft.PeftModel` reads it too, on a converted model.

    adapter_config.json          PEFT's: LoRA's rank, alpha, the matrices
    adapter_model.safetensors    PEFT's: A and B of each matrix
    blocks.json                  `LayerBlocks`; its metadata holds the rest of what `pod.convert` asks for:
                                 sink_size, recent_size, share
"""

from pathlib import Path

from safetensors import safe_open
from transformers import PreTrainedModel

from pod.blocks import LayerBlocks
from pod.extras import require
from pod.files import opening
from pod.model.families import convert
from pod.model.weights import load_causal_lm

FILES = ("adapter_config.json", "adapter_model.safetensors", "blocks.json")
FIELDS = {"sink_size": int, "recent_size": int, "share": str}


def load(path: str | Path, adapter: str | Path | None = None) -> PreTrainedModel:
    """A causal LM by name, in evaluation mode; with an adapter, the PoD model that it was trained for.

    Args:
        path: an export, any directory that transformers opens, a hub id, or a GGUF file.
        adapter: a folder as above. Its matrices are added to the weights once, so the model is as quick as any other.

    Returns:
        The model, in the precision that its weights are stored in.

    Raises:
        FileNotFoundError: there is no such model or adapter.
        ImportError: the package peft is missing, or gguf for a GGUF file.
        ValueError: something is damaged or missing; the adapter is of another model.
    """
    with opening(path):
        model = load_causal_lm(path, dtype="auto").eval()
    return model if adapter is None else _adapted(model, Path(adapter))


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
        if others := set(file.keys()) ^ set(get_peft_model_state_dict(adapted)):
            raise ValueError(f"{folder}: an adapter of another model, or damaged: {min(others)} has no counterpart")
    return adapted.merge_and_unload(safe_merge=True).eval()
