"""The kernels for Hopper: what takes them, their walks, and the head."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from conformance.draws import Rows, segment_ids
from jax_backend import linear_cross_entropy, segment_attention
from jax_backend.attention import mosaic_backward, request_for
from jax_backend.attention.mosaic_tiles import ROWS, TILE, by_step, by_tile, by_token, plan_keys, plan_queries
from jax_backend.attention.request import LOG2E
from jax_backend.losses.mosaic_powers import powers
from jax_backend.segments import Interval, find_segments, seeing_queries, visible_keys
from packing_core.budget import over_budget
from tests.jax_backend.oracle import Case
from tests.jax_backend.test_attention_gpu import run
from tests.jax_backend.test_linear_cross_entropy import plain_powers


def lowered_for(
    device: str, width: int, size: tuple[int, int], *, heads: int = 8, dtype: str = "bfloat16", **options: Any
) -> str:
    """The StableHLO of a call's gradient over a row of ``size`` queries and keys, lowered for a device."""
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device, num_cores=132, platform="cuda"))
    queries, keys = size
    operands = ((queries, heads), (keys, 2), (keys, 2))
    shapes = [jax.ShapeDtypeStruct((1, tokens, heads, width), dtype) for tokens, heads in operands]
    ids, kv_ids = (jax.ShapeDtypeStruct((1, tokens), jnp.int32) for tokens in size)

    def loss(*arrays: jax.Array) -> Any:
        kv_ids = {} if queries == keys else {"kv_segment_ids": arrays[4]}
        return segment_attention(*arrays[:4], implementation="pallas", **kv_ids, **options).astype(jnp.float32).sum()

    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*shapes, ids, kv_ids)
        return str(traced.lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.parametrize(
    ("device", "width", "size", "options", "taken"),
    [
        ("NVIDIA H200", 128, (264, 264), {"window": 100}, (2, 0)),
        ("NVIDIA H100 80GB HBM3", 128, (256, 256), {"dtype": "float16", "causal": False, "heads": 32}, (2, 0)),
        ("NVIDIA A100-SXM4-80GB", 128, (256, 256), {}, (0, 3)),
        ("NVIDIA H200", 64, (256, 256), {}, (1, 1)),
        ("NVIDIA H200", 64, (256, 256), {"heads": 14}, (0, 3)),
        ("NVIDIA H200", 128, (256, 256), {"heads": 14}, (2, 0)),
        ("NVIDIA H200", 80, (256, 256), {}, (0, 3)),
        ("NVIDIA H200", 128, (257, 256), {}, (0, 3)),
        ("NVIDIA H200", 128, (256, 257), {}, (0, 3)),
        ("NVIDIA H200", 128, (256, 256), {"dtype": "float32"}, (0, 3)),
        ("NVIDIA H200", 128, (256, 512), {"softcap": 5.0}, (0, 3)),
    ],
)
def test_pallas_takes_them_where_they_win_and_the_other_kernels_elsewhere(
    device: str, width: int, size: tuple[int, int], options: dict[str, Any], taken: tuple[int, int]
) -> None:
    text = lowered_for(device, width, size, **options)
    kernels = len(re.findall("custom_call @mosaic_gpu", text)), len(re.findall("custom_call @.*triton", text))
    assert kernels == taken


@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("causal", [True, False])
def test_a_walk_covers_what_its_rows_see_and_masks_every_step_that_some_row_does_not_see_whole(
    causal: bool, window: int | None
) -> None:
    rows: Rows = ((-5, 90, 1, -30, 34, 60, -4), (224,))
    step, heads = 16, 4
    keys = visible_keys(find_segments(jnp.asarray(segment_ids(rows))), causal=causal, window=window)
    plan = jax.tree.map(np.asarray, plan_keys(keys, heads, step))
    begin, end = np.asarray(keys.begin), np.asarray(keys.end)
    unmasked, tokens = 0, TILE // heads
    for row, tile in np.ndindex(plan.walk.shape[:2]):
        first, lead, full, total = plan.walk[row, tile]
        mine = range(tile * tokens, min((tile + 1) * tokens, begin.shape[1]))
        seen = [(begin[row, i], end[row, i]) for i in mine if begin[row, i] < end[row, i]]
        assert first % 8 == 0 or not seen
        assert all(first <= low and high <= first + total * step for low, high in seen)
        assert total == 0 or any(high > first + (total - 1) * step for _, high in seen)
        for inner in range(lead, full):
            low, high = first + inner * step, first + (inner + 1) * step
            assert len(seen) == len(mine)
            assert all(b <= low and high <= e for b, e in seen)
            unmasked += 1
    assert unmasked > 0


@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [((-5, 90, 1, -30, 34, 60, -4), (224,)), ((-200, 24), (60, -164))])
def test_blocks_visit_what_sees_their_keys_and_know_how_many_come_before(
    rows: Rows, causal: bool, window: int | None
) -> None:
    ids = jnp.asarray(segment_ids(rows))
    queries = seeing_queries(find_segments(ids), causal=causal, window=window)
    visits = check_plan(queries, ids.shape[1], tokens=16, block=32)
    keys = visible_keys(find_segments(ids), causal=causal, window=window)
    seen = np.asarray(keys.begin < keys.end).reshape(len(rows), -1, 16).any(axis=2)
    assert not (seen & ~visits).any(), "a step that sees something is visited"


