"""Prepared training data: memory-mapped samples of one length, their index, and the DataModule that reads them.

A prepared directory is written by `data/prepare.py` or `data/demo_corpus.py` and holds

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
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from pod.files import naming, publish, read_json, write_text

FORMAT = "pod-prepared"
VERSION = 1
PADDING = 65535  # in a documents file
IGNORED = -100  # a label that no loss counts
SHARD_BYTES = 2**30
KINDS = ("tokens", "documents", "answers", "learned")  # of files; the first is always there


class ShardWriter:
    """Writes the files of one shard: its tokens, its document ids unless every sample is one document, its marks.

    Args:
        directory: where the files go.
        split, number: which shard, as in its files' names.
        sequence_length, vocab_size: as in `SampleWriter`.
        documents, answers, learned: whether samples come with document ids, with marked answers, with marks of what is
            learned.
    """

    def __init__(
        self,
        directory: Path,
        split: str,
        number: int,
        *,
        sequence_length: int,
        vocab_size: int,
        documents: bool,
        answers: bool = False,
        learned: bool = False,
    ) -> None:
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self.samples = self.tokens = 0
        kinds = ["tokens"] + ["documents"] * documents + ["answers"] * answers + ["learned"] * learned
        self._names = {kind: f"{kind}-{split}-{number:05d}.bin" for kind in kinds}
        self._files = {kind: open(directory / name, "wb") for kind, name in self._names.items()}
        self._digests = {kind: hashlib.sha256() for kind in kinds}

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
        tokens = np.atleast_2d(np.asarray(tokens))
        if tokens.ndim != 2 or tokens.shape[1] != self.sequence_length:
            raise ValueError(f"samples have shape {tokens.shape}, sequence_length is {self.sequence_length}")
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise ValueError(f"token ids span {tokens.min()} to {tokens.max()}, vocab_size is {self.vocab_size}")
        if (document_ids is not None) != ("documents" in self._files):
            raise ValueError("document_ids: for all samples of a split or for none")
        for kind, marks in (("answers", answers), ("learned", learned)):
            if (marks is not None) != (kind in self._files):
                raise ValueError(f"{kind}: for all samples of a split or for none")
            if marks is not None:
                marks = np.atleast_2d(np.asarray(marks))
                if marks.shape != tokens.shape or marks.dtype != bool:
                    raise ValueError(f"{kind} are {marks.dtype} {marks.shape}: bool, {tokens.shape} as the tokens")
                self._append(kind, marks.astype(np.uint8))
        padding = 0
        if document_ids is not None:
            document_ids = np.atleast_2d(np.asarray(document_ids))
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


def token_dtype(vocab_size: int) -> np.dtype:
    """What token ids are stored as: little-endian uint16, or uint32 above 65,535 ids."""
    return np.dtype("<u2" if vocab_size <= 65535 else "<u4")


def samples_of_a_shard(sequence_length: int, vocab_size: int) -> int:
    """Samples whose tokens are about 1 GiB, at least 1."""
    return max(1, SHARD_BYTES // (sequence_length * token_dtype(vocab_size).itemsize))


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
        if not self.path.is_dir() or (any(self.path.iterdir()) and not (self.path / "index.json").is_file()):
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

    def _entry(self, split: str, documents: bool, answers: bool, learned: bool = False) -> dict[str, Any]:
        if split not in ("train", "validation"):
            raise ValueError(f"split is {split!r}: 'train' or 'validation'")
        given = {"documents": documents, "answers": answers, "learned": learned}
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
        tokens = np.atleast_2d(np.asarray(tokens))
        if document_ids is not None:
            document_ids = np.atleast_2d(np.asarray(document_ids))
        if answers is not None:
            answers = np.atleast_2d(np.asarray(answers))
        entry = self._entry(split, document_ids is not None, answers is not None)
        while len(tokens):
            if split not in self._open:
                self._open[split] = ShardWriter(
                    self.directory,
                    split,
                    len(entry["shards"]),
                    sequence_length=self.sequence_length,
                    vocab_size=self.vocab_size,
                    documents=entry["documents"],
                    answers=entry["answers"],
                )
            shard = self._open[split]
            count = self.shard_samples - shard.samples
            parts = (None if part is None else part[:count] for part in (document_ids, answers))
            shard.add(tokens[:count], *parts)
            tokens = tokens[count:]
            answers = None if answers is None else answers[count:]
            document_ids = None if document_ids is None else document_ids[count:]
            if shard.samples == self.shard_samples:
                self._close_shard(split)

    def adopt(self, split: str, shard: dict[str, Any], tokens: int) -> None:
        """Append a shard that lies in `directory` already.

        Args:
            split: "train" or "validation".
            shard: what `ShardWriter.close` returned.
            tokens: of the shard, without padding.
        """
        entry = self._entry(split, *(kind in shard for kind in KINDS[1:]))
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
        index["sha256"] = _own_digest(index)
        write_text(self.directory / "index.json", json.dumps(index, indent=2) + "\n")
        mask = os.umask(0)
        os.umask(mask)
        self.directory.chmod(0o777 & ~mask)  # mkdtemp makes it private
        self._check_free()
        publish(self.directory, self.path)


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
            raise FileNotFoundError(
                f"no prepared data at {self.path} (no index.json there). Make it with: "
                + (
                    f"python data/demo_corpus.py --out {self.path} --length L --samples N --validation-samples M"
                    if demo
                    else f"python data/prepare.py --source PATH --out {self.path} --tokenizer bytes --sequence-length N"
                )
            )
        self.index = read_json(index_file)
        if not isinstance(self.index, dict) or self.index.get("format") != FORMAT:
            raise ValueError(f"{index_file} is not the index of a prepared directory (format {FORMAT!r})")
        if self.index.get("version") != VERSION:
            raise ValueError(
                f"{index_file} has version {self.index.get('version')}, this code reads {VERSION}: prepare again"
            )
        if self.index.get("sha256") not in (None, _own_digest(self.index)):
            raise ValueError(f"{index_file} is damaged: its sha256 is not the one it names; prepare again")
        try:
            self._read_index()
        except (AttributeError, LookupError, OverflowError, TypeError) as error:
            kind = type(error).__name__
            raise ValueError(
                f"{index_file} is damaged: a field is missing or of another type ({kind}: {error}); prepare again"
            ) from error

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
            with open(self.path / entry["file"], "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
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


def _own_digest(index: dict[str, Any]) -> str:
    """sha256 of an index without its own: a number in it that changed would otherwise still be a number."""
    content = {name: value for name, value in index.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        if self._maps is None:
            entry = self.data.splits[self.split]
            self._maps = {
                kind: self.data.maps(self.split, kind) for kind in KINDS if kind == "tokens" or entry.get(kind)
            }
        shard = bisect.bisect_right(self._ends, index)
        row = index - (self._ends[shard - 1] if shard else 0)
        input_ids = torch.from_numpy(self._maps["tokens"][shard][row].astype(np.int64))
        labels = input_ids.clone()
        labels[0] = IGNORED
        item = {"input_ids": input_ids, "labels": labels}
        if "answers" in self._maps:
            item["answers"] = torch.from_numpy(self._maps["answers"][shard][row].astype(bool))
        if "learned" in self._maps:
            labels[torch.from_numpy(self._maps["learned"][shard][row] == 0)] = IGNORED
        if "documents" in self._maps:
            document_ids = torch.from_numpy(self._maps["documents"][shard][row].astype(np.int64))
            document_ids[document_ids == PADDING] = -1
            labels[1:][document_ids[1:] != document_ids[:-1]] = IGNORED
            labels[document_ids < 0] = IGNORED
            if document_ids.max() > 0:
                item["document_ids"] = document_ids
        return item


def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack samples to [B, T]. Where only some have `document_ids`, the single documents among them get zeros."""
    if any("document_ids" in item for item in items):
        items = [{"document_ids": torch.zeros_like(item["input_ids"]), **item} for item in items]
    return default_collate(items)


