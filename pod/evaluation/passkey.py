"""Pass-key retrieval: five digits hidden in a long text, asked for at its end; accuracy by length and depth.

    python eval/passkey.py --ckpt exports/tiny --lengths 256,512,1024
    python eval/passkey.py --ckpt exports/dense exports/tiny --depths 5 --samples 16
    python eval/passkey.py --ckpt exports/llama3-32k --phrase sentence --text book.txt --lengths 4096,16384,32768
    python eval/passkey.py --ckpt exports/tiny --lengths 512,1016 --eviction snapkv:budget=256+h2o:budget=256
    python eval/passkey.py --ckpt exports/llama31-128k --protocol cascade --batch-size 1 \\
        --eviction cascade:budget=65600,num_cascades=8+streamingllm:budget=65600,sinks=64

Each prompt is generated from with the model's own cache, and with a cache of each eviction method, where the question
is in the observation window; with query_aware=false the question is read after the eviction. What is counted is digits
in their place, of which a random guess gets 10 %.

`--protocol cascade` is that of the cascading KV cache's paper (arXiv 2406.17808, section 4.3): random English words, a
key at a random point of each of five ranges of depth, 20 keys for each range and length, 32K to 1M tokens doubling, the
sentence as the phrase; each of these can be set to another value.

Writes passkey.json (by checkpoint and method) and passkey.png (a heat map of lengths and depths for each) and prints a
table.

The text is cut into lines; the key's line stands between two of them at the wanted depth, and the prompt ends with the
beginning of the line that repeats the key. The model then generates. Other keys may be spread over the text, so that
names matter too. Every prompt of one length has exactly that many tokens, so that a batch needs no padding.
"""

import argparse
import random
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pod.evaluation import command, models, report
from pod.evaluation.haystack import ADJECTIVES, NOUNS
from pod.evaluation.intervals import of_first
from pod.evaluation.models import by_row, generate_greedily, label_of, parameters_of
from pod.evaluation.texts import given_texts, start_ids
from pod.terminal import exit_status

DIGITS = 5
# (the line that states a key, how the prompt ends). `key` is what the demo's models are trained on.
PHRASES = {
    "key": ("#key {name}={value}\n", "#get {name}="),
    "sentence": (
        "The pass key of {name} is {value}. Remember it: {value} is the pass key of {name}.\n",
        "What is the pass key of {name}? The pass key of {name} is",
    ),
}

PROTOCOLS: dict[str, dict] = {
    "grid": {"lengths": [256, 512, 1024], "depths": 11, "samples": 8, "phrase": "key"},
    "cascade": {"lengths": [2**n for n in range(15, 21)], "depths": 5, "samples": 20, "phrase": "sentence"},
}


@dataclass(frozen=True)
class PassKey:
    """One prompt.

    Attributes:
        input_ids: the prompt's tokens.
        value: the five digits that are to be generated.
        depth: where the key was wanted, 0 at the beginning of the prompt and 1 at its end.
        distance: tokens from the end of the line that states the key to the end of the prompt.
        question: how many of the last tokens ask for the key.
    """

    input_ids: list[int]
    value: str
    depth: float
    distance: int
    question: int


