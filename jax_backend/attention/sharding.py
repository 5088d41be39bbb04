"""Spreads a call over devices.

A kernel is opaque to XLA's partitioner: under plain ``jit`` with sharded inputs it would be run whole on every device.
So each device runs it on its own rows and heads under ``shard_map``, over the mesh that the call names or that the
inputs' types carry. Where neither says it (a mesh of Auto axes under ``jit``), only plain XLA operations are right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_backend.attention.request import Request
from jax_backend.placement import over_devices
from packing_core.errors import LayoutError, UnsupportedError


def spread(
    mesh: Mesh | NamedSharding, request: Request, *, run: Callable[[Request], Callable[..., Any]]
) -> Callable[..., Any]:
    """The function of (q, k, v, segments, q_offset) in which each device of ``mesh`` computes its own rows and heads.

    Args:
        mesh: a mesh whose axes all split the rows, or the sharding of q, which may split rows and heads.
        request: the whole call's.
        run: gives the local function for the local request.

    Raises:
        LayoutError: rows or heads do not divide over the mesh, or tokens or channels are split.
    """
    sharding = mesh if isinstance(mesh, NamedSharding) else NamedSharding(mesh, P(mesh.axis_names))
    by_row, by_token, by_head, by_channel = (tuple(sharding.spec) + (None,) * 4)[:4]
    if _shards(sharding.mesh, by_token) > 1 or _shards(sharding.mesh, by_channel) > 1:
        raise LayoutError(
            f"mesh splits q as {sharding.spec}, and segment_attention splits rows and heads: for split tokens gather "
            "the keys inside your own shard_map and pass kv_segment_ids and q_offset"
        )
    row_shards, head_shards = _shards(sharding.mesh, by_row), _shards(sharding.mesh, by_head)
    for what, size, shards in (
        ("rows", request.rows, row_shards),
        ("query heads", request.heads, head_shards),
        ("key/value heads", request.kv_heads, head_shards),
    ):
        if size % shards:
            raise LayoutError(
                f"{size} {what} do not divide over {shards} shards of the mesh: {dict(sharding.mesh.shape)}"
            )
    local = replace(
        request,
        rows=request.rows // row_shards,
        heads=request.heads // head_shards,
        kv_heads=request.kv_heads // head_shards,
    )
    per_head = P(by_row, None, by_head)
    in_specs = (per_head, per_head, per_head, P(by_row), P())
    return over_devices(partial(run(local), request=local), sharding.mesh, in_specs, (per_head, per_head))


def sharding_of(q: jax.Array, k: jax.Array, v: jax.Array) -> NamedSharding | None:
    """Returns how the operands are sharded, from their types (explicit axes) or devices; None if that is not known.

    Raises:
        LayoutError: they are spread over rows or heads in different ways.
        UnsupportedError: a concrete array is spread in a way that names no mesh.
    """
    found = {name: _split(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    if all(sharding is None for sharding in found.values()):
        return None
    over = {name: _rows_and_heads(sharding) for name, sharding in found.items()}
    if len(set(over.values())) > 1:
        raise LayoutError(
            f"rows and heads of q, k and v are spread differently ({over}): reshard them alike, or pass mesh="
        )
    return found["q"]


def left_to_compiler(**arrays: jax.Array) -> str | None:
    """The name of an array that is traced on a mesh of Auto axes, which the compiler shards as it likes, or None."""
    for name, x in arrays.items():
        if isinstance(x, jax.core.Tracer):
            mesh = jax.typeof(x).sharding.mesh
            kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
            if any(kind == AxisType.Auto and mesh.shape[axis] > 1 for axis, kind in kinds):
                return name
    return None


def is_whole(*arrays: jax.Array) -> bool:
    """Returns whether no array is sharded, nor may be by the compiler, so that a kernel can take it as it is."""
    for x in arrays:
        if isinstance(x, jax.core.Tracer):
            if left_to_compiler(x=x) is not None or any(part is not None for part in jax.typeof(x).sharding.spec):
                return False
        elif len(x.sharding.device_set) > 1:
            return False
    return True


def _split(name: str, x: jax.Array) -> NamedSharding | None:
    if isinstance(x, jax.core.Tracer):
        typed = jax.typeof(x).sharding
        return typed if any(part is not None for part in typed.spec) else None
    if len(x.sharding.device_set) == 1 or x.is_fully_replicated:
        return None
    if not isinstance(x.sharding, NamedSharding):
        raise UnsupportedError(f"{name} is spread over devices by a {type(x.sharding).__name__}: pass mesh=")
    return x.sharding


def _rows_and_heads(sharding: NamedSharding | None) -> tuple[Any, Any]:
    if sharding is None:
        return None, None
    spec = (*sharding.spec, None, None, None, None)
    return spec[0], spec[2]


def platform_of(q: jax.Array | None, mesh: Mesh | NamedSharding | None) -> str:
    """ "cpu", "gpu" or "tpu": of the mesh's devices, the array's, those that a trace is for, or the default ones."""
    over = mesh.mesh if isinstance(mesh, NamedSharding) else mesh
    if isinstance(over, Mesh):
        return _kind(over.devices.flat[0].platform)
    if q is not None and not isinstance(q, jax.core.Tracer):
        return _kind(next(iter(q.devices())).platform)
    traced = [] if q is None else [jax.typeof(q).sharding.mesh]
    for traced_mesh in (*traced, jax.sharding.get_abstract_mesh()):
        if traced_mesh.abstract_device is not None:
            return _kind(traced_mesh.abstract_device.platform)
    default = jax.config.jax_default_device  # type: ignore[attr-defined]  # made at run time
    if default is None:
        return _kind(jax.default_backend())
    return _kind(default if isinstance(default, str) else default.platform)


def _kind(platform: str) -> str:
    return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)


def _shards(mesh: Any, axes: str | tuple[str, ...] | None) -> int:
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape[name] for name in names)
