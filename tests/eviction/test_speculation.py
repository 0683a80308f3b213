"""Self-speculation: the text of plain decoding, samples of its distribution, a cache as if nothing was drafted."""

import copy
from itertools import product

import pytest
import torch
from tiny_models import ANCHORS, DENSE, VOCAB, assert_close, build, fed, tokens

import pod
from pod.eviction import ClusterKV, Quest, RecentReader, ShadowKV, SnapKV

READERS = {
    "quest": Quest(8, page_size=4, dense_layers=0),
    "shadowkv": ShadowKV(12, page_size=3, recent=2, outliers=0.5),
    "clusterkv": ClusterKV(9, cluster_size=4, dense_layers=0, sinks=1, recent=3),
    "recent": RecentReader(6, sinks=2),
    "share": Quest(0.3, 2),
}
MODELS = {
    "llama": ("llama", "scores", ANCHORS),
    "qwen3-keys": ("qwen3", "keys", ANCHORS),
    "dense": ("llama", "scores", DENSE),
}


def greedy(model, ids, new=16, **options):
    options = {"do_sample": False, "max_new_tokens": new, "return_dict_in_generate": True} | options
    return model.generate(ids, **options)


SOME = {
    ("quest", "llama"),
    ("shadowkv", "qwen3-keys"),
    ("clusterkv", "llama"),
    ("recent", "dense"),
    ("share", "qwen3-keys"),
}


@pytest.mark.parametrize(
    "reader, which",
    [
        pytest.param(*pair, marks=[] if pair in SOME else pytest.mark.slow, id="-".join(pair))
        for pair in product(READERS, MODELS)
    ],
)
def test_greedy_text_is_that_of_plain_decoding(reader, which):
    model, drafted, accepted = build(*MODELS[which]), 0, 0
    for seed, (length, gamma) in enumerate([(41, 4), (7, 1), (60, 12)]):
        ids = tokens(1, length, seed=seed)
        plain = greedy(model, ids)
        found = greedy(model, ids, draft=READERS[reader], num_assistant_tokens=gamma)
        assert found.sequences.tolist() == plain.sequences.tolist()
        ours, theirs = found.past_key_values, plain.past_key_values
        assert 0 <= ours.accepted <= ours.drafted and ours.drafted >= 6
        drafted, accepted = drafted + ours.drafted, accepted + ours.accepted
        # What is held is what plain decoding holds: keys and values of verification, and nothing of the drafts.
        assert ours.nbytes() == theirs.nbytes() and ours.get_seq_length() == theirs.get_seq_length()
        ahead = tokens(1, 5, seed=9)
        assert_close(fed(model, ours, ahead, chunks=(1, 3, 1)), fed(model, theirs, ahead, chunks=(1, 3, 1)))
    assert 0 < accepted < drafted  # both ends of a round were seen


@pytest.mark.parametrize("everything", [Quest(64, 4), RecentReader(64)])
def test_a_reader_that_reads_everything_is_always_right(everything):
    model, ids = build(), tokens(1, 30)
    cache = greedy(model, ids, new=21, draft=everything).past_key_values
    # The first token comes with the prompt; then rounds of four drafts and one token more.
    assert cache.accepted == cache.drafted == 16


def test_drafts_read_what_the_reader_says_and_verification_everything(monkeypatch):
    model, ids, seen = build(), tokens(1, 40), []
    paged, whole = pod.cache.slots.paged_attention, pod.cache.slots.cached_attention
    monkeypatch.setattr(pod.cache.slots, "paged_attention", lambda q, *a, **k: seen.append("few") or paged(q, *a, **k))
    monkeypatch.setattr(
        pod.cache.slots, "cached_attention", lambda q, *a, **k: seen.append(q.shape[2]) or whole(q, *a, **k)
    )
    greedy(model, ids, new=8, draft=READERS["quest"], num_assistant_tokens=3)
    layers, rounds = len(ANCHORS), []
    for first in range(0, len(seen), layers):
        (kind,) = set(seen[first : first + layers])
        rounds.append(kind)
    verified = [kind for kind in rounds if kind != "few"]
    # No draft in a round after which one token is left: that token's forward reads everything too.
    assert rounds.count("few") == sum(kind - 1 for kind in verified) and max(verified) == 4
    ends = greedy(model, ids, new=2, draft=READERS["quest"]).sequences
    assert ends.tolist() == greedy(model, ids, new=2).sequences.tolist() and seen[-layers:] == [1] * layers


