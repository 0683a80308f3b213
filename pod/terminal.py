"""What the commands have in common on a terminal: which warnings are left out, how they end."""

import logging
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

INTERRUPTED = 128 + signal.SIGINT  # the exit status that shells give to a command that Ctrl-C ended

# What the libraries below say of themselves, of what is meant, or for their own sake: nobody who runs a command can
# mend it, or need.
NOISE = (
    r"'set_vital' is deprecated, please do not call",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated, use ",
    r"`weights_only` was not set, defaulting to `False`\.",
    r"\W*Tip: For seamless cloud logging and experiment tracking, try installing \[litlogger\]",
    r"`Trainer\(limit_val_batches=1\)` was configured so 1 batch will be used\.",
    r"It is recommended to use `self\.log\('(val_|gate/)",  # these were computed from what all processes have
    r"Checkpoint directory .+ exists and is not empty\.",
    r"Found \d+ module\(s\) in eval mode at the start of training\.",
    # DeepSpeed is imported with the first model that transformers saves, where it is installed.
    r"Setting accelerator to CPU\. If you have GPU or other accelerator, we were unable to detect it\.",
)
LOGGERS = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.pytorch.trainer.connectors.checkpoint_connector",
    "DeepSpeed",
)


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


def _is_no_noise(record: logging.LogRecord) -> bool:
    return not any(re.match(noise, record.getMessage()) for noise in NOISE)


@contextmanager
def quiet() -> Iterator[None]:
    """Without NOISE in the block, neither as warnings nor as lines of a log."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    with warnings.catch_warnings():
        for noise in NOISE:
            warnings.filterwarnings("ignore", message=noise)
        for logger in loggers:
            logger.addFilter(_is_no_noise)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(_is_no_noise)


def interrupt_ends_at_once() -> None:
    """Let Ctrl-C end this process as any kill may, with one line and status 130, and its workers with it.

    For commands that lose nothing when killed: an exception is a traceback while modules are read, and is dropped by
    Python where it runs functions after a fork.
    """

    def interrupt(*_: object, process: int = os.getpid()) -> None:
        if os.getpid() == process:
            os.write(2, b"\ninterrupted\n")
        os._exit(INTERRUPTED)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def exit_status(main: Callable[..., int | None]) -> Callable[..., int]:
    """`main` of a command, with an exit status: its own, 0 where it has none, or 2 after `error: ...` on stderr.

    It runs `quiet`. One whose training a signal stopped goes on when it is called again: its last line says so. Ctrl-C
    ends it with one line and status 130, in the place of a traceback.
    """

    @wraps(main)
    def run(*arguments: Any) -> int:
        try:
            with quiet():
                return main(*arguments) or 0
        except (ValueError, OSError, ImportError) as error:
            # Other libraries' messages have several lines.
            print("error:", *map(str.strip, str(error).splitlines()), file=sys.stderr)
            return 2
        except Stopped as stopped:
            print(f"{stopped}; go on with: python {shlex.join(sys.orig_argv[1:])}", flush=True)
            return stopped.code
        except KeyboardInterrupt:
            pass
        except SystemExit as exit:
            # Lightning catches the interrupt and exits with 1.
            if not isinstance(exit.__context__, KeyboardInterrupt):
                raise
        print("interrupted", file=sys.stderr)
        return INTERRUPTED

    return run
