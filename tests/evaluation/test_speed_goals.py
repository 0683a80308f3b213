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
    assert found["training attention, 32K: throughput of the fastest dense"] == ["0.8", ">= 0.95"]
    assert found["training attention, 128K: throughput of the fastest dense"] == ["0.75", ">= 0.95"]
    assert found["decode attention, 128K: time by dense flash decoding"] == ["0.7", "<= 0.73"]
    # Without skipping the fused kernels are the ones to beat.
    assert found["the same with tau = 0.7, 32K: time by that without"] == ["0.8", "<= 0.75"]
    assert found["the same with tau = 0.7, 128K: time by that without"] == ["not measured", "the bytes'"]
    assert found["decode attention after SnapKV, 1,024 of 128K: full cache by it"] == ["12", ">= 10"]
    assert not any("storing" in name for name in found)
    assert goals([facts("prefill")], "cpu") == ""
    stored = record("update", 16_384, PodCache=0.01, PodCache__blocks=0.001, concatenation=2.0)
    assert "| storing a token, ring, 16K: concatenation by it    |          200 |" in goals(
        [facts("cache", stored)], "cpu"
    )
