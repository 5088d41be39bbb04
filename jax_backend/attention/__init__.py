"""Attention inside segments: the entry point, and the only place where an implementation is chosen.

Data flows ``segment_attention`` -> checks -> ``Request`` -> ``choose`` -> one implementation's ``attend``, under
``shard_map`` when a mesh is given. An implementation is a module with ``supports(request) -> None | reason`` and
``attend(q, k, v, segments, q_offset, request) -> (out, lse)``; a new one is a new file and a line in
``IMPLEMENTATIONS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jax_backend.attention.containment import contained
from jax_backend.attention.forest import depth_of, levels_above, over_levels, seen_keys
from jax_backend.attention.request import FORWARD_MODE, Request, check_arrays, check_options, checked_sinks
from jax_backend.attention.sharding import left_to_compiler, platform_of, sharding_of, spread
from jax_backend.differentiation import reverse_mode
from jax_backend.lacking import lacking
from jax_backend.placement import refuse_varying
from jax_backend.segments import Segments, cap_segments, find_segments, is_concrete, keys_inside
from packing_core.errors import LayoutError, PackingError, UnsupportedError

IMPLEMENTATIONS = {
    "xla": "jax_backend.attention.xla",
    "chunked": "jax_backend.attention.chunked",
    "pallas": "jax_backend.attention.pallas",
    "cudnn": "jax_backend.attention.cudnn",
    "tpu": "jax_backend.attention.tpu",
}

# Names that are asked for and are no implementation, each with the reason.
REFUSED = {
    "tokamax": "dot_product_attention takes no segment ids, and with a boolean mask it computes every pair of a row: "
    "pass None, or put segment_attention in its place (docs/jax.md)",
}

# Plain XLA operations, which the compiler's partitioner may split as it likes.
PARTITIONED = ("chunked", "xla")

# What ``implementation=None`` tries, in this order; measured (benchmarks/RESULTS.md), and the same on every host of a
# job.
ORDER = {"cpu": ("chunked", "xla"), "gpu": ("pallas", "cudnn", "chunked", "xla"), "tpu": ("tpu", "chunked", "xla")}


def segment_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | Segments,
    *,
    kv_segment_ids: jax.Array | None = None,
    q_offset: int | jax.Array = 0,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    max_segments: int | None = None,
    mesh: Mesh | NamedSharding | None = None,
    return_lse: bool = False,
    parents: jax.Array | None = None,
    max_ancestors: int | None = None,
    selected: jax.Array | None = None,
    contain_nonfinite: bool = False,
    implementation: str | None = None,
) -> Any:
    """Softmax attention of packed rows in which no segment sees another.

    ``out_i = sum_j p_ij v_j`` with ``p`` the softmax of ``scale q_i . k_j`` over the visible keys: those of the query's
    own segment, not after it if ``causal``, fewer than ``window`` away (Vaswani et al. 2017, arXiv:1706.03762, eq. 1;
    softcap and sinks as in ``packing_core.reference.attention``). A query that sees nothing, a padding token among
    others, returns exactly 0.

    Works under jit, grad, vmap, checkpoint, scan and shard_map. Shapes are static: a new segmentation never recompiles.

    Args:
        q: [B, S, N, D], bfloat16, float16 or float32.
        k: [B, T, K, D] with N a multiple of K; T is S unless ``kv_segment_ids`` is given.
        v: [B, T, K, E]; E may differ from D where the implementation allows it.
        segment_ids: integer [B, S], contiguous runs of ids from 1 on and 0 for padding; or what
            :func:`~jax_backend.segments.find_segments` made of them, so that layers share the work.
        kv_segment_ids: integer [B, T], the ids of the keys when these are another set of tokens of the same rows: under
            context parallelism, S queries of a shard against gathered or passed-on keys. An id must be one run.
        q_offset: with ``kv_segment_ids``, the position of query 0 in its row minus that of key 0; int or int scalar,
            may be traced and negative. Causality and windows compare ``i + q_offset`` with ``j``.
        causal: hide keys after the query.
        scale: factor on the logits; None for ``D ** -0.5``.
        window: keys visible to a query, its own included (Hugging Face's ``sliding_window``); to both sides when not
            causal.
        softcap: bound on the logits, ``softcap * tanh(logits / softcap)``.
        sinks: [N] logits that join the softmax's denominator only.
        max_segments: most segments that a row may hold; ``cudnn`` needs it. A row with more raises, or is NaN when
            traced.
        mesh: for inputs spread over devices: a ``Mesh``, whose axes then all split the rows, or a ``NamedSharding`` of
            q, which may split rows and heads.
        return_lse: also return the natural log of each softmax's sum over visible keys (sinks left out), float32 [B, S,
            N], -inf for a query that sees nothing. It is differentiable.
        parents: integer [B, S], at each token the id of the segment that its segment continues, 0 for none
            (``PackedBatch.parent_ids``): a query then also sees the segments on its path, and windows count along it.
            In causal attention over the queries' own tokens, on one device; by ``xla``, whose memory follows the
            square of a row, or without a window by ``pallas`` and ``chunked``, one call for each level.
        max_ancestors: the most segments that one continues, its parent's parents counted. Concrete parents tell it;
            traced ones run by ``xla`` without it. A row with more raises, or is NaN when traced.
        selected: bool [B, S, T], the keys that each query may see at all (:func:`.selection.select_keys`); None for
            every one. On one device, by ``chunked``, or by ``xla``, which alone combines them with ``parents`` and
            whose logits follow the square of a row.
        contain_nonfinite: keep NaN and infinities of one document out of the others, outputs and gradients, which
            costs the kernels a pass over q, k, v, the output and their gradients. ``chunked`` always does. Finite
            values never reach another document.
        implementation: one of ``IMPLEMENTATIONS``, or None for the first of ``ORDER`` that can serve. A named one that
            cannot serve raises.

    Returns:
        out [B, S, N, E] in q's dtype; with ``return_lse`` the pair (out, lse).

    Raises:
        LayoutError: shapes, dtypes or ids contradict each other.
        CapacityError: a row (concrete ids) holds more than ``max_segments`` segments.
        UnsupportedError: the implementation cannot serve, or it is a kernel, ``mesh`` is missing, and the inputs are
            traced on a mesh of Auto axes, whose types do not tell how they are sharded.
        PackingError: an option is out of its range.
    """
    check_arrays(q, k, v)
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    if not (mesh is None or isinstance(mesh, Mesh | NamedSharding)):
        raise PackingError(f"mesh must be a jax.sharding.Mesh or the NamedSharding of q, got {type(mesh).__name__}")
    sinks = checked_sinks(sinks, q.shape[2])
    check_options(
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        max_segments=max_segments,
    )
    segments = _segments(q, k, segment_ids, kv_segment_ids, q_offset, max_segments)
    if selected is not None:
        serving = PARTITIONED if parents is None else ("xla",)
        implementation = _for_selected(
            selected, q, k, implementation or serving[0], serving, mesh or sharding_of(q, k, v)
        )
    seen, levels = None, None
    if parents is not None:
        ids = _ids_with_parents(segment_ids, kv_segment_ids, causal, mesh or sharding_of(q, k, v))
        depth = depth_of(ids, parents) if max_ancestors is None else max_ancestors
        refused = _why_dense(depth, window, is_concrete(ids) and is_concrete(parents))
        if implementation == "xla" or (implementation is None and refused is not None):
            seen, valid = seen_keys(segments, ids, parents, window=window, deepest=max_ancestors)
            implementation = "xla"
        elif refused is not None:
            raise UnsupportedError(f"{_PARENTS}: {refused}, or pass implementation='xla'", option="implementation")
        else:
            levels, valid = levels_above(segments, ids, parents, depth or 0)
        segments = replace(segments, valid=valid if segments.valid is None else segments.valid & valid)
    if selected is not None:
        if seen is None:
            seen = keys_inside(segments, k.shape[1], causal=causal, window=window, q_offset=q_offset)
        seen = seen & selected
    request = request_for(
        q,
        k,
        v,
        platform=platform_of(q, mesh),
        kv_segment_ids=None if segments.own_keys else segments,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        max_segments=max_segments,
        return_lse=return_lse or levels is not None,
    )
    offset = jnp.asarray(q_offset, jnp.int32)
    sharding = sharding_of(q, k, v) if mesh is None else mesh
    if sharding is None:
        attend = _on_one_device(request, implementation, contain_nonfinite, seen, levels, q, k, v)
    else:
        attend = spread(
            sharding, request, run=lambda local: _attend_of(choose(local, implementation), contain_nonfinite)
        )
    if implementation != "xla":
        q, k, v = reverse_mode(FORWARD_MODE, q, k, v)
    out, lse = attend(q, k, v, segments, offset)
    if sinks is not None:
        # exp(lse) / (exp(lse) + exp(sink)) is what the sink leaves of every weight.
        left = jax.nn.sigmoid(lse - sinks.astype(jnp.float32)[None, None])[..., None]
        out = (out.astype(jnp.float32) * left).astype(q.dtype)
    if segments.valid is not None:
        # Multiplied, so that gradients of an invalid row are NaN too.
        poison = jnp.where(segments.valid, 1.0, jnp.nan)[:, None, None]
        out = out * poison[..., None].astype(out.dtype)
        lse = None if lse is None else lse * poison
    return (out, lse) if return_lse else out


def _attend_of(module: ModuleType, contain: bool) -> Callable[..., Any]:
    """The attention of an implementation; `chunked` contains what is not finite by itself."""
    return contained(module.attend) if contain and module.__name__ != IMPLEMENTATIONS["chunked"] else module.attend


def _on_one_device(
    request: Request,
    implementation: str | None,
    contain: bool,
    seen: Any,
    levels: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> Callable[..., Any]:
    """The attention of inputs that no mesh divides, by the implementation that is chosen for them.

    Raises:
        UnsupportedError: none can serve, or it is a kernel that the compiler would run whole on every device.
    """
    above = request if levels is None else replace(request, causal=False, own_keys=False)
    module = choose(above, implementation)
    name = left_to_compiler(q=q, k=k, v=v)
    if name is not None and module.__name__ not in map(IMPLEMENTATIONS.get, PARTITIONED):
        raise UnsupportedError(
            f"{name} may be sharded over devices, and the compiler would compute the whole batch on every one of "
            f"them: pass mesh=, give the mesh explicit axes, call segment_attention inside shard_map, or pass "
            f"implementation={PARTITIONED[0]!r}"
        )
    if module.__name__ != IMPLEMENTATIONS["xla"]:
        name = module.__name__.rpartition(".")[2]
        refuse_varying(f"segment_attention(implementation={name!r})", q, k, v)
    run = _attend_of(module, contain)
    attend = partial(run, request=request, **({} if seen is None else {"seen": seen}))
    if levels is None:
        return attend
    return over_levels(attend, partial(run, request=above), levels, merge_attention)


def _for_selected(selected: Any, q: Any, k: Any, implementation: str, serving: tuple[str, ...], sharding: Any) -> str:
    """Returns the implementation, one of ``serving``, that runs selected keys.

    Raises:
        LayoutError: the mask is not bool [B, S, T].
        UnsupportedError: it is another one, or inputs are spread over devices.
    """
    shape = (*q.shape[:2], k.shape[1])
    if getattr(selected, "shape", None) != shape or selected.dtype != jnp.bool_:
        raise LayoutError(f"selected must be bool {list(shape)}, got {getattr(selected, 'shape', type(selected))}")
    if implementation not in serving or sharding is not None:
        raise UnsupportedError(
            f"segment_attention with selected keys runs by {' or '.join(serving)} on one device: leave mesh out",
            option="implementation",
        )
    return implementation


_PARENTS = "segment_attention with parents (shared prefixes)"


def _why_dense(depth: int | None, window: int | None, concrete: bool) -> str | None:
    """Explains why attention of segments that continue others runs on a dense mask alone, None if it need not."""
    if window is not None:
        return "windows count along the path of a segment: leave window out"
    if depth is None and concrete:
        return "padding or another segment stands between one and what continues it: order them as pack_tree does"
    return "parents are traced: pass max_ancestors" if depth is None else None


def _ids_with_parents(segment_ids: jax.Array | Segments, kv_segment_ids: Any, causal: bool, sharding: Any) -> jax.Array:
    """Returns the segment ids; raises for what attention cannot combine with segments that continue others.

    Raises:
        UnsupportedError: names the option.
    """
    if isinstance(segment_ids, Segments):
        raise UnsupportedError(f"{_PARENTS}: segment ids are needed: pass them in place of a Segments")
    reasons = (
        (not causal, "attention must be causal: a segment that others continue must not see them"),
        (kv_segment_ids is not None, "keys must be the queries' own tokens: leave kv_segment_ids out"),
        (sharding is not None, "inputs must lie on one device: leave mesh out"),
    )
    for refused, reason in reasons:
        if refused:
            raise UnsupportedError(f"{_PARENTS}: {reason}")
    return segment_ids


def merge_attention(
    one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The attention over two disjoint sets of keys from the attention over each: what ring context parallelism folds.

    Args:
        one, other: (out [B, S, N, E], lse float32 [B, S, N]) of the same queries, as ``segment_attention(...,
            return_lse=True)`` gives them, without sinks. Zeros and -inf are the attention over no keys.

    Returns:
        (out, lse) over the union, out in the dtype of ``one``; differentiable, also where a query saw nothing.
    """
    (out, lse), (other_out, other_lse) = one, other
    largest = jax.lax.stop_gradient(jnp.maximum(lse, other_lse))
    largest = jnp.where(largest == -jnp.inf, 0.0, largest)
    weight, other_weight = jnp.exp(lse - largest), jnp.exp(other_lse - largest)
    total = weight + other_weight
    divisor = jnp.where(total == 0, 1.0, total)
    wide, other_wide = out.astype(jnp.float32), other_out.astype(jnp.float32)
    merged = wide * (weight / divisor)[..., None] + other_wide * (other_weight / divisor)[..., None]
    return merged.astype(out.dtype), jnp.where(total == 0, -jnp.inf, jnp.log(divisor) + largest)


