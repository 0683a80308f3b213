"""Text to adapt an English model on, of three kinds, and what is held out of each: novel, code, manual.

    python data/corpus.py --novels emma.txt mansfield_park.txt --out data/english
    python -m pod.prepare --source data/english/train.jsonl.gz --out data/smollm2 \\
        --tokenizer checkpoints/smollm2-135m --sequence-length 2048
    python eval/perplexity.py --ckpt checkpoints/smollm2-135m --text data/english/held-out/novel.txt

Novels are the files that are named; held out is Jane Austen's *Persuasion* (public domain), which the repository
brings: data/held-out/persuasion.txt.gz. Code is the running Python's standard library, manuals are what the machine
carries below /usr/share: packages' documentation (the kernel's where linux-doc is installed), manual and info pages,
Perl's and Vim's handbooks; of both, 5 % of the documents are held out, by the hash of their content, so that it is the
same ones wherever they are found. Of each kind as many bytes are taken as --megabytes says, in the order of their
hashes. No document of the training text, and no long paragraph of its novels, is in a held-out text.

Writes OUT/train.jsonl.gz (one document a line: text, source), OUT/held-out/KIND.txt and OUT/corpus.json (documents,
bytes, and the sha256 of every held-out document). --lookups N writes OUT/lookups.jsonl.gz, too, for a training that
learns to answer from far back and keeps its text: N documents of passages with facts strewn in and a question behind
each passage, of which the answers alone are learned, and N parts of the text, learned whole; with --weights 1 1 4, four
times as often from a character of a manual as from one of a novel or of code. OUT/lookups.jinja is the chat template
that writes both as they are:

    python -m pod.prepare --source data/english/lookups.jsonl.gz --chat --chat-template data/english/lookups.jinja \\
        --one-document --out data/lookups --tokenizer checkpoints/smollm2-135m --sequence-length 2048
"""

import argparse
import gzip
import hashlib
import json
import math
import random
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from pod.data.demo_corpus import standard_library
from pod.evaluation.texts import read_text
from pod.terminal import exit_status

NOVEL = Path(__file__).resolve().parent / "held-out/persuasion.txt.gz"
HELD_OUT = 0.05
LEAST = 2000  # bytes of a document
PART = 50_000  # characters of a novel's parts, which end at a paragraph's end, and at most of a manual
PARAGRAPH = 200  # characters from which a paragraph is nobody else's
WHOLE = 8000  # characters of a part of the text that fills a sample of 2,048 tokens
LOOKED_UP = 6600  # characters of a document of look-ups, whose digits are a token each
PASSAGES = (1200, 5000)  # characters of one of its passages
COLOURS, THINGS = (
    "amber azure beige black bronze copper coral crimson golden green grey indigo ivory olive purple scarlet".split(),
    "anchor barrel bridge candle carpet garden harbour kettle ladder lantern mirror orchard piano saddle tower".split(),
)
# How a fact is stated, asked for, and how its answer begins. {name} and {value} are drawn; RULER and the pass keys of
# `pod eval` are worded otherwise.
FACTS = (
    ("The access code for {name} is {value}.", "What is the access code for {name}?", "The access code for {name} is"),
    ("Register: {name}, serial {value}.", "Which serial does the register give for {name}?", "The serial of {name} is"),
    ("By the way, the password of {name} is {value}.", "Name the password of {name}.", "The password of {name} is"),
    ("{value} was noted as the weight of {name}.", "How heavy is {name}?", "The weight of {name} is"),
    ("[{name}] identifier = {value}", "Which identifier belongs to [{name}]?", "[{name}] identifier ="),
    ("Do not forget: {name} has the ticket {value}.", "Which ticket does {name} have?", "{name} has the ticket"),
    ("The archive keeps {name} under {value}.", "Where does the archive keep {name}?", "It keeps {name} under"),
    (
        "For {name} the hidden value is {value}.",
        "What is the hidden value for {name}?",
        "The hidden value for {name} is",
    ),
)
OPENINGS = (
    "",
    "Read the text below with care. A question about it follows.\n\n",
    "Something is hidden in this text. Remember it, you will be asked for it.\n",
    "Here is a document:\n\n",
    "Facts are strewn into the following pages.\n",
)
# What is read, and what is learned: the value, in a conversation the whole answer.
FRAMES = (
    ("{passage}\n{question} {answer}", " {value}.\n"),
    ("{passage}\n\nQuestion: {question}\nAnswer: {answer}", " {value}.\n\n"),
    ("{passage}\n\nAccording to the text above: {question}\n{answer}", " {value}.\n\n"),
    ("<|im_start|>user\n{passage}\n\n{question}<|im_end|>\n<|im_start|>assistant\n", "{answer} {value}.<|im_end|>\n"),
)
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PLACES = (
    ("doc", r"(?!.*(changelog|copyright|license|authors|thanks|news))(.*\.(txt|md|rst)|.*/readme[^/]*)(\.gz)?"),
    ("man", r"man\d/[^/]*\.gz"),
    ("info", r"[^/]*\.info[^/]*\.gz"),
    ("perl", r".*\.pod"),
    ("vim", r".*/doc/[^/]*\.txt"),
)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def held_out_novel() -> str:
    """*Persuasion*, as it lies in the repository."""
    return gzip.decompress(NOVEL.read_bytes()).decode()


