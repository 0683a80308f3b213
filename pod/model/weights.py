"""The weights of a model: all of them loaded, or refused by name; and what tells them from other weights."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import CONFIG_NAME, cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from pod.files import read_json, weights_sum
from pod.model.gguf import local


class PodAdapterError(ValueError):
    """An adapter of ours where a whole model is wanted; `base` is what its adapter_config.json names."""

    def __init__(self, where: str | Path, base: str) -> None:
        wanted = f"pod.load({base!r}, {str(where)!r})"
        super().__init__(f"{where} is an adapter of PoD, which brings blocks for its base: {wanted}")
        self.base = base


def load_causal_lm(where: str | Path, *, finite: bool = False, **options: Any) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained` of all the weights: by itself, that draws at random what is not there.

    Args:
        where: a directory, a hub id or a GGUF file.
        finite: refuse NaN and infinite weights; else a warning on stderr names them.
        options: of `from_pretrained`.

    Raises:
        PodAdapterError: it is an adapter of ours, which would stand on its base without the blocks.
        ValueError: weights are missing, left over or of other shapes than the config says, or not finite; names them.
    """
    where = local(where)
    if (base := _adapted(where)) is not None:
        if cached_file(str(where), "blocks.json", _raise_exceptions_for_missing_entries=False) is not None:
            raise PodAdapterError(where, base)
        load_causal_lm(base, device_map="meta")  # of an adapter's base, transformers does not tell what was missing
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            where, ignore_mismatched_sizes=True, output_loading_info=True, weights_only=True, **options
        )
    except Exception as error:
        if (file := _damaged_pickle(where)) is None:
            raise
        raise ValueError(
            f"{file}: truncated or damaged, or a pickle of more than tensors, nothing of which was run. Download it "
            "again, or take safetensors"
        ) from error
    shapes = [f"{name} {list(shape)}, not {list(wanted)}" for name, shape, wanted in found["mismatched_keys"]]
    problems = {
        "the weights lack": found["missing_keys"],
        "the model has no place for": found["unexpected_keys"],
        "the weights do not have the shapes that config.json says:": shapes,
    }
    if said := [f"{problem} {_some(names)}" for problem, names in problems.items() if names]:
        raise ValueError(
            f"{where}: {'; '.join(said)}. A file is missing, is a copy of another one or of another model, or "
            "config.json is: get the directory anew, by downloading or exporting again"
        )
    if names := _not_finite(model):
        problem = f"{where}: NaN or infinite numbers in {_some(names)}"
        if finite:
            raise ValueError(f"{problem}. Nothing can be learned from these weights: take others")
        print(f"warning: {problem}: what the model computes may mean nothing", file=sys.stderr)
    return model


def pod_base(folder: str | Path) -> str | None:
    """The base that an adapter of ours names in its adapter_config.json; None of what is no folder of one."""
    return _adapted(folder) if (Path(folder) / "blocks.json").is_file() else None


def _damaged_pickle(where: str | Path) -> Path | None:
    """The first file of a model's pickled weights that holds anything but tensors by name."""
    try:
        folder = _folder(where)
    except OSError:  # nothing is there
        return None
    for file in sorted(folder.glob("pytorch_model*.bin")):
        try:
            content = torch.load(file, map_location="meta", weights_only=True)
        except Exception:  # torch.load has one for every kind of damage
            return file
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            return file
    return None


def _some(names: set[str] | list[str]) -> str:
    """`2 tensors (a, b)`; of many names the first three."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(sorted(names)[:3])}{more})"


def _not_finite(model: PreTrainedModel) -> list[str]:
    """Names of the parameters that hold NaN or infinite numbers; of all processes where these have parts of them."""

    def is_finite(parameter: Tensor) -> bool:
        part = getattr(parameter, "ds_tensor", parameter).detach()  # ZeRO-3's, of this process
        if (scales := getattr(parameter, "quant_state", None)) is not None:  # of 4 bits, made from the weights
            part = scales.offset[None] if scales.nested else scales.absmax
        if part.is_meta or not part.numel() or not part.is_floating_point() or part.itemsize < 2:
            return True
        return all(map(torch.isfinite, part.aminmax()))  # a NaN is both; quicker than looking at each by itself

    names = [name for name, parameter in model.named_parameters() if not is_finite(parameter)]
    if is_deepspeed_zero3_enabled():
        parts: list[list[str]] = [[] for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather_object(parts, names)
        names = sorted({name for part in parts for name in part})
    return names


def weights_hash(where: str | Path) -> str:
    """What tells a model's weights, config and tokenizer from others under the same name.

    Args:
        where: a directory, of which it is a sha256 (`pod.files.weights_sum`), or a hub id that was loaded, of which it
            is the commit; of an adapter of peft, also its base's. Of a GGUF file, of the directory that it becomes.
    """
    where = local(where)
    base, folder = _adapted(where), _folder(where)
    own = weights_sum(folder) if Path(where).is_dir() else folder.name
    return own if base is None else f"{own} on {weights_hash(base)}"


def _folder(where: str | Path) -> Path:
    """The directory; of a hub id the one that it was put into, which is named by the commit."""
    if Path(where).is_dir():
        return Path(where)
    return Path(find_adapter_config_file(str(where)) or cached_file(str(where), CONFIG_NAME)).parent


def _adapted(where: str | Path) -> str | None:
    """The base of what is an adapter of peft, without weights of a whole model beside it."""
    file = find_adapter_config_file(str(where))
    if file is None or (Path(where) / CONFIG_NAME).exists():
        return None
    return read_json(file).get("base_model_name_or_path")
