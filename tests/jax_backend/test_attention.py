"""segment_attention: every implementation against the float64 oracle, and what the entry point promises and refuses."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_backend import find_segments, segment_attention
from jax_backend.attention import IMPLEMENTATIONS, ORDER, choose, cudnn
from jax_backend.attention.request import Request
from packing_core.errors import CapacityError, LayoutError, PackingError, UnsupportedError
from tests.jax_backend.oracle import Case

TWO_ROWS = ((-5, 9, 17, -3, 1, 30, 14, -17), (5, 40, 12, 39))
ONE_ROW = ((7, 33, -6, 1, 49),)

# name -> (rows, options of Case); sinks and the log-sum-exp are asked of those implementations that have them
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "grouped heads, padding anywhere": (TWO_ROWS, {}),
    "window, a group of three, odd widths": (
        ONE_ROW,
        {"heads": 3, "kv_heads": 1, "width": 24, "value_width": 8, "window": 9},
    ),
    "both directions, softcap, no groups": (ONE_ROW, {"heads": 2, "softcap": 1.5, "causal": False, "scale": 0.7}),
    "window to both sides": (TWO_ROWS, {"heads": 2, "causal": False, "window": 4}),
    "bfloat16": (TWO_ROWS, {"dtype": "bfloat16"}),
}
HAVE_LSE = ("xla", "chunked", "pallas")
RUN_HERE = (*HAVE_LSE, "tpu")


def cases_of(implementation: str) -> list[str]:
    """The cases to try; splash attention is JAX's own, so for that only what passes through our hands."""
    return list(CASES)[0:4:2] if implementation == "tpu" else list(CASES)


def run(case: Case, implementation: str, *, lse: bool) -> dict[str, Any]:
    """Output, log-sum-exp and gradients of one jitted call, by name."""
    both = compiled(implementation, lse, tuple(case.options.items()))
    return both(case.jax_operands(), jnp.asarray(case.ids), jnp.asarray(case.dout, case.dtype), jnp.asarray(case.dlse))


@cache
def compiled(implementation: str, lse: bool, options: tuple[tuple[str, Any], ...]) -> Any:
    @jax.jit
    def both(operands: dict[str, Any], ids: jax.Array, dout: jax.Array, dlse: jax.Array) -> dict[str, Any]:
        def attend(operands: dict[str, Any]) -> Any:
            chosen = {"implementation": implementation, "return_lse": lse, **dict(options)}
            return segment_attention(**operands, segment_ids=ids, **chosen)

        out, pullback = jax.vjp(attend, operands)
        (gradients,) = pullback((dout, dlse) if lse else dout)
        return gradients | ({"out": out[0], "lse": out[1]} if lse else {"out": out})

    return both


@pytest.mark.parametrize(
    ("implementation", "name"),
    [(implementation, name) for implementation in RUN_HERE for name in cases_of(implementation)],
)
def test_output_and_gradients_are_within_the_error_budget(implementation: str, name: str) -> None:
    rows, options = CASES[name]
    lse = implementation in HAVE_LSE
    case = Case(rows, **options, sinks=lse and case_has_sinks(name))
    found = run(case, implementation, lse=lse)
    over = case.worst(found, lse=lse)
    assert all(worst <= 1 for worst in over.values()), over
    padding = case.ids == 0
    for part in ("out", "q", "k", "v"):
        assert (np.asarray(found[part], np.float32)[padding] == 0).all(), f"{part} at padding must be exactly 0"


def case_has_sinks(name: str) -> bool:
    return name.startswith("window")


def test_every_implementation_has_a_test_here_or_needs_another_device() -> None:
    assert set(IMPLEMENTATIONS) == {*RUN_HERE, "cudnn"}


# -- what None picks ---------------------------------------------------------------------------------------------------


def request(**changes: Any) -> Request:
    fields: dict[str, Any] = {
        "rows": 1,
        "queries": 96,
        "keys": 96,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "value_dim": 64,
        "dtype": jnp.dtype("bfloat16"),
        "causal": True,
        "scale": 0.125,
        "window": None,
        "softcap": None,
        "needs_lse": False,
        "own_keys": True,
        "max_segments": None,
        "platform": "cpu",
    }
    return Request(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "chunked"),
        ({"platform": "gpu"}, "pallas"),
        ({"platform": "gpu", "head_dim": 512}, "chunked"),
        ({"platform": "tpu"}, "tpu"),
        ({"platform": "tpu", "needs_lse": True}, "chunked"),
    ],
)
def test_none_takes_the_first_of_the_order_that_can_serve(changes: dict[str, Any], expected: str) -> None:
    assert choose(request(**changes)).__name__ == IMPLEMENTATIONS[expected]