@pytest.mark.slow
def test_samples_have_the_distribution_of_plain_ones():
    model, ids = build(anchors=ANCHORS, sinks=1, recent=3), tokens(1, 24, seed=3)
    options = {"do_sample": True, "top_k": 4, "temperature": 1.5, "max_new_tokens": 3}
    cache = pod.PodCache(model.config)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
    torch.manual_seed(0)
    counts, count = torch.zeros(2, VOCAB), 250
    for way, draft in enumerate((None, RecentReader(3, sinks=1))):
        for _ in range(count):
            with cache.peek():
                found = model.generate(ids, past_key_values=cache, draft=draft, **options)
            counts[way, found[0, -1]] += 1
    plain, drafted = counts
    # Two samples of one distribution: the statistic's mean is the number of tokens that were seen, less one.
    used = plain + drafted > 0
    statistic = ((plain - drafted).square() / (plain + drafted))[used].sum()
    freedom = int(used.sum()) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5
    assert drafted.sum() == count and used.sum() > 5


def test_padding_turns_ends_and_processors():
    model, ids = build(), tokens(1, 33, seed=4)
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    options = {"attention_mask": mask, "repetition_penalty": 1.3}
    plain = greedy(model, ids, **options)
    found = greedy(model, ids, draft=READERS["quest"], **options)
    assert found.sequences.tolist() == plain.sequences.tolist()
    # A further turn of several tokens on the same cache, and one of a single token.
    for more in (6, 1):
        ids = torch.cat([found.sequences, tokens(1, more, seed=more)], dim=1)
        mask = torch.cat([mask, torch.ones(1, ids.shape[1] - mask.shape[1], dtype=torch.long)], dim=1)
        cache = copy.deepcopy(found.past_key_values)
        plain = greedy(model, ids, attention_mask=mask, past_key_values=cache)
        found = greedy(model, ids, attention_mask=mask, past_key_values=found.past_key_values, draft=READERS["recent"])
        assert found.sequences.tolist() == plain.sequences.tolist()
    ids = tokens(1, 20, seed=5)
    plain = greedy(model, ids).sequences[0, 20:].tolist()
    for end in (plain[3], plain[9]):
        text = greedy(model, ids, eos_token_id=end).sequences
        assert greedy(model, ids, eos_token_id=end, draft=Quest(16, 4)).sequences.tolist() == text.tolist()


def test_heads_that_stream():
    stock = build(anchors=DENSE)
    blocks = pod.LayerBlocks([[0, -1], [0, -1], [2, 2]])
    model = pod.convert(stock, blocks, sink_size=2, recent_size=6)
    ids = tokens(1, 50)
    found = greedy(model, ids, draft=READERS["quest"])
    assert found.sequences.tolist() == greedy(model, ids).sequences.tolist()
    assert 0 < found.past_key_values.accepted < found.past_key_values.drafted


def test_what_cannot_be_is_named():
    model, ids, quest = build(), tokens(1, 20), READERS["quest"]

    def refused(message, rows=ids, draft=quest, model=model, **options):
        with pytest.raises(ValueError, match=message):
            greedy(model, rows, new=4, draft=draft, **options)

    refused("draft is for one row, and there are 2", rows=tokens(2, 20))
    refused("not for beam_search", num_beams=2)
    refused("draft must be a method that chooses what is read.*got SnapKV", draft=SnapKV(64))
    refused("draft and prompt_lookup_num_tokens are two ways", prompt_lookup_num_tokens=2)
    refused("use_cache=False has none", use_cache=False)
    refused("num_assistant_tokens=65 is more than the 64", num_assistant_tokens=65)
    for name, options in {
        "eviction=Quest": {"eviction": quest},
        "eviction=SnapKV": {"eviction": SnapKV(64, query_aware=False)},
        "tau=0.5": {"tau": 0.5},
        "quantization=": {"quantization": pod.Quantization(bits=4, residual=64)},
    }.items():
        refused(name, past_key_values=pod.PodCache(model.config, **options))
    refused("has share='window'", model=build(share="window", anchors=DENSE))
    refused("has share='kv'", model=build(share="kv"))
    for method, message in (
        (lambda: RecentReader(4), "budget must be larger than the 4 sinks"),
        (lambda: RecentReader(8, sinks=-1), "must be >= 0"),
    ):
        with pytest.raises(ValueError, match=message):
            method()
