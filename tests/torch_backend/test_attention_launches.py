"""Launches of the attention kernels, as the interpreter ran them, compile for an H100 without one.

An interpreter takes what a compiler refuses: a branch on an argument that is None, for one.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from tests.torch_backend.test_triton_attention import SMALL
from tests.torch_backend.test_triton_compiled import HOPPER, compiled
from torch_backend.ops import operators
from torch_backend.ops.attention import attention
from torch_backend.ops.attention.triton import TRITON
from torch_backend.segments import PackedMetadata

implementation = import_module("torch_backend.ops.attention.triton")
KERNELS = ("forward", "backward_queries", "backward_keys", "add_shares")
KINDS = {torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
OPTIONS = ("num_warps", "num_stages", "maxnreg")

SEGMENTS = {
    "documents": lambda: PackedMetadata.from_lengths((5, 19, 8)),
    "last tokens of documents": lambda: PackedMetadata.of_last_tokens((1, 9), (13, 19), device="cpu"),
    "spans that see both ways": lambda: PackedMetadata.from_lengths((9,)).with_spans(
        torch.tensor([-1, 0, 0, 0] + 5 * [-1])
    ),
    "shared prefixes": lambda: PackedMetadata.from_lengths((17, 9, 8), parents=(-1, 0, 0)),
}


class Recorded:
    """A kernel that notes its launches: names of arguments -> kinds of tensors, numbers, constants."""

    def __init__(self, name: str, kernel: Any, launches: list[list[Any]]) -> None:
        self.name, self.kernel, self.launches = name, kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            options = [constants.get(name) for name in OPTIONS]
            names = dict(zip(self.kernel.arg_names, args, strict=False))
            names |= {name: value for name, value in constants.items() if name not in OPTIONS}
            given = {name: KINDS[x.dtype] if isinstance(x, torch.Tensor) else x for name, x in names.items()}
            self.launches.append(["launched", [self.name, given], *options])
            self.kernel[grid](*args, **constants)

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(operators, "INTERPRETED", True)
    found: list[list[Any]] = []
    kernels = import_module("torch_backend.ops.attention.triton_kernels")
    for name in KERNELS:
        monkeypatch.setattr(kernels, name, Recorded(name, getattr(kernels, name), found))
    monkeypatch.setattr(TRITON, "supports", TRITON.refuses)
    monkeypatch.setattr(implementation, "choose_tiles", lambda request: SMALL)
    return found


@pytest.mark.slow
def test_every_launch_compiles(launches: list[list[Any]]) -> None:
    for make in SEGMENTS.values():
        packed = make()
        keys = packed if packed.keys is None else packed.keys
        q, k, v = (torch.randn(n, heads, 16) for n, heads in ((packed.tokens, 4), (keys.tokens, 2), (keys.tokens, 2)))
        q.requires_grad_()
        for options in ({}, {"window": 6, "softcap": 1.5, "sinks": torch.zeros(4), "alibi_slopes": torch.ones(4)}):
            attention(q, k, v, packed, implementation="triton", **options).sum().backward()
    assert {arguments[0] for _, arguments, *_ in launches} == set(KERNELS)
    assert max(compiled(launches)) <= HOPPER
