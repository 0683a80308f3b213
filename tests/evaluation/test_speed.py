"""The speed script: what is compared, how ratios are computed, what is written. Not how fast anything is."""

import importlib.util
import json
import statistics
from pathlib import Path

import pytest
import torch

import pod

ROOT = Path(__file__).parent.parent.parent
SPEC = importlib.util.spec_from_file_location("eval_speed", ROOT / "eval" / "speed.py")
speed = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(speed)

PAIRS = {
    "decode": [
        "PoD / blocks of one layer",
        "PoD / DynamicCache",
        "after 64 / after 16",
    ],
    "prefill": ["PoD / blocks of one layer", "PoD / DynamicCache"],
    "cache": [
        "concatenation / PodCache",
        "concatenation / PodCache, blocks of one layer",
        "concatenation / cascade:budget=32",
    ],
}


@pytest.fixture
def tiny(monkeypatch):
    shape = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 4, "num_attention_heads": 16}
    monkeypatch.setattr(speed, "SHAPE", shape)
    monkeypatch.setattr(speed, "SINKS", 2)
    monkeypatch.setattr(speed, "RECENT", 6)
    monkeypatch.setattr(speed, "FILLED_AT_ONCE", 40)
    monkeypatch.setattr(speed, "UPDATES", 3)
    monkeypatch.setattr(speed, "EVICTION", "snapkv:budget=16,window=4")


@pytest.mark.parametrize("suite", PAIRS)
def test_each_suite_writes_its_ratios(suite, tiny, tmp_path, capsys):
    arguments = ["--suite", suite, "--lengths", "64", "--rounds", "2", "--device", "cpu", "--out", str(tmp_path)]
    assert speed.main(arguments) == 0
    written = json.loads((tmp_path / f"speed-{suite}.json").read_text())
    assert (written["suite"], written["device"], written["dtype"]) == (suite, "cpu", "float32")
    assert written["shared_keys"] == pytest.approx(0.7, abs=0.01)
    found = [name for measured in written["results"] for name in measured["ratios"]]
    assert found == PAIRS[suite]
    printed = capsys.readouterr().out
    for measured in written["results"]:
        assert measured["tokens"] == 64
        for name, value in measured["ratios"].items():
            one, other = (measured["seconds"][part] for part in name.split(" / "))
            assert len(one) == len(other) == 2 and min(one + other) > 0
            assert value == pytest.approx(statistics.median(a / b for a, b in zip(one, other, strict=True)))
            (line,) = (line for line in printed.splitlines() if line.startswith(f"| {name} "))
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert cells[1:3] == ["64", f"{value:.3g}"]
            assert cells[3] == f"{1e3 * statistics.median(one):.2f}"


def test_ratios_are_medians_of_rounds_on_a_fake_clock(monkeypatch):
    now = 0.0
    # One duration for the round that is not counted, then one for each of three; the second round is a slow one.
    durations = {"fast": iter([50.0, 1.0, 9.0, 2.0]), "slow": iter([0.5, 4.0, 18.0, 5.0])}
    order = []

    def work(name):
        nonlocal now
        order.append(name)
        now += next(durations[name])

    monkeypatch.setattr(speed.time, "perf_counter", lambda: now)
    seconds = speed.interleaved({name: lambda name=name: work(name) for name in durations}, 3, "cpu", "test")
    assert order == ["fast", "slow"] * 4
    assert seconds == {"fast": [1.0, 9.0, 2.0], "slow": [4.0, 18.0, 5.0]}
    # Rounds: 1/4, 9/18, 2/5. The ratio of the medians would also be 2/5; the other way it is 5/2.
    assert speed.ratios(seconds, [("fast", "slow"), ("slow", "fast")]) == {
        "fast / slow": pytest.approx(0.4),
        "slow / fast": pytest.approx(2.5),
    }
    assert speed.ratio({"a": [1.0, 2.0, 9.0], "b": [4.0, 1.0, 3.0]}, "a", "b") == pytest.approx(2.0)


def test_seventy_percent_of_the_keys_are_shared():
    blocks = speed.shared_blocks()
    layers = torch.arange(speed.LAYERS)[:, None]
    shared = (blocks.anchors != layers).float().mean().item()
    assert shared == pytest.approx(0.7, abs=0.01) and 2 * blocks.kv_saving == pytest.approx(shared)


def test_filled_caches_hold_what_was_stored(tiny):
    with torch.no_grad():
        models = speed.random_models("cpu", torch.float32, 256)
        for model in models.values():
            cache = speed.new_cache(model, 100)
            speed.fill(cache, model, 2, 90)
            assert cache.get_seq_length() == 90
        cache = pod.PodCache(models[speed.DENSE].config, eviction=pod.eviction.Cascade(budget=16, sinks=2))
        speed.fill(cache, models[speed.DENSE], 2, 90)
    assert cache.get_seq_length() == 90
    kept = cache.positions(3)
    assert kept.shape == (2, speed.KV_HEADS, 18) and (kept[..., :2] == torch.arange(2)).all()
    assert (kept[..., -1] == 89).all()


@pytest.mark.parametrize("wrong", [["--lengths", "63"], ["--rounds", "0"], ["--batch", "0"]])
def test_bad_sizes_are_refused(wrong, capsys):
    assert speed.main(["--suite", "decode", *wrong]) == 2
    assert "at least" in capsys.readouterr().err