def test_every_order_ends_with_one_that_serves_anything() -> None:
    assert {names[-1] for names in ORDER.values()} == {"xla"}


@pytest.mark.parametrize(
    ("implementation", "changes", "reason"),
    [
        ("pallas", {"platform": "tpu"}, "pallas cannot serve: its kernels are lowered for NVIDIA GPUs .* not for tpu"),
        ("pallas", {"head_dim": 512}, "pallas cannot serve: head width 512 is above 256"),
        ("cudnn", {}, "cudnn cannot serve: cuDNN needs an NVIDIA GPU, and this runs on cpu"),
        ("cudnn", {"platform": "gpu"}, "cudnn cannot serve: it allocates by the number of segments: pass max_segments"),
        ("cudnn", {"platform": "gpu", "max_segments": 8, "window": 4}, "the packed call has no window"),
        ("cudnn", {"platform": "gpu", "max_segments": 8, "softcap": 1.0}, "the packed call has no softcap"),
        ("cudnn", {"platform": "gpu", "max_segments": 8, "needs_lse": True}, "its log-sum-exp has no gradient"),
        ("cudnn", {"platform": "gpu", "max_segments": 8, "value_dim": 8}, "keys and values must have the same width"),
        ("cudnn", {"platform": "gpu", "max_segments": 8, "own_keys": False}, "queries and keys of the same tokens"),
        ("cudnn", {"platform": "gpu", "dtype": jnp.dtype("float32")}, "bfloat16 or float16, and q is float32"),
        ("cudnn", {"platform": "gpu", "max_segments": 8}, "cuDNN's packed call does not run here: "),
        (
            "cudnn",
            {"platform": "gpu", "rows": 4, "max_segments": 2**15, "queries": 64},
            "its query gradient is wrong from 33,554,432 rows x max_segments x tokens x query heads on, and this is "
            "33,554,432: lower max_segments or give fewer rows",
        ),
        ("tpu", {"platform": "gpu"}, "tpu cannot serve: it is a TPU kernel, and this runs on gpu"),
        ("tpu", {"own_keys": False}, "its causal mask is static"),
        ("tpu", {"dtype": jnp.dtype("float16")}, "TPUs have no float16"),
    ],
)
def test_a_named_implementation_that_cannot_serve_says_why(
    implementation: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        choose(request(**changes), implementation)


def test_cudnn_counts_the_rows_that_vmap_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cudnn, "_call", lambda q, k, v, lengths, first, request: q * k.sum() * lengths.sum().astype(q.dtype)
    )
    small = request(queries=8, heads=1, kv_heads=1, max_segments=2**17)  # 2**20 of 2**25
    segments = find_segments(jnp.ones((1, 8), int))

    def attend(x: jax.Array) -> jax.Array:
        return cudnn.attend(jnp.ones((1, 8, 1, 64)), x, x, segments, jnp.int32(0), small)[0].sum()

    jax.jit(jax.vmap(jax.grad(attend)))(jnp.ones((31, 1, 8, 1, 64)))
    with pytest.raises(UnsupportedError, match="cudnn cannot serve under vmap: .* and this is 33,554,432: lower"):
        jax.vmap(jax.grad(attend))(jnp.ones((32, 1, 8, 1, 64)))
    with pytest.raises(UnsupportedError, match="and this is 67,108,864"):
        jax.vmap(jax.vmap(attend))(jnp.ones((16, 4, 1, 8, 1, 64)))


def test_tokamax_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(UnsupportedError, match="'tokamax': dot_product_attention takes no segment ids, .* pass None"):
        choose(request(), "tokamax")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(PackingError, match="'flash' is unknown: pass one of xla, chunked, pallas, cudnn, tpu, or None"):
        choose(request(), "flash")


# -- what the entry point checks ---------------------------------------------------------------------------------------


