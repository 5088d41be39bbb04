"""The trainer of language models, whose template joins the documents of its rows, and the names of trainers."""

from importlib import import_module

import torch
from transformers import Seq2SeqTrainer as HfSeq2SeqTrainer


class TrainerFactory:
    TRAINER_MAPPING = {"causal_lm": "swift.trainers.Seq2SeqTrainer"}  # noqa: RUF012 # as in the release

    @classmethod
    def get_trainer_cls(cls, args):
        module, _, name = cls.TRAINER_MAPPING.get(
            getattr(args, "rlhf_type", args.task_type), "builtins.object"
        ).rpartition(".")
        return getattr(import_module(module), name)


class Seq2SeqTrainer(HfSeq2SeqTrainer):
    def __init__(self, *args, **kwargs):
        self.template = kwargs.pop("template")
        super().__init__(*args, data_collator=_joined, **kwargs)


def _joined(batch):
    documents = [document for row in batch for document in row]
    names = {"input_ids": [], "labels": [], "position_ids": []}
    for document in documents:
        for name in ("input_ids", "labels"):
            names[name] += document[name]
        names["position_ids"] += range(document["length"])
    return {name: torch.tensor([tokens]) for name, tokens in names.items()}
