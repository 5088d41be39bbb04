"""Fixtures of the torch backend's tests."""

from tests.torch_backend.kernels import interpreted, where  # noqa: F401
