"""``enable_packing`` with audio: an update of the trainer equals that of each document alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from tests.torch_backend.audio_models import audio_model
from tests.torch_backend.audio_processors import PROCESSORS, sound
from tests.torch_backend.collate.test_audio_collator import assert_same
from tests.torch_backend.collate.test_sounds import CHATS, at_rate, chat, processed
from tests.torch_backend.collate.test_vision_collator import update
from tests.torch_backend.trainers.test_vision_trainers import ONE_STEP, RATE, Processes
from torch_backend import PackedCollator, audit, enable_packing
from torch_backend.collate.sounds import clips_of

DATA = [*CHATS, chat(at_rate(sound(0.5, 7)), at_rate(sound(0.2, 8)))]
CAPACITY = 40


def data_of(family: str) -> list[dict[str, Any]]:
    return DATA if family == "qwen2_audio" else CHATS  # the other processors take one clip to a text


def listed(clip: Any) -> dict[str, Any]:
    """The clip as a ``datasets.Dataset`` keeps it."""
    (samples,) = clips_of({"audio": clip}, "it", 16_000)
    return at_rate(samples.tolist())


def trainer_of(family: str, kind: str, model: Any, folder: Any) -> Any:
    processor = PROCESSORS[family]()
    options = {**ONE_STEP, "output_dir": str(folder), "remove_unused_columns": False}
    if kind == "sft":
        skip = {"dataset_kwargs": {"skip_prepare_dataset": True}, "gradient_checkpointing": False, "bf16": False}
        collator = PackedCollator(model, processor=processor)
        data = Dataset.from_list([{**x, "audios": [listed(clip) for clip in x["audios"]]} for x in data_of(family)])
        return SFTTrainer(
            model,
            SFTConfig(**options, **skip),
            train_dataset=data,
            data_collator=collator,
            processing_class=processor,
        )
    arguments = TrainingArguments(**options)
    return Trainer(model, arguments, train_dataset=data_of(family), data_collator=Processes(processor, processed))


def moved(model: Any, before: Any, truth: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The loss of the truth, and what the step would have had as gradients."""
    start = dict(before.named_parameters())
    found = {name: (start[name] - p).detach() / RATE for name, p in model.named_parameters() if name in truth}
    return {"loss": truth["loss"], **found}


@pytest.mark.parametrize(
    ("family", "kind", "fast"),
    [
        ("qwen2_audio", "trainer", True),
        ("qwen2_audio", "trainer", False),
        ("qwen2_audio", "sft", True),
        ("audioflamingo3", "trainer", True),
        ("qwen3_asr", "trainer", False),
    ],
)
def test_an_update_equals_each_document_alone(family: str, kind: str, fast: bool, tmp_path: Any) -> None:
    model, before = audio_model(family), audio_model(family)
    truth = update(copy.deepcopy(before), [processed(PROCESSORS[family](), example) for example in data_of(family)])
    trainer = trainer_of(family, kind, model, tmp_path)
    enable_packing(trainer, capacity=CAPACITY, verify=False, fast=fast)
    trainer.train()
    assert_same(moved(model, before, truth), truth)


@pytest.mark.parametrize("family", ["qwen2_audio", "qwen3_asr"])
def test_the_audit_of_a_trainer_with_audio_is_exact(family: str, tmp_path: Any) -> None:
    trainer = trainer_of(family, "trainer", audio_model(family), tmp_path)
    enable_packing(trainer, capacity=CAPACITY, verify=False)
    report = audit(trainer)
    assert report.verdict == "exact" and report.documents == len(data_of(family)) and report.rows > 1
    assert report.gradients < 1e-5
