"""The demo on a real model: SmolLM2-135M as it is, as a PoD model, and adapted; ten to twenty minutes on two cores.

    make demo-real
    python eval/demo_real.py --texts 12 --keys 150 --needles 50      # with narrower intervals; hours
    python eval/demo_real.py --also "window, trained=runs/window" "greedy, adapted=runs/greedy"     # other adapters

Four rows, all in float32:

    dense               the base
    PoD, converted      its layers share distant scores and heads stream, by the adapter's blocks, without any training
    PoD, adapted        the shipped adapter on top
    window              sinks and recent tokens alone: what distant tokens are worth
    others              adapters that `--also` names, such as controls with the same steps

Each reads held-out text of three kinds (the novel that the repository brings; modules and manuals of this machine
that no training saw, by the hash of their content; a kind that is not there is left out); all but windows also answer
pass keys in English at two lengths and RULER's single needles in its own words. Then dense and adapted fill a cache of
2K and 8K tokens, decode from it, and continue a passage of the novel.

The report goes to OUT/report.md, report.png and report.json. Differences to dense are paired, text by text and prompt
by prompt, with intervals of 95 % by resampling. Exit status 1: an interval does not bear out one of the report's
claims. A demo that was stopped goes on with the row where it was.
"""

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from filled_cache import new_cache
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer, Cache, PreTrainedModel, PreTrainedTokenizerBase

import pod
from pod.evaluation import report
from pod.evaluation.haystack import Haystack
from pod.evaluation.intervals import ratio
from pod.evaluation.models import cache_bytes, generate_greedily, windowed
from pod.evaluation.passkey import passkey_accuracy, passkey_prompts
from pod.evaluation.perplexity import perplexity
from pod.evaluation.ruler import make_requests, score
from pod.evaluation.runner import Predictions, predict, settle
from pod.evaluation.texts import stretches, token_ids
from pod.files import read_json, weights_sum
from pod.model.gguf import local
from pod.model.weights import weights_hash
from pod.terminal import exit_status

ROOT = Path(__file__).resolve().parent.parent
ADAPTER = ROOT / "checkpoints/smollm2-pod-35-streaming"
KINDS = ("novel", "code", "manual")
LENGTH = 2048  # tokens of a stretch of text
KEY_LENGTHS, DEPTHS = (1000, 2000), (0.1, 0.3, 0.5, 0.7, 0.9)
NEEDLES, NEEDLE_LENGTH = ("niah_single_1", "niah_single_2", "niah_single_3"), 1024
CACHED, DECODED, ROUNDS = (2048, 8192), 8, 3
COLUMNS = {
    "": ("name", "{}"),
    **{kind: (kind, "{}") for kind in KINDS},
    "with distant tokens": ("distant", "{}"),
    "pass keys": ("keys", "{}"),
    "RULER's single needles": ("needles", "{}"),
}


def held_out(data: Path, tokenizer: PreTrainedTokenizerBase, count: int) -> dict[str, list[Tensor]]:
    """Kind -> stretches [1, T] of its held-out text, which data/corpus.py writes where it is missing."""
    if not (data / "corpus.json").is_file():
        subprocess.run([sys.executable, ROOT / "data/corpus.py", "--out", str(data)], check=True)
    found = {}
    for kind in KINDS:
        ids = token_ids(tokenizer, (data / f"held-out/{kind}.txt").read_text(encoding="utf-8"))
        if len(ids) < LENGTH:
            print(f"no held-out {kind} on this machine: left out", file=sys.stderr)
            continue
        found[kind] = list(stretches(ids, LENGTH, count, 1))
    return found


def bits(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[Tensor], first: int, label: str
) -> dict[str, list[float]]:
    """Bits per byte of each stretch: of `all` its positions, and of the `distant` ones from `first` on."""
    found: dict[str, list[float]] = {"all": [], "distant": []}
    for ids in texts:
        nats = perplexity(model, [ids], label=label).nats
        for name, start in (("all", 1), ("distant", first)):
            size = len(tokenizer.decode(ids[0, start:]).encode())
            found[name].append(float(nats[start:].sum()) / math.log(2) / size)
    return found


