"""Packed causal attention in JAX on one NVIDIA GPU, ours beside what else a JAX user can call, in under ten minutes.

    python -m benchmarks.jax_gpu                       # everything
    python -m benchmarks.jax_gpu --only "ours" --sets "8k lognormal"
    python -m benchmarks.jax_gpu --toy                 # tiny shapes, to see that it runs; on a CPU the figures mean
    nothing

bfloat16, 32 query heads, 8 key/value heads, width 128, one row. Every contender first shows its output and gradients on
documents of the set against the float64 reference; one that fails is shown as WRONG, one that cannot run as NOT RUN.
Milliseconds are the fastest of several rounds of back-to-back calls; TFLOP/s count the operations that documents need
(2 per multiply-add, keys not after the query; the backward 2.5 times the forward), not those that a contender spends on
masked blocks. Memory is what the compiled forward and backward allocate beyond inputs and results.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._report import machine, table, versions
from jax_backend import segment_attention
from jax_backend.attention.pallas_tiles import tiles_for
from jax_backend.attention.request import Request
from packing_core import reference

HEADS, KV_HEADS, WIDTH = 32, 8, 128
GATE = 0.02  # relative error; bfloat16 kernels that are right lie near 0.003, ones that leak above 0.1


def lognormal(total: int, seed: int, median: float = 400.0, sigma: float = 1.2) -> list[int]:
    """Document lengths that add up to ``total``."""
    rng, lengths, left = np.random.default_rng(seed), [], total
    while left:
        length = min(left, max(1, int(rng.lognormal(np.log(median), sigma))))
        lengths.append(length)
        left -= length
    return lengths


SETS: dict[str, list[int]] = {
    "8k, one": [8192],
    "8k, 8 x 1,024": [1024] * 8,
    "8k lognormal": lognormal(8192, 94),
    "32k lognormal": lognormal(32768, 337),
}
TOY = {"toy": [40, 3, 60, 25]}


@dataclass(frozen=True)
class Row:
    """One packed row and the operands of one attention call over it."""

    lengths: list[int]
    ids: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    dout: jax.Array

    @property
    def flops(self) -> int:
        """Of the forward, over the keys that causal documents see."""
        return sum(4 * self.q.shape[2] * self.q.shape[3] * n * (n + 1) // 2 for n in self.lengths)

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum([0, *self.lengths])[:-1]

    def visible(self) -> jax.Array:
        """The document mask, bool [1, 1, S, S], made on the device."""
        size = self.ids.shape[1]
        return ((self.ids[:, :, None] == self.ids[:, None, :]) & jnp.tril(jnp.ones((size, size), bool)))[:, None]


def make_row(lengths: list[int], heads: int, kv_heads: int, width: int) -> Row:
    total = sum(lengths)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(1, total, n, width) for n in (heads, kv_heads, kv_heads, heads)]
    operands = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    ids = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)
    return Row(lengths, jnp.asarray(ids[None]), *operands)


# -- contenders: a row in, the function of (q, k, v) out; whatever one raises is why it is not run --------------------


def ours(row: Row, implementation: str, **options: Any) -> Callable[..., jax.Array]:
    return partial(segment_attention, segment_ids=row.ids, implementation=implementation, **options)


def ours_cudnn(row: Row) -> Callable[..., jax.Array]:
    return ours(row, "cudnn", max_segments=len(row.lengths))


def jax_nn_cudnn_mask(row: Row) -> Callable[..., jax.Array]:
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, mask=row.visible(), implementation="cudnn")


def private_cudnn_packed(row: Row) -> Callable[..., jax.Array]:
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    lengths = jnp.asarray([row.lengths], jnp.int32)
    offsets = jnp.asarray([[*row.starts, sum(row.lengths)]], jnp.int32)
    options = {"scale": row.q.shape[3] ** -0.5, "mask_type": MaskType.PADDING_CAUSAL}
    return lambda q, k, v: dot_product_attention(q, k, v, None, None, lengths, lengths, offsets, offsets, **options)


def pallas_ops_mha(row: Row) -> Callable[..., jax.Array]:
    """Expands keys and values, because with fewer of them it is silently wrong."""
    from jax.experimental.pallas.ops.gpu.attention import mha

    group, scale = row.q.shape[2] // row.k.shape[2], row.q.shape[3] ** -0.5

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        return mha(q, k, v, row.ids, scale, True)

    return attend


def tokamax(row: Row, implementation: str) -> Callable[..., jax.Array]:
    """With the start of each query's document, which its public function does not take; its best way."""
    from tokamax._src.ops.attention import api, base

    first = jnp.asarray(np.repeat(row.starts, row.lengths).astype(np.int32)[None, None])
    mask = base.Mask(k_start=first, is_causal=True)
    return lambda q, k, v: api.IMPLEMENTATIONS[implementation](q, k, v, mask=mask)


