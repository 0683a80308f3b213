"""Attention over block tables against the reference on whole sequences: chunks, decoding, and both at once.

By plain torch and, in tests of the kernel, by Triton's: compiled on a GPU, else in the interpreter, which needs tens of
milliseconds for each program, so that not every case is one for it.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from pod_kernels import block_tables, reference, tables
from pod_kernels.block_tables import block_table_attention
from pod_kernels.tables import Part, Store, Tiles

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 12, 4  # no power of two where Triton's tiles are
LENGTHS = (37, 1, 23, 40, 6, 12)
QUERIES = {
    "decode": (1, 1, 1, 1, 1, 1),
    "prefill": LENGTHS,
    "chunks": (9, 1, 2, 33, 6, 5),
    "mixed": (1, 1, 12, 1, 6, 1),
    "absent": (3, 0, 1, 0, 6, 0),
}


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Those of the kernel run everywhere, and where there is a GPU they are among its tests.
of_the_kernel = pytest.mark.gpu if DEVICE.type == "cuda" else lambda test: test
SIZES = [(3, 5), (0, 1), (6, 9), (4, 64), (64, 2)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch, exact_float32):
    monkeypatch.setattr(tables, "TILE", 8)
    monkeypatch.setattr(block_tables, "PIECE", 4000)


@pytest.fixture
def kernel(monkeypatch):
    """Triton's kernel runs, in small parts; it is also seen to have run."""
    splits = pytest.importorskip("pod_kernels.triton.splits", reason="triton is not installed")
    from pod_kernels.triton import block_tables as kernels

    ran, attend = [], kernels.tiles_attention
    monkeypatch.setenv("POD_ATTENTION_BACKEND", "fused")
    monkeypatch.setattr(kernels, "tiles_attention", lambda *given: (ran.append(1), attend(*given))[1])
    monkeypatch.setattr(splits, "BLOCK", 16)
    monkeypatch.setattr(splits, "SPLITS", 2)
    yield splits
    assert ran


