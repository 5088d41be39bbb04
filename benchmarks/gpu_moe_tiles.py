"""The operations of a layer of experts by tile: what the static tables of ``torch_backend.ops.experts.triton`` rest on.

    python -m benchmarks.gpu_moe_tiles                            # both cases below, within about a minute on an H100
    python -m benchmarks.gpu_moe_tiles --case lora --only NARROW  # one case, and one table
    python -m benchmarks.gpu_moe_tiles --case layer --shapes gpt --tokens 8192 --budget 60

- ``lora``: the layer with adapters of rank 16 of ``benchmarks.gpu_moe``, 4,096 tokens, whose own weights are frozen.
- ``layer``: the layer of a shape, trained in full, at ``--tokens``; 8,192 of Qwen3-30B-A3B are 512 per expert.

Each operation runs with each candidate of its table, in a CUDA graph with a flushed cache, beside torch's grouped
product on rows in order, and the fastest is named. Several processes compile the kernels beforehand (``--workers``).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import collected, parsed, parser, survived
from benchmarks.gpu_clock import DEVICE, TOY, Result, ending_within, graph_ms, matrix_rate, seconds_left, synchronize
from benchmarks.gpu_moe_shapes import PEFT, SHAPES, Experts
from benchmarks.gpu_workload import DTYPE
from packing_core.reference import ExpertActivation
from torch_backend.ops.experts import triton as kernels
from torch_backend.ops.experts.products import Between, ByToken, ExpertProduct, LowRank
from torch_backend.ops.experts.triton import TileSize

RANK = 16
TABLES = {
    "ROWS": [
        TileSize(128, 256, 64, 8, 4), TileSize(128, 256, 64, 8, 3), TileSize(128, 128, 64, 4, 3),
        TileSize(128, 256, 128, 8, 2), TileSize(64, 256, 64, 4, 3), TileSize(64, 256, 64, 8, 3),
    ],
    "GATED": [
        TileSize(128, 128, 64, 8, 4), TileSize(128, 128, 64, 8, 3), TileSize(128, 64, 64, 4, 3),
        TileSize(64, 128, 64, 4, 3), TileSize(64, 128, 64, 8, 3), TileSize(128, 128, 128, 8, 2),
    ],
    "BACKWARD": [
        TileSize(64, 64, 64, 4, 4), TileSize(128, 64, 64, 8, 4), TileSize(128, 64, 64, 4, 4),
        TileSize(64, 128, 64, 4, 3, 2), TileSize(128, 128, 64, 8, 3, 2), TileSize(64, 256, 64, 8, 3, 2),
    ],
    "ACTIVATION": [
        TileSize(64, 64, 64, 4, 1), TileSize(32, 128, 64, 4, 1), TileSize(128, 64, 64, 8, 1),
        TileSize(32, 64, 64, 4, 1), TileSize(16, 128, 64, 4, 1),
    ],
    "NARROW": [
        TileSize(128, 64, 64, 8, 4), TileSize(128, 64, 64, 4, 4), TileSize(64, 64, 64, 4, 4),
        TileSize(64, 64, 128, 4, 4), TileSize(128, 64, 128, 4, 3), TileSize(32, 64, 128, 4, 4),
    ],
    "OUTER": [
        TileSize(128, 128, 64, 4, 4), TileSize(128, 128, 64, 4, 3), TileSize(128, 128, 64, 8, 3),
        TileSize(128, 256, 64, 8, 3),
        TileSize(128, 128, 64, 4, 5),  # where lines are gathered, the stage that reads their numbers holds no tile
    ],
    "NARROW_OUTER": [
        TileSize(128, 128, 64, 4, 4), TileSize(256, 256, 64, 4, 3), TileSize(128, 128, 32, 4, 4),
        TileSize(64, 64, 64, 4, 4), TileSize(128, 128, 128, 4, 2),
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """One operation of a layer.

    Attributes:
        table: whose tile it takes; None for what has none.
        run: the operation.
        flops: of its products.
        library: the product by torch's ``grouped_mm``, of rows in order.
    """

    table: str | None
    run: Callable[[], Any]
    flops: float = 0.0
    library: Callable[[], Any] | None = None


def operations(shape: Experts, tokens: int, lora: bool) -> dict[str, Operation]:
    """The operations of one layer by name, on random tokens."""
    d, i, count, places = shape.width, shape.inner, shape.experts, tokens * shape.top_k
    torch.manual_seed(0)

    def random(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(sizes, device=DEVICE) * scale).to(DTYPE)

    up, down = random(count, 2 * i, d, scale=d**-0.5), random(count, d, i, scale=i**-0.5)
    scores = torch.randn(tokens, count, device=DEVICE).softmax(-1)
    weights, indices = scores.topk(shape.top_k)
    x, out, weights = ByToken(random(tokens, d)), ByToken(random(tokens, d)), weights.to(DTYPE)
    steps, between = kernels.TRITON_EXPERTS, Between(ExpertActivation())
    routing = steps.route(indices, count)
    z, h, y = random(places, 2 * i), random(places, i), kernels.gathered(x.x, routing)
    low = {} if not lora else {
        "up_a": random(count, RANK, d), "up_b": random(count, 2 * i, RANK),
        "down_a": random(count, RANK, i), "down_b": random(count, d, RANK),
    }  # fmt: skip
    t = random(places, RANK)

    def adapter(name: str, transposed: bool = False) -> LowRank | None:
        if not lora:
            return None
        return LowRank(t, low[name].mT if transposed else low[name])

    def grouped(a: Tensor, w: Tensor) -> Callable[[], Any]:
        return lambda: torch._grouped_mm(a, w, offs=routing.offsets[1:])

    whole, half = 4.0 * d * i * places, 2.0 * d * i * places
    of_down = ExpertProduct(down.mT, adapter=adapter("down_a", transposed=True))
    found = {
        "up": Operation(
            "GATED", lambda: steps.up(x, ExpertProduct(up, adapter=adapter("up_b")), routing, between), whole,
            grouped(y, up.mT),
        ),
        "down": Operation(
            "ROWS", lambda: steps.rows(h, ExpertProduct(down, adapter=adapter("down_b")), routing), half,
            grouped(h, down.mT),
        ),
        "down backward": Operation(
            "BACKWARD", lambda: steps.down_backward(out, of_down, z, weights, routing, between), half,
            grouped(y, down),
        ),
        "activation backward": Operation(
            "ACTIVATION",
            lambda: steps.activation_backward(out, of_down, z, h, weights, routing, between, multiply=False),
        ),
        "dx": Operation(
            "ROWS",
            lambda: steps.rows(z, ExpertProduct(up.mT, adapter=adapter("up_a", transposed=True)), routing), whole,
            grouped(z, up),
        ),
    }  # fmt: skip
    if not lora:
        found |= {
            "d up": Operation("OUTER", lambda: steps.outer(z, x, routing, up), whole, grouped(z.t(), y)),
            "d down": Operation("OUTER", lambda: steps.outer(out, h, routing, down), half, grouped(y.t(), h)),
            "activation": Operation(None, lambda: kernels.activate(z, None, routing, between)),
        }
    else:
        for name, a, by in (
            ("t = x A", x, low["up_a"]), ("u = h A", h, low["down_a"]),
            ("du = dy B", out, low["down_b"].mT), ("dt = dz B", z, low["up_b"].mT),
        ):  # fmt: skip
            found[name] = Operation("NARROW", lambda a=a, by=by: steps.rows(a, ExpertProduct(by), routing))
        for name, a, b, like, by in (
            ("d up A", t, x, "up_a", None), ("d up B", z, t, "up_b", None),
            ("d down A", t, h, "down_a", None), ("d down B", out, t, "down_b", weights),
        ):  # fmt: skip
            found[name] = Operation(
                "NARROW_OUTER",
                lambda a=a, b=b, like=like, by=by: steps.outer(a, b, routing, low[like], weights=by),
            )
    return found | {
        "route": Operation(None, lambda: steps.route(indices, count)),
        "gather": Operation(None, lambda: kernels.gathered(x.x, routing)),
        "combine": Operation(None, lambda: steps.combine(y, routing, weights)),
    }


def sweep(case: str, found: dict[str, Operation], tables: Sequence[str]) -> Iterator[Result]:
    """Every operation with every candidate of its table; the note names the fastest."""
    for name, operation in found.items():
        if operation.table is None:
            yield _result(case, name, "no tile", operation.run, 0.0)
            continue
        if operation.table not in tables:
            continue
        if operation.library is not None:
            yield _result(case, name, "grouped_mm", operation.library, operation.flops)
        best: dict[TileSize, float] = {}
        for tile in TABLES[operation.table]:
            if seconds_left() < 0:
                yield Result(case, name, str(tuple(tile)), None, "ms", "out of time")
                continue
            try:
                with_tile = _with_tile(operation.table, tile, operation.run)
                result = _result(case, name, str(tuple(tile)), with_tile, operation.flops)
                best[tile] = result.value or 0.0
            except Exception as failure:  # a tile that does not fit is a line in the table
                result = Result(case, name, str(tuple(tile)), None, "ms", str(failure).splitlines()[0][:100])
            yield result
        if best:
            fastest = min(best, key=lambda tile: best[tile])
            yield Result(case, name, "fastest", best[fastest], "ms", f"{operation.table} {tuple(fastest)}")


def _with_tile(table: str, tile: TileSize, run: Callable[[], Any]) -> Callable[[], Any]:
    def call() -> Any:
        kept = getattr(kernels, table)
        setattr(kernels, table, ((2**62, tile),))
        try:
            return run()
        finally:
            setattr(kernels, table, kept)

    return call


def _result(case: str, operation: str, name: str, run: Callable[[], Any], flops: float) -> Result:
    ms = graph_ms(run)
    rate = flops / ms * 1e3
    note = f"{rate / 1e12:.0f} TFLOP/s, {100 * rate / matrix_rate():.0f}%" if flops else ""
    return Result(case, operation, name, ms, "ms", note)


def compile_part(found: dict[str, Operation], tables: Sequence[str], part: int, parts: int) -> None:
    """Run every so many candidates once, which leaves their kernels in Triton's cache."""
    candidates = [
        (operation, tile)
        for operation in found.values()
        if operation.table in tables
        for tile in TABLES[operation.table or ""]
    ]
    for operation, tile in candidates[part::parts]:
        try:
            _with_tile(operation.table or "", tile, operation.run)()
            synchronize()
        except Exception as failure:
            print(f"{operation.table} {tuple(tile)}: {failure}"[:200], file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__)
    options.add_argument("--case", nargs="+", choices=("lora", "layer"), default=["lora", "layer"])
    options.add_argument("--shapes", default="Qwen3-30B", help="the shape of the layer, whose name begins so")
    options.add_argument("--tokens", type=int, default=64 if TOY else 8_192, help="of the layer")
    options.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), help="tables")
    options.add_argument("--workers", type=int, default=0 if TOY else 8, help="processes that compile beforehand")
    options.add_argument("--part", type=int, nargs=2, help="compile one of so many parts, and measure nothing")
    chosen = parsed(options, arguments)
    cases: dict[str, tuple[Experts, int, bool]] = {}
    if "lora" in chosen.case:
        cases[f"{PEFT.name}, rank {RANK}"] = PEFT, 64 if TOY else 4_096, True
    for shape in (s for s in SHAPES if "layer" in chosen.case and s.name.startswith(chosen.shapes)):
        cases[f"{shape.name}, {chosen.tokens * shape.top_k // shape.experts} per expert"] = shape, chosen.tokens, False
    if chosen.part:
        for shape, tokens, lora in cases.values():
            compile_part(operations(shape, tokens, lora), chosen.only, *chosen.part)
        return []
    with ending_within(chosen.budget):
        command = [sys.executable, "-m", "benchmarks.gpu_moe_tiles", "--case", *chosen.case, "--only", *chosen.only]
        command += ["--shapes", chosen.shapes, "--tokens", str(chosen.tokens), "--part"]
        workers = [
            subprocess.Popen([*command, str(part), str(chosen.workers)]) for part in range(chosen.workers)
        ]  # fmt: skip
        for worker in workers:
            worker.wait()
        swept = (
            result
            for case, (shape, tokens, lora) in cases.items()
            for result in survived(case, sweep(case, operations(shape, tokens, lora), chosen.only))
        )
        return collected(swept, chosen.output, "tiles")


if __name__ == "__main__":
    main()
