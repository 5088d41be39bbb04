"""Audits over the ranks of a group: of whole families, and of broken ones that must be found contaminated."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch as mocked

import numpy as np
from torch import Tensor

from tests.torch_backend.models import tiny
from torch_backend import audit, patch
from torch_backend.context_parallel.share import KeyLayout, RankShare
from torch_backend.hf.edits import stand_ins
from torch_backend.hf.patch import Patched
from torch_backend.segments import PackedMetadata, host_lengths


def _lost_halo(x: Tensor, share: RankShare, width: int, convolve: Any) -> Tensor:
    return convolve(x, share.segments)


def _leaked_state(share: RankShare, args: Any, kwargs: Any, scan: Any) -> Any:
    return scan(PackedMetadata.from_lengths([len(share.tokens)]), args, kwargs)


def _mean_of_means(self: Patched, kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs


def _boundaries_divided_by_ranks(share: RankShare, reach: int | None) -> KeyLayout:
    layout = share._earlier(reach)
    if layout.beginning is None:
        return layout
    ends = np.cumsum(host_lengths(layout.beginning))
    starts = np.unique(np.append(0, ends[:-1] // share.ranks))
    lengths = np.diff(starts, append=ends[-1]).tolist()
    return replace(layout, beginning=PackedMetadata.from_lengths(lengths))


# name -> the family that is audited, and what is broken in it, if anything
AUDITS: dict[str, tuple[str, tuple[Any, str, Any] | None]] = {
    "qwen3": ("qwen3", None),
    "gpt_oss": ("gpt_oss", None),
    "qwen3_5_text": ("qwen3_5_text", None),
    "mamba": ("mamba", None),
    "lost halo": ("lfm2", (stand_ins, "convolve_pieces", _lost_halo)),
    "leaked state": ("qwen3_5_text", (stand_ins, "scan_by_heads", _leaked_state)),
    "mean of means": ("qwen3", (Patched, "with_count", _mean_of_means)),
    "boundaries divided by ranks": ("qwen3", (RankShare, "earlier", _boundaries_divided_by_ranks)),
}


def audited(name: str, mesh: Any) -> tuple[str, str, int]:
    """The verdict on a family, the report in words, and over how many ranks it was measured."""
    family, broken = AUDITS[name]
    with nullcontext() if broken is None else mocked.object(*broken):
        if broken is None:
            report = audit(tiny(family), mesh=mesh)
        else:
            report = audit(patch(tiny(family), verify=False, mesh=mesh, context_method="keys"))
    return report.verdict, str(report), report.ranks
