"""Gradients by central differences, to judge the reference's vector-Jacobian products."""

from collections.abc import Callable

import numpy as np

STEP = 1e-5
# A central difference errs by about STEP^2 times the third derivative plus float64's 2e-16 over STEP, some 1e-10 each
# on the tests' tiny inputs of order one; sums over an output multiply that by its size.
TOLERANCE = 2e-8


def numerical_gradient(scalar: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
    """The gradient of ``scalar`` at a point, one entry at a time."""
    gradient = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[index] += STEP
        down[index] -= STEP
        gradient[index] = (scalar(up) - scalar(down)) / (2 * STEP)
    return gradient


def assert_gradients(scalar: Callable[..., float], inputs: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> None:
    """Hold each found gradient against the numerical one of ``scalar(**inputs)``; every input must have one."""
    assert found.keys() == inputs.keys()
    for name, x in inputs.items():
        expected = numerical_gradient(lambda moved, name=name: scalar(**{**inputs, name: moved}), x)
        assert found[name].shape == x.shape
        assert np.abs(expected).max() > 1e-3, f"{name} has no gradient to speak of: the test shows nothing"
        np.testing.assert_allclose(found[name], expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
