"""The sweep over proximal sizes and savings, on a random model in seconds."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

SCRIPT = Path(__file__).parents[2] / "eval" / "figure4.py"


@pytest.fixture(scope="module")
def figure4():
    spec = importlib.util.spec_from_file_location("figure4", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=256, initializer_range=0.1, bos_token_id=None,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_sweep_is_stopped_and_goes_on(figure4, base, tmp_path, monkeypatch, capsys):
    for name, value in {"LENGTHS": (192,), "DEPTHS": (0.0, 1.0), "SAMPLES": 1, "TEXTS": 2}.items():
        monkeypatch.setattr(figure4.demo, name, value)
    out = tmp_path / "sweep"
    overrides = [f"model.base={base}", f"data.path={tmp_path / 'data' / '256'}", "data.sequence_length=256"]
    overrides += ["trainer.tokens_per_batch=2048", "trainer.max_steps=1", "trainer.validate_every=1"]
    overrides += ["model.recent_size=20", "blocks.samples=2", "blocks.kv_saving=0.25"]
    arguments = [*overrides, "--recent", "20,60", "--kv-savings", "0,0.25", "--out", str(out)]
    trained = []
    fit = figure4.fit

    def broken(recipe):
        if len(trained) == 2:
            raise ValueError("stopped here")
        trained.append((recipe.model.recent_size, recipe.blocks.kv_saving))
        return fit(recipe)

    monkeypatch.setattr(figure4, "fit", broken)
    assert figure4.main(arguments) == 2 and "stopped here" in capsys.readouterr().err
    assert trained == [(20, 0.25), (60, 0.25)] and not (out / "figure4.json").exists()
    monkeypatch.setattr(figure4, "fit", lambda recipe: trained.append("rest") or fit(recipe))
    assert figure4.main(arguments) == 0
    assert trained[2:] == ["rest"], "only the point that was missing"
    found = json.loads((out / "figure4.json").read_text())["points"]
    assert [(p["recent"], p["wanted_saving"]) for p in found] == [(20, 0.25), (60, 0.25), (20, 0)]
    dense = 2 * 4 * 256 * 16 * 4
    for point, near in zip(found, (4 + 20 + 64, 4 + 60 + 64, None), strict=True):
        assert point["kv_saving"] == point["wanted_saving"]
        shared = round(2 * point["kv_saving"] * 4)
        assert point["cache_bytes"] == dense - (shared * (256 - near) * 16 * 4 if near else 0)
        assert point["measured_saving"] == 1 - point["cache_bytes"] / dense
        assert 0 <= point["passkey"] <= 1 and 0 < point["bits_per_byte"] < 20
    assert all((out / f"{name}.png").stat().st_size > 5000 for name in ("proximal", "kv_saving", "cache_bytes"))
    assert len([line for line in (out / "figure4.md").read_text().splitlines() if line.startswith("|")]) == 5
    assert figure4.main(["trainer.max_steps=2", *arguments[:4], *arguments[5:]]) == 2
    assert "another recipe" in capsys.readouterr().err


def test_refuses_clearly(figure4, capsys, tmp_path):
    for arguments, message in (
        (["--recent", ""], "at least one value"),
        (["--recent", "x"], "x"),
        (["blocks.threshold=0.5"], "blocks.threshold must be null"),
        (["trainer.max_step=3"], "Did you mean trainer.max_steps?"),
    ):
        assert figure4.main([*arguments, "--out", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err
