"""KVzip keeps what a plain loop over the repeated context says, of all layers and heads together."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_cache import ANCHORS, DENSE, STREAMING, assert_close, build, fed, left_padded, tokens

import pod
from pod.blocks import STREAMS
from pod.eviction import AdaKV, Combined, KVzip, SnapKV

REQUESTS = {"exactly.": [5, 6, 7], "starting with": [8, 9], "<end>": [10]}  # the last words of what is asked
SUFFIX, LEAD = "<end>", 8


def tokenizer(text, add_special_tokens):
    assert not add_special_tokens
    return SimpleNamespace(input_ids=next(ids for end, ids in REQUESTS.items() if text.endswith(end)))


def recording(cache):
    """What is handed to the cache from now on: layer -> [(queries, keys)] in float64."""
    seen, attend = {}, cache.attend

    def watched(layer, q, k, *rest):
        seen.setdefault(layer, []).append((q.double().numpy(), k.double().numpy()))
        return attend(layer, q, k, *rest)

    cache.attend = watched
    return seen


def loop_scores(model, row, method, with_request):
    """(anchor, head) -> {position: score} of one row [N] of real tokens, from full caches and plain softmaxes."""
    config = model.config
    anchors, groups = config.blocks.anchors.tolist(), config.num_attention_heads // config.num_key_value_heads
    units = sorted({(layer, head) for line in anchors for head, layer in enumerate(line) if layer != STREAMS})
    cache = pod.PodCache(config)
    context = recording(cache)
    fed(model, cache, row[None])
    keys = {(layer, head): context[layer][0][1][0, head] for layer, head in units}
    scores = {unit: {p: 2.0 for p in range(min(method.sinks, len(row)))} for unit in units}
    for start in range(0, len(row), method.chunk):
        chunk = list(range(start, min(start + method.chunk, len(row))))
        new = row[chunk].tolist()
        if with_request:
            lead = row[max(0, start - LEAD) : start].tolist()
            new = REQUESTS["starting with" if start else "exactly."] + lead + REQUESTS[SUFFIX] + new
        again = pod.PodCache(config)
        fed(model, again, row[None])
        seen = recording(again)
        fed(model, again, torch.tensor([new]))
        for layer, head in units:
            q, own = seen[layer][0][0][0], seen[layer][0][1][0, head]
            before = [p for p in range(method.sinks) if p < len(row) and p not in chunk] + chunk
            for query in range(len(new)):
                for member in range(groups):
                    asked = q[head * groups + member, query]
                    logits = [asked @ keys[layer, head][p] for p in before]
                    logits += [asked @ own[other] for other in range(query + 1)]
                    weights = np.exp((np.array(logits) - max(logits)) / math.sqrt(len(asked)))
                    weights /= weights.sum()
                    for p, weight in zip(before, weights.tolist(), strict=False):
                        if p >= method.sinks and p in chunk:
                            scores[layer, head][p] = max(scores[layer, head].get(p, 0.0), weight)
    return scores


def loop_kept(config, scores, budget, recent, length):
    """(anchor, head) -> positions: of blocks the last ones, then the best of all, a token of a block for each layer."""
    anchors = config.blocks.anchors.tolist()
    sizes = {unit: sum(line[unit[1]] == unit[0] for line in anchors) for unit in scores}
    room, queue = budget * sum(sizes.values()), []
    last = length - min(config.recent_size, int(recent * (budget - config.sink_size)))
    kept = {unit: {p for p in scores[unit] if p < config.sink_size or p >= last} for unit in scores}
    kept = {unit: some if sizes[unit] > 1 else set() for unit, some in kept.items()}
    room -= sum(sizes[unit] * len(kept[unit]) for unit in scores)
    for unit in scores:
        queue += [(-score, -p, *unit) for p, score in scores[unit].items() if p not in kept[unit]]
    used = 0
    for _, p, *unit in sorted(queue):
        used += sizes[tuple(unit)]
        if used > room:
            break
        kept[tuple(unit)].add(-p)
    return kept


@pytest.mark.parametrize("lengths", [(40,), (40, 21)], ids=["one", "padded"])
@pytest.mark.parametrize(
    "anchors",
    [ANCHORS, *(pytest.param(anchors, marks=pytest.mark.slow) for anchors in (DENSE, STREAMING))],
    ids=["blocks", "dense", "streams"],
)
@pytest.mark.parametrize("with_request", [True, False], ids=["request", "alone"])
@pytest.mark.parametrize("budget, chunk, sinks, recent", [(12, 16, 4, 0.75), (0.3, 64, 2, 0.5), (18, 9, 0, 0)])
def test_kept_positions_are_those_of_a_loop(lengths, anchors, with_request, budget, chunk, sinks, recent):
    model = build(anchors=anchors)
    method = KVzip(budget, sinks=sinks, chunk=chunk, recent_in_blocks=recent)
    cache = pod.PodCache(model.config, eviction=method)
    ids, mask = left_padded(lengths)
    mask = mask if len(lengths) > 1 else None
    with cache.prefill() if len(lengths) == 1 else torch.no_grad():
        fed(model, cache, ids, mask, (13, ids.shape[1] - 13) if len(lengths) == 1 else ())
    whole = cache.nbytes()
    pod.reconstruct(model, cache, ids, tokenizer if with_request else None, mask, SUFFIX)
    total = 0
    for row, length in enumerate(lengths):
        tokens_of_row = ids[row, -length:]
        each = budget if isinstance(budget, int) else max(int(0.3 * length), 3)
        scores = loop_scores(model, tokens_of_row, method, with_request)
        wanted = loop_kept(model.config, scores, each, recent, length)
        for layer, line in enumerate(model.config.blocks.anchors.tolist()):
            for head, anchor in enumerate(line):
                held = {p for p in cache.positions(layer)[row, head].tolist() if p >= 0}
                if anchor == STREAMS:
                    assert max(held) == length - 1
                    continue
                assert held == wanted[anchor, head], (row, layer, head)
                total += len(held)
        assert total <= sum(lengths) * 10
    assert cache.nbytes() < 0.8 * whole
    assert not all(len(set(map(tuple, cache.positions(layer)[0].tolist()))) == 1 for layer in range(5))  # ragged


def test_what_follows_is_attention_to_what_is_kept_and_is_only_added():
    model = build(anchors=DENSE)
    cache, context = pod.PodCache(model.config, eviction=KVzip(12, sinks=2, chunk=16)), tokens(1, 40)
    fed(model, cache, context)
    pod.reconstruct(model, cache, context)
    held = [cache.positions(layer)[0] for layer in range(5)]
    answers = []
    for seed in (1, 2):
        with cache.peek():
            answers.append(fed(model, cache, tokens(1, 7, seed=seed)))
            for layer in range(5):
                for before, now in zip(held[layer], cache.positions(layer)[0], strict=True):
                    wanted = set(before.tolist()) | set(range(40, 47))
                    assert set(now.tolist()) - {-1} == wanted - {-1}
        assert [cache.positions(layer)[0].tolist() for layer in range(5)] == [one.tolist() for one in held]
    for seed, answer in zip((1, 2), answers, strict=True):
        assert_close(fed(model, cache, tokens(1, 7, seed=seed)), answer)
        cache.crop(-7)
    # The same as masking the evicted pairs in a full one: a budget of all changes nothing.
    everything = pod.PodCache(model.config, eviction=KVzip(40, chunk=16))
    fed(model, everything, context)
    pod.reconstruct(model, everything, context)
    plain = pod.PodCache(model.config)
    fed(model, plain, context)
    assert_close(fed(model, everything, tokens(1, 5)), fed(model, plain, tokens(1, 5)))


def test_it_is_saved_and_loaded_before_and_after(tmp_path):
    model, context = build(), tokens(1, 40)
    cache = pod.PodCache(model.config, eviction=KVzip(12, chunk=16))
    fed(model, cache, context)
    cache.save(tmp_path / "before")
    pod.reconstruct(model, cache, context)
    cache.save(tmp_path / "after")
    again = pod.PodCache.load(tmp_path / "before", model.config)
    with pytest.raises(ValueError, match=r"KVzip has not evicted from the context yet: call pod.reconstruct"):
        fed(model, again, tokens(1, 1))
    pod.reconstruct(model, again, context)
    other = pod.PodCache.load(tmp_path / "after", model.config)
    wanted = fed(model, copy.deepcopy(cache), tokens(1, 5))
    for one in (again, other):
        assert one.nbytes() == cache.nbytes()
        assert torch.equal(fed(model, one, tokens(1, 5)), wanted)


def test_in_8_bits():
    """Chosen in full precision's place, and at rest in fewer bytes afterwards."""
    model, context, sizes = build(), tokens(2, 200), []
    for quantization in (None, pod.Quantization(8, group=16, residual=4)):
        method = KVzip(150, chunk=80)
        cache = pod.PodCache(model.config, eviction=method, quantization=quantization, crop_slack=4)
        fed(model, cache, context)
        pod.reconstruct(model, cache, context)
        assert sum((cache.positions(layer) >= 0).sum().item() for layer in range(5)) <= 5 * 2 * 2 * 150
        sizes.append(cache.nbytes())
        assert fed(model, cache, tokens(2, 5)).isfinite().all()
    assert sizes[1] < 0.8 * sizes[0]


