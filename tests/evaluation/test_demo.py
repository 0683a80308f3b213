"""The demo's driver, run whole on a random model in seconds; what it claims about the shipped one is its own report."""

import json

import pytest
from scripts import save, script, tiny_llama

import pod
from pod.recipe.loading import load_recipe
from pod.recipe.loading import save as save_recipe


@pytest.fixture(scope="module")
def demo():
    return script("eval/demo.py")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    sizes = {"intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny_llama(**sizes, head_dim=16, max_position_embeddings=256, initializer_range=0.1)
    return save(model, tmp_path_factory.mktemp("base"))


@pytest.mark.slow
def test_the_whole_demo(demo, base, tmp_path, monkeypatch):
    for name, value in {"LENGTHS": (192, 256), "DEPTHS": (0.0, 1.0), "SAMPLES": 1, "TEXTS": 4, "DECODED": 3}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo, "ROUNDS", 1)
    out = tmp_path / "tiny"
    overrides = [f"model.base={base}", f"output={out}", f"data.path={tmp_path / 'data' / '256'}"]
    overrides += ["data.sequence_length=256", "trainer.tokens_per_batch=2048", "trainer.max_steps=2"]
    overrides += ["trainer.validate_every=1", "model.recent_size=20", "blocks.samples=4", "blocks.kv_saving=0.3"]
    assert demo.main(overrides) == 0
    result = json.loads((out / "report.json").read_text())
    assert list(result["rows"]) == ["dense", "dense, extra steps", "PoD, converted", "PoD, adapted", "StreamingLLM"]
    sizes = {name: row["cache_bytes"] for name, row in result["rows"].items()}
    assert sizes["dense"] == sizes["dense, extra steps"] == 256 * 6 * 2 * 16 * 4
    assert sizes["PoD, adapted"] == sizes["PoD, converted"] == result["expected_cache_bytes"] < sizes["dense"]
    assert sizes["StreamingLLM"] is None
    assert result["kv_saving"] == pod.LayerBlocks.load(out / "blocks.json").kv_saving >= 0.3
    text = (out / "report.md").read_text()
    assert all(name in text for name in result["rows"])
    assert (out / "report.png").stat().st_size > 10_000
    # Stopped and begun again: nothing is trained twice.
    trained = sorted(path.stat().st_mtime_ns for path in out.rglob("steps/*.ckpt"))
    assert demo.main(overrides) == 0
    assert trained == sorted(path.stat().st_mtime_ns for path in out.rglob("steps/*.ckpt"))


def test_a_demo_of_other_settings_is_not_gone_on_with(demo, base, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "fit", lambda *_: pytest.fail("it trains"))
    line = [f"model.base={base}", f"data.path={tmp_path / 'data' / '64'}", "data.sequence_length=128"]
    line += ["model.recent_size=20", "trainer.tokens_per_batch=512", f"output={tmp_path / 'tiny'}"]
    whole = load_recipe(["recipe=tiny", "resume=auto", *line, "trainer.max_steps=20"])
    save_recipe(load_recipe(["recipe=tiny", *line, "trainer.max_steps=3"]), tmp_path / "tiny" / "recipe.yaml")
    assert demo.main([*line, "trainer.max_steps=20"]) == 2
    assert "other settings (trainer.max_steps=3, now 20): remove it" in capsys.readouterr().err
    save_recipe(whole, tmp_path / "tiny" / "recipe.yaml")
    demo.refuse_other(whole)
    monkeypatch.setattr(demo, "TEXTS", 2)
    demo.write_data(load_recipe(["recipe=tiny", *line, "trainer.max_steps=3"]))
    assert "warning" not in capsys.readouterr().err
    demo.write_data(whole)
    assert "has 64 training samples and the run takes 80" in capsys.readouterr().err


def test_the_demo_refuses_clearly(demo, capsys):
    assert demo.main(["trainer.max_step=3"]) == 2
    assert "Did you mean trainer.max_steps?" in capsys.readouterr().err


def test_an_adapter_that_was_trained_anew_is_asked_anew(tmp_path, monkeypatch, capsys):
    """Under the name, and in the folder, of one that was asked before."""
    real = script("eval/demo_real.py")
    blocks = pod.LayerBlocks([[0, 0], [0, 1]])
    stock, shared = tiny_llama(), pod.convert(tiny_llama(), blocks, sink_size=2, recent_size=6)
    monkeypatch.setattr(pod, "load", lambda base, adapter=None, dtype=None: stock if adapter is None else shared)
    monkeypatch.setattr(real.AutoTokenizer, "from_pretrained", lambda *_: None)
    for name, value in {"held_out": {}, "passkey_prompts": [], "passkey_accuracy": [], "make_requests": []}.items():
        monkeypatch.setattr(real, name, lambda *_, value=value, **__: value)
    weights, asked = {tmp_path / "shipped": "0", tmp_path / "mine": "1"}, []
    monkeypatch.setattr(real, "weights_sum", weights.__getitem__)
    monkeypatch.setattr(real, "weights_hash", lambda *_: "base")

    def predict(model, tokenizer, requests, predictions, **options):
        asked.append(predictions.folder)
        return []

    def stop(*_):
        raise ValueError("as far as the rows")

    monkeypatch.setattr(real, "predict", predict)
    monkeypatch.setattr(real, "measure_caches", stop)
    monkeypatch.setattr(real, "token_ids", lambda *_: real.torch.zeros(9))
    (tmp_path / "data/held-out").mkdir(parents=True)
    (tmp_path / "data/held-out/novel.txt").write_text("Anne Elliot")
    arguments = ["--base", "base", "--adapter", str(tmp_path / "shipped"), "--also", f"mine={tmp_path / 'mine'}"]
    arguments += ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    assert real.main(arguments) == 2 and "as far as the rows" in capsys.readouterr().err
    first = asked[-1]
    assert len(set(asked)) == 4  # dense, converted, adapted, mine
    asked.clear()
    assert real.main(arguments) == 2 and not asked
    weights[tmp_path / "mine"] = "2"
    assert real.main(arguments) == 2 and len(asked) == 3 and first not in asked
