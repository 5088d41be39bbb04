"""The attention kernels compiled for an H100 without one: the tiles of wide heads fit its shared memory."""

from __future__ import annotations

import json
import os
import sys
from itertools import product
from typing import Any

import pytest

from tests.processes import run
from torch_backend.ops.attention.triton import _LARGE, _SMALL

HOPPER, CONSUMER = 227 * 1024, 99 * 1024  # bytes that one program can have
KERNELS = ("forward", "backward_queries", "backward_keys")


def source(name: str, width: int, value_width: int, group: int, rows: int, keys: int, *, spans: bool) -> Any:
    """A kernel with bfloat16 inputs of contiguous heads, causal, of spans that see both ways or not."""
    from triton.compiler import ASTSource

    from torch_backend.ops.attention import triton_kernels

    kernel = getattr(triton_kernels, name)
    kv_heads = 4
    heads = kv_heads * group
    tensors = dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), "*bf16")
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


def shared(cases: list[list[Any]]) -> list[int]:
    """Bytes of shared memory of each compiled case; runs in a process whose kernels are not interpreted."""
    import triton
    from triton.backends.compiler import GPUTarget

    found = []
    for name, width, value_width, group, spans, (rows, keys, warps, stages, registers) in cases:
        options = {"num_warps": warps, "num_stages": stages} | ({"maxnreg": registers} if registers else {})
        made = source(name, width, value_width, group, rows, keys, spans=spans)
        found.append(triton.compile(made, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("tiles", "most"), [(_LARGE, HOPPER), (_SMALL, CONSUMER)], ids=["H100", "consumer cards"])
def test_tiles_of_512_channels_fit_the_shared_memory(tiles: Any, most: int) -> None:
    pytest.importorskip("triton.backends.nvidia")
    shapes = ((512, 512, 8, False), (512, 256, 8, False), (512, 512, 8, True))
    cases = [
        [name, *shape, list(tile)] for shape, (name, tile) in product(shapes, zip(KERNELS, tiles[512], strict=True))
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.torch_backend.test_triton_compiled", json.dumps(cases)]
    done = run(command, env=environment, limit=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 9 and max(found) <= most


if __name__ == "__main__":
    print(json.dumps(shared(json.loads(sys.argv[1]))))
