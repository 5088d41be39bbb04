"""Run by ``torchrun`` in test_context_trainer: trainers whose documents are cut over ranks; rank 0 writes.

Argument: the file to write to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import Mock
from unittest.mock import patch as mocked

import datasets
import numpy as np
import torch
import torch.distributed as dist
import transformers
import trl
from accelerate.state import PartialState
from accelerate.utils import DistributedType, ParallelismConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.torch_backend.models import tiny
from tests.torch_backend.test_trainer import arguments, tiny_tokenizer
from tests.torch_backend.torchrun import leave, weights_of
from torch_backend import audit, enable_packing, explain
from torch_backend.context_parallel.group import ContextGroup
from torch_backend.context_parallel.share import RankShare

CAPACITY = 96
ROUTED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
OF_TRL = {"router_aux_loss_coef": 0.5}  # the model was built with another one
ROWS, MICROBATCHES = 4, 2  # of a step
LOGGED = ("loss", "train_loss", "grad_norm", "learning_rate", "total_flos")  # by every trainer
COUNTS = ("num_tokens", "eval_num_tokens", "num_input_tokens_seen")
ROUTERS = ("aux_loss", "eval_aux_loss")
# The last two steps are in train_loss alone, and the last one of the epoch has two rows.
COUNTED: dict[str, Any] = {
    "max_steps": 5,
    "logging_first_step": True,
    "logging_steps": 3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 1,
    "include_num_input_tokens_seen": "all",
}


class Case(NamedTuple):
    """A trainer that is packed under context parallelism.

    Attributes:
        family: of the model.
        kind: of the trainer.
        groups: of ranks, which train on different rows.
        smoothing: of labels.
        changes: of the model's config.
        evaluated: documents of a batch of all groups in evaluation, of eight in all.
        options: further arguments of the trainer.
    """

    family: str = "qwen3"
    kind: str = "Trainer"
    groups: int = 1
    smoothing: float = 0.0
    changes: dict[str, Any] = {}  # noqa: RUF012
    evaluated: int = 8
    options: dict[str, Any] = {}  # noqa: RUF012


CASES = {
    "Trainer": Case(evaluated=3),
    "Trainer, hybrid": Case("qwen3_5_text"),
    "SFTTrainer": Case(kind="SFTTrainer"),
    "Trainer, smoothed": Case(smoothing=0.1),
    "Trainer, router": Case("qwen3_moe", changes=ROUTED),
    "Trainer, router, smoothed": Case("qwen3_moe", smoothing=0.1, changes=ROUTED),
    "Trainer, counted": Case(options=COUNTED),
    "SFTTrainer, counted": Case(kind="SFTTrainer", options=COUNTED),
    "SFTTrainer, router": Case("qwen3_moe", "SFTTrainer", options=OF_TRL),
    "SFTTrainer, router, smoothed": Case("qwen3_moe", "SFTTrainer", smoothing=0.1, options=OF_TRL),
}
ON_FOUR = {"Trainer, two groups": Case(groups=2, evaluated=4)}


def documents(count: int = 24) -> datasets.Dataset:
    """Documents, many of them longer than half a row."""
    rng = np.random.default_rng(0)
    return of_lengths(rng.choice([3, 20, 70, 90], count).tolist())


def of_lengths(lengths: Sequence[int]) -> datasets.Dataset:
    """Random documents whose first third is a prompt."""
    rng = np.random.default_rng(1)
    ids = [rng.integers(3, 64, length).tolist() for length in lengths]
    labels = [[-100] * (len(x) // 3) + x[len(x) // 3 :] for x in ids]
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": labels})


def trainer_of(case: Case, folder: str, **changes: Any) -> Any:
    """The trainer of a case before it packs; its ranks are those of the process group, or one."""
    model, ranks = tiny(case.family, **case.changes), dist.get_world_size() if dist.is_initialized() else 1
    options: dict[str, Any] = {
        "max_steps": 2,
        "max_grad_norm": 0.5,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": ROWS // MICROBATCHES // case.groups,
        "per_device_eval_batch_size": case.evaluated // case.groups,
        "gradient_accumulation_steps": MICROBATCHES,
        "label_smoothing_factor": case.smoothing,
    }
    if ranks > 1:
        options["parallelism_config"] = ParallelismConfig(cp_size=ranks // case.groups, dp_shard_size=case.groups)
        layers = {type(m).__name__ for m in model.modules() if isinstance(m, GradientCheckpointingLayer)}
        options["fsdp"] = True
        options["fsdp_config"] = {"version": 2, "transformer_layer_cls_to_wrap": sorted(layers)}
    trains_text = case.kind == "SFTTrainer"
    if trains_text:
        options |= {"max_length": CAPACITY, "loss_type": "nll", "bf16": False, "shuffle_dataset": False}
    kind = trl.SFTConfig if trains_text else transformers.TrainingArguments
    given = arguments(kind, folder, **{**options, **case.options, **changes})
    if ranks > 1:
        # accelerate has both for ranks with an accelerator alone, so these ranks say that they have one.
        assert given.device.type == "cpu"
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    data = {"train_dataset": documents(), "eval_dataset": documents(8)}
    if trains_text:
        return trl.SFTTrainer(model, given, processing_class=tiny_tokenizer(), **data)
    return transformers.Trainer(model, given, **data)


@contextmanager
def straddling() -> Iterator[list[bool]]:
    """Collects of each row that is cut whether a document of it lies on both ranks."""
    stock, found = ContextGroup.share, []

    def share(*args: Any) -> Any:
        made = stock(*args)
        found.append(made.straddles)
        return made

    with mocked.object(ContextGroup, "share", share):
        yield found


def train(case: Case) -> dict[str, Any]:
    """Losses, weights and the evaluation of two steps."""
    with TemporaryDirectory() as folder, straddling() as straddled:
        trainer = trainer_of(case, folder)
        enable_packing(trainer, capacity=CAPACITY, verify=False)
        trainer.train()
        explained = str(explain(trainer))
        evaluated = trainer.evaluate()["eval_loss"]
    history = trainer.state.log_history
    return {
        **{key: [x[key] for x in history if key in x] for key in (*LOGGED, *COUNTS, *ROUTERS)},
        "eval_loss": evaluated,
        "weights": weights_of(trainer.model),
        "explained": explained,
        "straddled": straddled,
    }


def resumed(folder: Path) -> dict[str, Any]:
    """Losses and weights of four steps of AdamW under FSDP2, and of a run that goes on from the second one's states."""
    found: dict[str, Any] = {}
    for name, checkpoint in {"whole": None, "resumed": str(folder / "checkpoint-2")}.items():
        saving = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
        trainer = trainer_of(Case(), str(folder), max_steps=4, **saving)
        enable_packing(trainer, capacity=CAPACITY, verify=False)
        trainer.training_step = Mock(wraps=trainer.training_step)
        trainer.train(resume_from_checkpoint=checkpoint)
        found[name] = {
            "microbatches": trainer.training_step.call_count,
            "loss": [x["loss"] for x in trainer.state.log_history if "loss" in x],
            "weights": weights_of(trainer.model),
        }
    return found


