"""Shared-score attention: the reference against a plain loop, and the composed backend against the reference."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from pod_kernels import composed, dispatch, flash, pieces, reference
from pod_kernels.attention import shared_score_attention

HEADS, DIM = 8, 16
composed_attention = partial(shared_score_attention, backend="composed")
NAMES = ("q", "k", "v", "q_anchor", "k_anchor")

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]


def make_leaves(
    length: int,
    kv_heads: int,
    *,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> list[Tensor]:
    """q, k, v of a layer and q, k of its anchors, as leaves that want gradients."""
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, kv_heads, kv_heads, HEADS, kv_heads)
    tensors = [torch.randn(batch, count, length, DIM, generator=generator) for count in heads]
    return [tensor.to(device, dtype).requires_grad_() for tensor in tensors]


def mix_heads(leaves: list[Tensor], share: str) -> tuple[Tensor, ...]:
    """The arguments of a layer in which every other KV head is an anchor (none where there is but one)."""
    q, k, v, q_anchor, k_anchor = leaves
    kv_heads = k.shape[1]
    is_anchor = torch.arange(kv_heads, device=q.device) % 2 == 1
    k_distant = torch.where(is_anchor[:, None, None], k, k_anchor)
    if share == "keys":
        return q, k, v, q, k_distant
    is_anchor = is_anchor.repeat_interleave(HEADS // kv_heads)
    return q, k, v, torch.where(is_anchor[:, None, None], q, q_anchor), k_distant


def run(function, leaves: list[Tensor], share: str, **options) -> dict[str, Tensor]:
    """out, lse, gate and the gradient of every leaf for a fixed random output gradient."""
    for leaf in leaves:
        leaf.grad = None
    out, lse, gate = function(*mix_heads(leaves, share), return_lse=True, return_gate=True, **options)
    generator = torch.Generator().manual_seed(7)
    out.backward(torch.randn(out.shape, generator=generator).to(out))
    results = {"out": out.detach(), "lse": lse, "gate": gate}
    for name, leaf in zip(NAMES, leaves, strict=True):
        results[f"grad {name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return results


def relative(value: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of the truth; the plain norm where the truth is zero."""
    truth = truth.double()
    return ((value.double() - truth).norm() / (truth.norm().item() or 1.0)).item()


