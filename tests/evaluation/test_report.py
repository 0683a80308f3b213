"""The table of LongBench runs, from the files that eval/longbench.py writes."""

import csv
import json
from pathlib import Path

import pytest
import torch
from scripts import script
from test_longbench import write_data
from transformers import LlamaConfig, LlamaForCausalLM

import pod
from pod.evaluation import longbench, models

report = script("eval/report.py")


def write_run(folder, level, anchors=None, saving=None, eviction=None, **settings):
    ckpt = folder.with_name(f"{folder.name}-export")
    for path in (folder, ckpt):
        path.mkdir(parents=True)
    config = {"max_position_embeddings": 32768}
    if anchors is not None:
        config |= {"anchors": anchors, "sink_size": 16, "recent_size": 4080, "share": "scores"} | settings
    (ckpt / "config.json").write_text(json.dumps(config))
    scores = {name: level + index for index, name in enumerate(longbench.GROUPS["pod"])}
    result = {"scores": scores, "averages": longbench.averages(scores), "samples": dict.fromkeys(scores, 3)}
    (folder / "scores.json").write_text(json.dumps(result))
    (folder / "settings.json").write_text(json.dumps({"ckpt": str(ckpt), "max_length": 31500, "eviction": eviction}))
    if saving is not None:
        (folder / "cache.json").write_text(json.dumps({"tokens": 9, "bytes": 1, "dense_bytes": 2, "saving": saving}))
    return str(folder)


def test_table(tmp_path, capsys):
    dense = write_run(tmp_path / "dense", 40, saving=0.0)
    shared = write_run(tmp_path / "mine", 30, anchors=[[0, 0], [0, 1]], saving=0.337)
    snap = write_run(tmp_path / "snap", 28, eviction="snapkv:budget=4096")
    both = write_run(tmp_path / "both", 20, anchors=[[0, 0], [0, 1]], saving=0.9, eviction="h2o:budget=4000")
    out = tmp_path / "out"
    assert report.main([shared, dense, snap, both, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    rows = list(csv.DictReader((out / "report.csv").open()))
    assert [row["method"] for row in rows[:4]] == ["PoD (mine)", "dense (dense)", "SnapKV (snap)", "PoD + H2O (both)"]
    # Categories have 3, 3, 3, 3 and 2 sets: their means are level + 1, 4, 7, 10, 12.5, and the average of these 6.9.
    assert [rows[1][name] for name in report.HEADINGS] == ["41.00", "44.00", "47.00", "50.00", "52.50", "46.90"]
    assert [row["degradation, %"] for row in rows[:4]] == ["21.3", "", "25.6", "42.6"]
    assert [row["KV saving, %"] for row in rows[:4]] == ["33.7", "0.0", "", "90.0"]
    assert [row["window"] for row in rows[:4]] == ["16+4080+28K", "32K", "4K", "4000"]
    assert [row["stage"] for row in rows[:4]] == [report.BOTH, "", "prefilling", report.BOTH]
    published = {row["method"]: row for row in rows[4:]}
    assert len(published) == 12 and all(name.endswith(", published") for name in published)
    assert published["PoD, published"]["Avg."] == "44.75" and published["PoD, published"]["degradation, %"] == "2.8"
    assert "1.1 % for PoD" in printed and "5B tokens once" in (out / "report.md").read_text()
    assert (out / "report.png").stat().st_size > 5000
    assert report.main([shared, both, "--out", str(out), "--baseline", shared, "--no-published"]) == 0
    rows = list(csv.DictReader((out / "report.csv").open()))
    assert [row["degradation, %"] for row in rows] == ["", "27.1"]


def test_trained_baselines_have_their_names(tmp_path):
    window = write_run(tmp_path / "wa", 20, anchors=[[0], [1]], share="window", sink_size=0, recent_size=4096)
    pairs = write_run(tmp_path / "cla", 10, anchors=[[0], [0]], share="kv")
    rows = [report.read_run(Path(folder)) for folder in (window, pairs)]
    assert [row["method"] for row in rows] == ["window attention (wa)", "CLA (cla)"]
    assert [row["window"] for row in rows] == ["4K", "32K"] and not any(row["is_dense"] for row in rows)
    assert {row["stage"] for row in rows} == {report.BOTH}


def test_published_averages_are_the_means_of_their_categories():
    for name, _, *scores, average, saving, loss, stage in report.PUBLISHED:
        assert sum(scores) / 5 == pytest.approx(average, abs=0.01), name
        assert (saving is None) == (loss is None) == (stage == "")


def test_a_run_of_some_sets_has_gaps(tmp_path, capsys):
    folder = tmp_path / "part"
    folder.mkdir()
    averages = longbench.averages({"lcc": 10.0, "repobench-p": 20.0})
    (folder / "scores.json").write_text(json.dumps({"averages": averages}))
    assert report.main([str(folder), "--out", str(tmp_path / "out"), "--no-published"]) == 0
    row = next(csv.DictReader((tmp_path / "out" / "report.csv").open()))
    assert (row["method"], row["Code"], row["SQA"], row["Avg."], row["degradation, %"]) == ("part", "15.00", "", "", "")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "scores.json: not there"),
        ({"scores.json": "{"}, "scores.json: broken JSON"),
        ({"scores.json": "{}"}, "field 'averages'"),
        ({"scores.json": json.dumps({"averages": longbench.averages({}), "x": 1}), "cache.json": '{"a": 1}'}, "saving"),
    ],
)
def test_refuses_clearly(tmp_path, files, message, capsys):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert report.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    good = write_run(tmp_path / "good", 1)
    assert report.main([good, "--baseline", "elsewhere", "--out", str(tmp_path / "out")]) == 2
    assert "--baseline elsewhere" in capsys.readouterr().err


def test_saving_is_measured(model):
    ids = torch.full((1, 40), 5)
    found = models.measured_saving(model, ids)
    near = 2 + 14 + 64  # all of the 40 tokens are within sinks, recent tokens and crop_slack
    assert near > 40 and found["bytes"] == found["dense_bytes"] and found["saving"] == 0
    found = models.measured_saving(model, torch.full((1, 200), 5))
    # Two layers, two KV heads: one of the four keeps near keys only.
    assert found["saving"] == pytest.approx((200 - 80) / (8 * 200))
    cache = pod.PodCache(model.config, eviction=pod.eviction.TOVA(budget=20))
    assert models.measured_saving(model, ids, cache)["saving"] > 0.3
    stock = LlamaForCausalLM(LlamaConfig(**{
        "vocab_size": 259, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    })).eval()  # fmt: skip
    assert models.measured_saving(stock, ids)["saving"] == 0


def test_from_longbench_to_the_table(ckpt, tmp_path, capsys):
    data = write_data(tmp_path / "data", ["lcc", "repobench-p"], count=6)
    out = tmp_path / "run"
    arguments = ["--ckpt", str(ckpt), "--data", str(data), "--tasks", "lcc", "repobench-p", "--max-length", "150"]
    assert script("eval/longbench.py").main([*arguments, "--batch-size", "6", "--out", str(out)]) == 0
    cache = json.loads((out / "cache.json").read_text())
    assert 100 < cache["tokens"] <= 160 and 0 < cache["saving"] < 0.125
    assert report.main([str(out), "--out", str(tmp_path / "table"), "--no-published"]) == 0
    row = next(csv.DictReader((tmp_path / "table" / "report.csv").open()))
    assert row["method"] == "PoD (run)" and row["KV saving, %"] == f"{100 * cache['saving']:.1f}" and row["Code"]