def test_misuse_is_named():
    model, context = build(), tokens(1, 40)
    with pytest.raises(ValueError, match="query_aware must be False"):
        KVzip(12, query_aware=True)
    with pytest.raises(ValueError, match="chunk must be at least 1, got 4 and 0"):
        KVzip(12, chunk=0)
    with pytest.raises(ValueError, match="recent_in_blocks must be a share, 0 to 1, got 1.5"):
        KVzip(12, recent_in_blocks=1.5)
    with pytest.raises(ValueError, match="KVzip scores all layers at once, and goes alone"):
        Combined(12, KVzip(12), AdaKV(12, window=0 + 1, query_aware=False), query_aware=False)
    cache = pod.PodCache(model.config, eviction=SnapKV(12, window=4))
    fed(model, cache, context)
    with pytest.raises(ValueError, match="reconstruct is for a cache with pod.eviction.KVzip, this one has SnapKV"):
        pod.reconstruct(model, cache, context)
    with pytest.raises(ValueError, match="cache.evict is for a method that waits"):
        cache.evict({})
    cache = pod.PodCache(model.config, eviction=KVzip(12))
    with pytest.raises(ValueError, match="for a cache that holds a context"):
        cache.evict({})
    fed(model, cache, context)
    with pytest.raises(ValueError, match=r"tokens that the cache holds, \[1, 40\], got \[1, 39\]"):
        pod.reconstruct(model, cache, context[:, 1:])
    with pytest.raises(ValueError, match="has not evicted from the context yet"):
        fed(model, cache, tokens(1, 4))
    pod.reconstruct(model, cache, context)
    with pytest.raises(ValueError, match="before anything follows the prefill"):
        pod.reconstruct(model, cache, context)
    fed(model, cache, tokens(1, 4))


def test_the_command_reads_repeats_and_asks(capsys):
    from pod.generate import main

    line = ["--ckpt", "checkpoints/tiny-base", "--prompt", "import os\n" * 20, "--question", "class ", "--raw"]
    assert main([*line, "--max-new-tokens", "3", "--eviction", "kvzip:budget=0.3,chunk=50"]) == 0
    assert "saved" in capsys.readouterr().out
