"""What was prepared, for people: `report.md` and `report.png` beside the samples, from what is in `report.json`."""

from pathlib import Path
from typing import Any

import numpy as np


def histogram(lengths: np.ndarray) -> dict[str, Any]:
    """How long documents are.

    Args:
        lengths: [n] tokens of each, at least 1 document of at least 1 token.

    Returns:
        dict(shortest, median, mean, longest) in tokens, and `bins`: for each power of two between the shortest and the
        longest dict(from, to, documents, tokens) of the documents of from..to-1 tokens.
    """
    power = np.frexp(lengths)[1] - 1  # exact, where a logarithm would round
    first, count = int(power.min()), int(power.max() - power.min()) + 1
    documents = np.bincount(power - first, minlength=count)
    tokens = np.bincount(power - first, lengths, count).astype(np.int64)
    edges = [2**each for each in range(first, first + count + 1)]
    return {
        "shortest": int(lengths.min()),
        "median": float(np.median(lengths)),
        "mean": float(lengths.mean()),
        "longest": int(lengths.max()),
        "bins": [
            {"from": edges[i], "to": edges[i + 1], "documents": int(documents[i]), "tokens": int(tokens[i])}
            for i in range(count)
        ],
    }


def markdown(report: dict[str, Any], facts: dict[str, Any]) -> str:
    """report.md; `facts` are lines at its beginning, name -> value."""
    from pod.evaluation.report import markdown_table

    splits = report["splits"]
    rows = [[kind, *(f"{entry[kind]:,}" for entry in splits.values())] for kind in ("documents", "samples", "tokens")]
    rows.append(["padding", *(f"{entry['padding']:.1%}" for entry in splits.values())])
    rows.append(["tokens with distant keys", *(f"{entry['distant']:.1%}" for entry in splits.values())])
    for kind in ("shortest", "median", "mean", "longest"):
        rows.append([f"{kind} document", *(f"{report['lengths'][split][kind]:,.0f}" for split in splits)])
    parts = ["# Prepared data", "\n".join(f"- {name}: {value}" for name, value in facts.items())]
    parts.append(markdown_table(["", *splits], rows))
    left_out = {
        "the same text occurs before": report["duplicates"],
        "cut to the sample's length": report["truncated_documents"],
        "one token, in samples of one document": report["one_token_documents"],
    }
    for entry in report["skipped"]:
        kind = entry["problem"].partition(":")[0]
        left_out[kind] = left_out.get(kind, 0) + 1
    rows = [[name, f"{count:,}"] for name, count in left_out.items() if count]
    if rows:
        parts.append("## Left out, or cut\n\n" + markdown_table(["why", "documents"], rows))
    if report["length_intervals"]:
        rows = [
            [f"{entry['from']}..{'' if entry['to'] is None else entry['to'] - 1}"]
            + [f"{entry['drawn_documents']:,} of {entry['documents']:,}"]
            + [f"{entry['drawn_tokens']:,} of {entry['tokens']:,}"]
            + [f"{entry['drawn_tokens'] / splits['train']['tokens']:.1%}"]
            for entry in report["length_intervals"]
        ]
        parts.append(
            "## Intervals of length, training\n\n"
            + markdown_table(["tokens", "documents", "tokens drawn", "share"], rows)
        )
    for split, lengths in report["lengths"].items():
        rows = [
            [f"{one['from']:,}..{one['to'] - 1:,}", f"{one['documents']:,}", f"{one['tokens']:,}"]
            for one in lengths["bins"]
        ]
        parts.append(f"## Lengths, {split}\n\n" + markdown_table(["tokens", "documents", "tokens in them"], rows))
    parts.append("![The lengths as a picture](report.png)")
    return "\n\n".join(parts) + "\n"


def draw(report: dict[str, Any], sequence_length: int, path: Path) -> None:
    """report.png: documents and tokens by length, a row for each split; a line where a sample ends."""
    from pod.evaluation.report import figure, save_figure

    splits = report["lengths"]
    made = figure(9, 0.6 + 2.4 * len(splits))
    for row, (split, lengths) in enumerate(splits.items()):
        bins = lengths["bins"]
        for column, kind in enumerate(("documents", "tokens")):
            axes = made.add_subplot(len(splits), 2, 2 * row + column + 1)
            widths = [one["to"] - one["from"] for one in bins]
            axes.bar(
                [one["from"] for one in bins], [one[kind] for one in bins], widths, align="edge", edgecolor="white"
            )
            axes.set_xscale("log", base=2)
            axes.axvline(sequence_length, color="C1", label=f"a sample: {sequence_length:,} tokens")
            for edge in [entry["from"] for entry in report["length_intervals"] or []][1:] if split == "train" else []:
                axes.axvline(edge, color="grey", linestyle=":")
            axes.set(
                xlabel="tokens of a document", ylabel=kind, title=f"{split}: {sum(one[kind] for one in bins):,} {kind}"
            )
            axes.legend(fontsize=7)
    save_figure(made, path, dpi=100)


def write(folder: Path, report: dict[str, Any], sequence_length: int, facts: dict[str, Any]) -> None:
    """report.md and report.png into `folder`."""
    from pod.files import write_text

    write_text(folder / "report.md", markdown(report, facts))
    draw(report, sequence_length, folder / "report.png")
