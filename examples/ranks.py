"""Packing for several ranks with numpy alone: a planned data set divided by cost, and a stream that resumes anywhere.

Run it: python examples/ranks.py
Needs: pip install crosspack
"""

try:
    import numpy as np

    import crosspack
except ImportError as error:
    raise SystemExit(f"{error}: pip install crosspack") from None

RANKS = 4
rng = np.random.default_rng(0)
documents = [rng.integers(1, 32_000, int(n)) for n in rng.lognormal(6.0, 1.3, 2_000).clip(2, 8192)]

# All lengths are known: plan once, then deal rows so that no rank waits long for another.
packed = crosspack.plan([len(document) for document in documents], 8192)
dealt = crosspack.balance(packed, RANKS, cost=crosspack.Cost(tokens=1, squares=1e-4))
print(f"{packed.n_rows} rows, efficiency {packed.efficiency:.1%}, slowest rank over mean {dealt.imbalance:.3f}")

# Lengths are not known: every rank packs the same stream and takes its own rows.
streams = [crosspack.stream(documents, 8192, buffer=512, seed=0, shard=(rank, RANKS)) for rank in range(RANKS)]
first = [next(rows) for rows in streams]
print(f"first row of each rank: {[row.n_segments for row in first]} documents")

# The job is stopped and started again on half the ranks: the remaining rows are the same ones.
state = streams[0].state_dict()
resumed = [crosspack.stream(documents, 8192, buffer=512, seed=0, shard=(rank, 2)) for rank in range(2)]
for rows in resumed:
    rows.load_state_dict(state)
rest = sorted(int(row.sources.min()) for rows in resumed for row in rows if row.n_segments)
expected = sorted(int(row.sources.min()) for rows in streams for row in rows if row.n_segments)
print(f"{len(rest)} rows were left, the same as without the stop: {rest == expected}")
