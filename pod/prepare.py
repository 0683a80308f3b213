"""Turn text into a prepared directory: tokenised, packed to one sample length, memory-mapped.

    python -m pod.prepare --source docs/ notes.jsonl.gz --out prepared/mine --tokenizer bytes --sequence-length 1024
    python -m pod.prepare --source dolma/ --out prepared/dolma --tokenizer meta-llama/Meta-Llama-3-8B \\
        --sequence-length 32768 --length-intervals 4096 16384
    python -m pod.prepare --source prolong-data-512K/ --out prepared/prolong --tokenizer meta-llama/Llama-3.1-8B \\
        --sequence-length 131072 --length-intervals 16384 65536
    python -m pod.prepare --source chats.jsonl --chat --out prepared/chats --tokenizer Qwen/Qwen2.5-7B-Instruct \\
        --sequence-length 8192
    python -m pod.prepare --source hub:HuggingFaceFW/fineweb-edu/sample-10BT --max-tokens 5e9 --out prepared/fineweb \\
        --tokenizer HuggingFaceTB/SmolLM2-135M --sequence-length 8192

Reads text (.txt, .text), Markdown (.md, .markdown) and Python (.py), one document a file; JSON lines (.jsonl,
.jsonl.gz: Dolma), one document a line; Parquet (.parquet), one document a row; and MosaicML MDS shards (ProLong), which
are tokenised already: their ids are taken as they are, a document for each (start, end) of their column `indices`. A
directory stands for all of these that are in it, hidden ones left out; links are followed, and a file that is reached
by several paths is read once. What cannot be read (broken JSON, no text, NUL characters, wrong encoding) is skipped,
counted and reported with file and line, at the end and in `report.json` of the output; more of it than --max-bad-share
ends the run. An MDS shard that is missing or not what its index says ends it too, with its name; with --skip-bad-shards
it is reported with the rest. `report.md` and `report.png` of the output say how long the documents are, and which share
of the tokens has distant keys in a model of --sink-size and --recent-size: on the others sharing does not act.

`hub:NAMESPACE/NAME[/CONFIG][:SPLIT]` streams a data set of the Hugging Face hub, and `hub:FOLDER[:SPLIT]` a local one
in any format that the package datasets reads, one document a row of the column --text-field; code of a data set is
never run. With --max-tokens or --max-documents no more is read: files come in an order that the seed draws, since they
are often sorted by what they hold.

--chat reads JSON lines with a list `messages`, writes each by the tokenizer's chat template, and marks the assistant's
turns: they alone have labels (`pod/data/chat.py` says which tokens these are). A line without messages, with an unknown
role, or that the template refuses is reported with the rest.

A document is held out when the sha256 of its text (of its ids where it came tokenised) says so, and one that occurs
again is dropped, so no document is ever in both splits, whatever the seed, the files or their order. The seed decides
the order in which documents fill the samples. The output is the same byte for byte whatever the number of processes.

--length-intervals A B parts the training documents by their length in tokens into [0, A), [A, B) and [B, ...), and
draws from each, in the seed's order, as many tokens as the poorest has (to 2 %). Held-out documents stay as they are.

Every file, and then every shard of the output, is read or written by one process at a time, in a hidden folder beside
the output. A run that was killed goes on from there when the same command is given again, and the folder goes when the
output is whole. It takes as much disk as the output, and more when only a part of the documents is drawn. The format of
the output is in `pod/data/prepared.py`.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pod.data import summary
from pod.data.chat import load_chat
from pod.data.hub import PREFIX
from pod.data.prepared import token_dtype
from pod.data.sample_writer import SHARD_BYTES, SampleWriter, samples_of_a_shard
from pod.data.sampling import Plan, draw, split_documents, write_shard
from pod.data.sources import DOCUMENT, LINES, Reading, Unit, find_units, load_tokenizer, read_unit
from pod.extras import require
from pod.files import locked, write_text
from pod.terminal import exit_status, interrupt_ends_at_once

SHOWN = 20  # bad lines printed; report.json has all
WAIT = 5.0  # seconds in which the workers of a killed run end, which hold its lock until then


# Processes


_task: Callable[[Any], Any]  # of a worker; handed over once, as a plan may be large


def _begin(task: Callable[[Any], Any], parent: int) -> None:
    global _task
    _task = task
    if os.getpid() != parent:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches all: one of them says so
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    # A killed parent cannot end its workers.
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _run(item: Any) -> Any:
    return _task(item)


def in_parallel(
    task: Callable[[Any], Any],
    items: list,
    num_proc: int,
    desc: str,
    is_enough: Callable[[list], bool] = lambda done: False,
) -> list:
    """[task(item) for item in items], by up to `num_proc` processes, with a progress bar.

    It ends with the first result with which there `is_enough` (results so far, in the items' order).
    """
    from tqdm import tqdm

    count, done = min(num_proc, len(items)), []

    def collect(results: Iterable) -> list:
        for result in tqdm(results, total=len(items), desc=desc):
            done.append(result)
            if is_enough(done):
                break
        return done

    if count <= 1:
        return collect(map(task, items))
    # Forked workers share what the parent has loaded.
    method = "fork" if sys.platform == "linux" else None
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(count, context, _begin, (task, os.getpid())) as pool:
        try:
            return collect(pool.map(_run, items))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def work_folder(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out`, for one run at a time; it stays when the run fails, unless it was cleared."""
    work = out.absolute().parent / f".{out.name}.work"
    try:
        with locked(work / "lock", out, WAIT):
            yield work
    finally:
        with suppress(OSError):  # what is in it stays
            work.rmdir()


def clear(work: Path) -> None:
    """Take everything but the lock out of the work folder."""
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


@dataclass
class Documents:
    """All documents that were read, in order.

    Attributes:
        table: [n] of `DOCUMENT`.
        keys: of the units that have documents, the stems of their files in the work folder.
        unit: [n] int64, of which of these a document is.
        begin: [n] int64, the document's first token in its unit.
        skipped: what could not be read, dict(file, line, problem).
    """

    table: np.ndarray
    keys: list[str]
    unit: np.ndarray
    begin: np.ndarray
    skipped: list[dict[str, Any]]


@dataclass
class Choice:
    """Which documents fill the samples.

    Attributes:
        splits: name -> the numbers of its documents, in the seed's order.
        used: [n] int64, tokens that are taken of each document.
        duplicates, lonely: documents left out, as they occur before; as they have one token in a sample of their own.
        intervals: as `draw` reports them; None without.
    """

    splits: dict[str, np.ndarray]
    used: np.ndarray
    duplicates: int
    lonely: int = 0
    intervals: list[dict[str, Any]] | None = None


def prepare(
    sources: list[str],
    out: str | Path,
    tokenizer: str,
    sequence_length: int,
    one_document: bool = False,
    held_out: float = 0.01,
    seed: int = 0,
    num_proc: int = 1,
    text_field: str = "text",
    force: bool = False,
    length_intervals: list[int] | None = None,
    skip_bad_shards: bool = False,
    chat: bool = False,
    chat_template: str | Path | None = None,
    max_bad_share: float = 1.0,
    sink_size: int = 16,
    recent_size: int = 4080,
    max_tokens: float | None = None,
    max_documents: int | None = None,
) -> dict[str, Any]:
    """Prepare `sources` into the directory `out`; see the module's docstring and `--help`.

    Returns:
        what is in report.json: files, documents, duplicates, splits, truncated_documents, one_token_documents (left
        out where a sample is one document: they foretell nothing), lengths (a `summary.histogram` of each split),
        length_intervals (as `draw` reports them, or None), sink_size, recent_size, and `skipped`, a list of dict(file,
        line, problem).

    Raises:
        FileNotFoundError: no input files.
        FileExistsError: `out` exists (without `force`).
        ValueError: nothing readable in the input, or too little of it, none of it for training, a bad argument, an
            unknown tokenizer, a bad MDS shard, intervals that cannot give equal shares, another run at work on `out`,
            `out` inside a source or around it.
        ImportError: matplotlib is not installed, or what reads the kind of file.
    """
    check_numbers(sequence_length, held_out, max_bad_share, num_proc, seed, sink_size, recent_size)
    require("data", "matplotlib", what="pod.prepare")  # its picture comes last, and the work before it is long
    edges = length_intervals or None
    if edges and (min(edges) < 1 or edges != sorted(set(edges))):
        raise ValueError(f"--length-intervals {' '.join(map(str, edges))}: lengths in tokens, rising, at least 1")
    check_limits(max_tokens, max_documents)
    units = find_units(sources)
    if max_tokens is not None or max_documents is not None:
        # Files are often sorted by what they hold: the first of them would be of one kind.
        random.Random(seed).shuffle(units)
    _, vocab_size, pad_id = load_tokenizer(tokenizer)
    most = SHARD_BYTES // token_dtype(vocab_size).itemsize
    if sequence_length > most:
        raise ValueError(
            f"--sequence-length {sequence_length}: a sample must fit into a shard of {SHARD_BYTES >> 30} GiB, which is "
            f"{most} tokens"
        )
    if chat_template is not None and not chat:
        raise ValueError(f"--chat-template {chat_template}: only --chat writes chats")
    template = Path(chat_template).read_text() if chat_template is not None else None
    reading = Reading(tokenizer, vocab_size, text_field, chat, template, max_documents, max_tokens)
    if chat:
        check_chat(reading, units)
    out = Path(out)
    writer = partial(
        SampleWriter, out, sequence_length=sequence_length, vocab_size=vocab_size, tokenizer=tokenizer, force=force
    )
    writer()  # refuses what cannot be written, before anything is read
    check_apart(out, sources)
    with work_folder(out) as work:
        found = read_documents(units, reading, work, num_proc, skip_bad_shards, max_bad_share)
        choice = choose(found.table, held_out, seed, sequence_length if one_document else None, edges)
        plans = {
            name: Plan(
                [work / f"{key}.ids" for key in found.keys],
                found.unit[numbers],
                found.begin[numbers],
                choice.used[numbers],
                sequence_length,
                packed=not one_document,
                vocab_size=vocab_size,
                pad_id=pad_id,
                learned=[work / f"{key}.learned" for key in found.keys] if chat else [],
            )
            for name, numbers in choice.splits.items()
            if len(numbers)
        }
        shard_samples = samples_of_a_shard(sequence_length, vocab_size)
        digest = hashlib.sha256("".join(plan.digest() for plan in plans.values()).encode()).hexdigest()
        folder = work / f"out-{digest[:32]}"
        folder.mkdir(exist_ok=True)
        with writer(directory=folder) as samples:
            for name, plan in plans.items():
                task = partial(write_shard, plan, name, shard_samples, folder)
                numbers = list(range(-(-plan.samples // shard_samples)))
                for done in in_parallel(task, numbers, num_proc, f"Writing {name}"):
                    samples.adopt(name, **done)
            samples.held_out = [value.tobytes().hex() for value in found.table["sha256"][choice.splits["validation"]]]
            samples.length_intervals = edges
            distant = {name: plan.distant(sink_size, recent_size) for name, plan in plans.items()}
            report = {"files": len({name for unit in units for name in unit.files})}
            report |= counted(found, choice, samples.splits, distant, sequence_length)
            report |= {"sources": sources, "sink_size": sink_size, "recent_size": recent_size, "skipped": found.skipped}
            write_text(folder / "report.json", json.dumps(report, indent=2) + "\n")
            facts = {
                "tokenizer": tokenizer,
                "tokens of a sample": f"{sequence_length:,}, {'one document' if one_document else 'documents packed'}",
                "seed": seed,
                "share held out": held_out,
                "tokens with distant keys": f"those after {sink_size:,} sinks and {recent_size:,} recent tokens of "
                "their document in the sample; what is shared acts on them alone",
            }
            summary.write(folder, report, sequence_length, facts)
        clear(work)
    return report


def check_numbers(
    sequence_length: int,
    held_out: float,
    max_bad_share: float,
    num_proc: int,
    seed: int,
    sink_size: int,
    recent_size: int,
) -> None:
    """Refuse numbers that mean nothing.

    Raises:
        ValueError: names the option and what it may be.
    """
    if not 0 <= held_out < 1:
        raise ValueError(f"--held-out {held_out}: a share of the documents, at least 0 and below 1")
    if not 0 <= max_bad_share <= 1:
        raise ValueError(f"--max-bad-share {max_bad_share}: a share of the documents, from 0 to 1")
    if num_proc < 1 or seed < 0:
        raise ValueError(f"--num-proc {num_proc} must be at least 1, and --seed {seed} not negative")
    if sink_size < 0 or recent_size < 1:
        raise ValueError(f"--sink-size {sink_size} must not be negative, and --recent-size {recent_size} at least 1")
    if sequence_length < 2:
        raise ValueError(f"--sequence-length {sequence_length}: next-token training needs at least 2")


def check_limits(max_tokens: float | None, max_documents: int | None) -> None:
    """Refuse limits that leave nothing.

    Raises:
        ValueError: names the option and what it may be.
    """
    for option, limit in (("tokens", max_tokens), ("documents", max_documents)):
        if limit is not None and not 1 <= limit < float("inf"):
            raise ValueError(f"--max-{option} {limit}: at least 1")


def check_chat(reading: Reading, units: list[Unit]) -> None:
    """Refuse a template that cannot be, and sources that hold no chats.

    Raises:
        ValueError: names it.
    """
    load_chat(reading.tokenizer, reading.chat_template)
    for name in (name for unit in units for name in unit.files):
        if not name.endswith(LINES):
            raise ValueError(f"--chat reads {', '.join(LINES)}, and {name} is among the sources")


def check_apart(out: Path, sources: list[str]) -> None:
    """Refuse an output inside a source or around one.

    Raises:
        ValueError: names both.
    """
    for source in (Path(source.removeprefix(PREFIX).partition(":")[0]) for source in sources):
        if not source.exists():  # on the hub
            continue
        if out.resolve().is_relative_to(source.resolve()):
            raise ValueError(f"--out {out} lies inside --source {source}: the next run would read what this one writes")
        if source.resolve().is_relative_to(out.resolve()):
            raise ValueError(
                f"--source {source} lies inside --out {out}, which is to be replaced: choose another --out"
            )


def read_documents(
    units: list[Unit], reading: Reading, work: Path, num_proc: int, skip_bad_shards: bool, max_bad_share: float
) -> Documents:
    """Tokenise what is not in the work folder yet.

    Raises:
        ValueError: nothing readable, more unreadable than allowed, a bad MDS shard.
    """
    task = partial(read_unit, reading=reading, folder=work, skip_bad_shards=skip_bad_shards)

    def is_enough(done: list[dict[str, Any]]) -> bool:
        return reading.is_enough(*(sum(unit[name] for unit in done) for name in ("documents", "tokens")))

    found = in_parallel(task, units, num_proc, "Tokenising", is_enough)
    skipped = [problem for unit in found for problem in unit["problems"]]
    found = [unit for unit in found if unit["documents"]]
    first = "; the first: {file}:{line}: {problem}".format(**skipped[0]) if skipped else ""
    if not found:
        clear(work)
        files = len({name for unit in units for name in unit.files})
        raise ValueError(f"nothing readable in {files} files, {len(skipped)} problems{first}")
    counts = [unit["documents"] for unit in found]
    total = len(skipped) + sum(counts)
    if len(skipped) / total > max_bad_share:
        raise ValueError(
            f"{len(skipped)} of {total} documents cannot be read, {len(skipped) / total:.1%}, more than "
            f"--max-bad-share {max_bad_share:g} allows{first}"
        )
    table = np.empty(sum(counts), DOCUMENT)
    begin = np.empty(len(table), np.int64)
    for end, unit in zip(np.cumsum(counts).tolist(), found, strict=True):
        part = slice(end - unit["documents"], end)
        table[part] = np.load(work / f"{unit['key']}.npy")
        begin[part] = np.cumsum(table["length"][part]) - table["length"][part]
    unit = np.repeat(np.arange(len(counts)), counts)
    count = len(table) if reading.max_documents is None else min(len(table), reading.max_documents)
    if reading.max_tokens is not None:  # and with the document that reaches them
        count = min(count, int(np.searchsorted(np.cumsum(table["length"]), reading.max_tokens)) + 1)
    return Documents(table[:count], [each["key"] for each in found], unit[:count], begin[:count], skipped)


def choose(
    table: np.ndarray, held_out: float, seed: int, cut_to: int | None, length_intervals: list[int] | None
) -> Choice:
    """Split the documents, drop those that occur again, and draw from intervals of length.

    Args:
        table: [n] of `DOCUMENT`.
        held_out, seed: share of the documents for validation, and their order.
        cut_to: tokens of a sample that is one document; None where documents are packed.
        length_intervals: as `prepare`'s.

    Raises:
        ValueError: none is left for training, or the intervals cannot give equal shares.
    """
    splits, duplicates = split_documents(table["sha256"], held_out, seed)
    if not len(splits["train"]):
        raise ValueError(
            f"--held-out {held_out:g} leaves none of the {len(table) - duplicates} documents for training: lower it"
        )
    used = table["length"] if cut_to is None else np.minimum(table["length"], cut_to)
    choice = Choice(splits, used, duplicates)
    if cut_to is not None:  # a sample of one token foretells nothing
        choice.splits = {name: numbers[used[numbers] > 1] for name, numbers in splits.items()}
        choice.lonely = sum(len(splits[name]) - len(choice.splits[name]) for name in splits)
        if not len(choice.splits["train"]):
            raise ValueError("no document for training has more than one token, and --one-document needs two")
    if length_intervals:
        train = choice.splits["train"]
        drawn, choice.intervals = draw(table["length"][train], used[train], length_intervals)
        choice.splits["train"] = train[drawn]
    return choice


def counted(
    found: Documents,
    choice: Choice,
    written: dict[str, dict[str, Any]],
    distant: dict[str, int],
    sequence_length: int,
) -> dict[str, Any]:
    """What report.json says of the documents.

    Args:
        found, choice: what was read, and what of it fills the samples.
        written: the writer's splits.
        distant: their tokens with distant keys.
        sequence_length: tokens of a sample.
    """
    length, splits = found.table["length"], choice.splits
    return {
        "documents": sum(map(len, splits.values())),
        "duplicates": choice.duplicates,
        "truncated_documents": int(sum((length > choice.used)[numbers].sum() for numbers in splits.values())),
        "one_token_documents": choice.lonely,
        "splits": {
            name: {"documents": len(splits[name]), "samples": entry["samples"], "tokens": entry["tokens"]}
            | {"padding": 1 - entry["tokens"] / (entry["samples"] * sequence_length)}
            | {"distant": distant[name] / entry["tokens"]}
            for name, entry in written.items()
        },
        "lengths": {name: summary.histogram(length[splits[name]]) for name in written},
        "length_intervals": choice.intervals,
    }


@exit_status
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--source", nargs="+", required=True, metavar="PATH", help="files, directories and hub:NAME to read"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the directory to write")
    parser.add_argument("--tokenizer", required=True, metavar="bytes|PATH", help="bytes, a directory or a hub id")
    parser.add_argument("--sequence-length", type=int, required=True, metavar="N", help="tokens of a sample")
    layout = parser.add_mutually_exclusive_group()
    layout.add_argument("--pack", action="store_true", help="fill samples with documents one after the other (default)")
    layout.add_argument("--one-document", action="store_true", help="one document a sample, cut or padded")
    parser.add_argument(
        "--length-intervals",
        type=int,
        nargs="+",
        metavar="N",
        help="lengths in tokens that part the training documents into intervals, which give equally many tokens each",
    )
    parser.add_argument("--sink-size", type=int, default=16, help="of the model, for the report: distant keys (16)")
    parser.add_argument("--recent-size", type=int, default=4080, help="likewise, its recent tokens (4080)")
    parser.add_argument("--held-out", type=float, default=0.01, help="share of the documents for validation (0.01)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the documents (0)")
    parser.add_argument("--num-proc", type=int, default=os.cpu_count() or 1, help="processes (all cores)")
    parser.add_argument("--max-tokens", type=float, metavar="N", help="read no more than so many (5e9)")
    parser.add_argument("--max-documents", type=int, metavar="N", help="read no more than so many")
    parser.add_argument("--text-field", default="text", help="field of a JSON line, or column, with the text (text)")
    parser.add_argument("--chat", action="store_true", help="learn the assistant's turns of each line's `messages`")
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja chat template (that of the tokenizer)")
    parser.add_argument("--skip-bad-shards", action="store_true", help="leave out MDS shards that are damaged")
    parser.add_argument(
        "--max-bad-share",
        type=float,
        default=1.0,
        metavar="X",
        help="end where more documents are unreadable (1: never)",
    )
    parser.add_argument("--force", action="store_true", help="replace a prepared directory")
    options = vars(parser.parse_args(arguments))
    options.pop("pack")
    report = prepare(options.pop("source"), **options)
    skipped = report["skipped"]
    for entry in skipped[:SHOWN]:
        print("skipped {file}:{line}: {problem}".format(**entry), file=sys.stderr)
    if len(skipped) > SHOWN:
        print(f"... and {len(skipped) - SHOWN} more: see report.json", file=sys.stderr)
    print(
        f"{report['files']} files, {report['documents']} documents, {report['duplicates']} duplicates dropped, "
        f"{len(skipped)} skipped"
    )
    for entry in report["length_intervals"] or []:
        print(
            f"{entry['from']}..{'' if entry['to'] is None else entry['to'] - 1} tokens: drawn "
            f"{entry['drawn_documents']} of {entry['documents']} documents, {entry['drawn_tokens']} of "
            f"{entry['tokens']} tokens"
        )
    for name, entry in report["splits"].items():
        print(
            f"{name}: {entry['documents']} documents, {entry['samples']} samples, {entry['tokens']} tokens, "
            f"{entry['distant']:.1%} of them with distant keys"
        )
    print(f"written to {options['out']}; what it holds: {Path(options['out']) / 'report.md'}")


if __name__ == "__main__":
    interrupt_ends_at_once()
    sys.exit(main())
