"""What only some commands need, and the extra of the installation that brings it."""

import importlib.util


def require(extra: str, *packages: str, what: str) -> None:
    """See that packages are there which `pip install pod-attention` alone does not bring.

    Args:
        extra: the one of pyproject.toml that lists them.
        packages: by the names that they are imported by.
        what: needs them, for the message: a command, a key of a recipe, a kind of file.

    Raises:
        ImportError: one is missing; names it and the extra, on one line.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(f"{what} needs {', '.join(missing)}: pip install 'pod-attention[{extra}]'")
