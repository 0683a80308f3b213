"""Prepared data: the format's round trip, `python -m pod.prepare`, and a DataModule that resumes exactly."""

import gzip
import hashlib
import json
import multiprocessing
import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch
from transformers import ByT5Tokenizer

from pod import prepare
from pod.data.prepared import PreparedData, PreparedDataset, collate
from pod.data.sample_writer import SampleWriter
from pod.training.data import PodDataModule

SCRIPT = Path(__file__).parents[1] / "data" / "prepare.py"


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small are slower on several threads, many times so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write(path, samples=20, validation=4, length=8, vocab_size=259, **options):
    """Sample i is [i, i, ...]; validation sample i is [100 + i, ...]."""
    with SampleWriter(path, sequence_length=length, vocab_size=vocab_size, tokenizer="bytes", **options) as writer:
        writer.add("train", np.repeat(np.arange(samples)[:, None], length, 1))
        if validation:
            writer.add("validation", np.repeat(100 + np.arange(validation)[:, None], length, 1))
    return path


# The format


@pytest.mark.parametrize(
    "vocab_size,dtype", [(259, "uint16"), (65535, "uint16"), (65536, "uint32"), (200_000, "uint32")]
)
def test_round_trip(tmp_path, vocab_size, dtype):
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, vocab_size, (11, 5))
    tokens[0, 0] = vocab_size - 1
    ids = np.array([[0, 0, 1, 1, 2]] * 9 + [[0, 0, 0, 0, 0], [0, 1, 1, -1, -1]])
    with SampleWriter(
        tmp_path / "d", sequence_length=5, vocab_size=vocab_size, tokenizer="x", shard_samples=4
    ) as writer:
        writer.add("train", tokens[:1], ids[:1])
        writer.add("train", tokens[1], ids[1])
        writer.add("train", tokens[2:], ids[2:])
        writer.held_out = ["b", "a"]
    data = PreparedData(tmp_path / "d")
    data.verify()
    assert (data.dtype.name, data.held_out()) == (dtype, ["a", "b"])
    assert [shard["samples"] for shard in data.splits["train"]["shards"]] == [4, 4, 3]
    assert (data.splits["train"]["samples"], data.splits["train"]["tokens"]) == (11, 53)
    dataset = PreparedDataset(data, "train")
    assert len(dataset) == 11
    for index in range(11):
        item = dataset[index]
        assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
        assert item["input_ids"].tolist() == tokens[index].tolist()
    assert dataset[8]["document_ids"].tolist() == [0, 0, 1, 1, 2]
    ignored = torch.tensor([True, False, True, False, True])
    assert (dataset[8]["labels"] == torch.where(ignored, -100, dataset[8]["input_ids"])).all()
    assert dataset[10]["document_ids"].tolist() == [0, 1, 1, -1, -1]
    assert dataset[10]["labels"].tolist() == [-100, -100, tokens[10, 2], -100, -100]
    assert "document_ids" not in dataset[9]
    batch = collate([dataset[9], dataset[10]])
    assert batch["document_ids"].tolist() == [[0] * 5, [0, 1, 1, -1, -1]]
    assert "document_ids" not in collate([dataset[9], dataset[9]])
    with pytest.raises(IndexError):
        dataset[11]


