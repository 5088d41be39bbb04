"""Runs on two ranks for test_expert_parallel.py: transformers' expert parallelism, other documents on each rank.

Writes, for every experts implementation, the worst relative error of a gradient against one process, what runs the
experts, and why the step is not captured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

import torch_backend
from tests.torch_backend.models import alone, collate, documents, error
from tests.torch_backend.torchrun import leave
from torch_backend.hf.edits.experts import why_experts_read

DOCUMENTS = [documents((5, 19, 33), seed=1), documents((7, 40, 1, 2, 18), seed=2)]  # of each rank


def outcome(folder: str, implementation: str) -> dict[str, Any]:
    everything, own = [x for docs in DOCUMENTS for x in docs], DOCUMENTS[dist.get_rank()]
    load = transformers.AutoModelForCausalLM.from_pretrained
    want = alone(load(folder).train(), everything).gradients
    model = load(
        folder,
        distributed_config=DistributedConfig(fsdp_size=2, ep_size=2),
        experts_implementation=implementation,
    ).train()
    torch_backend.patch(model, verify=False)
    batch = collate(own)
    batch["attention_mask"] = (batch["input_ids"] != 0).long()
    targets = [sum(len(document) - 1 for document in docs) for docs in (own, everything)]
    loss = model(**batch).loss
    (loss * targets[0] * dist.get_world_size() / targets[1]).backward()
    errors = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            errors[name] = error(parameter.grad.full_tensor(), want[name])
    worst = max(errors, key=lambda name: errors[name])
    return {
        "worst": worst,
        "error": errors[worst],
        "experts": sum("experts" in name for name in errors),
        "explained": str(torch_backend.explain(model)),
        "reads": why_experts_read(model),
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    folder, file, *implementations = sys.argv[1:]
    found = {name: outcome(folder, name) for name in implementations}
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(found))
    leave()
