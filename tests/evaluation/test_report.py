"""The table of LongBench runs, from the files that eval/longbench.py writes."""

import csv
import json
from pathlib import Path

import pytest
import torch
from scripts import script, tiny_llama
from test_longbench import write_data
from transformers import LlamaConfig, LlamaForCausalLM

import pod
from pod.evaluation import longbench, models, tables
from pod.evaluation import runs as report


def write_run(folder, level, model=None, saving=None, eviction=None, samples=3, **settings):
    """A run's files; `model` as `models.facts` has it, a dense one unless told."""
    folder.mkdir(parents=True)
    model = {"kind": "dense", "tokens": 32768, "kv_saving": 0.0} | (model or {})
    scores = {name: level + index for index, name in enumerate(longbench.GROUPS["pod"])}
    result = {"scores": scores, "averages": longbench.averages(scores), "samples": dict.fromkeys(scores, samples)}
    (folder / "scores.json").write_text(json.dumps(result))
    method = None if eviction is None else pod.eviction.parse(eviction)
    parameters = None if method is None else pod.eviction.hyper_parameters(method)
    known = {"ckpt": "an/id", "max_length": 31500, "model": model, "eviction": eviction, "parameters": parameters}
    settings = known | settings
    (folder / "settings.json").write_text(json.dumps(settings))
    if saving is not None:
        (folder / "cache.json").write_text(json.dumps({"tokens": 9, "bytes": 1, "dense_bytes": 2, "saving": saving}))
    return str(folder)


POD = {"kind": "PoD", "kv_saving": 0.35, "sink_size": 16, "recent_size": 4080}


def test_table(tmp_path, capsys):
    dense = write_run(tmp_path / "dense", 40, saving=0.0)
    shared = write_run(tmp_path / "mine", 30, POD, saving=0.337)
    snap = write_run(tmp_path / "snap", 28, eviction="snapkv:budget=4096")
    both = write_run(tmp_path / "both", 20, POD, saving=0.9, eviction="h2o:budget=4000")
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
    window = {"kind": "window attention", "kv_saving": 1.0, "sink_size": 0, "recent_size": 4096}
    window = write_run(tmp_path / "wa", 20, window)
    pairs = write_run(tmp_path / "cla", 10, POD | {"kind": "CLA"})
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


def test_a_baseline_is_known_by_what_the_benchmark_saved(model, tmp_path, capsys):
    """Whatever --ckpt was, a hub id or a path from elsewhere: the checkpoint is not looked at again."""
    assert models.facts(model) == {
        "kind": "PoD", "tokens": 2048, "kv_saving": 0.125, "sink_size": 2, "recent_size": 14,
    }  # fmt: skip
    stock = tiny_llama()
    assert models.facts(stock) == {"kind": "dense", "tokens": 2048, "kv_saving": 0.0}
    as_pod = models.Variant("x", models.as_pod(tiny_llama()), pod.eviction.SnapKV(64))
    parameters = {
        "method": "SnapKV",
        "budget": 64,
        "query_aware": True,
        "window": 32,
        "kernel_size": 7,
        "pooling": "max",
    }
    assert as_pod.settings() == {"model": models.facts(stock), "eviction": "x", "parameters": parameters}
    assert report.read_run(Path(write_run(tmp_path / "dense", 40)))["is_dense"]
    mine = write_run(tmp_path / "mine", 30, POD)
    assert report.main([mine, "--out", str(tmp_path / "out"), "--no-published"]) == 0
    assert "No run is known to be dense" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("eviction", "dense", "shared"),
    [
        ("cascade:budget=4160", "64+4K", "64+4K"),
        ("cascade:budget=4096,sinks=4", "4+4092", "16+4080"),
        ("streamingllm:budget=4096,sinks=4", "4+4092", "16+4080"),
        ("lminfinite:budget=4096,sinks=16", "16+4080", "16+4080"),
        ("snapkv:budget=4096", "4K", "4K"),
        ("quest:budget=4096", "4K", "4K"),
        ("snapkv:budget=0.25", "0.25 of the prompt", "0.25 of the prompt"),
        ("cascade:budget=0.25", "0.25 of the prompt", "0.25 of the prompt"),
        ("cake*snapkv:budget=4096", "4K", "4K"),
    ],
)
def test_windows_have_the_sinks_that_are_kept_apart(tmp_path, eviction, dense, shared):
    rows = [write_run(tmp_path / name, 1, facts, eviction=eviction) for name, facts in (("a", None), ("b", POD))]
    assert [report.read_run(Path(row))["window"] for row in rows] == [dense, shared]


