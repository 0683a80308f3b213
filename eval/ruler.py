"""RULER: needles, variable tracking, common and frequent words, at any length, made from a seed.

    python eval/ruler.py --ckpt exports/llama3-32k --haystack essays.txt --lengths 4096 8192 16384 32768
    python eval/ruler.py --ckpt exports/tiny --tasks niah_single_1 --lengths 1024 2048 --samples 20
    python eval/ruler.py --ckpt exports/dense exports/tiny --tasks vt --eviction snapkv:budget=256+cake:budget=256
    torchrun --nproc-per-node 8 eval/ruler.py --ckpt exports/llama3-32k --tasks vt cwe fwe --lengths 131072

Predictions are written to --out as they come; the same command goes on where a killed run stopped. When all are there,
the table is printed and written as `scores.json`, `scores.md` and `scores.png`. Each method of --eviction has its own
folder in --out, laid out as --out itself, and so has each of several models; one table compares them all
(`comparison.md`). Five needle tasks hide their needles in --haystack; qa_1 and qa_2 need the files of SQuAD 2.0 and
HotpotQA (distractor setting). A model that knows no English question, as the demo's, can be asked in a phrase of
`eval/passkey.py` (--phrase); the table then says that this is not the benchmark's wording.
"""

import argparse
import sys
from hashlib import sha256
from pathlib import Path

from pod.evaluation import command, models, passkey, questions, report, ruler, runner
from pod.evaluation.haystack import Haystack
from pod.evaluation.ruler_tasks import TASKS
from pod.evaluation.texts import read_text
from pod.model.weights import weights_hash
from pod.terminal import exit_status


def run(options: argparse.Namespace) -> None:
    files = {"haystack": options.haystack, "squad": options.squad, "hotpotqa": options.hotpotqa}
    given = {name for name, path in files.items() if path is not None}
    tasks = ruler.resolve_tasks(options.tasks, given, options.phrase)
    read = {"haystack": lambda path: Haystack(read_text(path, "--haystack"))}
    read |= {"squad": questions.read_squad, "hotpotqa": questions.read_hotpotqa}
    sources = {need: read[need](files[need]) for need in {TASKS[task].needs for task in tasks} - {None}}
    settings = {name: sha256(files[name].read_bytes()).hexdigest() for name in sorted(sources)}
    settings |= {"seed": options.seed} | ({} if options.phrase is None else {"phrase": options.phrase})
    folders = {ckpt: options.out / Path(ckpt).resolve().name for ckpt in options.ckpt}
    if len(set(folders.values())) < len(options.ckpt):
        raise ValueError(f"--ckpt {' '.join(options.ckpt)}: two models of one name; run them into two --out")
    if len(folders) == 1:
        folders = dict.fromkeys(options.ckpt, options.out)
    rooms = {}
    methods: dict[str, dict[str, Path]] = {}
    for ckpt, out in folders.items():
        methods[ckpt], rooms[ckpt] = predict(ckpt, out, options, tasks, sources, settings | {"ckpt": ckpt})
    keys = [str(index) for index in range(options.samples)]
    found = {}
    for ckpt in folders:
        for method, folder in methods[ckpt].items():
            rows = {
                task: {n: runner.Predictions(folder, f"{task}-{n}").merge(keys) for n in options.lengths}
                for task in tasks
            }
            if not all(all(row.values()) for row in rows.values()):
                print(f"process {runner.process()[0]} is done; the last one prints the scores", file=sys.stderr)
                return
            scores = {task: {n: ruler.score(task, one) for n, one in row.items()} for task, row in rows.items()}
            name = f"{Path(ckpt).resolve().name}, {method}" if len(folders) > 1 else method
            if len(methods) * len(methods[ckpt]) > 1:
                print(f"\n{name}:")
            write_scores(scores, options, folder)
            found[name] = scores
    if len(found) > 1:
        compare(found, options, [beyond(*item, options.lengths) for item in rooms.items()])


def predict(
    ckpt: str, out: Path, options: argparse.Namespace, tasks: list[str], sources: dict, settings: dict
) -> tuple[dict[str, Path], int | None]:
    """Write this process's predictions of one model, without eviction and with each method.

    All prompts are made first: a task that does not fit into one of the lengths is refused before the work.

    Returns:
        method -> the folder of its predictions; and how many tokens the model was made for, where its config says.
    """
    runner.check_settings(out, settings, partly=True)
    model, tokenizer = models.load(ckpt)
    settings |= {"weights": weights_hash(ckpt)}
    variants = models.variants(model, options.eviction)
    sets = {
        f"{task}-{length}": ruler.make_requests(
            tokenizer,
            task,
            length,
            options.samples,
            seed=options.seed,
            source=sources.get(TASKS[task].needs),
            phrase=options.phrase,
        )
        for length in options.lengths
        for task in tasks
    }
    for name, requests in sets.items():
        runner.predict_each(variants, tokenizer, requests, out, name, options.batch_size, settings)
    folders = {variant.name: variant.folder(out) for variant in variants}
    return folders, getattr(model.config, "max_position_embeddings", None)


