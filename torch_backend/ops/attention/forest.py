"""Attention of segments that continue others, by an implementation that knows documents alone.

    q, k, v of a forest -> the path from a root to each segment as a document of its own -> the implementation
                        -> the output of each segment, taken from the document that ends with it

So nothing that comes after a segment, not even a NaN, reaches it. The gradient of a shared key is the sum over its
documents, made in float32. Attention itself costs a little more than without sharing, since every shared segment is a
document too; everything around it runs on the shared tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packing_core.storage.forest import lineage, offsets
from packing_core.storage.segment_indexing import indexes
from torch_backend.ops.attention.request import AttentionRequest
from torch_backend.ops.repeated import repeated
from torch_backend.segments import PackedMetadata, host_lengths, to_device


@dataclass(frozen=True, eq=False)
class WholePaths:
    """The paths to all segments of a forest, one after the other.

    Attributes:
        packed: their boundaries, of T' tokens.
        gather: int64 [T'] the token of the forest at each place.
        places: int64 [T] the place of each token of the forest in the path that ends with its segment.
    """

    packed: PackedMetadata
    gather: Tensor
    places: Tensor


def documents(packed: PackedMetadata) -> WholePaths:
    """The documents of segments with parents, made once per batch."""
    return packed.derived("documents of a forest", _documents)


def _documents(packed: PackedMetadata) -> WholePaths:
    lengths, parents = np.array(host_lengths(packed)), np.array(packed.parents)
    starts = np.cumsum(lengths) - lengths
    paths = [lineage(parents, segment) for segment in range(len(parents))]
    segments = np.concatenate(paths)
    gather = indexes(starts[segments], lengths[segments])
    of_path = offsets(parents, lengths) + lengths
    places = indexes(np.cumsum(of_path) - lengths, lengths)
    made = PackedMetadata.from_lengths(of_path.tolist(), device=packed.device)
    gather_, places_ = (to_device(torch.from_numpy(x), packed.device) for x in (gather, places))
    return WholePaths(made, gather_, places_)


def over_documents(
    run: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedMetadata,
    request: AttentionRequest,
    **options: Any,
) -> Tensor:
    """``run(q, k, v, packed, request, **options)`` of a forest, where ``run`` knows documents alone."""
    found = documents(packed)
    q, k, v = (repeated(x, found.gather) for x in (q, k, v))
    alone = replace(
        request,
        tokens=found.packed.tokens,
        segments=len(found.packed.cu_seqlens) - 1,
        max_seqlen=found.packed.max_seqlen,
        host_lengths=True,
        parents=False,
    )
    return run(q, k, v, found.packed, alone, **options).index_select(0, found.places)
