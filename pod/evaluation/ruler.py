"""RULER (Hsieh et al. 2024): 13 synthetic tasks at any length, made from a seed. `eval/ruler.py` runs it.

Eight needle tasks, variable tracking, common words, frequent words; and question answering over many documents when the
files of SQuAD 2.0 and HotpotQA are given.

A prompt is filled up to its length in whole words: the last line of the haystack is usually cut short, where the
authors' scripts leave up to one whole line empty. Prompts of 1K tokens are then within 2 % too.

A needle task that asks for one value can be worded in a phrase of `pod.evaluation.passkey` instead, for a model that
knows no English question (`phrase`). Such scores are not the benchmark's, and whoever prints them says so.
"""

import random
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from transformers import PreTrainedTokenizerBase

from pod.evaluation import metrics
from pod.evaluation.haystack import Haystack
from pod.evaluation.passkey import PHRASES
from pod.evaluation.questions import Questions
from pod.evaluation.ruler_tasks import TASKS, Made, Setting
from pod.evaluation.runner import Request, as_chat, question_at, tokenise

_PHRASE_NEW_TOKENS = 48  # a phrase is answered by the value at once; a uuid takes 36 bytes


def resolve_tasks(names: Sequence[str] | None, given: set[str], phrase: str | None = None) -> list[str]:
    """The named tasks; without names, all that can be made from what is given.

    Args:
        names: of `ruler_tasks.TASKS`.
        given: of "haystack", "squad", "hotpotqa".
        phrase: see `make_requests`.

    Raises:
        ValueError: an unknown task, with the closest valid one; a task whose text or questions are not given; an
            unknown phrase, a task that cannot be worded in it.
    """
    if phrase is not None and phrase not in PHRASES:
        raise ValueError(f"--phrase {phrase!r} is not known: {', '.join(PHRASES)}")
    worded = [name for name, task in TASKS.items() if phrase is None or task.has_phrases]
    if names is None:
        return [name for name in worded if TASKS[name].needs in {None, *given}]
    for name in names:
        if name not in TASKS:
            close = get_close_matches(name, TASKS, n=1) or list(TASKS)
            raise ValueError(f"{name!r} is no task of RULER; did you mean {', '.join(close)}?")
        if TASKS[name].needs not in {None, *given}:
            raise ValueError(f"{name} needs --{TASKS[name].needs} FILE")
        if name not in worded:
            raise ValueError(f"--phrase {phrase} has no words for {name}, only for {', '.join(worded)}")
    return list(dict.fromkeys(names))


def make_requests(
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    length: int,
    samples: int,
    *,
    seed: int = 0,
    source: Haystack | Questions | None = None,
    phrase: str | None = None,
) -> list[Request]:
    """The prompts of one task at one length, each with its answer prefix at the end.

    Sample i is a function of (seed, task, length, i), the tokenizer and the given texts, and of nothing else.

    Args:
        tokenizer: counts the tokens; its chat template, where it has one, stands around the question.
        task: one of `TASKS`.
        length: tokens of prompt and answer together, as the authors count; never more, and at most 2 % fewer.
        samples: how many.
        seed: of everything random.
        source: a `Haystack` for the tasks that need one, `questions.read_squad`'s for qa_1, `read_hotpotqa`'s for qa_2.
        phrase: a name in `passkey.PHRASES`: needles that ask for one value stand and are asked for in it, with names
            of two letters and numbers of five digits, and 48 tokens have room for the answer; None is the
            benchmark's wording.

    Returns:
        Requests whose record is {"answers", "tokens"}; tokens as the length counts them.

    Raises:
        ValueError: unknown task or phrase, a text that it needs is missing, a length that does not hold the question.
    """
    resolve_tasks([task], {"haystack", "squad", "hotpotqa"} if source is not None else set(), phrase)
    kind = TASKS[task]
    if samples < 1:
        raise ValueError(f"--samples must be at least 1, got {samples}")
    chat = bool(tokenizer.chat_template)
    new_tokens = kind.max_new_tokens if phrase is None else _PHRASE_NEW_TOKENS

    def prompt(made: Made) -> str:
        return as_chat(tokenizer, made.context + made.question) + made.prefix

    def count(text: str, special_tokens: bool = False) -> int:
        return len(tokenise(tokenizer, text, special_tokens))

    requests = []
    for index in range(samples):
        setting = Setting(index, length, length - new_tokens, count, source, phrase)

        def make(size: int, setting: Setting = setting) -> tuple[int, Made]:
            made = kind.make(random.Random(f"{seed} {task} {length} {setting.index}"), size, setting)
            return count(prompt(made), not chat), made

        tokens, made = fit(make, setting.room)
        if tokens > setting.room or not kind.is_answered(made):
            need = f"at least {tokens + new_tokens} tokens" if tokens > setting.room else "more tokens"
            raise ValueError(f"{task} does not fit into {length} tokens with this tokenizer: {need} are needed")
        text = prompt(made)
        requests.append(
            Request(
                key=str(index),
                text=text,
                max_new_tokens=new_tokens,
                special_tokens=not chat,
                question_at=question_at(text, made.question or made.prefix),
                record={"answers": made.answers, "tokens": tokens + new_tokens},
            )
        )
    return requests


def fit(make: Callable[[int], tuple[int, Any]], room: int) -> tuple[int, Any]:
    """The largest size whose tokens are at most `room`, or one within half a percent of it.

    Args:
        make: size -> (tokens, made); tokens grow about evenly with the size.
        room: tokens.

    Returns:
        (tokens, made); those of size 0 where even that has too many.
    """
    low, best = 0, make(0)
    base = best[0]
    high, size, tries = None, max(1, (room - base) // 4), 0
    while best[0] <= room and best[0] < 0.995 * room and (high is None or high - low > 1):
        tokens, made = make(size)
        if tokens <= room:
            low, best = size, (tokens, made)
        else:
            high = size
        # Where the straight line through size 0 and this one reaches the room; halving when that does not get there.
        tries += 1
        size = int(size * (room - base) / max(1, tokens - base))
        if high is None:
            size = min(max(size, low + 1), 8 * low + 8)
        elif not low < size < high or tries > 6:
            size = (low + high) // 2
    return best


def score(task: str, rows: Sequence[dict[str, Any]]) -> float:
    """0..100 of one task's predictions, rows `{"pred", "answers"}` as the runner writes them."""
    return metrics.ruler([row["pred"] for row in rows], [row["answers"] for row in rows], TASKS[task].match)
