"""A CUDA device that is not there: what code does on a GPU, seen on a machine without one.

Imported before torch (pytest -p pretended_gpu). A tensor on "cuda" then is a `DeviceTensor`: it says that it is on
cuda:0, and computes on the CPU. What a GPU would not allow, or would wait for, shows:

- operations on tensors of two devices are refused;
- `WAITS` lists what made the host wait for the device, or the device for the host, with the line of our code;
- under `torch.cuda.graph` such a wait is refused, nothing takes effect, and a replay repeats the captured operations
  with the same tensors and the same numbers from the host, as a CUDA graph does.

It shows nothing about speed, memory, races or CUDA's own kernels: flash attention is computed here by a few matmuls.
`pretended_triton` adds Triton's kernels.
"""

import contextlib
import ctypes
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections import Counter, defaultdict
from importlib.util import find_spec
from pathlib import Path

assert "torch" not in sys.modules, "import pretended_gpu before torch, which looks for devices when it is imported"

# torch without CUDA knows no device guard of it, and autograd asks whether there is an accelerator.
GUARD = r"""
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
static const Device gpu(DeviceType::CUDA, 0);
struct Guard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return gpu; }
  Device getDevice() const override { return gpu; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, gpu); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, gpu); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, gpu); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
static Guard guard;
struct PretendedHooks : at::CUDAHooksInterface {
  explicit PretendedHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};
namespace at { using CUDAHooks = PretendedHooks; REGISTER_CUDA_HOOKS(CUDAHooks) }
extern "C" void enable() {
  impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
}
"""


def _enable_guard() -> None:
    torch_folder = Path(find_spec("torch").origin).parent
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "guard.so")
        command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include", "-x", "c++", "-"]
        command += ["-o", library, f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder}/lib"]
        subprocess.run(command, input=GUARD.encode(), check=True)
        ctypes.CDLL(str(library)).enable()


_enable_guard()

import torch  # noqa: E402
from torch._library.custom_ops import OPDEFS  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

DEVICE = torch.device("cuda:0")
PROPERTIES = types.SimpleNamespace(
    name="a pretended H100",
    major=9,
    minor=0,
    multi_processor_count=4,
    total_memory=80 * 2**30,
    L2_cache_size=2**16,
    warp_size=32,
    shared_memory_per_block_optin=232_448,
)

WAITS: list[tuple[str, str]] = []  # (what was waited for, where in our code)


def wait(what: str) -> None:
    """Note a wait; while a graph is captured, refuse it."""
    if GRAPHS:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}, {_ours()}")
    WAITS.append((what, _ours()))


def _ours() -> str:
    """The innermost line of the library, or of whatever is not torch's."""
    frames = [frame for frame in reversed(traceback.extract_stack()) if "/torch/" not in frame.filename]
    frames = [frame for frame in frames if Path(frame.filename) != Path(__file__)]
    ours = [frame for frame in frames if "site-packages" not in frame.filename and "/pod" in frame.filename]
    frame = (ours or frames)[0]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"


