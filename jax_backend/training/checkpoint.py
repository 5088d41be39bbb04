"""Checkpoints of a :class:`~jax_backend.training.train_step.TrainState` through orbax, restored to the bit on any mesh.

When to save and which to keep is the caller's (``orbax.checkpoint.CheckpointManager`` does both); what is saved is
here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.tree_util import tree_leaves_with_path

from jax_backend.training.objective import refuse_donated
from jax_backend.training.train_step import TrainState, TrainStep
from packing_core.errors import PackingError, first_line


def save_state(folder: str | Path, state: TrainState) -> None:
    """Write ``state`` into ``folder``, which must not exist, and return when it is on disk.

    Raises:
        PackingError: the folder exists, or an earlier step took the state's buffers.
    """
    refuse_donated(state)
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
            _check_shapes(checkpointer.metadata(folder).item_metadata, train_step.shapes)
            restored: TrainState = checkpointer.restore(folder, train_step.shapes)
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            raise PackingError(
                f"{folder} is no checkpoint of this model and optimizer ({first_line(error)}): make the step with "
                "those that it was saved with"
            ) from error
    return restored


def _check_shapes(saved: Any, wanted: Any) -> None:
    """Raises for another model before any array is read; orbax would name an option of its own.

    Raises:
        ValueError: a name or a shape differs.
    """
    there, here = (
        {_name(path): _shape(leaf) for path, leaf in tree_leaves_with_path(tree)} for tree in (saved, wanted)
    )
    for name in sorted({*there, *here}):
        if there.get(name) != here.get(name):
            raise ValueError(f"{name}: {there.get(name, 'missing')} there and {here.get(name, 'missing')} here")


def _shape(leaf: Any) -> tuple[int, ...]:
    """Returns an array's shape as it is saved: random keys are saved as their numbers."""
    is_key = isinstance(leaf, jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return tuple(jax.eval_shape(jax.random.key_data, leaf).shape if is_key else leaf.shape)


def _name(path: Any) -> str:
    """Names an array alike in a tree of classes and in one of dictionaries."""
    return ".".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path)
