"""Which documents a prepared directory holds, in which order, and which of their tokens lie in which sample."""

import hashlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pod.data.prepared import token_dtype
from pod.data.sample_writer import ShardWriter
from pod.files import note_whole, whole

TOLERANCE = 0.02  # how much fewer tokens an interval of lengths may give than the poorest has
BLOCK = 2**19  # tokens in memory at once while a shard is written


def split_documents(hashes: np.ndarray, held_out: float, seed: int) -> tuple[dict[str, np.ndarray], int]:
    """Assign documents to splits by their hash, and put them in the seed's order.

    Args:
        hashes: [n, 32] uint8, the sha256 of each document.
        held_out: share of the documents held out. If it is not 0 and the hashes hold none out, the document with the
            smallest hash is, provided that there are two.

    Returns:
        ({"train": document numbers, "validation": document numbers}, how many documents were dropped because they
        occurred before).
    """
    words = np.ascontiguousarray(hashes).view(">u8").astype(np.uint64)  # the most significant first
    ranked = np.lexsort(words.T[::-1])  # stable: of equal ones the first stays first
    is_new = np.ones(len(ranked), bool)
    is_new[1:] = (words[ranked[1:]] != words[ranked[:-1]]).any(axis=1)
    first = np.sort(ranked[is_new])
    is_held_out = np.zeros(len(words), bool)
    is_held_out[first] = words[first, 0] < np.uint64(held_out * 2**64)
    if held_out > 0 and len(first) > 1 and not is_held_out.any():
        is_held_out[ranked[0]] = True
    order = np.random.default_rng(seed).permutation(first)
    splits = {"train": order[~is_held_out[order]], "validation": order[is_held_out[order]]}
    return splits, len(words) - len(first)


