"""The largest batch for prompts of x tokens and y new ones in a given memory: PoD's Table 2, by kind of byte.

    python eval/memory.py --model llama3-8b --memory 80GB
    python eval/memory.py --model exports/llama3-32k --memory H100 --eviction snapkv:budget=4096+h2o:budget=4096
    python eval/memory.py --model exports/tiny --memory 64MB --lengths 256,512 --output 32 --measure

By arithmetic: no model is loaded, only its sizes are needed. Rows are dense, PoD, and PoD with each eviction method,
each with a prefill that computes the last position's logits only, as this library does, and with one that keeps all
logits of the prompt, in float32 beside the half precision ones. `--measure` also builds the model with random weights
and searches for the batch on the device at hand: on a GPU by its allocator's peak, on a CPU by the bytes of all live
tensors. Writes memory.json, memory.md and memory.png.
"""

import argparse
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pod import eviction as methods
from pod.blocks import LayerBlocks
from pod.cache import PodCache
from pod.evaluation import command, report
from pod.evaluation.models import parameters_of
from pod.eviction import Method
from pod.files import read_json
from pod.model.families import FAMILIES, pod_config
from pod.model.memory import GPUS, RESERVED, Inference, even_blocks, largest
from pod.model.shape import KNOWN_CONFIGS, Shape
from pod.terminal import exit_status

SHORT_NAMES = {
    name.split("/")[-1].lower().removeprefix("meta-").replace("llama-", "llama"): name for name in KNOWN_CONFIGS
}
UNITS = {"KB": 2**10, "MB": 2**20, "GB": 2**30}
DTYPES = {"bfloat16": 2, "float32": 4}
# PoD's Table 2: prompt -> (dense, PoD), y = 8192, LLaMA3-8B on 80 GB, 35 % saved.
PUBLISHED = {2048: (25, 33), 4096: (13, 17), 8192: (6, 8), 16384: (3, 4)}
LAST_LOGITS, ALL_LOGITS = "last logits only", "all logits"  # what the prefill keeps
KINDS = ("weights", "cache", "prefill logits", "activations")


POD_FIELDS = ("anchors", "sink_size", "recent_size", "share", "tau", "architectures", "model_type")


def read_config(name: str, option: str) -> dict:
    """The config of the model that an option names: a directory's, or a known model's, also by its short name.

    Raises:
        ValueError: neither, or a field of it is wrong; names the option or the file.
    """
    file = Path(name) / "config.json"
    if file.is_file():
        config = read_json(file)
        if not isinstance(config, dict):
            raise ValueError(f"{file}: expected a JSON object, the config of a model, got {str(config)[:60]}")
        try:
            stock_config(config)
        except StrictDataclassError as error:
            raise ValueError(f"{file}: {' '.join(str(error).split())}") from error
        except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ValueError(f"{file}: a field is missing or wrong: {error}") from error
        return config
    known = name if name in KNOWN_CONFIGS else SHORT_NAMES.get(name.lower())
    if known is None:
        raise ValueError(f"{option} {name}: there is no {file}, and it is none of {', '.join(SHORT_NAMES)}")
    return dict(KNOWN_CONFIGS[known])


def stock_config(config: dict) -> PreTrainedConfig:
    """A config without PoD's fields, of the family that `model_type` names.

    Raises:
        ValueError: a family that PoD does not have. Others where a field is wrong.
    """
    family = str(config.get("model_type")).removeprefix("pod_")
    if family not in FAMILIES:
        raise ValueError(f"model_type {config.get('model_type')!r} is none of {', '.join(FAMILIES)}")
    return AutoConfig.for_model(family, **{key: value for key, value in config.items() if key not in POD_FIELDS})


def config_of(config: dict, row: Inference) -> PreTrainedConfig:
    """The PoD config of a row's sizes and blocks.

    Raises:
        ValueError: a size that means nothing, a model that PoD cannot convert.
    """
    return pod_config(stock_config(config), row.blocks, row.sink_size, row.recent_size, "scores")


