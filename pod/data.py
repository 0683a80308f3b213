"""The DataModule: batches of prepared samples in an order that a resumed run goes on with exactly."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from pod.prepared import PreparedData, PreparedDataset, collate


class ResumableSampler(DistributedSampler):
    """Yields the sample numbers of one epoch for one rank: a permutation that (seed, epoch) alone determine.

    Step s of an epoch takes the next `micro_batch_size * num_replicas` samples of the permutation, of which each rank
    has a contiguous part, so that an optimiser step of the same size sees the same samples however many ranks share
    it. What is left at the end of an epoch and fills no step is dropped.

    It derives from torch's DistributedSampler so that Lightning recognises that the work is split and puts no sampler
    of its own in its place, which would shuffle again and know of no position.

    Attributes:
        epoch: which permutation; set by the loader.
        start: samples of the permutation, over all ranks, that are skipped because they were trained on already.
    """

    def __init__(
        self,
        dataset: Dataset,
        micro_batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed)
        self.micro_batch_size = micro_batch_size
        self.start = 0

    @property
    def step(self) -> int:
        """Samples that all ranks together take at once."""
        return self.micro_batch_size * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        count = len(self.dataset)
        order = np.random.default_rng((self.seed, self.epoch)).permutation(count) if self.shuffle else np.arange(count)
        for first in range(self.start, count - self.step + 1, self.step):
            mine = first + self.rank * self.micro_batch_size
            yield from order[mine : mine + self.micro_batch_size].tolist()

    def __len__(self) -> int:
        return len(self.dataset) // self.step * self.micro_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Nothing: the loader counts epochs. Lightning calls this only after it has asked the loader to iterate."""


