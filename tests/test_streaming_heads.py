"""Heads that stream, against a dense attention whose mask is each head's own; what they store, and what they read."""

import copy
import math

import pytest
import torch
from test_model import VOCAB, gradients, left_padded, tiny_model, tokens
from torch import Tensor

import pod
from pod.blocks import STREAMS
from pod.cache import streams
from pod.eviction import CAKE, H2O, TOVA, AdaKV, Cascade, LMInfinite, PyramidKV, Quest, SnapKV, StreamingLLM
from pod.model.memory import Inference
from pod.model.shape import Shape
from pod_kernels import composed

SINKS, RECENT = 3, 5
# Blocks beside heads that stream in a whole layer, below a block, above one, between two of one head; a last layer
# with anchors, a sharing head and one that streams, stored in another order than theirs.
ANCHORS = [[0, 0, -1], [0, -1, -1], [-1, -1, -1], [3, 3, 3], [-1, 3, 4], [5, 3, -1]]
BLOCKS = pod.LayerBlocks(ANCHORS)
LAYERS, KV_HEADS, GROUPS = 6, 3, 2
FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
FIELDS += ("head_dim", "vocab_size", "tie_word_embeddings")
HEADS = {"num_key_value_heads": KV_HEADS, "num_attention_heads": KV_HEADS * GROUPS, "hidden_size": 96}


def stock(family="llama"):
    return tiny_model(family, num_hidden_layers=LAYERS, **HEADS)


def converted(model=None, blocks=BLOCKS, share="scores", sinks=SINKS, recent=RECENT):
    return pod.convert(model or stock(), blocks, sink_size=sinks, recent_size=recent, share=share)


class Truth(torch.nn.Module):
    """A whole model's forward by dense attention: of one row without padding, each head's mask written out."""

    def __init__(self, model, sinks, recent, share="scores"):
        super().__init__()
        self.model, self.sinks, self.recent, self.share = model, sinks, recent, share

    def forward(self, ids: Tensor) -> Tensor:
        base, config = self.model.model, self.model.config
        states, count = base.embed_tokens(ids), ids.shape[1]
        cos, sin = base.rotary_emb(states, position_ids=torch.arange(count)[None])
        at = torch.arange(count)
        causal = at[:, None] >= at
        near = (at < self.sinks) | (at[:, None] - at < self.recent)
        anchors: dict[int, tuple[Tensor, Tensor]] = {}
        for number, layer in enumerate(base.layers):
            mine, normed = layer.self_attn, layer.input_layernorm(states)
            q, k, v = (
                part(normed).view(count, -1, config.head_dim).transpose(0, 1)
                for part in (mine.q_proj, mine.k_proj, mine.v_proj)
            )
            q, k = (turned(x, cos[0], sin[0]) for x in (q, k))
            outs = []
            for head in range(len(q)):
                kv = head // GROUPS
                anchor = config.anchors[number][kv]
                own = q[head] @ k[kv].T
                if anchor == number:
                    anchors[head] = q[head], k[kv]
                if anchor == STREAMS:
                    logits = own.masked_fill(~(causal & near), -torch.inf)
                else:
                    query, key = anchors[head]
                    distant = (query if self.share == "scores" else q[head]) @ key.T
                    logits = torch.where(near, own, distant).masked_fill(~causal, -torch.inf)
                outs.append((logits / math.sqrt(config.head_dim)).softmax(-1) @ v[kv])
            states = states + mine.o_proj(torch.cat(outs, dim=-1))[None]
            states = states + layer.mlp(layer.post_attention_layernorm(states))
        return self.model.lm_head(base.norm(states))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def close(ours, theirs, tolerance=2e-4):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("share", ["scores", "keys"])
@pytest.mark.parametrize("sinks, recent, count", [(3, 5, 29), (0, 4, 17), (2, 1, 13), (4, 30, 21)])
def test_logits_and_every_gradient_are_those_of_a_dense_attention_with_masks_by_head(share, sinks, recent, count):
    model = converted(share=share, sinks=sinks, recent=recent).double()
    ids = tokens(1, count)
    ours, theirs = model(ids, use_cache=False).logits, Truth(model, sinks, recent, share)(ids)
    close(ours, theirs, 1e-9)
    mine, wanted = gradients(model, ours), gradients(model, theirs)
    assert mine.keys() == wanted.keys()
    for name, grad in wanted.items():
        close(mine[name], grad, 1e-7)


