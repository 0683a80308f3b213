"""Read MosaicML MDS shards, version 2: the format that ProLong is published in.

The reader is our own, because `mosaicml-streaming` 0.13 wants transformers < 5 and numpy < 2.2 and so cannot be
installed beside this library; it would also bring the clients of four clouds, where an offset table is all that is
needed. It reads about as fast (both gigabytes a second, which is not what preparing takes its time for).

A directory has an `index.json`, {"version": 2, "shards": [...]}, which names for each shard its columns, its file, and
the file's size and checksums. All numbers are little-endian. A shard is

    uint32 n                    samples
    uint32 offset[n + 1]        where each sample begins, counted from the start of the file, and where the last ends
    JSON                        the columns again, not read here
    sample 0, sample 1, ...     each: uint32 size of every column whose size is not fixed, then the columns' bytes

An `ndarray:uint32` is a byte (number of axes << 2 | log2 of the bytes of a dimension), the dimensions, and the values.
"""

import bz2
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pod.extras import require

OPEN = {"gz": gzip.open, "bz2": bz2.open}
ARRAY = "ndarray:uint32"


class BadShard(ValueError):
    """A shard that is missing, is not what its index says, or does not follow the format; the message names it."""


@dataclass(frozen=True)
class Shard:
    """One shard: the directory of its index, and its entry there as JSON text (so that it can be hashed and sent)."""

    directory: str
    text: str

    @property
    def entry(self) -> dict[str, Any]:
        return json.loads(self.text)

    @property
    def file(self) -> Path:
        """The shard's file; the compressed one when only that is there."""
        entry = self.entry
        raw = Path(self.directory) / entry["raw_data"]["basename"]
        if entry.get("zip_data") and not raw.is_file():
            return Path(self.directory) / entry["zip_data"]["basename"]
        return raw

    def content(self) -> np.ndarray:
        """The uncompressed file, [bytes] uint8, memory-mapped if it lies there uncompressed, after checking it.

        Raises:
            BadShard: it is missing, or its size or a checksum is not what the index says.
            ValueError: a compression or checksum that cannot be read here.
        """
        entry, file = self.entry, self.file
        if not file.is_file():
            raise BadShard(f"{file}: the shard is missing, {self.directory}/index.json names it")
        packed = file.name != entry["raw_data"]["basename"]
        try:
            data = np.memmap(file, np.uint8, "r") if file.stat().st_size else np.zeros(0, np.uint8)
            if packed:
                _check(file, data, entry["zip_data"])
                kind = str(entry["compression"]).partition(":")[0]
                if kind not in OPEN:
                    raise ValueError(
                        f"{file} is compressed with {kind!r}, only {', '.join(OPEN)} can be read: decompress the "
                        f"shards of {self.directory} first, the index stays as it is"
                    )
                with OPEN[kind](file, "rb") as stream:
                    data = np.frombuffer(stream.read(), np.uint8)
        except (OSError, EOFError, zlib.error) as error:
            raise BadShard(f"{file}: cannot be read: {error}") from None
        _check(file, data, entry["raw_data"])
        return data

    def samples(self, columns: tuple[str, ...]) -> Iterator[tuple[np.ndarray, ...]]:
        """The values of uint32 array columns, sample by sample; each has the shape that was written, without a copy.

        Raises:
            BadShard: the bytes do not follow the format; or as in `content`.
            ValueError: a column is missing or of another type.
        """
        data, entry = self.content(), self.entry
        kinds = dict(zip(entry["column_names"], entry["column_encodings"], strict=True))
        for name in columns:
            if kinds.get(name) != ARRAY:
                raise ValueError(f"{self.file}: column {name!r} is {kinds.get(name, 'missing')}, wanted {ARRAY}")
        fixed = entry["column_sizes"]
        dynamic = sum(not size for size in fixed)
        count = int(_numbers(self.file, data, 0, 1)[0])
        offsets = _numbers(self.file, data, 4, count + 1).astype(np.int64)
        if count != entry["samples"] or (np.diff(offsets) < 0).any() or offsets[-1] > len(data):
            raise BadShard(f"{self.file}: its offsets are not those of {entry['samples']} samples")
        for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            sizes = iter(_numbers(self.file, data[:end], begin, dynamic).tolist())
            place, found = begin + 4 * dynamic, {}
            for name, size in zip(entry["column_names"], fixed, strict=True):
                size = size or next(sizes)
                if name in columns:
                    found[name] = _array(self.file, data[place : min(place + size, end)])
                place += size
            if place != end:
                raise BadShard(f"{self.file}: the columns of a sample fill {place - begin} of its {end - begin} bytes")
            yield tuple(found[name] for name in columns)


