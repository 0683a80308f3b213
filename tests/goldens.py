"""What every method keeps, answers and takes in memory on a tiny model: recorded in goldens.npz, which a test compares.

    python tests/goldens.py            prints which cases differ from the file, in what and by how much
    python tests/goldens.py --write    the same, and then writes the file anew

A case is a setting of the cache on a model in a scenario: turns of two rows, then `STEPS` given tokens. Recorded are
the kept positions and `nbytes` after every turn and after the last token, and of each forward some projections of the
last logits. With `max_length` positions and logits must be the same; the bytes are recorded beside.

Weights and tokens are drawn by numpy's frozen generator, and depend on no version of torch or transformers. Rounding
differs between machines: no case is written that keeps other tokens, or answers out of proportion, where every weight
is off by a little.
"""

import argparse
import contextlib
import sys
import zlib
from dataclasses import dataclass, fields, replace
from functools import cache as memoized
from pathlib import Path

import numpy as np
import torch
from calibrated import with_filters
from test_cache import fed
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import pod
from pod import eviction

FILE = Path(__file__).with_suffix(".npz")
VOCAB, HIDDEN, HEADS, KV_HEADS = 64, 32, 4, 2
SINKS, RECENT, SLACK, BETWEEN, STEPS = 3, 8, 4, 2, 20  # BETWEEN: steps between two turns
MOST = 192  # no row has so many tokens
# Of logits of standard deviation 1, by bits: all that reads a number which is rounded to another code sees it.
TOLERANCES = {None: 1e-5, 8: 5e-3, 4: 1e-1}
ROUNDINGS = 3e-7  # how far a few operations in float32 are off, relatively
MARGIN = 30  # times as much may change no choice; with quantization some codes are always near to another
SCALES = {"q_proj": 1.5, "k_proj": 1.5, "o_proj": 0.5, "down_proj": 0.5}  # peaked attention, calm layers

DENSE, BLOCKS = ((0, 0), (1, 1), (2, 2), (3, 3)), ((0, 0), (0, 1), (0, 1), (3, 3))
MODELS = {  # anchors, share
    "dense": (DENSE, "scores"),
    "blocks": (BLOCKS, "scores"),
    "keys": (BLOCKS, "keys"),
    "kv": (BLOCKS, "kv"),
    "window": (DENSE, "window"),
}


@dataclass(frozen=True)
class Scenario:
    """What is fed before the steps.

    Attributes:
        turns: each of so many real tokens of the two rows, padded on the left.
        chunks: the forwards of the first one; one when empty.
        query_aware: of the method.
        with_max_length: run with `max_length` too.
    """

    turns: tuple[tuple[int, int], ...]
    chunks: tuple[int, ...] = ()
    query_aware: bool = True
    with_max_length: bool = False


SCENARIOS = {
    "one-forward": Scenario(((128, 128),)),
    "chunked": Scenario(((128, 128),), chunks=(60, 1, 67)),
    "left-padded": Scenario(((128, 91),)),
    "two-turns": Scenario(((96, 96), (25, 17)), with_max_length=True),
    "query_aware=false": Scenario(((112, 112), (12, 12)), query_aware=False),
}

