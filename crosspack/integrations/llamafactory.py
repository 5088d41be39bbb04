"""A launcher for LLaMA-Factory, which imports trainers from its own modules alone.

``python -m crosspack.integrations.llamafactory train train.yaml`` -> :func:`take_over` reads the configuration and
turns LLaMA-Factory's packing off -> LLaMA-Factory loads its data, one example per document, and builds one of the
trainers below in place of its own -> ``enable_packing``.
"""

from __future__ import annotations

import os
import sys
from typing import Any, ClassVar

import torch
from llamafactory.hparams import read_args
from llamafactory.train.pt import workflow as pretraining
from llamafactory.train.sft import workflow as tuning
from llamafactory.train.tuner import run_exp
from transformers import Trainer

from crosspack.integrations.options import pack_trainer, read_options, refuse
from packing_core.errors import PackingError, UnsupportedError

_OTHER_LOOP = "trains by a loop of its own, which packing does not know: leave it out"
_REFUSED = {
    "use_ray": "builds the trainer in other processes, where it would not be packed: leave it out",
    "use_mca": _OTHER_LOOP,
    "use_hyper_parallel": _OTHER_LOOP,
    "use_kt": _OTHER_LOOP,
    "use_asft_loss": "runs a second model on the same rows, which would see all of a row: leave it out",
    "predict_with_generate": "generates from padded prompts, and evaluation is packed: generate in a run of its own",
    "shift_attn": "replaces the attention of the model by one across documents: leave it out",
    "mixture_of_depths": "chooses tokens over the whole row, across documents: leave it out",
}
_STAGES = ("sft", "pt")


class _PackedWhenBuilt:
    """Mixed into a trainer of LLaMA-Factory: takes its data through transformers' sampler, and is packed when built."""

    options: ClassVar[dict[str, Any]] = {}

    _get_train_sampler = Trainer._get_train_sampler
    compute_loss = Trainer.compute_loss

    def __init__(self, *args: Any, finetuning_args: Any, **given: Any) -> None:
        super().__init__(*args, finetuning_args=finetuning_args, **given)  # type: ignore[call-arg] # the trainer's
        trainer: Any = self
        if finetuning_args.disable_shuffling:
            trainer.args.train_sampling_strategy = "sequential"
        pack_trainer(trainer, self.options)


class TuningTrainer(_PackedWhenBuilt, tuning.CustomSeq2SeqTrainer):
    """The trainer of ``stage: sft``."""


class PretrainingTrainer(_PackedWhenBuilt, pretraining.CustomTrainer):
    """The trainer of ``stage: pt``."""


def take_over(config: Any) -> dict[str, Any]:
    """Read the options of Crosspack from a configuration, and turn LLaMA-Factory's packing off in it.

    Args:
        config: of LLaMA-Factory, as it is read from a file; changed in place.

    Returns:
        The options; rows of ``cutoff_len`` tokens unless they say otherwise.

    Raises:
        UnsupportedError: a stage or an option of LLaMA-Factory does not go with packing.
        PackingError: the configuration is no file.
    """
    if not isinstance(config, dict):
        raise PackingError("LLaMA-Factory's arguments are read from a file: pass train.yaml, and others as NAME=VALUE")
    stage = config.get("stage", "sft")
    if stage not in _STAGES:
        raise UnsupportedError(
            f"LLaMA-Factory's stage={stage!r} trains pairs or scores by losses over padded batches: train it by "
            "LLaMA-Factory alone, or by TRL's trainer under enable_packing"
        )
    refuse(_REFUSED, config, "LLaMA-Factory")
    config["packing"] = config["neat_packing"] = False  # the one mixes documents, the other replaces transformers' mask
    given = read_options(config.pop("crosspack", None), "crosspack")
    return {"capacity": config.get("cutoff_len", 2048), **given}


def main(arguments: list[str]) -> None:
    """Train as ``llamafactory-cli train`` does; ``arguments`` begin with ``train``.

    Raises:
        PackingError: there is another command, or one process for several GPUs.
        UnsupportedError: as :func:`take_over`.
    """
    is_v1 = os.environ.get("USE_V1", "0").lower() in ("1", "true", "y")
    if not is_v1 and arguments[:1] != ["train"]:
        raise PackingError("the command is `train FILE.yaml [NAME=VALUE ...]`; llamafactory-cli has the others")
    if torch.cuda.device_count() > 1 and "LOCAL_RANK" not in os.environ:
        line = " ".join(arguments)
        raise PackingError(
            f"this is one process, and there are {torch.cuda.device_count()} GPUs: start it by `torchrun "
            f"--nproc-per-node {torch.cuda.device_count()} -m crosspack.integrations.llamafactory {line}`"
        )
    if is_v1:
        from crosspack.integrations import llamafactory_v1

        return llamafactory_v1.main(arguments)
    sys.argv[1:] = arguments[1:]  # where read_args looks
    config = read_args()
    _PackedWhenBuilt.options = take_over(config)
    tuning.CustomSeq2SeqTrainer, pretraining.CustomTrainer = TuningTrainer, PretrainingTrainer
    run_exp(config)


if __name__ == "__main__":
    main(sys.argv[1:])
