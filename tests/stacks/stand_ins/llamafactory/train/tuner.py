"""Runs a configuration: builds a trainer by the name that the workflow of its stage has."""

from llamafactory.train.pt import workflow as pt
from llamafactory.train.sft import workflow as sft

ran = []


def run_exp(args=None, callbacks=None):
    kind = pt.CustomTrainer if args["stage"] == "pt" else sft.CustomSeq2SeqTrainer
    ran.append((kind, args))
