"""Quick compilation on a CPU, for runs that compile many programs and run each a few times: tests and the gate."""

from __future__ import annotations

import os
from pathlib import Path

# XLA's passes and LLVM's take most of the time, and the old emitters of fusions compile twice as fast as the new ones.
_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)


def compile_quickly(*flags: str) -> None:
    """Let JAX compile four times as fast as by default, into slower programs, in this process and those it starts.

    It must be called before JAX runs anything. Where there is a GPU it does nothing: kernels are judged there as they
    are compiled for users. Nor does it change flags that ``XLA_FLAGS`` has already.

    Args:
        flags: further flags of XLA, under the same conditions.
    """
    if Path("/dev/nvidiactl").exists():
        return
    given = os.environ.get("XLA_FLAGS", "")
    added = [flag for flag in (*flags, *_FLAGS) if flag.partition("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()
