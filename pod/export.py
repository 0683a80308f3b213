"""Turn a training checkpoint into a Hugging Face model directory.

    python -m pod.export --ckpt checkpoints/llama3-32k --out exports/llama3-32k
    python -m pod.export --ckpt checkpoints/tiny/steps/step=60.ckpt --out exports/tiny --dtype bfloat16 --force
    python -m pod.export --ckpt checkpoints/smollm2-lora --out adapters/smollm2 --adapter --dtype float16
    python -m pod.export --ckpt adapters/smollm2 --out exports/smollm2
    python -m pod.export --ckpt checkpoints/llama3-32k --out exports/llama3-32k --push someone/llama3-pod

The directory holds config.json, sharded safetensors, tokenizer, generation config, their checksums and a model card;
with `--adapter`, of a run with `lora.rank`, the adapter alone in PEFT's format and its blocks, as `pod.load(base,
adapter)` reads them (see `pod.model.adapter`). Such a folder may be `--ckpt` itself: then it is added to its base. What
comes out is written aside, loaded again and compared with the checkpoint before it takes its name; a failure leaves
nothing behind. `--push` then uploads it to the hub.
"""

import argparse
import contextlib
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import create_repo, get_token, upload_folder
from huggingface_hub.utils import validate_repo_id
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pod.blocks import LayerBlocks
from pod.data.tokenizer import load_tokenizer
from pod.extras import require
from pod.files import SUMS, locked, naming, opening, publish, read_sums, write_sums
from pod.model.adapter import FIELDS, load, save
from pod.model.families import pod_config
from pod.model.gguf import local
from pod.model.weights import load_causal_lm, pod_base
from pod.model_card import data_of, measured, model_card, recipe_of
from pod.terminal import exit_status
from pod.training.adapters import merge, peft_name
from pod.training.base_model import first_config


def load_checkpoint(path: Path) -> tuple[dict, Path]:
    """Read a training checkpoint.

    Args:
        path: a checkpoint (a file, or the directory that DeepSpeed writes), or a run's folder, whose last whole
            checkpoint is taken. A directory's shards are unpickled: read those of your own runs alone.

    Returns:
        The checkpoint's content, and its path.

    Raises:
        ValueError: there is none, it is damaged, or it is not one of `PodModule`.
        ImportError: lightning is not installed, or deepspeed, where it sharded the checkpoint.
    """
    require("train", "lightning", what="pod.export")
    from pod.training.checkpoints import by_section, checkpoints, is_whole, last_checkpoint  # brings lightning

    file: Path | None = path
    if path.is_dir() and path.suffix != ".ckpt":
        file = last_checkpoint(path / "steps")
        if file is None and (damaged := len(checkpoints(path / "steps"))):
            raise ValueError(
                f"{path} holds no whole checkpoint: all {damaged} of {path / 'steps'} are truncated or damaged. Train "
                "again from the same recipe with resume=auto, which passes over them"
            )
        if file is None:
            raise ValueError(
                f"{path} holds no whole checkpoint (steps/step=N.ckpt): is it the folder of a pod.fit run?"
            )
    elif not path.exists():
        raise ValueError(f"{path} does not exist: --ckpt takes a run's folder or a checkpoint file")
    elif not is_whole(path):
        raise ValueError(f"{path} is truncated or damaged: take an earlier checkpoint of the run")
    if file.is_dir():
        content = consolidated(file)
    else:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    try:
        return content | {"hyper_parameters": by_section(content.get("hyper_parameters"))}, file
    except ValueError as error:
        raise ValueError(f"{file} is no checkpoint of pod.fit: {error}") from error


def consolidated(directory: Path) -> dict:
    """A checkpoint that DeepSpeed sharded, as one: its float32 weights, hyper-parameters and step.

    The weights are not in memory yet: `contiguous()` puts one together from the shards' files, which are mapped.

    Raises:
        ImportError: deepspeed is not installed.
    """
    require("train", "deepspeed", what=f"{directory}, which DeepSpeed sharded,")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    shard = min(directory.glob("checkpoint/*_model_states.pt"))
    content = torch.load(shard, map_location="cpu", weights_only=False, mmap=True)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(directory), lazy_mode=True)
    return {"state_dict": weights} | {name: content[name] for name in ("hyper_parameters", "global_step")}


