"""Data sets that the package `datasets` opens, streamed: nothing is fetched but what is read, no code of theirs runs.

    hub:NAMESPACE/NAME[/CONFIG][:SPLIT]     of the Hugging Face hub, in its newest state
    hub:FOLDER[:SPLIT]                      a local folder in any layout and format that `datasets.load_dataset` reads

A data set is parted as its files are: each part is read by one process at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pod.extras import require

PREFIX = "hub:"


@dataclass(frozen=True)
class Part:
    """Part `number` of `of` of a split; `state` is what tells one state of the data from another."""

    name: str
    config: str | None
    split: str
    state: str
    number: int
    of: int

    def __str__(self) -> str:
        config = "" if self.config is None else f"/{self.config}"
        return f"{PREFIX}{self.name}{config}:{self.split}#{self.number}"


def find_parts(source: str) -> list[Part]:
    """The parts of what `--source hub:...` names.

    Raises:
        ImportError: the package datasets is missing.
        ValueError: there is no such data set, configuration or split, it needs code of its own, or the hub does not
            answer.
    """
    require("data", "datasets", what=f"--source {source}")
    from datasets import load_dataset_builder

    name, _, split = source.removeprefix(PREFIX).partition(":")
    words, config = name.split("/"), None
    is_local = Path(name).exists()
    if not name or (len(words) > 3 and not is_local):
        raise ValueError(f"--source {source}: wanted hub:NAMESPACE/NAME[/CONFIG][:SPLIT], or hub:FOLDER[:SPLIT]")
    if not is_local:
        name, config = "/".join(words[:2]), words[2] if len(words) == 3 else None
    try:
        state = load_dataset_builder(name, config).hash
        part = Part(name, config, split or "train", state, 0, 1)
        count = _open(part).num_shards
    except Exception as error:  # of datasets, huggingface_hub, fsspec, requests: each has its own
        raise ValueError(f"--source {source}: {' '.join(str(error).split())}") from error
    return [Part(name, config, part.split, state, number, count) for number in range(count)]


def read_part(part: Part, column: str) -> Iterator[object]:
    """What stands in a column, row by row.

    Raises:
        OSError: the part cannot be read, or not to its end; or there is no such column.
    """
    try:
        rows = _open(part)
        names = rows.column_names
        if names is not None and column not in names:
            raise ValueError(f"no column {column!r}, only {', '.join(names)}: name it with --text-field")
        # The columns that are not read need not be decoded: pictures, sounds.
        rows = rows.select_columns([column]) if names is not None else rows
        for row in rows.shard(part.of, part.number):
            yield row[column]
    except Exception as error:
        raise OSError(" ".join(str(error).split())) from error


def _open(part: Part):
    from datasets import load_dataset

    return load_dataset(part.name, part.config, split=part.split, streaming=True)
