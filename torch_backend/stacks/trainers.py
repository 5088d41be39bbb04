"""Trainers in wide use, built over a tiny clone as users build them, and audited: ``crosspack audit --trainer trl``.

A config -> a tiny random model -> ``SFTTrainer(packing=True)`` on a few documents, stock and after ``enable_packing``
-> :func:`torch_backend.auditing.trainer.audit_trainer` -> one :class:`torch_backend.stacks.paths.PathResult` each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from packing_core.errors import PackingError
from packing_core.extras import require
from torch_backend.auditing.tiny import tiny_config, tiny_model
from torch_backend.auditing.trainer import TrainerReport, audit_trainer
from torch_backend.trainers.enable_packing import enable_packing

CAPACITY = 64
_SFT = "SFTTrainer(packing=True)"
# path of the table -> whether enable_packing is called
TRAINERS = {"trl": {_SFT: False, f"{_SFT}, enable_packing": True}}


def trainer_paths(name: str) -> dict[str, bool]:
    """Returns the paths of a trainer in the table, and of each whether ``enable_packing`` is called.

    Raises:
        PackingError: there is no trainer of that name.
    """
    if name not in TRAINERS:
        raise PackingError(f"--trainer {name}: there is {', '.join(TRAINERS)}")
    return TRAINERS[name]


def audit_sft(config: Any, documents: list[list[int]], enabled: bool) -> TrainerReport:
    """Audits TRL's ``SFTTrainer`` over documents, whose errors pass through."""
    datasets, trl = require("datasets", extra="hf"), require("trl", extra="hf")
    with TemporaryDirectory() as folder, _quiet():
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
        data, tokenizer = datasets.Dataset.from_dict({"input_ids": documents}), placeholder_tokenizer()
        model = tiny_model(tiny_config(config))
        trainer = trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
        return audit_trainer(enable_packing(trainer, verify=False) if enabled else trainer)


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
