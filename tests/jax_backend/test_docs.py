"""docs/jax.md is executed, its tables are made from the code, and its change to MaxText's operator is tested."""

from __future__ import annotations

import dataclasses
import re
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_backend
import packing_core
from jax_backend import find_segments
from jax_backend.attention import IMPLEMENTATIONS, ORDER, choose, cudnn
from packing_core.errors import LayoutError, UnsupportedError
from tests.jax_backend.maxtext import AttentionOp, AttentionType, logical_rules
from tests.jax_backend.test_attention import request

PAGE = (Path(__file__).parents[2] / "docs" / "jax.md").read_text()


def module(name: str) -> types.ModuleType:
    """The Python block under ``<!-- file: name -->``, executed."""
    (code,) = re.findall(rf"<!-- file: {re.escape(name)} -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    made = types.ModuleType(name.removesuffix(".py"))
    exec(compile(code, name, "exec"), made.__dict__)
    return made


def table(name: str) -> str:
    (found,) = re.findall(rf"<!-- table: {name} -->\n((?:\|.*\n)+)", PAGE)
    return found


def ids(*rows: str) -> jax.Array:
    return jnp.asarray([[int(digit) for digit in row] for row in rows], jnp.int32)


# -- the first blocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train_step.py", "own_loss.py", "attention.py"])
def test_the_first_blocks_run(name: str) -> None:
    module(name)


# -- an existing flax model -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_flax_model_gives_what_its_dense_mask_gave() -> None:
    page = module("packed_flax.py")
    segment_ids = ids("1111222220003333", "1222222222222233")
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    dense = jnp.tril(same)[:, None]
    x = jax.random.normal(jax.random.key(0), (2, 16, 32))
    before = page.Block(32, 4, attention_fn=nnx.dot_product_attention, rngs=nnx.Rngs(0))(x, dense)
    model = page.Block(32, 4, rngs=nnx.Rngs(0))
    for given in (segment_ids, find_segments(segment_ids)):
        after = nnx.jit(lambda model, x, given: model(x, given))(model, x, given)
        np.testing.assert_allclose(*(np.asarray(y)[segment_ids > 0] for y in (after, before)), atol=2e-6)


def test_the_flax_function_refuses_dropout() -> None:
    with pytest.raises(ValueError, match="no dropout"):
        module("packed_flax.py").packed(None, None, None, mask=None, dropout_rate=0.1)


# -- the tables -------------------------------------------------------------------------------------------------------

PLAIN = request(queries=64, keys=64, kv_heads=4)
CAPPED = {"max_segments": 8}
OPTIONS: dict[str, dict[str, Any]] = {
    "grouped heads": {"kv_heads": 2},
    "not causal": {"causal": False},
    "window": {"window": 8},
    "softcap": {"softcap": 5.0},
    "sinks, return_lse": {"needs_lse": True},
    "kv_segment_ids": {"own_keys": False},
    "narrow values": {"value_dim": 32},
    "width 256": {"head_dim": 256, "value_dim": 256},
    "width 512": {"head_dim": 512, "value_dim": 512},
    "float32": {"dtype": jnp.dtype("float32")},
    "float16": {"dtype": jnp.dtype("float16")},
    "no cap on segments": {"max_segments": None},
}


def serves(name: str, **changes: Any) -> bool:
    try:
        choose(dataclasses.replace(PLAIN, **(CAPPED | changes)), name)
    except UnsupportedError:
        return False
    return True


@pytest.fixture
def trusted(monkeypatch) -> None:
    """cuDNN's call is taken to run and be right: what this machine lacks is not what the table is about."""
    monkeypatch.setattr(cudnn, "_probe", lambda *shape: None)


def test_the_support_table_is_what_the_implementations_say(trusted) -> None:
    columns = list(IMPLEMENTATIONS)
    platforms = {name: [p for p in ("cpu", "gpu", "tpu") if serves(name, platform=p)] for name in columns}
    lines = [["", *columns], ["---"] * (len(columns) + 1), ["runs on", *(", ".join(platforms[n]) for n in columns)]]
    for option, change in OPTIONS.items():
        home = {name: "gpu" if name == "cudnn" else "cpu" for name in columns}
        lines.append([option, *("yes" if serves(n, platform=home[n], **change) else "-" for n in columns)])
    assert table("support") == "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)


def test_the_order_table_is_the_order() -> None:
    lines = [f"| {platform} | {', '.join(order)} |\n" for platform, order in ORDER.items()]
    assert table("order") == "| platform | order |\n|---|---|\n" + "".join(lines)


# -- MaxText's operator -----------------------------------------------------------------------------------------------


def cured(change: types.ModuleType) -> type[AttentionOp]:
    """The operator with the page's change in its training branch."""

    class Changed(AttentionOp):
        def cudnn_jax_flash_attention(self, query, key, value, decoder_segment_ids, model_mode="train"):
            scale = query.shape[-1] ** -0.5
            return change.packed_attention(self, query, key, value, decoder_segment_ids, scale=scale)

    return Changed


def maxtext_mesh(**sizes: int) -> Mesh:
    sizes = {"data": 2, "fsdp": 1, "context": 1, "tensor": 2} | sizes
    count = int(np.prod(list(sizes.values())))
    return Mesh(np.array(jax.devices()[:count]).reshape(*sizes.values()), tuple(sizes))


def real(segment_ids: jax.Array) -> jax.Array:
    return (segment_ids > 0)[..., None, None]


def operands() -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(1), 4)
    q, k, v, dout = (jax.random.normal(key, (2, 32, n, 16)) for key, n in zip(keys, (4, 2, 2, 4), strict=True))
    segment_ids = ids("1" * 9 + "2" * 14 + "0" * 2 + "3" * 7, "1" * 16 + "2" * 16)
    return q, k, v, jnp.where(real(segment_ids), dout, 0), segment_ids


