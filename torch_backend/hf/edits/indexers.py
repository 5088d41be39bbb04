"""Indexers of sparse attention in packed forwards: what they select inside the documents of a row.

Modeling files hand an indexer the hidden states of the row and the attention mask, and what it returns to the attention
function, or through the outputs of a layer to the attention of the next ones. In a packed forward it returns

- int32 [B, S, 0], made of nothing, where no document is longer than its budget: attention is dense then;
- else places of the long documents, as :mod:`torch_backend.ops.attention.selected` makes and takes them.

Layers of Qwen 4 join it to their mask and hand on that alone, so theirs is a :class:`PackedForward` that holds it.

Index queries, keys and weights come from the indexer's own forward, with the products of queries and keys left out: a
TorchFunctionMode sees its calls of ``torch.matmul``. So no rotation, norm or scale of a family is repeated here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from packing_core.errors import UnsupportedModelError
from torch_backend.hf.anatomy.layers import selects
from torch_backend.hf.forward import PackedForward, forward_among
from torch_backend.ops.attention.index_loss import IndexFactors
from torch_backend.ops.attention.selected import LongDocuments, select, select_blocks, select_pooled


def select_inside(indexer: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call of an indexer, which selects inside documents in packed calls."""
    forward = forward_among((*args, *kwargs.values()))
    if forward is None:
        return call(*args, **kwargs)
    joined = selects(indexer) == "pooled blocks"
    if forward.long is None and joined:
        return forward
    if forward.long is None:
        hidden = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        return hidden.new_empty((*hidden.shape[:2], 0), dtype=torch.int32)
    selected, scored = _selected(indexer, call, forward, args, kwargs)
    forward.scored = scored
    return forward.selecting(selected) if joined else selected


@torch.compiler.disable  # each batch has other documents
@torch.no_grad()
def _selected(
    indexer: Any, call: Callable[..., Any], forward: PackedForward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, IndexFactors | None]:
    """Returns what an indexer selects, and what it scored by, with the graph of its weights, if its loss is wanted."""
    long = forward.long
    assert long is not None
    if (kind := selects(indexer)) == "blocks":
        with _Projections(last=1) as seen, suppress(_AllSeen):
            call(*(None if isinstance(x, PackedForward) else x for x in args), **kwargs)
        q, k = seen.q.transpose(1, 2).flatten(0, 1), seen.k.flatten(0, 1)
        return select_blocks(q, k, long, top_k=indexer.topk_blocks, local=indexer.local_blocks), None
    if kind == "pooled blocks":
        return _by_pooled_keys(indexer, long, *args[:2]), None
    nothing = torch.zeros(1, 1, 1, device=long.places.device)  # a mask that hides none of the one key that is left

    def alone(x: Any) -> Any:
        return nothing if isinstance(x, PackedForward) else x.detach() if isinstance(x, Tensor) else x

    with _Projections(trained=forward.index_losses is not None) as seen:
        call(*map(alone, args), **{name: alone(x) for name, x in kwargs.items()})
    if seen.calls != 2:
        raise UnsupportedModelError(
            f"{type(indexer).__name__} multiplies {seen.calls} times, and not its queries by its keys and the weights "
            "of its heads by the products: nothing tells what it selects inside a document"
        )
    with torch.set_grad_enabled(seen.trained):
        q, k, weights = (x.flatten(0, 1) for x in (seen.q, seen.k, seen.weights))
        scored = IndexFactors(q, k, weights * seen.scale.flatten(0, 1)) if seen.trained else None
    return select(q, k, weights, long, top_k=indexer.index_topk), scored


def _by_pooled_keys(indexer: Any, long: LongDocuments, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """As the forward of Qwen 4's indexer, which asks for the blocks of one query after the other."""
    rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
    heads, width, size = indexer.index_n_heads, indexer.index_head_dim, indexer.compress_ratio
    q, keys = indexer.index_qk_proj(hidden).split([heads * width, width], -1)
    q = rotate(indexer.q_layernorm(q.unflatten(-1, (heads, width))), cos=rotation[0], sin=rotation[1], unsqueeze_dim=2)
    keys, cos, sin = (x.flatten(0, 1).index_select(0, long.places) for x in (keys, *rotation))
    pooled = []
    for k, c, s in zip(*(x.split(long.lengths) for x in (keys, cos, sin)), strict=True):
        whole = slice(0, len(k) // size * size)
        means = k[whole].unflatten(0, (-1, size)).float().mean(1).to(k.dtype)
        at = {"cos": c[whole][::size], "sin": s[whole][::size]}
        pooled.append(rotate(indexer.k_layernorm(means).unsqueeze(1), **at).squeeze(1))
    return select_pooled(q.flatten(0, 1), pooled, long, top_k=indexer.block_topk)


class _AllSeen(Exception):
    """The last product of interest was seen; the forward need not go on."""


class _Projections(TorchFunctionMode):
    """Takes the operands of an indexer's two products, queries by keys and weights by what became of these.

    Args:
        last: the product at which the forward ends.
        trained: whether the graph of the operands is kept, although modeling files select without gradients.

    Attributes:
        scale: [B, S, H], what the products of queries and keys were multiplied by.
        q, k, weights: [B, S, H, D], or as the forward has it, [B, S, D], [B, S, H]; q and k as they were before
            ``float()``.
        widened: what ``float()`` made of another dtype, by its address, and that dtype.
    """

    def __init__(self, last: int = 0, *, trained: bool = False) -> None:
        super().__init__()
        self.calls, self.last, self.trained = 0, last, trained
        self.q = self.k = self.weights = self.scale = torch.empty(0)
        self.widened: dict[int, tuple[Tensor, torch.dtype]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.set_grad_enabled(self.trained):
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is not torch.matmul:
            out = func(*args, **(kwargs or {}))
            if func is Tensor.float and args[0].dtype != torch.float32:
                self.widened[out.data_ptr()] = out, args[0].dtype
            return out
        self.calls += 1
        if self.calls == 1:
            dtypes = {self.widened.get(x.data_ptr(), (x, x.dtype))[1] for x in args}
            narrow = dtypes.pop() if len(dtypes) == 1 else args[0].dtype  # of which they have the values
            self.q, self.k = args[0].to(narrow), args[1].squeeze(1).transpose(-1, -2).to(narrow)
            if self.last == 1:
                raise _AllSeen
        else:
            self.weights, self.scale = args[0].squeeze(-2), args[1].squeeze(-1)
        return args[0].new_ones(*args[0].shape[:-1], 1)
