"""Selective scans over packed rows (Mamba, RG-LRU): their operators and Triton kernels."""
