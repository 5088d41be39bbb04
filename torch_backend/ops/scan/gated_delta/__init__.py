"""The gated delta rule over packed rows: the entry, its operators and their Triton kernels."""
