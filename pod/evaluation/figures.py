"""The papers' figures of how a model attends, and of where an answer lies, on any model: four pictures each.

    python eval/figures.py --ckpt checkpoints/smollm2-135m --text book.txt --length 512 --proximal 32,64,128,256
    python eval/figures.py --ckpt exports/smollm2-pod --text book.txt --only tau --length 1024
    python eval/figures.py --ckpt exports/llama3-32k --text book.txt --only places --length 4096 \\
        --eviction streamingllm:budget=1024,sinks=16+h2o:budget=1024

- `attention.png`: mean weights of all heads in some layers, by query and key (PoD's Figure 1-(a), (b)), of one text.
- `dynamics.png`: CAKE's dispersion H and shift V of the last --window queries, by layer and text (its Figure 3).
- `proximal.png`: the share of a text's last 100 positions whose likeliest next token is the same where every token sees
  n proximal ones only, sinks and window, in every layer and at its true positions (PoD's Figure 1-(c)). How the paper
  splits n is unstated: 16 sinks here, or n / 4 where that is fewer. Nothing is trained.
- `places.png`: pass keys in four places (PoD's Figure 5): (a) inside the window, (b) among the first 16 tokens with
  irrelevant text after them, (c) in the middle, with related text just before the question, (d) in the middle alone.
  The paper's prompts are in its picture only: these are InfiniteBench's words. Rows are the model and each method of
  --eviction; the same command goes on where a killed run stopped.
- `tau.png`, where blocks share scores, if --only names it: query heads whose gate is at least tau leave distant tokens
  out, in layers that are no anchors and at decode (part of PoD's Figure 4). The last quarter of each text is decoded
  token by token, with the next tokens given: nats a token, and the share of distant values that is not read.

In PoD models attention.png and dynamics.png are of what each layer would attend to by itself, nothing shared.
"""

import argparse
import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pod.cache import PodCache
from pod.evaluation import command, metrics, models, report, runner
from pod.evaluation.benchmark import folders_of
from pod.evaluation.haystack import NOISE, fit
from pod.evaluation.texts import given_texts, stretches, token_ids
from pod.eviction import CAKE, Observation
from pod.model.probe import Meter, Seen, watch
from pod.model.weights import weights_hash
from pod.terminal import exit_status

PICTURES = ("attention", "dynamics", "proximal", "places")  # of any model
TAU_COLUMNS = {
    "tau": ("tau", "{:g}"),
    "query heads that skip": ("skipped_share", "{:.1%}"),
    "distant values not read": ("unread_share", "{:.1%}"),
}
LAST = 100  # positions whose likeliest token is compared
PLACES = {
    "a": "inside the window",
    "b": "first 16 tokens",
    "c": "middle, related text last",
    "d": "middle",
}
MAX_NEW_TOKENS = 12
_RELATED = "Somewhere above a pass key was stated, a number of five digits that you were asked to remember. "


class Attention(Meter):
    """A meter of `pod.model.probe.watch`: attention of some layers, and CAKE's H and V of all.

    Args:
        layers: whose weights are kept.
        window: last queries that H and V are of, at least 2.

    Attributes:
        maps: layer -> [T, T] float32 on the CPU, the mean over its heads, of the first sample.
        dynamics: of each sample (H, V) by layer.
    """

    def __init__(self, layers: Sequence[int], window: int) -> None:
        self.layers, self.cake = layers, CAKE(2 * window, window=window)
        self.maps: dict[int, Tensor] = {}
        self.dynamics: list[list[tuple[float, float]]] = []

    def begin(self, length: int, layers: int) -> bool:
        if length <= self.cake.window:
            raise ValueError(
                f"a text of {length} tokens has none before the window of {self.cake.window}: raise length"
            )
        self.length = length
        self.dynamics.append([])
        return True

    def enter(self, layer: int, seen: Seen) -> None:
        wants_map = len(self.dynamics) == 1 and layer in self.layers
        first = 0 if wants_map else self.length - self.cake.window
        at = torch.arange(self.length, device=seen.hidden_states.device)
        logits = seen.logits(slice(first, None), slice(None))
        logits = logits.view(len(logits), -1, self.length - first, self.length)  # [H_kv, G, q, T]
        weights = logits.masked_fill_(at > at[first:, None], -math.inf).softmax(-1)[None]
        if wants_map:
            self.maps[layer] = weights.mean(dim=(0, 1, 2)).cpu()
        positions = at.expand(1, weights.shape[1], -1)
        last = weights[:, :, :, -self.cake.window :]
        found = self.cake.dispersion_and_shift(Observation(last, positions, at[-1:], in_order=True, decoding=False))
        self.dynamics[-1].append(tuple(float(one) for one in found))


