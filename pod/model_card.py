"""README.md of an export: what it is, how it is loaded, what it was trained on and what was measured."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from pod.blocks import LayerBlocks
from pod.data.hub import PREFIX as HUB
from pod.files import read_json
from pod.recipe.errors import RecipeError
from pod.recipe.loading import load_recipe
from pod.recipe.schema import Recipe

CARD = """---
{metadata}
---
# {name}

A {kind} trained by [PoD](https://arxiv.org/abs/2412.02252) (proximal tokens over distant tokens).
{sharing}

```python
{snippet}
```

| | |
|---|---|
| base | {base} |
| data | {data} |
| training step | {step} |
| kv_saving | {saving:.1%} of the cache's bytes, as length grows |
| sink_size, recent_size | {sink_size}, {recent_size} |
| share | {share} |
{measured}

Anchor layer of each layer (rows) and KV head (columns); a head whose anchor is its own layer shares nothing{streaming}:

```
{block_map}
```
"""

MODEL = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{path}")
tokenizer = AutoTokenizer.from_pretrained("{path}")"""
ADAPTER = """import pod

model = pod.load("{base}", adapter="{path}")"""

IN_4_BITS = ", in 4 bits (nf4) while adapters were trained and measured, in full here"

STREAMING = ", and one whose anchor is -1 streams: it attends to sinks and recent tokens alone, and stores no others"

SHARING = dict.fromkeys(("scores", "keys"), "Its layers share the attention scores of distant tokens") | {
    "kv": "Its layers share keys and values (cross-layer attention): projections to keys and values of a layer without "
    "anchors are in the weights, and unused",
    "window": "Its layers attend to sinks and recent tokens alone (window attention)",
}


def recipe_of(run: Path) -> Recipe | None:
    """The recipe that the run saved; None where it is gone.

    Raises:
        ValueError: it cannot be read.
    """
    file = run / "recipe.yaml"
    try:
        return load_recipe([f"recipe={file}"]) if file.exists() else None
    except RecipeError as error:
        raise ValueError(f"{file} is damaged, it names the run's tokenizer and data: {error}") from error


def data_of(run: Path) -> tuple[str, list[str]]:
    """What the run was trained on, for its card: a line, and those of its data sets that are of the hub.

    They are the sources that `pod.prepare` reports, where the data are still there; of what is no data set of the hub,
    the line has the last part of the name, as the rest is its owner's business.
    """
    recipe = recipe_of(run)
    if recipe is None:
        return "not known", []
    report = Path(recipe.data.path, "report.json")
    sources = read_json(report).get("sources", []) if report.is_file() else [recipe.data.path]
    said, of_hub = [], []
    for source in sources:
        name = source.removeprefix(HUB).partition(":")[0]
        if source.startswith(HUB) and not Path(name).exists():
            of_hub.append("/".join(name.split("/")[:2]))
            said.append(source.removeprefix(HUB))
        else:
            said.append(Path(name).name)
    return ", ".join(said), list(dict.fromkeys(of_hub))


def measured(run: Path, step: int) -> tuple[dict[str, float], int]:
    """The run's last validation up to a step, from its log.

    Args:
        run: its folder.
        step: optimiser steps done.

    Returns:
        Metric -> value, empty when it never validated; and after how many steps that was.
    """
    from pod.training.summary import read_metrics  # brings lightning, as the run's checkpoint did

    rows = [row for row in read_metrics(run) if "val_loss" in row and row["step"] < step]  # the log counts from 0
    if not rows:
        return {}, 0
    return {key: value for key, value in rows[-1].items() if key.startswith("val_")}, int(rows[-1]["step"]) + 1


def card_metadata(base: str | None, datasets: Sequence[str] = (), adapter: bool = False) -> ModelCardData:
    """What the hub reads of a model card: what the model is for, what it is made from, under what license.

    Args:
        base: a directory, whose own card is asked, or a hub id, whose card is asked of the hub or of its local cache;
            None: there is none. Where no card says, the license is left out: it is not ours to guess.
        datasets: of the hub, that it was trained on.
        adapter: it is to be added to its base. It is not named as one of peft's, whose own snippet would put it on the
            base as it is, without the blocks.
    """
    kept: dict[str, Any] = {"datasets": list(datasets)} if datasets else {}
    if base is not None:
        is_local = Path(base).exists()
        with suppress(OSError, ValueError, yaml.YAMLError):  # no card, a broken one, or no network
            said = ModelCard.load(Path(base) / "README.md" if is_local else base, ignore_metadata_errors=True).data
            kept |= {key: value for key, value in said.to_dict().items() if key.startswith("license")}
            kept |= {"base_model": said.base_model} if is_local and said.base_model else {}
        kept |= {} if is_local else {"base_model": base}
        kept |= {"base_model_relation": "adapter"} if adapter and "base_model" in kept else {}
    tags = ["pod", "kv-cache", "long-context"]
    return ModelCardData(library_name="pod-attention", pipeline_tag="text-generation", tags=tags, **kept)


def model_card(
    model: PreTrainedModel,
    path: Path,
    base: str | None,
    step: int | str,
    metrics: dict[str, float],
    measured_at: int,
    data: tuple[str, list[str]],
    adapter: bool = False,
    in_4_bits: bool = False,
) -> str:
    """README.md of an export: what it is, how to load it, what was measured after how many steps, the block map.

    Args:
        path: where the export is, as whoever loads it names it: its directory, or its name on the hub.
        base, step: what was trained, for how many steps (or where that is said).
        metrics, measured_at: what the last validation found, after how many steps.
        data: of `data_of`.
        adapter: the export is to be added to its base.
        in_4_bits: what validation measured was the adapter on the base in 4 bits.
    """
    config = model.config
    shares = hasattr(config, "share")
    blocks = config.blocks if shares else LayerBlocks.dense(config.num_hidden_layers, config.num_key_value_heads)
    snippet = ADAPTER if adapter else f"import pod  # registers the model type\n{MODEL}" if shares else MODEL
    return CARD.format(
        metadata=card_metadata(base, data[1], adapter).to_yaml(),
        name=path.name,
        snippet=snippet.format(path=path, base=base),
        kind=f"{config.model_type.removeprefix('pod_')} model",
        sharing=SHARING[config.share]
        + ": install the library from its repository (`pip install -e .` in a clone) and `import pod` before loading "
        "it; without that, transformers does not know the model type."
        if shares
        else "Its layers share nothing: it is a plain model that transformers loads by itself.",
        base=(base or "from scratch") + IN_4_BITS * in_4_bits,
        data=data[0],
        step=step,
        saving=config.kv_saving if shares else 0.0,
        **{name: getattr(config, name, "-") for name in ("sink_size", "recent_size", "share")},
        measured="\n".join(
            f"| {key}, on held-out samples at step {measured_at} | {value:.4f} |" for key, value in metrics.items()
        ),
        block_map="\n".join(
            f"layer {layer:3d}: " + " ".join(f"{anchor:3d}" for anchor in row)
            for layer, row in enumerate(blocks.anchors.tolist())
        ),
        streaming=STREAMING if blocks.is_streaming.any() else "",
    )