def draw(lengths: np.ndarray, sizes: np.ndarray, edges: list[int]) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Draw documents so that every interval of lengths gives the same number of tokens.

    Each interval gives as much as the poorest has: its documents in order while they fit, then further ones that fill
    what is left. No document is cut or repeated.

    Args:
        lengths: [n] tokens of each document, in the order in which they are to be drawn.
        sizes: [n] tokens that each gives to the samples.
        edges: lengths that part the intervals, rising: [0, edges[0]), [edges[0], edges[1]), ..., [edges[-1], ...).

    Returns:
        the numbers of the drawn documents, rising, and for each interval dict(from, to, documents, tokens,
        drawn_documents, drawn_tokens), where `to` is the first length that is too long, None for the last.

    Raises:
        ValueError: an interval has no documents, or cannot be filled to 2 %.
    """
    interval = np.searchsorted(edges, lengths, side="right")
    bounds = list(zip([0, *edges], [*edges, None], strict=True))
    available = np.bincount(interval, weights=sizes, minlength=len(bounds)).astype(np.int64)
    names = [f"{low}.." + ("" if high is None else str(high - 1)) for low, high in bounds]
    if not available.all():
        empty = ", ".join(name for name, tokens in zip(names, available, strict=True) if not tokens)
        raise ValueError(
            f"--length-intervals {' '.join(map(str, edges))}: no training document has {empty} tokens, so no other "
            "interval could give any: leave out an edge, or prepare more documents"
        )
    wanted, taken, report = int(available.min()), [], []
    for number, (low, high) in enumerate(bounds):
        members = np.flatnonzero(interval == number)
        fits = np.cumsum(sizes[members]) <= wanted
        chosen, rest = [members[fits]], members[~fits]
        left = wanted - int(sizes[chosen[0]].sum())
        while (fitting := np.flatnonzero(sizes[rest] <= left)).size:
            chosen.append(rest[fitting[:1]])
            left -= int(sizes[rest[fitting[0]]])
            rest = rest[fitting[0] + 1 :]
        if left > TOLERANCE * wanted:
            raise ValueError(
                f"--length-intervals {' '.join(map(str, edges))}: of the documents of {names[number]} tokens, "
                f"{wanted - left} tokens can be drawn whole, wanted {wanted}, what {names[int(available.argmin())]} "
                "has: prepare more documents, or move the edges"
            )
        chosen = np.concatenate(chosen)
        taken.append(chosen)
        report.append(
            {"from": low, "to": high, "documents": len(members), "tokens": int(available[number])}
            | {"drawn_documents": len(chosen), "drawn_tokens": wanted - left}
        )
    return np.sort(np.concatenate(taken)), report


@dataclass
class Plan:
    """Where each token of a split comes from; any part of the split can be written from it alone.

    Packed, sample s holds the tokens [s * T, (s + 1) * T) of all documents one after the other: a document that does
    not fit goes on in the next sample, as a document of its own there, and only the last sample is padded. Otherwise
    sample s is document s, cut or padded.

    Attributes:
        files: the units' ids on disk.
        unit, begin, length: [n] of each document: which file, its first token there, its tokens (cut ones only what is
            used).
        sequence_length: T.
        packed, vocab_size, pad_id: what they say.
        learned: of chats, the files beside `files` that mark the tokens which are learned; else empty.
    """

    files: list[Path]
    unit: np.ndarray
    begin: np.ndarray
    length: np.ndarray
    sequence_length: int
    packed: bool
    vocab_size: int
    pad_id: int
    learned: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dtype = token_dtype(self.vocab_size)
        # As one row: a sample after the other.
        ends = np.cumsum(self.length)
        self.starts = ends - self.length if self.packed else np.arange(len(ends)) * self.sequence_length
        self.ends = self.starts + self.length
        self._open: dict[int, Any] = {}
        self._marks: Plan | None = None

    @property
    def samples(self) -> int:
        return -(-int(self.ends[-1]) // self.sequence_length)

    def distant(self, sink_size: int, recent_size: int) -> int:
        """Tokens that have distant keys: what stands before them in their document, in their sample, is more."""
        ends = np.append(np.arange(0, self.ends[-1], self.sequence_length), self.ends)
        parts = np.diff(np.unique(ends)) if self.packed else self.length
        return int(np.maximum(parts - sink_size - recent_size, 0).sum())

    def digest(self) -> str:
        """Hex digest of everything that the samples depend on."""
        names = [file.name for file in [*self.files, *self.learned]]
        digest = hashlib.sha256(repr((names, self.sequence_length, self.packed, self.vocab_size, self.pad_id)).encode())
        for values in (self.unit, self.begin, self.length):
            digest.update(np.ascontiguousarray(values, np.int64).data)
        return digest.hexdigest()

    def document(self, number: int, begin: int, end: int) -> np.ndarray:
        """Tokens [begin, end) of a document."""
        unit = int(self.unit[number])
        if unit not in self._open:
            if len(self._open) == 64:
                self._open.pop(next(iter(self._open))).close()
            self._open[unit] = open(self.files[unit], "rb")
        size = self.dtype.itemsize
        content = os.pread(self._open[unit].fileno(), (end - begin) * size, (int(self.begin[number]) + begin) * size)
        return np.frombuffer(content, self.dtype)

    def read(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Samples [first, last): tokens [n, T], document_ids [n, T], -1 where padded."""
        shape = (last - first, self.sequence_length)
        begin, end = first * self.sequence_length, last * self.sequence_length
        numbers = np.arange(np.searchsorted(self.ends, begin, "right"), np.searchsorted(self.starts, end, "left"))
        starts, stops = np.maximum(self.starts[numbers], begin), np.minimum(self.ends[numbers], end)
        tokens = np.full(shape, self.pad_id, self.dtype)
        flat, ids = tokens.reshape(-1), np.full(tokens.size, -1, np.int32)
        for number, start, stop in zip(numbers.tolist(), starts.tolist(), stops.tolist(), strict=True):
            origin = int(self.starts[number])
            flat[start - begin : stop - begin] = self.document(number, start - origin, stop - origin)
            ids[start - begin : stop - begin] = number - numbers[0]
        ids = ids.reshape(shape)
        return tokens, np.where(ids < 0, -1, ids - ids[:, :1])

    def marks(self, first: int, last: int) -> np.ndarray | None:
        """The tokens of samples [first, last) that are learned, [n, T] bool; None when all are."""
        if not self.learned:
            return None
        if self._marks is None:  # laid out as the ids are: the same plan, on other files
            self._marks = replace(self, files=self.learned, vocab_size=2, pad_id=0, learned=[])
            self._marks.dtype = np.dtype(np.uint8)
        return self._marks.read(first, last)[0].astype(bool)


def write_shard(plan: Plan, split: str, samples_of_a_shard: int, folder: Path, number: int) -> dict[str, Any]:
    """Write one shard of a split into `folder`, unless it lies there already, whole.

    Returns:
        dict(shard, tokens), as `SampleWriter.adopt` takes them.
    """
    note = folder.with_name(f"{folder.name}-{split}-{number:05d}.json")
    if known := whole(note):
        return known
    kinds = ["documents", "learned"] if plan.learned else ["documents"]
    sizes = {"sequence_length": plan.sequence_length, "vocab_size": plan.vocab_size}
    writer = ShardWriter(folder, split, number, kinds, **sizes)
    first, last = number * samples_of_a_shard, min((number + 1) * samples_of_a_shard, plan.samples)
    step = max(1, BLOCK // plan.sequence_length)
    for begin in range(first, last, step):
        end = min(begin + step, last)
        writer.add(*plan.read(begin, end), learned=plan.marks(begin, end))
    done = {"shard": writer.close(), "tokens": writer.tokens}
    entries = [entry for entry in done["shard"].values() if isinstance(entry, dict)]
    note_whole(note, done, {f"{folder.name}/{entry['file']}": entry["sha256"] for entry in entries})
    return done
