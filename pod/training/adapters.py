"""LoRA: small adapters beside frozen matrices (arXiv 2106.09685), put in by peft, merged into plain weights at last.

A matrix W [out, in] with an adapter of rank r gives W x + alpha / r * B A x, where A [r, in] and B [out, r] alone are
trained; B begins at 0, so training begins at the frozen model. peft is imported only where adapters are used.

QLoRA (arXiv 2305.14314): W is held in 4 bits, and what is multiplied is W as it is restored from them.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from pod.blocks import LayerBlocks
from pod.extras import require
from pod.files import opening, read_json
from pod.model.adapter import FIELDS
from pod.recipe.sections import LORA_TARGETS

_ADAPTER = "default"  # peft's name of it
HOLDS_4_BITS = ("cuda",)  # kinds of device; bitsandbytes also has code for a CPU, too slow to train with


def check_4_bits(kind: str) -> None:
    """See that a base can be held in 4 bits here.

    Args:
        kind: of the device, as torch names it.

    Raises:
        ImportError: bitsandbytes or accelerate is not installed.
        ValueError: the device is no GPU.
    """
    if kind not in HOLDS_4_BITS:
        raise ValueError(
            f"model.load_in_4bit=true needs a GPU of NVIDIA's, and this run is on {kind}: set model.load_in_4bit=false "
            "and, for half of float32's memory, model.dtype=bfloat16"
        )
    require("qlora", "accelerate", "bitsandbytes", what="model.load_in_4bit=true")


def in_4_bits(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` is given for a base in 4 bits: nf4 with scales in 8 bits, as in QLoRA's paper.

    Args:
        device: where the base shall lie, and is quantised.
        dtype: what is computed in.

    Raises:
        ImportError, ValueError: as `check_4_bits`.
    """
    check_4_bits(device.type)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": quantization, "device_map": {"": device}}


def add_adapters(model: nn.Module, rank: int, alpha: float, dropout: float, targets: Sequence[str]) -> None:
    """Freeze a model and put adapters beside some of its matrices.

    The adapters are float32 whatever the matrices are: an optimiser that keeps no float32 copy would lose small updates
    of bfloat16 to rounding, and they are few.

    Args:
        model: a causal LM of a supported family; it is changed.
        rank, alpha: r and alpha.
        dropout: share of an adapter's inputs that are set to 0 in training.
        targets: of `LORA_TARGETS`.

    Raises:
        ImportError: peft is not installed.
        ValueError: a number out of its range, an unknown target, or one that the family joins with others in one
            matrix.
    """
    require("lora", "peft", what="lora.rank")
    if rank < 1 or not alpha > 0 or not 0 <= dropout < 1:
        raise ValueError(f"LoRA needs rank >= 1, alpha > 0, dropout in [0, 1); got {rank}, {alpha:g}, {dropout:g}")
    unknown = [target for target in targets if target not in LORA_TARGETS]
    if unknown or not targets:
        raise ValueError(f"LoRA's targets are some of {', '.join(LORA_TARGETS)}; got {', '.join(targets) or 'none'}")
    present = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    joined = [target for target in targets if f"{target}_proj" not in present]
    if joined:
        there = [target for target in LORA_TARGETS if f"{target}_proj" in present]
        raise ValueError(
            f"LoRA's targets {', '.join(joined)}: {type(model).__name__} has no such matrices of their own; choose of "
            f"{', '.join(there)}"
        )
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=[f"{target}_proj" for target in targets]
    )
    model.requires_grad_(False)
    inject_adapter_in_model(config, model, _ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def peft_name(name: str) -> str:
    """How PEFT's files call a parameter of an adapter, which has `name` in the model with adapters."""
    return f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}"


def read_adapter(folder: Path, alpha: float) -> dict[str, Tensor]:
    """The matrices of an exported adapter by PEFT's names, if training can go on from it.

    Raises:
        FileNotFoundError: there is no adapter.
        ValueError: it is of another alpha, or damaged.
    """
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise FileNotFoundError(
            f"lora.adapter={folder} is no adapter, it has no {file.name}: name a folder that `python -m pod.export "
            "--adapter` wrote, or leave lora.adapter out to begin anew"
        )
    with opening(folder):
        saved = load_file(file)
        theirs = read_json(folder / "adapter_config.json").get("lora_alpha")
    if theirs != alpha:
        raise ValueError(f"lora.alpha={alpha:g}, and lora.adapter={folder} was trained with {theirs}: set lora.alpha")
    return saved


@torch.no_grad()
def go_on_from(model: nn.Module, folder: Path, alpha: float) -> None:
    """Give a model's adapters the weights of an exported one.

    Args:
        model: with adapters; it is changed.
        folder: in PEFT's format, of the same matrices and rank. Of another window or `share` it is warned.
        alpha: what the model's adapters were made with.

    Raises:
        FileNotFoundError, ValueError: as `read_adapter`; or it is of other matrices or another rank.
    """
    from lightning.pytorch.utilities import rank_zero_only  # `pod export` names the extra that it lacks

    saved = read_adapter(folder, alpha)
    ours = {peft_name(name): parameter for name, parameter in model.named_parameters() if ".lora_" in name}
    shapes = [{(name, value.shape) for name, value in some.items()} for some in (saved, ours)]
    if others := shapes[0] ^ shapes[1]:
        name, shape = min(others)
        raise ValueError(
            f"lora.adapter={folder} does not fit lora.rank and lora.targets: {name} {list(shape)} has no counterpart. "
            "Set both to what its adapter_config.json says"
        )
    for name, parameter in ours.items():
        parameter.copy_(saved[name])
    blocks = folder / "blocks.json"
    metadata = LayerBlocks.load(blocks).metadata if blocks.is_file() else {}
    for name in FIELDS if rank_zero_only.rank == 0 else ():
        was, now = metadata.get(name), getattr(model.config, name)
        if was not in (None, now):
            print(f"warning: lora.adapter={folder} was trained with {name}={was}, this run has {now}", file=sys.stderr)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes what it did before `add_adapters`; without gradients."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        with torch.no_grad():
            yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merge(model: nn.Module, adapters: Mapping[str, Tensor], rank: int, alpha: float) -> None:
    """Add trained adapters to the matrices of a model that has none; the sums are rounded once, to the matrix's dtype.

    Args:
        model: what the adapters were trained on; it is changed.
        adapters: by the names that they have in the model with adapters.
        rank, alpha: as they were trained with.

    Raises:
        ValueError: a tensor that is no adapter, belongs to no matrix of the model, or does not fit it.
    """
    for name, down in adapters.items():
        place, found, rest = name.partition(f".lora_A.{_ADAPTER}.weight")
        if not found or rest:
            if f".lora_B.{_ADAPTER}.weight" not in name:
                raise ValueError(f"{name} is no adapter of LoRA")
            continue
        up = adapters.get(f"{place}.lora_B.{_ADAPTER}.weight")
        try:
            weight = model.get_submodule(place).weight
        except AttributeError:
            raise ValueError(f"{name}: the model has no {place}") from None
        if up is None or (*up.shape[:1], *down.shape[1:]) != weight.shape or down.shape[0] != rank:
            raise ValueError(f"{name} {tuple(down.shape)} does not fit {place} {tuple(weight.shape)} at rank {rank}")
        weight += up.contiguous().float() @ down.contiguous().float() * (alpha / rank)