def in_blocks(vectors: list[Tensor], seed: int, keep=None) -> Store:
    """Vectors [S, n, D] of each request, in blocks dealt out at random; what nobody wrote is NaN.

    keep: (sinks, recent, queries of each request): only what these may see is there, as where an engine has freed the
    blocks between.
    """
    generator = torch.Generator().manual_seed(seed)
    columns = max(-(-one.shape[1] // BLOCK) for one in vectors)
    numbers = iter(torch.randperm(len(vectors) * columns, generator=generator) + 1)
    blocks = torch.full((len(vectors) * columns + 1, vectors[0].shape[0], BLOCK, DIM), float("nan"))
    store = Store(blocks.to(vectors[0].dtype), torch.zeros(len(vectors), columns, dtype=torch.int32))
    for row, one in enumerate(vectors):
        for column in range(-(-one.shape[1] // BLOCK)):
            if keep is not None:
                sinks, recent, counts = keep
                oldest = one.shape[1] - counts[row] - recent + 1
                if column * BLOCK >= sinks and (column + 1) * BLOCK <= oldest:
                    continue  # block 0, which holds NaN
            store.table[row, column] = next(numbers)
        places = torch.arange(one.shape[1])
        at = store.table[row][places // BLOCK].long() * BLOCK + places % BLOCK
        store.write(one.transpose(0, 1)[at >= BLOCK], at[at >= BLOCK])
    return Store(store.blocks.to(DEVICE), store.table.to(DEVICE))


def problem(dtype=torch.float32):
    torch.manual_seed(0)
    return [
        {
            name: torch.randn(heads, length, DIM).to(dtype)
            for name, heads in (
                ("q", HEADS),
                ("q_distant", HEADS),
                ("k", KV_HEADS),
                ("k_distant", KV_HEADS),
                ("v", KV_HEADS),
            )
        }
        for length in LENGTHS
    ]


def last(requests, name: str, counts) -> Tensor:
    """[T, H, D]: the last `counts` of each request, one request behind the other."""
    return torch.cat(
        [one[name][:, one[name].shape[1] - n :].transpose(0, 1) for one, n in zip(requests, counts, strict=True)]
    ).to(DEVICE)


def tiles_of(counts) -> list[Tiles]:
    return Tiles.of(np.cumsum([0, *counts]), np.array(LENGTHS), DEVICE)


def expected(requests, counts, **options) -> Tensor:
    outs = []
    for one, n in zip(requests, counts, strict=True):
        tensors = [
            one[name][None].float() if name in one else None for name in ("q", "k", "v", "q_distant", "k_distant")
        ]
        out = reference.shared_score_attention(*tensors, **options)
        outs.append(out[0, :, out.shape[2] - n :].transpose(0, 1))
    return torch.cat(outs).to(DEVICE)


def of_all_heads(store: Store, first: int = 0) -> list[Part]:
    return [Part(store, torch.arange(first, first + KV_HEADS, device=DEVICE), torch.arange(KV_HEADS, device=DEVICE))]


@pytest.mark.parametrize("counts", QUERIES.values(), ids=QUERIES)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "sinks{}-recent{}".format(*sizes))
@pytest.mark.parametrize("share", ["scores", "keys"])
def test_as_the_reference_on_whole_sequences(counts, sizes, share):
    check_shared(counts, sizes, share)


@of_the_kernel
@pytest.mark.parametrize(
    ("name", "sizes", "share", "splits"),
    [
        *(pytest.param("mixed", sizes, "scores", 2, marks=pytest.mark.slow) for sizes in SIZES),
        ("decode", (3, 5), "scores", 2),
        ("decode", (3, 5), "keys", 4),
        pytest.param("chunks", (3, 5), "scores", 2, marks=pytest.mark.slow),
        ("absent", (6, 9), "keys", 2),
    ],
)
def test_the_kernel_is_as_the_reference(name, sizes, share, splits, kernel, monkeypatch):
    monkeypatch.setattr(kernel, "SPLITS", splits)
    check_shared(QUERIES[name], sizes, share)


def check_shared(counts, sizes, share):
    """Keys of the anchors lie in two stores, as heads of one layer have anchors in several; near blocks are freed."""
    requests = problem()
    if share == "keys":
        for one in requests:
            one["q_distant"] = one["q"]
    values = in_blocks([one["v"] for one in requests], seed=1)
    near = in_blocks([one["k"] for one in requests], seed=2, keep=(*sizes, counts))
    anchors = [in_blocks([one["k_distant"] for one in requests], seed=seed) for seed in (3, 4)]
    distant = [
        Part(store, *torch.tensor([[head], [head]], device=DEVICE)) for head, store in zip((1, 0), anchors, strict=True)
    ]
    sink_size, recent_size = sizes
    out = block_table_attention(
        last(requests, "q", counts),
        last(requests, "q_distant", counts) if share == "scores" else None,
        of_all_heads(near),
        distant,
        of_all_heads(values),
        tiles_of(counts),
        sink_size=sink_size,
        recent_size=recent_size,
        scale=0.3,
    )
    wanted = expected(requests, counts, sink_size=sink_size, recent_size=recent_size, scale=0.3)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("counts", QUERIES.values(), ids=QUERIES)
def test_one_kind_of_pair_is_causal_attention(counts):
    check_one_kind(counts, window_only=False)


@of_the_kernel
@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_the_kernel_of_one_kind_of_pair_is_causal_attention(name, kernel):
    check_one_kind(QUERIES[name], window_only=False)


def check_one_kind(counts, *, window_only):
    """One set of keys, in blocks beside the values: attention to the window alone, or causal attention."""
    requests = problem()
    for one in requests:
        del one["q_distant"], one["k_distant"]
    keep = (3, 5, counts) if window_only else None
    both = in_blocks([torch.cat([one["v"], one["k"]]) for one in requests], seed=1, keep=keep)
    keys, values = of_all_heads(both, KV_HEADS), of_all_heads(both)
    near_and_distant = (keys, None) if window_only else (None, keys)
    sizes = {"sink_size": 3, "recent_size": 5, "scale": 0.3}
    out = block_table_attention(last(requests, "q", counts), None, *near_and_distant, values, tiles_of(counts), **sizes)
    torch.testing.assert_close(out, expected(requests, counts, window_only=window_only, **sizes), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("counts", QUERIES.values(), ids=QUERIES)
def test_without_distant_keys_it_is_window_attention(counts):
    check_one_kind(counts, window_only=True)


@of_the_kernel
@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_the_kernel_without_distant_keys_is_window_attention(name, kernel):
    check_one_kind(QUERIES[name], window_only=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_is_as_near_as_eager_half_precision(dtype):
    """At most twice the error of plain attention in the same type, both against float32."""
    counts = QUERIES["mixed"]
    requests = problem(dtype)
    stores = {
        name: in_blocks([one[name] for one in requests], seed) for seed, name in enumerate(("k", "k_distant", "v"))
    }
    near, distant, values = (of_all_heads(stores[name]) for name in ("k", "k_distant", "v"))
    queries = (last(requests, "q", counts), last(requests, "q_distant", counts))
    sizes = {"sink_size": 3, "recent_size": 5, "scale": 0.3}
    out = block_table_attention(*queries, near, distant, values, tiles_of(counts), **sizes)
    assert out.dtype == dtype
    wanted = expected(requests, counts, **sizes)
    eager = torch.cat([_eager_half(one, n, 3, 5, 0.3) for one, n in zip(requests, counts, strict=True)]).to(DEVICE)
    assert (out.float() - wanted).abs().max() <= 2 * (eager.float() - wanted).abs().max()


def _eager_half(one: dict[str, Tensor], count: int, sink_size: int, recent_size: int, scale: float) -> Tensor:
    groups, length = HEADS // KV_HEADS, one["q"].shape[1]
    k, k_distant, v = (one[name].repeat_interleave(groups, dim=0) for name in ("k", "k_distant", "v"))
    i, j = torch.arange(length)[:, None], torch.arange(length)
    logits = torch.where((j < sink_size) | (i - j < recent_size), one["q"] @ k.mT, one["q_distant"] @ k_distant.mT)
    weights = (logits * scale).masked_fill(j > i, float("-inf")).softmax(dim=-1)
    return (weights @ v)[:, length - count :].transpose(0, 1)


def test_tiles_hold_every_query_once():
    counts = QUERIES["mixed"]
    starts = np.cumsum([0, *counts])
    queries = torch.cat([some.queries for some in tiles_of(counts)])
    assert sorted(queries.tolist()) == list(range(starts[-1]))
    for some in tiles_of(counts):
        positions = (some.first[:, None] + torch.arange(some.tokens.shape[1], device=DEVICE)).flatten()[some.places]
        rows = some.rows[:, None].expand(some.tokens.shape).flatten()[some.places]
        for token, row, position in zip(some.queries.tolist(), rows.tolist(), positions.tolist(), strict=True):
            assert starts[row] <= token < starts[row + 1]
            assert position == LENGTHS[row] - counts[row] + token - starts[row]
