"""Questions over many documents: the files of SQuAD 2.0 (arXiv 1806.03822) and HotpotQA (arXiv 1809.09600)."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Questions:
    """Questions over documents, of a file.

    Attributes:
        items: (question, answers, numbers of its documents, numbers of documents near to them).
        documents: all of them.
        path: the file.
    """

    items: list[tuple[str, list[str], list[int], list[int]]]
    documents: list[str]
    path: str


def read_squad(path: str | Path) -> Questions:
    """Answerable questions of a SQuAD 2.0 file; documents of the same article count as near.

    Raises:
        ValueError: no such file, or another format; names the field.
    """
    numbers: dict[str, int] = {}
    items = []
    with _content(path, "SQuAD 2.0") as content:
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                numbers.setdefault(paragraph["context"], len(numbers))
        for article in content["data"]:
            all_of = list(dict.fromkeys(numbers[paragraph["context"]] for paragraph in article["paragraphs"]))
            for paragraph in article["paragraphs"]:
                own = numbers[paragraph["context"]]
                near = [number for number in all_of if number != own]
                for item in paragraph["qas"]:
                    if not item.get("is_impossible", False):
                        answers = list(dict.fromkeys(answer["text"] for answer in item["answers"]))
                        items.append((item["question"], answers, [own], near))
    return _questions(path, items, numbers)


def read_hotpotqa(path: str | Path) -> Questions:
    """The questions of a HotpotQA file (distractor setting), each with its ten documents.

    Raises:
        ValueError: no such file, or another format; names the field.
    """
    numbers: dict[str, int] = {}
    items = []
    with _content(path, "HotpotQA") as content:
        for item in content:
            documents = [f"{title}\n{''.join(sentences)}" for title, sentences in item["context"]]
            own = list(dict.fromkeys(numbers.setdefault(document, len(numbers)) for document in documents))
            items.append((item["question"], [item["answer"]], own, []))
    return _questions(path, items, numbers)


def _questions(path: str | Path, items: list, numbers: dict[str, int]) -> Questions:
    items = [item for item in items if item[1]]
    if not items:
        raise ValueError(f"{path}: no question with an answer")
    return Questions(items, list(numbers), str(path))


@contextmanager
def _content(path: str | Path, format_name: str) -> Iterator[Any]:
    """What a JSON file holds; names file and field when it is not of its format."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give the path of the data set's JSON file") from error
    except ValueError as error:
        raise ValueError(f"{path}: broken JSON: {error}") from error
    try:
        yield content
    except KeyError as error:
        raise ValueError(f"{path}: not {format_name}: field {error} is missing") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: not {format_name}: {error}") from error
