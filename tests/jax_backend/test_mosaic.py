"""The kernels on Hopper's own instructions: where they are taken and what they walk, on any host; what they compute, on
a Hopper GPU."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from conformance.draws import Rows, segment_ids
from jax_backend import segment_attention
from jax_backend.attention.mosaic_tiles import ROWS, TILE, by_part, by_tile, by_token, plan_keys
from jax_backend.segments import find_segments, visible_keys
from tests.jax_backend.oracle import Case
from tests.jax_backend.test_attention_gpu import run


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
        ("NVIDIA H200", 128, (264, 264), {"window": 100}, True),
        ("NVIDIA H100 80GB HBM3", 128, (256, 256), {"dtype": "float16", "causal": False, "heads": 32}, True),
        ("NVIDIA A100-SXM4-80GB", 128, (256, 256), {}, False),
        ("NVIDIA H200", 64, (256, 256), {}, False),
        ("NVIDIA H200", 128, (256, 256), {"heads": 14}, True),
        ("NVIDIA H200", 128, (257, 256), {}, False),
        ("NVIDIA H200", 128, (256, 257), {}, False),
        ("NVIDIA H200", 128, (256, 256), {"dtype": "float32"}, False),
        ("NVIDIA H200", 128, (256, 512), {"softcap": 5.0}, False),
    ],
)
def test_pallas_takes_them_where_they_serve_and_the_other_kernels_elsewhere(
    device: str, width: int, size: tuple[int, int], options: dict[str, Any], taken: bool
) -> None:
    text = lowered_for(device, width, size, **options)
    kernels = len(re.findall("custom_call @mosaic_gpu", text)), len(re.findall("custom_call @.*triton", text))
    assert kernels == ((2, 1) if taken else (0, 3))


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


def test_rows_hold_a_token_once_per_packed_head_and_give_it_back() -> None:
    numbers = jnp.arange(2 * 72).reshape(2, 72)
    tiles = by_tile(numbers, 4)
    assert tiles.shape == (2, 3, TILE)
    np.testing.assert_array_equal(tiles[1, 1, ROWS : ROWS + 17], [*range(120, 136), 120])
    back = by_token(jnp.stack([tiles, tiles + 1000], axis=1), 4, 72)
    np.testing.assert_array_equal(back, numbers[..., None] + np.repeat([0, 1000], 4))
    np.testing.assert_array_equal(by_part(back, 4)[:, 1, 2:4], (tiles[:, 1] + 1000).reshape(2, 2, ROWS))


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
def test_under_vmap_rows_are_those_of_a_batch() -> None:
    case = Case(((100, 28), (-30, 98), (1, 127)), heads=4, kv_heads=2, width=128, dtype="bfloat16")
    q, k, v = (case.jax_operands()[name] for name in "qkv")

    def attend(*row: jax.Array) -> jax.Array:
        out: jax.Array = segment_attention(*(x[None] for x in row))[0]
        return out

    ids = jnp.asarray(case.ids)
    np.testing.assert_array_equal(jax.jit(jax.vmap(attend))(q, k, v, ids), jax.jit(segment_attention)(q, k, v, ids))
