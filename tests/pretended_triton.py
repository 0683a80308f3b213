"""Triton's kernels on the pretended GPU: compiled as for an H100, then run by Triton's interpreter.

Each start goes through Triton's own way from a call to a launch, with the machine code for compute capability 9.0 made
by ptxas; only in the place of the launch stands the interpreter. It leaves Triton's language changed, and nothing more
could be compiled, so each launch is a process of its own that hands back what was written.
"""

import os
import traceback
from collections import Counter

import pretended_gpu
import torch
from pretended_gpu import DEVICE, GRAPHS, held
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import interpreter
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

SHARED_MEMORY = 232_448  # bytes that a block may have

STARTS: Counter[str] = Counter()  # by kernel
REWRITTEN = interpreter.InterpretedFunction.rewritten_fn  # what the interpreter runs, by function


def rewrite(function: JITFunction) -> None:
    """Let the interpreter rewrite a function and those that it may call: once, not in each process of a launch."""
    if function.fn not in REWRITTEN:
        interpreter.InterpretedFunction(function.fn).rewrite()
        for inner in [value for value in function.fn.__globals__.values() if isinstance(value, JITFunction)]:
            rewrite(inner)


def call_inner(patched: set[str], function: JITFunction, *given, **named):
    """As the interpreter does, which goes through Triton's language at each call: here once for each module."""
    if function.fn.__module__ not in patched:
        patched.add(function.fn.__module__)
        interpreter._patch_lang(function.fn)
    rewrite(function)
    return REWRITTEN[function.fn](*given, **named)


class Launcher:
    """In the place of the C function that starts a compiled kernel."""

    def __init__(self, source, metadata) -> None:
        self._function = source.fn

    def __call__(self, x, y, z, stream, function, packed, metadata, enter_hook, exit_hook, *args) -> None:
        STARTS[self._function.fn.__name__] += 1
        args = tree_map(held, args)
        if GRAPHS:
            GRAPHS[-1].keep([value for value in tree_leaves(args) if isinstance(value, torch.Tensor)])
            GRAPHS[-1].add(self._interpret, ((x, y, z), args), {}, None)
        self._interpret((x, y, z), args)

    def _interpret(self, grid: tuple[int, int, int], args: tuple) -> None:
        with _disable_current_modes():
            rewrite(self._function)
            storages = {}
            for value in tree_leaves(args):
                if isinstance(value, torch.Tensor):
                    storage = value.untyped_storage()
                    storages[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage)
            receiving, sending = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(receiving)
                self._run_and_send(grid, args, list(storages.values()), sending)
            os.close(sending)
            with os.fdopen(receiving, "rb") as pipe:
                results = [pipe.read(storage.numel()) for storage in storages.values()]
            os.waitpid(child, 0)
            for storage, result in zip(storages.values(), results, strict=True):
                if len(result) != storage.numel():
                    raise RuntimeError(f"interpreting {self._function.fn.__name__} failed, see above")
                if result:
                    storage.copy_(torch.frombuffer(bytearray(result), dtype=torch.uint8))

    def _run_and_send(self, grid, args: tuple, storages: list[torch.Tensor], sending: int) -> None:
        """The child's part. Does not return."""
        try:
            patched: set[str] = set()
            JITFunction.__call__ = lambda inner, *given, **named: call_inner(patched, inner, *given, **named)
            named = dict(zip(self._function.arg_names, args, strict=True))
            interpreter.InterpretedFunction(self._function.fn).run(grid=grid, warmup=False, **named)
            with os.fdopen(sending, "wb") as pipe:
                for storage in storages:
                    pipe.write(storage.numpy().tobytes())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)


class Utilities:
    """What Triton asks of a device."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple:
        return "module", "function", 0, 0, 1024  # registers, spilled ones, most threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY}


class Driver(DriverBase):
    launcher_cls, utils = Launcher, Utilities()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return DEVICE

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def get_benchmarker(self):
        raise NotImplementedError("nothing is timed on a GPU that is not there")

    @staticmethod
    def is_active() -> bool:
        return True


assert pretended_gpu.DEVICE == DEVICE
driver.set_active(Driver())
