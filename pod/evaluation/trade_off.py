"""Quality against kept bytes: every eviction method at several budgets, on a dense and a PoD model, one curve each.

    python eval/trade_off.py --ckpt checkpoints/tiny-base checkpoints/tiny/export
    python eval/trade_off.py --ckpt exports/dense exports/pod --methods snapkv:window=16+cascade --budgets 128,256,512
    python eval/trade_off.py --ckpt exports/dense exports/pod --methods kvzip+snapkv:query_aware=false --texts 0

Quality is pass-key accuracy (the question is in the observation window) and bits per byte of held-out text that goes
through the cache --stream tokens at a time. Bytes are measured on the cache's storages at the end of a prompt with its
answer, and at the end of a text. A budget counts every kept token, sinks too, so that all methods keep equally many.
Quest keeps all and reads a budget's worth, at decoded tokens only: it shows in the pass keys, its bits per byte are
those without eviction. --texts 0 leaves the texts out, and is what methods need that read the question after the
eviction. The first of --ckpt is the one to compare with: shares of its pass keys are paired by prompt, with 95 %
intervals. Writes trade_off.json after every point, then trade_off.md and trade_off.png; the same command goes on where
a killed run stopped, and one with more methods, budgets or checkpoints keeps the points that are there.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pod import eviction
from pod.cache import PodCache
from pod.evaluation import command, models, report, runner
from pod.evaluation.intervals import of_first
from pod.evaluation.models import generate_greedily, label_of
from pod.evaluation.passkey import PHRASES, passkey_accuracy, passkey_prompts
from pod.evaluation.perplexity import check_streamed, perplexity
from pod.evaluation.texts import given_texts, stretches, text_hash, token_ids
from pod.files import read_json
from pod.model.weights import weights_hash
from pod.terminal import exit_status

# As many sinks in the three that keep them, so that only what they keep of the rest differs.
METHODS = "snapkv+pyramidkv+adakv+zigzagkv+chunkkv+criticalkv+sagekv+h2o+tova+cake+expectedattention+knorm+keydiff"
METHODS += "+lagkv+quest+shadowkv+clusterkv:recent=16+streamingllm:sinks=16+lminfinite:sinks=16+cascade:sinks=16"

Method = eviction.Method


def with_budget(text: str, budget: int) -> Method:
    """The method of `snapkv:window=16`, keeping `budget` tokens in all.

    Raises:
        ValueError: as `pod.eviction.parse`; the text already has a budget.
    """
    return eviction.parse(f"{text}{',' if ':' in text else ':'}budget={budget}")


def planned(
    loaded: dict[str, PreTrainedModel], methods: list[str], budgets: list[int], streamed: bool
) -> list[tuple[str, str, int | None, models.Variant]]:
    """(checkpoint, method, budget, variant) of every point; without eviction first, method "none" and budget None.

    Raises:
        ValueError: a method or budget that cannot be, in any of the models, or with texts that are `streamed`; the same
            point twice.
    """
    points = []
    keys = [(text, budget) for text in methods for budget in budgets]
    wanted = [with_budget(*key) for key in keys]
    if streamed:
        try:
            check_streamed(wanted)
        except ValueError as error:
            raise ValueError(f"{error}; or ask for pass keys alone, --texts 0") from error
    for ckpt, model in loaded.items():
        variants = models.variants(models.as_pod(model), wanted)
        points += [(ckpt, *key, one) for key, one in zip([(models.NO_EVICTION, None), *keys], variants, strict=True)]
    return points


class Kept:
    """Makes caches and remembers how many bytes per row each of them held at the end of its use.

    Args:
        method: the eviction method; None keeps every token.
    """

    def __init__(self, method: Method | None) -> None:
        self.method = method
        self.cache: PodCache | None = None
        self.sizes: list[float] = []

    def new_cache(self, model: PreTrainedModel, length: int) -> PodCache:
        """An empty cache for `length` tokens: it need not grow, so nothing in it is unused growth."""
        self.measure()
        self.cache = PodCache(model.config, max_length=length, eviction=self.method)
        return self.cache

    def measure(self) -> float:
        """Mean bytes per row of the caches up to now, the last of which is not used any more."""
        if self.cache is not None:
            self.sizes.append(models.cache_bytes(self.cache) / self.cache.batch_size)
            self.cache = None
        return sum(self.sizes) / max(1, len(self.sizes))


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    method: Method | None,
    options: argparse.Namespace,
    label: str,
) -> dict[str, float | list[float]]:
    """One point.

    Returns:
        passkey (0..1), its passkey_samples (of each prompt), bits_per_byte, nats_per_token, and per row of a batch:
        passkey_bytes, text_bytes and what a dense model keeps of as many tokens without eviction, passkey_dense_bytes
        and text_dense_bytes. What is of texts is left out where there are none.
    """
    depths = [index / (options.depths - 1) for index in range(options.depths)]
    length = options.length
    prompts = passkey_prompts(tokenizer, text, length, depths, options.samples, options.phrase, seed=options.seed)
    ids = token_ids(tokenizer, text)
    token_bytes = models.dense_token_bytes(model)
    new_tokens = []

    def generate(model: PreTrainedModel, input_ids: torch.Tensor, count: int, question: int) -> torch.Tensor:
        new_tokens.append(count)
        return generate_greedily(model, input_ids, count, question, asked.new_cache(model, length + count), tokenizer)

    asked, streamed = Kept(method), Kept(method)
    scores = passkey_accuracy(model, tokenizer, prompts, options.batch_size, generate, f"{label}: pass keys")
    found = {
        "passkey": sum(scores) / len(scores),
        "passkey_samples": scores,
        "passkey_bytes": asked.measure(),
        "passkey_dense_bytes": token_bytes * (length + max(new_tokens)),
    }
    if not options.texts:
        return found
    losses = perplexity(
        model,
        stretches(ids, length, options.texts, options.batch_size),
        len(text.encode()) / len(ids),
        options.stream,
        lambda: streamed.new_cache(model, length - 1),
        label=f"{label}: text",
    )
    return found | {
        "bits_per_byte": losses.bits_per_byte,
        "nats_per_token": losses.loss,
        "text_bytes": streamed.measure(),
        "text_dense_bytes": token_bytes * (length - 1),
    }


def read_points(path: Path) -> dict[tuple[str, str], dict]:
    """(checkpoint, eviction method) -> what an earlier run measured; nothing where there was none.

    Raises:
        ValueError: the file is not what `run` writes.
    """
    if not path.exists():
        return {}
    content = read_json(path)
    points = content.get("points") if isinstance(content, dict) else None
    if not isinstance(points, list) or not all(isinstance(p, dict) and {"ckpt", "eviction"} <= set(p) for p in points):
        raise ValueError(f"{path}: not the points of an earlier run: choose another --out, or remove the file")
    if not all("passkey_samples" in point for point in points):
        raise ValueError(
            f"{path}: points of an earlier version, without each prompt's score, which intervals need: choose another "
            "--out, or remove the file"
        )
    return {(point["ckpt"], point["eviction"]): point for point in points}


def run(options: argparse.Namespace) -> list[dict]:
    """Measure what is not there yet, and write all; returns the points asked for.

    Raises:
        ValueError: an option that cannot be, or results of other settings, weights or methods in --out.
    """
    command.check_least(options, depths=2, samples=1, texts=0, stream=1, batch_size=1)
    text = "".join(given_texts(options.text))
    names = ("length", "depths", "samples", "texts", "stream", "phrase", "seed")
    settings = {name: getattr(options, name) for name in names} | {"text": text_hash(text)}
    runner.check_settings(options.out, settings)
    loaded = {ckpt: models.load(ckpt) for ckpt in options.ckpt}
    hashes = {ckpt: weights_hash(ckpt) for ckpt in loaded}
    opened = {ckpt: one for ckpt, (one, _) in loaded.items()}
    wanted = planned(opened, options.methods, options.budgets, bool(options.texts))
    path = options.out / "trade_off.json"
    done = read_points(path)
    made_with = {}
    for ckpt, _, _, variant in wanted:
        key = (ckpt, variant.name)
        made_with[key] = {"weights": hashes[ckpt], "parameters": variant.parameters}
        if key in done:
            runner.refuse_others(f"{path} holds {', '.join(key)}", done[key], made_with[key], "file")
    rows = []
    with tqdm(wanted, desc="points", unit=" points") as bar:
        for ckpt, method, budget, variant in bar:
            key = (ckpt, variant.name)
            if key not in done:
                label = label_of(ckpt, variant.name)
                found = measure(variant.model, loaded[ckpt][1], text, variant.method, options, label)
                done[key] = {"ckpt": ckpt, "eviction": variant.name, **made_with[key], **found}
                runner.settle(options.out, settings)
                report.write_json(path, {"settings": settings, "points": list(done.values())})
            rows.append({**done[key], "method": method, "budget": budget})
    return rows


def table(rows: list[dict]) -> str:
    """A row for each point; pass-key accuracy also as a share of the first checkpoint's without eviction."""
    labels = [label_of(row["ckpt"], row["eviction"]) for row in rows]
    shares = of_first({label: row["passkey_samples"] for label, row in zip(labels, rows, strict=True)})
    records = [
        row
        | {
            "label": label,
            "kept": "all" if row["budget"] is None else row["budget"],
            "of_dense": row["passkey_bytes"] / row["passkey_dense_bytes"],
            "of_first": shares.get(label),
            "streamed": row["text_bytes"] / row["text_dense_bytes"] if "text_bytes" in row else None,
        }
        for label, row in zip(labels, rows, strict=True)
    ]
    columns = {
        "": ("label", "{}"),
        "tokens kept": ("kept", "{}"),
        "bytes": ("passkey_bytes", "{:,.0f}"),
        "of dense": ("of_dense", "{:.1%}"),
        "pass-key digits": ("passkey", "{:.1%}"),
        f"of {Path(rows[0]['ckpt']).name}": ("of_first", "{}"),
    }
    if "text_bytes" in rows[0]:
        columns |= {"streamed: of dense": ("streamed", "{:.1%}"), "bits/byte": ("bits_per_byte", "{:.4f}")}
    return report.table_of(records, columns)


