"""Chats for `prepare.py --chat`: a JSON line's `messages`, written by a chat template, and which tokens are learned.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}

Learned is what the assistant writes: its turns' text and the token that ends each turn, which `generate` stops at; not
what the template puts before (`<|im_start|>assistant`), nor after (the newline behind `<|im_end|>`). Where the template
itself marks its turns with {% generation %}, that is what is learned.
"""

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

ROLES = ("system", "user", "assistant", "tool")


class BadChat(ValueError):
    """A record that is no chat, or that the chat template cannot write."""


def unreadable(error: ValueError | RecursionError) -> str:
    """What is wrong with a document, by what reading it as UTF-8 or as JSON raised."""
    if isinstance(error, UnicodeError):
        text = "UTF-8" if isinstance(error, UnicodeDecodeError) else "Unicode text"
        return f"wrong encoding: not {text} ({error.reason})"
    return f"broken JSON: {error}"


def parse_chat(raw: bytes) -> tuple[list[dict[str, Any]] | None, str]:
    """(messages, "") of one JSON line, or (None, what is wrong with it)."""
    try:
        record = json.loads(raw.decode("utf-8"))
        json.dumps(record, ensure_ascii=False).encode("utf-8")  # JSON may hold half a surrogate pair
    except (ValueError, RecursionError) as error:
        return None, unreadable(error)
    if not isinstance(record, dict) or "messages" not in record:
        return None, "no chat: no field 'messages'"
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        return None, "no chat: 'messages' is no list of messages"
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            return None, f"no chat: message {number} is no object with role and content"
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            return None, f"message {number} has role {role!r}: must be one of {', '.join(ROLES)}"
        if not isinstance(content, str):
            return None, f"message {number} ({role}) has no content: it must be a string"
    if all(message["role"] != "assistant" for message in messages):
        return None, "no turn of the assistant: nothing to learn"
    return messages, ""


@lru_cache(maxsize=1)
def load_chat(name: str, template: str | None) -> Callable[[list[dict[str, Any]]], tuple[np.ndarray, np.ndarray, str]]:
    """What writes chats with the tokenizer `name`.

    Args:
        name: as `--tokenizer` takes it.
        template: a Jinja chat template; None: the tokenizer's own.

    Returns:
        encode, which gives a chat's ids [n], learned [n] bool, and its text; it raises BadChat.

    Raises:
        ValueError: there is no tokenizer or no chat template, or the tokenizer does not tell where its tokens lie in
            the text.
    """
    from jinja2.exceptions import TemplateError

    from pod.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(name)
    if name != "bytes" and not tokenizer.is_fast:
        raise ValueError(f"--chat: the tokenizer {name} does not tell where its tokens lie; it needs tokenizer.json")
    template = template or tokenizer.chat_template
    if not isinstance(template, str):
        raise ValueError(f"--chat: the tokenizer {name} has no chat template; give one with --chat-template FILE")
    marks = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
    if marks and name == "bytes":
        raise ValueError("--chat: a template with {% generation %} needs a tokenizer with a tokenizer.json, not bytes")

    def written(messages: list[dict[str, Any]], **options: Any) -> str:
        try:
            return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
        except (TemplateError, TypeError, ValueError) as error:
            raise BadChat(f"the chat template refuses these messages: {error}") from None

    def header(through: str) -> str:
        """What the template puts before a chat's first turn, written as `through`, where that is the assistant's."""
        asked = [{"role": "user", "content": "?"}]
        prompt = written(asked, add_generation_prompt=True).removeprefix(written(asked))
        before, found, _ = through.partition(prompt) if prompt else ("", "", "")
        return before + found if found else ""

    def spans(messages: list[dict[str, Any]], text: str) -> list[tuple[int, int]]:
        """[begin, end) of the text that each of the assistant's turns adds to its prompt."""
        found = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            through = written(messages[: number + 1])
            prompt = written(messages[:number], add_generation_prompt=True) if number else header(through)
            if not through.startswith(prompt) or not text.startswith(through):
                raise BadChat(
                    f"message {number}: the chat template writes this turn otherwise when more follows, so where it "
                    "begins and ends is not known; use a template that marks it with {% generation %}"
                )
            found.append((len(prompt), len(through)))
        return found

    def encode(messages: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray, str]:
        text = written(messages)
        if name == "bytes":
            ids = np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64) + 3
            learned = np.zeros(len(ids), bool)
            for begin, end in spans(messages, text):
                learned[len(text[:begin].encode("utf-8")) : len(text[:end].encode("utf-8"))] = True
            return ids, learned, text
        if marks:
            both = tokenizer.apply_chat_template(
                messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
            )
            return np.asarray(both["input_ids"]), np.asarray(both["assistant_masks"], bool), text
        both = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, ends = np.asarray(both["input_ids"], np.int64), np.asarray(both["offset_mapping"]).reshape(-1, 2)[:, 1]
        learned = np.zeros(len(ids), bool)
        special = np.isin(ids, tokenizer.all_special_ids)
        for begin, end in spans(messages, text):
            # A token belongs to whoever writes its last character.
            turn = np.flatnonzero((ends > begin) & (ends <= end))
            closing = np.flatnonzero(special[turn])
            learned[turn if not len(closing) else turn[: closing[-1] + 1]] = True
        return ids, learned, text

    return encode
