"""The fused Triton kernels against the reference: under triton's interpreter without a GPU, compiled with one."""

import ast
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pod_kernels import attention, dispatch, reference, shared_score_attention
from pod_kernels.attention import sequence_spans

triton = pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")
import triton.language as tl  # noqa: E402

from pod_kernels.triton import fused, fused_tiles  # noqa: E402

fused_attention = partial(shared_score_attention, backend="fused")
ROOT = Path(__file__).parents[2]
NAMES = ("q", "k", "v", "q_distant", "k_distant")
slow = pytest.mark.slow
interpreted = pytest.mark.skipif(
    not fused.INTERPRETED, reason="with a GPU, TestOnGpu runs the compiled kernels instead"
)
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch):
    """Tiles small enough for the interpreter: queries by keys."""

    def use(query_tile: int, key_tile: int) -> None:
        launch = fused.Launch(query_tile, key_tile, 4, 1)
        monkeypatch.setattr(fused, "launch_of", lambda *_: launch)

    # Two heads of 50 float32 tokens of dimension 16 at once, so that three are no multiple.
    monkeypatch.setattr(fused, "SECTION_BYTES", 2 * 3 * 50 * 16 * 4)
    use(32, 32)
    return use


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel does not write is NaN."""
    for name in ("_empty", "_empty_like"):
        allocate = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *args, allocate=allocate: allocate(*args).fill_(torch.nan))


def make_leaves(
    length: int,
    heads: tuple[int, int] = (2, 1),
    *,
    dim: int = 16,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[Tensor]:
    """q, k, v, q_distant, k_distant as leaves; heads: of queries, of keys."""
    generator = torch.Generator().manual_seed(length)
    counts = (heads[0], heads[1], heads[1], heads[0], heads[1])
    tensors = [torch.randn(batch, count, length, dim, generator=generator) for count in counts]
    return [tensor.to(device, dtype).requires_grad_() for tensor in tensors]


def run(function, leaves: list[Tensor], **options) -> dict[str, Tensor]:
    """out, lse, gate and the gradient of every leaf for a fixed random output gradient, NaN at padding."""
    for leaf in leaves:
        leaf.grad = None
    out, lse, gate = function(*leaves, return_lse=True, return_gate=True, **options)
    assert out.dtype == leaves[0].dtype and not lse.requires_grad and not gate.requires_grad
    generator = torch.Generator().manual_seed(7)
    out.backward(torch.randn(out.shape, generator=generator).to(out).masked_fill(lse.isinf()[..., None], torch.nan))
    results = {"out": out.detach(), "lse": lse, "gate": gate}
    grads = {f"grad {name}": leaf.grad for name, leaf in zip(NAMES, leaves, strict=False)}
    return results | {name: grad for name, grad in grads.items() if grad is not None}


def relative(value: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of the truth; the plain norm where the truth is zero."""
    truth = truth.double()
    return ((value.double() - truth).norm() / (truth.norm().item() or 1.0)).item()


