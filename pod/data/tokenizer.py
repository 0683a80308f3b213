"""Tokenizers by name, and whether prepared data can be learned by a model: its ids, and what they stand for."""

import sys
from collections.abc import Collection

from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

from pod.data.prepared import PreparedData
from pod.files import announce_hub
from pod.model.gguf import local


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer `name`: `bytes`, a directory, a hub id or a GGUF file.

    Raises:
        ValueError: none can be loaded from there.
    """
    if name == "bytes":
        return ByT5Tokenizer(extra_ids=0)
    try:
        announce_hub(name)
        return AutoTokenizer.from_pretrained(local(name))
    except Exception as error:  # what tokenizers raises for a damaged file is a bare Exception
        raise ValueError(
            f"no tokenizer can be loaded from {name!r}: {' '.join(str(error).split())}; give bytes, a directory, a hub "
            "id or a GGUF file"
        ) from error


def check_vocabulary(data: PreparedData, vocab_size: int) -> None:
    """Refuse data whose ids may lie beyond a model's embedding.

    Args:
        vocab_size: ids of the model.

    Raises:
        ValueError: the data's tokenizer has more; names both numbers.
    """
    if data.vocab_size > vocab_size:
        raise ValueError(
            f"{data.path} was prepared with the tokenizer {data.tokenizer!r} of {data.vocab_size} ids, but the model "
            f"has {vocab_size}: prepare again with the model's tokenizer (--tokenizer), or train a model of at least "
            f"vocab_size {data.vocab_size}"
        )


def check_tokenizer(data: PreparedData, name: str, used: Collection[int] | None = None) -> None:
    """See whether ids of prepared data stand for other tokens than the tokenizer `name` means by them.

    Tokenizers of two names are compared id by id: a directory that was moved or a longer vocabulary is no other one.
    That the data's tokenizer is not here is no error: a warning on stderr says so. Nothing is said where the model's is
    not.

    Args:
        used: ids that are known to be in the data, all of which must be the same; None compares all, and only warns,
            as a few reserved ids may be named anew without harm.

    Raises:
        ValueError: one of the ids `used` is another token.
    """
    if data.tokenizer == name:
        return
    try:
        mine = load_tokenizer(name).get_vocab()
    except ValueError:
        return
    others = []
    try:
        theirs = load_tokenizer(data.tokenizer).get_vocab()
    except ValueError as error:
        problem = f"which cannot be compared ({error})"
    else:
        ours = {index: token for token, index in mine.items()}
        compared = {index: token for token, index in theirs.items() if used is None or index in used}
        others = sorted((index, token) for index, token in compared.items() if ours.get(index) != token)
        if not others:
            return
        index, token = others[0]
        what = "ids" if used is None else "ids in it"
        problem = (
            f"and {len(others)} of {len(compared)} {what} are other tokens (id {index}: {token!r}, {ours.get(index)!r})"
        )
    said = f"{data.path} was prepared with the tokenizer {data.tokenizer!r}, the model's is {name!r}, {problem}: "
    if others and used is not None:
        raise ValueError(f"{said}prepare again with the model's")
    print(f"warning: {said}if these are not the same, prepare again with the model's", file=sys.stderr)
