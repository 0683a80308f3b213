"""Quality against bytes: every point once, paired intervals, killed runs go on, nothing of another model is taken."""

import json
import math

import pytest
from scripts import TEXT, save, tiny_llama
from torch import nn

import pod
from pod import eviction
from pod.evaluation import models, trade_off
from pod.evaluation.intervals import ratio
from pod.evaluation.texts import stretches, token_ids


def test_every_method_keeps_the_budget_in_all():
    for text in trade_off.METHODS.split("+"):
        assert trade_off.with_budget(text, 64).budget == 64
    assert trade_off.with_budget("cake*snapkv:window=8", 64) == eviction.parse("cake*snapkv:budget=64,window=8")
    # Q-Filters has no default: it needs a file of the model's. KVzip is for contexts without their questions, and
    # RecentReader, which keeps all and reads what StreamingLLM keeps, for drafts.
    assert {text.split(":")[0] for text in trade_off.METHODS.split("+")} == set(eviction.METHODS) - {
        "qfilters",
        "kvzip",
        "recentreader",
    }
    with pytest.raises(ValueError, match="hold the 64 sinks and a token of each of the 4"):
        trade_off.with_budget("cascade", 64)
    with pytest.raises(ValueError, match="given twice"):
        trade_off.with_budget("snapkv:budget=9", 64)


