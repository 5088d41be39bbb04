"""The oracle: float64 forward and vector-Jacobian products, one document at a time, in numpy.

Every fast implementation is judged against these functions, and the same functions with a ``dtype`` (see
`packing_core.reference.arithmetic`) say how much error a working dtype may make. They are written to be read. A product
(``_vjp``) raises what its forward does.
"""

from packing_core.reference.arithmetic import WorkingDtype
from packing_core.reference.attention import AttentionOptions, attention, attention_lse, attention_vjp
from packing_core.reference.clips import clip_convolutions, clip_convolutions_vjp
from packing_core.reference.convolution import short_convolution, short_convolution_vjp
from packing_core.reference.delta import gated_delta_rule, gated_delta_rule_vjp
from packing_core.reference.experts import ExpertActivation, experts, experts_vjp
from packing_core.reference.loss import cross_entropy, cross_entropy_vjp, token_logprobs, token_logprobs_vjp
from packing_core.reference.rope import rope, rope_vjp
from packing_core.reference.scan import selective_scan, selective_scan_vjp
from packing_core.reference.selection import index_loss, index_loss_vjp, select

__all__ = [
    "AttentionOptions",
    "ExpertActivation",
    "WorkingDtype",
    "attention",
    "attention_lse",
    "attention_vjp",
    "clip_convolutions",
    "clip_convolutions_vjp",
    "cross_entropy",
    "cross_entropy_vjp",
    "experts",
    "experts_vjp",
    "gated_delta_rule",
    "gated_delta_rule_vjp",
    "index_loss",
    "index_loss_vjp",
    "rope",
    "rope_vjp",
    "select",
    "selective_scan",
    "selective_scan_vjp",
    "short_convolution",
    "short_convolution_vjp",
    "token_logprobs",
    "token_logprobs_vjp",
]