def paragraphs(text: str) -> set[str]:
    """The long paragraphs of a text, each with single spaces."""
    found = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return {part for part in found if len(part) >= PARAGRAPH}


def novels(files: list[Path]) -> Iterator[str]:
    """The files' parts.

    Raises:
        ValueError: a file is not there or no UTF-8 text, or tells what the held-out novel tells; names it.
    """
    kept_back = paragraphs(held_out_novel())
    for file in files:
        text = read_text(file, "--novels").replace("\r\n", "\n").replace("\r", "\n")
        if both := paragraphs(text) & kept_back:
            raise ValueError(f"--novels {file} has {len(both)} paragraphs of the held-out {NOVEL.name}: leave it out")
        part = ""
        for piece in re.split(r"(?<=\n)(?=\n)", text):
            part += piece
            if len(part) >= PART:
                yield part
                part = ""
        if part:
            yield part


def manuals(root: Path) -> Iterator[Path]:
    """The files in which a system's packages carry prose; manual pages only where groff is installed to set them."""
    for place, pattern in PLACES:
        if place == "man" and shutil.which("groff") is None:
            print("groff is not installed: manual pages are left out", file=sys.stderr)
            continue
        wanted = re.compile(pattern, re.IGNORECASE)
        for file in sorted((root / place).rglob("*")):
            if not file.is_symlink() and file.is_file() and wanted.fullmatch(str(file.relative_to(root / place))):
                yield file


def read_manual(file: Path) -> str | None:
    """A manual's text, of a long one the beginning; None where it is none, or no UTF-8."""
    try:
        content = file.read_bytes()
        content = gzip.decompress(content) if file.suffix == ".gz" else content
        if re.fullmatch(r"man\d", file.parent.name):
            command = ["groff", "-k", "-t", "-man", "-Tutf8", "-P-cbou", "-rHY=0"]
            content = subprocess.run(command, input=content, capture_output=True).stdout
        text = content.decode()
    except (OSError, EOFError, UnicodeDecodeError):
        return None
    return None if "\0" in text else text[:PART]


def is_held_out(text: str) -> bool:
    return int(digest(text)[:8], 16) < HELD_OUT * 2**32


def up_to(limit: float, texts: Iterable[str]) -> Iterator[str]:
    """The texts until they have `limit` bytes."""
    size = 0
    for text in texts:
        if size >= limit:
            break
        yield text
        size += len(text.encode())


def within(texts: Iterable[str], limit: float) -> list[str]:
    """Different texts of at least `LEAST` bytes, in the order of their hashes, until they have `limit` bytes."""
    by_hash = {digest(text): text for text in texts if len(text.encode()) >= LEAST}
    return list(up_to(limit, (text for _, text in sorted(by_hash.items()))))


def lookups(texts: Sequence[str], weights: Sequence[float], count: int) -> Iterator[list[dict[str, str]]]:
    """`count` parts of the texts, and as many documents in which there is something to look up, as chats.

    In most text the tokens just before tell the next one. The answers are told by one place far above, which is what
    sharing scores can lose. One question behind a passage: among several, the answers before it show how to answer.

    Args:
        texts: what the parts and passages are cut from.
        weights: how often a character of each text is chosen, against those of the others.
        count: of both; the same ones for the same texts.
    """
    draw = random.Random(0)
    values = (
        lambda: str(uuid.UUID(int=draw.getrandbits(128), version=4)),
        lambda: str(draw.randrange(10**3, 10 ** draw.randint(4, 9))),
        lambda: " ".join(draw.choice(COLOURS + THINGS).title() for _ in range(3)),
    )
    names = (
        lambda: f"the {draw.choice(COLOURS)} {draw.choice(THINGS)}",
        lambda: f"{draw.choice(COLOURS)}-{draw.choice(THINGS)}",
        lambda: "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 4))),
    )

    sizes = [*accumulate(len(text) * weight for text, weight in zip(texts, weights, strict=True))]

    def passage(length: int) -> str:
        (text,) = draw.choices(texts, cum_weights=sizes)
        start = draw.randrange(max(1, len(text) - length))
        return text[start : start + length]

    def lookup(length: int) -> tuple[str, str]:
        """A passage with its question, and the answer."""
        lines, (fact, question, answer) = passage(length).splitlines(), draw.choice(FACTS)
        named, value = draw.choice(names), draw.choices(values, (2, 2, 1))[0]
        facts = {named(): value() for _ in range(draw.choice((1, 2, 4, 4)))}
        for name, given in facts.items():
            lines.insert(draw.randrange(len(lines) + 1), fact.format(name=name, value=given))
        name, given = draw.choice([*facts.items()])
        read, learned = draw.choice(FRAMES)
        words = {"question": question.format(name=name), "answer": answer.format(name=name), "value": given}
        words["passage"] = draw.choice(OPENINGS) + "\n".join(lines)
        return read.format(**words), learned.format(**words)

    for _ in range(count):
        yield [{"role": "assistant", "content": passage(WHOLE)}]
        turns, size = [], 0
        while LOOKED_UP - size >= PASSAGES[0]:
            asked, answered = lookup(min(draw.randint(*PASSAGES), LOOKED_UP - size))
            turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
            size += len(asked)
        yield turns


