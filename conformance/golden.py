"""Golden data: what the right answers are, as JSON that any language reads. ``python -m conformance.golden`` writes it.

Plans come from the naive packer, masks and positions from their definitions token by token, numbers from
`packing_core.reference`; nothing comes from a backend. Tensors are nested lists; their inputs are multiples of 1/64 of
at most 8 significant bits, so that every working dtype holds them exactly. ``cases/schema.json`` describes the files.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from conformance import naive
from conformance.draws import Rows, generator, segment_ids
from packing_core import reference
from packing_core.protocol import Array, segments

CASES = Path(__file__).parent / "cases"
FORMAT = 1
Case = dict[str, Any]


@cache
def golden(kind: str) -> list[Case]:
    """The cases of ``cases/{kind}.json``."""
    content = json.loads((CASES / f"{kind}.json").read_text(encoding="utf-8"))
    cases: list[Case] = content["cases"]
    return cases


def generate() -> dict[str, dict[str, Any]]:
    """File name without suffix -> content."""
    made = {"plans": _plans(), "masks": _masks(), "positions": _positions(), "losses": _losses()}
    made |= {"attention": _attention(), "rope": _rope(), "scan": _scan()}
    return {kind: {"format": FORMAT, "kind": kind, "cases": cases} for kind, cases in made.items()}


def write() -> None:
    """Write every file, one case per line."""
    for kind, content in generate().items():
        lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in content["cases"])
        text = f'{{"format": {FORMAT}, "kind": "{kind}", "cases": [\n{lines}\n]}}\n'
        (CASES / f"{kind}.json").write_text(text, encoding="utf-8")


# -- plans -----------------------------------------------------------------------------------------------------------


def _plans() -> list[Case]:
    draw = generator("plans")
    sets = {
        "one document": ([7], 8),
        "all fill a row": ([8, 8, 8], 8),
        "one token each": ([1] * 20, 8),
        "exact pairs": ([5, 3, 6, 2, 7, 1, 4, 4], 8),
        "ties": ([4, 4, 4, 2, 2, 2, 2, 6, 6], 8),
        "best fit differs from first fit": ([8, 6, 5, 1], 12),
        "just over a half": ([9] * 5 + [7] * 5, 16),
        "short lognormal": (np.clip(draw.lognormal(5.2, 0.8, 200), 1, 2048).astype(int).tolist(), 2048),
        "heavy tail": (np.clip(draw.lognormal(7.2, 1.3, 150), 1, 65536).astype(int).tolist(), 65536),
        "a quarter to a half": (draw.integers(257, 513, 120).tolist(), 1024),
    }
    return [
        {"name": name, "strategy": strategy, "capacity": capacity, "lengths": lengths, "rows": pack(lengths, capacity)}
        for strategy, pack in naive.STRATEGIES.items()
        for name, (lengths, capacity) in sets.items()
    ]


# -- masks and positions ---------------------------------------------------------------------------------------------


def _masks() -> list[Case]:
    mixed: Rows = ((7, 1, 16, 3, 21, 16),)
    padded: Rows = ((-4, 9, -3, 1, 20, -5, 12, -10), (30, -2, 31, -1))
    window = 16
    around: Rows = ((window - 1, window, window + 1, -16),)
    cases: list[tuple[str, str, Rows, bool, int | None]] = [
        ("several documents", "document", mixed, True, None),
        ("one document", "document", ((64,),), True, None),
        ("one token each", "document", ((1,) * 64,), True, None),
        ("padding anywhere, two rows", "document", padded, True, None),
        ("window of 16 in documents of 15, 16, 17", "window", around, True, window),
        ("window of 1", "window", mixed, True, 1),
        ("window of 63 in one document", "window", ((64,),), True, window - 1 + 48),
        ("window of 64 in one document", "window", ((64,),), True, 64),
        ("window of 65 in one document", "window", ((64,),), True, 65),
        ("short documents", "window across a boundary", ((3, 5, 2, 4, 6, 1, 3, 40),), True, 8),
        ("two rows with padding", "window across a boundary", padded, True, 6),
        ("several documents, both directions", "bidirectional", mixed, False, None),
        ("padding anywhere, both directions", "bidirectional", padded, False, None),
        ("window of 5, both directions", "window both ways", mixed, False, 5),
        ("window of 6 beside padding, both directions", "window both ways", padded, False, 6),
    ]
    return [
        {"name": name, "about": about, "rows": rows, "segment_ids": segment_ids(rows).tolist(), "causal": causal,
         "window": window, "visible": _visible(segment_ids(rows), causal, window)}
        for name, about, rows, causal, window in cases
    ]  # fmt: skip


def _visible(ids: Array, causal: bool, window: int | None) -> list[list[str]]:
    """Per row and query a string with ``x`` at every visible key: the definition, token by token."""

    def mark(row: Array, i: int, j: int) -> str:
        seen = row[i] == row[j] and row[i] > 0 and not (causal and j > i) and (window is None or abs(i - j) < window)
        return "x" if seen else "."

    width = ids.shape[1]
    return [["".join(mark(row, i, j) for j in range(width)) for i in range(width)] for row in ids]


def _positions() -> list[Case]:
    layouts: dict[str, Rows] = {
        "one document": ((8,),),
        "several documents": ((3, 1, 4, 2),),
        "padding anywhere, two rows": ((-2, 3, -1, 4), (1, 1, 5, -3)),
    }
    cases = []
    for name, rows in layouts.items():
        ids = segment_ids(rows)
        positions, bounds = np.zeros_like(ids), []
        for row, start, stop in segments(ids):
            bounds.append([row, start, stop])
            for t in range(start, stop):
                positions[row, t] = t - start
        cases.append(
            {"name": name, "segment_ids": ids.tolist(), "position_ids": positions.tolist(), "segments": bounds}
        )
    return cases


# -- numbers ---------------------------------------------------------------------------------------------------------


def _exact(*key: object, shape: tuple[int, ...], low: int = -128, high: int = 128) -> Array:
    """Multiples of 1/64 in [low / 64, high / 64]."""
    return generator("golden", *key).integers(low, high + 1, shape) / 64


def _lists(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: x.tolist() if isinstance(x, np.ndarray) else x for name, x in arrays.items()}


def _losses() -> list[Case]:
    layouts: dict[str, tuple[Rows, float]] = {
        "every token labelled": (((3, 1, 5, 3),), 0.0),
        "padding labelled too": (((-2, 4, -1, 3, 2),), 0.0),
        "prompts masked, two rows": (((6, 6), (2, 7, -3)), 0.4),
        "nothing labelled": (((6, 6),), 1.0),
    }
    cases = []
    for name, (rows, masked) in layouts.items():
        ids = segment_ids(rows)
        draw = generator("losses", name)
        labels = np.where(draw.random(ids.shape) < masked, -100, draw.integers(0, 11, ids.shape))
        logits = _exact("logits", name, shape=(*ids.shape, 11))
        targets = np.full(ids.shape, -100)
        for row, start, stop in segments(ids):
            for t in range(start, stop - 1):
                targets[row, t] = labels[row, t + 1]
        flat = logits.reshape(-1, 11), targets.ravel()
        total, weight = reference.cross_entropy(*flat)
        dlogits = reference.cross_entropy_vjp(*flat)["logits"].reshape(logits.shape)
        arrays = {"segment_ids": ids, "labels": labels, "logits": logits, "trained": (targets != -100).astype(int)}
        cases.append(
            {"name": name, **_lists(arrays), "loss_sum": total, "weight_sum": weight, "dlogits": dlogits.tolist()}
        )
    return cases


def _attention() -> list[Case]:
    lengths, heads, kv_heads, width = (4, 1, 5), 2, 2, 8
    options: dict[str, dict[str, Any]] = {
        "causal": {},
        "window of 3": {"window": 3},
        "softcap of 2": {"softcap": 2.0},
        "sinks": {"sinks": _exact("sinks", shape=(heads,))},
        "ALiBi": {"alibi_slopes": np.array([0.5, 0.25])},
        "one key/value head": {},
        "bidirectional, scale of 0.5": {"causal": False, "scale": 0.5},
    }
    cases = []
    for name, chosen in options.items():
        kv = 1 if name == "one key/value head" else kv_heads
        tokens, bounds = sum(lengths), [0, *np.cumsum(lengths).tolist()]
        shapes = {"q": heads, "k": kv, "v": kv, "dout": heads}
        given = {key: _exact(name, key, shape=(tokens, count, width)) for key, count in shapes.items()}
        q, k, v, dout = given.values()
        out = reference.attention(q, k, v, bounds, **chosen)
        found = reference.attention_vjp(q, k, v, bounds, dout, **chosen)
        result = {"out": out} | {f"d{key}": x for key, x in found.items() if key != "alibi_slopes"}
        cases.append({"name": name, "cu_seqlens": bounds, **_lists(chosen), **_lists(given), **_lists(result)})
    return cases


def _rope() -> list[Case]:
    cases = []
    for name, turned, interleaved, first in (
        ("half", 8, False, 0),
        ("interleaved", 8, True, 0),
        ("partial", 4, False, 0),
        ("long positions", 8, False, 100_000),
    ):
        positions = np.array([0, 1, 2, 0, 0, 1, 2, 3]) + first
        inv_freq = 10_000.0 ** (-np.arange(0, turned, 2) / turned)
        x, dout = (_exact(name, key, shape=(8, 2, 8)) for key in ("x", "dout"))
        out = reference.rope(x, positions, inv_freq, interleaved=interleaved)
        dx = reference.rope_vjp(x, positions, inv_freq, dout, interleaved=interleaved)["x"]
        arrays = {"position_ids": positions, "inv_freq": inv_freq, "x": x, "dout": dout, "out": out, "dx": dx}
        cases.append({"name": name, "interleaved": interleaved, **_lists(arrays)})
    return cases


def _scan() -> list[Case]:
    bounds, channels, states = [0, 4, 5, 12], 3, 4
    per_token = {"x": channels, "dt": channels, "B": states, "C": states, "dy": channels}
    given = {
        key: _exact("scan", key, shape=(12, count), low=1 if key == "dt" else -128) for key, count in per_token.items()
    }
    given["A"] = _exact("scan", "A", shape=(channels, states), high=-8)
    x, dt, A, B, C, dy = (given[key] for key in ("x", "dt", "A", "B", "C", "dy"))
    out = reference.selective_scan(x, dt, A, B, C, bounds)
    found = reference.selective_scan_vjp(x, dt, A, B, C, bounds, dy)
    result = {"y": out} | {f"d{key}": x for key, x in found.items()}
    return [{"name": "three documents", "cu_seqlens": bounds, **_lists(given), **_lists(result)}]


if __name__ == "__main__":
    write()
