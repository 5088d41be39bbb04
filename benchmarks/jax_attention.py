"""Packed causal attention in JAX, ours beside what else a JAX user can call; a part of `jax_gpu` and `jax_tpu`.

    python -m benchmarks.jax_attention                          # four sets, every contender
    python -m benchmarks.jax_attention --sets "8k lognormal" --match pallas
    python -m benchmarks.jax_attention --group cudnn --match "pallas$|packed offsets"

bfloat16, one row a call. Every contender first shows its output and gradients on documents of the set against the
float64 reference; one that fails or cannot run has no figure, and the reason below the table. Milliseconds are the
fastest of several rounds of back-to-back calls. What a contender wants to know about the documents (segments, offsets,
first keys) is an argument, computed before, once for all layers; only the dense mask is made inside, since nobody keeps
it. TFLOP/s count the operations that documents need (2 per multiply-add, keys not after the query; the backward 2.5
times the forward), not those that a contender spends on masked blocks. Memory is what the compiled forward and backward
allocate beyond arguments and results.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._report import fastest, machine, not_run, table, versions, write_json
from jax_backend import find_segments, segment_attention
from jax_backend.attention import mosaic_tiles
from packing_core import reference

NAN = float("nan")
GATE = 0.02  # relative error; bfloat16 kernels that are right lie near 0.003, ones that leak above 0.1


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


# -- contenders: each makes a call of a row; what it raises is why it has no figure


@dataclass(frozen=True)
class Call:
    """``attend`` of (q, k, v, *extras). ``cap`` is what ``attend`` itself knows of the row: most documents of one."""

    attend: Callable[..., jax.Array]
    extras: tuple[Any, ...]
    cap: int | None = None


def ours(row: Row, implementation: str, contain: bool = False) -> Call:
    cap = len(row.lengths) if implementation == "cudnn" else None
    options: dict[str, Any] = {"implementation": implementation, "max_segments": cap, "contain_nonfinite": contain}
    return Call(
        lambda q, k, v, segments: segment_attention(q, k, v, segments, **options), (find_segments(row.ids),), cap
    )


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


def cudnn_mask(row: Row) -> Call:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        size = ids.shape[1]
        visible = (ids[:, :, None] == ids[:, None, :]) & jnp.tril(jnp.ones((size, size), bool))
        return jax.nn.dot_product_attention(q, k, v, mask=visible[:, None], implementation="cudnn")

    return Call(attend, (row.ids,))


def pallas_ops_mha(row: Row) -> Call:
    """Expands keys and values, because with fewer of them it is silently wrong."""
    from jax.experimental.pallas.ops.gpu.attention import mha

    group, scale = row.q.shape[2] // row.k.shape[2], row.q.shape[3] ** -0.5
    interpret = jax.default_backend() == "cpu"

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        return mha(q, k, v, ids, scale, True, interpret=interpret)

    return Call(attend, (row.ids,))


def tokamax(row: Row, implementation: str) -> Call:
    """With the start of each query's document, which its public function does not take; its best way."""
    from tokamax._src.ops.attention import api, base

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array) -> jax.Array:
        return api.IMPLEMENTATIONS[implementation](q, k, v, mask=base.Mask(k_start=first, is_causal=True))

    return Call(attend, (jnp.asarray(np.repeat(row.starts, row.lengths).astype(np.int32)[None, None]),))


CONTENDERS: dict[str, Callable[[Row], Call]] = {
    "ours, pallas": partial(ours, implementation="pallas"),
    "contained, pallas": partial(ours, implementation="pallas", contain=True),
    "ours, cudnn": partial(ours, implementation="cudnn"),
    "cuDNN packed offsets (private)": cudnn_packed,
    "tokamax mosaic, k_start (private)": partial(tokamax, implementation="mosaic_gpu"),
    "tokamax triton, k_start (private)": partial(tokamax, implementation="triton"),
    "pallas.ops.gpu mha, segment ids": pallas_ops_mha,
    "jax.nn cudnn, bool mask": cudnn_mask,
    "ours, chunked": partial(ours, implementation="chunked"),
    "ours, tpu": partial(ours, implementation="tpu"),
}


# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """One contender on one set; a ``status`` other than "ok" says why there are no figures."""

    set: str
    contender: str
    status: str = "ok"
    error: float = NAN
    forward_ms: float = NAN
    both_ms: float = NAN
    forward_tflops: float = NAN
    both_tflops: float = NAN
    memory_mib: float = NAN


@dataclass(frozen=True)
class Compiled:
    """Both compiled functions of a contender on a row, and what they take after q, k, v (and dout)."""

    forward: Any
    both: Any
    extras: tuple[Any, ...]


