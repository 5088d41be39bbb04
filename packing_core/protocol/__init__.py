"""The protocol between the conformance suite and a packed-training stack: one class, in numpy.

    suite (float64 oracle, one document at a time)  --numpy arrays + a dtype name-->  Backend  --numpy arrays-->  suite

A stack takes part at four levels and implements what it has; every method left alone raises `UnsupportedError`:

    collator      `plan`, `collate`                         documents in, batch out
    operation     `attention`, `rope`, `scan`,              each with its vector-Jacobian product
                  `delta_rule`, `ssd`, `convolution`, `clips`, `index_loss`, `experts`, `loss`, `reduce`
    model         `forward`, `gradients`, `logprobs`,       batch in, numbers per token and gradients out
                  `embed`                                   documents in, a vector of each out
    trainer       `train`, `preference`                     documents in, updated weights or gradients out

Axis names: B rows, S tokens of a row, H query heads, K key/value heads, D query and key width, E value width, V words.

**Dtypes.** Arrays travel as float32, whatever the dtype *name* says (bfloat16 has no numpy dtype). What the suite sends
is already a value of the named dtype, so the adapter's cast loses nothing; it casts, computes in that dtype and returns
float32.

**Layout.** Operations take ``segment_ids [B, S]``: 1.. per row in contiguous runs, 0 for padding, anywhere in the row.

**Registration.** An entry point of the group ``crosspack.backends`` names a function ``backends()`` that returns
``{name: zero-argument factory}``; entry point ``torch`` with the name ``sdpa`` is addressed as ``torch:sdpa``. The
factory of what cannot run here raises `UnsupportedError` or `MissingExtraError` with the reason: NOT RUN.
"""

from packing_core.protocol.backend import Backend, BackendFactory, require_declared
from packing_core.protocol.calls import OperationCall, ScanCall, takes_call
from packing_core.protocol.capabilities import (
    ADAMW_EPSILON,
    ALL_OPTIONS,
    DTYPES,
    LEVELS,
    OPTIONS,
    PROMISES,
    Capabilities,
)
from packing_core.protocol.data import Array, Batch, Decoder, DecoderConfig, Document, Gradients, Place
from packing_core.protocol.layout import attention_options, cu_seqlens, delta_rule_options, position_ids, segments

__all__ = [
    "ADAMW_EPSILON",
    "ALL_OPTIONS",
    "DTYPES",
    "LEVELS",
    "OPTIONS",
    "PROMISES",
    "Array",
    "Backend",
    "BackendFactory",
    "Batch",
    "Capabilities",
    "Decoder",
    "DecoderConfig",
    "Document",
    "Gradients",
    "OperationCall",
    "Place",
    "ScanCall",
    "attention_options",
    "cu_seqlens",
    "delta_rule_options",
    "position_ids",
    "require_declared",
    "segments",
    "takes_call",
]