def measure_row(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: dict, novel: str, first: int, name: str, options
) -> dict:
    """Everything about the quality of one row that the report shows, text by text and prompt by prompt."""
    found = {"bits": {kind: bits(model, tokenizer, some, first, f"{name}: {kind}") for kind, some in texts.items()}}
    if getattr(model.config, "share", None) == "window":
        return found
    per_depth = math.ceil(options.keys / len(DEPTHS) / len(KEY_LENGTHS))
    prompts = [
        prompt
        for length in KEY_LENGTHS
        for prompt in passkey_prompts(tokenizer, novel, length, DEPTHS, per_depth, "sentence", seed=options.seed)
    ]
    found["keys"] = passkey_accuracy(model, tokenizer, prompts, 1, label=f"{name}: pass keys")
    found["needles"] = []
    for task in NEEDLES:
        source = None if task == "niah_single_1" else Haystack(novel)
        requests = make_requests(tokenizer, task, NEEDLE_LENGTH, options.needles, seed=options.seed, source=source)
        rows = predict(model, tokenizer, requests, Predictions(options.out / f"predictions/{name}", task), label=name)
        found["needles"] += [score(task, [row]) / 100 for row in rows]
    return found


@torch.no_grad()
def decode_seconds(model: PreTrainedModel, cache: Cache, token: Tensor) -> float:
    """Seconds of one decode step, the mean of `DECODED`; the cache grows by them."""
    start = time.perf_counter()
    for _ in range(DECODED):
        model(token, past_key_values=cache)
    return (time.perf_counter() - start) / DECODED


@torch.no_grad()
def measure_caches(models: dict[str, PreTrainedModel], ids: Tensor) -> dict:
    """Bytes of the caches and seconds of a step at each of `CACHED` lengths, the models' steps in turns."""
    found = {}
    for length in CACHED:
        text = ids[:, torch.arange(length - ROUNDS * DECODED) % ids.shape[1]]  # decoding fills the rest
        caches = {name: new_cache(model, length) for name, model in models.items()}
        for name, model in models.items():
            for part in tqdm(text.split(1024, dim=1), desc=f"{name}: {length:,} tokens", unit="K tokens"):
                model(part, past_key_values=caches[name], logits_to_keep=1)
        rounds = [
            {name: decode_seconds(model, caches[name], text[:, :1]) for name, model in models.items()}
            for _ in range(ROUNDS)
        ]
        sizes = {name: cache_bytes(cache) for name, cache in caches.items()}
        expected = pod.PodCache(models["PoD, adapted"].config).expected_nbytes(length, itemsize=4)
        medians = {name: statistics.median(each[name] for each in rounds) for name in models}
        found[str(length)] = {"bytes": sizes, "expected_bytes": expected, "seconds": medians}
    return found


def compared(rows: dict[str, dict], name: str) -> dict[str, tuple[float, float, float]]:
    """What of a row is shown -> its ratio to dense, with an interval."""
    mine, dense = rows[name], rows["dense"]
    found = {kind: ratio(mine["bits"][kind]["all"], dense["bits"][kind]["all"]) for kind in mine["bits"]}
    found["distant"] = ratio(
        *(sum((row["bits"][kind]["distant"] for kind in row["bits"]), []) for row in (mine, dense))
    )
    return found | {key: ratio(mine[key], dense[key]) for key in ("keys", "needles") if key in mine}


def table(rows: dict[str, dict]) -> str:
    """The report's table: dense in bits per byte and shares that are right, the others relative to it."""
    lines = []
    for name, row in rows.items():
        cells: dict[str, str | None] = dict.fromkeys((*KINDS, "distant", "keys", "needles"))
        if name == "dense":
            distant = sum((some["distant"] for some in row["bits"].values()), [])
            means = {kind: some["all"] for kind, some in row["bits"].items()} | {"distant": distant}
            cells |= {key: f"{sum(some) / len(some):.3f}" for key, some in means.items()}
            cells |= {key: f"{sum(row[key]) / len(row[key]):.0%} of {len(row[key])}" for key in ("keys", "needles")}
        else:
            for key, (value, low, high) in compared(rows, name).items():
                form = "{:.2f} [{:.2f}, {:.2f}]" if key in ("keys", "needles") else "{:+.1%} [{:+.1%}, {:+.1%}]"
                less = 0 if key in ("keys", "needles") else 1
                cells[key] = form.format(value - less, low - less, high - less)
        lines.append({"name": name, **cells})
    return report.table_of(lines, COLUMNS)


