"""One rank of the runs that test_strategy.py compares with one process: `python strategy_worker.py SPEC.json`.

The launcher sets LOCAL_RANK, MASTER_ADDR and MASTER_PORT. All runs of the file are trained one after the other in the
same processes, as starting up takes most of the time; rank r writes RUN.r.pt for each. A run may write a checkpoint
after a step (`save`: step and path), or begin with one (`resume`: path).
"""

import json
import os
import sys
from pathlib import Path

import lightning
import torch
import torch.distributed as dist

torch.set_num_threads(1)


class Recorded(lightning.Callback):
    """What the run did: samples seen, losses, the first step's gradients, norms, the last weights, all-to-all calls."""

    def __init__(self, sharded, save):
        self.sharded, self.save = sharded, save
        self.seen, self.losses, self.norms, self.gradients, self.saved = [], [], [], {}, {}

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.seen.append(batch["input_ids"][:, 0].tolist())
        self.losses.append(float(outputs["loss"]))  # divided by the micro-batches of a step
        if not trainer.fit_loop._should_accumulate():
            if self.sharded:
                self.norms.append(trainer.strategy.global_grad_norm())
            if self.save and trainer.global_step == self.save[0]:
                self.saved = self.weights_of(module)
                trainer.save_checkpoint(self.save[1])

    def on_before_optimizer_step(self, trainer, module, optimizer):
        from deepspeed.utils import safe_get_full_grad

        if trainer.fit_loop._should_accumulate():
            return
        if not self.gradients:
            gradient = safe_get_full_grad if self.sharded else (lambda parameter: parameter.grad)
            self.gradients = {name: gradient(parameter).float().clone() for name, parameter in trained(module)}
        if not self.sharded:
            self.norms.append(float(torch.nn.utils.get_total_norm([p.grad for _, p in trained(module)])))

    def weights_of(self, module):
        from deepspeed.utils import safe_get_full_fp32_param

        weight = safe_get_full_fp32_param if self.sharded else torch.Tensor.detach
        return {name: weight(parameter).clone() for name, parameter in trained(module)}

    def on_train_end(self, trainer, module):
        self.weights = self.weights_of(module)
        self.rotary = module.model.model.rotary_emb.inv_freq.clone()
        self.bytes = states_bytes(trainer.strategy.deepspeed_engine) if module.kept else []


def trained(module):
    return [(name, parameter) for name, parameter in module.model.named_parameters() if parameter.requires_grad]


def states_bytes(engine):
    """What ZeRO-3 keeps on this rank: parameters, gradients, optimiser."""
    optimizer = engine.optimizer
    states = [value for state in optimizer.optimizer.state.values() for value in state.values() if value.dim()]
    weights = [parameter.ds_tensor for parameter in engine.parameters()]
    optimizer_states = [*states, *optimizer.fp32_partitioned_groups_flat]
    sums = [sum(tensor.nbytes for tensor in tensors) for tensors in (weights, optimizer_states)]
    return [sums[0], optimizer.grad_partitions_flat_buffer.nbytes, sums[1]]


def draw_adapters(model):
    """The same adapters in every process: where they are drawn, how many numbers were drawn before may differ."""
    for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        parameter.data.normal_(std=0.2, generator=torch.Generator().manual_seed(number))


def train(run, spec):
    import pod
    from pod.training.data import PodDataModule
    from pod.training.module import PodModule

    class Module(PodModule):
        kept = {}  # what the first forward saved for its backward, by address

        def training_step(self, batch, index):
            if not run.get("bytes") or self.kept:
                return super().training_step(batch, index)
            self.kept = {}

            def pack(tensor):
                pointer = tensor.untyped_storage().data_ptr()
                if all(pointer != parameter.untyped_storage().data_ptr() for parameter in self.parameters()):
                    self.kept[pointer] = tensor  # kept, so that no address is used twice
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = super().training_step(batch, index)
            self.kept = {"bytes": sum(tensor.untyped_storage().nbytes() for tensor in self.kept.values())}
            return loss

        def configure_model(self):
            super().configure_model()
            if run["module"].get("lora"):
                draw_adapters(self.model)
            self.loaded = sum(p.numel() for p in self.parameters())
            if run["checkpointing"] is not None:
                kind = {"use_reentrant": run["checkpointing"]}
                self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kind)

    os.environ["POD_ATTENTION_BACKEND"] = run["backend"]
    recorded = Recorded(run["stage"] > 0, run["save"])
    strategy = "ddp"
    if run["stage"]:
        strategy = pod.UlyssesDeepSpeedStrategy(run["sequence_parallel_size"], stage=run["stage"], **run["offload"])
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=spec["world_size"],
        strategy=strategy,
        precision=run["precision"],
        max_steps=spec["steps"],
        max_epochs=-1,
        accumulate_grad_batches=run["accumulate"],
        gradient_clip_val=spec["clip"],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recorded],
    )
    sections = spec["module"] | run["module"]
    sections["model"] = {"base": run["base"], **spec["module"]["model"], **run["module"].get("model", {})}
    module = Module(**sections, blocks=run["blocks"])
    data = PodDataModule(run["data"], run["length"], micro_batch_size=spec["micro_batch_size"], seed=3)
    calls, exchange = [], dist.all_to_all_single

    def counted(received, sent, **options):
        calls.append(sent.numel() * sent.element_size())
        return exchange(received, sent, **options)

    dist.all_to_all_single = counted
    trainer.fit(module, data, ckpt_path=run["resume"], weights_only=True)
    dist.all_to_all_single = exchange
    if run["stage"]:
        assert strategy.sequence_group is None and strategy.model is module, "torn down"
    return {
        "seen": recorded.seen,
        "losses": recorded.losses,
        "norms": recorded.norms,
        "gradients": recorded.gradients,
        "weights": recorded.weights,
        "saved": recorded.saved,
        "rotary": recorded.rotary,
        "loaded": module.loaded,
        "calls": calls,
        "groups": {name: trainer.distributed_sampler_kwargs[name] for name in ("num_replicas", "rank")},
        "flops": module.flops_per_token(),
        "bytes": [*recorded.bytes, *module.kept.values()],
    }


if __name__ == "__main__":
    path = Path(sys.argv[1])
    spec = json.loads(path.read_text())
    for name, run in spec["runs"].items():
        torch.save(train(run, spec), path.parent / f"{name}.{os.environ['LOCAL_RANK']}.pt")
