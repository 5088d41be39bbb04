"""The judge of the GPU benchmark and its store of compiled contenders: a wrong figure must not get past them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import jax_attention, jax_profile
from benchmarks.jax_rows import GATE, Documents, gate, make_row
from jax_backend import find_segments, segment_attention


@pytest.mark.slow
def test_the_gate_sees_a_wrong_number_and_one_that_is_none() -> None:
    row = make_row(Documents([20, 12], 2, 1, 16))
    out, pullback = jax.vjp(lambda *qkv: segment_attention(*qkv, row.ids), row.q, row.k, row.v)
    found = out, *pullback(row.dout)
    assert gate(row, found) <= GATE
    for part in range(4):
        for wrong in (np.nan, 30.0):
            spoilt = [np.array(x, np.float32) for x in found]
            spoilt[part][0, 25, 0] = wrong
            assert not gate(row, tuple(spoilt)) <= GATE, (part, wrong)


@pytest.mark.slow
def test_rows_of_one_shape_share_a_program_only_under_the_same_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    def capped(row):
        cap = len(row.lengths)
        call = lambda q, k, v, segments: segment_attention(q, k, v, segments, max_segments=cap)  # noqa: E731
        return jax_attention.Call(call, (find_segments(row.ids),), cap)

    monkeypatch.setattr(jax_attention, "CONTENDERS", {"capped": capped})
    compilers = jax_attention.Compilers()
    rows = [make_row(Documents(lengths, 2, 1, 16)) for lengths in ([32], [20, 12], [16, 16])]
    one, two, again = (compilers.start("capped", row)(60.0) for row in rows)
    assert two.both is again.both and two.both is not one.both
    for row, compiled in zip(rows, (one, two, again), strict=True):
        assert gate(row, compiled.both(*row.operands, *compiled.extras)) <= GATE


def test_the_profile_counts_what_ran_on_the_streams_of_a_device_by_kind_and_the_gaps_between(tmp_path: Path) -> None:
    def ran(thread: int, begin: int, duration: int, kernel: str, operation: str) -> dict[str, Any]:
        event = {"ph": "X", "pid": 1, "tid": thread, "ts": begin, "dur": duration, "name": kernel}
        return event | {"args": {"hlo_op": operation} if operation else {}}

    events = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "pid": 1, "tid": 7, "name": "thread_name", "args": {"name": "Stream #13(Compute)"}},
        {"ph": "M", "pid": 1, "tid": 8, "name": "thread_name", "args": {"name": "XLA Ops"}},
        ran(8, 0, 100, "a sum", "of the streams"),
        ran(7, 0, 10, "nvjet_128x256", "custom-call.1"),
        ran(7, 10, 1, "Memset", "custom-call.1"),
        ran(7, 11, 9, "nvjet_128x256", "custom-call.1"),
        ran(7, 25, 5, "segment_attention_dkv", "pallas_call.3"),
        ran(7, 30, 6, "nvjet_64x64", "custom-call.9"),
        ran(7, 36, 2, "MemcpyD2D", ""),
        ran(7, 38, 1, "loop_add", "loop_add_fusion"),
        ran(7, 39, 3, "loop_multiply", "loop_multiply_fusion"),
    ]
    (tmp_path / "a.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    program = """%fused (p: f32[2]) -> f32[2] {
  ROOT %add.1 = f32[2]{0} add(), metadata={op_name="jit(step)/optimizer/add"}
}

ENTRY %main (p: f32[2]) -> f32[2] {
  %custom-call.1 = f32[2]{0} custom-call(), metadata={op_name="jit(step)/transpose(jvp())/transpose"}
  %custom-call.9 = f32[3]{0} custom-call(), metadata={op_name="jit(step)/jvp(cross_entropy)/dot_general"}
  %loop_add_fusion = f32[2]{0} fusion(), calls=%fused
}
"""
    kinds, operations = jax_profile.profile_of(tmp_path, program)
    assert kinds == {
        "products of the layers": 19,
        "loss and output head, products": 6,
        "attention, dkv": 5,
        "nothing": 5,
        "norms, activations, residuals": 3,
        "copies, transposes, fills": 3,
        "optimizer": 1,
    }
    assert operations[0][:3] == (20, 3, "custom-call.1") and operations[0].result == "f32[2]{0}"
