"""The speed script: what is compared, how ratios are computed, what is written. Not how fast anything is."""

import json
import math
import statistics
import warnings
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scripts import script

import pod
from pod.evaluation import filled_cache, timing
from pod_kernels.attention import BACKEND_VARIABLE
from pod_kernels.winners import ShapeClass, Winner

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


def test_early_skip_leaves_out_every_second_head(tiny):
    with torch.no_grad():
        measured = speed.decode_attention_skipping(replace(tiny, batch=2, rounds=1), 64)
    blocks, room = speed.shared_blocks(), 64 + 5
    shared = int((~blocks.is_anchor).sum())
    near = min(room, 2 + 6 + 64)
    whole = 2 * 4 * 4 * (2 * blocks.anchors.numel() * room + shared * (near - room))
    # Of the shared heads at even places, none of the 64 - 2 - 6 distant values is read, and of the others each.
    unread = 2 * 4 * 4 * (64 - 2 - 6) * shared / 2
    assert measured.amounts["PoD"] == (whole, timing.BYTES)
    # An even head may skip a little less often than there are even heads among the shared ones.
    even = int((~blocks.is_anchor)[:, ::2].sum()) / shared
    assert measured.by_bytes == pytest.approx(1 - 2 * even * unread / whole)
    assert any(f"{even:.0%} of the query heads of shared scores skipped" in note for note in measured.notes)


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


def test_no_round_begins_after_the_most_seconds(monkeypatch):
    now = 0.0

    def work():
        nonlocal now
        now += 3.0

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    assert timing.interleaved({"one": work}, 9, "cpu", "test", 5.0) == {"one": [3.0, 3.0]}
    assert timing.interleaved({"one": work}, 9, "cpu", "test", 1.0) == {"one": [3.0]}
    assert len(timing.interleaved({"one": work}, 9, "cpu", "test")["one"]) == 9


@pytest.fixture
def graphs(monkeypatch):
    """A device that captures; what it was asked is in its list."""
    asked, mode = [], [0]

    class Graph:
        def replay(self):
            asked.append("replay")

    @contextmanager
    def capture(graph):
        asked.append("capture")
        yield

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda new: mode.__setitem__(0, new))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: asked.append(stream))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return SimpleNamespace(asked=asked, mode=mode)


def test_replays_of_a_work(graphs):
    runs = []
    replay, refusal = timing.captured(lambda: runs.append(graphs.mode[0]))
    assert refusal is None and runs == ["warn", 0] and graphs.asked == ["capture", "replay"]
    replay()
    assert len(runs) == 2 and graphs.asked[-1] == "replay"


def test_what_waits_for_the_device_is_not_captured(graphs):
    def work():
        if graphs.mode[0] == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    same, refusal = timing.captured(work)
    assert same is work and graphs.asked == [] and graphs.mode == [0]
    assert refusal.startswith("it waits for the device: test_speed.py, line ")


