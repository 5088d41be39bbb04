"""The recurrent mixers' oracles, held against their definitions written another way, and their gradients."""

from itertools import pairwise

import numpy as np
import pytest

from packing_core.errors import LayoutError
from packing_core.reference import (
    gated_delta_rule,
    gated_delta_rule_vjp,
    selective_scan,
    selective_scan_vjp,
    short_convolution,
    short_convolution_vjp,
)
from tests.packing_core.finite_differences import assert_gradients

# Three documents of 4, 1 and 3 tokens, and 1 token that belongs to none:  aaaa b ccc .
CU_SEQLENS = [0, 4, 5, 8]
TOKENS = 9


def scan_inputs(*, groups: int | None = None, skip: bool = True, gate: bool = True) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    channels, states = 4, 3
    grouped = (TOKENS, states) if groups is None else (TOKENS, groups, states)
    inputs = {
        "x": rng.standard_normal((TOKENS, channels)),
        "dt": rng.uniform(0.1, 1.0, (TOKENS, channels)),
        "A": -rng.uniform(0.2, 1.0, (channels, states)),
        "B": rng.standard_normal(grouped),
        "C": rng.standard_normal(grouped),
    }
    if skip:
        inputs["D"] = rng.standard_normal(channels)
    if gate:
        inputs["z"] = rng.standard_normal((TOKENS, channels))
    return inputs


