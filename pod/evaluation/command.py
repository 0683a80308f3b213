"""What the command lines of the evaluations have in common."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pod import eviction
from pod.files import check_writable


def parser_of(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of an evaluation, be it called as `python eval/NAME.py` or `python -m pod.eval NAME`.

    Args:
        name: of the evaluation.
        doc: its module's docstring, which `--help` shows.
    """
    called = f"eval/{name}.py" if Path(sys.argv[0]).stem == name else f"-m pod.eval {name}"
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"python {called}", description=doc, formatter_class=form)


class _Models(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: list, option_string: str | None = None):
        if len({Path(ckpt).resolve().name for ckpt in values}) < len(values):
            raise ValueError(f"--ckpt {' '.join(values)}: two models of one name; run them into two --out")
        setattr(namespace, self.dest, values)


def add_ckpts(parser: argparse.ArgumentParser, batch_size: int | None = None, required: bool = True) -> None:
    """Give a parser `--ckpt` of one or more models, and `--batch-size` with its default, where it has one.

    Rows of tables and folders of results are told apart by the models' names, so two of one are refused (ValueError).
    """
    what = "exports, adapters, or any Hugging Face causal LMs"
    parser.add_argument("--ckpt", action=_Models, nargs="+", required=required, help=what)
    if batch_size is not None:
        what = f"prompts or texts at once ({batch_size})"
        parser.add_argument("--batch-size", type=int, default=batch_size, help=what)


def add_out(parser: argparse.ArgumentParser, name: str) -> None:
    """Give a parser `--out`, the folder of what an evaluation writes: runs/eval/NAME when not told."""
    parser.add_argument("--out", type=Path, default=Path("runs/eval") / name, help="folder of what is written")


def parse(parser: argparse.ArgumentParser, name: str, arguments: list[str] | None) -> argparse.Namespace:
    """The options, `--out` among them.

    Raises:
        OSError: nothing can be written there.
    """
    add_out(parser, name)
    options = parser.parse_args(arguments)
    check_writable(options.out)
    return options


def numbers(text: str, kind: type[int] | type[float] = int) -> list[int] | list[float]:
    """`256,512` -> [256, 512], each number once.

    Raises:
        argparse.ArgumentTypeError: something else.
    """
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        wanted, such = ("whole numbers", "256,512") if kind is int else ("numbers", "0.5,1")
        raise argparse.ArgumentTypeError(f"{text!r} is not of {wanted}, comma-separated, such as {such}") from None


class _Numbers(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: list, option_string: str | None = None):
        setattr(namespace, self.dest, list(dict.fromkeys(number for part in values for number in part)))


def add_numbers(
    parser: argparse.ArgumentParser,
    option: str,
    default: list[int] | list[float] | None,
    help: str,
    kind: type[int] | type[float] = int,
) -> None:
    """Give a parser an option of one or more numbers, written `256,512` or `256 512`: a list of them, each once."""
    parse = partial(numbers, kind=kind)
    parser.add_argument(option, action=_Numbers, nargs="+", type=parse, metavar="N", default=default, help=help)


def check_least(options: Any, **bounds: int) -> None:
    """See that options are at least so much; of several numbers, the smallest counts, and None is any.

    Raises:
        ValueError: one is below its bound; names it, the bound and what it is.
    """
    for name, least in bounds.items():
        value = getattr(options, name)
        given = value if isinstance(value, list) else [value]
        if value is not None and min(given) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {min(given)}")


def add_eviction(
    parser: argparse.ArgumentParser,
    option: str = "--eviction",
    what: str = "also with a cache that keeps some tokens only, such as snapkv:budget=256,window=16",
    parse: Callable[[str], list] = eviction.parse_all,
    default: list | None = None,
    several: bool = True,
) -> None:
    """Give a parser `--eviction`, or what it is called there: a list of methods, the default when it is left out.

    `list` prints the methods and ends, whatever other options are missing; other texts are parsed. The help says how
    `several` are written.
    """

    def methods(text: str) -> list:
        if text == "list":
            print(eviction.describe())
            parser.exit()
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    plus = "several methods are separated by +; " if several else ""
    parser.add_argument(option, type=methods, default=default, metavar="METHOD", help=f"{what}; {plus}`list` shows all")


def add_cache(parser: argparse.ArgumentParser, what: str, several: bool = True) -> None:
    """Give a parser the options of one cache: `--tau`, `--quantization-bits`, and `--eviction`, `what` says of what."""
    parser.add_argument(
        "--tau", type=float, help="gate from which layers that are no anchors leave distant tokens out, 0 to 1"
    )
    parser.add_argument(
        "--quantization-bits", type=int, choices=(8, 4), help="of values and distant keys in the cache (as they come)"
    )
    add_eviction(parser, what=what, several=several)
