"""Batches under the names that MaxText's train step reads, with targets that cross no boundary.

Run it: python examples/maxtext_keys.py
Needs: pip install 'crosspack[jax]'
"""

try:
    import grain

    import crosspack
    import jax_backend
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[jax]'") from None

documents = [[11, 12, 13, 14, 15], [21, 22, 23], [31, 32, 33, 34], [41, 42]]
batch = crosspack.pack(documents, 8, seed=None)
given = batch.to_dict("maxtext")
for name, values in given.items():
    print(f"{name:22} {values.dtype} {values.tolist()}")

# MaxText counts a target where targets_segmentation is not 0: not at the last token of a document, and not in padding.
trained = [
    (int(token), int(target))
    for token, target, segment in zip(
        given["inputs"].flat, given["targets"].flat, given["targets_segmentation"].flat, strict=True
    )
    if segment
]
print(f"trained pairs: {trained}")
print(f"within documents alone: {all(target == token + 1 for token, target in trained)}")

# The same from a grain pipeline, as MaxText's data loading builds one.
dataset = crosspack.PackedDataset(documents, 8, seed=None)
loader = grain.MapDataset.source(jax_backend.GrainSource(dataset, "maxtext")).batch(2)
print(f"from grain: {sorted(loader[0])}")
