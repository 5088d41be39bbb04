"""The order in which the tiles of a kernel start, and how their walks are divided."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jax_backend import find_segments, segment_attention
from jax_backend.attention import pallas_tiles, request_for
from jax_backend.attention.pallas_tiles import Walk, heaviest_first, tiles_for
from jax_backend.attention.request import SAVED
from jax_backend.segments import seeing_queries
from tests.jax_backend.oracle import Case
from tests.jax_backend.test_attention_gpu import run


@pytest.mark.parametrize("window", [None, 9])
def test_the_tiles_that_walk_longest_come_first(window: int | None) -> None:
    lengths = ((40, 3, 17), (5, 30, 8))  # 60 tokens in 8 tiles of 8, padding at the end of the second row
    ids = np.array([np.repeat(range(5), [0, *row, 60 - sum(row)]) % 4 for row in lengths])
    interval = seeing_queries(find_segments(jnp.asarray(ids)), causal=True, window=window)
    order = np.asarray(heaviest_first(interval, 8))

    begin, end = (np.asarray(x) for x in interval)
    for row, tiles in enumerate(order):
        spans = []
        for tile in tiles:
            seen = {q for t in range(tile * 8, min(tile * 8 + 8, 60)) for q in range(begin[row, t], end[row, t])}
            spans.append(max(seen) + 1 - min(seen) if seen else 0)
        assert sorted(tiles) == list(range(8))
        assert spans == sorted(spans, reverse=True), (tiles, spans)
        assert spans[0] > spans[-1]


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_the_parts_of_a_walk_take_each_step_once_under_its_own_mask(parts: int) -> None:
    walk = Walk(jnp.int32(0), jnp.int32(0), jnp.int32(2), jnp.int32(4), jnp.int32(5))

    def visit(index, visits, *, masked):
        return visits.at[index, int(masked)].add(1)

    visits = sum(np.asarray(walk.run(visit, jnp.zeros((6, 2), int), part, parts)) for part in range(parts))
    np.testing.assert_array_equal(visits, [[0, 1], [0, 1], [1, 0], [1, 0], [0, 1], [0, 0]])


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, 2.0)])
def test_divided_walks_are_within_the_error_budget(window, softcap, monkeypatch: pytest.MonkeyPatch) -> None:
    def divided(request):
        tiles = tiles_for(request)
        return replace(tiles, dkv=replace(tiles.dkv, parts=3))

    monkeypatch.setattr(pallas_tiles, "tiles_for", divided)
    jax.clear_caches()
    case = Case(((70, -9, 49),), heads=6, kv_heads=2, width=8, dtype="bfloat16", window=window, softcap=softcap)
    over = case.worst(run(case, "pallas"))
    jax.clear_caches()
    assert all(worst <= 1 for worst in over.values()), over


def test_a_recomputed_layer_does_not_plan_its_backward_anew() -> None:
    q, ids = jnp.ones((1, 64, 2, 8)), jnp.ones((1, 64), jnp.int32)
    keep = jax.checkpoint_policies.save_only_these_names(SAVED)

    @partial(jax.checkpoint, policy=keep)
    def layer(q: jax.Array) -> jax.Array:
        out: jax.Array = segment_attention(q, q, q, ids, implementation="pallas")
        return out

    whole = jax.make_jaxpr(jax.grad(lambda q: layer(q).sum()))(q).jaxpr
    (backward,) = (eqn.params["jaxpr"] for eqn in whole.eqns if eqn.primitive.name in ("checkpoint", "remat2"))
    assert "pallas_call" in primitives(backward)
    assert "sort" in primitives(whole) and "sort" not in primitives(backward)


def primitives(jaxpr: Any) -> set[str]:
    """The names of all operations, those of inner programs included."""
    found = {eqn.primitive.name for eqn in jaxpr.eqns}
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            program = getattr(value, "jaxpr", value)
            if hasattr(program, "eqns"):
                found |= primitives(program)
    return found


def test_only_few_programs_divide_their_walks() -> None:
    def parts(kv_heads: int, tokens: int, platform: str = "gpu") -> int:
        q, k = (jax.ShapeDtypeStruct((1, tokens, heads, 64), jnp.bfloat16) for heads in (16, kv_heads))
        return tiles_for(request_for(q, k, k, platform=platform)).dkv.parts

    assert parts(2, 16384) == 3
    assert parts(1, 8192) == pallas_tiles._MOST_PARTS
    assert parts(16, 16384) == parts(2, 16384, "cpu") == 1


def test_wide_heads_take_smaller_tiles_where_shared_memory_is_not_large() -> None:
    def rows(device: str, width: int) -> int:
        q = jax.ShapeDtypeStruct((1, 256, 4, width), jnp.bfloat16)
        mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device, num_cores=128, platform="cuda"))
        with jax.sharding.use_abstract_mesh(mesh):
            return tiles_for(request_for(q, q, q, platform="gpu")).forward.rows

    large = ("NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA B200", "NVIDIA GB300")
    others = ("NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "NVIDIA H", "")
    assert [rows(device, 256) for device in large + others] == 4 * [128] + 4 * [64]
    assert rows(others[0], 128) == rows(large[0], 128)
