"""Segment ids in, positions, boundaries and places out; and which options a call of attention takes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from packing_core.protocol.data import Array, Place


def attention_options(q: Array, k: Array, v: Array, **options: Any) -> set[str]:
    """Name the options of `OPTIONS["attention"]` that a call of `Backend.attention` takes."""
    named = {"window": "window", "softcap": "softcap", "sinks": "sinks", "alibi": "alibi_slopes"}
    named |= {"both_ways": "spans", "selected_keys": "top_k"}
    taken = {name: options.get(argument) is not None for name, argument in named.items()}
    taken |= {"gqa": k.shape[-2] < q.shape[-2], "narrow_values": v.shape[-1] < q.shape[-1]}
    taken |= {"bidirectional": not options.get("causal", True), "selected_blocks": options.get("index_block", 1) > 1}
    taken |= {"context_parallel": options.get("context_ranks", 1) > 1}
    return {name for name, is_taken in taken.items() if is_taken}


def delta_rule_options(q: Array, v: Array, g: Array, *, normalise: bool = False) -> set[str]:
    """Name the options of `OPTIONS["delta_rule"]` that a call of `Backend.delta_rule` takes."""
    taken = {"grouped_values": q.shape[2] < v.shape[2], "channel_decay": g.ndim == 4, "normalise": normalise}
    return {name for name, is_taken in taken.items() if is_taken}


def position_ids(segment_ids: Array) -> Array:
    """Positions that restart at 0 at each run of equal segment ids, padding runs included: int64 ``[B, S]``."""
    ids = np.asarray(segment_ids)
    column = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int64), ids.shape)
    starts = np.ones(ids.shape, dtype=bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return column - np.maximum.accumulate(np.where(starts, column, 0), axis=1)


def cu_seqlens(segment_ids: Array) -> Array:
    """Boundaries of all runs of the flattened rows, int32 ``[N+1]``; a run of padding is a segment of any length."""
    starts = np.flatnonzero(position_ids(segment_ids).ravel() == 0)
    return np.append(starts, np.asarray(segment_ids).size).astype(np.int32)


def segments(segment_ids: Array) -> list[Place]:
    """Every real segment as ``(row, start, stop)``, in row order."""
    width = np.asarray(segment_ids).shape[1]
    flat = np.asarray(segment_ids).ravel()
    bounds = cu_seqlens(segment_ids).tolist()
    return [(lo // width, lo % width, lo % width + hi - lo) for lo, hi in pairwise(bounds) if flat[lo] != 0]
