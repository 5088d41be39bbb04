"""Fixtures of the torch backend's tests."""

from tests.torch_backend.kernels import where  # noqa: F401
