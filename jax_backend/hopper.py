"""The common ground of kernels on Pallas' Mosaic GPU lowering: how tiles lie, and where they run."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # of a warpgroup: what one wgmma multiplies
COPIED = 8  # the rows of a swizzled block of shared memory
PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
BLOCKS = (plgpu.TilingTransform((COPIED, 64)), plgpu.SwizzleTransform(128))  # how wgmma wants its operands to lie
PER_ROW = plgpu.Layout.WGMMA.reduce(1)  # how one number per row lies beside them in registers
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # and one per column
_HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")
_BLACKWELL = re.compile(r"\bG?B(100|200|300)\b")  # of data centres


def along_rows(x: jax.Array, columns: int) -> jax.Array:
    """One number per row [ROWS], repeated to [ROWS, columns]."""
    return lax.broadcast_in_dim(x, (ROWS, columns), [0])


def along_columns(x: jax.Array) -> jax.Array:
    """One number per column [columns], repeated to [ROWS, columns]."""
    return lax.broadcast_in_dim(x, (ROWS, x.shape[0]), [1])


def column_numbers(columns: int) -> jax.Array:
    """The number of each element's column, int32 [ROWS, columns]."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, columns), 1, layout=plgpu.Layout.WGMMA)


def compiles_for_hopper() -> bool:
    """Returns whether the GPU that is compiled for is a Hopper, by an assembler that such kernels survive."""
    return _HOPPER.search(_device_kind()) is not None and not _miscompiled()


def has_large_shared_memory() -> bool:
    """Returns whether a program on the GPU that is compiled for has 227 KB of shared memory; JAX tells no number.

    An A100 has 163 KB and a consumer card 99 KB. A GPU that is not known counts as one of those.
    """
    return any(kind.search(_device_kind()) is not None for kind in (_HOPPER, _BLACKWELL))


def multiprocessors() -> int:
    """Returns the number of multiprocessors of the GPU that is compiled for."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices("gpu")[0].core_count if abstract is None else abstract.num_cores


def _device_kind() -> str:
    """The name of the GPU that is compiled for; empty on a host that has none."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return str(abstract.device_kind)
    try:
        return str(jax.devices("gpu")[0].device_kind)
    except RuntimeError:  # asked about a GPU from elsewhere, as by explain(platform="gpu")
        return ""


def _miscompiled() -> bool:
    """Returns whether this is CUDA 12.8 to 12.9.0, whose assembler is known to break such kernels when they mask."""
    from jax._src.lib import cuda_versions  # the only place where JAX tells; None without CUDA

    return cuda_versions is not None and 12080 <= cuda_versions.cuda_runtime_get_version() < 12091
