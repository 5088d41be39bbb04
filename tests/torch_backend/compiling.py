"""Compiles the project's Triton kernels for a GPU that is not there, as its public functions launch them.

A test -> :func:`compiled` -> a process of its own, where kernels are not interpreted and :class:`StandIn` is Triton's
driver -> the cases of :mod:`.launches` call public functions, forward and backward -> Triton compiles each launch with
the arguments that a GPU would get, checks its shared memory against the device's, and starts nothing.

Each case runs again on documents of other lengths. A kernel that is compiled again then takes a number of tokens for a
constant, and would be compiled in every step whose rows have another length.

An interpreter takes what a compiler refuses (a branch on an argument that is None), and knows no shared memory.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.processes import run


class Device(NamedTuple):
    """A GPU's compute capability, times ten, and the bytes of shared memory that one program can have."""

    capability: int
    memory: int


HOPPER = Device(90, 227 * 1024)
AMPERE = Device(80, 163 * 1024)
CONSUMER = Device(86, 99 * 1024)  # an RTX 3090; a 4090 (8.9) has as much
TURING = Device(75, 64 * 1024)


class Compiled(NamedTuple):
    """Bytes of shared memory by kernel (``module.function``), the most of its launches; and by case errors, and the
    kernels that were compiled again for other lengths."""

    shared: dict[str, int]
    failed: dict[str, str]
    again: dict[str, list[str]]

    @property
    def report(self) -> str:
        return "\n".join(f"{case}: {error}" for case, error in self.failed.items())


def compiled(device: Device, cases: list[list[Any]], folder: Path, *, to: str = "llir") -> Compiled:
    """Run cases of :mod:`.launches`, each the name of a function, a dtype and keywords, for a device.

    Args:
        folder: for what Triton caches.
        to: the last stage. "ttir" is Triton's own representation, where Python is left, and with it all of None, types
            and shapes: 0.1 seconds of a kernel. After "llir", which is not optimised, its shared memory is known: 0.5
            seconds. "cubin" is machine code: 1.2 seconds.
    """
    pytest.importorskip("triton.backends.nvidia")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, "-m", "tests.torch_backend.compiling", *map(json.dumps, (device, cases, to))]
    done = run(command, env=environment, limit=900)
    assert done.returncode == 0, done.stderr
    return Compiled(*json.loads(done.stdout.splitlines()[-1]))


class StandIn:
    """Stands in for Triton's CUDA driver: it has a device's limits, loads nothing and starts nothing."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.shared: dict[str, int] = {}
        self.compiled: list[str] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": device.memory},
            load_binary=lambda *_: (1, 1, 0, 0, 1024),  # module, function, registers, spills, threads
        )

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.device.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Triton makes one for each kernel that it has compiled, before it checks its shared memory."""
        function = source.fn
        name = f"{function.__module__.removeprefix('torch_backend.ops.')}.{function.__name__}"
        self.compiled.append(name)
        self.shared[name] = max(metadata.shared, self.shared.get(name, 0))
        return lambda *_: None


def install(device: Device, to: str) -> StandIn:
    """Let this process compile for ``device``, whose tensors are those of the CPU; new memory is zero.

    It must come before the modules that import what it replaces.
    """
    import torch
    from triton.runtime import driver

    from torch_backend.ops import operators

    operators.runs_triton = lambda x: x.dtype != torch.float64
    operators.shared_memory = lambda _: device.memory
    # Nothing is written, and plain torch between kernels reads indices.
    torch.empty, torch.empty_like, torch.Tensor.new_empty = torch.zeros, torch.zeros_like, torch.Tensor.new_zeros
    stop_after(to)
    stand_in = StandIn(device)
    driver.set_active(stand_in)
    return stand_in


def stop_after(last: str) -> None:
    """Let Triton compile to this stage; machine code made of an earlier one is empty."""
    from triton.backends.nvidia import compiler

    if last == "cubin":
        return
    compiler.llvm.optimize_module = lambda *_: None  # which takes most of the time of "llir"
    stages_of = compiler.CUDABackend.add_stages

    def first_stages(self: Any, stages: dict[str, Any], *rest: Any) -> None:
        stages_of(self, stages, *rest)
        names = list(stages)
        for name in names[names.index(last) + 1 :]:
            del stages[name]

        def nothing(source: Any, metadata: dict[str, Any]) -> bytes:
            metadata |= {"name": "", "shared": metadata.get("shared", 0)}
            return b""

        stages[self.binary_ext] = nothing

    compiler.CUDABackend.add_stages = first_stages


def main(device: Device, cases: list[list[Any]], to: str) -> None:
    stand_in = install(device, to)
    from tests.torch_backend.launches import OTHER_LENGTHS, on_documents, run_case

    failed, again = {}, {}
    for case in cases:
        try:
            run_case(device, *case)
            before = len(stand_in.compiled)
            with on_documents(OTHER_LENGTHS):
                run_case(device, *case)
        except Exception as error:  # reported with the others, so that one run names all
            reason = "" if error.__cause__ is None else f": {error.__cause__}"
            last = stand_in.compiled[-1] if stand_in.compiled else "nothing"
            failed[json.dumps(case)] = f"after {last}: {type(error).__name__}: {error}{reason}"
        else:
            again[json.dumps(case)] = stand_in.compiled[before:]
    print(json.dumps([stand_in.shared, failed, {case: kernels for case, kernels in again.items() if kernels}]))


if __name__ == "__main__":
    arguments = list(map(json.loads, sys.argv[1:]))
    main(Device(*arguments[0]), *arguments[1:])
