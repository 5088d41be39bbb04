"""Packed causal attention in JAX, ours beside what else a JAX user can call; a part of `jax_gpu`.

    python -m benchmarks.jax_attention                          # every set, every contender
    python -m benchmarks.jax_attention --sets "8k lognormal" --match pallas

bfloat16, one row a call. Every contender first shows its output and gradients on documents of the set against the
float64 reference; one that fails or cannot run has no figure, and the reason below the table. Milliseconds are the
fastest of several rounds of back-to-back calls. What a contender wants to know about the documents (segments, offsets)
is an argument, computed before, once for all layers. TFLOP/s count the operations that documents need (2 per
multiply-add, keys not after the query; the backward 2.5 times the forward), not those that a contender spends on masked
blocks. Memory is what the compiled forward and backward allocate beyond arguments and results. The last lines compare
our kernels that keep what is not finite in its document with those that do not.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import Figures, measured, parsed, parser, seconds_left, wanted
from benchmarks.report import Result, collected, machine, versions
from jax_backend import find_segments, segment_attention
from packing_core import reference

GATE = 0.02  # relative error; bfloat16 kernels that are right lie near 0.003, ones that leak above 0.1
BOTH = "ms forward + backward"

# -- the rows, and the judge of what is computed on them


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
    "8k lognormal": Documents(lognormal(8192, 94)),
    "8k, 8 x 1,024": Documents([1024] * 8),
    "32k, 32 x 1,024": Documents([1024] * 32),
    "8k, one": Documents([8192]),
    "32k, one, 16 heads over 4": Documents([32768], 16, 4),
    "32k, 15 documents": Documents(lognormal(32768, 21, median=1800.0, sigma=0.8)),
    "16k, 8 x 2,048, 16 heads of 64": Documents([2048] * 8, 16, 16, 64),
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


def gate(row: Row, results: tuple[jax.Array, ...]) -> float:
    """Largest relative error of out, dq, dk, dv over a few documents of the row and one key/value head's group; NaN if
    one is."""
    errors = []
    for here, right in judged(row):
        for x, y in zip(results, right, strict=False):
            x = np.asarray(x[0, here, : y.shape[1]], np.float64)
            errors.append(np.linalg.norm(x - y) / np.linalg.norm(y))
    return float(np.max(errors))


@cache
def judged(row: Row, longest: int = 2048) -> list[tuple[slice, list[np.ndarray]]]:
    """Documents of the row and their output, dq, dk, dv in the first key/value head's group.

    A row of one longer document is judged by its first tokens: causally they are a document of their own for the output
    and dq.
    """
    group = row.q.shape[2] // row.k.shape[2]
    documents = [(start, n) for start, n in zip(row.starts, row.lengths, strict=True) if n <= longest]
    whole = bool(documents)
    documents = documents[:1] + documents[len(documents) // 2 :][:1] + documents[-1:] if whole else [(0, longest)]
    parts = []
    for start, size in documents:
        here = slice(int(start), int(start) + size)
        q, dout = (np.asarray(x[0, here, :group], np.float64) for x in (row.q, row.dout))
        k, v = (np.asarray(x[0, here, :1], np.float64) for x in (row.k, row.v))
        gradients = reference.attention_vjp(q, k, v, [0, size], dout)
        right = [reference.attention(q, k, v, [0, size]), *(gradients[name] for name in ("q", "k", "v"))]
        parts.append((here, right if whole else right[:2]))
    return parts


# -- contenders: each makes a call of a row; what it raises is why it has no figure


@dataclass(frozen=True)
class Call:
    """``attend`` of (q, k, v, *extras)."""

    attend: Callable[..., jax.Array]
    extras: tuple[Any, ...]


def ours(row: Row, implementation: str, contain: bool = False) -> Call:
    cap = len(row.lengths) if implementation == "cudnn" else None
    options: dict[str, Any] = {"implementation": implementation, "max_segments": cap, "contain_nonfinite": contain}
    return Call(lambda q, k, v, segments: segment_attention(q, k, v, segments, **options), (find_segments(row.ids),))


def cudnn_packed(row: Row) -> Call:
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    options: dict[str, Any] = {"scale": row.q.shape[3] ** -0.5, "mask_type": MaskType.PADDING_CAUSAL}
    # One document would select the call without offsets; an empty second one keeps it this one.
    lengths = [*row.lengths, -1][: max(2, len(row.lengths))]
    offsets = [*row.starts, sum(row.lengths), -1][: len(lengths) + 1]
    extras = jnp.asarray([lengths], jnp.int32), jnp.asarray([offsets], jnp.int32)
    return Call(
        lambda q, k, v, n, first: dot_product_attention(q, k, v, None, None, n, n, first, first, **options), extras
    )


CONTENDERS: dict[str, Callable[[Row], Call]] = {
    "ours, pallas": partial(ours, implementation="pallas"),
    "contained, pallas": partial(ours, implementation="pallas", contain=True),
    "ours, cudnn": partial(ours, implementation="cudnn"),
    "cuDNN packed offsets (private)": cudnn_packed,
    "ours, chunked": partial(ours, implementation="chunked"),
    "ours, tpu": partial(ours, implementation="tpu"),
}


# -- measuring --------------------------------------------------------------------------------------------------------


def compiled(name: str, row: Row) -> tuple[Any, Any, tuple[Any, ...]]:
    """Forward, forward with backward, and what they take after q, k, v (and dout)."""
    call = CONTENDERS[name](row)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array, *extras: Any) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(lambda q, k, v: call.attend(q, k, v, *extras), q, k, v)
        return out, *pullback(dout)

    forward = jax.jit(call.attend).lower(row.q, row.k, row.v, *call.extras).compile()
    return forward, jax.jit(both).lower(*row.operands, *call.extras).compile(), call.extras


def fastest(run: Callable[[], Any], rounds: int, seconds: float = 0.05) -> float:
    """Milliseconds of a call, the best of several rounds of back-to-back calls.

    Args:
        run: the call; its first one is not timed.
        rounds: each of about ``seconds``. Of a call that takes longer than that there are two rounds of one call.
    """

    def calls(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            last = run()
        jax.block_until_ready(last)
        return (time.perf_counter() - begin) / count

    calls(1)
    first = calls(1)
    count = max(1, min(200, int(seconds / first)))
    return min(first, *(calls(count) for _ in range(rounds if first < seconds else 2))) * 1e3


def run(sets: dict[str, Documents], rounds: int) -> Iterator[Result]:
    """Every contender on every set."""
    rows = {name: make_row(documents) for name, documents in sets.items()}
    pairs = [(case, name) for case in rows for name in CONTENDERS if wanted(name)]
    pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1))  # all are compiled at once, so that the GPU waits for few
    pending = {(case, name): pool.submit(compiled, name, rows[case]) for case, name in pairs}
    for case, name in pairs:
        row, future = rows[case], pending[case, name]

        def check(row: Row = row, future: Any = future) -> float:
            _, both, extras = future.result(max(min(60.0, seconds_left()), 0.01))
            return gate(row, both(*row.operands, *extras))

        def measure(row: Row = row, future: Any = future) -> Figures:
            forward, both, extras = future.result()
            ahead = fastest(partial(forward, row.q, row.k, row.v, *extras), rounds)
            all_ms = fastest(partial(both, *row.operands, *extras), rounds)
            return {
                "ms forward": ahead,
                "TFLOP/s forward": row.flops / ahead / 1e9,
                BOTH: all_ms,
                "TFLOP/s forward + backward": 3.5 * row.flops / all_ms / 1e9,
                "memory MiB": both.memory_analysis().temp_size_in_bytes / 2**20,
            }

        yield from measured("attention", case, name, BOTH, measure, check, GATE)
    find = jax.jit(find_segments)
    for case, row in rows.items():
        yield from measured(
            "find_segments, once per batch",
            case,
            "ours",
            "ms",
            lambda row=row: {"ms": fastest(partial(find, row.ids), rounds)},
        )


def containment(results: Sequence[Result]) -> str:
    """Time of our kernels, forward and backward, that keep what is not finite in its document, to those that do not."""
    ms = {(r.case, r.contender): r.value for r in results if r.unit == BOTH and r.value}
    both = [case for case, name in ms if name == "ours, pallas" and (case, "contained, pallas") in ms]
    return "\n".join(
        f"{case}: {ms[case, 'contained, pallas'] / ms[case, 'ours, pallas']:.2f} contained" for case in both
    )


def about() -> str:
    packages = versions("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "tokamax", "flax", "optax")
    return f"{machine()}; {len(jax.devices())} x {jax.devices()[0].device_kind}\n{packages}"


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__)
    options.add_argument("--sets", nargs="*", choices=list(SETS), default=list(SETS), help="these sets only")
    options.add_argument("--rounds", type=int, default=4)
    chosen = parsed(options, arguments)
    sets = TOY if chosen.tiny else {name: SETS[name] for name in chosen.sets}
    results = collected(run(sets, chosen.rounds), about(), chosen.output, "jax_attention")
    print(containment(results))
    return results


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a compiler that outlived its limit would hold the process
