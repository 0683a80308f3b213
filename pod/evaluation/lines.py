"""Files of one JSON object a line, as benchmarks publish them; what is wrong with one is named by file, line, field.

And an unknown name is refused with the one that may have been meant.
"""

import io
import json
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

Fields = Mapping[str, tuple[type, ...]]  # name -> types that its value may have; a list is one of texts
TYPE_NAMES = {str: "a text", list: "a list of texts", int: "a whole number", type(None): "null"}


def read_lines(path: Path, fields: Fields, option: str = "--data") -> list[tuple[str, dict[str, Any]]]:
    """(file:line, object) of each line of a file.

    Raises:
        ValueError: the file is not there or has no line; as `parse_lines`.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{option}: {path} cannot be read ({error.strerror})") from error
    found = list(parse_lines(str(path), raw, fields))
    if not found:
        raise ValueError(f"{path} has no samples")
    return found


def parse_lines(name: str, raw: bytes, fields: Fields) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, object) of each line that is not blank.

    Args:
        name: of the file, for errors.
        raw: its content, UTF-8.
        fields: what every line must have.

    Raises:
        ValueError: no UTF-8, no JSON, no object, a field that is missing or of another type.
    """
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{name}:{line}: wrong encoding: not UTF-8 ({error.reason})") from error
    # Not splitlines: a context may hold other characters that it takes for line ends.
    for number, line in enumerate(io.StringIO(text, newline="\n"), start=1):
        if not line.strip():
            continue
        place = f"{name}:{number}"
        try:
            found = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{place}: broken JSON: {error}") from error
        check_fields(place, found, fields)
        yield place, found


def check_fields(place: str, found: Any, fields: Fields) -> None:
    """Refuse what is no JSON object with these fields.

    Raises:
        ValueError: names the place and the field.
    """
    if not isinstance(found, dict):
        raise ValueError(f"{place}: expected a JSON object with the fields {', '.join(fields)}")
    for name, types in fields.items():
        wanted = " or ".join(TYPE_NAMES[kind] for kind in types)
        if name not in found:
            raise ValueError(f"{place}: field {name!r} ({wanted}) is missing")
        value = found[name]
        right = isinstance(value, types) and not isinstance(value, bool)
        if not right or (isinstance(value, list) and not all(isinstance(item, str) for item in value)):
            raise ValueError(f"{place}: field {name!r} must be {wanted}, got {str(value)[:60]!r}")


def check_name(said: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that is not among the known ones.

    Raises:
        ValueError: what is `said` of it, and the closest of them; all where none is close.
    """
    if name not in known:
        close = get_close_matches(name, known, n=1) or known
        raise ValueError(f"{said}; did you mean {', '.join(close)}?")