def claims(rows: dict[str, dict], caches: dict) -> list[tuple[str, bool]]:
    """What the report says, and whether its own intervals bear it out."""
    found = []
    for other in (name for name in rows if name not in ("dense", "PoD, adapted")):
        for kind, some in rows["PoD, adapted"]["bits"].items():
            _, _, high = ratio(some["all"], rows[other]["bits"][kind]["all"])
            found.append((f"{kind}: fewer bits per byte with the adapter than of {other}", high < 1))
    exact = all(each["bytes"]["PoD, adapted"] == each["expected_bytes"] for each in caches.values())
    return [*found, ("the cache holds the bytes of the formula", exact)]


def draw(rows: dict[str, dict], caches: dict, path: Path) -> None:
    """Bits per byte and answers relative to dense with their intervals; bytes of the caches."""
    figure = report.figure(11, 3.6)
    text, answers, size = figure.subplots(1, 3, width_ratios=[1.6, 1, 1])
    for axes, keys, less, title in (
        (text, (*KINDS, "distant"), 1, "bits per byte above dense, %"),
        (answers, ("keys", "needles"), 0, "right answers, % of dense"),
    ):
        for index, name in enumerate(name for name in rows if name != "dense"):
            shown = {key: value for key, value in compared(rows, name).items() if key in keys}
            places = [keys.index(key) + 0.6 * (index - 1) / (len(rows) - 1) for key in shown]
            values = [100 * (value - less) for value, _, _ in shown.values()]
            spread = [[100 * abs(value[end] - value[0]) for value in shown.values()] for end in (1, 2)]
            axes.errorbar(places, values, spread, fmt="o", capsize=3, label=name)
        axes.set_xticks(range(len(keys)), keys, fontsize=8)
        axes.axhline(100 * (1 - less), color="gray", linewidth=0.8)
        axes.set_title(title, fontsize=9)
    text.legend(fontsize=8)
    for index, name in enumerate(("dense", "PoD, adapted")):
        values = [each["bytes"][name] / 2**20 for each in caches.values()]
        bars = size.bar([place + 0.4 * index for place in range(len(caches))], values, width=0.38, label=name)
        size.bar_label(bars, fmt="%.0f", fontsize=8)
    size.set_xticks([place + 0.2 for place in range(len(caches))], [f"{int(length):,}" for length in caches])
    size.set_title("cache, MiB, by tokens", fontsize=9)
    size.legend(fontsize=8)
    report.save_figure(figure, path, dpi=150)


