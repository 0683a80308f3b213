"""python -m pod.analyze with blocks.method=damage: what it measures, writes and refuses."""

import numpy as np
import pytest
import torch
from scripts import save, tiny_llama
from test_fit import recipe_file

import pod
from pod.analyze import analyze, load_damage, load_similarity
from pod.data.prepared import PreparedDataset
from pod.data.sample_writer import SampleWriter
from pod.recipe.loading import load_recipe


def test_blocks_by_damage_are_measured_saved_and_drawn(tmp_path, capsys):
    """Costs and similarity come from the same forwards, and are those of the functions that measure one alone."""
    model = tiny_llama(num_hidden_layers=4)
    ids = np.random.default_rng(0).integers(3, 259, (6, 128))
    with SampleWriter(tmp_path / "data", sequence_length=128, vocab_size=259, tokenizer="bytes") as writer:
        for row in ids:
            writer.add("train", row[None])
        writer.add("validation", ids[:1])
    line = [f"recipe={recipe_file(tmp_path, tmp_path / 'data', base=save(model, tmp_path / 'base'))}"]
    blocks = analyze(load_recipe([*line, "blocks.method=damage"]))
    run = tmp_path / "run"
    assert "blocks.png, damage.safetensors, damage.png" in capsys.readouterr().out
    dataset = PreparedDataset(tmp_path / "data", "train")
    chosen = torch.linspace(0, len(dataset) - 1, 4).long().tolist()
    samples = [dataset[index]["input_ids"][None] for index in chosen]
    costs = pod.similarity.sharing_damage(model, samples, sink_size=2, recent_size=14, progress=False)
    assert torch.equal(load_damage(run / "damage.safetensors"), costs)
    similarity = pod.similarity.attention_similarity(model, samples, progress=False)
    assert torch.equal(load_similarity(run / "similarity.safetensors"), similarity)
    assert blocks == pod.LayerBlocks.load(run / "blocks.json") == pod.LayerBlocks.for_damage(costs, 0.25)
    assert blocks.kv_saving >= 0.25 and (run / "damage.png").read_bytes().startswith(b"\x89PNG")
    by_loss = analyze(load_recipe([*line, "blocks.method=fisher"]))
    costs = pod.similarity.sharing_damage(model, samples, 2, 14, fisher=True, progress=False)
    assert torch.equal(load_damage(run / "damage.safetensors"), costs)
    assert by_loss == pod.LayerBlocks.for_damage(costs, 0.25)
    with pytest.raises(ValueError, match="truncated, damaged or no damage file"):
        load_damage(run / "similarity.safetensors")
    with pytest.raises(ValueError, match="damage measures shared scores, not model.share=keys"):
        analyze(load_recipe([*line, "blocks.method=damage", "model.share=keys"]))
