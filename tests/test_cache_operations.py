"""Random operations on a `PodCache`, one after the other: every step's logits are those of an oracle, row by row.

Where nothing is dropped the oracle is the row's whole text again, without a cache. Else it is a twin: a cache of that
row alone, never padded, cut, moved, copied or cropped, which was given the same turns; it also keeps the same tokens.
What is refused is refused by a ValueError and leaves the cache as it was.
"""

import copy
import pickle
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_cache import EIGHT, build, fed, recomputed, tokens
from test_peek import MODELS
from torch import Tensor

import pod
from pod.eviction import (
    CAKE,
    H2O,
    TOVA,
    AdaKV,
    Cascade,
    ChunkKV,
    Combined,
    CriticalKV,
    ExpectedAttention,
    KeyDiff,
    LagKV,
    LMInfinite,
    PyramidKV,
    Quest,
    RecentReader,
    SageKV,
    ShadowKV,
    SnapKV,
    StreamingLLM,
    ZigZagKV,
)

SNAP = {"window": 4, "kernel_size": 3}
WHOLE = {"none": {}, "small": {"crop_slack": 2}, "8-bits": {"quantization": EIGHT}}
TWINS = {
    "tau": {"tau": 0.3},
    "snapkv": {"eviction": SnapKV(16, **SNAP)},
    "snapkv-once": {"eviction": SnapKV(16, **SNAP, query_aware=False)},
    "snapkv-share": {"eviction": SnapKV(0.5, **SNAP)},
    "h2o": {"eviction": H2O(12)},
    "h2o-share": {"eviction": H2O(0.5)},
    "h2o-once": {"eviction": H2O(12, query_aware=False)},
    "tova": {"eviction": TOVA(8)},
    "adakv": {"eviction": AdaKV(16, **SNAP)},
    "cake": {"eviction": CAKE(16, window=4)},
    "keydiff": {"eviction": KeyDiff(12, every=3)},
    "pyramidkv": {"eviction": PyramidKV(14, **SNAP, beta=2)},
    "pyramidkv-share": {"eviction": PyramidKV(0.4, **SNAP)},
    "zigzagkv": {"eviction": ZigZagKV(16, **SNAP)},
    "criticalkv": {"eviction": CriticalKV(16, **SNAP)},
    "chunkkv-once": {"eviction": ChunkKV(16, **SNAP, chunk_size=3, query_aware=False)},
    "expected": {"eviction": ExpectedAttention(14, sinks=2, future=16, window=1)},
    "lagkv": {"eviction": LagKV(12, sinks=2, lag=3, every=2)},
    "combined": {"eviction": Combined(16, SnapKV(16, **SNAP), CAKE(16, window=4))},
    "shadowkv": {"eviction": ShadowKV(16, page_size=4, recent=2, outliers=0.4)},
    "recent-pool": {"eviction": RecentReader(9, sinks=2), "value_pool": 9},
    "sagekv-once": {"eviction": SageKV(0.5, query_aware=False)},
    "quest": {"eviction": Quest(8, page_size=4, dense_layers=1)},
    "quest-share": {"eviction": Quest(0.5, page_size=4, dense_layers=0)},
    "quest-pool": {"eviction": Quest(8, page_size=4, dense_layers=1), "value_pool": 10},
    "streaming": {"eviction": StreamingLLM(12)},
    "streaming-absolute": {"eviction": StreamingLLM(12, positions="absolute")},
    "streaming-share": {"eviction": StreamingLLM(0.5)},
    "lminfinite": {"eviction": LMInfinite(12)},
    "cascade": {"eviction": Cascade(12, sinks=4, num_cascades=2)},
    "cascade-share": {"eviction": Cascade(0.5, sinks=4, num_cascades=2)},
}


def is_taken(which: str, name: str) -> bool:
    """A model's cache can have these settings."""
    try:
        return bool(pod.PodCache(build(*MODELS[which]).config, **(WHOLE | TWINS)[name]))
    except ValueError:
        return False


CASES = [(which, name) for name in WHOLE | TWINS for which in MODELS if is_taken(which, name)]


