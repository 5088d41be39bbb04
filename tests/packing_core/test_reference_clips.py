"""The oracle of clips: by NumPy's convolution, and by finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from packing_core.reference import clip_convolutions, clip_convolutions_vjp
from tests.packing_core.finite_differences import assert_gradients


def inputs() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    shapes = {"features": (9, 3), "up": (4, 3, 3), "up_bias": (4,), "down": (2, 4, 3)}
    return {name: draw.standard_normal(shape) for name, shape in shapes.items()}


def convolved(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """By numpy.convolve, one pair of channels at a time."""
    pairs = [
        sum(np.convolve(x[:, c], weight[d, c, ::-1], "same") for c in range(weight.shape[1]))
        for d in range(len(weight))
    ]
    return np.stack(pairs, 1)


@pytest.mark.parametrize("frames", [1, 4, 5, 9])
def test_the_second_convolution_takes_every_second_output_of_the_first(frames: int) -> None:
    given = inputs()
    want = convolved(convolved(given["features"], given["up"]) + given["up_bias"], given["down"])
    found = clip_convolutions(**given, frames=frames)
    np.testing.assert_allclose(found, want[::2][: (frames + 1) // 2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frames", [1, 4, 5, 9])
def test_gradients_are_the_slopes_of_the_forward_pass(frames: int) -> None:
    given = inputs()
    dout = np.random.default_rng(1).standard_normal(((frames + 1) // 2, 2))
    found = clip_convolutions_vjp(**given, frames=frames, dout=dout)
    assert_gradients(lambda **moved: (clip_convolutions(**moved, frames=frames) * dout).sum(), given, found)
