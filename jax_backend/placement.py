"""Placement of the weights and of the rows on devices.

Weights, gradients and optimizer state are cut over the mesh's axis named ``fsdp``; rows are spread over all axes, and
every process of a job gives the rows of its own devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from packing_core.errors import LayoutError, PackingError, UnsupportedError

Function = TypeVar("Function", bound=Callable[..., Any])


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


def over_devices(
    call: Callable[..., Any], mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """``call`` on every device's own part of the operands, for kernels, whose outputs carry no varying axes."""
    mapped = jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    if AxisType.Explicit not in mesh.axis_types:
        return mapped

    def resharded(*operands: Any) -> Any:
        """Explicit axes must match exactly, and the ids may be whole where q is spread."""
        given = []
        for operand, spec in zip(operands, in_specs, strict=True):
            to = NamedSharding(mesh, spec)
            given.append(jax.tree.map(lambda x, to=to: jax.sharding.reshard(x, to), operand))
        return mapped(*given)

    return resharded


def spec_of(array: jax.Array) -> PartitionSpec:
    """Returns how an array is spread, by its type: only explicit axes are part of it."""
    return jax.typeof(array).sharding.spec


def explicit_mesh(tree: Any) -> Mesh | AbstractMesh | None:
    """The mesh over whose explicit axes an array of the tree is spread, with its devices if they are known, or None."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            typed = jax.typeof(leaf).sharding
            if AxisType.Explicit in typed.mesh.axis_types and any(part is not None for part in typed.spec):
                return typed.mesh if isinstance(leaf, jax.core.Tracer) else leaf.sharding.mesh  # type: ignore[attr-defined]
    return None


def takes_explicit_axes(results: Callable[[Mapping[str, Any]], Any]) -> Callable[[Function], Function]:
    """Decorates a function of arrays so that it takes arrays over explicit axes, which ``jax.make_mesh`` makes.

    On explicit axes JAX wants to know how the result of every single operation is spread. Inside the function the axes
    are Auto and the compiler decides, as it does where all axes are Auto.

    Args:
        results: gives the PartitionSpecs of what the function returns, a tree or a prefix of one, from the call's
            arguments by name.
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = jax.tree.flatten((args, kwargs))
            mesh = explicit_mesh(leaves)
            if mesh is None:
                return function(*args, **kwargs)
            is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]

            def call(arrays: list[Any]) -> Any:
                given = iter(arrays)
                whole = [next(given) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
                args, kwargs = jax.tree.unflatten(tree, whole)
                return function(*args, **kwargs)

            specs = results(signature(function).bind(*args, **kwargs).arguments)
            spread = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]
                return jax.sharding.auto_axes(call, out_sharding=spread)(arrays)

        return run  # type: ignore[return-value]  # wraps keeps the signature

    return decorate


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
