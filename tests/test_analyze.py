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
from pod.evaluation.texts import prepared
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
    with pytest.raises(ValueError, match="kv_saving=0.4 is more .* with 4 layers the maximum is 0.3750"):
        analyze(load_recipe([*line, "blocks.kv_saving=0.4", "data.path=nothere"]))  # before anything is measured


def test_documents_are_measured_one_by_one(tmp_path):
    """Without padding, and without those that are packed before them; fewer than last_q tokens are left out."""
    model = tiny_llama(num_hidden_layers=4)
    ids = np.random.default_rng(0).integers(3, 259, (3, 128))
    with SampleWriter(tmp_path / "data", sequence_length=128, vocab_size=259, tokenizer="bytes") as writer:
        for row, sizes in zip(ids, ((128,), (60,), (3, 80, 1, 40)), strict=True):
            documents = np.repeat([*range(len(sizes)), -1], [*sizes, 128 - sum(sizes)])
            for split in ("train", "validation"):
                writer.add(split, np.where(documents >= 0, row, 0)[None], document_ids=documents[None])
    texts = [ids[0], ids[1, :60], ids[2, :3], ids[2, 3:83], ids[2, 83:84], ids[2, 84:124]]
    assert [batch.tolist() for batch in prepared(tmp_path / "data", 3, 8)] == [
        [text.tolist()] for text in texts if len(text) > 1
    ]
    dataset = PreparedDataset(tmp_path / "data", "train")
    found = [text.tolist() for index in range(3) for text in dataset.texts(index)]
    assert found == [text.tolist() for text in texts]
    samples = [torch.from_numpy(text)[None] for text in texts if len(text) >= 16]
    line = [f"recipe={recipe_file(tmp_path, tmp_path / 'data', base=save(model, tmp_path / 'base'))}"]
    analyze(load_recipe([*line, "blocks.method=damage"]))
    costs = pod.similarity.sharing_damage(model, samples, sink_size=2, recent_size=14, progress=False)
    assert torch.equal(load_damage(tmp_path / "run/damage.safetensors"), costs)
    similarity = pod.similarity.attention_similarity(model, samples, progress=False)
    assert torch.equal(load_similarity(tmp_path / "run/similarity.safetensors"), similarity)
    with pytest.raises(ValueError, match="no document in 3 samples has blocks.last_q=200 tokens, the longest has 128"):
        analyze(load_recipe([*line, "blocks.last_q=200"]))
    with pytest.raises(IndexError, match="sample 3 of 3"):
        dataset.texts(3)
