"""Preparing data at scale: ProLong's shards, equal shares of length intervals, killed and continued, memory."""

import gzip
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from test_mds import random_samples, write_mds

from pod import prepare
from pod.data import sampling, sources
from pod.data.prepared import PreparedData, PreparedDataset
from pod.training.data import PodDataModule

SCRIPT = Path(prepare.__file__)
OPTIONS = {"tokenizer": "bytes", "sequence_length": 64, "held_out": 0.2}


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def words(generator, count):
    """Random text of `count` bytes, in words."""
    letters = generator.integers(97, 123, count).astype(np.uint8)
    letters[generator.random(count) < 0.17] = 32
    return letters.tobytes().decode()


def write_dolma(folder, files, documents, longest, seed=0):
    """Dolma-shaped files of `documents` documents each, their lengths spread evenly on a logarithmic scale."""
    generator = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for number in range(files):
        sizes = np.exp(generator.uniform(np.log(20), np.log(longest), documents)).astype(int)
        rows = [{"id": f"{number}-{row}", "text": words(generator, size)} for row, size in enumerate(sizes)]
        rows = [json.dumps({**row, "source": "made up", "added": "2024", "metadata": {}}) for row in rows]
        content = gzip.compress("\n".join(rows).encode(), compresslevel=1)
        (folder / f"part-{number:03d}.jsonl.gz").write_bytes(content)
    return folder


def packed(documents, length):
    """The eager truth of packing: one token after the other; (tokens, document_ids) of each sample."""
    samples = []
    for document in documents:
        for place, token in enumerate(document):
            if not samples or len(samples[-1][0]) == length:
                samples.append(([], []))
            tokens, ids = samples[-1]
            ids.append((ids[-1] + (place == 0)) if ids else 0)
            tokens.append(int(token))
    return samples


def assert_packed(path, split, documents, pad):
    """The split holds exactly these documents, packed in this order, and the labels restart with each."""
    dataset = PreparedDataset(path, split)
    samples = packed(documents, dataset.data.sequence_length)
    assert len(dataset) == len(samples)
    for item, (tokens, ids) in zip(dataset, samples, strict=True):
        rest = len(item["input_ids"]) - len(tokens)
        assert item["input_ids"].tolist() == tokens + [pad] * rest
        if "document_ids" in item:
            assert item["document_ids"].tolist() == ids + [-1] * rest
        else:
            assert set(ids) == {0}
        is_first = [True] + [after != before for before, after in zip(ids, ids[1:], strict=False)]
        labels = [-100 if first else token for first, token in zip(is_first, tokens, strict=True)]
        assert item["labels"].tolist() == labels + [-100] * rest


def documents_of(samples):
    return [ids[begin:end] for _, ids, indices in samples for begin, end in indices]


@pytest.mark.parametrize("num_proc,shard_bytes", [(1, 2**30), (2, 64 * 2 * 3)])
def test_prolong(tmp_path, monkeypatch, num_proc, shard_bytes):
    monkeypatch.setattr("pod.data.sample_writer.SHARD_BYTES", shard_bytes)
    monkeypatch.setattr(sampling, "BLOCK", 2 * 64)
    samples = random_samples(11)
    write_mds(tmp_path / "in" / "book", samples[:7])
    write_mds(tmp_path / "in" / "arxiv", [*samples[7:], samples[0]], integer="int", compression="gz")
    report = prepare.prepare([str(tmp_path / "in")], tmp_path / "out", num_proc=num_proc, **OPTIONS)
    data = PreparedData(tmp_path / "out")
    data.verify()
    every = documents_of([*samples[7:], samples[0], *samples[1:7]])  # arxiv comes before book
    hashes = [hashlib.sha256(ids.astype("<u4").tobytes()).hexdigest() for ids in every]
    assert len(set(hashes)) == len(every)
    held = [int(value[:16], 16) < 0.2 * 2**64 for value in hashes]
    assert 0 < sum(held) < len(every)
    order = np.random.default_rng(0).permutation(len(every))
    for split, wanted in (("train", False), ("validation", True)):
        assert_packed(tmp_path / "out", split, [every[number] for number in order if held[number] == wanted], pad=0)
    assert data.held_out() == sorted(value for value, is_held in zip(hashes, held, strict=True) if is_held)
    assert (report["files"], report["documents"]) == (4 + 3, len(every))
    assert report["duplicates"] == len(documents_of(samples[:1])) and not report["skipped"]
    assert sum(entry["tokens"] for entry in report["splits"].values()) == sum(map(len, every))
    assert len(data.splits["train"]["shards"]) > (1 if shard_bytes < 2**30 else 0)