def rebuild(checkpoint: dict, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The Hugging Face model of a checkpoint: a PoD model, or a stock one when its layers share nothing.

    A checkpoint of LoRA holds adapters alone: they are merged into the weights of the base that they were trained on.

    Args:
        checkpoint: of `load_checkpoint`; its weights are taken out one by one, so that none is in memory twice.
        dtype: of the model; as in the checkpoint when None.

    Raises:
        ValueError: its weights do not fit its config.
    """
    hparams = checkpoint["hyper_parameters"]
    trained, lora, anchors = hparams["model"], hparams["lora"], hparams["blocks"]
    config = first_config(trained["base"], trained["config"], trained["rope_theta"])
    if anchors is not None or trained["share"] == "window":
        dense = LayerBlocks.dense(config.num_hidden_layers, config.num_key_value_heads)
        blocks = dense if anchors is None else LayerBlocks(anchors)
        config = pod_config(config, blocks, trained["sink_size"], trained["recent_size"], trained["share"])
    if lora.get("rank"):
        kept = dtype or getattr(torch, trained["dtype"])
        with opening(trained["base"]):
            model = load_causal_lm(trained["base"], config=config, dtype=kept)
        adapters = {name.removeprefix("model."): value for name, value in checkpoint.pop("state_dict").items()}
        merge(model, adapters, lora["rank"], lora["alpha"])
        return model.eval()
    weights, state = {}, checkpoint.pop("state_dict")
    for name in list(state):
        weight = state.pop(name).contiguous()
        weights[name.removeprefix("model.")] = weight.to(dtype or weight.dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"the checkpoint's weights do not fit its config: {error}") from error
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # no part of the state; it was made on meta
    return model.eval()


def tokenizer_of(run: Path, base: str | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer that the run was trained with, the base's if its recipe names none; None when it is not known.

    Raises:
        ValueError: the run's recipe cannot be read, or the tokenizer that it names cannot.
    """
    recipe = recipe_of(run)
    if recipe is not None and (name := recipe.model.tokenizer) is not None:
        try:
            return load_tokenizer(name)
        except ValueError as error:
            raise ValueError(f"model.tokenizer={name} in {run}/recipe.yaml: {error}") from error
    try:
        return None if base is None else load_tokenizer(base)
    except ValueError:
        return None


def export(
    ckpt: str | Path,
    out: str | Path,
    dtype: str | None = None,
    force: bool = False,
    adapter: bool = False,
    push: str | None = None,
    private: bool = False,
) -> Path:
    """Write a Hugging Face directory from a training checkpoint, or an adapter in PEFT's format.

    Args:
        ckpt: a run's folder or a checkpoint; or an adapter that this wrote, to add it to its base.
        out: the directory to write.
        dtype: "float32", "bfloat16" or "float16"; the training dtype when None, of an adapter float32, of one that is
            added to its base the base's.
        force: replace an export at `out`.
        adapter: write what a run with `lora.rank` trained and its blocks, instead of a whole model (`pod.load` adds
            them to the base again).
        push: USER/NAME on the hub, to upload it to; made where it is not there.
        private: make it so that only its owners see it.

    Returns:
        `out`.

    Raises:
        ValueError: `out` exists, and is no export or `force` is off; it is or holds the checkpoint, its base or the
            folder this runs in; another process writes it; the checkpoint is missing or damaged, or holds no adapter
            where one is wanted, or is one already; or what was written does not give the checkpoint's logits. Nothing
            is left behind. Or `push` is no name, there is no token, or the hub does not take it: then `out` is
            complete, and the message names the command that uploads it.
        ImportError: an adapter is wanted, and the package peft is missing.
    """
    ckpt, out = Path(ckpt), Path(out)
    if push is not None:
        validate_repo_id(push)
        if get_token() is None:
            raise ValueError(f"--push {push}: there is no token of the hub: `hf auth login`, or HF_TOKEN")
    _check_apart(out, {"the folder this runs in": Path.cwd(), "the checkpoint": ckpt})
    with locked(out.with_name(f".{out.name}.lock"), out):
        _check_free(out, force)
        _export(ckpt, out, None if dtype is None else getattr(torch, dtype), adapter, push)
        if push is not None:
            _upload(out, push, private)
    return out


def _upload(out: Path, name: str, private: bool) -> None:
    try:
        create_repo(name, private=private, exist_ok=True)
        upload_folder(repo_id=name, folder_path=out, commit_message="pod.export")
    except (OSError, RuntimeError, ValueError) as error:  # the hub's errors, httpx's among them, are one of these
        problem = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{out} is written, and the hub did not take it as {name}: {problem}. Again: hf upload {name} {out}"
        ) from error


def _check_apart(out: Path, needed: dict[str, Path]) -> None:
    """Refuse to write where something is that must stay."""
    for what, path in needed.items():
        if path.resolve().is_relative_to(out.resolve()):
            raise ValueError(f"{out} is or holds {what}, {path}: choose another --out")


def _check_free(out: Path, force: bool) -> None:
    """Refuse to replace anything but an export: its files are those of its checksums, and the card."""
    if not os.path.lexists(out):
        return
    if not force:
        raise ValueError(f"{out} exists: choose another --out, or replace an export with --force")
    if out.is_symlink() or not out.is_dir():
        raise ValueError(f"{out} is no directory, so --force will not replace it: choose another --out")
    found = {path.name: path.is_file() for path in out.iterdir()}
    is_ours = found.get(SUMS) and (found.get("config.json") or found.get("adapter_config.json"))
    ours = {"README.md", SUMS, *read_sums(out)} if is_ours else set()
    others = sorted(name for name, is_file in found.items() if not is_file or name not in ours)
    if others:
        raise ValueError(
            f"{out} holds {', '.join(others[:3])}{' and more' if len(others) > 3 else ''}, not named by a {SUMS} as an "
            "export's files are, so --force will not replace it: choose another --out, or remove it"
        )


