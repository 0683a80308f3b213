"""How much each KV head needs the distant past, from a file; `LayerBlocks.streaming` lets those stream that do least.

scores = head_scores("attn_patterns/Llama-3-8B/", model.config)      # as DuoAttention publishes them
scores = head_scores("calibration.safetensors:razor", model.config)  # as `python -m pod.calibrate` measures them
blocks = pod.LayerBlocks.dense(*scores.shape).streaming(scores, 0.5)
"""

import csv
import math
import os
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from pod import calibration
from pod.blocks import LayerBlocks
from pod.files import read_json

DUO_SCORES, DUO_CONFIG = "full_attention_heads.tsv", "config.json"
MEASURED = "razor"  # of a calibration file, where the name does not say


def head_scores(path: str | os.PathLike[str], config: PreTrainedConfig) -> Tensor:
    """Read head scores.

    Args:
        path: a table as DuoAttention (arXiv 2410.10819, github.com/mit-han-lab/duo-attention) publishes them: a line
            for each layer, in it a number for each KV head, tabs between; or the folder that holds it as
            `full_attention_heads.tsv`. Beside it, `config.json` says the sizes it was learned with. Or a calibration
            file, FILE.safetensors, and after a colon which of its scores: razor (the default), induction, echo, kvzip,
            duo.
        config: of the model, dense or PoD, that the scores are for.

    Returns:
        [L, H_kv] float32, higher where a head needs distant tokens more; a table's are cut to [0, 1].

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no such table, or of another model; names the file, and the line.
    """
    if (measured := _measured(path)) is not None:
        return calibration.head_scores(*measured, config)
    path = Path(path)
    path = path / DUO_SCORES if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such head scores; DuoAttention publishes {DUO_SCORES} for some models, and python -m "
            "pod.calibrate measures a model"
        )
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            table = list(csv.reader(lines, delimiter="\t"))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: no table of head scores ({error}); name a .tsv or FILE.safetensors") from error
    rows = [_numbers(path, number, row) for number, row in enumerate(table, 1) if row]
    shape = [config.num_hidden_layers, config.num_key_value_heads]
    if [len(rows), *sorted({len(row) for row in rows})] != shape:
        widths = " or ".join(str(width) for width in sorted({len(row) for row in rows}))
        raise ValueError(
            f"{path}: {len(rows)} lines of {widths or 'no'} numbers, and the model has {shape[0]} layers x {shape[1]} "
            "KV heads: scores are of one model, and no other's"
        )
    return torch.tensor(rows, dtype=torch.float32).clamp(0, 1)


def streamed(
    blocks: LayerBlocks, path: str, share: float, config: PreTrainedConfig, sizes: tuple[int, int]
) -> LayerBlocks:
    """The blocks, of which those stream that a file's scores say; a warning where they were learned with more tokens.

    Args:
        blocks: of the model.
        path, config: see `head_scores`.
        share: see `LayerBlocks.streaming`.
        sizes: (sink_size, recent_size) that the model is to have.

    Raises:
        FileNotFoundError, ValueError: of either.
    """
    found = blocks.streaming(head_scores(path, config), share)
    beside = Path(path if os.path.isdir(path) else os.path.dirname(path)) / DUO_CONFIG
    if (measured := _measured(path)) is not None:
        learned = calibration.load(measured[0]).made.get(measured[1])
    else:
        learned = read_json(beside) if beside.is_file() else None
    learned = [learned.get(name) for name in ("sink_size", "recent_size")] if isinstance(learned, dict) else []
    if any(isinstance(of, int) and of > size for of, size in zip(learned, sizes, strict=False)):
        print(
            f"warning: {path}: these heads were found with {learned[0]} sinks and {learned[1]} recent tokens, and "
            f"model.sink_size, model.recent_size are {sizes[0]}, {sizes[1]}: fewer tokens may be too few for them",
            file=sys.stderr,
        )
    return found


def _measured(path: str | os.PathLike[str]) -> tuple[str, str] | None:
    """(calibration file, which of its scores) of FILE.safetensors:NAME or FILE.safetensors; None of another path."""
    file, _, name = str(path).rpartition(":")
    if file.endswith(".safetensors"):
        return file, name
    return (str(path), MEASURED) if name.endswith(".safetensors") else None


def _numbers(path: Path, line: int, row: list[str]) -> list[float]:
    try:
        numbers = [float(text) for text in row]
    except ValueError:
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{path}, line {line}: wanted numbers with tabs between, got {chr(9).join(row)[:80]!r}")
    return numbers
