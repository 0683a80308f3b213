"""`python -m pod.prepare`, whose help says what it does; Ctrl-C is heard while that reads its modules, too."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    # By its path: to import it is to import pod, which takes the seconds that are meant.
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "pod/terminal.py"))["interrupt_ends_at_once"]()
    runpy.run_module("pod.prepare", run_name="__main__", alter_sys=True)
