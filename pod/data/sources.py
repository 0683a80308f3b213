"""What `prepare.py` reads: files, MDS shards and data sets of the hub, as units, each turned into token ids on disk.

A unit is what one process reads at a time and what a killed run need not read again: one file of JSON lines or of
Parquet, one MDS shard, one part of a data set, or some small files of text. `read_unit` leaves these files in the work
folder, named after the unit's content:

    KEY.ids     every document's token ids, one after the other, uint16 or uint32
    KEY.learned of chats: 1 for each of these that is learned, else 0, uint8
    KEY.npy     [documents] of (length, sha256), the latter of the UTF-8 text, or of the uint32 ids of what came
                tokenised
    KEY.json    counts, problems, and the sha256 of the others; written last, so it says that the unit is whole
"""

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from pod.data import hub
from pod.data.chat import BadChat, load_chat, parse_chat, unreadable
from pod.data.mds import BadShard, Shard, read_index
from pod.data.prepared import token_dtype
from pod.extras import require
from pod.files import digest, naming, note_whole, whole

TEXT = (".txt", ".text", ".md", ".markdown", ".py")
LINES = (".jsonl", ".jsonl.gz")
PARQUET = ".parquet"
PARQUET_ROWS = 256  # in memory at once
BYTES_VOCABULARY = 259  # ByT5Tokenizer(extra_ids=0): pad 0, eos 1, unk 2, then the 256 bytes
DOCUMENT = np.dtype([("length", "<i8"), ("sha256", "u1", 32)])
# A unit of text files ends with the file that reaches one of these.
UNIT_FILES, UNIT_BYTES = 256, 2**24


@dataclass(frozen=True)
class Unit:
    """Files of text, JSON lines or Parquet, one MDS shard, or one part of a data set; `stamp` is what shows that they
    have not changed."""

    files: tuple[str, ...]
    stamp: tuple
    shard: Shard | None = None
    part: hub.Part | None = None


@dataclass(frozen=True)
class Reading:
    """How documents become ids: everything that a unit's ids depend on, beside its files."""

    tokenizer: str
    vocab_size: int
    text_field: str
    chat: bool = False
    chat_template: str | None = None
    max_documents: int | None = None
    """Of all that is read, and so of a unit: it ends with so many, or with the document that reaches so many tokens."""
    max_tokens: float | None = None

    def is_enough(self, documents: int, tokens: int) -> bool:
        """Whether so much is as much as is wanted."""
        limits = ((documents, self.max_documents), (tokens, self.max_tokens))
        return any(limit is not None and count >= limit for count, limit in limits)

    def key(self, unit: Unit) -> str:
        """The name of the unit's files in the work folder."""
        shard = unit.shard.text if unit.shard is not None else None
        return hashlib.sha256(repr((self, unit.files, unit.stamp, shard)).encode()).hexdigest()[:32]


def find_units(sources: list[str]) -> list[Unit]:
    """The units that `sources` (files, directories, `hub:...`) stand for: in the order of their files' names, each file
    once, and then the parts of data sets.

    In a directory, an index.json of MDS shards stands for these. Links are followed, also to directories and in loops;
    a file that is reached by several names is read under the first of them.

    Raises:
        FileNotFoundError: a source does not exist, or no source has a readable kind of file.
        OSError: a directory cannot be listed.
        ValueError: a file was named whose kind is not one that can be read; an index.json beside MDS shards is damaged;
            a data set cannot be opened.
    """
    parts = [part for source in sources if source.startswith(hub.PREFIX) for part in hub.find_parts(source)]
    sources = [source for source in sources if not source.startswith(hub.PREFIX)]
    known = (*TEXT, *LINES, PARQUET)
    found: dict[str, Shard | None] = {}
    for source in sources:
        path = Path(source)
        if path.is_file():
            if not path.name.endswith(known):
                raise ValueError(
                    f"--source {source}: cannot read this kind of file, only {', '.join(known)}, and directories with "
                    "the index.json of MDS shards"
                )
            found[str(path)] = None
        elif path.is_dir():
            for file in visible_files(path):
                if file.name == "index.json":
                    found.update({str(shard.file): shard for shard in read_index(file) or []})
                elif file.name.endswith(known):
                    found[str(file)] = None
        else:
            raise FileNotFoundError(f"--source {source}: no such file or directory")
    if not found and not parts:
        raise FileNotFoundError(
            f"no input files: nothing in {', '.join(sources)} ends with {', '.join(known)} or is an index.json of MDS "
            "shards"
        )
    units: list[Unit] = []
    group: list[tuple[str, tuple]] = []
    seen: set[tuple[int, int]] = set()
    for name, shard in sorted(found.items()):
        stamp = (0, 0)  # of a shard that is missing, or a link that leads nowhere
        if os.path.exists(name):
            status = os.stat(name)
            stamp = (status.st_size, status.st_mtime_ns)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
        if shard is not None:
            units.append(Unit((name,), stamp, shard))
        elif name.endswith((*LINES, PARQUET)):
            units.append(Unit((name,), (stamp,)))
        else:
            group.append((name, stamp))
            if len(group) == UNIT_FILES or sum(size for _, (size, _) in group) >= UNIT_BYTES:
                units.append(Unit(*zip(*group, strict=True)))
                group = []
    if group:
        units.append(Unit(*zip(*group, strict=True)))
    return units + [Unit((str(part),), (part.state,), part=part) for part in parts]


