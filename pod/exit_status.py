"""How a command ends: with 0, or with one line that says what its user can mend and 2."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any


def exit_status(main: Callable[..., int | None]) -> Callable[..., int]:
    """`main` of a command, with an exit status: its own, 0 where it has none, or 2 after `error: ...` on stderr."""

    @wraps(main)
    def run(*arguments: Any) -> int:
        try:
            return main(*arguments) or 0
        except (ValueError, OSError, ImportError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return run
