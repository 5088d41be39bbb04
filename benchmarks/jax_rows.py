"""The packed rows that the JAX benchmarks run on, and the judge of what they compute.

Data flows document lengths -> :class:`Row` of random operands -> a benchmark; what that found goes to :func:`gate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jax_backend.attention import mosaic_backward, mosaic_tiles
from jax_backend.attention.pallas_tiles import tiles_for
from jax_backend.attention.request import Request
from packing_core import reference

GATE = 0.02  # relative error; bfloat16 kernels that are right lie near 0.003, ones that leak above 0.1


def lognormal(total: int, seed: int, median: float = 400.0, sigma: float = 1.2) -> list[int]:
    """Document lengths that add up to ``total``."""
    rng, lengths, left = np.random.default_rng(seed), [], total
    while left:
        length = min(left, max(1, int(rng.lognormal(np.log(median), sigma))))
        lengths.append(length)
        left -= length
    return lengths


@dataclass(frozen=True)
class Documents:
    """The lengths of one row's documents, and the heads of attention over it."""

    lengths: list[int]
    heads: int = 32
    kv_heads: int = 8
    width: int = 128


SETS: dict[str, Documents] = {
    "8k, one": Documents([8192]),
    "8k, 8 x 1,024": Documents([1024] * 8),
    "8k lognormal": Documents(lognormal(8192, 94)),
    "32k lognormal": Documents(lognormal(32768, 337)),
    "32k, 32 x 1,024": Documents([1024] * 32),
    "32k, one, 16 heads over 4": Documents([32768], 16, 4),
    "32k, 15 documents": Documents(lognormal(32768, 21, median=1800.0, sigma=0.8)),
    "16k, 8 x 2,048, 16 heads of 64": Documents([2048] * 8, 16, 16, 64),
    "16k lognormal, 14 heads of 64 over 2": Documents(lognormal(16384, 94), 14, 2, 64),
    "16k lognormal, 32 heads of 64 over 8": Documents(lognormal(16384, 94), 32, 8, 64),
    "16k lognormal, 28 heads over 4": Documents(lognormal(16384, 94), 28, 4),
    "16k lognormal, 16 heads": Documents(lognormal(16384, 94), 16, 16),
}
_CUDNN = ["8k lognormal", "8k, 8 x 1,024", "32k, 32 x 1,024", "8k, one", "32k, one, 16 heads over 4"]
_CUDNN += ["32k, 15 documents", "16k, 8 x 2,048, 16 heads of 64"]
# which sets are measured together
GROUPS: dict[str, list[str]] = {
    "attention": list(SETS)[:4],
    "cudnn": _CUDNN,
    "torch": ["8k lognormal", *list(SETS)[7:]],
}
TOY = {"toy": Documents([40, 3, 60, 25], 4, 2, 16), "toy, one": Documents([128], 4, 2, 16)}


@dataclass(frozen=True, eq=False)
class Row:
    """One packed row and the operands of one attention call over it: q and dout [1, S, N, D], k and v [1, S, K, D]."""

    lengths: tuple[int, ...]
    q: jax.Array
    k: jax.Array
    v: jax.Array
    dout: jax.Array

    @property
    def ids(self) -> jax.Array:
        """Segment ids, int32 [1, S]."""
        return jnp.asarray(np.repeat(np.arange(1, len(self.lengths) + 1, dtype=np.int32), self.lengths)[None])

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum([0, *self.lengths])[:-1]

    @property
    def flops(self) -> int:
        """Counts the FLOPs of the forward, over the keys that causal documents see."""
        return sum(4 * self.q.shape[2] * self.q.shape[3] * n * (n + 1) // 2 for n in self.lengths)

    @property
    def operands(self) -> tuple[jax.Array, ...]:
        return self.q, self.k, self.v, self.dout


def make_row(documents: Documents) -> Row:
    lengths, heads, kv_heads, width = documents.lengths, documents.heads, documents.kv_heads, documents.width
    total = sum(lengths)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(1, total, n, width) for n in (heads, kv_heads, kv_heads, heads)]
    return Row(tuple(lengths), *(jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True)))


