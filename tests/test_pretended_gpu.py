"""The library on a GPU that is pretended: what can be known of one without one. `pretended_gpu.py` says how."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which makes the pretended device's guard"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="needs no pretended GPU where there is one"),
]


def run_on_pretended_gpu(chosen: str) -> None:
    """Run those tests of `on_pretended_gpu.py`, in a process that pretends the device before it imports torch."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    environment.pop("TRITON_INTERPRET", None)  # its kernels are compiled there
    command = [sys.executable, "-m", "pytest", "-p", "pretended_gpu", "-p", "no:cacheprovider", "-q", "-k", chosen]
    result = subprocess.run(
        [*command, TESTS / "on_pretended_gpu.py"], cwd=TESTS.parent, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout + result.stderr


@pytest.mark.slow
def test_attention_and_training():
    run_on_pretended_gpu("not generate and not fused and not device_map")


@pytest.mark.slow
def test_generating():
    pytest.importorskip("triton")
    run_on_pretended_gpu("generate or fused")


@pytest.mark.slow
def test_a_model_on_two_devices():
    run_on_pretended_gpu("device_map")
