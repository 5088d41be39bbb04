"""``enable_packing`` with images: an update of the trainer equals that of each document alone."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from conformance.pairwise import pairwise
from packing_core.errors import CapacityError, LayoutError, PackingError, UnsupportedError, UnsupportedModelError
from tests.torch_backend.collate.test_vision_collator import CHATS, TOLERANCE, chat, processed, update
from tests.torch_backend.models import PLAIN_SGD, tiny
from tests.torch_backend.processors import picture, tiny_processor
from tests.torch_backend.vision_models import vision_model
from torch_backend import PackedCollator, PackedMediaDataset, audit, enable_packing
from torch_backend.collate.vision import VisionReader
from torch_backend.hf.anatomy.families import EXACT_KEYS

RATE = 10.0  # so that the step is larger than what float32 rounds of a weight
ONE_STEP: dict[str, Any] = {
    **PLAIN_SGD,
    "max_steps": 1,
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 8,
    "learning_rate": RATE,
    "seed": 3,
}
CAPACITY = {"llava": 60}


class Processes:
    """A collator as users of ``Trainer`` write it: the processor's batch, with labels at text alone."""

    def __init__(self, processor: Any, processed: Any = processed) -> None:
        self.processor, self.processed = processor, processed

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        assert len(examples) == 1
        return self.processed(self.processor, examples[0])


def after_one_step(model: Any, batches: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The weights after a step of plain SGD on the mean loss over all targets, one document at a time."""
    gradients = update(model, batches)
    return {name: p.detach() - RATE * gradients[name] for name, p in model.named_parameters() if name in gradients}


def assert_trained(model: Any, before: Any, want: dict[str, torch.Tensor]) -> None:
    """Every weight moved as it should, within 1e-5 of the largest move of the tower or of the decoder."""
    got, start = dict(model.named_parameters()), dict(before.named_parameters())
    for tower in (True, False):
        names = [name for name in want if ("vision" in name or "visual" in name) == tower]
        largest = max(float((want[name] - start[name]).detach().abs().max()) for name in names)
        errors = {name: float((got[name] - want[name]).detach().abs().max()) / largest for name in names}
        assert largest > 0 and all(error < TOLERANCE for error in errors.values()), errors


def trainer_of(family: str, kind: str, model: Any, processor: Any, data: Any, folder: Any) -> Any:
    if kind == "sft":
        return SFTTrainer(
            model,
            SFTConfig(**ONE_STEP, output_dir=str(folder), bf16=False, gradient_checkpointing=False, max_length=512),
            train_dataset=Dataset.from_list(data),
            processing_class=processor,
        )
    arguments = TrainingArguments(**ONE_STEP, output_dir=str(folder), remove_unused_columns=False)
    return Trainer(model, arguments, train_dataset=data, data_collator=Processes(processor))


CASES = pairwise({"family": ("qwen2_5_vl", "llava", "idefics3"), "kind": ("trainer", "sft"), "fast": (True, False)})


@pytest.mark.parametrize(("family", "kind", "fast"), [tuple(case.values()) for case in CASES])
def test_an_update_equals_each_document_alone(family: str, kind: str, fast: bool, tmp_path: Any) -> None:
    model, processor = vision_model(family), tiny_processor(family)
    model.config.pad_token_id = 0  # that of Idefics3 is no token of a tiny model
    before = copy.deepcopy(model)
    examples = [processed(processor, example) for example in CHATS]
    if kind == "sft":  # TRL trains the tokens of images, too
        examples = [{**example, "labels": example["input_ids"]} for example in examples]
    want = after_one_step(before, examples)
    trainer = trainer_of(family, kind, model, processor, CHATS, tmp_path)
    enable_packing(trainer, capacity=CAPACITY.get(family, 48), verify=False, fast=fast)
    assert 1 < len(trainer.packing_plan.rows) < len(CHATS)
    assert "by PackedCollator in place of" in str(trainer.packing_plan)
    trainer.train()
    assert_trained(model, before, want)


def test_a_trainer_with_our_collator_or_our_rows_trains_alike(tmp_path: Any) -> None:
    processor = tiny_processor("qwen2_5_vl")
    before = vision_model("qwen2_5_vl")
    want = after_one_step(before, [processed(processor, example) for example in CHATS])
    for own_rows in (False, True):
        model = vision_model("qwen2_5_vl")
        data = PackedMediaDataset(CHATS, 48, model, processor) if own_rows else CHATS
        arguments = TrainingArguments(**ONE_STEP, output_dir=str(tmp_path), remove_unused_columns=False)
        collator = PackedCollator(model, processor=processor)
        trainer = Trainer(model, arguments, train_dataset=data, data_collator=collator)
        enable_packing(trainer, **({} if own_rows else {"capacity": 48}), verify=False)
        trainer.train()
        assert_trained(model, before, want)


@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("family", ["llava", "qwen3_moe"])
def test_checkpoints_are_read_whatever_names_they_give_to_weights(family: str, best: bool, tmp_path: Any) -> None:
    """Transformers writes images' weights under older names and experts one by one: its Trainer does not find them."""

    def trained(folder: Any, steps: int, resume: bool = False, **more: Any) -> dict[str, torch.Tensor]:
        saves = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 0.1, "max_steps": steps}
        images = family == "llava"
        data = CHATS if images else [{"input_ids": list(range(4, 14 + n))} for n in range(8)]
        trainer = Trainer(
            vision_model(family) if images else tiny(family),
            TrainingArguments(**{**ONE_STEP, **saves, **more}, output_dir=str(folder), remove_unused_columns=False),
            train_dataset=data,
            eval_dataset=data,
            data_collator=Processes(tiny_processor(family)) if images else None,
        )
        enable_packing(trainer, capacity=60, verify=False)
        trainer.train(resume_from_checkpoint=resume)
        return dict(trainer.model.named_parameters())

    if best:  # the worst of them, which is the first
        worst = {"metric_for_best_model": "eval_loss", "greater_is_better": True, "load_best_model_at_end": True}
        read = trained(tmp_path / "read", 3, eval_strategy="steps", eval_steps=1, **worst)
        whole = trained(tmp_path / "whole", 1)
    else:
        whole = trained(tmp_path / "whole", 2)
        shutil.copytree(tmp_path / "whole" / "checkpoint-1", tmp_path / "read" / "checkpoint-1")
        read = trained(tmp_path / "read", 2, resume=True)
    for name, weight in whole.items():
        assert float((read[name] - weight).detach().abs().max()) < 1e-6, name


