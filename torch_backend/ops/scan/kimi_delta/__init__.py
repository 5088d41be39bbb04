"""Kimi delta attention over packed rows: its operators and their Triton kernels."""