def test_the_trade_off_goes_on_where_it_was_killed(ckpt, dense_ckpt, text, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    arguments = [
        "--ckpt",
        str(dense_ckpt),
        str(ckpt),
        "--methods",
        "snapkv:window=8+cascade:sinks=4",
        "--length",
        "150",
    ]
    arguments += ["--depths", "2", "--samples", "1", "--texts", "2", "--stream", "32", "--text", str(text)]
    arguments += ["--out", str(out), "--budgets", "40,80"]
    measure, calls = trade_off.measure, []

    def killed(*given):
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append(given[-1])
        return measure(*given)

    monkeypatch.setattr(trade_off, "measure", killed)
    assert trade_off.main(arguments) == 130
    before = json.loads((out / "trade_off.json").read_text())["points"]
    assert len(before) == 4
    monkeypatch.setattr(trade_off, "measure", lambda *given: calls.append(given[-1]) or measure(*given))
    assert trade_off.main(arguments) == 0
    points = json.loads((out / "trade_off.json").read_text())["points"]
    assert points[:4] == before and len(points) == 10 == len(calls) == len(set(calls))
    names = ["none", *(f"snapkv:budget={n},window=8" for n in (40, 80)), "cascade:budget=40,sinks=4"]
    names.append("cascade:budget=80,sinks=4")
    assert [(p["ckpt"], p["eviction"]) for p in points] == [(str(c), n) for c in (dense_ckpt, ckpt) for n in names]
    # Bytes: without eviction the cache's formula, 150 tokens and 8 new ones (the last is never stored, but has room).
    plain = {p["ckpt"]: p for p in points if p["eviction"] == "none"}
    assert (
        plain[str(dense_ckpt)]["passkey_bytes"] == plain[str(dense_ckpt)]["passkey_dense_bytes"] == 2 * 4 * 8 * 4 * 158
    )
    shared = models.load(str(ckpt))[0].config
    assert plain[str(ckpt)]["text_bytes"] == pod.PodCache(shared).expected_nbytes(149, itemsize=4)
    assert plain[str(ckpt)]["text_dense_bytes"] == 2 * 4 * 8 * 4 * 149
    for small, large in zip(points, points[1:], strict=False):
        if "=40" in small["eviction"]:
            assert small["text_bytes"] < large["text_bytes"] < plain[small["ckpt"]]["text_bytes"]
    # Quality: the plain row is the model's own loss on the same texts.
    ids = token_ids(models.load(str(dense_ckpt))[1], TEXT)
    (rows,) = stretches(ids, 150, 2, 8)
    logits = tiny_llama(seed=3)(rows).logits[:, :-1].detach().double()
    loss = float(nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))
    assert plain[str(dense_ckpt)]["bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-5)
    printed = capsys.readouterr().out
    assert (out / "trade_off.md").read_text() in printed
    assert "dense, cascade:budget=40,sinks=4" in printed
    assert (out / "trade_off.png").stat().st_size > 1000
    # Another method only adds its own points; other settings are not mixed in.
    assert trade_off.main([*arguments, "--methods", "h2o", "--budgets", "40"]) == 0
    assert len(calls) == 12
    assert trade_off.main([*arguments, "--seed", "1"]) == 2
    assert "with seed 0, now it is 1" in capsys.readouterr().err
    for change, message in [
        (["--budgets", "4"], "snapkv|SnapKV"),
        (["--methods", "h2o+h2o", "--budgets", "40"], "named twice"),
        (["--methods", "snapvk"], "did you mean"),
        (["--depths", "1"], "--depths must be at least 2"),
    ]:
        assert trade_off.main([*arguments, *change]) == 2
        error = capsys.readouterr().err
        assert any(part in error for part in message.split("|")), error
    assert len(calls) == 12


def test_a_trade_off_without_texts_asks_after_the_eviction(ckpt, dense_ckpt, text, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--ckpt", str(dense_ckpt), str(ckpt), "--text", str(text), "--out", str(out), "--budgets", "60"]
    arguments += ["--depths", "2", "--samples", "3", "--texts", "0", "--length", "150"]
    assert trade_off.main([*arguments, "--methods", "kvzip+snapkv:window=8,query_aware=false"]) == 0
    table = (out / "trade_off.md").read_text()
    assert table in capsys.readouterr().out and "bits/byte" not in table and "streamed" not in table
    file = out / "trade_off.json"
    whole = json.loads(file.read_text())
    assert len(whole["points"]) == 6 and (out / "trade_off.png").stat().st_size > 1000
    for point in whole["points"]:
        assert len(point["passkey_samples"]) == 6 and "text_bytes" not in point
        assert point["passkey"] == pytest.approx(sum(point["passkey_samples"]) / 6)
    # The share of the first row and its interval are those of the prompts, paired.
    for point, samples in zip(whole["points"], ([1, 1, 0, 1, 1, 0], [1, 0, 0, 1, 0, 0]), strict=False):
        point["passkey_samples"] = samples
    file.write_text(json.dumps(whole))
    assert trade_off.main([*arguments, "--methods", "kvzip"]) == 0
    share, low, high = ratio([1, 0, 0, 1, 0, 0], [1, 1, 0, 1, 1, 0])
    assert f"| {share:.2f} [{low:.2f}, {high:.2f}]" in (out / "trade_off.md").read_text()
    # Points of before intervals are refused, and stay.
    del whole["points"][0]["passkey_samples"]
    file.write_text(json.dumps(whole))
    assert trade_off.main([*arguments, "--methods", "kvzip"]) == 2
    assert "points of an earlier version, without each prompt's score" in capsys.readouterr().err
    assert json.loads(file.read_text()) == whole


def test_points_of_other_weights_or_hyper_parameters_are_not_taken(text, tmp_path, capsys, monkeypatch):
    out, base = tmp_path / "out", save(tiny_llama(), tmp_path / "model")
    arguments = ["--ckpt", str(base), "--text", str(text), "--out", str(out), "--methods", "h2o", "--budgets", "40"]
    arguments += ["--depths", "2", "--samples", "1", "--texts", "1", "--length", "150"]
    assert trade_off.main(arguments) == 0
    file = out / "trade_off.json"
    whole = json.loads(file.read_text())
    plain, evicted = whole["points"]
    assert evicted["parameters"] == {"method": "H2O", "budget": 40, "query_aware": True, "recent": None}
    assert plain["parameters"] is None and plain["weights"] == evicted["weights"]
    monkeypatch.setattr(trade_off, "measure", None)  # nothing is measured again
    assert trade_off.main(arguments) == 0
    default = {"parameters": evicted["parameters"] | {"recent": 3}}
    for number, change, words in [
        (1, default, (f"{base}, h2o:budget=40 with parameters", "'recent': 3", "'recent': None")),
        (
            1,
            {"parameters": None},
            (f"{base}, h2o:budget=40 with parameters None", "none is noted there, as by earlier versions"),
        ),
        (0, {"weights": None}, (f"{base}, none with weights None", "none is noted there, as by earlier versions")),
    ]:
        points = [dict(point) for point in whole["points"]]
        points[number] |= change
        points[number] = {name: value for name, value in points[number].items() if value is not None}
        file.write_text(json.dumps(whole | {"points": points}))
        assert trade_off.main(arguments) == 2
        said = capsys.readouterr().err
        for word in (*words, f"{file} holds", "choose another --out, or remove the file"):
            assert word in said
    file.write_text(json.dumps(whole))
    save(tiny_llama(seed=1), base)
    assert trade_off.main(arguments) == 2
    assert f"{base}, none with weights '{plain['weights']}', now it is '" in capsys.readouterr().err


def test_a_typo_does_not_block_the_folder_of_a_trade_off(ckpt, text, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--ckpt", str(ckpt), "--text", str(text), "--out", str(out), "--methods", "h2o", "--budgets", "40"]
    arguments += ["--depths", "2", "--samples", "1", "--texts", "1"]
    assert trade_off.main([*arguments, "--length", "20"]) == 2
    assert "length 20: the key lines and the question alone take" in capsys.readouterr().err
    assert not list(out.iterdir())
    for content in ("[1]", '{"points": 3}', '{"points": [[]]}', '{"points": [{"ckpt": "a"}]}'):
        (out / "trade_off.json").write_text(content)
        assert trade_off.main([*arguments, "--length", "150"]) == 2
        assert "trade_off.json: not the points of an earlier run" in capsys.readouterr().err
