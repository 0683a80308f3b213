"""Shared-score attention in one Triton kernel over two sources of logits: launches and operations.

Never imported before it is used: importing it imports triton (the package does so when it runs it).

The kernels are `fused_forward.py` and `fused_backward.py`; `fused_tiles.py` says how the pairs are cut into tiles.
"""

import os
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from pod_kernels.attention import Problem, sequence_spans
from pod_kernels.flash import unit_stride
from pod_kernels.triton.fused_backward import key_grad_kernel, query_grad_kernel
from pod_kernels.triton.fused_forward import forward_kernel
from pod_kernels.triton.fused_tiles import Tiles
from pod_kernels.triton.reading import strided

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # as it was when the kernels were made

KERNELS = {"forward": forward_kernel, "query_grad": query_grad_kernel, "key_grad": key_grad_kernel}


class Launch(NamedTuple):
    query_tile: int
    key_tile: int
    warps: int
    stages: int


class Launches(NamedTuple):
    """What a kernel is launched with, by device and type.

    Attributes:
        hopper: half precision where a block has 227 KB of shared memory: compute capability 9.0 and 10.0.
        others: half precision on all others, where it is 99 KB or more.
        single: float32, without tensor cores, as these round to less: registers are what limits.
    """

    hopper: Launch
    others: Launch
    single: Launch


# By (kernel, head dimension rounded up to 64, 128 or 256). None was timed, as no GPU was at hand. They were chosen by
# what the compiler makes of them without one: shared memory per block, spilled registers, and the instructions that the
# plain loops take per matrix product. A timed one replaces its entry.
LAUNCHES = {
    ("forward", 64): Launches(Launch(128, 128, 8, 2), Launch(128, 64, 4, 3), Launch(32, 32, 4, 2)),
    ("forward", 128): Launches(Launch(128, 128, 8, 2), Launch(128, 32, 8, 2), Launch(32, 32, 8, 2)),
    ("forward", 256): Launches(Launch(128, 32, 8, 3), Launch(64, 32, 8, 1), Launch(16, 16, 8, 2)),
    ("query_grad", 64): Launches(Launch(128, 64, 8, 3), Launch(64, 64, 4, 2), Launch(32, 32, 8, 2)),
    ("query_grad", 128): Launches(Launch(128, 64, 8, 3), Launch(64, 32, 4, 2), Launch(32, 32, 8, 2)),
    ("query_grad", 256): Launches(Launch(128, 32, 8, 2), Launch(32, 32, 8, 1), Launch(16, 16, 8, 2)),
    ("key_grad", 64): Launches(Launch(64, 128, 8, 2), Launch(32, 128, 8, 2), Launch(32, 32, 8, 2)),
    ("key_grad", 128): Launches(Launch(64, 128, 8, 2), Launch(32, 64, 4, 2), Launch(16, 32, 8, 2)),
    ("key_grad", 256): Launches(Launch(16, 64, 8, 2), Launch(16, 32, 8, 2), Launch(16, 16, 8, 2)),
}


def launch_of(kernel: str, padded: int, itemsize: int, device: torch.device) -> Launch:
    """Tiles, warps and stages of a kernel ("forward", "query_grad" or "key_grad") on a device."""
    if INTERPRETED:
        return Launch(32, 32, 4, 1)
    launches = LAUNCHES[kernel, max(padded, 64)]
    if itemsize == 4:
        return launches.single
    return launches.hopper if torch.cuda.get_device_properties(device).major in (9, 10) else launches.others


# Programs that stream the same keys and values (or queries and gradients) run together, and as many such groups at once
# as have theirs in the L2 cache.
SECTION_BYTES = 24 * 2**20


def _empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _empty_like(tensor: Tensor) -> Tensor:
    """Uninitialised, in the tensor's own layout where that has a head dimension of stride 1."""
    empty = torch.empty_like(tensor)
    return empty if empty.stride(-1) == 1 else _empty(tensor.shape, tensor.dtype, tensor.device)


