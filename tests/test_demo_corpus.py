"""The demo's corpus: what is planted is found again, a sample depends on its index alone, splits are apart."""

import json

import numpy as np
import pytest

from pod.data import demo_corpus
from pod.data.prepared import PreparedData, PreparedDataset


@pytest.fixture(scope="module")
def modules():
    return demo_corpus.standard_library()


def test_the_splits_share_no_module(modules):
    train, validation = modules
    assert len(train) > 100 and len(validation) > 3
    assert not set(train) & set(validation)
    assert len(set(train)) == len(train)
    assert demo_corpus.standard_library() == (train, validation)


@pytest.mark.parametrize("length,keys", [(128, 2), (256, 4), (1024, 12), (1024, 25), (3000, 40)])
def test_asked_digits_are_the_stated_ones(modules, length, keys):
    asked = 0
    for seed in range(40):
        sample = demo_corpus.planted_sample(modules[0], length, seed, keys)
        assert len(sample.text) == length
        for answer, key_end in sample.answers:
            digits = sample.text[answer : answer + 5]
            assert digits.isdigit() and len(digits) == 5
            assert digits == sample.text[key_end - 5 : key_end]
            assert key_end <= answer
            # The digits end their line, and both lines name the same key.
            assert sample.text[answer + 5 : answer + 6] in (b"\n", b"")
            asked += 1
    assert asked >= 40


def test_a_sample_depends_on_its_index_alone(modules):
    ahead = [demo_corpus.corpus_sample(modules[0], 512, 7, index) for index in range(6)]
    back = [demo_corpus.corpus_sample(modules[0], 512, 7, index) for index in reversed(range(6))]
    assert ahead == back[::-1]
    assert len({sample.text for sample in ahead}) == 6
    assert demo_corpus.corpus_sample(modules[0], 512, 8, 0) != ahead[0]
    assert demo_corpus.corpus_sample(modules[0], 512, 7, 0, validation=True) != ahead[0]


def test_more_keys_than_names(modules):
    sample = demo_corpus.corpus_sample(modules[0], 65536, 0, 0, keys_min=1000, keys_max=1000)
    assert len(sample.text) == 65536 and len(sample.answers) <= 676


def test_command_writes_a_prepared_directory(tmp_path, modules, capsys):
    out = tmp_path / "demo"
    command = ["--out", str(out), "--length", "256", "--samples", "9", "--validation-samples", "3", "--seed", "5"]
    assert demo_corpus.main(command) == 0
    data = PreparedData(out)
    data.verify()
    assert (data.tokenizer, data.vocab_size, data.sequence_length) == ("bytes", 259, 256)
    for split, texts, count in (("train", modules[0], 9), ("validation", modules[1], 3)):
        dataset = PreparedDataset(data, split)
        assert len(dataset) == count
        for index in range(count):
            item = dataset[index]
            sample = demo_corpus.corpus_sample(texts, 256, 5, index, validation=split == "validation")
            assert bytes((item["input_ids"].numpy() - 3).astype(np.uint8)) == sample.text
            assert item["labels"][0] == -100 and (item["labels"][1:] == item["input_ids"][1:]).all()
            assert "document_ids" not in item
            marked = np.zeros(256, dtype=bool)
            for start, _ in sample.answers:
                marked[start : start + 5] = True
            assert item["answers"].tolist() == marked.tolist()
        assert sum(int(dataset[index]["answers"].sum()) for index in range(count)) >= 5 * count
    assert len(data.held_out()) == len(modules[1])
    before = (out / "index.json").read_bytes()

    assert demo_corpus.main(command) == 2
    assert "--force" in capsys.readouterr().err
    assert demo_corpus.main([*command, "--force"]) == 0
    assert (out / "index.json").read_bytes() == before
    assert demo_corpus.main([*command, "--force", "--keys-min", "3", "--keys-max", "3"]) == 0
    assert json.loads((out / "index.json").read_text()) != json.loads(before)
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


@pytest.mark.parametrize("extra", [["--length", "64"], ["--keys-min", "9", "--keys-max", "3"], ["--samples", "0"]])
def test_command_refuses(tmp_path, capsys, extra):
    out = ["--out", str(tmp_path / "demo"), "--samples", "2", "--validation-samples", "0"]
    assert demo_corpus.main([*out, *extra]) == 2
    assert extra[0] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
