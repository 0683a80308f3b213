"""The runner that all benchmarks of generated text share: predictions are written as they come, and never twice.

    requests = [Request(key="0", text=prompt, max_new_tokens=32, record={...}), ...]
    predict(model, tokenizer, requests, Predictions("runs/longbench/mine", "hotpotqa"))

A folder holds, for each set of requests, `NAME.jsonl` when it is complete and `NAME.part<rank>.jsonl` while it is not;
one line is one prediction. A run that was killed goes on where it stopped, with any other number of processes.
Processes (`torchrun --nproc-per-node 8 eval/...`) do not talk to each other: which requests are a process's own
follows from the requests alone, and whoever finds all predictions there merges them.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pod.evaluation import report
from pod.evaluation.models import Variant, asks_apart, generate_greedily
from pod.files import naming, read_json, replacing


@dataclass(frozen=True)
class Request:
    """One prompt.

    Attributes:
        key: names the request among those of its set; what is resumed is found by it.
        text: the whole prompt, chat template included.
        max_new_tokens: at most so many tokens are generated.
        special_tokens: the tokenizer adds its begin-of-text token; False where a chat template wrote one.
        stop_at_newline: generation also ends at a newline, but neither a newline nor the end of text comes first
            (LongBench's rule for samsum).
        question_at: the character of `text` at which the question begins; None where there is no telling. A method with
            `query_aware=False` evicts what comes before it and only then reads on.
        record: what is written beside the prediction; JSON types.
    """

    key: str
    text: str
    max_new_tokens: int
    special_tokens: bool = True
    stop_at_newline: bool = False
    question_at: int | None = None
    record: dict[str, Any] = field(default_factory=dict)


class Predictions:
    """The predictions of one set of requests, on disk.

    Args:
        folder: where the files are; made when the first prediction is written.
        name: of the set, the files' stem.
        rank: of this process; None takes it from torchrun's environment.
    """

    def __init__(self, folder: str | Path, name: str, rank: int | None = None) -> None:
        self.folder = Path(folder)
        self.name = name
        self.path = self.folder / f"{name}.jsonl"
        self._cut = False
        self.part = self.folder / f"{name}.part{process()[0] if rank is None else rank}.jsonl"

    def read(self, check: Callable[[str, dict[str, Any]], None] | None = None) -> dict[str, dict[str, Any]]:
        """key -> {"key", "pred", ...}, of all processes; a line that a kill cut short is left out.

        Args:
            check: ("file:line", row), raises where there is something wrong with a row.

        Raises:
            ValueError: a line is broken, with file and line.
        """
        found: dict[str, dict[str, Any]] = {}
        # Parts first: another process may merge them meanwhile, and then the merged file, read last, has them.
        for path in [*sorted(self.folder.glob(f"{self.name}.part*.jsonl")), self.path]:
            for number, row in enumerate(_read_lines(path, whole=path == self.path), start=1):
                if check is not None:
                    check(f"{path}:{number}", row)
                # The authors' own prediction files have no key: their order stands for it.
                found.setdefault(str(row.get("key", number - 1)), row)
        return found

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write rows to this process's part, each in one line, and see them on disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with naming(self.part), open(self.part, "ab") as file:
            if not self._cut:
                _cut_broken_end(self.part)
                self._cut = True
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def merge(self, keys: Sequence[str]) -> list[dict[str, Any]] | None:
        """The rows of `keys` in that order, all of them also written as one file; None while some are missing.

        Rows of other keys that are there (of a run with a larger limit) stay, at the end.
        """
        found = self.read()
        if any(key not in found for key in keys):
            return None
        wanted = set(keys)
        ordered = [found[key] for key in keys] + [row for key, row in found.items() if key not in wanted]
        parts = list(self.folder.glob(f"{self.name}.part*.jsonl"))
        if parts:
            lines = (json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") for row in ordered)
            with replacing(self.path) as aside:
                aside.write_bytes(b"".join(line + b"\n" for line in lines))
            for part in parts:
                part.unlink(missing_ok=True)
        return ordered[: len(keys)]


def predict(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    requests: Sequence[Request],
    predictions: Predictions,
    *,
    batch_size: int = 1,
    cache_factory: Callable[[PreTrainedModel], Any] | None = None,
    apart: bool = False,
    settings: dict[str, Any] | None = None,
    label: str = "",
) -> list[dict[str, Any]] | None:
    """Generate greedily for all requests that have no prediction yet.

    Requests are sorted by length, longest first, so that a batch pads little and a lack of memory shows at once. Rows
    are padded on the left: the batch size changes nothing but speed.

    Args:
        model: on its device, in eval mode.
        tokenizer: the model's.
        requests: all requests of the set, the same in every process and every run.
        predictions: where they are written.
        batch_size: requests generated at once.
        cache_factory: model -> `past_key_values` of a new batch; None leaves the cache to the model.
        apart: the questions are read after the caches have taken in, and evicted from, their contexts.
        settings: what predictions depend on, see `settle`; None notes nothing.
        label: what the progress bar says after the set's name.

    Returns:
        The rows `{"key", "pred", **record}` in the requests' order; None where other processes are not done yet.

    Raises:
        ValueError: two requests with one key, an empty prompt, a batch size below 1, predictions of other requests or
            with other settings; a method with `query_aware=False` and a request whose question is not known.
    """
    if batch_size < 1:
        raise ValueError(f"the batch size must be at least 1, got {batch_size}")
    keys = [request.key for request in requests]
    if len(set(keys)) < len(keys):
        raise ValueError(f"{predictions.name}: two requests have the same key")
    done = predictions.read()
    for request in requests:
        if request.key in done:
            _check_same(request, done[request.key], predictions)
    rank, world = process()
    # Dealt out by length, so that all processes have alike much to do, and by nothing that changes during a run.
    own = sorted(requests, key=lambda request: (-len(request.text), request.key))[rank::world]
    own = [_Prompt.of(tokenizer, request, apart) for request in own if request.key not in done]
    own.sort(key=lambda prompt: (prompt.rule, -len(prompt.ids), prompt.request.key))
    if settings is not None:  # nothing is left that could be refused
        settle(predictions.folder, settings)
    with tqdm(
        total=sum(len(prompt.ids) for prompt in own),
        desc=f"{predictions.name}{label} ({len(own)} of {len(requests)})",
        unit="tok",
        unit_scale=True,
        disable=rank != 0,
    ) as bar:
        start = 0
        while start < len(own):
            batch = [prompt for prompt in own[start : start + batch_size] if prompt.rule == own[start].rule]
            texts = _generate(model, tokenizer, batch, cache_factory)
            predictions.append(
                {"key": prompt.request.key, "pred": text, **prompt.request.record}
                for prompt, text in zip(batch, texts, strict=True)
            )
            bar.update(sum(len(prompt.ids) for prompt in batch))
            start += len(batch)
    return predictions.merge(keys)


def predict_each(
    variants: Sequence[Variant],
    tokenizer: PreTrainedTokenizerBase,
    requests: Sequence[Request],
    out: Path,
    name: str,
    batch_size: int,
    settings: dict[str, Any],
) -> dict[Variant, list[dict[str, Any]] | None]:
    """`predict` with every eviction method, the set's `name` in the method's folder of `out`.

    `settings` are what the predictions depend on beside the variant.
    """
    for variant in variants:
        check_settings(variant.folder(out), settings | variant.settings())
    return {
        variant: predict(
            variant.model,
            tokenizer,
            requests,
            Predictions(variant.folder(out), name),
            batch_size=batch_size,
            cache_factory=variant.cache_factory,
            apart=asks_apart(variant.method),
            settings=settings | variant.settings(),
            label=variant.label,
        )
        for variant in variants
    }


def as_chat(tokenizer: PreTrainedTokenizerBase, text: str, system: str = "") -> str:
    """The text as a user's turn, up to where the answer begins; as it is where the tokenizer has no chat template.

    Args:
        tokenizer: of the chat template.
        text: what the user says.
        system: a system message; where there is no chat template, or one without such, it opens the text.

    Raises:
        ValueError: the chat template fails on a user's turn.
    """
    if not tokenizer.chat_template:
        return system + text
    user = {"role": "user", "content": text}
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    turns = [user] if not system else [{"role": "system", "content": system}, user]
    try:
        made = tokenizer.apply_chat_template(turns, **options)
    except (TemplateError, TypeError) as error:  # how templates refuse a role, and how they fail
        if not system:
            raise ValueError(f"the tokenizer's chat template fails on a user's turn: {error}") from error
        made = ""
    return made if system.strip() in made else as_chat(tokenizer, system + text)


def asked_last(tokenizer: PreTrainedTokenizerBase, text: str, asked: str, chat: bool) -> tuple[str, int | None]:
    """A prompt that may have been truncated, and where its question begins.

    Args:
        tokenizer: of the chat template.
        text: the prompt; what is asked stands at its end. What truncation has cut of that, or the tokenizer writes in
            another way, counts as that long, and as half of the prompt at most, which is what truncation leaves of its
            end.
        asked: what the prompt's template has behind the context.
        chat: put it into the chat template.

    Returns:
        The text and `question_at` of a `Request`.
    """
    place = text.rfind(asked) if asked else -1
    place = place if place > 0 else max(len(text) - len(asked), len(text) // 2)
    if not chat:
        return text, place
    wrapped = as_chat(tokenizer, text)
    return wrapped, question_at(wrapped, text[place:])


def encode(tokenizer: PreTrainedTokenizerBase, request: Request) -> list[int]:
    """The request's token ids.

    Raises:
        ValueError: the prompt is empty.
    """
    ids = tokenise(tokenizer, request.text, request.special_tokens)
    if not ids:
        raise ValueError(f"request {request.key}: the prompt is empty")
    return ids


def tokenise(tokenizer: PreTrainedTokenizerBase, text: str, special_tokens: bool = True) -> list[int]:
    """The ids of a prompt: begin-of-text token where the tokenizer has one, and never an end-of-text token.

    A tokenizer without a begin-of-text token may still put an end-of-text token (ByT5): nothing could follow that.
    """
    special_tokens = special_tokens and tokenizer.bos_token_id is not None
    return tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"]


def question_at(text: str, question: str) -> int | None:
    """Where in a prompt its question begins, for `Request`; None where the chat template changed the question.

    What stands behind the question (the end of the turn, an answer's prefix) is read with it.
    """
    question = question.rstrip()  # chat templates may strip a turn
    place = text.rfind(question) if question else -1
    return None if place < 0 else place


def question_tokens(tokenizer: PreTrainedTokenizerBase, request: Request, ids: Sequence[int]) -> int:
    """How many of a request's last ids are its question; an id that stands for both sides of the border is.

    Raises:
        ValueError: where the question begins is not known.
    """
    if request.question_at is None:
        raise ValueError(
            f"request {request.key}: query_aware=false evicts the context before the question is read, and it is not "
            "known where the question begins: set question_at"
        )
    context = tokenise(tokenizer, request.text[: request.question_at], request.special_tokens)
    return len(ids) - len(os.path.commonprefix([list(ids), context]))


@dataclass(frozen=True)
class _Prompt:
    """A request's token ids; `question`: how many of the last are the question, where it is read apart, else 0."""

    request: Request
    ids: list[int]
    question: int = 0

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, request: Request, apart: bool) -> "_Prompt":
        ids = encode(tokenizer, request)
        return cls(request, ids, question_tokens(tokenizer, request, ids) if apart else 0)

    @property
    def rule(self) -> tuple[bool, int, int]:
        """What rows of one call of `generate` have in common: limit, stop rule, tokens read after the contexts."""
        return self.request.stop_at_newline, self.request.max_new_tokens, self.question


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: list[_Prompt],
    cache_factory: Callable[[PreTrainedModel], Any] | None,
) -> list[str]:
    """The new text of each row, special tokens skipped."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    rows = [torch.tensor(prompt.ids, device=model.device) for prompt in batch]
    input_ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    request = batch[0].request
    options: dict[str, Any] = {"pad_token_id": pad}
    if request.stop_at_newline:
        newline = tokenizer.encode("\n", add_special_tokens=False)[-1:]  # some tokenizers make nothing of it
        options["eos_token_id"] = [i for i in (tokenizer.eos_token_id, *newline) if i is not None]
        options["min_new_tokens"] = 1
    cache = None if cache_factory is None else cache_factory(model)
    with torch.inference_mode():
        new = generate_greedily(
            model, input_ids, request.max_new_tokens, batch[0].question, cache, tokenizer, mask, **options
        )
    return [tokenizer.decode(row, skip_special_tokens=True) for row in new.tolist()]


def process() -> tuple[int, int]:
    """(rank, number of processes) as torchrun's RANK and WORLD_SIZE say; (0, 1) without them.

    Raises:
        ValueError: they make no sense.
    """
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise ValueError(f"RANK={rank} and WORLD_SIZE={world}: the rank must be below the number of processes")
    return int(rank), int(world)


def check_settings(folder: str | Path, settings: dict[str, Any], partly: bool = False) -> None:
    """Refuse to mix a folder's predictions with others; writes nothing.

    Args:
        folder: of the predictions; there may be none yet.
        settings: what predictions depend on.
        partly: these are not all of it: what is known before a model is loaded.

    Raises:
        ValueError: the folder's predictions were made with other settings.
    """
    path = Path(folder) / "settings.json"
    if not path.exists():
        return
    earlier = read_json(path)
    if not isinstance(earlier, dict):
        raise ValueError(f"{path}: not the settings of predictions: choose another --out, or remove the folder")
    names = set(settings) if partly else set(earlier) | set(settings)
    refuse_others(f"--out {folder} holds predictions", earlier, {name: settings.get(name) for name in names}, "folder")


def refuse_others(what: str, earlier: dict[str, Any], settings: dict[str, Any], place: str) -> None:
    """Refuse results that were not made with these settings.

    Args:
        what: says where which results are.
        earlier: what they were made with, as JSON gives it back.
        settings: what they would be made with now.
        place: what to remove.

    Raises:
        ValueError: a setting differs, or the results, of an earlier version of the library, do not tell.
    """
    for name, value in sorted(settings.items()):
        if earlier.get(name) != value:
            untold = "" if name in earlier else " (none is noted there, as by earlier versions)"
            raise ValueError(
                f"{what} with {name} {earlier.get(name)!r}, now it is {value!r}{untold}: choose another --out, or "
                f"remove the {place}"
            )


def settle(folder: str | Path, settings: dict[str, Any]) -> None:
    """Note in `settings.json` what the predictions of a folder depend on, just before the first is made.

    Raises:
        ValueError: as `check_settings`.
    """
    check_settings(folder, settings)
    path = Path(folder) / "settings.json"
    if not path.exists():
        report.write_json(path, settings)


def _read_lines(path: Path, whole: bool) -> list[dict[str, Any]]:
    """The rows of a file; of one that is not `whole`, without what a kill has cut short."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    rows = []
    lines = raw.split(b"\n")
    # What follows the last newline was being written when the process was killed; of a whole file it may be a line.
    for number, line in enumerate(lines if whole and lines[-1].strip() else lines[:-1], start=1):
        try:
            row = json.loads(line.decode("utf-8", "surrogatepass"))
            if not isinstance(row["pred"], str):
                raise TypeError
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}:{number}: no prediction (a JSON object with a text in 'pred'): {line[:80]!r}. Remove the line "
                "to have it made again"
            ) from error
        rows.append(row)
    return rows


def _cut_broken_end(path: Path) -> None:
    """Take away what a kill left of a line, so that the next line does not continue it."""
    raw = path.read_bytes()
    if raw and not raw.endswith(b"\n"):
        os.truncate(path, raw.rfind(b"\n") + 1)


def _check_same(request: Request, row: dict[str, Any], predictions: Predictions) -> None:
    for name, value in request.record.items():
        if name in row and row[name] != value:
            raise ValueError(
                f"{predictions.folder}: the prediction {request.key} of {predictions.name} was made for other data "
                f"({name} differs): choose another --out, or remove the file"
            )
