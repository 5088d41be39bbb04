"""Kernels compiled for an H100 without one: tiles of wide heads and of experts with adapters fit its shared memory."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.processes import run
from tests.torch_backend.test_attention_order import REQUEST
from torch_backend.ops import operators
from torch_backend.ops.attention import triton
from torch_backend.ops.attention.triton import _LARGE, _SMALL, _TURING, KernelTiles, Tile, choose_tiles
from torch_backend.ops.experts import triton as experts
from torch_backend.ops.experts.products import Places

HOPPER, CONSUMER, TURING = 227 * 1024, 99 * 1024, 64 * 1024  # bytes that one program can have
KERNELS = ("forward", "backward_queries", "backward_keys")


def source(
    name: str, width: int, value_width: int, group: int, rows: int, keys: int, spans: bool, dtype: str = "bf16"
) -> Any:
    """A kernel with inputs of contiguous heads, causal, of spans that see both ways or not."""
    from triton.compiler import ASTSource

    from torch_backend.ops.attention import triton_kernels

    kernel = getattr(triton_kernels, name)
    kv_heads = 4
    heads = kv_heads * group
    tensors = dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), f"*{dtype}")
    tensors |= dict.fromkeys(("lse", "stats"), "*fp32") | dict.fromkeys(("work", "begins", "ends"), "*i32")
    numbers = {"tokens": "i32", "scale": "fp32", "softcap": "fp32", "window": "i32"}
    strides = {"Q": heads * width, "K": kv_heads * width, "V": kv_heads * value_width, "DO": heads * value_width}
    constants: dict[str, Any] = {f"{x}_T": stride for x, stride in strides.items()}
    constants |= {"Q_H": width, "K_H": width, "V_H": value_width, "DO_H": value_width}
    constants |= {"HEADS": heads, "GROUP": group, "HEAD_DIM": width, "VALUE_DIM": value_width, "CAUSAL": True}
    constants |= dict.fromkeys(("WINDOW", "SOFTCAP", "SINKS", "ALIBI", "FOREST"), False) | {"SPANS": spans}
    constants |= {"BLOCK_D": 1 << (width - 1).bit_length(), "BLOCK_E": 1 << (value_width - 1).bit_length()}
    constants |= {"BLOCK_M": rows, "BLOCK_N": keys} | dict.fromkeys(("sinks", "slopes", "parts"))
    constants |= {} if spans else dict.fromkeys(("begins", "ends"))
    names = list(kernel.arg_names)
    types = {n: kind for n, kind in (tensors | numbers).items() if n not in constants}
    signature = {n: types.get(n, "constexpr") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    return ASTSource(kernel, signature, {(names.index(n),): x for n, x in constants.items() if n in names}, aligned)


def experts_source(name: str, rank: int, m: int, n: int, k: int, parts: int) -> Any:
    """A product of 128 experts of 2,048 x 768 with gates and adapters, bfloat16."""
    from triton.compiler import ASTSource

    from torch_backend.ops.experts import product_kernels

    kernel = getattr(product_kernels, name)
    tensors = dict.fromkeys(("a", "x", "dy", "w", "t", "b", "y", "z", "h", "dz", "weights", "weighted"), "*bf16")
    tensors |= dict.fromkeys(("order", "offsets"), "*i32") | {"shares": "*fp32"}
    numbers = {"tiles": "i32"} | dict.fromkeys(("scale", "alpha", "limit", "offset"), "fp32")
    strides = dict.fromkeys(("w_e", "w_n", "w_k", "b_e", "b_n", "b_r"), "i32")
    constants: dict[str, Any] = {"w_k": 1, "b_r": 1, "bias": None, "BIAS": False, "GATHER": False, "LIMIT": False}
    constants |= {"N": 2_048, "INNER": 768, "K": 768 if name == "rows" else 2_048, "R": rank, "TOP_K": 8}
    constants |= {"EXPERTS": 128, "PADDED": 128, "NAME": "silu", "GATED": True, "INTERLEAVED": False, "PARTS": parts}
    constants |= {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "BLOCK_R": rank, "GROUP": 8, "PRECISION": "ieee"}
    names = list(kernel.arg_names)
    kinds = tensors | numbers | strides
    signature = {n: "constexpr" if n in constants else kinds[n] for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*" or signature[n] == "i32"
    }
    return ASTSource(kernel, signature, {(names.index(n),): x for n, x in constants.items() if n in names}, aligned)


def launched(name: str, given: dict[str, Any]) -> Any:
    """A kernel of attention with the arguments of a launch: kinds of tensors, numbers, constants."""
    from triton.compiler import ASTSource

    from torch_backend.ops.attention import triton_kernels

    kernel = getattr(triton_kernels, name)
    constants = {p.name: given[p.name] for p in kernel.params if p.is_constexpr or given[p.name] is None}
    numbers = {int: "i32", float: "fp32"}
    signature = {
        n: "constexpr" if n in constants else numbers.get(type(x), x)
        for n, x in ((n, given[n]) for n in kernel.arg_names)
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if signature[n].startswith("*")}
    return ASTSource(kernel, signature, {(kernel.arg_names.index(n),): x for n, x in constants.items()}, aligned)


def shared(cases: list[list[Any]], capability: int) -> list[int]:
    """Bytes of shared memory of each compiled case; runs in a process whose kernels are not interpreted."""
    import triton
    from triton.backends.compiler import GPUTarget

    found = []
    for make, arguments, warps, stages, registers in cases:
        options = {"num_warps": warps, "num_stages": stages} | ({"maxnreg": registers} if registers else {})
        made = globals()[make](*arguments)
        found.append(triton.compile(made, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared)
    return found


def compiled(cases: list[list[Any]], capability: int = 90) -> list[int]:
    """As :func:`shared`, in a process of its own."""
    pytest.importorskip("triton.backends.nvidia")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.torch_backend.test_triton_compiled", json.dumps(cases), str(capability)]
    done = run(command, env=environment, limit=600)
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("tiles", "most"), [(_LARGE, HOPPER), (_SMALL, CONSUMER)], ids=["H100", "consumer cards"])
def test_tiles_of_512_channels_fit_the_shared_memory(tiles: Any, most: int) -> None:
    shapes = ((512, 512, 8, False), (512, 256, 8, False), (512, 512, 8, True))
    cases = []
    for (*shape, spans), (name, tile) in product(shapes, zip(KERNELS, tiles[512], strict=True)):
        rows, keys, *options = tile
        cases.append(["source", [name, *shape, rows, keys, spans], *options])
    found = compiled(cases)
    assert len(found) == 9 and max(found) <= most


def tiles_on(memory: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> KernelTiles:
    """The tiles for a request on a device that has so much shared memory."""
    monkeypatch.setattr(triton, "shared_memory", lambda device: memory)
    return choose_tiles(replace(REQUEST, **changes))


def test_tiles_follow_the_shared_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    half = {"dtype": torch.float16, "head_dim": 128, "value_dim": 128}
    chosen = [tiles_on(memory, monkeypatch, **half) for memory in (HOPPER, CONSUMER, TURING, 0)]
    assert chosen == [_LARGE[128], _SMALL[128], _TURING[128], _SMALL[128]]
    assert tiles_on(TURING, monkeypatch, **half | {"dtype": torch.float32}).keys == Tile(32, 16, 4, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "width"), [("fp16", 64), ("fp16", 128), ("fp16", 256), ("fp32", 128)])
def test_tiles_of_a_t4_fit_its_shared_memory(dtype: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = torch.float16 if dtype == "fp16" else torch.float32
    chosen = tiles_on(TURING, monkeypatch, dtype=kind, head_dim=width, value_dim=width, heads=16, kv_heads=4)
    cases = []
    for name, (rows, keys, *options) in zip(KERNELS, chosen, strict=True):
        cases.append(["source", [name, width, width, 4, rows, keys, False, dtype], *options])
    found = compiled(cases, 75)
    assert len(found) == 3 and max(found) <= TURING


def test_bfloat16_runs_by_plain_torch_on_a_t4_and_float16_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the functions that ask see it: a tensor of a GPU, by its dtype and its device."""
    monkeypatch.setattr(operators, "TRITON", True)

    def runs(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        tensor = SimpleNamespace(dtype=dtype, device=torch.device("cuda", 0), is_cuda=True)
        return operators.runs_triton(tensor)

    assert [runs(torch.bfloat16, at) for at in ((7, 5), (8, 0), (9, 0))] == [False, True, True]
    assert [runs(dtype, (7, 5)) for dtype in (torch.float16, torch.float32)] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [16, 64])
def test_tiles_of_experts_with_adapters_fit_the_shared_memory(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "shared_memory", lambda device: HOPPER)
    monkeypatch.setattr(operators, "INTERPRETED", False)
    places = Places(torch.empty(32_768), torch.empty(4_096, 8), torch.empty(129), torch.empty(4_096, 8))
    like, cases = torch.empty(0, dtype=torch.bfloat16), []
    for name, table, columns in (
        ("rows", experts.ROWS, 1),
        ("up", experts.GATED, 2),
        ("down_backward", experts.BACKWARD, 1),
    ):
        tile = experts._tile(table, places, like, columns=columns, rank=rank)
        cases.append(["experts_source", [name, rank, tile.m, tile.n, tile.k, tile.parts], tile.warps, tile.stages, 0])
    found = compiled(cases)
    assert len(found) == 3 and max(found) <= HOPPER


if __name__ == "__main__":
    print(json.dumps(shared(json.loads(sys.argv[1]), int(sys.argv[2]))))
