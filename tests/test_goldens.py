"""Every method keeps, answers and takes what tests/goldens.py has recorded of it."""

import goldens
import numpy as np
import pytest

import pod

RECORDED = goldens.read()


# What sees most comes with `make test`: a second turn that evicts again, in blocks of several layers.
QUICK = [case for case in RECORDED if case.endswith("two-turns") and "dense" not in case]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in RECORDED]
)
def test_what_is_kept_answered_and_taken_is_as_recorded(case):
    assert not goldens.differences(case, RECORDED[case], goldens.recorded(case))


def test_every_method_and_case_is_recorded():
    assert list(RECORDED) == goldens.cases()
    left_out = {pod.eviction.Knorm, pod.eviction.KVzip}
    assert {type(method) for method in goldens.METHODS.values()} >= {*pod.eviction.METHODS.values()} - left_out
    assert goldens.FILE.stat().st_size < 500_000


SPOILED = ["none", "none-4-bits", "snapkv", "snapkv-8-bits", "h2o", "cake", "streamingllm", "cascade", "quest"]


@pytest.mark.parametrize("setting", SPOILED)
@pytest.mark.parametrize("model", [pytest.param("dense", marks=pytest.mark.slow), "blocks"])
def test_vectors_in_each_others_slots_are_seen(model, setting, monkeypatch):
    """Two of those stored of a prompt change places, two groups where they are quantised."""
    finish, case = pod.PodCache.finish, f"{model}/{setting}/one-forward"

    def swapped(cache):
        finish(cache)
        if cache.get_seq_length() == 128:
            stored = next(one for one in cache.storages() if one.dim() > 1)
            stored = stored.view(-1, stored.shape[-1]) if stored.is_floating_point() else stored
            stored[[1, 2]] = stored[[2, 1]]

    monkeypatch.setattr(pod.PodCache, "finish", swapped)
    lines = goldens.differences(case, RECORDED[case], goldens.run(case))
    assert lines and lines[0].startswith(f"{case}: logits of ")


def test_another_kept_position_and_more_bytes_are_seen(monkeypatch):
    case = "blocks/snapkv/two-turns"
    positions, nbytes, record = pod.PodCache.positions, pod.PodCache.nbytes, RECORDED[case]

    def shifted(cache, layer):
        held = positions(cache, layer)
        held[1, 0, -1] += layer == 2
        return held

    monkeypatch.setattr(pod.PodCache, "positions", shifted)
    monkeypatch.setattr(pod.PodCache, "nbytes", lambda cache: nbytes(cache) + 8)
    kept, *more = goldens.differences(case, record, goldens.recorded(case))
    where = "at moment 0 in layer 2, row 1, head 0"
    assert kept == f"{case}: 6 kept positions, at most 2 of a head; the first is 95, now gone, {where}"
    assert [line.split(" than ")[0] for line in more] == [f"{case}: {name}, 8 more" for name in goldens.QUANTITIES[2:]]
    monkeypatch.undo()
    monkeypatch.setattr(pod.PodCache, "nbytes", lambda cache: nbytes(cache) - 8)
    assert not goldens.differences(case, record, goldens.recorded(case))


def test_the_script_says_what_changes_before_it_writes(tmp_path, monkeypatch, capsys):
    case, other = "dense/tova/one-forward", "dense/tova/chunked"
    monkeypatch.setattr(goldens, "FILE", tmp_path / "goldens.npz")
    monkeypatch.setattr(goldens, "SCENARIOS", {name: goldens.SCENARIOS[name] for name in ("one-forward", "chunked")})
    monkeypatch.setattr(goldens, "cases", lambda: [case, other])
    assert goldens.main([]) == 1 and "tova/chunked: new" in capsys.readouterr().out and not goldens.FILE.exists()
    assert goldens.main(["--write"]) == 0 and goldens.main([]) == 0
    assert capsys.readouterr().out.endswith("2 cases are as recorded\n")
    before = goldens.FILE.read_bytes()
    monkeypatch.setitem(goldens.SETTINGS, "tova", {"eviction": pod.eviction.TOVA(goldens.BUDGET - 1)})
    assert goldens.main([]) == 1 and goldens.FILE.read_bytes() == before
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and {line.split(":")[0] for line in lines} == {case, other}
    assert "fewer" in lines[2]
    monkeypatch.setattr(goldens, "unsafe", lambda case, record: [case])
    assert goldens.main(["--write"]) == 1 and goldens.FILE.read_bytes() == before


def test_choices_that_rounding_could_turn_are_refused():
    case = "blocks/tova/one-forward"
    record = RECORDED[case]
    assert not goldens.unsafe(case, record)
    kept = record.kept.copy()
    kept[0, 0, 0, 0, 3] ^= 1
    assert "kept positions" in goldens.unsafe(case, goldens.replace(record, kept=kept))[0]
    logits = np.where(record.logits == record.logits.max(), np.nan, record.logits)
    assert "logits" in goldens.unsafe(case, goldens.replace(record, logits=logits))[0]
