"""Runs on two ranks for test_sharded.py: FSDP2 models on different documents per rank.

Writes, for every family and order, the worst relative error of a gradient against one process, or the refusal.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import torch_backend
from packing_core.errors import UnsupportedModelError
from tests.torch_backend.models import alone, collate, documents, error, in_float64, tiny
from tests.torch_backend.torchrun import leave

DOCUMENTS = [documents((5, 19, 33), seed=1), documents((7, 40, 1, 2, 18), seed=2)]  # of each rank


def targets(docs: list[Tensor]) -> int:
    return sum(len(document) - 1 for document in docs)


def shard(model: Any) -> None:
    decoder = model.get_decoder()
    for layer in getattr(decoder, "layers", None) or decoder.h:
        fully_shard(layer)
    fully_shard(model)


def outcome(family: str, order: str) -> float | str:
    everything = [document for docs in DOCUMENTS for document in docs]
    want = alone(in_float64(tiny(family)), everything).gradients
    model, own = in_float64(tiny(family)), DOCUMENTS[dist.get_rank()]
    if order == "shard, patch":
        shard(model)
    torch_backend.patch(model, verify=False)
    if order == "patch, shard":
        shard(model)
    try:
        loss = model(**collate(own)).loss
    except UnsupportedModelError as refusal:
        return str(refusal)
    (loss * targets(own) * dist.get_world_size() / targets(everything)).backward()
    return max(error(p.grad.full_tensor(), want[name]) for name, p in model.named_parameters() if p.grad is not None)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    families, file = sys.argv[1].split(","), Path(sys.argv[2])
    found = {f"{f}: {order}": outcome(f, order) for f in families for order in ("shard, patch", "patch, shard")}
    if dist.get_rank() == 0:
        file.write_text(json.dumps(found))
    leave()