def audited(kind: str, broken: bool = False) -> tuple[str, str]:
    """The verdict on a trainer before it trains, and the report in words."""
    with TemporaryDirectory() as folder:
        trainer = trainer_of(Case(kind=kind), folder)
        trainer.train_dataset = of_lengths((70, 20, 6))  # of which two ranks cut the first
        enable_packing(trainer, capacity=CAPACITY, verify=False)
        with mocked.object(RankShare, "positions", property(restarting)) if broken else nullcontext():
            report = audit(trainer)
    return report.verdict, str(report)


def restarting(share: RankShare) -> Any:
    """Replaces positions in whole documents: they count from 0 in every piece."""
    return np.concatenate([np.arange(n) for n in share.lengths])


def pack(
    case: Case = CASES["Trainer"], fast: bool = True, replaced: Any = None, memory: Any = None, **changes: Any
) -> None:
    """Packs a trainer that has other arguments, or another attribute."""
    with TemporaryDirectory() as folder:
        trainer = trainer_of(case, folder, **changes)
        for name, value in (replaced or {}).items():
            setattr(trainer, name, value)
        enable_packing(trainer, capacity=CAPACITY, verify=False, fast=fast, memory=memory)


REFUSED: dict[str, Callable[[], Any]] = {
    "compute_loss_func": partial(pack, replaced={"compute_loss_func": max}),
    "compute_metrics": partial(pack, replaced={"compute_metrics": max}),
    "loss of TRL": partial(pack, CASES["SFTTrainer"], loss_type="dft"),
    "NEFTune": partial(pack, neftune_noise_alpha=5.0),
    "counts of a rank": partial(pack, average_tokens_across_devices=False),
    "torch_compile": partial(pack, torch_compile=True),
    "slow step": partial(pack, fast=False),
}


def predicted() -> None:
    """Asks for the logits of documents that are cut."""
    with TemporaryDirectory() as folder:
        trainer = trainer_of(Case(), folder, max_steps=1)
        enable_packing(trainer, capacity=CAPACITY, verify=False)
        trainer.train()
        trainer.predict(documents(8))


def attempt(what: Callable[[], Any]) -> Any:
    """Returns what the call returns, or the text of its error."""
    try:
        return what()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(target: Path) -> None:
    dist.init_process_group("gloo")
    if dist.get_world_size() == 4:
        results = {name: attempt(partial(train, case)) for name, case in ON_FOUR.items()}
    else:
        results = {name: attempt(partial(train, case)) for name, case in CASES.items()}
        results |= {f"refuse, {name}": attempt(what) for name, what in REFUSED.items()}
        results |= {f"audit, {kind}": attempt(partial(audited, kind)) for kind in ("Trainer", "SFTTrainer")}
        results["audit, broken"] = attempt(partial(audited, "Trainer", True))
        results["refuse, logits"] = attempt(predicted)
        results["refuse, level"] = attempt(partial(pack, memory="auto"))
        results["resumed"] = attempt(partial(resumed, target.parent / "run"))
    if dist.get_rank() == 0:
        torch.save(results, target)
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