def trained(op: AttentionOp) -> list[np.ndarray]:
    """Output at real tokens and gradients of one jitted call on inputs sharded as MaxText shards them."""
    q, k, v, dout, segment_ids = operands()

    def both(q: Any, k: Any, v: Any) -> Any:
        attend = lambda q, k, v: op.apply_attention(q, k, v, segment_ids, None, None, "train")[0]  # noqa: E731
        out, pullback = jax.vjp(attend, q, k, v)
        return jnp.where(real(segment_ids), out, 0), *pullback(dout)

    spread = jax.sharding.NamedSharding(op.mesh, P(("data", "fsdp"), None, "tensor"))
    with logical_rules():
        found = jax.jit(both)(*(jax.device_put(x, spread) for x in (q, k, v)))
    return [np.asarray(x) for x in found]


@pytest.mark.parametrize(
    "options",
    [{}, {"attention_type": AttentionType.LOCAL_SLIDING, "sliding_window_size": 5, "attn_logits_soft_cap": 3.0}],
    ids=["global", "local, softcap"],
)
def test_maxtexts_changed_operator_gives_what_its_dense_mask_gives(options: dict[str, Any]) -> None:
    mesh = maxtext_mesh()
    wanted = trained(AttentionOp(mesh, "dot_product", **options))
    found = trained(cured(module("packed_maxtext.py"))(mesh, "cudnn_flash_jax", **options))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=5e-6)
    leaking = trained(AttentionOp(mesh, "cudnn_flash_jax", **options))
    assert np.abs(leaking[0] - wanted[0]).max() > 0.1


def test_maxtexts_changed_operator_refuses_what_it_would_get_wrong() -> None:
    q, k, v, _, segment_ids = operands()
    change = module("packed_maxtext.py")
    with logical_rules():
        op = AttentionOp(maxtext_mesh(), "cudnn_flash_jax", attention_type=AttentionType.CHUNK)
        with pytest.raises(NotImplementedError, match="CHUNK"):
            change.packed_attention(op, q, k, v, segment_ids, scale=1.0)
        op = AttentionOp(maxtext_mesh(data=1, context=2), "cudnn_flash_jax")
        with pytest.raises(LayoutError, match="splits q as .* and segment_attention splits rows and heads"):
            change.packed_attention(op, q, k, v, segment_ids, scale=1.0)


@pytest.mark.slow
def test_without_segment_ids_maxtexts_rows_are_one_document_each() -> None:
    q, k, v, *_ = operands()
    op = AttentionOp(maxtext_mesh(), "cudnn_flash_jax")
    with logical_rules():
        found, lse = module("packed_maxtext.py").packed_attention(op, q, k, v, None, scale=16**-0.5)
    wanted, _, _ = op.apply_attention(q, k, v, None, None, None, "train")
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    assert lse.shape == (2, 4, 32)


@pytest.mark.parametrize(
    "options",
    [{}, {"local_window_size": (3, 0), "scale": 0.3}, {"is_causal": False, "local_window_size": 2}],
    ids=str,
)
def test_the_function_with_the_arguments_of_jax_nn_gives_its_numbers_for_each_document(options) -> None:
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 12, heads, 8)) for i, heads in enumerate((4, 2, 2)))
    found = module("packed_nn.py").packed_attention(q, k, v, ids("111112222220"), **options)
    for document in (slice(0, 5), slice(5, 11)):
        alone = [x[:, document] for x in (q, k, v)]
        wanted = jax.nn.dot_product_attention(*alone, **{"is_causal": True} | options)
        np.testing.assert_allclose(found[:, document], wanted, atol=2e-6)
    assert not found[:, 11].any()


def test_the_arguments_for_easydel_mark_padding_as_ejkernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = types.SimpleNamespace(MaskInfo=types.SimpleNamespace(from_segments=lambda ids: ids))
    monkeypatch.setitem(sys.modules, "ejkernel", types.SimpleNamespace(types=stand_in))
    monkeypatch.setitem(sys.modules, "ejkernel.types", stand_in)
    batch = jax_backend.to_batch(packing_core.pack([np.arange(5), np.arange(4)], 12, seed=None))
    arguments = module("packed_easydel.py").packed_arguments(batch)
    assert arguments["mask_info"].tolist() == [[1] * 5 + [2] * 4 + [-1] * 3]
    assert arguments["position_ids"].tolist() == [[*range(5), *range(4), 0, 0, 0]]


def test_the_functions_for_tunix_give_the_loss_of_each_document() -> None:
    """On a stand-in for its models: ``(input_tokens, positions, cache, attention_mask) -> (logits, cache)``."""
    page = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "jax_tunix.py"))
    table, places = (jax.random.normal(jax.random.key(i), (16, 8)) for i in range(2))

    def model(tokens: jax.Array, positions: jax.Array, cache: None, attention_mask: jax.Array) -> Any:
        x = table[tokens] + places[positions]
        scores = jnp.where(attention_mask, x @ x.swapaxes(1, 2), -2.3e38)
        return jax.nn.softmax(scores) @ x @ table.T, cache

    documents = [np.arange(5), np.arange(7)[::-1].copy()]

    def loss(documents: list[np.ndarray]) -> float:
        batch = jax_backend.to_batch(packing_core.pack(documents, 16))
        return float(page["packed_loss"](model, **page["packed_inputs"](batch)))

    alone = [loss([document]) * (len(document) - 1) for document in documents]
    assert abs(loss(documents) - sum(alone) / (4 + 6)) < 1e-5
