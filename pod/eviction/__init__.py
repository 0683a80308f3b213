"""Eviction methods: which tokens the cache keeps. `pod.PodCache(config, eviction=pod.eviction.SnapKV(budget=4096))`.

base.py                what a method says, three kinds of it, and what it is shown: what the last queries attended to
snapkv.py, pyramidkv.py, adakv.py, sagekv.py, h2o.py, tova.py, cake.py, chunkkv.py    one method each, by scores
criticalkv.py, zigzagkv.py      SnapKV's scores with what values add to the output; shared between layers
expected.py            Expected Attention: scores by the moments of the prompt's queries
keys.py                Knorm, KeyDiff, LagKV, Q-Filters: scores of what is stored, without queries
kvzip.py               KVzip: what is looked at while the context is repeated, of all layers together
combined.py            one method's scores under another's allocation
streaming.py, cascade.py    methods that keep tokens by their places
quest.py, shadowkv.py, clusterkv.py, recent.py    keep all, and choose what a step reads

A further method: the checklist of CONTRIBUTING.md.
"""

import difflib
import types
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from pod.eviction.adakv import AdaKV
from pod.eviction.base import (
    Chain,
    ChainPolicy,
    Eviction,
    Method,
    Observation,
    ReadSelector,
    Sharing,
    Stage,
    accepted_types,
)
from pod.eviction.cake import CAKE
from pod.eviction.cascade import Cascade
from pod.eviction.chunkkv import ChunkKV
from pod.eviction.clusterkv import ClusterKV
from pod.eviction.combined import Combined
from pod.eviction.criticalkv import CriticalKV
from pod.eviction.expected import ExpectedAttention
from pod.eviction.h2o import H2O
from pod.eviction.keys import KeyDiff, Knorm, LagKV, QFilters
from pod.eviction.kvzip import KVzip
from pod.eviction.pyramidkv import PyramidKV
from pod.eviction.quest import Quest
from pod.eviction.recent import RecentReader
from pod.eviction.sagekv import SageKV
from pod.eviction.shadowkv import ShadowKV
from pod.eviction.snapkv import SnapKV
from pod.eviction.streaming import LMInfinite, StreamingLLM
from pod.eviction.tova import TOVA
from pod.eviction.zigzagkv import ZigZagKV

METHODS: dict[str, type] = {
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "adakv": AdaKV,
    "h2o": H2O,
    "tova": TOVA,
    "cake": CAKE,
    "sagekv": SageKV,
    "chunkkv": ChunkKV,
    "criticalkv": CriticalKV,
    "zigzagkv": ZigZagKV,
    "expectedattention": ExpectedAttention,
    "knorm": Knorm,
    "keydiff": KeyDiff,
    "lagkv": LagKV,
    "qfilters": QFilters,
    "kvzip": KVzip,
    "streamingllm": StreamingLLM,
    "lminfinite": LMInfinite,
    "cascade": Cascade,
    "quest": Quest,
    "shadowkv": ShadowKV,
    "clusterkv": ClusterKV,
    "recentreader": RecentReader,
}


def parse(text: str) -> Method:
    """A method from the command line's form.

    `snapkv:budget=256,window=16`, `snapkv:budget=0.25` with a share of the prompt, `cake:budget=1024,preset=NAME` with
    searched hyper-parameters; `cake*snapkv:budget=256` is `Combined` of CAKE's allocation and SnapKV's scores, and a
    parameter goes to the parts that have it.

    Raises:
        ValueError: unknown method, parameter or preset (names the closest), a value of the wrong type, a missing
            budget, methods that cannot be combined.
    """
    name, _, settings = text.strip().partition(":")
    methods = [_named(part.strip(), name) for part in name.split("*")]
    known = {one.name for method in methods for one in fields(method)}
    presets = {preset: values for method in methods for preset, values in getattr(method, "PRESETS", {}).items()}
    given: dict[str, str] = {}
    for setting in filter(None, settings.split(",")):
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not equals:
            raise ValueError(f"{text!r}: {setting!r} is not of the form parameter=value")
        pairs = {key: value}
        if presets and key == "preset":
            if value not in presets:
                raise ValueError(f"{name} has no preset {value!r}{_closest(value, presets)}")
            pairs = {one: str(number) for one, number in presets[value].items()}
        elif key not in known:
            raise ValueError(f"{name} has no parameter {key!r}{_closest(key, known)}")
        for one in pairs.keys() & given.keys():
            raise ValueError(f"{text!r}: {one} is given twice")
        given |= pairs
    parts = []
    for method in methods:
        types_of = accepted_types(method)
        values = {key: _value(name, key, value, types_of[key]) for key, value in given.items() if key in types_of}
        missing = [one.name for one in fields(method) if one.default is MISSING and one.name not in values]
        if missing:
            example = "256" if missing[0] == "budget" else "FILE"
            raise ValueError(f"{text!r}: {missing[0]} is missing, e.g. {name}:{missing[0]}={example}")
        parts.append(method(**values))
    if len(parts) == 1:
        return parts[0]
    if len(parts) > 2 or not all(isinstance(part, Eviction) for part in parts):
        raise ValueError(
            f"{text!r}: ALLOCATOR*SCORER, such as cake*snapkv, combines two methods, and none that organises storage"
        )
    allocator, scorer = parts
    try:
        return Combined(scorer.budget, scorer, allocator, query_aware=scorer.query_aware)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from error


