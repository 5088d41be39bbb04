"""Imports that every worker needs, loaded once by the server that forks the workers."""

from __future__ import annotations

import os
from contextlib import suppress

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers are the parallelism

with suppress(ImportError):
    import pyarrow.parquet  # noqa: F401
    import tokenizers  # noqa: F401

import crosspack.packing.unit  # noqa: F401
