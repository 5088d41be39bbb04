"""Keys that an indexer selects inside documents: the oracle of sparse attention over tokens.

For query i and key j of one document, ``j <= i``, the score is (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, eq. 1)

    s_ij = sum_h w_ih relu(q_ih . k_j)

and query i sees the ``top_k`` keys of the largest scores, all of them where there are no more. Of equal scores the
earlier key comes first. Where keys are chosen in blocks (Qwen 4), counted from the document's first token, the mean
of a block stands for it, blocks that end after the query are left out, and query i also sees the keys behind the last
other one, up to itself. The choice has no gradient.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packing_core.errors import PackingError
from packing_core.reference.layout import Boundaries, check_shape
from packing_core.reference.paths import documents


def select(
    q: npt.ArrayLike, k: npt.ArrayLike, weights: npt.ArrayLike, cu_seqlens: Boundaries, *, top_k: int, block: int = 1
) -> npt.NDArray[np.bool_]:
    """Returns whether each query sees each key, as `attention` takes it in ``selected``.

    Args:
        q, k, weights: ``[T, H, D]``, ``[T, D]``, ``[T, H]``, the indexer's queries, keys and weights of its heads.
        cu_seqlens: ``[S+1]`` boundaries of the documents, starting at 0.
        top_k: keys that a query sees at most, or blocks beside its own.
        block: keys of a block.

    Returns:
        bool ``[T, T]``, False between documents.

    Raises:
        LayoutError: shapes or boundaries contradict each other.
        PackingError: ``top_k`` or ``block`` is below 1.
    """
    q, k, weights = _checked(q, k, weights)
    if min(top_k, block) < 1:
        raise PackingError(f"top_k is {top_k} in blocks of {block}: a query sees at least one key")
    tokens = len(q)
    seen = np.zeros((tokens, tokens), np.bool_)
    for document in documents(cu_seqlens, tokens, None):
        places = np.arange(tokens)[document.tokens]
        blocks = places[: len(places) // block * block].reshape(-1, block)
        means = k[blocks].mean(1)
        for at, query in enumerate(places):
            ended = (at + 1) // block
            scores = weights[query] @ np.maximum(q[query] @ means[:ended].T, 0)
            seen[query, blocks[np.argsort(-scores, kind="stable")[:top_k]]] = True
            seen[query, places[ended * block : at + 1]] = True
    return seen


def _checked(q: npt.ArrayLike, k: npt.ArrayLike, weights: npt.ArrayLike) -> tuple[npt.NDArray[np.float64], ...]:
    q, k, weights = (np.asarray(x, np.float64) for x in (q, k, weights))
    check_shape("q", q, (None, None, None), "[T, H, D]")
    tokens, heads, width = q.shape
    check_shape("k", k, (tokens, width), "[T, D]")
    check_shape("weights", weights, (tokens, heads), "[T, H]")
    return q, k, weights
