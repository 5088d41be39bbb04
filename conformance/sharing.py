"""What the processes of a run share on a machine: a GPU's memory, and the programs that JAX compiles."""

from __future__ import annotations

from pathlib import Path


def environment(compiled: Path) -> dict[str, str]:
    """Variables that JAX reads when it is first imported; a caller's own come before them.

    Args:
        compiled: the folder of compiled programs, which are many and small, so that all are kept.
    """
    return {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # else each process takes most of a GPU's memory for itself
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
