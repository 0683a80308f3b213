"""What a run's numbers say of the goals."""

from speed_goals import goals
from speed_setting import DENSE


def record(what, tokens, by_bytes=None, **seconds):
    seconds = {name.replace("__", ", "): [value] * 3 for name, value in seconds.items()}
    return {"what": what, "tokens": tokens, "seconds": seconds, "by_bytes": by_bytes}


def facts(suite, *results, **more):
    return {"suite": suite, "results": results, "device": "H100", "dtype": "bfloat16", "head_dim": 128, **more}


def test_goals_take_our_best_and_the_hardest_to_beat():
    training = record("attention_training", 32_768, PoD=2.0, PoD__fused=1.25, FlexAttention=1.5)
    training["seconds"] |= {"SDPA flash": [1.0] * 3, "SDPA cuDNN": [1.1] * 3}
    longer = record("attention_training", 131_072, PoD=2.0, PoD__cuDNN=1.6, PoD__fused=1.8, FlexAttention=1.2)
    decoding = record("decode_attention", 131_072, PoD=0.9, PoD__fused=0.35)
    decoding["seconds"] |= {"SDPA flash": [0.5] * 3, DENSE: [0.1] * 3}
    skipping = record("decode_attention_skipping", 32_768, 0.75, PoD=1.0, PoD__fused=0.5)
    skipping["seconds"] |= {"PoD, tau=0.7": [0.9] * 3, "PoD, tau=0.7, fused": [0.4] * 3}
    evicted = record("decode_attention_after_eviction", 131_072, PoD=9.0, PoD__fused=6.0)
    evicted["seconds"] |= {"snapkv:budget=1024": [2.0] * 3, "snapkv:budget=1024, fused": [0.5] * 3}
    table = goals([facts("attention", training, longer), facts("decode", decoding, skipping, evicted)], "cuda")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    found = {row[0]: row[1:] for row in rows}
    assert found["training attention, 32K: throughput of the fastest dense"] == ["0.8", ">= 0.95", "no"]
    assert found["training attention, 128K: throughput of the fastest dense"] == ["0.75", ">= 0.95", "no"]
    assert found["decode attention, 128K: time by dense flash decoding"] == ["0.7", "<= 0.73", "yes"]
    # Without skipping the fused kernels are the ones to beat.
    assert found["the same with tau = 0.7, 32K: time by that without"] == ["0.8", "<= 0.75", "no"]
    assert found["the same with tau = 0.7, 128K: time by that without"] == ["-", "the bytes'", "not measured"]
    assert found["decode attention after SnapKV, 1,024 of 128K: full cache by it"] == ["12", ">= 10", "yes"]
    assert not any("storing" in name for name in found)
    assert goals([facts("prefill")], "cpu") == ""
    stored = record("update", 16_384, PodCache=0.01, PodCache__blocks=0.001, concatenation=2.0)
    assert "| storing a token, ring, 16K: concatenation by it " in (page := goals([facts("cache", stored)], "cpu"))
    assert "200 |        >= 100 |          yes |" in page


def test_attention_of_the_real_model_is_held_against_the_bytes():
    decoding = record("decode_attention_of_model", 8192, 0.8, PoD=0.9)
    decoding["seconds"] |= {"SDPA flash": [1.0] * 3, DENSE: [1.1] * 3}
    after = record("decode_after_snapkv", 4000)
    after["seconds"] |= {"PoD, SnapKV(512)": [1.04] * 3, "kvpress, SnapKV(512)": [1.0] * 3, "StaticCache": [0.9] * 3}
    table = goals([facts("cpu", decoding, after)], "cpu")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    found = {row[0].removeprefix("the real model: "): row[1:] for row in rows}
    assert found["decode attention, 8K: time by dense"] == ["0.9", "<= 0.92", "yes"]
    assert found["decode attention, 2K: time by dense"] == ["-", "the bytes'", "not measured"]
    step = "a decode step after SnapKV(512) of 4,000, "
    assert found[step + "PoD: time by kvpress's"] == ["1.04", "<= 1.05", "yes"]
    assert found[step + "PoD: time by transformers' fastest"] == ["1.16", "<= 1", "no"]
    assert found[step + "blocks of one layer: time by kvpress's"][2] == "not measured"
