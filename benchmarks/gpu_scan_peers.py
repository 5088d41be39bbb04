"""Calls the scan libraries on a packed row: ``fla``, ``flash_qla`` and ``mamba_ssm``, for :mod:`.gpu_scan`.

``mamba_ssm`` imports its CUDA extensions as a whole. Its scan of Mamba-2 is Triton alone, so a folder that holds its
sources (``CROSSPACK_MAMBA_SSM``: where the unpacked archive has ``mamba_ssm/ops``) does without building these.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from torch_backend.ops.scan.libraries import fla
from torch_backend.segments import PackedMetadata


def delta_by_fla(inputs: list[Tensor], packed: PackedMetadata) -> Tensor:
    """By its own kernels: where ``flash_qla`` is installed, it hands the call to these otherwise."""
    os.environ["FLA_FLASH_QLA"] = "0"
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    boundaries, chunks = packed.derived("chunks", fla.chunks)
    rows = (x[None] for x in inputs)
    return _first(chunk_gated_delta_rule(*rows, cu_seqlens=boundaries, chunk_indices=chunks))


def delta_by_flash_qla(inputs: list[Tensor], packed: PackedMetadata) -> Tensor:
    from flash_qla import chunk_gated_delta_rule

    return _first(chunk_gated_delta_rule(*(x[None] for x in inputs), cu_seqlens=packed.cu_seqlens, auto_cp=False))


def kimi_by_fla(inputs: list[Tensor], packed: PackedMetadata) -> Tensor:
    from fla.ops.kda import chunk_kda

    return _first(chunk_kda(*(x[None] for x in inputs), cu_seqlens=packed.cu_seqlens, use_graph=True))


def stepped_by_mamba_ssm(inputs: list[Tensor], packed: PackedMetadata) -> Tensor:
    c, b, x, dt = (x[None] for x in inputs)
    rates = -torch.ones_like(dt[0, 0])
    scan = _mamba_ssm().mamba_chunk_scan_combined
    out: Tensor = scan(x, dt, rates, b, c, chunk_size=256, seq_idx=packed.seq_idx[None].int())
    return out[0]


def _first(result: tuple[Any, ...]) -> Tensor:
    out: Tensor = result[0][0]
    return out


@cache
def _mamba_ssm() -> ModuleType:
    folder = os.environ.get("CROSSPACK_MAMBA_SSM")
    if folder is not None:
        package = ModuleType("mamba_ssm")
        package.__path__ = [os.path.join(folder, "mamba_ssm")]
        sys.modules["mamba_ssm"] = package
    return import_module("mamba_ssm.ops.triton.ssd_combined")
