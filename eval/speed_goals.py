"""What a run of `eval/speed.py` says: the goals it reached, and the lines of `pod_kernels.dispatch`."""

import os
import statistics
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any, NamedTuple

import timing
import torch
from dense_attention import FLASH, OTHERS
from speed_setting import FUSED, Setting
from speed_works import (
    POD_CUDNN,
    SUITES,
    TAU,
    attention_forward,
    attention_training,
    cascade_prefill,
    decode_attention,
    decode_attention_after_eviction,
    decode_attention_skipping,
    update,
    update_one_layer,
)
from timing import Measured

from pod.evaluation import report
from pod_kernels import dispatch
from pod_kernels.flash import CUDNN, FLASH_VARIABLE


class Goal(NamedTuple):
    """What the design wants of a time.

    Attributes:
        text: what is measured against what.
        device, what, tokens: where it is measured.
        ours: pattern of the names of our works, by whichever backend; the best counts.
        others: the names of those they are compared with; the hardest to beat counts.
        most: ours by theirs, at most; None for what the bytes make of it.
        least: theirs by ours, at least; in the place of `most`.
    """

    text: str
    device: str
    what: Callable[[Setting, int], Measured]
    tokens: int
    ours: str
    others: tuple[str, ...]
    most: float | None = None
    least: float | None = None

    def reached(self, record: dict[str, Any]) -> float | None:
        """The number of this goal in a record of `Measured`; None where a side is missing."""
        seconds = record["seconds"]
        ours = [name for name in seconds if fnmatch(name.removesuffix(FUSED), self.ours)]
        others = [name for name in seconds if name in self.others]
        if not ours or not others:
            return None
        if self.least is None:
            return min(max(timing.ratio(seconds, name, other) for other in others) for name in ours)
        return max(min(timing.ratio(seconds, other, name) for other in others) for name in ours)


FULL = ("PoD", "PoD" + FUSED)
CONCATENATION = ("concatenation",)
GOALS = [
    *(
        Goal(f"training attention, {size}: throughput of the fastest dense", "cuda", attention_training, tokens, "PoD*",
             OTHERS, least=0.95)
        for size, tokens in (("32K", 32_768), ("128K", 131_072))
    ),
    *(
        Goal(f"decode attention, {size}: time by dense flash decoding", "cuda", decode_attention, tokens, "PoD", OTHERS,
             most=most)
        for size, tokens, most in (("32K", 32_768, 0.76), ("128K", 131_072, 0.73))
    ),
    *(
        Goal(f"the same with tau = {TAU}, {size}: time by that without", "cuda", decode_attention_skipping, tokens,
             f"PoD, tau={TAU}", FULL)
        for size, tokens in (("32K", 32_768), ("128K", 131_072))
    ),
    *(
        Goal(f"decode attention after {name}, 1,024 of 128K: full cache by it", "cuda", decode_attention_after_eviction,
             131_072, f"{method}:*", FULL, least=10)
        for name, method in (("SnapKV", "snapkv"), ("CAKE", "cake"))
    ),
    *(
        Goal(f"storing a token, {name}, {size}: concatenation by it", device, what, 16_384, ours, CONCATENATION,
             least=100)
        for device, size, what in (
            ("cpu", "16K", update),
            ("cuda", "1 GiB in 8 layers", update),
            ("cuda", "1 GiB in one layer", update_one_layer),
        )
        for name, ours in (("ring", "PodCache"), ("cascade", "cascade:*"))
    ),
    Goal("prefill by a cascade, 1M, one layer: full flash by it", "cuda", cascade_prefill, 2**20, "cascade of *",
         (FLASH,), least=6.8),
]  # fmt: skip


def goals(suites: list[dict[str, Any]], kind: str) -> str:
    """What of the goals was reached, of those that these suites measure on this kind of device; else empty."""
    records = {(record["what"], record["tokens"]): record for facts in suites for record in facts["results"]}
    names = {run.__name__ for facts in suites for run in SUITES[facts["suite"]]}
    rows = []
    for goal in GOALS:
        record = records.get((goal.what.__name__, goal.tokens))
        if goal.device != kind or goal.what.__name__ not in names:
            continue
        reached = None if record is None else goal.reached(record)
        wanted = goal.most if goal.least is None else goal.least
        if wanted is None and record is not None:
            wanted = record["by_bytes"]
        sign = "<=" if goal.least is None else ">="
        rows.append(
            [
                goal.text,
                "not measured" if reached is None else f"{reached:.3g}",
                "the bytes'" if wanted is None else f"{sign} {wanted:.3g}",
            ]
        )
    return report.markdown_table(["goal", "reached", "goal's number"], rows) if rows else ""


def winner_lines(suites: list[dict[str, Any]], commit: str) -> str:
    """Lines of `pod_kernels.dispatch.WINNERS`, from what ran by both backends; empty without.

    Of decoding, all lengths together are one line: a cache does not change its backend as it grows.
    """
    ways = {
        "PoD": ("composed", os.environ.get(FLASH_VARIABLE) or None),
        POD_CUDNN: ("composed", CUDNN),
        "PoD" + FUSED: ("fused", None),
    }
    works = {attention_forward: "forward", attention_training: "training", decode_attention: "decode"}
    works = {measurement.__name__: work for measurement, work in works.items()}
    times: dict[dispatch.ShapeClass, dict[str, float]] = {}
    dates = {}
    for facts in suites:
        for record in facts["results"]:
            medians = {name: statistics.median(record["seconds"][name]) for name in ways if name in record["seconds"]}
            if record["what"] not in works or not {"PoD", "PoD" + FUSED} <= medians.keys():
                continue
            work = works[record["what"]]
            length = max(reached for reached in dispatch.LENGTHS if reached <= record["tokens"])
            shapes = dispatch.ShapeClass(
                facts["device"],
                getattr(torch, facts["dtype"]).itemsize,
                facts["head_dim"],
                0 if work == "decode" else length,
                work,
            )
            # What did not run at one of a class's lengths has no sum to compare.
            sums = times.get(shapes, dict.fromkeys(medians, 0.0))
            times[shapes] = {name: total + medians[name] for name, total in sums.items() if name in medians}
            dates[shapes] = facts["date"]
    lines = {}
    for shapes, sums in times.items():
        backend, flash = ways[min(sums, key=sums.get)]
        lines[shapes] = dispatch.Winner(backend, dates[shapes], commit, flash)
    return "\n".join(f"    {shapes!r}: {winner!r},".replace("'", '"') for shapes, winner in lines.items())
