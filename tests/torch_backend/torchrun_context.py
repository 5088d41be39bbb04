"""Run by ``torchrun`` in test_context_parallel: a batch cut over all ranks; rank 0 writes losses and gradients.

Argument: the file to write to.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.torch_backend.models import collate, documents, tiny
from tests.torch_backend.torchrun import leave
from torch_backend import explain, patch

# On two ranks the document of 190 has one cut, on four three; of the few tokens each rank has one or two.
LENGTHS = (5, 190, 33, 1, 7, 2)
FEW = (3, 2)


class Case(NamedTuple):
    """A model that is trained under context parallelism.

    Attributes:
        family: of the model.
        changes: of its config.
        lengths: of the documents of the row.
        method: how attention crosses ranks.
    """

    family: str
    changes: dict[str, Any] = {}  # noqa: RUF012
    lengths: tuple[int, ...] = LENGTHS
    method: str = "keys"


CASES: dict[str, Case] = {
    "qwen3": Case("qwen3"),
    "qwen3, whole documents": Case("qwen3", lengths=(40, 40, 40, 40)),
    "qwen3, a few tokens": Case("qwen3", lengths=FEW),
    "qwen3, heads": Case("qwen3", {"num_attention_heads": 8, "num_key_value_heads": 4}, method="heads"),
    "gpt_oss, window of 5": Case("gpt_oss", {"sliding_window": 5}),
    "gpt_oss, window of 100": Case("gpt_oss", {"sliding_window": 100}),
    "gpt_oss, heads": Case(
        "gpt_oss", {"sliding_window": 20, "num_attention_heads": 8, "num_key_value_heads": 4}, method="heads"
    ),
    "gemma2": Case("gemma2", {"sliding_window": 20}),
    "phi3, longrope": Case("phi3"),
    "deepseek_v3": Case("deepseek_v3"),
}


def run(case: Case, mesh: Any = None) -> dict[str, Any]:
    """The loss of a batch, the gradients, and what explain says."""
    options = {} if mesh is None else {"mesh": mesh, "context_method": case.method}
    model = patch(tiny(case.family, **case.changes), verify=False, **options)
    output = model(**collate(documents(case.lengths), capacity=None))
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if mesh is not None:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= mesh.size()
    return {
        "loss": float(output.loss.detach()),
        "gradients": gradients,
        "tokens": output.logits.shape[1],
        "explained": str(explain(model)),
    }


def main(target: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))["cp"]
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            results[name] = run(case, mesh)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    if dist.get_rank() == 0:
        torch.save(results, target)
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