class DeviceTensor(torch.Tensor):
    """A tensor that says it is on cuda:0; `held` is what it computes with, on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor):
        options = {"dtype": held.dtype, "layout": held.layout, "storage_offset": held.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, strides=held.stride(), device=DEVICE, **options)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, kinds, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    def __repr__(self):
        return f"DeviceTensor({self.held!r})"

    def data_ptr(self):
        return self.held.data_ptr()

    def untyped_storage(self):
        return self.held.untyped_storage()

    def tolist(self):
        wait("tolist")
        return self.held.tolist()


def held(value):
    """What is on the CPU behind a value; other values are themselves."""
    return value.held if isinstance(value, DeviceTensor) else value


def on_device(value):
    """A tensor on the CPU as one on the device; other values are themselves."""
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor)
    return DeviceTensor(value) if is_plain else value


# Operations

READ = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim", "bincount")
INDEXED = ("index", "index_put_", "index_put", "_index_put_impl_")
COPIES = ("copy_", "_to_copy")


def run(func, args: tuple, kwargs: dict):
    """An operation of which some tensor is on the device, or is to be."""
    namespace, name = func._schema.name.split("::")
    if func._schema.name in OPDEFS:
        # An operation of ours: its Python code sees the device.
        with Operations(), Functions():
            return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    target = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
    _check(name, args, kwargs, tensors, there, target)

    plain_args, plain_kwargs = tree_map(held, (args, kwargs))
    if target == "cuda":
        plain_kwargs["device"] = "cpu"
    plain_kwargs.pop("pin_memory", None)
    stays = isinstance(args[0], DeviceTensor) if name == "copy_" else target == "cuda" or (there and target is None)
    work = EMULATED.get(name, func) if there else func
    CALLED[name] += name in EMULATED
    is_mutable = func._schema.is_mutable
    if GRAPHS:
        GRAPHS[-1].keep([tensor.held for tensor in there] if is_mutable else [])
    out = work(*plain_args, **plain_kwargs)
    if GRAPHS and there and not func.is_view:
        GRAPHS[-1].add(work, plain_args, plain_kwargs, None if is_mutable else out)
    if not stays:
        return out
    if is_mutable:  # what it was given comes back, and not another tensor with the same numbers
        given = {id(held(tensor)): tensor for tensor in tensors}
        return tree_map(lambda value: given.get(id(value), on_device(value)), out)
    return tree_map(on_device, out)


def _check(name: str, args: tuple, kwargs: dict, tensors: list, there: list, target: str | None) -> None:
    """Refuse what a GPU refuses, and note what waits."""
    strangers = [tuple(tensor.shape) for tensor in tensors if not isinstance(tensor, DeviceTensor) and tensor.dim()]
    if there and name in INDEXED:
        indices = [index for index in args[1] if index is not None]
        if not isinstance(args[0], DeviceTensor) or (name != "index" and strangers and args[2].shape in strangers):
            raise RuntimeError(f"indices should be on the same device as the indexed tensor, in {name}")
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            wait("a mask as index")
        if any(not isinstance(index, DeviceTensor) for index in indices):
            wait("indices from the CPU")
    elif there and strangers and name not in COPIES:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} has cuda:0 and cpu {strangers}")
    if there and name in READ:
        wait(name)
    if name == "copy_" and isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor):
        wait("a copy from one device to another")
    if name == "_to_copy" and target is not None and isinstance(args[0], DeviceTensor) != (target == "cuda"):
        # A graph would repeat the copy from memory that may hold something else by then.
        if GRAPHS or not (
            kwargs.get("non_blocking") and target == "cuda" and getattr(args[0], "is_page_locked", False)
        ):
            wait(f"a copy to {target}")


class Operations(TorchDispatchMode):
    """Takes the operations that make tensors on the device, and those of tensors there."""

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        target = kwargs.get("device")
        on_gpu = target is not None and torch.device(target).type == "cuda"
        if on_gpu or any(isinstance(value, DeviceTensor) for value in tree_leaves((args, kwargs))):
            return run(func, args, kwargs)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


class Functions(TorchFunctionMode):
    """Takes what torch does below its operations: tensors from Python's numbers, and the choice of an attention."""

    def __torch_function__(self, func, kinds, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        on_gpu = first is not None and first.is_cuda
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and first is None:
            device = kwargs.pop("device", None)
            made = func(*args, **kwargs)
            return made if device is None else made.to(device)
        if func is torch.Tensor.new_tensor and on_gpu:
            return torch.tensor(args[1], dtype=kwargs.get("dtype", first.dtype)).to(first.device)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and on_gpu:
            index = tuple(map(_listed, args[1])) if isinstance(args[1], tuple) else _listed(args[1])
            return func(first, index, *args[2:])
        if func is torch.nn.functional.scaled_dot_product_attention and on_gpu:
            return _dense_attention(*args, **kwargs)
        if func is torch.Tensor.pin_memory:
            locked = first.clone()
            locked.is_page_locked = True
            return locked
        return func(*args, **kwargs)


def _listed(index):
    """A list as an index, or a tuple in a tuple, is a tensor that torch copies to the device."""
    if not isinstance(index, list | range | tuple):
        return index
    return (torch.tensor(index) if len(index) else torch.zeros(0, dtype=torch.long)).to(DEVICE)


# Attention that CUDA has kernels for


def _dense_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    CALLED["cuDNN may plan"] += torch.backends.cuda.cudnn_sdp_enabled()
    if enable_gqa:
        k, v = (states.repeat_interleave(q.shape[-3] // states.shape[-3], -3) for states in (k, v))
    logits = (q @ k.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        logits = logits + attn_mask
    return logits.softmax(-1).to(v.dtype) @ v


def _flash_logits(q, k, causal, scale, window_size_left, window_size_right):
    """[B, H, Tq, Tk] of q [B, Tq, H, D] and k [B, Tk, H_kv, D], -inf where a pair is not seen."""
    assert q.dtype in (torch.float16, torch.bfloat16) and q.stride(-1) == k.stride(-1) == 1
    keys = k.float().repeat_interleave(q.shape[2] // k.shape[2], 2)
    logits = torch.einsum("bihd,bjhd->bhij", q.float(), keys) * scale
    back = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    hidden = torch.zeros_like(back, dtype=torch.bool)
    if causal:
        hidden |= back < 0
    if window_size_left is not None:
        hidden |= (back > window_size_left) | (back < -window_size_right)
    return logits.masked_fill(hidden, -torch.inf)


def _flash_forward(q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale,
                   window_size_left=None, window_size_right=None):  # fmt: skip
    assert (
        cum_q is cum_k is None and dropout == 0.0 and v.stride(-1) == 1 and (max_q, max_k) == (q.shape[1], k.shape[1])
    )
    logits = _flash_logits(q, k, causal, scale, window_size_left, window_size_right)
    lse = logits.logsumexp(-1)
    values = v.float().repeat_interleave(q.shape[2] // v.shape[2], 2)
    weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    out = torch.einsum("bhij,bjhd->bihd", weights, values)
    return out.to(q.dtype), lse, torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64), q.new_empty(0)


def _flash_backward(grad_out, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, seed, offset, *, scale,
                    window_size_left=None, window_size_right=None):  # fmt: skip
    assert lse.is_contiguous() and lse.dtype == torch.float32 and seed.dtype == torch.uint64
    weights = torch.exp(_flash_logits(q, k, causal, scale, window_size_left, window_size_right) - lse[..., None])
    groups = q.shape[2] // k.shape[2]
    keys, values = (states.float().repeat_interleave(groups, 2) for states in (k, v))
    correction = (grad_out.float() * out.float()).sum(-1).transpose(1, 2)
    grad_weights = torch.einsum("bihd,bjhd->bhij", grad_out.float(), values)
    grad_logits = weights * (grad_weights - correction[..., None]) * scale
    dq = torch.einsum("bhij,bjhd->bihd", grad_logits, keys)
    dk = torch.einsum("bhij,bihd->bjhd", grad_logits, q.float())
    dv = torch.einsum("bhij,bihd->bjhd", weights, grad_out.float())
    dk, dv = (grad.unflatten(2, (-1, groups)).sum(3) for grad in (dk, dv))
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _cudnn_forward(q, k, v, bias, compute_lse, dropout=0.0, causal=False, debug=False, *, scale):
    assert bias is None and compute_lse and causal
    if q.shape[2] == k.shape[2] == 1:
        raise RuntimeError("cuDNN Frontend error: s_q = s_kv = 1 is not supported.")
    states = (part.transpose(1, 2) for part in (q, k, v))
    out, lse, *rest = _flash_forward(*states, None, None, q.shape[2], k.shape[2], dropout, causal, debug, scale=scale)
    return out.transpose(1, 2), lse[..., None], None, None, q.shape[2], k.shape[2], *rest


def _cudnn_backward(grad_out, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal, *,
                    scale):  # fmt: skip
    assert lse.is_contiguous() and lse.shape == (*q.shape[:3], 1) and bias is cum_q is cum_k is None and causal
    states = (part.transpose(1, 2) for part in (grad_out, q, k, v, out))
    state = torch.empty(2, dtype=torch.uint64)
    grads = _flash_backward(*states, lse[..., 0], None, None, max_q, max_k, dropout, causal, state, state, scale=scale)
    return tuple(grad.transpose(1, 2) for grad in grads)


EMULATED = {
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
}
CALLED: Counter[str] = Counter()  # of these


# CUDA graphs

GRAPHS: list["Graph"] = []  # the one that is being captured


class Graph:
    """What a CUDA graph holds: operations, the tensors they read and write, and the host's numbers of then."""

    replays = 0  # of all graphs

    def __init__(self) -> None:
        self._works, self._before = [], {}

    def keep(self, tensors: list[torch.Tensor]) -> None:
        """Remember what is about to be written, as capturing leaves all as it was."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))

    def add(self, work, args: tuple, kwargs: dict, out) -> None:
        """One operation; `out`: the tensors that its results go to, None when it writes into its arguments."""
        self._works.append((work, args, kwargs, out))

    def finish(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)

    def replay(self) -> None:
        Graph.replays += 1
        for work, args, kwargs, out in self._works:
            found = work(*args, **kwargs)
            for result, place in zip(tree_leaves(found), tree_leaves(out), strict=True) if out is not None else ():
                if isinstance(place, torch.Tensor):
                    place.copy_(result)


@contextlib.contextmanager
def capture(graph: Graph, *args, **kwargs):
    """`torch.cuda.graph`."""
    GRAPHS.append(graph)
    try:
        yield
    finally:
        GRAPHS.pop()
        with torch.utils._python_dispatch._disable_current_modes():
            graph.finish()


# torch.cuda


class Event:
    def __init__(self, **options) -> None:
        self._time = 0.0

    def record(self, stream=None) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end._time - self._time)

    def query(self) -> bool:
        return True

    def wait(self, stream=None) -> None: ...

    synchronize = wait


class Stream:
    device, cuda_stream = DEVICE, 0

    def __init__(self, *args, **kwargs) -> None: ...

    def wait_stream(self, stream) -> None: ...

    def record_event(self, event=None) -> Event:
        return event or Event()

    wait_event = wait_stream

    def synchronize(self) -> None: ...


class Place(contextlib.nullcontext):
    """`torch.cuda.device` and its like: there is one device."""


def _install() -> None:
    cuda = torch.cuda
    constants = {
        "is_available": True, "is_initialized": True, "is_bf16_supported": True, "_is_in_bad_fork": False,
        "device_count": 1, "current_device": 0, "memory_allocated": 0, "max_memory_allocated": 0,
        "memory_reserved": 0, "max_memory_reserved": 0, "get_device_properties": PROPERTIES,
        "get_device_capability": (9, 0), "get_device_name": PROPERTIES.name, "mem_get_info": (70 * 2**30, 80 * 2**30),
        "memory_stats": defaultdict(int), "_lazy_init": None, "set_device": None, "empty_cache": None,
        "reset_peak_memory_stats": None, "manual_seed": None, "manual_seed_all": None, "set_stream": None,
        "set_rng_state": None, "set_rng_state_all": None,
    }  # fmt: skip
    for name, value in constants.items():
        setattr(cuda, name, lambda *args, value=value, **kwargs: value)
    cuda.synchronize = lambda *args: wait("synchronize")
    cuda.get_rng_state = lambda *args: torch.get_rng_state()
    cuda.get_rng_state_all = lambda: [torch.get_rng_state()]
    cuda.Event, cuda.Stream, cuda.CUDAGraph, cuda.graph = Event, Stream, Graph, capture
    cuda.current_stream = cuda.default_stream = Stream
    cuda.device = cuda.device_of = cuda.stream = Place
    # A parameter becomes a tensor of another class, which cannot be put into the one that is there.
    torch.__future__.set_swap_module_params_on_conversion(True)
    Operations().__enter__()
    Functions().__enter__()


_install()