class ResumableSampler(DistributedSampler):
    """Yields the sample numbers of one epoch for one rank: a permutation that (seed, epoch) alone determine.

    Step s of an epoch takes the next `micro_batch_size * num_replicas` samples of the permutation, of which each rank
    has a contiguous part, so that an optimiser step of the same size sees the same samples however many ranks share
    it. What is left at the end of an epoch and fills no step is dropped.

    It derives from torch's DistributedSampler so that Lightning recognises that the work is split and puts no sampler
    of its own in its place, which would shuffle again and know of no position.

    Attributes:
        epoch: which permutation; set by the loader.
        start: samples of the permutation, over all ranks, that are skipped because they were trained on already.
    """

    def __init__(
        self,
        dataset: Dataset,
        micro_batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed)
        self.micro_batch_size = micro_batch_size
        self.start = 0

    @property
    def step(self) -> int:
        """Samples that all ranks together take at once."""
        return self.micro_batch_size * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        count = len(self.dataset)
        order = np.random.default_rng((self.seed, self.epoch)).permutation(count) if self.shuffle else np.arange(count)
        for first in range(self.start, count - self.step + 1, self.step):
            mine = first + self.rank * self.micro_batch_size
            yield from order[mine : mine + self.micro_batch_size].tolist()

    def __len__(self) -> int:
        return len(self.dataset) // self.step * self.micro_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Nothing: the loader counts epochs. Lightning calls this only after it has asked the loader to iterate."""