# Every hyper-parameter is given: no other default changes a case. Knorm is not here: equal tokens have keys of equal
# norm in the first layer, so that rounding decides. KVzip is not: it takes more than what is fed here.
BUDGET = 32
WINDOW = {"window": 6, "kernel_size": 3}
METHODS = {
    "snapkv": eviction.SnapKV(BUDGET, **WINDOW, pooling="max"),
    "pyramidkv": eviction.PyramidKV(BUDGET, **WINDOW, pooling="avg", beta=4),
    "adakv": eviction.AdaKV(BUDGET, **WINDOW, pooling="max", alpha=0.2),
    "sagekv": eviction.SageKV(BUDGET),
    "h2o": eviction.H2O(BUDGET, recent=10),
    "tova": eviction.TOVA(BUDGET),
    "cake": eviction.CAKE(BUDGET, **WINDOW, gamma=200.0, tau1=1.6, tau2=0.4),
    "chunkkv": eviction.ChunkKV(BUDGET, **WINDOW, pooling="max", chunk_size=5),
    "expectedattention": eviction.ExpectedAttention(BUDGET, sinks=4, future=64, epsilon=0.01, window=2),
    "keydiff": eviction.KeyDiff(BUDGET, every=3),
    "lagkv": eviction.LagKV(BUDGET, every=0, sinks=4, lag=16, cross_scoring=False),
    "qfilters": eviction.QFilters(BUDGET, every=3, window=6, filters="measured"),
    "criticalkv": eviction.CriticalKV(BUDGET, **WINDOW, pooling="max", epsilon=1e-4),
    "zigzagkv": eviction.ZigZagKV(BUDGET, **WINDOW, pooling="max", alpha=0.2, held=0.9),
    "combined": eviction.Combined(
        BUDGET,
        eviction.H2O(BUDGET, recent=6),
        eviction.CAKE(BUDGET, **WINDOW, gamma=200.0, tau1=1.0, tau2=1.0),
    ),
    "streamingllm": eviction.StreamingLLM(BUDGET, sinks=4, positions="cache", stride=24),
    "streamingllm-absolute": eviction.StreamingLLM(BUDGET, sinks=4, positions="absolute", stride=24),
    "lminfinite": eviction.LMInfinite(BUDGET, sinks=4, stride=24),
    "cascade": eviction.Cascade(BUDGET, sinks=4, num_cascades=4, gamma=0.95, stride=24, head_reduction="max"),
    "quest": eviction.Quest(BUDGET, page_size=8, dense_layers=1),
    "clusterkv": eviction.ClusterKV(BUDGET, cluster_size=5, dense_layers=1, sinks=2, recent=3),
    "shadowkv": eviction.ShadowKV(BUDGET, page_size=4, dense_layers=1, recent=2),
    "recent": eviction.RecentReader(BUDGET, sinks=2, dense_layers=1),
}
SETTINGS = {"none": {}, "tau": {"tau": 0.3}} | {name: {"eviction": method} for name, method in METHODS.items()}
QUANTIZED = {8: ("none", "snapkv", "h2o"), 4: ("none", "snapkv", "pyramidkv", "adakv", "sagekv", "tova")}
SETTINGS |= {
    f"{name}-{bits}-bits": SETTINGS[name] | {"quantization": pod.Quantization(bits, group=8, residual=8)}
    for bits, names in QUANTIZED.items()
    for name in names
}
OF_MODEL = {"keys": ("none", "tau", "snapkv", "h2o", "cascade"), "kv": ("none",), "window": ("none",)}


def cases() -> list[str]:
    """MODEL/SETTING/SCENARIO of all that can be and say something."""
    return [
        f"{model}/{setting}/{scenario}"
        for scenario in SCENARIOS
        for model in MODELS
        for setting in OF_MODEL.get(model, SETTINGS)
        if is_possible(model, SETTINGS[setting], SCENARIOS[scenario].query_aware)
    ]


def is_possible(model: str, setting: dict, query_aware: bool) -> bool:
    """Whether there is such a case: what is quantised cannot be evicted at steps; a dense model has nothing to skip."""
    method = setting.get("eviction")
    if not query_aware:
        return hasattr(method, "query_aware")
    evicts_at_steps = getattr(method, "when", 0) > 0
    return not ("quantization" in setting and evicts_at_steps) and not ("tau" in setting and model == "dense")


# ---------------------------------------------------------------------- running a case


@dataclass
class Record:
    """What one case gives.

    Attributes:
        logits: [forwards, B, 4] float32.
        kept: [moments, L, B, H_kv, MOST / 8] uint8, the bits of the positions.
        nbytes: [moments] int64.
        nbytes_with_max_length: the same; zeros where that is not looked at.
    """

    logits: np.ndarray
    kept: np.ndarray
    nbytes: np.ndarray
    nbytes_with_max_length: np.ndarray


