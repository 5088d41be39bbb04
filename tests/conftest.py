"""One thread for each process, and Triton's library functions interpretable where there is no GPU.

The suite runs in several workers, and some of its tests start processes; with a thread for every core each, torch's
threads would wait for one another.

Triton settles when a function is defined whether it can be interpreted, by ``TRITON_INTERPRET``; transformers imports
Triton. The variable does not stay set: the code under test sees it in the tests of the kernels alone
(``tests.torch_backend.kernels``).
"""

import os
from importlib.util import find_spec

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch and numpy are first imported, which is below

if find_spec("torch") and find_spec("triton") and "TRITON_INTERPRET" not in os.environ:
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        import triton  # noqa: F401

        del os.environ["TRITON_INTERPRET"]