def gate(row: Row, found: tuple[jax.Array, ...]) -> float:
    """Largest relative error of out, dq, dk, dv over a few documents of the row and one key/value head's group; NaN if
    one is."""
    errors = []
    for here, right in wanted(row):
        for x, y in zip(found, right, strict=False):
            x = np.asarray(x[0, here, : y.shape[1]], np.float64)
            errors.append(np.linalg.norm(x - y) / np.linalg.norm(y))
    return float(np.max(errors))


@cache
def wanted(row: Row, longest: int = 2048) -> list[tuple[slice, list[np.ndarray]]]:
    """Documents of the row and their output, dq, dk, dv in the first key/value head's group.

    A row of one longer document is judged by its first tokens: causally they are a document of their own for the output
    and dq.
    """
    group = row.q.shape[2] // row.k.shape[2]
    documents = [(start, n) for start, n in zip(row.starts, row.lengths, strict=True) if n <= longest]
    whole = bool(documents)
    documents = documents[:1] + documents[len(documents) // 2 :][:1] + documents[-1:] if whole else [(0, longest)]
    judged = []
    for start, size in documents:
        here = slice(int(start), int(start) + size)
        q, dout = (np.asarray(x[0, here, :group], np.float64) for x in (row.q, row.dout))
        k, v = (np.asarray(x[0, here, :1], np.float64) for x in (row.k, row.v))
        gradients = reference.attention_vjp(q, k, v, [0, size], dout)
        right = [reference.attention(q, k, v, [0, size]), *(gradients[name] for name in ("q", "k", "v"))]
        judged.append((here, right if whole else right[:2]))
    return judged


def request_of(row: Row) -> Request:
    """Makes the request of ``segment_attention`` for the row."""
    return Request(
        rows=1,
        queries=row.q.shape[1],
        keys=row.q.shape[1],
        heads=row.q.shape[2],
        kv_heads=row.k.shape[2],
        head_dim=row.q.shape[3],
        value_dim=row.q.shape[3],
        dtype=row.q.dtype,
        causal=True,
        scale=row.q.shape[3] ** -0.5,
        window=None,
        softcap=None,
        needs_lse=False,
        own_keys=True,
        max_segments=None,
        platform=jax.default_backend(),
    )


def visited_area(row: Row) -> float:
    """Multiply-adds per channel and head of all tiles that our kernels visit, masked parts included."""
    request = request_of(row)
    tiles, group, total = tiles_for(request), request.group, request.queries
    first = np.repeat(row.starts, row.lengths)
    last = np.repeat(row.starts + row.lengths, row.lengths)
    at = np.arange(total)

    def walked(tokens: int, step: int, low: np.ndarray, high: np.ndarray) -> int:
        starts = range(0, total, tokens)
        steps = (-(-(high[i : i + tokens].max() - low[i : i + tokens].min()) // step) for i in starts)
        return tokens * step * int(sum(steps))

    hopper, heads = mosaic_tiles.lowers(request), mosaic_tiles.packed_heads(request)
    if hopper and mosaic_tiles.wins_forward(request):
        tokens = mosaic_tiles.TILE // heads
        area = 2 * walked(tokens, mosaic_tiles.KEYS, first // mosaic_tiles.COPIED * mosaic_tiles.COPIED, at + 1)
    else:
        area = 2 * walked(tiles.forward.tokens(group), tiles.forward.keys, first, at + 1)
    if hopper and mosaic_tiles.wins_backward(request):
        tokens = mosaic_backward.queries_of_step(request)
        return area + 5 * walked(mosaic_backward.KEYS, tokens, at // tokens * tokens, -(-last // tokens) * tokens)
    area += 3 * walked(tiles.dq.tokens(group), tiles.dq.keys, first, at + 1)
    return area + 4 * walked(tiles.dkv.keys, tiles.dkv.tokens(group), at, last)
