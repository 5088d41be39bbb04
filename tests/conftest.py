"""Where there is no GPU, Triton's own library functions are loaded interpretable, before anything else imports Triton.

Triton settles when a function is defined whether it can be interpreted, by ``TRITON_INTERPRET``; transformers imports
Triton. The variable does not stay set: the code under test sees it in the tests of the kernels alone
(``tests.torch_backend.kernels``).
"""

import os
from importlib.util import find_spec

if find_spec("torch") and find_spec("triton") and "TRITON_INTERPRET" not in os.environ:
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        import triton  # noqa: F401

        del os.environ["TRITON_INTERPRET"]
