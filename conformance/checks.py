"""Checks that several requirements share: masks of attention, isolation and padding of every operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from conformance import oracle
from conformance.draws import LARGE, AttentionCase, OperationCase, Rows, generator, segment_ids
from conformance.judge import Judge, NotDeclared, Rejected, as_result
from conformance.oracle import Expected, Result
from conformance.pairwise import declared_pairs
from packing_core.protocol import Array


def visible_keys(
    judge: Judge,
    rows: Rows,
    *,
    causal: bool = True,
    window: int | None = None,
    spans: Rows | None = None,
    top_k: int | None = None,
    index_block: int = 1,
    changed: Mapping[str, Array] | None = None,
) -> Array:
    """bool ``[B, S, S]``: the mask, read off the backend's own output.

    With q = 0 every visible key weighs the same, and with v the identity the output at a query is its row of weights.
    Other arrays of the call may be ``changed``.
    """
    ids = segment_ids(rows)
    width = ids.shape[1]
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "spans": spans,
        "top_k": top_k,
        "index_block": index_block,
    }
    case = AttentionCase(rows, heads=1, kv_heads=1, width=width, **options)
    identity = np.broadcast_to(np.eye(width, dtype=np.float32)[None, :, None], (len(ids), width, 1, width))
    zero = np.zeros((len(ids), width, 1, width), np.float32)
    out, _ = judge.ask_case(case, judge.dtype, {"q": zero, "v": identity.copy(), "dout": None, **(changed or {})})
    return (out[:, :, 0] > 0.5 / width) & (ids > 0)[..., None]


def compare_mask(judge: Judge, seen: Array, expected: Array) -> None:
    """Hold a mask of :func:`visible_keys` against the one that it should be."""
    wrong = np.argwhere(seen != expected)
    if len(wrong):
        row, query, key = wrong[0]
        verb = "sees" if seen[row, query, key] else "does not see"
        judge.holds(False, f"{len(wrong)} places differ from the mask: in row {row}, query {query} {verb} key {key}")


def check_pairs(
    judge: Judge, build: Callable[..., OperationCase], factors: Mapping[str, Sequence[Any]], dtypes: Sequence[str]
) -> None:
    """Every pair of values of ``factors`` and ``dtypes`` that is declared works together; see `declared_pairs`.

    Every other case has its arrays in Fortran's order, as those are that a model has transposed.
    """
    declared = judge.backend.capabilities
    tried = declared_pairs(build, replace(declared, dtypes=tuple(x for x in declared.dtypes if x in dtypes)), factors)
    for number, (case, dtype) in enumerate(tried):
        try:
            judge.check(case, dtype, order="F" if number % 2 else "C")
        except Rejected as error:
            raise Rejected(f"{_named(case)} in {dtype}: {error}") from error
    for dtype in (x for x in dtypes if x not in declared.dtypes):
        try:
            judge.check(build(), dtype)
        except NotDeclared:
            if not tried:
                raise


def _named(case: OperationCase) -> str:
    """Names what the case has beyond the plainest one."""
    plain, own = type(case)(), vars(case)
    return ", ".join(f"{name}={value}" for name, value in own.items() if value != getattr(plain, name)) or "plain"


def check_isolated(
    judge: Judge,
    case: OperationCase,
    where: tuple[int, ...] | None = None,
    dtype: str | None = None,
    *,
    backward: bool = True,
) -> None:
    """No segment (of those in ``where``) moves another's output or, with ``backward``, its gradients per token."""
    working, case = dtype or judge.dtype, _as_tried(judge, case.fitted(judge.backend.capabilities.head_dims))
    ids, arrays = segment_ids(case.rows), case.arguments(working)

    def call(arguments: Mapping[str, Array]) -> dict[str, Array]:
        changed: dict[str, Array | None] = {**case.sound(arguments, working)}
        out, gradients = judge.ask_case(case, working, changed if backward else changed | {"dout": None})
        per_token = {f"gradient of {name}": x for name, x in gradients.items() if x.shape[:2] == ids.shape}
        return {"output": out} | per_token

    change = [name for name in case.isolated if name in arrays and (backward or name != "dout")]
    judge.isolated(call, arrays, ids, change=change, dtype=working, where=where, backward=backward)


def _as_tried(judge: Judge, case: OperationCase) -> OperationCase:
    """Attention with one head for an interpreter, which runs them one by one: heads never mix, whatever the segments.

    Cases of grouped heads stay, and all other requirements try two heads and more.
    """
    if judge.backend.capabilities.interpreted and isinstance(case, AttentionCase) and case.heads == case.kv_heads:
        return replace(case, heads=1, kv_heads=1)
    return case


def check_padding(
    judge: Judge, case: OperationCase, dtype: str | None = None, changed: Mapping[str, Array] | None = None
) -> None:
    """With other numbers at padding (``changed``, or large ones), real tokens keep outputs and gradients, and those of
    padding are 0."""
    dtype, case = dtype or judge.dtype, case.fitted(judge.backend.capabilities.head_dims)
    real = segment_ids(case.rows) > 0
    changed = at_padding(case, dtype) if changed is None else changed
    finite = all(np.isfinite(x).all() for x in changed.values())
    (out, gradients), (moved_out, moved) = judge.ask_case(case, dtype), judge.ask_case(case, dtype, changed)
    judge.unmoved("the output", out[real], moved_out[real], because="padding changed")
    noise = judge.noise(lambda: judge.ask_case(case, dtype)[1], gradients)
    for name, gradient in gradients.items():
        per_token = gradient.shape[:2] == real.shape
        at = real if per_token else (...,)
        judge.unmoved(
            f"the gradient of {name}", gradient[at], moved[name][at], because="padding changed", noise=noise[name]
        )
        if per_token:
            nothing = not gradient[~real].any() and not (finite and moved[name][~real].any())
            judge.holds(nothing, f"the gradient of {name} at padding is not exactly 0")


def at_padding(case: OperationCase, dtype: str) -> dict[str, Array]:
    """The arrays that hold any numbers at padding, with large finite ones there."""
    arrays, padding, large = case.arguments(dtype), segment_ids(case.rows) == 0, LARGE[dtype]
    other = {name: generator("padding", name).choice([-large, large], arrays[name].shape) for name in case.padded}
    other = case.sound({**arrays, **other}, dtype)
    changed = {name: arrays[name].copy() for name in case.padded}
    for name, x in changed.items():
        x[padding] = other[name][padding]
    return changed


def check_index_loss(judge: Judge, case: AttentionCase, dout: Array, dtype: str) -> tuple[Result, Expected]:
    """Compares losses and gradients of an indexer with those of each segment alone; returns both."""
    answer, expected = ask_index_loss(judge, case, dout, dtype=dtype), oracle.index_loss(case, dout, dtype)  # type: ignore[arg-type]
    judge.within(answer, expected, segment_ids(case.rows), dtype)
    return answer, expected


def ask_index_loss(
    judge: Judge,
    case: AttentionCase,
    dout: Array | None,
    changed: Mapping[str, Array] | None = None,
    dtype: str | None = None,
) -> Result:
    """Losses and gradients of the backend, some of whose operands may be ``changed``."""
    dtype = dtype or judge.dtype
    arrays = {**case.index_arguments(dtype), **(changed or {})}
    arrays["segment_ids"] = segment_ids(case.rows)
    return as_result(judge.ask("index_loss", *arrays.values(), top_k=case.top_k, dtype=dtype, dout=dout))
