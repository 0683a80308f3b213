"""Times as ratios inside one run, on the device at hand.

Works take turns, round after round, and a ratio is the median over the rounds of one's time by the other's in the same
round: a busy machine slows all alike. Where a work's operations or bytes are known, its rate is stated too, with its
share of what a large product or copy reached in the same run.

On a GPU, time is between two CUDA events, after something that empties the L2 cache. What starts many small kernels is
captured in a CUDA graph where that is possible, and its replays are timed: the device's work and not Python's.
"""

import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pod.evaluation import report
from pod_kernels.dispatch import forced

OPERATIONS, BYTES = "TFLOP/s", "GB/s"
SCALE = {OPERATIONS: 1e12, BYTES: 1e9}

Works = dict[str, Callable[[], object]]


@dataclass
class Measured:
    """What one function measured.

    Attributes:
        seconds: [work], one number for each round.
        pairs: (work, other work): whose times are compared.
        amounts: [work] (how much, `OPERATIONS` or `BYTES`) it does at least, where that is known.
        left_out: [work] why it could not run here.
        notes: what a reader of the times should know.
        by_bytes: what the bytes alone make of a ratio, where the inputs decide that.
    """

    seconds: dict[str, list[float]]
    pairs: list[tuple[str, str]]
    amounts: dict[str, tuple[float, str]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    by_bytes: float | None = None

    def record(self, what: str, tokens: int) -> dict[str, Any]:
        """The result as JSON keeps it and `table` reads it."""
        rates = {
            name: {"rate": amount / statistics.median(self.seconds[name]), "unit": unit}
            for name, (amount, unit) in self.amounts.items()
            if name in self.seconds
        }
        return {
            "tokens": tokens,
            "what": what,
            "ratios": ratios(self.seconds, self.pairs),
            "rates": rates,
            "left_out": self.left_out,
            "notes": self.notes,
            "by_bytes": self.by_bytes,
            "seconds": self.seconds,
        }


@cache
def _pushes_out(device: str) -> Tensor:
    """What pushes everything else out of the device's L2 cache when it is written."""
    size = 4 * torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(size, dtype=torch.uint8, device=device)


def clock() -> float:
    """Seconds of the host: the process's own where one thread computes, as others' work is not in them."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds that `work` takes, the device's queue emptied before and after, and on a GPU its L2 cache before."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        # While the device still writes this, the host puts the first of the work into the queue.
        _pushes_out(device).zero_()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    begun = clock()
    work()
    return clock() - begun


def interleaved(
    works: Works, rounds: int, device: str, label: str, most_seconds: float | None = None
) -> dict[str, list[float]]:
    """Seconds of every work in every round, one work after the other; each has run before.

    Args:
        works: by name.
        rounds: how many.
        device: "cuda" or what is timed by the host's clock.
        label: of the progress bar.
        most_seconds: no round begins after so many.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    begun = time.perf_counter()
    for done in tqdm(range(rounds), desc=label, unit=" rounds"):
        if done and most_seconds is not None and time.perf_counter() - begun > most_seconds:
            break
        for name, work in works.items():
            seconds[name].append(timed(work, device))
    return seconds


def runnable(works: Works) -> tuple[Works, dict[str, str]]:
    """Those that run here, each of which has run once, and why the others do not."""
    good, left_out = {}, {}
    for name, work in works.items():
        try:
            work()
            good[name] = work
        except Exception as error:
            left_out[name] = reason(error)
    return good, left_out


def reason(error: Exception) -> str:
    """What went wrong, in a line; all of it goes to stderr."""
    traceback.print_exception(error, file=sys.stderr)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def measured(
    works: Works,
    rounds: int,
    device: str,
    label: str,
    most_seconds: float | None = None,
    graphs: Collection[str] = (),
    first: Works | None = None,
) -> tuple[dict[str, list[float]], dict[str, str], list[str]]:
    """Run every work once, which is not counted, and then time those that can run.

    Args:
        works, rounds, device, label, most_seconds: as for `interleaved`.
        graphs: the works whose replays are timed, on a GPU, where a CUDA graph can have them. Where some are named, the
            others are those that allocate anew at each step, or read what the host counted.
        first: what runs once in the works' stead, under their names: less of it, where all of it takes long.

    Returns:
        seconds, left_out and notes of `Measured`.
    """
    good, left_out = runnable(works if first is None else first)
    good = {name: works[name] for name in good}
    notes = []
    for name in [name for name in good if name in graphs and device == "cuda"]:
        try:
            good[name], refusal = captured(good[name])
        except Exception as error:
            left_out[name] = reason(error)
            del good[name]
            continue
        notes += [f"{name} is no graph, and timed with Python's starts ({refusal})."] if refusal else []
    if graphs and device == "cuda":  # else a reader would take all for replays
        others = [name for name in good if name not in graphs]
        notes += [
            f"{name} is timed with Python's starts, as it allocates or reads what the host has counted."
            for name in others
        ]
    return interleaved(good, rounds, device, label, most_seconds), left_out, notes


def captured(work: Callable[[], object]) -> tuple[Callable[[], object], str | None]:
    """Replays of a work as a CUDA graph; or the work itself, and why there is none.

    The work has run before, so that its kernels are compiled. It runs once more: what makes the host wait for the
    device is found without a capture, as one that fails leaves torch's allocator and random numbers in a bad state. A
    replay does to the device what the work did, but what the host counts stands still: a cache whose steps are replayed
    needs room for all of them.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in heard:
        if "called a synchronizing" in str(warning.message):
            return work, f"it waits for the device: {os.path.basename(warning.filename)}, line {warning.lineno}"
    stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        torch.cuda.set_stream(stream)  # a capture that fails at its end leaves its own
        return work, reason(error)
    return graph.replay, None


def by(backend: str, work: Callable[[], object], flash: str | None = None) -> Callable[[], object]:
    """The work with attention and the cache's functions run by this backend.

    Args:
        backend: of `pod_kernels`.
        work: what to run.
        flash: what runs the composed backend's pieces, as POD_FLASH_IMPLEMENTATION names it. None: what that says, and
            torch's own where it is not set, as what won an earlier measurement is to be measured by its name.
    """

    def run() -> None:
        with forced(backend, flash):
            work()

    return run


def ceilings(device: str, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """What this device reaches at best: a large copy in bytes/s, read and written ones, and a product in FLOP/s."""
    elements, size = (2**29, 8192) if device == "cuda" else (2**24, 1024)
    source, one, other = (
        torch.randn(sizes, device=device, dtype=dtype) for sizes in [(elements,), (size, size), (size, size)]
    )
    target = torch.empty_like(source)
    works = {BYTES: lambda: target.copy_(source), OPERATIONS: lambda: one @ other}
    seconds, *_ = measured(works, rounds, device, "ceilings")
    amounts = {BYTES: 2 * source.nbytes, OPERATIONS: 2 * size**3}
    return {name: amounts[name] / statistics.median(seconds[name]) for name in works}


def ratio(seconds: dict[str, list[float]], name: str, against: str) -> float:
    """Median over the rounds of `name`'s time over `against`'s in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[against], strict=True))