def test_intervals_that_do_not_move_on_with_the_keys_are_visited_too() -> None:
    begin = np.asarray([[96] * 32 + [0] * 32 + [0] * 32 + [32] * 32], np.int32)
    end = np.asarray([[128] * 32 + [32] * 32 + [0] * 32 + [64] * 32], np.int32)
    check_plan(Interval(begin, end), 128, tokens=16, block=32)


def check_plan(queries: Any, size: int, *, tokens: int, block: int) -> np.ndarray:
    """Every query that sees a key is visited by the key's block, masked unless all see all, and the blocks of a step
    are numbered without a gap; returns which steps are visited."""
    plan = jax.tree.map(np.asarray, plan_queries(Interval(*map(jnp.asarray, queries)), size, tokens, block))
    begin, end = np.asarray(queries[0]), np.asarray(queries[1])
    visitors: dict[tuple[int, int], list[int]] = {}
    for row, tile in np.ndindex(plan.walk.shape[:2]):
        last, total, clear, masked = plan.walk[row, tile]
        mine = [(b, e) for b, e in zip(begin[row], end[row], strict=True)][tile * block : (tile + 1) * block]
        steps = range(last - total + 1, last + 1)
        needed = {i // tokens for b, e in mine if b < e for i in range(b, e)}
        assert needed <= set(steps)
        for step in steps:
            visitors.setdefault((row, step), []).append(tile)
            if clear <= step < masked:
                assert len(mine) == block
                assert all(b <= step * tokens and (step + 1) * tokens <= e for b, e in mine)
    for (row, step), tiles in visitors.items():
        leader = plan.leader[row, step]
        assert tiles == list(range(leader, leader + len(tiles)))
    visited = np.zeros(plan.visited.shape, bool)
    visited[tuple(np.transpose(list(visitors)))] = True
    np.testing.assert_array_equal(plan.visited, visited)
    return visited


def test_rows_hold_a_token_once_per_packed_head_and_give_it_back() -> None:
    numbers = jnp.arange(2 * 72).reshape(2, 72)
    tiles = by_tile(numbers, 4)
    assert tiles.shape == (2, 3, TILE)
    np.testing.assert_array_equal(tiles[1, 1, ROWS : ROWS + 17], [*range(120, 136), 120])
    back = by_token(jnp.stack([tiles, tiles + 1000], axis=1), 4, 72)
    np.testing.assert_array_equal(back, np.asarray(numbers)[..., None] + np.repeat([0, 1000], 4))
    np.testing.assert_array_equal(by_step(back, 4, ROWS)[:, 1, 2:4], (tiles[:, 1] + 1000).reshape(2, 2, ROWS))


@pytest.mark.parametrize(("width", "heads"), [(128, 8), (64, 8), (64, 2)])
def test_pieces_of_dq_are_given_back_to_their_tokens(width: int, heads: int) -> None:
    packed, tokens = heads // 2, 72
    q, k = (jax.ShapeDtypeStruct((1, tokens, n, width), jnp.bfloat16) for n in (heads, 2))
    request = request_for(q, k, k, platform="gpu")
    size = 64 * 128 // width
    dq = np.arange(tokens * heads * width, dtype=np.float32).reshape(1, tokens, heads, width)
    columns = [by_step(jnp.asarray(dq[..., column]), packed, size) for column in range(width)]
    rows = jnp.stack(columns, axis=-1)  # [1, parts, steps, size, D]
    pieces = rows.reshape(*rows.shape[:3], -1, 64, width // 64, 64)
    pieces = pieces.swapaxes(4, 5).reshape(*rows.shape[:3], 2, 64, 64)
    np.testing.assert_array_equal(mosaic_backward.by_token(pieces, packed, request), dq)


# -- on a GPU; more widths, dtypes and options in test_attention_gpu.py ------------------------------------------------

needs_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device that JAX sees")


@pytest.mark.parametrize("rows", [((-3, 261),), ((1, 1, 1, 5, 128, 64, -8), (-200, 8))])
@pytest.mark.gpu
@needs_gpu
def test_rows_that_fill_no_tile_are_within_the_error_budget(rows: Rows) -> None:
    case = Case(rows, heads=8, kv_heads=2, width=128, dtype="bfloat16")
    found = run(case, "pallas")
    _, found["lse"] = segment_attention(**case.jax_operands(), segment_ids=jnp.asarray(case.ids), return_lse=True)
    over = case.worst(found)
    assert all(worst <= 1 for worst in over.values()), over


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("width", [64, 128])
def test_gradients_under_vmap_are_those_of_a_batch(width: int) -> None:
    case = Case(((100, 28), (-30, 98), (1, 127)), heads=4, kv_heads=2, width=width, dtype="bfloat16")
    q, k, v = (case.jax_operands()[name] for name in "qkv")
    ids, dout = jnp.asarray(case.ids), jnp.asarray(case.dout, "bfloat16")

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, dout: jax.Array) -> Any:
        return jax.vjp(lambda *x: segment_attention(*x, ids), q, k, v)[1](dout)

    def of_row(*row: jax.Array) -> Any:
        return jax.tree.map(lambda x: x[0], gradients(*(x[None] for x in row)))

    found = jax.jit(jax.vmap(of_row))(q, k, v, ids, dout)
    for one, other in zip(found, jax.jit(gradients)(q, k, v, ids, dout), strict=True):
        # Not to the bit: what a query that sees one key leaves of dp - delta is rounding, and delta is XLA's.
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=0.01, atol=1e-5)


