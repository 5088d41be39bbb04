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
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

if "--tiny" in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX looks for devices

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import Figures, measured, parsed, parser, seconds_left, wanted
from benchmarks.report import Result, collected, machine, ratios, versions
from jax_backend import find_segments, segment_attention
from packing_core import reference

GATE = 0.02  # relative error; bfloat16 kernels that are right lie near 0.003, ones that leak above 0.1
OURS, BOTH = "ours, pallas", "ms forward + backward"

# -- the rows, and the judge of what is computed on them


def lognormal(total: int, seed: int, median: float = 400.0, sigma: float = 1.2) -> tuple[int, ...]:
    """Document lengths that add up to ``total``."""
    rng, lengths, left = np.random.default_rng(seed), [], total
    while left:
        length = min(left, max(1, int(rng.lognormal(np.log(median), sigma))))
        lengths.append(length)
        left -= length
    return tuple(lengths)


@dataclass(frozen=True)
class Row:
    """One packed row of documents, and the operands of one attention call over it."""

    lengths: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    width: int = 128

    @cached_property
    def operands(self) -> tuple[jax.Array, ...]:
        """q [1, S, N, D], k and v [1, S, K, D], and the gradient of the output, [1, S, N, D]."""
        total, keys = sum(self.lengths), jax.random.split(jax.random.key(0), 4)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        pairs = zip(keys, heads, strict=True)
        return tuple(jax.random.normal(key, (1, total, n, self.width), jnp.bfloat16) for key, n in pairs)

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
        return sum(4 * self.heads * self.width * n * (n + 1) // 2 for n in self.lengths)


SETS = {
    "8k lognormal": Row(lognormal(8192, 94)),
    "8k, 8 x 1,024": Row((1024,) * 8),
    "32k, 32 x 1,024": Row((1024,) * 32),
    "8k, one": Row((8192,)),
    "32k, one, 16 heads over 4": Row((32768,), 16, 4),
    "32k, 15 documents": Row(lognormal(32768, 21, median=1800.0, sigma=0.8)),
    "16k, 8 x 2,048, 16 heads of 64": Row((2048,) * 8, 16, 16, 64),
}
TOY = {"toy": Row((40, 3, 60, 25), 4, 2, 16), "toy, one": Row((128,), 4, 2, 16)}


def gate(row: Row, results: tuple[jax.Array, ...]) -> float:
    """Largest relative error of out, dq, dk, dv over a few documents of the row and one key/value head's group; NaN if
    one is."""
    errors = []
    for here, right in judged(row):
        for x, y in zip(results, right, strict=False):
            part = np.asarray(x[0, here, : y.shape[1]], np.float64)
            errors.append(np.linalg.norm(part - y) / np.linalg.norm(y))
    return float(np.max(errors))


@cache
def judged(row: Row, longest: int = 2048) -> list[tuple[slice, list[np.ndarray]]]:
    """Documents of the row and their output, dq, dk, dv in the first key/value head's group.

    A row of one longer document is judged by its first tokens: causally they are a document of their own for the output
    and dq.
    """
    q_row, k_row, v_row, dout_row = row.operands
    group = row.heads // row.kv_heads
    documents = [(start, n) for start, n in zip(row.starts, row.lengths, strict=True) if n <= longest]
    whole = bool(documents)
    documents = documents[:1] + documents[len(documents) // 2 :][:1] + documents[-1:] if whole else [(0, longest)]
    parts = []
    for start, size in documents:
        here = slice(int(start), int(start) + size)
        q, dout = (np.asarray(x[0, here, :group], np.float64) for x in (q_row, dout_row))
        k, v = (np.asarray(x[0, here, :1], np.float64) for x in (k_row, v_row))
        gradients = reference.attention_vjp(q, k, v, [0, size], dout)
        right = [reference.attention(q, k, v, [0, size]), *(gradients[name] for name in ("q", "k", "v"))]
        parts.append((here, right if whole else right[:2]))
    return parts


# -- contenders: each makes a call of a row; what it raises is why it has no figure


# attend of (q, k, v, *extras), and the extras
Call = tuple[Callable[..., jax.Array], tuple[Any, ...]]


def ours(row: Row, implementation: str, contain: bool = False) -> Call:
    cap = len(row.lengths) if implementation == "cudnn" else None
    options: dict[str, Any] = {"implementation": implementation, "max_segments": cap, "contain_nonfinite": contain}
    return lambda q, k, v, segments: segment_attention(q, k, v, segments, **options), (find_segments(row.ids),)


def cudnn_packed(row: Row) -> Call:
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    options: dict[str, Any] = {"scale": row.width**-0.5, "mask_type": MaskType.PADDING_CAUSAL}
    # One document would select the call without offsets; an empty second one keeps it this one.
    lengths = [*row.lengths, -1][: max(2, len(row.lengths))]
    offsets = [*row.starts, sum(row.lengths), -1][: len(lengths) + 1]
    extras = jnp.asarray([lengths], jnp.int32), jnp.asarray([offsets], jnp.int32)
    return lambda q, k, v, n, first: dot_product_attention(q, k, v, None, None, n, n, first, first, **options), extras


CONTENDERS: dict[str, Callable[[Row], Call]] = {
    OURS: partial(ours, implementation="pallas"),
    "contained, pallas": partial(ours, implementation="pallas", contain=True),
    "ours, cudnn": partial(ours, implementation="cudnn"),
    "cuDNN packed offsets (private)": cudnn_packed,
    "ours, chunked": partial(ours, implementation="chunked"),
    "ours, tpu": partial(ours, implementation="tpu"),
}


# -- measuring --------------------------------------------------------------------------------------------------------


def program_of(name: str, row: Row) -> tuple[object, ...]:
    """Returns what decides the programs of a contender, for sets of all its shapes; cuDNN's count documents."""
    documents = len(row.lengths) if "cudnn" in name.lower() else None
    return name, sum(row.lengths), row.heads, row.kv_heads, row.width, documents


def compiled(name: str, row: Row) -> tuple[Any, Any]:
    """Forward, and forward with backward; they take the extras of a row after q, k, v (and dout)."""
    attend, extras = CONTENDERS[name](row)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array, *extras: Any) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, *extras), q, k, v)
        return out, *pullback(dout)

    forward = jax.jit(attend).lower(*row.operands[:3], *extras).compile()
    return forward, jax.jit(both).lower(*row.operands, *extras).compile()


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