def test_prolong_must_be_of_the_tokenizer(tmp_path):
    write_mds(tmp_path / "in", random_samples(4, vocabulary=259)[:3] + [("", np.array([5, 259]), [[0, 2]])])
    with pytest.raises(ValueError, match=r"shard.00001.mds: sample 1 has token id 259, the tokenizer has 259 ids"):
        prepare.prepare([str(tmp_path / "in")], tmp_path / "out", **OPTIONS)


@pytest.mark.parametrize("indices", [[[0, 9]], [[3, 2]], [[0], [1], [2]]])
def test_prolong_indices_must_fit(tmp_path, indices):
    write_mds(tmp_path / "in", [("", np.arange(8), indices)])
    with pytest.raises(ValueError, match=r"shard.00000.mds: sample 0 (of 8 tokens|has ids)"):
        prepare.prepare([str(tmp_path / "in")], tmp_path / "out", **OPTIONS)


def test_a_bad_shard_is_named_and_skipped_only_when_asked(tmp_path, capsys):
    samples = random_samples(6)
    bad = write_mds(tmp_path / "in", samples) / "shard.00001.mds"
    content = bytearray(bad.read_bytes())
    content[-1] ^= 1
    bad.write_bytes(content)
    command = ["--source", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    command += ["--sequence-length", "64", "--num-proc", "2", "--held-out", "0"]
    assert prepare.main(command) == 2
    said = capsys.readouterr().err
    assert f"{bad}: wrong checksum, sha1 is" in said and "--skip-bad-shards" in said
    assert not (tmp_path / "out").exists()
    assert prepare.main([*command, "--skip-bad-shards"]) == 0
    assert f"skipped {bad}:0: bad shard" in capsys.readouterr().err
    good = documents_of(samples[:2] + samples[4:])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["splits"]["train"]["tokens"] == sum(map(len, good)) and len(report["skipped"]) == 1
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_text_and_shards_go_together(tmp_path):
    write_mds(tmp_path / "in" / "mds", random_samples(3))
    write_dolma(tmp_path / "in" / "dolma", 2, 10, 300)
    report = prepare.prepare([str(tmp_path / "in")], tmp_path / "out", **OPTIONS)
    assert report["documents"] == 20 + len(documents_of(random_samples(3)))


# Length intervals


@pytest.mark.parametrize("one_document", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("edges", [[100], [200, 500]])
def test_intervals_give_the_same_number_of_tokens(tmp_path, edges, one_document):
    write_dolma(tmp_path / "in", 3, 300, 1500)
    options = {**OPTIONS, "sequence_length": 512, "one_document": one_document, "length_intervals": edges}
    report = prepare.prepare([str(tmp_path / "in")], tmp_path / "out", **options)
    # Counted again, from the output alone: a packed document is whole again once its pieces are joined.
    given = np.zeros(len(edges) + 1, int)
    drawn = np.zeros(len(edges) + 1, int)
    if one_document:
        lengths = [int((item["input_ids"] != 0).sum()) for item in PreparedDataset(tmp_path / "out")]
    else:
        stream = np.concatenate([item["input_ids"].numpy() for item in PreparedDataset(tmp_path / "out")])
        lengths = np.diff(np.flatnonzero(stream == 1), prepend=-1)
    for length in lengths:
        given[np.searchsorted(edges, length, "right")] += length
        drawn[np.searchsorted(edges, length, "right")] += 1
    if not one_document or edges[-1] < 512:  # a longer document is cut and so looks shorter
        assert [entry["drawn_tokens"] for entry in report["length_intervals"]] == given.tolist()
        assert [entry["drawn_documents"] for entry in report["length_intervals"]] == drawn.tolist()
    given = [entry["drawn_tokens"] for entry in report["length_intervals"]]
    assert min(given) >= 0.98 * max(given)
    assert max(given) == min(entry["tokens"] for entry in report["length_intervals"])
    assert max(entry["tokens"] for entry in report["length_intervals"]) > 1.5 * max(given)
    assert report["splits"]["train"]["tokens"] == sum(given)
    assert PreparedData(tmp_path / "out").length_intervals == edges
    # Without intervals the held-out documents are the same.
    prepare.prepare([str(tmp_path / "in")], tmp_path / "all", **{**options, "length_intervals": None})
    assert PreparedData(tmp_path / "all").held_out() == PreparedData(tmp_path / "out").held_out()
    assert PreparedData(tmp_path / "all").length_intervals is None


def test_drawing_fills_what_is_left_with_documents_that_fit():
    lengths = np.array([2, 2, 70, 60, 900])
    with pytest.raises(ValueError, match=r"the documents of 50\.\.499 tokens, 0 tokens can be drawn whole, wanted 4"):
        sampling.draw(lengths, lengths, [50, 500])
    # In order while they fit, 271; 99 does not, but 1 and 28 do.
    lengths = np.array([30, 70, 60, 40, 30, 41, 99, 1, 28, 300])
    drawn, report = sampling.draw(lengths, lengths, [100])
    assert [entry["tokens"] for entry in report] == [399, 300]
    assert drawn.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9] and report[0]["drawn_tokens"] == 300


@pytest.mark.parametrize(
    "edges,message",
    [([9, 9], "rising"), ([9, 5], "rising"), ([0, 5], "at least 1"), ([10**6], "no training document has 1000000.. ")],
)
def test_bad_intervals_are_refused(tmp_path, edges, message):
    write_dolma(tmp_path / "in", 1, 20, 300)
    with pytest.raises(ValueError, match=rf"--length-intervals {' '.join(map(str, edges))}: .*{message}"):
        prepare.prepare([str(tmp_path / "in")], tmp_path / "out", **OPTIONS, length_intervals=edges)


# Continuing


def test_a_failed_run_reads_nothing_twice(tmp_path, monkeypatch):
    folder = write_dolma(tmp_path / "in", 5, 30, 400)
    prepare.prepare([str(folder)], tmp_path / "whole", **OPTIONS)
    encode, *rest = sources.load_tokenizer("bytes")
    read = []

    def failing(name):
        def count(text):
            read.append(text)
            if len(read) == 100:
                raise KeyboardInterrupt
            return encode(text)

        return count, *rest

    monkeypatch.setattr(sources, "load_tokenizer", failing)
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare([str(folder)], tmp_path / "out", **OPTIONS)
    assert (tmp_path / ".out.work").is_dir() and not (tmp_path / "out").exists()
    # One of the whole units is damaged meanwhile, and one file is new: these are read, the other whole ones are not.
    first = sorted((tmp_path / ".out.work").glob("*.json"))[0].with_suffix(".ids")
    first.write_bytes(first.read_bytes()[:-1] + b"?")
    prepare.prepare([str(folder)], tmp_path / "out", **OPTIONS)
    assert len(read) == 100 + 150 - 90 + 30
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert not (tmp_path / ".out.work").exists()


def test_a_failed_writing_goes_on_at_the_shard(tmp_path, monkeypatch):
    monkeypatch.setattr("pod.data.sample_writer.SHARD_BYTES", 64 * 2 * 20)
    folder = write_dolma(tmp_path / "in", 2, 30, 900)
    prepare.prepare([str(folder)], tmp_path / "whole", **OPTIONS)
    numbers, whole = [], sampling.Plan.read

    def failing(plan, first, last):
        numbers.append(first)
        if len(numbers) == 4:
            raise OSError("no space left on device")
        return whole(plan, first, last)

    monkeypatch.setattr(sampling.Plan, "read", failing)
    with pytest.raises(OSError, match="no space"):
        prepare.prepare([str(folder)], tmp_path / "out", **OPTIONS)
    prepare.prepare([str(folder)], tmp_path / "out", **OPTIONS)
    assert numbers[:5] == [0, 20, 40, 60, 60]
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    # Another seed does not take the shards of this one.
    prepare.prepare([str(folder)], tmp_path / "other", **OPTIONS, seed=1)
    assert files_of(tmp_path / "other") != files_of(tmp_path / "whole")


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"sequence_length": 100_000_000_000},
            "--sequence-length 100000000000: a sample must fit into a shard",
        ),
        ({"held_out": 0.99999}, "--held-out 0.99999 leaves none of the 3 documents for training: lower it"),
    ],
)
def test_what_would_give_no_sample_is_refused(tmp_path, changes, message):
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / f"{number}.txt").write_text(f"text {number}")
    with pytest.raises(ValueError, match=message):
        prepare.prepare([str(tmp_path / "in")], tmp_path / "out", **{**OPTIONS, **changes})
    if "sequence_length" in changes:  # before anything is read
        assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert not (tmp_path / "out").exists()


