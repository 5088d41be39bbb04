"""A callback for Lightning: its loop trains the packed rows of its dataloader without contamination.

``Trainer(callbacks=[LightningPacking()])`` -> ``setup`` patches the transformers model of the module, before a strategy
wraps it -> the first training batch is checked for its segments and audited. Loop, loss and optimizer are Lightning's.
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:  # the same callbacks under the older name of the package
    from pytorch_lightning import Callback

import crosspack
from crosspack.integrations.batches import FirstBatch

_SHARDING = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")


class LightningPacking(Callback):
    """Patches the model of a LightningModule, and audits its first training batch.

    Args:
        audit: compare the logits of the first batch with each document alone, and stop if they see each other.
        options: arguments of ``crosspack.patch``.
    """

    def __init__(self, *, audit: bool = True, **options: Any) -> None:
        self.options = options
        self._first = FirstBatch(audit=audit)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Patch the model that the module holds.

        Raises:
            UnsupportedModelError: as ``crosspack.patch``, also if the module has no model yet.
            UnsupportedError: the strategy shards the model, whose documents cannot be run alone.
        """
        strategy = type(trainer.strategy).__name__
        if self._first.audit and strategy in _SHARDING:
            raise crosspack.UnsupportedError(
                f"Lightning's {strategy} shards the model, and the audit of a batch calls it past its wrapper: pass "
                "LightningPacking(audit=False); crosspack.patch audits the model all the same"
            )
        crosspack.patch(pl_module, **self.options)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Check the first batch.

        Raises:
            PackingError, ContaminationError, UnsupportedError: it carries no segments, or they do not hold.
        """
        self._first.check(pl_module, batch)
