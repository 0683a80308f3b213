"""What all tests share: no network, and one thread, as tensors this small are slower on several."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: its kernels then run on the CPU


def pytest_sessionstart(session: pytest.Session) -> None:
    torch.set_num_threads(1)
