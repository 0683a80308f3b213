"""What a run of `eval/speed.py` says of the goals."""

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any, NamedTuple

import timing
from dense_attention import FLASH, OTHERS
from speed_cpu import (
    DENSE_EVICTED,
    EVICTED,
    KVPRESS_EVICTED,
    STATIC,
    decode_after_snapkv,
    decode_attention_of_model,
    decode_step,
    prefill_of_model,
    similarity_by_forward,
    training_step,
)
from speed_setting import DENSE, FUSED, STOCK, Setting
from speed_works import (
    SUITES,
    TAU,
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


class Goal(NamedTuple):
    """What the design wants of a time.

    Attributes:
        text: what is measured against what.
        device, what, tokens: where it is measured.
        ours: pattern of the names of our works, by whichever backend; the best counts.
        others: the names of those they are compared with; the hardest to beat counts.
        most: ours by theirs, at most; None for what the bytes make of it, `of_bytes` times.
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
    of_bytes: float = 1.0

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
    *(
        Goal(f"the real model: decode attention, {size}: time by dense", "cpu", decode_attention_of_model, tokens,
             "PoD", (DENSE, FLASH), of_bytes=1.15)
        for size, tokens in (("2K", 2048), ("8K", 8192))
    ),
    *(
        Goal(f"the real model: {text}, {size}: time by transformers' fastest", "cpu", what, tokens, "PoD",
             (STOCK, STATIC), most=most)
        for text, what, most in (("a decode step", decode_step, 1), ("prefill", prefill_of_model, 1.02))
        for size, tokens in (("2K", 2048), ("8K", 8192))
    ),
    *(
        Goal(f"the real model: a decode step after SnapKV(512) of 4,000, {text}: time by {peer}", "cpu",
             decode_after_snapkv, 4000, ours, others, most=most)
        for text, ours in (("PoD", EVICTED), ("blocks of one layer", DENSE_EVICTED))
        for peer, others, most in (
            ("kvpress's", (KVPRESS_EVICTED,), 1.05), ("transformers' fastest", (STOCK, STATIC), 1)
        )
    ),
    Goal("the real model: a training step, 2K: time by the dense model's", "cpu", training_step, 2048, "PoD",
         (DENSE, STOCK), most=1.1),
    Goal("the real model: attention_similarity, 2K: time by a forward", "cpu", similarity_by_forward, 2048,
         "attention_similarity", ("forward",), most=1.5),
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
            wanted = goal.of_bytes * record["by_bytes"]
        sign = "<=" if goal.least is None else ">="
        verdict = "not measured"
        if reached is not None:
            verdict = "yes" if (reached <= wanted if goal.least is None else reached >= wanted) else "no"
        rows.append(
            [
                goal.text,
                "-" if reached is None else f"{reached:.3g}",
                "the bytes'" if wanted is None else f"{sign} {wanted:.3g}",
                verdict,
            ]
        )
    return report.markdown_table(["goal", "measured", "goal's number", "reached"], rows) if rows else ""
