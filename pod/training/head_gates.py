"""Learn how much each KV head needs the distant past, as DuoAttention does (arXiv 2410.10819, section 2.2).

    scores = learn(model, tokenizer, text, Path("runs/learning"))  # [L, H_kv] in [0, 1], for `LayerBlocks.streaming`

The model stays as it is. What is trained is a gate for each KV head, alpha. A head's output is alpha times that of the
model as it is, plus 1 - alpha times the head's own over sinks and recent tokens alone; the last hidden states are to be
those of the model as it is, and alpha small. What is read asks for words that were hidden far above.

`python -m pod.calibrate --learn` is the command. Legend: L layers, H_kv KV heads, T tokens, C hidden size.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_wsd_schedule

from pod.blocks import LayerBlocks
from pod.evaluation.texts import start_ids, token_ids
from pod.files import locked
from pod.model.families import convert
from pod.model.probe import attended, frozen
from pod.training.checkpoints import Checkpoints, SaveAtEnd, WholeFiles, last_checkpoint
from pod.training.run import MetricsLog, StepsBar

# Of a dense model's heads; DuoAttention's.
SINK_SIZE, RECENT_SIZE = 128, 256

# The radio alphabet: words that no text foretells.
WORDS = (
    "alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa quebec romeo "
    "sierra tango uniform victor whiskey xray yankee zulu"
).split()
STATED = "\nThe words that open vault {number} are: {words}. Keep them in mind.\n"
ASKED = "\nWhich words open vault {number}? They are: {words}."
DEPTHS = (0.05, 0.95)
LENGTHS, PLACES = 50, 1000


@dataclass(frozen=True)
class Learning:
    """How gates are learned; the defaults are DuoAttention's, but for the wording of what is hidden.

    Attributes:
        steps: of the optimiser, one sample each.
        shortest, longest: tokens of a sample, one of 50 lengths between them; no more than the model takes.
        needles: how many rows of words are hidden in a sample and asked for at its end.
        words: of each.
        sink_size, recent_size: tokens that a head that streams attends to; None: a PoD model's own, and of a dense one
            128 and 256.
        lr: of AdamW at its highest; it rises over the first fifth of the steps and falls over the last, to a tenth.
        penalty: what the mean of all gates weighs in the loss.
        seed: of the samples.
    """

    steps: int = 2000
    shortest: int = 1000
    longest: int = 32_000
    needles: int = 10
    words: int = 32
    sink_size: int | None = None
    recent_size: int | None = None
    lr: float = 0.02
    penalty: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "shortest", "longest", "needles", "words"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.lr <= 0 or self.penalty < 0:
            raise ValueError(f"lr must be above 0 and penalty not below, got lr {self.lr} and penalty {self.penalty}")
        if self.shortest > self.longest:
            raise ValueError(f"shortest is {self.shortest} and longest {self.longest}: it must not be longer")


class Vaults:
    """Samples: a text in which words are hidden, and at its end, for each of them, the question and the words.

    Args:
        tokenizer: of the model.
        text: what words are hidden in; each sample takes another part of it.
        learning: see there; its lengths are no longer than the model takes.

    Raises:
        ValueError: the text is shorter than a sample, or what is hidden and asked leaves the shortest no room for it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, learning: Learning) -> None:
        self.tokenizer, self.learning = tokenizer, learning
        self.ids = self._tokens(text)
        self.start = start_ids(tokenizer)
        if len(self.ids) < learning.longest:
            raise ValueError(
                f"the text has {len(self.ids)} tokens, fewer than the longest sample, {learning.longest}: give a "
                "longer one, or a smaller --longest"
            )
        longest = max(WORDS, key=lambda word: len(self._tokens(f" {word}")))
        hidden, asked = self._needles([[longest] * learning.words] * learning.needles)
        taken = sum(map(len, hidden)) + len(asked)
        if learning.shortest <= len(self.start) + taken:
            raise ValueError(
                f"a sample of {learning.shortest} tokens has no room for a text: {learning.needles} needles of "
                f"{learning.words} words, stated and asked, take up to {taken}. Take fewer needles or words, or a "
                "longer --shortest"
            )

    def __len__(self) -> int:
        return self.learning.steps

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        """input_ids [T] and how many of the last ones are the questions with their words; by `number` alone."""
        learning, draw = self.learning, random.Random(f"vaults-{self.learning.seed}-{number}")
        apart = (learning.longest - learning.shortest) / (LENGTHS - 1)
        length = learning.shortest + round(apart * draw.randrange(LENGTHS))
        hidden, asked = self._needles([draw.choices(WORDS, k=learning.words) for _ in range(learning.needles)])
        room = length - len(self.start) - len(asked) - sum(map(len, hidden))
        at = draw.randrange(len(self.ids) - room + 1)
        text, sample, done = self.ids[at : at + room], list(self.start), 0
        places = [draw.randrange(PLACES) / (PLACES - 1) for _ in hidden]
        places = [round(room * (DEPTHS[0] + (DEPTHS[1] - DEPTHS[0]) * place)) for place in places]
        for place, needle in sorted(zip(places, hidden, strict=True)):
            sample += text[done:place] + needle
            done = place
        return torch.tensor(sample + text[done:] + asked), len(asked)

    def _needles(self, words: list[list[str]]) -> tuple[list[list[int]], list[int]]:
        """Tokens of what is hidden, one list for each needle, and of all that is asked."""
        said = [{"number": number, "words": " ".join(some)} for number, some in enumerate(words, 1)]
        asked = [self._tokens(ASKED.format(**each)) for each in said]
        return [self._tokens(STATED.format(**each)) for each in said], sum(asked, [])

    def _tokens(self, text: str) -> list[int]:
        return token_ids(self.tokenizer, text).tolist()