def _export(ckpt: Path, out: Path, dtype: torch.dtype | None, adapter: bool, push: str | None) -> None:
    base = pod_base(ckpt)
    if base is None:
        checkpoint, file = load_checkpoint(ckpt)
        trained, run, step = checkpoint["hyper_parameters"]["model"], file.parent.parent, int(checkpoint["global_step"])
        base, make = trained["base"], partial(rebuild, checkpoint)
        said = step, *measured(run, step), data_of(run), adapter, trained.get("load_in_4bit", False)
    elif adapter:
        raise ValueError(f"{ckpt} is an adapter already: without --adapter it is added to its base, {base}")
    else:
        run, make = ckpt, lambda dtype: load(base, ckpt, dtype or "auto")
        said = "that of the adapter", {}, 0, (f"that of the adapter, {ckpt.name}", [])
    _check_apart(out, {} if base is None else {"the model that was trained": Path(base)})
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with naming(out):
            if adapter:
                model = _write_adapter(checkpoint, run, aside, dtype)
            else:
                model = _write_model(make(dtype), tokenizer_of(run, base), aside, base, f"{base or run}: {out}")
            card = model_card(model, out if push is None else Path(push), base, *said)
            (aside / "README.md").write_text(card, encoding="utf-8")
            write_sums(aside)
        wanted = _logits(model)
        del model  # the written one takes its place in memory
        # An adapter's sum with its matrix is taken in another order.
        _verify(wanted, *((base, aside, 1e-3) if adapter else (aside, None, 0.0)))
        publish(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _generation_config(base: str | None, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """The base's, where one of the ids that it ends at is the tokenizer's end; else the tokenizer's ids alone."""
    if base is not None:
        with contextlib.suppress(OSError):  # it has none
            config = GenerationConfig.from_pretrained(local(base))
            ends = config.eos_token_id
            if tokenizer.eos_token_id in (ends if isinstance(ends, list) else [ends]):
                return config
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    return GenerationConfig(**{f"{key}_token_id": value for key, value in ids.items()})


def _write_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, aside: Path, base: str | None, whose: str
) -> PreTrainedModel:
    if tokenizer is not None:
        model.generation_config = _generation_config(base, tokenizer)
    else:
        print(f"warning: no tokenizer is known for {whose} has none, save one there", file=sys.stderr)
    model.save_pretrained(aside)
    if tokenizer is not None:
        tokenizer.save_pretrained(aside)
    return model


def _write_adapter(checkpoint: dict, run: Path, aside: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    hparams = checkpoint["hyper_parameters"]
    trained, lora = hparams["model"], hparams["lora"]
    if not lora.get("rank"):
        raise ValueError(
            f"{run} trained all weights (lora.rank is 0): there is no adapter, export it without --adapter"
        )
    if trained["rope_theta"] is not None:
        raise ValueError(
            f"{run} was trained at model.rope_theta={trained['rope_theta']:g}, which an adapter cannot say: export it "
            "without --adapter"
        )
    state = {name: value.to(dtype or value.dtype) for name, value in checkpoint["state_dict"].items()}
    model = rebuild(checkpoint | {"state_dict": dict(state)}, torch.float32)
    anchors = hparams["blocks"]
    shape = model.config.num_hidden_layers, model.config.num_key_value_heads
    blocks = LayerBlocks.dense(*shape) if anchors is None else LayerBlocks(anchors)
    weights = {peft_name(name.removeprefix("model.")): value for name, value in state.items()}
    save(aside, trained["base"], weights, blocks, {name: trained[name] for name in FIELDS}, lora)
    return model


@torch.no_grad()
def _logits(model: PreTrainedModel) -> Tensor:
    ids = torch.randint(model.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0))
    return model(ids, use_cache=False).logits


def _verify(wanted: Tensor, path: str | Path, adapter: Path | None, tolerance: float) -> None:
    found = _logits(load(path, adapter, dtype=wanted.dtype))
    difference = (wanted - found).abs().max()
    if not difference <= tolerance:
        raise ValueError(
            f"the written model's logits differ from the checkpoint's by {difference:.2e}: the "
            "export was removed. Check the disk, then try again."
        )


@exit_status
def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m pod.export", description=__doc__.split("\n")[0])
    parser.add_argument("--ckpt", required=True, help="a run's folder or a checkpoint, or an adapter")
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as trained")
    parser.add_argument("--force", action="store_true", help="replace an earlier export at --out")
    parser.add_argument("--adapter", action="store_true", help="of a run with lora.rank: the adapter and blocks alone")
    parser.add_argument("--push", metavar="USER/NAME", help="also upload it to the hub, under this name")
    parser.add_argument("--private", action="store_true", help="with --push: make it private, where it is new")
    options = parser.parse_args(arguments)
    if options.private and options.push is None:
        parser.error("--private is about --push, which is not given")
    out = export(**vars(options))
    print(f"written and verified: {out}{f'; on the hub: {options.push}' if options.push else ''}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
