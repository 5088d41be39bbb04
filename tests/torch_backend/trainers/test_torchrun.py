"""Ranks and one process train the same documents to the same weights, whoever holds which, by Trainer.

DDP, FSDP1, FSDP2 and, where DeepSpeed is installed, ZeRO-2, ZeRO-3 and tensor parallelism.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from packing_core import plan
from tests.torch_backend.graphs import stand_in
from tests.torch_backend.models import tiny
from tests.torch_backend.ranks import DEEPSPEED, on_ranks, refused
from tests.torch_backend.trainers.test_trainer import CAPACITY, arguments, documents, gpt_oss
from tests.torch_backend.wrappers import assert_same_weights, on_accelerators, weights_of
from torch_backend.trainers.enable_packing import enable_packing

pytestmark = pytest.mark.slow  # starts processes that train

DOCUMENTS = 48  # 16 rows in the order of the documents: 2 steps of 8 rows
LIMITS = {"max_steps": 2, "max_grad_norm": 0.5, "train_sampling_strategy": "sequential"}
FAMILIES = ("qwen3", "gpt_oss", "qwen3_5_text", "bloom")  # rotary and plain attention, sinks, recurrent layers, ALiBi
FOUR = ("qwen3", "ddp")  # which trains on four ranks

ZERO = {f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in (2, 3)}
ZERO["autotp"] = {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}
FSDP = {"fsdp1": 1, "fsdp2": 2}
# strategy -> the family whose steps are recorded (graphs.py)
RECORDED = {"ddp": "gpt_oss", "fsdp2": "qwen3"}


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
    if strategy in ZERO:
        options["deepspeed"] = {
            **ZERO[strategy],
            "zero_allow_untested_optimizer": True,
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        }
    given = arguments(transformers.TrainingArguments, folder, **LIMITS, **options)
    with on_accelerators() if strategy in FSDP else nullcontext():
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


def on_rank(family: str, folder: Path, strategy: str) -> dict[str, Any]:
    if strategy in ZERO:
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile first; gloo does the same
    rows = 4 if strategy == "autotp" else 4 // torch.distributed.get_world_size()
    with ExitStack() as stack:
        recorded = family == RECORDED.get(strategy)
        graphs = stand_in(lambda *x: stack.enter_context(patch.object(*x))) if recorded else None
        return train(untrained(family), folder, rows, 2, strategy, graphs)


@cache
def on_one_process(family: str) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        return train(untrained(family), Path(folder), rows_at_once=4, accumulation=2, strategy="ddp")


def of_deepspeed(*cases: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*case, marks=DEEPSPEED) for case in cases]


ROUTES = [("qwen3", "fsdp1"), ("gpt_oss", "fsdp1"), ("qwen3", "fsdp2"), ("qwen3_5_text", "fsdp2"), ("bloom", "fsdp2")]
ROUTES += [(family, "ddp") for family in FAMILIES]
ROUTES += of_deepspeed(*product(FAMILIES, ("zero2",)), *product(FAMILIES[:3], ("zero3", "autotp")))


@pytest.mark.parametrize(("family", "strategy"), ROUTES)
def test_ranks_train_as_one_process_does(family: str, strategy: str, tmp_path: Path) -> None:
    """In steps of 8 rows, in 2 microbatches of each rank."""
    many = on_ranks(
        on_rank, family, tmp_path, strategy, ranks=4 if (family, strategy) == FOUR else 2, own=strategy in ZERO
    )
    one = on_one_process(family)
    assert many["sharded"] == (strategy in ("fsdp1", "fsdp2", "zero3"))
    assert many["replays"] == (2 if RECORDED.get(strategy) == family else 0)  # the microbatches of the second step
    data = documents(DOCUMENTS)
    rows = plan([len(ids) for ids in data["input_ids"]], CAPACITY, strategy="sequential", seed=None).to_lists()
    trained = [sum(label != -100 for label in labels[1:]) for labels in data["labels"]]
    targets = [sum(trained[d] for row in rows[a : a + 8] for d in row) for a in (0, 8)]
    assert len(rows) == 16
    assert list(many["counts"][:2]) == list(one["counts"][:2]) == targets
    split = {name for name, weight in one["model"].items() if many["model"][name].shape != weight.shape}
    assert bool(split) == (strategy == "autotp")
    assert_same_weights(*({name: x for name, x in run["model"].items() if name not in split} for run in (many, one)))
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-4)
    before = dict(untrained(family).named_parameters())
    assert max(float((weight - before[name]).abs().max()) for name, weight in one["model"].items()) > 1e-3


REFUSED = [("fsdp1", "ranks would gather its parameters a different number of times, and hang")]
REFUSED += [("fsdp2", REFUSED[0][1]), *of_deepspeed(("zero3", REFUSED[0][1]))]
REFUSED += of_deepspeed(("autotp", "DeepSpeed's tensor parallelism cannot split falcon"))


@pytest.mark.parametrize(("strategy", "text"), REFUSED)
def test_decoders_that_run_per_document_are_not_split(strategy: str, text: str, tmp_path: Path) -> None:
    assert all(text in error for error in refused(on_rank, "falcon_alibi", tmp_path, strategy, own=strategy in ZERO))
