"""The forward kernel on Hopper's own instructions: one block per (tile of queries, P heads, row).

The recurrence is that of ``pallas_forward``. The two computing warpgroups take turns: while one multiplies, the other
takes its softmax (Shah et al. 2024, arXiv:2407.08608, section 3.1). Both walk the same keys, so neither waits for the
other at the end.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_backend.attention.mosaic_tiles import COPIED, GROUPS, ROWS, TILE, by_token, packed_heads, plan_keys
from jax_backend.attention.pallas_tiles import LOG2E
from jax_backend.attention.request import Request
from jax_backend.segments import Interval

KEYS = 128  # keys of a step
STAGES = 2  # steps in shared memory
_PER_ROW = plgpu.Layout.WGMMA.reduce(1)


def forward(q: jax.Array, k: jax.Array, v: jax.Array, keys: Interval, request: Request) -> tuple[jax.Array, jax.Array]:
    """Attention [B, S, N, D] in q's dtype and lse, float32 [B, S, N].

    Args:
        q, k, v: [B, S, N, D], [B, T, K, D], [B, T, K, D].
        keys: the keys that each query sees, int32 [B, S] and [B, S].
    """
    heads = packed_heads(request)
    plan = plan_keys(keys, heads, KEYS)
    rows, tiles = plan.walk.shape[:2]
    blocks = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # what wgmma reads
    stages = plgpu.SMEM((STAGES, KEYS, request.head_dim), q.dtype, transforms=blocks)
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
            "q_smem": plgpu.SMEM((GROUPS, ROWS, request.head_dim), q.dtype, transforms=blocks),
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
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(q, k, v, *plan)
    return out, by_token(lse, heads, request.queries)


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    begin_ref: Any,
    end_ref: Any,
    walk_ref: Any,
    o_ref: Any,
    lse_ref: Any,
    *,
    q_smem: Any,
    k_smem: Any,
    v_smem: Any,
    bounds_smem: Any,
    lse_smem: Any,
    q_filled: Any,
    k_filled: Any,
    v_filled: Any,
    k_freed: Any,
    v_freed: Any,
    turn: Any,
    request: Request,
    heads: int,
    tiles: int,
) -> None:
    row, part = lax.axis_index("row"), lax.axis_index("part")
    tile = tiles - 1 - lax.axis_index("tile")  # the longest walks first
    group = lax.axis_index("warpgroup")
    first, lead, full, total = (walk_ref[row, tile, i] for i in range(4))

    def slot_of(step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.int32(STAGES))

    @pl.when(group == GROUPS)
    def copy() -> None:
        plgpu.set_max_registers(40, action="decrease")
        kv_head = lax.div(part * heads, jnp.int32(request.group))

        def step(index: jax.Array, _: None) -> None:
            slot = slot_of(index)
            span = pl.ds(pl.multiple_of(first + index * KEYS, COPIED), KEYS)
            for ref, smem, filled, freed in ((k_ref, k_smem, k_filled, k_freed), (v_ref, v_smem, v_filled, v_freed)):
                pl.when(index >= STAGES)(partial(plgpu.barrier_wait, freed.at[slot]))
                plgpu.copy_gmem_to_smem(ref.at[row, span, kv_head], smem.at[slot], filled.at[slot])

        lax.fori_loop(0, total, step, None)

    @pl.when(group < GROUPS)
    def compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        tokens = ROWS // heads
        q, lse, ready = q_smem.at[group], lse_smem.at[group], q_filled.at[group]
        span, mine = pl.ds((tile * GROUPS + group) * tokens, tokens), pl.ds(group * ROWS, ROWS)
        for member in range(heads):
            plgpu.copy_gmem_to_smem(
                q_ref.at[row, span, part * heads + member], q.at[pl.ds(member * tokens, tokens)], ready
            )
        for side, ref in enumerate((begin_ref, end_ref)):
            plgpu.copy_gmem_to_smem(ref.at[row, tile, mine], bounds_smem.at[side, group], ready)
        plgpu.barrier_wait(ready)
        begin, end = (plgpu.layout_cast(bounds_smem[side, group], _PER_ROW) for side in range(2))

        def swap_turns() -> None:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def await_keys(index: jax.Array | int) -> None:
            pl.when(index < total)(lambda: plgpu.barrier_wait(k_filled.at[slot_of(jnp.int32(index))]))

        def step(index: jax.Array, carry: Any) -> Any:
            acc, m, summed = carry
            slot = slot_of(index)

            def multiply_keys(z_ref: Any) -> jax.Array:
                plgpu.wgmma(z_ref, q, k_smem.at[slot].T)
                swap_turns()
                return z_ref[...]

            z = pl.run_scoped(multiply_keys, plgpu.ACC((ROWS, KEYS), jnp.float32))
            plgpu.barrier_arrive(k_freed.at[slot])

            def mask() -> jax.Array:
                key = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=plgpu.Layout.WGMMA)
                key += first + index * KEYS
                return jnp.where((across(begin, KEYS) <= key) & (key < across(end, KEYS)), z, -jnp.inf)

            z = lax.cond((index < lead) | (index >= full), mask, lambda: z)
            factor = request.scale * LOG2E
            m_new = jnp.maximum(m, z.max(axis=1) * factor)
            pivot = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # a row may have seen nothing yet
            p = jnp.exp2(z * factor - across(pivot, KEYS))
            alpha = jnp.exp2(m - pivot)
            summed = summed * alpha + p.sum(axis=1)
            acc *= across(alpha, request.value_dim)
            narrow = p.astype(q_ref.dtype)
            acc, m, summed, narrow = lax.optimization_barrier((acc, m_new, summed, narrow))
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_filled.at[slot])
            plgpu.barrier_wait(turn)

            def multiply_values(acc_ref: Any) -> None:
                plgpu.wgmma(acc_ref, narrow, v_smem.at[slot])
                await_keys(index + 1)

            acc = pl.run_state(multiply_values)(plgpu.ACC.init(acc))
            plgpu.barrier_arrive(v_freed.at[slot])
            return acc, m, summed

        start = (
            plgpu.layout_cast(jnp.zeros((ROWS, request.value_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), _PER_ROW),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _PER_ROW),
        )
        await_keys(0)
        pl.when(group == 1)(swap_turns)  # the second warpgroup is half a step behind
        acc, m, summed = lax.fori_loop(0, total, step, start)
        pl.when(group == 0)(swap_turns)
        saw = summed > 0
        divisor = jnp.where(saw, summed, 1.0)
        q[...] = (acc * across(1.0 / divisor, request.value_dim)).astype(q_ref.dtype)  # q is not read any more
        lse[...] = jnp.where(saw, (m + jnp.log2(divisor)) / LOG2E, -jnp.inf)
        plgpu.commit_smem()
        for member in range(heads):
            plgpu.copy_smem_to_gmem(q.at[pl.ds(member * tokens, tokens)], o_ref.at[row, span, part * heads + member])
        plgpu.copy_smem_to_gmem(lse, lse_ref.at[row, part, tile, mine])
        plgpu.wait_smem_to_gmem(0)


def across(x: jax.Array, columns: int) -> jax.Array:
    """One number per row [ROWS], repeated to [ROWS, columns]."""
    return lax.broadcast_in_dim(x, (ROWS, columns), [0])
