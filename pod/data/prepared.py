"""Prepared training data: the format of a directory of samples of one length, and its memory-mapped reader.

A prepared directory is written by `python -m pod.prepare` or `data/demo_corpus.py` and holds

    index.json                   format, tokenizer, lengths, for each split its shards with sizes and sha256, and the
                                 sha256 of all this
    tokens-SPLIT-00000.bin       [n, T] uint16 (uint32 where the vocabulary has more than 65,535 ids), little-endian
    documents-SPLIT-00000.bin    [n, T] uint16, the document of each token inside its sample, 65,535 for padding;
                                 absent when every sample is one whole document
    answers-SPLIT-00000.bin      [n, T] uint8, 1 where a token answers a question that the sample itself has answered
                                 before (a planted key's digits); absent when nobody marked any
    learned-SPLIT-00000.bin      [n, T] uint8, 1 where a token is learned (the assistant's turns of a chat); absent when
                                 all are
    held-out-sha256.txt          sha256 of each held-out document's text, sorted, one a line

Splits are "train" and "validation". T is the sample length, n a shard's number of samples.
"""

import bisect
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from pod.files import digest, read_json
from pod.training.loss import IGNORED

FORMAT = "pod-prepared"
VERSION = 1
PADDING = 65535  # in a documents file
KINDS = ("tokens", "documents", "answers", "learned")  # of files; the first is always there


def token_dtype(vocab_size: int) -> np.dtype:
    """What token ids are stored as: little-endian uint16, or uint32 above 65,535 ids."""
    return np.dtype("<u2" if vocab_size <= 65535 else "<u4")


