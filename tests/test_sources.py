"""What `pod.prepare` is given: Parquet, links, odd characters and lengths, much that is unreadable; its report."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from test_mds import random_samples, write_mds

from pod import prepare
from pod.data import sources, summary
from pod.data.prepared import PreparedData, PreparedDataset

OPTIONS = {"tokenizer": "bytes", "sequence_length": 64, "held_out": 0}


def texts(directory, split="train"):
    """The documents of a packed split, whole again, sorted."""
    stream = np.concatenate([item["input_ids"].numpy() for item in PreparedDataset(directory, split)])
    stream = stream[stream != 0]
    return sorted(part.decode() for part in bytes(0 if token == 1 else token - 3 for token in stream)[:-1].split(b"\0"))


def read(paths, field="text"):
    """(texts, problems) of what sources find, as `prepare.py` reads it."""
    rows = [
        row for unit in sources.find_units(list(map(str, paths))) for row in sources.read_documents(unit.files, field)
    ]
    return [row["text"] for row in rows if not row["problem"]], [row for row in rows if row["problem"]]


# Parquet


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
@pytest.mark.parametrize("rows", [1, 257, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (255, 256, 700))])
def test_parquet_gives_what_json_lines_give(tmp_path, kind, rows):
    written = [f"row {number} é " * (number % 7 + 1) for number in range(rows)]
    table = pa.table({"id": range(rows), "content": pa.array(written, pa.string()).cast(kind)})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"content": text}) for text in written))
    assert read([tmp_path / "a.parquet"], "content") == (written, [])
    for name in ("a.parquet", "a.jsonl"):
        prepare.prepare([str(tmp_path / name)], tmp_path / name[2:], **OPTIONS, text_field="content")
    assert texts(tmp_path / "parquet") == texts(tmp_path / "jsonl") == sorted(written)
    one, two = (tmp_path / name / "tokens-train-00000.bin" for name in ("parquet", "jsonl"))
    assert one.read_bytes() == two.read_bytes()


def test_bad_rows_of_parquet_are_named(tmp_path):
    raw = pa.array([b"good", b"caf\xe9", None, b" \n", b"a\0b", b"also good"], pa.binary())
    column = pa.StringArray.from_buffers(len(raw), raw.buffers()[1], raw.buffers()[2], raw.buffers()[0], raw.null_count)
    parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    found, problems = read([tmp_path / "a.parquet"])
    assert found == ["good", "also good"]
    assert [row["line"] for row in problems] == [2, 3, 4, 5]
    for row, words in zip(problems, ("not UTF-8", "is empty", "is empty", "NUL"), strict=True):
        assert words in row["problem"]


@pytest.mark.parametrize(
    "table,words",
    [
        ({"body": ["x"]}, "no column 'text', only body"),
        ({"text": [1, 2]}, "column 'text' is int64"),
        ({"text": [["x"], []]}, "column 'text' is list<"),
        ({"text": [b"x"]}, "column 'text' is binary"),
        ({"text": pa.array([], pa.string())}, "the file has no rows"),
    ],
)
def test_parquet_without_text_is_named(tmp_path, table, words):
    parquet.write_table(pa.table(table), tmp_path / "a.parquet")
    (problem,) = read([tmp_path])[1]
    assert words in problem["problem"] and problem["line"] == 1
    with pytest.raises(ValueError, match="nothing readable in 1 files, 1 problems; the first: .*a.parquet:1"):
        prepare.prepare([str(tmp_path)], tmp_path.with_name("out"), **OPTIONS)


def test_damaged_parquet_is_named(tmp_path):
    parquet.write_table(pa.table({"text": ["some text"] * 500}), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    for damaged in (b"", b"PAR1", whole[:50], whole[:-20], b"?" * len(whole), whole[:4] + b"?" * 40 + whole[44:]):
        (tmp_path / "a.parquet").write_bytes(damaged)
        found, problems = read([tmp_path])
        assert len(found) < 500 and "cannot be read from here on" in problems[-1]["problem"]
        assert "\n" not in problems[-1]["problem"]


# Characters and lengths


def test_characters_that_are_in_no_text(tmp_path):
    (tmp_path / "utf16.txt").write_bytes("a document".encode("utf-16"))
    (tmp_path / "utf16-without-mark.txt").write_bytes("a document".encode("utf-16-le"))
    (tmp_path / "surrogate.txt").write_bytes("a \ud800 b".encode("utf-8", "surrogatepass"))
    (tmp_path / "good.txt").write_bytes("﻿good é 🙂".encode())
    rows = [{"text": "a\0b"}, {"text": "\0"}, {"text": "half \ud83d"}, {"text": "whole 🙂"}, {"text": "﻿"}]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n" + "\0" * 100)
    found, problems = read([tmp_path])
    assert sorted(found) == ["good é 🙂", "whole 🙂", "﻿"]
    named = {(Path(row["file"]).name, row["line"]): row["problem"] for row in problems}
    assert "not UTF-8" in named["utf16.txt", 1] and "NUL" in named["utf16-without-mark.txt", 1]
    assert "not UTF-8" in named["surrogate.txt", 1]
    assert "NUL" in named["lines.jsonl", 1] and "NUL" in named["lines.jsonl", 2]
    assert "not Unicode text" in named["lines.jsonl", 3] and "broken JSON" in named["lines.jsonl", 6]
    assert len(named) == len(problems) == 7


def one_token_shards(folder):
    """Documents of 1, 1, 200, 2, 64 and 65 tokens, all different."""
    ids = np.concatenate([[7], [8], np.arange(200) % 50 + 10, [9, 9], np.arange(64) + 60, np.arange(65) + 100])
    ends = np.cumsum([1, 1, 200, 2, 64, 65])
    write_mds(folder, [("", ids, [[int(end - size), int(end)] for end, size in
                                  zip(ends, (1, 1, 200, 2, 64, 65), strict=True)])])  # fmt: skip
    return [ids[end - size : end].tolist() for end, size in zip(ends, (1, 1, 200, 2, 64, 65), strict=True)]


def test_documents_of_one_token_and_longer_ones_than_a_sample_are_packed(tmp_path):
    documents = one_token_shards(tmp_path / "in")
    report = prepare.prepare([str(tmp_path / "in")], tmp_path / "out", **OPTIONS)
    assert (report["documents"], report["one_token_documents"], report["truncated_documents"]) == (6, 0, 0)
    items = list(PreparedDataset(tmp_path / "out"))
    stream = [token for item in items for token in item["input_ids"].tolist()][: sum(map(len, documents))]
    order = np.random.default_rng(0).permutation(6)
    assert stream == [token for number in order for token in documents[number]]
    # A document's first token is no target, nor that of what goes on in another sample; no token is lost.
    targets = sum(int((item["labels"] != -100).sum()) for item in items)
    pieces = sum(len(set(item.get("document_ids", item["labels"] * 0).tolist()) - {-1}) for item in items)
    assert targets == sum(map(len, documents)) - pieces


def test_documents_of_one_token_are_no_samples_of_their_own(tmp_path):
    documents = one_token_shards(tmp_path / "in")
    report = prepare.prepare([str(tmp_path / "in")], tmp_path / "out", **OPTIONS, one_document=True)
    assert (report["one_token_documents"], report["truncated_documents"]) == (2, 2)
    items = list(PreparedDataset(tmp_path / "out"))
    wanted = sorted(document[:64] for document in documents if len(document) > 1)
    assert (
        sorted(item["input_ids"][: max(1, int((item["labels"] != -100).sum()) + 1)].tolist() for item in items)
        == wanted
    )
    assert "| one token, in samples of one document |" in (tmp_path / "out" / "report.md").read_text()
    write_mds(tmp_path / "short", [("", np.arange(3), [[0, 1], [1, 2], [2, 3]])])
    with pytest.raises(ValueError, match="--one-document needs two"):
        prepare.prepare([str(tmp_path / "short")], tmp_path / "none", **OPTIONS, one_document=True)


def test_a_text_of_which_the_tokenizer_makes_nothing(tmp_path, monkeypatch):
    _, *rest = sources.load_tokenizer("bytes")
    encode = lambda text: np.zeros(0 if "silent" in text else 3, np.int64) + 5  # noqa: E731
    monkeypatch.setattr(sources, "load_tokenizer", lambda name: (encode, *rest))
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "silent"}\n{"text": "two"}\n')
    report = prepare.prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", **OPTIONS)
    (problem,) = report["skipped"]
    assert problem["line"] == 2 and "no token" in problem["problem"] and report["documents"] == 2


# Too much that cannot be read


@pytest.mark.parametrize("share,bad,fails", [(0.0, 0, False), (0.0, 1, True), (0.25, 3, False), (0.25, 4, True)])
def test_max_bad_share(tmp_path, capsys, share, bad, fails):
    rows = ["{"] * bad + [json.dumps({"text": f"document {number}"}) for number in range(9)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    command = ["--source", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    command += ["--sequence-length", "32", "--num-proc", "1", "--held-out", "0", "--max-bad-share", str(share)]
    assert prepare.main(command) == (2 if fails else 0)
    said = capsys.readouterr().err
    assert (tmp_path / "out").exists() != fails
    if fails:
        assert f"{bad} of {bad + 9} documents cannot be read" in said and f"--max-bad-share {share:g}" in said
        assert f"{tmp_path}/a.jsonl:1: broken JSON" in said
        # With a larger share the same files are not read again.
        assert prepare.main([*command[:-1], "0.9"]) == 0
    assert prepare.main([*command[:-1], "1.5", "--force"]) == 2


# Paths


@pytest.fixture
def tree(tmp_path):
    """Files that are reached by several names, links in loops and to nowhere, a pipe."""
    root = tmp_path / "root"
    (root / "deep").mkdir(parents=True)
    (root / "a.txt").write_text("a")
    (root / "deep" / "b.txt").write_text("b")
    os.link(root / "a.txt", root / "deep" / "hard.txt")
    (root / "link.txt").symlink_to("a.txt")
    (root / "up").symlink_to("..", target_is_directory=True)
    (root / "deep" / "self").symlink_to(".", target_is_directory=True)
    (root / "again").symlink_to("deep", target_is_directory=True)
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / ".hidden").mkdir(parents=True)
    (elsewhere / "c.jsonl").write_text('{"text": "c"}')
    (elsewhere / ".hidden" / "d.txt").write_text("never")
    (root / "other").symlink_to(elsewhere, target_is_directory=True)
    os.mkfifo(root / "pipe.txt")
    return root


def test_every_file_is_read_once_whatever_leads_to_it(tree):
    assert sorted(read([tree])[0]) == ["a", "b", "c"]
    assert read([tree])[1] == []
    several = [
        tree,
        tree / "a.txt",
        tree / "deep" / ".." / "a.txt",
        f"{tree}/./deep/",
        tree / "link.txt",
        tree / "other",
    ]
    assert sorted(read(several)[0]) == ["a", "b", "c"]
    assert sorted(read(several[::-1])[0]) == ["a", "b", "c"]


def test_a_link_that_leads_nowhere_is_named(tree):
    (tree / "gone.txt").symlink_to("nothing.txt")
    (tree / "round.jsonl").symlink_to("round.jsonl")
    found, problems = read([tree])
    assert sorted(found) == ["a", "b", "c"]
    assert {Path(row["file"]).name for row in problems} == {"gone.txt", "round.jsonl"}
    assert all("cannot be read" in row["problem"] for row in problems)


def test_shards_that_are_reached_twice_are_read_once(tmp_path):
    write_mds(tmp_path / "in" / "mds", random_samples(4))
    (tmp_path / "in" / "again").symlink_to("mds", target_is_directory=True)
    units = sources.find_units([str(tmp_path / "in"), str(tmp_path / "in" / "mds")])
    assert len(units) == 2 and all(unit.shard is not None for unit in units)


def test_a_relative_source_is_named_as_given(tree, monkeypatch):
    monkeypatch.chdir(tree.parent)
    names = [name for unit in sources.find_units(["root"]) for name in unit.files]
    assert all(name.startswith("root/") for name in names)
    monkeypatch.chdir(tree)
    assert "a.txt" in [name for unit in sources.find_units(["."]) for name in unit.files]


@pytest.mark.parametrize("content", ["", '{"version": 2, "shards": [', "[" * 100_000])
def test_a_damaged_index_of_shards_is_named(tmp_path, content):
    write_mds(tmp_path, random_samples(2))
    (tmp_path / "index.json").write_text(content)
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(ValueError, match="index.json: the index of MDS shards is truncated or damaged"):
        prepare.prepare([str(tmp_path)], tmp_path.with_name("out"), **OPTIONS)


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.pop("raw_data"),
        lambda entry: entry.update(samples="two"),
        lambda entry: entry["raw_data"].update(basename="../../secret"),
        lambda entry: entry["raw_data"].update(bytes=None),
        lambda entry: entry["raw_data"].update(hashes=["sha1"]),
        lambda entry: entry["column_names"].pop(),
        lambda entry: entry.update(column_sizes=[None, None, None, "8"]),
    ],
)
def test_a_wrong_field_in_an_index_of_shards_is_named(tmp_path, change):
    write_mds(tmp_path, random_samples(2))
    index = json.loads((tmp_path / "index.json").read_text())
    change(index["shards"][0])
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="index.json: the index of MDS shards is damaged"):
        sources.find_units([str(tmp_path)])


# The report


def test_histogram_counts_every_document():
    lengths = np.array([1, 2, 3, 4, 7, 8, 1023, 1024, 1025])
    found = summary.histogram(lengths)
    assert (found["shortest"], found["median"], found["longest"]) == (1, 7, 1025)
    assert found["mean"] == pytest.approx(lengths.mean())
    assert [one["from"] for one in found["bins"]] == [2**power for power in range(11)]
    for one in found["bins"]:
        inside = lengths[(lengths >= one["from"]) & (lengths < one["to"])]
        assert (one["documents"], one["tokens"]) == (len(inside), inside.sum())


@pytest.mark.parametrize("one_document", [False, True])
@pytest.mark.parametrize("sinks,recent", [(2, 14), (0, 1), (16, 4080)])
def test_the_report_says_how_many_tokens_have_distant_keys(one_document, sinks, recent, tmp_path, capsys):
    """Counted again from the samples: pairs beyond sinks and recent tokens, inside a document of a sample."""
    sizes = np.random.default_rng(1).integers(1, 150, 40)
    rows = [json.dumps({"text": f"{n} " + "x" * int(size)}) for n, size in enumerate(sizes)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    command = ["--source", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    command += ["--sequence-length", "64", "--num-proc", "1", "--held-out", "0.2"]
    command += ["--one-document"] * one_document
    if recent != 4080:  # the default
        command += ["--sink-size", str(sinks), "--recent-size", str(recent)]
    assert prepare.main(command) == 0
    said = capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["sink_size"], report["recent_size"]) == (sinks, recent)
    for split, entry in report["splits"].items():
        tokens = distant = 0
        for item in PreparedDataset(tmp_path / "out", split):
            ids = item["document_ids"].numpy() if "document_ids" in item else np.zeros(64, int)
            ids = np.where(item["input_ids"].numpy() == 0, -1, ids)  # padding
            tokens += (ids >= 0).sum()
            for document in range(ids.max() + 1):
                places = np.arange((ids == document).sum())
                pairs = (places[None] >= sinks) & (places[:, None] - places[None] >= recent)
                distant += pairs.any(axis=1).sum()
        assert entry["tokens"] == tokens and entry["distant"] == pytest.approx(distant / tokens)
        assert (0.3 < entry["distant"] < 1) == (recent != 4080)
        share = f"{entry['distant']:.1%}"
        assert f"{entry['tokens']} tokens, {share} of them with distant keys\n" in said
        assert share in (tmp_path / "out" / "report.md").read_text()
    assert f"{sinks} sinks and {recent:,} recent tokens" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize("changes", [{"sink_size": -1}, {"recent_size": 0}])
def test_sinks_and_recent_tokens_that_no_model_has_are_refused(changes, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} {value}"):
        prepare.prepare([str(tmp_path / "a.txt")], tmp_path / "out", **OPTIONS, **changes)


def test_the_report_says_what_was_prepared(tmp_path):
    generator = np.random.default_rng(0)
    sizes = generator.integers(1, 300, 600)
    rows = [json.dumps({"text": f"{n} " + "x" * int(size)}) for n, size in enumerate(sizes)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join([*rows, "{", '{"text": 1}', rows[0]]).encode()))
    options = {**OPTIONS, "held_out": 0.2, "length_intervals": [100, 200]}
    report = prepare.prepare([str(tmp_path / "a.jsonl.gz")], tmp_path / "out", **options)
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    for split, entry in report["splits"].items():
        bins = report["lengths"][split]["bins"]
        assert sum(one["documents"] for one in bins) == entry["documents"]
        assert sum(one["tokens"] for one in bins) == entry["tokens"]
        assert entry["padding"] == pytest.approx(1 - entry["tokens"] / entry["samples"] / 64)
        # Counted again from the samples: a document ends with its end-of-text token.
        stream = np.concatenate([item["input_ids"].numpy() for item in PreparedDataset(tmp_path / "out", split)])
        lengths = np.diff(np.flatnonzero(stream == 1), prepend=-1)
        assert (lengths.min(), lengths.max()) == tuple(
            report["lengths"][split][kind] for kind in ("shortest", "longest")
        )
    drawn = [entry["drawn_tokens"] for entry in report["length_intervals"]]
    assert min(drawn) >= 0.98 * max(drawn)
    text = (tmp_path / "out" / "report.md").read_text()
    assert f"{report['splits']['train']['tokens']:,}" in text and "| 100..199 |" in text and "| broken JSON" in text
    for entry in report["length_intervals"]:
        assert f"{entry['drawn_tokens']:,} of {entry['tokens']:,}" in text
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")
    PreparedData(tmp_path / "out").verify()
