"""RULER: needles, variable tracking, common and frequent words, at any length, made from a seed.

    python eval/ruler.py --ckpt exports/llama3-32k --haystack essays.txt --lengths 4096 8192 16384 32768
    python eval/ruler.py --ckpt exports/tiny --tasks niah_single_1 --lengths 1024 2048 --samples 20
    python eval/ruler.py --ckpt exports/tiny --tasks niah_single_1 --eviction snapkv:budget=256+cake:budget=256
    torchrun --nproc-per-node 8 eval/ruler.py --ckpt exports/llama3-32k --tasks vt cwe fwe --lengths 131072

Predictions are written to --out as they come; the same command goes on where a killed run stopped. When all are there,
the table is printed and written as `scores.json`, `scores.md` and `scores.png`. Each method of --eviction has its own
folder in --out, laid out as --out itself, and a table of averages compares them (`comparison.md`). Five needle tasks
hide their needles in --haystack; qa_1 and qa_2 need the files of SQuAD 2.0 and HotpotQA (distractor setting).
"""

import argparse
import sys
from hashlib import sha256
from pathlib import Path

from pod.evaluation import models, report, ruler, runner


def run(options: argparse.Namespace) -> None:
    files = {"haystack": options.haystack, "squad": options.squad, "hotpotqa": options.hotpotqa}
    tasks = ruler.resolve_tasks(options.tasks, {name for name, path in files.items() if path is not None})
    read = {"haystack": lambda path: ruler.Haystack(path.read_text(encoding="utf-8"))}
    read |= {"squad": ruler.read_squad, "hotpotqa": ruler.read_hotpotqa}
    sources = {need: read[need](files[need]) for need in {ruler.TASKS[task].needs for task in tasks} - {None}}
    texts = {name: sha256(path.read_bytes()).hexdigest() for name, path in files.items() if path is not None}
    settings = {"ckpt": options.ckpt, "seed": options.seed, **texts}
    runner.settle(options.out, settings)
    model, tokenizer = models.load(options.ckpt)
    variants = models.variants(model, options.eviction)
    for variant in variants:
        runner.settle(variant.folder(options.out), settings | variant.settings())
    keys = {}
    for length in options.lengths:
        for task in tasks:
            source = sources.get(ruler.TASKS[task].needs)
            requests = ruler.make_requests(tokenizer, task, length, options.samples, seed=options.seed, source=source)
            keys[task, length] = [request.key for request in requests]
            for variant in variants:
                runner.predict(
                    variant.model,
                    tokenizer,
                    requests,
                    runner.Predictions(variant.folder(options.out), f"{task}-{length}"),
                    batch_size=options.batch_size,
                    cache_factory=variant.cache_factory,
                    label=variant.label,
                )
    found = {}
    for variant in variants:
        folder = variant.folder(options.out)
        rows = {set_: runner.Predictions(folder, "{}-{}".format(*set_)).merge(names) for set_, names in keys.items()}
        if not all(rows.values()):
            print(f"process {runner.process()[0]} is done; the last one to finish prints the scores", file=sys.stderr)
            return
        scores = {task: {length: ruler.score(task, rows[task, length]) for length in options.lengths} for task in tasks}
        found[variant.name] = write_scores(scores, options, folder)
    if len(variants) > 1:
        lines = [[name, *(f"{averages[n]:.2f}" for n in options.lengths)] for name, averages in found.items()]
        table = report.markdown_table(["average with", *map(str, options.lengths)], lines)
        report.write(options.out / "comparison.md", table + "\n")
        print(f"\n{table}\nwritten: {options.out}/comparison.md")


def write_scores(scores: dict[str, dict[int, float]], options: argparse.Namespace, out: Path) -> dict[int, float]:
    """Print the table and write `scores.json`, `scores.md` and `scores.png`; scores: task -> length -> 0..100.

    Returns:
        length -> average.
    """
    lengths = options.lengths
    averages = {length: sum(row[length] for row in scores.values()) / len(scores) for length in lengths}
    lines = [f"| task | {' | '.join(str(length) for length in lengths)} |", "|---|" + "--:|" * len(lengths)]
    for name, row in [*scores.items(), *([("average", averages)] if len(scores) > 1 else [])]:
        lines.append(f"| {name} | {' | '.join(f'{row[length]:.2f}' for length in lengths)} |")
    table = "\n".join(lines)
    result = {"samples": options.samples, "seed": options.seed, "scores": scores, "averages": averages}
    report.write_json(out / "scores.json", result)
    report.write(out / "scores.md", table + "\n")
    report.save_heat_map(
        out / "scores.png",
        [[row[length] for length in lengths] for row in scores.values()],
        list(scores),
        [str(length) for length in lengths],
        title=f"RULER, {options.samples} samples each",
        xlabel="tokens of prompt and answer",
        ylabel="task",
    )
    print(table)
    print(f"written: {out}/scores.json, scores.md, scores.png")
    return averages


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python eval/ruler.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ckpt", required=True, help="an exported model's directory, or any Hugging Face causal LM")
    parser.add_argument(
        "--tasks",
        nargs="+",
        metavar="TASK",
        help=f"of {', '.join(ruler.TASKS)} (default: all whose files are given)",
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        default=[4096, 8192, 16384, 32768],
        help="tokens of prompt and answer together",
    )
    parser.add_argument("--samples", type=int, default=100, help="per task and length (default: 100; the authors: 500)")
    parser.add_argument("--haystack", type=Path, help="a UTF-8 file with any long text")
    parser.add_argument("--squad", type=Path, help="SQuAD 2.0's dev-v2.0.json, for qa_1")
    parser.add_argument("--hotpotqa", type=Path, help="HotpotQA's hotpot_dev_distractor_v1.json, for qa_2")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: 0)")
    parser.add_argument("--batch-size", type=int, default=1, help="prompts generated at once (default: 1)")
    models.add_eviction(parser)
    parser.add_argument("--out", type=Path, help="where predictions and scores go (default: runs/ruler/NAME)")
    options = parser.parse_args(arguments)
    if options.out is None:
        options.out = Path("runs") / "ruler" / Path(options.ckpt).resolve().name
    try:
        run(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