def beyond(ckpt: str, room: int | None, lengths: list[int]) -> str:
    """Which lengths a model was not made for, as a sentence; nothing where there are none."""
    longer = [str(length) for length in lengths if room is not None and length > room]
    return f"{Path(ckpt).resolve().name} was made for {room} tokens, not for {', '.join(longer)}." if longer else ""


def title(options: argparse.Namespace) -> str:
    """What was run, in a line."""
    text = f"RULER, {options.samples} samples each"
    if options.phrase is not None:
        stated, asked = (part.strip() for part in passkey.PHRASES[options.phrase])
        text += f", not in its own words: stated as `{stated}`, asked for as `{asked}`"
    return text


def compare(found: dict[str, dict[str, dict[int, float]]], options: argparse.Namespace, notes: list[str]) -> None:
    """Print the scores of several models and methods and write them to `comparison.md`; name -> task -> length."""
    rows = []
    for task in next(iter(found.values())):
        for length in options.lengths:
            rows.append([f"{task}, {length}", *(f"{scores[task][length]:.2f}" for scores in found.values())])
    averages = [average(scores, options.lengths) for scores in found.values()]
    rows += [[f"average, {length}", *(f"{one[length]:.2f}" for one in averages)] for length in options.lengths]
    table = report.markdown_table(["task, tokens", *found], rows)
    text = "\n".join([f"{title(options)}. {' '.join(notes)}".rstrip(), "", table])
    report.write(options.out / "comparison.md", text + "\n")
    print(f"\n{text}\nwritten: {options.out}/comparison.md")


def average(scores: dict[str, dict[int, float]], lengths: list[int]) -> dict[int, float]:
    """length -> the mean over the tasks; scores: task -> length -> 0..100."""
    return {length: sum(row[length] for row in scores.values()) / len(scores) for length in lengths}


def write_scores(scores: dict[str, dict[int, float]], options: argparse.Namespace, out: Path) -> None:
    """Print the table and write `scores.json`, `scores.md` and `scores.png`; scores: task -> length -> 0..100."""
    lengths = options.lengths
    averages = average(scores, lengths)
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
        title=title(options),
        xlabel="tokens of prompt and answer",
        ylabel="task",
    )
    print(table)
    print(f"written: {out}/scores.json, scores.md, scores.png")


@exit_status
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python eval/ruler.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ckpt", nargs="+", required=True, help="exported models (directories or hub ids)")
    parser.add_argument(
        "--tasks",
        nargs="+",
        metavar="TASK",
        help=f"of {', '.join(TASKS)} (default: all whose files are given)",
    )
    command.add_numbers(
        parser, "--lengths", [4096, 8192, 16384, 32768], "tokens of prompt and answer together (4096,...,32768)"
    )
    parser.add_argument("--samples", type=int, default=100, help="per task and length (default: 100; the authors: 500)")
    parser.add_argument(
        "--phrase",
        choices=list(passkey.PHRASES),
        help="needle tasks of one value in eval/passkey.py's words, names of two letters, numbers of five digits; "
        "default: the benchmark's",
    )
    parser.add_argument("--haystack", type=Path, help="a UTF-8 file with any long text")
    parser.add_argument("--squad", type=Path, help="SQuAD 2.0's dev-v2.0.json, for qa_1")
    parser.add_argument("--hotpotqa", type=Path, help="HotpotQA's hotpot_dev_distractor_v1.json, for qa_2")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: 0)")
    parser.add_argument("--batch-size", type=int, default=1, help="prompts generated at once (default: 1)")
    command.add_eviction(parser)
    parser.add_argument(
        "--out", type=Path, help="where predictions and scores go (default: runs/ruler/NAME; of several, runs/ruler)"
    )
    options = parser.parse_args(arguments)
    options.lengths = list(dict.fromkeys(options.lengths))
    if options.out is None:
        options.out = Path("runs") / "ruler"
        if len(options.ckpt) == 1:
            options.out /= Path(options.ckpt[0]).resolve().name
    run(options)


if __name__ == "__main__":
    sys.exit(main())
