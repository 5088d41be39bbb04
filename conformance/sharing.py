"""Divides a machine among the processes of a run: its cores, a GPU's memory, the programs that JAX compiles."""

from __future__ import annotations

from pathlib import Path


def environment(compiled: Path | None) -> dict[str, str]:
    """Variables that torch and JAX read when they are first imported; a caller's own come before them.

    Args:
        compiled: the folder of compiled programs, which are many and small, so that all are kept; None for no folder.
    """
    shared = {
        "OMP_NUM_THREADS": "1",  # on arrays as small as the suite's, more threads mostly wait for one another
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # else each process takes most of a GPU's memory for itself
    }
    if compiled is None:
        return shared
    return shared | {
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