@pytest.mark.parametrize("kind", ["trainer", "sft"])
def test_images_that_are_rare_among_texts_are_packed(kind: str, tmp_path: Any) -> None:
    model, processor = vision_model("qwen2_5_vl"), tiny_processor("qwen2_5_vl")
    data = [chat(ask=f"w{4 + i % 40}") for i in range(300)]
    data[150] = CHATS[1]  # none of the examples that are looked at
    trainer = trainer_of("qwen2_5_vl", kind, model, processor, data, tmp_path)
    enable_packing(trainer, capacity=48, verify=False)
    assert sum(bool(images) for row in trainer.packing_plan.rows for images in row.images) == 1


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "idefics3"])
def test_the_audit_of_a_trainer_with_images_is_exact(family: str, tmp_path: Any) -> None:
    model, processor = vision_model(family), tiny_processor(family)
    model.config.pad_token_id = 0
    trainer = trainer_of(family, "trainer", model, processor, CHATS, tmp_path)
    enable_packing(trainer, capacity=48, verify=False)
    report = audit(trainer)
    assert report.verdict == "exact" and report.documents == len(CHATS) and report.rows > 1
    assert report.gradients < TOLERANCE


def test_the_audit_notices_images_of_other_documents(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = vision_model("qwen2_5_vl"), tiny_processor("qwen2_5_vl")
    trainer = trainer_of("qwen2_5_vl", "trainer", model, processor, CHATS, tmp_path)
    enable_packing(trainer, capacity=48, verify=False)
    emit = VisionReader.emit

    def turned(reader: Any, batch: dict[str, Any], rows: Any) -> dict[str, Any]:
        found = emit(reader, batch, rows)
        return found | {"pixel_values": found["pixel_values"].flip(0)}  # each document gets another one's images

    monkeypatch.setattr(VisionReader, "emit", turned)
    assert audit(trainer).verdict == "contaminated"


def test_evaluation_is_that_of_each_document_alone(tmp_path: Any) -> None:
    model, processor = vision_model("qwen2_5_vl"), tiny_processor("qwen2_5_vl")
    trainer = trainer_of("qwen2_5_vl", "trainer", model, processor, CHATS, tmp_path)
    trainer.eval_dataset = CHATS
    want = update(model, [processed(processor, example) for example in CHATS])["loss"]
    enable_packing(trainer, capacity=48, verify=False)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(want), rel=1e-5)


def test_what_cannot_be_packed_is_refused_before_training(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = vision_model("qwen2_5_vl"), tiny_processor("qwen2_5_vl")

    def built(data: Any, model: Any = model, processor: Any = processor) -> Any:
        return trainer_of("qwen2_5_vl", "trainer", model, processor, data, tmp_path)

    with pytest.raises(CapacityError, match="example 2 has 23 tokens, 12 of them of images, and capacity is 16: raise"):
        enable_packing(built(CHATS), capacity=16, verify=False)
    torn = chat(picture(1), picture(2))
    torn["images"][1] = "no image"
    with pytest.raises(PackingError, match="example 1: Processes raised"):
        enable_packing(built([CHATS[1], torn]), capacity=48, verify=False)
    stream = IterableDataset.from_generator(lambda: iter(CHATS))
    with pytest.raises(UnsupportedError, match="a stream of examples with images is not packed: pass a datasets.Data"):
        enable_packing(built(stream), capacity=48, verify=False)
    monkeypatch.delitem(EXACT_KEYS, "gemma3")
    with pytest.raises(UnsupportedModelError, match="Gemma3ForConditionalGeneration is not known to be exact with im"):
        enable_packing(built(CHATS[1:], vision_model("gemma3"), tiny_processor("gemma3")), capacity=48, verify=False)


class Texts(torch.utils.data.IterableDataset):
    """A stream of chats without images, of which the first ones alone may be read before training."""

    def __iter__(self) -> Any:
        for number in range(200):
            assert number < 100, "the stream was read on"
            yield {"messages": chat(ask="w5")["messages"]}


class Endless(torch.utils.data.Dataset):
    """Eight examples, and the same one wherever else it is asked for."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": list(range(4, 10)), "labels": list(range(4, 10))}


def test_images_are_not_looked_for_in_streams_and_behind_the_last_example(tmp_path: Any) -> None:
    def trainer(data: Any, collator: Any) -> Trainer:
        arguments = TrainingArguments(**ONE_STEP, output_dir=str(tmp_path), remove_unused_columns=False)
        return Trainer(vision_model("qwen2_5_vl"), arguments, train_dataset=data, data_collator=collator)

    with pytest.raises(LayoutError, match="the training data have no input_ids, only messages"):
        enable_packing(trainer(Texts(), Processes(tiny_processor("qwen2_5_vl"))), capacity=60, verify=False)
    enable_packing(trainer(Endless(), None), capacity=60, verify=False)