def request_for(
    q: Any,
    k: Any,
    v: Any,
    *,
    platform: str,
    kv_segment_ids: Any = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    max_segments: int | None = None,
    return_lse: bool = False,
) -> Request:
    """The static part of a call with these arrays, or arrays of these shapes, and options."""
    return Request(
        rows=q.shape[0],
        queries=q.shape[1],
        keys=k.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        dtype=q.dtype,
        causal=causal,
        scale=q.shape[3] ** -0.5 if scale is None else float(scale),
        window=None if window is None else int(window),
        softcap=None if softcap is None else float(softcap),
        needs_lse=return_lse or sinks is not None,
        own_keys=kv_segment_ids is None,
        max_segments=None if max_segments is None else int(max_segments),
        platform=platform,
    )


def choose(request: Request, implementation: str | None = None) -> ModuleType:
    """Selects the implementation of a request: the named one, or the first in the platform's ``ORDER`` that can run.

    Raises:
        PackingError: no implementation has that name.
        UnsupportedError: the named one, or every one in the order, cannot serve; the message says why for each.
    """
    found = answers(request, implementation)
    for name, reason in found.items():
        if reason is None:
            return import_module(IMPLEMENTATIONS[name])
    raise UnsupportedError("; ".join(f"{name} cannot serve: {reason}" for name, reason in found.items()))


