"""Eight host devices for the multi-device tests, and quick compilation; set before jax is first imported.

Compilation is most of these tests' time, and many compile the same step: each such program is compiled once a run.

Not where there is a GPU: its kernels are tested as they are compiled for users.
"""

import os
import tempfile
from pathlib import Path

_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
if not Path("/dev/nvidiactl").exists():
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS])
    _PROGRAMS = tempfile.TemporaryDirectory(prefix="crosspack-jax-")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _PROGRAMS.name)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