def test_a_capture_that_fails(graphs, capsys):
    def work():
        if graphs.asked:
            raise RuntimeError("operation not permitted")

    same, refusal = timing.captured(work)
    assert same is work and refusal == "RuntimeError: operation not permitted"
    assert graphs.asked == ["capture", "stream"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_works_are_captured_and_timed_on_a_gpu():
    counts, other = torch.zeros(2, 1000, device="cuda")
    works = {"adding": lambda: counts.add_(1), "asking": lambda: float(other.add_(1).sum())}
    seconds, left_out, notes = timing.measured(works, 3, "cuda", "test", None, works)
    assert not left_out and min(seconds["adding"] + seconds["asking"]) > 0
    assert len(notes) == 1 and "asking is no graph" in notes[0] and "test_speed.py" in notes[0]
    # The first run, the one that looks, a replay and three rounds; asking is not replayed.
    assert (counts == 6).all() and (other == 5).all()
    assert torch.randn(3, device="cuda").isfinite().all()


@pytest.mark.parametrize("length", [128, 256, 1024])
def test_the_causal_block_mask_is_the_one_of_every_pair(length):
    from torch.nn.attention.flex_attention import create_block_mask

    mask = speed.causal_block_mask(length, "cpu")
    truth = create_block_mask(speed.is_causal_pair, None, None, length, length, device="cpu")
    assert mask.seq_lengths == truth.seq_lengths == (length, length) and mask.BLOCK_SIZE == truth.BLOCK_SIZE
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, wanted = (getattr(one, f"{kind}_num_blocks") for one in (mask, truth))
        assert torch.equal(counts, wanted)
        places, all_places = (getattr(one, f"{kind}_indices") for one in (mask, truth))
        for row, count in enumerate(wanted[0, 0].tolist()):
            assert set(places[0, 0, row, :count].tolist()) == set(all_places[0, 0, row, :count].tolist())


def test_what_fails_is_said_and_the_rest_is_measured(tiny, monkeypatch, tmp_path, capsys):
    def broken(setting, length):
        raise RuntimeError("CUDA out of memory.\nTried to allocate")

    def partly(setting, length):
        return timing.Measured({"PoD": [1.0]}, [("PoD", "DynamicCache")], {}, {"PoD, fused": "no", "flash-attn": "no"})

    monkeypatch.setitem(speed.SUITES, "decode", [broken, partly, speed.decode_attention])
    arguments = ["--suite", "decode", "--lengths", "64", "--rounds", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert speed.main(arguments) == 1
    written = json.loads((tmp_path / "speed-decode.json").read_text())
    assert written["failed"] == ["broken at 64: RuntimeError: CUDA out of memory.", "partly at 64, PoD, fused: no"]
    assert [result["what"] for result in written["results"]] == ["partly", "decode_attention"]
    out = capsys.readouterr().out
    assert "### failed\n\n- broken at 64: RuntimeError: CUDA out of memory.\n- partly" in out
    assert "PoD / SDPA flash" in out


def test_all_suites_run_each_in_a_process(tiny, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(speed, "SUITES", {name: speed.SUITES[name] for name in ("cache", "prefill", "end-to-end")})
    started = []

    def run(command, **_):
        if command[0] == "git":
            return SimpleNamespace(stdout="abc1234\n")
        started.append(command)
        if command[-1] == "prefill":
            return SimpleNamespace(returncode=-11)
        return SimpleNamespace(returncode=speed.main(command[2:]))

    monkeypatch.setattr(speed.subprocess, "run", run)
    (tmp_path / "speed-prefill.json").write_text("of another day")
    arguments = ["--suite", "all", "--lengths", "64", "--rounds", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert speed.main(arguments) == 1
    assert [command[-2:] for command in started] == [["--suite", name] for name in speed.SUITES]
    page = (tmp_path / "speed.md").read_text()
    assert page.count("## cpu, ") == 1 and "commit abc1234" in page
    assert page.index("### cache") < page.index("### end-to-end") < page.index("### failed")
    assert "- suite prefill: ended with exit status -11" in page and "### prefill" not in page
    assert page.strip() in capsys.readouterr().out


def test_a_suite_that_leaves_a_gpu_unusable_goes_on_without_the_fused_kernels(tiny, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(speed, "SUITES", {"attention": [], "decode": [], "cache": [], "prefill": []})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ceilings = {timing.BYTES: 2e9, timing.OPERATIONS: 4e12}
    started = []

    def run(command, timeout=None, **_):
        if command[0] == "git":
            return SimpleNamespace(stdout="abc1234\n")
        suite, is_again = command[command.index("--suite", 6) + 1], command[-1] == "--without-fused"
        started.append((suite, is_again))
        assert timeout == speed.MOST_SECONDS
        one = timing.Measured({"PoD": [1.0]}, []).record("one", 64) | {"again": is_again}
        two = timing.Measured({"PoD": [2.0]}, []).record("two", 64) | {"again": is_again}
        written = facts(suite, one, ceilings=ceilings, date="2026-01-02", threads=1, shared_keys=0.7)
        written |= {"results": [one], "failed": []}
        if suite == "attention" and not is_again:
            written["failed"] = ["two: AcceleratorError: CUDA error: an illegal memory access was encountered"]
        elif suite == "cache" and not is_again:
            written["failed"] = ["two: OutOfMemoryError: CUDA out of memory."]
        elif suite == "decode" and not is_again:
            raise speed.subprocess.TimeoutExpired(command, timeout)
        elif suite == "prefill":
            return SimpleNamespace(returncode=1)
        else:
            written["results"].append(two)
        (tmp_path / f"speed-{suite}.json").write_text(json.dumps(written))
        return SimpleNamespace(returncode=int(bool(written["failed"])))

    monkeypatch.setattr(speed.subprocess, "run", run)
    assert speed.main(["--suite", "all", "--device", "cuda", "--out", str(tmp_path)]) == 1
    assert [suite for suite, is_again in started if is_again] == ["attention", "decode", "prefill"]
    found = {suite: json.loads((tmp_path / f"speed-{suite}.json").read_text()) for suite in ("attention", "decode")}
    assert [(one["what"], one["again"]) for one in found["attention"]["results"]] == [("one", False), ("two", True)]
    assert [(one["what"], one["again"]) for one in found["decode"]["results"]] == [("one", True), ("two", True)]
    page = (tmp_path / "speed.md").read_text()
    for line in (
        "- suite decode: not done after 240 seconds, and was run again without the fused kernels",
        "- suite prefill: ended with exit status 1\n",
        "- two: AcceleratorError: CUDA error",
        "- two: OutOfMemoryError",
    ):
        assert line in page


def record(what, tokens, by_bytes=None, **seconds):
    seconds = {name.replace("__", ", "): [value] * 3 for name, value in seconds.items()}
    return {"what": what, "tokens": tokens, "seconds": seconds, "by_bytes": by_bytes}


def facts(suite, *results, **more):
    return {"suite": suite, "results": results, "device": "H100", "dtype": "bfloat16", "head_dim": 128, **more}


def test_goals_take_our_best_and_the_hardest_to_beat():
    training = record("attention_training", 32_768, PoD=2.0, PoD__fused=1.25, FlexAttention=1.5)
    training["seconds"] |= {"SDPA flash": [1.0] * 3}
    decoding = record("decode_attention", 131_072, PoD=0.9, PoD__fused=0.35)
    decoding["seconds"] |= {"SDPA flash": [0.5] * 3, speed.DENSE: [0.1] * 3}
    skipping = record("decode_attention_skipping", 32_768, 0.75, PoD=1.0, PoD__fused=0.5)
    skipping["seconds"] |= {"PoD, tau=0.7": [0.9] * 3, "PoD, tau=0.7, fused": [0.4] * 3}
    evicted = record("decode_attention_after_eviction", 131_072, PoD=9.0, PoD__fused=6.0)
    evicted["seconds"] |= {"snapkv:budget=1024": [2.0] * 3, "snapkv:budget=1024, fused": [0.5] * 3}
    table = speed.goals([facts("attention", training), facts("decode", decoding, skipping, evicted)], "cuda")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    found = {row[0]: row[1:] for row in rows}
    assert found["training attention, 32K: throughput of the fastest dense"] == ["0.8", ">= 0.95"]
    assert found["training attention, 128K: throughput of the fastest dense"] == ["not measured", ">= 0.95"]
    assert found["decode attention, 128K: time by dense flash decoding"] == ["0.7", "<= 0.73"]
    # Without skipping the fused kernels are the ones to beat.
    assert found["the same with tau = 0.7, 32K: time by that without"] == ["0.8", "<= 0.75"]
    assert found["the same with tau = 0.7, 128K: time by that without"] == ["not measured", "the bytes'"]
    assert found["decode attention after SnapKV, 1,024 of 128K: full cache by it"] == ["12", ">= 10"]
    assert not any("storing" in name for name in found)
    assert speed.goals([facts("prefill")], "cpu") == ""
    stored = record("update", 16_384, PodCache=0.01, PodCache__blocks=0.001, concatenation=2.0)
    assert "| storing a token, ring, 16K: concatenation by it    |          200 |" in speed.goals(
        [facts("cache", stored)], "cpu"
    )


def test_every_goal_is_measured_by_default():
    for goal in speed.GOALS:
        (suite,) = (name for name, runs in speed.SUITES.items() if goal.what in runs)
        assert goal.tokens in speed.LENGTHS[goal.device][suite]
        assert goal.tokens <= speed.LONGEST.get(goal.what, math.inf)


def test_winners_are_lines_to_paste():
    runs = [
        record("attention_training", 32_768, PoD=2.0, PoD__fused=1.0),
        record("attention_forward", 8192, PoD=2.0, PoD__fused=3.0),
        record("attention_forward", 131_072, PoD=2.0),
    ]
    text = speed.winner_lines([facts("attention", *runs, date="2026-01-02"), facts("decode", runs[0])], "abc")
    assert eval(f"{{{text}}}") == {
        ShapeClass("H100", 2, 128, 16_384, True): Winner("fused", "2026-01-02", "abc"),
        ShapeClass("H100", 2, 128, 4096, False): Winner("composed", "2026-01-02", "abc"),
    }


def test_seventy_percent_of_the_keys_are_shared():
    blocks = speed.shared_blocks()
    layers = torch.arange(speed.LAYERS)[:, None]
    shared = (blocks.anchors != layers).float().mean().item()
    assert shared == pytest.approx(0.7, abs=0.01) and 2 * blocks.kv_saving == pytest.approx(shared)


@pytest.mark.parametrize("kind", speed.SETTINGS)
def test_models_of_the_real_shape_that_only_say_shapes(kind):
    setting = replace(speed.SETTINGS[kind], device="cpu")
    for model in speed.random_models(setting, 64, is_whole=False).values():
        config = model.config
        assert (config.num_attention_heads, config.head_dim) == (setting.heads, setting.head_dim)
        assert model.dtype == setting.dtype and sum(one.numel() for one in model.parameters()) < 10**7
    assert config.max_position_embeddings == 128


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


def test_a_gpu_that_is_not_there_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert speed.main(["--suite", "all", "--device", "cuda"]) == 2
    assert "--device cuda: torch finds no GPU here" in capsys.readouterr().err