def assert_close(results: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert results.keys() == truth.keys()
    for name, expected in truth.items():
        value = results[name]
        assert value.shape == expected.shape and value.dtype == expected.dtype, name
        is_infinite = expected.isinf()
        assert torch.equal(value.isinf(), is_infinite), name
        error = relative(value.masked_fill(is_infinite, 0.0), expected.masked_fill(is_infinite, 0.0))
        # 1e-6: one token alone has no gradient but a rounding error.
        assert error <= max(tolerance, 1e-6), f"{name}: relative error {error:.1e}"


def assert_reference(leaves: list[Tensor], **options) -> dict[str, Tensor]:
    results = run(fused_attention, leaves, **options)
    assert_close(results, run(reference.shared_score_attention, leaves, **options))
    return results


# Which tiles are visited


@triton.jit
def runs_of_tiles(
    spans, runs, length, S, R,
    QUERY_TILE: tl.constexpr, KEY_TILE: tl.constexpr, SPANS: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    """Sixteen numbers for each tile of queries (or of keys): the runs of the distant, then of the proximal source."""
    tile = tl.program_id(0)
    TILE: tl.constexpr = KEY_TILE if OF_KEYS else QUERY_TILE
    own = fused_tiles.tokens(spans, tile * 0, tile * TILE, length, TILE, SPANS)
    if OF_KEYS:
        stops, stop = own[0], length
        if SPANS:
            stops = tl.load(spans + length + own[0], mask=own[0] < length, other=0)
            stop = tl.max(stops, 0)
        far, far_plain = fused_tiles.distant_queries(own, stops, stop, S, R, QUERY_TILE, SPANS)
        near, near_plain = fused_tiles.proximal_queries(own, stop, S, R, QUERY_TILE)
    else:
        far, far_plain = fused_tiles.distant_keys(own, S, R, KEY_TILE, SPANS)
        near, near_plain = fused_tiles.proximal_keys(own, S, R, KEY_TILE, SPANS)
    runs += tile * 16
    for place in tl.static_range(6):
        tl.store(runs + place, far[place])
        tl.store(runs + 8 + place, near[place])
    for place in tl.static_range(2):
        tl.store(runs + 6 + place, far_plain[place])
        tl.store(runs + 14 + place, near_plain[place])


def assert_tiles(length: int, sizes: tuple[int, int], shape: tuple[int, int], ids: list[int] | None) -> None:
    """The runs of every tile against a count of the pairs."""
    documents = None if ids is None else torch.tensor([ids])
    positions, which = reference.positions_and_documents(1, length, None, documents, torch.device("cpu"))
    positions, which, column = positions[0], which[0], torch.arange(length)
    visible = (column[:, None] >= column) & (which[:, None] == which) & (which >= 0)
    proximal = (positions < sizes[0]) | (positions[:, None] - positions < sizes[1])
    spans = sequence_spans(1, length, None, documents, torch.device("cpu"))
    for of_keys in (False, True):
        own, other = shape[::-1] if of_keys else shape
        count = -(-length // own)
        runs = torch.full((count, 2, 8), -1, dtype=torch.int32)
        runs_of_tiles[(count,)](
            column if spans is None else spans, runs, length, *sizes,
            QUERY_TILE=shape[0], KEY_TILE=shape[1], SPANS=spans is not None, OF_KEYS=of_keys,
        )  # fmt: skip
        for source, wanted in enumerate((visible & ~proximal, visible & proximal)):
            pairs = wanted.T if of_keys else wanted
            for tile in range(count):
                rows = slice(tile * own, (tile + 1) * own)
                real = (which[rows] >= 0)[:, None]
                blocks = pairs[rows].split(other, dim=1)
                expected = [number for number, block in enumerate(blocks) if block.any()]
                numbers = runs[tile, source].tolist()
                ranges = [range(first, first + many) for first, many in zip(numbers[::2], numbers[1::2], strict=True)]
                where = f"tile {tile} of {'keys' if of_keys else 'queries'}, source {source}: {ranges}"
                assert sorted(number for run in ranges for number in run) == expected, where
                # Plain tiles need no mask; distant ones, nearly all of a long sequence, are never masked in vain.
                plain = [n for n, block in enumerate(blocks) if (block | ~real).all() and block.shape[1] == other]
                assert set(ranges[3]) <= set(plain), where
                if source == 0 and ids is None:
                    assert set(ranges[3]) == set(plain) & set(expected), where


DOCUMENTS = [-1] * 5 + [0] * 41 + [1] + [4] * 9 + [5] * 37 + [-1] * 7


@interpreted
@pytest.mark.parametrize("ids", [None, DOCUMENTS], ids=["one", "documents"])
@pytest.mark.parametrize("sizes", [(3, 7), (0, 33)], ids=lambda s: f"sinks{s[0]}-recent{s[1]}")
def test_no_tile_is_empty_and_none_is_left_out(sizes: tuple[int, int], ids: list[int] | None) -> None:
    assert_tiles(100, sizes, (32, 16), ids)


@slow
@interpreted
@pytest.mark.parametrize("shape", [(32, 16), (16, 32), (16, 16)], ids=str)
@pytest.mark.parametrize("sizes", [(0, 1), (16, 64), (40, 5), (1, 16)], ids=lambda s: f"sinks{s[0]}-recent{s[1]}")
def test_tiles_of_random_documents(sizes: tuple[int, int], shape: tuple[int, int]) -> None:
    assert_tiles(97, sizes, shape, None)
    generator = torch.Generator().manual_seed(sum(sizes) + shape[0])
    lengths = torch.randint(1, 50, (20,), generator=generator).tolist()
    ids = [document for document, count in enumerate(lengths) for _ in range(count)]
    assert_tiles(97, sizes, shape, [-1] * sizes[0] + ids[: 97 - sizes[0] - 3] + [-1] * 3)


# Against the reference


@interpreted
@pytest.mark.parametrize(
    ("length", "heads", "sizes"),
    [
        pytest.param(1, (2, 1), (3, 7), id="T1"),
        pytest.param(17, (1, 1), (0, 1), id="T17"),
        pytest.param(65, (2, 1), (3, 7), id="T65"),
        pytest.param(40, (4, 2), (3, 64), id="shorter-than-the-window"),
        *(
            pytest.param(length, heads, (sinks, recent), marks=slow, id=f"T{length}-S{sinks}-R{recent}-H{heads}")
            for length, heads in ((17, (4, 1)), (65, (2, 2)), (100, (2, 1)))
            for sinks, recent in ((0, 1), (0, 7), (3, 1), (3, 64), (16, 7), (16, 64))
        ),
    ],
)
def test_reference(length: int, heads: tuple[int, int], sizes: tuple[int, int], tiles, poisoned) -> None:
    leaves = make_leaves(length, heads)
    results = assert_reference(leaves, sink_size=sizes[0], recent_size=sizes[1])
    assert (results["gate"][:, :, : sum(sizes)] == 1).all()


LENGTHS = {"lengths": torch.tensor([50, 0, 21])}
PACKED = {"document_ids": torch.tensor([[0] * 20 + [1] + [3] * 25 + [-1] * 4, [-1] * 7 + [0] * 43, [-1] * 50])}


@interpreted
@pytest.mark.parametrize("spans", [LENGTHS, PACKED], ids=["lengths", "documents"])
@pytest.mark.parametrize("shape", [(32, 32), pytest.param((32, 16), marks=slow), pytest.param((16, 32), marks=slow)])
def test_padding_and_documents(spans: dict, shape: tuple[int, int], tiles, poisoned) -> None:
    tiles(*shape)
    leaves = make_leaves(50, (1, 1), batch=3)
    results = assert_reference(leaves, sink_size=3, recent_size=7, **spans)
    _, which = reference.positions_and_documents(3, 50, **{"lengths": None, "document_ids": None} | spans, device="cpu")
    is_padding = (which < 0)[:, None]
    assert (results["lse"][is_padding] == -torch.inf).all() and (results["gate"][is_padding] == 1).all()
    for name in ("out", *(f"grad {name}" for name in NAMES)):
        assert (results[name][is_padding] == 0).all(), name


@interpreted
@pytest.mark.parametrize("window_only", [True, False], ids=["window", "causal"])
@pytest.mark.parametrize("spans", [{}, pytest.param(PACKED, marks=slow)], ids=["one", "documents"])
def test_without_a_distant_source(window_only: bool, spans: dict, tiles, poisoned) -> None:
    leaves = make_leaves(50, (2, 1), batch=3 if spans else 1)[:3]
    assert_reference(leaves, sink_size=2, recent_size=9, window_only=window_only, **spans)
    out, lse = fused_attention(*leaves, sink_size=2, recent_size=9, window_only=window_only, return_lse=True, **spans)
    expected = run(
        reference.shared_score_attention, leaves, sink_size=2, recent_size=9, window_only=window_only, **spans
    )
    assert relative(out, expected["out"]) < 1e-5 and torch.equal(lse.isinf(), expected["lse"].isinf())


@interpreted
def test_an_anchor_gets_the_gradients_of_both_sources(tiles, poisoned) -> None:
    q, k, v, *_ = make_leaves(40, (1, 1))
    shared = shared_score_attention(q, k, v, q, k, sink_size=2, recent_size=6, backend="fused")
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(shared.square().sum(), (q, k, v))
    expected_grads = torch.autograd.grad(expected.square().sum(), (q, k, v))
    assert relative(shared, expected) <= 1e-6
    assert all(relative(a, b) <= 1e-5 for a, b in zip(grads, expected_grads, strict=True))


@interpreted
@pytest.mark.parametrize("dim", [24, *(pytest.param(dim, marks=slow) for dim in (64, 96, 128, 256))])
def test_head_dimensions(dim: int, tiles, poisoned) -> None:
    assert_reference(make_leaves(20, (1, 1), dim=dim), sink_size=1, recent_size=5, scale=0.3)


@interpreted
@pytest.mark.parametrize("order", [(0, 2, 1, 3), pytest.param((3, 0, 1, 2), marks=slow)], ids=["BTHD", "DBHT"])
def test_layouts_of_the_inputs_do_not_matter(order: tuple[int, ...], tiles, poisoned) -> None:
    leaves = make_leaves(20, (2, 2), batch=2)
    inverse = tuple(order.index(axis) for axis in range(4))
    strided = [leaf.detach().permute(order).contiguous().permute(inverse).requires_grad_() for leaf in leaves]
    options = {"sink_size": 2, "recent_size": 9}
    out = fused_attention(*strided, **options)
    grads = torch.autograd.grad(out.sum(), strided)  # the gradient of a sum is expanded, all strides 0
    expected = reference.shared_score_attention(*leaves, **options)
    expected_grads = torch.autograd.grad(expected.sum(), leaves)
    assert relative(out, expected) <= 1e-6
    assert all(relative(a, b) <= 1e-5 for a, b in zip(grads, expected_grads, strict=True))


def eager_half(
    q: Tensor, k: Tensor, v: Tensor, q_distant: Tensor, k_distant: Tensor, *, sink_size: int, recent_size: int, **_
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention as an eager model computes it: every product and the softmax in the inputs' dtype."""
    group = q.shape[1] // k.shape[1]
    k, v, k_distant = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v, k_distant))
    column = torch.arange(q.shape[2], device=q.device)
    proximal = (column < sink_size) | (column[:, None] - column < recent_size)
    logits = torch.where(proximal, q @ k.transpose(2, 3), q_distant @ k_distant.transpose(2, 3)) * q.shape[3] ** -0.5
    logits = logits.masked_fill(column[:, None] < column, -torch.inf)
    nothing = torch.zeros(q.shape[:3], device=q.device)
    return torch.softmax(logits, dim=-1) @ v, nothing, nothing


def assert_half(leaves: list[Tensor], **options) -> None:
    """Every error against float32 is at most twice that of an eager model in the leaves' dtype."""
    single = [leaf.detach().float().requires_grad_() for leaf in leaves]
    truth = run(reference.shared_score_attention, single, **options)
    results = run(fused_attention, leaves, **options)
    baseline = run(eager_half, leaves, **options)
    assert relative(results["lse"], truth["lse"]) < 1e-3 and (results["gate"] - truth["gate"]).abs().max() < 1e-3
    for name in (name for name in truth if name not in ("lse", "gate")):
        error, allowed = (relative(values[name], truth[name]) for values in (results, baseline))
        assert error <= 2 * allowed + 1e-6, f"{name}: {error:.1e}, eager: {allowed:.1e}"


@interpreted
@pytest.mark.parametrize("length", [33, pytest.param(100, marks=slow)])
def test_float16(length: int, tiles, poisoned) -> None:
    assert_half(make_leaves(length, dtype=torch.float16), sink_size=3, recent_size=7)


@interpreted
def test_only_the_gradients_that_are_needed(tiles) -> None:
    leaves = make_leaves(20)
    truth = run(reference.shared_score_attention, leaves, sink_size=1, recent_size=4)
    for name, leaf in zip(NAMES, leaves, strict=True):
        leaf.requires_grad_(name in ("k", "q_distant"))
    results = run(fused_attention, leaves, sink_size=1, recent_size=4)
    assert {name for name in results if "grad" in name} == {"grad k", "grad q_distant"}
    assert all(relative(results[name], truth[name]) < 1e-5 for name in results if "grad" in name)


@interpreted
@pytest.mark.parametrize("shape", [(0, 5), (1, 0)], ids=["no-rows", "no-tokens"])
def test_nothing_to_do(shape: tuple[int, int]) -> None:
    leaves = make_leaves(shape[1], batch=shape[0])
    results = run(fused_attention, leaves, sink_size=1, recent_size=4)
    assert results["out"].shape == leaves[0].shape and results["grad k_distant"].shape == leaves[4].shape


@slow
@interpreted
def test_checkpointing_and_compiling_change_nothing(tiles) -> None:
    leaves = make_leaves(20, (1, 1))

    def attend(*tensors: Tensor) -> Tensor:
        return shared_score_attention(*tensors, sink_size=1, recent_size=4, backend="fused") * 2

    def checkpointed(*tensors: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(attend, *tensors, use_reentrant=False)

    expected = attend(*leaves)
    expected_grads = torch.autograd.grad(expected.sum(), leaves)
    for function in (checkpointed, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        out = function(*leaves)
        assert torch.equal(out, expected)
        grads = torch.autograd.grad(out.sum(), leaves)
        assert all(torch.equal(a, b) for a, b in zip(grads, expected_grads, strict=True))


@slow
@interpreted
def test_operations_keep_the_rules_of_torch(tiles) -> None:
    torch.library.opcheck(fused._forward, (*make_leaves(9, (1, 1)), None, 1, 3, 0.25, False, True))


# What the interpreter does not show: that the kernels compile for a GPU, and fit there

COMPILE = """
import os, sys
os.environ.pop("TRITON_INTERPRET", None)
sys.path[:0] = sys.argv[1].split(":")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pod_kernels.triton import fused, fused_tiles

TENSOR = ("*bf16", "i32", "i32", "i32")  # and its strides
GIVEN = {
    "forward": {"results": (TENSOR, "*fp32", "*fp32")},
    "query_grad": {"known": (TENSOR, TENSOR, "*fp32", "*fp32"), "grads": (TENSOR, TENSOR)},
    "key_grad": {"known": (TENSOR, "*fp32", "*fp32"), "grads": (TENSOR, TENSOR, TENSOR)},
}


def numbers(kind, *place):
    # Where the pointers and numbers of an argument are, one inside another.
    if not isinstance(kind, tuple):
        return [place]
    return [found for at, part in enumerate(kind) for found in numbers(part, *place, at)]


for name, kernel in fused.KERNELS.items():
    launch = fused.LAUNCHES[name, 128].hopper
    cut = fused_tiles.Tiles(128, 128, launch.query_tile, launch.key_tile)
    constants = {"CUT": cut, "DISTANT": True, "SPANS": True, "GATE": True}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    tensors = {"inputs": (TENSOR,) * 5, "spans": "*i32", **GIVEN[name]}
    types, aligned = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        types[argument] = "constexpr" if argument in constants else "fp32" if argument == "scale" else "i32"
        if argument in tensors:
            types[argument] = tensors[argument]
            aligned |= dict.fromkeys(numbers(tensors[argument], place), [["tt.divisibility", 16]])
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(name, compiled.metadata.shared, compiled.asm["ptx"].count("wgmma.mma_async"))
"""


@slow
def test_kernels_compile_for_hopper_and_fit() -> None:
    """No GPU is needed to compile. A block of compute capability 9.0 has 227 KB of shared memory."""
    folder = str(Path(fused.__file__).resolve().parents[2])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, folder], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == list(fused.KERNELS)
    for name, shared, products in lines:
        assert int(shared) <= 227 * 1024, name
        assert int(products) > 0, f"{name} does not use Hopper's matrix instructions"


# The choice of a backend


def test_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 1, 4, 16)
    options = {"sink_size": 1, "recent_size": 2, "backend": "fused"}
    for changed, reason in (
        (q.double(), "q is torch.float64"),
        (torch.zeros(1, 1, 4, 512), "head dimensions end at 256, and q has 512"),
    ):
        with pytest.raises(ValueError, match=f"backend 'fused' cannot run this: .*{reason}.*'composed'"):
            shared_score_attention(changed, changed, changed, **options)
    monkeypatch.setattr(fused, "INTERPRETED", True)
    with pytest.raises(ValueError, match="scale must be positive, and is -1.0"):
        shared_score_attention(q, q, q, scale=-1.0, **options)
    with pytest.raises(ValueError, match="interpreter .* multiplies bfloat16 wrongly"):
        shared_score_attention(*[q.bfloat16()] * 3, **options)
    monkeypatch.setattr(fused, "INTERPRETED", False)
    with pytest.raises(ValueError, match="needs a CUDA device, and q is on cpu"):
        shared_score_attention(q, q, q, **options)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    import pod_kernels.triton

    # None in sys.modules is a module that cannot be imported; the package's attribute would answer without importing.
    monkeypatch.delattr(pod_kernels.triton, "fused")
    monkeypatch.delitem(sys.modules, "pod_kernels.triton.fused")
    monkeypatch.setitem(sys.modules, "triton", None)
    q = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ValueError, match="backend 'fused' needs triton: pip install triton"):
        shared_score_attention(q, q, q, sink_size=1, recent_size=2, backend="fused")
    shared_score_attention(q, q, q, sink_size=1, recent_size=2)


def test_auto_takes_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    shapes = dispatch.ShapeClass("a GPU", "bfloat16", 128, 4096, "training")
    monkeypatch.setattr(dispatch, "_fixed", {shapes: dispatch.Choice("fused")})
    assert dispatch.resolve_backend("auto", shapes) == "fused"
    others = {"gpu": "another", "dtype": "float16", "head_dim": 64, "length": 16_384, "work": "forward"}
    for other in (None, *(shapes._replace(**{name: value}) for name, value in others.items())):
        assert dispatch.resolve_backend("auto", other) == "composed"
    assert dispatch.resolve_backend("reference", shapes) == "reference"
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    assert dispatch.resolve_backend("auto", shapes) == "reference"


def test_classes_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name = "a GPU"

    class Queries:
        device, dtype, shape = torch.device("cuda"), torch.bfloat16, (1, 8, 5000, 128)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert dispatch.shape_class(Queries, "training") == dispatch.ShapeClass("a GPU", "bfloat16", 128, 4096, "training")
    Queries.shape = (1, 8, 1, 64)
    assert dispatch.shape_class(Queries, "forward") == dispatch.ShapeClass("a GPU", "bfloat16", 64, 0, "forward")
    Queries.shape = (9000, 64)
    assert dispatch.shape_class(Queries, "decode") == dispatch.ShapeClass("a GPU", "bfloat16", 64, 0, "decode")
    assert dispatch.shape_class(torch.zeros(1, 1, 4, 16), "training") is None


def test_names_of_backends() -> None:
    assert dispatch.NAMES == tuple(attention.BACKENDS)


def test_triton_is_imported_by_nothing_else() -> None:
    code = "import sys, pod_kernels; sys.exit('triton' in sys.modules)"
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "kernels"))
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=120).returncode == 0
    for path in (*(ROOT / "pod").rglob("*.py"), *(ROOT / "kernels/pod_kernels").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "triton" for name in names), path


