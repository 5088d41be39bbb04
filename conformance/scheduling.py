"""Distributes tests over the workers of pytest-xdist under ``--dist loadgroup``: all tests of a method one worker.

What a backend compiles for one test, others of the method need too, and all backends share the oracle's answers. Many
workers get the tests of one backend and requirement at a time: attention has most tests, and groups of whole methods
would leave most of the workers idle.

xdist's own ``loadgroup`` has its workers append a group to each test's id. pytest 9.2 does not let them, and the tests
would be spread one by one; so the groups are made here, in the process that hands the tests out.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from conformance.spec import requirements

FEW_WORKERS = 4


class ByMethod(LoadScopeScheduling):
    """Hands out the suite's tests by groups.

    Args:
        config: of the controlling process.
        log: where xdist writes.
        backends: the names of those that are judged.
    """

    def __init__(self, config: pytest.Config, log: Any, backends: Collection[str]) -> None:
        super().__init__(config, log)
        self._backends = backends
        self._few = config.option.numprocesses is None or config.option.numprocesses <= FEW_WORKERS

    def _split_scope(self, nodeid: str) -> str:
        """The group of a test of the suite, such as ``test_masks.py::test_softcap[jax:xla-5.0]``; other tests alone."""
        path, _, test = nodeid.partition("::")
        function, _, case = test.partition("[")
        try:
            found = getattr(import_module(f"conformance.{PurePosixPath(path).stem}"), function)
            (requirement,) = (mark.args[0] for mark in found.pytestmark if mark.name == "requirement")
        except (ImportError, AttributeError, ValueError):
            return nodeid
        if self._few:
            return requirements()[requirement].method
        judged = next((name for name in self._backends if f"{case[:-1]}-".startswith(f"{name}-")), "")
        return f"{judged} {requirement}"
