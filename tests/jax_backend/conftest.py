"""Eight host devices for the multi-device tests, and quick compilation; set before jax is first imported.

Not where there is a GPU: its kernels are tested as they are compiled for users.
"""

import os
from pathlib import Path

_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
if not Path("/dev/nvidiactl").exists():
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS])