def read_index(file: Path) -> list[Shard] | None:
    """The shards that an index.json names, in its order; None when it is not the index of MDS shards.

    Raises:
        ValueError: another version, or shards of another format of the same library.
    """
    try:
        index = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        if any(file.parent.glob("*.mds*")):
            raise ValueError(f"{file}: the index of MDS shards is truncated or damaged: {error}") from error
        return None
    if not isinstance(index, dict) or not isinstance(index.get("shards"), list):
        return None
    if index.get("version") != 2:
        raise ValueError(f"{file}: MDS of version {index.get('version')}, only version 2 can be read")
    if not all(isinstance(entry, dict) for entry in index["shards"]):
        raise ValueError(f"{file}: the index of MDS shards is damaged: {index['shards']!r:.80}")
    other = {str(entry.get("format")) for entry in index["shards"]} - {"mds"}
    if other:
        raise ValueError(f"{file}: shards of format {', '.join(map(str, other))}, only mds can be read")
    shards = [Shard(str(file.parent), json.dumps(entry, sort_keys=True)) for entry in index["shards"]]
    for shard in shards:
        _check_entry(file, shard.entry)
    return shards


def _check_entry(file: Path, entry: dict[str, Any]) -> None:
    """The fields that are read here, of the types that they have."""
    try:
        for info in (entry["raw_data"], *filter(None, [entry.get("zip_data")])):
            right = isinstance(info["basename"], str) and isinstance(info["bytes"], int)
            right &= all(isinstance(value, str) for value in info["hashes"].values())
            right &= info["basename"] == Path(info["basename"]).name and info["basename"] not in ("", "..")
            if not right:
                raise TypeError(f"{info!r:.80}")
        lists = [entry["column_names"], entry["column_encodings"], entry["column_sizes"]]
        if not len(lists[0]) == len(lists[1]) == len(lists[2]) or not isinstance(entry["samples"], int):
            raise TypeError(f"columns {lists!r:.80}")
        if not all(size is None or (isinstance(size, int) and size >= 0) for size in lists[2]):
            raise TypeError(f"column_sizes {lists[2]!r:.80}")
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: the index of MDS shards is damaged ({type(error).__name__}: {error})") from error


def _check(file: Path, data: np.ndarray, wanted: dict[str, Any]) -> None:
    if len(data) != wanted["bytes"]:
        raise BadShard(f"{file}: {len(data)} bytes, its index says {wanted['bytes']}")
    for name, value in wanted["hashes"].items():
        if name in hashlib.algorithms_available:
            digest = hashlib.new(name)
        else:
            require("data", "xxhash", what=f"{file}, whose checksum may be of {name},")
            import xxhash

            if name not in xxhash.algorithms_available:
                raise ValueError(f"{file}: its index has a checksum {name!r}, which is unknown here")
            digest = getattr(xxhash, name)()
        digest.update(data.data)
        if digest.hexdigest() != value:
            raise BadShard(f"{file}: wrong checksum, {name} is {digest.hexdigest()}, its index says {value}")


def _numbers(file: Path, data: np.ndarray, begin: int, count: int) -> np.ndarray:
    part = data[begin : begin + 4 * count]
    if len(part) < 4 * count:
        raise BadShard(f"{file}: ends inside a table of sizes")
    return part.view("<u4") if begin % 4 == 0 and part.flags.aligned else np.frombuffer(part.tobytes(), "<u4")


def _array(file: Path, data: np.ndarray) -> np.ndarray:
    """Decode `ndarray:uint32`. The values begin at any byte: they are viewed there, unaligned."""
    if not len(data):
        raise BadShard(f"{file}: an array without a head")
    axes, width = int(data[0]) >> 2, 1 << (int(data[0]) & 3)
    head = 1 + axes * width
    shape = np.frombuffer(data[1:head].tobytes(), f"<u{width}") if len(data) >= head else None
    if shape is None or axes == 0 or len(data) - head != 4 * int(np.prod(shape.astype(object))):
        raise BadShard(f"{file}: an array of {len(data)} bytes does not hold the values its shape wants")
    return np.frombuffer(data.data, "<u4", offset=head).reshape(shape.astype(np.int64))
