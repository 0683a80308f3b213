"""A tiny random PoD model with a byte tokenizer, saved as an export is."""

import pytest
from scripts import TEXT, save, tiny_llama
from transformers import ByT5Tokenizer

import pod


@pytest.fixture(scope="session")
def model():
    return pod.convert(tiny_llama(), pod.LayerBlocks([[0, 0], [0, 1]]), sink_size=2, recent_size=14)


@pytest.fixture(scope="session")
def tokenizer():
    return ByT5Tokenizer(extra_ids=0)


@pytest.fixture(scope="session")
def ckpt(tmp_path_factory, model):
    return save(model, tmp_path_factory.mktemp("ckpt") / "tiny")


@pytest.fixture(scope="session")
def dense():
    return tiny_llama(seed=3)


@pytest.fixture(scope="session")
def dense_ckpt(dense, tmp_path_factory):
    return save(dense, tmp_path_factory.mktemp("ckpt") / "dense")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.py"
    path.write_text(TEXT)
    return path
