"""Attention of segments that continue others, by an implementation that knows documents alone.

    q, k, v of a forest -> the path from a root to each segment as a document of its own -> the implementation
                        -> the output of each segment, taken from the document that ends with it

So nothing that comes after a segment, not even a NaN, reaches it. Attention itself costs a little more than without
sharing, since every shared segment is a document too; everything around it runs on the shared tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from torch_backend.ops.attention.request import AttentionInputs, AttentionRequest
from torch_backend.ops.forests import documents
from torch_backend.ops.repeated import repeated


def over_documents(
    run: Callable[[AttentionInputs, AttentionRequest], Tensor], inputs: AttentionInputs, request: AttentionRequest
) -> Tensor:
    """``run(inputs, request)`` of a forest, where ``run`` knows documents alone."""
    forest = documents(inputs.packed)
    q, k, v = (repeated(x, forest.gather) for x in inputs[:3])
    alone = replace(
        request,
        tokens=forest.packed.tokens,
        segments=len(forest.packed.cu_seqlens) - 1,
        max_seqlen=forest.packed.max_seqlen,
        host_lengths=True,
        parents=False,
    )
    return run(inputs._replace(q=q, k=k, v=v, packed=forest.packed), alone).index_select(0, forest.places)