class ResumableLoader(StatefulDataLoader):
    """A StatefulDataLoader whose state is a position in the data and nothing else: {"epoch", "samples"}.

    The position counts the batches handed out, not those that workers have prefetched. Because the order of samples
    follows from it alone, a run may go on with another number of workers or ranks, which torchdata's own state
    (a snapshot of every worker) does not allow.

    Iterating begins the next epoch, or where `load_state_dict` said. Needs a `ResumableSampler`.

    Attributes:
        in_flight: called when the state is asked for: how many batches were handed out but not trained on.
    """

    epoch = 0
    samples = 0  # of this epoch, over all ranks
    in_flight: Callable[[], int] | None = None
    _begun = False  # whether the next iteration is a new epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        # A generator, so nothing is prefetched for an iterator that is made and thrown away, as Lightning does.
        sampler = self.sampler
        if self._begun or self.samples + sampler.step > len(sampler.dataset):
            self.epoch += 1
            self.samples = 0
        self._begun = True
        sampler.epoch, sampler.start = self.epoch, self.samples
        iterator = super().__iter__()
        try:
            for batch in iterator:
                self.samples += sampler.step
                yield batch
        finally:
            # The last references: workers end now. Left to the garbage collector, each is waited for in vain for 5 s.
            if self._iterator is iterator:
                self._iterator = None
            del iterator

    def state_dict(self) -> dict[str, int]:
        unused = self.in_flight() if self.in_flight is not None else 0
        return {"epoch": self.epoch, "samples": max(0, self.samples - unused * self.sampler.step)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epoch, self.samples = state_dict["epoch"], state_dict["samples"]
        self._begun = False


def _outlive_interrupt(worker: int) -> None:
    """A terminal's Ctrl-C reaches the workers too: the step that ends before the checkpoint still needs them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class PodDataModule(LightningDataModule):
    """Reads a prepared directory; its state is part of Lightning's checkpoints, so that a resumed run goes on exactly.

    Under a distributed strategy the ranks share the samples as the strategy's `distributed_sampler_kwargs` say
    (num_replicas, rank).

    Args:
        path: a prepared directory.
        sequence_length: tokens of a sample; must be the prepared one.
        micro_batch_size: samples of one forward on one rank.
        seed: of the order of the samples.
        num_workers: processes that read; the samples and their order do not depend on it.
        shuffle: a new permutation each epoch; else the order in the files.
        validation_path: another prepared directory to validate on: its validation split if it has one, else its
            train split. By default the validation split of `path`.
        length_intervals: what the training documents must have been drawn by; None takes any data.

    Raises:
        FileNotFoundError: no prepared directory there; the message has the command that makes one.
        ValueError: a `sequence_length` or `length_intervals` other than the prepared ones, a file of the wrong size, a
            number out of range.
    """

    def __init__(
        self,
        path: str | Path,
        sequence_length: int,
        micro_batch_size: int,
        seed: int = 0,
        num_workers: int = 0,
        shuffle: bool = True,
        validation_path: str | Path | None = None,
        length_intervals: list[int] | None = None,
    ) -> None:
        super().__init__()
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is {micro_batch_size}: at least 1")
        if seed < 0 or num_workers < 0:
            raise ValueError(f"seed is {seed} and num_workers is {num_workers}: neither may be negative")
        self.sequence_length = sequence_length
        self.micro_batch_size = micro_batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.shuffle = shuffle
        self.prepared = self._open(path)
        if length_intervals is not None and length_intervals != self.prepared.length_intervals:
            raise ValueError(
                f"length_intervals is {length_intervals}, but {path} was prepared with "
                f"{self.prepared.length_intervals}: set it to null, or prepare again with --length-intervals "
                f"{' '.join(map(str, length_intervals))}"
            )
        self.validation = self._open(validation_path) if validation_path is not None else None
        self._loader: ResumableLoader | None = None
        self._resume: dict[str, Any] | None = None

    def _open(self, path: str | Path) -> PreparedData:
        prepared = PreparedData(path)
        prepared.require_length(self.sequence_length)
        return prepared

    def setup(self, stage: str | None = None) -> None:
        """Forget the position of an earlier `fit` with this object."""
        self._loader = None

    def train_dataloader(self) -> ResumableLoader:
        """The training loader: batches of [micro_batch_size, T], at the position that `load_state_dict` was given.

        Raises:
            ValueError: the split is missing or holds too few samples for one step of all ranks.
        """
        dataset = PreparedDataset(self.prepared, "train")
        share = (self.trainer.distributed_sampler_kwargs if self.trainer is not None else None) or {}
        sampler = ResumableSampler(
            dataset,
            micro_batch_size=self.micro_batch_size,
            num_replicas=share.get("num_replicas", 1),
            rank=share.get("rank", 0),
            seed=self.seed,
            shuffle=self.shuffle,
        )
        if len(dataset) < sampler.step:
            raise ValueError(
                f"{self.prepared.path} has {len(dataset)} training samples, one step takes {sampler.step} "
                f"(micro_batch_size {self.micro_batch_size} x {sampler.num_replicas} data-parallel ranks): "
                "lower micro_batch_size or prepare more text"
            )
        loader = ResumableLoader(
            dataset,
            batch_size=self.micro_batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            drop_last=True,
            worker_init_fn=_outlive_interrupt,
        )
        loader.in_flight = self._in_flight
        if self._resume is not None:
            loader.load_state_dict(self._resume)
        elif self._loader is not None:  # Lightning asks again with reload_dataloaders_every_n_epochs
            loader.load_state_dict({"epoch": self._loader.epoch + 1, "samples": 0})
        self._loader, self._resume = loader, None
        return loader

    def val_dataloader(self) -> DataLoader:
        """The validation loader, in the order of the files; the last batch may be smaller.

        Raises:
            ValueError: there is no validation split.
        """
        prepared = self.validation or self.prepared
        split = "train" if self.validation and "validation" not in prepared.splits else "validation"
        if split not in prepared.splits:
            raise ValueError(
                f"{prepared.path} has no validation split: prepare with --held-out 0.01, name another prepared "
                "directory as validation_path, or train without validation (limit_val_batches=0)"
            )
        return DataLoader(
            PreparedDataset(prepared, split),
            batch_size=self.micro_batch_size,
            shuffle=False,
            num_workers=self.num_workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_outlive_interrupt,
        )

    def _in_flight(self) -> int:
        """Batches that Lightning has taken but whose step is not done: 1 when a checkpoint is written during a step."""
        if self.trainer is None:
            return 0
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return progress.ready - progress.processed

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch trained on: epoch, samples of it over all ranks; and what it counts in."""
        position = self._resume or {"epoch": 0, "samples": 0}
        if self._loader is not None:
            position = self._loader.state_dict()
        return {
            "epoch": position["epoch"],
            "samples": position["samples"],
            "seed": self.seed,
            "shuffle": self.shuffle,
            "data": self.prepared.fingerprint("train"),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next `train_dataloader` go on at a saved position.

        Raises:
            ValueError: the position belongs to other data, or to another seed or shuffle.
        """
        mine = self.state_dict()
        for name in ("seed", "shuffle"):
            if state_dict[name] != mine[name]:
                raise ValueError(
                    f"the checkpoint's data position belongs to {name}={state_dict[name]}, this run has "
                    f"{name}={mine[name]}: set {name}={state_dict[name]} to resume it"
                )
        if state_dict["data"] != mine["data"]:
            raise ValueError(
                f"the checkpoint was trained on other samples than those in {self.prepared.path}: name the prepared "
                "directory it was trained on, or start a new run from its weights"
            )
        self._resume = {"epoch": state_dict["epoch"], "samples": state_dict["samples"]}
