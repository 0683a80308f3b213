"""The speed script: what is compared, how ratios are computed, what is written. Not how fast anything is."""

import json
import math
import re
import statistics
import sys
from dataclasses import replace
from types import SimpleNamespace

import filled_cache
import pytest
import speed_cpu
import speed_goals
import speed_setting
import speed_works
import timing
import torch
from scripts import save, script
from transformers import LlamaConfig, LlamaForCausalLM

import pod

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
    "fork": {"decode_forked": ["forked rows / copied rows"]},
}
SHAPE = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 4, "num_attention_heads": 16}


@pytest.fixture
def tiny(monkeypatch):
    setting = replace(speed.SETTINGS["cpu"], shape=SHAPE, recent=6, sinks=2, eviction=("snapkv:budget=16,window=4",))
    monkeypatch.setitem(speed.SETTINGS, "cpu", setting)
    monkeypatch.setattr(filled_cache, "FILLED_AT_ONCE", 40)
    monkeypatch.setattr(speed_works, "UPDATES", 3)
    monkeypatch.setattr(speed_works, "NEW_TOKENS", 3)
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
            each = [a / b for a, b in zip(one, other, strict=True)]
            middles = (f"{1e3 * statistics.median(seconds):,.4g}" for seconds in (one, other))
            assert [name, *where, f"{value:.3g}", f"{min(each):.3g} to {max(each):.3g}", *middles] in rows
        for name, found in measured["rates"].items():
            ceiling = {"GB/s": 2e9, "TFLOP/s": 4e12}[found["unit"]]
            (row,) = (row for row in rows if row[:3] == [name, *where] and found["unit"] in row[3])
            assert row[4] == f"{found['rate'] / ceiling:.0%}"


def test_operations_and_bytes(tiny):
    with torch.no_grad():
        measured = speed_works.attention_forward(replace(tiny, batch=2, rounds=1), 64)
        trained = speed_works.attention_training(replace(tiny, batch=2, rounds=1), 64)
        decoded = speed_works.decode_attention(replace(tiny, batch=2, rounds=1), 64)
    pairs = 2 * 16 * sum(query + 1 for query in range(64))
    # For each pair: 4 multiplications and as many additions for the logit, and the same for the value.
    assert measured.amounts["SDPA flash"] == (pairs * 4 * 2 * 2, timing.OPERATIONS)
    assert trained.amounts["PoD"] == (pairs * 4 * 2 * 7, timing.OPERATIONS)
    assert decoded.amounts["SDPA flash"] == (
        2 * 2 * 64 * 4 * 4 * speed_setting.KV_HEADS * speed_setting.LAYERS,
        timing.BYTES,
    )
    # Its blocks of one layer hold the same keys and values, and room for the tokens of the rounds.
    dense, most = decoded.amounts[speed_setting.DENSE][0], decoded.amounts["SDPA flash"][0]
    assert dense == most // 64 * (64 + 6)


def test_early_skip_leaves_out_every_second_head(tiny):
    with torch.no_grad():
        measured = speed_works.decode_attention_skipping(replace(tiny, batch=2, rounds=1), 64)
    blocks, room = speed_setting.shared_blocks(), 64 + 6
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


