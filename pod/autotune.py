"""Check and time the kernels on this GPU, for a model's shapes, and take those that are right and fastest.

    python -m pod.autotune --ckpt exports/llama3-32k
    python -m pod.autotune --ckpt exports/llama3-32k --lengths 4096,131072
    python -m pod.autotune recipe=llama3-32k            # attention with its gradients too, at the recipe's length
    python -m pod.autotune --show

Each candidate for each class of shapes runs in a process of its own with a time limit, so that a crash or a hang costs
nothing but that candidate: the fused kernels, and in the composed backend cuDNN's and FlashAttention 3 and 4 where they
are installed, against torch's own flash attention. What it finds is kept by GPU, versions and the kernels' sources in
pod/kernels of the user's cache, after each class, and read by everything that runs attention there. What was tried is
not tried again (`--force`), so a run that was stopped goes on. POD_ATTENTION_BACKEND still forces.
"""

import argparse
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from tqdm.auto import tqdm

from pod.evaluation.command import numbers
from pod.evaluation.memory import read_config
from pod.evaluation.report import markdown_table
from pod.files import naming, write_text
from pod.model.shape import Shape
from pod.model.trial import EXACT, Trial
from pod.recipe.loading import load_recipe
from pod.terminal import exit_status
from pod.training.plan import config_of
from pod_kernels import dispatch
from pod_kernels.dispatch import FORMAT, LENGTHS, TORCH, Choice, ShapeClass, Work, choices_path, length_class, machine
from pod_kernels.flash import CUDNN

ATTENTION = [Choice("composed", name) for name in (CUDNN, "FA3", "FA4")] + [Choice("fused")]
CANDIDATES: dict[Work, list[Choice]] = {"forward": ATTENTION, "training": ATTENTION}
CANDIDATES |= dict.fromkeys(("decode", "serving"), [Choice("fused")])
SMALLEST, DECODED = 512, 8192  # tokens of the shortest class of attention, and in the cache that is decoded from
DEVICE = "cuda"
PACKAGES = {"FA3": "flash_attn_interface", "FA4": "flash_attn"}  # without which no process is started
COMMAND = [sys.executable, "-m", "pod.model.trial"]


def trials_of(shapes: ShapeClass, shape: Shape) -> Iterator[Trial]:
    """What is tried for a class: its smallest shapes, an odd number of tokens, with the model's heads."""
    tokens = (max(shapes.length, SMALLEST) if CANDIDATES[shapes.work] is ATTENTION else DECODED) + 37
    for choice in CANDIDATES[shapes.work]:
        heads = {"head_dim": shapes.head_dim, "heads": shape.heads, "kv_heads": shape.kv_heads}
        yield Trial(shapes.work, shapes.dtype, **heads, tokens=tokens, **choice._asdict(), device=DEVICE)


