"""Trainers whose documents are cut over ranks, by accelerate's ``cp_size``: the steps of one process, and refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch as mocked

import datasets
import numpy as np
import pytest
import torch.distributed as dist
import transformers
import trl
from accelerate.utils import ParallelismConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.torch_backend.context_parallel.test_context_parallel import ROUTED
from tests.torch_backend.models import tiny
from tests.torch_backend.ranks import on_ranks, refused
from tests.torch_backend.trainers.test_trainer import arguments, tiny_tokenizer
from tests.torch_backend.wrappers import assert_same_weights, on_accelerators, weights_of
from torch_backend import audit, enable_packing, explain
from torch_backend.context_parallel.group import ContextGroup
from torch_backend.context_parallel.share import RankShare

pytestmark = pytest.mark.slow  # starts processes that train

CAPACITY = 96
OF_TRL = {"router_aux_loss_coef": 0.5}  # the model was built with another one
ROWS, MICROBATCHES = 4, 2  # of a step
LOGGED = ("loss", "train_loss", "grad_norm", "learning_rate", "total_flos")  # by every trainer
COUNTS = ("num_tokens", "eval_num_tokens", "num_input_tokens_seen")
EVALUATED = ("eval_loss", "eval_loss_per_batch")
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
    """A trainer that is packed under context parallelism."""

    family: str = "qwen3"
    kind: str = "Trainer"
    groups: int = 1  # of ranks, which train on different rows
    smoothing: float = 0.0  # of labels
    changes: dict[str, Any] = {}  # noqa: RUF012 # of the model's config
    evaluated: int = 8  # documents of a batch of all groups in evaluation, of eight in all
    options: dict[str, Any] = {}  # noqa: RUF012 # further arguments of the trainer


CASES = {
    "Trainer": Case(evaluated=3),
    "Trainer, hybrid": Case("qwen3_5_text"),
    "Trainer, router, smoothed": Case("qwen3_moe", smoothing=0.1, changes=ROUTED),
    "Trainer, counted": Case(options=COUNTED),
    "Trainer, two groups": Case(groups=2, evaluated=4),
    "Trainer, two groups, filled": Case(groups=2, evaluated=6),  # accelerate repeats documents in the last batch
    "SFTTrainer, counted": Case(kind="SFTTrainer", options=COUNTED),
    "SFTTrainer, router": Case("qwen3_moe", "SFTTrainer", options=OF_TRL),
    "SFTTrainer, router per document": Case(
        "qwen3_moe", "SFTTrainer", changes={"router_loss": "document"}, options=OF_TRL
    ),
    "SFTTrainer, router, smoothed": Case("qwen3_moe", "SFTTrainer", smoothing=0.1, options=OF_TRL),
}


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
    data = {"train_dataset": documents(), "eval_dataset": documents(8)}
    with on_accelerators() if ranks > 1 else nullcontext():
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
        evaluated = trainer.evaluate()
    history = trainer.state.log_history
    return {
        **{key: [x[key] for x in history if key in x] for key in (*LOGGED, *COUNTS, *ROUTERS)},
        **{key: evaluated.get(key) for key in EVALUATED},
        "weights": weights_of(trainer.model),
        "explained": explained,
        "straddled": straddled,
    }


@pytest.mark.parametrize("name", CASES)
def test_ranks_log_and_train_as_one_process_does(name: str) -> None:
    case = CASES[name]
    many, one = on_ranks(train, case, ranks=2 * case.groups), train(case._replace(groups=1))
    assert any(many["straddled"])
    assert re.search(r"in 18 rows of 96 tokens, 76.1% full, by PackedCollator .*, cut over 2 ranks", many["explained"])
    assert len(many["loss"]) == 2
    for key in LOGGED:
        assert one[key] and many[key] == pytest.approx(one[key], rel=1e-5), key
    for key in COUNTS:
        assert many[key] == one[key], key
    assert bool(one["num_tokens"]) == bool(one["eval_num_tokens"]) == (case.kind == "SFTTrainer")
    assert bool(one["num_input_tokens_seen"]) == ("include_num_input_tokens_seen" in case.options)
    for key in ROUTERS:
        assert many[key] == pytest.approx(one[key], rel=1e-5)
        assert bool(one[key]) == ("router_aux_loss_coef" in case.options)
    for key in EVALUATED:
        assert (many[key] or 0) == pytest.approx(one[key] or 0, rel=1e-5), key
    assert (one["eval_loss_per_batch"] is None) == bool(case.smoothing)
    assert_same_weights(many["weights"], one["weights"])


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


@pytest.mark.parametrize(("kind", "broken"), [("Trainer", False), ("Trainer", True), ("SFTTrainer", False)])
def test_an_audit_of_a_trainer_tells_what_is_exact(kind: str, broken: bool) -> None:
    verdict, words = on_ranks(audited, kind, broken)
    assert verdict == ("contaminated" if broken else "exact"), words
    assert "row cut over 2 ranks" in words


def pack(kind: str = "Trainer", replaced: Any = None, predicts: bool = False, **changes: Any) -> None:
    """Packs a trainer that has other arguments, or another attribute, or asks for the logits of cut documents."""
    with TemporaryDirectory() as folder:
        trainer = trainer_of(Case(kind=kind), folder, **changes)
        for name, value in (replaced or {}).items():
            setattr(trainer, name, value)
        enable_packing(trainer, capacity=CAPACITY, verify=False)
        if predicts:
            trainer.train()
            trainer.predict(documents(8))


# One of each place that refuses; ``test_over_ranks`` has the other reasons, without processes.
WITHOUT_LOGITS = "every rank computes its part of the loss without the logits of others"
CUT = "context parallelism (cp_size=2) cuts documents over ranks, and "
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"replaced": {"compute_loss_func": max}}, f"{CUT}{WITHOUT_LOGITS}: compute_loss_func reads them"),
    (
        {"kind": "SFTTrainer", "loss_type": "dft"},
        f"{CUT}{WITHOUT_LOGITS}: loss_type='dft' is a loss of TRL's own",
    ),
    ({"torch_compile": True}, f"{CUT}their pieces differ in every batch: leave torch_compile out"),
    (
        {"predicts": True, "max_steps": 1},
        "documents are cut over 2 ranks, and no rank has the logits",
    ),
]


@pytest.mark.parametrize(("options", "text"), REFUSALS, ids=[str(options) for options, _ in REFUSALS])
def test_trainers_that_need_whole_documents_are_refused(options: dict[str, Any], text: str) -> None:
    assert all(error.startswith(f"UnsupportedError: {text}") for error in refused(pack, **options))
