"""Eight host devices for the multi-device tests, and quick compilation (the old emitters of fusions compile twice as
fast as the new ones); set before jax is first imported.

Not where there is a GPU: its kernels are tested as they are compiled for users.
"""

import os
from pathlib import Path

_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)
if not Path("/dev/nvidiactl").exists():
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS])
