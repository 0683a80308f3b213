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
"""

import argparse
import sys
from pathlib import Path

from pod import eviction
from pod.data.demo_corpus import held_out_text
from pod.evaluation import command, models, report
from pod.evaluation.haystack import ADJECTIVES, NOUNS
from pod.evaluation.models import by_row, label_of, parameters_of
from pod.evaluation.passkey import PHRASES, generate_greedily, passkey_accuracy, passkey_prompts
from pod.evaluation.texts import read_text
from pod.files import check_writable
from pod.terminal import exit_status

PROTOCOLS: dict[str, dict] = {
    "grid": {"lengths": [256, 512, 1024], "depths": 11, "samples": 8, "phrase": "key"},
    "cascade": {"lengths": [2**n for n in range(15, 21)], "depths": 5, "samples": 20, "phrase": "sentence"},
}


def evaluate(
    ckpts: list[str],
    text: str,
    lengths: list[int],
    depths: int,
    samples: int,
    phrase: str,
    batch_size: int,
    seed: int,
    methods: list[eviction.Method] | None = None,
    protocol: str = "grid",
) -> dict:
    """Accuracy of each checkpoint, without eviction and with each of the methods.

    `depths` of the protocol "cascade" are ranges that share the prompt evenly, in random words of the text; of "grid"
    they are points from beginning to end, between lines of the text.

    Returns:
        lengths, depths (points, or [from, to]), and models[checkpoint][method]: `accuracy` [lengths][depths], `mean`,
        and for each prompt its
        length, distance and score. The method is "none" without eviction.

    Raises:
        ValueError: a checkpoint, length, phrase or method that cannot be.
    """
    for ckpt in ckpts:
        models.require_model(ckpt)
    if depths < 2 or samples < 1 or batch_size < 1:
        raise ValueError("--depths must be at least 2, --samples and --batch-size at least 1")
    by_range = protocol == "cascade"
    if by_range:
        places = [(index / depths, (index + 1) / depths) for index in range(depths)]
    else:
        places = [index / (depths - 1) for index in range(depths)]
    result: dict = {
        "protocol": protocol,
        "lengths": lengths,
        "depths": places,
        "samples": samples,
        "phrase": phrase,
        "seed": seed,
        "models": {},
    }
    for ckpt in ckpts:
        model, tokenizer = models.load(ckpt)
        variants = models.variants(model, methods)
        found = {variant.name: {"accuracy": [], "mean": 0.0, "prompts": []} for variant in variants}
        result["models"][ckpt] = found
        for length in lengths:  # the prompts of one length at a time: a hundred of a million tokens are enough to hold
            asked = passkey_prompts(tokenizer, text, length, places, samples, phrase, seed=seed, words=by_range)
            for variant in variants:

                def generate(model, input_ids, count, question, factory=variant.cache_factory):
                    return generate_greedily(model, input_ids, count, question, factory and factory(model))

                label = f"{label_of(ckpt, variant.name)} at {length}"
                scores = passkey_accuracy(variant.model, tokenizer, asked, batch_size, generate, label)
                cells = [sum(scores[d * samples : (d + 1) * samples]) / samples for d in range(depths)]
                found[variant.name]["accuracy"].append(cells)
                found[variant.name]["prompts"] += [
                    {"length": length, "depth": p.depth, "distance": p.distance, "score": s}
                    for p, s in zip(asked, scores, strict=True)
                ]
        for values in found.values():
            values["mean"] = sum(map(sum, values["accuracy"])) / (len(lengths) * depths)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", nargs="+", required=True, help="exported models (directories or hub ids)")
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
    command.add_eviction(parser)
    parser.add_argument("--batch-size", type=int, default=8, help="prompts generated at once (8)")
    parser.add_argument("--seed", type=int, default=0, help="of keys and text (0)")
    parser.add_argument("--out", type=Path, default=command.default_folder("passkey"), help="folder of what is written")
    options = parser.parse_args(arguments)
    for name, value in PROTOCOLS[options.protocol].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    check_writable(options.out)
    if options.text:
        text = "".join(read_text(path, "--text") for path in options.text)
    else:
        text = held_out_text() if options.protocol == "grid" else " ".join(ADJECTIVES + NOUNS)
    result = evaluate(
        options.ckpt,
        text,
        options.lengths,
        options.depths,
        options.samples,
        options.phrase,
        options.batch_size,
        options.seed,
        options.eviction,
        options.protocol,
    )
    report.write_json(options.out / "passkey.json", result | {"parameters": parameters_of(options.eviction)})
    draw(result, options.out / "passkey.png")
    header = ["model", *(f"{length} tokens" for length in result["lengths"]), "mean"]
    rows = [
        [label, *(f"{sum(row) / len(row):.1%}" for row in values["accuracy"]), f"{values['mean']:.1%}"]
        for label, values in by_row(result["models"]).items()
    ]
    print(report.markdown_table(header, rows))
    print(f"written: {options.out}/passkey.json, {options.out}/passkey.png")


if __name__ == "__main__":
    sys.exit(main())
