"""The scores of an indexer in Triton: of keys, of keys that stand for blocks, and of the best key of each block.

Half precision alone: products of its numbers are exact in float32, as they are in plain torch.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from torch_backend.ops.operators import operator, runs_triton, shared_memory
from torch_backend.ops.trial import current_device, in_own_thread, refusal

_TOLERANCE = 1e-3  # products are summed in float32
_LENGTH = 75  # of the trial's document, longer than a tile on small GPUs


def scores_refused(q: Tensor, block: int = 1, *, best: bool = False) -> str | None:
    """Explains why :func:`index_scores`, or :func:`best_scores`, cannot run for such queries; None if it can."""
    if q.dtype not in (torch.bfloat16, torch.float16) or not runs_triton(q):
        return "needs Triton and a GPU, and bfloat16 or float16"
    return _outcome(q.dtype, q.device, q.shape[1], q.shape[2], block, best)


def index_scores(q: Tensor, k: Tensor, weights: Tensor, start: int, block: int = 1) -> Tensor:
    """The scores of queries q [L, H, D] from ``start`` on and keys k [S, D] with weights [L, H]; [L, S].

    In float32, and minus infinity where a key is later; a key of a block where the end of its block is.
    """
    return _index_scores(q.contiguous(), k.contiguous(), weights.float().t().contiguous(), start, block)


def best_scores(q: Tensor, k: Tensor, start: int, block: int) -> Tensor:
    """The largest product of a query and a key of each block, in float32: q [L, H, D], k [S, D]; [L, H, blocks].

    Later keys do not count, and blocks of such alone are minus infinity.
    """
    return _best_scores(q.contiguous(), k.contiguous(), start, block)


def _launch_scores(q: Tensor, k: Tensor, weights: Tensor, start: int, block: int) -> Tensor:
    from torch_backend.ops.attention import selected_kernels as kernels

    scores, (rows, options) = _score_outputs(q, k), _tiles(q)
    grid = -(-len(q) // rows), -(-len(k) // rows)
    kernels.index_scores[grid](q, k, weights, scores, start, len(q), len(k), SIZE=block, **options)
    return scores


def _launch_best(q: Tensor, k: Tensor, start: int, block: int) -> Tensor:
    from torch_backend.ops.attention import selected_kernels as kernels

    scores, (rows, options) = _best_outputs(q, k, start, block), _tiles(q)
    grid = -(-len(q) // rows), scores.shape[2], q.shape[1]
    kernels.best_scores[grid](q, k, scores, start, len(q), len(k), SIZE=block, **options)
    return scores


def _tiles(q: Tensor) -> tuple[int, dict[str, Any]]:
    (_, heads, width), large = q.shape, shared_memory(q.device) >= 200 * 1024
    rows = 128 if large else 32
    options = {"HEADS": heads, "HEAD_DIM": width, "BLOCK_D": max(16, 1 << (width - 1).bit_length())}
    return rows, options | {"BLOCK_M": rows, "BLOCK_N": rows, "num_warps": 8 if large else 4, "num_stages": 3}


def _score_outputs(q: Tensor, k: Tensor, *_: Any) -> Tensor:
    return q.new_empty(len(q), len(k), dtype=torch.float32)


def _best_outputs(q: Tensor, k: Tensor, start: int, block: int) -> Tensor:
    return q.new_empty(*q.shape[:2], -(-len(k) // block), dtype=torch.float32)


_index_scores = operator(
    "index_scores(Tensor q, Tensor k, Tensor weights, int start, int block) -> Tensor", _launch_scores, _score_outputs
)
_best_scores = operator("best_scores(Tensor q, Tensor k, int start, int block) -> Tensor", _launch_best, _best_outputs)


@cache
def _outcome(*configuration: Any) -> str | None:
    return refusal(partial(_errors, *configuration), _TOLERANCE)


@in_own_thread
def _errors(dtype: torch.dtype, device: torch.device, heads: int, width: int, block: int, best: bool) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    shapes = (_LENGTH, heads, width), (_LENGTH, width), (_LENGTH, heads)
    q, k, weights = (
        torch.randn(shape, generator=generator).to(device, dtype)[10 * (i != 1) :] for i, shape in enumerate(shapes)
    )
    query, key = (torch.arange(n, _LENGTH, device=device) for n in (10, 0))
    with current_device(device), torch.no_grad():
        products = torch.einsum("ihd,jd->ihj", q.float(), k.float())
        if best:
            scores = best_scores(q, k, 10, block)
            products = products.masked_fill((key > query[:, None])[:, None], float("-inf"))
            right = torch.stack([part.amax(-1) for part in products.split(block, -1)], -1)
        else:
            scores = index_scores(q, k, weights, 10, block)
            right = torch.einsum("ihj,ih->ij", products.relu(), weights.float())
            right = right.masked_fill((key + 1) * block > query[:, None] + 1, float("-inf"))
        hidden = right == float("-inf")
        wrong = (hidden != (scores == float("-inf"))).sum()
        scores, right = (x.masked_fill(hidden, 0) for x in (scores, right))
        return [float(wrong), float((scores - right).abs().max() / right.abs().max().clamp(min=1e-6))]
