"""`PodModule`: one step of learning, for PoD models and for their dense baselines (blocks of one layer)."""

import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
import torchmetrics
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, get_cosine_with_min_lr_schedule_with_warmup

from pod.blocks import LayerBlocks
from pod.files import opening
from pod.model.families import pod_config
from pod.model.memory import GPUS
from pod.model.sequence_parallel import SequenceGroup, SequenceShard, check_heads
from pod.model.weights import load_causal_lm
from pod.recipe.schema import steps, warmup_steps
from pod.recipe.sections import Distill, Lora, Model, Optimizer, Trainer
from pod.training.adapters import add_adapters, go_on_from, in_4_bits, without_adapters
from pod.training.base_model import first_config
from pod.training.data import PodDataModule
from pod.training.loss import IGNORED, chunked_cross_entropy, chunked_distillation, shifted
from pod_kernels import dispatch


class Sections(NamedTuple):
    """The recipe's sections that a step of learning depends on, by their names there."""

    model: Model
    trainer: Trainer
    optimizer: Optimizer
    distill: Distill
    lora: Lora


class PodModule(lightning.LightningModule):
    """Next-token training of a causal LM whose layers share distant scores.

    Projections that no output depends on (`share: kv`) are frozen.

    Args:
        model, trainer, optimizer, distill, lora: sections of a recipe, or plain dicts of them; None: as their keys'
            defaults. A checkpoint holds them as dicts.
        blocks: anchors `[L][H_kv]`; None is the dense model.
        bytes_per_token: 1.0 for byte tokenizers: bits per byte is then logged; None logs none.

    Raises:
        ValueError: a section that cannot be, distillation or adapters without a base, or 4 bits without adapters.
    """

    def __init__(
        self,
        model: Model | dict[str, Any],
        trainer: Trainer | dict[str, Any],
        optimizer: Optimizer | dict[str, Any] | None = None,
        distill: Distill | dict[str, Any] | None = None,
        lora: Lora | dict[str, Any] | None = None,
        blocks: list[list[int]] | None = None,
        bytes_per_token: float | None = None,
    ) -> None:
        super().__init__()
        given = zip(Sections.__annotations__.values(), (model, trainer, optimizer, distill, lora), strict=True)
        self.sections = Sections(*(section.model_validate({} if value is None else value) for section, value in given))
        model, _, _, distill, lora = self.sections
        if (distill.weight or lora.rank) and model.base is None:
            raise ValueError("distill.weight and lora.rank need model.base: a model from scratch teaches nothing")
        if model.load_in_4bit and not lora.rank:
            raise ValueError("model.load_in_4bit needs lora.rank: weights in 4 bits cannot be trained")
        plain = {name: section.model_dump() for name, section in self.sections._asdict().items()}
        self.save_hyperparameters({**plain, "blocks": blocks, "bytes_per_token": bytes_per_token})
        self.model: PreTrainedModel | None = None
        self.teacher: PreTrainedModel | None = None
        self.strict_loading = not (distill.weight or lora.rank)  # a checkpoint holds what is trained
        self.validation_loss = torchmetrics.MeanMetric()
        self.validation_answers = torchmetrics.MeanMetric()
        self.validation_gates = nn.ModuleList()  # one mean for each layer
        self._exact: list[tuple[nn.Module, str, Tensor]] = []  # the models' buffers as they were made
        self._clock = time.perf_counter()
        self._tokens = 0

    def configure_model(self) -> None:
        """Load or build the model; Lightning calls this when the strategy is ready."""
        if self.model is not None:
            return
        wanted, _, _, distill, lora = self.sections
        dtype = getattr(torch, wanted.dtype)
        config = first_config(wanted.base, wanted.config, wanted.rope_theta)
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        if self.sequence_group is not None:
            check_heads(config.num_attention_heads, heads, self.sequence_group.size)
        dense = LayerBlocks.dense(layers, heads)
        blocks = dense if self.hparams.blocks is None else LayerBlocks(self.hparams.blocks)
        teaching = pod_config(config, dense, wanted.sink_size, wanted.recent_size, "scores")
        config = pod_config(config, blocks, wanted.sink_size, wanted.recent_size, wanted.share)
        # Made as a PoD model at once, not converted: under ZeRO-3 the parameters are sharded while they are made.
        if wanted.base is not None:
            with opening(wanted.base):
                options = self._in_4_bits() if wanted.load_in_4bit else {}
                self.model = load_causal_lm(wanted.base, finite=True, config=config, dtype=dtype, **options)
        else:
            self.model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            if wanted.initialization == "torch":
                for module in self.model.modules():
                    if isinstance(module, nn.Linear | nn.Embedding):
                        module.reset_parameters()
        if lora.rank:
            add_adapters(self.model, lora.rank, lora.alpha, lora.dropout, lora.targets)
            if lora.adapter is not None:
                go_on_from(self.model, Path(lora.adapter), lora.alpha)
        elif distill.weight:
            # A PoD model of blocks of one layer is the dense one, and takes a part of a sequence as the student does.
            self.teacher = load_causal_lm(wanted.base, finite=True, config=teaching, dtype=dtype)
            self.teacher.requires_grad_(False)
        if wanted.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.model.offload_checkpoints = wanted.offload_checkpoints
        for layer in self.model.model.layers:
            # DDP and ZeRO wait for the gradient of whatever is not frozen.
            for parameter in layer.self_attn.unused_parameters():
                parameter.requires_grad_(False)
        for model in filter(None, (self.model, self.teacher)):
            for layer in model.model.layers:
                layer.mlp_tiles = wanted.mlp_tiles
            if wanted.compile:
                model.model.compile()
        self.validation_gates.extend(torchmetrics.MeanMetric() for _ in range(layers))
        self._exact = [
            (module, name, buffer.clone())
            for module in self.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point()
        ]
        self.model.train()

    def _in_4_bits(self) -> dict[str, Any]:
        """What `from_pretrained` is given for `model.load_in_4bit`.

        Raises:
            ImportError, ValueError: bitsandbytes or a GPU is missing, or the Trainer's strategy shards weights.
        """
        if self._trainer is not None and type(self._trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy):
            raise ValueError(
                f"model.load_in_4bit=true does not go with {type(self._trainer.strategy).__name__}: weights in 4 bits "
                "cannot be sharded; take strategy='auto' or 'ddp'"
            )
        return in_4_bits(self._root_device, getattr(torch, self.sections.model.dtype))

    @property
    def sequence_group(self) -> SequenceGroup | None:
        """The ranks that share a sequence with this one; None when each rank has its own."""
        return getattr(self._trainer.strategy, "sequence_group", None) if self._trainer is not None else None

    @property
    def _root_device(self) -> torch.device:
        """Where this process trains. The module's own `device` does not know while a checkpoint is read."""
        return self.device if self._trainer is None else self._trainer.strategy.root_device

    def _shard(self, length: int) -> SequenceShard | None:
        return None if self.sequence_group is None else SequenceShard(length, self.sequence_group)

    def hidden_states(self, batch: dict[str, Tensor]) -> Tensor:
        """[B, T, hidden] after the last norm; the rank's part of T where ranks share the sequences.

        Args:
            batch: input_ids [B, T], optionally document_ids [B, T]; whole on every rank.
        """
        return self._states(self.model, batch)

    def _states(self, model: PreTrainedModel, batch: dict[str, Tensor], unshared: bool = False) -> Tensor:
        ids = batch["input_ids"]
        output = model.model(
            ids,
            document_ids=batch.get("document_ids"),
            use_cache=False,
            sequence=self._shard(ids.shape[1]),
            unshared=unshared,
        )
        return output.last_hidden_state

    @torch.no_grad()
    def teacher_states(self, batch: dict[str, Tensor]) -> Tensor:
        """`hidden_states` of the frozen dense base: a model of its own, or with LoRA the same one without adapters."""
        if self.teacher is not None:
            return self._states(self.teacher, batch)
        with without_adapters(self.model):
            return self._states(self.model, batch, unshared=True)

    def _targets(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """What each of the rank's positions foretells [B, t], and the number of targets of the whole batch."""
        # Shifted before it is cut: the first label of a rank's part belongs to the last token of the part before.
        targets = shifted(labels)
        count = (targets != IGNORED).sum()
        shard = self._shard(labels.shape[1])
        return (targets if shard is None else shard.take(targets, fill=IGNORED)), count

    @property
    def _ranks(self) -> int:
        return 1 if self.sequence_group is None else self.sequence_group.size

    def loss(self, batch: dict[str, Tensor], hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the cross-entropies of a batch in nats, and the number of targets.

        Where P ranks share the sequences, all of them are given the whole batch. The sum is then P times that of the
        rank's own tokens, so that its mean over the ranks is the batch's, and the number is the batch's.

        Args:
            batch: input_ids [B, T], optionally labels [B, T] (-100 is ignored).
            hidden_states: [B, T, hidden], of the same batch.
        """
        targets, count = self._targets(batch.get("labels", batch["input_ids"]))
        total, _ = chunked_cross_entropy(hidden_states, self.model.lm_head, targets, self.sections.trainer.loss_chunk)
        return total * self._ranks, count

    def answers(self, batch: dict[str, Tensor], hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The batch's marked answers, answers [B, T] bool.

        Returns:
            Logits [n, vocab] that foretell the rank's own ones, their ids [n], and the number of all.
        """
        targets, count = self._targets(batch["input_ids"].masked_fill(~batch["answers"], IGNORED))
        marked = (targets != IGNORED).nonzero(as_tuple=True)  # a mask as an index is found anew at each use
        return self.model.lm_head(hidden_states[marked]), targets[marked], count

    def distillation(
        self, batch: dict[str, Tensor], hidden_states: Tensor, teacher_states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `loss`, with the sum of the divergences from the teacher in its midst.

        Args:
            batch: input_ids [B, T], optionally labels [B, T] (-100 is ignored).
            hidden_states, teacher_states: [B, T, hidden], of the same batch.
        """
        targets, count = self._targets(batch.get("labels", batch["input_ids"]))
        entropies, divergences, _ = chunked_distillation(
            hidden_states,
            self.model.lm_head,
            teacher_states,
            (self.teacher or self.model).lm_head,
            targets,
            self.sections.trainer.loss_chunk,
            self.sections.distill.temperature,
        )
        return entropies * self._ranks, divergences * self._ranks, count

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        weight = self.sections.distill.weight
        # The teacher goes first: what its layers take is gone before the student's forward keeps anything.
        teacher_states = self.teacher_states(batch) if weight else None
        hidden_states = self.hidden_states(batch)
        if weight:
            total, divergences, count = self.distillation(batch, hidden_states, teacher_states)
        else:
            total, count = self.loss(batch, hidden_states)
        loss = total / count.clamp(min=1)
        self._tokens += batch["input_ids"].numel()
        self.log("train_loss", loss.detach(), prog_bar=True, sync_dist=True)
        if weight:
            divergence = divergences / count.clamp(min=1)
            self.log("train_divergence", divergence.detach(), sync_dist=True)
            loss = (1 - weight) * loss + weight * divergence
        if self.sections.trainer.answer_weight and "answers" in batch:
            logits, ids, count = self.answers(batch, hidden_states)
            answer_loss = nn.functional.cross_entropy(logits.float(), ids, reduction="sum")
            answer_loss = answer_loss * self._ranks / count.clamp(min=1)
            self.log("train_answer_loss", answer_loss.detach(), sync_dist=True)
            loss = loss + self.sections.trainer.answer_weight * answer_loss
        return loss

    def on_fit_start(self) -> None:
        """What `precision=bf16-true` rounds beside the weights: RoPE's frequencies, which no checkpoint has; means."""
        for module, name, exact in self._exact:
            buffer = getattr(module, name)
            if buffer.dtype != exact.dtype:
                setattr(module, name, exact.to(buffer.device))
        for metric in (self.validation_loss, self.validation_answers, *self.validation_gates):
            metric.set_dtype(torch.float32)

    on_validation_start = on_fit_start

    def setup(self, stage: str) -> None:
        # The first process may have analysed the model while the others waited.
        if self.trainer.world_size > 1:
            self.hparams.blocks = self.trainer.strategy.broadcast(self.hparams.blocks)
            # Machines may have been tuned apart; ranks that run other kernels would not stay equal.
            dispatch.fix(self.trainer.strategy.broadcast(dispatch.known()))

    def on_train_batch_start(self, batch: dict[str, Tensor], index: int) -> None:
        # What loggers go by: one too many where a run goes on from another's end that was a moment to validate.
        self.trainer.fit_loop.epoch_loop._batches_that_stepped = self.trainer.global_step

    def _is_logged(self) -> bool:
        """Whether the micro-batch at hand is the last of an optimiser step of which the loggers are told.

        What is told is read back from the device, which has to be waited for.
        """
        return not self.trainer.fit_loop._should_accumulate() and self.trainer._logger_connector.should_update_logs

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        # One line a logged step: gradient norm before clipping, learning rate, speed since the line before.
        if not self._is_logged():  # DeepSpeed is asked to step after every micro-batch
            return
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        # Always read at this point of a step: where the device is behind, it is so by as much each time.
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        groups = (self.trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        tokens, self._tokens = groups * self._tokens, 0  # of all processes
        values = {"lr": optimizer.param_groups[0]["lr"], "tokens_per_second": tokens / max(seconds, 1e-9)}
        peak = self._peak_flops()
        if peak:
            flops = values["tokens_per_second"] * self.flops_per_token()
            values["flops_utilisation"] = flops / (peak * self.trainer.world_size)
        # As tensors on the CPU, where they came from: Lightning would put numbers on the device.
        values = {name: torch.tensor(value, dtype=torch.float32, device="cpu") for name, value in values.items()}
        if gradients:
            values["grad_norm"] = nn.utils.get_total_norm(gradients)
        self.log_dict(values, prog_bar=False)
        self.log("tok/s", values["tokens_per_second"], prog_bar=True, logger=False)

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Tensor], index: int) -> None:
        # DeepSpeed keeps the gradients to itself, and knows their norm when the step is done.
        norm = getattr(self.trainer.strategy, "global_grad_norm", None)
        if norm is not None and self._is_logged():
            self.log("grad_norm", norm())

    def flops_per_token(self) -> float:
        """Floating-point operations of forward and backward per token, attention left out.

        6 per parameter that is trained, 4 per frozen one, 0 per unused one, 2 per one of the teacher; with LoRA that is
        the model itself.
        """
        unused = {id(p) for layer in self.model.model.layers for p in layer.self_attn.unused_parameters()}
        used = (p for p in self.model.parameters() if id(p) not in unused)
        student = sum((6 if p.requires_grad else 4) * math.prod(_shape(p)) for p in used)
        taught = (self.teacher or self.model).parameters() if self.sections.distill.weight else ()
        return float(student + 2 * sum(math.prod(_shape(p)) for p in taught if not p.requires_grad))

    def _peak_flops(self) -> float | None:
        """bf16 FLOP/s of the device; None: its name is not known, and no utilisation is logged."""
        if self.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self.device)
        return next((gpu.flops for key, gpu in GPUS.items() if key in name), None)

    def _measure_gates(self, wanted: bool) -> None:
        for layer in self.model.model.layers:
            layer.self_attn.measure_gate = wanted

    def on_validation_epoch_start(self) -> None:
        self._measure_gates(True)

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        hidden_states = self.hidden_states(batch)
        for metric, layer in zip(self.validation_gates, self.model.model.layers, strict=True):
            metric.update(layer.self_attn.gate)
        total, count = self.loss(batch, hidden_states)
        self.validation_loss.update(total / count.clamp(min=1), weight=count)
        if "answers" in batch:
            logits, ids, _ = self.answers(batch, hidden_states)
            right = (logits.argmax(dim=-1) == ids).sum()
            # Every rank updates, also without an answer of its own: what is computed in the end is computed by all.
            self.validation_answers.update(right / max(1, len(ids)), weight=len(ids))

    def on_validation_epoch_end(self) -> None:
        loss = self.validation_loss.compute()
        self.validation_loss.reset()
        values = {"val_loss": loss, "val_perplexity": loss.exp()}
        if self.hparams.bytes_per_token:
            values["val_bits_per_byte"] = loss / math.log(2) / self.hparams.bytes_per_token
        if self.validation_answers.update_called:
            values["val_passkey"] = self.validation_answers.compute()
            self.validation_answers.reset()
        self.log_dict(values, prog_bar=True)
        self._measure_gates(False)
        self.log_dict({f"gate/layer_{i}": metric.compute() for i, metric in enumerate(self.validation_gates)})
        for metric in self.validation_gates:
            metric.reset()

    def on_train_start(self) -> None:
        self._clock, self._tokens = time.perf_counter(), 0
        # A checkpoint holds the rate of its run's next step; this run's schedule may be another.
        schedule = self.lr_schedulers()
        for group, rate, factor in zip(
            schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
        ):
            group["lr"] = rate * factor(schedule.last_epoch)

    def configure_optimizers(self) -> dict[str, Any]:
        settings, trainer = self.sections.optimizer, self.sections.trainer
        # A head tied to the embedding is one parameter, and stays undecayed.
        embeddings = {module.weight for module in self.model.modules() if isinstance(module, nn.Embedding)}
        trained = [p for p in self.model.parameters() if p.requires_grad]
        matrices = [p for p in trained if len(_shape(p)) > 1 and p not in embeddings]
        others = [p for p in trained if len(_shape(p)) < 2 or p in embeddings]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]  # adapters are all matrices
        optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=tuple(settings.betas))
        schedule = get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, warmup_steps(settings, trainer), steps(trainer), min_lr=settings.min_lr
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "state_dict" in checkpoint:
            # The base of adapters, and the scales of one in 4 bits, and a teacher are elsewhere. What is frozen because
            # nothing uses it is not.
            state, trained, lora = checkpoint["state_dict"], self._names(), self.sections.lora.rank
            checkpoint["state_dict"] = {
                name: value
                for name, value in state.items()
                if name in trained or not (lora or name.startswith("teacher."))
            }
        checkpoint["rng_state"] = torch.get_rng_state()
        if self._root_device.type == "cuda":  # dropout draws there
            checkpoint["cuda_rng_state"] = torch.cuda.get_rng_state(self._root_device)
        checkpoint["accumulate"] = self.trainer.accumulate_grad_batches
        checkpoint["kernels"] = dispatch.known()

    def _names(self) -> set[str]:
        """Names of the parameters that are trained."""
        named = self.named_parameters(remove_duplicate=False)
        return {name for name, parameter in named if parameter.requires_grad}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if not self.strict_loading and "state_dict" in checkpoint and self.model is not None:
            missing = self._names() - set(checkpoint["state_dict"])
            if missing:
                raise ValueError(
                    f"the checkpoint lacks {len(missing)} of the tensors that are trained, {min(missing)} among them: "
                    "continue with the lora.rank and lora.targets of its run, or begin a new one"
                )
        if self._trainer is not None and "accumulate" in checkpoint:
            # Another number of processes makes a step of another number of micro-batches, which Lightning counts. It
            # must agree with the data on where in the epoch the run goes on.
            accumulate, data = self.trainer.accumulate_grad_batches, self.trainer.datamodule
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            for kind in ("total", "current"):
                counts = progress[kind]
                done = counts["ready"] // checkpoint["accumulate"] * accumulate
                if kind == "current" and isinstance(data, PodDataModule):
                    done = data.batches_trained()
                counts.update({name: done + count - counts["ready"] for name, count in counts.items()})
        if "loops" in checkpoint:
            _validate_first(checkpoint["loops"]["fit_loop"])
        if "kernels" in checkpoint:  # a run keeps what it began with
            dispatch.fix(checkpoint["kernels"])
        if "rng_state" in checkpoint:
            torch.set_rng_state(checkpoint["rng_state"].cpu())
        if "cuda_rng_state" in checkpoint and self._root_device.type == "cuda":
            torch.cuda.set_rng_state(checkpoint["cuda_rng_state"].cpu(), self._root_device)


def _validate_first(loops: dict[str, Any]) -> None:
    """Let a run that goes on from a checkpoint of a step's end begin with the validation that is due there, if one is.

    Lightning takes it for done unless it was begun, and adds the step to those that loggers go by before it.

    Args:
        loops: the checkpoint's state of Lightning's loops.
    """
    trained, validated = (loops[f"epoch_loop.{name}batch_progress"] for name in ("", "val_loop."))
    if trained["total"]["completed"] < trained["total"]["processed"]:
        done = validated["total"]["completed"]
        validated["total"].update(ready=done + 1, started=done + 1, processed=done)
        validated["current"] = dict.fromkeys(validated["current"], 0)
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The whole parameter's shape: under ZeRO-3 it is empty on each rank, and in 4 bits a row of bytes."""
    whole = getattr(parameter, "quant_state", parameter)
    return tuple(getattr(parameter, "ds_shape", whole.shape))