def read_memory(text: str) -> tuple[int, int]:
    """(bytes, of these reserved for context and fragments) of `80GB`, `64MB` or a GPU's name; a GB is 2**30 bytes.

    Raises:
        ValueError: none of these.
    """
    if text in GPUS:
        return int(GPUS[text].memory), RESERVED
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG])i?B", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"--memory {text}: a size such as 80GB or 512MB, or one of {', '.join(GPUS)}")
    size = int(float(match[1]) * UNITS[match[2].upper() + "B"])
    # What is smaller than any such GPU is a budget for tensors alone.
    return size, RESERVED if size >= 4 * RESERVED else 0


def rows_of(options: argparse.Namespace, config: dict) -> list[tuple[str, Inference]]:
    """(name, arithmetic for a prompt of 1 token) of every row of the table.

    Raises:
        ValueError, RecipeError: a model, blocks, sizes or method that cannot be, or a method named twice.
    """
    shape = Shape.from_config(config)
    if config.get("share") in ("kv", "window"):
        raise ValueError(
            f"--model {options.model}: its config has share={config['share']!r}, whose cache and activations this "
            "arithmetic does not count; name a model of share='scores' or 'keys' (PodCache.expected_nbytes counts the "
            "cache of any)"
        )
    dense = LayerBlocks.dense(shape.layers, shape.kv_heads)
    if options.blocks is not None:
        blocks = LayerBlocks.load(options.blocks)
        blocks.check(shape.layers, shape.kv_heads)
    elif config.get("anchors"):
        blocks = LayerBlocks(config["anchors"])
    else:
        blocks = even_blocks(shape.layers, shape.kv_heads, options.kv_saving)
    sinks = config.get("sink_size", 16) if options.sinks is None else options.sinks
    recent = config.get("recent_size", 4080) if options.recent is None else options.recent
    common = {
        "shape": shape, "prompt": 1, "output": options.output, "sink_size": sinks, "recent_size": recent,
        "itemsize": DTYPES[options.dtype],
    }  # fmt: skip
    rows = [("dense", Inference(blocks=dense, **common)), ("PoD", Inference(blocks=blocks, **common))]
    for method in options.eviction or []:
        name = f"PoD + {methods.unparse(method)}"
        if name in dict(rows):
            raise ValueError(f"the eviction method {methods.unparse(method)} is named twice")
        rows.append((name, Inference(blocks=blocks, eviction=method, **common)))
    for _, row in rows:
        PodCache(config_of(config, row), eviction=row.eviction)  # what no cache can be has no row
    return [
        (f"{name}, {kind}", replace(row, whole_logits=kind == ALL_LOGITS))
        for kind in (LAST_LOGITS, ALL_LOGITS)
        for name, row in rows
        if kind == LAST_LOGITS or row.eviction is None
    ]


def random_model(config: dict, row: Inference, dtype: str, device: str) -> torch.nn.Module:
    """A model of the row's sizes and blocks with random weights."""
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config_of(config, row), dtype=getattr(torch, dtype)).eval()


def evaluate(options: argparse.Namespace) -> dict:
    """Largest batches and the bytes at them, by row and prompt length.

    Raises:
        ValueError, RecipeError: an option that cannot be.
    """
    command.check_least(options, lengths=1, output=1)
    config = read_config(options.model, "--model")
    memory, reserved = read_memory(options.memory)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict = {
        "model": options.model, "memory": memory, "reserved": reserved, "output": options.output,
        "dtype": options.dtype, "lengths": options.lengths, "rows": {},
    }  # fmt: skip
    for name, row in rows_of(options, config):
        model = None
        if options.measure:
            row = replace(row, fused=device == "cuda" and options.dtype == "bfloat16")
            model = random_model(config, row, options.dtype, device)
            result["device"] = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        cells = []
        for length in options.lengths:
            sized = replace(row, prompt=length)
            batch = sized.largest_batch(memory - reserved)
            cell = {"prompt": length, "batch": batch, "bytes": sized.by_kind(max(batch, 1))}
            cell["stays_whole"] = sized.stays_whole
            if model is not None:
                asked = {"eviction": row.eviction, "whole_logits": row.whole_logits}
                cell["measured"] = measured_batch(model, memory - reserved, length, options.output, **asked)
            cells.append(cell)
        result["rows"][name] = {"kv_saving": row.blocks.kv_saving, "cells": cells}
    is_papers = Shape.from_config(config) == Shape.from_config(KNOWN_CONFIGS[SHORT_NAMES["llama3-8b"]])
    if is_papers and options.output == 8192 and options.dtype == "bfloat16" and 79 <= memory / 2**30 <= 80:
        result["published"] = {str(length): PUBLISHED[length] for length in options.lengths if length in PUBLISHED}
    return result