def passkey_prompts(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    length: int,
    depths: Sequence[float | tuple[float, float]],
    samples: int,
    phrase: str = "key",
    distractors: int = 0,
    seed: int = 0,
    words: bool = False,
) -> list[PassKey]:
    """Prompts of exactly `length` tokens, `samples` for each depth, in the order of `depths`.

    Args:
        tokenizer: of the model that is asked.
        text: what the keys are hidden in; each prompt takes another stretch of its lines.
        length: tokens of a prompt.
        depths: where the keys are stated, each in [0, 1]; of a range (from, to), each prompt draws its own.
        samples: prompts for each depth.
        phrase: a name in `PHRASES`.
        distractors: other keys stated and never asked for, spread over the text.
        seed: of the keys, the stretches of text and the places of the distractors.
        words: fill with the text's words, drawn at random with equal chances, instead of with its lines in order.

    Raises:
        ValueError: an unknown phrase, a depth outside [0, 1], no text, or a length that the key lines alone exceed.
    """
    if phrase not in PHRASES:
        raise ValueError(f"phrase {phrase!r} is not known: {', '.join(PHRASES)}")
    ranges = [depth if isinstance(depth, tuple) else (depth, depth) for depth in depths]
    if not all(0 <= first <= last <= 1 for first, last in ranges):
        raise ValueError(f"depths {list(depths)}: each lies between 0 (the beginning) and 1 (the end)")
    stated, asked = PHRASES[phrase]
    if words:
        stated, asked = f"\n{stated}", f"\n{asked}"  # lines of their own there too
        lines = [f" {word}" for word in sorted({word for word in text.split() if word.isalpha()})]
    else:
        lines = [line if line.endswith("\n") else line + "\n" for line in text.splitlines(True) if line.strip()]

    @cache
    def tokens(piece: str) -> list[int]:
        return tokenizer(piece, add_special_tokens=False)["input_ids"]

    if not any(map(tokens, lines)):
        raise ValueError("the text to hide keys in is empty, or the tokenizer makes no token of it")

    start = start_ids(tokenizer)
    all_names = [a + b for a in string.ascii_lowercase for b in string.ascii_lowercase]
    prompts = []
    for number, (first, last) in enumerate(bounds for bounds in ranges for _ in range(samples)):
        generator = random.Random(f"passkey-{seed}-{length}-{number}")
        depth = first if first == last else generator.uniform(first, last)
        names = generator.sample(all_names, distractors + 1)
        values = [str(generator.randrange(10 ** (DIGITS - 1), 10**DIGITS)) for _ in names]
        keys = [tokens(stated.format(name=n, value=v)) for n, v in zip(names, values, strict=True)]
        question = tokens(asked.format(name=names[0]))
        room = length - len(start) - len(question) - sum(map(len, keys))
        if room < 0:
            raise ValueError(f"length {length}: the key lines and the question alone take {length - room} tokens")
        # Lines or words that fill the room; the first of them is cut so that they fill it exactly.
        filling: list[list[int]] = []
        at = generator.randrange(len(lines))
        while room > 0:
            line = tokens(lines[at])
            filling.append(line[-room:])
            room -= len(filling[-1])
            whole = len(filling[-1]) == len(line)
            at = generator.randrange(len(lines)) if words else (at + 1) % len(lines)
        if filling and not whole:
            filling.insert(0, filling.pop())
        places = [_place(filling, depth)]
        places += [generator.randrange(len(filling) + 1) for _ in range(distractors)]
        inserted = sorted(zip(places, range(len(places)), strict=True), reverse=True)
        pieces = list(filling)
        for place, index in inserted:
            pieces.insert(place, keys[index])
        (stated_at,) = (at for at, piece in enumerate(pieces) if piece is keys[0])
        behind = [*chain.from_iterable(pieces[stated_at + 1 :]), *question]
        ids = [*start, *chain.from_iterable(pieces[: stated_at + 1]), *behind]
        prompts.append(PassKey(ids, values[0], depth, len(behind), len(question)))
    return prompts


def _place(lines: list[list[int]], depth: float) -> int:
    """How many lines stand before the one whose beginning is nearest to the depth."""
    ends = [0, *accumulate(map(len, lines))]
    return min(range(len(ends)), key=lambda index: abs(ends[index] - depth * ends[-1]))


def passkey_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[PassKey],
    batch_size: int = 8,
    generate: Callable[[PreTrainedModel, Tensor, int, int], Tensor] = generate_greedily,
    label: str = "passkey",
) -> list[float]:
    """Share of right digits of each prompt (10 % is chance): the first five digits generated, against the key's.

    Args:
        model: a causal LM, in evaluation mode.
        tokenizer: its tokenizer.
        prompts: those with as many tokens, of which as many are the question, are batched together.
        batch_size: prompts at once.
        generate: (model, input_ids [B, T], n, tokens of the question) -> [B, n], what produces the tokens.
        label: of the progress bar.
    """
    wanted = len(tokenizer(" " + "0" * DIGITS, add_special_tokens=False)["input_ids"]) + 2
    scores: list[float] = [0.0] * len(prompts)
    with torch.no_grad(), tqdm(total=len(prompts), desc=label, unit=" prompts") as bar:
        for batch in _batches(prompts, batch_size):
            ids = torch.tensor([prompts[index].input_ids for index in batch], device=model.device)
            new = generate(model, ids, wanted, prompts[batch[0]].question)
            for index, row in zip(batch, new.tolist(), strict=True):
                digits = [c for c in tokenizer.decode(row, skip_special_tokens=True) if c.isdecimal()][:DIGITS]
                right = sum(a == b for a, b in zip(digits, prompts[index].value, strict=False))
                scores[index] = right / DIGITS
            bar.update(len(batch))
    return scores


def _batches(prompts: Sequence[PassKey], size: int) -> Iterator[list[int]]:
    alike: dict[tuple[int, int], list[int]] = {}
    for index, prompt in enumerate(prompts):
        alike.setdefault((len(prompt.input_ids), prompt.question), []).append(index)
    for indices in alike.values():
        for first in range(0, len(indices), size):
            yield indices[first : first + size]