def delta_inputs(*, per_channel: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    heads, width, v_width = 2, 3, 2
    return {
        "q": rng.standard_normal((TOKENS, heads, width)),
        "k": rng.standard_normal((TOKENS, heads, width)) / width,
        "v": rng.standard_normal((TOKENS, heads, v_width)),
        "g": -rng.uniform(0.1, 1.0, (TOKENS, heads, width) if per_channel else (TOKENS, heads)),
        "beta": rng.uniform(0.2, 0.9, (TOKENS, heads)),
    }


def convolution_inputs(*, bias: bool = True) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    inputs = {"x": rng.standard_normal((TOKENS, 2)), "weight": rng.standard_normal((2, 3))}
    return inputs | ({"bias": rng.standard_normal(2)} if bias else {})


MIXERS = [
    pytest.param(selective_scan, selective_scan_vjp, scan_inputs(), {}, id="scan"),
    pytest.param(selective_scan, selective_scan_vjp, scan_inputs(groups=2, skip=False), {}, id="scan, groups, no skip"),
    pytest.param(selective_scan, selective_scan_vjp, scan_inputs(gate=False), {}, id="scan, no gate"),
    pytest.param(gated_delta_rule, gated_delta_rule_vjp, delta_inputs(), {}, id="delta"),
    pytest.param(gated_delta_rule, gated_delta_rule_vjp, delta_inputs(per_channel=True), {"scale": 0.8}, id="kimi"),
    pytest.param(
        short_convolution, short_convolution_vjp, convolution_inputs(), {"silu": True}, id="convolution, silu"
    ),
    pytest.param(short_convolution, short_convolution_vjp, convolution_inputs(bias=False), {}, id="convolution"),
]
PARAMETERS = {"A", "D", "weight", "bias"}  # shared by all tokens; everything else has the token axis first


def cut(inputs: dict[str, np.ndarray], tokens: slice) -> dict[str, np.ndarray]:
    return {name: x if name in PARAMETERS else x[tokens] for name, x in inputs.items()}


def gradients_of(vjp, inputs, cu_seqlens, dout, options):
    output = "dout" if vjp is gated_delta_rule_vjp else "dy"
    return vjp(**inputs, cu_seqlens=cu_seqlens, **{output: dout}, **options)


def weights_like(out: np.ndarray) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(out.shape)


@pytest.mark.parametrize("groups", [None, 2])
def test_the_scan_is_a_sum_over_the_past_of_the_document(groups):
    inputs = scan_inputs(groups=groups)
    x, dt, A, D, z = (inputs[name] for name in ("x", "dt", "A", "D", "z"))
    # Unrolled: y_t = sum over s <= t of C_t . (exp(A (dt_{s+1} + ... + dt_t)) B_s) dt_s x_s
    expected = np.zeros_like(x)
    for first, last in pairwise(CU_SEQLENS):
        for t in range(first, last):
            for channel in range(x.shape[1]):
                group = () if groups is None else (channel * groups // x.shape[1],)
                total = D[channel] * x[t, channel]
                for s in range(first, t + 1):
                    decay = np.exp(A[channel] * dt[s + 1 : t + 1, channel].sum())
                    seen = np.dot(inputs["C"][(t, *group)], decay * inputs["B"][(s, *group)])
                    total += seen * dt[s, channel] * x[s, channel]
                expected[t, channel] = total * z[t, channel] / (1 + np.exp(-z[t, channel]))
    np.testing.assert_allclose(selective_scan(**inputs, cu_seqlens=CU_SEQLENS), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_delta_rule_is_the_papers_matrix_product(per_channel):
    inputs = delta_inputs(per_channel=per_channel)
    q, k, v, g, beta = inputs.values()
    expected = np.zeros_like(v)
    for first, last in pairwise(CU_SEQLENS):
        for head in range(q.shape[1]):
            state = np.zeros((v.shape[-1], q.shape[-1]))  # the paper's S, values by keys
            for t in range(first, last):
                key, value = k[t, head], v[t, head]
                decay = np.diag(np.exp(np.broadcast_to(g[t, head], key.shape)))
                forget = decay @ (np.eye(len(key)) - beta[t, head] * np.outer(key, key))
                state = state @ forget + beta[t, head] * np.outer(value, key)
                expected[t, head] = 0.5 * state @ q[t, head]
    found = gated_delta_rule(**inputs, cu_seqlens=CU_SEQLENS, scale=0.5)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_the_convolution_is_numpys():
    inputs = convolution_inputs()
    expected = np.zeros_like(inputs["x"])
    for first, last in pairwise(CU_SEQLENS):
        for channel in range(2):
            full = np.convolve(inputs["x"][first:last, channel], inputs["weight"][channel, ::-1])
            y = full[: last - first] + inputs["bias"][channel]
            expected[first:last, channel] = y / (1 + np.exp(-y))
    found = short_convolution(**inputs, cu_seqlens=CU_SEQLENS, silu=True)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("mixer", "vjp", "inputs", "options"), MIXERS)
def test_gradients_are_the_slopes_of_the_forward_pass(mixer, vjp, inputs, options):
    dout = weights_like(mixer(**inputs, cu_seqlens=CU_SEQLENS, **options))
    found = gradients_of(vjp, inputs, CU_SEQLENS, dout, options)
    assert_gradients(lambda **moved: (mixer(**moved, cu_seqlens=CU_SEQLENS, **options) * dout).sum(), inputs, found)


@pytest.mark.parametrize(("mixer", "vjp", "inputs", "options"), MIXERS)
def test_a_document_is_the_same_alone_and_packed_to_the_bit(mixer, vjp, inputs, options):
    packed = mixer(**inputs, cu_seqlens=CU_SEQLENS, **options)
    dout = weights_like(packed)
    packed_vjp = gradients_of(vjp, inputs, CU_SEQLENS, dout, options)
    summed = {name: np.zeros_like(inputs[name]) for name in PARAMETERS & inputs.keys()}
    for first, last in pairwise(CU_SEQLENS):
        alone, boundaries = cut(inputs, slice(first, last)), [0, last - first]
        np.testing.assert_array_equal(packed[first:last], mixer(**alone, cu_seqlens=boundaries, **options))
        alone_vjp = gradients_of(vjp, alone, boundaries, dout[first:last], options)
        for name, gradient in alone_vjp.items():
            if name in PARAMETERS:
                summed[name] += gradient
            else:
                np.testing.assert_array_equal(packed_vjp[name][first:last], gradient)
    for name, gradient in summed.items():
        np.testing.assert_allclose(packed_vjp[name], gradient, rtol=1e-12)


@pytest.mark.parametrize(("mixer", "vjp", "inputs", "options"), MIXERS)
def test_tokens_of_no_segment_give_and_get_nothing(mixer, vjp, inputs, options):
    outside = slice(CU_SEQLENS[-1], None)
    inputs = {name: x.copy() for name, x in inputs.items()}
    for name in inputs.keys() - PARAMETERS:
        inputs[name][outside] = np.nan
    out = mixer(**inputs, cu_seqlens=CU_SEQLENS, **options)
    assert not out[outside].any() and np.isfinite(out).all()
    for name, gradient in gradients_of(vjp, inputs, CU_SEQLENS, np.ones_like(out), options).items():
        assert np.isfinite(gradient).all()
        assert name in PARAMETERS or not gradient[outside].any()


def test_a_strong_gate_does_not_overflow():
    inputs = scan_inputs()
    inputs["z"] = np.where(inputs["z"] > 0, 1e4, -1e4)
    assert np.isfinite(selective_scan(**inputs, cu_seqlens=CU_SEQLENS)).all()


@pytest.mark.parametrize(
    ("mixer", "inputs", "change", "message"),
    [
        (selective_scan, scan_inputs(), {"dt": np.zeros((TOKENS, 3))}, r"dt must have shape \[T, E\] = \(9, 4\)"),
        (selective_scan, scan_inputs(), {"C": np.zeros((TOKENS, 2))}, r"C must have shape \[T, N\] = \(9, 3\)"),
        (selective_scan, scan_inputs(), {"B": np.zeros((TOKENS, 3, 3))}, "B has 3 groups, which do not divide the 4"),
        (selective_scan, scan_inputs(), {"D": np.zeros(3)}, "D must have shape"),
        (selective_scan, scan_inputs(), {"z": np.zeros(3)}, "z must have shape"),
        (gated_delta_rule, delta_inputs(), {"g": np.zeros((TOKENS, 3))}, r"g must have shape \[T, H\]"),
        (gated_delta_rule, delta_inputs(), {"beta": np.zeros((TOKENS, 3))}, "beta must have shape"),
        (gated_delta_rule, delta_inputs(), {"k": np.zeros((TOKENS, 2, 4))}, "k must have shape"),
        (short_convolution, convolution_inputs(), {"weight": np.zeros((3, 3))}, "weight must have shape"),
        (short_convolution, convolution_inputs(), {"bias": np.zeros(3)}, "bias must have shape"),
        (short_convolution, convolution_inputs(), {"x": np.zeros((TOKENS, 2, 2))}, r"x must have shape \[T, E\]"),
    ],
)
def test_bad_input_is_named(mixer, inputs, change, message):
    with pytest.raises(LayoutError, match=message):
        mixer(**{**inputs, **change}, cu_seqlens=CU_SEQLENS)


@pytest.mark.parametrize(
    ("vjp", "inputs", "gradient"),
    [
        (selective_scan_vjp, scan_inputs(), "dy"),
        (gated_delta_rule_vjp, delta_inputs(), "dout"),
        (short_convolution_vjp, convolution_inputs(), "dy"),
    ],
)
def test_an_output_gradient_of_another_shape_is_named(vjp, inputs, gradient):
    """One that broadcasts would give gradients."""
    with pytest.raises(LayoutError, match=f"{gradient} must have shape"):
        vjp(**inputs, cu_seqlens=CU_SEQLENS, **{gradient: np.ones((TOKENS, 1))})