class ResumableLoader(StatefulDataLoader):
    """A StatefulDataLoader whose state is a position in the data and nothing else: {"epoch", "samples"}.

    The position counts the batches handed out, not those that workers have prefetched. Because the order of samples
    follows from it alone, a run may go on with another number of workers or ranks, which torchdata's own state
    (a snapshot of every worker) does not allow.

    Iterating begins the next epoch, or where `load_state_dict` said. Needs a `ResumableSampler`.

    Attributes:
        in_flight: called when the state is asked for: how many batches were handed out but not trained on.
    """

    epoch = 0
    samples = 0  # of this epoch, over all ranks
    in_flight: Callable[[], int] | None = None
    _begun = False  # whether the next iteration is a new epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        # A generator, so nothing is prefetched for an iterator that is made and thrown away, as Lightning does.
        sampler = self.sampler
        if self._begun or self.samples + sampler.step > len(sampler.dataset):
            self.epoch += 1
            self.samples = 0
        self._begun = True
        sampler.epoch, sampler.start = self.epoch, self.samples
        iterator = super().__iter__()
        try:
            for batch in iterator:
                self.samples += sampler.step
                yield batch
        finally:
            # The last references: workers end now. Left to the garbage collector, each is waited for in vain for 5 s.
            if self._iterator is iterator:
                self._iterator = None
            del iterator

    def state_dict(self) -> dict[str, int]:
        unused = self.in_flight() if self.in_flight is not None else 0
        return {"epoch": self.epoch, "samples": max(0, self.samples - unused * self.sampler.step)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epoch, self.samples = state_dict["epoch"], state_dict["samples"]
        self._begun = False


class PodDataModule(LightningDataModule):
    """Reads a prepared directory; its state is part of Lightning's checkpoints, so that a resumed run goes on exactly.

    Under a distributed strategy the ranks share the samples as the strategy's `distributed_sampler_kwargs` say
    (num_replicas, rank).

    Args:
        path: a prepared directory.
        sequence_length: tokens of a sample; must be the prepared one.
        micro_batch_size: samples of one forward on one rank.
        seed: of the order of the samples.
        num_workers: processes that read; the samples and their order do not depend on it.
        shuffle: a new permutation each epoch; else the order in the files.
        validation_path: another prepared directory to validate on: its validation split if it has one, else its
            train split. By default the validation split of `path`.
        length_intervals: what the training documents must have been drawn by; None takes any data.

    Raises:
        FileNotFoundError: no prepared directory there; the message has the command that makes one.
        ValueError: a `sequence_length` or `length_intervals` other than the prepared ones, a file of the wrong size, a
            number out of range.
    """

    def __init__(
        self,
        path: str | Path,
        sequence_length: int,
        micro_batch_size: int,
        seed: int = 0,
        num_workers: int = 0,
        shuffle: bool = True,
        validation_path: str | Path | None = None,
        length_intervals: list[int] | None = None,
    ) -> None:
        super().__init__()
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is {micro_batch_size}: at least 1")
        if seed < 0 or num_workers < 0:
            raise ValueError(f"seed is {seed} and num_workers is {num_workers}: neither may be negative")
        self.sequence_length = sequence_length
        self.micro_batch_size = micro_batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.shuffle = shuffle
        self.prepared = self._open(path)
        if length_intervals is not None and length_intervals != self.prepared.length_intervals:
            raise ValueError(
                f"length_intervals is {length_intervals}, but {path} was prepared with "
                f"{self.prepared.length_intervals}: set it to null, or prepare again with --length-intervals "
                f"{' '.join(map(str, length_intervals))}"
            )
        self.validation = self._open(validation_path) if validation_path is not None else None
        self._loader: ResumableLoader | None = None
        self._resume: dict[str, Any] | None = None

    def _open(self, path: str | Path) -> PreparedData:
        prepared = PreparedData(path)
        if prepared.sequence_length != self.sequence_length:
            raise ValueError(
                f"sequence_length is {self.sequence_length}, but {path} was prepared with {prepared.sequence_length}: "
                f"set sequence_length={prepared.sequence_length}, or prepare again with "
                f"--sequence-length {self.sequence_length}"
            )
        return prepared

    def setup(self, stage: str | None = None) -> None:
        """Forget the position of an earlier `fit` with this object."""
        self._loader = None

    def train_dataloader(self) -> ResumableLoader:
        """The training loader: batches of [micro_batch_size, T], at the position that `load_state_dict` was given.

        Raises:
            ValueError: the split is missing or holds too few samples for one step of all ranks.
        """
        dataset = PreparedDataset(self.prepared, "train")
        share = (self.trainer.distributed_sampler_kwargs if self.trainer is not None else None) or {}
        sampler = ResumableSampler(
            dataset,
            micro_batch_size=self.micro_batch_size,
            num_replicas=share.get("num_replicas", 1),
            rank=share.get("rank", 0),
            seed=self.seed,
            shuffle=self.shuffle,
        )
        if len(dataset) < sampler.step:
            raise ValueError(
                f"{self.prepared.path} has {len(dataset)} training samples, one step takes {sampler.step} "
                f"(micro_batch_size {self.micro_batch_size} x {sampler.num_replicas} data-parallel ranks): "
                "lower micro_batch_size or prepare more text"
            )
        loader = ResumableLoader(
            dataset,
            batch_size=self.micro_batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            drop_last=True,
        )
        loader.in_flight = self._in_flight
        if self._resume is not None:
            loader.load_state_dict(self._resume)
        elif self._loader is not None:  # Lightning asks again with reload_dataloaders_every_n_epochs
            loader.load_state_dict({"epoch": self._loader.epoch + 1, "samples": 0})
        self._loader, self._resume = loader, None
        return loader

    def val_dataloader(self) -> DataLoader:
        """The validation loader, in the order of the files; the last batch may be smaller.

        Raises:
            ValueError: there is no validation split.
        """
        prepared = self.validation or self.prepared
        split = "train" if self.validation and "validation" not in prepared.splits else "validation"
        if split not in prepared.splits:
            raise ValueError(
                f"{prepared.path} has no validation split: prepare with --held-out 0.01, name another prepared "
                "directory as validation_path, or train without validation (limit_val_batches=0)"
            )
        return DataLoader(
            PreparedDataset(prepared, split),
            batch_size=self.micro_batch_size,
            shuffle=False,
            num_workers=self.num_workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
        )

    def _in_flight(self) -> int:
        """Batches that Lightning has taken but whose step is not done: 1 when a checkpoint is written during a step."""
        if self.trainer is None:
            return 0
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return progress.ready - progress.processed

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch trained on: epoch, samples of it over all ranks; and what it counts in."""
        position = self._resume or {"epoch": 0, "samples": 0}
        if self._loader is not None:
            position = self._loader.state_dict()
        return {
            "epoch": position["epoch"],
            "samples": position["samples"],
            "seed": self.seed,
            "shuffle": self.shuffle,
            "data": self.prepared.fingerprint("train"),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next `train_dataloader` go on at a saved position.

        Raises:
            ValueError: the position belongs to other data, or to another seed or shuffle.
        """
        mine = self.state_dict()
        for name in ("seed", "shuffle"):
            if state_dict[name] != mine[name]:
                raise ValueError(
                    f"the checkpoint's data position belongs to {name}={state_dict[name]}, this run has "
                    f"{name}={mine[name]}: set {name}={state_dict[name]} to resume it"
                )
        if state_dict["data"] != mine["data"]:
            raise ValueError(
                f"the checkpoint was trained on other samples than those in {self.prepared.path}: name the prepared "
                "directory it was trained on, or start a new run from its weights"
            )
        self._resume = {"epoch": state_dict["epoch"], "samples": state_dict["samples"]}