def index_digest(index: dict[str, Any]) -> str:
    """sha256 of an index without its own: a number in it that changed would otherwise still be a number."""
    content = {name: value for name, value in index.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class PreparedData:
    """A prepared directory, opened: its index checked, its shards memory-mapped when first read.

    Attributes:
        path, tokenizer, vocab_size, sequence_length: what the index says.
        length_intervals: the lengths in tokens that part the intervals which the training documents were drawn from in
            equal shares; None when they were not.
        splits: the index's entry of each split: samples, tokens (without padding), documents, shards.

    Raises:
        FileNotFoundError: no such directory, or a file of it is missing.
        ValueError: not a prepared directory of this version, or a file whose size is not what the index says.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        index_file = self.path / "index.json"
        if not index_file.is_file():
            demo = "data/demo" in self.path.as_posix()
            options = f"--source PATH --out {self.path} --tokenizer TOKENIZER --sequence-length N"
            raise FileNotFoundError(
                f"no prepared data at {self.path} (no index.json there). Make it with: "
                + (
                    f"python data/demo_corpus.py --out {self.path} --length L --samples N --validation-samples M"
                    if demo
                    else f"python -m pod.prepare {options}, with the tokenizer of the model"
                )
            )
        self.index = read_json(index_file)
        if not isinstance(self.index, dict) or self.index.get("format") != FORMAT:
            raise ValueError(f"{index_file} is not the index of a prepared directory (format {FORMAT!r})")
        if self.index.get("version") != VERSION:
            raise ValueError(
                f"{index_file} has version {self.index.get('version')}, this code reads {VERSION}: prepare again"
            )
        if self.index.get("sha256") not in (None, index_digest(self.index)):
            raise ValueError(f"{index_file} is damaged: its sha256 is not the one it names; prepare again")
        try:
            self._read_index()
        except (AttributeError, LookupError, OverflowError, TypeError) as error:
            kind = type(error).__name__
            raise ValueError(
                f"{index_file} is damaged: a field is missing or of another type ({kind}: {error}); prepare again"
            ) from error

    def require_length(self, sequence_length: int) -> None:
        """See that samples have so many tokens.

        Raises:
            ValueError: they have not; says what to set.
        """
        if self.sequence_length != sequence_length:
            raise ValueError(
                f"sequence_length is {sequence_length}, but {self.path} was prepared with {self.sequence_length}: "
                f"set sequence_length={self.sequence_length}, or prepare again with --sequence-length {sequence_length}"
            )

    def _read_index(self) -> None:
        self.tokenizer: str = self.index["tokenizer"]
        self.vocab_size: int = self.index["vocab_size"]
        self.sequence_length: int = self.index["sequence_length"]
        self.length_intervals: list[int] | None = self.index.get("length_intervals")
        if self.index["dtype"] != token_dtype(self.vocab_size).name or self.sequence_length < 2:
            raise TypeError(f"dtype {self.index['dtype']!r}, sequence_length {self.sequence_length}")
        self.dtype = token_dtype(self.vocab_size)
        self.splits: dict[str, dict[str, Any]] = self.index["splits"]
        for entry in [*(entry for split in self.splits for entry in self._files(split)), self.index["held_out"]]:
            if not isinstance(entry["sha256"], str) or entry["file"] != Path(entry["file"]).name:
                raise TypeError(f"a file {entry!r}")
            if not (self.path / entry["file"]).is_file():
                raise FileNotFoundError(f"{self.path / entry['file']} is missing: the index of {self.path} names it")
        for split in self.splits:
            samples = [shard["samples"] for shard in self.splits[split]["shards"]]
            if not samples or min(samples) < 1 or sum(samples) != self.splits[split]["samples"]:
                raise TypeError(f"shards of {samples} samples in the {split} split")
            for shard in self.splits[split]["shards"]:
                for kind in KINDS:
                    if kind == "tokens" or kind in shard:
                        self._check_size(kind, shard)
                    if kind != "tokens" and (kind in shard) != bool(self.splits[split].get(kind)):
                        raise TypeError(f"{kind} of some shards of the {split} split only")

    def _check_size(self, kind: str, shard: dict[str, Any]) -> None:
        file = self.path / shard[kind]["file"]
        wanted = shard["samples"] * self.sequence_length * self._dtype(kind).itemsize
        if file.stat().st_size != wanted:
            raise ValueError(
                f"{file} has {file.stat().st_size} bytes, its index says {wanted}: truncated; prepare again"
            )

    def _dtype(self, kind: str) -> np.dtype:
        return {"tokens": self.dtype, "documents": np.dtype("<u2")}.get(kind, np.dtype(np.uint8))

    def verify(self, split: str | None = None) -> None:
        """Read every file, or those of one split, and compare its sha256 with the index.

        Raises:
            ValueError: naming the file that differs.
        """
        entries = [entry for name in self.splits if split in (None, name) for entry in self._files(name)]
        for entry in [*entries, *([self.index["held_out"]] if split is None else [])]:
            if digest(self.path / entry["file"]) != entry["sha256"]:
                raise ValueError(f"{self.path / entry['file']} is not what its index says (sha256): prepare again")

    def held_out(self) -> list[str]:
        """sha256 (hex) of each held-out document's UTF-8 text, sorted."""
        return (self.path / self.index["held_out"]["file"]).read_text().split()

    def maps(self, split: str, kind: str) -> list[np.ndarray]:
        """The split's shards of one kind (of `KINDS`), each [n, T], read-only and memory-mapped."""
        length, dtype = self.sequence_length, self._dtype(kind)
        return [
            np.memmap(self.path / shard[kind]["file"], dtype, "r", shape=(shard["samples"], length))
            for shard in self.splits[split]["shards"]
        ]

    def fingerprint(self, split: str) -> str:
        """Hex digest that two splits share exactly when they hold the same samples in the same order."""
        hashes = [entry["sha256"] for entry in self._files(split)]
        return hashlib.sha256(json.dumps([self.sequence_length, hashes]).encode()).hexdigest()

    def _files(self, split: str) -> list[dict[str, str]]:
        shards = self.splits[split]["shards"]
        return [shard[kind] for shard in shards for kind in KINDS if kind in shard]


class PreparedDataset(Dataset):
    """The samples of one split.

    An item is a dict of int64 tensors of shape [T]:

        input_ids      token ids
        labels         input_ids, unshifted (the model shifts, as Hugging Face's do), with -100 at padding, at each
                       document's first token, which nothing before it foretells, and of chats outside of the
                       assistant's turns
        document_ids   the document of each token, -1 for padding; absent when the sample is a single document (what
                       follows it, if it is padded, has no labels and is never looked at by causal attention)
        answers        bool, the marked tokens; absent when the split marks none

    Args:
        path: a prepared directory, or `PreparedData`.
        split: "train" or "validation".

    Raises:
        ValueError: the directory has no such split.
    """

    def __init__(self, path: str | Path | PreparedData, split: str = "train") -> None:
        self.data = path if isinstance(path, PreparedData) else PreparedData(path)
        if split not in self.data.splits:
            raise ValueError(f"{self.data.path} has no {split} split, only: {', '.join(self.data.splits)}")
        self.split = split
        self._ends = np.cumsum([shard["samples"] for shard in self.data.splits[split]["shards"]]).tolist()
        self._maps: dict[str, list[np.ndarray]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Each process maps for itself: a pickled memory map would carry its content along.
        return {**self.__dict__, "_maps": None}

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rows = self._rows(index)
        input_ids = torch.from_numpy(rows["tokens"].astype(np.int64))
        labels = input_ids.clone()
        labels[0] = IGNORED
        item = {"input_ids": input_ids, "labels": labels}
        if "answers" in rows:
            item["answers"] = torch.from_numpy(rows["answers"].astype(bool))
        if "learned" in rows:
            labels[torch.from_numpy(rows["learned"] == 0)] = IGNORED
        if "documents" in rows:
            document_ids = torch.from_numpy(rows["documents"].astype(np.int64))
            document_ids[document_ids == PADDING] = -1
            labels[1:][document_ids[1:] != document_ids[:-1]] = IGNORED
            labels[document_ids < 0] = IGNORED
            if document_ids.max() > 0:
                item["document_ids"] = document_ids
        return item

    def texts(self, index: int) -> list[Tensor]:
        """The token ids of each document of a sample, [at most T] int64 each, without padding.

        Documents packed into one sample do not see each other in training: whoever reads them as a model does, reads
        them one by one. Where samples were not packed, each is one text.

        Raises:
            IndexError: there is no such sample.
        """
        rows = self._rows(index)
        tokens = torch.from_numpy(rows["tokens"].astype(np.int64))
        if "documents" not in rows:
            return [tokens]
        of_document, sizes = np.unique(rows["documents"], return_counts=True)  # in order; padding is the largest
        parts = zip(of_document, tokens.split(sizes.tolist()), strict=True)
        return [part for document, part in parts if document != PADDING]

    def _rows(self, index: int) -> dict[str, np.ndarray]:
        """A sample as it lies in the files of each kind that the split has."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        if self._maps is None:
            first = self.data.splits[self.split]["shards"][0]  # as all are
            self._maps = {kind: self.data.maps(self.split, kind) for kind in KINDS if kind in first}
        shard = bisect.bisect_right(self._ends, index)
        row = index - (self._ends[shard - 1] if shard else 0)
        return {kind: shards[shard][row] for kind, shards in self._maps.items()}


def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack samples to [B, T]. Where only some have `document_ids`, the single documents among them get zeros."""
    if any("document_ids" in item for item in items):
        items = [{"document_ids": torch.zeros_like(item["input_ids"]), **item} for item in items]
    return default_collate(items)