def ratios(seconds: dict[str, list[float]], pairs: list[tuple[str, str]]) -> dict[str, float]:
    """Each pair's ratio by the name that tables and JSON give it, of the pairs that were timed."""
    timed_ones = [pair for pair in pairs if all(name in seconds for name in pair)]
    return {f"{name} / {against}": ratio(seconds, name, against) for name, against in timed_ones}


def table(title: str, records: list[dict[str, Any]], ceilings: dict[str, float]) -> str:
    """A line for each ratio, with the smallest and the largest of a round.

    The medians beside them are in milliseconds and belong to this machine at this hour.
    """
    rows, rates, notes = [], [], []
    for record in records:
        where = [record["what"].replace("_", " "), f"{record['tokens']:,}"]
        for name, value in record["ratios"].items():
            both = [record["seconds"][part] for part in name.split(" / ")]
            one, other = (1e3 * statistics.median(seconds) for seconds in both)
            each = [mine / theirs for mine, theirs in zip(*both, strict=True)]
            spread = f"{min(each):.3g} to {max(each):.3g}"
            rows.append([name, *where, f"{value:.3g}", spread, f"{one:,.4g}", f"{other:,.4g}"])
        for name, found in record["rates"].items():
            rate, unit = found["rate"], found["unit"]
            rates.append([name, *where, f"{rate / SCALE[unit]:,.3g} {unit}", f"{rate / ceilings[unit]:.0%}"])
        notes += [f"Left out: {name} ({why})." for name, why in record["left_out"].items()]
        notes += [f"{where[0].capitalize()} at {where[1]}: {note}" for note in record["notes"]]
    parts = [
        f"### {title}",
        report.markdown_table(["time by time", "what", "tokens", "ratio", "in the rounds", "ms", "by ms"], rows),
    ]
    if rates:
        parts.append(report.markdown_table(["", "what", "tokens", "rate", "of the ceiling"], rates))
    return "\n\n".join(parts + list(dict.fromkeys(notes)))
