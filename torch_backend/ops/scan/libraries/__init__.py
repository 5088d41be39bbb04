"""Scan kernels of other libraries as operators: fla, FlashQLA, mamba_ssm."""
