"""Writing prepared data, the format of `pod/data/prepared.py`, shard by shard; digests are computed while writing."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from pod.data.prepared import FORMAT, KINDS, PADDING, VERSION, index_digest, token_dtype
from pod.files import naming, publish, write_text

SHARD_BYTES = 2**30


def samples_of_a_shard(sequence_length: int, vocab_size: int) -> int:
    """Samples whose tokens are about 1 GiB, at least 1."""
    return max(1, SHARD_BYTES // (sequence_length * token_dtype(vocab_size).itemsize))


class ShardWriter:
    """Writes the files of one shard: its tokens, its document ids unless every sample is one document, its marks.

    Args:
        directory: where the files go.
        split, number: which shard, as in its files' names.
        kinds: what samples come with beside tokens, in the order of `KINDS`: document ids, marked answers, marks of
            what is learned.
        sequence_length, vocab_size: as in `SampleWriter`.
    """

    def __init__(
        self, directory: Path, split: str, number: int, kinds: Iterable[str], *, sequence_length: int, vocab_size: int
    ) -> None:
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self.samples = self.tokens = 0
        self._names = {kind: f"{kind}-{split}-{number:05d}.bin" for kind in ("tokens", *kinds)}
        self._files = {kind: open(directory / name, "wb") for kind, name in self._names.items()}
        self._digests = {kind: hashlib.sha256() for kind in self._names}

    def add(
        self,
        tokens: np.ndarray,
        document_ids: np.ndarray | None = None,
        answers: np.ndarray | None = None,
        learned: np.ndarray | None = None,
    ) -> None:
        """Append samples.

        Args:
            tokens: [T] or [n, T] integers in [0, vocab_size).
            document_ids: the same shape: non-decreasing in each sample, -1 (at the end only) for padding.
            answers: the same shape, bool: the tokens whose accuracy validation reports.
            learned: the same shape, bool: the tokens that have labels; all when None.

        Raises:
            ValueError: a wrong length or id, or document ids, answers or marks where there must be none, or none where
                there must be.
        """
        tokens = np.atleast_2d(tokens)
        if tokens.ndim != 2 or tokens.shape[1] != self.sequence_length:
            raise ValueError(f"samples have shape {tokens.shape}, sequence_length is {self.sequence_length}")
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise ValueError(f"token ids span {tokens.min()} to {tokens.max()}, vocab_size is {self.vocab_size}")
        given = {"documents": document_ids, "answers": answers, "learned": learned}
        given = {kind: np.atleast_2d(values) for kind, values in given.items() if values is not None}
        if unlike := sorted({"tokens", *given} ^ set(self._files)):
            raise ValueError(f"{', '.join(unlike)}: for all samples of a split or for none")
        document_ids, padding = given.pop("documents", None), 0
        for kind, marks in given.items():
            if marks.shape != tokens.shape or marks.dtype != bool:
                raise ValueError(f"{kind} are {marks.dtype} {marks.shape}: bool, {tokens.shape} as the tokens")
            self._append(kind, marks.astype(np.uint8))
        if document_ids is not None:
            span = (document_ids.min(initial=0), document_ids.max(initial=0))
            stored = document_ids.astype("<u2")  # -1 becomes 65,535
            in_range = -1 <= span[0] and span[1] < PADDING
            if stored.shape != tokens.shape or not in_range or (stored[:, 1:] < stored[:, :-1]).any():
                raise ValueError("document_ids: the shape of tokens, non-decreasing below 65,535, -1 only at the end")
            self._append("documents", stored)
            padding = int((stored == PADDING).sum()) if span[0] < 0 else 0
        self._append("tokens", tokens.astype(self.dtype, copy=False))
        self.samples += len(tokens)
        self.tokens += tokens.size - padding

    def _append(self, kind: str, values: np.ndarray) -> None:
        content = np.ascontiguousarray(values).data
        with naming(self._files[kind].name):
            self._files[kind].write(content)
        self._digests[kind].update(content)

    def close(self) -> dict[str, Any]:
        """Close the files; the shard's entry in the index: samples, and file and sha256 of each kind."""
        for file in self._files.values():
            with naming(file.name):
                file.close()
        entries = {kind: {"file": self._names[kind], "sha256": self._digests[kind].hexdigest()} for kind in self._names}
        return {"samples": self.samples, **entries}


