"""How the kernels of scans should divide their work on this GPU: one JSON line per kernel and tile.

    python -m benchmarks.gpu_scan_tiles                   # the gated delta rule, 16/32 heads of 128
    python -m benchmarks.gpu_scan_tiles --kernels carry carry_backward --budget 120
    python -m benchmarks.gpu_scan_tiles --shape ssd       # Mamba-2 2.7B

Milliseconds of the operators that the kernel is part of, forward and backward, on one document of 8,192 tokens and on
16,384 tokens of mean 240, with every other kernel as ``chunks.TILES`` says. A tile whose results differ from those
of the table has no figures. Without a GPU everything runs tiny, and times mean nothing.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import header
from benchmarks.gpu_clock import DEVICE, TOY, device_ms, gated, relative_error, set_budget
from benchmarks.gpu_scan import DTYPE, drawn_delta, drawn_ssd, sets
from torch_backend.ops.scan import delta_rule
from torch_backend.ops.scan.chunks import FEW, TILES, Tile
from torch_backend.segments import PackedMetadata

_CARRY = [(16, 1, 2), (16, 2, 2), (32, 1, 2), (32, 2, 1), (32, 2, 2), (32, 2, 3), (32, 4, 2), (64, 2, 2), (64, 4, 2)]
_OVER_CHUNKS = [(32, 2, 1), (32, 4, 1), (64, 2, 1), (64, 4, 1), (64, 8, 1), (128, 4, 1), (128, 8, 1)]
CANDIDATES = {
    "prepare": [(0, 1, 1), (0, 2, 1), (0, 4, 1)],
    "carry": _CARRY,
    "output": _OVER_CHUNKS,
    "values_backward": _OVER_CHUNKS,
    "carry_backward": _CARRY,
    "chunk_backward": [(16, 4, 1), (32, 4, 1), (32, 4, 2), (32, 8, 1), (64, 4, 1), (64, 8, 1), (128, 8, 1)],
}
LIMIT = 1e-2  # in norm, between two tiles


def run(shape: str, kernels: list[str]) -> None:
    chosen = list(sets().values())
    cases = {len(x): _calls(shape, x) for x in (chosen[0], chosen[-1])}
    right = {name: _results(calls) for name, calls in cases.items()}
    print(json.dumps({"kernel": "as in the table", **_measured(cases)}), flush=True)
    for kernel in kernels:
        usual, few = TILES[kernel], FEW.pop(kernel, None)
        for candidate in CANDIDATES[kernel]:
            TILES[kernel] = Tile(*candidate)
            figures, note = gated(partial(_error, cases, right), LIMIT, partial(_measured, cases))
            print(json.dumps({"kernel": kernel, "tile": candidate, **figures, "note": note}), flush=True)
        TILES[kernel] = usual
        if few is not None:
            FEW[kernel] = few


def _calls(shape: str, documents: list[int]) -> tuple[Any, Any]:
    """The forward operator and the backward operator on the same inputs."""
    inputs = [x.to(DEVICE) for x in (drawn_delta if shape == "delta" else drawn_ssd)(sum(documents))]
    given = [*inputs, *([None] if shape == "delta" else [None, None])]
    packed = PackedMetadata.from_lengths(documents, device=DEVICE)
    given += [packed.cu_seqlens, packed.seq_idx]
    dout = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(9)).to(DEVICE, DTYPE)
    _, gates, inverses, final = delta_rule._forward(*given, 0.1)
    ahead = partial(delta_rule._forward, *given, 0.1)
    return ahead, partial(delta_rule._backward, *given, gates, inverses, dout, final, 0.1)


def _results(calls: tuple[Any, Any]) -> list[Tensor]:
    return [x for call in calls for x in call() if x.numel()]


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
    parser.add_argument("--shape", choices=("delta", "ssd"), default="delta")
    parser.add_argument("--kernels", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--budget", type=float, help="seconds after which nothing new is begun")
    options = parser.parse_args()
    if options.budget:
        set_budget(options.budget)
    if not TOY:
        print(header(), flush=True)
    run(options.shape, options.kernels)


if __name__ == "__main__":
    main()
