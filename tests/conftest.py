"""What all tests share: no network, one thread, as tensors this small are slower on several, and no need of a GPU."""

import os
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub

import pytest
import torch

# Before anything imports triton: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


# Files of minutes, of which one begun last would leave the other workers idle.
LONG = ("test_pretended_gpu", "test_strategy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONG)


def pytest_sessionstart(session: pytest.Session) -> None:
    torch.set_num_threads(1)


@pytest.fixture
def exact_float32() -> Iterator[None]:
    """A GPU's float32 products are float32's. pytest's own patch would delete what torch has no attribute for."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
