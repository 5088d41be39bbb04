"""The adapters of scan libraries hand them each document, and say in a line what is missing.

No library is installed where these run: stand-ins with their functions' names and arguments take their place.
"""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from conformance.checks import check_isolated
from conformance.judge import Judge, NotDeclared, Rejected
from conformance.registry import PEERS, LoadError, load
from conformance.scan_cases import FULL, ON_EDGES, DeltaCase, SsdCase
from torch_backend.conformance import libraries

ROOT = Path(__file__).parents[3]


def judge_of(kind: type[libraries.Library], monkeypatch: pytest.MonkeyPatch, **functions: Any) -> Judge:
    """A judge of the adapter over a stand-in library, on the CPU."""
    stand_in = ModuleType(kind.module)
    for name, function in functions.items():
        setattr(stand_in, name, function)
    monkeypatch.setattr(libraries, "import_module", lambda name: stand_in)
    monkeypatch.setattr(libraries, "version", lambda name: "0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "cpu")
    method = "ssd" if kind is libraries.MambaSsm else "delta_rule"
    return Judge(kind(torch.device("cpu")), method=method, required=False)


def by_document(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **options: Any) -> Any:
    options.pop("auto_cp", None)
    found = []
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        mine = (x[:, start:stop] for x in (q, k, v, g, beta))
        found.append(torch_chunk_gated_delta_rule(*mine, **options)[0])
    return torch.cat(found, dim=1), None


def row_as_one(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **options: Any) -> Any:
    return torch_chunk_gated_delta_rule(q, k, v, g, beta, **options)


def test_fla_gets_every_document_with_its_boundaries(monkeypatch) -> None:
    judge = judge_of(libraries.Fla, monkeypatch, chunk_gated_delta_rule=by_document)
    judge.check(DeltaCase(ON_EDGES))
    judge.check(DeltaCase(FULL, normalise=True, heads=4))


def test_a_library_that_ignores_boundaries_is_rejected(monkeypatch) -> None:
    judge = judge_of(libraries.Fla, monkeypatch, chunk_gated_delta_rule=row_as_one)
    with pytest.raises(Rejected, match="segment 0 changed, and .* moved"):
        check_isolated(judge, DeltaCase(ON_EDGES), where=(0,))


def test_flash_qla_is_asked_in_half_precision_at_its_one_width_without_context_parallelism(monkeypatch) -> None:
    seen = []

    def chunk_gated_delta_rule(q: Tensor, *args: Any, auto_cp: bool = True, **options: Any) -> Any:
        seen.append((q.dtype, q.shape[-1], auto_cp))
        return by_document(q, *args, **options)

    judge = judge_of(libraries.FlashQla, monkeypatch, chunk_gated_delta_rule=chunk_gated_delta_rule)
    judge.check(DeltaCase(((5, 27),)))
    assert seen == [(torch.bfloat16, 128, False)]
    with pytest.raises(NotDeclared, match="channel_decay not declared"):
        judge.check(DeltaCase(((5, 27),), by_channel=True))


def test_mamba_ssm_gets_the_number_of_each_tokens_segment(monkeypatch) -> None:
    def mamba_chunk_scan_combined(x: Tensor, *args: Any, seq_idx: Tensor, **options: Any) -> Tensor:
        def alone(row: int, number: int) -> Tensor:
            here = slice(row, row + 1), seq_idx[row] == number
            mine = (y if y.ndim == 1 else y[here] for y in (x, *args))
            return mamba2_chunk_scan(*mine, **options)

        rows = [[alone(row, number) for number in numbers.unique().tolist()] for row, numbers in enumerate(seq_idx)]
        return torch.cat([torch.cat(documents, dim=1) for documents in rows])

    judge = judge_of(libraries.MambaSsm, monkeypatch, mamba_chunk_scan_combined=mamba_chunk_scan_combined)
    judge.check(SsdCase(ON_EDGES))


@pytest.mark.parametrize(
    ("name", "distribution"),
    [("fla", "flash-linear-attention"), ("flash_qla", "flash-qla"), ("mamba_ssm", "mamba-ssm")],
)
def test_a_missing_library_says_how_to_install_it(name, distribution, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # not installed
    with pytest.raises(LoadError, match=f"{name} is not installed: pip install {distribution} beside your torch"):
        load([f"torch_backend.conformance.libraries:{name}"])


def test_without_a_gpu_the_reason_is_the_gpu(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LoadError, match="the kernels of flash-linear-attention need a GPU, and torch sees none"):
        load(["torch_backend.conformance.libraries:fla"])


def test_the_package_registers_them_apart_from_the_backends_of_a_default_run() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][PEERS]
    for name, place in points.items():
        module, _, function = place.partition(":")
        assert list(getattr(import_module(module), function)()) == [name]
