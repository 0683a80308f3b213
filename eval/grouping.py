"""Which grouping of layers costs a model least: each method's blocks at one saving, on a model that is not trained.

    python eval/grouping.py --base checkpoints/tiny-base --similarity checkpoints/tiny/similarity.safetensors \\
        --data data/demo/1024-plain --kv-saving 0.33 --sink-size 4 --recent-size 124

    python eval/grouping.py --base checkpoints/smollm2-135m --similarity runs/damage/similarity.safetensors \\
        --damage runs/damage/damage.safetensors --data data/smollm2 --recent-size 240 --samples 0 --limit 12

Writes grouping.json and prints a table: the similarity of sharing layers to their anchors (mean and least), nats per
token on the validation split of `--data`, and pass keys of which the greater part lies beyond the window (`--samples 0`
leaves them out). The first row is the dense model, the second window attention: sinks and recent tokens alone.
"dist." counts the positions with distant tokens only.
"""

import argparse
import sys
from pathlib import Path

from torch import Tensor

import pod
from pod.analyze import load_damage, load_similarity
from pod.blocks import LayerBlocks
from pod.data.demo_corpus import held_out_text
from pod.evaluation import command, models, report
from pod.evaluation.passkey import generate_greedily, passkey_accuracy, passkey_prompts
from pod.evaluation.perplexity import perplexity
from pod.evaluation.texts import prepared
from pod.grouping import METHODS
from pod.terminal import exit_status


def to_anchors(similarity: Tensor, blocks: LayerBlocks) -> Tensor:
    """[n] similarities of all sharing layers to their anchors; similarity is [H_kv, L, L]."""
    layers, heads = (~blocks.is_anchor).nonzero(as_tuple=True)
    return similarity[heads, layers, blocks.anchors[layers, heads]]


def evaluate(options: argparse.Namespace) -> dict[str, dict]:
    """Every number of the table, by row.

    Raises:
        ValueError: a model, file, saving or length that cannot be.
    """
    similarity = load_similarity(options.similarity)
    costs = None if options.damage is None else load_damage(options.damage)
    stock, tokenizer = models.load(options.base, dtype="float32")
    prompts = [
        prompt
        for length in options.lengths
        for prompt in passkey_prompts(tokenizer, held_out_text(), length, [k / 8 for k in range(9)], options.samples)
    ]
    found = {}
    first = options.sink_size + options.recent_size  # the lowest position with a distant token
    for name in ("dense", "window", *METHODS, *(["damage"] if costs is not None else [])):
        if name in ("dense", "window"):
            blocks = LayerBlocks.dense(stock.config.num_hidden_layers, stock.config.num_key_value_heads)
        elif name == "damage":
            blocks = LayerBlocks.for_damage(costs, options.kv_saving)
        else:
            blocks = LayerBlocks.for_saving(similarity, options.kv_saving, name)
        share = "window" if name == "window" else "scores"
        model = pod.convert(stock, blocks, options.sink_size, options.recent_size, share).eval()
        text = perplexity(model, prepared(options.data, options.limit, options.batch_size), label=f"{name}: text")
        scores = passkey_accuracy(model, tokenizer, prompts, 12, generate_greedily, label=f"{name}: pass keys")
        far = [score for score, p in zip(scores, prompts, strict=True) if p.distance > options.recent_size]
        alike = to_anchors(similarity, blocks)
        found[name] = {
            "kv_saving": model.config.kv_saving,
            "mean_similarity": float(alike.mean()) if len(alike) else 1.0,
            "worst_similarity": float(alike.min()) if len(alike) else 1.0,
            "loss": text.loss,
            "loss_distant": float(text.nats[first + 1 :].sum() / text.count[first + 1 :].sum().clamp(min=1)),
            "tokens": int(text.count.sum()),
            "passkey": sum(scores) / len(scores) if scores else None,
            "passkey_beyond": sum(far) / len(far) if far else None,
            "sizes": blocks.sizes,
        }
    return found


@exit_status
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="the dense model: a directory or hub id")
    parser.add_argument("--similarity", type=Path, required=True, help="what pod.analyze wrote about it")
    parser.add_argument("--damage", type=Path, help="what pod.analyze wrote with blocks.method=damage or fisher")
    parser.add_argument("--data", required=True, help="a prepared directory, whose validation split is foretold")
    parser.add_argument("--kv-saving", type=float, default=0.35, help="share of the cache's bytes to save (0.35)")
    parser.add_argument("--sink-size", type=int, default=16)
    parser.add_argument("--recent-size", type=int, default=4080)
    command.add_numbers(parser, "--lengths", [256, 512, 1016], "tokens of the prompts with keys (256,512,1016)")
    parser.add_argument("--samples", type=int, default=4, help="prompts for each length and depth (4)")
    parser.add_argument("--limit", type=int, default=96, help="samples of text (96)")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of text at once (8)")
    parser.add_argument(
        "--out", type=Path, default=command.default_folder("grouping"), help="folder of what is written"
    )
    options = parser.parse_args(arguments)
    found = evaluate(options)
    report.write_json(options.out / "grouping.json", found)
    header = ["grouping", "kv_saving", "mean similarity", "least", "nats/token", "dist.", "pass-key digits"]
    header += ["beyond the window"]
    rows = [
        [
            name,
            f"{row['kv_saving']:.1%}",
            f"{row['mean_similarity']:.4f}",
            f"{row['worst_similarity']:.4f}",
            f"{row['loss']:.4f}",
            f"{row['loss_distant']:.4f}",
            *("-" if row[key] is None else f"{row[key]:.1%}" for key in ("passkey", "passkey_beyond")),
        ]
        for name, row in found.items()
    ]
    print(report.markdown_table(header, rows))
    print(f"written: {options.out}/grouping.json")


if __name__ == "__main__":
    sys.exit(main())
