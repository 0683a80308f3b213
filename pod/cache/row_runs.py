"""Chains of a budget that is a share of the prompt: rows with other prompts have slots of other numbers."""

import copy
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from pod.cache.chain import ChainStorage
from pod.cache.storage import Anchors, Pieces, Rotary, Rows, Step, Storage, real_tokens, strides, widened


class RowRuns(Storage):
    """Each run of rows with one budget in a chain of its own, which is made when the first forward begins."""

    is_fixed = True

    def reset(self) -> None:
        super().reset()
        self.rotates = self.method.positions == "cache"
        self._runs: list[tuple[slice, ChainStorage]] = []

    def _make(self, counts: list[int]) -> None:
        """Empty chains of runs of so many rows."""
        for end, count in zip(accumulate(counts), counts, strict=True):
            method, mine = self.method.with_budget(self.rows.budgets[end - 1]), slice(end - count, end)
            self._runs.append((mine, ChainStorage(self.config, Rows(), method)))
        self._count()

    def _count(self) -> None:
        """Tell every chain what its rows have seen."""
        for rows, chain in self._runs:
            chain.rows.seen = self.rows.seen[rows]

    def pieces(self, mask: Tensor | None, count: int, device: torch.device) -> Pieces:
        if self.rows.budgets is None:
            self.take_share([count] * len(self.rows.seen) if mask is None else real_tokens(mask))
        return strides(mask, count, [self.method.with_budget(budget).at_once for budget in self.rows.budgets], device)

    def take_share(self, tokens: list[int]) -> None:
        if self.in_prefill:
            raise ValueError(
                f"{type(self.method).__name__}: budget={self.method.budget} is a share of the prompt, which has to "
                "come in one forward then: leave cache.prefill() and prefill_chunk_size out, or give a number of tokens"
            )
        super().take_share(tokens)

    def begin(self, step: Step, inputs: Tensor, rotary: Rotary) -> None:
        if self.rows.budgets is None:  # not cut by `pieces`
            self.take_share(step.new)
        if not self._runs:
            self._make([len(list(run)) for _, run in groupby(self.rows.budgets)])
        self._count()
        self.step = step
        for rows, chain in self._runs:
            chain.begin(step.of_rows(rows), inputs[rows], rotary)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, anchors: Anchors, scale: float) -> Tensor:
        out = [chain.attend(layer, q[rows], k[rows], v[rows], anchors, scale) for rows, chain in self._runs]
        return torch.cat(out)

    def finish(self) -> None:
        for _, chain in self._runs:
            chain.finish()
        self.step = None

    def positions(self, layer: int) -> Tensor:
        self._count()
        return torch.cat(widened([chain.positions(layer) for _, chain in self._runs]))

    def storages(self) -> list[Tensor]:
        return [tensor for _, chain in self._runs for tensor in chain.storages()]

    def select_rows(self, rows: Tensor) -> None:
        places = [(number, row) for number, (run, _) in enumerate(self._runs) for row in range(run.stop - run.start)]
        chosen = [
            (number, [row for _, row in run])
            for number, run in groupby((places[row] for row in rows.tolist()), key=lambda place: place[0])
        ]
        numbers, chains, end = [number for number, _ in chosen], [chain for _, chain in self._runs], 0
        self._runs = []
        for number, mine in chosen:
            chain = chains[number] if numbers.count(number) == 1 else copy.deepcopy(chains[number])
            self._runs.append((slice(end, end + len(mine)), chain))
            self._count()
            chain.select_rows(torch.tensor(mine, device=rows.device))
            end += len(mine)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        states = [chain.state() for _, chain in self._runs]
        tensors = {f"{number}.{name}": part for number, (held, _) in enumerate(states) for name, part in held.items()}
        counts = [rows.stop - rows.start for rows, _ in self._runs]
        return tensors, {"rows": counts, "chains": [facts for _, facts in states]}

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self._make(facts["rows"])
        for number, ((_, chain), mine) in enumerate(zip(self._runs, facts["chains"], strict=True)):
            prefix = f"{number}."
            own = {name.removeprefix(prefix): part for name, part in tensors.items() if name.startswith(prefix)}
            chain.restore(own, mine)