CONTENDERS: dict[str, Callable[[Row], Callable[..., jax.Array]]] = {
    "ours, pallas": lambda row: ours(row, "pallas"),
    "ours, cudnn": ours_cudnn,
    "cuDNN packed offsets (private)": private_cudnn_packed,
    "jax.nn cudnn, bool mask": jax_nn_cudnn_mask,
    "pallas.ops.gpu mha, segment ids": pallas_ops_mha,
    "tokamax mosaic, k_start (private)": lambda row: tokamax(row, "mosaic_gpu"),
    "tokamax triton, k_start (private)": lambda row: tokamax(row, "triton"),
}


# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """One contender on one set; a ``status`` other than "ok" says why there are no figures."""

    set: str
    contender: str
    status: str = "ok"
    error: float = float("nan")
    forward_ms: float = float("nan")
    both_ms: float = float("nan")
    memory_mib: float = float("nan")


def measure(name: str, set_name: str, row: Row, rounds: int) -> Result:
    result = Result(set_name, name)
    try:
        attend = CONTENDERS[name](row)
        forward = jax.jit(attend).lower(row.q, row.k, row.v).compile()
        both = jax.jit(lambda q, k, v, dout: _out_and_gradients(attend, q, k, v, dout))
        both = both.lower(row.q, row.k, row.v, row.dout).compile()
        result.error = gate(row, both(row.q, row.k, row.v, row.dout))
        if not result.error <= GATE:
            result.status = f"WRONG: relative error {result.error:.2g}"
            return result
        result.memory_mib = both.memory_analysis().temp_size_in_bytes / 2**20
        result.forward_ms = fastest(partial(forward, row.q, row.k, row.v), rounds)
        result.both_ms = fastest(partial(both, row.q, row.k, row.v, row.dout), rounds)
    except Exception as error:  # a peer may fail in any way; the table says how
        result.status = f"NOT RUN: {type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    return result


def _out_and_gradients(attend: Callable[..., jax.Array], *operands: jax.Array) -> tuple[jax.Array, ...]:
    *qkv, dout = operands
    out, pullback = jax.vjp(attend, *qkv)
    return out, *pullback(dout)