def run(rows: dict[str, Row], rounds: int) -> Iterator[Result]:
    """Every contender on every set."""
    pairs = [(case, name) for case in rows for name in CONTENDERS if wanted(name)]
    pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1))  # all are compiled at once, so that the GPU waits for few
    one_of = {program_of(name, rows[case]): (name, rows[case]) for case, name in pairs}
    pending = {program: pool.submit(compiled, *one) for program, one in one_of.items()}
    for case, name in pairs:
        row, future = rows[case], pending[program_of(name, rows[case])]

        def check(name: str = name, row: Row = row, future: Any = future) -> float:
            wait([future], max(min(60.0, seconds_left()), 0.01))
            if not future.done():
                raise TimeoutError("not compiled after a minute more")
            _, both = future.result()
            return gate(row, both(*row.operands, *CONTENDERS[name](row)[1]))

        def measure(name: str = name, row: Row = row, future: Any = future) -> Figures:
            (forward, both), (_, extras) = future.result(), CONTENDERS[name](row)
            ahead = fastest(partial(forward, *row.operands[:3], *extras), rounds)
            all_ms = fastest(partial(both, *row.operands, *extras), rounds)
            return {
                "ms forward": ahead,
                "TFLOP/s forward": row.flops / ahead / 1e9,
                BOTH: all_ms,
                "TFLOP/s forward + backward": 3.5 * row.flops / all_ms / 1e9,
                "memory MiB": both.memory_analysis().temp_size_in_bytes / 2**20,
            }

        yield from measured("attention", case, name, BOTH, measure, check, GATE)


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
    pairs = [((case, "contained, pallas"), (case, OURS)) for case in sets]
    print(ratios(results, BOTH, pairs, lambda r: (r.case, r.contender)))
    return results


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a compiler that outlived its limit would hold the process
