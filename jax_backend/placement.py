"""Placement of the weights and of the rows on devices.

Weights, gradients and optimizer state are cut over the mesh's axis named ``fsdp``; rows are spread over all axes but
``tensor``, which cuts a decoder's heads and the width of its MLPs, and ``context``, which cuts the tokens of its rows.
Every process of a job gives the rows of its own devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from packing_core.errors import LayoutError, PackingError, UnsupportedError

Function = TypeVar("Function", bound=Callable[..., Any])


def auto_axes(mesh: Mesh) -> Mesh:
    """The same devices and names with Auto axes, so that the compiler propagates shardings inside the step."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


TENSOR, CONTEXT = "tensor", "context"
_OTHER_WORK = ("model", "tp", "sequence", "cp", "sp", "expert", "ep", "stage", "pipeline", "pp")
_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # linear layers whose outputs ``tensor`` cuts
_BY_INPUT = ("o_proj", "down_proj")  # and those whose inputs are these outputs


def rows_mesh(mesh: Mesh) -> Mesh:
    """The mesh of a train step, with Auto axes.

    Raises:
        PackingError: it is no mesh.
        UnsupportedError: an axis of several devices is named for work that the step does not do.
    """
    if not isinstance(mesh, Mesh):
        raise PackingError(
            f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}: make one with "
            "jax.make_mesh((jax.device_count(),), ('data',))"
        )
    other = [name for name, size in mesh.shape.items() if size > 1 and name in _OTHER_WORK]
    if other:
        raise UnsupportedError(
            f"the mesh has the axis {', '.join(map(repr, other))}, and the train step would spread rows over it: name "
            "it data, or fsdp to cut weights over it, tensor to cut the heads of a Decoder, context to cut its tokens"
        )
    return auto_axes(mesh)


def shares_rows(mesh: Mesh) -> bool:
    """Returns whether several devices share a row: over ``tensor`` or ``context``."""
    return mesh.shape.get(TENSOR, 1) * mesh.shape.get(CONTEXT, 1) > 1


def row_axes(names: Iterable[str]) -> tuple[str, ...]:
    """Returns those of a mesh's axes over which rows are spread."""
    return tuple(name for name in names if name not in (TENSOR, CONTEXT))


def token_spec(mesh: Mesh) -> PartitionSpec:
    """Returns how arrays [B, S] are spread: rows, and tokens over ``context``."""
    return PartitionSpec(row_axes(mesh.axis_names) or None, CONTEXT if mesh.shape.get(CONTEXT, 1) > 1 else None)


def head_sharding(mesh: Mesh) -> NamedSharding:
    """Returns how queries [B, S, N, D] are spread."""
    heads = TENSOR if mesh.shape.get(TENSOR, 1) > 1 else None
    return NamedSharding(mesh, PartitionSpec(*token_spec(mesh), heads))


def weight_sharding(shape: tuple[int, ...], mesh: Mesh, path: Sequence[str] = ()) -> NamedSharding:
    """Returns how a weight is cut, by its shape and the names of the modules that hold it.

    ``tensor`` cuts the kernels and biases of attention and MLP by heads and width, ``fsdp`` the largest other dimension
    that it divides; scalars and odd shapes are replicated.
    """
    spec: list[str | None] = [None] * len(shape)
    layer, kind = path[-2:] if len(path) > 1 else ("", "")
    cut = -1 if layer in _BY_OUTPUT and kind in ("kernel", "bias") else None
    cut = -2 if layer in _BY_INPUT and kind == "kernel" else cut
    parts = mesh.shape.get(TENSOR, 1)
    if cut is not None and parts > 1 and shape[cut] % parts == 0:
        spec[cut] = TENSOR
    parts = mesh.shape.get("fsdp", 1)
    fitting = [axis for axis, size in enumerate(shape) if parts > 1 and size % parts == 0 and spec[axis] is None]
    if fitting:
        spec[max(fitting, key=lambda axis: shape[axis])] = "fsdp"
    return NamedSharding(auto_axes(mesh), PartitionSpec(*spec))


def weight_shardings(tree: Any, mesh: Mesh | None) -> Any:
    """The sharding of every leaf of a tree of weights; None without a mesh."""
    if mesh is None:
        return None

    def of(path: Any, leaf: Any) -> NamedSharding:
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        return weight_sharding(leaf.shape, mesh, [name for name in names if name != "value"])

    return jax.tree_util.tree_map_with_path(of, tree)


def put_tree(tree: Any, shardings: Any, *, donate: bool = False) -> Any:
    """The tree's arrays where they belong: new ones, or with ``donate`` the same ones if they are there already."""
    if shardings is None:
        return tree if donate else jax.tree.map(jnp.copy, tree)
    # A replica on the array's own device shares its memory, even with may_alias=False: hand over a copy, one at a time.
    return jax.tree.map(
        lambda leaf, sharding: jax.device_put(leaf if donate else jnp.copy(leaf), sharding, donate=True),
        tree,
        shardings,
    )


def with_sharding(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype with a sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def place_rows(arrays: Mapping[str, Any], mesh: Mesh, by_token: Container[str] = ()) -> dict[str, jax.Array]:
    """Spread arrays [A, B, S] over the mesh by their rows B, which are those of this process alone.

    Arrays that are already spread so are passed on.

    Args:
        by_token: names of the arrays that a ``context`` axis cuts along S too.

    Raises:
        LayoutError: the rows do not divide over this process's devices of the mesh, or their tokens over ``context``.
        UnsupportedError: devices of several processes share a row.
    """
    names, (rows, tokens) = row_axes(mesh.axis_names), token_spec(mesh)
    shared = math.prod(mesh.shape.get(name, 1) for name in (TENSOR, CONTEXT))
    mine = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
    if shared > 1 and jax.process_count() > 1:
        by_row = np.moveaxis(mesh.devices, [mesh.axis_names.index(name) for name in names], range(len(names)))
        owners = [{device.process_index for device in group} for group in by_row.reshape(-1, shared)]
        if any(len(owner) > 1 for owner in owners):
            raise UnsupportedError("tensor and context axes must lie inside a process: make them the mesh's last axes")
    devices = mine // shared
    placed = {}
    for name, array in arrays.items():
        cut = tokens is not None and name in by_token and array.ndim == 3
        spread = NamedSharding(mesh, PartitionSpec(None, rows, tokens) if cut else PartitionSpec(None, rows))
        if isinstance(array, jax.Array) and array.sharding.is_equivalent_to(spread, array.ndim):
            placed[name] = array
            continue
        if array.shape[1] % devices:
            raise LayoutError(
                f"{array.shape[1]} rows do not divide over {devices} devices: take a multiple of {devices} rows a "
                "microbatch" + (" and process" if jax.process_count() > 1 else "")
            )
        if cut and array.shape[2] % mesh.shape[CONTEXT]:
            raise LayoutError(
                f"{array.shape[2]} tokens of a row do not divide over the {mesh.shape[CONTEXT]} devices of axis "
                f"{CONTEXT!r}: pack rows of a multiple"
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
