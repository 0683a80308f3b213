"""Turn local text into a prepared directory: tokenised, packed to one sample length, memory-mapped.

    python data/prepare.py --source docs/ notes.jsonl.gz --out prepared/mine --tokenizer bytes --sequence-length 1024

Reads text (.txt, .text), Markdown (.md, .markdown) and Python (.py), one document a file, and JSON lines (.jsonl,
.jsonl.gz), one document a line; a directory stands for all such files in it, hidden ones left out. What cannot be read
(broken JSON, no text, wrong encoding) is skipped, counted and reported with file and line, at the end and in
`report.json` of the output.

A document is held out when the sha256 of its text says so, and a text that occurs again is dropped, so no text is ever
in both splits, whatever the seed, the files or their order. The seed decides the order in which documents fill the
samples. The output is the same byte for byte whatever the number of processes. The format is in `pod/data.py`.
"""

import argparse
import gzip
import hashlib
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

TEXT = (".txt", ".text", ".md", ".markdown", ".py")
LINES = (".jsonl", ".jsonl.gz")
BYTES_VOCABULARY = 259  # ByT5Tokenizer(extra_ids=0): pad 0, eos 1, unk 2, then the 256 bytes
SHOWN = 20  # bad lines printed; report.json has all


def find_files(sources: list[str]) -> list[str]:
    """The files that `sources` (files and directories) stand for, sorted, each once.

    Raises:
        FileNotFoundError: a source does not exist, or no source has a readable kind of file.
        ValueError: a file was named whose kind is not one that can be read.
    """
    known = TEXT + LINES
    found: set[str] = set()
    for source in sources:
        path = Path(source)
        if path.is_file():
            if not path.name.endswith(known):
                raise ValueError(f"--source {source}: cannot read this kind of file, only {', '.join(known)}")
            found.add(str(path))
        elif path.is_dir():
            for file in path.rglob("*"):
                hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
                if file.name.endswith(known) and not hidden and file.is_file():
                    found.add(str(file))
        else:
            raise FileNotFoundError(f"--source {source}: no such file or directory")
    if not found:
        raise FileNotFoundError(f"no input files: nothing in {', '.join(sources)} ends with {', '.join(known)}")
    return sorted(found)


def read_documents(files: list[str], text_field: str) -> Iterator[dict[str, Any]]:
    """Read documents; what is bad becomes a row of its own, with no text and the problem named.

    Yields:
        dict(text, file, line, problem); line counts from 1, problem is "" for a document.
    """
    for file in files:
        line, empty = 1, True
        try:
            if file.endswith(LINES):
                with gzip.open(file, "rb") if file.endswith(".gz") else open(file, "rb") as lines:
                    for raw in lines:
                        if line == 1:
                            raw = raw.removeprefix(b"\xef\xbb\xbf")
                        if raw.strip():
                            empty = False
                            text, problem = parse_line(raw, text_field)
                            yield {"text": text, "file": file, "line": line, "problem": problem}
                        line += 1
                if empty:
                    yield {"text": "", "file": file, "line": 1, "problem": "no text: the file is empty"}
            else:
                raw = Path(file).read_bytes().removeprefix(b"\xef\xbb\xbf")
                try:
                    text, problem = raw.decode("utf-8"), ""
                except UnicodeDecodeError as error:
                    line = raw.count(b"\n", 0, error.start) + 1
                    text, problem = "", f"wrong encoding: not UTF-8 ({error.reason})"
                if not problem and not text.strip():
                    text, problem = "", "no text: the file is empty"
                yield {"text": text, "file": file, "line": line, "problem": problem}
        except (OSError, EOFError, zlib.error) as error:
            yield {"text": "", "file": file, "line": line, "problem": f"cannot be read from here on: {error}"}


def parse_line(raw: bytes, text_field: str) -> tuple[str, str]:
    """(text, "") of one JSON line, or ("", what is wrong with it)."""
    try:
        record = json.loads(raw.decode("utf-8"))
        text = record[text_field]
        text.encode("utf-8")  # JSON may hold half a surrogate pair
        return (text, "") if text.strip() else ("", f"no text: field {text_field!r} is empty")
    except UnicodeDecodeError as error:
        return "", f"wrong encoding: not UTF-8 ({error.reason})"
    except UnicodeEncodeError as error:
        return "", f"wrong encoding: not Unicode text ({error.reason})"
    except (json.JSONDecodeError, RecursionError) as error:
        return "", f"broken JSON: {error}"
    except (KeyError, TypeError):
        return "", f"no text: no field {text_field!r}"
    except AttributeError:
        return "", f"no text: field {text_field!r} is not a string"
    except ValueError as error:  # a number of more digits than Python reads
        return "", f"broken JSON: {error}"


