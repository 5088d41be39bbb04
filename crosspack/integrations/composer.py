"""A callback for Composer, and the specification of packed data that its trainer asks for.

``Trainer(model, packed_spec(loader), callbacks=[ComposerPacking()])`` -> ``Event.INIT`` patches the transformers model
and lets Composer's wrapper hand the segments on.
"""

from __future__ import annotations

from typing import Any

from composer import Callback, DataSpec

import crosspack
from packing_core.batches.keys import BatchKey

CARRIED = (*BatchKey.ALL, "position_ids", "loss_weights")  # weights are refused by a loss that does not count them


class ComposerPacking(Callback):
    """Patches the model of a Composer trainer.

    Args:
        options: arguments of ``crosspack.patch``.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def init(self, state: Any, logger: Any) -> None:
        """Patch the model, and add the segments to the arguments that ``HuggingFaceModel`` hands on.

        Raises:
            UnsupportedModelError: as ``crosspack.patch``.
        """
        crosspack.patch(state.model, **self.options)
        model = getattr(state.model, "module", state.model)
        if hasattr(model, "model_forward_args"):  # it drops every other key of a batch
            model.model_forward_args = {*model.model_forward_args, *CARRIED}


def packed_spec(loader: Any) -> Any:
    """Returns Composer's ``DataSpec`` of a dataloader of packed batches.

    Composer counts rows as samples and targets as tokens that generate loss, so ``accumulate_train_batch_on_tokens``
    weighs ranks by their targets. A batch is one microbatch.

    Args:
        loader: a ``DataLoader`` whose ``collate_fn`` is :class:`crosspack.PackedCollator`.
    """
    return DataSpec(
        loader, split_batch=_whole, get_num_samples_in_batch=_count_rows, get_num_tokens_in_batch=_count_tokens
    )


def _whole(batch: Any, microbatch_size: Any) -> list[Any]:
    rows = _count_rows(batch)
    if microbatch_size < rows:
        raise crosspack.UnsupportedError(
            f"Composer's device_train_microbatch_size={microbatch_size} cuts a packed batch of {rows} rows, whose "
            f"segments are counted over all of them: let the dataloader take batch_size={microbatch_size}"
        )
    return [batch]


def _count_rows(batch: Any) -> int:
    return len(batch["input_ids"])


def _count_tokens(batch: Any) -> dict[str, int]:
    return {"total": batch["input_ids"].numel(), "loss_generating": int((batch["labels"] != -100).sum())}
