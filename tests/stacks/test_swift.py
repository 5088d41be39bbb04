"""The plugin for ms-swift on a stand-in, whose signatures ``python -m tests.stacks swift`` compares with a release."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import transformers

from packing_core.errors import PackingError, UnsupportedError
from tests.stacks.training import is_exact
from tests.torch_backend.trainers.test_trainer import arguments, documents, llama


class Rows(list):
    """A data set of rows, as ms-swift's: a list of documents each."""


def built(plugin, tmp_path, *, padding_free=True, accumulation=2, **named):
    found = [
        {"input_ids": x["input_ids"], "labels": x["labels"], "length": len(x["input_ids"])}
        for x in documents(12).remove_columns("comment")
    ]
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation, "max_steps": 1}
    args = arguments(transformers.Seq2SeqTrainingArguments, tmp_path, **options, remove_unused_columns=False)
    args.use_logits_to_keep = None
    for name, value in named.items():
        setattr(args, name, value)
    return plugin.PackedSeq2SeqTrainer(
        model=llama(),
        args=args,
        template=SimpleNamespace(padding_free=padding_free),
        train_dataset=Rows(found[first : first + 3] for first in range(0, 12, 3)),
    )


def test_an_update_is_that_of_each_document_alone(plugin, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(plugin, "_options", {"audit": True})
    trainer = built(plugin, tmp_path)
    assert "exact" in capsys.readouterr().out and trainer.args.use_logits_to_keep is False
    assert is_exact(trainer)


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("padding_free", False, "pads each document of this run: pass --packing true, or --padding_f"),
        ("sequence_parallel_size", 2, "ms-swift's sequence_parallel_size=2 cuts rows, and documents with them"),
        ("predict_with_generate", True, "ms-swift's predict_with_generate=True evaluates by generating"),
        ("use_logits_to_keep", True, "ms-swift's use_logits_to_keep=True gives the model labels of some"),
    ],
)
def test_what_packing_cannot_follow_is_refused_by_name(plugin, tmp_path, option, value, reason) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        built(plugin, tmp_path, **{option: value})


def test_configure_gives_ms_swift_the_trainer_and_any_attention(plugin, monkeypatch) -> None:
    monkeypatch.setattr(plugin, "_options", {})
    plugin.configure(implementation="sdpa")
    assert plugin._options == {"implementation": "sdpa"}
    mapping = sys.modules["swift.trainers"].TrainerFactory.TRAINER_MAPPING
    assert mapping["causal_lm"] == "crosspack.integrations.swift.PackedSeq2SeqTrainer"
    check = sys.modules["swift.arguments"].SftArguments._check_padding_free
    taken = SimpleNamespace(packing=True, padding_free=False, task_type="causal_lm")
    check(taken)  # any attention implementation
    assert taken.padding_free, "--packing true joins documents without padding"
    for other in ({"rlhf_type": "dpo", "task_type": "causal_lm"}, {"task_type": "embedding"}):
        check(SimpleNamespace(packing=False, padding_free=False, **other))
        with pytest.raises(UnsupportedError, match="by a trainer that this plugin does not patch, and documents that"):
            check(SimpleNamespace(packing=False, padding_free=True, **other))
    with pytest.raises(PackingError, match="configure.. has no option pack"):
        plugin.configure(pack=1)
