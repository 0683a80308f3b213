"""Times as ratios inside one run, on the device at hand.

Works take turns, round after round, and a ratio is the median over the rounds of one's time by the other's in the same
round: a busy machine slows all alike. On a GPU, time is between two CUDA events. Where a work's operations or bytes are
known, its rate is stated too, with its share of what a large product or copy reached in the same run.
"""

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pod.evaluation import report
from pod_kernels.attention import BACKEND_VARIABLE

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
    """

    seconds: dict[str, list[float]]
    pairs: list[tuple[str, str]]
    amounts: dict[str, tuple[float, str]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def record(self, what: str, tokens: int) -> dict[str, Any]:
        """The result as JSON keeps it and `table` reads it."""
        rates = {
            name: {"rate": amount / statistics.median(self.seconds[name]), "unit": unit}
            for name, (amount, unit) in self.amounts.items()
        }
        return {
            "tokens": tokens,
            "what": what,
            "ratios": ratios(self.seconds, self.pairs),
            "rates": rates,
            "left_out": self.left_out,
            "seconds": self.seconds,
        }


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds that `work` takes, the device's queue emptied before and after."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def interleaved(works: Works, rounds: int, device: str, label: str) -> dict[str, list[float]]:
    """Seconds of every work in every round, one work after the other; the first time of each is not counted."""
    for work in works.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in tqdm(range(rounds), desc=label, unit=" rounds"):
        for name, work in works.items():
            seconds[name].append(timed(work, device))
    return seconds


def runnable(works: Works) -> tuple[Works, dict[str, str]]:
    """Those that run here, and why the others do not."""
    good, left_out = {}, {}
    for name, work in works.items():
        try:
            work()
            good[name] = work
        except (ValueError, RuntimeError, ImportError) as error:
            left_out[name] = str(error).splitlines()[0]
    return good, left_out


def rotated(device: str, make: Callable[[], list[Tensor]]) -> Iterator[list[Tensor]]:
    """Inputs without end, on a GPU so many of them that its L2 cache has forgotten each before it comes again."""
    sets = [make()]
    if device == "cuda":
        size = sum(tensor.nbytes for tensor in sets[0])
        cached = torch.cuda.get_device_properties(device).L2_cache_size
        sets += [make() for _ in range(math.ceil(2 * cached / size))]
    return itertools.cycle(sets)


def by(backend: str, work: Callable[[], object]) -> Callable[[], object]:
    """The work with attention and the cache's functions run by this backend."""

    def run() -> None:
        before = os.environ.get(BACKEND_VARIABLE)
        os.environ[BACKEND_VARIABLE] = backend
        try:
            work()
        finally:
            if before is None:
                del os.environ[BACKEND_VARIABLE]
            else:
                os.environ[BACKEND_VARIABLE] = before

    return run


def ceilings(device: str, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """What this device reaches at best: a large copy in bytes/s, read and written ones, and a product in FLOP/s."""
    elements, size = (2**29, 8192) if device == "cuda" else (2**24, 1024)
    source, one, other = (
        torch.randn(sizes, device=device, dtype=dtype) for sizes in [(elements,), (size, size), (size, size)]
    )
    target = torch.empty_like(source)
    works = {BYTES: lambda: target.copy_(source), OPERATIONS: lambda: one @ other}
    seconds = interleaved(works, rounds, device, "ceilings")
    amounts = {BYTES: 2 * source.nbytes, OPERATIONS: 2 * size**3}
    return {name: amounts[name] / statistics.median(seconds[name]) for name in works}


def ratio(seconds: dict[str, list[float]], name: str, against: str) -> float:
    """Median over the rounds of `name`'s time over `against`'s in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[against], strict=True))


def ratios(seconds: dict[str, list[float]], pairs: list[tuple[str, str]]) -> dict[str, float]:
    """Each pair's ratio by the name that tables and JSON give it."""
    return {f"{name} / {against}": ratio(seconds, name, against) for name, against in pairs}


def table(title: str, records: list[dict[str, Any]], ceilings: dict[str, float]) -> str:
    """A line for each ratio; the medians beside it are in milliseconds and belong to this machine at this hour."""
    rows, rates, notes = [], [], []
    for record in records:
        where = [record["what"].replace("_", " "), f"{record['tokens']:,}"]
        for name, value in record["ratios"].items():
            one, other = (1e3 * statistics.median(record["seconds"][part]) for part in name.split(" / "))
            rows.append([name, *where, f"{value:.3g}", f"{one:.2f}", f"{other:.2f}"])
        for name, found in record["rates"].items():
            rate, unit = found["rate"], found["unit"]
            rates.append([name, *where, f"{rate / SCALE[unit]:,.3g} {unit}", f"{rate / ceilings[unit]:.0%}"])
        notes += [f"Left out: {name} ({why})." for name, why in record["left_out"].items()]
    parts = [
        f"### {title}",
        report.markdown_table(["time by time", "what", "tokens", "ratio", "ms", "by ms"], rows),
    ]
    if rates:
        parts.append(report.markdown_table(["", "what", "tokens", "rate", "of the ceiling"], rates))
    return "\n\n".join(parts + list(dict.fromkeys(notes)))
