"""The bookkeeping of the Cascading KV cache: which tokens a cache of fixed size keeps, and in which of its slots.

Legend: B rows, A KV heads that decide, T tokens of a chunk, S sinks, C slots of the sub-caches together, N sub-caches
of c = C / N slots, P = S + C slots in all.

Sub-cache 0 takes every token; what a full sub-cache pushes out, its oldest, is offered to the next one. With u the
index of the token being added, sinks not counted, sub-cache i accepts when u is a multiple of 2^i, and always while
u <= C. Where it accepts, the offered token becomes its newest. Where it does not, the token replaces that sub-cache's
newest if its score is at least as high, else it is dropped (arXiv 2406.17808, section 3.2 and Algorithm 2).

"Always while u <= C", eager filling, is not what Algorithm 2 prints: there only an *empty* sub-cache takes what it
would not accept, and one that holds a token contests it, so that tokens would be dropped while slots are empty. Figure
7 decides, and section 4.2 says it too: up to the cache's size the method is StreamingLLM, which keeps every token. The
authors' one-token path does so.

Two facts make this cheap. *When* a sub-cache accepts, pushes out or is contested follows from u alone; only *who* wins
a contest depends on scores. So the k-th entry of every sub-cache has a time in closed form and at most one challenger,
and a whole chunk is inserted level by level without a loop over its tokens. And a token never changes its slot: the
rings hold slot numbers, and a new token is written where a dropped one was: an update writes the inserted tokens only.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pod_kernels.segments import on_device


@dataclass(frozen=True)
class Cascades:
    """When N equal sub-caches accept, push out and are contested: arithmetic on token counts.

    Args:
        sinks: S, first tokens that stay for ever.
        budget: C, slots of all sub-caches; a multiple of `num_cascades`.
        num_cascades: N.
    """

    sinks: int
    budget: int
    num_cascades: int

    @property
    def slots(self) -> int:
        """P, slots in all."""
        return self.sinks + self.budget

    @property
    def size(self) -> int:
        """c, slots of one sub-cache."""
        return self.budget // self.num_cascades

    def entries(self, level: int, count: np.ndarray) -> np.ndarray:
        """How many tokens sub-cache `level` has accepted when `count` tokens, sinks not counted, were added."""
        last = count - 1
        eager = np.maximum(np.minimum(last, self.budget) - level * self.size + 1, 0)
        return eager + np.where(last > self.budget, (last >> level) - (self.budget >> level), 0)

    def offers(self, level: int, count: np.ndarray) -> np.ndarray:
        """How many tokens were offered to sub-cache `level` when `count` tokens, sinks not counted, were added."""
        return count if level == 0 else np.maximum(self.entries(level - 1, count) - self.size, 0)

    def times(self, level: int, entry: np.ndarray) -> np.ndarray:
        """The index u, sinks not counted, of the token with which sub-cache `level` accepts its `entry`-th token."""
        eager = entry + level * self.size
        later = ((self.budget >> level) + eager - self.budget) << level
        return np.where(eager <= self.budget, eager, later)

    def oldest(self, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which entry is the oldest that each sub-cache holds, and how many older tokens are kept elsewhere.

        Args:
            seen: [B] int64 tokens of each row so far, sinks included.

        Returns:
            [B, N] int64 each, for `ranks`.
        """
        count = np.maximum(seen - self.sinks, 0)
        entries = np.stack([self.entries(level, count) for level in range(self.num_cascades)], axis=1)
        first = np.maximum(entries - self.size, 0)
        # Older tokens: the sinks, and what the sub-caches further down hold.
        return first, self.sinks + (entries - first)[:, ::-1].cumsum(axis=1)[:, ::-1] - (entries - first)

    def ranks(self, first: Tensor, older: Tensor) -> Tensor:
        """The place of each ring position among the kept tokens, counted from the oldest, sinks included.

        Args:
            first, older: [B, N] int64 of `oldest`.

        Returns:
            [B, N, c] int64; what it says of a ring position that holds nothing has no meaning.
        """
        place = torch.arange(self.size, device=first.device) - first[..., None]
        return older[..., None] + place.remainder(self.size)

    def plan(self, seen: np.ndarray, new: np.ndarray, columns: int, device: torch.device) -> "Plan":
        """What inserting a chunk does, as far as it does not depend on scores.

        The arithmetic runs on the host, where it costs a fraction of what starting as many kernels would.

        Args:
            seen: [B] int64, tokens of each row before the chunk, sinks included.
            new: [B] int64, tokens of each row in it, right-aligned in its columns.
            columns: T, columns of the chunk.
            device: where the plan is used.
        """
        before, after = np.maximum(seen - self.sinks, 0), np.maximum(seen + new - self.sinks, 0)
        nobody = self.slots + columns

        def numbered(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """first, first + 1, .. of each row [B, most], and which of them are below last."""
            number = first[:, None] + np.arange((last - first).max())
            return number, number < last[:, None]

        token, is_token = numbered(columns - (after - before), np.full_like(seen, columns))
        empty, is_empty = numbered(np.minimum(before, self.budget), np.minimum(after, self.budget))
        levels, depths = [], np.zeros_like(seen)
        for level in range(self.num_cascades):
            offered = self.offers(level, before)
            offers = self.offers(level, after) - offered
            most = offers.max()
            if not most:
                break
            depths += offers > 0
            old, end = self.entries(level, before), self.entries(level, after)
            # The newest entry there is may still be contested; the chunk's own entries follow it.
            first = old - 1
            entry, is_entry = numbered(first, end)
            is_entry = is_entry & (entry >= 0)
            time = self.times(level, entry)
            challengers = None
            if level:
                # The one offer that is not accepted between an entry and the next one.
                step = 1 << (level - 1)
                challenge = (np.maximum(time, self.budget) // step + 1) * step
                is_newest = self.entries(level, challenge + 1) == entry + 1
                is_in_chunk = (challenge >= before[:, None]) & (challenge < after[:, None])
                is_contested = is_entry & is_newest & is_in_chunk & (challenge % (2 * step) != 0)
                if is_contested.any():
                    which = self.offers(level, challenge + 1) - 1 - offered[:, None]
                    challengers = np.where(is_contested, which, -1)
            pushed, is_pushed = numbered(np.maximum(old - self.size, 0), np.maximum(end - self.size, 0))
            width = min(entry.shape[1], self.size)
            kept = end[:, None] - 1 - np.arange(width)
            is_kept = kept >= np.maximum(first, 0)[:, None]
            accepted = self.offers(level, time[:, 1:] + 1) - 1 - offered[:, None]
            levels.append(
                {
                    "newest": first[:, None] % self.size,
                    "accepted": np.clip(accepted, 0, most - 1),
                    "challengers": challengers,
                    "pushed": np.where(is_pushed, pushed - first[:, None], 0),
                    "pushed_old": pushed % self.size,
                    "is_pushed": is_pushed,
                    "kept": np.maximum(kept - first[:, None], 0),
                    "places": np.where(is_kept, kept % self.size, self.size),
                }
            )
        arrays = [np.where(is_token, self.slots + token, nobody), np.where(is_empty, self.sinks + empty, nobody)]
        arrays += [array for level in levels for array in level.values() if array is not None]
        tokens, empty, *parts = on_device(arrays, device)
        parts = iter(parts)
        placed = [{name: array if array is None else next(parts) for name, array in level.items()} for level in levels]
        levels = [LevelPlan(**level | {"is_pushed": level["is_pushed"].bool()}) for level in placed]
        return Plan(tokens, empty, levels, depths=depths.tolist())


@dataclass
class LevelPlan:
    """What happens to one sub-cache; [B, ..] int64. "Entries" are its newest before the chunk, then the new ones.

    Attributes:
        newest: [B, 1] ring position of its newest token before the chunk.
        accepted: [B, W - 1] for each new entry, which of the offered tokens it is.
        challengers: [B, W] for each entry, which of the offered tokens contests it, -1 for none; None: none at all.
        pushed: [B, M] for each token pushed out, which entry it is; negative where it is older than all entries.
        pushed_old: [B, M] its ring position, where it is older.
        is_pushed: [B, M] bool, False where a row pushes out fewer.
        kept: [B, K] the last entries, newest first.
        places: [B, K] their ring positions; c, the spare one, where a row has fewer.
    """

    newest: Tensor
    accepted: Tensor
    challengers: Tensor | None
    pushed: Tensor
    pushed_old: Tensor
    is_pushed: Tensor
    kept: Tensor
    places: Tensor


@dataclass
class Plan:
    """A chunk's insertion. A token is named by its slot, or by P + its column in the chunk; P + T is nobody.

    Attributes:
        tokens: [B, M] the chunk's tokens that are no sinks, in order.
        empty: [B, E] empty slots that the chunk may fill.
        levels: what happens to each sub-cache, as far down as anything does.
        depths: how far down that is in each row.
    """

    tokens: Tensor
    empty: Tensor
    levels: list[LevelPlan]
    depths: list[int]

    def rows(self, first: int, last: int) -> "Plan":
        """The plan of the rows first .. last - 1."""
        part = slice(first, last)
        levels = [
            LevelPlan(**{name: None if value is None else value[part] for name, value in vars(step).items()})
            for step in self.levels[: max(self.depths[part])]
        ]
        return Plan(self.tokens[part], self.empty[part], levels, self.depths[part])


@dataclass
class CascadeState:
    """Which tokens the slots of some heads hold.

    Attributes:
        positions: [A, B, P + 1] int64, the token in each slot by its position in the row, -1 for an empty slot; the
            last column takes what has no slot.
        scores: [A, B, P + 1] float32, the moving average of each slot's attention, likewise; None when nobody contests.
        rings: [A, B, N, c + 1] int64, the slots of each sub-cache's tokens, its k-th entry at k mod c; the last column
            takes what has no place.
    """

    positions: Tensor
    scores: Tensor | None
    rings: Tensor

    @classmethod
    def allocate(cls, cascades: Cascades, heads: int, batch: int, with_scores: bool, device: torch.device):
        """The state of empty slots."""
        rings = (heads, batch, cascades.num_cascades, cascades.size + 1)
        return cls(
            positions=torch.full((heads, batch, cascades.slots + 1), -1, device=device),
            scores=torch.zeros(heads, batch, cascades.slots + 1, device=device) if with_scores else None,
            rings=torch.full(rings, cascades.slots, device=device),
        )

    def tensors(self) -> list[Tensor]:
        """All of it."""
        return [self.positions, self.rings] + ([] if self.scores is None else [self.scores])

    def part(self, heads: slice, rows: Tensor | slice = slice(None)) -> "CascadeState":
        """The state of some heads and rows [n]: views, where the rows are a slice."""
        parts = {name: None if part is None else part[heads, rows] for name, part in vars(self).items()}
        return CascadeState(**parts)

    def ranks(self, cascades: Cascades, ranks: Tensor) -> Tensor:
        """The place of each slot's token among the kept ones, oldest first.

        Args:
            ranks: [B or 1, N, c] of `Cascades.ranks`.

        Returns:
            [A, B, P] int64; an empty slot's has no meaning.
        """
        by_slot = torch.zeros_like(self.positions)
        by_slot[..., : cascades.sinks] = torch.arange(cascades.sinks, device=by_slot.device)
        slots = self.rings[..., :-1].flatten(2)
        return by_slot.scatter_(2, slots, ranks.flatten(1).expand(slots.shape))[..., :-1]

    def insert(self, cascades: Cascades, plan: Plan, positions: Tensor, scores: Tensor | None = None) -> Tensor:
        """Add a chunk's tokens one by one, all levels and heads at once.

        Args:
            plan: of this chunk, on the state's device; its rows are B or 1.
            positions: [B, T] int64 of the chunk's tokens in their rows, -1 for padding.
            scores: [A, B, T] float32 of the chunk's tokens; those of `self.scores` are up to date. Needed when N > 1.

        Returns:
            [A, B, T] int64, the slot that each token of the chunk is written to; -1 for those that were dropped again,
            and for padding.
        """
        heads, batch = self.positions.shape[:2]
        first, columns = cascades.slots, positions.shape[1]
        nobody = first + columns
        known = self.scores
        if known is not None and columns == 1:
            known[..., -1:] = scores  # the spare column is where a single token's name points to
        elif known is not None:
            known = torch.cat([known[..., :-1], scores], dim=2)

        def take(source: Tensor, index: Tensor) -> Tensor:
            return source.gather(2, index.expand(heads, batch, -1))

        def score(tokens: Tensor) -> Tensor:
            return known.gather(2, tokens.clamp(max=nobody - 1))

        offered = plan.tokens.expand(heads, batch, -1)
        dropped, writes = [], []
        for level, step in enumerate(plan.levels):
            ring = self.rings[:, :, level]
            entries = torch.cat([take(ring, step.newest), take(offered, step.accepted)], dim=2)
            if step.challengers is not None:
                challengers = take(offered, step.challengers.clamp(min=0))
                is_contested = (step.challengers >= 0).expand_as(entries)
                # Of equals the later one stays.
                wins = is_contested & (score(challengers) >= score(entries))
                dropped.append(torch.where(wins, entries, challengers).masked_fill(~is_contested, nobody))
                entries = torch.where(wins, challengers, entries)
            pushed = torch.where(step.pushed < 0, take(ring, step.pushed_old), take(entries, step.pushed.clamp(min=0)))
            offered = pushed.masked_fill(~step.is_pushed, nobody)
            writes.append((ring, step.places, take(entries, step.kept)))
        if len(plan.levels) == cascades.num_cascades:
            dropped.append(offered)

        slots = self._slots(cascades, plan, positions, dropped)
        named = torch.nn.functional.pad(slots, (0, 1), value=first)
        for ring, places, tokens in writes:
            at = torch.where(tokens < first, tokens, named.gather(2, (tokens - first).clamp(0, columns)))
            ring.scatter_(2, places.expand_as(at), at)
        target = torch.where(slots < 0, first, slots)
        self.positions.scatter_(2, target, positions.expand_as(target))
        self.positions[..., -1] = -1
        if self.scores is not None:
            self.scores.scatter_(2, target, scores)
        return slots

    def _slots(self, cascades: Cascades, plan: Plan, positions: Tensor, dropped: list[Tensor]) -> Tensor:
        """Give the tokens that stay the slots of those that went."""
        first, columns = cascades.slots, positions.shape[1]
        heads, batch = self.positions.shape[:2]
        free = torch.cat([plan.empty.expand(heads, batch, -1), *dropped], dim=2)
        # As many tokens stay as slots are free: the i-th takes the i-th.
        if columns == 1 and free.shape[2]:
            slots = free.amin(dim=2, keepdim=True)
        elif free.shape[2]:
            is_gone = torch.zeros(heads, batch, columns + 1, dtype=torch.bool, device=free.device)
            gone = torch.where((free >= first) & (free < first + columns), free - first, columns)
            stays = (positions >= cascades.sinks) & ~is_gone.scatter_(2, gone, True)[..., :-1]
            is_free = free < first
            rank = torch.where(is_free, is_free.cumsum(dim=2) - 1, columns)
            ranked = free.new_full((heads, batch, columns + 1), first).scatter_(2, rank, free)
            slots = ranked.gather(2, (stays.cumsum(dim=2) - 1).clamp(min=0)).masked_fill(~stays, -1)
        else:
            slots = positions.new_full((heads, batch, columns), -1)
        slots = torch.where((positions >= 0) & (positions < cascades.sinks), positions, slots)
        return slots.masked_fill(positions < 0, -1)