def run(options: argparse.Namespace) -> bool:
    """The whole demo; whether every claim stands.

    Raises:
        FileNotFoundError, ValueError: a model or adapter that is not there, or does not fit.
    """
    began = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(local(options.base))
    adapted = pod.load(options.base, options.adapter, dtype="float32")
    config = adapted.config
    sizes = {"sink_size": config.sink_size, "recent_size": config.recent_size}
    dense = pod.load(options.base, dtype="float32")
    models: dict[str, Callable[[], PreTrainedModel]] = {
        "dense": lambda: dense,
        "PoD, converted": lambda: pod.convert(dense, config.blocks, **sizes, share=config.share).eval(),
        "PoD, adapted": lambda: adapted,
        "window": lambda: windowed(dense, config.sink_size, config.recent_size),
    }
    files = {name: f"{name}.json" for name in models}
    for name, folder in options.also:
        models[name] = partial(pod.load, options.base, folder, dtype="float32")
        files[name] = f"{name}-{weights_sum(folder)[:12]}.json"
    texts = held_out(options.data, tokenizer, options.texts)
    novel = (options.data / "held-out/novel.txt").read_text(encoding="utf-8")
    first = config.sink_size + config.recent_size + 1  # the first position that is foretold with a distant token
    settings = {name: getattr(options, name) for name in ("texts", "keys", "needles", "seed")}
    # Rows of other weights are no rows of these, whatever the folders are called.
    settings |= {"base": weights_hash(options.base), "adapter": weights_sum(options.adapter)}
    settings |= {"anchors": config.blocks.anchors.tolist(), **sizes, "share": config.share}
    settle(options.out, settings)
    rows = {}
    for name, make in models.items():
        kept = options.out / "rows" / files[name]
        if not kept.is_file():
            # Answers about needles are kept under that name, too.
            report.write_json(kept, measure_row(make(), tokenizer, texts, novel, first, kept.stem, options))
        rows[name] = read_json(kept)
    both = {"dense": dense, "PoD, adapted": adapted}
    ids = token_ids(tokenizer, novel)[None]
    caches = measure_caches(both, ids[:, : CACHED[-1]])
    passage = ids[:, 20_000:21_500]
    said = {name: tokenizer.decode(generate_greedily(model, passage, 60)[0]) for name, model in both.items()}
    held = claims(rows, caches)
    counts = ", ".join(f"{len(some)} of {kind}" for kind, some in texts.items())
    report.write_json(options.out / "report.json", {**settings, "rows": rows, "caches": caches, "continued": said})
    lines = [
        "# SmolLM2-135M as a PoD model",
        "",
        table(rows),
        "",
        "- Dense: bits per byte, and the share of answers that are right; the others: relative to it, with 95 % "
        f"intervals. Stretches of {LENGTH:,} tokens: {counts}. "
        f"Pass keys at {' and '.join(f'{n:,}' for n in KEY_LENGTHS)} tokens, "
        f"needles at {NEEDLE_LENGTH:,}.",
        f"- kv_saving {config.kv_saving:.1%} as length grows; {config.sink_size} sinks + {config.recent_size} recent "
        "tokens.",
        *(
            f"- Cache at {int(length):,} tokens: {each['bytes']['PoD, adapted']:,} bytes, "
            f"{each['bytes']['PoD, adapted'] / each['bytes']['dense']:.1%} of dense; a decode step takes "
            f"{each['seconds']['PoD, adapted'] / each['seconds']['dense']:.2f} of dense's time on this CPU."
            for length, each in caches.items()
        ),
        *(f"- {'holds' if stands else 'DOES NOT HOLD'}: {claim}." for claim, stands in held),
        "",
        f"*Persuasion*, continued after “…{tokenizer.decode(passage[0, -40:]).strip()}”",
        "",
        *(f"> {name}: {' '.join(text.split())}\n" for name, text in said.items()),
        f"{(time.perf_counter() - began) / 60:.1f} minutes.",
        "",
        "![The same as a picture](report.png)",
    ]
    report.write(options.out / "report.md", "\n".join(lines) + "\n")
    draw(rows, caches, options.out / "report.png")
    print("\n".join(lines))
    print(f"written: {options.out}/report.md, report.png, report.json")
    return all(stands for _, stands in held)


def named(text: str) -> tuple[str, Path]:
    """`NAME=FOLDER` of an adapter."""
    name, _, folder = text.rpartition("=")
    if not name or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER")
    return name, Path(folder)


@exit_status
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="checkpoints/smollm2-135m", help="the dense model (make smollm2)")
    parser.add_argument("--adapter", type=Path, default=ADAPTER, help=f"({ADAPTER.relative_to(ROOT)})")
    parser.add_argument("--also", type=named, nargs="+", default=[], metavar="NAME=FOLDER", help="further adapters")
    parser.add_argument("--data", type=Path, default=Path("data/english"), help="what data/corpus.py writes")
    parser.add_argument("--texts", type=int, default=3, help="stretches of each kind of text (3)")
    parser.add_argument("--keys", type=int, default=10, help="pass keys, of both lengths together (10)")
    parser.add_argument("--needles", type=int, default=3, help="of each of RULER's three tasks (3)")
    parser.add_argument("--seed", type=int, default=0, help="of keys and needles")
    parser.add_argument("--out", type=Path, default=Path("runs/demo-real"), help="folder of what is written")
    return 0 if run(parser.parse_args(arguments)) else 1


if __name__ == "__main__":
    sys.exit(main())
