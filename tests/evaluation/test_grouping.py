"""`eval/grouping.py` on a model of a few layers: its numbers, counted again."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scripts import save, script, tiny_llama

import pod
from pod.data.prepared import PreparedDataset
from pod.data.sample_writer import SampleWriter

grouping = script("eval/grouping.py")


@pytest.mark.slow
def test_rows_are_what_they_say(tmp_path, capsys):
    model = tiny_llama(intermediate_size=48, num_hidden_layers=5, head_dim=8)
    save(model, tmp_path / "base")
    similarity = torch.rand(2, 5, 5).tril(-1)
    similarity = similarity + similarity.mT + torch.eye(5)
    save_file({"similarity": similarity}, tmp_path / "similarity.safetensors")
    with SampleWriter(tmp_path / "data", sequence_length=64, vocab_size=259, tokenizer="bytes") as writer:
        writer.add("validation", np.random.default_rng(0).integers(3, 259, (3, 64)))
    paths = ["--base", tmp_path / "base", "--similarity", tmp_path / "similarity.safetensors"]
    options = ["--data", tmp_path / "data", "--kv-saving", "0.25", "--sink-size", "2", "--recent-size", "10"]
    options += ["--lengths", "96", "--samples", "1", "--out", tmp_path / "out"]
    costs = torch.rand(2, 5, 5)
    save_file({"damage": costs}, tmp_path / "damage.safetensors")
    options += ["--damage", tmp_path / "damage.safetensors"]
    assert grouping.main([str(option) for option in paths + options]) == 0
    assert "| worst" in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "grouping.json").read_text())
    assert list(found) == ["dense", "window", "greedy", "sum", "worst", "damage"]
    samples = torch.stack([PreparedDataset(tmp_path / "data", "validation")[index]["input_ids"] for index in range(3)])
    for method, row in found.items():
        blocks = pod.LayerBlocks.dense(5, 2)
        if method == "damage":
            blocks = pod.LayerBlocks.for_damage(costs, 0.25)
        elif method not in ("dense", "window"):
            blocks = pod.LayerBlocks.for_saving(similarity, 0.25, method)
        share = "window" if method == "window" else "scores"
        shared = pod.convert(model, blocks, sink_size=2, recent_size=10, share=share)
        with torch.no_grad():
            logits = shared(samples, use_cache=False).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten(), reduction="none")
        assert abs(row["loss"] - losses.mean().item()) < 1e-4 and row["kv_saving"] == shared.config.kv_saving
        # Position 12 is the first with a distant token: it foretells token 13.
        assert abs(row["loss_distant"] - losses.view(3, 63)[:, 12:].mean().item()) < 1e-4
        assert row["tokens"] == 3 * 63
        alike = [
            similarity[head, layer, anchor].item()
            for layer, anchors in enumerate(blocks.anchors.tolist())
            for head, anchor in enumerate(anchors)
            if anchor != layer
        ]
        assert row["worst_similarity"] == (min(alike) if alike else 1.0)
    assert len({row["loss"] for row in found.values()}) >= 4
    without = [str(option) for option in paths + options if option != "1"]
    without.insert(without.index("--samples") + 1, "0")
    assert grouping.main(without) == 0
    text_only = json.loads((tmp_path / "out" / "grouping.json").read_text())
    assert text_only["damage"]["passkey"] is None and text_only["damage"]["loss"] == found["damage"]["loss"]
    assert grouping.main([*map(str, paths), "--data", str(tmp_path / "data"), "--kv-saving", "0.7"]) == 2
    assert "kv_saving must be in [0, 0.5], got 0.7" in capsys.readouterr().err
