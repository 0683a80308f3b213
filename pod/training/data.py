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

from pod.data.prepared import PreparedData, PreparedDataset, collate


class ResumableSampler(DistributedSampler):
    """Yields the sample numbers of one epoch for one rank: a permutation that (seed, epoch) alone determine.

    A micro-batch of all ranks takes the next `micro_batch_size * num_replicas` samples of the permutation, of which
    each rank has a contiguous part, so that an optimiser step of the same size sees the same samples however many ranks
    share it. An epoch ends with a whole optimiser step: what is left and fills none is dropped, and is other samples in
    the next epoch, whose permutation is another.

    It derives from torch's DistributedSampler so that Lightning recognises that the work is split and puts no sampler
    of its own in its place, which would shuffle again and know of no position.

    Args:
        accumulation: micro-batches of an optimiser step.

    Attributes:
        epoch: which permutation; set by the loader.
        start: samples of the permutation, over all ranks, that are skipped because they were trained on already.

    Raises:
        ValueError: the dataset has too few samples for one optimiser step; names the numbers.
    """

    def __init__(
        self,
        dataset: Dataset,
        micro_batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        accumulation: int = 1,
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed)
        self.micro_batch_size = micro_batch_size
        self.accumulation = accumulation
        self.start = 0
        if len(dataset) < self.step:
            raise ValueError(
                f"{len(dataset)} training samples, but one optimiser step takes {self.step} (micro_batch_size "
                f"{micro_batch_size} x {num_replicas} data-parallel ranks x {accumulation} accumulated micro-batches): "
                "lower tokens_per_batch or micro_batch_size, or prepare more text"
            )

    @property
    def micro_step(self) -> int:
        """Samples that all ranks together take at once."""
        return self.micro_batch_size * self.num_replicas

    @property
    def step(self) -> int:
        """Samples of an optimiser step, over all ranks."""
        return self.micro_step * self.accumulation

    @property
    def epoch_size(self) -> int:
        """Samples of an epoch, over all ranks: whole optimiser steps."""
        return len(self.dataset) // self.step * self.step

    def next_step(self, samples: int) -> int:
        """Where in an epoch the next whole optimiser step begins: `samples` itself, unless steps had another size."""
        return min(-(-samples // self.step) * self.step, self.epoch_size)

    def __iter__(self) -> Iterator[int]:
        count = len(self.dataset)
        order = np.random.default_rng((self.seed, self.epoch)).permutation(count) if self.shuffle else np.arange(count)
        for first in range(self.start, self.epoch_size, self.micro_step):
            mine = first + self.rank * self.micro_batch_size
            yield from order[mine : mine + self.micro_batch_size].tolist()

    def __len__(self) -> int:
        return self.epoch_size // self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Nothing: the loader counts epochs. Lightning calls this only after it has asked the loader to iterate."""


class ResumableLoader(StatefulDataLoader):
    """A StatefulDataLoader whose state is a position in the data and nothing else: {"epoch", "samples"}.

    The position counts the batches handed out, not those that workers have prefetched, and stands between two optimiser
    steps: the gradients of a step that is not done are in no checkpoint. Because the order of samples follows from it
    alone, a run may go on with another number of workers or ranks, which torchdata's own state (a snapshot of every
    worker) does not allow. Where optimiser steps have become larger, it moves on to where one of the new ones begins.

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
        if self._begun or self.samples >= sampler.epoch_size:
            self.epoch += 1
            self.samples = 0
        self._begun = True
        sampler.epoch, sampler.start = self.epoch, self.samples
        iterator = super().__iter__()
        try:
            for batch in iterator:
                self.samples += sampler.micro_step
                yield batch
        finally:
            # The last references: workers end now. Left to the garbage collector, each is waited for in vain for 5 s.
            if self._iterator is iterator:
                self._iterator = None
            del iterator

    def state_dict(self) -> dict[str, int]:
        unused = self.in_flight() if self.in_flight is not None else 0
        trained = max(0, self.samples - unused * self.sampler.micro_step)
        return {"epoch": self.epoch, "samples": trained // self.sampler.step * self.sampler.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epoch, self.samples = state_dict["epoch"], self.sampler.next_step(state_dict["samples"])
        self._begun = False


def _outlive_interrupt(worker: int) -> None:
    """A terminal's Ctrl-C reaches the workers too: the step that ends before the checkpoint still needs them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class PodDataModule(LightningDataModule):
    """Reads a prepared directory; its state is part of Lightning's checkpoints, so that a resumed run goes on exactly.

    Under a distributed strategy the ranks share the samples as the strategy's `distributed_sampler_kwargs` say
    (num_replicas, rank). An epoch is as many whole optimiser steps, of the Trainer's `accumulate_grad_batches`, as the
    data has samples for; the rest is dropped, and is drawn anew in each epoch.

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
        """Forget the position of an earlier `fit` with this object; refuse a split that is too small for one step.

        Here, because Lightning leaves DataLoader patched where an error comes out of `train_dataloader`, and loaders
        that are made then keep their workers for good.

        Raises:
            ValueError: as `train_dataloader`.
        """
        self._loader = None
        if stage == "fit":
            self._sampler()

    def _sampler(self) -> ResumableSampler:
        trainer, dataset = self.trainer, PreparedDataset(self.prepared, "train")
        share = (trainer.distributed_sampler_kwargs if trainer is not None else None) or {}
        try:
            return ResumableSampler(
                dataset,
                micro_batch_size=self.micro_batch_size,
                seed=self.seed,
                shuffle=self.shuffle,
                accumulation=trainer.accumulate_grad_batches if trainer is not None else 1,
                **share,
            )
        except ValueError as error:
            raise ValueError(f"{self.prepared.path}: {error}") from None

    def train_dataloader(self) -> ResumableLoader:
        """The training loader: batches of [micro_batch_size, T], at the position that `load_state_dict` was given.

        Raises:
            ValueError: the split is missing or holds too few samples for one optimiser step of all ranks.
        """
        sampler = self._sampler()
        loader = ResumableLoader(
            sampler.dataset,
            sampler=sampler,
            drop_last=True,
            **self._reading(),
            generator=torch.Generator(),  # iterators draw from it; from the global one dropout would resume elsewhere
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
        return DataLoader(PreparedDataset(prepared, split), **self._reading())

    def _reading(self) -> dict[str, Any]:
        """What both loaders are made with."""
        return {
            "batch_size": self.micro_batch_size,
            "num_workers": self.num_workers,
            "collate_fn": collate,
            # Pinning takes memory of the GPU too, which a run on the CPU leaves alone.
            "pin_memory": self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
            "worker_init_fn": _outlive_interrupt,
        }

    def _in_flight(self) -> int:
        """Batches that Lightning has taken but whose step is not done: 1 when a checkpoint is written during a step."""
        if self.trainer is None:
            return 0
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return progress.ready - progress.processed

    def batches_trained(self) -> int:
        """Of the epoch that `load_state_dict` goes on with, the batches on each rank that come before its position."""
        sampler = self._sampler()
        return sampler.next_step((self._resume or {"samples": 0})["samples"]) // sampler.micro_step

    def state_dict(self) -> dict[str, Any]:
        """The position after the last optimiser step: epoch, samples of it over all ranks; and what it counts in."""
        position = self._resume or {"epoch": 0, "samples": 0}
        if self._loader is not None:
            position = self._loader.state_dict()
        return {**position, "seed": self.seed, "shuffle": self.shuffle, "data": self.prepared.fingerprint("train")}

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