def test_the_commands_in_the_help_are_whole(capsys):
    with pytest.raises(SystemExit):
        prepare.main(["--help"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for above, below in zip(lines, lines[1:], strict=False):
        if "pod.prepare" in above and "--sequence-length" not in above:
            assert above[-1] == "\\" and "--sequence-length" in below


def test_two_runs_at_once_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "WAIT", 0)
    folder = write_dolma(tmp_path / "in", 1, 3, 50)
    with prepare.work_folder(tmp_path / "out"):
        with pytest.raises(ValueError, match="out is being written by process .*lock"):
            prepare.prepare([str(folder)], tmp_path / "out", **OPTIONS)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "source,out,message",
    [
        ("in", "in/prepared", "--out .*in/prepared lies inside --source .*in:"),
        ("in/deep/..", "in/deep/prepared", "lies inside --source"),
        ("link", "in/prepared", "lies inside --source"),
        ("older", "older", "lies inside --source|exists: choose another"),
        ("older/report.md", "older", "--source .*older/report.md lies inside --out|exists: choose another"),
        ("in", "shards", "exists: choose another|not a prepared directory"),
    ],
)
def test_no_run_reads_its_own_report_nor_replaces_what_it_reads(source, out, message, force, tmp_path):
    write_dolma(tmp_path / "in", 1, 9, 50)
    (tmp_path / "in" / "deep").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "in")
    prepare.prepare([str(tmp_path / "in")], tmp_path / "older", **OPTIONS)
    (tmp_path / "shards").mkdir()  # MDS has an index.json too
    (tmp_path / "shards" / "index.json").write_text('{"version": 2, "shards": []}')
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((ValueError, FileExistsError), match=message):
        prepare.prepare([str(tmp_path / source)], tmp_path / out, force=force, **OPTIONS)
    assert sorted(tmp_path.rglob("*")) == before


