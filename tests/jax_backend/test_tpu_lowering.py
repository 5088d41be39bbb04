"""Lowering for TPUs, by cross-platform export on a host that has none.

Mosaic's front end refuses here what a TPU could not take: block shapes off its tiles, operations without a rule. What a
kernel holds in vector memory is counted from its block shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh

from jax_backend import (
    causal_conv,
    gated_delta_rule,
    linear_cross_entropy,
    segment_attention,
    selective_scan,
    ssd,
)
from jax_backend.attention import IMPLEMENTATIONS, request_for, tpu
from packing_core.errors import UnsupportedError

KERNELS = {"splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv"}
CHIPS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}


def on_tpu(chip: str = "v5e") -> Any:
    """Traces inside are for a TPU."""
    device = AbstractDevice(CHIPS[chip], num_cores=1, platform="tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


def exported(function: Callable[..., Any], *arguments: Any) -> str:
    """The StableHLO of a function and of the gradient of its first argument's sum, for a TPU."""

    def both(first: Any, *others: Any) -> Any:
        return jax.value_and_grad(lambda first: jnp.sum(function(first, *others), dtype=jnp.float32))(first)

    with on_tpu():
        found = export.export(jax.jit(both), platforms=["tpu"])(*arguments)
    assert found.platforms == ("tpu",)
    return found.mlir_module()


def kernels(text: str) -> set[str]:
    return set(re.findall(r'kernel_name = "(splash_mha_(?:fwd|dq|dkv))', text))


def operands(tokens: int, width: int, dtype: str, heads: int = 8) -> tuple[Any, ...]:
    """q, k, v of two rows with heads in groups, and their ids."""
    arrays = [jax.ShapeDtypeStruct((2, tokens, n, width), dtype) for n in (heads, 2, 2)]
    return *arrays, jax.ShapeDtypeStruct((2, tokens), jnp.int32)


def attention(**options: Any) -> Callable[..., Any]:
    """Attention whose gradient reaches q, k and v."""
    return lambda q, k, v, ids: segment_attention(q, k + q[:, :, :2], v + q[:, :, :2], ids, **options)


@pytest.mark.parametrize(
    ("tokens", "width", "dtype", "options"),
    [
        (1024, 128, "bfloat16", {}),
        (1000, 64, "bfloat16", {"window": 200}),
        (384, 80, "float32", {"softcap": 30.0}),
        (1024, 256, "float32", {"causal": False}),
    ],
)
def test_none_takes_the_tpu_kernels_and_they_lower(tokens: int, width: int, dtype: str, options: Any) -> None:
    assert kernels(exported(attention(**options), *operands(tokens, width, dtype))) == KERNELS


def test_every_implementation_lowers_for_a_tpu_or_says_that_it_does_not() -> None:
    arrays = operands(256, 64, "bfloat16")
    lowered = {}
    for name in set(IMPLEMENTATIONS) - {"pallas", "cudnn"}:
        lowered[name] = kernels(exported(attention(implementation=name), *arrays))
    assert lowered == {"tpu": KERNELS, "chunked": set(), "xla": set()}
    for name, refusal in (("pallas", "lowered for NVIDIA GPUs"), ("cudnn", "cuDNN")):
        with pytest.raises(Exception, match=refusal):
            exported(attention(implementation=name), *arrays)


def test_an_export_that_does_not_name_a_device_holds_the_kernels_too() -> None:
    def loss(*arrays: Any) -> jax.Array:
        return attention(implementation="tpu")(*arrays).astype(jnp.float32).sum()

    exporting = export.export(jax.jit(jax.grad(loss)), platforms=["tpu"])
    assert kernels(exporting(*operands(256, 64, "bfloat16")).mlir_module()) == KERNELS


@pytest.mark.parametrize(
    ("dtype", "options"), [("bfloat16", {"sinks": np.zeros(8, np.float32)}), ("float16", {})], ids=["sinks", "float16"]
)
def test_what_the_kernels_do_not_take_lowers_in_plain_operations(dtype: str, options: Any) -> None:
    text = exported(attention(**options), *operands(256, 64, dtype))
    assert "stablehlo.while" in text and "tpu_custom_call" not in text


