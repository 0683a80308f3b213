"""One CUDA graph for each decode step of a `generate` call: at small batches a step is bound by starting its kernels.

A graph repeats what was started while it was captured, with the same memory and the same numbers from the host. So it
is right for a step whose work on the device follows from what lies on the device: tokens, positions, and the rows'
lengths, which the cache keeps there. `pod_kernels.triton.decode` is written like that; what the cache counts on the
host (`PodCache.host_state`) is advanced beside every replay. Only caches whose storage stands still can have one: with
room for the next token, rows that stay in their places (beams move them), and without eviction or by a method that
evicts after a prefill only (SnapKV, PyramidKV, AdaKV; any with `query_aware=False`). Where storage grows, the steps up
to the next growth are captured anew.
"""

import os
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from pod.cache import PodCache

VARIABLE = "POD_CUDA_GRAPH"

Forward = Callable[[Tensor, Tensor], Tensor]  # tokens [B, 1] and positions [B, 1] -> logits [B, 1, V]
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]  # step -> replay, what it writes


def cuda_capture(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Capture a step, which does not run: what replays it, and the tensor that a replay fills."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph.replay, out


class StepGraphs:
    """The steps of one `generate` call: the first runs as it is, which compiles its kernels, the next is captured.

    Args:
        forward: one step of the model with the cache, without a mask.
        cache: the call's cache.
        capture: `cuda_capture`, or what a test puts in its place.
    """

    def __init__(self, forward: Forward, cache: PodCache, capture: Capture = cuda_capture) -> None:
        self.cache, self._forward, self._capture = cache, forward, capture
        self._replay: Callable[[], None] | None = None
        self._place: tuple | None = None  # where the cache lay at the last step
        self._is_given_up = False

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor | None:
        """Logits [B, 1, V] of one step, None where it has to run as it is."""
        place = self.cache.place_of_a_step() if tokens.shape[1] == 1 and not self._is_given_up else None
        same, self._place = place is not None and place == self._place, place
        if not same:
            self._replay = None
            return None
        if self._replay is None:
            self._tokens, self._positions = tokens.clone(), positions.clone()
            before = self.cache.host_state()
            try:
                self._replay, self._logits = self._capture(lambda: self._forward(self._tokens, self._positions))
            except RuntimeError as error:
                # Nothing has run on the device: the step runs as it is.
                self.cache.set_host_state(before)
                self._is_given_up = True
                warnings.warn(f"decoding without a CUDA graph, capturing a step failed: {error}", stacklevel=2)
                return None
        else:
            self._tokens.copy_(tokens)
            self._positions.copy_(positions)
            self.cache.advance()
        self._replay()
        return self._logits.clone()


def step_graphs(forward: Forward, cache: object, device: torch.device) -> StepGraphs | None:
    """What `generate` asks for its steps; None where there can be no graph, or POD_CUDA_GRAPH=0 says so."""
    if device.type != "cuda" or os.environ.get(VARIABLE) == "0" or not isinstance(cache, PodCache):
        return None
    return StepGraphs(forward, cache)
