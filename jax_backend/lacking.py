"""Finds what an implementation needs and this JAX lacks: JAX promises no stability for what kernels use."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module

import jax


@cache
def missing(module: str) -> str | None:
    """Explains why a module of this package cannot be imported here, or returns None."""
    try:
        import_module(module)
    except ImportError as error:
        return f"JAX {jax.__version__} lacks what it is written in ({error})"
    return None


@cache
def lacking(implementation: str, module: str) -> str | None:
    """Explains why an implementation cannot run without a module, or returns None.

    It warns once, because what runs in place of a kernel may be much slower.
    """
    reason = missing(module)
    if reason is not None:
        warnings.warn(f"segment_attention: {implementation} cannot run: {reason}", stacklevel=2)
    return reason
