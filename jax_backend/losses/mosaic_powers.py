"""The output head's product on Hopper's own instructions, which writes powers where a plain product writes logits.

With the logit ``x_t`` of the target as the base, a token's loss is ``log(1 + S)`` and the gradient of its logits
``2^(x_j - x_t) / (1 + S)``, at the target ``-S / (1 + S)``, where S sums the powers of the other classes (logits in
base 2). So no logits are written, nor read for a softmax. Programs stay on their multiprocessors and take one tile
after the other: one warpgroup copies ahead (TMA), two others multiply 64 tokens each (wgmma).

Shape letters: C tokens, M hidden size, V vocabulary.
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

from jax_backend.attention.request import LOG2E
from jax_backend.hopper import BLOCKS, PARAMS, PER_ROW, ROWS, along_rows, column_numbers, multiprocessors

GROUPS = 2  # warpgroups that compute
TOKENS = GROUPS * ROWS  # of a tile
CLASSES = 256  # of a tile
DEPTH = 64  # channels of a step
STAGES = 3  # steps in shared memory
PART = 64  # classes that are written at a time
HIGHEST = 100.0  # the largest exponent of a power, so that no sum of products with it overflows


def powers(
    hidden: jax.Array, weight: jax.Array, labels: jax.Array, bases: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Powers [C, V] in hidden's dtype, 0 at each token's label, and their sums per tile of classes, float32 [tiles, C].

    Args:
        hidden: bfloat16 [C, M], C a multiple of ``TOKENS``.
        weight: bfloat16 [V, M], V a multiple of ``PART`` and at least ``CLASSES``, M a multiple of ``DEPTH``.
        labels: int32 [C].
        bases: float32 [C], in base 2.
        scale: factor on the logits.
    """
    tokens, classes = len(hidden), len(weight)
    tall, wide = tokens // TOKENS, pl.cdiv(classes, CLASSES)
    programs = min(multiprocessors(), tall * wide)
    found: tuple[jax.Array, jax.Array] = plgpu.kernel(
        partial(_kernel, tall=tall, tiles=tall * wide, programs=programs, scale=scale),
        out_type=(
            jax.ShapeDtypeStruct((tokens, classes), hidden.dtype),
            jax.ShapeDtypeStruct((wide, tokens), jnp.float32),
        ),
        grid=(programs,),
        grid_names=("program",),
        num_threads=GROUPS + 1,
        thread_name="warpgroup",
        kernel_name="cross_entropy_powers",
        scratch_types={
            "hidden_smem": plgpu.SMEM((STAGES, GROUPS, ROWS, DEPTH), hidden.dtype, transforms=BLOCKS),
            "weight_smem": plgpu.SMEM((STAGES, CLASSES, DEPTH), hidden.dtype, transforms=BLOCKS),
            "out_smem": plgpu.SMEM((GROUPS, 2, ROWS, PART), hidden.dtype, transforms=BLOCKS),
            "labels_smem": plgpu.SMEM((GROUPS, ROWS), jnp.int32),
            "bases_smem": plgpu.SMEM((GROUPS, ROWS), jnp.float32),
            "sums_smem": plgpu.SMEM((GROUPS, ROWS), jnp.float32),
            "filled": plgpu.Barrier(num_arrivals=GROUPS + 1, num_barriers=STAGES),
            "freed": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
            "known": plgpu.Barrier(num_arrivals=2, num_barriers=GROUPS),
        },
        compiler_params=PARAMS,
    )(hidden, weight, labels, bases)
    return found


