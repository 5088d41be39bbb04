"""The rotary oracle, held against multiplication by a complex number of length one."""

import numpy as np
import pytest

from packing_core.errors import LayoutError
from packing_core.reference import rope, rope_vjp
from tests.packing_core.finite_differences import assert_gradients

TOKENS, HEADS = 5, 2
POSITIONS = np.array([0, 1, 2, 0, 1])  # a document of three tokens, one of two


def inputs(width: int, turned: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((TOKENS, HEADS, width))
    return x, 10_000.0 ** (-np.arange(0, turned, 2) / turned)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turned", [8, 4], ids=["whole", "partial"])
def test_rope_is_a_rotation_in_the_complex_plane(interleaved, turned):
    x, inv_freq = inputs(8, turned)
    real = slice(0, turned, 2) if interleaved else slice(0, turned // 2)
    imaginary = slice(1, turned, 2) if interleaved else slice(turned // 2, turned)
    pairs = (x[..., real] + 1j * x[..., imaginary]) * np.exp(1j * POSITIONS[:, None, None] * inv_freq)
    expected = x.copy()
    expected[..., real], expected[..., imaginary] = 1.5 * pairs.real, 1.5 * pairs.imag
    found = rope(x, POSITIONS, inv_freq, interleaved=interleaved, scale=1.5)
    np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turned", [8, 4], ids=["whole", "partial"])
def test_gradients_are_the_slopes_of_the_forward_pass(interleaved, turned):
    x, inv_freq = inputs(8, turned)
    dout = np.random.default_rng(1).standard_normal(x.shape)
    options = {"interleaved": interleaved, "scale": 1.5}
    found = rope_vjp(x, POSITIONS, inv_freq, dout, **options)
    assert_gradients(lambda x: (rope(x, POSITIONS, inv_freq, **options) * dout).sum(), {"x": x}, found)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_of_two_tokens_alone(interleaved):
    x, inv_freq = inputs(8, 8)

    def score(query_position: int, key_position: int) -> float:
        q = rope(x[:1], [query_position], inv_freq, interleaved=interleaved)
        k = rope(x[1:2], [key_position], inv_freq, interleaved=interleaved)
        return float((q * k).sum())

    assert score(7, 3) == pytest.approx(score(1_004, 1_000), rel=1e-11)
    assert score(7, 3) != pytest.approx(score(7, 4), rel=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((TOKENS, 8))}, r"x must have shape \[T, H, D\]"),
        ({"positions": np.zeros(4)}, r"positions must have shape \[T\] = \(5\)"),
        ({"inv_freq": np.zeros(5)}, "inv_freq has 5 entries, which turn 10 channels, and x has 8: pass fewer"),
        ({"inv_freq": np.zeros((TOKENS, 4))}, "inv_freq must have shape"),
    ],
)
def test_bad_input_is_named(change, message):
    x, inv_freq = inputs(8, 8)
    with pytest.raises(LayoutError, match=message):
        rope(**{"x": x, "positions": POSITIONS, "inv_freq": inv_freq, **change})


def test_the_gradients_shape_is_checked():
    x, inv_freq = inputs(8, 8)
    with pytest.raises(LayoutError, match="dout must have shape"):
        rope_vjp(x, POSITIONS, inv_freq, x[:, :1])