def test_left_padding_and_packed_documents_count_from_each_first_token():
    model, lengths = converted(), (23, 9)
    ids, mask, positions = left_padded(lengths, 23)
    truth = Truth(model, SINKS, RECENT)
    out = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    filled = model(ids, attention_mask=mask, position_ids=positions, use_cache=True).logits
    for row, length in enumerate(lengths):
        wanted = truth(ids[row : row + 1, -length:])[0]
        close(out[row, -length:], wanted)
        close(filled[row, -length:], wanted)
    ids = tokens(1, 31)
    documents = torch.tensor([[0] * 12 + [1] * 19])
    positions = torch.cat([torch.arange(12), torch.arange(19)])[None]
    packed = model(ids, document_ids=documents, position_ids=positions, use_cache=False).logits
    close(packed[:, :12], truth(ids[:, :12]))
    close(packed[:, 12:], truth(ids[:, 12:]))


@pytest.mark.parametrize("chunks", [(29,), (1, 28), (2, 20, 7), (12, 3, 14)])
@pytest.mark.parametrize("share", ["scores", "keys"])
def test_a_cache_gives_what_the_whole_forward_gives(share, chunks, monkeypatch):
    monkeypatch.setattr("pod.cache.streams.LEAST_CHUNK", 4)
    model, ids = converted(share=share), tokens(2, 41)
    wanted = torch.cat([Truth(model, SINKS, RECENT, share)(row[None]) for row in ids])
    cache, found, start = pod.PodCache(model.config, crop_slack=4), [], 0
    with torch.no_grad(), cache.prefill():
        for count in chunks:
            found.append(model(ids[:, start : start + count], past_key_values=cache).logits)
            start += count
    with torch.no_grad():
        found += [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(start, 41)]
    close(torch.cat(found, dim=1), wanted)
    assert cache.positions(2)[0, 1].tolist()[:12] == [0, 1, 2, *range(32, 41)]


def test_layers_of_few_heads_take_more_queries_at_once_than_others(monkeypatch):
    """Masks that layers have in common are those of all queries."""
    monkeypatch.setattr("pod_kernels.cached.MAX_LOGITS", 2 * GROUPS * 41 * 12)
    model, ids = converted(), tokens(1, 41)
    cache, found = pod.PodCache(model.config), []
    with torch.no_grad(), cache.prefill():
        found = [model(part, past_key_values=cache).logits for part in ids.split([17, 12, 12], dim=1)]
    close(torch.cat(found, dim=1), Truth(model, SINKS, RECENT)(ids))


def test_padded_rows_go_on_in_chunks_and_steps(monkeypatch):
    monkeypatch.setattr("pod.cache.streams.LEAST_CHUNK", 4)
    model, lengths = converted(), (14, 2)
    ids, mask, positions = left_padded(lengths, 14)
    more = tokens(2, 17, seed=5)
    cache, truth = pod.PodCache(model.config, crop_slack=0), Truth(model, SINKS, RECENT)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        rest = [(0, 12), *((at, at + 1) for at in range(12, 17))]
        at = torch.tensor(lengths)[:, None]
        found = [
            model(more[:, a:b], position_ids=at + torch.arange(a, b), past_key_values=cache).logits for a, b in rest
        ]
    found = torch.cat(found, dim=1)
    for row, length in enumerate(lengths):
        whole = torch.cat([ids[row, -length:], more[row]])[None]
        close(found[row], truth(whole)[0, length:])


def filled(model, count=30, **options):
    cache, ids = pod.PodCache(model.config, **options), tokens(2, count)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache, ids


