"""A needle in a haystack: one sentence at every depth of a text of every length, 35 x 35 by default.

    python eval/needle.py --ckpt exports/llama3-32k --haystack essays.txt --max-length 32000
    python eval/needle.py --ckpt exports/llama3-32k --haystack essays.txt --eviction snapkv:budget=1024+h2o:budget=1024
    torchrun --nproc-per-node 8 eval/needle.py --ckpt exports/llama3-32k --haystack essays.txt --batch-size 4

The text is cut to the length less 200 tokens, which question and answer need; the needle goes in at its depth, moved
back to the end of a sentence (at depth 100 it stands at the very end). The score needs no judge and is this
project's own: the share of the needle's key words that stand in the answer. Predictions are written to --out as they
come; the same command goes on where a killed run stopped. Then `scores.json` and the heat map `scores.png` follow.
Each method of --eviction has its own folder in --out, laid out as --out itself, and so has each of several
models; a table compares them (`comparison.md`).
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from pod.evaluation import report, runner
from pod.evaluation.benchmark import Benchmark, Row, Score, command
from pod.evaluation.command import check_least
from pod.evaluation.texts import read_text, text_hash

NEEDLE = "\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.\n"
KEY_WORDS = ("eat", "sandwich", "sit", "dolores", "park", "sunny", "day")
QUESTION = "\n\nAnswer from the text above. What is the best thing to do in San Francisco?\n"
ANSWER_PREFIX = "Answer: The best thing to do in San Francisco is"
BUFFER = 200  # tokens kept free for question and answer
MAX_NEW_TOKENS = 50


def make_requests(
    tokenizer: PreTrainedTokenizerBase, text: str, lengths: list[int], depths: list[float]
) -> list[runner.Request]:
    """One prompt for each length and depth; the record is {"length", "depth"}.

    Args:
        tokenizer: counts the tokens; its chat template, where it has one, stands around text and question.
        text: the haystack, repeated where it is too short.
        lengths: tokens, the buffer included.
        depths: 0 (before the text) to 100 (after it).

    Raises:
        ValueError: an empty text, a length that does not hold needle and buffer.
    """
    needle = runner.tokenise(tokenizer, NEEDLE, False)
    if min(lengths) < BUFFER + 2 * len(needle):
        raise ValueError(
            f"a length of {min(lengths)} tokens is too small: question and answer take {BUFFER} and the needle "
            f"{len(needle)} with this tokenizer; --min-length must be at least {BUFFER + 2 * len(needle)}"
        )
    # No tokenizer in use has tokens of 20 characters on average: a whole library need not be tokenised.
    hay = runner.tokenise(tokenizer, text[: 20 * max(lengths)], False)
    if not hay:
        raise ValueError("the haystack is empty: give any long text")
    hay = (hay * (max(lengths) // len(hay) + 1))[: max(lengths)]
    ends = _sentence_ends(tokenizer, hay)
    requests = []
    for length in lengths:
        kept = hay[: length - BUFFER - len(needle)]
        for depth in depths:
            place = _place(len(kept), depth, ends)
            content = tokenizer.decode(kept[:place] + needle + kept[place:], skip_special_tokens=True) + QUESTION
            prompt = runner.as_chat(tokenizer, content) + ANSWER_PREFIX
            requests.append(
                runner.Request(
                    key=f"{length}-{depth:g}",
                    text=prompt,
                    max_new_tokens=MAX_NEW_TOKENS,
                    special_tokens=not tokenizer.chat_template,
                    question_at=runner.question_at(prompt, QUESTION),
                    record={"length": length, "depth": depth},
                )
            )
    return requests


def _sentence_ends(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[bool]:
    """For each token, whether a sentence ends with it; all of them where the text has no full stop at all."""
    stops = {token for token in set(ids) if tokenizer.decode([token]).rstrip().endswith(".")}
    return [token in stops for token in ids] if stops else [True] * len(ids)


def _place(count: int, depth: float, ends: list[bool]) -> int:
    """How many of `count` tokens stand before the needle."""
    if depth == 100:
        return count
    place = int(count * depth / 100)
    while place > 0 and not ends[place - 1]:
        place -= 1
    return place


def score(prediction: str) -> float:
    """The share of the key words among the words of the answer, 0..100, whatever the case."""
    words = set(re.findall(r"\w+", prediction.lower()))
    return 100 * sum(word in words for word in KEY_WORDS) / len(KEY_WORDS)


def grid(first: float, last: float, steps: int) -> list[float]:
    """`steps` numbers from first to last, evenly spaced; of one step, the last."""
    return [first + (last - first) * step / (steps - 1) for step in range(steps)] if steps > 1 else [last]


class Needle(Benchmark):
    """See the module's docstring. One set; the parts of its score are the cells, `LENGTH-DEPTH`."""

    name = "needle"
    what = ""

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--haystack", type=Path, required=True, help="a UTF-8 file with any long text")
        parser.add_argument(
            "--min-length", type=int, default=1000, help="tokens of the shortest prompt (default: 1000)"
        )
        parser.add_argument(
            "--max-length", type=int, default=32000, help="tokens of the longest prompt (default: 32000)"
        )
        parser.add_argument("--steps", type=int, default=35, help="lengths, and depths (default: 35)")

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        check_least(options, steps=1)
        if options.min_length > options.max_length:
            raise ValueError(f"--min-length {options.min_length} is above --max-length {options.max_length}")
        self.lengths = list(dict.fromkeys(map(round, grid(options.min_length, options.max_length, options.steps))))
        self.depths = [round(depth, 1) for depth in grid(0, 100, options.steps)]
        self.text = read_text(options.haystack, "--haystack")
        self.settings = {"haystack": text_hash(self.text)}

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, list[runner.Request]]]:
        return [("needle", make_requests(tokenizer, self.text, self.lengths, self.depths))]

    def score(self, name: str, rows: Sequence[Row]) -> Score:
        return {row["key"]: score(row["pred"]) for row in rows}

    def aggregate(self, scores: dict[str, Score]) -> dict[str, float | None]:
        (cells,) = scores.values()
        return {"key words, %": sum(cells.values()) / len(cells)}

    def compared(self, scores: dict[str, Score]) -> dict[str, float | None]:
        return self.aggregate(scores)  # a thousand cells are for the picture

    def write(self, scores: dict[str, Score], counts: dict[str, int], folder: Path) -> None:
        (average,) = self.aggregate(scores).values()
        cells = {(n, depth): scores["needle"][f"{n}-{depth:g}"] for n in self.lengths for depth in self.depths}
        found = [{"length": length, "depth": depth, "score": value} for (length, depth), value in cells.items()]
        content = {"average": round(average, 2), "metric": "share of the needle's key words", "scores": found}
        report.write_json(folder / "scores.json", content)
        report.save_heat_map(
            folder / "scores.png",
            [[cells[length, depth] for length in self.lengths] for depth in self.depths],
            [f"{depth:g}" for depth in self.depths],
            [str(length) for length in self.lengths],
            title=f"Needle in a haystack: {average:.1f} % of the key words",
            xlabel="tokens",
            ylabel="depth in per cent",
        )
        where = f"over {len(self.lengths)} lengths x {len(self.depths)} depths"
        print(f"{average:.2f} % of the needle's key words found, {where}")
        print(f"written: {folder}/scores.json, scores.png")


main = command(Needle, __doc__)
