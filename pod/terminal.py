"""What the commands have in common on a terminal: how they end when they are interrupted."""

import signal
import sys
from collections.abc import Callable
from functools import wraps

INTERRUPTED = 128 + signal.SIGINT  # the exit status that shells give to a command that Ctrl-C ended


class Stopped(SystemExit):
    """Training was told to end by a signal, and has written a checkpoint.

    Args:
        number: of the signal; the exit status is 128 more.
        step: optimiser steps done.
    """

    def __init__(self, number: int, step: int) -> None:
        super().__init__(128 + number)
        self.step = step

    def __str__(self) -> str:
        return f"stopped at step {self.step}"


def interruptible(main: Callable[..., int]) -> Callable[..., int]:
    """A command's `main` that Ctrl-C ends with one line and status 130, in the place of a traceback."""

    @wraps(main)
    def run(*arguments: list[str] | None) -> int:
        try:
            return main(*arguments)
        except KeyboardInterrupt:
            pass
        except SystemExit as exit:
            # Lightning catches the interrupt and exits with 1.
            if not isinstance(exit.__context__, KeyboardInterrupt):
                raise
        print("interrupted", file=sys.stderr)
        return INTERRUPTED

    return run