def tables(result: dict) -> str:
    """Markdown: the batches, and the bytes by kind at them."""
    lengths = result["lengths"]
    unit, name = (2**30, "GiB") if result["memory"] >= 2**30 else (2**20, "MiB")
    batches = []
    for row, values in result["rows"].items():
        cells = [str(c["batch"]) + (f" ({c['measured']})" if "measured" in c else "") for c in values["cells"]]
        batches.append([row, *cells])
    for index, row in enumerate(("dense, the paper's Table 2", "PoD, the paper's Table 2")):
        if "published" in result:
            pairs = [result["published"].get(str(length)) for length in lengths]
            batches.append([row, *("-" if pair is None else str(pair[index]) for pair in pairs)])
    kinds = [
        [row, f"{c['prompt']:,}", str(max(c["batch"], 1)), *(f"{c['bytes'][kind] / unit:.2f}" for kind in KINDS),
         f"{sum(c['bytes'].values()) / unit:.2f}"]
        for row, values in result["rows"].items() for c in values["cells"]
    ]  # fmt: skip
    whole = ""
    if any(cell["stays_whole"] for values in result["rows"].values() for cell in values["cells"]):
        whole = (
            "\nCAKE keeps a prompt of up to budget + window tokens whole until the first new token, as its authors' "
            "code does; its\nbytes stay allocated from then on.\n"
        )
    measured = ", in brackets measured" if "device" in result else ""
    note = ""
    if "published" in result:
        note = (
            "\nThe paper is PoD's (arXiv 2412.02252). Its dense row halves with the prompt although the cache of "
            "prompt and output\ndoes not: all logits of the prompt explain that, and the rows that keep them are the "
            "ones to compare. What ran\nbeside the model there is not known, so the batches need not be equal.\n"
        )
    return (
        f"Largest batch in {result['memory'] / unit:.1f} {name}, {result['reserved'] / unit:.1f} of them reserved, for "
        f"{result['output']:,} new tokens, by prompt length{measured}:\n\n"
        + report.markdown_table(["", *(f"{length:,}" for length in lengths)], batches)
        + f"\n{note}\n{name} at these batches (of one row where none fits); logits are 0 where a layer is the peak:\n\n"
        + report.markdown_table(["", "prompt", "batch", *KINDS, "total"], kinds)
        + whole
    )