@pytest.mark.gpu
@needs_gpu
def test_under_vmap_rows_are_those_of_a_batch() -> None:
    case = Case(((100, 28), (-30, 98), (1, 127)), heads=4, kv_heads=2, width=128, dtype="bfloat16")
    q, k, v = (case.jax_operands()[name] for name in "qkv")

    def attend(*row: jax.Array) -> jax.Array:
        out: jax.Array = segment_attention(*(x[None] for x in row))[0]
        return out

    ids = jnp.asarray(case.ids)
    np.testing.assert_array_equal(jax.jit(jax.vmap(attend))(q, k, v, ids), jax.jit(segment_attention)(q, k, v, ids))


@pytest.mark.parametrize(
    ("device", "dtype", "classes", "tokens", "options", "taken"),
    [
        ("NVIDIA H200", "bfloat16", 1088, 200, {"logit_scale": 0.5}, True),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 1088, 256, {"chunk": 128, "transposed": True}, True),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 1088, 256, {}, False),
        ("NVIDIA H200", "float32", 1088, 256, {}, False),
        ("NVIDIA H200", "float16", 1088, 256, {}, False),  # a power may be too large for it
        ("NVIDIA H200", "bfloat16", 1056, 256, {}, False),
        ("NVIDIA H200", "bfloat16", 1088, 256, {"chunk": 100}, False),
        ("NVIDIA H200", "bfloat16", 1088, 256, {"softcap": 5.0}, False),
    ],
)
def test_the_head_takes_it_where_it_serves(
    device: str, dtype: str, classes: int, tokens: int, options: dict[str, Any], taken: bool
) -> None:
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device, num_cores=132, platform="cuda"))
    hidden = jax.ShapeDtypeStruct((1, tokens, 128), dtype)
    weight = jax.ShapeDtypeStruct((classes, 128) if "transposed" in options else (128, classes), jnp.float32)

    def loss(hidden: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
        return linear_cross_entropy(hidden, weight, targets, **options)[0]

    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(hidden, weight, jax.ShapeDtypeStruct((1, tokens), int))
        text = str(traced.lower(lowering_platforms=("cuda",)).as_text())
    assert len(re.findall("custom_call @mosaic_gpu", text)) == taken


def operands(tokens: int, channels: int, classes: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    hidden, weight = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((tokens, channels), (classes, channels))
    )
    labels = jnp.asarray(rng.integers(0, classes, tokens), jnp.int32)
    return {"hidden": hidden, "weight": weight, "labels": labels}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("tokens", "channels", "classes"), [(256, 128, 1088), (640, 192, 5056), (128, 64, 256)])
