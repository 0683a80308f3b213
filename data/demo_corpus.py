"""The demo's corpus: the running Python's own standard library, with key lines planted in it and asked for again.

Every machine with Python carries about 30 MB of real text with long-range structure. A sample is a stretch of one
module into which pairs of lines are planted at line ends: one states a key (`#key ab=48213`), the other, further on,
asks for it (`#get ab=48213`). Predicting the asked digits takes a look back over the whole distance, which is what a
shared distant score has to preserve.

A sample depends on its index alone, never on the worker that makes it.
"""

import hashlib
import random
import string
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# (stated, asked): the asked line ends with the value, so that its digits follow from the stated line alone.
PHRASES = (
    ("#key {name}={value}\n", "#get {name}={value}\n"),
    ("# the code of {name} is {value}\n", "# recall: the code of {name} is {value}\n"),
)


@dataclass(frozen=True)
class Sample:
    """A text and what was planted in it.

    Attributes:
        text: the sample's bytes, of exactly the wanted length.
        answers: one (answer_start, key_end) pair per asked key, byte offsets: where the five asked digits start, and
            where the digits that state them ended.
    """

    text: bytes
    answers: tuple[tuple[int, int], ...]


def standard_library(held_out: float = 0.05) -> tuple[list[bytes], list[bytes]]:
    """Read the standard library's sources and split them by module.

    Args:
        held_out: share of the modules, chosen by the hash of their content, kept for validation.

    Returns:
        (train, validation), each a list of the modules' bytes, in order of path. Files below 2,000 bytes, files
        that are not ASCII, code-page tables and a second copy of a file are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    train: list[bytes] = []
    validation: list[bytes] = []
    seen: set[bytes] = set()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if {"site-packages", "dist-packages", "encodings", "__pycache__"} & set(parts) or len(parts) > 6:
            continue
        text = path.read_bytes()
        digest = hashlib.sha256(text).digest()
        if len(text) < 2000 or digest in seen or not text.isascii():
            continue
        seen.add(digest)
        is_held_out = int.from_bytes(digest[:4], "big") < held_out * 2**32
        (validation if is_held_out else train).append(text)
    return train, validation


def plain_sample(modules: list[bytes], length: int, seed: int) -> bytes:
    """A stretch of `length` bytes that begins at a line of a module, modules drawn in proportion to their size."""
    generator = random.Random(f"text-{seed}")
    module = generator.choices(modules, weights=[len(module) for module in modules])[0]
    while len(module) <= length:
        module = module + generator.choice(modules)
    start = generator.randrange(len(module) - length)
    line = module.rfind(b"\n", 0, start) + 1
    if line + length <= len(module):
        start = line
    return module[start : start + length]


def planted_sample(
    modules: list[bytes], length: int, seed: int, keys: int, min_distance: int = 0, phrase: int | None = None
) -> Sample:
    """A stretch of text with `keys` keys stated and asked for again.

    Args:
        modules: the texts to draw from.
        length: bytes of the sample.
        seed: the sample's index; the same seed gives the same sample.
        keys: how many keys to plant; fewer when they do not fit.
        min_distance: least number of bytes between the digits that state a key and those that answer.
        phrase: index into `PHRASES` for all keys; each key draws its own when None.
    """
    generator = random.Random(f"plant-{seed}")
    names = generator.sample([a + b for a in string.ascii_lowercase for b in string.ascii_lowercase], keys)
    lines: list[tuple[float, int, bool, bytes]] = []
    used = 0
    for index, name in enumerate(names):
        chosen = phrase if phrase is not None else generator.choices(range(len(PHRASES)), weights=(3, 1))[0]
        value = f"{generator.randrange(100_000):05d}"
        stated, asked = (form.format(name=name, value=value).encode() for form in PHRASES[chosen])
        first, second = sorted(generator.random() for _ in range(2))
        spare = max(0.0, 1 - (min_distance + len(asked)) / length)
        second = max(second * spare + (1 - spare), first * spare + (1 - spare)) if min_distance else second
        first = first * spare if min_distance else first
        lines += [(first, index, False, stated), (second, index, True, asked)]
        used += len(stated) + len(asked)
    if used > length * 4 // 5:
        return planted_sample(modules, length, seed, keys - 1, min_distance, phrase)
    body = plain_sample(modules, length - used, seed)
    breaks = [0] + [i + 1 for i, byte in enumerate(body) if byte == 10]
    if breaks[-1] != len(body):
        breaks.append(len(body))
    pieces: list[bytes] = []
    key_ends: dict[int, int] = {}
    answers: list[tuple[int, int]] = []
    position = previous = 0
    # A line goes to the line break nearest to where its share of the text lies; pairs keep their order.
    for share, index, is_asked, line in sorted(lines):
        target = min(breaks, key=lambda place: abs(place - share * len(body)))
        target = max(target, previous)
        if is_asked and min_distance:
            needed = key_ends[index] + min_distance + 6 - len(line) - position + previous
            later = [place for place in breaks if place >= max(target, needed)]
            target = later[0] if later else len(body)
        pieces.append(body[previous:target])
        position += target - previous
        if target == len(body) and target and body[-1:] != b"\n":
            line = b"\n" + line[:-1]
        pieces.append(line)
        digits_end = position + len(line.rstrip(b"\n"))
        position += len(line)
        previous = target
        if is_asked:
            if digits_end - 5 - key_ends[index] >= min_distance:
                answers.append((digits_end - 5, key_ends[index]))
        else:
            key_ends[index] = digits_end
    pieces.append(body[previous:])
    text = b"".join(pieces)
    assert len(text) == length, (len(text), length)
    return Sample(text, tuple(answers))
