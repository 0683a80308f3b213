"""`python -m pod.prepare`, whose help says what it does."""

import os
import runpy
import signal

if __name__ == "__main__":
    # Ctrl-C ends the command as any kill may, also while modules are read, without a traceback of imports.
    def _interrupt(*_: object, process: int = os.getpid()) -> None:
        if os.getpid() == process:
            os.write(2, b"\ninterrupted\n")
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    runpy.run_module("pod.prepare", run_name="__main__", alter_sys=True)
