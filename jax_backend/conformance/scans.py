"""The part of the conformance adapter about scans: Mamba's, Mamba-2's and the gated delta rule."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jax_backend.conformance.operations import out_and_gradients
from jax_backend.scan.delta_rule import gated_delta_rule, ssd
from jax_backend.scan.selective_scan import selective_scan
from packing_core import protocol
from packing_core.protocol import Array, Backend, Gradients


class ScanMethods(Backend):
    """`scan`, `delta_rule` and `ssd`."""

    def scan(
        self,
        x: Array,
        dt: Array,
        A: Array,
        B: Array,
        C: Array,
        segment_ids: Array,
        *,
        dtype: str,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        operands = {"x": x, "dt": dt, "A": A, "B": B, "C": C}
        return out_and_gradients(_scan, operands, dout, np.asarray(segment_ids, np.int32), dtype=dtype)

    def delta_rule(
        self,
        q: Array,
        k: Array,
        v: Array,
        g: Array,
        beta: Array,
        segment_ids: Array,
        *,
        dtype: str,
        normalise: bool = False,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        protocol.require_declared(self, options=protocol.delta_rule_options(q, v, g, normalise=normalise))
        operands, ids = {"q": q, "k": k, "v": v, "g": g, "beta": beta}, np.asarray(segment_ids, np.int32)
        return out_and_gradients(_delta_rule, operands, dout, ids, dtype=dtype, normalise=normalise)

    def ssd(
        self,
        x: Array,
        dt: Array,
        A: Array,
        B: Array,
        C: Array,
        D: Array,
        segment_ids: Array,
        *,
        dtype: str,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        operands = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D}
        return out_and_gradients(_ssd, operands, dout, np.asarray(segment_ids, np.int32), dtype=dtype)


def _scan(operands: dict[str, Any], segment_ids: jax.Array) -> jax.Array:
    return selective_scan(**operands, segment_ids=segment_ids)


def _delta_rule(operands: dict[str, Any], segment_ids: jax.Array, **options: Any) -> jax.Array:
    return gated_delta_rule(**operands, segment_ids=segment_ids, **options)


def _ssd(operands: dict[str, Any], segment_ids: jax.Array) -> jax.Array:
    return ssd(**operands, segment_ids=segment_ids)