class Compilers:
    """Compiles contenders beside each other, each set of shapes and cap once, so that the GPU waits for few."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1))
        self._pairs: dict[Any, Future[tuple[Any, Any]]] = {}

    def start(self, name: str, row: Row) -> Callable[[float], Compiled]:
        """Start compiling; the result takes the seconds to wait and gives the compiled pair, or raises."""
        try:
            call = CONTENDERS[name](row)
        except Exception as error:
            return partial(_raise, error)
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype), (row.operands, call.extras))
        key = name, call.cap, jax.tree.structure(call.extras), str(shapes)
        if key not in self._pairs:
            self._pairs[key] = self._pool.submit(_compile, row, call)
        future = self._pairs[key]
        return lambda seconds: Compiled(*future.result(max(seconds, 0.01)), call.extras)


def _raise(error: Exception, seconds: float) -> Compiled:
    raise error


def _compile(row: Row, call: Call) -> tuple[Any, Any]:
    def both(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array, *extras: Any) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(lambda q, k, v: call.attend(q, k, v, *extras), q, k, v)
        return out, *pullback(dout)

    forward = jax.jit(call.attend).lower(row.q, row.k, row.v, *call.extras).compile()
    return forward, jax.jit(both).lower(*row.operands, *call.extras).compile()


def measure(result: Result, row: Row, compiled: Callable[[float], Compiled], rounds: int, seconds: float) -> None:
    """Fill in ``result``; ``seconds`` is how long it may wait for the compiler."""
    try:
        found = compiled(seconds)
        result.error = gate(row, found.both(*row.operands, *found.extras))
        if not result.error <= GATE:
            result.status = f"WRONG: relative error {result.error:.2g}"
            return
        result.memory_mib = found.both.memory_analysis().temp_size_in_bytes / 2**20
        result.forward_ms = fastest(
            partial(found.forward, row.q, row.k, row.v, *found.extras), rounds, jax.block_until_ready
        )
        result.both_ms = fastest(partial(found.both, *row.operands, *found.extras), rounds, jax.block_until_ready)
        result.forward_tflops = row.flops / result.forward_ms / 1e9
        result.both_tflops = 3.5 * row.flops / result.both_ms / 1e9
    except TimeoutError:
        result.status = f"NOT RUN: not compiled after {seconds:.0f} s more"
    except Exception as error:  # a peer may fail in any way; the table says how
        result.status = not_run(error)


# -- the report -------------------------------------------------------------------------------------------------------


def line(r: Result) -> list[str]:
    if r.status != "ok":
        return [r.set, r.contender, *["-"] * 6]
    figures = [f"{r.forward_ms:.3f}", f"{r.forward_tflops:.0f}", f"{r.both_ms:.3f}", f"{r.both_tflops:.0f}"]
    return [r.set, r.contender, *figures, f"{r.memory_mib:,.0f}", f"{r.error:.1e}"]


def report(results: list[Result]) -> str:
    header = ["set", "contender", "forward ms", "TFLOP/s", "fwd + bwd ms", "TFLOP/s", "memory MiB", "error"]
    reasons = [f"{r.set}, {r.contender}: {r.status}" for r in results if r.status != "ok"]
    return "\n".join([table(header, [line(r) for r in results]), *reasons])


def containment(results: list[Result]) -> dict[str, float]:
    """Time of our kernels, forward and backward, that keep what is not finite in its document, to those that do not."""
    contained, plain = (
        {r.set: r.both_ms for r in results if r.status == "ok" and r.contender == f"{kind}, pallas"}
        for kind in ("contained", "ours")
    )
    return {name: contained[name] / plain[name] for name in contained.keys() & plain.keys()}


def attention(sets: dict[str, Documents], match: str, rounds: int, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield what is to be written after each measurement; print rows as they come and the table at the end."""
    rows = {name: make_row(documents) for name, documents in sets.items()}
    for name, row in rows.items():
        print(f"{name}: {len(row.lengths)} documents, longest {max(row.lengths)}, {row.flops / 1e9:.1f} GFLOP forward")
    compilers = Compilers()
    results = [Result(set_name, name) for set_name in rows for name in CONTENDERS if re.search(match, name)]
    pending = [compilers.start(r.contender, rows[r.set]) for r in results]
    for row in rows.values():
        wanted(row)
    for r, compiled in zip(results, pending, strict=True):
        # All are being compiled at once; the first waits longest.
        measure(r, rows[r.set], compiled, rounds, min(60.0, deadline - time.perf_counter()))
        print(" | ".join(line(r)), "" if r.status == "ok" else r.status, flush=True)
        yield {"attention": [asdict(x) for x in results[: results.index(r) + 1]]}
    find = jax.jit(find_segments)
    finding = {name: fastest(partial(find, row.ids), rounds, jax.block_until_ready) for name, row in rows.items()}
    print(report(results))
    print("find_segments, once per batch, ms:", ", ".join(f"{name} {value:.3f}" for name, value in finding.items()))
    contain = containment(results)
    print("time with what is not finite contained, against without:", {k: round(v, 3) for k, v in contain.items()})
    yield {"containment": contain}
    yield {"find_segments_ms": finding}


def main(arguments: Sequence[str] | None = None) -> None:
    begin = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", metavar="PATTERN", help="contenders whose name it matches")
    parser.add_argument("--group", choices=list(GROUPS), default="attention", help="which sets")
    parser.add_argument("--sets", nargs="*", choices=list(SETS), help="these sets only")
    parser.add_argument(
        "--lowering",
        choices=["mosaic", "triton"],
        help="of the kernels, instead of the chosen one",
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120.0, help="stop measuring after this long")
    parser.add_argument("--output", type=Path, help="file of JSON, rewritten after each measurement")
    parser.add_argument("--toy", action="store_true", help="tiny shapes; only to see that everything runs")
    options = parser.parse_args(arguments)
    sets = TOY if options.toy else {name: SETS[name] for name in options.sets or GROUPS[options.group]}
    if options.lowering:
        for kernel in ("wins_forward", "wins_backward"):
            setattr(mosaic_tiles, kernel, lambda request: options.lowering == "mosaic")
    deadline = begin + options.seconds

    header = [
        f"{machine()}; {len(jax.devices())} x {jax.devices()[0].device_kind}",
        versions("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "tokamax"),
    ]
    print("\n".join(header), flush=True)
    found: dict[str, Any] = {"header": header}
    for part in attention(sets, options.match, options.rounds, deadline):
        found |= part
        write_json(options.output, found, begin)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a compiler that outlived its limit would hold the process