def test_a_padded_turn_that_is_longer_than_the_window(monkeypatch):
    """Its row's first tokens come after many columns of padding, and still see the ring of the turn before."""
    monkeypatch.setattr(streams, "LEAST_CHUNK", 4)
    model, turns = converted(), ([10, 10], [30, 3], [1, 1], [1, 1])
    rows = [tokens(1, sum(turn[row] for turn in turns), seed=row)[0] for row in (0, 1)]
    cache, masks, outs = pod.PodCache(model.config), [], [[], []]
    with torch.no_grad():
        for number, turn in enumerate(turns):
            ids, mask, at = (torch.zeros(2, max(turn), dtype=torch.long) for _ in range(3))
            for row, count in enumerate(turn):
                start = sum(before[row] for before in turns[:number])
                ids[row, -count:], mask[row, -count:] = rows[row][start : start + count], 1
                at[row, -count:] = torch.arange(start, start + count)
            masks.append(mask)
            seen = torch.cat(masks, dim=1)
            logits = model(ids, attention_mask=seen, position_ids=at, past_key_values=cache).logits
            for row, count in enumerate(turn):
                outs[row].append(logits[row, -count:])
        for row in (0, 1):
            whole = model(rows[row][None], use_cache=False).logits[0]
            torch.testing.assert_close(torch.cat(outs[row]), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count, most", [(30, 34), (6, 34), (30, None)])
def test_bytes_are_those_of_the_formula(count, most):
    model = converted()
    cache, _ = filled(model, count, max_length=most, crop_slack=4)
    length = count if most is None else most
    near = min(length, SINKS + RECENT + 4)
    shared, streams = 3, sum(row.count(-1) for row in ANCHORS)
    anchors = LAYERS * KV_HEADS - shared - streams
    wanted = 2 * 4 * 16 * (2 * anchors * length + shared * (length + near) + 2 * streams * near)
    stored = sum(one.untyped_storage().nbytes() for one in cache.storages())
    assert stored == cache.nbytes() == wanted == cache.expected_nbytes(length, batch=2, itemsize=4)


def test_crop_reorder_save_copy_and_a_broken_forward(tmp_path, monkeypatch):
    model = converted()
    ids, truth = tokens(2, 40), Truth(model, SINKS, RECENT)
    with torch.no_grad():
        wanted = torch.cat([truth(row[None]) for row in ids])
        cache = pod.PodCache(model.config, crop_slack=6)
        model(ids[:, :25], past_key_values=cache)
        model(tokens(2, 6, seed=9), past_key_values=cache)
        cache.crop(-6)
        for held in cache.positions(2)[:, 1].tolist():  # the ring has 6 places more, which the six tokens were given
            assert held[:SINKS] == [0, 1, 2] and [at for at in held if at >= SINKS] == list(range(25 - RECENT, 25))
        close(model(ids[:, 25:28], past_key_values=cache).logits, wanted[:, 25:28])
        cache.save(tmp_path / "cache.safetensors")
        loaded = pod.PodCache.load(tmp_path / "cache.safetensors", model.config)
        turned_round = copy.deepcopy(cache)
        turned_round.reorder_cache(torch.tensor([1, 0, 1]))
        attend = pod.PodCache.attend
        monkeypatch.setattr(pod.PodCache, "attend", lambda self, at, *a: 1 / 0 if at == 4 else attend(self, at, *a))
        with pytest.raises(ZeroDivisionError):
            model(tokens(2, 2, seed=3), past_key_values=cache)
        monkeypatch.undo()
        for one, order in ((cache, [0, 1]), (loaded, [0, 1]), (turned_round, [1, 0, 1])):
            found = [model(ids[order, at : at + 1], past_key_values=one).logits for at in range(28, 33)]
            found.append(model(ids[order, 33:], past_key_values=one).logits)
            close(torch.cat(found, dim=1), wanted[order, 28:])
    with pytest.raises(ValueError, match="crop_slack"):
        cache.crop(-7)


@pytest.mark.parametrize("anchors", [[[0, -1, 0], [0, 1, 0], [0, 1, 2]], [[0, 0, 0], [0, 1, 0], [0, 1, 2]]])
def test_a_layer_whose_heads_have_other_anchors_goes_on_after_a_broken_forward(anchors, tmp_path, monkeypatch):
    """The first layer's slots have grown by then, and the others' have not."""
    model = pod.convert(tiny_model(num_hidden_layers=3, **HEADS), pod.LayerBlocks(anchors), SINKS, RECENT)
    cache, ids, attend = pod.PodCache(model.config), tokens(1, 26), pod.PodCache.attend

    def breaking(self, layer, *arguments):
        attend(self, layer, *arguments)
        raise KeyboardInterrupt

    with torch.no_grad():
        for part in (ids[:, :16], ids[:, 16:17]):
            model(part, past_key_values=cache)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(pod.PodCache, "attend", breaking)
            model(ids[:, 17:20], past_key_values=cache)
        cache.save(tmp_path / "cache.safetensors")
        steps = [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(17, 26)]
        close(torch.cat(steps, dim=1), model(ids, use_cache=False).logits[:, 17:])


def test_a_cache_file_of_other_blocks_is_refused(tmp_path):
    cache, _ = filled(converted())
    cache.save(tmp_path / "cache.safetensors")
    other = converted(blocks=pod.LayerBlocks.dense(LAYERS, KV_HEADS))
    with pytest.raises(ValueError, match="anchors"):
        pod.PodCache.load(tmp_path / "cache.safetensors", other.config)


METHODS = [
    SnapKV(14, window=4, kernel_size=3),
    PyramidKV(14, window=4, kernel_size=3, beta=2),
    AdaKV(14, window=4, kernel_size=3),
    CAKE(14, window=4, kernel_size=3),
    H2O(14),
    TOVA(14),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_others_evict_and_heads_that_stream_keep_what_they_keep(method):
    model = converted()
    cache, _ = filled(model, 40, eviction=method)
    with torch.no_grad():
        for at in range(6):
            model(tokens(2, 1, seed=at), past_key_values=cache)
    for layer, row in enumerate(ANCHORS):
        for head, anchor in enumerate(row):
            kept = cache.positions(layer)[:, head]
            if anchor == STREAMS:
                for each in kept.tolist():
                    held = [position for position in each if position >= 0]
                    assert held[:SINKS] == [0, 1, 2] and held[-RECENT:] == list(range(46 - RECENT, 46))
            else:
                assert int((kept >= 0).sum(dim=-1).max()) < 40


def test_a_model_of_blocks_of_one_layer_evicts_from_a_head_as_if_no_other_streamed():
    """The first layer's heads see the same inputs, whatever the others do."""
    streaming = [[0, -1, 0], *([layer] * 3 for layer in range(1, LAYERS))]
    kept = []
    for blocks in (pod.LayerBlocks(streaming), pod.LayerBlocks.dense(LAYERS, KV_HEADS)):
        model = converted(blocks=blocks, sinks=0)
        cache, _ = filled(model, 40, eviction=SnapKV(14, window=4, kernel_size=3))
        kept.append(cache.positions(0)[:, [0, 2], :14])
    assert torch.equal(*kept)


def test_quest_and_quantization_leave_heads_that_stream_alone():
    model, ids = converted(), tokens(2, 40)
    with torch.no_grad():
        plain, _ = filled(model, 40)
        wanted = model(ids[:, :1], past_key_values=plain).logits
        paged, _ = filled(model, 40, eviction=Quest(64, page_size=4, dense_layers=0))
        close(model(ids[:, :1], past_key_values=paged).logits, wanted)
        spec = pod.Quantization(bits=8, residual=64)
        small, _ = filled(model, 40, quantization=spec)
        close(model(ids[:, :1], past_key_values=small).logits, wanted)


def test_tau_skips_in_heads_that_share_alone():
    model = converted()
    cache, _ = filled(model, 40, tau=0.0)
    with torch.no_grad():
        model(tokens(2, 1), past_key_values=cache)
    assert cache.stats.decisions == cache.stats.skipped == 2 * GROUPS * 3


def test_prefill_reads_no_distant_key(monkeypatch):
    """Every key that a block of heads that stream looks at in a long prefill lies in a window of it, or is a sink."""
    anchors = [[0, 0, 0], [-1, -1, -1]]
    model = converted(tiny_two(), pod.LayerBlocks(anchors), sinks=2, recent=16)
    read, plain = [], streams.window_attention

    def counted(q, keys, *rest):
        read.append(q.shape[2] * keys.shape[2])
        return plain(q, keys, *rest)

    monkeypatch.setattr(streams, "window_attention", counted)
    monkeypatch.setattr(streams, "LEAST_CHUNK", 8)
    counts = []
    for length in (256, 512):
        read.clear()
        cache = pod.PodCache(model.config, crop_slack=0)
        with torch.no_grad(), cache.prefill():
            model(tokens(1, 64), past_key_values=cache)
            model(tokens(1, length, seed=2), past_key_values=cache)
        counts.append(sum(read))
    # As many pairs for each further query, however many tokens there are before it: a chunk, its window, the sinks.
    assert counts[1] - counts[0] == 256 * (8 + 16 - 1 + 2)


def tiny_two():
    return tiny_model(num_hidden_layers=2, max_position_embeddings=2048, **HEADS)


def test_a_first_prefill_multiplies_windows_and_sinks_alone(monkeypatch):
    pieces, plain = [], composed.forward_piece

    def counted(kernel, piece, *rest):
        pieces.append(piece)
        return plain(kernel, piece, *rest)

    monkeypatch.setattr(composed, "forward_piece", counted)
    model = converted(tiny_two(), pod.LayerBlocks([[0, 0, 0], [-1, -1, -1]]), sinks=2, recent=16)
    with torch.no_grad():
        model(tokens(1, 1024), past_key_values=pod.PodCache(model.config))
    dense, *windows = dict.fromkeys(pieces)  # a CPU multiplies each for some heads at a time
    assert dense.keys == dense.queries == (0, 1024) and len(windows) > 1
    for piece in windows:
        assert piece.keys == (0, 2) or piece.keys[0] >= piece.queries[0] - 15
    assert sum(piece.multiplied_pairs for piece in windows) < 1024 * (2 + 16 + 1024 // 32)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_generate_and_beams_go_on_where_the_whole_forward_does(family):
    model = converted(stock(family))
    ids = tokens(1, 20)
    out = model.generate(ids, max_new_tokens=8, do_sample=False)
    again = ids
    with torch.no_grad():
        for _ in range(8):
            again = torch.cat([again, model(again, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(out, again)
    beams = model.generate(ids, max_new_tokens=6, do_sample=False, num_beams=3)
    assert beams.shape == (1, 26) and int(beams.max()) < VOCAB


def test_what_contradicts_heads_that_stream_is_refused_by_name():
    model = converted()
    for method in (StreamingLLM(32), LMInfinite(32), Cascade(32, sinks=4)):
        with pytest.raises(ValueError, match=f"{type(method).__name__} keeps tokens by their places"):
            pod.PodCache(model.config, eviction=method)
    with pytest.raises(ValueError, match="share='kv' cannot be combined with heads that stream"):
        converted(share="kv")
    with pytest.raises(ValueError, match="share='window' has no distant tokens"):
        converted(share="window")
    with pytest.raises(ValueError, match="all heads stream"):
        pod.LayerBlocks([[-1, -1]])


def test_a_saved_model_and_its_config_keep_the_heads(tmp_path):
    model, ids = converted(), tokens(1, 25)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.config.blocks == BLOCKS and again.config.kv_saving == BLOCKS.kv_saving
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, again(ids, use_cache=False).logits)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_gradients_are_those_without(use_reentrant):
    model, ids = converted().train(), tokens(2, 19)
    wanted = gradients(model, loss_of_(model, ids))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    found = gradients(model, loss_of_(model, ids))
    for name, grad in wanted.items():
        close(found[name], grad, 1e-5)


def loss_of_(model, ids):
    return model(ids, use_cache=False).logits


@pytest.mark.parametrize("method", [None, SnapKV(14, window=4, kernel_size=3), H2O(14)], ids=["all", "snapkv", "h2o"])
def test_the_plan_of_memory_counts_what_is_stored(method):
    recent, prompt = 8, 120  # longer than sinks, recent tokens and what may be cropped
    model = converted(recent=recent)
    fields = {"model_type": "llama", **{name: getattr(model.config, name) for name in FIELDS}}
    memory = Inference(
        Shape.from_config(fields), BLOCKS, prompt, 5, SINKS, recent, eviction=method, itemsize=4, fused=False
    )
    cache = pod.PodCache(model.config, max_length=prompt + 4, eviction=method)
    with torch.no_grad():
        model(tokens(1, prompt), past_key_values=cache)
    streams = sum(one.untyped_storage().nbytes() for one in cache.storages() if one.dim() == 5)
    assert streams == 2 * 4 * 16 * int(BLOCKS.is_streaming.sum()) * memory._near
    assert memory.cache == pytest.approx(cache.nbytes(), rel=0.02)
