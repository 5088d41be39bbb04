"""The part of the conformance adapter about scans, Mamba's, Mamba-2's and the gated delta rule, and convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_backend.conformance.operations import out_and_gradients
from jax_backend.scan.convolution import causal_conv
from jax_backend.scan.delta_rule import gated_delta_rule, ssd
from jax_backend.scan.selective_scan import selective_scan
from packing_core import protocol
from packing_core.protocol import Array, Backend, Gradients, OperationCall, takes_call


class ScanMethods(Backend):
    """`scan`, `delta_rule`, `ssd` and `convolution`."""

    @takes_call("x", "dt", "A", "B", "C")
    def scan(self, call: OperationCall) -> tuple[Array, Gradients]:
        return _run(_scan, call)

    @takes_call("q", "k", "v", "g", "beta")
    def delta_rule(self, call: OperationCall) -> tuple[Array, Gradients]:
        q, _, v, g, _ = call.operands.values()
        protocol.require_declared(self, options=protocol.delta_rule_options(q, v, g, **call.options))
        return _run(_delta_rule, call)

    @takes_call("x", "dt", "A", "B", "C", "D")
    def ssd(self, call: OperationCall) -> tuple[Array, Gradients]:
        return _run(_ssd, call)

    @takes_call("x", "weight", "bias")
    def convolution(self, call: OperationCall) -> tuple[Array, Gradients]:
        return _run(_convolution, call)


def _run(function: Callable[..., jax.Array], call: OperationCall) -> tuple[Array, Gradients]:
    ids = np.asarray(call.segment_ids, np.int32)
    return out_and_gradients(function, call.operands, call.dout, ids, dtype=call.dtype, **call.options)


def _scan(operands: dict[str, Any], segment_ids: jax.Array) -> jax.Array:
    return selective_scan(**operands, segment_ids=segment_ids)


def _delta_rule(operands: dict[str, Any], segment_ids: jax.Array, **options: Any) -> jax.Array:
    return gated_delta_rule(**operands, segment_ids=segment_ids, **options)


def _ssd(operands: dict[str, Any], segment_ids: jax.Array) -> jax.Array:
    return ssd(**operands, segment_ids=segment_ids)


def _convolution(operands: dict[str, Any], segment_ids: jax.Array) -> jax.Array:
    return causal_conv(operands["x"], operands["weight"], segment_ids, bias=operands["bias"])
