"""The cascade's bookkeeping, chunk by chunk and vectorised, against the plain simulation token by token."""

import numpy as np
import pytest
import torch
from cascade_simulation import SimulatedCascade
from hypothesis import given, settings
from hypothesis import strategies as st

from pod_kernels.cascade import Cascades, CascadeState


@st.composite
def streams(draw):
    """Shape of a cache, and chunks of (tokens of each row)."""
    levels = draw(st.integers(1, 4))
    size = draw(st.integers(1, 5))
    sinks = draw(st.integers(0, 3))
    rows = draw(st.integers(1, 3))
    chunks = draw(st.lists(st.lists(st.integers(0, 13), min_size=rows, max_size=rows), min_size=1, max_size=9))
    chunks = [chunk for chunk in chunks if any(chunk)]
    return levels, size, sinks, rows, chunks, draw(st.integers(0, 2**16)), draw(st.integers(1, 6))


@settings(deadline=None, max_examples=120, derandomize=True)
@given(streams())
def test_chunks_equal_the_simulation(stream):
    levels, size, sinks, rows, chunks, seed, different = stream
    heads = 2
    cascades = Cascades(sinks, levels * size, levels)
    state = CascadeState.allocate(cascades, heads, rows, True, torch.device("cpu"))
    truth = [[SimulatedCascade(sinks + levels * size, sinks, levels) for _ in range(rows)] for _ in range(heads)]
    generator = torch.Generator().manual_seed(seed)
    held = torch.full((heads, rows, cascades.slots), -1)  # what the slots' vectors would be
    seen = torch.zeros(rows, dtype=torch.long)
    for chunk in chunks:
        new, columns = torch.tensor(chunk), max(chunk)
        plan = cascades.plan(seen.numpy(), new.numpy(), columns, seen.device)
        positions = seen[:, None] + torch.arange(columns) - (columns - new)[:, None]
        positions[torch.arange(columns) < (columns - new)[:, None]] = -1
        # Few different scores, so that there are ties.
        scores = torch.randint(0, different, (heads, rows, columns), generator=generator).float()
        # Scores of what is kept change between chunks.
        change = torch.randint(0, different, (heads, rows, cascades.slots + 1), generator=generator).float()
        state.scores.copy_(change)
        for head in range(heads):
            for row in range(rows):
                sim = truth[head][row]
                for slot, token in enumerate(state.positions[head, row, :-1].tolist()):
                    if token >= sinks:
                        sim.scores[token] = float(change[head, row, slot])
                for column in range(columns - chunk[row], columns):
                    sim.insert(float(scores[head, row, column]))
        before = held.clone()
        slots = state.insert(cascades, plan, positions, scores)
        for head, row, column in (slots >= 0).nonzero().tolist():
            held[head, row, slots[head, row, column]] = positions[row, column]
        seen = seen + new
        assert torch.equal(held, state.positions[..., :-1])
        written = (held != before).sum(dim=2)
        assert torch.equal(written, (slots >= 0).sum(dim=2)), "a slot was written twice"
        ranks = state.ranks(cascades, cascades.ranks(*map(torch.from_numpy, cascades.oldest(seen.numpy()))))
        for head in range(heads):
            for row in range(rows):
                sim = truth[head][row]
                kept = sim.kept()
                slots_of = {token: slot for slot, token in enumerate(state.positions[head, row, :-1].tolist())}
                assert sorted(kept) == sorted(token for token in slots_of if token >= 0)
                assert [int(ranks[head, row, slots_of[token]]) for token in kept] == list(range(len(kept)))
                for token, score in sim.scores.items():
                    assert float(state.scores[head, row, slots_of[token]]) == score


@pytest.mark.parametrize("levels, size, sinks", [(1, 8, 4), (2, 6, 0), (3, 7, 2), (4, 16, 5), (5, 3, 1)])
def test_the_span_is_the_papers_equation_4(levels, size, sinks):
    cascades = Cascades(sinks, levels * size, levels)
    state = CascadeState.allocate(cascades, 1, 1, True, torch.device("cpu"))
    span = size * sum(2**i for i in range(levels))
    seen, total = 0, sinks + 5 * span
    for count in [7] * (total // 7):
        plan = cascades.plan(np.array([seen]), np.array([count]), count, state.rings.device)
        positions = torch.arange(seen, seen + count)[None]
        state.insert(cascades, plan, positions, torch.rand(1, 1, count))
        seen += count
        kept = state.positions[0, 0, :-1]
        oldest = int(kept[kept >= sinks].min()) if seen > sinks else seen
        if seen > sinks + 2 * span:
            # Each sub-cache of the chain is at most one of its own periods late.
            assert abs(seen - oldest - span) < 2**levels
