"""The speed script: what is compared, how ratios are computed, what is written. Not how fast anything is."""

import json
import statistics
from dataclasses import replace

import pytest
import torch
from scripts import script

import pod
from pod.evaluation import filled_cache, timing
from pod_kernels.attention import BACKEND_VARIABLE

speed = script("eval/speed.py")

ATTENTION = ["PoD / SDPA flash"]
PAIRS = {
    "attention": {"attention_forward": ATTENTION, "attention_training": ATTENTION},
    "decode": {
        "decode": ["PoD / blocks of one layer", "PoD / DynamicCache"],
        "decode_attention": ["PoD / blocks of one layer", "PoD / SDPA flash"],
        "decode_attention_skipping": ["PoD, tau=0.7 / PoD"],
        "decode_after_eviction": ["after 64 / after 16"],
        "decode_attention_after_eviction": ["PoD / snapkv:budget=16,window=4"],
    },
    "prefill": {
        "prefill": ["PoD / blocks of one layer", "PoD / DynamicCache"],
        "cascade_prefill": ["SDPA flash / cascade of 16 in strides of 16"],
    },
    "cache": {
        "update": [
            "concatenation / PodCache",
            "concatenation / PodCache, blocks of one layer",
            "concatenation / cascade:budget=32",
        ],
        "update_one_layer": ["concatenation / PodCache", "concatenation / cascade:budget=32"],
    },
    "end-to-end": {
        "generation": [
            "PoD / blocks of one layer",
            "PoD / DynamicCache",
            "PoD, snapkv:budget=16,window=4 / DynamicCache",
        ]
    },
}
SHAPE = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 4, "num_attention_heads": 16}


@pytest.fixture
def tiny(monkeypatch):
    setting = replace(speed.SETTINGS["cpu"], shape=SHAPE, recent=6, sinks=2, eviction=("snapkv:budget=16,window=4",))
    monkeypatch.setitem(speed.SETTINGS, "cpu", setting)
    monkeypatch.setattr(filled_cache, "FILLED_AT_ONCE", 40)
    monkeypatch.setattr(speed, "UPDATES", 3)
    monkeypatch.setattr(speed, "NEW_TOKENS", 3)
    ceilings = {timing.BYTES: 2e9, timing.OPERATIONS: 4e12}
    monkeypatch.setattr(timing, "ceilings", lambda *_: ceilings)
    return setting


@pytest.mark.parametrize("suite", PAIRS)
def test_each_suite_writes_its_ratios(suite, tiny, tmp_path, capsys):
    arguments = ["--suite", suite, "--lengths", "64", "--rounds", "2", "--device", "cpu", "--out", str(tmp_path)]
    assert speed.main(arguments) == 0
    written = json.loads((tmp_path / f"speed-{suite}.json").read_text())
    assert (written["suite"], written["device"], written["dtype"]) == (suite, "cpu", "float32")
    assert written["shared_keys"] == pytest.approx(0.7, abs=0.01)
    assert {measured["what"]: list(measured["ratios"]) for measured in written["results"]} == PAIRS[suite]
    printed = capsys.readouterr().out
    assert (tmp_path / "speed.md").read_text().strip() in printed
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()]
    for measured in written["results"]:
        assert measured["tokens"] == 64
        where = [measured["what"].replace("_", " "), "64"]
        for name, value in measured["ratios"].items():
            one, other = (measured["seconds"][part] for part in name.split(" / "))
            assert len(one) == len(other) == 2 and min(one + other) > 0
            assert value == pytest.approx(statistics.median(a / b for a, b in zip(one, other, strict=True)))
            middles = (f"{1e3 * statistics.median(seconds):,.4g}" for seconds in (one, other))
            assert [name, *where, f"{value:.3g}", *middles] in rows
        for name, found in measured["rates"].items():
            ceiling = {"GB/s": 2e9, "TFLOP/s": 4e12}[found["unit"]]
            (row,) = (row for row in rows if row[:3] == [name, *where] and found["unit"] in row[3])
            assert row[4] == f"{found['rate'] / ceiling:.0%}"


