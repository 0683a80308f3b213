"""Evaluate by name, as `python eval/NAME.py ...` does, outside the repository too.

    python -m pod.eval longbench --ckpt exports/llama3-32k --data longbench/ --tasks pod
    python -m pod.eval memory --model llama3-8b --memory 80GB
    python -m pod.eval ruler --help

What there is:
"""

import argparse
import sys

from pod.evaluation.registry import EVALUATIONS, command_of


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    width = max(map(len, EVALUATIONS))
    names = "\n".join(f"  {name:<{width}}  {what}" for name, (_, what) in EVALUATIONS.items())
    parser = argparse.ArgumentParser(
        prog="python -m pod.eval",
        description=__doc__ + names,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=EVALUATIONS, metavar="NAME", help="what to evaluate; NAME --help says how")
    # Only the name is this parser's: options behind it, --help too, are the evaluation's own.
    name = parser.parse_args(arguments[:1]).name
    return command_of(name)(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
