"""The gated delta rule of a Qwen3.5 layer in JAX: ours packed, beside MaxText's chunked form and the plain recurrence.

    python -m benchmarks.jax_scan --output results/scan.json       # on a GPU, under two minutes with compiling
    python -m benchmarks.jax_scan --only ours                      # ours, with and without the search for NaN
    python -m benchmarks.jax_scan --only '^ours$' --group 1        # ours alone, its walk from chunk to chunk ungrouped
    python -m benchmarks.jax_scan --toy                            # tiny shapes, to see that it runs

bfloat16, 16 heads of q and k, 32 of v, width 128, g and beta float32 as models compute them. Every contender first
shows its output and gradients on documents of the set (its first, one in the middle, its last, cut to `TOKENS`) against
the float64 reference. MaxText's function and the recurrence know no documents, so they have figures for one document,
and for packed rows an error that says what they make of them. Milliseconds are the fastest of several rounds of
back-to-back calls; memory is what the compiled function allocates beyond arguments and results.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._report import fastest, machine, not_run, table, versions, write_json
from jax_backend import gated_delta_rule
from jax_backend.scan import chunked_scan, delta_rule
from jax_backend.segments import Segments
from packing_core import reference

NAN = float("nan")
GATE = 2e-2  # of the largest value, in bfloat16; a state that leaks shows at a tenth or more
TOKENS = 64  # of a long document's start and end, that are compared with the reference
NAMES = ("q", "k", "v", "g", "beta")
SETS = {
    "one document of 8,192": [8192],
    "8 x 1,024": [1024] * 8,
    "16,384 of mean 240": 16_384,
}
TOY: dict[str, Any] = {"one document of 256": [256], "256 of mean 24": 256}


@dataclass(frozen=True)
class Shape:
    """Heads of q and k, heads of v, and the width of both."""

    key_heads: int = 16
    heads: int = 32
    width: int = 128


@dataclass(frozen=True)
class Row:
    """One packed row: lengths, ids [1, S] and operands in ``NAMES``, with the output's gradient."""

    lengths: list[int]
    ids: jax.Array
    operands: tuple[jax.Array, ...]
    dout: jax.Array


@dataclass
class Result:
    """One contender on one set; a ``status`` other than "ok" says why there are no figures."""

    set: str
    contender: str
    status: str = "ok"
    error: float = NAN
    forward_ms: float = NAN
    both_ms: float = NAN
    memory_mib: float = NAN
    compile_s: float = NAN


def make_row(lengths: list[int] | int, shape: Shape) -> Row:
    """A row of documents; a number stands for so many tokens of log-normal documents, as text has them."""
    draw = np.random.default_rng(0)
    if isinstance(lengths, int):
        left, mean, found = lengths, 240 if lengths > 1000 else 24, []
        while left:
            found.append(min(left, max(1, int(draw.lognormal(np.log(mean) - 0.5, 1.0)))))
            left -= found[-1]
        lengths = found
    tokens = sum(lengths)

    def normal(*tail: int, norm: bool = False) -> jax.Array:
        x = draw.standard_normal((1, tokens, *tail), np.float32)
        return jnp.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True) if norm else x, jnp.bfloat16)

    decay = jnp.asarray(-0.1 * draw.exponential(size=(1, tokens, shape.heads)), jnp.float32)
    beta = jnp.asarray(draw.uniform(size=(1, tokens, shape.heads)), jnp.float32)
    q, k = (normal(shape.key_heads, shape.width, norm=True) for _ in range(2))
    v, dout = (normal(shape.heads, shape.width) for _ in range(2))
    ids = jnp.asarray(np.repeat(np.arange(1, len(lengths) + 1), lengths)[None], jnp.int32)
    return Row(lengths, ids, (q, k, v, decay, beta), dout)


# -- contenders: what is called with (q, k, v, g, beta, ids)


def ours() -> Callable[..., jax.Array]:
    return gated_delta_rule