def test_operations_and_bytes(tiny):
    with torch.no_grad():
        measured = speed.attention_forward(replace(tiny, batch=2, rounds=1), 64)
        trained = speed.attention_training(replace(tiny, batch=2, rounds=1), 64)
        decoded = speed.decode_attention(replace(tiny, batch=2, rounds=1), 64)
    pairs = 2 * 16 * sum(query + 1 for query in range(64))
    # For each pair: 4 multiplications and as many additions for the logit, and the same for the value.
    assert measured.amounts["SDPA flash"] == (pairs * 4 * 2 * 2, timing.OPERATIONS)
    assert trained.amounts["PoD"] == (pairs * 4 * 2 * 7, timing.OPERATIONS)
    assert decoded.amounts["SDPA flash"] == (2 * 2 * 64 * 4 * 4 * speed.KV_HEADS * speed.LAYERS, timing.BYTES)
    # Its blocks of one layer hold the same keys and values, and room for the tokens of the rounds.
    dense, most = decoded.amounts[speed.DENSE][0], decoded.amounts["SDPA flash"][0]
    assert dense == most // 64 * (64 + 5)


def test_the_backend_holds_inside_only(monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "reference")
    seen = []
    timing.by("composed", lambda: seen.append(timing.os.environ[BACKEND_VARIABLE]))()
    assert seen == ["composed"] and timing.os.environ[BACKEND_VARIABLE] == "reference"
    monkeypatch.delenv(BACKEND_VARIABLE)
    with pytest.raises(ZeroDivisionError):
        timing.by("fused", lambda: 1 / 0)()
    assert BACKEND_VARIABLE not in timing.os.environ


def test_what_cannot_run_is_left_out_with_its_reason():
    def refuse():
        raise ValueError("no such thing here\nat all")

    good, left_out = timing.runnable({"one": lambda: None, "other": refuse})
    assert list(good) == ["one"] and left_out == {"other": "ValueError: no such thing here"}


def test_ratios_are_medians_of_rounds_on_a_fake_clock(monkeypatch):
    now = 0.0
    # One duration for the run that is not counted, then one for each of three; the second round is a slow one.
    durations = {"fast": iter([50.0, 1.0, 9.0, 2.0]), "slow": iter([0.5, 4.0, 18.0, 5.0])}
    order = []

    def work(name):
        nonlocal now
        order.append(name)
        now += next(durations[name])

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    works = {name: lambda name=name: work(name) for name in durations}
    seconds, left_out, notes = timing.measured(works, 3, "cpu", "test")
    assert not left_out and not notes
    assert order == ["fast", "slow"] * 4
    assert seconds == {"fast": [1.0, 9.0, 2.0], "slow": [4.0, 18.0, 5.0]}
    # Rounds: 1/4, 9/18, 2/5. The ratio of the medians would also be 2/5; the other way it is 5/2.
    assert timing.ratios(seconds, [("fast", "slow"), ("slow", "fast")]) == {
        "fast / slow": pytest.approx(0.4),
        "slow / fast": pytest.approx(2.5),
    }
    assert timing.ratio({"a": [1.0, 2.0, 9.0], "b": [4.0, 1.0, 3.0]}, "a", "b") == pytest.approx(2.0)


def test_seventy_percent_of_the_keys_are_shared():
    blocks = speed.shared_blocks()
    layers = torch.arange(speed.LAYERS)[:, None]
    shared = (blocks.anchors != layers).float().mean().item()
    assert shared == pytest.approx(0.7, abs=0.01) and 2 * blocks.kv_saving == pytest.approx(shared)


def test_filled_caches_hold_what_was_stored(tiny):
    with torch.no_grad():
        models = speed.random_models(tiny, 256)
        for model in models.values():
            cache = filled_cache.new_cache(model, 100)
            filled_cache.fill(cache, model, 2, 90)
            assert cache.get_seq_length() == 90
        cache = pod.PodCache(models[speed.DENSE].config, eviction=pod.eviction.Cascade(budget=16, sinks=2))
        filled_cache.fill(cache, models[speed.DENSE], 2, 90)
    assert cache.get_seq_length() == 90
    kept = cache.positions(3)
    assert kept.shape == (2, speed.KV_HEADS, 18) and (kept[..., :2] == torch.arange(2)).all()
    assert (kept[..., -1] == 89).all()


@pytest.mark.parametrize("wrong", [["--lengths", "63"], ["--rounds", "0"], ["--batch", "0"]])
def test_bad_sizes_are_refused(wrong, capsys):
    assert speed.main(["--suite", "decode", *wrong]) == 2
    assert "at least" in capsys.readouterr().err