def assert_close(results: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    for name, expected in truth.items():
        value = results[name]
        assert value.shape == expected.shape and value.dtype == expected.dtype, name
        is_infinite = expected.isinf()
        assert torch.equal(value.isinf(), is_infinite), name
        error = relative(value.masked_fill(is_infinite, 0.0), expected.masked_fill(is_infinite, 0.0))
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


def lengths_around(sink_size: int, recent_size: int) -> list[int]:
    """Lengths at which the shape of the computation changes, and two long ones."""
    border = sink_size + recent_size
    return sorted({1, 2, max(sink_size, 1), max(border - 1, 1), border, border + 1, 257, 1000})


def simulate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_distant: Tensor,
    k_distant: Tensor,
    *,
    sink_size: int,
    recent_size: int,
    scale: float,
    sequences: list[list[list[int]]],
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, pair by pair. `sequences` holds, for each row, the columns of each of its sequences."""
    batch, heads, length, dim = q.shape
    group = heads // k.shape[1]
    out = torch.zeros(batch, heads, length, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, length), -math.inf, dtype=torch.float64)
    gate = torch.ones(batch, heads, length, dtype=torch.float64)
    for row in range(batch):
        for head in range(heads):
            for columns in sequences[row]:
                for i, column in enumerate(columns):
                    masses, proximal_mass = [], 0.0
                    for j, other in enumerate(columns[: i + 1]):
                        is_proximal = j < sink_size or i - j < recent_size
                        query, key = (q, k) if is_proximal else (q_distant, k_distant)
                        a, b = query[row, head, column].tolist(), key[row, head // group, other].tolist()
                        masses.append(math.exp(scale * sum(a[d] * b[d] for d in range(dim))))
                        proximal_mass += masses[-1] if is_proximal else 0.0
                    total = sum(masses)
                    for mass, other in zip(masses, columns, strict=False):
                        out[row, head, column] += mass / total * v[row, head // group, other]
                    lse[row, head, column] = math.log(total)
                    gate[row, head, column] = proximal_mass / total
    return out, lse, gate


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The tensors are tiny: threads would spend their time waiting for one another, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# The reference against the loop


@pytest.mark.parametrize("packing", ["none", "lengths", "documents"])
@pytest.mark.parametrize("sizes", [(0, 1), (2, 3), (1, 4), (20, 2)], ids=lambda s: f"sinks{s[0]}-recent{s[1]}")
def test_reference_is_the_definition(sizes: tuple[int, int], packing: str) -> None:
    length = 11
    generator = torch.Generator().manual_seed(3)
    q, k, v, q_distant, k_distant = (
        torch.randn(3, heads, length, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4, 2)
    )
    options, sequences = {}, [[list(range(length))]] * 3
    if packing == "lengths":
        options["lengths"] = torch.tensor([11, 1, 0])
        sequences = [[list(range(11))], [[10]], [[]]]
    elif packing == "documents":
        documents = [[0] * 11, [-1, -1, 0, 0, 0, 0, 0, 2, 2, 2, 2], [0] + [1] * 8 + [-1, -1]]
        options["document_ids"] = torch.tensor(documents)
        sequences = [
            [[column for column in range(length) if row[column] == document] for document in sorted(set(row) - {-1})]
            for row in documents
        ]
    shape = {"sink_size": sizes[0], "recent_size": sizes[1], "scale": 0.7}
    expected = simulate(q, k, v, q_distant, k_distant, sequences=sequences, **shape)
    results = reference.shared_score_attention(
        q, k, v, q_distant, k_distant, return_lse=True, return_gate=True, **shape, **options
    )
    for name, result, truth in zip(("out", "lse", "gate"), results, expected, strict=True):
        assert torch.equal(result.isinf(), truth.isinf()), name
        assert torch.allclose(result.double(), truth, rtol=0, atol=1e-12 if name == "out" else 1e-6), name


@pytest.mark.parametrize("backend", ["reference", "composed"])
def test_gradcheck(backend: str) -> None:
    generator = torch.Generator().manual_seed(5)
    tensors = [
        torch.randn(1, heads, 6, 2, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (2, 1, 1, 2, 1)
    ]
    lengths = torch.tensor([5])

    def attend(*inputs: Tensor) -> Tensor:
        return shared_score_attention(*inputs, sink_size=1, recent_size=2, lengths=lengths, backend=backend)

    assert torch.autograd.gradcheck(attend, tensors)


# The composed backend against the reference

GRID = [
    pytest.param(length, kv_heads, share, sizes, id=f"T{length}-Hkv{kv_heads}-{share}-sinks{sizes[0]}-recent{sizes[1]}")
    for sizes in [(4, 28), (0, 1), (3, 60)]
    for length in lengths_around(*sizes)
    for kv_heads in (1, 2, 8)
    for share in ("scores", "keys")
    # The longest length costs a second and more in the reference.
    if length < 1000 or sizes == (4, 28)
]


@pytest.mark.parametrize(("length", "kv_heads", "share", "sizes"), GRID)
def test_composed_equals_reference(length: int, kv_heads: int, share: str, sizes: tuple[int, int]) -> None:
    leaves = make_leaves(length, kv_heads, batch=1 if length == 1000 else 2)
    options = {"sink_size": sizes[0], "recent_size": sizes[1]}
    truth = run(reference.shared_score_attention, leaves, share, **options)
    results = run(composed_attention, leaves, share, **options)
    assert_close(results, truth)
    assert torch.equal(results["gate"][:, :, : sum(sizes)], torch.ones_like(results["gate"][:, :, : sum(sizes)]))


def eager_half(
    q: Tensor, k: Tensor, v: Tensor, q_distant: Tensor, k_distant: Tensor, *, sink_size: int, recent_size: int
) -> Tensor:
    """Attention as an eager model computes it in bfloat16: every product and the softmax in the inputs' dtype."""
    k, v, k_distant = (tensor.repeat_interleave(HEADS // k.shape[1], dim=1) for tensor in (k, v, k_distant))
    column = torch.arange(q.shape[2], device=q.device)
    proximal = (column < sink_size) | (column[:, None] - column < recent_size)
    logits = torch.where(proximal, q @ k.transpose(2, 3), q_distant @ k_distant.transpose(2, 3)) * DIM**-0.5
    logits = logits.masked_fill(column[:, None] < column, -torch.inf)
    return torch.softmax(logits, dim=-1) @ v


def half_errors(length: int, kv_heads: int, share: str, sizes: tuple[int, int], device: str) -> dict[str, list[float]]:
    """For the output and every gradient: the relative errors of composed and of eager bfloat16 against float32."""
    options = {"sink_size": sizes[0], "recent_size": sizes[1]}
    leaves = make_leaves(length, kv_heads, dtype=torch.bfloat16, device=device)
    truth = run(
        reference.shared_score_attention, [x.detach().float().requires_grad_() for x in leaves], share, **options
    )
    results = run(composed_attention, leaves, share, **options)

    def eager(*tensors: Tensor, return_lse: bool, return_gate: bool, **sizes: int) -> tuple[Tensor, None, None]:
        return eager_half(*tensors, **sizes), None, None

    baseline = run(eager, leaves, share, **options)
    names = [name for name in truth if name not in ("lse", "gate")]
    assert all(results[name].dtype == torch.bfloat16 for name in names)
    assert relative(results["lse"], truth["lse"]) < 1e-3 and (results["gate"] - truth["gate"]).abs().max() < 1e-3
    return {name: [relative(values[name], truth[name]) for values in (results, baseline)] for name in names}


HALF_GRID = [
    pytest.param(length, kv_heads, share, id=f"T{length}-Hkv{kv_heads}-{share}")
    for length in lengths_around(4, 28)
    for kv_heads in (1, 2, 8)
    for share in ("scores", "keys")
    if length < 1000 or share == "scores"
]


@pytest.mark.parametrize(("length", "kv_heads", "share"), HALF_GRID)
def test_composed_in_bfloat16(length: int, kv_heads: int, share: str) -> None:
    for name, (error, eager_error) in half_errors(length, kv_heads, share, (4, 28), "cpu").items():
        # 1e-6: where the true gradient is zero (one token alone), the correction leaves a rounding error in float32.
        assert error <= 2 * eager_error + 1e-6, f"{name}: {error:.1e}, eager bfloat16: {eager_error:.1e}"


@pytest.mark.parametrize("share", ["scores", "keys"])
@pytest.mark.parametrize("kv_heads", [1, 2, 8], ids=lambda n: f"Hkv{n}")
def test_left_padding(kv_heads: int, share: str) -> None:
    length, lengths = 70, [70, 2, 0, 45, 33, 45, 4]
    options = {"sink_size": 4, "recent_size": 28, "lengths": torch.tensor(lengths)}
    leaves = make_leaves(length, kv_heads, batch=len(lengths))
    truth = run(reference.shared_score_attention, leaves, share, **options)
    results = run(composed_attention, leaves, share, **options)
    assert_close(results, truth)
    for row, real in enumerate(lengths):
        padding = slice(0, length - real)
        assert (results["lse"][row, :, padding] == -torch.inf).all()
        assert (results["gate"][row, :, padding] == 1).all()
        for name in ("out", *(f"grad {name}" for name in NAMES)):
            assert (results[name][row, :, padding] == 0).all(), name


def test_padded_rows_equal_the_rows_alone() -> None:
    leaves = make_leaves(50, 2, batch=2)
    options = {"sink_size": 4, "recent_size": 10}
    padded = composed_attention(*leaves, lengths=torch.tensor([50, 41]), **options)
    alone = composed_attention(*(leaf[1:, :, 9:] for leaf in leaves), **options)
    assert torch.equal(padded[1:, :, 9:], alone)


def test_no_padding_changes_nothing() -> None:
    leaves = make_leaves(50, 2, batch=2)
    options = {"sink_size": 4, "recent_size": 10}
    plain = run(composed_attention, leaves, "scores", **options)
    full = run(composed_attention, leaves, "scores", lengths=torch.tensor([50, 50]), **options)
    assert all(torch.equal(plain[name], full[name]) for name in plain)


@pytest.mark.parametrize("backend", ["reference", "composed"])
@pytest.mark.parametrize("length", [1, 20, 32])
def test_short_sequences_are_plain_causal_attention(length: int, backend: str) -> None:
    q, k, v, q_distant, k_distant = make_leaves(length, 2, batch=2)
    options = {"sink_size": 4, "recent_size": 28, "backend": backend}
    shared = shared_score_attention(q, k, v, q_distant, k_distant, **options)
    plain = shared_score_attention(q, k, v, **options)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(shared, plain)
    assert relative(plain, expected) <= 1e-6


@pytest.mark.parametrize("backend", ["reference", "composed"])
def test_own_keys_as_distant_keys_are_plain_causal_attention(backend: str) -> None:
    q, k, v, *_ = make_leaves(100, 2)
    shared = shared_score_attention(q, k, v, q, k, sink_size=2, recent_size=6, backend=backend)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(shared.square().sum(), (q, k, v))
    expected_grads = torch.autograd.grad(expected.square().sum(), (q, k, v))
    assert relative(shared, expected) <= 1e-6
    assert all(relative(a, b) <= 1e-5 for a, b in zip(grads, expected_grads, strict=True))


def test_layouts_of_the_inputs_do_not_matter() -> None:
    leaves = make_leaves(60, 2, batch=2)
    options = {"sink_size": 2, "recent_size": 9}
    expected = composed_attention(*leaves, **options)
    expected_grads = torch.autograd.grad(expected.sum(), leaves)
    # [B, T, H, D] as projections leave it, and with the head dimension outermost.
    for order in ((0, 2, 1, 3), (3, 0, 1, 2)):
        inverse = tuple(order.index(axis) for axis in range(4))
        strided = [leaf.detach().permute(order).contiguous().permute(inverse).requires_grad_() for leaf in leaves]
        out = composed_attention(*strided, **options)
        grads = torch.autograd.grad(out.sum(), strided)  # the gradient of a sum is expanded, all strides 0
        assert relative(out, expected) <= 1e-6
        assert all(relative(a, b) <= 1e-5 for a, b in zip(grads, expected_grads, strict=True))


@pytest.mark.parametrize("wanted", [("v",), ("q_anchor",), ("k", "k_anchor")], ids="-".join)
def test_only_the_gradients_that_are_needed(wanted: tuple[str, ...]) -> None:
    leaves = make_leaves(60, 2)
    options = {"sink_size": 2, "recent_size": 9}
    truth = run(composed_attention, leaves, "scores", **options)
    for name, leaf in zip(NAMES, leaves, strict=True):
        leaf.requires_grad_(name in wanted)
    results = run(composed_attention, leaves, "scores", **options)
    for name, leaf in zip(NAMES, leaves, strict=True):
        assert (leaf.grad is not None) == (name in wanted)
        if name in wanted:
            assert torch.equal(results[f"grad {name}"], truth[f"grad {name}"])


@pytest.mark.parametrize("backend", ["reference", "composed"])
def test_lse_and_gate_carry_no_gradient(backend: str) -> None:
    leaves = make_leaves(20, 2)
    options = {"sink_size": 1, "recent_size": 3, "backend": backend}
    out, lse, gate = shared_score_attention(*leaves, return_lse=True, return_gate=True, **options)
    assert out.requires_grad and not lse.requires_grad and not gate.requires_grad
    assert lse.dtype == gate.dtype == torch.float32
    only_gate = shared_score_attention(*leaves, return_gate=True, **options)
    assert len(only_gate) == 2 and torch.equal(only_gate[1], gate)
    assert torch.equal(shared_score_attention(*leaves, **options), out)


@pytest.mark.parametrize("window_only", [False, True])
def test_gate_without_a_distant_source(window_only: bool) -> None:
    """The share of proximal keys is a matter of positions; only window attention has nothing else."""
    leaves = make_leaves(40, 2)[:3]
    options = {"sink_size": 1, "recent_size": 6, "window_only": window_only, "return_gate": True}
    out, gate = composed_attention(*leaves, **options)
    expected_out, expected = reference.shared_score_attention(*leaves, **options)
    assert relative(gate, expected) < 1e-6 and (gate[:, :, 10:].min() < 0.9) == (not window_only)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    expected_grads = torch.autograd.grad(expected_out.square().sum(), leaves)
    assert all(relative(a, b) <= 1e-5 for a, b in zip(grads, expected_grads, strict=True))


def test_autocast_leaves_float32_alone() -> None:
    leaves = make_leaves(40, 2)
    options = {"sink_size": 1, "recent_size": 6}
    expected = run(composed_attention, leaves, "scores", **options)
    with torch.autocast("cpu", torch.bfloat16):
        results = run(composed_attention, leaves, "scores", **options)
    assert all(torch.equal(results[name], expected[name]) for name in expected)


# The pieces


@pytest.mark.parametrize("window", ["bands", "native", "squares"])
@pytest.mark.parametrize("sizes", [(0, 1), (1, 1), (4, 28), (16, 8)], ids=lambda s: f"sinks{s[0]}-recent{s[1]}")
def test_pieces_cover_every_pair_once(sizes: tuple[int, int], window: str) -> None:
    sink_size, recent_size = sizes
    for length in (1, 2, 5, sink_size + recent_size, sink_size + recent_size + 1, 84, 85, 86, 100):
        column = torch.arange(length)
        distance = column[:, None] - column
        expected = torch.where((column < sink_size) | (distance < recent_size), 1, 100).masked_fill(distance < 0, 0)
        counted = torch.zeros(length, length, dtype=torch.long)
        for piece in pieces.plan(length, sink_size, recent_size, True, window):
            assert not piece.first or not counted[slice(*piece.queries)].any()
            for first in range(0, piece.chunks * piece.step or 1, piece.step or 1):
                rows, columns = (
                    slice(start + first, start + first + width)
                    for (start, _), width in zip((piece.queries, piece.keys), piece.widths, strict=True)
                )
                block = counted[rows, columns]
                t, u = torch.arange(block.shape[0])[:, None], torch.arange(block.shape[1])
                if piece.reversed:
                    t, u = t.flip(0), u.flip(0)
                visible = {
                    "full": torch.ones_like(block, dtype=torch.bool),
                    "causal": u <= t,
                    "band": (u >= t) & (u < t + recent_size),
                    "window": (u <= t) & (t - u < recent_size),
                }[piece.shape]
                assert piece.shape not in ("causal", "window") or block.shape[0] == block.shape[1] > 0
                block += visible * (100 if piece.distant else 1)
        assert torch.equal(counted, expected), length


@pytest.mark.parametrize("share", ["scores", "keys"])
@pytest.mark.parametrize("length", [57, 84, 85, 86, 150])
@pytest.mark.parametrize("kernel", ["flash_cpu", "eager"])
def test_a_window_of_squares(kernel: str, length: int, share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuDNN has it: chunks of 28, a short one, and one of a single token."""
    options = {"sink_size": 4, "recent_size": 28, "lengths": torch.tensor([length, length - 20])}
    leaves = make_leaves(length, 2, batch=2)
    truth = run(reference.shared_score_attention, leaves, share, **options)
    monkeypatch.setattr(composed, "choose_kernel", lambda q, v: kernel)
    monkeypatch.setattr(composed, "WINDOWS", {kernel: "squares"})
    monkeypatch.setattr(composed, "SMALLEST_SQUARE", 1)
    monkeypatch.setattr(composed, "FEWEST_SQUARES", 1)
    assert any(piece.reversed for piece in composed._cut(tuple(leaves), composed.Sizes(4, 28, 1.0, False))[1])
    assert_close(run(composed_attention, leaves, share, **options), truth)


@pytest.mark.parametrize("recent_size", [8, 28, 60, 4080])
@pytest.mark.parametrize("sink_size", [0, 1, 4, 16])
def test_few_pairs_are_multiplied_in_vain(sink_size: int, recent_size: int) -> None:
    for length in sorted({4 * recent_size, 4 * recent_size + 1, 100, 257, 1000, 4096, 16_384, 50_001, 131_072}):
        if length >= 4 * recent_size:
            causal = length * (length + 1) // 2
            parts = pieces.plan(length, sink_size, recent_size, distant=True)
            assert causal <= sum(piece.multiplied_pairs for piece in parts) <= 1.1 * causal, length


@pytest.mark.parametrize("kv_heads", [1, 2, 8], ids=lambda n: f"Hkv{n}")
def test_eager_kernel(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs where there is no flash attention, in chunks small enough to be several."""
    options = {"sink_size": 4, "recent_size": 28, "lengths": torch.tensor([150, 90])}
    leaves = make_leaves(150, kv_heads, batch=2)
    truth = run(reference.shared_score_attention, leaves, "scores", **options)
    monkeypatch.setattr(composed, "choose_kernel", lambda q, v: "eager")
    monkeypatch.setattr(flash, "EAGER_LOGITS", 2 * HEADS * 150 * 7)
    assert_close(run(composed_attention, leaves, "scores", **options), truth)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(run(composed_attention, leaves, "scores", **options), truth)


def test_values_of_another_dimension() -> None:
    q, k, _, q_distant, k_distant = make_leaves(50, 2)
    leaves = [q, k, torch.randn(1, 2, 50, 5, requires_grad=True), q_distant, k_distant]
    options = {"sink_size": 4, "recent_size": 10}
    truth = run(reference.shared_score_attention, leaves, "scores", **options)
    assert_close(run(composed_attention, leaves, "scores", **options), truth)


def test_named_flash_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    activated = []

    def activate(name: str) -> None:
        if name == "FA4":
            raise ModuleNotFoundError("No module named 'flash_attn'")
        activated.append(name)

    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    flash.activate_flash.cache_clear()
    for name, message in (
        ("FA9", "'FA9' does not exist: there are 'cuDNN', .*'FA3'"),
        ("FA4", "'FA4' is not installed"),
    ):
        with pytest.raises(ValueError, match=f"POD_FLASH_IMPLEMENTATION {message}"):
            flash.activate_flash(name)
    flash.activate_flash("FA3")
    flash.activate_flash("FA3")
    assert activated == ["FA3"]
    flash.activate_flash.cache_clear()


@pytest.mark.parametrize("kernel", ["flash_cuda", "cudnn"])
@pytest.mark.parametrize("shape", ["window", "causal", "full"])
def test_cuda_calls_fit_the_operations(shape: str, kernel: flash.Kernel) -> None:
    """torch's CUDA flash attention is private: its arguments and the shapes of its results, without a device."""
    num_keys = 4 if shape == "full" else 40
    q = torch.empty(2, 8, 40, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 2, num_keys, 64, dtype=torch.bfloat16, device="meta")
    piece = pieces.Piece((0, 40), (0, num_keys), shape)
    out, lse = flash.forward_piece(kernel, piece, q, k, k, None, 16, 0.1)
    assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    grads = flash.backward_piece(kernel, piece, out, q, k, k, out, lse, None, 16, 0.1)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


# Memory

MEASURE = """
import resource, sys, torch
sys.path[:0] = sys.argv[1].split(":")
from pod_kernels.attention import shared_score_attention
length = 16384
inputs = [torch.randn(1, heads, length, 64).requires_grad_() for heads in (8, 2, 2, 8, 2)]
short = [x.detach()[:, :, :300].requires_grad_() for x in inputs]
shared_score_attention(*short, sink_size=16, recent_size=40).sum().backward()
with open("/proc/self/statm") as file:
    before = int(file.read().split()[1]) * resource.getpagesize()
shared_score_attention(*inputs, sink_size=16, recent_size=4080).sum().backward()
assert all(x.grad is not None for x in inputs)
# Not ru_maxrss, which begins at the size of the process that started this one.
with open("/proc/self/status") as file:
    peak = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
print(peak - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the resident size from /proc")
def test_memory_of_a_long_sequence() -> None:
    """T = 16384, forward and backward: under 600 MB above the inputs, their gradients included."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(composed.__file__)))
    done = subprocess.run([sys.executable, "-c", MEASURE, folder], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout)
    print(f"peak above the inputs: {peak / 1e6:.0f} MB")
    assert peak < 600e6, f"{peak / 1e6:.0f} MB"


# Bad input and the choice of a backend


@pytest.mark.parametrize("backend", ["reference", "composed"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"q": torch.zeros(2, 3, 4)}, r"q and k must be \[B, heads, T, D\]", id="three-dimensions"),
        pytest.param({"q": torch.zeros(2, 3, 6, 4)}, r"query heads \(3\) must be a multiple", id="heads"),
        pytest.param({"k_distant": None}, "q_distant and k_distant come together", id="half-a-pair"),
        pytest.param({"k": torch.zeros(2, 2, 5, 4)}, "k must have shape", id="k-shape"),
        pytest.param({"v": torch.zeros(2, 1, 6, 4)}, "v must have shape", id="v-shape"),
        pytest.param({"q_distant": torch.zeros(2, 2, 6, 4)}, "q_distant must have shape", id="q_distant-shape"),
        pytest.param({"k_distant": torch.zeros(1, 2, 6, 4)}, "k_distant must have shape", id="k_distant-shape"),
        pytest.param({"v": torch.zeros(2, 2, 6, 4).double()}, "v is torch.float64 but q is torch.float32", id="dtype"),
        pytest.param({"sink_size": -1}, "sink_size must be >= 0, got -1", id="sink_size"),
        pytest.param({"recent_size": 0}, "recent_size must be >= 1 .*got 0", id="recent_size"),
        pytest.param({"lengths": torch.tensor([6])}, r"lengths must have shape \(2,\)", id="lengths-shape"),
        pytest.param({"document_ids": torch.zeros(2, 5)}, "document_ids must have shape", id="document_ids-shape"),
        pytest.param(
            {"lengths": torch.tensor([6, 6]), "document_ids": torch.zeros(2, 6)},
            "lengths or document_ids, not both",
            id="lengths-and-documents",
        ),
    ],
)
def test_bad_inputs_are_named(changes: dict, message: str, backend: str) -> None:
    arguments = {name: torch.zeros(2, heads, 6, 4) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    arguments |= {"q_distant": torch.zeros(2, 4, 6, 4), "k_distant": torch.zeros(2, 2, 6, 4)}
    arguments |= {"sink_size": 1, "recent_size": 2}
    with pytest.raises(ValueError, match=message):
        shared_score_attention(**(arguments | changes), backend=backend)


@pytest.mark.parametrize("value", [-1, 7])
def test_composed_refuses_impossible_lengths(value: int) -> None:
    q = torch.zeros(2, 1, 6, 4)
    with pytest.raises(ValueError, match=rf"lengths must lie in 0\.\.6.*row 1 has {value}"):
        composed_attention(q, q, q, sink_size=1, recent_size=2, lengths=torch.tensor([6, value]))


def test_unknown_backend_names_the_closest() -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="did you mean 'composed'.*'auto', 'reference', 'composed'"):
        shared_score_attention(q, q, q, sink_size=1, recent_size=2, backend="compose")


def test_auto_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    assert dispatch.resolve_backend("auto") == "composed"
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    assert dispatch.resolve_backend("auto") == "reference"
    assert dispatch.resolve_backend("composed") == "composed"
    monkeypatch.setenv(dispatch.VARIABLE, "referense")
    with pytest.raises(ValueError, match="POD_ATTENTION_BACKEND 'referense'.*did you mean 'reference'"):
        dispatch.resolve_backend("auto")


PACKED = [
    [0] * 70 + [1] + [2] * 33 + [5] * 46,
    [-1] * 9 + [0] * 61 + [1] + [2] * 33 + [3] * 46,  # three documents in the columns of the row before
    [4] * 150,
    [0] * 3 + [1] * 120 + [-1] * 27,
    [-1] * 150,
]


@pytest.mark.parametrize("share", ["scores", "keys"])
@pytest.mark.parametrize("kv_heads", [1, 2, 8], ids=lambda n: f"Hkv{n}")
def test_packed_documents(kv_heads: int, share: str) -> None:
    leaves = make_leaves(150, kv_heads, batch=5)
    options = {"sink_size": 4, "recent_size": 28, "document_ids": torch.tensor(PACKED)}
    truth = run(reference.shared_score_attention, leaves, share, **options)
    assert_close(run(composed_attention, leaves, share, **options), truth)


def test_packed_documents_lse_and_gate() -> None:
    leaves = [leaf.detach() for leaf in make_leaves(150, 2, batch=5)]
    options = {"sink_size": 4, "recent_size": 28, "document_ids": torch.tensor(PACKED)}
    options |= {"return_lse": True, "return_gate": True}
    ours, theirs = (function(*leaves, **options) for function in (composed_attention, reference.shared_score_attention))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_rows_of_one_document_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = make_leaves(60, 2, batch=2)
    plain = composed_attention(*leaves, sink_size=2, recent_size=9)
    calls = []
    forward = composed._forward
    monkeypatch.setattr(composed, "_forward", lambda *args: calls.append(args[0][0].shape) or forward(*args))
    ids = torch.tensor([[3] * 60, [0] * 60])
    assert torch.equal(composed_attention(*leaves, sink_size=2, recent_size=9, document_ids=ids), plain)
    assert [tuple(shape[:1]) for shape in calls] == [(2,)]
    ids = torch.tensor([[0] * 20 + [1] * 40, [7] * 20 + [9] * 40])
    composed_attention(*leaves, sink_size=2, recent_size=9, document_ids=ids)
    assert [shape[2] for shape in calls[1:]] == [20, 40]


def test_document_ids_that_decrease_are_refused() -> None:
    q = torch.zeros(2, 1, 4, 4)
    ids = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0]])
    with pytest.raises(ValueError, match="must not decrease: row 1 has 0 after 1"):
        composed_attention(q, q, q, sink_size=1, recent_size=2, document_ids=ids)


