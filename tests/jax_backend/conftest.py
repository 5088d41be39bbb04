"""Eight host devices for the multi-device tests, and quick compilation, set before JAX runs; all tests of this package
forbid implicit promotion of dtypes and ranks, as many users of JAX do.
"""

from collections.abc import Iterator

import jax
import pytest

from jax_backend.compilation import compile_quickly

compile_quickly("--xla_force_host_platform_device_count=8")
STRICT = {"jax_numpy_dtype_promotion": "strict", "jax_numpy_rank_promotion": "raise"}


@pytest.fixture(scope="package", autouse=True)
def no_implicit_promotion() -> Iterator[None]:
    """Sets them for all threads and, by the environment, for the processes that tests start."""
    before = {name: getattr(jax.config, name) for name in STRICT}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in STRICT.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), value)
        yield
    for name, value in before.items():
        jax.config.update(name, value)