def gate(row: Row, found: tuple[jax.Array, ...], longest: int = 1500) -> float:
    """Largest relative error of out, dq, dk, dv over a few documents of the row and one key/value head's group.

    A set of one longer document is judged by its first tokens: causally they are a document of their own for the output
    and dq.
    """
    group, worst = row.q.shape[2] // row.k.shape[2], 0.0
    documents = [(start, n) for start, n in zip(row.starts, row.lengths, strict=True) if n <= longest]
    whole = bool(documents)
    documents = documents[:1] + documents[len(documents) // 2 :][:1] + documents[-1:] if whole else [(0, longest)]
    for start, size in documents:
        here = slice(start, start + size)
        q, dout = (np.asarray(x[0, here, :group], np.float64) for x in (row.q, row.dout))
        k, v = (np.asarray(x[0, here, :1], np.float64) for x in (row.k, row.v))
        bounds = [0, size]
        wanted = [reference.attention(q, k, v, bounds), *reference.attention_vjp(q, k, v, bounds, dout).values()]
        for x, y in zip(found if whole else found[:2], wanted, strict=False):
            x = np.asarray(x[0, here, : y.shape[1]], np.float64)
            worst = max(worst, float(np.linalg.norm(x - y) / np.linalg.norm(y)))
    return worst


def fastest(run: Callable[[], Any], rounds: int, seconds: float = 0.05) -> float:
    """Milliseconds of a call, the best of ``rounds`` rounds of about ``seconds`` of back-to-back calls."""
    jax.block_until_ready(run())
    begin = time.perf_counter()
    jax.block_until_ready(run())
    calls = max(3, min(200, int(seconds / (time.perf_counter() - begin))))
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            last = run()
        jax.block_until_ready(last)
        best = min(best, (time.perf_counter() - begin) / calls)
    return best * 1e3


def visited_area(lengths: list[int], group: int, request: Request) -> float:
    """Multiply-adds per channel and head of all tiles that our three kernels visit, masked parts included."""
    tiles, total = tiles_for(request), sum(lengths)
    first = np.repeat(np.cumsum([0, *lengths])[:-1], lengths)
    last = np.repeat(np.cumsum(lengths), lengths)
    at = np.arange(total)
    area = 0.0
    for tile, weight, span in ((tiles.forward, 2, None), (tiles.dq, 3, None), (tiles.dkv, 4, tiles.dkv.tokens(group))):
        tokens, step = (tile.tokens(group), tile.keys) if span is None else (tile.keys, span)
        low, high = (first, at + 1) if span is None else (at, last)
        for start in range(0, total, tokens):
            here = slice(start, start + tokens)
            area += weight * tokens * step * -(-(high[here].max() - low[here].min()) // step)
    return area


# -- the report -------------------------------------------------------------------------------------------------------


def report(results: list[Result], rows: dict[str, Row]) -> str:
    lines = []
    for r in results:
        flops = rows[r.set].flops
        if r.status != "ok":
            lines.append([r.set, r.contender, r.status, "", "", "", "", ""])
            continue
        lines.append(
            [
                r.set,
                r.contender,
                f"{r.forward_ms:.3f}",
                f"{flops / r.forward_ms / 1e9:.0f}",
                f"{r.both_ms:.3f}",
                f"{3.5 * flops / r.both_ms / 1e9:.0f}",
                f"{r.memory_mib:,.0f}",
                f"{r.error:.1e}",
            ]
        )
    header = ["set", "contender", "forward ms", "TFLOP/s", "fwd + bwd ms", "TFLOP/s", "memory MiB", "error"]
    return table(header, lines)


def proportion(results: list[Result], rows: dict[str, Row]) -> str:
    """Time of our kernels per visited tile area, relative to the cheapest set."""
    cost = {}
    for r in results:
        if r.contender == "ours, pallas" and r.status == "ok":
            row = rows[r.set]
            request = Request(
                queries=row.q.shape[1],
                keys=row.q.shape[1],
                heads=row.q.shape[2],
                kv_heads=row.k.shape[2],
                head_dim=row.q.shape[3],
                value_dim=row.q.shape[3],
                dtype=row.q.dtype,
                causal=True,
                scale=1.0,
                window=None,
                softcap=None,
                needs_lse=False,
                own_keys=True,
                max_segments=None,
                platform="gpu",
            )
            cost[r.set] = r.both_ms / visited_area(row.lengths, request.group, request)
    if not cost:
        return ""
    least = min(cost.values())
    figures = ", ".join(f"{name} {value / least:.2f}" for name, value in cost.items())
    return f"time of ours, pallas (forward + backward) per visited tile area, against the cheapest set: {figures}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="contenders whose name contains this")
    parser.add_argument("--sets", nargs="*", choices=list(SETS), help="these sets only")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--toy", action="store_true", help="tiny shapes; only to see that everything runs")
    arguments = parser.parse_args()
    sets = TOY if arguments.toy else {name: SETS[name] for name in arguments.sets or SETS}
    shape = (4, 2, 16) if arguments.toy else (HEADS, KV_HEADS, WIDTH)

    begin = time.perf_counter()
    print(f"{machine()}; {jax.devices()[0].device_kind}")
    print(versions("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "tokamax"), flush=True)
    rows = {name: make_row(lengths, *shape) for name, lengths in sets.items()}
    for name, row in rows.items():
        print(f"{name}: {len(row.lengths)} documents, longest {max(row.lengths)}, {row.flops / 1e9:.1f} GFLOP forward")
    results = []
    for set_name, row in rows.items():
        for name in CONTENDERS:
            if arguments.only in name:
                results.append(measure(name, set_name, row, arguments.rounds))
                print(results[-1], flush=True)
    print(report(results, rows))
    print(proportion(results, rows))
    print(f"{time.perf_counter() - begin:.0f} s in all")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(r) for r in results], indent=1))


if __name__ == "__main__":
    main()
