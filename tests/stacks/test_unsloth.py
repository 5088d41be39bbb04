"""Labels of Unsloth's ``train_on_responses_only``, by a stand-in with its signature: ``python -m tests.stacks unsloth``
runs the released one.
"""

from __future__ import annotations

from importlib import import_module

import pytest
import transformers

import crosspack
from packing_core.errors import PackingError
from tests.stacks.training import documents_of, is_exact
from tests.torch_backend.steps.test_sft_step import DEFAULTS, tokenizer, words
from tests.torch_backend.trainers.test_trainer import CAPACITY, arguments, datasets, llama, trl

PARTS = {"instruction_part": "w60 w61", "response_part": "w62 w63"}


@pytest.fixture
def responses_only(stand_ins):
    return import_module("unsloth.chat_templates").train_on_responses_only


def built(tmp_path, **options):
    texts = [f"w60 w61 {words(2 + i % 3)} w62 w63 {words(3 + i % 5)} w2" for i in range(16)]
    given = {"max_length": CAPACITY, "max_steps": 1, "per_device_train_batch_size": 8, "use_cpu": True}
    return trl.SFTTrainer(
        llama(),
        arguments(trl.SFTConfig, tmp_path, **DEFAULTS | given | options),
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
    )


def test_responses_are_trained_exactly_before_and_after(responses_only, tmp_path) -> None:
    masked = responses_only(built(tmp_path), **PARTS)
    assert type(masked.data_collator) is transformers.DataCollatorForSeq2Seq
    documents = documents_of(masked.train_dataset)
    assert all(0 < sum(label != -100 for label in labels) < len(labels) - 4 for _, labels in documents)
    assert is_exact(crosspack.enable_packing(masked), documents)

    late = responses_only(crosspack.enable_packing(built(tmp_path)), **PARTS)
    with pytest.raises(PackingError, match=r"train_dataset was exchanged after enable_packing\(trainer\): call it ag"):
        late.train()  # it replaced the data and the collator
    assert is_exact(crosspack.enable_packing(late), documents)


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_rows_of_trl_are_masked_document_by_document(responses_only, tmp_path, late) -> None:
    documents = documents_of(responses_only(built(tmp_path), **PARTS).train_dataset)
    trainer = built(tmp_path, packing=True)
    if late:
        crosspack.enable_packing(trainer)
    responses_only(trainer, **PARTS)
    assert is_exact(trainer if late else crosspack.enable_packing(trainer), documents)
