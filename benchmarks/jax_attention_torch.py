"""torch's packed attention kernels on the sets of `jax_rows`, measured as `jax_attention` measures: its ``--torch``.

Prints the results as one line of JSON. Runs in a process without a JAX backend, so that the GPU is torch's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks._report import fastest, not_run
from benchmarks.jax_attention import Result
from benchmarks.jax_rows import GATE, SETS, TOY, Documents, Row, gate
from torch_backend import PackedMetadata, attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def measure(name: str, documents: Documents, implementation: str, rounds: int) -> Result:
    result = Result(name, f"torch, {implementation}")
    heads, kv_heads = documents.heads, documents.kv_heads
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, k, v, dout = (
        torch.randn(
            sum(documents.lengths), n, documents.width, dtype=torch.bfloat16, device=DEVICE, generator=generator
        )
        for n in (heads, kv_heads, kv_heads, heads)
    )
    for x in (q, k, v):
        x.requires_grad_()
    packed = PackedMetadata.from_lengths(documents.lengths, device=DEVICE)

    def both() -> tuple[torch.Tensor, ...]:
        out = attention(q, k, v, packed, implementation=implementation)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attention(q, k, v, packed, implementation=implementation)

    row = Row(tuple(documents.lengths), *map(_on_host, (q, k, v, dout)))
    try:
        result.error = gate(row, tuple(map(_on_host, both())))
        if not result.error <= GATE:
            result.status = f"WRONG: relative error {result.error:.2g}"
            return result
        result.forward_ms, result.both_ms = (fastest(x, rounds, _wait) for x in (forward, both))
    except Exception as error:  # a line in the table
        result.status = not_run(error)
        return result
    result.forward_tflops = row.flops / result.forward_ms / 1e9
    result.both_tflops = 3.5 * row.flops / result.both_ms / 1e9
    return result


def _wait(_: Any) -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _on_host(x: torch.Tensor) -> Any:
    return x.detach().float().cpu().numpy()[None]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args(arguments)
    known = TOY if options.toy else SETS
    implementation = "sdpa" if DEVICE == "cpu" else "triton"
    results = [measure(name, known[name], implementation, options.rounds) for name in options.sets]
    print(json.dumps([asdict(result) for result in results]))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
