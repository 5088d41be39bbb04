"""Our kernels as a package of the Hugging Face Kernels Hub: ``python -m tools.hub OUT``.

:mod:`.functions` has the signatures that other libraries call, :mod:`.layers` the same for ``kernelize``, and
:mod:`.package` writes them with the kernels below them into a folder that needs torch, Triton and NumPy alone.
"""
