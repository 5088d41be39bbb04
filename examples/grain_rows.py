"""Packed rows in grain: random access with shuffling and sharding by host, and a stream that resumes where it stopped.

Run it: python examples/grain_rows.py
Needs: pip install 'crosspack[jax]'
"""

try:
    import grain
    import numpy as np

    import crosspack
    import jax_backend
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[jax]'") from None

rng = np.random.default_rng(0)
documents = [rng.integers(1, 500, length) for length in rng.integers(5, 200, 400)]

# All lengths are known: rows are planned once, and grain asks for them by number.
rows = grain.MapDataset.source(jax_backend.GrainSource(crosspack.PackedDataset(documents, 512)))
hosts = [rows.shuffle(seed=0)[host::2].batch(4) for host in range(2)]
batch = hosts[0][0]
print(f"{len(rows)} rows, {[len(host) for host in hosts]} batches on two hosts, inputs {batch['inputs'].shape}")

# They are not: a stream packs documents as they come, and grain's iterator carries its state.
stream = jax_backend.GrainStream(lambda: crosspack.stream(documents, 512, buffer=64, seed=0)).batch(4)
iterator = iter(stream)
first = next(iterator)
state = iterator.get_state()
expected = [given["inputs"] for given in iterator]

resumed = iter(stream)
resumed.set_state(state)
same = all(np.array_equal(a, b["inputs"]) for a, b in zip(expected, resumed, strict=True))
print(f"{len(expected)} batches were left, the same as without the stop: {same}")
