"""Works in turns: their order, their ratios, what is captured as a graph. The clock and the device are pretended."""

import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import timing
import torch

from pod_kernels.dispatch import VARIABLE as BACKEND_VARIABLE
from pod_kernels.flash import FLASH_VARIABLE


def test_the_backend_holds_inside_only(monkeypatch):
    names, seen = (BACKEND_VARIABLE, FLASH_VARIABLE), []

    def now():
        return tuple(timing.os.environ.get(name) for name in names)

    def look(backend, flash=None):
        timing.by(backend, lambda: seen.append(now()), flash)()

    monkeypatch.setenv(BACKEND_VARIABLE, "reference")
    monkeypatch.setenv(FLASH_VARIABLE, "FA3")
    look("composed")
    look("composed", "cuDNN")
    assert now() == ("reference", "FA3")
    for name in names:
        monkeypatch.delenv(name)
    look("fused")
    with pytest.raises(ZeroDivisionError):
        timing.by("fused", lambda: 1 / 0, "cuDNN")()
    assert now() == (None, None)
    assert seen == [("composed", "FA3"), ("composed", "cuDNN"), ("fused", "")]


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

    monkeypatch.setattr(timing, "clock", lambda: now)
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

    monkeypatch.setattr(timing, "clock", lambda: now)
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
    assert refusal.startswith("it waits for the device: test_timing.py, line ")


def test_a_capture_that_fails(graphs, capsys):
    def work():
        if graphs.asked:
            raise RuntimeError("operation not permitted")

    same, refusal = timing.captured(work)
    assert same is work and refusal == "RuntimeError: operation not permitted"
    assert graphs.asked == ["capture", "stream"]


def test_what_is_no_replay_among_replays_is_said(graphs, monkeypatch):
    monkeypatch.setattr(timing, "timed", lambda work, device: work() or 1.0)
    works = {"adding": lambda: None, "growing": lambda: None}
    seconds, left_out, notes = timing.measured(works, 2, "cuda", "test", None, ["adding"])
    assert list(seconds) == ["adding", "growing"] and not left_out
    assert notes == ["growing is timed with Python's starts, as it allocates or reads what the host has counted."]
    assert timing.measured(works, 2, "cuda", "test")[2] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_works_are_captured_and_timed_on_a_gpu():
    counts, other = torch.zeros(2, 1000, device="cuda")
    works = {"adding": lambda: counts.add_(1), "asking": lambda: float(other.add_(1).sum())}
    seconds, left_out, notes = timing.measured(works, 3, "cuda", "test", None, works)
    assert not left_out and min(seconds["adding"] + seconds["asking"]) > 0
    assert len(notes) == 1 and "asking is no graph" in notes[0] and "test_timing.py" in notes[0]
    # The first run, the one that looks, a replay and three rounds; asking is not replayed.
    assert (counts == 6).all() and (other == 5).all()
    assert torch.randn(3, device="cuda").isfinite().all()