class _Kernels:
    """What all three kernels are told, from the arguments of the operations, and their launches."""

    def __init__(self, q, k, v, q_distant, k_distant, spans, sink_size, recent_size, scale, window_only):
        self.batch, self.heads, self.length, self.dim = q.shape
        self.kv_heads = k.shape[1]
        self.is_empty = q.numel() == 0
        # Within the window and the sinks every pair is proximal. Without distant pairs, all count as recent.
        self.distant = q_distant is not None and self.length > sink_size + recent_size
        if not (self.distant or window_only):
            sink_size, recent_size = 0, self.length
        if not self.distant:
            q_distant, k_distant = q, k
        self.inputs = tuple(map(unit_stride, (q, k, v, q_distant, k_distant)))
        self.spans = spans
        self.sizes = (min(sink_size, self.length), min(recent_size, self.length), scale)
        self.device, self.itemsize = q.device, q.itemsize

    def run(self, name: str, *operands: tuple, **constants: bool) -> None:
        padded = max(16, triton.next_power_of_2(self.dim))
        launch = launch_of(name, padded, self.itemsize, self.device)
        groups = self.heads // self.kv_heads
        # The kernel of the keys runs once per KV head, the others once per query head.
        own_tile, heads, together, streamed = launch.query_tile, self.heads, groups, 1
        if name == "key_grad":
            own_tile, heads, together, streamed = launch.key_tile, self.kv_heads, 1, groups
        streamed_bytes = 3 * streamed * self.length * self.dim * self.itemsize
        section = min(max(SECTION_BYTES // streamed_bytes, 1) * together, self.batch * heads)
        spans = self.spans if self.spans is not None else self.inputs[0]
        with torch.cuda.device_of(self.inputs[0]):
            KERNELS[name][(triton.cdiv(self.length, own_tile) * self.batch * heads,)](
                tuple(map(strided, self.inputs)),
                spans,
                *operands,
                self.batch,
                heads,
                groups,
                self.length,
                section,
                *self.sizes,
                CUT=Tiles(self.dim, padded, launch.query_tile, launch.key_tile),
                DISTANT=self.distant,
                SPANS=self.spans is not None,
                **constants,
                num_warps=launch.warps,
                num_stages=launch.stages,
                enable_fp_fusion=True,
            )


# The two operations: opaque to torch.compile, with results of known shape


@torch.library.custom_op("pod_kernels::fused_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_distant: Tensor | None,
    k_distant: Tensor | None,
    spans: Tensor | None,
    sink_size: int,
    recent_size: int,
    scale: float,
    window_only: bool,
    want_gate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    kernels = _Kernels(q, k, v, q_distant, k_distant, spans, sink_size, recent_size, scale, window_only)
    out, lse, gate = _empty_results(q, want_gate)
    if want_gate and not kernels.distant:
        gate.fill_(1.0)
    if not kernels.is_empty:
        kernels.run("forward", (strided(out), lse, gate), GATE=want_gate and kernels.distant)
    return out, lse, gate


def _empty_results(q: Tensor, want_gate: bool) -> tuple[Tensor, Tensor, Tensor]:
    lse = _empty(q.shape[:3], torch.float32, q.device)
    gate = _empty(q.shape[:3] if want_gate else (0,), torch.float32, q.device)
    return _empty_like(q), lse, gate


@_forward.register_fake
def _(q, k, v, q_distant, k_distant, spans, sink_size, recent_size, scale, window_only, want_gate):
    return _empty_results(q, want_gate)


@torch.library.custom_op("pod_kernels::fused_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_distant: Tensor | None,
    k_distant: Tensor | None,
    spans: Tensor | None,
    out: Tensor,
    lse: Tensor,
    sink_size: int,
    recent_size: int,
    scale: float,
    window_only: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    kernels = _Kernels(q, k, v, q_distant, k_distant, spans, sink_size, recent_size, scale, window_only)
    grads = dq, dk, dv, dq_distant, dk_distant = _empty_grads(q, k, v, q_distant, k_distant)
    if not kernels.distant:
        dq_distant.zero_()
        dk_distant.zero_()
        dq_distant, dk_distant = dq, dk  # pointers that are not used
    if not kernels.is_empty:
        grad_out, out, lse = unit_stride(grad_out), unit_stride(out), lse.contiguous()
        correction = _empty(lse.shape, lse.dtype, lse.device)
        known = strided(grad_out), lse, correction
        kernels.run("query_grad", (strided(out), *known), (strided(dq), strided(dq_distant)))
        kernels.run("key_grad", known, (strided(dk), strided(dv), strided(dk_distant)))
    return grads


def _empty_grads(*inputs: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(inputs[0].new_empty(0) if tensor is None else _empty_like(tensor) for tensor in inputs)


@_backward.register_fake
def _(grad_out, q, k, v, q_distant, k_distant, spans, out, lse, sink_size, recent_size, scale, window_only):
    return _empty_grads(q, k, v, q_distant, k_distant)


def _keep(ctx, inputs, output) -> None:
    *tensors, sink_size, recent_size, scale, window_only, _ = inputs
    out, lse, _ = output
    ctx.save_for_backward(*tensors, out, lse)
    ctx.options = (sink_size, recent_size, scale, window_only)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_out, grad_lse, grad_gate):
    if grad_out is None:
        return (None,) * 11
    grads = _backward(grad_out, *ctx.saved_tensors, *ctx.options)
    needed = ctx.needs_input_grad[:5]
    return (*(grad if need else None for grad, need in zip(grads, needed, strict=True)), *(None,) * 6)


_forward.register_autograd(_differentiate, setup_context=_keep)


def unavailable(q: Tensor) -> str | None:
    """Why the kernels cannot run on tensors like this one; None when they can."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    if q.dtype not in dtypes:
        return f"it computes float32, float16 and bfloat16, and q is {q.dtype}"
    if q.shape[-1] > 256:
        return f"its head dimensions end at 256, and q has {q.shape[-1]}"
    if INTERPRETED:
        if q.dtype == torch.bfloat16:
            return "triton's interpreter (TRITON_INTERPRET=1) multiplies bfloat16 wrongly without an error"
        return None
    if q.device.type != "cuda":
        return f"it needs a CUDA device, and q is on {q.device} (TRITON_INTERPRET=1, set early, interprets it on a CPU)"
    if torch.version.hip is not None:
        return "it was written for NVIDIA GPUs, and this torch is built for AMD's"
    gpu = torch.cuda.get_device_properties(q.device)
    if gpu.major < 8:
        return f"it needs compute capability 8.0, and {gpu.name} has {gpu.major}.{gpu.minor}"
    return None


def attend(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and gate (empty unless it is asked for), in one kernel.

    Accumulates in float32. Once differentiable, deterministic. The host reads nothing from the device: `lengths` are
    clamped to 0..T, and every run of one document id is a document.

    Raises:
        ValueError: the kernels cannot run these tensors on this device; says why.
    """
    q, v, scale = problem.q, problem.v, problem.scale
    reason = unavailable(q)
    if reason is None and v.shape[-1] != q.shape[-1]:
        reason = f"values must have q's head dimension ({q.shape[-1]}), and have {v.shape[-1]}"
    if reason is None and not scale > 0:
        reason = f"scale must be positive, and is {scale}"
    if reason is not None:
        raise ValueError(f"backend 'fused' cannot run this: {reason}. Choose backend 'composed'")
    spans = sequence_spans(q.shape[0], q.shape[2], problem.lengths, problem.document_ids, q.device)
    out, lse, gate = _forward(*problem.sources, spans, *problem.sizes, problem.return_gate)
    return out, lse.detach(), gate.detach()