def draw(result: dict, path: Path) -> None:
    """Bytes by kind at the largest batch, stacked, one group of bars for each prompt length."""
    unit, name = (2**30, "GiB") if result["memory"] >= 2**30 else (2**20, "MiB")
    rows, lengths = list(result["rows"]), result["lengths"]
    figure = report.figure(8, 1.2 + 0.28 * len(rows) * len(lengths))
    axes = figure.add_subplot()
    cells = [(f"{row}, {cell['prompt']:,}", cell) for i in range(len(lengths)) for row in rows
             for cell in [result["rows"][row]["cells"][i]]]  # fmt: skip
    left = [0.0] * len(cells)
    for kind in KINDS:
        widths = [cell["bytes"][kind] / unit for _, cell in cells]
        axes.barh(range(len(cells)), widths, left=left, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, (_, cell) in enumerate(cells):
        axes.text(left[y], y, f" {cell['batch']}", va="center", fontsize=7)
    axes.axvline((result["memory"] - result["reserved"]) / unit, color="black", linewidth=0.8)
    axes.set_yticks(range(len(cells)), [label for label, _ in cells], fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel=f"{name} at the largest batch, which stands at the bar", title=result["model"])
    axes.margins(y=0.01)
    figure.legend(loc="outside lower center", ncols=len(KINDS), fontsize=7)
    report.save_figure(figure, path, dpi=120)


# Measured


class TensorBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, as long as anything refers to their storage.

    What a kernel allocates inside, and what an allocator keeps in reserve, are not seen.

    Attributes:
        live: bytes that are there now.
        peak: the most that ever were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        before: set[int] | None = None
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._known:
                continue
            # What came in from outside (weights, the prompt) is not this run's.
            if before is None:
                before = {given.untyped_storage()._cdata for given in _tensors((args, kwargs))}
            if key in before:
                continue
            self._known.add(key)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key, storage.nbytes())
        return result

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _tensors(values: object) -> list[Tensor]:
    """The tensors among an operation's arguments or results, which may come in lists."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[Callable[[], int]]:
    """Measure the most bytes that tensors made inside take at once; what was there before is not counted.

    On CUDA it is the allocator's own peak, elsewhere `TensorBytes`.

    Yields:
        a function that returns the bytes; call it when the block has ended.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield lambda: torch.cuda.max_memory_allocated(device) - before
    else:
        with TensorBytes() as mode:
            yield lambda: mode.peak


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    batch: int,
    prompt: int,
    output: int,
    eviction: Method | None = None,
    whole_logits: bool = False,
) -> PodCache:
    """Generate greedily from prompts of token 3; returns the cache.

    Args:
        model: a PoD model, in evaluation mode.
        batch, prompt, output: rows, tokens of each prompt, new tokens of each.
        eviction, whole_logits: as in `Inference`.
    """
    cache = PodCache(model.config, max_length=prompt + output - 1, eviction=eviction)
    new = torch.full((batch, prompt), 3, device=model.device)
    for step in range(output):
        keep = 0 if whole_logits and step == 0 else 1
        logits = model(new, past_key_values=cache, logits_to_keep=keep).logits
        logits = logits.float() if keep == 0 else logits
        new = logits[:, -1].argmax(dim=-1, keepdim=True)
        del logits
    return cache


def measured_bytes(model: PreTrainedModel, batch: int, prompt: int, output: int, **options) -> int:
    """Bytes of the weights and of everything else at the peak of `generate`; arguments are its own."""
    weights = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in model.parameters()}
    with peak_bytes(model.device) as peak:
        generate(model, batch, prompt, output, **options)
    return sum(weights.values()) + peak()


def measured_batch(model: PreTrainedModel, memory: float, prompt: int, output: int, **options) -> int:
    """The most rows whose measured peak is within `memory` bytes, 0 if not even one."""

    def fits(batch: int) -> bool:
        try:
            return measured_bytes(model, batch, prompt, output, **options) <= memory
        except torch.cuda.OutOfMemoryError:
            return False

    return largest(fits)


@exit_status
def main(arguments: list[str] | None = None) -> None:
    parser = command.parser_of("memory", __doc__)
    parser.add_argument("--model", required=True, help=f"a directory with config.json, or {', '.join(SHORT_NAMES)}")
    parser.add_argument("--memory", default="80GB", help=f"80GB, 512MB (1 GB = 2**30), or {', '.join(GPUS)} (80GB)")
    command.add_numbers(parser, "--lengths", list(PUBLISHED), "tokens of a prompt (2048,4096,8192,16384)")
    parser.add_argument("--output", type=int, default=8192, help="new tokens (8192)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of weights and cache (bfloat16)")
    parser.add_argument("--blocks", type=Path, help="a blocks file of pod.analyze (the model's own, or --kv-saving)")
    parser.add_argument("--kv-saving", type=float, default=0.35, help="saved by evenly long blocks (0.35)")
    parser.add_argument("--sinks", type=int, help="sink tokens (the model's own, or 16)")
    parser.add_argument("--recent", type=int, help="recent tokens (the model's own, or 4080)")
    command.add_eviction(parser, what="rows for PoD with these, such as snapkv:budget=4096+h2o:budget=4096")
    parser.add_argument("--measure", action="store_true", help="also search with a random model on this device")
    options = command.parse(parser, "memory", arguments)
    result = evaluate(options)
    text = tables(result)
    report.write_json(options.out / "memory.json", result | {"parameters": parameters_of(options.eviction)})
    report.write(options.out / "memory.md", text + "\n\n![The same as a picture](memory.png)\n")
    draw(result, options.out / "memory.png")
    print(text)
    print(f"written: {options.out}/memory.json, {options.out}/memory.md, {options.out}/memory.png")
