"""The sweep behind ``tiles_for``: each Pallas kernel alone under several tiles, on the sets of ``benchmarks.jax_rows``.

    python -m benchmarks.jax_tiles                                   # bfloat16, 32 heads over 8, width 128
    python -m benchmarks.jax_tiles --heads 14 2 --width 64
    python -m benchmarks.jax_tiles --forward 128,64,8,3 256,64,8,2   # these tiles only: rows, keys, warps, stages

The first line of a kernel is the tile that ``tiles_for`` gives; the others' results are compared with its. Everything
is compiled before anything is timed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._report import fastest
from benchmarks.jax_rows import GATE, GROUPS, SETS, TOY, Row, make_row, request_of
from jax_backend import find_segments
from jax_backend.attention.pallas_backward import grad_keys, grad_queries
from jax_backend.attention.pallas_forward import forward
from jax_backend.attention.pallas_tiles import Tile, heaviest_first, tiles_for
from jax_backend.segments import seeing_queries, visible_keys

CANDIDATES = {
    "forward": ["64,64,4,3", "128,64,8,2", "128,64,8,3", "256,64,8,2"],
    "dq": ["64,64,4,2", "128,64,8,2", "128,64,8,3"],
    "dkv": ["64,64,4,2", "32,64,4,3", "64,128,8,3"],
}


def operands(row: Row) -> dict[str, tuple[Any, ...]]:
    """Prepares the arguments of each kernel before its request and tiles."""
    segments = find_segments(row.ids)
    keys = visible_keys(segments, causal=True, window=None)
    queries = seeing_queries(segments, causal=True, window=None)
    request = request_of(row)
    run = partial(forward, request=request, tiles=tiles_for(request).forward, interpret=request.platform == "cpu")
    out, lse = jax.jit(run)(row.q, row.k, row.v, keys)
    delta = jnp.sum(row.dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    both = row.q, row.k, row.v, row.dout, lse, delta
    return {"forward": (row.q, row.k, row.v, keys), "dq": (*both, keys), "dkv": (*both, queries)}


def compiled(kernel: str, row: Row, tiles: Tile, arguments: tuple[Any, ...]) -> Callable[[], Any] | str:
    """The kernel as a call without arguments, or why this tile does not compile."""
    kernels: dict[str, Callable[..., Any]] = {"forward": forward, "dq": grad_queries, "dkv": grad_keys}
    request = request_of(row)
    if kernel == "dkv":
        arguments = *arguments, heaviest_first(arguments[-1], tiles.keys)
    call = partial(kernels[kernel], request=request, tiles=tiles, interpret=request.platform == "cpu")
    try:
        return partial(jax.jit(call).lower(*arguments).compile(), *arguments)
    except Exception as error:  # a tile may ask for more than the chip has
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"


def difference(found: Any, wanted: Any) -> float:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    flat = [(np.asarray(x, np.float32).ravel(), np.asarray(y, np.float32).ravel()) for x, y in pairs]
    return float(np.max([np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in flat]))  # NaN if one is


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="*", choices=list(SETS))
    parser.add_argument("--heads", nargs=2, type=int, default=(32, 8), metavar=("N", "K"))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--toy", action="store_true", help="tiny shapes; only to see that everything runs")
    for kernel, candidates in CANDIDATES.items():
        parser.add_argument(f"--{kernel}", nargs="*", default=candidates, metavar="R,K,W,S")
    options = parser.parse_args(arguments)
    sets = TOY if options.toy else {name: SETS[name] for name in options.sets or GROUPS["attention"]}
    shape = {"heads": options.heads[0], "kv_heads": options.heads[1], "width": options.width}
    rows = {name: make_row(x if options.toy else replace(x, **shape)) for name, x in sets.items()}
    jobs: list[tuple[str, str, Tile, tuple[Any, ...]]] = []
    for name, row in rows.items():
        chosen = tiles_for(request_of(row))
        for kernel, given in operands(row).items():
            own = getattr(chosen, kernel)
            others = [Tile(*map(int, text.split(","))) for text in getattr(options, kernel)]
            jobs += [(name, kernel, tiles, given) for tiles in dict.fromkeys([own, *others])]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        calls = list(pool.map(lambda job: compiled(job[1], rows[job[0]], *job[2:]), jobs))
    wanted: dict[tuple[str, str], Any] = {}
    for (name, kernel, tiles, _), call in zip(jobs, calls, strict=True):
        if isinstance(call, str):
            print(f"{name:16} {kernel:8} {tiles}: {call}", flush=True)
            continue
        result = call()
        off = difference(result, wanted.setdefault((name, kernel), result))
        figure = f"{fastest(call, 4, jax.block_until_ready):.3f} ms" if off <= GATE else f"WRONG, off by {off:.1e}"
        print(f"{name:16} {kernel:8} {tiles}: {figure}", flush=True)


if __name__ == "__main__":
    main()
