"""LongBench v1 and LongBench-E, scored as their authors score them.

    python eval/longbench.py --ckpt exports/llama3-32k --data longbench/ --tasks pod
    torchrun --nproc-per-node 8 eval/longbench.py --ckpt exports/llama3-32k --batch-size 4
    python eval/longbench.py --ckpt exports/llama3-32k --tasks pod --eviction snapkv:budget=1024+cake:budget=1024
    python eval/longbench.py --out runs/longbench/llama3-32k --score-only

Predictions are written to --out as they come; the same command goes on where a killed run stopped. When all are there,
the scores are printed and written to `scores.json`, and the bytes that the cache of the longest prompt takes to
`cache.json`; `eval/report.py` makes one table of several runs. Each method of --eviction has its own folder in --out,
laid out as --out itself, and a table compares them (`comparison.md`).
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

from pod.evaluation import command, longbench, metrics, models, report, runner
from pod.model.weights import weights_hash
from pod.terminal import exit_status


def run(options: argparse.Namespace) -> None:
    tasks = longbench.resolve_tasks(options.tasks)
    _check_segmentation(tasks)
    samples = {task: longbench.load_samples(options.data, task) for task in tasks}
    settings = {"ckpt": options.ckpt, "max_length": options.max_length}
    runner.check_settings(options.out, settings, partly=True)
    model, tokenizer = models.load(options.ckpt)
    settings["weights"] = weights_hash(options.ckpt)
    variants = models.variants(model, options.eviction)
    room = getattr(model.config, "max_position_embeddings", None)
    if room is not None and options.max_length >= room and runner.process()[0] == 0:
        print(f"note: prompts of {options.max_length} tokens, but the model was made for {room}", file=sys.stderr)
    keys, longest = {}, None
    for task in tasks:
        requests = longbench.make_requests(tokenizer, task, samples.pop(task), options.max_length, options.limit)
        keys[task] = [request.key for request in requests]
        longest = max([longest, *requests] if longest else requests, key=lambda request: len(request.text))
        runner.predict_each(variants, tokenizer, requests, options.out, task, options.batch_size, settings)
    scores = {}
    for variant in variants:
        folder = variant.folder(options.out)
        rows = {task: runner.Predictions(folder, task).merge(keys[task]) for task in tasks}
        if not all(rows.values()):
            print(f"process {runner.process()[0]} is done; the last one to finish prints the scores", file=sys.stderr)
            return
        # What the cache takes is measured, on the longest prompt there is: `eval/report.py` prints it.
        ids = runner.encode(tokenizer, longest)
        cache = None if variant.cache_factory is None else variant.cache_factory(variant.model)
        question = runner.question_tokens(tokenizer, longest, ids) if variant.asks_apart else 0
        saving = models.measured_saving(variant.model, torch.tensor([ids]), cache, question)
        report.write_json(folder / "cache.json", saving)
        scores[variant.name] = write_scores(rows, folder)
    if len(variants) > 1:
        compare(scores, options.out)


def compare(scores: dict[str, dict], out: Path) -> None:
    """Print the scores of several methods and write them to `comparison.md`; scores: method -> set -> score.

    A LongBench-E set is one row for each length.
    """
    flat: dict[str, dict[str, float | None]] = {}
    for method, found in scores.items():
        plain = {task: value for task, value in found.items() if not isinstance(value, dict)}
        flat[method] = dict(plain)
        for task, value in found.items():
            if isinstance(value, dict):
                flat[method] |= {f"{task} {bucket}": part for bucket, part in value.items()}
        flat[method] |= longbench.averages(plain)
    names = [name for name in next(iter(flat.values())) if any(row[name] is not None for row in flat.values())]
    cells = [["-" if row[name] is None else f"{row[name]:.2f}" for row in flat.values()] for name in names]
    table = report.markdown_table(["set", *flat], [[name, *line] for name, line in zip(names, cells, strict=True)])
    report.write(out / "comparison.md", table + "\n")
    print(f"\n{table}\nwritten: {out}/comparison.md")


def score_only(options: argparse.Namespace, named: bool) -> None:
    tasks = longbench.resolve_tasks(options.tasks if named else longbench.GROUPS["all"] + longbench.GROUPS["e"])
    rows = {}
    for task in tasks:
        check = partial(longbench.check_prediction, task=task)
        rows[task] = list(runner.Predictions(options.out, task).read(check).values())
    missing = [task for task in tasks if not rows[task]]
    if missing and (named or len(missing) == len(tasks)):
        raise ValueError(f"--out {options.out}: no predictions of {', '.join(missing)}")
    rows = {task: found for task, found in rows.items() if found}
    _check_segmentation(list(rows))
    write_scores(rows, options.out)


def write_scores(rows: dict[str, list[dict]], out: Path) -> dict:
    """Print the scores and write them to `scores.json`; rows: set -> its predictions. Returns set -> score."""
    scores = {task: longbench.score(task, found) for task, found in rows.items()}
    counts = {task: len(found) for task, found in rows.items()}
    plain = {task: value for task, value in scores.items() if not isinstance(value, dict)}
    result = {"scores": scores, "averages": longbench.averages(plain), "samples": counts}
    report.write_json(out / "scores.json", result)
    print(longbench.table(scores, counts))
    print(f"written: {out}/scores.json")
    return scores


def _check_segmentation(tasks: list[str]) -> None:
    """Say before the work, not after it, that the Chinese sets cannot be scored."""
    if any(task in metrics.NEEDS_SEGMENTATION for task in tasks):
        metrics.jieba_segment()


@exit_status
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python eval/longbench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ckpt", help="an exported model's directory, or any Hugging Face causal LM")
    parser.add_argument(
        "--data",
        default="hub",
        help="a directory with TASK.jsonl files or the benchmark's data.zip, or 'hub' to fetch it (default: hub)",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        metavar="TASK",
        help=f"sets, or groups: all (21, the default), e (LongBench-E), pod (14), cake (16). "
        f"Sets: {', '.join(longbench.GROUPS['all'])}",
    )
    parser.add_argument("--max-length", type=int, default=31500, help="tokens of a prompt (default: 31500)")
    parser.add_argument("--limit", type=int, help="only the first LIMIT samples of each set")
    parser.add_argument("--batch-size", type=int, default=1, help="prompts generated at once (default: 1)")
    command.add_eviction(parser)
    parser.add_argument("--score-only", action="store_true", help="score the predictions in --out; no model is loaded")
    parser.add_argument("--out", type=Path, help="where predictions and scores go (default: runs/longbench/NAME)")
    options = parser.parse_args(arguments)
    named = options.tasks is not None
    options.tasks = options.tasks or ["all"]
    if options.ckpt is None and not options.score_only:
        raise ValueError("--ckpt is missing: name an exported model's directory")
    if options.out is None:
        if options.ckpt is None:
            raise ValueError("--score-only needs --out, the folder of the predictions")
        options.out = Path("runs") / "longbench" / Path(options.ckpt).resolve().name
    if options.score_only and options.eviction:
        raise ValueError("--score-only scores one folder: name the method's own folder with --out, no --eviction")
    if options.score_only:
        score_only(options, named)
    else:
        run(options)


if __name__ == "__main__":
    sys.exit(main())