def visible_files(directory: Path) -> Iterator[Path]:
    """The files below a directory, hidden ones left out, through links too; each directory once, so loops end.

    Links that lead nowhere are among them; sockets, pipes and devices are not.

    Raises:
        OSError: a directory cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise error

    seen = {os.path.realpath(directory)}
    for folder, folders, names in os.walk(directory, onerror=refuse, followlinks=True):
        kept = []
        for name in sorted(folders):
            real = os.path.realpath(os.path.join(folder, name))
            if not name.startswith(".") and real not in seen:
                seen.add(real)
                kept.append(name)
        folders[:] = kept
        for name in names:
            file = Path(folder) / name
            if not name.startswith(".") and (file.is_file() or (file.is_symlink() and not os.path.exists(file))):
                yield file


def read_documents(files: tuple[str, ...], text_field: str, chat: bool = False) -> Iterator[dict[str, Any]]:
    """Read documents of text, JSON lines and Parquet; what is bad becomes a row of its own, with no text and the
    problem named.

    With `chat`, the text of a JSON line is its list of messages.

    Yields:
        dict(text, file, line, problem); line (of Parquet the row) counts from 1, problem is "" for a document.
    """
    for file in files:
        if file.endswith(LINES):
            parse = parse_chat if chat else partial(parse_line, text_field=text_field)
            yield from placed(file, enumerate(read_lines(file, parse), start=1), "the file is empty")
        elif file.endswith(PARQUET):
            yield from placed(file, enumerate(read_parquet(file, text_field), start=1), "the file has no rows")
        else:
            yield from placed(file, read_text(file))


def read_columns(part: hub.Part, column: str) -> Iterator[dict[str, Any]]:
    """As `read_documents`, of a part of a data set."""
    rows = (
        checked(text, f"column {column!r}")
        if isinstance(text, str)
        else ("", f"no text: column {column!r} is {type(text).__name__}")
        for text in hub.read_part(part, column)
    )
    return placed(str(part), enumerate(rows, start=1))


def placed(file: str, rows: Iterable[tuple[int, tuple[Any, str]]], empty: str = "") -> Iterator[dict[str, Any]]:
    """Rows (line, (text, problem)) as `read_documents` yields them; what has neither text nor problem is left out.

    Where they cannot be read to their end, and with `empty` where there are none, a row says so.
    """
    line = 0
    try:
        for line, (text, problem) in rows:
            if text or problem:
                empty = ""
                yield {"text": text, "file": file, "line": line, "problem": problem}
    except (OSError, EOFError, zlib.error) as error:
        empty = ""
        yield {"text": "", "file": file, "line": line + 1, "problem": f"cannot be read from here on: {error}"}
    if empty:
        yield {"text": "", "file": file, "line": 1, "problem": f"no text: {empty}"}


def read_lines(file: str, parse: Callable[[bytes], tuple[Any, str]]) -> Iterator[tuple[Any, str]]:
    """What `parse` makes of each JSON line; ("", "") of a blank one.

    Raises:
        OSError, EOFError, zlib.error: the file cannot be read, or not to its end.
    """
    with gzip.open(file, "rb") if file.endswith(".gz") else open(file, "rb") as lines:
        for number, raw in enumerate(lines):
            raw = raw if number else raw.removeprefix(b"\xef\xbb\xbf")
            yield parse(raw) if raw.strip() else ("", "")


def read_text(file: str) -> Iterator[tuple[int, tuple[str, str]]]:
    """The one document of a file of text, with line 1, or with the line in which it is wrong.

    Raises:
        OSError: the file cannot be read.
    """
    raw = Path(file).read_bytes().removeprefix(b"\xef\xbb\xbf")
    try:
        yield 1, checked(raw.decode("utf-8"), "the file")
    except UnicodeDecodeError as error:
        yield raw.count(b"\n", 0, error.start) + 1, ("", unreadable(error))


def parse_line(raw: bytes, text_field: str) -> tuple[str, str]:
    """(text, "") of one JSON line, or ("", what is wrong with it)."""
    try:
        text = json.loads(raw.decode("utf-8"))[text_field]
        text.encode("utf-8")  # JSON may hold half a surrogate pair
        return checked(text, f"field {text_field!r}")
    except (KeyError, TypeError):
        return "", f"no text: no field {text_field!r}"
    except AttributeError:
        return "", f"no text: field {text_field!r} is not a string"
    except (ValueError, RecursionError) as error:  # also a number of more digits than Python reads
        return "", unreadable(error)


def checked(text: str, where: str) -> tuple[str, str]:
    """(text, "") of a document, or ("", what is wrong with it): nothing in it, or a character that is in no text."""
    if not text.strip():
        return "", f"no text: {where} is empty"
    if "\0" in text:
        return "", f"no text: {where} holds NUL characters (UTF-16, or something that is no text?)"
    return text, ""


def read_parquet(file: str, column: str) -> Iterator[tuple[str, str]]:
    """Each row of a Parquet file: (text, ""), or ("", what is wrong with it).

    A column that is missing or holds no text is one problem of the whole file.

    Raises:
        OSError: the file cannot be read, or not to its end.
    """
    require("data", "pyarrow", what=file)
    import pyarrow
    from pyarrow import parquet, types

    try:
        with parquet.ParquetFile(file) as opened:
            if column not in opened.schema_arrow.names:
                yield "", f"no text: no column {column!r}, only {', '.join(opened.schema_arrow.names)}"
                return
            kind = opened.schema_arrow.field(column).type
            value = kind.value_type if types.is_dictionary(kind) else kind
            if not (types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)):
                yield "", f"no text: column {column!r} is {kind}"
                return
            for batch in opened.iter_batches(PARQUET_ROWS, columns=[column], use_threads=False):
                # As bytes: a writer need not have checked that they are UTF-8.
                for raw in batch.column(0).cast(value).cast(pyarrow.large_binary()).to_pylist():
                    try:
                        yield checked("" if raw is None else raw.decode("utf-8"), f"column {column!r}")
                    except UnicodeDecodeError as error:
                        yield "", unreadable(error)
    except (pyarrow.ArrowException, OSError) as error:  # messages of several lines
        raise OSError(" ".join(str(error).split())) from error


@lru_cache(maxsize=1)
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
            content = np.frombuffer(text.encode("utf-8"), np.uint8)
            ids = np.ones(len(content) + 1, np.uint16)
            np.add(content, 3, out=ids[:-1], dtype=np.uint16)
            return ids

        return encode_bytes, BYTES_VOCABULARY, 0
    from pod.data.tokenizer import load_tokenizer as load  # here: `--help` should not wait for tokenizers

    tokenizer = load(name)
    end = tokenizer.eos_token_id

    def encode(text: str) -> np.ndarray:
        ids = tokenizer(text, verbose=False)["input_ids"]
        return np.asarray(ids if end is None or ids[-1:] == [end] else [*ids, end], np.int64)

    pad = tokenizer.pad_token_id
    return encode, len(tokenizer), pad if pad is not None else end or 0


def read_shard(shard: Shard, vocab_size: int) -> Iterator[np.ndarray]:
    """The documents of an MDS shard of ProLong: token ids [n] as they lie there, without special tokens.

    Raises:
        BadShard: the shard is damaged.
        ValueError: an id is not below `vocab_size`.
    """
    for number, (ids, indices) in enumerate(shard.samples(("input_ids", "indices"))):
        if ids.ndim != 1 or indices.size % 2:
            raise BadShard(f"{shard.file}: sample {number} has ids of shape {ids.shape}, indices {indices.shape}")
        if ids.size and ids.max() >= vocab_size:
            raise ValueError(
                f"{shard.file}: sample {number} has token id {ids.max()}, the tokenizer has {vocab_size} ids: name the "
                "tokenizer that the shards were made with"
            )
        for begin, end in indices.reshape(-1, 2).tolist():
            if not begin <= end <= len(ids):
                raise BadShard(f"{shard.file}: sample {number} of {len(ids)} tokens has a document {begin}..{end}")
            if begin < end:
                yield ids[begin:end]


def read_unit(unit: Unit, reading: Reading, folder: Path, skip_bad_shards: bool) -> dict[str, Any]:
    """Read and tokenise one unit into `folder`, unless it lies there already, whole.

    Returns:
        dict(key, documents, tokens, problems); key is None where an MDS shard is bad and skipped.

    Raises:
        BadShard: an MDS shard is bad, and `skip_bad_shards` is off.
        ValueError: a token id that the tokenizer does not have.
    """
    key = reading.key(unit)
    ids_file, table_file, note = (folder / f"{key}{suffix}" for suffix in (".ids", ".npy", ".json"))
    learned_file = folder / f"{key}.learned"
    if known := whole(note):
        return known
    dtype = token_dtype(reading.vocab_size)
    table, problems, tokens, written = bytearray(), [], 0, hashlib.sha256()

    def documents() -> Iterator[tuple[np.ndarray, np.ndarray | None, bytes]]:
        if unit.shard is not None:
            for ids in read_shard(unit.shard, reading.vocab_size):
                yield ids, None, hashlib.sha256(ids.tobytes()).digest()
            return
        encode = load_tokenizer(reading.tokenizer)[0]
        encode_chat = load_chat(reading.tokenizer, reading.chat_template) if reading.chat else None
        if unit.part is not None:
            rows = read_columns(unit.part, reading.text_field)
        else:
            rows = read_documents(unit.files, reading.text_field, reading.chat)
        for row in rows:
            text, ids, learned = row.pop("text"), (), None
            if not row["problem"]:
                try:
                    ids, learned, text = encode_chat(text) if encode_chat is not None else (encode(text), None, text)
                    row["problem"] = "" if len(ids) else "no text: the tokenizer makes no token of it"
                except BadChat as error:
                    row["problem"] = str(error)
            if row["problem"]:
                problems.append(row)
            else:
                yield ids, learned, hashlib.sha256(text.encode()).digest()

    try:
        with ExitStack() as files:
            files.enter_context(naming(ids_file))
            file = files.enter_context(open(ids_file, "wb"))
            marks = files.enter_context(open(learned_file, "wb")) if reading.chat else None
            for ids, learned, own_sum in documents():
                content = np.ascontiguousarray(ids, dtype).data
                file.write(content)
                written.update(content)
                if marks is not None:
                    marks.write(learned.astype(np.uint8).data)
                table += len(ids).to_bytes(8, "little") + own_sum
                tokens += len(ids)
                if reading.is_enough(len(table) // DOCUMENT.itemsize, tokens):
                    break
    except BadShard as error:
        ids_file.unlink()
        if not skip_bad_shards:
            raise BadShard(f"{error}. Fetch it again, or leave it out with --skip-bad-shards") from None
        problem = {"file": unit.files[0], "line": 0, "problem": f"bad shard, skipped: {error}"}
        return {"key": None, "documents": 0, "tokens": 0, "problems": [problem]}
    with naming(table_file):
        np.save(table_file, np.frombuffer(table, DOCUMENT))
    result = {"key": key, "documents": len(table) // DOCUMENT.itemsize, "tokens": tokens, "problems": problems}
    sums = {file.name: digest(file) for file in [table_file, *([learned_file] if reading.chat else [])]}
    note_whole(note, result, sums | {ids_file.name: written.hexdigest()})
    return result