def test_answers_round_trip(tmp_path):
    tokens, answers = np.arange(35).reshape(7, 5), np.random.default_rng(1).random((7, 5)) < 0.4
    with SampleWriter(tmp_path / "d", sequence_length=5, vocab_size=99, tokenizer="x", shard_samples=3) as writer:
        writer.add("train", tokens[:4], answers=answers[:4])
        writer.add("train", tokens[4:], answers=answers[4:])
        writer.add("validation", tokens[:1])
        with pytest.raises(ValueError, match="answers for all samples or for none"):
            writer.add("train", tokens[:1])
        with pytest.raises(ValueError, match="answers are int64"):
            writer.add("train", tokens[:1], answers=answers[:1].astype(np.int64))
    data = PreparedData(tmp_path / "d")
    data.verify()
    items = [PreparedDataset(data, "train")[index] for index in range(7)]
    assert torch.stack([item["answers"] for item in items]).tolist() == answers.tolist()
    assert "answers" not in PreparedDataset(data, "validation")[0]
    (tmp_path / "d" / "answers-train-00001.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="answers-train-00001.bin has 1 bytes"):
        PreparedData(tmp_path / "d")


def test_pickling_carries_no_samples(tmp_path):
    dataset = PreparedDataset(write(tmp_path / "d", samples=50, length=1000))
    dataset[0]
    content = pickle.dumps(dataset)
    assert len(content) < 5000
    assert pickle.loads(content)[7]["input_ids"][0] == 7


def test_a_truncated_file_is_named(tmp_path):
    file = write(tmp_path / "d") / "tokens-train-00000.bin"
    content = file.read_bytes()
    file.write_bytes(content[:-3])
    with pytest.raises(ValueError, match=r"tokens-train-00000.bin has 317 bytes, its index says 320"):
        PreparedData(tmp_path / "d")
    file.write_bytes(content[:-1] + b"x")
    with pytest.raises(ValueError, match="tokens-train-00000.bin is not what its index says"):
        PreparedData(tmp_path / "d").verify()
    file.unlink()
    with pytest.raises(FileNotFoundError, match="tokens-train-00000.bin is missing"):
        PreparedData(tmp_path / "d")


@pytest.mark.parametrize("content,message", [("{", "not JSON"), ("[]", "not the index"), ('{"a": 1}', "not the index")])
def test_a_bad_index_is_named(tmp_path, content, message):
    (write(tmp_path / "d") / "index.json").write_text(content)
    with pytest.raises(ValueError, match=rf"index.json.*{message}"):
        PreparedData(tmp_path / "d")


def test_another_version_is_named(tmp_path):
    index = write(tmp_path / "d") / "index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "version": 9}))
    with pytest.raises(ValueError, match="version 9, this code reads 1"):
        PreparedData(tmp_path / "d")


def test_writer_leaves_nothing_half(tmp_path):
    with pytest.raises(RuntimeError):
        with SampleWriter(tmp_path / "d", sequence_length=2, vocab_size=9, tokenizer="x") as writer:
            writer.add("train", [1, 2])
            raise RuntimeError
    with pytest.raises(ValueError, match="no sample"):
        with SampleWriter(tmp_path / "d", sequence_length=2, vocab_size=9, tokenizer="x"):
            pass
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    for force in (False, True):
        with pytest.raises(FileExistsError):
            write(tmp_path / "mine", force=force)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize(
    "tokens,ids,message",
    [
        ([[1, 2]], None, "sequence_length is 3"),
        ([1, 2, 9], None, "vocab_size is 9"),
        ([1, 2, -1], None, "vocab_size is 9"),
        ([1, 2, 3], [1, 0, 0], "non-decreasing"),
        ([1, 2, 3], [-1, 0, 0], "non-decreasing"),
        ([1, 2, 3], [0, 1], "shape"),
    ],
)
def test_writer_refuses(tmp_path, tokens, ids, message):
    with pytest.raises(ValueError, match=message):
        with SampleWriter(tmp_path / "d", sequence_length=3, vocab_size=9, tokenizer="x") as writer:
            writer.add("train", tokens, ids)


# data/prepare.py


@pytest.fixture
def corpus(tmp_path):
    """Documents of every kind, some bad, one twice."""
    root = tmp_path / "corpus"
    (root / "deep" / ".hidden").mkdir(parents=True)
    for number in range(12):
        (root / "deep" / f"{number}.{('py', 'md', 'txt')[number % 3]}").write_text(
            f"document {number}\n" * (number + 3)
        )
    (root / "deep" / ".hidden" / "x.txt").write_text("never read")
    (root / "image.png").write_bytes(b"\x89PNG")
    (root / "copy.txt").write_text("document 3\n" * 6)
    (root / "empty.md").write_text("\n")
    (root / "latin.txt").write_bytes("good\nalso good\ncaf\xe9\n".encode("latin-1"))
    records = [json.dumps({"id": number, "text": f"line {number} with an é. " * 4}) for number in range(20)]
    records[3] = '{"text": "cut off'
    records[5] = '{"body": "no text here"}'
    records[6] = '{"text": 7}'
    records[7] = '["text"]'
    records[8] = '{"text": " "}'
    records[9] = '{"text": "half a pair \\ud800"}'
    content = [record.encode() for record in records]
    content[11] = b'{"text": "caf\xe9"}'
    content.insert(12, b"  ")
    (root / "lines.jsonl").write_bytes(b"\n".join(content))
    whole = gzip.compress(b"\n".join(json.dumps({"text": f"packed {n}"}).encode() for n in range(9)))
    (root / "packed.jsonl.gz").write_bytes(whole)
    return root


BAD = {
    "empty.md": [1],
    "latin.txt": [3],
    "lines.jsonl": [4, 6, 7, 8, 9, 10, 12],
}


def run(corpus, out, **options):
    settings = {"tokenizer": "bytes", "sequence_length": 64, "held_out": 0.2}
    return prepare.prepare([str(corpus)], out, **{**settings, **options})


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def documents_of(path, split):
    """The texts of a packed split, its pieces joined across samples again."""
    stream = []
    for item in (dataset := PreparedDataset(path, split)):
        stream += item["input_ids"][item["input_ids"] != 0].tolist()
    assert len(dataset) == dataset.data.splits[split]["samples"]
    text = bytes(0 if token == 1 else token - 3 for token in stream)
    assert text.endswith(b"\0")
    return [part.decode() for part in text[:-1].split(b"\0")]


def test_prepare(corpus, tmp_path):
    report = run(corpus, tmp_path / "one")
    found = {}
    for entry in report["skipped"]:
        found.setdefault(Path(entry["file"]).name, []).append(entry["line"])
    assert found == BAD
    problems = {entry["line"]: entry["problem"] for entry in report["skipped"] if entry["file"].endswith("lines.jsonl")}
    assert "broken JSON" in problems[4] and "no text" in problems[6] and "not a string" in problems[7]
    assert "no text" in problems[8] and "empty" in problems[9]
    assert "wrong encoding" in problems[10] and "wrong encoding" in problems[12]
    assert json.loads((tmp_path / "one" / "report.json").read_text()) == report
    assert (report["documents"], report["duplicates"]) == (12 + 13 + 9, 1)

    data = PreparedData(tmp_path / "one")
    data.verify()
    train, validation = (documents_of(tmp_path / "one", split) for split in ("train", "validation"))
    assert len(train) + len(validation) == 34 and len(set(train + validation)) == 34
    assert "document 3\n" * 6 in train + validation and "packed 8" in train + validation
    hashes = [hashlib.sha256(text.encode()).hexdigest() for text in validation]
    assert sorted(hashes) == data.held_out() and hashes
    assert not set(data.held_out()) & {hashlib.sha256(text.encode()).hexdigest() for text in train}

    # Any number of processes: the same bytes. Another seed: another order, the same split.
    run(corpus, tmp_path / "two", num_proc=2)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    run(corpus, tmp_path / "two", seed=1, force=True)
    assert files_of(tmp_path / "one") != files_of(tmp_path / "two")
    assert PreparedData(tmp_path / "two").held_out() == data.held_out()
    assert sorted(documents_of(tmp_path / "two", "train")) == sorted(train)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "one", "two"]