def _named(name: str, text: str) -> type:
    if name.lower() not in METHODS:
        where = "" if name == text else f" (in {text!r})"
        raise ValueError(f"unknown eviction method {name!r}{_closest(name.lower(), METHODS)}{where}")
    return METHODS[name.lower()]


def split(text: str) -> list[str]:
    """The texts of methods separated by `+`.

    Raises:
        ValueError: one is empty.
    """
    parts = [part.strip() for part in text.split("+")]
    if not all(parts):
        raise ValueError(f"{text!r}: no method stands before or after a +: name one there, or remove the +")
    return parts


def parse_all(text: str) -> list[Method]:
    """Methods separated by `+`, in the order of the text.

    Raises:
        ValueError: as `parse`, and where nothing stands before or after a `+`.
    """
    return [parse(part) for part in split(text)]


def unparse(method: Method) -> str:
    """The shortest text of which `parse` makes an equal method, for tables and folders' names.

    Defaults are not in it: what is kept for later is kept with `hyper_parameters`.

    Raises:
        ValueError: the method is none of `METHODS`, or combines two that have other values of one parameter.
    """
    parts = [method.allocator, method.scorer] if isinstance(method, Combined) else [method]
    names, values, given = [_name_of(part) for part in parts], {}, {}
    for part in parts:
        for one in fields(part):
            value = getattr(part, one.name)
            values.setdefault(one.name, []).append(value)
            if one.default is MISSING or value != one.default:
                given[one.name] = value
    for name in given:
        if len(set(values[name])) > 1:
            raise ValueError(f"{method!r} has no text: its parts have other values of {name}")
    settings = ",".join(f"{name}={_text(values[name][0])}" for name in values if name in given)
    return f"{'*'.join(names)}:{settings}"


def hyper_parameters(method: Method) -> dict[str, Any]:
    """The class and every hyper-parameter, defaults too, as JSON: a default may change, what is saved may not.

    Raises:
        ValueError: the method is none of this library's.
    """
    if not isinstance(method, Combined):
        _name_of(method)
    values = {one.name: getattr(method, one.name) for one in fields(method)}
    return {"method": type(method).__name__} | {
        name: hyper_parameters(value) if isinstance(value, Eviction) else value for name, value in values.items()
    }


def of_hyper_parameters(saved: dict[str, Any]) -> Method:
    """The method that `hyper_parameters` has described.

    Raises:
        ValueError: no method has that name, or it has other hyper-parameters.
    """
    classes = {one.__name__: one for one in (*METHODS.values(), Combined)}
    if saved["method"] not in classes:
        raise ValueError(f"unknown eviction method {saved['method']!r}{_closest(saved['method'], classes)}")
    method = classes[saved["method"]]
    values = {name: value for name, value in saved.items() if name != "method"}
    known = {one.name for one in fields(method)}
    for name in sorted(known ^ values.keys()):
        whose = "is not saved" if name in known else "is saved, and this library does not know it"
        raise ValueError(f"{saved['method']}: the hyper-parameter {name} {whose}")
    return method(**{k: of_hyper_parameters(v) if isinstance(v, dict) else v for k, v in values.items()})


def _name_of(method: Method) -> str:
    names = [name for name, known in METHODS.items() if type(method) is known]
    if not names:
        raise ValueError(f"{method!r} has no text; there are {', '.join(METHODS)}")
    return names[0]


def describe() -> str:
    """A line for each method, its parameters and their defaults: what `--eviction list` prints."""
    lines = []
    for name, method in METHODS.items():
        parameters = ",".join(
            one.name + ("" if one.default is MISSING else f"={str(one.default).lower()}") for one in fields(method)
        )
        summary = method.__doc__.split("\n")[0]
        lines.append(f"{name}:{parameters}\n    {summary}")
        for preset, values in getattr(method, "PRESETS", {}).items():
            lines.append(f"    preset={preset}: " + ",".join(f"{one}={number}" for one, number in values.items()))
    lines.append("ALLOCATOR*SCORER:budget,...\n    One method's allocation, another's scores: cake*snapkv:budget=256.")
    lines.append("budget: tokens, or a share of the prompt between 0 and 1, as in snapkv:budget=0.25.")
    return "\n".join(lines)


def _text(value: object) -> str:
    return value if isinstance(value, str) else str(value).lower()


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
    "Chain",
    "ChainPolicy",
    "ChunkKV",
    "ClusterKV",
    "Combined",
    "CriticalKV",
    "Eviction",
    "ExpectedAttention",
    "KVzip",
    "KeyDiff",
    "Knorm",
    "LMInfinite",
    "LagKV",
    "Method",
    "Observation",
    "PyramidKV",
    "QFilters",
    "Quest",
    "ReadSelector",
    "RecentReader",
    "SageKV",
    "ShadowKV",
    "Sharing",
    "SnapKV",
    "Stage",
    "StreamingLLM",
    "ZigZagKV",
    "describe",
    "hyper_parameters",
    "of_hyper_parameters",
    "parse",
    "parse_all",
    "split",
    "unparse",
]