# On a GPU


class TestOnGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("kv_heads", [1, 2, 8], ids=lambda n: f"Hkv{n}")
    @pytest.mark.parametrize("length", lengths_around(4, 28), ids=lambda n: f"T{n}")
    def test_bfloat16(self, length: int, kv_heads: int) -> None:
        for share in ("scores", "keys"):
            for name, (error, eager_error) in half_errors(length, kv_heads, share, (4, 28), "cuda").items():
                assert error <= 2 * eager_error + 1e-6, f"{name}: {error:.1e}, eager bfloat16: {eager_error:.1e}"

    @pytest.mark.parametrize("kv_heads", [1, 2, 8], ids=lambda n: f"Hkv{n}")
    @pytest.mark.parametrize("length", lengths_around(4, 28), ids=lambda n: f"T{n}")
    def test_float32(self, length: int, kv_heads: int, exact_float32) -> None:
        leaves = make_leaves(length, kv_heads, batch=2, device="cuda")
        options = {"sink_size": 4, "recent_size": 28, "lengths": torch.tensor([length, length // 2], device="cuda")}
        truth = run(reference.shared_score_attention, leaves, "scores", **options)
        assert_close(run(composed_attention, leaves, "scores", **options), truth)

    @pytest.mark.parametrize("kv_heads", [2, 8], ids=lambda n: f"Hkv{n}")
    def test_cudnn(self, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its backward is given the merged output and log-sum-exp, as flash attention's is."""
        monkeypatch.setenv(flash.FLASH_VARIABLE, flash.CUDNN)
        monkeypatch.setattr(composed, "SMALLEST_SQUARE", 1)
        for length in (700, 640, 641, 133):
            for name, (error, eager_error) in half_errors(length, kv_heads, "scores", (4, 128), "cuda").items():
                assert error <= 2 * eager_error + 1e-6, f"{name}: {error:.1e}, eager bfloat16: {eager_error:.1e}"
