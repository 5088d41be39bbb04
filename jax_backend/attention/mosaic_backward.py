"""The gradient of the queries on Hopper's own instructions: one block per (tile of queries, P heads, row).

The formulas are those of ``pallas_backward``. Both products of a step are started together, so that the second is
computed while the weights are taken from the first. Keys and values keep ``pallas_backward``'s kernel: here they would
need tiles of 128 keys, which are slower on short segments.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_backend.attention.mosaic_tiles import (
    GROUPS,
    KEYS,
    STAGES,
    Stream,
    by_part,
    load_rows,
    packed_heads,
    plan_keys,
    store_rows,
    stream_keys,
)
from jax_backend.attention.pallas_tiles import LOG2E
from jax_backend.attention.request import Request
from jax_backend.hopper import BLOCKS, PARAMS, PER_ROW, ROWS, along_rows, column_numbers
from jax_backend.segments import Interval


def grad_queries(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    keys: Interval,
    request: Request,
) -> jax.Array:
    """dq [B, S, N, D] in q's dtype.

    Args:
        lse, delta: float32 [B, S, N].
        keys: the keys that each query sees, int32 [B, S] and [B, S].
    """
    heads = packed_heads(request)
    plan = plan_keys(keys, heads)
    rows, tiles = plan.walk.shape[:2]
    own = plgpu.SMEM((GROUPS, ROWS, request.head_dim), q.dtype, transforms=BLOCKS)
    stages = plgpu.SMEM((STAGES, KEYS, request.head_dim), q.dtype, transforms=BLOCKS)
    filled, freed = plgpu.Barrier(num_barriers=STAGES), plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES)
    dq: jax.Array = plgpu.kernel(
        partial(_kernel, request=request, heads=heads, tiles=tiles),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(request.heads // heads, tiles, rows),
        grid_names=("part", "tile", "row"),
        num_threads=GROUPS + 1,
        thread_name="warpgroup",
        kernel_name="segment_attention_dq",
        scratch_types={
            "q_smem": own,
            "dout_smem": own,
            "k_smem": stages,
            "v_smem": stages,
            "numbers_smem": plgpu.SMEM((2, GROUPS, ROWS), jnp.float32),
            "bounds_smem": plgpu.SMEM((2, GROUPS, ROWS), jnp.int32),
            "own_filled": plgpu.Barrier(num_arrivals=2 * heads + 4, num_barriers=GROUPS),
            "k_filled": filled,
            "v_filled": filled,
            "k_freed": freed,
            "v_freed": freed,
        },
        compiler_params=PARAMS,
    )(q, k, v, dout, by_part(lse * LOG2E, heads), by_part(delta, heads), *plan)
    return dq


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    dout_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    begin_ref: Any,
    end_ref: Any,
    walk_ref: Any,
    dq_ref: Any,
    *,
    q_smem: Any,
    dout_smem: Any,
    k_smem: Any,
    v_smem: Any,
    numbers_smem: Any,
    bounds_smem: Any,
    own_filled: Any,
    k_filled: Any,
    v_filled: Any,
    k_freed: Any,
    v_freed: Any,
    request: Request,
    heads: int,
    tiles: int,
) -> None:
    row, part = lax.axis_index("row"), lax.axis_index("part")
    tile = tiles - 1 - lax.axis_index("tile")  # the longest walks first
    group = lax.axis_index("warpgroup")
    first, lead, full, total = (walk_ref[row, tile, i] for i in range(4))

    @pl.when(group == GROUPS)
    def copy() -> None:
        plgpu.set_max_registers(24, action="decrease")
        streams = Stream(k_ref, k_smem, k_filled, k_freed), Stream(v_ref, v_smem, v_filled, v_freed)
        stream_keys(streams, row, first, total, lax.div(part * heads, jnp.int32(request.group)))

    @pl.when(group < GROUPS)
    def compute() -> None:
        plgpu.set_max_registers(224, action="increase")
        q, dout, ready = q_smem.at[group], dout_smem.at[group], own_filled.at[group]
        token = (tile * GROUPS + group) * (ROWS // heads)
        load_rows(q_ref, q, ready, row, token, part, heads)
        load_rows(dout_ref, dout, ready, row, token, part, heads)
        for side, ref in enumerate((lse_ref, delta_ref)):
            plgpu.copy_gmem_to_smem(ref.at[row, part, tile * GROUPS + group], numbers_smem.at[side, group], ready)
        for side, ref in enumerate((begin_ref, end_ref)):
            plgpu.copy_gmem_to_smem(ref.at[row, tile, pl.ds(group * ROWS, ROWS)], bounds_smem.at[side, group], ready)
        plgpu.barrier_wait(ready)
        lse, delta = (plgpu.layout_cast(numbers_smem[side, group], PER_ROW) for side in range(2))
        begin, end = (plgpu.layout_cast(bounds_smem[side, group], PER_ROW) for side in range(2))

        def step(index: jax.Array, dq_acc: Any) -> None:
            slot = lax.rem(index, jnp.int32(STAGES))

            def weigh(z_acc: Any, dp_acc: Any) -> jax.Array:
                plgpu.barrier_wait(k_filled.at[slot])
                plgpu.wgmma(z_acc, q, k_smem.at[slot].T)
                plgpu.barrier_wait(v_filled.at[slot])
                plgpu.wgmma(dp_acc, dout, v_smem.at[slot].T)
                z = plgpu.wgmma_accumulator_load(z_acc, wait_n=1)
                p = jnp.exp2(z * (request.scale * LOG2E) - along_rows(lse, KEYS))

                def mask() -> jax.Array:
                    key = column_numbers(KEYS) + (first + index * KEYS)
                    return jnp.where((along_rows(begin, KEYS) <= key) & (key < along_rows(end, KEYS)), p, 0.0)

                p = lax.cond((index < lead) | (index >= full), mask, lambda: p)
                dp = dp_acc[...]
                plgpu.barrier_arrive(v_freed.at[slot])
                return p * (dp - along_rows(delta, KEYS))

            wide = plgpu.ACC((ROWS, KEYS), jnp.float32)
            dz = pl.run_scoped(weigh, wide, wide)
            plgpu.wgmma(dq_acc, dz.astype(q_ref.dtype), k_smem.at[slot])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(k_freed.at[slot])

        def walk(dq_acc: Any) -> jax.Array:
            lax.fori_loop(0, total, lambda index, _: step(index, dq_acc), None)
            return dq_acc[...]

        dq = pl.run_scoped(walk, plgpu.ACC((ROWS, request.head_dim), jnp.float32))
        q[...] = (dq * request.scale).astype(q_ref.dtype)  # q is not read any more
        plgpu.commit_smem()
        store_rows(q, dq_ref, row, token, part, heads)
        plgpu.wait_smem_to_gmem(0)
