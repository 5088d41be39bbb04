"""Fixtures of the torch backend's tests, and which of them the machine can run."""

import pytest
import torch

from tests.torch_backend.kernels import interpreted, where  # noqa: F401


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = 2 if item.get_closest_marker("two_gpus") else int(item.get_closest_marker("gpu") is not None)
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} CUDA devices")