def answers(request: Request, implementation: str | None = None) -> dict[str, str | None]:
    """Collects the answer of each implementation to a request: None, or the reason why it cannot run it.

    Raises:
        PackingError: no implementation has that name.
        UnsupportedError: the name is that of a library that cannot serve.
    """
    if implementation in REFUSED:
        raise UnsupportedError(f"implementation {implementation!r}: {REFUSED[implementation]}")
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise PackingError(
            f"implementation {implementation!r} is unknown: pass one of {', '.join(IMPLEMENTATIONS)}, or None"
        )
    names = ORDER[request.platform] if implementation is None else (implementation,)
    found: dict[str, str | None] = {}
    for name in names:
        found[name] = lacking(name, IMPLEMENTATIONS[name]) or import_module(IMPLEMENTATIONS[name]).supports(request)
        if found[name] is None and implementation is None:
            break  # what comes after is not asked: cudnn would compile a trial
    return found


def _segments(
    q: jax.Array,
    k: jax.Array,
    segment_ids: jax.Array | Segments,
    kv_segment_ids: jax.Array | None,
    q_offset: int | jax.Array,
    max_segments: int | None,
) -> Segments:
    rows, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    if isinstance(segment_ids, Segments):
        if kv_segment_ids is not None:
            raise LayoutError("segment_ids is already a Segments: give kv_segment_ids to find_segments instead")
        segments = segment_ids if max_segments is None else cap_segments(segment_ids, max_segments)
    else:
        segments = find_segments(segment_ids, kv_segment_ids, max_segments=max_segments)
    if segments.key_begin.shape != (rows, queries):
        raise LayoutError(f"segment_ids must have shape [B, S] = ({rows}, {queries}), got {segments.key_begin.shape}")
    found = segments.queries_of_keys[0].shape
    if found != (rows, keys):
        raise LayoutError(
            f"q has {queries} tokens and k has {keys}: give the keys' ids as kv_segment_ids"
            if segments.own_keys
            else f"kv_segment_ids must have shape [B, T] = ({rows}, {keys}), got {found}"
        )
    if segments.own_keys and not (isinstance(q_offset, int) and q_offset == 0):
        raise LayoutError("q_offset places queries among other tokens' keys: give kv_segment_ids with it")
    return segments
