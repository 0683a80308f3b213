"""The base model that is shipped with the demo: what it is, and that it retrieves and predicts as its log says."""

import csv
import json

import pytest
import torch
from safetensors import safe_open
from scripts import ROOT

from pod.evaluation import models
from pod.evaluation.passkey import passkey_accuracy, passkey_prompts
from pod.evaluation.perplexity import perplexity

BASE = ROOT / "checkpoints" / "tiny-base"


def test_it_is_small_and_safe():
    assert sum(path.stat().st_size for path in BASE.iterdir()) < 12e6
    assert not {path.suffix for path in BASE.iterdir()} & {".bin", ".pt", ".ckpt", ".pkl", ".pickle"}
    with safe_open(BASE / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}
    config = json.loads((BASE / "config.json").read_text())
    assert config["num_hidden_layers"] >= 14 and config["max_position_embeddings"] == 1024
    for length in (128, 256, 512, 1024):
        rows = list(csv.DictReader((BASE / f"training-log-{length}.csv").open()))
        assert any(row["val_passkey"] for row in rows) and any(row["train_loss"] for row in rows)


@pytest.mark.slow
def test_it_retrieves_and_predicts():
    from pod.data.demo_corpus import corpus_sample, standard_library

    model, tokenizer = models.load(str(BASE), "cpu", "float32")
    held_out = standard_library()[1]
    prompts = passkey_prompts(tokenizer, b"\n".join(held_out).decode(), 1016, [0.0, 0.25, 0.5, 0.75], samples=4, seed=3)
    assert sum(passkey_accuracy(model, tokenizer, prompts, 8)) / len(prompts) > 0.97
    texts = [corpus_sample(held_out, 1024, 2, index, 0, 0, validation=True).text for index in range(64)]
    texts = [torch.tensor([list(text)]) + 3 for text in texts]
    assert perplexity(model, texts, bytes_per_token=1.0).bits_per_byte < 2.0
