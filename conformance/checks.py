"""Checks that several requirements share: masks, isolation and padding of attention and scan, in any dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.draws import AttentionCase, Rows, ScanCase, generator, round_to, segment_ids
from conformance.judge import LARGE, Judge
from packing_core.protocol import Array, Gradients

Ask = Callable[[Mapping[str, Array]], tuple[Array, Gradients]]


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
    out, _ = judge.ask_attention(case, judge.dtype, {"q": zero, "v": identity.copy(), "dout": None, **(changed or {})})
    return (out[:, :, 0] > 0.5 / width) & (ids > 0)[..., None]


def compare_mask(judge: Judge, seen: Array, expected: Array) -> None:
    """Hold a mask of :func:`visible_keys` against the one that it should be."""
    wrong = np.argwhere(seen != expected)
    if len(wrong):
        row, query, key = wrong[0]
        verb = "sees" if seen[row, query, key] else "does not see"
        judge.holds(False, f"{len(wrong)} places differ from the mask: in row {row}, query {query} {verb} key {key}")


def _as_tried(judge: Judge, case: AttentionCase) -> AttentionCase:
    """The case, with one head for an interpreter, which runs them one by one: heads never mix, whatever the segments.

    Cases of grouped heads stay, and all other requirements try two heads and more.
    """
    alike = case.heads == case.kv_heads
    return replace(case, heads=1, kv_heads=1) if judge.backend.capabilities.interpreted and alike else case


def attention_forward_isolated(judge: Judge, case: AttentionCase) -> None:
    """No segment moves another's output; no gradient is asked for."""
    working, case = judge.dtype, _as_tried(judge, case)

    def call(arguments: Mapping[str, Array]) -> dict[str, Array]:
        return {"output": judge.ask_attention(case, working, {**arguments, "dout": None})[0]}

    ids = segment_ids(case.rows)
    judge.isolated(call, case.arguments(working), ids, change=("q", "k", "v"), dtype=working)


def attention_isolated(
    judge: Judge, case: AttentionCase, where: tuple[int, ...] | None = None, dtype: str | None = None
) -> None:
    """No segment (of those in ``where``) moves another's output or gradients of q, k and v, whatever it selects."""
    working, case = dtype or judge.dtype, _as_tried(judge, case)

    def call(arguments: Mapping[str, Array]) -> dict[str, Array]:
        out, found = judge.ask_attention(case, working, arguments)
        return {"output": out} | {f"gradient of {name}": found[name] for name in ("q", "k", "v")}

    judge.isolated(
        call, case.arguments(working), segment_ids(case.rows),
        change=("q", "k", "v", "dout", *(("index_q", "index_k") if case.top_k else ())),
        dtype=working, where=where, backward=True,
    )  # fmt: skip


def scan_isolated(judge: Judge, case: ScanCase, where: tuple[int, ...] | None = None, dtype: str | None = None) -> None:
    """No segment (of those in ``where``) moves another's output or gradients."""
    working = dtype or judge.dtype

    def call(arguments: Mapping[str, Array]) -> dict[str, Array]:
        out, found = judge.ask_scan(case, working, arguments)
        return {"output": out} | {f"gradient of {name}": found[name] for name in ("x", "dt", "B", "C")}

    judge.isolated(
        call, case.arguments(working), segment_ids(case.rows),
        change=("x", "B", "C", "dout"), dtype=working, where=where, backward=True,
    )  # fmt: skip


def repadded(given: Mapping[str, Array], ids: Array, names: tuple[str, ...], dtype: str) -> dict[str, Array]:
    """The named arguments with large finite numbers at padding."""
    changed = {name: given[name].copy() for name in names}
    for name, x in changed.items():
        x[ids == 0] = round_to(dtype, generator("padding", name).choice([-1, 1], x[ids == 0].shape) * LARGE[dtype])
    return changed


def padding_moves_nothing(judge: Judge, ask: Ask, changed: Mapping[str, Array], ids: Array) -> None:
    """With ``changed`` arguments at padding, real tokens keep outputs and gradients, and padding's gradients are 0."""
    real = ids > 0
    (out, found), (moved_out, moved) = ask({}), ask(changed)
    judge.unmoved("the output", out[real], moved_out[real], because="padding changed")

    noise = judge.noise(lambda: ask({})[1], found)
    for name, gradient in found.items():
        per_token = gradient.shape[:2] == ids.shape
        judge.unmoved(
            f"the gradient of {name}", gradient[real] if per_token else gradient,
            moved[name][real] if per_token else moved[name], because="padding changed", noise=noise[name],
        )  # fmt: skip
        if per_token:
            zero = not np.any(gradient[~real])
            judge.holds(zero, f"the gradient of {name} at padding is not exactly 0")
