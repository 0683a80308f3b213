"""`UlyssesDeepSpeedStrategy`: Lightning's DeepSpeed strategy with sequence parallelism, on CPUs (gloo) and GPUs (NCCL).

    trainer = lightning.Trainer(devices=8, strategy=pod.UlyssesDeepSpeedStrategy(sequence_parallel_size=4, stage=3))

ZeRO shards over all processes; consecutive ones form sequence-parallel groups. deepspeed is imported only when a
strategy is made.
"""

import atexit
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn

from pod.extras import require
from pod.model.decoder import PodAttention, PodDecoderLayer
from pod.model.sequence_parallel import SequenceGroup

COMPLETE = "complete.json"  # in a checkpoint's directory: all shards are written, and by how many processes
UNIVERSAL = "universal"  # beside its shards, while it is read by another number of processes


def world_size_of(checkpoint: Path) -> int:
    """How many processes wrote a checkpoint directory."""
    return json.loads((checkpoint / COMPLETE).read_text())["world_size"]


class UlyssesDeepSpeedStrategy(DeepSpeedStrategy):
    """DeepSpeed ZeRO whose ranks share sequences in groups of `sequence_parallel_size`.

    Ranks 0 .. P-1 are the first group, P .. 2P-1 the second, and so on: a group should fit into one machine. All ranks
    of a group read the same sample (`distributed_sampler_kwargs` count groups), and each runs its part of it.

    The loss is the token mean inside a group, then the mean over groups and micro-batches. A rank knows only its own
    tokens' part of the sum, and DeepSpeed averages gradients over all ranks, P of which make one group; so a rank's
    loss must be

        P * (sum of its own tokens' losses) / (number of targets in the group's micro-batch)

    which `PodModule` computes. This is exact on every ZeRO stage because DeepSpeed is told nothing of the groups: with
    an `mpu` the right factor would depend on stage and `reduce_scatter`. Accumulation divides once (by Lightning).

    With precision bf16-mixed DeepSpeed loads the base in bfloat16 and makes its float32 weights from that: those of a
    base in float32 are rounded once, when a run begins. A checkpoint keeps them in float32.

    Args:
        sequence_parallel_size: P, ranks that share a sequence; 1 is plain data parallelism.
        stage: of ZeRO: 1 shards the optimiser's state, 2 the gradients too, 3 the parameters too.
        logging_batch_size_per_gpu: samples of a micro-batch, for DeepSpeed's own throughput log alone.
        timeout: how long a collective may wait. Where a launcher starts all processes at once, the others wait here
            for what the first one does alone (the analysis that finds the blocks).
        **settings: further arguments of Lightning's `DeepSpeedStrategy`.

    Attributes:
        sequence_group: this rank's group, None when P is 1; there as soon as processes are connected, which is before
            `configure_model`.

    Raises:
        ImportError: deepspeed is not installed.
        ValueError: P < 1, or the processes are no multiple of P (when the Trainer is made).
    """

    def __init__(
        self,
        sequence_parallel_size: int = 1,
        stage: int = 3,
        logging_batch_size_per_gpu: int = 1,
        timeout: timedelta = timedelta(hours=2),
        **settings: Any,
    ) -> None:
        require("train", "accelerate", "deepspeed", what="trainer.strategy=deepspeed")
        if sequence_parallel_size < 1:
            raise ValueError(f"sequence_parallel_size must be at least 1, got {sequence_parallel_size}")
        super().__init__(
            stage=stage, logging_batch_size_per_gpu=logging_batch_size_per_gpu, timeout=timeout, **settings
        )
        # AdamW is torch's, also offloaded: DeepSpeed's own has to be compiled first.
        self.config.setdefault("zero_force_ds_cpu_optimizer", False)
        self.sequence_parallel_size = sequence_parallel_size
        self.sequence_group: SequenceGroup | None = None
        self._hf_config: Any = None

    @property
    def _on_cpu(self) -> bool:
        return isinstance(self.accelerator, CPUAccelerator)

    def _configure_launcher(self) -> None:
        # Called when the Trainer is made: before any other process is started.
        count = self.num_nodes * self.num_processes
        if count % self.sequence_parallel_size:
            raise ValueError(
                f"{count} processes ({self.num_nodes} machines x {self.num_processes} devices) cannot form groups of "
                f"sequence_parallel_size={self.sequence_parallel_size}: the processes must be a multiple of it"
            )
        super()._configure_launcher()

    # Connecting the processes. Lightning allows DeepSpeed on CUDA alone; on a CPU we take its steps without its checks.

    def setup_environment(self) -> None:
        if self._on_cpu:
            super(DeepSpeedStrategy, self).setup_environment()
        else:
            super().setup_environment()

    def setup_distributed(self) -> None:
        if self._on_cpu:
            reset_seed()
            self.set_world_ranks()
            self._init_deepspeed_distributed()
        else:
            super().setup_distributed()

    def _init_deepspeed_distributed(self) -> None:
        if self._on_cpu:
            import deepspeed

            # Shared-memory collectives would be compiled now, for half a minute, and need a compiler.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        super()._init_deepspeed_distributed()
        atexit.unregister(_disconnect)
        atexit.register(_disconnect)
        size = self.sequence_parallel_size
        if size > 1:
            # Every process takes part in making every group.
            firsts = range(0, self.world_size, size)
            groups = [dist.new_group(list(range(first, first + size)), timeout=self._timeout) for first in firsts]
            self.sequence_group = SequenceGroup(size, self.global_rank % size, groups[self.global_rank // size])

    @property
    def root_device(self) -> torch.device:
        """The process's device, with an index: Lightning hands that on to DeepSpeed, and a CPU has none."""
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Samplers share the samples out among groups, not among ranks."""
        size = self.sequence_parallel_size
        return {"num_replicas": self.world_size // size, "rank": self.global_rank // size}

    # The model

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around `configure_model`: under ZeRO-3, transformers' from_pretrained and from_config load and build sharded.

        Not inside `deepspeed.zero.Init`, as Lightning has it: a transformers model that is made by its class alone
        would then silently keep the initial weights of its torch layers.
        """
        from transformers.integrations import HfDeepSpeedConfig

        self._init_config_if_needed()
        self._hf_config = HfDeepSpeedConfig(self.config)  # transformers keeps a weak reference
        yield

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Any]:
        for part in model.modules():
            if isinstance(part, PodDecoderLayer | PodAttention):
                part.pre_bwd_fn = _Unhooked
        return super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        # Lightning has divided the loss by the number of accumulated micro-batches already.
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    def global_grad_norm(self) -> float | None:
        """The norm of the whole gradient of the last optimiser step, before clipping."""
        norm = self.deepspeed_engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def save_checkpoint(self, checkpoint: dict, filepath: str | Path, storage_options: Any = None) -> None:
        """Each process writes its shard into the directory `filepath`; when all have, `complete.json` is added.

        What lies there goes first: a killed run of more processes may have left shards of ranks that this one has not.
        """
        filepath = Path(self.broadcast(filepath))
        if self.is_global_zero and filepath.is_dir():
            (filepath / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(filepath)
        self.barrier()
        super().save_checkpoint(checkpoint, filepath, storage_options)  # ends with a barrier
        if self.is_global_zero:
            (filepath / COMPLETE).write_text(json.dumps({"world_size": self.world_size}))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, also one that another number of processes wrote.

        That one is first turned into DeepSpeed's universal form (every parameter and every state of the optimiser
        whole, in a file of its own), inside the checkpoint's directory; it takes 12 bytes per parameter there, and is
        removed when it is read. Every process must see the directory.

        Raises:
            ValueError: the shards cannot be converted, or do not hold what was frozen.
        """
        path = Path(checkpoint_path)
        complete = (path / COMPLETE).is_file()
        if not complete or world_size_of(path) == self.world_size:
            return super().load_checkpoint(checkpoint_path, weights_only)
        if self.exclude_frozen_parameters:
            raise ValueError(
                f"{path} was written by {world_size_of(path)} processes and this run has {self.world_size}: with "
                "lora.rank or distill.weight a checkpoint holds only what is trained, and is read by as many processes"
            )
        if self.is_global_zero:
            print(
                f"{path} was written by {world_size_of(path)} processes and this run has {self.world_size}: "
                "it is read by way of DeepSpeed's universal checkpoint",
                flush=True,
            )
        failure = self.broadcast(_make_universal(path) if self.is_global_zero else None)
        if failure:
            raise ValueError(f"{path} cannot be read by {self.world_size} processes: {failure}")
        # ZeRO-3 gives every group of parameters the settings of the first one, and all of them the same tensor as their
        # count of steps, which each would then advance.
        optimizer = self.deepspeed_engine.optimizer.optimizer
        decays = [group["weight_decay"] for group in optimizer.param_groups]
        config = self.deepspeed_engine._config
        config.load_universal_checkpoint = True
        try:
            state = super().load_checkpoint(checkpoint_path, weights_only)
        finally:
            config.load_universal_checkpoint = False
            self.barrier()
            if self.is_global_zero:
                shutil.rmtree(path / UNIVERSAL)
                (path / f"latest_{UNIVERSAL}").unlink()
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        for kept in optimizer.state.values():
            if isinstance(kept.get("step"), Tensor):
                kept["step"] = kept["step"].clone()
        return state

    def teardown(self) -> None:
        # The engine's hooks and cycles go first: what is left of them when the processes disconnect may abort them.
        engine, self._hf_config, self.sequence_group = self.model, None, None
        super().teardown()
        self.optimizers, self.lr_scheduler_configs = [], []
        if engine is not None and not isinstance(engine, lightning.LightningModule):
            engine.destroy()
        self.model = self.lightning_module
        del engine
        gc.collect()


class _Unhooked:
    """In the place of the autograd function that ZeRO-3 puts behind each output of a module (`module.pre_bwd_fn`).

    It gathers the module's own parameters before its backward and notes the module in a trace that must be the same on
    all ranks. A layer's outputs are the hidden states and the running anchors, of which a rank has as many as its heads
    need; but layers and attention have no parameters of their own, so nothing need be gathered or noted.
    """

    @staticmethod
    def apply(output: Tensor) -> Tensor:
        return output


def _make_universal(checkpoint: Path) -> str:
    """Convert a checkpoint's shards; why that failed, "" if it did not."""
    shutil.rmtree(checkpoint / UNIVERSAL, ignore_errors=True)
    # A process of its own: it starts workers, which a process with threads and connections must not do by forking.
    folders = ("--input_folder", str(checkpoint / "checkpoint"), "--output_folder", str(checkpoint / UNIVERSAL))
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *folders, "--inject_missing_state"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return "" if done.returncode == 0 else f"ds_to_universal failed: {done.stdout[-1000:]}"


def _disconnect() -> None:
    """At exit, not in `teardown`: a Trainer may fit, then validate, then fit again."""
    gc.collect()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
