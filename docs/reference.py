"""The API reference from the docstrings of pod and pod_kernels, as HTML: build/api/index.html.

python docs/reference.py
python docs/reference.py --out DIR

Ends with 1 when a module cannot be imported or shown, or when a docstring names something of the library that is not
there, such as `pod.PodCash`.
"""

import argparse
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pod
import pod_kernels

REFERENCE = re.compile(r"\b(?:pod|pod_kernels)(?:\.[A-Za-z_]\w*)+")
SPARED = (
    "Error parsing type annotation",  # of fields that transformers' configs hand down; their names are not imported
    "has already been added",  # pdoc finds some packages' modules by itself, others not
)


# What can be imported in vLLM's environment only (docs/SERVE.md).
INSIDE_VLLM = {f"pod.serving.{name}" for name in ("attention", "checks", "models", "near_keys")}


def modules() -> list[str]:
    """The names of all modules of the library, of those for vLLM only where it is installed."""
    names, left_out = [], set() if importlib.util.find_spec("vllm") else INSIDE_VLLM
    for package in (pod, pod_kernels):
        found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        names += [package.__name__, *(module.name for module in found if module.name not in left_out)]
    return names


def exists(name: str) -> bool:
    """Whether a dotted name such as `pod.eviction.SnapKV` leads to something."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for place, part in enumerate(parts[count:], count):
            if not hasattr(found, part):  # a dataclass's field without a default is an annotation only
                return part in getattr(found, "__dataclass_fields__", {}) and place == len(parts) - 1
            found = getattr(found, part)
        return True
    return False


def broken(text: str) -> list[str]:
    """The names of the library in backticks or code of a text that lead nowhere."""
    quoted = re.findall(r"`[^`]+`", text)
    names = {name for part in quoted for name in REFERENCE.findall(part)}
    # `pod.fit` and the like may end a file's name.
    return sorted(name for name in names if not name.endswith((".py", ".md")) and not exists(name))


def docstrings(module: ModuleType) -> Iterator[tuple[str, str]]:
    """(name, docstring) of a module and of the classes, functions and methods that it defines."""
    yield module.__name__, module.__doc__ or ""
    for name, member in vars(module).items():
        if getattr(member, "__module__", None) != module.__name__:
            continue
        yield f"{module.__name__}.{name}", inspect.getdoc(member) or ""
        if inspect.isclass(member):
            for inner, function in vars(member).items():
                yield f"{module.__name__}.{name}.{inner}", getattr(function, "__doc__", None) or ""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--out", type=Path, default=root / "build/api", help="directory to write (build/api)")
    out = parser.parse_args(arguments).out

    import pdoc

    names = modules()
    faults = [
        f"{where}: `{name}` leads nowhere"
        for module in names
        for where, text in docstrings(importlib.import_module(module))
        for name in broken(text)
    ]
    for name in pod.__all__:  # what is loaded when first used is not there until then
        setattr(pod, name, getattr(pod, name))
    pdoc.render.configure(docformat="google", show_source=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # A package brings its modules along, also those that cannot be imported here.
        left_out = [] if importlib.util.find_spec("vllm") else [f"!{name}" for name in sorted(INSIDE_VLLM)]
        pdoc.pdoc(*names, *left_out, output_directory=out)
    said = [str(one.message) for one in caught if one.category is UserWarning]
    faults += [message for message in said if not any(spared in message for spared in SPARED)]
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    print(f"written: {out}/index.html, {len(names)} modules")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
