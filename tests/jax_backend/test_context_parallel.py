"""Context parallelism over four devices: tokens of a row are split, and segments cross the cuts.

Two ways, each an example to copy: every device gathers all keys, or keys travel around a ring of devices and the
partial results are merged. Positions in the row give causality: ``q_offset`` says where the queries stand.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_backend import merge_attention, segment_attention
from tests.jax_backend.oracle import assert_same

DEVICES, S = 4, 64
HERE = S // DEVICES


def gathered_keys(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, **options: Any) -> jax.Array:
    """Each device's queries against all keys of its rows."""
    k, v, kv_ids = (lax.all_gather(x, "context", axis=1, tiled=True) for x in (k, v, ids))
    return segment_attention(q, k, v, ids, kv_segment_ids=kv_ids, q_offset=lax.axis_index("context") * HERE, **options)


def ring(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, **options: Any) -> jax.Array:
    """Each device's queries against one shard of keys at a time, while the shards travel around."""
    me = lax.axis_index("context")
    to_next = [(i, (i + 1) % DEVICES) for i in range(DEVICES)]

    def hop(carry: Any, number: jax.Array) -> tuple[Any, None]:
        whole, (k, v, kv_ids) = carry
        owner = (me - number) % DEVICES
        part = segment_attention(
            q, k, v, ids, kv_segment_ids=kv_ids, q_offset=(me - owner) * HERE, return_lse=True, **options
        )
        keys = jax.tree.map(lambda x: lax.ppermute(x, "context", to_next), (k, v, kv_ids))
        return (merge_attention(whole, part), keys), None

    nothing = jnp.zeros_like(q), jnp.full(q.shape[:3], -jnp.inf)
    (whole, _), _ = lax.scan(hop, (nothing, (k, v, ids)), jnp.arange(DEVICES))
    return whole[0]


@pytest.mark.parametrize("way", [gathered_keys, ring])
@pytest.mark.parametrize(("implementation", "window"), [("pallas", None), ("chunked", 11)])
def test_split_tokens_give_what_whole_rows_give(way: Any, implementation: str, window: int | None) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, S, heads, 16)), jnp.float32) for heads in (4, 2, 2))
    #                    cuts of the devices at 16, 32, 48
    ids = jnp.asarray([[1] * 10 + [0] * 3 + [2] * 40 + [3] * 11, [1] * 16 + [2] * 16 + [3] * 30 + [0] * 2], jnp.int32)
    options = {"implementation": implementation, "window": window}
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("context",))
    tokens = P(None, "context")
    split = jax.shard_map(partial(way, **options), mesh=mesh, in_specs=(tokens,) * 4, out_specs=tokens, check_vma=False)

    def loss(attend: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = attend(q, k, v, ids)
        return (out**2).sum(), out

    def run(attend: Any) -> Any:
        return jax.jit(jax.grad(partial(loss, attend), argnums=(0, 1, 2), has_aux=True))(q, k, v)

    whole = run(partial(segment_attention, implementation="xla", window=window))
    assert_same(run(split), whole)
