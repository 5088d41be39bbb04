"""Tries how the kernels of scans should divide their work on this GPU: one JSON line per kernel and tile.

    python -m benchmarks.gpu_scan_tiles                   # the gated delta rule, 16/32 heads of 128
    python -m benchmarks.gpu_scan_tiles --kernels carry carry_backward --budget 120
    python -m benchmarks.gpu_scan_tiles --shape ssd       # Mamba-2 2.7B; kimi, selective
    python -m benchmarks.gpu_scan_tiles --kernels         # no tile but those of the table, and the time of each kernel

Milliseconds of the operators that the kernel is part of, forward and backward, on one document of 8,192 tokens and on
16,384 tokens of mean 240, with every other kernel as ``TILES`` of its module says. A tile whose results differ from
those of the table has no figures. Without a GPU everything runs tiny, and times mean nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import header
from benchmarks.gpu_clock import DEVICE, TOY, device_ms, gated, relative_error, set_budget
from benchmarks.gpu_scan import drawn_delta, drawn_kimi, drawn_selective, drawn_ssd, sets
from torch_backend.ops.scan.chunks import FEW, KIMI_TILES
from torch_backend.ops.scan.gated_delta import operators as delta
from torch_backend.ops.scan.kimi_delta import operators as kimi_delta
from torch_backend.ops.scan.linear_attention import wide as linear
from torch_backend.ops.scan.selective import operators as selective
from torch_backend.segments import PackedMetadata


def _drawn_selective(tokens: int) -> list[Tensor]:
    b, c, x, dt, rates = drawn_selective(tokens)
    return [dt * x, dt, rates, b, c]


_WALKS = [(16, 4, 2), (32, 2, 3), (32, 4, 1), (32, 4, 2), (64, 4, 1), (64, 4, 2), (64, 4, 3)]
_OVER_CHUNKS = [(64, 4, 1), (64, 4, 2), (128, 4, 1), (128, 4, 2)]
CANDIDATES: dict[str, list[tuple[int, ...]]] = {
    "prepare": [(32, 2, 1), (64, 1, 1), (64, 2, 1), (64, 4, 1)],
    "carry": _WALKS,
    "restore": _WALKS,
    "output": [(64, 4, 1), (128, 4, 1)],
    "scores_backward": _OVER_CHUNKS,
    "query_backward": _OVER_CHUNKS,
    "carry_backward": _WALKS,
    "solve_backward": _OVER_CHUNKS,
    "key_backward": _OVER_CHUNKS,
    "gates_backward": [(0, 1, 1), (0, 4, 1)],
}
KIMI_CANDIDATES: dict[str, list[tuple[int, ...]]] = {
    "decay": [(0, 4, 1), (0, 8, 1)],
    "score": [(0, 2, 1), (0, 4, 1), (0, 8, 1)],
    "solve": [(0, 1, 1), (0, 2, 1)],
    "carry": [(16, 2, 2), (16, 4, 2), (32, 2, 2), (32, 4, 2), (32, 4, 3)],
    "output": [(64, 4, 1), (128, 4, 1), (128, 8, 1)],
    "carry_backward": [(16, 2, 2), (16, 4, 2), (32, 4, 1), (32, 4, 2)],
    "chunk_backward": [(16, 8, 1), (32, 4, 1), (32, 8, 1), (64, 8, 1)],
}
# Warps, and the stages of loads.
LINEAR_CANDIDATES: dict[str, list[tuple[int, ...]]] = {
    "ends": [(4, 1), (4, 2), (4, 3)],
    "states": [(4, 1), (4, 2), (4, 3)],
    "output": [(4, 1), (4, 2), (8, 2)],
    "values_backward": [(4, 1), (4, 2), (8, 1)],
    "queries_backward": [(4, 1), (4, 2), (4, 3), (8, 2)],
    "keys_backward": [(4, 1), (4, 2), (4, 3), (8, 2)],
}
# Warps, and tokens whose loads are on the way at once.
SELECTIVE_CANDIDATES: dict[str, list[tuple[int, ...]]] = {
    "ends": [(1, 4), (1, 8), (2, 8), (4, 8), (1, 16)],
    "output": [(1, 4), (1, 8), (2, 8), (4, 8)],
    "ends_backward": [(1, 4), (1, 8), (2, 8), (4, 8)],
    "chunk_backward": [(1, 2), (1, 4), (2, 4), (4, 4), (1, 8)],
}
# Of a shape: its module, what it is drawn by, its tiles and what they could be.
SHAPES: dict[str, tuple[Any, Callable[[int], list[Tensor]], dict[str, Any], dict[str, list[tuple[int, ...]]]]] = {
    "delta": (delta, drawn_delta, delta.TILES, CANDIDATES),
    "ssd": (linear, drawn_ssd, linear.TILES, LINEAR_CANDIDATES),
    "kimi": (kimi_delta, drawn_kimi, KIMI_TILES, KIMI_CANDIDATES),
    "selective": (selective, _drawn_selective, selective.TILES, SELECTIVE_CANDIDATES),
}
LIMIT = 1e-2  # in norm, between two tiles


def run(shape: str, kernels: list[str]) -> None:
    chosen = list(sets().values())
    cases = {len(x): _calls(shape, x) for x in (chosen[0], chosen[-1])}
    right = {name: _results(calls) for name, calls in cases.items()}
    for name, calls in cases.items():
        print(json.dumps({"documents": name, "milliseconds": _by_kernel(calls)}), flush=True)
    print(json.dumps({"kernel": "as in the table", **_measured(cases)}), flush=True)
    _, _, tiles, candidates = SHAPES[shape]
    for kernel in kernels:
        usual = tiles[kernel]
        few = [(table, table.pop(kernel)) for table in (FEW, delta.FEW) if kernel in table]
        for candidate in candidates[kernel]:
            tiles[kernel] = type(usual)(*candidate)
            figures, note = gated(partial(_error, cases, right), LIMIT, partial(_measured, cases))
            print(json.dumps({"kernel": kernel, "tile": candidate, **figures, "note": note}), flush=True)
        tiles[kernel] = usual
        for table, tile in few:
            table[kernel] = tile


def _calls(shape: str, documents: list[int]) -> tuple[Any, Any]:
    """The forward operator and the backward operator on the same inputs."""
    module, drawn, _, _ = SHAPES[shape]
    inputs = [x.to(DEVICE) for x in drawn(sum(documents))]
    of_v = inputs[0 if shape == "selective" else 2]
    given = [*inputs, *([None, None] if shape == "ssd" else [None])]  # no beta, no initial states
    packed = PackedMetadata.from_lengths(documents, device=DEVICE)
    given += [packed.cu_seqlens, packed.seq_idx]
    scale = [] if shape == "selective" else [0.1]
    dout = torch.randn(of_v.shape, generator=torch.Generator().manual_seed(9)).to(of_v)
    ahead = partial(module._forward, *given, *scale)
    _, *kept, final = ahead()
    return ahead, partial(module._backward, *given, *kept, dout, final, *scale)


def _by_kernel(calls: tuple[Any, Any]) -> dict[str, float]:
    """Milliseconds of every kernel of forward and backward, without those of torch below a hundredth."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        for call in calls:
            call()
        if not TOY:
            torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name[:60]] = found.get(event.name[:60], 0.0) + event.time_range.elapsed_us() / 1e3
    return {name: round(ms, 3) for name, ms in found.items() if ms >= 0.01}


def _results(calls: tuple[Any, Any]) -> list[Tensor]:
    """The output, and the gradients; what is kept for the backward may hold unwritten memory."""
    ahead, behind = calls
    return [x for x in (ahead()[0], *behind()) if x.numel()]


def _error(cases: dict[int, tuple[Any, Any]], right: dict[int, list[Tensor]]) -> float:
    return max(
        relative_error(found, wanted)
        for name, calls in cases.items()
        for found, wanted in zip(_results(calls), right[name], strict=True)
    )


def _measured(cases: dict[int, tuple[Any, Any]]) -> dict[str, float]:
    return {
        f"{kind}, {documents} documents": round(device_ms(call), 4)
        for documents, calls in cases.items()
        for kind, call in zip(("forward", "backward"), calls, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="delta")
    parser.add_argument("--kernels", nargs="*", help="all by default; none without a name")
    parser.add_argument("--budget", type=float, help="seconds after which nothing new is begun")
    options = parser.parse_args()
    if options.budget:
        set_budget(options.budget)
    if not TOY:
        print(header(), flush=True)
    run(options.shape, list(SHAPES[options.shape][3]) if options.kernels is None else options.kernels)


if __name__ == "__main__":
    main()
