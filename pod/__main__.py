"""One name for the commands: `pod fit ...` is `python -m pod.fit ...`, and so on.

pod --help                      # lists them
pod fit recipe=llama3-32k plan=true
pod generate --ckpt exports/tiny --prompt "def main():"
"""

import ast
import difflib
import runpy
import sys
from pathlib import Path

from pod import __version__


def commands() -> dict[str, str]:
    """The modules beside this one that have a `main`, and what each says it does; none of them is imported."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def main() -> int | None:
    name, *arguments = sys.argv[1:] or ["--help"]
    known = commands()
    if name == "--version":
        print(__version__)
    elif name in ("--help", "-h"):
        width = max(map(len, known))
        lines = [f"  {command:<{width}}  {says}" for command, says in known.items()]
        print("usage: pod COMMAND ...", "", *lines, "", "What one takes: pod COMMAND --help", sep="\n")
    elif name in known:
        sys.argv[1:] = arguments
        runpy.run_module(f"pod.{name}", run_name="__main__", alter_sys=True)  # ends with its exit status
    else:
        closest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {closest[0]}? " if closest else ""
        print(f"error: pod {name}: no such command; {hint}there are {', '.join(known)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
