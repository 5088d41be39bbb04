"""Keys that an indexer selects inside documents: the oracle of sparse attention over tokens, and of the indexer's loss.

For query i and key j of one document, ``j <= i``, the score is (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, eq. 1)

    s_ij = sum_h w_ih relu(q_ih . k_j)

and query i sees the ``top_k`` keys of the largest scores, all of them where there are no more. Of equal scores the
earlier key comes first. Where keys are chosen in blocks (Qwen 4), counted from the document's first token, the mean
of a block stands for it, blocks that end after the query are left out, and query i also sees the keys behind the last
other one, up to itself. The choice has no gradient.

The indexer trains by a loss of its own (eq. 4). With t_ij, the attention of all heads to a selected key j, divided by
the sum over these keys, it is for each document the mean over its queries i of

    l_i = sum_j t_ij (log t_ij - log softmax_j(s_ij))       over selected keys j

which has no gradient by way of t.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from packing_core.errors import PackingError
from packing_core.reference.arithmetic import Array, WorkingDtype, log_softmax, operands, plain
from packing_core.reference.attention import attention
from packing_core.reference.layout import Boundaries, check_shape, documents


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
    q, k, weights = _checked("float64", q, k, weights)
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


def index_loss(
    index_q: npt.ArrayLike,
    index_k: npt.ArrayLike,
    index_weights: npt.ArrayLike,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    cu_seqlens: Boundaries,
    *,
    selected: npt.NDArray[np.bool_],
    dtype: WorkingDtype = "float64",
) -> npt.NDArray[np.float64]:
    """The loss of an indexer in each document.

    Args:
        index_q, index_k, index_weights: ``q``, ``k`` and ``weights`` of `select`.
        q, k: ``[T, H, D]``, ``[T, K, D]`` of attention.
        cu_seqlens: ``[S+1]`` boundaries of the documents, starting at 0; none of them is empty.
        selected: ``[T, T]``, as `select` returns it.
        dtype: working dtype that every operation is rounded to.

    Returns:
        ``[S]``.

    Raises:
        LayoutError: shapes or boundaries contradict each other.
    """
    index = _checked(dtype, index_q, index_k, index_weights)
    attended = _attended(q, k, cu_seqlens, selected, dtype)
    losses = []
    for document in documents(cu_seqlens, len(index[0]), None):
        terms = [
            (wanted * (np.log(np.where(wanted > 0, wanted, 1)) - log_choice)).sum()
            for _, _, _, log_choice, wanted in _queries(document.tokens, index, attended, selected)
        ]
        losses.append(operands(dtype, terms)[0].sum() / len(terms))
    return plain(np.array(losses))


def index_loss_vjp(
    index_q: npt.ArrayLike,
    index_k: npt.ArrayLike,
    index_weights: npt.ArrayLike,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    cu_seqlens: Boundaries,
    dout: npt.ArrayLike,
    *,
    selected: npt.NDArray[np.bool_],
    dtype: WorkingDtype = "float64",
) -> dict[str, npt.NDArray[np.float64]]:
    """The gradients of ``(index_loss * dout).sum()``, dout ``[S]``: ``{"index_q", "index_k", "index_weights"}``."""
    index = _checked(dtype, index_q, index_k, index_weights)
    attended = _attended(q, k, cu_seqlens, selected, dtype)
    (douts,) = operands(dtype, dout)
    paths = list(documents(cu_seqlens, len(index[0]), None))
    check_shape("dout", douts, (len(paths),), "[S]")
    dq, dk, dweights = (np.zeros_like(x) for x in index)
    for number, document in enumerate(paths):
        for query, keys, products, log_choice, wanted in _queries(document.tokens, index, attended, selected):
            of_scores = (np.exp(log_choice) - wanted) * (douts[number] / len(document.tokens))
            of_products = of_scores[:, None] * (index[2][query] * (products > 0))
            dweights[query] = of_scores @ np.maximum(products, 0)
            dq[query] = of_products.T @ index[1][keys]
            dk[keys] += of_products @ index[0][query]
    return {"index_q": plain(dq), "index_k": plain(dk), "index_weights": plain(dweights)}


def _attended(
    q: npt.ArrayLike, k: npt.ArrayLike, cu_seqlens: Boundaries, selected: npt.NDArray[np.bool_], dtype: WorkingDtype
) -> Array:
    """``[T, T]``, the attention to selected keys, added up over heads."""
    one = np.eye(len(selected))[:, None].repeat(np.shape(k)[1], 1)
    (by_head,) = operands(dtype, attention(q, k, one, cu_seqlens, selected=selected, dtype=dtype))
    total: Array = by_head.sum(1)
    return total


def _queries(
    tokens: npt.NDArray[np.int64], index: tuple[Array, ...], attended: Array, selected: npt.NDArray[np.bool_]
) -> Iterator[tuple[int, npt.NDArray[np.int64], Array, Array, Array]]:
    """Yields each query, its keys [n], their products [n, H], log softmax of the scores, and the target [n]."""
    q, k, weights = index
    for query in tokens:
        (keys,) = selected[query].nonzero()
        products = k[keys] @ q[query].T
        scores = np.maximum(products, 0) @ weights[query]
        wanted = attended[query, keys]
        yield query, keys, products, log_softmax(scores), wanted / wanted.sum()


def _checked(
    dtype: WorkingDtype, q: npt.ArrayLike, k: npt.ArrayLike, weights: npt.ArrayLike
) -> tuple[Array, Array, Array]:
    q, k, weights = operands(dtype, q, k, weights)
    check_shape("q", q, (None, None, None), "[T, H, D]")
    tokens, heads, width = q.shape
    check_shape("k", k, (tokens, width), "[T, D]")
    check_shape("weights", weights, (tokens, heads), "[T, H]")
    return q, k, weights