def test_one_document(corpus, tmp_path):
    report = run(corpus / "deep", tmp_path / "out", one_document=True, sequence_length=80, held_out=0)
    assert list(report["splits"]) == ["train"]
    dataset = PreparedDataset(tmp_path / "out")
    sizes = [len(f"document {number}\n") * (number + 3) + 1 for number in range(12)]
    assert len(dataset) == 12 and 0 < report["truncated_documents"] == sum(size > 80 for size in sizes) < 12
    for item in dataset:
        real = int((item["input_ids"] != 0).sum())
        assert "document_ids" not in item
        assert (item["input_ids"][real:] == 0).all() and (item["labels"][real:] == -100).all()
        assert (item["labels"][1:real] == item["input_ids"][1:real]).all() and item["labels"][0] == -100
        if real < 80:
            assert item["input_ids"][real - 1] == 1


def test_bytes_are_the_ids_of_byt5():
    encode, vocab_size, pad_id = prepare.load_tokenizer("bytes")
    tokenizer = ByT5Tokenizer(extra_ids=0)
    assert (vocab_size, pad_id) == (len(tokenizer), tokenizer.pad_token_id)
    for text in ("def f(x):\n\treturn x\n", "é 漢字 🙂 \x00 \r\n"):
        assert encode(text).tolist() == tokenizer(text)["input_ids"]


def test_a_tokenizers_directory(corpus, tmp_path):
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path / "tokenizer")
    run(corpus / "deep", tmp_path / "one", tokenizer=str(tmp_path / "tokenizer"))
    run(corpus / "deep", tmp_path / "two")
    one, two = files_of(tmp_path / "one"), files_of(tmp_path / "two")
    assert one["tokens-train-00000.bin"] == two["tokens-train-00000.bin"]


