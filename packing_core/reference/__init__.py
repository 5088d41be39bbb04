"""The oracle: float64 forward and vector-Jacobian products, one document at a time, in numpy.

Every fast implementation is judged against these functions, and the same functions with a ``dtype`` (see
`packing_core.reference.arithmetic`) say how much error a working dtype may make. They are written to be read.
"""

from packing_core.reference.attention import AttentionOptions, attention, attention_lse, attention_vjp

__all__ = [
    "AttentionOptions",
    "attention",
    "attention_lse",
    "attention_vjp",
]
