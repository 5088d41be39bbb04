"""The order in which the implementations of a scan are tried: measured, by device and length of the documents.

Libraries that ``torch.compile`` and CUDA graphs cannot hold (``fla``) come after our kernels whatever they take: a step
gains more from these two than from any scan. On a device without a record, all libraries come after our kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, log

import torch

from torch_backend.segments import PackedMetadata

# compute capability -> function of the modeling files -> tokens of a document -> milliseconds of kernels, forward and
# backward, in benchmarks/RESULTS.md ("Scans"). What is new there belongs here.
RECORDED: Mapping[tuple[int, int], Mapping[str, Mapping[int, Mapping[str, float]]]] = {
    (9, 0): {
        "torch_chunk_gated_delta_rule": {
            16: {"flash_qla": 12.01, "triton": 2.21},
            32: {"flash_qla": 7.74, "triton": 1.94},
            64: {"flash_qla": 2.42, "triton": 1.80},
            240: {"flash_qla": 2.23, "triton": 2.83},
            1_024: {"flash_qla": 0.77, "triton": 1.31},
            8_192: {"flash_qla": 2.06, "triton": 1.67},
        },
        "mamba2_chunk_scan": {
            240: {"mamba_ssm": 3.01, "triton": 1.81},
            1_024: {"mamba_ssm": 1.67, "triton": 0.97},
            8_192: {"mamba_ssm": 1.67, "triton": 0.97},
        },
    }
}


def by_time(name: str, implementations: Sequence[str], packed: PackedMetadata) -> tuple[str, ...]:
    """The implementations, the one to try first at the front.

    Args:
        name: of the function that a modeling file calls.
        implementations: in the order where nothing was measured.
        packed: its device and the mean length of its segments decide; where the host does not know how many there are,
            their number is that of the batch's boundaries, empty segments counted.
    """
    _, times = _recorded(name, packed)
    return tuple(sorted(implementations, key=lambda each: times.get(each, inf))) if times else tuple(implementations)


def measured(name: str, implementation: str, packed: PackedMetadata) -> str:
    """The times by which ``implementation`` has its place, in words; empty where it has none."""
    length, times = _recorded(name, packed)
    if implementation not in times:
        return ""
    found = ", ".join(f"{each} {times[each]:.2f} ms" for each in sorted(times, key=times.__getitem__))
    return f" (measured on documents of {length:,} tokens: {found})"


def _recorded(name: str, packed: PackedMetadata) -> tuple[int, Mapping[str, float]]:
    """The length nearest to that of the documents for which there are times, and the times; none without a record."""
    if packed.device.type != "cuda":
        return 0, {}
    recorded = RECORDED.get(torch.cuda.get_device_capability(packed.device), {}).get(name)
    if not recorded:
        return 0, {}
    segments = len(packed.cu_seqlens) - 1 if packed.lengths is None else len(packed.lengths)
    mean = packed.tokens / max(segments, 1)
    length = min(recorded, key=lambda each: abs(log(each / mean)))
    return length, recorded[length]
