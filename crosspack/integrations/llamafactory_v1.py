"""LLaMA-Factory's v1, which ``USE_V1=1 python -m crosspack.integrations.llamafactory sft train.yaml`` trains by.

v1 renders documents and joins those of a micro-batch (``batching_strategy: padding_free``) -> :class:`PackedBatches`
carries their boundaries -> :class:`PackedSFTTrainer` runs them through the patched model, under v1's own loss.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from llamafactory.hparams import read_args
from llamafactory.v1.core.utils.batching import BatchGenerator
from llamafactory.v1.trainers import sft_trainer
from torch import Tensor
from torch.nn import functional as F

import crosspack
from crosspack.integrations.options import read_options
from packing_core.errors import PackingError, UnsupportedError

_STRATEGIES = ("padding_free", "dynamic_padding_free")


class PackedBatches(BatchGenerator):
    """v1's batches, in which every micro-batch carries its segments."""

    def _generate_batch(self) -> list[dict[str, Any]] | None:
        batch: list[dict[str, Any]] | None = super()._generate_batch()
        return batch and [dict(crosspack.with_boundaries(dict)(micro_batch)) for micro_batch in batch]


class PackedSFTTrainer(sft_trainer.SFTTrainer):
    """v1's trainer on a patched model."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, args: Any, model: Any, *given: Any, **named: Any) -> None:
        if str(args.batching_strategy) not in _STRATEGIES:
            raise UnsupportedError(
                f"LLaMA-Factory's batching_strategy={str(args.batching_strategy)!r} pads each document: set it to "
                "padding_free or dynamic_padding_free"
            )
        distributed = dict(args.dist_config or {})
        if distributed.get("name") == "deepspeed" or distributed.get("cp_size", 1) > 1:
            raise UnsupportedError(
                "LLaMA-Factory's dist_config asks for DeepSpeed or for context parallelism, which v1 runs by a loop or "
                "a loss that packing does not know: use fsdp2, or leave dist_config out"
            )
        crosspack.patch(model, **self.options)
        super().__init__(args, model, *given, **named)

    def _create_batch_generator(self) -> None:  # v1's own asks for flash_attention_2 as well
        names = ("micro_batch_size", "global_batch_size", "cutoff_len", "batching_workers", "batching_strategy", "seed")
        given = {name: getattr(self.args, name) for name in names}
        self.train_batch_generator = PackedBatches(dataset=self.train_dataset, renderer=self.renderer, **given)

    def compute_log_probs(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """Returns the log-probability of each token after the first, [B, S - 1]; 0 where none is a target."""
        moved = {n: x.to(self.device, non_blocking=True) if isinstance(x, Tensor) else x for n, x in batch.items()}
        del moved["loss_weights"]
        labels = moved.pop("labels")[:, 1:]
        logits = model(**moved).logits[:, :-1].float()
        return -F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def main(arguments: list[str]) -> None:
    """Train as ``llamafactory-cli sft`` does under ``USE_V1``; ``arguments`` begin with ``sft`` or ``train``.

    Raises:
        PackingError: there is another command, or the configuration names an unknown option.
    """
    if arguments[:1] not in (["sft"], ["train"]):
        raise PackingError("LLaMA-Factory's v1 trains by `sft FILE.yaml [NAME=VALUE ...]`, and packing serves no other")
    sys.argv[1:] = arguments[1:]  # where read_args looks
    config = read_args()
    if not isinstance(config, dict):
        raise PackingError("LLaMA-Factory's arguments are read from a file: pass train.yaml, and others as NAME=VALUE")
    from torch_backend import patch  # whose options there are, and none of rows, which are v1's

    PackedSFTTrainer.options = read_options(config.pop("crosspack", None), "crosspack under v1", patch)
    sft_trainer.SFTTrainer = PackedSFTTrainer
    sft_trainer.run_sft(config)
