"""Checkpoints of a :class:`~jax_backend.training.train_step.TrainState` through orbax, restored to the bit on any mesh.

When to save and which to keep is the caller's (``orbax.checkpoint.CheckpointManager`` does both); what is saved is
here.
"""

from __future__ import annotations

from pathlib import Path

import orbax.checkpoint as ocp

from jax_backend.training.train_step import TrainState, TrainStep
from packing_core.errors import PackingError, first_line


def save_state(folder: str | Path, state: TrainState) -> None:
    """Write ``state`` into ``folder``, which must not exist, and return when it is on disk.

    Raises:
        PackingError: the folder exists.
    """
    folder = Path(folder).absolute()
    if folder.exists():
        raise PackingError(f"{folder} exists: give every checkpoint a folder of its own")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, state)


def restore_state(folder: str | Path, train_step: TrainStep) -> TrainState:
    """The state that ``folder`` holds, laid out over devices as ``train_step`` lays it out.

    Raises:
        PackingError: the folder holds no checkpoint, or one of another model or optimizer.
    """
    folder = Path(folder).absolute()
    if not folder.is_dir():
        raise PackingError(f"{folder} holds no checkpoint: save_state writes one")
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            restored: TrainState = checkpointer.restore(folder, train_step.shapes)
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            raise PackingError(
                f"{folder} is no checkpoint of this model and optimizer ({first_line(error)}): make the step with "
                "those that it was saved with"
            ) from error
    return restored
