"""All three gradients on Hopper's own instructions, in one walk: one block per (tile of keys, P heads, row).

The formulas are those of ``pallas_backward``. Made together they take five matrix products instead of seven, and every
power once. Of a block's warpgroups one copies queries ahead; two hold 64 keys each, and make dk and dv of them and
both a half of a step's dq; one adds that dq to what other blocks have made. It adds in the order of the keys, and
waits for those that come before: runs repeat to the bit. Blocks start in that order too, so none waits for one that
has not started.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_backend.attention.mosaic_tiles import GROUPS, QueryPlan, by_step, load_rows, packed_heads, plan_queries
from jax_backend.attention.request import LOG2E, Request
from jax_backend.hopper import (
    BLOCKS,
    COPIED,
    PARAMS,
    PER_COLUMN,
    PER_ROW,
    ROWS,
    along_columns,
    along_rows,
    column_numbers,
)
from jax_backend.segments import Interval

KEYS = GROUPS * ROWS  # of a block
STAGES = 2  # steps whose queries are in shared memory
COLUMNS = 64  # of a piece of k or dq: a row of a swizzled block in half precision
PIECES = (plgpu.TilingTransform((COPIED, 32)), plgpu.SwizzleTransform(128))  # how a piece of dq lies, float32
COPIER, ADDER = GROUPS, GROUPS + 1  # warpgroups


def gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    plan: QueryPlan,
    request: Request,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq [B, S, N, D], dk and dv [B, T, K, D], in q's dtype. Meanwhile dq takes float32, and dk and dv too where heads
    that share them are in several blocks.

    Args:
        lse, delta: float32 [B, S, N].
        plan: what :func:`plan_walks` makes.
    """

    run = custom_vmap(partial(_gradients, request))

    @run.def_vmap
    def more_rows(size: int, batched: list[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        # The counters that order the additions are one call's: what vmap adds are more rows of it.
        spread = (x if has else jnp.broadcast_to(x, (size, *x.shape)) for x, has in zip(arrays, batched, strict=True))
        grads = run(*(x.reshape(-1, *x.shape[2:]) for x in spread))
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in grads), (True, True, True)

    dq, dk, dv = run(q, k, v, dout, lse, delta, *plan)
    return dq, dk, dv


def _gradients(request: Request, *arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v, dout, lse, delta, *plans = arrays
    heads, width = packed_heads(request), request.head_dim
    blocks = 2 * COLUMNS // width  # of 64 packed rows in a step: dq is two pieces of 64 columns, or two of 64 rows
    size = blocks * ROWS
    plan = QueryPlan(*plans)
    (rows, tiles), steps = plan.walk.shape[:2], plan.leader.shape[1]
    parts, shares = request.heads // heads, request.group // heads
    stages = plgpu.SMEM((STAGES, size, width), q.dtype, transforms=BLOCKS)
    filled = plgpu.Barrier(num_arrivals=heads + 1, num_barriers=STAGES)
    grad = jax.ShapeDtypeStruct((shares, *k.shape), q.dtype if shares == 1 else jnp.float32)
    dq, dk, dv = plgpu.kernel(
        partial(_kernel, request=request, heads=heads, blocks=blocks, rows=rows, steps=steps),
        out_type=(jax.ShapeDtypeStruct((rows * parts * steps * GROUPS, ROWS, COLUMNS), jnp.float32), grad, grad),
        grid=(rows, tiles, parts),  # row by row: the queries of few rows are in the cache at a time
        grid_names=("row", "tile", "part"),
        num_threads=GROUPS + 2,
        thread_name="warpgroup",
        kernel_name="segment_attention_backward",
        scratch_types={
            "k_smem": plgpu.SMEM((GROUPS, width // COLUMNS, ROWS, COLUMNS), q.dtype, transforms=BLOCKS),
            "v_smem": plgpu.SMEM((GROUPS, ROWS, width), q.dtype, transforms=BLOCKS),
            "q_smem": stages,
            "dout_smem": stages,
            "dz_smem": plgpu.SMEM((STAGES, GROUPS, blocks, ROWS, ROWS), q.dtype, transforms=BLOCKS),
            "dq_smem": plgpu.SMEM((GROUPS, ROWS, COLUMNS), jnp.float32, transforms=PIECES),
            "numbers_smem": plgpu.SMEM((2, STAGES, size), jnp.float32),
            "bounds_smem": plgpu.SMEM((2, GROUPS, ROWS), jnp.int32),
            "own_filled": plgpu.Barrier(num_arrivals=GROUPS * (width // COLUMNS + 3)),
            "q_filled": filled,
            "dout_filled": filled,
            "freed": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
            "dz_filled": plgpu.Barrier(num_arrivals=GROUPS),
            "dq_filled": plgpu.Barrier(num_arrivals=GROUPS),
            "dq_freed": plgpu.Barrier(),
        },
        compiler_params=PARAMS,
    )(
        *(q, k, v, dout, by_step(lse * LOG2E, heads, size), by_step(delta, heads, size)),
        *(x.reshape(rows, tiles, GROUPS, ROWS) for x in (plan.begin, plan.end)),
        *(plan.walk, plan.leader),
    )
    dq = dq.reshape(rows, parts, steps, GROUPS, ROWS, COLUMNS)
    dq = jnp.where(plan.visited[:, None, :, None, None, None], dq, 0.0)  # what no block visits is not written
    dq = (by_token(dq, heads, request) * request.scale).astype(q.dtype)
    if shares == 1:
        return dq, dk[0], dv[0]
    return dq, dk.sum(axis=0).astype(k.dtype), dv.sum(axis=0).astype(v.dtype)


def plan_walks(request: Request, queries: Interval) -> QueryPlan:
    """Lists the tiles that the kernel's blocks visit.

    Args:
        queries: the queries that see each key, int32 [B, T] and [B, T].
    """
    return plan_queries(queries, request.queries, queries_of_step(request), KEYS)


def queries_of_step(request: Request) -> int:
    """Query tokens that a step covers."""
    return 2 * COLUMNS * ROWS // (request.head_dim * packed_heads(request))


def by_token(dq: jax.Array, heads: int, request: Request) -> jax.Array:
    """Pieces [B, N / P, steps, 2, 64, 64] as [B, S, N, D]: a step is 64 rows of two pieces, or two times 64 of one."""
    rows, parts, steps = dq.shape[:3]
    if request.head_dim > COLUMNS:
        dq = dq.swapaxes(3, 4)
    dq = dq.reshape(rows, parts, steps, heads, -1, request.head_dim).transpose(0, 2, 4, 1, 3, 5)
    return dq.reshape(rows, -1, parts * heads, request.head_dim)[:, : request.queries]


def _kernel(*refs: Any, request: Request, heads: int, blocks: int, rows: int, steps: int, **scratch: Any) -> None:
    q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, *plan_refs, dq_ref, dk_ref, dv_ref = refs
    begin_ref, end_ref, walk_ref, leader_ref = plan_refs
    s = SimpleNamespace(**scratch)
    row, part, tile = (lax.axis_index(name) for name in ("row", "part", "tile"))
    group = lax.axis_index("warpgroup")
    size, width, parts = blocks * ROWS, request.head_dim, request.heads // heads
    tokens = size // heads
    kv_head = lax.div(part * heads, jnp.int32(request.group))
    share = lax.rem(part, jnp.int32(request.group // heads))
    last, total, clear, masked = (walk_ref[row, tile, i] for i in range(4))
    done = pl.get_global(plgpu.SemaphoreType.REGULAR((rows * parts * steps,)))  # how many blocks a step has behind it

    @pl.when(group == COPIER)
    def copy() -> None:
        plgpu.set_max_registers(24, action="decrease")
        for member in range(GROUPS):
            span = pl.ds(pl.multiple_of(tile * KEYS + member * ROWS, ROWS), ROWS)
            for piece in range(width // COLUMNS):
                source = k_ref.at[row, span, kv_head, pl.ds(piece * COLUMNS, COLUMNS)]
                plgpu.copy_gmem_to_smem(source, s.k_smem.at[member, piece], s.own_filled)
            plgpu.copy_gmem_to_smem(v_ref.at[row, span, kv_head], s.v_smem.at[member], s.own_filled)
            for side, ref in enumerate((begin_ref, end_ref)):
                plgpu.copy_gmem_to_smem(ref.at[row, tile, member], s.bounds_smem.at[side, member], s.own_filled)

        def step(index: jax.Array, _: None) -> None:
            slot, at = lax.rem(index, jnp.int32(STAGES)), last - index
            pl.when(index >= STAGES)(lambda: plgpu.barrier_wait(s.freed.at[slot]))
            streams = (q_ref, s.q_smem, s.q_filled, lse_ref), (dout_ref, s.dout_smem, s.dout_filled, delta_ref)
            for side, (ref, smem, filled, numbers) in enumerate(streams):
                load_rows(ref, smem.at[slot], filled.at[slot], row, pl.multiple_of(at * tokens, COPIED), part, heads)
                plgpu.copy_gmem_to_smem(numbers.at[row, part, at], s.numbers_smem.at[side, slot], filled.at[slot])

        lax.fori_loop(0, total, step, None)

    @pl.when(group == ADDER)
    def add() -> None:
        plgpu.set_max_registers(24, action="decrease")

        def count(index: jax.Array) -> jax.Array:
            return tile - leader_ref[row, jnp.maximum(last - index, 0)]

        def step(index: jax.Array, before: jax.Array) -> jax.Array:
            place = (row * parts + part) * steps + last - index

            def write(**how: Any) -> None:
                for member in range(GROUPS):
                    plgpu.copy_smem_to_gmem(s.dq_smem.at[member], dq_ref.at[place * GROUPS + member], **how)

            @pl.when(before > 0)
            def await_turn() -> None:
                plgpu.semaphore_wait(done.at[place], before, decrement=False, memory_scope="gpu")

            plgpu.barrier_wait(s.dq_filled)
            pl.when(before == 0)(write)
            pl.when(before > 0)(partial(write, reduction_op="add"))
            following = count(index + 1)  # read while the copy is under way
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(s.dq_freed)
            plgpu.wait_smem_to_gmem(0)
            plgpu.semaphore_signal(done.at[place], memory_scope="gpu")
            return following

        lax.fori_loop(0, total, step, count(jnp.int32(0)))

    @pl.when(group < GROUPS)
    def compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        plgpu.barrier_wait(s.own_filled)
        begin, end = (plgpu.layout_cast(s.bounds_smem[side, group], PER_ROW) for side in range(2))
        v, piece = s.v_smem.at[group], s.dq_smem.at[group]
        square = plgpu.ACC((ROWS, ROWS), jnp.float32)

        def multiply_keys(z_acc: Any, slot: Any, block: int) -> None:
            """Start z = k q^T for 64 packed rows of queries."""
            for piece in range(width // COLUMNS):
                columns = pl.ds(piece * COLUMNS, COLUMNS)
                plgpu.wgmma(z_acc, s.k_smem.at[group, piece], s.q_smem.at[slot, pl.ds(block * ROWS, ROWS), columns].T)

        def step(index: jax.Array, z: jax.Array, dk_acc: Any, dv_acc: Any) -> jax.Array:
            slot, at = lax.rem(index, jnp.int32(STAGES)), last - index
            following = 1 - slot

            def load_numbers(side: int, block: int) -> jax.Array:
                numbers = s.numbers_smem[side, slot, pl.ds(block * ROWS, ROWS)]
                return along_columns(plgpu.layout_cast(numbers, PER_COLUMN))

            def weigh(z: jax.Array, block: int) -> jax.Array:
                p = jnp.exp2(z * (request.scale * LOG2E) - load_numbers(0, block))

                def mask() -> jax.Array:
                    token = ((column_numbers(ROWS) + block * ROWS) & (tokens - 1)) + at * tokens
                    return jnp.where((along_rows(begin, ROWS) <= token) & (token < along_rows(end, ROWS)), p, 0.0)

                return lax.cond((at < clear) | (at >= masked), mask, lambda: p)

            def add_up(dp_acc: Any, *others: Any) -> None:
                """From z to dk, dv and dz in shared memory, one 64 rows of queries after the other."""
                p = z
                plgpu.barrier_wait(s.dout_filled.at[slot])
                plgpu.wgmma(dp_acc, v, s.dout_smem.at[slot, pl.ds(0, ROWS)].T)
                for block in range(blocks):
                    mine, more = pl.ds(block * ROWS, ROWS), block + 1 < blocks
                    if more:
                        z_acc, next_acc = others
                        multiply_keys(z_acc, slot, block + 1)
                    p = weigh(p, block)
                    plgpu.wgmma(dv_acc, p.astype(q_ref.dtype), s.dout_smem.at[slot, mine])
                    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=2 if more else 1)  # started since: z, dv
                    dz = (p * (dp - load_numbers(1, block))).astype(q_ref.dtype)
                    s.dz_smem[slot, group, block] = dz
                    if not more:
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(s.dz_filled)
                    # Where registers are short, dz is read back.
                    plgpu.wgmma(dk_acc, dz if blocks > 1 else s.dz_smem.at[slot, group, block], s.q_smem.at[slot, mine])
                    if more:
                        dp_acc = next_acc
                        plgpu.wgmma(dp_acc, v, s.dout_smem.at[slot, pl.ds((block + 1) * ROWS, ROWS)].T)
                        p = plgpu.wgmma_accumulator_load(z_acc, wait_n=3)  # started since: dv, dk, dp
                if blocks == 1:
                    plgpu.wgmma_wait(1)  # frees the registers that dv is made of

            def multiply(dq_acc: Any, z_acc: Any) -> tuple[jax.Array, jax.Array]:
                """This step's dq, of the keys of both warpgroups, and the next one's z, unless this is the last."""
                pl.when(index + 1 < total)(lambda: plgpu.barrier_wait(s.q_filled.at[following]))
                multiply_keys(z_acc, following, 0)
                plgpu.barrier_wait(s.dz_filled)
                block, column = (group, 0) if blocks > 1 else (0, group)
                for member in range(GROUPS):
                    plgpu.wgmma(dq_acc, s.dz_smem.at[slot, member, block].T, s.k_smem.at[member, column])
                plgpu.wgmma_wait(GROUPS + width // COLUMNS)
                plgpu.barrier_arrive(s.freed.at[slot])
                return dq_acc[...], z_acc[...]

            pl.run_scoped(add_up, *[square] * (2 * blocks - 1))
            dq, z = pl.run_scoped(multiply, square, square)
            pl.when(index > 0)(lambda: plgpu.barrier_wait(s.dq_freed))
            piece[...] = dq
            plgpu.commit_smem()
            plgpu.barrier_arrive(s.dq_filled)
            return z

        def walk(dk_acc: Any, dv_acc: Any) -> tuple[jax.Array, jax.Array]:
            def start(z_acc: Any) -> jax.Array:
                pl.when(total > 0)(lambda: plgpu.barrier_wait(s.q_filled.at[0]))
                multiply_keys(z_acc, 0, 0)
                return z_acc[...]

            z = pl.run_scoped(start, square)
            lax.fori_loop(0, total, lambda index, z: step(index, z, dk_acc, dv_acc), z)
            return dk_acc[...], dv_acc[...]

        wide = plgpu.ACC((ROWS, width), jnp.float32)
        dk, dv = pl.run_scoped(walk, wide, wide)
        pl.when(total > 0)(lambda: plgpu.barrier_wait(s.dq_freed))
        mine = pl.ds(pl.multiple_of(tile * KEYS + group * ROWS, ROWS), ROWS)
        for grad, ref in ((dk * request.scale, dk_ref), (dv, dv_ref)):
            if ref.dtype == q_ref.dtype:
                store(grad.astype(ref.dtype), v, ref.at[share, row, mine, kv_head])  # v is not read any more
                continue
            for first in range(0, width, COLUMNS):
                target = ref.at[share, row, mine, kv_head, pl.ds(first, COLUMNS)]
                store(grad[:, first : first + COLUMNS], piece, target)


def store(value: jax.Array, smem: Any, target: Any) -> None:
    """Write a value through shared memory, which is free again afterwards."""
    smem[...] = value
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