def load_tokenizer(name: str) -> tuple[Callable[[str], np.ndarray], int, int]:
    """Resolve `--tokenizer`.

    Returns:
        (encode, vocab_size, pad_id). encode gives a document's ids [n], with the special tokens that the tokenizer
        puts around a text, and its end-of-text token last.

    Raises:
        ValueError: no tokenizer can be loaded from there.
    """
    if name == "bytes":
        # ByT5Tokenizer's ids, much faster, and "</s>" written in a text stays the four bytes that it is.
        def encode_bytes(text: str) -> np.ndarray:
            return np.append(np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64) + 3, 1)

        return encode_bytes, BYTES_VOCABULARY, 0
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"--tokenizer {name}: 'bytes' or a tokenizer's directory. {error}") from None
    end = tokenizer.eos_token_id

    def encode(text: str) -> np.ndarray:
        ids = tokenizer(text, verbose=False)["input_ids"]
        return np.asarray(ids if end is None or ids[-1:] == [end] else [*ids, end], np.int64)

    pad = tokenizer.pad_token_id
    return encode, len(tokenizer), pad if pad is not None else end or 0


def tokenise(files: list[str], text_field: str, encode: Callable, wide: bool, num_proc: int, cache: str) -> Any:
    """Read and tokenise in parallel, on disk.

    Returns:
        a `datasets.Dataset` in the order of `files`: input_ids, sha256 (of the text), file, line, problem.
    """
    import datasets

    text = datasets.Value("large_string")
    place = {"file": datasets.Value("string"), "line": datasets.Value("int64"), "problem": datasets.Value("string")}
    documents = datasets.Dataset.from_generator(
        read_documents,
        features=datasets.Features({"text": text, **place}),
        gen_kwargs={"files": files, "text_field": text_field},
        num_proc=min(num_proc, len(files)) if num_proc > 1 and len(files) > 1 else None,
        cache_dir=cache,
        writer_batch_size=100,
    )

    def convert(batch: dict[str, list[str]]) -> dict[str, list]:
        empty = np.zeros(0, np.int64)
        pairs = list(zip(batch["text"], batch["problem"], strict=True))
        return {
            "input_ids": [empty if problem else encode(text) for text, problem in pairs],
            "sha256": ["" if problem else hashlib.sha256(text.encode()).hexdigest() for text, problem in pairs],
        }

    ids = datasets.LargeList(datasets.Value("uint32" if wide else "uint16"))
    return documents.map(
        convert,
        batched=True,
        batch_size=100,
        writer_batch_size=100,
        remove_columns=["text"],
        features=datasets.Features({**place, "input_ids": ids, "sha256": datasets.Value("string")}),
        num_proc=min(num_proc, len(documents)) if num_proc > 1 and len(documents) > 1 else None,
        new_fingerprint="tokenised",  # nothing is reused, so nothing need be hashed
        load_from_cache_file=False,
        desc="Tokenising",
    )


def split_documents(hashes: list[str], held_out: float, seed: int) -> tuple[dict[str, np.ndarray], int]:
    """Assign documents to splits by the hash of their text, and put them in the seed's order.

    Args:
        hashes: sha256 of each document, "" for what is no document.
        held_out: share of the documents held out. If it is not 0 and the hashes hold none out, the document with the
            smallest hash is, provided that there are two.

    Returns:
        ({"train": row numbers, "validation": row numbers}, how many documents were dropped because they occurred
        before).
    """
    first: dict[str, int] = {}
    for row, value in enumerate(hashes):
        if value:
            first.setdefault(value, row)
    below = {value for value in first if int(value[:16], 16) < held_out * 2**64}
    if held_out > 0 and not below and len(first) > 1:
        below = {min(first)}
    order = np.random.default_rng(seed).permutation(np.fromiter(first.values(), np.int64, len(first)))
    is_held_out = np.array([hashes[row] in below for row in order], bool)
    duplicates = sum(1 for value in hashes if value) - len(first)
    return {"train": order[~is_held_out], "validation": order[is_held_out]}, duplicates