def test_what_fails_is_said_and_the_rest_is_measured(tiny, monkeypatch, tmp_path, capsys):
    def broken(setting, length):
        raise RuntimeError("CUDA out of memory.\nTried to allocate")

    optional = "PoD, fused", "flash-attn", "PoD, cuDNN"

    def partly(setting, length):
        return timing.Measured({"PoD": [1.0]}, [("PoD", "DynamicCache")], {}, dict.fromkeys(optional, "no"))

    monkeypatch.setitem(speed.SUITES, "decode", [broken, partly, speed_works.decode_attention])
    arguments = ["--suite", "decode", "--lengths", "64", "--rounds", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert speed.main(arguments) == 1
    written = json.loads((tmp_path / "speed-decode.json").read_text())
    assert written["failed"] == ["broken at 64: RuntimeError: CUDA out of memory.", "partly at 64, PoD, fused: no"]
    assert [result["what"] for result in written["results"]] == ["partly", "decode_attention"]
    out = capsys.readouterr().out
    assert "### failed\n\n- broken at 64: RuntimeError: CUDA out of memory.\n- partly" in out
    assert "PoD / SDPA flash" in out


def test_what_has_no_times_is_measured_by_the_process_that_follows(tiny, monkeypatch, tmp_path):
    """A device may fail while the first work is captured: then every work is left out, and nothing is raised."""

    def decode(setting, length):
        if setting.has_kernels:
            return timing.Measured({}, [], left_out={"PoD": "AcceleratorError: CUDA error: an illegal memory access"})
        return timing.Measured({"PoD": [1.0]}, [])

    monkeypatch.setitem(speed.SUITES, "decode", [decode])
    path = tmp_path / "speed-decode.json"
    for has_kernels in (True, False):
        speed.run_suite("decode", [64], replace(tiny, has_kernels=has_kernels), path)
    written = json.loads(path.read_text())
    assert written["failed"] == ["decode at 64, PoD: AcceleratorError: CUDA error: an illegal memory access"]
    assert [record["seconds"] for record in written["results"]] == [{"PoD": [1.0]}]


def test_a_page_is_made_where_git_is_missing(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(speed.SUITES, "decode", [lambda *_: timing.Measured({"PoD": [1.0]}, [])])
    speed.run_suite("decode", [64], tiny, tmp_path / "speed-decode.json")
    assert "commit unknown" in speed.page([speed.read(tmp_path / "speed-decode.json")], "cpu", [])


class Process:
    """One of `multiprocessing`, run here: `endings` says what becomes of a suite's first."""

    endings: dict[str, object] = {}
    started: list[tuple[str, bool]]
    exitcode = None

    def __init__(self, target, args):
        self.target, self.args = target, args

    def start(self):
        suite, _, setting, path = self.args
        self.started.append((suite, setting.has_kernels))
        ending = self.endings.get(suite)
        self.exitcode = ending(path, setting.has_kernels) if callable(ending) else self.target(*self.args) or 0

    def join(self, seconds=None):
        self.waited = seconds

    def is_alive(self):
        return self.exitcode is None

    def kill(self):
        assert self.waited == speed.MOST_SECONDS
        self.exitcode = -9


@pytest.fixture
def processes(monkeypatch):
    """The processes that are started, as (suite, whether with all kernels)."""
    monkeypatch.setattr(Process, "started", [], raising=False)
    monkeypatch.setattr(speed.multiprocessing, "get_context", lambda method: SimpleNamespace(Process=Process))
    return Process.started


def test_all_suites_run_each_in_a_process(tiny, processes, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(speed, "SUITES", {name: speed.SUITES[name] for name in ("cache", "prefill", "end-to-end")})
    monkeypatch.setattr(Process, "endings", {"prefill": lambda *_: -11})
    (tmp_path / "speed-prefill.json").write_text("of another day")
    arguments = ["--suite", "all", "--lengths", "64", "--rounds", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert speed.main(arguments) == 1
    assert processes == [(name, True) for name in speed.SUITES]
    page = (tmp_path / "speed.md").read_text()
    assert page.count("## cpu, ") == 1
    assert page.index("### cache") < page.index("### end-to-end") < page.index("### failed")
    assert "- suite prefill: ended with exit status -11\n" in page and "### prefill" not in page
    assert page.strip() in capsys.readouterr().out


def test_a_suite_that_leaves_a_gpu_unusable_goes_on_without_the_fused_kernels(
    tiny, processes, monkeypatch, tmp_path, capsys
):
    def one(setting, length):
        return timing.Measured({"PoD": [1.0], "other": [float(setting.has_kernels)]}, [])

    def two(setting, length):
        return timing.Measured({"PoD": [2.0], "other": [float(setting.has_kernels)]}, [])

    def measure(path, runs, has_kernels, failed=()):
        """What `run_suite` does, where `runs` are those that succeed, and then the device fails."""
        suite = path.stem.removeprefix("speed-")
        monkeypatch.setitem(speed.SUITES, suite, runs)
        speed.run_suite(suite, [64], replace(tiny, has_kernels=has_kernels), path)
        written = json.loads(path.read_text())
        written["failed"] += failed
        path.write_text(json.dumps(written))

    def unusable(path, has_kernels):
        failed = ["two: AcceleratorError: CUDA error: an illegal memory access was encountered"] if has_kernels else []
        measure(path, [one] if has_kernels else [one, two], has_kernels, failed)
        return 0

    def hangs(path, has_kernels):
        if has_kernels:
            return None
        measure(path, [one, two], has_kernels)
        return 0

    def too_large(path, has_kernels):
        measure(path, [one], has_kernels, ["two: OutOfMemoryError: CUDA out of memory."])
        return 0

    endings = {"attention": unusable, "decode": hangs, "cache": too_large, "prefill": lambda *_: 1}
    monkeypatch.setattr(speed, "SUITES", dict.fromkeys(endings, []))
    monkeypatch.setattr(Process, "endings", endings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert speed.main(["--suite", "all", "--lengths", "64", "--device", "cuda", "--out", str(tmp_path)]) == 1
    assert [suite for suite, has_kernels in processes if not has_kernels] == ["attention", "decode", "prefill"]
    found = {suite: json.loads((tmp_path / f"speed-{suite}.json").read_text()) for suite in ("attention", "decode")}
    # What was measured with them stays; the rest is measured without.
    for suite, firsts in (("attention", [1.0, 0.0]), ("decode", [0.0, 0.0])):
        assert [record["what"] for record in found[suite]["results"]] == ["one", "two"]
        assert [record["seconds"]["other"] for record in found[suite]["results"]] == [[first] for first in firsts]
    page = (tmp_path / "speed.md").read_text()
    for line in (
        "- suite decode: not done after 240 seconds, and was run again without the fused kernels\n",
        "- suite prefill: ended with exit status 1, and was run again without the fused kernels\n",
        "- suite prefill: ended with exit status 1\n",
        "- two: AcceleratorError: CUDA error",
        "- two: OutOfMemoryError",
    ):
        assert line in page


def test_every_goal_is_measured_by_default():
    for goal in speed_goals.GOALS:
        (suite,) = (name for name, runs in speed.SUITES.items() if goal.what in runs)
        assert goal.tokens in speed.default_lengths(suite, goal.what, goal.device)
        assert goal.tokens <= speed.LONGEST.get(goal.what, math.inf)


def test_seventy_percent_of_the_keys_are_shared():
    blocks = speed_setting.shared_blocks()
    layers = torch.arange(speed_setting.LAYERS)[:, None]
    shared = (blocks.anchors != layers).float().mean().item()
    assert shared == pytest.approx(0.7, abs=0.01) and 2 * blocks.kv_saving == pytest.approx(shared)


@pytest.mark.parametrize("kind", speed.SETTINGS)
def test_models_of_the_real_shape_that_only_say_shapes(kind):
    setting = replace(speed.SETTINGS[kind], device="cpu")
    for model in speed_setting.random_models(setting, 64, is_whole=False).values():
        config = model.config
        assert (config.num_attention_heads, config.head_dim) == (setting.heads, setting.head_dim)
        assert model.dtype == setting.dtype and sum(one.numel() for one in model.parameters()) < 10**7
    assert config.max_position_embeddings == 128


def test_filled_caches_hold_what_was_stored(tiny):
    with torch.no_grad():
        models = speed_setting.random_models(tiny, 256)
        for model in models.values():
            cache = filled_cache.new_cache(model, 100)
            filled_cache.fill(cache, model, 2, 90)
            assert cache.get_seq_length() == 90
        cache = pod.PodCache(models[speed_setting.DENSE].config, eviction=pod.eviction.Cascade(budget=16, sinks=2))
        filled_cache.fill(cache, models[speed_setting.DENSE], 2, 90)
    assert cache.get_seq_length() == 90
    kept = cache.positions(3)
    assert kept.shape == (2, speed_setting.KV_HEADS, 14) and (kept[..., :2] == torch.arange(2)).all()
    assert (kept[..., -1] == 89).all()


@pytest.mark.parametrize("wrong", [["--lengths", "63"], ["--rounds", "0"], ["--batch", "0"]])
def test_bad_sizes_are_refused(wrong, capsys):
    assert speed.main(["--suite", "decode", *wrong]) == 2
    assert "at least" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert speed.main(["--suite", "all", "--device", "cuda"]) == 2
    assert "--device cuda: torch finds no GPU here" in capsys.readouterr().err


@pytest.fixture
def tiny_real(tmp_path, monkeypatch):
    """A model with random weights and its blocks on disk, and sizes that a prompt of 64 tokens outgrows."""
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=256,
    )
    save(LlamaForCausalLM(config), tmp_path / "base")
    blocks = pod.LayerBlocks([[0, 0], [0, 1]], metadata={"sink_size": 2, "recent_size": 6})
    blocks.save(tmp_path / "blocks.json")
    monkeypatch.setattr(speed, "BUDGET", 16)
    monkeypatch.setattr(speed_cpu, "BUDGET", 16)
    monkeypatch.setattr(speed_cpu, "WINDOW", 4)
    monkeypatch.setattr(speed_cpu, "SPOKEN", 7)
    monkeypatch.setattr(timing, "ceilings", lambda *_: {timing.BYTES: 2e9, timing.OPERATIONS: 4e12})
    speed_cpu.real_models.cache_clear()
    return ["--suite", "cpu", "--ckpt", str(tmp_path / "base"), "--blocks", str(tmp_path / "blocks.json")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_real_model_against_its_peers(dtype, tiny_real, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "kvpress", None)  # as if it were not installed
    arguments = [*tiny_real, "--dtype", dtype, "--lengths", "64", "--rounds", "2", "--out", str(tmp_path)]
    assert speed.main(arguments) == 0
    written = speed.read(tmp_path / "speed-cpu.json")
    after = [f"{name} / {other}" for name in (speed_cpu.EVICTED, speed_cpu.DENSE_EVICTED) for other in
             ("DynamicCache", "StaticCache")]  # fmt: skip
    step = ["PoD / blocks of one layer", "PoD / DynamicCache"]
    assert {measured["what"]: list(measured["ratios"]) for measured in written["results"]} == {
        "decode_attention_of_model": ["PoD / blocks of one layer", "PoD / SDPA flash"],
        "decode_step": [*step, "PoD / StaticCache"],
        "decode_after_snapkv": after,
        "similarity_by_forward": ["attention_similarity / forward"],
        "speculation": ["plain / drafts by quest:budget=16", "plain / drafts by recentreader:budget=16"],
        "training_step": step,
        "prefill_of_model": ["PoD / DynamicCache", "PoD / StaticCache"],
    }
    assert (written["dtype"], written["shared_keys"]) == (dtype, 0.25)
    spoken = next(measured for measured in written["results"] if measured["what"] == "speculation")
    # A token comes with what is left of the prompt; before the last one, nothing is drafted.
    drafts = [re.match(r"drafts by \w+:budget=16: (\d+) of (\d+) accepted", note) for note in spoken["notes"]]
    assert [0 <= int(found[1]) <= int(found[2]) and int(found[2]) >= 4 for found in filter(None, drafts)] == [True] * 2
    assert f"Left out: {speed_cpu.KVPRESS_EVICTED} (not installed: pip install" in capsys.readouterr().out
    # The distant tokens' keys of one of four heads are not there.
    attention = written["results"][0]
    room = 64 + speed_cpu.STEPS * 4
    stored = 2 + 6 + 64  # sinks, recent tokens and what may be cropped
    assert attention["by_bytes"] == pytest.approx((8 * room - room + min(room, stored)) / (8 * room))


def test_a_run_goes_on_where_it_was_stopped(tiny_real, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speed, "described_commit", lambda: "abc")
    arguments = [*tiny_real, "--lengths", "64", "--rounds", "1", "--out", str(tmp_path)]

    def broken(setting, length):
        raise RuntimeError("no more memory")

    monkeypatch.setitem(speed.SUITES, "cpu", [speed_cpu.decode_step, broken])
    assert speed.main(arguments) == 1
    first = speed.read(tmp_path / "speed-cpu.json")["results"]
    monkeypatch.setitem(speed.SUITES, "cpu", [speed_cpu.decode_step, speed_cpu.training_step])
    assert speed.main([*arguments, "--resume"]) == 0
    results = speed.read(tmp_path / "speed-cpu.json")["results"]
    assert results[:1] == first and [record["what"] for record in results] == ["decode_step", "training_step"]
    assert speed.main([*arguments, "--resume", "--dtype", "bfloat16"]) == 2
    assert "has dtype float32, not bfloat16: leave out --resume" in capsys.readouterr().err
    monkeypatch.setattr(speed, "described_commit", lambda: "def")
    assert speed.main([*arguments, "--resume"]) == 2 and "has commit abc, not def" in capsys.readouterr().err
    assert speed.main(arguments) == 0
    assert len(speed.read(tmp_path / "speed-cpu.json")["results"]) == 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(["--device", "cuda"], "leave out --device"), (["--lengths", "64"], "--lengths are at least 80")],
)
def test_the_suite_cpu_refuses_gpus_and_short_prompts(wrong, said, tiny_real, monkeypatch, capsys):
    monkeypatch.setattr(speed, "BUDGET", 40)
    assert speed.main([*tiny_real, *wrong]) == 2
    assert said in capsys.readouterr().err
