"""Indexers of DeepSeek's sparse attention in packed forwards: what they select inside the documents of a row.

Modeling files hand an indexer the hidden states of the row and the attention mask, and what it returns to the attention
function, or through the outputs of a layer to the attention of the next ones. In a packed forward it returns

- int32 [B, S, 0], made of nothing, where no document is longer than its budget: attention is dense then;
- else int32 [N, top_k], as :func:`torch_backend.ops.attention.selected.select` makes it of the long documents.

Index queries, keys and weights come from the indexer's own forward, with the products of queries and keys left out: a
TorchFunctionMode sees its two calls of ``torch.matmul``. So no rotation, norm or scale of a family is repeated here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from packing_core.errors import UnsupportedModelError
from torch_backend.hf.anatomy.families import INDEXERS
from torch_backend.hf.edits.override import override
from torch_backend.hf.forward import PackedForward, forward_among
from torch_backend.ops.attention.selected import LongDocuments, select


def find_indexers(decoder: nn.Module) -> list[nn.Module]:
    """The indexers inside a decoder, known by the names of their classes."""
    return [m for m in decoder.modules() if any(c.__name__ in INDEXERS for c in type(m).__mro__)]


def override_indexer(indexer: nn.Module) -> None:
    """Make an indexer select inside documents in packed forwards."""
    override(indexer, _forward)


def _forward(indexer: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    forward = forward_among((*args, *kwargs.values()))
    if forward is None:
        return call(*args, **kwargs)
    if forward.long is None:
        hidden = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        return hidden.new_empty((*hidden.shape[:2], 0), dtype=torch.int32)
    return _selected(indexer, call, forward.long, args, kwargs)


@torch.compiler.disable  # each batch has other documents
@torch.no_grad()
def _selected(
    indexer: Any, call: Callable[..., Any], long: LongDocuments, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    nothing = torch.zeros(1, 1, 1, device=long.places.device)  # a mask that hides none of the one key that is left
    args = tuple(nothing if isinstance(x, PackedForward) else x for x in args)
    kwargs = {name: nothing if isinstance(x, PackedForward) else x for name, x in kwargs.items()}
    with _Projections() as seen:
        call(*args, **kwargs)
    if seen.calls != 2:
        raise UnsupportedModelError(
            f"{type(indexer).__name__} multiplies {seen.calls} times, and not its queries by its keys and the weights "
            "of its heads by the products: nothing tells what it selects inside a document"
        )
    q, k, weights = (x.flatten(0, 1) for x in (seen.q, seen.k, seen.weights))
    return select(q, k, weights, long, top_k=indexer.index_topk)


class _Projections(TorchFunctionMode):
    """Takes the operands of an indexer's two products, queries by keys and weights by what became of these.

    Attributes:
        q, k, weights: [B, S, H, D], [B, S, D], [B, S, H].
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.q = self.k = self.weights = torch.empty(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.matmul:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        if self.calls == 1:
            self.q, self.k = args[0], args[1].squeeze(1).transpose(-1, -2)
        else:
            self.weights = args[0].squeeze(-2)
        return args[0].new_zeros(*args[0].shape[:-1], 1)