def test_damaged_gzip_keeps_what_comes_before(tmp_path):
    lines = b"\n".join(json.dumps({"text": hashlib.sha256(bytes([n])).hexdigest() * 40}).encode() for n in range(200))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-2000])
    (tmp_path / "in" / "b.jsonl.gz").write_bytes(b"not gzip")
    report = run(tmp_path / "in", tmp_path / "out")
    assert 1 <= report["documents"] < 200
    assert [Path(entry["file"]).name for entry in report["skipped"]] == ["a.jsonl.gz", "b.jsonl.gz"]
    assert report["skipped"][0]["line"] == report["documents"] + 1
    assert all("cannot be read" in entry["problem"] for entry in report["skipped"])


@pytest.mark.parametrize(
    "extra,message",
    [
        (["--source", "nowhere"], "nowhere: no such file or directory"),
        (["--source", "{}/image.png"], "cannot read this kind of file"),
        (["--source", "{}/void"], "no input files"),
        (["--source", "{}/latin.txt"], "nothing readable in 1 files, 1 problems; the first: {}/latin.txt:3: wrong"),
        (["--source", "{}/blank.jsonl"], "blank.jsonl:1: no text: the file is empty"),
        (["--sequence-length", "1"], "--sequence-length 1"),
        (["--held-out", "1"], "--held-out 1.0"),
        (["--tokenizer", "{}/void"], "no tokenizer can be loaded from '{}/void'"),
        (["--out", "{}"], "exists: choose another --out, or pass --force"),
        (["--out", "{}", "--force"], "not a prepared directory"),
    ],
)
def test_command_fails_clearly(corpus, tmp_path, capsys, extra, message):
    (corpus / "void").mkdir()
    (corpus / "blank.jsonl").write_text("\n\n")
    before = sorted(corpus.rglob("*"))
    command = ["--source", str(corpus), "--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--num-proc", "1"]
    command += ["--sequence-length", "32", *(word.format(corpus) for word in extra)]
    assert prepare.main(command) == 2
    assert message.format(corpus) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]
    assert sorted(corpus.rglob("*")) == before


def test_command(corpus, tmp_path):
    command = [sys.executable, SCRIPT, "--source", corpus, "--out", tmp_path / "out", "--tokenizer", "bytes"]
    done = subprocess.run(
        [*command, "--sequence-length", "64", "--num-proc", "2"], capture_output=True, text=True, check=True
    )
    assert f"skipped {corpus}/lines.jsonl:4: broken JSON" in done.stderr and "Tokenising" in done.stderr
    assert "34 documents, 1 duplicates dropped, 9 skipped" in done.stdout
    assert PreparedData(tmp_path / "out").sequence_length == 64


def test_import_pod_is_light():
    code = "import pod, sys; assert not {'lightning', 'datasets', 'torchdata'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# The DataModule


def module(path, **options):
    return PodDataModule(path, **{"sequence_length": 8, "micro_batch_size": 2, "seed": 3, **options})


def first_tokens(batches):
    return [batch["input_ids"][:, 0].tolist() for batch in batches]


@pytest.fixture
def prepared(tmp_path):
    return write(tmp_path / "d", samples=21)


def test_order_depends_on_the_seed_alone(prepared):
    loaders = [module(prepared, num_workers=workers).train_dataloader() for workers in (0, 1, 2)]
    epochs = [[first_tokens(loader) for _ in range(2)] for loader in loaders]
    assert epochs[0] == epochs[1] == epochs[2]
    first, second = (sum(epoch, []) for epoch in epochs[0])
    assert first != second and len(set(first)) == len(set(second)) == 20
    assert len(loaders[0]) == len(epochs[0][0]) == 10
    assert first_tokens(module(prepared, seed=4).train_dataloader()) != epochs[0][0]
    assert sum(first_tokens(module(prepared, shuffle=False).train_dataloader()), []) == list(range(20))


@pytest.mark.parametrize("workers", [(0, 0), (2, 2), (2, 0), (0, 1)])
@pytest.mark.parametrize("stop", [0, 3, 9, 10])
def test_resumes_exactly(prepared, workers, stop):
    whole = module(prepared).train_dataloader()
    expected = first_tokens(whole) + first_tokens(whole) + first_tokens(whole)

    data = module(prepared, num_workers=workers[0])
    iterator = iter(data.train_dataloader())
    seen = first_tokens(next(iterator) for _ in range(stop))
    state = json.loads(json.dumps(data.state_dict()))
    del iterator

    resumed = module(prepared, num_workers=workers[1])
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    loader = resumed.train_dataloader()
    assert resumed.state_dict() == state
    for _ in range(2 if stop < 10 else 1):
        seen += first_tokens(loader)
    assert seen == expected[: len(seen)] and len(seen) == 20