def tree(pid):
    """A process and its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(found for child in children for found in tree(int(child)))]


def memory(pid):
    """Bytes of main memory that a process and its descendants take together, shared pages counted once."""
    total = 0
    for process in tree(pid):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        except OSError:
            pass  # it has just ended
    return total


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="measures memory through Linux' /proc")
def test_32_mb_of_dolma_killed_and_continued(tmp_path):
    folder = write_dolma(tmp_path / "in", 16, 400, 60_000)
    size = sum(len(gzip.decompress(path.read_bytes())) for path in folder.iterdir())
    assert size > 32e6
    command = [sys.executable, str(SCRIPT), "--source", str(folder), "--tokenizer", "bytes", "--num-proc", "2"]
    command += ["--sequence-length", "4096", "--length-intervals", "1000", "10000", "--out"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

    peak = 0
    process = subprocess.Popen([*command, str(tmp_path / "whole")], **quiet)
    while process.poll() is None:
        peak = max(peak, memory(process.pid))
        time.sleep(0.02)
    assert process.returncode == 0
    assert 100e6 < peak < 600e6, peak

    process = subprocess.Popen([*command, str(tmp_path / "out")], **quiet)
    work = tmp_path / ".out.work"
    while len(list(work.glob("*.npy"))) < 8 and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    assert process.wait() < 0, "it ended before it was killed"
    before = {path.name: path.stat().st_mtime_ns for path in work.glob("*.json")}
    assert 4 <= len(before) < 16 and not (tmp_path / "out").exists()
    process = subprocess.Popen([*command, str(tmp_path / "out")], **quiet)
    kept = {}
    while process.poll() is None:
        for path in work.glob("*.json"):
            try:
                kept[path.name] = path.stat().st_mtime_ns
            except OSError:
                pass  # it has just been removed
        time.sleep(0.01)
    assert process.returncode == 0
    assert {name: kept.get(name) for name in before} == before  # read from disk, not made again
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert not work.exists()
    given = [
        entry["drawn_tokens"] for entry in json.loads((tmp_path / "out/report.json").read_text())["length_intervals"]
    ]
    assert min(given) >= 0.98 * max(given) > 1e5


def test_a_recipe_may_insist_on_the_intervals(tmp_path):
    prepare.prepare(
        [str(write_dolma(tmp_path / "in", 1, 200, 400))], tmp_path / "out", **OPTIONS, length_intervals=[90]
    )
    PodDataModule(tmp_path / "out", 64, 1)
    PodDataModule(tmp_path / "out", 64, 1, length_intervals=[90])
    with pytest.raises(
        ValueError, match=r"length_intervals is \[90, 200\], but .* was prepared with \[90\]: .* 90 200"
    ):
        PodDataModule(tmp_path / "out", 64, 1, length_intervals=[90, 200])