def without_search() -> Callable[..., jax.Array]:
    """Ours as if every number were finite: what keeping NaN in its own document costs is the difference."""

    def none_broken(segments: Segments, *arrays: jax.Array, first: jax.Array | None = None) -> jax.Array:
        return jnp.zeros(segments.key_begin.shape, bool)

    def run(*operands: jax.Array) -> jax.Array:
        with mock.patch.object(delta_rule, "broken_segments", none_broken):  # read while the function is traced
            return gated_delta_rule(*operands)

    return run


def recurrence() -> Callable[..., jax.Array]:
    """One token after the other, and all of a row as one document."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, ids: jax.Array) -> jax.Array:
        group = v.shape[2] // q.shape[2]
        q, k = (jnp.repeat(x, group, axis=2) for x in (q, k))

        def step(state: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
            q, k, v, g, beta = token
            state = state * jnp.exp(g)[..., None, None]
            error = (v - jnp.einsum("bhde,bhd->bhe", state, k)) * beta[..., None]
            state = state + k[..., None] * error[:, :, None]
            return state, jnp.einsum("bhde,bhd->bhe", state, q)

        tokens = tuple(jnp.moveaxis(x.astype(jnp.float32), 1, 0) for x in (q * q.shape[-1] ** -0.5, k, v, g, beta))
        start = jnp.zeros((v.shape[0], v.shape[2], q.shape[3], v.shape[3]), jnp.float32)
        return jnp.moveaxis(jax.lax.scan(step, start, tokens)[1], 0, 1).astype(v.dtype)

    return run


def maxtext() -> Callable[..., jax.Array]:
    """MaxText's own function, which has as many heads of q and k as of v, and no documents."""
    function = import_module("maxtext.models.qwen3").jax_chunk_gated_delta_rule

    def run(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, ids: jax.Array) -> jax.Array:
        group = v.shape[2] // q.shape[2]
        out: jax.Array = function(jnp.repeat(q, group, axis=2), jnp.repeat(k, group, axis=2), v, g, beta)[0]
        return out

    return run


CONTENDERS: dict[str, Callable[[], Callable[..., jax.Array]]] = {
    "ours": ours,
    "ours, NaN not looked for": without_search,
    "MaxText, chunked": maxtext,
    "jax.lax.scan over tokens": recurrence,
}


# -- measuring


def measure(result: Result, row: Row, rounds: int) -> None:
    """Fill in ``result``."""
    try:
        function = CONTENDERS[result.contender]()

        def both(dout: jax.Array, *operands: Any) -> tuple[jax.Array, ...]:
            *arrays, ids = operands
            out, pullback = jax.vjp(lambda *arrays: function(*arrays, ids), *arrays)
            return out, *pullback(dout.astype(out.dtype))

        given = (*row.operands, row.ids)
        begin = time.perf_counter()
        forward = jax.jit(function).lower(*given).compile()
        training = jax.jit(both).lower(row.dout, *given).compile()
        result.compile_s = time.perf_counter() - begin
        result.memory_mib = training.memory_analysis().temp_size_in_bytes / 2**20
        result.error = error(row, training(row.dout, *given))
        if not result.error <= GATE:
            result.status = f"WRONG: relative error {result.error:.2g}"
            return
        result.forward_ms = fastest(partial(forward, *given), rounds, jax.block_until_ready)
        result.both_ms = fastest(partial(training, row.dout, *given), rounds, jax.block_until_ready)
    except Exception as failure:  # a peer may fail in any way; the table says how
        result.status = not_run(failure)


