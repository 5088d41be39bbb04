"""The launcher of LLaMA-Factory on a stand-in, whose signatures ``python -m tests.stacks llamafactory`` compares."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers

from packing_core.errors import PackingError, UnsupportedError
from tests.stacks.training import is_exact
from tests.torch_backend.trainers.test_trainer import CAPACITY, arguments, documents, llama, tiny_tokenizer
from torch_backend.trainers.dataloader import rows_of


def built(plugin, kind, tmp_path, monkeypatch, in_order=False):
    tokenizer = tiny_tokenizer()
    monkeypatch.setattr(plugin._PackedWhenBuilt, "options", {"capacity": CAPACITY})
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 1, "max_steps": -1}
    return kind(
        model=llama(),
        args=arguments(transformers.Seq2SeqTrainingArguments, tmp_path, **sizes),
        finetuning_args=SimpleNamespace(disable_shuffling=in_order),
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer),
        train_dataset=documents().remove_columns("comment"),
        processor=None,
        tokenizer=tokenizer,
    )


@pytest.mark.parametrize("kind", ["TuningTrainer", "PretrainingTrainer"])
def test_an_update_is_that_of_each_document_alone(plugin, kind, tmp_path, monkeypatch) -> None:
    trainer = built(plugin, getattr(plugin, kind), tmp_path, monkeypatch)
    assert is_exact(trainer)
    assert trainer.state.max_steps == 1 and rows_of(trainer) is not None, "the whole data set is packed"


def test_data_that_are_not_shuffled_keep_their_order(plugin, tmp_path, monkeypatch) -> None:
    trainer = built(plugin, plugin.TuningTrainer, tmp_path, monkeypatch, in_order=True)
    first = next(iter(trainer.get_train_dataloader()))["input_ids"].flatten()[: CAPACITY // 2]
    ids = [token for document in trainer.train_dataset["input_ids"][:8] for token in document]
    assert first.tolist() == ids[: len(first)]


def test_its_packing_is_taken_over(plugin) -> None:
    config = {"stage": "sft", "neat_packing": True, "packing": True, "cutoff_len": 9, "crosspack": {"overflow": "drop"}}
    assert plugin.take_over(config) == {"capacity": 9, "overflow": "drop"}
    assert config == {"stage": "sft", "neat_packing": False, "packing": False, "cutoff_len": 9}
    assert plugin.take_over({"crosspack": {"capacity": 5}}) == {"capacity": 5}
    assert plugin.take_over({}) == {"capacity": 2048}, "the length that LLaMA-Factory cuts documents to"


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"stage": "dpo"}, "stage='dpo' trains pairs or scores by losses over padded batches: train it by "),
        ({"use_ray": True}, "use_ray=True builds the trainer in other processes"),
        ({"predict_with_generate": True}, "predict_with_generate=True generates from padded prompts"),
        ({"use_asft_loss": True}, "use_asft_loss=True runs a second model on the same rows"),
    ],
)
def test_what_packing_cannot_follow_is_refused_by_name(plugin, option, reason) -> None:
    with pytest.raises(UnsupportedError, match=f"LLaMA-Factory's {reason}"):
        plugin.take_over(option)


def test_the_launcher_gives_llamafactory_its_trainers(plugin, tmp_path, monkeypatch) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(json.dumps({"stage": "sft", "cutoff_len": 9, "crosspack": {"audit": True}}))
    monkeypatch.setattr(sys, "argv", ["llamafactory"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    plugin.main(["train", str(file), "stage=pt"])
    (kind, config) = sys.modules["llamafactory.train.tuner"].ran[-1]
    assert kind is plugin.PretrainingTrainer and "crosspack" not in config
    assert plugin._PackedWhenBuilt.options == {"capacity": 9, "audit": True}


def test_the_launcher_refuses_what_it_would_run_wrongly(plugin, monkeypatch) -> None:
    with pytest.raises(PackingError, match="the command is `train FILE.yaml"):
        plugin.main(["export", "a.yaml"])
    with pytest.raises(PackingError, match=r"read from a file: pass train.yaml, and others as NAME=VALUE"):
        plugin.take_over(["--stage", "sft"])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(PackingError, match="torchrun --nproc-per-node 2 -m crosspack.integrations.llama.* train a"):
        plugin.main(["train", "a.yaml"])
