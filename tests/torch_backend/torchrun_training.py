"""Run by ``torchrun`` in test_torchrun: two optimizer steps of packed training; rank 0 writes what came out.

Arguments: the folder to write to, rows per rank and microbatch, microbatches per step, and what is sharded: ddp, fsdp1,
fsdp2, zero2, zero3, or autotp, DeepSpeed's tensor parallelism, whose ranks hold the same rows.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from packing_core.errors import UnsupportedModelError
from tests.torch_backend.graphs import stand_in
from tests.torch_backend.models import tiny
from tests.torch_backend.test_trainer import CAPACITY, arguments, documents, gpt_oss
from tests.torch_backend.torchrun import leave, weights_of
from torch_backend.trainers.enable_packing import enable_packing

DOCUMENTS = 48  # 16 rows in the order of the documents: 2 steps of 8 rows
LIMITS = {"max_steps": 2, "max_grad_norm": 0.5, "train_sampling_strategy": "sequential"}
FAMILIES = ("qwen3", "gpt_oss", "qwen3_5_text", "bloom")  # rotary and plain attention, sinks, recurrent layers, ALiBi

DEEPSPEED = {f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in (2, 3)}
DEEPSPEED["autotp"] = {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}
FSDP = {"fsdp1": 1, "fsdp2": 2}
RECORDED = {"ddp": "gpt_oss", "fsdp2": "qwen3"}  # strategy -> the family whose steps are recorded (graphs.py)


class Counting(transformers.Trainer):
    """Notes what the loss of every step is divided by."""

    counts: tuple[int, ...] = ()

    def get_batch_samples(self, *args, **kwargs):
        batches, count = super().get_batch_samples(*args, **kwargs)
        self.counts += (int(count),)
        return batches, count


def untrained(family: str) -> torch.nn.Module:
    return gpt_oss() if family == "gpt_oss" else tiny(family)


def train(
    model: torch.nn.Module,
    folder: Path,
    rows_at_once: int,
    accumulation: int,
    strategy: str,
    graphs: SimpleNamespace | None = None,
) -> dict[str, Any]:
    options = {"per_device_train_batch_size": rows_at_once, "gradient_accumulation_steps": accumulation}
    if strategy in FSDP:
        layers = sorted({type(m).__name__ for m in model.modules() if isinstance(m, GradientCheckpointingLayer)})
        config = {"version": FSDP[strategy], "transformer_layer_cls_to_wrap": layers}
        if strategy == "fsdp1":  # whose weights accelerate sends to the other ranks from an accelerator alone
            config |= {"sync_module_states": False, "cpu_ram_efficient_loading": False}
        options |= {"fsdp": True, "fsdp_config": config}
    if strategy in DEEPSPEED:
        options["deepspeed"] = {
            **DEEPSPEED[strategy],
            "zero_allow_untested_optimizer": True,
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        }
    given = arguments(transformers.TrainingArguments, folder, **LIMITS, **options)
    if strategy in FSDP:
        # accelerate has FSDP for ranks with an accelerator alone, so these ranks say that they have one.
        assert given.device.type == "cpu"
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        PartialState._shared_state["device"] = torch.device("cpu")  # and not cpu:0, which FSDP1 takes for another one
    trainer = Counting(model, given, train_dataset=documents(DOCUMENTS))
    enable_packing(trainer, capacity=CAPACITY, verify=False)
    if graphs is not None:
        graphs.model = trainer.model
    trainer.train()
    return {
        "replays": getattr(graphs, "replayed", 0),
        "model": gathered(trainer.model, strategy),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "counts": trainer.counts,
        "sharded": isinstance(trainer.model, FSDP1)
        or any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in trainer.model.parameters()),
    }


def gathered(model: torch.nn.Module, strategy: str) -> dict[str, torch.Tensor]:
    if strategy != "zero3":
        return weights_of(model)
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(list(model.parameters())):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def main(folder: Path, rows_at_once: int, accumulation: int, strategy: str) -> None:
    if strategy in DEEPSPEED:
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile first; gloo does the same
    models = {family: untrained(family) for family in FAMILIES}  # before ZeRO-3 partitions all that is built
    found: dict[str, Any] = {}
    for family, model in models.items():
        with ExitStack() as stack:
            recorded = family == RECORDED.get(strategy)
            graphs = stand_in(lambda *x: stack.enter_context(patch.object(*x))) if recorded else None
            try:
                found[family] = train(model, folder, rows_at_once, accumulation, strategy, graphs)
            except UnsupportedModelError as refusal:
                found[family] = str(refusal)
    if torch.distributed.get_rank() == 0:
        torch.save(found, folder / "result.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    leave()
