"""Collators that carry the segments of a batch to a patched model.

:class:`PackedCollator` takes documents, or rows of a ``PackedDataset``, and packs them. :class:`BoundaryCollator` wraps
another collator and reads the documents of its batches (``packing_core.batches.marks``). Both return CPU tensors under
the names that Hugging Face models take, and plain Python values that device movers leave alone. A ``PackedDataset`` is
a map-style dataset: ``DataLoader(PackedDataset(...), batch_size=2, collate_fn=PackedCollator(model))``.
"""

from torch_backend.collate.boundary_collator import BoundaryCollator, call_on_copies, with_boundaries
from torch_backend.collate.model_traits import labels_every_token
from torch_backend.collate.packed_collator import FULL, Batch, PackedCollator

__all__ = [
    "FULL",
    "Batch",
    "BoundaryCollator",
    "PackedCollator",
    "call_on_copies",
    "labels_every_token",
    "with_boundaries",
]
