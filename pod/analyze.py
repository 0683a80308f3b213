"""Find out which layers' attention is alike, and write the blocks that save the wanted share of the cache.

    python -m pod.analyze recipe=llama3-32k
    python -m pod.analyze recipe=tiny blocks.samples=64

    python -m pod.analyze recipe=tiny blocks.method=fisher

Writes into the run's folder: `blocks.json`, `similarity.safetensors` ([H_kv, L, L] float32), `similarity.png` (the
paper's Figure 1-(d)) and `blocks.png`; with `blocks.method=damage` or `fisher` also `damage.safetensors` and
`damage.png`, measured in the same forwards.
"""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from pod.blocks import LayerBlocks
from pod.data.prepared import PreparedData, PreparedDataset
from pod.data.tokenizer import check_vocabulary
from pod.extras import require
from pod.files import check_writable, replacing
from pod.grouping import layers_to_share
from pod.heads import streamed
from pod.model.families import FAMILIES
from pod.model.probe import watch
from pod.recipe.loading import main_recipe
from pod.recipe.schema import Recipe, output_folder
from pod.similarity import Damage, Similarity, plot_damage, plot_similarity
from pod.terminal import exit_status
from pod.training.base_model import first_config, load_stock


def analyze(recipe: Recipe) -> LayerBlocks:
    """Measure the similarity of the recipe's base model, and the damage if asked for, on its data; group its layers.

    Args:
        recipe: `model.base`, `data` and `blocks` say what is measured on what and what is wanted.

    Returns:
        The blocks, also written to the run's folder with the pictures.

    Raises:
        ValueError: no such model or data, data of another sample length or without a document of `blocks.last_q`
            tokens, or more saving wanted than the model can give; damage of what is not shared; head scores of another
            model.
        ImportError: matplotlib is not installed.
    """
    method = recipe.blocks.method
    by_damage = method in ("damage", "fisher")
    if by_damage and recipe.model.share != "scores":
        raise ValueError(
            f"blocks.method={method} measures shared scores, not model.share={recipe.model.share}: set "
            "model.share=scores or another blocks.method"
        )
    if recipe.model.base is None:
        raise ValueError(
            "model.base is empty: a model from scratch has no attention to analyse. Set blocks.kv_saving=0"
        )
    config, streaming = first_config(recipe.model.base, None), None
    if recipe.blocks.streaming or config.model_type in FAMILIES:  # others are refused when the model is seen
        blocks = LayerBlocks.dense(config.num_hidden_layers, config.num_key_value_heads)
        if share := recipe.blocks.streaming:
            near = recipe.model.sink_size, recipe.model.recent_size
            blocks = streamed(blocks, recipe.blocks.head_scores, share, config, near)
            streaming = blocks.is_streaming
        if recipe.blocks.threshold is None:  # refused now where it is too much: what comes before the grouping is long
            layers_to_share(recipe.blocks.kv_saving, blocks.is_streaming)
    require("train", "matplotlib", what="pod.analyze")  # its pictures come last, and the work before them is long
    out = output_folder(recipe)
    check_writable(out)
    dataset = PreparedDataset(_data(recipe), "train")
    check_vocabulary(dataset.data, config.vocab_size)
    count = min(recipe.blocks.samples, len(dataset))
    # Spread over the whole set; each index gives the same sample on every machine.
    chosen = torch.linspace(0, len(dataset) - 1, count).long().tolist()
    device = "cuda" if torch.cuda.is_available() and recipe.trainer.accelerator != "cpu" else "cpu"
    model = load_stock(recipe.model.base, recipe.model.rope_theta, getattr(torch, recipe.model.dtype)).to(device)
    sizes = {"sink_size": recipe.model.sink_size, "recent_size": recipe.model.recent_size}
    meters = [Similarity(recipe.blocks.last_q, distant_only=recipe.blocks.distant_only, **sizes)]
    meters += [Damage(**sizes, fisher=method == "fisher")] if by_damage else []
    samples = (ids[None].to(device) for ids in _documents(dataset, chosen, recipe.blocks.last_q))
    watch(model, samples, meters, "attention similarity", progress=False)
    similarity, *costs = (meter.result() for meter in meters)
    blocks = group(recipe, similarity, *costs, streaming=streaming)
    save_similarity(similarity, out / "similarity.safetensors")
    plot_similarity(similarity, out / "similarity.png", blocks)
    if by_damage:
        save_damage(costs[0], out / "damage.safetensors")
        plot_damage(costs[0], out / "damage.png", blocks)
    blocks.plot(out / "blocks.png")
    blocks.save(out / "blocks.json")  # the last one: a run that goes on takes it to mean that all are there
    print(savings_table(similarity))
    more = ", damage.safetensors, damage.png" if by_damage else ""
    print(f"{blocks}\nwritten: {out}/blocks.json, similarity.safetensors, similarity.png, blocks.png{more}")
    return blocks