class SampleWriter:
    """Writes a prepared directory beside its place and renames it when it is whole; a failure leaves nothing.

        with SampleWriter("prepared/x", sequence_length=1024, vocab_size=259, tokenizer="bytes") as writer:
            writer.add("train", tokens, document_ids)

    Args:
        path: the directory to write.
        sequence_length: tokens of a sample (T), at least 2.
        vocab_size: one more than the largest token id.
        tokenizer: the tokenizer's name, as `data/prepare.py --tokenizer` takes it.
        force: replace a prepared directory that is there already.
        shard_samples: samples of a shard; about 1 GiB of tokens by default.
        directory: where the files lie until the rename, on the file system of `path`. It may hold shards that other
            processes wrote, to be adopted, and a failure leaves it as it is. By default a new temporary directory.

    Attributes:
        held_out: sha256 (hex) of the held-out documents, to be set before the end.
        length_intervals: the lengths in tokens that part the intervals the training documents were drawn from in equal
            shares, to be set before the end; None when they were not.

    Raises:
        FileExistsError: `path` exists and `force` is off, or it is something else than a prepared directory.
        ValueError: `sequence_length` or `vocab_size` is below 2.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        sequence_length: int,
        vocab_size: int,
        tokenizer: str,
        force: bool = False,
        shard_samples: int | None = None,
        directory: Path | None = None,
    ) -> None:
        if sequence_length < 2:
            raise ValueError(f"sequence_length is {sequence_length}: next-token training needs at least 2")
        if vocab_size < 2:
            raise ValueError(f"vocab_size is {vocab_size}: at least 2")
        self.path = Path(path)
        self.force = force
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.shard_samples = shard_samples or samples_of_a_shard(sequence_length, vocab_size)
        self.splits: dict[str, dict[str, Any]] = {}
        self.held_out: list[str] = []
        self.length_intervals: list[int] | None = None
        self._directory = directory
        self._open: dict[str, ShardWriter] = {}
        self._check_free()

    def _check_free(self) -> None:
        if not self.path.exists():
            return
        if not self.force:
            raise FileExistsError(f"{self.path} exists: choose another --out, or pass --force to replace it")
        index = self.path / "index.json"  # MDS shards have one too
        is_prepared = index.is_file() and f'"{FORMAT}"'.encode() in index.read_bytes()
        if not self.path.is_dir() or (any(self.path.iterdir()) and not is_prepared):
            raise FileExistsError(f"{self.path} is not a prepared directory, so --force will not replace it")

    def __enter__(self) -> "SampleWriter":
        parent = self.path.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        # `directory` is where files lie until the rename; more files may be put there.
        self.directory = self._directory or Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", dir=parent))
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            for split in list(self._open):
                self._close_shard(split)
            if error is None:
                self._publish()
        finally:
            if self._directory is None:
                shutil.rmtree(self.directory, ignore_errors=True)

    def _entry(self, split: str, **given: bool) -> dict[str, Any]:
        if split not in ("train", "validation"):
            raise ValueError(f"split is {split!r}: 'train' or 'validation'")
        entry = self.splits.setdefault(split, {"samples": 0, "tokens": 0, **given, "shards": []})
        for kind, is_given in given.items():
            if entry[kind] != is_given:
                raise ValueError(f"split {split!r}: {kind} for all samples or for none")
        return entry

    def add(
        self,
        split: str,
        tokens: np.ndarray,
        document_ids: np.ndarray | None = None,
        answers: np.ndarray | None = None,
    ) -> None:
        """Append samples to a split.

        Args:
            split: "train" or "validation".
            tokens, document_ids, answers: as in `ShardWriter.add`; no document ids when every sample of the split is
                one whole document.

        Raises:
            ValueError: a wrong split name, length, id, or a split with document ids or answers for some samples only.
        """
        given = [None if values is None else np.atleast_2d(values) for values in (tokens, document_ids, answers)]
        entry = self._entry(split, documents=document_ids is not None, answers=answers is not None, learned=False)
        written = 0
        while written < len(given[0]):
            if split not in self._open:
                self._open[split] = ShardWriter(
                    self.directory,
                    split,
                    len(entry["shards"]),
                    [kind for kind in KINDS[1:] if entry[kind]],
                    sequence_length=self.sequence_length,
                    vocab_size=self.vocab_size,
                )
            shard = self._open[split]
            part = slice(written, written + self.shard_samples - shard.samples)
            shard.add(*(None if values is None else values[part] for values in given))
            written = part.stop
            if shard.samples == self.shard_samples:
                self._close_shard(split)

    def adopt(self, split: str, shard: dict[str, Any], tokens: int) -> None:
        """Append a shard that lies in `directory` already.

        Args:
            split: "train" or "validation".
            shard: what `ShardWriter.close` returned.
            tokens: of the shard, without padding.
        """
        entry = self._entry(split, **{kind: kind in shard for kind in KINDS[1:]})
        entry["shards"].append(shard)
        entry["samples"] += shard["samples"]
        entry["tokens"] += tokens

    def _close_shard(self, split: str) -> None:
        shard = self._open.pop(split)
        self.adopt(split, shard.close(), shard.tokens)

    def _publish(self) -> None:
        if not self.splits:
            raise ValueError(f"{self.path}: no sample was written")
        hashes = "".join(f"{value}\n" for value in sorted(self.held_out))
        write_text(self.directory / "held-out-sha256.txt", hashes)
        index = {
            "format": FORMAT,
            "version": VERSION,
            "tokenizer": self.tokenizer,
            "vocab_size": self.vocab_size,
            "sequence_length": self.sequence_length,
            "dtype": token_dtype(self.vocab_size).name,
            "length_intervals": self.length_intervals,
            "splits": dict(sorted(self.splits.items())),
            "held_out": {
                "file": "held-out-sha256.txt",
                "documents": len(self.held_out),
                "sha256": hashlib.sha256(hashes.encode()).hexdigest(),
            },
        }
        index["sha256"] = index_digest(index)
        write_text(self.directory / "index.json", json.dumps(index, indent=2) + "\n")
        mask = os.umask(0)
        os.umask(mask)
        self.directory.chmod(0o777 & ~mask)  # mkdtemp makes it private
        self._check_free()
        publish(self.directory, self.path)
