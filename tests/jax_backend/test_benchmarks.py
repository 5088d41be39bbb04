"""The judge of the GPU benchmark and its store of compiled contenders: a wrong figure must not get past them."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from benchmarks import jax_attention
from benchmarks.jax_attention import GATE, Documents, gate, make_row
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