def _documents(dataset: PreparedDataset, chosen: list[int], last_q: int) -> Iterator[Tensor]:
    """The documents of the chosen samples, [T] each, one by one; those of fewer than last_q tokens are left out."""
    longest = 0
    for index in tqdm(chosen, desc="attention similarity", unit="sample"):
        for ids in dataset.texts(index):
            longest = max(longest, len(ids))
            if len(ids) >= last_q:
                yield ids
    if longest < last_q:
        raise ValueError(
            f"no document in {len(chosen)} samples has blocks.last_q={last_q} tokens, the longest has {longest}: lower "
            "blocks.last_q or raise blocks.samples"
        )


def _data(recipe: Recipe) -> PreparedData:
    prepared = PreparedData(recipe.data.path)
    prepared.require_length(recipe.data.sequence_length)
    return prepared


def refuse_run(out: Path) -> None:
    """See that a folder holds no training run, which goes on with the blocks it was begun with.

    Raises:
        ValueError: it holds checkpoints.
    """
    if any((out / "steps").glob("step=*.ckpt")):
        raise ValueError(
            f"{out} holds a run that trains with the blocks in {out}/blocks.json: analyse into another output=FOLDER"
        )


def group(
    recipe: Recipe, similarity: Tensor, costs: Tensor | None = None, streaming: Tensor | None = None
) -> LayerBlocks:
    """The blocks that the recipe asks for: by threshold when it names one, else by saving and method.

    Args:
        similarity, costs: [H_kv, L, L], of `pod.similarity`; costs for `blocks.method` damage or fisher.
        streaming: [L, H_kv] bool, the heads that stream, which are in no block; None: none does.
    """
    if costs is not None:
        return LayerBlocks.for_damage(costs, recipe.blocks.kv_saving, streaming)
    if recipe.blocks.threshold is not None:
        return LayerBlocks.from_similarity(similarity, recipe.blocks.threshold, streaming)
    return LayerBlocks.for_saving(similarity, recipe.blocks.kv_saving, recipe.blocks.method, streaming)


def savings_table(similarity: Tensor) -> str:
    """What each threshold saves, as lines of text; similarity is [H_kv, L, L]."""
    lines = ["threshold  kv_saving"]
    for threshold in torch.arange(0.9, 0.0, -0.05).tolist():
        saving = LayerBlocks.from_similarity(similarity, threshold).kv_saving
        lines.append(f"{threshold:9.2f}  {saving:8.1%}")
    return "\n".join(lines)


def save_similarity(similarity: Tensor, path: str | Path) -> None:
    """Write a similarity tensor [H_kv, L, L], whole or not at all, with its sha256."""
    _save("similarity", similarity, path)


def save_damage(costs: Tensor, path: str | Path) -> None:
    """Write costs [H_kv, L, L] of `pod.similarity.sharing_damage` as `save_similarity` does."""
    _save("damage", costs, path)


def _save(name: str, values: Tensor, path: str | Path) -> None:
    values = values.cpu().contiguous()
    with replacing(path) as aside:
        save_file({name: values}, aside, {"sha256": _digest(values)})


def load_similarity(path: str | Path) -> Tensor:
    """The similarity tensor [H_kv, L, L] that `analyze` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is truncated or damaged, or another kind of file; names it.
    """
    return _load("similarity", Path(path))


def load_damage(path: str | Path) -> Tensor:
    """The costs [H_kv, L, L] that `analyze` wrote with `blocks.method` damage or fisher, for `LayerBlocks.for_damage`.

    Raises:
        FileNotFoundError, ValueError: as `load_similarity`.
    """
    return _load("damage", Path(path))


def _load(name: str, path: Path) -> Tensor:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such {name} file; python -m pod.analyze writes one")
    try:
        with safe_open(path, "pt") as file:
            wanted = (file.metadata() or {}).get("sha256")
            values = file.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{path}: truncated, damaged or no {name} file ({error}); analyse again") from error
    if wanted not in (None, _digest(values)):
        raise ValueError(f"{path} is damaged: its sha256 is not the one it names; analyse again")
    return values


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


@exit_status
def main(arguments: list[str]) -> None:
    recipe = main_recipe(arguments, "pod.analyze")
    refuse_run(output_folder(recipe))
    _data(recipe).verify("train")
    analyze(recipe)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
