"""Compile the kernels of decoding, updating and block tables for an H100, without one: what the interpreter lets pass.

The functions that start kernels run as always, on CPU tensors; each start compiles its kernel down to machine code
instead. Prints the kernels' names. Run without TRITON_INTERPRET (`test_decode.py` does).
"""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import numpy as np
import test_decode as cases
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from pod_kernels import Segments, SkipStats, cached_attention
from pod_kernels.cascade import Cascades, CascadeState
from pod_kernels.tables import Part, Store, Tiles
from pod_kernels.triton import block_tables, cascade, column_sums, slot_decode, splits, update

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32"}
HALF = torch.bfloat16


def type_of(value) -> str | tuple:
    """A parameter's type in a signature, as the launcher chooses it."""
    if isinstance(value, tuple):
        return tuple(map(type_of, value))
    if value is None or (isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def compiled(kernel: JITFunction, *args, grid, warmup=False, **kwargs) -> None:
    """What stands in for `JITFunction.run`."""
    options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion") if name in kwargs}
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    signature, constants = {}, {}
    for place, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        kind = signature[parameter.name] = "constexpr" if parameter.is_constexpr else type_of(value)
        if kind == "constexpr":
            constants[parameter.name] = value
        elif isinstance(value, tuple):
            constants |= {(place, at): part for at, part in enumerate(value) if kind[at] == "constexpr"}
    source = ASTSource(kernel, signature, constants)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(kernel.__name__, flush=True)


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(HALF)


def main() -> None:
    JITFunction.run = compiled
    splits.SPLITS = column_sums.SPLITS = 4
    lengths = torch.tensor((200, 150))
    positions = lengths[:, None] - 1
    layer = cases.make_layer((False, True), lengths, dim=128, dtype=HALF, capacity=256)
    given = cases.decoded(layer, lengths, 4, "scores", HALF)
    options = dict(
        q_distant=None, distant_keys=(), scale=0.1, scores=given["scores"], score_heads=(1,), stats=SkipStats()
    )
    # As few parts as tests take, and as many as a GPU does: a loop over them is another one.
    for tau, splits.SPLITS in ((None, 4), (0.5, 4), (None, 64), (0.5, 64)):
        sharing = dict(table=None, tau=tau, return_weights=False)
        cached_attention(given["q"], layer, positions=positions, by_kernels=True, **sharing, **options)
    splits.SPLITS = 4
    update.append(layer, half(2, 2, 1, 128), half(2, 2, 1, 128), positions)

    packed, table = cases.make_packed(cases.SLOTS["ragged"], 1)
    options |= dict(table=((table, 0), (table, 1)), scores=torch.empty(2, 2, 2, 1, 21), return_weights=True, tau=None)
    cached_attention(torch.randn(2, 4, 1, 16), packed, positions=positions, by_kernels=True, **options)
    new, slots = torch.randn(2, 2, 2, 1, 16), torch.zeros(1, 2, 1, dtype=torch.long)
    update.append_packed(packed, table, cases.packed(cases.SLOTS["ragged"], 1), *new, positions, slots)

    keys, values, new = half(1, 2, 64, 128), half(2, 2, 64, 128), half(2, 2, 1, 128)
    slot_decode.slot_decode(
        half(2, 2, 4, 1, 128),
        keys,
        values,
        new,
        new,
        used=40,
        kept=torch.tensor([40, 30]),
        positions=positions,
        shared_logits=torch.randn(1, 2, 4, 1, 41),
        scale=0.1,
        ranks=torch.zeros(1, 2, 40, dtype=torch.long),
        table=(half(64, 64), half(64, 64)),
        decay=0.1,
        return_logits=True,
    )
    cascades = Cascades(4, 60, 4)
    state = CascadeState.allocate(cascades, 2, 2, True, torch.device("cpu"))
    scores = cascade.average(state.scores, torch.rand(2, 2, 4, 41), torch.ones(1), "max")
    slots = cascade.insert(state, cascades, positions, scores)
    stores = [
        Segments.rectangular(heads, 2, places, 128, dtype=HALF, device=keys.device)
        for heads, places in ((1, 64), (2, 64), (1, 20))
    ]
    update.append_slots(*stores, new, new, positions, slots, torch.tensor([0, 1]), 4, False)

    q, keys = half(2, 2, 4, 200, 128), half(2, 2, 260, 128)
    counts = dict(used=60, kept=torch.tensor([60, 30]), counts=torch.tensor([200, 150]))
    column_sums.chunk_attention(q, keys, keys, scale=0.1, decay=torch.ones(200), **counts)
    held, at = torch.zeros(2, 2, 260, dtype=torch.long), torch.zeros(2, 32, dtype=torch.long)
    column_sums.column_statistics(q[..., :32, :], keys, held, at, 0.1, with_spread=True)

    blocks = Store(half(9, 4, 16, 128), torch.zeros(2, 8, dtype=torch.int32))
    parts = [Part(blocks, torch.arange(2), torch.arange(2))]
    for tiles in Tiles.of(np.array([0, 1, 81]), np.array([100, 128]), torch.device("cpu")):  # a decode, a chunk
        block_tables.tiles_attention(half(81, 8, 128), half(81, 8, 128), parts, parts, parts, tiles, 4, 28, 0.1)


if __name__ == "__main__":
    main()