# On a GPU


class TestOnGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("dim", [64, 96, 128, 256])
    def test_bfloat16(self, dim: int, poisoned) -> None:
        assert_half(
            make_leaves(4096 + 77, (8, 2), dim=dim, dtype=torch.bfloat16, device="cuda"), sink_size=16, recent_size=1008
        )

    @pytest.mark.parametrize("sizes", [(0, 1), (3, 64), (128, 512)], ids=lambda s: f"sinks{s[0]}-recent{s[1]}")
    @pytest.mark.parametrize(("heads", "dtype"), [((4, 1), torch.bfloat16), ((4, 4), torch.float16)], ids=str)
    def test_half_of_other_sizes(self, heads, dtype, sizes, poisoned) -> None:
        leaves = make_leaves(4096, heads, dim=128, dtype=dtype, device="cuda")
        assert_half(leaves, sink_size=sizes[0], recent_size=sizes[1])

    @pytest.mark.parametrize("spans", ["none", "lengths", "documents"])
    def test_float32(self, spans: str, poisoned, exact_float32) -> None:
        length = 1500
        ids = torch.full((3, length), -1)
        ids[0, :700], ids[0, 700:], ids[1, 100:130], ids[1, 130:] = 0, 1, 4, 5
        options = {
            "none": {},
            "lengths": {"lengths": torch.tensor([length, 0, 901], device="cuda")},
            "documents": {"document_ids": ids.cuda()},
        }[spans]
        leaves = make_leaves(length, (4, 2), dim=64, batch=3, device="cuda")
        assert_reference(leaves, sink_size=16, recent_size=200, **options)

    @pytest.mark.parametrize("window_only", [True, False], ids=["window", "causal"])
    def test_without_a_distant_source(self, window_only: bool, poisoned, exact_float32) -> None:
        leaves = make_leaves(1500, (4, 2), dim=64, device="cuda")[:3]
        assert_reference(leaves, sink_size=16, recent_size=200, window_only=window_only)

    @pytest.mark.parametrize("length", [1, 17, 65, 100, 127, 128, 129])
    def test_short(self, length: int, poisoned, exact_float32) -> None:
        assert_reference(make_leaves(length, dim=64, device="cuda"), sink_size=3, recent_size=7)

    def test_the_same_input_gives_the_same_bits(self) -> None:
        leaves = make_leaves(8192, (8, 2), dim=128, batch=2, dtype=torch.bfloat16, device="cuda")
        ids = (torch.arange(8192, device="cuda") // 3000).expand(2, -1)
        options = {"sink_size": 16, "recent_size": 1008, "document_ids": ids}
        first = run(fused_attention, leaves, **options)
        for _ in range(19):
            again = run(fused_attention, leaves, **options)
            assert all(torch.equal(first[name], again[name]) for name in first)

    def test_a_tensor_of_more_than_2_to_the_31_numbers(self) -> None:
        """Offsets of rows and heads in 64 bits: the last row of a large batch equals that row alone."""
        batch, heads, length = 17, 32, 32_768
        needed = 4 * batch * heads * length * 128 * 2
        if torch.cuda.get_device_properties(0).total_memory < 1.2 * needed:
            pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory")
        q = torch.randn(batch, heads, length, 128, dtype=torch.bfloat16, device="cuda")
        k, v = torch.randn(2, batch, 1, length, 128, dtype=torch.bfloat16, device="cuda")
        options = {"sink_size": 4, "recent_size": 64, "window_only": True}
        out = fused_attention(q, k, v, **options)[-1:]
        assert torch.equal(out, fused_attention(q[-1:], k[-1:], v[-1:], **options))
