"""The sweep over thresholds, proximal sizes and savings, on a random model in seconds."""

import json

import pytest
from scripts import save, script, tiny_llama


@pytest.fixture(scope="module")
def figure4():
    return script("eval/figure4.py")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    return save(
        tiny_llama(**sizes, max_position_embeddings=256, initializer_range=0.1), tmp_path_factory.mktemp("base")
    )


@pytest.mark.slow
def test_a_sweep_is_stopped_and_goes_on(figure4, base, tmp_path, monkeypatch, capsys):
    for name, value in {"LENGTHS": (192,), "DEPTHS": (0.0, 1.0)}.items():
        monkeypatch.setattr(figure4.demo, name, value)
    out = tmp_path / "sweep"
    overrides = [f"model.base={base}", f"data.path={tmp_path / 'data' / '256'}", "data.sequence_length=256"]
    overrides += ["trainer.tokens_per_batch=2048", "trainer.max_steps=1", "trainer.validate_every=1"]
    overrides += ["model.recent_size=20", "blocks.samples=2", "blocks.kv_saving=0.25"]
    arguments = [*overrides, "--recent", "20,60", "--kv-savings", "0,0.25", "--taus", "0,1", "--samples", "1"]
    arguments += ["--texts", "2", "--out", str(out)]
    trained = []
    fit = figure4.fit

    def broken(recipe, analyze):
        if len(trained) == 2:
            raise ValueError("stopped here")
        trained.append((recipe.model.recent_size, recipe.blocks.kv_saving))
        return fit(recipe, analyze)

    monkeypatch.setattr(figure4, "fit", broken)
    assert figure4.main(arguments) == 2 and "stopped here" in capsys.readouterr().err
    assert trained == [(20, 0.25), (60, 0.25)] and not (out / "figure4.json").exists()
    monkeypatch.setattr(figure4, "fit", lambda *given: trained.append("rest") or fit(*given))
    assert figure4.main(arguments) == 0
    assert trained[2:] == ["rest"], "only the point that was missing"
    written = json.loads((out / "figure4.json").read_text())
    found, (everything, nothing) = written["points"], written["taus"]
    assert [(p["recent"], p["wanted_saving"]) for p in found] == [(20, 0.25), (60, 0.25), (20, 0)]
    dense = 2 * 4 * 256 * 16 * 4
    for point, near in zip(found, (4 + 20 + 64, 4 + 60 + 64, None), strict=True):
        assert point["kv_saving"] == point["wanted_saving"]
        shared = round(2 * point["kv_saving"] * 4)
        assert point["cache_bytes"] == dense - (shared * (256 - near) * 16 * 4 if near else 0)
        assert point["measured_saving"] == 1 - point["cache_bytes"] / dense
        assert 0 <= point["passkey"] <= 1 and 0 < point["bits_per_byte"] < 20
    # Tau: every decision of the decoded tokens, all of them one way and none of them the other.
    assert everything["tau"] == 0 and everything["skipped_share"] == everything["unread_share"] == 1
    assert nothing["tau"] == 1 and nothing["skipped_share"] == nothing["unread_share"] == 0
    for point in (everything, nothing):
        assert point["tokens"] == 2 * 63, "the last quarter of 256, but for its first token"
        assert point["decisions"] == 2 * 2 * 63 * 2, "rows, query heads, tokens, layers that are no anchors"
        assert point["distant_values"] == 2 * 2 * sum(at - 4 - 20 for at in range(193, 256))
        assert point["settings"]["samples"] == 1 and point["settings"]["texts"] == 2
    assert nothing["passkey"] == found[0]["passkey"] and nothing["bits_per_byte"] != everything["bits_per_byte"]
    assert all((out / f"{name}.png").stat().st_size > 5000 for name in ("tau", "proximal", "kv_saving"))
    assert len([line for line in (out / "figure4.md").read_text().splitlines() if line.startswith("|")]) == 4 + 5
    monkeypatch.setattr(figure4.figures, "decoded_loss", lambda *_: pytest.fail("is there already"))
    assert figure4.main(arguments) == 0
    assert figure4.main([*arguments, "--texts", "3"]) == 2 and "another recipe" in capsys.readouterr().err
    assert figure4.main(["trainer.max_steps=2", *arguments[:4], *arguments[5:]]) == 2
    assert "another recipe" in capsys.readouterr().err


def test_refuses_clearly(figure4, capsys, tmp_path):
    for arguments, message in (
        (["--recent", ""], "at least one value"),
        (["--recent", "x"], "x"),
        (["blocks.threshold=0.5"], "blocks.threshold must be null"),
        (["--taus", "0.5,1.5"], "each between 0 (skip all that is distant) and 1"),
        (["--samples", "0"], "at least 1"),
        (["trainer.max_step=3"], "Did you mean trainer.max_steps?"),
    ):
        assert figure4.main([*arguments, "--out", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err
