"""Set-up of the whole suite: one thread for each process, a cache of what JAX compiles, the tier and the shard of a run
(``tests.tiers``), a record of its results, and Triton's library functions interpretable where there is no GPU.

The suite runs in several workers, and some of its tests start processes; with a thread for every core each, torch's
threads would wait for one another.

Triton settles when a function is defined whether it can be interpreted, by ``TRITON_INTERPRET``; transformers imports
Triton. The variable does not stay set: the code under test sees it in the tests of the kernels alone
(``tests.torch_backend.kernels``).
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

from conformance import sharing
from tests import gpu, recording, tiers

settings.register_profile("untimed", settings(), deadline=None)  # on a busy machine any example may be slow
settings.load_profile("untimed")

# Before torch and JAX are imported. Workers, and the processes that tests start, compile many programs in common; a
# second run compiles none.
for name, value in sharing.environment(Path(__file__).parents[1] / ".pytest_cache" / "jax").items():
    os.environ.setdefault(name, value)


class Interpretable(MetaPathFinder):
    """Finds Triton such that its import sets ``TRITON_INTERPRET`` for as long as it takes, where there is no GPU.

    Its kernels are interpreted quickly then. An import hook, because tests of NumPy's packages need neither torch nor
    Triton this way.
    """

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        spec = PathFinder.find_spec(name, path) if name == "triton" else None
        if spec is None or spec.loader is None or "TRITON_INTERPRET" in os.environ:
            return None
        load = spec.loader.exec_module

        def interpretable(module: ModuleType) -> None:
            import torch

            if torch.cuda.is_available():
                return load(module)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TRITON_INTERPRET", "1")
                load(module)
            from torch_backend.interpretation import interpret_quickly

            interpret_quickly()

        spec.loader.exec_module = interpretable  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Interpretable())


@pytest.fixture(autouse=True)
def log_stays_on() -> Iterator[None]:
    """Examples and tools switch the log off for their process, which is that of the tests after them too."""
    yield
    logging.disable(logging.NOTSET)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("crosspack")
    group.addoption("--tier", choices=tiers.TIERS, default="all", help="which tests of the suite; see tests/tiers.py")
    group.addoption("--shard", metavar="K/N", help="the files of the K-th of N shards of about equal time")
    group.addoption("--limit", type=int, metavar="SECONDS", help="fail a test that takes longer")
    recording.pytest_addoption(parser)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpus = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("two_gpus")]
    if unseen := {item.path for item in on_gpus} - set(gpu.files()):
        raise pytest.UsageError(f"python -m tests.gpu does not see the tests of {min(unseen)}: see files() there")
    chosen = any(not Path(argument.partition("::")[0]).is_dir() for argument in config.args)
    tier = "all" if chosen or config.getoption("keyword") else config.getoption("tier")
    kept = {item.nodeid for item in items}
    if tier != "all":
        slow = [item for item in items if item.get_closest_marker("slow")]
        left_out = [item.nodeid for item in slow + on_gpus]
        names, changed = [item.nodeid for item in items], tiers.reached(tiers.changed_files())
        quick = tiers.quick(names, left_out, changed, tiers.recorded())
        kept = quick if tier == "quick" else kept - quick
    if config.getoption("shard"):
        number, _, of = config.getoption("shard").partition("/")
        files = {name.partition("::")[0] for name in kept}
        mine = tiers.shard(files, tiers.recorded(), int(number), int(of))
        kept = {name for name in kept if name.partition("::")[0] in mine}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]
    if hasattr(config, "workerinput"):  # one of several workers: the long files first, so that they end together
        durations = tiers.recorded()
        items.sort(key=lambda item: -durations.get(item.nodeid.partition("::")[0], tiers.UNKNOWN))


def pytest_collection_finish() -> None:
    """Takes what collection imported, half a million objects that stay, out of all garbage collections to come.

    Trainers and compilers collect often: walking those objects was half of the time of their tests.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Ends a test at its time limit by an exception in it, so that it is named and the tests after it run."""
    limit = item.config.getoption("limit")
    if not limit:
        return (yield)

    def late(*_: object) -> None:
        pytest.fail(f"took longer than {limit} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pytest_configure(config: pytest.Config) -> None:
    recording.pytest_configure(config)
