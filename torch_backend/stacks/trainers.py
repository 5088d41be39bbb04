"""Trainers in wide use, built over a tiny clone as users build them, and audited: ``crosspack audit --trainer trl``.

A config -> a tiny random model -> ``SFTTrainer(packing=True)`` on a few documents, stock and after ``enable_packing``
-> :func:`torch_backend.auditing.trainer.audit_trainer` -> one :class:`torch_backend.stacks.paths.PathResult` each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from packing_core.errors import PackingError
from packing_core.extras import require
from torch_backend.auditing.tiny import tiny_config, tiny_model
from torch_backend.auditing.trainer import TrainerReport, audit_trainer
from torch_backend.trainers.enable_packing import enable_packing

CAPACITY = 64


def _sft_trainer(config: Any, documents: list[list[int]], folder: str) -> Any:
    datasets, trl = require("datasets", extra="hf"), require("trl", extra="hf")
    arguments = trl.SFTConfig(
        folder,
        packing=True,
        max_length=CAPACITY,
        per_device_train_batch_size=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
    )
    data = datasets.Dataset.from_dict({"input_ids": documents})
    return trl.SFTTrainer(
        tiny_model(tiny_config(config)), arguments, train_dataset=data, processing_class=placeholder_tokenizer()
    )


# name -> what builds it, and how its two rows of the table are called
TRAINERS: dict[str, tuple[Callable[..., Any], str]] = {"trl": (_sft_trainer, "SFTTrainer(packing=True)")}


def trainer_paths(name: str) -> tuple[str, str]:
    """Returns the names of a trainer in the table, as it is and after ``enable_packing``.

    Raises:
        PackingError: there is no trainer of that name.
    """
    if name not in TRAINERS:
        raise PackingError(f"--trainer {name}: there is {', '.join(TRAINERS)}")
    path = TRAINERS[name][1]
    return path, f"{path}, enable_packing"


def audits(name: str, config: Any, documents: list[list[int]]) -> Iterator[tuple[str, Callable[[], TrainerReport]]]:
    """Lists each path of a trainer with the call that audits it; the trainer's errors pass through."""
    build = TRAINERS[name][0]

    def audit(packed: bool) -> TrainerReport:
        with TemporaryDirectory() as folder, _quiet():
            trainer = build(config, documents, folder)
            return audit_trainer(enable_packing(trainer, verify=False) if packed else trainer)

    stock, enabled = trainer_paths(name)
    yield stock, lambda: audit(packed=False)
    yield enabled, lambda: audit(packed=True)


def placeholder_tokenizer() -> Any:
    """Makes the tokenizer that a trainer needs to be built; the documents are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(4)}, unk_token="<3>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<0>", bos_token="<1>", eos_token="<2>", unk_token="<3>"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Datasets of three documents need no progress bars."""
    datasets = require("datasets", extra="hf")
    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not shown:
            datasets.enable_progress_bars()