def pack(documents: Iterable[np.ndarray], length: int, pad_id: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Fill samples with documents one after the other.

    Args:
        documents: token ids, each [n].
        length: tokens of a sample (T).
        pad_id: what fills the last sample up.

    Yields:
        (tokens [T] int64, document_ids [T] int64). A document that does not fit goes on in the next sample, as a
        document of its own there; -1 marks padding, which only the last sample has.
    """
    tokens, ids = np.full(length, pad_id), np.full(length, -1)
    filled = document = 0
    for content in documents:
        begin = 0
        while begin < len(content):
            count = min(len(content) - begin, length - filled)
            tokens[filled : filled + count] = content[begin : begin + count]
            ids[filled : filled + count] = document
            begin, filled, document = begin + count, filled + count, document + 1
            if filled == length:
                yield tokens, ids
                tokens, ids = np.full(length, pad_id), np.full(length, -1)
                filled = document = 0
    if filled:
        yield tokens, ids


def whole_documents(
    documents: Iterator[np.ndarray], length: int, pad_id: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """One document a sample, cut or padded: (tokens [T], document_ids [T] with -1 at padding)."""
    for content in documents:
        tokens, ids = np.full(length, pad_id), np.full(length, -1)
        count = min(length, len(content))
        tokens[:count], ids[:count] = content[:count], 0
        yield tokens, ids


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
) -> dict[str, Any]:
    """Prepare `sources` into the directory `out`; see the module's docstring and `--help`.

    Returns:
        what is in report.json: files, documents, duplicates, splits, truncated_documents, and `skipped`, a list of
        dict(file, line, problem).

    Raises:
        FileNotFoundError: no input files.
        FileExistsError: `out` exists (without `force`).
        ValueError: nothing readable in the input, a bad argument, an unknown tokenizer.
    """
    from tqdm import tqdm

    from pod.data import SampleWriter

    if not 0 <= held_out < 1:
        raise ValueError(f"--held-out {held_out}: a share of the documents, at least 0 and below 1")
    if num_proc < 1 or seed < 0:
        raise ValueError(f"--num-proc {num_proc} must be at least 1, and --seed {seed} not negative")
    if sequence_length < 2:
        raise ValueError(f"--sequence-length {sequence_length}: next-token training needs at least 2")
    files = find_files(sources)
    encode, vocab_size, pad_id = load_tokenizer(tokenizer)
    writer = SampleWriter(out, sequence_length=sequence_length, vocab_size=vocab_size, tokenizer=tokenizer, force=force)
    with writer, tempfile.TemporaryDirectory(prefix=".work.", dir=writer.directory.parent) as cache:
        rows = tokenise(files, text_field, encode, vocab_size > 65535, num_proc, cache)
        skipped = [
            dict(zip(("file", "line", "problem"), found, strict=True))
            for found in zip(rows["file"], rows["line"], rows["problem"], strict=True)
            if found[2]
        ]
        hashes = list(rows["sha256"])
        if not any(hashes):
            first = "; the first: {file}:{line}: {problem}".format(**skipped[0]) if skipped else ""
            raise ValueError(f"nothing readable in {len(files)} files, {len(skipped)} problems{first}")
        splits, duplicates = split_documents(hashes, held_out, seed)
        tokens = rows.select_columns(["input_ids"]).with_format("numpy")
        truncated = 0

        def contents(numbers: np.ndarray, name: str) -> Iterator[np.ndarray]:
            nonlocal truncated
            for row in tqdm(numbers, desc=f"Writing {name}", unit=" documents"):
                content = tokens[int(row)]["input_ids"]
                truncated += one_document and len(content) > sequence_length
                yield content

        fill = whole_documents if one_document else pack
        for name, numbers in splits.items():
            for sample, document_ids in fill(contents(numbers, name), sequence_length, pad_id):
                writer.add(name, sample, document_ids)
        writer.held_out = [hashes[row] for row in splits["validation"]]
        report = {
            "files": len(files),
            "documents": sum(len(numbers) for numbers in splits.values()),
            "duplicates": duplicates,
            "truncated_documents": truncated,
            "splits": {
                name: {"documents": len(splits[name]), "samples": entry["samples"], "tokens": entry["tokens"]}
                for name, entry in writer.splits.items()
            },
            "skipped": skipped,
        }
        (writer.directory / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", nargs="+", required=True, metavar="PATH", help="files and directories to read")
    parser.add_argument("--out", required=True, metavar="DIR", help="the directory to write")
    parser.add_argument("--tokenizer", required=True, metavar="bytes|PATH", help="bytes, or a tokenizer's directory")
    parser.add_argument("--sequence-length", type=int, required=True, metavar="N", help="tokens of a sample")
    layout = parser.add_mutually_exclusive_group()
    layout.add_argument("--pack", action="store_true", help="fill samples with documents one after the other (default)")
    layout.add_argument("--one-document", action="store_true", help="one document a sample, cut or padded")
    parser.add_argument("--held-out", type=float, default=0.01, help="share of the documents for validation (0.01)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the documents (0)")
    parser.add_argument("--num-proc", type=int, default=os.cpu_count() or 1, help="processes (all cores)")
    parser.add_argument("--text-field", default="text", help="the field of a JSON line that holds the text (text)")
    parser.add_argument("--force", action="store_true", help="replace a prepared directory")
    options = vars(parser.parse_args(arguments))
    options.pop("pack")
    try:
        report = prepare(options.pop("source"), **options)
    except (OSError, ValueError) as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 1
    skipped = report["skipped"]
    for entry in skipped[:SHOWN]:
        print("skipped {file}:{line}: {problem}".format(**entry), file=sys.stderr)
    if len(skipped) > SHOWN:
        print(f"... and {len(skipped) - SHOWN} more: see report.json", file=sys.stderr)
    print(
        f"{report['files']} files, {report['documents']} documents, {report['duplicates']} duplicates dropped, "
        f"{len(skipped)} skipped"
    )
    for name, entry in report["splits"].items():
        print(f"{name}: {entry['documents']} documents, {entry['samples']} samples, {entry['tokens']} tokens")
    print(f"written to {options['out']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