def call(**changes: Any) -> Any:
    """A legal call of [1, 8] tokens with some arguments replaced."""
    arguments: dict[str, Any] = {
        "q": jnp.ones((1, 8, 4, 16)),
        "k": jnp.ones((1, 8, 2, 16)),
        "v": jnp.ones((1, 8, 2, 16)),
        "segment_ids": jnp.array([[1, 1, 2, 2, 2, 3, 3, 0]]),
        "implementation": "xla",
    }
    return segment_attention(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": jnp.ones((8, 4, 16))}, LayoutError, "q must have shape [B, S, N, D], got (8, 4, 16)"),
        (
            {"q": jnp.ones((1, 8, 4, 16), jnp.int32)},
            LayoutError,
            "q, k and v must share one dtype of bfloat16, float16",
        ),
        ({"v": jnp.ones((1, 8, 2, 16), jnp.bfloat16)}, LayoutError, "got float32, float32, bfloat16: cast them"),
        ({"v": jnp.ones((1, 8, 1, 16))}, LayoutError, "must agree in rows, tokens and heads"),
        ({"q": jnp.ones((1, 8, 4, 8))}, LayoutError, "must agree in rows (axis 0) and width (axis 3)"),
        ({"q": jnp.ones((1, 8, 3, 16))}, LayoutError, "q has 3 heads and k has 2: the first must be a multiple"),
        ({"q": jnp.ones((1, 0, 4, 16))}, LayoutError, "must not be empty"),
        (
            {"segment_ids": jnp.ones((1, 7), int)},
            LayoutError,
            "segment_ids must have shape [B, S] = (1, 8), got (1, 7)",
        ),
        ({"segment_ids": jnp.ones((1, 8))}, LayoutError, "segment_ids must be integers of shape [B, S], got float32"),
        (
            {"q": jnp.ones((1, 4, 4, 16)), "segment_ids": jnp.ones((1, 4), int)},
            LayoutError,
            "give the keys' ids as kv_",
        ),
        ({"kv_segment_ids": jnp.ones((1, 9), int)}, LayoutError, "kv_segment_ids must have shape [B, T] = (1, 8), got"),
        ({"q_offset": 3}, LayoutError, "q_offset places queries among other tokens' keys: give kv_segment_ids"),
        ({"window": 0}, PackingError, "window is 0: it counts visible keys, the query's own included"),
        ({"window": (4, 0)}, PackingError, "window must be an int or None, got (4, 0)"),
        ({"window": 4.0}, PackingError, "window must be an int or None, got 4.0"),
        ({"max_segments": 2.5}, PackingError, "max_segments must be an int or None, got 2.5"),
        ({"softcap": "2"}, PackingError, "softcap must be a number or None, got '2'"),
        ({"mesh": (8,)}, PackingError, "mesh must be a jax.sharding.Mesh or the NamedSharding of q, got tuple"),
        ({"softcap": 0.0}, PackingError, "softcap is 0.0: it must be positive and finite; pass None for none"),
        ({"scale": -1.0}, PackingError, "scale is -1.0: it must be positive and finite"),
        ({"max_segments": 0}, PackingError, "max_segments is 0: it must be at least 1"),
        ({"max_segments": 2}, CapacityError, "row 0 holds 3 segments and max_segments is 2"),
        ({"sinks": jnp.ones(3)}, LayoutError, "sinks must have one logit per query head, shape (4,), got (3,)"),
    ],
)
def test_bad_input_raises_with_the_reason(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call(**changes)


def test_segments_are_given_whole() -> None:
    segments = find_segments(jnp.array([[1, 1, 2, 2, 2, 3, 3, 0]]))
    assert (call(segment_ids=segments) == call()).all()
    with pytest.raises(LayoutError, match="segment_ids is already a Segments: give kv_segment_ids to find_segments"):
        call(segment_ids=segments, kv_segment_ids=jnp.ones((1, 8), int))
    with pytest.raises(CapacityError, match="row 0 holds 3 segments and max_segments is 2"):
        call(segment_ids=segments, max_segments=2)


def test_an_exceeded_cap_is_nan_in_that_row_forward_and_backward() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 8, 2, 16)), jnp.float32) for _ in range(3))
    ids = jnp.array([[1, 1, 2, 2, 2, 3, 3, 0], [1, 1, 1, 1, 2, 2, 0, 0]])

    @jax.jit
    def loss(q: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = segment_attention(q, k, v, ids, max_segments=2)
        return out.sum(), out

    (_, out), dq = jax.value_and_grad(loss, has_aux=True)(q, ids)
    assert np.isnan(out[0]).all() and np.isnan(dq[0, :7]).all()
    assert (dq[0, 7] == 0).all()  # of padding
    assert np.isfinite(out[1]).all() and np.isfinite(dq[1]).all()


def test_numpy_arrays_are_taken_as_they_are() -> None:
    as_numpy = {name: np.ones((1, 8, heads, 16), np.float32) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    assert (call(**as_numpy, segment_ids=np.array([[1, 1, 2, 2, 2, 3, 3, 0]])) == call()).all()
