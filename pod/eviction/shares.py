"""Stores of a budget that is a share of the prompt: rows with other prompts have slots of other numbers."""

import copy
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.configuration_utils import PreTrainedConfig

from pod.blocks import LayerBlocks
from pod.cache_rows import Rows
from pod.eviction.storage import Rotary, StoragePolicy, Store


class RowStores(Store):
    """Each run of rows with one budget in a store of its own, which is made when the first forward begins.

    Args:
        policy: whose budget is a share.
        config, blocks: of the model.
        rows: say what the share came to in each.
    """

    def __init__(self, policy: StoragePolicy, config: PreTrainedConfig, blocks: LayerBlocks, rows: Rows) -> None:
        self.rotates = policy.positions == "cache"
        self._policy, self._config, self._blocks, self._rows = policy, config, blocks, rows
        self.reset()

    def reset(self) -> None:
        self._runs: list[tuple[slice, Store]] = []

    def _make(self, counts: list[int] | None = None) -> None:
        """Empty stores of runs of so many rows; of those with one budget when not told."""
        budgets = self._rows.budgets
        counts = counts or [len(list(run)) for _, run in groupby(budgets)]
        ends = list(accumulate(counts))
        policies = [self._policy.with_budget(budgets[end - 1]) for end in ends]
        stores = [policy.make_store(self._config, self._blocks) for policy in policies]
        self._runs = [(slice(end - count, end), store) for end, count, store in zip(ends, counts, stores, strict=True)]

    @property
    def pairs(self) -> int:
        return sum(store.pairs for _, store in self._runs)

    @property
    def moved(self) -> int:
        return sum(store.moved for _, store in self._runs)

    @property
    def batch_size(self) -> int:
        return self._runs[-1][0].stop if any(store.batch_size >= 0 for _, store in self._runs) else -1

    def begin(self, inputs: Tensor, mask: Tensor | None, rotary: Rotary) -> None:
        if self.batch_size < 0:
            self._make()
        if len(inputs) != self._runs[-1][0].stop:
            raise ValueError(f"the cache holds {self._runs[-1][0].stop} rows but the input has {len(inputs)}")
        for rows, store in self._runs:
            store.begin(inputs[rows], None if mask is None else mask[rows], rotary)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return torch.cat([store.attend(layer, q[rows], k[rows], v[rows], scale) for rows, store in self._runs])

    def finish(self) -> None:
        for _, store in self._runs:
            store.finish()

    def positions(self, layer: int) -> Tensor:
        parts = [store.positions(layer) for _, store in self._runs]
        widest = max(part.shape[2] for part in parts)
        return torch.cat([pad(part, (0, widest - part.shape[2]), value=-1) for part in parts])

    def storages(self) -> list[Tensor]:
        return [tensor for _, store in self._runs for tensor in store.storages()]

    def select(self, rows: Tensor) -> None:
        places = [(number, row) for number, (run, _) in enumerate(self._runs) for row in range(run.stop - run.start)]
        chosen = [
            (number, [row for _, row in run])
            for number, run in groupby((places[row] for row in rows.tolist()), key=lambda place: place[0])
        ]
        numbers, stores, end = [number for number, _ in chosen], [store for _, store in self._runs], 0
        self._runs = []
        for number, mine in chosen:
            store = stores[number] if numbers.count(number) == 1 else copy.deepcopy(stores[number])
            store.select(torch.tensor(mine))
            self._runs.append((slice(end, end + len(mine)), store))
            end += len(mine)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        states = [store.state() for _, store in self._runs]
        tensors = {f"{number}.{name}": part for number, (held, _) in enumerate(states) for name, part in held.items()}
        counts = [rows.stop - rows.start for rows, _ in self._runs]
        return tensors, {"rows": counts, "stores": [facts for _, facts in states]}

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self._make(facts["rows"])
        for number, ((_, store), mine) in enumerate(zip(self._runs, facts["stores"], strict=True)):
            prefix = f"{number}."
            own = {name.removeprefix(prefix): part for name, part in tensors.items() if name.startswith(prefix)}
            store.restore(own, mine)
