"""Eviction methods: which tokens the cache keeps. `pod.PodCache(config, eviction=pod.eviction.SnapKV(budget=4096))`.

A further method that gives scores or allocates takes at most five steps:

1. Read the method's rules and write them into shared terms: what scores a token, how many are kept where, when.
2. Write `pod/eviction/NAME.py`: a frozen dataclass below `Eviction` with the hyper-parameters, a first line of
   docstring for `--eviction list`, and of the hooks `score`, `allocate`, `preference` and `when` those that differ.
3. Say which last tokens are always kept (`protected`) and how many queries are looked at (`observed`).
4. Enter the class in `METHODS` below: command lines and `parse` then know it.
5. Write a plain-loop simulation in `tests/eviction/`, and compare the kept positions with it.

A method that organises storage itself (Cascade, StreamingLLM) derives from `StoragePolicy` and makes a `Store` instead
of giving scores; steps 1, 4 and 5 are the same.
"""

import difflib
import types
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import get_type_hints

from pod.eviction.adakv import AdaKV
from pod.eviction.base import Eviction, Sharing, Stage, accepted_types
from pod.eviction.cake import CAKE
from pod.eviction.cascade import Cascade
from pod.eviction.combined import Combined
from pod.eviction.h2o import H2O
from pod.eviction.observation import Observation
from pod.eviction.pyramidkv import PyramidKV
from pod.eviction.quest import Quest
from pod.eviction.sagekv import SageKV
from pod.eviction.snapkv import SnapKV
from pod.eviction.storage import StoragePolicy, Store
from pod.eviction.streaming import LMInfinite, StreamingLLM
from pod.eviction.tova import TOVA

METHODS: dict[str, type] = {
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "adakv": AdaKV,
    "h2o": H2O,
    "tova": TOVA,
    "cake": CAKE,
    "sagekv": SageKV,
    "streamingllm": StreamingLLM,
    "lminfinite": LMInfinite,
    "cascade": Cascade,
    "quest": Quest,
}


def parse(text: str) -> Eviction | StoragePolicy:
    """A method from the command line's form, `snapkv:budget=256,window=16`.

    Raises:
        ValueError: unknown method or parameter (names the closest), a value of the wrong type, a missing budget.
    """
    name, _, settings = text.strip().partition(":")
    if name.lower() not in METHODS:
        raise ValueError(f"unknown eviction method {name!r}{_closest(name.lower(), METHODS)}")
    method = METHODS[name.lower()]
    hints = get_type_hints(method)
    known = {one.name: hints[one.name] for one in fields(method)}
    values = {}
    for setting in filter(None, settings.split(",")):
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not equals:
            raise ValueError(f"{text!r}: {setting!r} is not of the form parameter=value")
        if key not in known:
            raise ValueError(f"{name} has no parameter {key!r}{_closest(key, known)}")
        if key in values:
            raise ValueError(f"{text!r}: {key} is given twice")
        values[key] = _value(name, key, value, accepted_types(known[key]))
    missing = [one.name for one in fields(method) if one.default is MISSING and one.name not in values]
    if missing:
        raise ValueError(f"{text!r}: {missing[0]} is missing, e.g. {name}:{missing[0]}=256")
    return method(**values)


def split(text: str) -> list[str]:
    """The texts of methods separated by `+`.

    Raises:
        ValueError: one is empty.
    """
    parts = [part.strip() for part in text.split("+")]
    if not all(parts):
        raise ValueError(f"{text!r}: no method stands before or after a +: name one there, or remove the +")
    return parts


def parse_all(text: str) -> list[Eviction | StoragePolicy]:
    """Methods separated by `+`, in the order of the text.

    Raises:
        ValueError: as `parse`, and where nothing stands before or after a `+`.
    """
    return [parse(part) for part in split(text)]


def unparse(method: Eviction | StoragePolicy) -> str:
    """The shortest text of which `parse` makes an equal method: results are kept under it.

    Raises:
        ValueError: the method is none of `METHODS`.
    """
    names = [name for name, known in METHODS.items() if type(method) is known]
    if not names:
        raise ValueError(f"{method!r} has no text; there are {', '.join(METHODS)}")
    settings = ",".join(
        f"{one.name}={str(getattr(method, one.name)).lower()}"
        for one in fields(method)
        if one.default is MISSING or getattr(method, one.name) != one.default
    )
    return f"{names[0]}:{settings}"


def describe() -> str:
    """A line for each method, its parameters and their defaults: what `--eviction list` prints."""
    lines = []
    for name, method in METHODS.items():
        parameters = ",".join(
            one.name + ("" if one.default is MISSING else f"={str(one.default).lower()}") for one in fields(method)
        )
        summary = method.__doc__.split("\n")[0]
        lines.append(f"{name}:{parameters}\n    {summary}")
    return "\n".join(lines)


def _closest(name: str, valid: Iterable[str]) -> str:
    valid = list(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(valid)}"


def _value(method: str, key: str, text: str, accepted: tuple[type, ...]) -> object:
    lowered = text.lower()
    if types.NoneType in accepted and lowered == "none":
        return None
    if bool in accepted and lowered in ("true", "false"):
        return lowered == "true"
    if str in accepted:
        return text
    for kind in (int, float):
        if kind in accepted:
            try:
                return kind(text)
            except ValueError:
                continue
    names = " or ".join("none" if one is types.NoneType else one.__name__ for one in accepted)
    raise ValueError(f"{method}: {key} must be {names}, got {text!r}")


__all__ = [
    "CAKE",
    "H2O",
    "METHODS",
    "TOVA",
    "AdaKV",
    "Cascade",
    "Combined",
    "Eviction",
    "LMInfinite",
    "Observation",
    "PyramidKV",
    "Quest",
    "SageKV",
    "Sharing",
    "SnapKV",
    "Stage",
    "StoragePolicy",
    "Store",
    "StreamingLLM",
    "describe",
    "parse",
    "parse_all",
    "split",
    "unparse",
]