def shape(*sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, "float32")


OPERATIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "delta rule": (lambda q, g: gated_delta_rule(q, q, q, g, g, ones()), (shape(1, 256, 4, 32), shape(1, 256, 4))),
    "ssd": (lambda x, dt: ssd(x, dt, -dt[0, 0], x, x, ones()), (shape(1, 256, 4, 32), shape(1, 256, 4))),
    "selective scan": (lambda x, A: selective_scan(x, x, A, x, x, ones()), (shape(1, 256, 8), shape(8, 8))),
    "convolution": (lambda x, w: causal_conv(x, w, ones(), activation="silu"), (shape(1, 256, 32), shape(32, 4))),
    "loss of the head": (lambda x, w: linear_cross_entropy(x, w, ones())[0], (shape(1, 256, 64), shape(64, 1000))),
}


def ones() -> jax.Array:
    return jnp.ones((1, 256), jnp.int32)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_scans_the_convolution_and_the_loss_lower(operation: str) -> None:
    function, arguments = OPERATIONS[operation]
    assert "stablehlo" in exported(function, *arguments)


SHAPES = [(width, dtype) for width in (64, 128, 256, 512) for dtype in ("bfloat16", "float32")]


def held(chip: str, width: int, dtype: str) -> tuple[int, dict[str, int]]:
    """Returns the block of tokens that is chosen on a chip, and the bytes that each kernel holds there."""

    def loss(*arrays: Any) -> jax.Array:
        return attention(implementation="tpu")(*arrays).astype(jnp.float32).sum()

    with on_tpu(chip):
        traced = jax.make_jaxpr(jax.grad(loss))(*operands(4096, width, dtype))
    found = {call.params["name"].split("_")[2]: held_by(call) for call in pallas_calls(traced.jaxpr)}
    (block,) = {block for block, _ in found.values()}
    return block, {name: held for name, (_, held) in found.items()}


@pytest.mark.parametrize(("width", "dtype"), SHAPES)
def test_the_blocks_of_each_kernel_fit_into_vector_memory(width: int, dtype: str) -> None:
    q, k, v, _ = operands(4096, width, dtype)
    request = request_for(q, k, v, platform="tpu")
    for chip in CHIPS:
        block, found = held(chip, width, dtype)
        assert found.keys() == {"fwd", "dq", "dkv"}
        assert max(found.values()) <= tpu.vector_memory(block, request) <= tpu.SCOPED_VMEM < capacity(chip)


def test_heads_whose_blocks_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="blocks of heads 4096 wide do not fit into 16 MiB of vector memory"):
        exported(attention(implementation="tpu"), *operands(256, 4096, "float32"))


def capacity(chip: str) -> int:
    """Returns the bytes of vector memory of a core, as JAX knows the chip."""
    with on_tpu(chip):
        return pltpu.get_tpu_info().vmem_capacity_bytes


def held_by(call: Any) -> tuple[int, int]:
    """Returns the block of tokens, and bytes: two buffers of each block whose last axis fills whole lanes, and four
    squares of scores in float32 (scores, weights, both gradients)."""
    mapping = call.params["grid_mapping"]
    blocks, tokens = 0, set()
    for block in mapping.block_mappings:
        sizes = [getattr(size, "block_size", size) for size in block.block_shape]
        *sizes, last = [size for size in sizes if isinstance(size, int)]  # an axis that is left out counts 1
        tokens |= {size for size in sizes if size % tpu.LANES == 0}
        lanes = -(-last // tpu.LANES) * tpu.LANES
        blocks += math.prod(sizes) * lanes * jnp.dtype(block.array_aval.dtype).itemsize
    assert not mapping.num_scratch_operands
    (size,) = tokens
    return size, 2 * blocks + 4 * size**2 * 4


def pallas_calls(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        else:
            for inner in jaxprs_in_params(equation.params):
                yield from pallas_calls(inner)
