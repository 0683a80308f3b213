"""The demo's corpus: the running Python's own standard library, with key lines planted in it and asked for again.

Every machine with Python carries about 30 MB of real text with long-range structure. A sample is a stretch of one
module into which pairs of lines are planted at line ends: one states a key (`#key ab=48213`), the other, further on,
asks for it (`#get ab=48213`). Predicting the asked digits takes a look back over the whole distance, which is what a
shared distant score has to preserve.

A sample depends on its index alone, never on the worker that makes it.

    python data/demo_corpus.py --out prepared/demo --length 1024 --samples 20000 --validation-samples 200 --seed 0

writes a prepared directory (see `pod/data/prepared.py`): bytes as tokens, training samples from the training modules
and validation samples from the held-out ones.
"""

import argparse
import hashlib
import random
import string
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from pod.terminal import exit_status

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


def held_out_text() -> str:
    """All modules kept for validation as one text, which the demo's models never saw."""
    return b"\n".join(standard_library()[1]).decode()


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


def planted_sample(modules: list[bytes], length: int, seed: int, keys: int) -> Sample:
    """A stretch of text with `keys` keys stated and asked for again.

    Args:
        modules: the texts to draw from.
        length: bytes of the sample.
        seed: the sample's index; the same seed gives the same sample.
        keys: how many keys to plant; fewer when they do not fit.
    """
    generator = random.Random(f"plant-{seed}")
    names = generator.sample([a + b for a in string.ascii_lowercase for b in string.ascii_lowercase], keys)
    lines: list[tuple[float, int, bool, bytes]] = []
    used = 0
    for index, name in enumerate(names):
        phrase = generator.choices(PHRASES, weights=(3, 1))[0]
        value = f"{generator.randrange(100_000):05d}"
        stated, asked = (form.format(name=name, value=value).encode() for form in phrase)
        first, second = sorted(generator.random() for _ in range(2))
        lines += [(first, index, False, stated), (second, index, True, asked)]
        used += len(stated) + len(asked)
    if used > length * 4 // 5:
        return planted_sample(modules, length, seed, keys - 1)
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
        pieces.append(body[previous:target])
        position += target - previous
        if target == len(body) and target and body[-1:] != b"\n":
            line = b"\n" + line[:-1]
        pieces.append(line)
        digits_end = position + len(line.rstrip(b"\n"))
        position += len(line)
        previous = target
        if is_asked:
            answers.append((digits_end - 5, key_ends[index]))
        else:
            key_ends[index] = digits_end
    pieces.append(body[previous:])
    text = b"".join(pieces)
    assert len(text) == length, (len(text), length)
    return Sample(text, tuple(answers))


def corpus_sample(
    modules: list[bytes],
    length: int,
    seed: int,
    index: int,
    keys_min: int | None = None,
    keys_max: int | None = None,
    validation: bool = False,
) -> Sample:
    """Sample `index` of the prepared corpus; what `write_corpus` writes, so that its answers can be found again.

    Args:
        modules: the split's modules, from `standard_library`.
        length: bytes of the sample (L).
        seed, index: the corpus's seed and the sample's number in its split.
        keys_min, keys_max: bounds of the number of keys, max(2, L // 80) and max(4, L // 40) by default; at most 676
            keys, one per name.
        validation: which split; the two plant different keys under the same index.
    """
    names = len(string.ascii_lowercase) ** 2
    least = min(names, max(2, length // 80) if keys_min is None else keys_min)
    most = min(names, max(4, length // 40) if keys_max is None else keys_max)
    keys = random.Random(seed * 1000 + index).randint(least, most)
    return planted_sample(modules, length, seed * 2**32 + validation * 2**31 + index, keys)


def write_corpus(
    out: str | Path,
    length: int,
    samples: int,
    validation_samples: int,
    seed: int = 0,
    keys_min: int | None = None,
    keys_max: int | None = None,
    force: bool = False,
) -> None:
    """Write a prepared directory of planted samples, each a single document of `length` bytes (ByT5's ids: byte + 3).

    Raises:
        FileExistsError: `out` exists (without `force`).
        ValueError: a number out of range.
    """
    import numpy as np
    from tqdm import tqdm

    from pod.data.sample_writer import SampleWriter

    if length < 128:
        raise ValueError(f"--length {length}: key lines need at least 128 bytes")
    if samples < 1 or validation_samples < 0 or seed < 0:
        raise ValueError("--samples must be at least 1, --validation-samples and --seed not negative")
    least = max(2, length // 80) if keys_min is None else keys_min
    most = max(4, length // 40) if keys_max is None else keys_max
    if not 0 <= least <= most:
        raise ValueError(f"--keys-min {least} and --keys-max {most}: the first may not exceed the second")
    writer = SampleWriter(out, sequence_length=length, vocab_size=259, tokenizer="bytes", force=force)
    train, held_out = standard_library()
    with writer:
        for split, modules, count in (("train", train, samples), ("validation", held_out, validation_samples)):
            for index in tqdm(range(count), desc=f"Writing {split}", unit=" samples"):
                sample = corpus_sample(modules, length, seed, index, keys_min, keys_max, split == "validation")
                answers = np.zeros(length, dtype=bool)
                for start, _ in sample.answers:
                    answers[start : start + 5] = True
                writer.add(split, np.frombuffer(sample.text, np.uint8).astype(np.int64) + 3, answers=answers)
        writer.held_out = [hashlib.sha256(module).hexdigest() for module in held_out]


@exit_status
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, metavar="DIR", help="the directory to write")
    parser.add_argument("--length", type=int, default=1024, metavar="L", help="bytes of a sample (1024)")
    parser.add_argument("--samples", type=int, required=True, metavar="N", help="training samples")
    parser.add_argument("--validation-samples", type=int, required=True, metavar="M", help="validation samples")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other samples (0)")
    parser.add_argument("--keys-min", type=int, help="least number of keys in a sample (max(2, L // 80))")
    parser.add_argument("--keys-max", type=int, help="largest number of keys in a sample (max(4, L // 40))")
    parser.add_argument("--force", action="store_true", help="replace a prepared directory")
    options = vars(parser.parse_args(arguments))
    write_corpus(**options)
    print(f"written to {options['out']}: {options['samples']} + {options['validation_samples']} samples")


if __name__ == "__main__":
    sys.exit(main())
