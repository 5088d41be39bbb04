"""Loads implementations from tables of places: a name -> ``package.module:ATTRIBUTE``, imported on first use."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch


def load(table: Mapping[str, str], name: str) -> Any:
    """Returns the object at the place that the table has for a name."""
    module, _, attribute = table[name].partition(":")
    _import(module)
    return getattr(sys.modules[module], attribute)


@torch.compiler.assume_constant_result  # torch.compile runs it while tracing, or the first call would break the graph
def _import(module: str) -> None:
    import_module(module)