@dataclass
class Row:
    """What one row was given: turns of tokens, and whether their forward had several columns."""

    turns: list[tuple[list[int], bool]] = field(default_factory=list)
    twin: pod.PodCache | None = None

    def crop(self, removed: int) -> None:
        self.twin = None
        while removed:
            turn, several = self.turns.pop()
            if len(turn) > removed:
                self.turns.append((turn[:-removed], several))
            removed -= min(removed, len(turn))


@dataclass
class World:
    """A cache, its rows, and the columns [B, n] of all forwards."""

    cache: pod.PodCache
    rows: list[Row] = field(default_factory=list)
    ids: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))
    mask: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))
    has_failed: bool = False
    peek: tuple | None = None

    def take(self, rows: Tensor) -> None:
        self.rows = [copy.deepcopy(self.rows[row]) for row in rows.tolist()]
        self.ids, self.mask = self.ids[rows], self.mask[rows]

    def seen(self) -> tuple:
        cache = self.cache
        held = [cache.positions(layer).tolist() for layer in range(len(cache))] if cache.is_initialized else None
        return cache.get_seq_length(), cache.batch_size, held


class Operations(RuleBasedStateMachine):
    LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=3)
    PROMPTS = st.lists(st.sampled_from([0, 1, 2, 5, 11, 17, 24, 30]), min_size=1, max_size=3).filter(any)
    SEEDS = st.integers(0, 10**6)
    cases = CASES

    @initialize(data=st.data(), limit=st.sampled_from([None, None, 400]))
    def make(self, data, limit):
        self.which, self.name = data.draw(st.sampled_from(self.cases))
        self.model, self.setting = build(*MODELS[self.which]), (WHOLE | TWINS)[self.name]
        self.world = World(pod.PodCache(self.model.config, max_length=limit, **self.setting))
        self.others: list[World] = []
        self.atol = 0.2 if self.name == "8-bits" else 1e-3

    # ------------------------------------------------------------------ the oracle

    def alone(self, twin: pod.PodCache, turn: list[int], several: bool) -> Tensor:
        """Logits of a turn of one row. It has a column of padding where else it would have fewer than its forward."""
        short = max(0, 1 + several - len(turn))
        ids = torch.tensor([[0] * short + turn])
        mask = torch.ones(1, twin.get_seq_length() + ids.shape[1], dtype=torch.long)
        padding = () if twin._rows.padding is None else twin._rows.padding
        for start, count in zip(twin._rows.starts, padding, strict=True):
            mask[:, start : start + int(count)] = 0
        mask[:, twin.get_seq_length() :][:, :short] = 0
        return fed(self.model, twin, ids, mask)[0, short:]

    def expected(self, row: Row, turn: list[int], several: bool) -> Tensor:
        if self.name in WHOLE:
            row.turns.append((turn, several))
            text = [token for each, _ in row.turns for token in each]
            return recomputed(self.model, torch.tensor([text]))[0, -len(turn) :] if turn else torch.zeros(0)
        if row.twin is None:
            row.twin = pod.PodCache(self.model.config, **self.setting)
            for before in row.turns:
                self.alone(row.twin, *before)
        row.turns.append((turn, several))
        return self.alone(row.twin, turn, several)

    def check(self, logits: Tensor, ids: Tensor, mask: Tensor, several: bool) -> None:
        """Logits [B, n, V] of the last n columns of a forward of ids [B, T] are the oracle's; count its columns."""
        world = self.world
        for number, row in enumerate(world.rows):
            wanted = self.expected(row, ids[number][mask[number].bool()].tolist(), several)
            count = min(len(wanted), logits.shape[1])
            if count:
                torch.testing.assert_close(logits[number, -count:], wanted[-count:], atol=self.atol, rtol=0)
        world.ids, world.mask = torch.cat([world.ids, ids], dim=1), torch.cat([world.mask, mask], dim=1)

    def attempt(self, operation):
        """What it returns; None where it is refused, and nothing has changed."""
        world = self.world
        before = None if world.has_failed else world.seen()
        try:
            result = operation()
        except ValueError as error:
            if "broke off" in str(error):
                assert world.has_failed
                self.reset()
            else:
                assert before in (None, world.seen()), error
            return None
        world.has_failed = False
        return True if result is None else result

    # ------------------------------------------------------------------ operations

    def columns(self, lengths: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """ids and mask [B, T] of a turn, left-padded, and the mask [B, n] of all columns with it."""
        lengths = torch.tensor((lengths * 12)[: len(self.world.rows)])
        count = max(1, int(lengths.max()))
        mask = (torch.arange(count) >= count - lengths[:, None]).long()
        return tokens(len(lengths), count, seed=seed) * mask, mask, torch.cat([self.world.mask, mask], dim=1)

    def feed(self, lengths: list[int], seed: int, size: int = 0) -> None:
        """A forward, or with a size a prefill in chunks of so many columns."""
        cache, is_first = self.world.cache, not self.world.ids.shape[1]
        ids, mask, whole = self.columns(lengths, seed)
        count = ids.shape[1]
        if not size:
            logits = self.attempt(lambda: fed(self.model, cache, ids, whole))
            if logits is not None:
                self.check(logits, ids, mask, is_first or count > 1)
            return

        def chunks():
            with cache.prefill():
                return fed(self.model, cache, ids, whole, tuple(len(part) for part in torch.arange(count).split(size)))

        logits = self.attempt(chunks)
        # Methods by places act on every chunk, all others when the prefill ends.
        width = size if cache._storage.is_fixed else count
        for part in torch.arange(count).split(width) if logits is not None else ():
            self.check(logits[:, part], ids[:, part], mask[:, part], True)

    @precondition(lambda self: not self.world.ids.shape[1])
    @rule(lengths=PROMPTS, seed=SEEDS, size=st.sampled_from([0, 0, 0, 1, 3, 7]))
    def prompt(self, lengths, seed, size):
        self.world = World(self.world.cache, peek=self.world.peek, has_failed=self.world.has_failed)
        self.world.rows = [Row() for _ in lengths]
        self.world.ids = self.world.mask = torch.zeros(len(lengths), 0, dtype=torch.long)
        self.feed(lengths, seed, size)

    @precondition(lambda self: self.world.ids.shape[1])
    @rule(lengths=LENGTHS, seed=SEEDS, size=st.sampled_from([0, 0, 1, 3]))
    def turn(self, lengths, seed, size):
        self.feed(lengths[:1] if size else lengths, seed, size)  # a later chunk with padding would be refused

    @precondition(lambda self: self.world.ids.shape[1])
    @rule(count=st.integers(1, 6), seed=SEEDS)
    def steps(self, count, seed):
        for step in range(count):
            if self.world.ids.shape[1]:  # a forward that broke off may have cost all
                self.feed([1], seed + step)

    @precondition(lambda self: self.world.ids.shape[1])
    @rule(lengths=LENGTHS, count=st.integers(1, 4), seed=SEEDS)
    def generate(self, lengths, count, seed):
        world = self.world
        new, mask, whole = self.columns(lengths, seed)
        ids = torch.cat([world.ids, new], dim=1)
        options = {"max_new_tokens": count, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        options |= {"attention_mask": whole, "past_key_values": world.cache}
        out = self.attempt(lambda: self.model.generate(ids, **options))
        if out is not None:
            self.check(out.logits[0][:, None], new, mask, new.shape[1] > 1)
            for step in range(1, count):
                one = out.sequences[:, ids.shape[1] + step - 1][:, None]
                self.check(out.logits[step][:, None], one, torch.ones_like(one), False)

    @precondition(lambda self: self.world.ids.shape[1])
    @rule(removed=st.integers(1, 9))
    def crop(self, removed):
        world = self.world
        if self.attempt(lambda: world.cache.crop(-removed)):
            for row in world.rows:
                row.crop(removed)
            world.ids, world.mask = world.ids[:, :-removed], world.mask[:, :-removed]

    @precondition(lambda self: self.world.ids.shape[1])
    @rule(picks=st.lists(st.integers(0, 7), min_size=1, max_size=4), as_mask=st.booleans())
    def select(self, picks, as_mask):
        world, rows = self.world, torch.tensor(picks) % len(self.world.rows)
        given = torch.zeros(len(world.rows), dtype=torch.bool).index_fill(0, rows, True) if as_mask else rows
        if self.attempt(lambda: world.cache.batch_select_indices(given)):
            world.take(given.nonzero()[:, 0] if as_mask else rows)

    @precondition(lambda self: self.world.ids.shape[1] and len(self.world.rows) < 3)
    @rule(count=st.integers(1, 3), forks=st.booleans())
    def repeat(self, count, forks):
        cache = self.world.cache
        act = cache.fork if forks else cache.batch_repeat_interleave
        if self.attempt(lambda: act(count)):
            self.world.take(torch.arange(len(self.world.rows)).repeat_interleave(count))

    @precondition(lambda self: len(self.others) < 2)
    @rule()
    def copied(self):
        self.others.append(copy.deepcopy(World(**vars(self.world) | {"peek": None})))

    @precondition(lambda self: self.others)
    @rule(number=st.integers(0, 1))
    def swap(self, number):
        number %= len(self.others)
        self.world, self.others[number] = self.others[number], self.world

    @precondition(lambda self: self.world.ids.shape[1] and self.world.peek is None)
    @rule()
    def file(self):
        with TemporaryDirectory() as folder:
            path = f"{folder}/cache"
            if self.attempt(lambda: self.world.cache.save(path)):
                before = self.world.seen()
                self.world.cache = pod.PodCache.load(path, self.model.config)
                assert self.world.seen() == before

    @precondition(lambda self: self.world.ids.shape[1] and self.world.peek is None)
    @rule()
    def peek(self):
        world, context = self.world, self.world.cache.peek()
        if self.attempt(context.__enter__):
            world.peek = context, copy.deepcopy(world.rows), world.ids, world.mask, world.seen()

    @precondition(lambda self: self.world.peek is not None)
    @rule()
    def leave(self):
        context, rows, ids, mask, seen = self.world.peek
        context.__exit__(None, None, None)
        self.world = World(self.world.cache, rows, ids, mask)
        assert self.world.seen() == seen

    @rule()
    def pickled(self):
        if self.world.peek is None:
            before = self.world.seen()
            self.world.cache = pickle.loads(pickle.dumps(self.world.cache))
            assert self.world.seen() == before

    @precondition(lambda self: self.world.ids.shape[1])
    @rule(layer=st.integers(0, 4), count=st.sampled_from([1, 1, 2, 6]), seed=SEEDS, part=st.sampled_from(["", "mlp"]))
    def fail(self, layer, count, seed, part):
        """A forward breaks off before a layer, or behind its attention."""
        world, (ids, _, whole) = self.world, self.columns([count], seed)

        def fails(*args):
            raise MemoryError

        handle = self.model.model.layers[layer].get_submodule(part).register_forward_pre_hook(fails)
        try:
            self.attempt(lambda: fed(self.model, world.cache, ids, whole))
        except MemoryError:
            world.has_failed = True
        finally:
            handle.remove()

    @rule()
    def reset(self):
        self.world.cache.reset()
        self.world = World(self.world.cache, peek=self.world.peek)

    @invariant()
    def keeps_what_it_should(self):
        world = self.world
        if not world.ids.shape[1] or world.has_failed:
            return
        assert (world.cache.get_seq_length(), world.cache.batch_size) == (world.ids.shape[1], len(world.rows))
        for layer in range(len(world.cache)):
            for row, positions in zip(world.rows, world.cache.positions(layer), strict=True):
                if row.twin is not None:
                    assert listed(positions) == listed(row.twin.positions(layer)[0])
                elif self.name in WHOLE and self.which not in ("window", "streams"):
                    count = sum(len(turn) for turn, _ in row.turns)
                    assert listed(positions) == [list(range(count))] * len(positions)


def listed(positions: Tensor) -> list[list[int]]:
    """By head, without empty slots."""
    return [head[head >= 0].tolist() for head in positions]


class ManyOperations(Operations):
    """The same, more and longer."""


# The same ones in every run: among equal scores rounding may choose otherwise in a batch than in a row alone.
OPTIONS = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
Operations.TestCase.settings = settings(max_examples=14, stateful_step_count=12, **OPTIONS)
ManyOperations.TestCase.settings = settings(max_examples=100, stateful_step_count=20, **OPTIONS)
TestOperations = Operations.TestCase
TestManyOperations = pytest.mark.slow(ManyOperations.TestCase)