def error(row: Row, found: tuple[jax.Array, ...]) -> float:
    """The largest distance from the float64 reference, over the largest value, of output and gradients.

    Compared are one head of q and k with its heads of v, at the first and the last `TOKENS` of three documents. The
    reference sees four times as many there; what lies further away the decays have left nothing of.
    """
    group = row.operands[2].shape[2] // row.operands[0].shape[2]
    stops = np.cumsum(row.lengths).tolist()
    worst = 0.0
    for number in sorted({0, len(row.lengths) // 2, len(row.lengths) - 1}):
        length, stop = row.lengths[number], stops[number]
        seen = min(length, 4 * TOKENS)
        compared = slice(None) if seen == length else slice(TOKENS)
        worst = max(worst, _error(row, found, slice(stop - length, stop - length + seen), compared, group))
        if seen < length:
            worst = max(worst, _error(row, found, slice(stop - seen, stop), slice(-TOKENS, None), group))
    return worst


def _error(row: Row, found: tuple[jax.Array, ...], here: slice, compared: slice, group: int) -> float:
    def of_heads(x: jax.Array, heads: int) -> np.ndarray:
        return np.asarray(x[0, here, :heads].astype(jnp.float32), np.float64)

    counts = (1, 1, group, group, group)
    arrays = [of_heads(x, heads) for x, heads in zip(row.operands, counts, strict=True)]
    arrays[:2] = (np.repeat(x, group, axis=1) for x in arrays[:2])
    bounds = [0, len(arrays[0])]
    wanted = {"out": reference.gated_delta_rule(*arrays, bounds)}
    wanted |= reference.gated_delta_rule_vjp(*arrays, bounds, of_heads(row.dout, group))
    worst = 0.0
    for name, x, heads in zip(("out", *NAMES), found, (group, *counts), strict=True):
        exact = wanted[name].sum(axis=1, keepdims=True) if name in "qk" else wanted[name]
        difference = of_heads(x, heads)[compared] - exact[compared]
        worst = max(worst, float(np.abs(difference).max() / np.abs(exact).max()))
    return worst


def line(r: Result) -> list[str]:
    if r.status != "ok":
        return [r.set, r.contender, *["-"] * 5]
    figures = [
        f"{r.forward_ms:.3f}",
        f"{r.both_ms:.3f}",
        f"{r.memory_mib:,.0f}",
        f"{r.compile_s:.0f}",
        f"{r.error:.1e}",
    ]
    return [r.set, r.contender, *figures]


def main(arguments: Sequence[str] | None = None) -> None:
    begin = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PATTERN", help="contenders whose name it matches")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--group", type=int, default=chunked_scan.GROUP, help="chunks in a step of ours")
    parser.add_argument("--seconds", type=float, default=110.0, help="start nothing after this long")
    parser.add_argument("--output", type=Path, help="file for the figures, rewritten after each measurement")
    parser.add_argument("--toy", action="store_true", help="tiny shapes; only to see that everything runs")
    options = parser.parse_args(arguments)
    chunked_scan.GROUP = options.group
    shape = Shape(2, 4, 16) if options.toy else Shape()
    rows = {name: make_row(lengths, shape) for name, lengths in (TOY if options.toy else SETS).items()}
    header = [f"{machine()}; {jax.devices()[0].device_kind}", versions("jax", "jaxlib", "jax-cuda13-plugin", "maxtext")]
    print("\n".join(header), flush=True)
    results: list[Result] = []
    for contender in [name for name in CONTENDERS if re.search(options.only, name)]:
        for name, row in rows.items():
            result = Result(name, contender)
            results.append(result)
            if time.perf_counter() - begin > options.seconds:
                result.status = f"NOT RUN: {options.seconds:.0f} s are over"
            else:
                measure(result, row, options.rounds)
            print(" | ".join(line(result)), "" if result.status == "ok" else result.status, flush=True)
            found = {"header": header, "group": options.group, "results": [asdict(r) for r in results]}
            write_json(options.output, found, begin)
    columns = ["set", "contender", "forward ms", "fwd + bwd ms", "memory MiB", "compile s", "error"]
    print(table(columns, [line(r) for r in results]))
    print(f"{time.perf_counter() - begin:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
