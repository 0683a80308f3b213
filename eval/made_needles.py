"""NeedleBench's files with needles of our own in *Persuasion*, as the authors' lie on a hub.

    python eval/made_needles.py --out runs/needles
    python eval/needlebench.py --ckpt exports/llama3-32k --data runs/needles --lengths 1024 2048 --buffer 200

Twelve needles ("On Emerald Island lies the Stardust Shard."), chains of two to five facts to reason on ("Ann is the
pupil of Bob."), two of each length, and the novel's long paragraphs as the haystack.
"""

import argparse
import gzip
import json
import sys
from itertools import pairwise
from pathlib import Path

from pod.terminal import exit_status

NOVEL = Path(__file__).resolve().parents[1] / "data/held-out/persuasion.txt.gz"
THINGS = {
    "Emerald": "Stardust Shard", "Amber": "Golden Compass", "Coral": "Ivory Flute", "Silver": "Crystal Lamp",
    "Copper": "Iron Crown", "Cedar": "Painted Drum", "Falcon": "Silver Mirror", "Harbor": "Wooden Horse",
    "Juniper": "Glass Rose", "Lantern": "Bronze Bell", "Marble": "Velvet Map", "Willow": "Stone Clock",
}  # fmt: skip
NAMES = ("Ann", "Bob", "Carl", "Dora", "Emil", "Fay")


def needles() -> list[dict[str, str]]:
    return [
        {
            "needle": f"On {isle} Island lies the {thing}.",
            "retrieval_question": f"What lies on {isle} Island? Please answer in the format 'On {isle} Island lies the "
            "____.'",
            "arg1": f"{isle} Island",
            "arg2": thing,
            "language": "English",
        }
        for isle, thing in THINGS.items()
    ]


def chains() -> list[dict[str, str | int | list[str]]]:
    found = []
    for count in (2, 3, 4, 5):
        for names in (NAMES[: count + 1], (*NAMES[1:], NAMES[0])[: count + 1]):
            asked = f"{names[0]} learned from a teacher, who learned from a teacher, and so on."
            found.append(
                {
                    "derivations": [f"{one} is the pupil of {other}." for one, other in pairwise(names)],
                    "derivation_count": count,
                    "question": f"{asked} Who is the first teacher of all?",
                    "answer": names[-1],
                }
            )
    return found


@exit_status
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    out = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    paragraphs = gzip.decompress(NOVEL.read_bytes()).decode().split("\n\n")
    haystack = [{"text": " ".join(one.split()) + " "} for one in paragraphs if len(one) > 200]
    for name, lines in (("PaulGrahamEssays", haystack), ("needles", needles())):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (out / "multi_needle_reasoning_en.json").write_text(json.dumps(chains()))
    print(f"written: {out}/PaulGrahamEssays.jsonl, needles.jsonl, multi_needle_reasoning_en.json")


if __name__ == "__main__":
    sys.exit(main())
