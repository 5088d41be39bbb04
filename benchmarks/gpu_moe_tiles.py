"""The products of a layer of experts by tile: what the static tables of ``torch_backend.ops.experts.triton`` rest on.

    python -m benchmarks.gpu_moe_tiles                          # every shape at 8,192 tokens, bfloat16
    python -m benchmarks.gpu_moe_tiles --shapes Qwen3 --tokens 1024

Each product runs with each candidate of its table, beside torch's ``grouped_mm`` on rows that were gathered before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import as_table, header, survived
from benchmarks.gpu_clock import DEVICE, Result, graph_ms, matrix_rate
from benchmarks.gpu_moe_shapes import SHAPES, Experts
from benchmarks.gpu_workload import DTYPE
from packing_core.reference import ExpertActivation
from torch_backend.ops.experts import triton as kernels
from torch_backend.ops.experts.products import Between, ExpertProduct
from torch_backend.ops.experts.triton import TileSize

Run = Callable[[], Any]

WIDE = [
    TileSize(64, 128, 64, 4, 4), TileSize(64, 256, 64, 8, 3), TileSize(128, 128, 64, 8, 3),
    TileSize(128, 128, 64, 4, 4), TileSize(128, 256, 64, 8, 3), TileSize(128, 256, 64, 8, 4),
]  # fmt: skip
GATED = [
    TileSize(64, 64, 64, 4, 4), TileSize(64, 128, 64, 4, 3), TileSize(64, 128, 64, 8, 3), TileSize(128, 64, 64, 4, 4),
    TileSize(128, 128, 64, 8, 3), TileSize(128, 128, 64, 8, 4),
]  # fmt: skip
BACKWARD = [
    TileSize(64, 64, 64, 4, 4), TileSize(64, 128, 64, 8, 3), TileSize(128, 64, 64, 4, 4), TileSize(128, 64, 64, 8, 4),
    TileSize(128, 128, 64, 8, 3),
]  # fmt: skip
OUTER = [
    TileSize(128, 128, 32, 8, 3), TileSize(128, 128, 64, 8, 3), TileSize(128, 256, 64, 8, 3),
    TileSize(128, 128, 64, 4, 4), TileSize(128, 256, 32, 8, 4),
]  # fmt: skip


def sweep(shapes: Sequence[Experts], tokens: int) -> Iterator[Result]:
    for shape in shapes:
        yield from _of_shape(shape, tokens)


def _of_shape(shape: Experts, tokens: int) -> Iterator[Result]:
    d, i = shape.width, shape.inner
    torch.manual_seed(0)

    def random(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(sizes, device=DEVICE) * scale).to(DTYPE)

    up, down = random(shape.experts, 2 * i, d, scale=d**-0.5), random(shape.experts, d, i, scale=i**-0.5)
    scores = torch.randn(tokens, shape.experts, device=DEVICE).softmax(-1)
    weights, indices = scores.topk(shape.top_k)
    x, dy, weights = random(tokens, d), random(tokens, d), weights.to(DTYPE)
    steps, between = kernels.TRITON_EXPERTS, Between(ExpertActivation())
    routing = steps.route(indices, shape.experts)
    z, h = steps.up(x, ExpertProduct(up), routing, between)
    pairs, label = tokens * shape.top_k, f"{shape.name}, {tokens * shape.top_k // shape.experts} per expert"
    gathered = kernels.gathered(x, routing)

    def library(a: Tensor, w: Tensor, routing: Any = routing) -> Run:
        return lambda: torch._grouped_mm(a, w, offs=routing.offsets[1:])

    products: dict[str, tuple[str, list[TileSize], Run, Run, float]] = {
        "up": (
            "GATED", GATED,
            lambda: steps.up(x, ExpertProduct(up), routing, between),
            library(gathered, up.mT), 4 * d * i * pairs,
        ),
        "down": (
            "ROWS", WIDE, lambda: steps.rows(h, ExpertProduct(down), routing),
            library(h, down.mT), 2 * d * i * pairs,
        ),
        "down backward": (
            "BACKWARD", BACKWARD,
            lambda: steps.down_backward(dy, ExpertProduct(down.mT), z, weights, routing, between),
            library(gathered, down), 2 * d * i * pairs,
        ),
        "dx": ("ROWS", WIDE, lambda: steps.rows(z, ExpertProduct(up.mT), routing), library(z, up), 4 * d * i * pairs),
        "d up": (
            "OUTER", OUTER, lambda: steps.outer(z, x, routing, up, gather_b=True),
            library(z.t(), gathered), 4 * d * i * pairs,
        ),
    }  # fmt: skip
    for product, (name, tiles, run, other, operations) in products.items():
        case = f"{label}, {product}"
        yield _result(case, "grouped_mm", other, operations)
        kept = getattr(kernels, name)
        for tile in tiles:
            setattr(kernels, name, ((2**62, tile),))
            try:
                yield _result(case, str(tuple(tile)), run, operations)
            except Exception as failure:  # a tile that does not fit is a line in the table
                yield Result("tiles", case, str(tuple(tile)), None, "ms", str(failure).splitlines()[0][:100])
            finally:
                setattr(kernels, name, kept)
    for part, run in {
        "route": lambda: steps.route(indices, shape.experts),
        "combine": lambda: steps.combine(gathered, routing, weights),
        "gather": lambda: kernels.gathered(x, routing),
        "torch.sort": lambda: indices.flatten().sort(stable=True),
    }.items():
        yield Result("tiles", label, part, graph_ms(run), "ms")


def _result(case: str, name: str, run: Run, operations: float) -> Result:
    ms = graph_ms(run)
    rate = operations / ms * 1e3
    return Result("tiles", case, name, ms, "ms", f"{rate / 1e12:.0f} TFLOP/s, {100 * rate / matrix_rate():.0f}%")


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shapes", nargs="+", default=[""], help="shapes whose name begins so")
    options.add_argument("--tokens", type=int, default=8_192)
    chosen = options.parse_args(arguments)
    print(header(), flush=True)
    shapes = [shape for shape in SHAPES if shape.name.startswith(tuple(chosen.shapes))]
    print(as_table(list(survived("tiles", sweep(shapes, chosen.tokens)))))


if __name__ == "__main__":
    main()