def _kernel(*refs: Any, tall: int, tiles: int, programs: int, scale: float, **scratch: Any) -> None:
    hidden_ref, weight_ref, labels_ref, bases_ref, out_ref, sums_ref = refs
    s = SimpleNamespace(**scratch)
    program, group = lax.axis_index("program"), lax.axis_index("warpgroup")
    classes, steps = weight_ref.shape[0], hidden_ref.shape[1] // DEPTH
    own = lax.div(tiles - program + (programs - 1), jnp.int32(programs))

    def place(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first token of this program's tile, and its tile of classes, which neighbouring programs share."""
        tile = program + index * programs
        return lax.rem(tile, jnp.int32(tall)) * TOKENS, lax.div(tile, jnp.int32(tall))

    def slot_of(step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.int32(STAGES))

    @pl.when(group == GROUPS)
    def copy() -> None:
        plgpu.set_max_registers(40, action="decrease")

        def tile(index: jax.Array, _: None) -> None:
            token, block = place(index)

            def step(k: jax.Array, _: None) -> None:
                count = index * steps + k
                slot, depth = slot_of(count), pl.ds(pl.multiple_of(k * DEPTH, DEPTH), DEPTH)
                pl.when(count >= STAGES)(partial(plgpu.barrier_wait, s.freed.at[slot]))
                filled = s.filled.at[slot]
                for member in range(GROUPS):
                    rows = pl.ds(token + member * ROWS, ROWS)
                    plgpu.copy_gmem_to_smem(hidden_ref.at[rows, depth], s.hidden_smem.at[slot, member], filled)
                columns = pl.ds(block * CLASSES, CLASSES)
                plgpu.copy_gmem_to_smem(weight_ref.at[columns, depth], s.weight_smem.at[slot], filled)

            lax.fori_loop(0, steps, step, None)

        lax.fori_loop(0, own, tile, None)

    @pl.when(group < GROUPS)
    def compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        labels, bases, ready = s.labels_smem.at[group], s.bases_smem.at[group], s.known.at[group]

        def tile(index: jax.Array, _: None) -> None:
            token, block = place(index)
            rows = pl.ds(pl.multiple_of(token + group * ROWS, ROWS), ROWS)
            plgpu.copy_gmem_to_smem(labels_ref.at[rows], labels, ready)
            plgpu.copy_gmem_to_smem(bases_ref.at[rows], bases, ready)

            def multiply(acc: Any) -> jax.Array:
                def step(k: jax.Array, _: None) -> None:
                    count = index * steps + k
                    slot = slot_of(count)
                    plgpu.barrier_wait(s.filled.at[slot])
                    plgpu.wgmma(acc, s.hidden_smem.at[slot, group], s.weight_smem.at[slot].T)
                    plgpu.wgmma_wait(1)  # for the product before, whose slot is free then
                    pl.when(k > 0)(lambda: plgpu.barrier_arrive(s.freed.at[slot_of(count - 1)]))

                lax.fori_loop(0, steps, step, None)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(s.freed.at[slot_of(index * steps + (steps - 1))])
                return acc[...]

            logits = pl.run_scoped(multiply, plgpu.ACC((ROWS, CLASSES), jnp.float32))
            plgpu.barrier_wait(ready)
            label, base = (plgpu.layout_cast(x[...], PER_ROW) for x in (labels, bases))
            column = column_numbers(CLASSES) + block * CLASSES
            counts = (column < classes) & (column != along_rows(label, CLASSES))
            exponent = jnp.minimum(logits * (scale * LOG2E) - along_rows(base, CLASSES), HIGHEST)
            power = jnp.where(counts, jnp.exp2(exponent), 0.0)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what the tile before wrote has left its place
            s.sums_smem.at[group][...] = power.sum(axis=1)
            narrow = power.astype(out_ref.dtype)
            for part in range(CLASSES // PART):
                out = s.out_smem.at[group, part % 2]
                if part >= 2:
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                out[...] = narrow[:, part * PART : (part + 1) * PART]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out, out_ref.at[rows, pl.ds(block * CLASSES + part * PART, PART)])
            plgpu.copy_smem_to_gmem(s.sums_smem.at[group], sums_ref.at[block, rows])

        lax.fori_loop(0, own, tile, None)
        plgpu.wait_smem_to_gmem(0)
