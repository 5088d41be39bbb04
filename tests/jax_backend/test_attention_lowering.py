"""The Pallas kernels lowered for an H200 on a host that has none: they lower, compile, and fit the chip."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jaxlib.mlir import ir
from jaxlib.triton import dialect

from jax_backend import segment_attention
from tests import processes
from tests.processes import limited

triton = pytest.importorskip("triton", reason="unsupported here: Triton has wheels for Linux alone")
compiler = pytest.importorskip("triton.backends.compiler")

MOSAIC_NAME = re.compile(rb"segment_attention_[a-z]+(?=_mosaic_gpu)")
FORWARD, BACKWARD = "segment_attention_forward", "segment_attention_backward"  # on a Hopper GPU
KERNELS = (FORWARD, "segment_attention_dq", "segment_attention_dkv")


@cache
def lowered(
    heads: int,
    kv_heads: int,
    width: int,
    dtype: str,
    window: int | None = None,
    device: str = "NVIDIA H200",
    layers: int = 1,
) -> Any:
    """The gradient of so many calls after each other over a row of 1,024 tokens, lowered for a device."""
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device, num_cores=132, platform="cuda"))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        for _ in range(layers):
            q = segment_attention(q, k, v, ids, window=window)
        return q.astype(jnp.float32).sum()

    shapes = [(1, 1024, n, width) for n in (heads, kv_heads, kv_heads)]
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    arguments.append(jax.ShapeDtypeStruct((1, 1024), jnp.int32))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*arguments).lower(lowering_platforms=("cuda",))


def kernels(module: Any) -> dict[str, Any]:
    """Kernel name -> the attributes of its custom call."""
    found = {}

    def visit(operation: Any) -> None:
        for region in operation.regions:
            for block in region:
                for inner in block:
                    target = str(inner.attributes["call_target_name"]) if "call_target_name" in inner.attributes else ""
                    if "triton" in target:
                        config = inner.attributes["mhlo.backend_config"]
                        found[config["name"].value] = config
                    if "mosaic_gpu" in target:
                        config = inner.attributes["mhlo.backend_config"]
                        found[MOSAIC_NAME.search(config["module"].value_bytes)[0].decode()] = config
                    visit(inner.operation)

    visit(module.operation)
    return found


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "dtype", "window", "expected"),
    [
        (32, 8, 128, "bfloat16", None, (FORWARD, BACKWARD)),
        (14, 2, 64, "bfloat16", 512, KERNELS),
        (8, 2, 64, "float16", None, (FORWARD, BACKWARD)),
        (4, 4, 80, "float32", None, KERNELS),
        (8, 1, 256, "float16", None, KERNELS),
    ],
)
def test_none_picks_pallas_for_a_gpu_and_its_kernels_lower(
    heads: int, kv_heads: int, width: int, dtype: str, window: int | None, expected: tuple[str, ...]
) -> None:
    assert set(kernels(lowered(heads, kv_heads, width, dtype, window).compiler_ir())) == set(expected)


def test_powers_of_two_are_single_instructions() -> None:
    for name, config in kernels(lowered(14, 2, 64, "bfloat16").compiler_ir()).items():
        text = _text(config["ir"].value_bytes)
        assert "ex2.approx.ftz.f32" in text and "exp2f" not in text, name


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA B200"])
def test_layers_share_the_compiled_kernels(device: str) -> None:
    def count(layers: int) -> int:
        text = lowered(32, 8, 128, "bfloat16", device=device, layers=layers).as_text()
        return len(re.findall(r"custom_call @(?:mosaic_gpu|__gpu\$xla\.gpu\.triton)", text))

    assert count(5) == count(2) <= 2 * len(KERNELS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "capability", "kib", "width", "dtype"),
    [
        ("NVIDIA B200", 90, 227, 256, "bfloat16"),
        ("NVIDIA A100", 80, 163, 256, "bfloat16"),
        ("RTX 4090", 89, 99, 128, "bfloat16"),
        ("RTX 4090", 89, 99, 256, "float32"),
    ],
)
def test_the_compiled_kernels_fit_into_shared_memory(
    device: str, capability: int, kib: int, width: int, dtype: str, tmp_path: Path
) -> None:
    # On a Hopper, Mosaic GPU's lowering itself refuses what does not fit.
    found = kernels(lowered(32, 8, width, dtype, device=device).compiler_ir())
    assert set(found) == set(KERNELS)
    for name, config in found.items():
        source = tmp_path / f"{name}.ttir"
        source.write_text(_text(config["ir"].value_bytes))
        options = {"num_warps": config["num_warps"].value, "num_stages": config["num_stages"].value}
        compiled = triton.compile(str(source), target=compiler.GPUTarget("cuda", capability, 32), options=options)
        assert compiled.metadata.shared <= kib * 1024, (name, compiled.metadata.shared)


OPTIONS: list[dict[str, Any]] = [
    {"sinks": True, "window": 30},
    {"softcap": 5.0, "causal": False},
    {"return_lse": True, "scale": 0.3, "max_segments": 3},
    {"keys": 512, "q_offset": 256, "window": 30},
    {"parents": True, "max_ancestors": 1},
    {"window": 30, "causal": False, "return_lse": True},
]


DEVICES: list[tuple[str, int, set[str]]] = [
    ("NVIDIA H200", 128, {FORWARD, BACKWARD}),
    ("NVIDIA H200", 96, set(KERNELS)),
    ("RTX 4090", 256, set(KERNELS)),
]


@pytest.mark.parametrize(
    ("options", "device", "width", "expected"),
    [
        (options, *DEVICES[place])
        for number, options in enumerate(OPTIONS)
        for place in ({0, 1 + number % 2})  # Hopper's own kernels each, and the others in turn
    ],
)
def test_every_option_lowers_with_its_gradients(
    device: str, width: int, expected: set[str], options: dict[str, Any]
) -> None:
    if "softcap" in options:  # which Hopper's own kernels do not take
        expected = set(KERNELS)
    keys = options.get("keys", 256)
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device, num_cores=132, platform="cuda"))
    shapes = [(1, tokens, heads, width) for tokens, heads in ((256, 8), (keys, 2), (keys, 2))]
    floats = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes] + [jax.ShapeDtypeStruct((8,), jnp.float32)]
    ids, key_ids = (jax.ShapeDtypeStruct((1, tokens), jnp.int32) for tokens in (256, keys))

    def loss(
        q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array, ids: jax.Array, key_ids: jax.Array
    ) -> jax.Array:
        arrays = {"sinks": sinks, "parents": ids}
        given = {name: arrays[name] if value is True and name in arrays else value for name, value in options.items()}
        if given.pop("keys", None):
            given["kv_segment_ids"] = key_ids
        found = segment_attention(q, k, v, ids, implementation="pallas", **given)
        return jnp.stack([x.astype(jnp.float32).sum() for x in jax.tree.leaves(found)]).sum()

    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).trace(*floats, ids, key_ids)
        assert set(kernels(traced.lower(lowering_platforms=("cuda",)).compiler_ir())) == expected


WITHOUT_A_LOWERING = """
import sys, warnings
sys.modules[{module!r}] = None  # as in a JAX that has removed it
import jax, jax.numpy as jnp
from jax_backend import explain, segment_attention
q = jnp.ones((1, 16, 4, 8))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(explain(q, q[:, :, :2], q[:, :, :2], platform="gpu"))
    print(explain(q, q[:, :, :2], q[:, :, :2], platform="gpu"))