def test_workers_end_with_the_iterator(prepared):
    data = module(prepared, num_workers=2)
    others = set(multiprocessing.active_children())
    iterator = iter(data.train_dataloader())
    next(iterator)
    assert len(set(multiprocessing.active_children()) - others) == 2
    begin = time.monotonic()
    del iterator
    assert not set(multiprocessing.active_children()) - others
    assert time.monotonic() - begin < 4


def test_ranks_share_the_steps_of_one_process(prepared):
    """Four samples a step: one process with 4, or two with 2 each, see the same samples in each step."""
    from pod.training.data import ResumableLoader, ResumableSampler

    dataset = PreparedDataset(prepared)
    loaders = []
    for rank in range(2):
        sampler = ResumableSampler(dataset, micro_batch_size=2, num_replicas=2, rank=rank, seed=3)
        loaders.append(ResumableLoader(dataset, batch_size=2, sampler=sampler, collate_fn=collate, drop_last=True))
    both = [left + right for left, right in zip(*map(first_tokens, loaders), strict=True)]
    alone = module(prepared, micro_batch_size=4).train_dataloader()
    assert both == first_tokens(alone) and len(both) == 5
    assert loaders[1].state_dict() == alone.state_dict() == {"epoch": 0, "samples": 20}


def sampled(dataset, accumulation, ranks=1, start=0):
    from pod.training.data import ResumableSampler

    samplers = [ResumableSampler(dataset, 1, ranks, rank, 3, accumulation=accumulation) for rank in range(ranks)]
    for sampler in samplers:
        sampler.start = start
    orders = [list(sampler) for sampler in samplers]
    assert start or all(len(sampler) == len(order) for sampler, order in zip(samplers, orders, strict=True))
    return orders


def test_an_epoch_is_whole_optimiser_steps(prepared):
    """21 samples: 5 steps of 4, by however many ranks and micro-batches a step is made up."""
    dataset = PreparedDataset(prepared)
    order = np.random.default_rng((3, 0)).permutation(21).tolist()
    assert sampled(dataset, 4) == [order[:20]]
    assert sampled(dataset, 2, ranks=2) == [order[:20:2], order[1:20:2]]
    assert sampled(dataset, 8) == [order[:16]] and sampled(dataset, 4, start=16) == [order[16:20]]
    with pytest.raises(
        ValueError,
        match="21 training samples, but one optimiser step takes 22 .micro_batch_size 1 x 2 data-parallel ranks x 11",
    ):
        sampled(dataset, 11, ranks=2)