def sinks_of(proximal: int) -> int:
    """Sinks among `proximal` tokens."""
    return min(16, proximal // 4)


@torch.inference_mode()
def agreement(
    model: PreTrainedModel, samples: Sequence[Tensor], proximal: Sequence[int], last: int = LAST
) -> list[float]:
    """The share of the last positions whose likeliest next token is that of full attention, for each number of tokens.

    Args:
        model: dense, or PoD, whose own sharing then counts as full attention.
        samples: [1, T] each.
        proximal: tokens that a query sees, itself included: sinks, and the last ones.
        last: positions of each sample that are compared.

    Raises:
        ValueError: a size below 2; a family that is not supported.
    """
    if min(proximal) < 2:
        raise ValueError(f"--proximal must be at least 2 tokens, got {min(proximal)}")

    def likeliest(one: PreTrainedModel, label: str) -> Tensor:
        options = {"use_cache": False, "logits_to_keep": last}
        read = tqdm(samples, label, unit=" texts")
        return torch.cat([one(ids.to(one.device), **options).logits.argmax(dim=-1) for ids in read])

    wanted = likeliest(model, "all tokens")
    shares = []
    for size in proximal:
        sinks = sinks_of(size)
        near = models.windowed(model, sinks, size - sinks)
        shares.append((likeliest(near, f"{size} proximal tokens") == wanted).double().mean().item())
    return shares


@torch.no_grad()
def decoded_loss(model: PreTrainedModel, ids: Tensor, prompt: int, cache: PodCache) -> float:
    """Nats of the tokens after the first `prompt` + 1, decoded one by one; their sum over rows and tokens.

    Args:
        model: a PoD model in evaluation mode.
        ids: [B, T].
        prompt: tokens of the prefill, 1 to T - 2.
        cache: an empty one; its `stats` afterwards count these tokens.
    """
    given, total = ids[:, :prompt], 0.0
    for at in range(prompt, ids.shape[1]):
        logits = model(given, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        given = ids[:, at : at + 1]
        if at > prompt:  # the prefill's own prediction skips nothing
            total += float(torch.nn.functional.cross_entropy(logits, given[:, 0], reduction="sum"))
    return total


def skipping(model: PreTrainedModel, batches: Sequence[Tensor], tau: float) -> dict[str, float]:
    """What a threshold of early skip costs and saves while the last quarter of each text is decoded, all but its first.

    Args:
        model: a PoD model in evaluation mode.
        batches: token ids [B, T] each, T at least 5.
        tau: between 0, which skips all that is distant, and 1, which skips nothing.

    Returns:
        nats a token (`nats`), how many there were (`tokens`), the counts of `SkipStats`, and as shares of them query
        heads that skip (`skipped_share`) and distant values that are not read (`unread_share`).
    """
    nats, tokens, counts = 0.0, 0, Counter()
    for ids in tqdm(batches, desc=f"tau {tau:g}: held-out text", unit=" batches"):
        prompt = ids.shape[1] * 3 // 4
        cache = PodCache(model.config, tau=tau, max_length=ids.shape[1])
        nats += decoded_loss(model, ids.to(model.device), prompt, cache)
        tokens += ids[:, prompt + 1 :].numel()
        counts.update(dataclasses.asdict(cache.stats))
    skipped = counts["skipped"] / max(1, counts["decisions"])
    unread = counts["unread_values"] / max(1, counts["distant_values"])
    return {"nats": nats / tokens, "tokens": tokens, **counts, "skipped_share": skipped, "unread_share": unread}


def place_prompts(tokenizer: PreTrainedTokenizerBase, length: int, count: int) -> dict[str, list[runner.Request]]:
    """Prompts of at most `length` tokens, answer included, for each of the four places.

    Raises:
        ValueError: the length does not hold a prompt without irrelevant text.
    """
    asks = "\nWhat is the pass key? The pass key is"
    line = " ".join(NOISE) + "\n"

    def text(place: str, key: str, lines: int) -> str:
        hidden = f"The pass key is {key}. Remember it.\n"
        before = {"a": lines, "b": 0}.get(place, lines // 2)
        return line * before + hidden + line * (lines - before) + (_RELATED if place == "c" else "") + asks

    def request(place: str, index: int, lines: int) -> runner.Request:
        key = str(Random(f"{length} {index}").randrange(10000, 100000))
        prompt = text(place, key, lines)
        at = runner.question_at(prompt, asks.strip())
        return runner.Request(str(index), prompt, MAX_NEW_TOKENS, question_at=at, record={"label": [key]})

    def tokens(lines: int) -> tuple[int, int]:
        return max(len(runner.tokenise(tokenizer, request("c", i, lines).text)) for i in range(count)), lines

    used, lines = fit(tokens, length - MAX_NEW_TOKENS)
    if used > length - MAX_NEW_TOKENS:
        raise ValueError(f"--length {length}: places needs at least {used + MAX_NEW_TOKENS} tokens")
    return {place: [request(place, index, lines) for index in range(count)] for place in PLACES}


def places(
    variants: Sequence[models.Variant],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    count: int,
    out: Path,
    ckpt: str,
) -> dict[str, dict[str, float]] | None:
    """Method -> place -> the share of the keys that are found, 0..100; None where other processes are not done yet."""
    settings = {"ckpt": ckpt, "weights": weights_hash(ckpt), "places": count, "length": length}
    found: dict[str, dict[str, float]] = {variant.name: {} for variant in variants}
    missing = False
    for place, requests in place_prompts(tokenizer, length, count).items():
        for variant, rows in runner.predict_each(variants, tokenizer, requests, out, place, 1, settings).items():
            if rows is None:
                missing = True
                continue
            right = [metrics.infinitebench("passkey", row["pred"], row["label"]) for row in rows]
            found[variant.name][place] = 100 * sum(right) / max(1, len(right))
    return None if missing else found


def draw_maps(maps: dict[int, Tensor], path: Path) -> None:
    """One map beside the other, on a scale of logarithms."""
    figure = report.figure(3.4 * len(maps) + 0.8, 3.4)
    for number, (layer, weights) in enumerate(maps.items(), start=1):
        axes = figure.add_subplot(1, len(maps), number)
        image = axes.imshow(
            weights.clamp(min=1e-5).log10().numpy(), vmin=-5, vmax=0, cmap="viridis", interpolation="nearest"
        )
        axes.set(title=f"layer {layer}", xlabel="key", ylabel="query" if number == 1 else "")
    figure.colorbar(image, ax=figure.axes, label="log10 of the weight, mean over heads")
    report.save_figure(figure, path, dpi=130)


def draw_dynamics(dynamics: Sequence[Sequence[tuple[float, float]]], path: Path) -> None:
    """H above V: by layer and text, and how they run over the layers, the mean over texts."""
    figure = report.figure(9, 6)
    for row, name in enumerate(("dispersion H", "shift V")):
        values = torch.tensor([[one[row] for one in sample] for sample in dynamics]).T.numpy()  # [L, samples]
        axes = figure.add_subplot(2, 2, 2 * row + 1)
        image = axes.imshow(values, cmap="coolwarm", aspect="auto", interpolation="nearest")
        axes.set(title=name, xlabel="text", ylabel="layer")
        figure.colorbar(image, ax=axes)
        line = figure.add_subplot(2, 2, 2 * row + 2)
        line.plot(values.mean(axis=1))
        line.set(xlabel="layer", ylabel=f"{name}, mean over texts")
    report.save_figure(figure, path, dpi=130)


def draw_proximal(sizes: Sequence[int], shares: Sequence[float], path: Path) -> None:
    """Shares against tokens."""
    figure = report.figure(5, 3.6)
    axes = figure.add_subplot()
    axes.plot(sizes, [100 * share for share in shares], marker="o")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="proximal tokens that are seen", ylabel="same likeliest token, %", ylim=(0, 102))
    report.save_figure(figure, path, dpi=130)


def draw_tau(found: Sequence[dict], path: Path) -> None:
    """What is not read (left) and the loss (right) against the threshold."""
    figure = report.figure(5, 3.6)
    axes = figure.add_subplot()
    taus = [row["tau"] for row in found]
    lines = axes.plot(taus, [100 * row["unread_share"] for row in found], "^:", label="distant values not read")
    axes.set(xlabel="tau: query heads with at least this gate skip distant tokens", ylabel="%", ylim=(0, 102))
    other = axes.twinx()
    lines += other.plot(taus, [row["nats"] for row in found], "s--", color="C1", label="nats a token")
    other.set_ylabel("nats a token, decoded")
    figure.legend(handles=lines, fontsize=8, loc="outside upper center", ncols=2)
    report.save_figure(figure, path, dpi=130)


def run(options: argparse.Namespace) -> None:
    """Measure, write figures.json and draw what --only names.

    Raises:
        ValueError: options that mean nothing, two models of one name, layers that the model has not, a text that is too
            short.
    """
    command.check_least(options, texts=1, samples=1, window=2, length=5 if "tau" in options.only else 2)
    if "tau" in options.only and not all(0 <= tau <= 1 for tau in options.taus):
        raise ValueError(f"--taus {options.taus}: each between 0 (skip all that is distant) and 1 (skip nothing)")
    texts = given_texts(options.text) if set(options.only) - {"places"} else []
    for ckpt, out in folders_of(options.ckpt, options.out).items():
        model, tokenizer = models.load(ckpt)
        shares = getattr(model.config, "share", None) == "scores" and not model.config.blocks.is_dense
        if "tau" in options.only and not shares:
            raise ValueError(f"--only tau: {ckpt} shares no scores, so there are none to skip: give a PoD model")
        count = model.config.num_hidden_layers
        layers = sorted({0, count // 2, count - 1}) if options.layers is None else options.layers
        if wrong := [layer for layer in layers if not 0 <= layer < count]:
            raise ValueError(f"--layers {wrong[0]}: {Path(ckpt).name} has layers 0 to {count - 1}")
        found, written = {"ckpt": ckpt, "weights": weights_hash(ckpt), "length": options.length}, []
        ids = token_ids(tokenizer, "".join(texts))
        samples = list(stretches(ids, options.length, options.texts, 1)) if texts else []
        if {"attention", "dynamics"} & set(options.only):
            meter = Attention(layers if "attention" in options.only else [], options.window)
            watch(model, samples if "dynamics" in options.only else samples[:1], [meter], "attention", progress=True)
            if "attention" in options.only:
                draw_maps(meter.maps, out / "attention.png")
                near = {layer: _near(weights, 4, options.window) for layer, weights in meter.maps.items()}
                found["attention on 4 sinks, on the last window"] = near
            if "dynamics" in options.only:
                draw_dynamics(meter.dynamics, out / "dynamics.png")
                found["dispersion and shift"] = meter.dynamics
        if "proximal" in options.only:
            shares = agreement(model, samples, options.proximal, min(LAST, options.length))
            found["proximal"] = dict(zip(map(str, options.proximal), shares, strict=True))
            draw_proximal(options.proximal, shares, out / "proximal.png")
            rows = [[str(size), f"{share:.1%}"] for size, share in zip(options.proximal, shares, strict=True)]
            written.append(report.markdown_table(["proximal tokens", "same likeliest token"], rows))
        if "tau" in options.only:
            decoded = [{"tau": tau, **skipping(model, samples, tau)} for tau in sorted(options.taus)]
            found["tau"] = decoded
            draw_tau(decoded, out / "tau.png")
            written.append(report.table_of(decoded, TAU_COLUMNS | {"nats a token, decoded": ("nats", "{:.4f}")}))
        if "places" in options.only:
            variants = models.variants(model, options.eviction)
            shares = places(variants, tokenizer, options.length, options.samples, out / "places", ckpt)
            if shares is None:
                print(f"process {runner.process()[0]} is done; the last one to finish writes the rest", file=sys.stderr)
                continue
            found["places"] = shares
            cells = [[row[place] for place in PLACES] for row in shares.values()]
            names = [f"({place}) {said}" for place, said in PLACES.items()]
            labels = {"title": "pass keys found, %", "xlabel": "where the answer lies", "ylabel": ""}
            report.save_heat_map(out / "places.png", cells, list(shares), names, **labels)
            rows = [[name, *(f"{one:.1f}" for one in row)] for name, row in zip(shares, cells, strict=True)]
            written.append(report.markdown_table(["pass keys found, %", *names], rows))
        report.write_json(out / "figures.json", found)
        print("\n\n".join([Path(ckpt).resolve().name, *written]))
        print("written: " + ", ".join([f"{out}/figures.json", *(f"{one}.png" for one in options.only)]))


def _near(weights: Tensor, sinks: int, window: int) -> tuple[float, float]:
    """Of the last `window` queries' weights [T, T]: the mean share on the first tokens, and on their own last ones."""
    length = len(weights)
    at = torch.arange(length)
    recent = (at[-window:, None] - at < window) & (at >= sinks)
    rows = weights[-window:]
    return float(rows[:, :sinks].sum(-1).mean()), float((rows * recent).sum(-1).mean())


@exit_status
def main(arguments: list[str] | None = None) -> None:
    parser = command.parser_of("figures", __doc__)
    command.add_ckpts(parser)
    parser.add_argument("--text", nargs="+", type=Path, help="UTF-8 files (the standard library's held-out modules)")
    parser.add_argument("--only", nargs="+", choices=(*PICTURES, "tau"), default=list(PICTURES), help="(all but tau)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a text, and of a prompt of places (512)")
    parser.add_argument("--texts", type=int, default=8, help="stretches of the text, evenly spread (8)")
    parser.add_argument("--samples", type=int, default=5, help="prompts of each place (5)")
    parser.add_argument("--window", type=int, default=32, help="last queries that H and V are of (32)")
    command.add_numbers(parser, "--layers", None, "whose attention is drawn (the first, the middle, the last)")
    command.add_numbers(parser, "--proximal", [32, 64, 128, 256], "tokens that are seen (32,64,128,256)")
    command.add_numbers(parser, "--taus", [0, 0.5, 0.7, 0.9, 1], "thresholds of early skip (0,0.5,0.7,0.9,1)", float)
    command.add_eviction(parser, what="also places with a cache that keeps some tokens only")
    run(command.parse(parser, "figures", arguments))
