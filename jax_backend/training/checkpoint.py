"""Checkpoints of a :class:`~jax_backend.training.train_step.TrainState` through orbax, restored to the bit on any mesh.

When to save and which to keep is the caller's (``orbax.checkpoint.CheckpointManager`` does both); what is saved is
here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves_with_path

from jax_backend.placement import weight_shardings, with_sharding
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

    A `Decoder`'s layers may have been stacked (``scan_layers``) where it was saved and not here, or the other way
    round.

    Raises:
        PackingError: the folder holds no checkpoint, or one of another model or optimizer.
    """
    folder = Path(folder).absolute()
    if not folder.is_dir():
        raise PackingError(f"{folder} holds no checkpoint: save_state writes one")
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            saved = checkpointer.metadata(folder).item_metadata
            there, here = _leaves(saved), _leaves(train_step.shapes)
            if {*there} != {*here} and _by_layer(there).keys() == _by_layer(here).keys():
                arrays = _leaves(checkpointer.restore(folder, _abstract(saved, train_step.mesh)))
                return _restacked(arrays, _by_layer(there), train_step)
            _check_shapes(there, here)
            restored: TrainState = checkpointer.restore(folder, train_step.shapes)
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            raise PackingError(
                f"{folder} is no checkpoint of this model and optimizer ({first_line(error)}): make the step with "
                "those that it was saved with"
            ) from error
    return restored


def _check_shapes(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raises for another model before any array is read; orbax would name an option of its own.

    Raises:
        ValueError: a name or a shape differs.
    """
    shapes, wanted = ({name: _shape(leaf) for name, leaf in leaves.items()} for leaves in (there, here))
    for name in sorted({*shapes, *wanted}):
        if shapes.get(name) != wanted.get(name):
            raise ValueError(f"{name}: {shapes.get(name, 'missing')} there and {wanted.get(name, 'missing')} here")


def _leaves(tree: Any) -> dict[str, Any]:
    """A state's arrays, or what stands for them, by name."""
    return {_name(path): leaf for path, leaf in tree_leaves_with_path(tree)}


Place = tuple[str, int | None]  # an array's name, and the index in a stack of layers
_BLOCK = re.compile(r"(.*model\.)blocks\.(\d+)\.(.*)")
_LAYER = re.compile(r"(.*model\.)layers\.(\d+)\.(.*)")


def _by_layer(leaves: Mapping[str, Any]) -> dict[tuple[str, tuple[int, ...]], Place]:
    """Maps names with the numbers of layers as if none were stacked, and shapes, to the array and the index in it."""
    blocks = {name: match for name in leaves if (match := _BLOCK.match(name))}
    period = len({match[2] for match in blocks.values()})
    repeats = next((leaves[name].shape[0] for name in blocks), 0)
    places: dict[tuple[str, tuple[int, ...]], Place] = {}
    for name, leaf in leaves.items():
        shape = _shape(leaf)
        if (match := blocks.get(name)) is not None and shape[:1] == (repeats,):
            for i in range(repeats):
                places[f"{match[1]}layers.{i * period + int(match[2])}.{match[3]}", shape[1:]] = name, i
        elif (match := _LAYER.match(name)) is not None:
            places[f"{match[1]}layers.{period * repeats + int(match[2])}.{match[3]}", shape] = name, None
        else:
            places[name, shape] = name, None
    return places


def _abstract(saved: Any, mesh: Any) -> Any:
    """Shapes and dtypes of a saved tree; floating-point arrays are spread over the mesh as weights are."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), saved)
    if mesh is None:
        return shapes

    def spread(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        is_weight = jnp.issubdtype(leaf.dtype, jnp.floating)
        return with_sharding(leaf, sharding if is_weight else NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(spread, shapes, weight_shardings(shapes, mesh))


def _restacked(saved: dict[str, Any], places: Mapping[Any, Place], train_step: TrainStep) -> TrainState:
    """The state of arrays by name, with layers stacked as ``train_step`` stacks them."""
    here = _by_layer(_leaves(train_step.shapes))
    stacks = {name for name, index in here.values() if index is not None}
    parts: dict[str, list[Place]] = {}  # of each array, the layers of a stack in their order
    for key, (name, _) in here.items():
        parts.setdefault(name, []).append(places[key])

    def convert(saved: dict[str, jax.Array]) -> TrainState:
        def made(name: str) -> jax.Array:
            layers = [saved[there] if index is None else saved[there][index] for there, index in parts[name]]
            return jnp.stack(layers) if name in stacks else layers[0]

        return jax.tree.unflatten(jax.tree.structure(train_step.shapes), [made(name) for name in parts])

    mesh = train_step.mesh
    shardings = None if mesh is None else jax.tree.map(lambda leaf: leaf.sharding, train_step.shapes)
    restored: TrainState = jax.jit(convert, out_shardings=shardings)(saved)
    return restored


def _shape(leaf: Any) -> tuple[int, ...]:
    """Returns an array's shape as it is saved: random keys are saved as their numbers."""
    is_key = isinstance(leaf, jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return tuple(jax.eval_shape(jax.random.key_data, leaf).shape if is_key else leaf.shape)


def _name(path: Any) -> str:
    """Names an array alike in a tree of classes and in one of dictionaries."""
    return ".".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path)
