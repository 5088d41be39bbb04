"""The forward kernel on Hopper's own instructions: one block per (tile of queries, P heads, row).

The recurrence is that of ``pallas_forward``. The two computing warpgroups take turns: while one multiplies, the other
takes its softmax (Shah et al. 2024, arXiv:2407.08608, section 3.1). Both walk the same keys, so neither waits for the
other at the end.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
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
    TILE,
    Stream,
    by_token,
    load_rows,
    packed_heads,
    plan_keys,
    store_rows,
    stream_keys,
)
from jax_backend.attention.request import LOG2E, Request
from jax_backend.hopper import BLOCKS, PARAMS, PER_ROW, ROWS, along_rows, column_numbers
from jax_backend.segments import Interval


def forward(q: jax.Array, k: jax.Array, v: jax.Array, keys: Interval, request: Request) -> tuple[jax.Array, jax.Array]:
    """Attention [B, S, N, D] in q's dtype and lse, float32 [B, S, N].

    Args:
        q, k, v: [B, S, N, D], [B, T, K, D], [B, T, K, D].
        keys: the keys that each query sees, int32 [B, S] and [B, S].
    """
    heads = packed_heads(request)
    plan = plan_keys(keys, heads)
    rows, tiles = plan.walk.shape[:2]
    stages = plgpu.SMEM((STAGES, KEYS, request.head_dim), q.dtype, transforms=BLOCKS)
    filled, freed = plgpu.Barrier(num_barriers=STAGES), plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES)

    out, lse = plgpu.kernel(
        partial(_kernel, request=request, heads=heads, tiles=tiles),
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((rows, request.heads // heads, tiles, TILE), jnp.float32),
        ),
        grid=(request.heads // heads, tiles, rows),
        grid_names=("part", "tile", "row"),
        num_threads=GROUPS + 1,
        thread_name="warpgroup",
        kernel_name="segment_attention_forward",
        scratch_types={
            "q_smem": plgpu.SMEM((GROUPS, ROWS, request.head_dim), q.dtype, transforms=BLOCKS),
            "k_smem": stages,
            "v_smem": stages,
            "bounds_smem": plgpu.SMEM((2, GROUPS, ROWS), jnp.int32),
            "lse_smem": plgpu.SMEM((GROUPS, ROWS), jnp.float32),
            "q_filled": plgpu.Barrier(num_arrivals=heads + 2, num_barriers=GROUPS),
            "k_filled": filled,
            "v_filled": filled,
            "k_freed": freed,
            "v_freed": freed,
            "turn": plgpu.Barrier(num_arrivals=GROUPS),
        },
        compiler_params=PARAMS,
    )(q, k, v, *plan)
    return out, by_token(lse, heads, request.queries)


def _kernel(*refs: Any, request: Request, heads: int, tiles: int, **scratch: Any) -> None:
    q_ref, k_ref, v_ref, begin_ref, end_ref, walk_ref, o_ref, lse_ref = refs
    s = SimpleNamespace(**scratch)
    row, part = lax.axis_index("row"), lax.axis_index("part")
    tile = tiles - 1 - lax.axis_index("tile")  # the longest walks first
    group = lax.axis_index("warpgroup")
    first, lead, full, total = (walk_ref[row, tile, i] for i in range(4))

    def slot_of(step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.int32(STAGES))

    @pl.when(group == GROUPS)
    def copy() -> None:
        plgpu.set_max_registers(40, action="decrease")
        streams = Stream(k_ref, s.k_smem, s.k_filled, s.k_freed), Stream(v_ref, s.v_smem, s.v_filled, s.v_freed)
        stream_keys(streams, row, first, total, lax.div(part * heads, jnp.int32(request.group)))

    @pl.when(group < GROUPS)
    def compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        q, lse, ready = s.q_smem.at[group], s.lse_smem.at[group], s.q_filled.at[group]
        token, mine = (tile * GROUPS + group) * (ROWS // heads), pl.ds(group * ROWS, ROWS)
        load_rows(q_ref, q, ready, row, token, part, heads)
        for side, ref in enumerate((begin_ref, end_ref)):
            plgpu.copy_gmem_to_smem(ref.at[row, tile, mine], s.bounds_smem.at[side, group], ready)
        plgpu.barrier_wait(ready)
        begin, end = (plgpu.layout_cast(s.bounds_smem[side, group], PER_ROW) for side in range(2))

        def swap_turns() -> None:
            plgpu.barrier_arrive(s.turn)
            plgpu.barrier_wait(s.turn)

        def await_keys(index: jax.Array | int) -> None:
            pl.when(index < total)(lambda: plgpu.barrier_wait(s.k_filled.at[slot_of(jnp.int32(index))]))

        def step(index: jax.Array, carry: Any) -> Any:
            acc, m, summed = carry
            slot = slot_of(index)

            def multiply_keys(z_ref: Any) -> jax.Array:
                plgpu.wgmma(z_ref, q, s.k_smem.at[slot].T)
                swap_turns()
                return z_ref[...]

            z = pl.run_scoped(multiply_keys, plgpu.ACC((ROWS, KEYS), jnp.float32))
            plgpu.barrier_arrive(s.k_freed.at[slot])

            def mask() -> jax.Array:
                key = column_numbers(KEYS) + (first + index * KEYS)
                visible = (along_rows(begin, KEYS) <= key) & (key < along_rows(end, KEYS))
                return jnp.where(visible, z, -jnp.inf)

            z = lax.cond((index < lead) | (index >= full), mask, lambda: z)
            factor = request.scale * LOG2E
            m_new = jnp.maximum(m, z.max(axis=1) * factor)
            pivot = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # a row may have seen nothing yet
            p = jnp.exp2(z * factor - along_rows(pivot, KEYS))
            alpha = jnp.exp2(m - pivot)
            summed = summed * alpha + p.sum(axis=1)
            acc *= along_rows(alpha, request.value_dim)
            narrow = p.astype(q_ref.dtype)
            acc, m, summed, narrow = lax.optimization_barrier((acc, m_new, summed, narrow))
            plgpu.barrier_arrive(s.turn)
            plgpu.barrier_wait(s.v_filled.at[slot])
            plgpu.barrier_wait(s.turn)

            def multiply_values(acc_ref: Any) -> None:
                plgpu.wgmma(acc_ref, narrow, s.v_smem.at[slot])
                await_keys(index + 1)

            acc = pl.run_state(multiply_values)(plgpu.ACC.init(acc))
            plgpu.barrier_arrive(s.v_freed.at[slot])
            return acc, m, summed

        start = (
            plgpu.layout_cast(jnp.zeros((ROWS, request.value_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), PER_ROW),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), PER_ROW),
        )
        await_keys(0)
        pl.when(group == 1)(swap_turns)  # the second warpgroup is half a step behind
        acc, m, summed = lax.fori_loop(0, total, step, start)
        pl.when(group == 0)(swap_turns)
        saw = summed > 0
        divisor = jnp.where(saw, summed, 1.0)
        q[...] = (acc * along_rows(1.0 / divisor, request.value_dim)).astype(q_ref.dtype)  # q is not read any more
        lse[...] = jnp.where(saw, (m + jnp.log2(divisor)) / LOG2E, -jnp.inf)
        plgpu.commit_smem()
        store_rows(q, o_ref, row, token, part, heads)
        plgpu.copy_smem_to_gmem(lse, lse_ref.at[row, part, tile, mine])
        plgpu.wait_smem_to_gmem(0)
