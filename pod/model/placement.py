"""A model on several devices, as `device_map` spreads it: every block lies on one.

The layers of a block share scores and keys, so a border between two devices may lie only behind a layer that ends the
blocks of all KV heads (`Layout.borders`). A map that a caller wrote is checked; in one that transformers computed
("auto" and its kin, which know single layers only) each border moves to the nearest place where it may lie.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel

from pod.blocks import LayerBlocks
from pod.cache import PodCache

OFFLOADED = ("cpu", "disk")  # accelerate brings these weights to the main device when they are needed
REMEDY = "Load it with device_map={'': 0}, or take blocks that end together in some layers; to train, ZeRO-3"


class GivenMap(dict):
    """A device map that the caller of `from_pretrained` wrote himself."""


def check_borders(devices: Iterable[Any], blocks: LayerBlocks) -> None:
    """Refuse devices of layers, from the lowest up, between which a block would be cut.

    Raises:
        ValueError: names the border, and the layers behind which it may lie.
    """
    borders = blocks.layout().borders
    for layer, (device, following) in enumerate(pairwise(devices)):
        if device != following and layer not in borders:
            raise ValueError(
                f"the device_map puts layer {layer} on {device} and layer {layer + 1} on {following}, and blocks that "
                f"share keys hold both: {_legal(borders)}. device_map='auto' moves borders there by itself"
            )


def place(model: PreTrainedModel, device_map: MutableMapping[str, Any]) -> None:
    """Check a map before weights are loaded by it; one that transformers computed is changed in place.

    Raises:
        ValueError: it cuts a block, or is to be changed and no border may lie anywhere.
    """
    names = [name for name, module in model.named_modules() if type(module).__name__ in model._no_split_modules]
    placed = [_placed(name, device_map) for name in names]
    main = next(iter(set(device_map.values()) - set(OFFLOADED)), "cpu")  # as accelerate chooses it
    runs = [main if device in OFFLOADED else device for device in placed]
    if len(set(runs)) < 2:
        return
    blocks = model.config.blocks
    if isinstance(device_map, GivenMap):
        check_borders(runs, blocks)
        return
    borders = blocks.layout().borders
    if not borders:
        raise ValueError(f"no device_map can spread this model over several devices: {_legal(borders)}")
    cuts = [layer for layer, (one, other) in enumerate(pairwise(runs)) if one != other]
    nearest = [min(borders, key=lambda border: (abs(border - cut), border)) for cut in cuts]
    moved = []
    for layer, device in enumerate(placed):
        before, now = (sum(border < layer for border in some) for some in (cuts, nearest))
        if now != before:  # it goes where the neighbour is
            device = placed[cuts[now] if now < before else cuts[now - 1] + 1]
        moved.append(device)
    # Whatever names a layer, a part of one, or all of them at once, makes room for one entry a layer.
    layers = names[0].rpartition(".")[0]
    for name in [name for name in device_map if name == layers or name.startswith(f"{layers}.")]:
        del device_map[name]
    device_map.update(zip(names, moved, strict=True))


def layer_devices(model: PreTrainedModel) -> list[torch.device] | None:
    """Where accelerate runs each layer of a decoder stack; None where there is one device.

    Raises:
        ValueError: between two of them a block is cut.
    """
    devices = [_runs_on(layer) for layer in model.layers]
    if len(set(devices)) < 2:
        return None
    check_borders(devices, model.config.blocks)
    return devices


def current(device: torch.device | None) -> AbstractContextManager:
    """The device is CUDA's current one inside, on which Triton starts kernels; nothing changes for None and the CPU."""
    return nullcontext() if device is None or device.type != "cuda" else torch.cuda.device(device)


def check_spread_cache(cache: PodCache) -> None:
    """Refuse a cache that works on one device only.

    Raises:
        ValueError: it evicts, quantises or skips; names what.
    """
    chosen = {"eviction": cache.eviction, "quantization": cache.quantization, "tau": cache.tau}
    wrong = [f"{name}={value!r}" for name, value in chosen.items() if value is not None]
    remedy = "make the cache without it"
    if cache.config.share == "window":
        wrong, remedy = ["the cache of share='window'"], "pass use_cache=False"
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)} works on one device, and the model lies on several: load it with "
            f"device_map={{'': 0}}, or {remedy}"
        )


def _legal(borders: list[int]) -> str:
    if not borders:
        return f"in no layer but the last do the blocks of all KV heads end. {REMEDY}"
    return f"a border may lie only behind a layer that ends the blocks of all KV heads, here {borders}"


def _placed(name: str, device_map: Mapping[str, Any]) -> Any:
    """The device of a module: that of the longest prefix, as accelerate reads a map."""
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map.get(name, "cpu")


def _runs_on(layer: torch.nn.Module) -> torch.device | None:
    hook = getattr(layer, "_hf_hook", None)
    device = next(
        (one.execution_device for one in getattr(hook, "hooks", [hook]) if hasattr(one, "execution_device")), None
    )
    return torch.device("cuda", device) if isinstance(device, int) else device and torch.device(device)
