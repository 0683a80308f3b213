"""The exchange around attention against one process on whole sequences. Ranks are threads here; over gloo, see
test_strategy.py."""

import threading
from dataclasses import dataclass, field

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import pod
from pod.model.sequence_parallel import SequenceGroup, SequenceShard, check_heads


@dataclass
class Board:
    """Where the threads of one group leave what they send, and how much of it there was."""

    size: int
    calls: list[int] = field(default_factory=list)  # bytes of each all-to-all of rank 0

    def __post_init__(self):
        self.barrier = threading.Barrier(self.size, timeout=60)
        self.sent = [None] * self.size


@dataclass(frozen=True)
class ThreadGroup(SequenceGroup):
    board: Board = None

    def all_to_all(self, parts):
        assert parts.is_contiguous() and len(parts) == self.size
        board = self.board
        if self.rank == 0:
            board.calls.append(parts.numel() * parts.element_size())
        board.sent[self.rank] = parts.detach()
        board.barrier.wait()
        received = torch.stack([board.sent[other][self.rank] for other in range(self.size)])
        board.barrier.wait()
        return received


def on_ranks(size, work):
    """Run `work(group)` in one thread per rank; the results in the order of ranks, and the board."""
    board, results = Board(size), [None] * size

    def run(rank):
        try:
            results[rank] = work(ThreadGroup(size, rank, None, board))
        except BaseException as error:
            results[rank] = error
            board.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
            raise result
    return results, board


def blocks_of(layers, kv_heads, seed=0):
    """Random blocks, other ones for each head, so that the ranks have other anchors."""
    generator = torch.Generator().manual_seed(seed)
    opens = torch.rand(layers, kv_heads, generator=generator) < 0.45
    opens[0] = True
    numbers = torch.where(opens, torch.arange(layers)[:, None], 0)
    return pod.LayerBlocks(numbers.cummax(dim=0).values)


def model_of(heads, kv_heads, share="scores", family="llama", layers=4):
    torch.manual_seed(1)
    classes = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    config_class, model_class = classes[family]
    config = config_class(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=6,
        initializer_range=0.3,
    )
    model = pod.convert(model_class(config), blocks_of(layers, kv_heads), sink_size=2, recent_size=4, share=share)
    return model.train()


def hidden_and_gradients(model, ids, sequence=None, probe=None, **inputs):
    """[B, T or t, hidden] and every parameter's gradient of a random projection of it."""
    for parameter in model.parameters():
        parameter.grad = None
    hidden = model.model(input_ids=ids, use_cache=False, sequence=sequence, **inputs).last_hidden_state
    part = probe if sequence is None else sequence.take(probe)
    (hidden * part).sum().backward()
    return hidden.detach(), {name: p.grad for name, p in model.model.named_parameters()}


def compare(size, heads, kv_heads, length, batch=2, checkpointing=None, share="scores", family="llama", **inputs):
    """One process on whole sequences against `size` ranks: hidden states, and the ranks' summed gradients."""
    model = model_of(heads, kv_heads, share, family)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(50, (batch, length), generator=generator)
    probe = torch.randn(batch, length, 24, generator=generator)
    if "attention_mask" in inputs:
        probe = probe * inputs["attention_mask"][..., None]
    if "document_ids" in inputs:
        probe = probe * (inputs["document_ids"] >= 0)[..., None]
    wanted, gradients = hidden_and_gradients(model, ids, probe=probe, **inputs)
    models = [model_of(heads, kv_heads, share, family) for _ in range(size)]
    if checkpointing is not None:
        for one in models:
            one.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})

    def work(group):
        return hidden_and_gradients(models[group.rank], ids, SequenceShard(length, group), probe, **inputs)

    results, board = on_ranks(size, work)
    whole = torch.cat([hidden for hidden, _ in results], dim=1)[:, :length]
    real = probe.abs().sum(dim=-1) > 0
    assert torch.linalg.norm((whole - wanted)[real]) <= 1e-5 * torch.linalg.norm(wanted[real])
    for name, gradient in gradients.items():
        if gradient is None:  # of a layer without anchors under share="kv"
            assert all(of[name] is None for _, of in results)
            continue
        got = sum(of[name] for _, of in results if of[name] is not None)
        assert torch.linalg.norm(got - gradient) <= 1e-5 * torch.linalg.norm(gradient), name
    return board


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "length"),
    [
        (2, 4, 2, 24),  # a KV head each
        (2, 4, 4, 23),  # MHA, a length that does not divide
        (2, 4, 1, 21),  # one KV head, repeated
        (4, 4, 2, 13),  # fewer KV heads than ranks; the last rank holds one real token
        (4, 8, 1, 9),  # 3 tokens a rank: the last holds filling alone
        (3, 6, 3, 3),  # one token a rank
    ],
)
def test_ranks_together_are_one_process(size, heads, kv_heads, length):
    compare(size, heads, kv_heads, length)


@pytest.mark.parametrize("backend", ["reference", "composed"])
@pytest.mark.parametrize("padding", [None, "left", "documents", "right"])
def test_masks_of_whole_sequences(backend, padding, monkeypatch):
    monkeypatch.setenv("POD_ATTENTION_BACKEND", backend)
    inputs = {}
    if padding == "left":  # one row shorter than the sinks
        inputs["attention_mask"] = (torch.arange(23) >= torch.tensor([[0], [22], [9]])).long()
    elif padding == "right":
        inputs["attention_mask"] = (torch.arange(23) < torch.tensor([[23], [1], [12]])).long()
    elif padding == "documents":  # boundaries inside and between the ranks' parts, and padding
        documents = torch.zeros(3, 23, dtype=torch.long)
        documents[0, 5:], documents[0, 12:], documents[1, 22:] = 1, 2, 1
        documents[2, 11:], documents[2, 18:] = 1, -1
        inputs["document_ids"] = documents
    compare(2, 4, 2, 23, batch=3, **inputs)