class HeadGates(lightning.LightningModule):
    """A gate for each KV head of a model; a block of layers has one.

    Args:
        model: a causal LM of a supported family, dense or PoD; it is not changed.
        learning: how, with `sink_size` and `recent_size`.
        samples: what is read, one in each step of the optimiser.
        weights: what tells the model's from others'.

    Attributes:
        alpha: [L, H_kv] float32; of a block, its anchor's entry counts.

    Raises:
        ValueError: a model whose heads cannot stream.
    """

    def __init__(self, model: PreTrainedModel, learning: Learning, samples: Vaults, weights: str = "") -> None:
        super().__init__()
        blocks = blocks_of(model)
        text = hashlib.sha256(str(samples.ids).encode()).hexdigest()
        self.settings = asdict(learning) | {"text": text, "weights": weights}
        self.learning, self.samples = learning, samples
        window = convert(
            model, LayerBlocks.dense(*blocks.anchors.shape), learning.sink_size, learning.recent_size, share="window"
        )
        window.config.attention_dropout = window.config.resid_pdrop = 0.0
        # Each layer's forward is run again in the backward: samples are long.
        window.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        window.train()
        self.models = (model, window)  # in a tuple they are no modules of this one, and a checkpoint holds gates alone
        self.attended: list[Tensor] = []  # [B, T, H * D] of each layer of the model as it is
        for layer, each in enumerate(window.model.layers):
            each.self_attn.o_proj.register_forward_pre_hook(self._mixing(layer))
        self.register_buffer("anchors", blocks.anchors.clone(), persistent=False)
        self.alpha = nn.Parameter(torch.ones(blocks.anchors.shape))

    @property
    def gates(self) -> Tensor:
        """[L, H_kv], a block's layers alike."""
        return self.alpha.gather(0, self.anchors)

    def _mixing(self, layer: int) -> Callable[[nn.Module, tuple[Tensor]], tuple[Tensor]]:
        def hook(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            full, window = self.attended[layer], args[0]
            gate = self.gates[layer].to(window.dtype).repeat_interleave(window.shape[-1] // self.alpha.shape[1])
            return (gate * full + (1 - gate) * window,)

        return hook

    def states(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states after the last norm [B, T, C], of the model as it is and of the one with gates.

        What a gate lets through is the output of the model as it is, as in DuoAttention's code; the paper has that of
        the gated model's own queries. A backward is for the last call only.

        Args:
            input_ids: [B, T] int64.
        """
        full, window = self.models
        with attended(full) as self.attended, torch.no_grad():
            wanted = full.model(input_ids, use_cache=False).last_hidden_state
        return wanted, window.model(input_ids, use_cache=False).last_hidden_state

    def training_step(self, batch: tuple[Tensor, int], index: int) -> Tensor:
        input_ids, asked = batch
        wanted, found = self.states(input_ids[None])
        distance = (found[:, -asked:].float() - wanted[:, -asked:].float()).square().mean()
        share = self.gates.abs().mean()
        self.log_dict({"distance": distance.detach(), "gates": share.detach()}, prog_bar=True)
        return distance + self.learning.penalty * share

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():  # here: what follows a step may be a checkpoint
            self.alpha.clamp_(0, 1)

    def configure_optimizers(self) -> dict[str, Any]:
        steps, fifth = self.learning.steps, self.learning.steps // 5
        optimizer = torch.optim.AdamW([self.alpha], lr=self.learning.lr, weight_decay=0.0)
        schedule = get_wsd_schedule(
            optimizer,
            num_warmup_steps=fifth,
            num_decay_steps=fifth,
            num_training_steps=steps,
            decay_type="linear",
            min_lr_ratio=0.1,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> StatefulDataLoader:
        return StatefulDataLoader(self.samples, batch_size=None)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["settings"] = self.settings

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        theirs = checkpoint["settings"]
        changed = [
            f"{name} {theirs.get(name)} -> {ours}" for name, ours in self.settings.items() if theirs.get(name) != ours
        ]
        if changed:
            raise ValueError(
                f"what was begun there had other settings: {', '.join(changed)}. Give them again, or another --out"
            )


def blocks_of(model: PreTrainedModel) -> LayerBlocks:
    """The blocks of a model of which heads can stream, of a dense one those of one layer.

    Raises:
        ValueError: they cannot; says what to learn with instead.
    """
    config = model.config
    if not hasattr(config, "share"):
        return LayerBlocks.dense(config.num_hidden_layers, config.num_key_value_heads)
    if config.share not in ("scores", "keys") or bool(config.blocks.is_streaming.any()):
        raise ValueError(
            f"heads of this model (share={config.share!r}) stream already, or have no distant keys and values of their "
            "own: learn with the model that it was made of"
        )
    return config.blocks


def learn(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    folder: Path,
    learning: Learning | None = None,
    *,
    weights: str = "",
    progress: bool = True,
) -> tuple[Tensor, dict[str, Any]]:
    """Learn head scores; goes on from where an earlier call with the same arguments was stopped.

    Args:
        model: a causal LM of a supported family, dense or PoD, in evaluation mode, on the device to learn on.
        tokenizer: of the model.
        text: what words are hidden in, at least as long as a sample.
        folder: for checkpoints (`steps/`) and the log (`logs/`: distance, mean gate).
        learning: how; None: as DuoAttention.
        weights: what tells the model's weights from others', as `pod.model.weights.weights_hash` does; a checkpoint of
            others is refused.
        progress: show a progress bar.

    Returns:
        [L, H_kv] float32 in [0, 1], higher where a head needs distant tokens more, a block's layers alike; and how they
        were learned.

    Raises:
        ValueError: the text is too short, a sample longer than the model takes, heads of the model cannot stream, or
            the folder holds what was begun with other settings, or another process learns there.
        Stopped: a signal told the process to end, and a checkpoint was written.
    """
    learning, config = learning or Learning(), model.config
    sinks, recent = (config.sink_size, config.recent_size) if hasattr(config, "share") else (SINK_SIZE, RECENT_SIZE)
    learning = replace(
        learning,
        longest=min(learning.longest, config.max_position_embeddings),
        sink_size=sinks if learning.sink_size is None else learning.sink_size,
        recent_size=recent if learning.recent_size is None else learning.recent_size,
    )
    if learning.shortest <= learning.sink_size + learning.recent_size:
        raise ValueError(
            f"a sample of {learning.shortest} tokens has none that is distant at {learning.sink_size} sinks and "
            f"{learning.recent_size} recent tokens: take a longer --shortest"
        )
    module = HeadGates(model, learning, Vaults(tokenizer, text, learning), weights)
    checkpoint = last_checkpoint(folder / "steps")
    if checkpoint is not None:
        print(f"continuing from {checkpoint}")
    device = model.get_input_embeddings().weight.device
    trainer = lightning.Trainer(
        accelerator=device.type,
        devices=1 if device.index is None else [device.index],
        max_steps=learning.steps,
        max_epochs=-1,
        log_every_n_steps=1,
        logger=MetricsLog(folder),
        plugins=[WholeFiles()],
        callbacks=[
            Checkpoints(folder / "steps", keep=2, every=20),  # the one before, should the newest be damaged
            SaveAtEnd(folder / "steps"),
            *([StepsBar()] if progress else []),
        ],
        enable_progress_bar=progress,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    with locked(folder / ".lock", folder), frozen(model):
        trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
    return module.gates.detach().cpu(), asdict(learning)
