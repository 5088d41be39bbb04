"""A callback for Lightning: its loop trains the packed rows of its dataloader without contamination.

``Trainer(callbacks=[LightningPacking()])`` -> ``setup`` patches the transformers model of the module, before a strategy
wraps it. Loop, loss and optimizer are Lightning's.
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:  # the same callbacks under the older name of the package
    from pytorch_lightning import Callback

import crosspack


class LightningPacking(Callback):
    """Patches the model of a LightningModule.

    Args:
        options: arguments of ``crosspack.patch``.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Patch the model that the module holds.

        Raises:
            UnsupportedModelError: as ``crosspack.patch``, also if the module has no model yet.
        """
        crosspack.patch(pl_module, **self.options)
