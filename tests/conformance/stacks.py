"""Stacks that the suite is run against by name, ``tests.conformance.stacks:NAME``, and how a run is started."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np

from conformance.reference import Reference
from packing_core.errors import UnsupportedError
from packing_core.protocol import ALL_OPTIONS, Backend, Capabilities
from tests import processes

ROOT = Path(__file__).parents[2]
HERE = "tests.conformance.stacks"


class Empty(Backend):
    """Implements nothing."""


class Modest(Reference):
    """Declares neither bfloat16 nor sinks, and refuses them."""

    capabilities = Capabilities(dtypes=("float32",), options=ALL_OPTIONS - {"sinks"})

    def attention(self, *args, dtype, sinks=None, **kwargs):
        if sinks is not None or dtype != "float32":
            raise UnsupportedError("neither sinks nor narrow dtypes")
        return super().attention(*args, dtype=dtype, **kwargs)


def joining() -> dict[str, Callable[[], Backend]]:
    """The adapters of torch and JAX with tokens of one id side by side, so that runs of an id are one segment."""

    def joined(family: str, name: str) -> Backend:
        backend = import_module(f"{family}.conformance").backends()[name]()
        attention = backend.attention

        def attend(q, k, v, segment_ids, *, dout=None, **options):
            order = np.argsort(segment_ids, axis=1, kind="stable")
            back = np.argsort(order, axis=1)

            def moved(x, to):
                return None if x is None else np.take_along_axis(x, to.reshape(to.shape + (1,) * (x.ndim - 2)), axis=1)

            given = (moved(x, order) for x in (q, k, v, segment_ids))
            out, gradients = attention(*given, dout=moved(dout, order), **options)
            return moved(out, back), {name: moved(x, back) for name, x in gradients.items()}

        backend.attention = attend
        return backend

    return {"torch": partial(joined, "torch_backend", "sdpa"), "jax": partial(joined, "jax_backend", "xla")}


class Boastful(Reference):
    """Declares sinks, and refuses them."""

    def attention(self, *args, sinks=None, **kwargs):
        if sinks is not None:
            raise UnsupportedError("no sinks after all")
        return super().attention(*args, sinks=sinks, **kwargs)


class Unpromising(Reference):
    """Divides by the number of targets, and does not promise to be right without any."""

    capabilities = Capabilities(options=ALL_OPTIONS - {"untrained_batches"})

    def gradients(self, decoder, batch, *, dtype):
        assert (batch.labels != -100).any()
        return super().gradients(decoder, batch, dtype=dtype)


class NarrowHeads(Reference):
    """Declares away what a required test needs."""

    capabilities = Capabilities(head_dims=range(1, 33))


class Interpreted(Reference):
    """A kernel in an interpreter."""

    capabilities = Capabilities(interpreted=True)


class Crashing(Reference):
    """Raises what is not an answer."""

    def attention(self, *args, **kwargs):
        raise RuntimeError("illegal memory access")


class Malformed(Reference):
    """Returns arrays of the wrong shape."""

    def attention(self, *args, **kwargs):
        out, gradients = super().attention(*args, **kwargs)
        return out[:, :, 0], gradients


class OwnModel(Reference):
    """Has a model of its own: the suite's weights, scaled, whatever decoder it is handed."""

    capabilities = Capabilities(own_model=True)

    @staticmethod
    def own(decoder):
        return replace(decoder, weights={name: 1.25 * w for name, w in decoder.weights.items()})

    def forward(self, decoder, batch, *, dtype):
        return super().forward(self.own(decoder), batch, dtype=dtype)

    def gradients(self, decoder, batch, *, dtype):
        return super().gradients(self.own(decoder), batch, dtype=dtype)

    def train(self, decoder, steps, **kwargs):
        return super().train(self.own(decoder), steps, **kwargs)


class LeakyOwnModel(OwnModel):
    """The same, running a row's segments together."""

    def forward(self, decoder, batch, *, dtype):
        return super().forward(decoder, replace(batch, segment_ids=1 * (batch.segment_ids > 0)), dtype=dtype)


def absent():
    raise UnsupportedError("needs an accelerator")


def partly():
    """One that runs here and one that does not."""
    return {"here": Reference, "elsewhere": absent}


def nowhere():
    return {"elsewhere": absent}


def threads():
    """One that is called like the number of threads that torch would take."""
    return {os.environ.get("OMP_NUM_THREADS", "all"): Reference}


@dataclass
class Outcome:
    code: int
    output: str
    report: dict | None


def run(folder, *options, report=True):
    """Run the suite in a process of its own, started from ``folder``."""
    path = folder / "report.json"
    command = [sys.executable, "-m", "pytest", str(ROOT / "conformance"), "-q", "-p", "no:cacheprovider", *options]
    if report:
        command.append(f"--report={path}")
    if "-n" in options:
        command += ["-p", "xdist.plugin"]
    # Other plugins of the machine have no part in it, and take longer to import than most of these runs.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    done = processes.run(command, cwd=folder, env=environment)
    found = json.loads(path.read_text()) if path.exists() else None
    return Outcome(done.returncode, done.stdout + done.stderr, found)