def tried(trial: Trial, time_limit: float) -> dict[str, Any]:
    """`pod.model.trial.report` of another process; a process that does not end well is a reason too.

    Args:
        trial: what is tried.
        time_limit: seconds, after which the process and what it has started are killed.
    """
    package = PACKAGES.get(trial.flash)
    if package is not None and importlib.util.find_spec(package) is None:
        return {"ratio": None, "reason": f"not installed: there is no package {package}"}
    command = [*COMMAND, json.dumps(asdict(trial))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        try:
            out, errors = process.communicate(timeout=time_limit)
        except subprocess.TimeoutExpired:
            return {"ratio": None, "reason": f"it did not end within {time_limit:g} seconds"}
        finally:
            with suppress(ProcessLookupError):  # after an interrupt too
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == 0:
        return json.loads(out.splitlines()[-1])
    last = ([line.strip() for line in errors.splitlines() if line.strip()] or ["no word"])[-1]
    status = process.returncode
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return {"ratio": None, "reason": f"the process ended with {how}: {last}"}


def entry_of(shapes: ShapeClass, trials: list[dict[str, Any]]) -> dict[str, Any]:
    """A class as the file has it: the fastest of what is right, torch's own where nothing is faster."""
    faster = [trial for trial in trials if trial["ratio"] is not None and trial["ratio"] < 1]
    best = min(faster, key=lambda trial: trial["ratio"], default=TORCH._asdict())
    choice = {name: best[name] for name in Choice._fields}
    return {**shapes._asdict(), **choice, "date": datetime.date.today().isoformat(), "trials": trials}


def entries(path: Path) -> list[dict[str, Any]]:
    """What a file of choices holds, nothing where there is none; see `read_classes`."""
    try:
        return dispatch.read_classes(path)
    except FileNotFoundError:
        return []


def keep(gpu: str, entry: dict[str, Any]) -> None:
    """Put a class's entry into the file, among what other processes have put there meanwhile.

    Raises:
        OSError: the cache cannot be written to.
    """
    path = choices_path(gpu)
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            try:
                known = entries(path)
            except ValueError as damaged:
                print(f"{damaged}", file=sys.stderr)
                known = []
            key = _key(entry)
            known = sorted([other for other in known if _key(other) != key] + [entry], key=_key)
            found = {"format": FORMAT, "machine": machine(gpu), "classes": known}
            write_text(path, json.dumps(found, indent=1) + "\n")


def _key(entry: dict[str, Any]) -> ShapeClass:
    return ShapeClass(*(entry[name] for name in ShapeClass._fields))


def autotune(
    shape: Shape, dtype: str, works: Sequence[Work], lengths: Sequence[int], time_limit: float, force: bool = False
) -> list[dict[str, Any]]:
    """Try every candidate for every class that a model's work at these lengths belongs to.

    Args:
        shape: of the model: its heads.
        dtype: as torch writes it.
        works: of `Work`.
        lengths: tokens of whole sequences.
        time_limit: seconds for each candidate.
        force: try again what was tried.

    Returns:
        the classes' entries, as the file has them.

    Raises:
        OSError: the cache cannot be written to.
    """
    gpu = torch.cuda.get_device_properties(DEVICE).name
    classes = [
        ShapeClass(gpu, dtype, shape.head_dim, length, work)
        for work in works
        for length in sorted({length_class(work, tokens) for tokens in lengths})
    ]
    path = choices_path(gpu)
    try:
        known = {} if force else {_key(entry): entry for entry in entries(path)}
    except ValueError:
        known = {}  # `keep` says so
    wanted = [(shapes, list(trials_of(shapes, shape))) for shapes in classes if shapes not in known]
    with tqdm(total=sum(len(trials) for _, trials in wanted), desc="trials", unit=" trials") as bar:
        for shapes, trials in wanted:
            done = []
            for trial in trials:
                bar.set_postfix_str(f"{shapes.work} {shapes.length:,} {trial.flash or trial.backend}")
                said = {name: getattr(trial, name) for name in Choice._fields}
                done.append({**said, "tokens": trial.tokens, **tried(trial, time_limit)})
                bar.update()
            known[shapes] = entry_of(shapes, done)
            keep(gpu, known[shapes])
    return [known[shapes] for shapes in classes]


def table(classes: list[dict[str, Any]]) -> str:
    """A line for each trial of each class, the class's choice beside it."""
    rows = []
    for entry in classes:
        where = [entry["work"], entry["dtype"], str(entry["head_dim"])]
        where.append("any" if CANDIDATES[entry["work"]] is not ATTENTION else f"from {entry['length']:,}")
        chosen = _name(entry)
        for trial in entry["trials"]:
            ratio = "-" if trial["ratio"] is None else f"{trial['ratio']:.2f}"
            rows.append([*where, chosen, _name(trial), f"{trial['tokens']:,}", ratio, trial["reason"] or ""])
    head = ["work", "dtype", "head dim", "tokens", "runs", "tried", "at tokens", "time by torch's own", "why not"]
    return markdown_table(head, rows)


def _name(choice: dict[str, Any]) -> str:
    return choice["flash"] or {"composed": "torch's own"}.get(choice["backend"], choice["backend"])


def show() -> str:
    """All that is known of this machine.

    Raises:
        ValueError: the file is damaged; names it.
    """
    if not torch.cuda.is_available():
        return _without_gpu()
    gpu = torch.cuda.get_device_properties(DEVICE).name
    path = choices_path(gpu)
    known = entries(path)
    versions = ", ".join(f"{name} {value}" for name, value in machine(gpu).items())
    if not known:
        return f"nothing was tried with {versions}: torch's own operations run"
    return f"{table(known)}\n\n{versions}\n{path}"


def _without_gpu() -> str:
    return (
        "there is no GPU here, and nothing to choose: attention runs by torch's flash attention for CPUs, decoding by "
        "torch's matmuls"
    )


@exit_status
def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pod.autotune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="*", help="recipe=NAME and its keys: the shapes that it trains")
    parser.add_argument("--ckpt", help="an export: the shapes that it decodes, serves and prefills")
    parser.add_argument("--lengths", type=numbers, help="tokens of whole sequences (1024,4096,16384,65536)")
    parser.add_argument("--dtype", choices=sorted(map(dispatch.name_of, EXACT)), help="of the model (its own)")
    parser.add_argument("--time-limit", type=float, default=300, help="seconds for a candidate (300)")
    parser.add_argument("--force", action="store_true", help="try again what was tried")
    parser.add_argument("--show", action="store_true", help="only print what is known, and the reasons")
    options = parser.parse_args(arguments)
    if options.show:
        print(show())
        return
    if bool(options.recipe) == (options.ckpt is not None):
        raise ValueError("name either --ckpt EXPORT or recipe=NAME: the shapes are those of a model")
    if options.recipe:
        recipe = load_recipe(options.recipe)
        shape, works = Shape.from_config(config_of(recipe)), ("forward", "training")
        dtype = "bfloat16" if "bf16" in recipe.trainer.precision else recipe.model.dtype
        lengths = [recipe.data.sequence_length]
    else:
        config = read_config(options.ckpt, "--ckpt")
        shape, works, lengths = Shape.from_config(config), ("forward", "decode", "serving"), LENGTHS
        dtype = config.get("dtype") or "float32"
    if not torch.cuda.is_available():
        print(_without_gpu())
        return
    if any(length < 1 for length in options.lengths or [1]):
        raise ValueError(f"--lengths {options.lengths}: wanted numbers of tokens, 1 or more")
    if options.time_limit <= 0:
        raise ValueError(f"--time-limit {options.time_limit:g}: wanted seconds, more than 0")
    found = autotune(
        shape, options.dtype or dtype, works, options.lengths or lengths, options.time_limit, options.force
    )
    print(table(found))
    print(f"written: {choices_path(torch.cuda.get_device_properties(DEVICE).name)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
