"""Run by ``torchrun`` in test_distributed_loss: ``causal_lm_loss`` under each wrapper; rank 0 writes the gradients.

Argument: the file to write to. Two steps of plain gradient descent, so that the second step runs on weights that the
first one changed. Every rank takes its share of the documents of a step; one process takes all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.torch_backend.models import collate, documents, tiny
from tests.torch_backend.torchrun import run_cases, whole
from torch_backend import normalise, patch
from torch_backend.losses.causal_lm import causal_lm_loss

# The documents of each step, a line per microbatch; rank r of n takes every n-th from r on.
STEPS = [[(5, 19, 33, 7), (40, 1, 2, 18)], [(9, 30, 3, 11), (4, 4, 21, 6)]]
RATE = 0.1

Model = Any
Wrapper = Callable[[Model], Model]


def plain(model: Model) -> Model:
    return patch(model, verify=False)


def adapted(model: Model) -> Model:
    """LoRA on the output layer and elsewhere, with a base that is trained too."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    torch.manual_seed(0)
    model = get_peft_model(model, config)
    for parameter in model.parameters():
        parameter.requires_grad_()
    return plain(model)


def ddp(**options: Any) -> Wrapper:
    return lambda model: DDP(plain(model), **options)


def with_idle_parameter(model: Model) -> Model:
    """A parameter that no forward uses: DDP waits for its gradient unless it looks for such parameters."""
    model.idle = nn.Parameter(torch.ones(3))
    return DDP(plain(model), find_unused_parameters=True)


def sharded(model: Model, *own: str) -> Model:
    """FSDP2 over each decoder layer, the modules named ``own`` and the root."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain(model)
    for module in (*model.get_decoder().layers, *(model.get_submodule(name) for name in own)):
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded_by_fsdp_1(model: Model, **options: Any) -> Model:
    def wrap(module: nn.Module) -> FSDP1:
        return FSDP1(module, use_orig_params=True, device_id=torch.device("cpu"), **options)

    model = plain(model)
    model.lm_head = wrap(model.lm_head)
    model.model.layers = nn.ModuleList(wrap(layer) for layer in model.model.layers)
    return wrap(model)


def sharded_adapters(model: Model) -> Model:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = adapted(model)
    for module in (*model.get_decoder().layers, model.get_output_embeddings()):
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(gathered: bool) -> Wrapper:
    """The output layer split over its rows; its logits come out whole, or as a DTensor."""

    def wrap(model: Model) -> Model:
        layout = ColwiseParallel(output_layouts=Replicate()) if gathered else ColwiseParallel(use_local_output=False)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return plain(parallelize_module(model, mesh, {"lm_head": layout}))

    return wrap


def prepared(model: Model) -> Model:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(plain(model))


# name -> (how one process wraps the model, how several do, whether every rank takes all documents)
CASES: dict[str, tuple[Wrapper, Wrapper, bool]] = {
    "DDP": (plain, ddp(), False),
    "DDP, unused parameters": (plain, with_idle_parameter, False),
    "DDP, static graph": (plain, ddp(static_graph=True), False),
    "FSDP2": (plain, sharded, False),
    "FSDP2, head on its own": (plain, lambda model: sharded(model, "lm_head"), False),
    "FSDP1, head on its own": (plain, sharded_by_fsdp_1, False),
    "FSDP2, LoRA on the head": (adapted, sharded_adapters, False),
    "DDP, LoRA on the head": (adapted, lambda model: DDP(adapted(model)), False),
    "tensor parallel": (plain, tensor_parallel(gathered=True), True),
    "tensor parallel, logits split": (plain, tensor_parallel(gathered=False), True),
    "accelerate": (plain, prepared, False),
}


def train(model: Model, shares: int, share: int) -> Iterator[dict[str, Tensor]]:
    """The gradients of each step. Where DDP can, all microbatches but the last run under ``no_sync``."""
    for step in STEPS:
        batches = [collate(documents(lengths, seed)[share::shares], capacity=64) for seed, lengths in enumerate(step)]
        # divided once per step, over all microbatches and ranks
        total = torch.tensor(float(sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)))
        for number, batch in enumerate(batches):
            accumulate = number < len(batches) - 1 and isinstance(model, DDP) and not model.static_graph
            with model.no_sync() if accumulate else nullcontext():
                loss, weight = causal_lm_loss(model, batch)
                assert weight == (batch["labels"][:, 1:] != -100).sum()
                normalise(loss, total).backward() if shares > 1 else (loss / total).backward()
        yield gradients(model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
                    parameter.grad = None


def gradients(model: Model) -> dict[str, Tensor]:
    """Whole gradients under the names of the model that is not wrapped."""
    with FSDP1.summon_full_params(model, with_grads=True) if isinstance(model, FSDP1) else nullcontext():
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return whole(found)


def on_rank(name: str) -> Any:
    _, wrap, everything = CASES[name]
    shares, share = (1, 0) if everything else (dist.get_world_size(), dist.get_rank())
    return list(train(wrap(tiny("qwen2")), shares, share))


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), CASES, on_rank)
