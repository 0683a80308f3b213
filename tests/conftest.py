"""What all tests share: no network, and one thread, as tensors this small are slower on several."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub

import pytest
import torch


def pytest_sessionstart(session: pytest.Session) -> None:
    torch.set_num_threads(1)
