"""How a command ends: with 0, or with one line that says what its user can mend and 2, or how to go on."""

import shlex
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from pod.terminal import Stopped, as_command


def exit_status(main: Callable[..., int | None]) -> Callable[..., int]:
    """`main` of a command, with an exit status: its own, 0 where it has none, or 2 after `error: ...` on stderr.

    One whose training a signal stopped goes on when it is called again: its last line says so.
    """

    @as_command
    @wraps(main)
    def run(*arguments: Any) -> int:
        try:
            return main(*arguments) or 0
        except (ValueError, OSError, ImportError) as error:
            # Other libraries' messages have several lines.
            print("error:", *map(str.strip, str(error).splitlines()), file=sys.stderr)
            return 2
        except Stopped as stopped:
            print(f"{stopped}; go on with: python {shlex.join(sys.orig_argv[1:])}", flush=True)
            return stopped.code

    return run
