"""Measures packing of streams, the fill of their rows, and how evenly planned rows fall on ranks.

    python -m benchmarks.stream

One thread. Documents are views of one array of int32 tokens. One shard makes every row's tokens; with 64 shards each
decides all rows and makes one in 64 of them, as data-parallel training does, so that deciding is what is measured.
"""

from __future__ import annotations

import time
from itertools import islice

import numpy as np

from benchmarks._report import best, machine, table, versions
from benchmarks.plan import MILLION, distributions
from packing_core import Cost, balance, plan, stream

BUFFER = 8192
RANKS = 64


def main() -> None:
    print(machine())
    print(versions("numpy"), end="\n\n")
    streaming()
    one_by_one()
    even_steps()
    balancing()


def streaming(count: int = 200_000, repeat: int = 3) -> None:
    """Documents per second, and the packing efficiency of all rows, the last ones too."""
    lines = []
    for name, lengths, capacity in islice(distributions(count), 2):
        tokens = np.zeros(capacity, np.int32)
        documents = [tokens[:length] for length in lengths.tolist()]
        for shards in (1, RANKS):
            seconds, efficiency = [], 0.0
            for _ in range(repeat):
                begin = time.perf_counter()
                made = rows = 0
                for chunk in stream(documents, capacity, buffer=BUFFER, shard=(0, shards)).chunks():
                    rows += len(chunk)
                    made += int(np.diff(chunk.cu_seqlens).sum())
                seconds.append(time.perf_counter() - begin)
                efficiency = made / (rows * capacity)
            rate = f"{count / min(seconds):,.0f}"
            lines.append(
                [f"{name}, {count:,}", str(shards), rate, f"{made / min(seconds) / 1e6:,.0f}", f"{efficiency:.5f}"]
            )
    print(
        table([f"stream, buffer {BUFFER:,}", "shards", "documents/s", "Mtok/s made", "efficiency"], lines), end="\n\n"
    )


def one_by_one(count: int = 40_000, repeat: int = 2) -> None:
    """Tokens per second of processor time, rows taken one by one and in chunks."""
    name, lengths, capacity = next(iter(distributions(count)))
    tokens = np.zeros(capacity, np.int32)
    documents = [tokens[:length] for length in lengths.tolist()]
    taken = {
        "one by one": lambda: sum(row.n_tokens for row in stream(documents, capacity)),
        "batches of 8": lambda: sum(batch.n_tokens for batch in stream(documents, capacity).batches(8)),
        "chunks": lambda: sum(chunk.n_tokens for chunk in stream(documents, capacity).chunks()),
    }
    rates = {way: lengths.sum() / best(repeat, run, time.process_time) / 1e6 for way, run in taken.items()}
    lines = [[way, f"{rate:,.0f}", f"{rate / rates['chunks']:.2f}"] for way, rate in rates.items()]
    print(table([f"{name}, {count:,}", "Mtok per CPU-second", "to chunks"], lines), end="\n\n")


def even_steps(count: int = 20_000, shards: int = 8) -> None:
    """The slowest shard over the mean, of a stream's rows in random order and under ``equal_cost=True``."""
    lines = []
    for name, lengths, capacity in islice(distributions(count), 2):
        tokens, cost = np.zeros(capacity, np.int32), Cost()
        documents = [tokens[:length] for length in lengths.tolist()]
        for equal in (False, True):
            given = {"lengths": lengths, "seed": 0, "buffer": BUFFER, "equal_cost": equal}
            of_shards = [stream(documents, capacity, shard=(shard, shards), **given) for shard in range(shards)]
            costs = np.array([np.concatenate([cost.of_rows(rows) for rows in of.chunks()]) for of in of_shards])
            costs = costs[:, (costs > 0).all(axis=0)]
            slowest = costs.max(axis=0).sum() / costs.mean(axis=0).sum()
            lines.append([f"{name}, {count:,}", str(equal), f"{costs.shape[1]:,}", f"{slowest:.4f}"])
    print(table([f"stream, {shards} shards", "equal_cost", "rows of each", "slowest / mean"], lines), end="\n\n")


def balancing(repeat: int = 5) -> None:
    """The slowest rank over the mean, of rows in the order of ``balance`` and in the plan's own, which is random."""
    _, lengths, capacity = list(distributions(MILLION))[1]
    rows = plan(lengths, capacity)
    attention = Cost(tokens=0, squares=1)
    lines = []
    for title, cost in (("default cost", Cost()), ("attention alone", attention)):
        costs = cost.of_rows(rows)
        steps = costs[: len(costs) // RANKS * RANKS].reshape(-1, RANKS)
        random = float(steps.max(axis=1).sum() / steps.mean(axis=1).sum())
        for per_step in (1, 4):
            dealt = balance(rows, RANKS, cost=cost, rows_per_step=per_step)
            seconds = best(repeat, lambda c=cost, k=per_step: balance(rows, RANKS, cost=c, rows_per_step=k))
            figures = [f"{seconds * 1e3:.1f}", f"{dealt.imbalance:.4f}", f"{random:.2f}" if per_step == 1 else ""]
            lines.append([f"{title}, {rows.n_rows:,} rows", str(per_step), *figures])
    header = [f"heavy tail, {RANKS} ranks", "rows a step", "ms", "slowest / mean", "random order"]
    print(table(header, lines))


if __name__ == "__main__":
    main()