print([str(warning.message) for warning in caught if "segment_attention" in str(warning.message)])
print(segment_attention(q, q, q, jnp.ones((1, 16), int)).shape)
try:
    segment_attention(q, q, q, jnp.ones((1, 16), int), implementation="pallas")
except Exception as error:
    print(type(error).__name__, error)
"""


@limited()
@pytest.mark.parametrize("module", ["jax.experimental.pallas.triton", "jax.experimental.pallas.mosaic_gpu"])
def test_without_a_lowering_the_next_in_the_order_serves_and_says_why(module: str) -> None:
    done = processes.run([sys.executable, "-c", WITHOUT_A_LOWERING.format(module=module)])
    assert done.returncode == 0, done.stderr
    first, second, warned, shape, refused = done.stdout.splitlines()
    assert first == second and first.startswith("attention: chunked (not pallas: JAX")
    assert "lacks what it is written in" in first and "not cudnn:" in first
    assert len(ast.literal_eval(warned)) == 1 and "pallas cannot run" in warned
    assert shape == "(1, 16, 4, 8)"
    assert refused.startswith("UnsupportedError pallas cannot serve: JAX")


ON_HOPPER_ALONE = """
import sys, warnings
sys.modules["jax.experimental.pallas.triton"] = None
from tests.jax_backend.test_mosaic import lowered_for
from jax_backend import explain
import jax, jax.numpy as jnp
q = jax.ShapeDtypeStruct((1, 256, 8, 64), "bfloat16")
assert not str(explain(q, q, q, platform="gpu")).startswith("attention: pallas"), "no GPU here"
for heads in (8, 14):
    print(lowered_for("NVIDIA H200", 64, (256, 256), heads=heads).count("custom_call @mosaic_gpu"))
"""


@pytest.mark.slow
@limited()
def test_without_the_triton_lowering_a_hopper_gpu_keeps_its_own_kernels() -> None:
    done = processes.run([sys.executable, "-c", ON_HOPPER_ALONE])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "2"]


def _text(bytecode: bytes) -> str:
    context = ir.Context()
    dialect.register_dialect(context)
    context.load_all_available_dialects()
    return ir.Module.parse(bytecode, context).operation.get_asm(enable_debug_info=False)