@pytest.mark.parametrize("share", ["scores", "keys", "kv"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_both_kinds_of_checkpointing(share, checkpointing):
    """Anchors that travel past recomputed layers; True is use_reentrant."""
    compare(2, 4, 2, 19, checkpointing=checkpointing, share=share)


def test_family_with_norms_of_q_and_k():
    compare(2, 4, 2, 17, family="qwen3")


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "length", "batch", "checkpointing"),
    [(2, 4, 2, 24, 1, None), (4, 4, 2, 13, 2, None), (2, 4, 1, 9, 3, False), (2, 4, 4, 8, 1, True)],
)
def test_calls_and_bytes_are_those_of_the_docstring(size, heads, kv_heads, length, batch, checkpointing):
    """Per layer, whatever the blocks share: 2 calls forward, 2 backward, 2 for a recomputation."""
    board = compare(size, heads, kv_heads, length, batch, checkpointing)
    passes, layers = 2 + (checkpointing is not None), 4
    assert len(board.calls) == 2 * passes * layers
    tokens = -(-length // size)
    one_pass = batch * tokens * 6 * 4 * (2 * heads + 2 * max(kv_heads, size))
    assert sum(board.calls) == one_pass * passes * layers


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 2), (4, 2), (2, 4), (4, 1)])
def test_layers_without_keys_exchange_queries_alone(size, kv_heads):
    """`share: kv` in pairs of layers, of which the upper one has neither keys nor values."""
    model = model_of(4, kv_heads)
    model = pod.convert(model, pod.LayerBlocks.uniform(4, kv_heads, 2), share="kv")
    ids = torch.arange(11)[None]
    wanted = model.model(ids, use_cache=False).last_hidden_state

    def work(group):
        return model.model(ids, use_cache=False, sequence=SequenceShard(11, group)).last_hidden_state

    with torch.no_grad():
        results, board = on_ranks(size, work)
    whole = torch.cat(results, dim=1)[:, :11]
    assert torch.linalg.norm(whole - wanted) <= 1e-5 * torch.linalg.norm(wanted)
    tokens = -(-11 // size)
    lower, upper = 2 * 4 + 2 * max(kv_heads, size), 2 * 4
    assert len(board.calls) == 2 * 4
    assert sum(board.calls) == tokens * 6 * 4 * (2 * lower + 2 * upper)


def test_shared_scores_cost_no_communication():
    """Blocks over all layers and blocks of one layer exchange the same bytes."""
    counts = []
    for blocks in (pod.LayerBlocks.dense(3, 2), pod.LayerBlocks([[0, 0], [0, 0], [0, 0]])):
        model = pod.convert(model_of(4, 2, layers=3), blocks, sink_size=1, recent_size=3)
        ids = torch.arange(16)[None]
        _, board = on_ranks(
            2,
            lambda group, model=model, ids=ids: model.model(ids, use_cache=False, sequence=SequenceShard(16, group)),
        )
        counts.append(board.calls)
    assert counts[0] == counts[1] and len(counts[0]) == 2 * 3


def test_bfloat16_moves_unchanged():
    q, k, v = (torch.randn(1, heads, 6, 4, dtype=torch.bfloat16) for heads in (4, 2, 2))

    def work(group):
        shard = SequenceShard(6, group)
        parts = [shard.take(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v)]
        mine = shard.to_heads(*parts)
        return mine, shard.to_tokens(mine[0])

    results, _ = on_ranks(2, work)
    for rank, (mine, back) in enumerate(results):
        for whole, part in zip((q, k, v), mine, strict=True):
            assert torch.equal(whole.chunk(2, dim=1)[rank], part)
        assert torch.equal(q[:, :, rank * 3 : rank * 3 + 3], back)


def test_heads_that_cannot_be_shared_out():
    with pytest.raises(ValueError, match="sequence_parallel_size=3 does not fit 4 query heads and 2 KV heads.*1, 2, 4"):
        check_heads(4, 2, 3)
    with pytest.raises(ValueError, match="6 query heads and 3 KV heads"):
        check_heads(6, 3, 2)
    for size in (1, 2, 4, 8, 16, 32):
        check_heads(32, 8, size)


def test_sequence_shorter_than_the_group():
    with pytest.raises(ValueError, match="3 tokens cannot be shared by 4 ranks"):
        SequenceShard(3, SequenceGroup(4, 0, None))


def test_what_a_shared_sequence_refuses():
    shard = SequenceShard(8, SequenceGroup(2, 0, None))
    model, ids = model_of(4, 2), torch.arange(8)[None]
    with pytest.raises(ValueError, match="use_cache=False"):
        model.eval().model(ids, sequence=shard, use_cache=True)
    with pytest.raises(ValueError, match="leave labels out"):
        model(ids, labels=ids, sequence=shard)
    with pytest.raises(ValueError, match="whole sequences of 8 tokens"):
        model.model(ids[:, :4], sequence=shard, use_cache=False)