QUANTITIES = [one.name for one in fields(Record)]


def drawn(name: str, *shape: int) -> np.ndarray:
    return np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)


@memoized
def model_of(name: str, noise: float = 0.0) -> PreTrainedModel:
    """A PoD model in float32; `noise` is how far every weight is off, relatively."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=len(DENSE),
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        hidden_act="silu",
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    weights = {}
    for key, tensor in model.state_dict().items():
        weight = drawn(key, *tensor.shape)
        if tensor.dim() == 1:
            weight = 1 + 0.1 * weight  # of a norm
        elif "embed" not in key:
            weight *= SCALES.get(key.split(".")[-2], 1.0) / HIDDEN**0.5
        weights[key] = torch.from_numpy(weight * (1 + noise * drawn("off " + key, *tensor.shape))).float()
    model.load_state_dict(weights)
    anchors, share = MODELS[name]
    blocks = pod.LayerBlocks([list(row) for row in anchors])
    return pod.convert(model, blocks, sink_size=SINKS, recent_size=RECENT, share=share)


def recorded(case: str) -> Record:
    """Run a case, and once more with `max_length` where the scenario says so.

    Raises:
        ValueError: what `max_length` must not change differs.
    """
    record = run(case)
    if SCENARIOS[case.split("/")[2]].with_max_length:
        other = run(case, max_length=MOST)
        record.nbytes_with_max_length = other.nbytes
        if lines := differences(case, record, replace(other, nbytes=record.nbytes)):
            raise ValueError("\n".join(["with max_length:", *lines]))
    return record


def run(case: str, noise: float = 0.0, max_length: int | None = None) -> Record:
    """Run a case with one cache."""
    name, setting, scenario = case.split("/")
    model, scenario, setting = model_of(name, noise), SCENARIOS[scenario], dict(SETTINGS[setting])
    if not scenario.query_aware:
        setting["eviction"] = unaware(setting["eviction"])
    setting["eviction"] = with_filters(setting.get("eviction"), model.config)
    cache = pod.PodCache(model.config, max_length=max_length, crop_slack=SLACK, **setting)
    draw, projection = np.random.RandomState(0), torch.from_numpy(drawn("projection", VOCAB, 4)).float() / VOCAB**0.5
    mask, logits, kept, nbytes = torch.ones(2, 0, dtype=torch.long), [], [], []

    def feed(real: tuple[int, int], chunks: tuple[int, ...] = ()) -> None:
        nonlocal mask
        ids = torch.from_numpy(draw.randint(1, VOCAB, (2, max(real))))
        mask = torch.cat([mask, (torch.arange(max(real)) >= max(real) - torch.tensor(real)[:, None]).long()], dim=1)
        with cache.prefill() if chunks else contextlib.nullcontext():
            found = fed(model, cache, ids, None if bool(mask.all()) else mask, chunks)
        logits.append((found[:, -1] @ projection).numpy())

    def look() -> None:
        kept.append(np.stack([bits(cache.positions(layer).numpy()) for layer in range(len(DENSE))]))
        nbytes.append(cache.nbytes())

    for number, real in enumerate(scenario.turns):
        for _ in range(BETWEEN if number else 0):
            feed((1, 1))
        feed(real, () if number else scenario.chunks)
        look()
    for _ in range(STEPS):
        feed((1, 1))
    look()
    return Record(np.stack(logits), np.stack(kept), np.array(nbytes), np.zeros(len(nbytes), dtype=np.int64))


def unaware(method: eviction.Eviction) -> eviction.Eviction:
    """The method with `query_aware=False`, and its parts."""
    parts = {one.name: getattr(method, one.name) for one in fields(method)}
    parts = {name: unaware(part) for name, part in parts.items() if isinstance(part, eviction.Eviction)}
    return replace(method, query_aware=False, **parts)


def bits(positions: np.ndarray) -> np.ndarray:
    """[..., MOST / 8] uint8, which positions are among [..., n].

    Raises:
        ValueError: one is there twice, or is too large.
    """
    counts = (positions[..., None] == np.arange(MOST)).sum(axis=-2)
    if counts.max() > 1 or counts.sum() != (positions >= 0).sum():
        raise ValueError(f"a position is held twice or is above {MOST}: {positions.tolist()}")
    return np.packbits(counts.astype(np.uint8), axis=-1)


# ---------------------------------------------------------------------- comparing


def bits_of(case: str) -> int | None:
    """How many a stored number has; None where they are stored as they come."""
    quantization = SETTINGS[case.split("/")[1]].get("quantization")
    return quantization and quantization.bits


def differences(case: str, before: Record, now: Record, times: float = 1) -> list[str]:
    """A line for each quantity that is not what it was; bytes may be fewer; `times` the tolerance."""
    lines, off, tolerance = [], np.abs(now.logits - before.logits), times * TOLERANCES[bits_of(case)]
    if not off.max() <= tolerance:
        forward, row, _ = np.unravel_index(np.argmax(off), off.shape)
        many = (off > tolerance).any(axis=(1, 2)).sum()
        lines.append(f"{case}: logits of {many} forwards, at most by {off.max():.2g} in forward {forward}, row {row}")
    other = np.unpackbits(now.kept ^ before.kept, axis=-1)
    if other.any():
        moment, layer, row, head, position = np.argwhere(other)[0]
        verb = "kept" if np.unpackbits(now.kept, axis=-1)[moment, layer, row, head, position] else "gone"
        lines.append(
            f"{case}: {other.sum()} kept positions, at most {other.sum(axis=-1).max()} of a head; the first is "
            f"{position}, now {verb}, at moment {moment} in layer {layer}, row {row}, head {head}"
        )
    for name in QUANTITIES[2:]:
        more = getattr(now, name) - getattr(before, name)
        if more.max() > 0:
            lines.append(f"{case}: {name}, {more.max()} more than {getattr(before, name)[more.argmax()]}")
    return lines


def read() -> dict[str, Record]:
    """The recorded cases."""
    with np.load(FILE) as held:
        return {
            case: Record(*(held[f"{scenario} {name}"][place] for name in QUANTITIES))
            for scenario in SCENARIOS
            for place, case in enumerate(held[scenario].tolist())
        }


def write(records: dict[str, Record]) -> None:
    """Write them, those of a scenario as one array of each quantity."""
    arrays = {}
    for scenario in SCENARIOS:
        names = [case for case in records if case.endswith("/" + scenario)]
        arrays[scenario] = np.array(names)
        for name in QUANTITIES:
            arrays[f"{scenario} {name}"] = np.stack([getattr(records[case], name) for case in names])
    np.savez_compressed(FILE, **arrays)


def unsafe(case: str, record: Record) -> list[str]:
    """A line for what another machine's rounding might change."""
    times = MARGIN if bits_of(case) is None else 1
    return differences(case, record, run(case, noise=times * ROUNDINGS), times)


def main(argv: list[str] | None = None) -> int:
    """Compare, and write when told; 1 where something differs and is not written."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the file anew, after saying what changes")
    write_it = parser.parse_args(argv).write
    torch.set_num_threads(1)
    before, now = read() if FILE.exists() else {}, {case: recorded(case) for case in cases()}
    lines = [f"{case}: new" for case in now if case not in before]
    lines += [f"{case}: no longer there" for case in before if case not in now]
    for case in now:
        if case in before:
            lines += differences(case, before[case], now[case])
            fewer = [getattr(before[case], name) - getattr(now[case], name) for name in QUANTITIES[2:]]
            if np.max(fewer) > 0:
                lines.append(f"{case}: up to {np.max(fewer)} bytes fewer")
    print("\n".join(lines) or f"{len(now)} cases are as recorded")
    if not write_it:
        return int(bool(lines))
    if close := [line for case, record in now.items() for line in unsafe(case, record)]:
        print("nothing is written, as other machines may find otherwise: change tokens or weights", *close, sep="\n")
        return 1
    write(now)
    return 0


if __name__ == "__main__":
    sys.exit(main())