def collect(files: list[Path], root: Path, limit: float) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """(training documents, held-out documents) by kind.

    Args:
        files: novels.
        root: where the system's packages have their texts.
        limit: bytes of each kind; of what is held out of code and manuals, a twentieth.
    """
    code, code_held_out = ([module.decode() for module in modules] for modules in standard_library(HELD_OUT))
    # Which files are looked at is decided by their names' hashes: to set a manual page takes a tenth of a second.
    looked_at = sorted(manuals(root), key=lambda file: digest(str(file.relative_to(root))))
    chosen = list(up_to(limit * (1 + 2 * HELD_OUT), filter(None, map(read_manual, looked_at))))
    train = {
        "novel": within(novels(files), limit),
        "code": within(code, limit),
        "manual": within((text for text in chosen if not is_held_out(text)), limit),
    }
    held_out = {
        "novel": [held_out_novel()],
        "code": within(code_held_out, limit * HELD_OUT),
        "manual": within(filter(is_held_out, chosen), limit * HELD_OUT),
    }
    return train, held_out


def write_lines(path: Path, records: Iterable[dict]) -> None:
    """Write gzipped JSON lines, the same bytes for the same records."""
    with gzip.GzipFile(path, "wb", mtime=0) as lines:
        for record in records:
            lines.write(json.dumps(record).encode() + b"\n")


def write(out: Path, train: dict[str, list[str]], held_out: dict[str, list[str]]) -> dict[str, list[str]]:
    """Write what the command promises; the hashes of the held-out documents by kind.

    Raises:
        ValueError: a document is on both sides.
    """
    hashes = {kind: sorted(map(digest, texts)) for kind, texts in held_out.items()}
    kept_back = {each for some in hashes.values() for each in some}
    if both := [text for texts in train.values() for text in texts if digest(text) in kept_back]:
        raise ValueError(f"a document is held out and trained on: {both[0][:60]!r}...")
    (out / "held-out").mkdir(parents=True, exist_ok=True)
    write_lines(
        out / "train.jsonl.gz", ({"text": text, "source": kind} for kind, texts in train.items() for text in texts)
    )
    for kind, texts in held_out.items():
        (out / f"held-out/{kind}.txt").write_text("\n".join(texts), encoding="utf-8")
    count = {
        kind: {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}
        for kind, texts in train.items()
    }
    (out / "corpus.json").write_text(json.dumps({"train": count, "held_out": hashes}, indent=2) + "\n")
    return hashes


@exit_status
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--novels", type=Path, nargs="*", default=[], metavar="FILE", help="UTF-8 texts to train on")
    parser.add_argument("--root", type=Path, default=Path("/usr/share"), help="where packages' texts are (/usr/share)")
    parser.add_argument("--megabytes", type=float, default=4.0, help="of each kind (4)")
    parser.add_argument("--lookups", type=int, default=0, metavar="N", help="documents with facts to look up (0)")
    more = "how often these draw from novel, code and manual, a character (1 1 1)"
    parser.add_argument("--weights", type=float, nargs=3, default=[1.0] * 3, metavar="W", help=more)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    options = parser.parse_args(arguments)
    if options.lookups < 0:
        raise ValueError(f"--lookups {options.lookups} must not be negative: 0 writes none")
    if min(options.weights) < 0 or not 0 < sum(options.weights) < math.inf:
        raise ValueError(f"--weights {options.weights}: give three numbers of at least 0, not all of them 0")
    train, held_out = collect(options.novels, options.root, options.megabytes * 1e6)
    hashes = write(options.out, train, held_out)
    if options.lookups:
        of_kinds = zip(train.values(), options.weights, strict=True)
        drawn = [(text, weight) for texts, weight in of_kinds for text in texts]
        chats = lookups(*zip(*drawn, strict=True), options.lookups)
        write_lines(options.out / "lookups.jsonl.gz", ({"messages": messages} for messages in chats))
        (options.out / "lookups.jinja").write_text(TEMPLATE + "\n")
    for kind, texts in train.items():
        size = sum(len(text.encode()) for text in texts)
        print(f"{kind}: {len(texts)} documents, {size:,} bytes; held out {len(hashes.get(kind, ()))}")
    more = ", lookups.jsonl.gz, lookups.jinja" if options.lookups else ""
    print(f"written: {options.out}/train.jsonl.gz, held-out/, corpus.json{more}")


if __name__ == "__main__":
    sys.exit(main())