def evaluate(options: argparse.Namespace, text: str) -> dict:
    """Accuracy of each checkpoint, without eviction and with each of the methods.

    Args:
        options: of the command line. `depths` of the protocol "cascade" are ranges that share the prompt evenly, in
            random words of the text; of "grid" they are points from beginning to end, between lines of the text.
        text: what keys are hidden in.

    Returns:
        lengths, depths (points, or [from, to]), and `models[checkpoint][method]`: `accuracy` `[lengths][depths]`,
        `mean`, and for each prompt its length, distance and score. The method is "none" without eviction.

    Raises:
        ValueError: a checkpoint, length, phrase or method that cannot be.
    """
    for ckpt in options.ckpt:
        models.require_model(ckpt)
    depths, samples = options.depths, options.samples
    command.check_least(options, depths=2, samples=1, batch_size=1)
    by_range = options.protocol == "cascade"
    if by_range:
        places = [(index / depths, (index + 1) / depths) for index in range(depths)]
    else:
        places = [index / (depths - 1) for index in range(depths)]
    result: dict = {name: getattr(options, name) for name in ("protocol", "lengths", "samples", "phrase", "seed")}
    result |= {"depths": places, "models": {}}
    for ckpt in options.ckpt:
        model, tokenizer = models.load(ckpt)
        variants = models.variants(model, options.eviction)
        found = {variant.name: {"accuracy": [], "mean": 0.0, "prompts": []} for variant in variants}
        result["models"][ckpt] = found
        for length in options.lengths:  # one length at a time: a hundred prompts of a million tokens are enough to hold
            asked = passkey_prompts(
                tokenizer, text, length, places, samples, options.phrase, seed=options.seed, words=by_range
            )
            for variant in variants:

                def generate(model, input_ids, count, question, factory=variant.cache_factory, by=tokenizer):
                    return generate_greedily(model, input_ids, count, question, factory and factory(model), by)

                label = f"{label_of(ckpt, variant.name)} at {length}"
                scores = passkey_accuracy(variant.model, tokenizer, asked, options.batch_size, generate, label)
                cells = [sum(scores[d * samples : (d + 1) * samples]) / samples for d in range(depths)]
                found[variant.name]["accuracy"].append(cells)
                found[variant.name]["prompts"] += [
                    {"length": length, "depth": p.depth, "distance": p.distance, "score": s}
                    for p, s in zip(asked, scores, strict=True)
                ]
        for values in found.values():
            values["mean"] = sum(map(sum, values["accuracy"])) / (len(options.lengths) * depths)
    return result


def draw(result: dict, path: Path) -> None:
    """One heat map for each model and method: lengths down, depths across."""
    maps = by_row(result["models"])
    count = len(maps)
    figure = report.figure(1.5 + 0.55 * len(result["depths"]), count * (1.0 + 0.35 * len(result["lengths"])))
    for index, (label, values) in enumerate(maps.items()):
        axes = figure.add_subplot(count, 1, index + 1)
        columns = [
            f"{depth[0]:.0%} to {depth[1]:.0%}" if isinstance(depth, tuple) else f"{depth:.0%}"
            for depth in result["depths"]
        ]
        rows = [str(length) for length in result["lengths"]]
        cells = [[100 * value for value in row] for row in values["accuracy"]]
        report.heat_map(axes, cells, rows, columns, f"{label}: pass-key digits right, %")
        axes.set(xlabel="depth of the key", ylabel="tokens")
    report.save_figure(figure, path, dpi=150)


@exit_status
def main(arguments: list[str] | None = None) -> None:
    parser = command.parser_of("passkey", __doc__)
    command.add_ckpts(parser, batch_size=8)
    command.add_eviction(parser)
    parser.add_argument("--protocol", choices=list(PROTOCOLS), default="grid", help="cascade: see above (grid)")
    command.add_numbers(parser, "--lengths", None, "tokens (256,512,1024; cascade: 32768 doubling to 1048576)")
    parser.add_argument("--depths", type=int, help="depths, evenly from beginning to end (11), or ranges (cascade: 5)")
    parser.add_argument("--samples", type=int, help="prompts for each length and depth (8; cascade: 20)")
    parser.add_argument(
        "--phrase", choices=list(PHRASES), help="how keys are stated and asked for (key; cascade: sentence)"
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        help="UTF-8 files to hide keys in, or whose words to take (held-out Python modules; cascade: some 350 words)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of keys and text (0)")
    options = command.parse(parser, "passkey", arguments)
    for name, value in PROTOCOLS[options.protocol].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.protocol == "cascade" and not options.text:
        text = " ".join(ADJECTIVES + NOUNS)
    else:
        text = "".join(given_texts(options.text))
    result = evaluate(options, text)
    report.write_json(options.out / "passkey.json", result | {"parameters": parameters_of(options.eviction)})
    draw(result, options.out / "passkey.png")
    header = ["model", *(f"{length} tokens" for length in result["lengths"]), "mean"]
    found = by_row(result["models"])
    rows = [
        [label, *(f"{sum(row) / len(row):.1%}" for row in values["accuracy"]), f"{values['mean']:.1%}"]
        for label, values in found.items()
    ]
    shares = of_first({label: [one["score"] for one in values["prompts"]] for label, values in found.items()})
    if len(shares) > 1:
        header.append(f"of {next(iter(found))} [95 %]")
        rows = [[*row, shares[row[0]]] for row in rows]
    print(report.markdown_table(header, rows))
    print(f"written: {options.out}/passkey.json, {options.out}/passkey.png")
