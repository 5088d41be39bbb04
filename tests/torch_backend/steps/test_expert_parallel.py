"""Experts that transformers spreads over two ranks train packed documents as one process does."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import transformers

from tests.torch_backend.models import alone, collate, documents, error, tiny
from tests.torch_backend.ranks import on_ranks
from torch_backend import explain, patch
from torch_backend.hf.edits.packed_experts import why_experts_read

distributed = pytest.importorskip("transformers.distributed", reason="unsupported here: an older transformers")
pytestmark = [
    pytest.mark.slow,  # starts processes that train
    pytest.mark.skipif(
        "ep_size" not in signature(distributed.DistributedConfig).parameters,
        reason="unsupported here: this transformers spreads no experts over ranks",
    ),
]

DOCUMENTS = [documents((5, 19, 33), seed=1), documents((7, 40, 1, 2, 18), seed=2)]  # of each rank


def outcome(folder: Path, implementation: str) -> dict[str, Any]:
    everything, own = [x for docs in DOCUMENTS for x in docs], DOCUMENTS[dist.get_rank()]
    load = transformers.AutoModelForCausalLM.from_pretrained
    want = alone(load(folder).train(), everything).gradients
    config = distributed.DistributedConfig(fsdp_size=2, ep_size=2)
    model = load(folder, distributed_config=config, experts_implementation=implementation).train()
    patch(model, verify=False)
    batch = collate(own)
    batch["attention_mask"] = (batch["input_ids"] != 0).long()
    targets = [sum(len(document) - 1 for document in docs) for docs in (own, everything)]
    (model(**batch).loss * targets[0] * dist.get_world_size() / targets[1]).backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    return {
        "errors": {name: error(gradient, want[name]) for name, gradient in gradients.items()},
        "explained": str(explain(model)),
        "reads": why_experts_read(model),
    }


@pytest.mark.parametrize(("family", "implementation"), [("qwen3_moe", "crosspack"), ("gpt_oss", "grouped_mm")])
def test_spread_experts_train_as_one_process_does(family: str, implementation: str, tmp_path: Path) -> None:
    tiny(family).save_pretrained(tmp_path)
    found = on_ranks(outcome, tmp_path, implementation)
    assert max(found["errors"].values()) <= 1e-5, found["errors"]
    assert sum("experts" in name for name in found["errors"]) >= 4
    reads = "the experts of model.layers.0.mlp.experts are spread over ranks, which read how many tokens each gets"
    assert found["reads"] == reads
    assert f"layers.0.mlp.experts: experts -> {implementation}" in found["explained"]
    assert "not crosspack: expert parallelism spreads them over ranks" in found["explained"]
