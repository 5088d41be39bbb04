"""Every Triton kernel compiles as public functions launch it, and its tiles fit the shared memory of common GPUs.

No GPU is needed: see :mod:`tests.torch_backend.compiling`.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.imports import ROOT
from tests.torch_backend.compiling import AMPERE, CONSUMER, HOPPER, TURING, Device, compiled
from tests.torch_backend.launches import OPTIONS, QUICK, SIZES
from tests.torch_backend.offsets import narrow_products
from tests.torch_backend.ops.test_attention_order import REQUEST
from torch_backend.ops import operators
from torch_backend.ops.attention import triton
from torch_backend.ops.attention.triton import _LARGE, _SMALL, _TURING, KernelTiles, Tile, choose_tiles
from torch_backend.ops.scan.chunks import LINEAR_SMALL, LINEAR_TILES, ChunkTile
from torch_backend.ops.scan.linear_attention import any_width

FOLDER = ROOT / "torch_backend" / "ops"
FIRST = [[name, "bfloat16", options[0]] for name, options in OPTIONS.items()]
FIRST += [[name, "bfloat16", options] for name, options in QUICK]


def kernels() -> set[str]:
    """Returns all kernels of ``torch_backend.ops``: functions of Triton that no other one calls."""
    defined, called = set(), set()
    for path in FOLDER.rglob("*.py"):
        tree = ast.parse(path.read_text())
        module = path.relative_to(FOLDER).with_suffix("").as_posix().replace("/", ".")
        jitted = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
            and any(ast.unparse(x).startswith("triton.jit") for x in node.decorator_list)
        ]
        at_home = {node.name: module for node in jitted}
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                at_home |= {name.name: node.module.removeprefix("torch_backend.ops.") for name in node.names}
        calls = [node for function in jitted for node in ast.walk(function) if isinstance(node, ast.Call)]
        called |= {f"{at_home[x.func.id]}.{x.func.id}" for x in calls if getattr(x.func, "id", None) in at_home}
        defined |= {f"{module}.{node.name}" for node in jitted}
    return defined - called


def test_every_kernel_compiles_as_it_is_launched(tmp_path: Path) -> None:
    found = compiled(HOPPER, FIRST, tmp_path, to="ttir")
    assert not found.failed, found.report
    assert not found.again
    assert set(found.shared) == kernels()
    assert too_narrow(tmp_path) == set()


def too_narrow(folder: Path) -> set[str]:
    """The products of 32 bits in addresses, but for rotations: their launch asks how wide they must be."""
    return {place for place in narrow_products(folder) if not place.startswith("rope/")}


@pytest.mark.slow
def test_every_option_compiles(tmp_path: Path) -> None:
    """Each in one of two dtypes: the first, which the test above has in bfloat16, in float32, and so on by turns."""
    dtypes = ("float32", "bfloat16")
    cases = [[name, dtypes[i % 2], each] for name, options in OPTIONS.items() for i, each in enumerate(options)]
    found = compiled(HOPPER, cases, tmp_path, to="ttir")
    assert not found.failed, found.report
    assert not found.again
    assert too_narrow(tmp_path) == set()


def tiles_on(memory: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> KernelTiles:
    """The tiles for a request on a device that has so much shared memory."""
    monkeypatch.setattr(triton, "shared_memory", lambda device: memory)
    return choose_tiles(replace(REQUEST, **changes))


def test_tiles_follow_the_shared_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    half = {"dtype": torch.float16, "head_dim": 128, "value_dim": 128}
    chosen = [tiles_on(memory, monkeypatch, **half) for memory in (HOPPER.memory, CONSUMER.memory, TURING.memory, 0)]
    assert chosen == [_LARGE[128], _SMALL[128], _TURING[128], _SMALL[128]]
    assert tiles_on(TURING.memory, monkeypatch, **half | {"dtype": torch.float32}).keys == Tile(32, 16, 4, 1)


def test_tiles_of_the_widest_linear_attention_follow_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def carry_backward(memory: int, width: int = 256) -> ChunkTile:
        monkeypatch.setattr(any_width, "shared_memory", lambda device: memory)
        q, v = (torch.empty(1, 1, width, dtype=torch.bfloat16) for _ in range(2))
        return any_width._row(q, v, None, None, torch.zeros(1_000)).tiles["carry_backward"]  # many segments

    large = LINEAR_TILES["carry_backward"]
    chosen = [carry_backward(device.memory) for device in (HOPPER, AMPERE, CONSUMER)]
    assert chosen == [large, large, LINEAR_SMALL["carry_backward"]]
    assert carry_backward(0) == carry_backward(CONSUMER.memory, 128) == large


def test_bfloat16_runs_by_plain_torch_on_a_t4_and_float16_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the functions that ask see it: a tensor of a GPU, by its dtype and its device."""
    monkeypatch.setattr(operators, "TRITON", True)

    def runs(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        tensor = SimpleNamespace(dtype=dtype, device=torch.device("cuda", 0), is_cuda=True)
        return operators.runs_triton(tensor)

    assert [runs(torch.bfloat16, at) for at in ((7, 5), (8, 0), (9, 0))] == [False, True, True]
    assert [runs(dtype, (7, 5)) for dtype in (torch.float16, torch.float32)] == [True, True]


def of_sizes(dtype: str, *names: str, below: int = 2**31) -> list[list[Any]]:
    """Cases of ``SIZES``, of some functions or of all, with heads narrower than ``below``."""
    wanted = names or tuple(SIZES)
    return [[name, dtype, each] for name in wanted for each in SIZES[name] if each.get("width", 0) < below]


# Tiles of attention, experts and linear attention follow the device. What does not fit is refused by a trial: heads of
# 512 on a T4 and in float32 on a consumer card, and a T4's scans of wide heads.
NARROWER_IN_FLOAT32 = ("of_attention", "of_delta_rule")  # whose tiles are others
WIDE_LINEAR = ["of_delta_rule", "bfloat16", {"corrects": False, "width": 256, "shared": 4}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "cases"),
    [
        (HOPPER, [*of_sizes("bfloat16", "of_attention", "of_experts"), WIDE_LINEAR]),
        (AMPERE, [*of_sizes("bfloat16", "of_experts"), WIDE_LINEAR]),
        (CONSUMER, [*of_sizes("bfloat16"), *([name, "float32", {"width": 256}] for name in NARROWER_IN_FLOAT32)]),
        (
            TURING,
            of_sizes("float16", "of_attention", "of_experts", below=512)
            + of_sizes("float32", "of_attention", below=256),
        ),
    ],
    ids=["H100", "A100", "consumer cards", "T4"],
)
def test_tiles_fit_the_shared_memory(device: Device, cases: list[list[Any]], tmp_path: Path) -> None:
    found = compiled(device, cases, tmp_path)
    assert not found.failed, found.report
    assert 0 < max(found.shared.values()) <= device.memory


@pytest.mark.slow
def test_a_kernel_that_does_not_fit_is_named(tmp_path: Path) -> None:
    small = Device(90, 1_024)
    (message,) = compiled(small, [["of_kimi_rule", "bfloat16", {}]], tmp_path).failed.values()
    assert message.startswith("after scan.kimi_delta.kernels.") and "shared memory" in message
