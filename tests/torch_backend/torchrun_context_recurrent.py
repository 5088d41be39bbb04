"""Run by ``torchrun`` in test_context_recurrent: scans that hand states on between ranks; rank 0 writes the results.

Arguments: the file to write to, and which of PARTS: "scans" of plain torch in float64, or "models" by our kernels.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from packing_core.planning.context import context_plan
from tests.torch_backend.torchrun import run_cases
from tests.torch_backend.torchrun_context import Case, run
from torch_backend.context_parallel.share import RankShare
from torch_backend.context_parallel.states import Recurrence, scan_by_states
from torch_backend.interpretation import interpret_quickly
from torch_backend.segments import PackedMetadata, host_lengths

CHANNELS, NUMBERS = 3, 2
# name -> lengths of the documents, and whether a rank has one piece of a document
ROWS: dict[str, tuple[tuple[int, ...], bool]] = {
    "one document": ((61,), False),
    "one document, contiguous": ((61,), True),
    "several are cut": ((70, 3, 60, 1), False),
    "a few tokens": ((3, 2), False),
    "some ranks have none": ((30, 10), True),
    "none is cut": ((12,) * 12, False),
}
FROZEN = "frozen inputs"  # only the parameters are trained


def walk(u: Tensor, g: Tensor, rates: Tensor, packed: PackedMetadata, initial: Tensor | None = None) -> Any:
    """``s_t = exp(g_t rates) s_{t-1} + u_t``, ``y_t = sum of the numbers of s_t``, token by token."""
    outputs, last, first = [], [], 0
    for segment, length in enumerate(host_lengths(packed)):
        state = torch.zeros_like(rates) if initial is None else initial[segment]
        for t in range(first, first + length):
            state = state * (g[t, :, None] * rates).exp() + u[t, :, None]
            outputs.append(state.sum(1))
        last.append(state)
        first += length
    return torch.stack(outputs), torch.stack(last)


WALK = Recurrence(
    scan=lambda *given: walk(*given)[0],
    with_states=walk,
    fade=lambda states, gates, rates: states * (gates[..., None] * rates).exp(),
    gates=1,
)


def scanned(name: str) -> dict[str, Any]:
    """The output of a scan of all ranks' tokens, and the gradients; without ranks of the whole documents."""
    lengths, contiguous = ROWS["several are cut" if name == FROZEN else name]
    tokens, generator = sum(lengths), torch.Generator().manual_seed(0)
    drawn = [torch.randn(tokens, CHANNELS, generator=generator, dtype=torch.float64) for _ in range(3)]
    u, g, weights = drawn[0], -drawn[1].abs() / 4, drawn[2]
    rates = torch.rand(CHANNELS, NUMBERS, generator=generator, dtype=torch.float64).requires_grad_()
    for x in (u, g):
        x.requires_grad_(name != FROZEN)
    if not dist.is_initialized():
        y = WALK.scan(u, g, rates, PackedMetadata.from_lengths(lengths, device="cpu"))
        straddles = 0
    else:
        plan = context_plan(lengths, dist.get_world_size(), contiguous=contiguous)
        share = RankShare(plan, dist.get_rank(), dist.group.WORLD, torch.device("cpu"))
        index, straddles = torch.from_numpy(share.tokens), int(plan.straddling.sum())
        y, weights = scan_by_states(share, WALK, [x[index] for x in (u, g)], [rates]), weights[index]
    (y * weights).sum().backward()
    found = {
        "y": y.detach(),
        **{name: x.grad for name, x in (("u", u), ("g", g), ("rates", rates)) if x.grad is not None},
    }
    if dist.is_initialized():
        found["y"] = torch.zeros(tokens, CHANNELS, dtype=torch.float64).index_copy_(0, index, found["y"])
        for x in found.values():
            dist.all_reduce(x)
    return {**found, "straddles": straddles}


SMALL = {"hidden_size": 16, "intermediate_size": 16, "state_size": 2, "num_hidden_layers": 1}
MODELS: dict[str, Case] = {  # interpreted kernels take their time
    "mamba": Case("mamba", SMALL, lengths=(5, 40, 7, 1)),
    "recurrent_gemma": Case("recurrent_gemma", lengths=(5, 40, 7, 1)),
    "minimax": Case("minimax", lengths=(5, 40, 7, 1)),
}
PARTS = {"scans": [*ROWS, FROZEN], "models": list(MODELS)}


def case(name: str) -> dict[str, Any]:
    if name in MODELS:
        return run(MODELS[name], init_device_mesh("cpu", (dist.get_world_size(),)))
    return scanned(name)


if __name__ == "__main__":
    interpret_quickly()
    run_cases(Path(sys.argv[1]), PARTS[sys.argv[2]], case)