def test_powers_and_their_sums_are_those_of_plain_operations(tokens: int, channels: int, classes: int) -> None:
    data = operands(tokens, channels, classes)
    logits = jnp.einsum("cm,cm->c", data["hidden"], data["weight"][data["labels"]], preferred_element_type=jnp.float32)
    scale = channels**-0.5
    bases = jnp.where(jnp.arange(tokens) % 7 == 0, 1e30, logits * (scale * LOG2E))
    found, sums = jax.jit(powers, static_argnums=4)(*data.values(), bases, scale)
    wanted, whole = plain_powers(*data.values(), bases, scale)
    np.testing.assert_allclose(sums.sum(axis=0), whole[0], rtol=2e-5)
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=2**-7, atol=2.0**-100
    )


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("strength", [1.0, 30.0], ids=["small", "where-powers-overflow"])
@pytest.mark.parametrize("transposed", [False, True])
def test_loss_and_gradients_are_within_the_error_budget(transposed: bool, strength: float) -> None:
    data = operands(700, 192, 5056)
    hidden, weight = data["hidden"] * jnp.bfloat16(strength * 192**-0.5), data["weight"]
    targets = jnp.where(jnp.arange(700) % 5 == 0, -100, data["labels"])
    factors = jnp.asarray(np.random.default_rng(1).random(700), jnp.float32)

    def fused(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        head = weight if transposed else weight.T
        return linear_cross_entropy(hidden, head, targets, weights=factors, chunk=256, transposed=transposed)[0]

    def plain(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        wide = jnp.float64 if hidden.dtype == jnp.float64 else jnp.float32
        log_p = jax.nn.log_softmax((hidden @ weight.T).astype(wide))
        picked = jnp.take_along_axis(log_p, jnp.where(targets < 0, 0, targets)[:, None], 1)[:, 0]
        return -jnp.where(targets < 0, 0, factors.astype(wide) * picked).sum()

    def run(function: Any, *arrays: Any) -> list[np.ndarray]:
        found = jax.jit(jax.value_and_grad(function, argnums=(0, 1)))(*arrays)
        return [np.asarray(x, np.float64) for x in jax.tree.leaves(found)]

    found, rounded = run(fused, hidden, weight), run(plain, hidden, weight)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        exact = run(plain, *(jnp.asarray(np.asarray(x, np.float64)) for x in (hidden, weight)))
    for one, truth, like in zip(found, exact, rounded, strict=True):
        assert over_budget(one, truth, like, scale=float(np.abs(truth).max()), dtype="bfloat16").max() <= 1
