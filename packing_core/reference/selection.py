"""Keys that an indexer selects inside documents: the oracle of sparse attention over tokens.

For query i and key j of one document, ``j <= i``, the score is (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, eq. 1)

    s_ij = sum_h w_ih relu(q_ih . k_j)

and query i sees the ``top_k`` keys of the largest scores, all of them where there are no more. Of equal scores the
earlier key comes first. The choice has no gradient.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packing_core.errors import PackingError
from packing_core.reference.layout import Boundaries, check_shape
from packing_core.reference.paths import documents


def select(
    q: npt.ArrayLike, k: npt.ArrayLike, weights: npt.ArrayLike, cu_seqlens: Boundaries, *, top_k: int
) -> npt.NDArray[np.bool_]:
    """Returns whether each query sees each key, as `attention` takes it in ``selected``.

    Args:
        q, k, weights: ``[T, H, D]``, ``[T, D]``, ``[T, H]``, the indexer's queries, keys and weights of its heads.
        cu_seqlens: ``[S+1]`` boundaries of the documents, starting at 0.
        top_k: keys that a query sees at most.

    Returns:
        bool ``[T, T]``, False between documents.

    Raises:
        LayoutError: shapes or boundaries contradict each other.
        PackingError: ``top_k`` is below 1.
    """
    q, k, weights = (np.asarray(x, np.float64) for x in (q, k, weights))
    check_shape("q", q, (None, None, None), "[T, H, D]")
    tokens, heads, width = q.shape
    check_shape("k", k, (tokens, width), "[T, D]")
    check_shape("weights", weights, (tokens, heads), "[T, H]")
    if top_k < 1:
        raise PackingError(f"top_k is {top_k}: a query sees at least one key")
    seen = np.zeros((tokens, tokens), np.bool_)
    for document in documents(cu_seqlens, tokens, None):
        places = np.arange(tokens)[document.tokens]
        for at, query in enumerate(places):
            keys = places[: at + 1]
            scores = weights[query] @ np.maximum(q[query] @ k[keys].T, 0)
            seen[query, keys[np.argsort(-scores, kind="stable")[:top_k]]] = True
    return seen