@pytest.mark.parametrize("saved,goes_on", [(0, 0), (6, 8), (8, 8), (18, 20), (21, 20)])
def test_a_position_of_smaller_steps_moves_on_to_a_whole_one(prepared, saved, goes_on):
    data = module(prepared)
    data.trainer = lightning.Trainer(accelerator="cpu", logger=False, accumulate_grad_batches=2)
    data.load_state_dict(data.state_dict() | {"samples": saved})
    assert data.batches_trained() == goes_on // 2
    loader = data.train_dataloader()
    assert loader.state_dict() == {"epoch": 0, "samples": goes_on}
    order = np.random.default_rng((3, goes_on == 20)).permutation(21).tolist()
    assert sum(first_tokens(loader), []) == order[goes_on % 20 : 20]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_batches_are_pinned_for_a_gpu_alone(prepared, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # a run on the CPU beside a GPU leaves it alone
    data = module(prepared)
    strategy = SimpleNamespace(root_device=torch.device(device))
    data.trainer = SimpleNamespace(strategy=strategy, distributed_sampler_kwargs=None, accumulate_grad_batches=1)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        assert loader.pin_memory == (device == "cuda:0")


def test_a_position_is_that_of_the_last_whole_step(prepared):
    data = module(prepared)
    data.trainer = lightning.Trainer(accelerator="cpu", logger=False, accumulate_grad_batches=3)
    loader = data.train_dataloader()
    positions = [loader.state_dict()["samples"] for _ in loader]
    assert positions == [0, 0, 6, 6, 6, 12, 12, 12, 18]


def test_a_position_in_other_data_is_refused(prepared, tmp_path):
    state = module(prepared).state_dict()
    with pytest.raises(ValueError, match="seed=3, this run has seed=4"):
        module(prepared, seed=4).load_state_dict(state)
    with pytest.raises(ValueError, match="shuffle=True, this run has shuffle=False"):
        module(prepared, shuffle=False).load_state_dict(state)
    with pytest.raises(ValueError, match="trained on other samples"):
        module(write(tmp_path / "e", samples=22)).load_state_dict(state)
    module(write(tmp_path / "f", samples=21, validation=0)).load_state_dict(state)


def test_clear_errors(prepared, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"python -m pod.prepare --source PATH --out .*nowhere"):
        module(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="sequence_length is 16, but .* was prepared with 8"):
        module(prepared, sequence_length=16)
    with pytest.raises(ValueError, match="d: 21 training samples, but one optimiser step takes 22"):
        module(prepared, micro_batch_size=22).train_dataloader()
    with pytest.raises(ValueError, match="micro_batch_size is 0"):
        module(prepared, micro_batch_size=0)
    bare = write(tmp_path / "bare", validation=0, samples=5)
    with pytest.raises(ValueError, match="no validation split: prepare with --held-out"):
        module(bare).val_dataloader()
    with pytest.raises(ValueError, match="has no validation split, only: train"):
        PreparedDataset(bare, "validation")
    with pytest.raises(ValueError, match="prepared with 4"):
        module(prepared, validation_path=write(tmp_path / "short", length=4))
    assert sum(first_tokens(module(bare, validation_path=prepared).val_dataloader()), []) == [100, 101, 102, 103]
    assert sum(first_tokens(module(prepared, validation_path=bare).val_dataloader()), []) == [0, 1, 2, 3, 4]


class Recorder(lightning.LightningModule):
    """Trains one number and notes the samples it saw; can stop in the middle of a step."""

    def __init__(self, interrupt_at=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []
        self.interrupt_at = interrupt_at

    def training_step(self, batch, batch_idx):
        if self.interrupt_at == self.global_step:
            self.trainer.save_checkpoint(self.trainer.default_root_dir + "/stopped.ckpt")
            raise RuntimeError("interrupted")
        self.seen.append(batch["input_ids"][:, 0].tolist())
        return self.weight * batch["input_ids"].float().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        path = self.trainer.default_root_dir + f"/{self.global_step}.ckpt"
        if not Path(path).exists():
            self.trainer.save_checkpoint(path)

    def validation_step(self, batch, batch_idx):
        assert batch["input_ids"].min() >= 100

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(root, data, model, ckpt=None, **options):
    trainer = lightning.Trainer(
        default_root_dir=root, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, **{"max_epochs": 3, "val_check_interval": 5, **options},
    )  # fmt: skip
    trainer.fit(model, datamodule=data, ckpt_path=ckpt)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 2])
def test_lightning_resumes_exactly(prepared, tmp_path, workers):
    whole = fit(tmp_path / "run", module(prepared), Recorder())
    assert len(whole.seen) == 30
    for steps in (4, 10, 14) if workers == 0 else (14,):
        resumed = fit(
            tmp_path / "again", module(prepared, num_workers=workers), Recorder(), tmp_path / "run" / f"{steps}.ckpt"
        )
        assert resumed.seen == whole.seen[steps:], steps
        assert resumed.weight == whole.weight
    # The same object fits again from the start.
    data = module(prepared, num_workers=workers)
    for _ in range(2):
        assert fit(tmp_path / "run", data, Recorder(), max_epochs=-1, max_steps=13).seen == whole.seen[:13]


@pytest.mark.filterwarnings("ignore")
def test_a_batch_in_flight_is_trained_on_after_resuming(prepared, tmp_path):
    whole = fit(tmp_path / "run", module(prepared), Recorder())
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(tmp_path / "run", module(prepared, num_workers=2), Recorder(interrupt_at=13))
    state = torch.load(tmp_path / "run" / "stopped.ckpt", weights_only=True)["PodDataModule"]
    assert (state["epoch"], state["samples"]) == (1, 6)
    resumed = fit(tmp_path / "again", module(prepared), Recorder(), tmp_path / "run" / "stopped.ckpt")
    assert resumed.seen == whole.seen[13:] and resumed.weight == whole.weight