def draw(rows: list[dict], path: Path) -> None:
    """A panel for pass keys and one for bits per byte, where there are texts, against the share of dense bytes kept;
    one curve per model and method."""
    ckpts = list(dict.fromkeys(row["ckpt"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    panels: list[tuple[str, str, Callable[[dict], float]]] = [
        ("passkey", "pass-key digits right, %", lambda row: 100 * row["passkey"]),
        ("text", "bits per byte", lambda row: row["bits_per_byte"]),
    ]
    panels = [panel for panel in panels if f"{panel[0]}_bytes" in rows[0]]
    figure = report.figure(1 + 6 * len(panels), 5)
    for index, (kind, title, value) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        for ckpt in ckpts:
            for number, method in enumerate(methods):
                mine = [row for row in rows if (row["ckpt"], row["method"]) == (ckpt, method)]
                curve = sorted((100 * row[f"{kind}_bytes"] / row[f"{kind}_dense_bytes"], value(row)) for row in mine)
                style = ("-", "--", ":", "-.")[ckpts.index(ckpt) % 4]
                axes.plot(
                    *zip(*curve, strict=True), style, marker="o", color=f"C{number}", label=label_of(ckpt, method)
                )
        axes.set(xlabel="bytes kept, % of a dense cache", ylabel=title)
        axes.grid(alpha=0.3)
    axes.legend(fontsize=7, bbox_to_anchor=(1.02, 1), loc="upper left")
    report.save_figure(figure, path, dpi=150, bbox_inches="tight")


@exit_status
def main(arguments: list[str] | None = None) -> None:
    parser = command.parser_of("trade_off", __doc__)
    command.add_ckpts(parser, batch_size=8)
    command.add_eviction(
        parser, "--methods", f"eviction methods without budgets ({METHODS})", eviction.split, eviction.split(METHODS)
    )
    command.add_numbers(parser, "--budgets", [64, 128, 256], "tokens kept (64,128,256)")
    parser.add_argument("--length", type=int, default=1016, help="tokens of a prompt, and of a text (1016)")
    parser.add_argument("--depths", type=int, default=9, help="depths of the keys, from beginning to end (9)")
    parser.add_argument("--samples", type=int, default=8, help="prompts for each depth (8)")
    parser.add_argument("--texts", type=int, default=32, help="texts for the bits per byte (32); 0: none")
    parser.add_argument("--stream", type=int, default=64, metavar="N", help="tokens of a text fed at a time (64)")
    parser.add_argument("--phrase", choices=list(PHRASES), default="key", help="how keys are stated and asked for")
    parser.add_argument("--text", type=Path, nargs="+", help="UTF-8 files for both (held-out Python modules)")
    parser.add_argument("--seed", type=int, default=0, help="of keys and text (0)")
    options = command.parse(parser, "trade_off", arguments)
    rows = run(options)
    found = table(rows)
    report.write(options.out / "trade_off.md", found + "\n")
    draw(rows, options.out / "trade_off.png")
    print(found)
    print(f"written: {options.out}/trade_off.json, trade_off.md, trade_off.png")
