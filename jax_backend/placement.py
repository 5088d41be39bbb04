"""Placement of the weights and of the rows on devices.

Weights, gradients and optimizer state are cut over the mesh's axis named ``fsdp``; rows are spread over all axes, and
every process of a job gives the rows of its own devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from packing_core.errors import LayoutError, PackingError, UnsupportedError


def auto_axes(mesh: Mesh) -> Mesh:
    """The same devices and names with Auto axes, so that the compiler propagates shardings inside the step."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


_OTHER_WORK = ("tensor", "model", "tp", "context", "sequence", "cp", "sp", "expert", "ep", "stage", "pipeline", "pp")


def rows_mesh(mesh: Mesh) -> Mesh:
    """The mesh of a train step, whose axes all spread rows, with Auto axes.

    Raises:
        PackingError: it is no mesh.
        UnsupportedError: an axis of several devices is named for other work than spreading rows.
    """
    if not isinstance(mesh, Mesh):
        raise PackingError(
            f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}: make one with "
            "jax.make_mesh((jax.device_count(),), ('data',))"
        )
    other = [name for name, size in mesh.shape.items() if size > 1 and name in _OTHER_WORK]
    if other:
        raise UnsupportedError(
            f"the mesh has the axis {', '.join(map(repr, other))}, and the train step spreads rows over all axes: it "
            "cuts neither heads nor tokens. Name the axis data, or fsdp to cut weights over it; "
            "context_attention cuts rows over devices in a model of your own"
        )
    return auto_axes(mesh)


def weight_sharding(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Cut the largest dimension that the ``fsdp`` axis divides; scalars and odd shapes are replicated."""
    parts = mesh.shape.get("fsdp", 1)
    fitting = [axis for axis, size in enumerate(shape) if parts > 1 and size % parts == 0]
    spec: list[str | None] = [None] * len(shape)
    if fitting:
        spec[max(fitting, key=lambda axis: shape[axis])] = "fsdp"
    return NamedSharding(auto_axes(mesh), PartitionSpec(*spec))


def weight_shardings(tree: Any, mesh: Mesh | None) -> Any:
    """The sharding of every leaf of a tree of weights; None without a mesh."""
    return None if mesh is None else jax.tree.map(lambda leaf: weight_sharding(leaf.shape, mesh), tree)


def place_rows(arrays: Mapping[str, Any], mesh: Mesh) -> dict[str, jax.Array]:
    """Spread arrays [A, B, S] over the mesh by their rows B, which are those of this process alone.

    Arrays that are already spread so are passed on.

    Raises:
        LayoutError: the rows do not divide over this process's devices of the mesh.
    """
    spread = NamedSharding(mesh, PartitionSpec(None, mesh.axis_names, None))
    devices = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
    placed = {}
    for name, array in arrays.items():
        if isinstance(array, jax.Array) and array.sharding.is_equivalent_to(spread, array.ndim):
            placed[name] = array
            continue
        if array.shape[1] % devices:
            raise LayoutError(
                f"{array.shape[1]} rows do not divide over {devices} devices: take a multiple of {devices} rows a "
                "microbatch" + (" and process" if jax.process_count() > 1 else "")
            )
        placed[name] = jax.make_array_from_process_local_data(spread, np.asarray(array))
    return placed


def to_host(array: jax.Array) -> np.ndarray:
    """The whole array in this process's memory, from wherever its shards are; all processes must call it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def refuse_varying(what: str, *arrays: jax.Array) -> None:
    """Refuses the values of a ``shard_map`` that checks which axes they vary over: loops and kernels do not say it.

    Raises:
        UnsupportedError: an array is one of them.
    """
    for array in arrays:
        type_ = jax.typeof(array)
        kind = getattr(type_, "manual_axis_type", None)  # vma in earlier versions of JAX
        axes = getattr(type_, "vma", frozenset()) if kind is None else kind.varying
        if axes:
            raise UnsupportedError(
                f"{what} runs inside a shard_map over {', '.join(sorted(axes))} that checks its outputs' axes, which "
                "loops and kernels do not name: pass jax.shard_map(..., check_vma=False)"
            )


def refuse_explicit(what: str, array: jax.Array) -> None:
    """Refuses an array that is spread over explicit axes, which ``jax.make_mesh`` makes by default.

    Raises:
        UnsupportedError: it is.
    """
    sharding = jax.typeof(array).sharding
    kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    used = [name for part in sharding.spec for name in (part if isinstance(part, tuple) else (part,)) if name]
    if axes := [name for name in used if kinds[name] is AxisType.Explicit]:
        raise UnsupportedError(
            f"{what} got rows over the explicit axes {', '.join(axes)}: make the mesh with "
            f"jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * {len(kinds)}), call it inside "
            "jax.shard_map(..., check_vma=False), or train by make_train_step(model, tx, mesh), which takes any mesh"
        )
