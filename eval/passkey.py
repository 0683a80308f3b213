"""Pass-key retrieval: five digits hidden in a long text, asked for at its end; accuracy by length and depth.

    python eval/passkey.py --ckpt exports/tiny --lengths 256,512,1024
    python eval/passkey.py --ckpt exports/dense exports/tiny --depths 5 --samples 16
    python eval/passkey.py --ckpt exports/llama3-32k --phrase sentence --text book.txt --lengths 4096,16384,32768

Each prompt is generated from with the model's own cache. Writes passkey.json and passkey.png (a heat map of lengths and
depths for each model) and prints a table.
"""

import argparse
import sys
from pathlib import Path

from pod.evaluation import models, report
from pod.evaluation.passkey import PHRASES, passkey_accuracy, passkey_prompts

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data"))


def default_text() -> str:
    """The held-out modules of the running Python's standard library, which the demo's models never saw."""
    from demo_corpus import standard_library

    return b"\n".join(standard_library()[1]).decode()


def numbers(text: str) -> list[int]:
    """`256,512` -> [256, 512]."""
    return [int(part) for part in text.split(",")]


def evaluate(
    ckpts: list[str], text: str, lengths: list[int], depths: int, samples: int, phrase: str, batch_size: int, seed: int
) -> dict:
    """Accuracy of each checkpoint.

    Returns:
        lengths, depths, and for each checkpoint `accuracy` [lengths][depths], `mean`, and for each prompt its length,
        distance and score.

    Raises:
        ValueError: a checkpoint, length or phrase that cannot be.
    """
    if depths < 2 or samples < 1 or batch_size < 1:
        raise ValueError("--depths must be at least 2, --samples and --batch-size at least 1")
    places = [index / (depths - 1) for index in range(depths)]
    result: dict = {
        "lengths": lengths,
        "depths": places,
        "samples": samples,
        "phrase": phrase,
        "seed": seed,
        "models": {},
    }
    for ckpt in ckpts:
        model, tokenizer = models.load(ckpt)
        accuracy, prompts_written = [], []
        for length in lengths:
            prompts = passkey_prompts(tokenizer, text, length, places, samples, phrase, seed=seed)
            scores = passkey_accuracy(model, tokenizer, prompts, batch_size, label=f"{Path(ckpt).name} at {length}")
            accuracy.append([sum(scores[d * samples : (d + 1) * samples]) / samples for d in range(depths)])
            prompts_written += [
                {"length": length, "depth": p.depth, "distance": p.distance, "score": s}
                for p, s in zip(prompts, scores, strict=True)
            ]
        mean = sum(map(sum, accuracy)) / (len(lengths) * depths)
        result["models"][ckpt] = {"accuracy": accuracy, "mean": mean, "prompts": prompts_written}
    return result


def draw(result: dict, path: Path) -> None:
    """One heat map for each model: lengths down, depths across."""
    count = len(result["models"])
    figure = report.figure(1.5 + 0.55 * len(result["depths"]), count * (1.0 + 0.35 * len(result["lengths"])))
    for index, (ckpt, values) in enumerate(result["models"].items()):
        axes = figure.add_subplot(count, 1, index + 1)
        columns = [f"{depth:.0%}" for depth in result["depths"]]
        rows = [str(length) for length in result["lengths"]]
        cells = [[100 * value for value in row] for row in values["accuracy"]]
        report.heat_map(axes, cells, rows, columns, f"{Path(ckpt).name}: pass-key digits right, %")
        axes.set(xlabel="depth of the key", ylabel="tokens")
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", nargs="+", required=True, help="exported models (directories or hub ids)")
    parser.add_argument("--lengths", type=numbers, default=[256, 512, 1024], help="tokens, comma-separated")
    parser.add_argument("--depths", type=int, default=11, help="depths, evenly from beginning to end (11)")
    parser.add_argument("--samples", type=int, default=8, help="prompts for each length and depth (8)")
    parser.add_argument("--phrase", choices=list(PHRASES), default="key", help="how keys are stated and asked for")
    parser.add_argument("--text", type=Path, nargs="+", help="UTF-8 files to hide keys in (held-out Python modules)")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=report.default_folder("passkey"), help="folder of what is written")
    options = parser.parse_args(arguments)
    try:
        text = "".join(path.read_text(encoding="utf-8") for path in options.text) if options.text else default_text()
        result = evaluate(
            options.ckpt,
            text,
            options.lengths,
            options.depths,
            options.samples,
            options.phrase,
            options.batch_size,
            options.seed,
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report.write_json(options.out / "passkey.json", result)
    draw(result, options.out / "passkey.png")
    header = ["model", *(f"{length} tokens" for length in result["lengths"]), "mean"]
    rows = [
        [Path(ckpt).name, *(f"{sum(row) / len(row):.1%}" for row in values["accuracy"]), f"{values['mean']:.1%}"]
        for ckpt, values in result["models"].items()
    ]
    print(report.markdown_table(header, rows))
    print(f"written: {options.out}/passkey.json, {options.out}/passkey.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
