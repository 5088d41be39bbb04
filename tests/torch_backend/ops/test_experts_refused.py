"""Arguments of routed experts that cannot be run: every implementation says why before it runs."""

from __future__ import annotations

import pytest
import torch

from packing_core.errors import LayoutError, UnsupportedError
from tests.torch_backend.expert_layers import UNGATED
from torch_backend.ops.experts import Adapter, experts


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": zeros(1, 3, 4)}, LayoutError, r"takes x \[T, D\], .*, got x \[1, 3, 4\]"),
        ({"up": zeros(2, 5, 4)}, LayoutError, r"up must be \[2, 6, 4\], got \[2, 5, 4\]"),
        ({"weights": zeros(3, 2)}, LayoutError, r"weights must be \[3, 1\], got \[3, 2\]"),
        ({"up_bias": zeros(2, 3)}, LayoutError, r"up_bias must be \[2, 6\], got \[2, 3\]"),
        (
            {"indices": zeros(3, 3, dtype=torch.int64), "weights": zeros(3, 3)},
            LayoutError,
            "each token chooses 3 experts and there are 2",
        ),
        (
            {"indices": zeros(3, 1)},
            LayoutError,
            r"indices are int32 or int64, got torch.float32: cast them, indices.int\(\)",
        ),
        ({"indices": torch.tensor([[0], [3], [1]])}, LayoutError, "an index names expert 3 and there are 2"),
        ({"indices": torch.tensor([[0], [-2], [1]])}, LayoutError, "an index names expert -2 and there are 2"),
        (
            {"indices": zeros(3, 0, dtype=torch.int64), "weights": zeros(3, 0)},
            LayoutError,
            "each token chooses 0 experts and there are 2",
        ),
        ({"down": zeros(2, 4, 3, dtype=torch.float64)}, LayoutError, "down is torch.float64 and x torch.float32"),
        ({"up": zeros(2, 6, 4).half()}, LayoutError, "up is torch.float16 and x torch.float32: give both one dtype"),
        ({"down_bias": zeros(2, 4).bfloat16()}, LayoutError, "down_bias is torch.bfloat16 and x torch.float32"),
        (
            {"up_adapter": Adapter(zeros(2, 1, 4), zeros(2, 6, 1).half(), 1.0)},
            LayoutError,
            "up_adapter.b is torch.float16 and x torch.float32",
        ),
        (
            {"weights": zeros(3, 1, dtype=torch.int64)},
            LayoutError,
            "must be floating-point, got torch.float32 and torch.i",
        ),
        (
            {"interleaved": True, "activation": UNGATED, "up": zeros(2, 3, 4)},
            LayoutError,
            "need an activation with gates",
        ),
        ({"x": zeros(3, 4).to("meta")}, LayoutError, "is on cpu and x on meta: move both to one device"),
        (
            {"up_adapter": Adapter(zeros(2, 1, 4), zeros(2, 6, 2), 1.0)},
            LayoutError,
            r"up_adapter.b must be \[2, 6, 1\], got \[2, 6, 2\]",
        ),
        ({"implementation": "cutlass"}, UnsupportedError, "no experts implementation 'cutlass'; there are triton"),
        (
            {"implementation": "grouped_mm"},
            UnsupportedError,
            "no experts for 1 of 2 experts of 4 x 3, float32 on cpu, silu with gates: grouped_mm: ",
        ),
    ],
)
@pytest.mark.parametrize("implementation", ["auto", "triton", "grouped_mm", "plain"])
def test_what_cannot_be_run_says_why_before_it_runs(change, error, message, implementation, monkeypatch):
    for name in ("_forward", "_backward"):
        monkeypatch.setattr(f"torch_backend.ops.experts.{name}", None)
    given = {
        "x": zeros(3, 4),
        "indices": zeros(3, 1, dtype=torch.int64),
        "weights": zeros(3, 1),
        "up": zeros(2, 6, 4),
        "down": zeros(2, 4, 3),
        "implementation": implementation,
    }
    with pytest.raises(error, match=message):
        experts(**given | change)
