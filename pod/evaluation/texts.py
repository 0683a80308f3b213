"""Held-out texts: files that an option names, stretches of them, samples of a prepared directory."""

import gzip
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pod.data.demo_corpus import held_out_text


def read_text(path: Path, option: str) -> str:
    """A UTF-8 file that a command-line option names; one that ends with .gz is unpacked.

    Raises:
        ValueError: it is not there, no file, or no UTF-8; names the option, the path and what to give instead.
    """
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except EOFError as error:
        raise ValueError(f"{option} {path}: truncated ({error}); get it anew") from error
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror or error
        raise ValueError(f"{option} {path}: {reason}; give the path of a UTF-8 text file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path}: not UTF-8 ({error.reason} at byte {error.start}); convert it") from error


def text_hash(text: str) -> str:
    """What tells a text from others: sha256, hex. Of a prompt, before a chat template, which may write the date."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def given_texts(paths: Sequence[Path] | None) -> list[str]:
    """The UTF-8 files that `--text` names; without any, the held-out modules of the standard library as one text.

    Raises:
        ValueError: as `read_text`.
    """
    return [read_text(path, "--text") for path in paths] if paths else [held_out_text()]


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """A text's ids [N] int64, without special tokens."""
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)


def start_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before every text: its begin-of-text token, or nothing."""
    return [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id]


def stretches(ids: Tensor, length: int, limit: int, batch_size: int) -> Iterator[Tensor]:
    """[N] -> batches [B, length] of stretches spread evenly over the text, at most `limit` of them."""
    count = min(limit, len(ids) // length)
    if count == 0:
        raise ValueError(f"the text has {len(ids)} tokens, --length {length} wants more: lower it or give longer text")
    starts = torch.linspace(0, len(ids) - length, count).long().tolist()
    rows = torch.stack([ids[start : start + length] for start in starts])
    yield from rows.split(batch_size)


def prepared(path: str | Path, limit: int, batch_size: int) -> Iterator[Tensor]:
    """Batches [<= batch_size, <= T] of the documents in a prepared directory's validation split.

    Those of at most `limit` samples, spread evenly; documents beside each other share a batch if they have one length.
    One of a single token, of which nothing is foretold, is left out.
    """
    from pod.data.prepared import PreparedDataset

    dataset = PreparedDataset(path, "validation")
    dataset.data.verify("validation")
    chosen = torch.linspace(0, len(dataset) - 1, min(limit, len(dataset))).long().tolist()
    texts = (ids for index in chosen for ids in dataset.texts(index) if len(ids) > 1)
    for _, alike in groupby(texts, len):
        yield from torch.stack(list(alike)).split(batch_size)
