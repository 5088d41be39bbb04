"""One thread for each process, a cache of what JAX compiles, tests by turns (``tests.turns``), no time limit for an
example that hypothesis draws, and Triton's library functions interpretable where there is no GPU.

The suite runs in several workers, and some of its tests start processes; with a thread for every core each, torch's
threads would wait for one another.

Triton settles when a function is defined whether it can be interpreted, by ``TRITON_INTERPRET``; transformers imports
Triton. The variable does not stay set: the code under test sees it in the tests of the kernels alone
(``tests.torch_backend.kernels``).
"""

import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from conformance import sharing
from tests import turns

settings.register_profile("untimed", settings(), deadline=None)  # on a busy machine any example may be slow
settings.load_profile("untimed")

# Before torch and JAX are imported. Workers, and the processes that tests start, compile many programs in common; a
# second run compiles none.
for name, value in sharing.environment(Path(__file__).parents[1] / ".pytest_cache" / "jax").items():
    os.environ.setdefault(name, value)

if find_spec("torch") and find_spec("triton") and "TRITON_INTERPRET" not in os.environ:
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        import triton  # noqa: F401

        del os.environ["TRITON_INTERPRET"]


@pytest.fixture(autouse=True)
def log_stays_on() -> Iterator[None]:
    """Examples and tools switch the log off for their process, which is that of the tests after them too."""
    yield
    logging.disable(logging.NOTSET)


def pytest_configure() -> None:
    turns.today()  # before workers start, which inherit it


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if turns.everything(config.args) or config.getoption("keyword") or config.getoption("markexpr"):
        return
    waiting = turns.waiting([item.nodeid for item in items], turns.today())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in waiting])
    items[:] = [item for item in items if item.nodeid not in waiting]