def test_a_method_is_what_it_was_when_it_ran(tmp_path, capsys):
    """Not what its text would mean by the defaults of today."""
    parameters = pod.eviction.hyper_parameters(pod.eviction.Cascade(4128)) | {"sinks": 32}
    run = write_run(tmp_path / "run", 1, eviction="cascade:budget=4128", parameters=parameters)
    assert report.read_run(Path(run))["window"] == "32+4K"
    old = write_run(tmp_path / "old", 1, eviction="cascade:budget=4128", parameters=None)
    assert report.main([old, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert (
        f"{old}/settings.json notes no parameters of cascade:budget=4128" in said
        and "run eval/longbench.py again" in said
    )


def test_runs_that_were_asked_otherwise_are_not_compared(tmp_path, capsys):
    dense = write_run(tmp_path / "dense", 40)
    runs = [
        write_run(tmp_path / "short", 30, POD, max_length=3500),
        write_run(tmp_path / "few", 30, POD, samples=2),
        write_run(tmp_path / "good", 30, POD),
    ]
    assert report.main([dense, *runs, "--out", str(tmp_path / "out"), "--no-published"]) == 0
    rows = list(csv.DictReader((tmp_path / "out" / "report.csv").open()))
    assert [row["degradation, %"] for row in rows] == ["", "", "", "21.3"]
    printed = capsys.readouterr().out
    assert "- PoD (short) cannot be compared with dense (dense): prompts of 3500 tokens and not of 31500." in printed
    assert "- PoD (few) cannot be compared with dense (dense): 2 samples of 2wikimqa and not 3 (and other" in printed
    assert "PoD (good) cannot" not in printed
    assert "cannot be compared" in (tmp_path / "out" / "report.md").read_text()


def write_other(folder, scores, averages, eviction=None, weights="w", samples=3, **asked):
    """A run of another benchmark."""
    folder.mkdir(parents=True)
    result = {"scores": scores, "averages": averages, "samples": dict.fromkeys(scores, samples)}
    (folder / "scores.json").write_text(json.dumps(result))
    method = None if eviction is None else pod.eviction.parse(eviction)
    settings = {
        "ckpt": "an/id", "weights": weights, "eviction": eviction, "model": {"kind": "dense", "tokens": 9},
        "parameters": None if method is None else pod.eviction.hyper_parameters(method),
    }  # fmt: skip
    (folder / "settings.json").write_text(json.dumps(settings | asked))
    return str(folder)


def leval_run(folder, average, **options):
    averages = {"Closed, 7 sets": average, "QA": average, "Summ, rougeL": average, tables.LEVAL_AVERAGE: average}
    return write_other(folder, {"quality": average}, averages, max_length=32, **options)


def test_degradation_over_longbench_and_leval_is_the_mean_of_both_losses(tmp_path, capsys):
    runs = [
        write_run(tmp_path / "long/dense", 40, weights="w"),
        write_run(tmp_path / "long/snap", 30, eviction="snapkv:budget=64", weights="w"),
        write_run(tmp_path / "long/alone", 20, weights="other", eviction="snapkv:budget=64"),
        leval_run(tmp_path / "exam/dense", 20.0),
        leval_run(tmp_path / "exam/snap", 15.0, eviction="snapkv:budget=64"),
    ]
    assert report.main([*runs, "--out", str(tmp_path / "out")]) == 0
    rows = list(csv.DictReader((tmp_path / "out" / "report.csv").open()))
    # 46.9 -> 36.9 is 21.32 %, 20 -> 15 is 25 %; the third has no run of L-Eval.
    assert [row["degradation, %"] for row in rows[:3]] == ["", "23.2", "42.6"]
    text = (tmp_path / "out" / "report.md").read_text()
    assert "Degradation over LongBench and L-Eval, the mean of both losses: SnapKV (snap)." in text
    assert "| SnapKV (snap)           |  15.00 | 15.00 | 15.00 | 15.00 |           25.0 |" in text
    assert "| PoD + SnapKV, published |  43.07 | 22.12 | 14.32 | 26.50 |                |" in text
    exams = json.loads((tmp_path / "out" / "report.json").read_text())["tables"]["L-Eval (PoD's Table 1)"]
    assert [row["degradation"] for row in exams] == [None, 25.0]
    # A run of LongBench names the baseline of both.
    assert report.main([*runs, "--out", str(tmp_path / "two"), "--baseline", runs[1], "--no-published"]) == 0
    exams = json.loads((tmp_path / "two" / "report.json").read_text())["tables"]["L-Eval (PoD's Table 1)"]
    assert exams[0]["degradation"] == pytest.approx(-100 / 3) and exams[1]["degradation"] is None
    assert "published" not in (tmp_path / "two" / "report.md").read_text()


def test_cascades_and_cakes_tables_are_of_longbench_runs(tmp_path):
    scores = {name: 10.0 + index for index, name in enumerate(longbench.GROUPS["cake"])}
    run = write_other(tmp_path / "run", scores, longbench.averages(scores), max_length=31500)
    assert report.main([run, "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert "## LongBench, CAKE's mean of 16 sets" in text and "CAKE, allocation=random, published" in text
    found = json.loads((tmp_path / "out" / "report.json").read_text())["tables"]
    cake, cascade = (found[title][0]["scores"] for title in found)
    assert cake == [pytest.approx(10 + 15 / 2)]
    names = ("narrativeqa", "hotpotqa", "qasper", "multi_news", "2wikimqa", "gov_report")
    assert cascade[:6] == [scores[name] for name in names] and cascade[6] == pytest.approx(sum(cascade[:6]) / 6)
    published = {name: list(row.values()) for name, row in tables.TABLES[-1].published.items()}
    for name, row in published.items():
        assert len(row) == 7 and sum(row[:6]) / 6 == pytest.approx(row[6], abs=0.01), name


def test_hidden_numbers_made_here_stand_beside_no_published_row(tmp_path, capsys):
    made = {"passkey-1024": {"score": 80.0, "ceiling": 100.0}, "number_string-1024": {"score": 40.0, "ceiling": 100.0}}
    less = {name: one | {"score": 30.0} for name, one in made.items()}
    runs = [
        write_other(tmp_path / "dense", made, {"mean of 2": 60.0}, made=3),
        write_other(tmp_path / "cake", less, {"mean of 2": 30.0}, eviction="cake:budget=64", made=3),
        write_other(tmp_path / "more", less, {"mean of 2": 30.0}, eviction="cake:budget=65", made=9),
    ]
    assert report.main([*runs, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "| CAKE (cake)   |        30.00 |              30.00 |     30.00 |           50.0 |" in printed
    assert "- CAKE (more) cannot be compared with dense (dense): made is 9 and not 3." in printed
    assert "published" not in printed
    real = {f"passkey-{32768}": {"score": 27.0, "ceiling": 27.12}}
    run = write_other(tmp_path / "real", real, {"mean of 1": 27.0})
    assert report.main([run, "--out", str(tmp_path / "out")]) == 0
    assert "| H2O, published          |          4.92 |      4.92 |" in capsys.readouterr().out


def test_needlebench_has_its_table(tmp_path, capsys):
    names = ("single, mean", "multi_retrieval, mean", "multi_reasoning, mean", "overall (0.4, 0.3, 0.3)")
    run = write_other(tmp_path / "run", {"single-English": 9.0}, dict(zip(names, (9.0, 8.0, 7.0, 8.1), strict=True)))
    assert report.main([run, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "| dense (run)                           |  9.00 |  8.00 |  7.00 |    8.10 |" in printed
    assert "| Llama3.1-8B, CAKE, published          | 92.01 | 94.16 | 71.35 |   86.46 |" in printed
    wrong = {"passkey-1024": {"score": "high"}}
    run = write_other(tmp_path / "wrong", wrong, {"mean of 1": 1.0})
    assert report.main([run, "--out", str(tmp_path / "out")]) == 2
    assert "'score' must be a number or null, got 'high'" in capsys.readouterr().err


GOOD = {"scores.json": json.dumps({"averages": longbench.averages({})})}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "scores.json: not there"),
        ({"scores.json": "{"}, "scores.json: not JSON"),
        ({"scores.json": "{}"}, "field 'averages'"),
        ({"scores.json": "[1]"}, r"scores.json: expected a JSON object"),
        (GOOD | {"cache.json": '{"a": 1}'}, "cache.json: field 'saving' must be int | float, got None"),
        (GOOD | {"cache.json": "[]"}, "cache.json: expected a JSON object"),
        (GOOD | {"settings.json": "[]"}, "settings.json: expected a JSON object"),
        (GOOD | {"settings.json": '{"model": "dense"}'}, "settings.json: field 'model' must be dict, got 'dense'"),
        (GOOD | {"settings.json": '{"model": {"kind": 3}}'}, "settings.json: field 'kind' must be str, got 3"),
        (GOOD | {"settings.json": '{"eviction": 7}'}, "settings.json: field 'eviction' must be str | None, got 7"),
        (GOOD | {"settings.json": '{"eviction": "snpkv:budget=7"}'}, "did you mean 'snapkv'"),
        (GOOD | {"settings.json": '{"max_length": "31500"}'}, "settings.json: field 'max_length'"),
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
