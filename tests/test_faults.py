"""What kills, full disks and damaged files do to the commands: nothing is lost, everything is named."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="sees through Linux' /proc that nothing has threads")
def test_commands_that_are_killed_and_run_again_end_as_if_undisturbed():
    command = [sys.executable, str(ROOT / "tests" / "faults.py"), "--kills", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "20 kills in" in done.stdout and " 0 of them inside" not in done.stdout
