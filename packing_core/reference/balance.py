"""The sequence-wise balance loss of a router, document by document: the oracle for routers' losses in packed rows.

DeepSeek-V3, https://arxiv.org/abs/2412.19437, equations 17 to 20, without their factor alpha. A sequence is a document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from packing_core.errors import LayoutError
from packing_core.reference.arithmetic import Array, WorkingDtype, operands, plain


def sequence_balance(
    scores: npt.ArrayLike, lengths: Sequence[int], chosen: int, *, dtype: WorkingDtype = "float64"
) -> npt.NDArray[np.float64]:
    """``sum_i f_i P_i`` of each document, which is 1 where its tokens are spread evenly.

    ``f_i = E / (K T) sum_t [i is among the K largest scores of t]`` and ``P_i = 1 / T sum_t s_ti / sum_j s_tj``.

    Args:
        scores: ``[T, E]``, above 0: the affinities of each token, a sigmoid or softmax of its logits.
        lengths: tokens of each document, which add up to T.
        chosen: K.
        dtype: working dtype that every operation is rounded to.

    Returns:
        ``[documents]`` float64.

    Raises:
        LayoutError: shapes contradict each other.
    """
    return plain(np.array([(f * s.mean(0)).sum() for _, s, f in _documents(scores, lengths, chosen, dtype)]))


def sequence_balance_vjp(
    scores: npt.ArrayLike, lengths: Sequence[int], chosen: int, dy: npt.ArrayLike, *, dtype: WorkingDtype = "float64"
) -> npt.NDArray[np.float64]:
    """Gradient ``[T, E]`` of ``sum(sequence_balance * dy)`` by the scores; which experts are chosen is constant."""
    (dy_,) = operands(dtype, dy)
    statistics = _documents(scores, lengths, chosen, dtype)
    return plain(
        np.concatenate(
            [g * (f - s @ f[:, None]) / sums / len(s) for g, (sums, s, f) in zip(dy_, statistics, strict=True)]
        )
    )


def _documents(
    scores: npt.ArrayLike, lengths: Sequence[int], chosen: int, dtype: WorkingDtype
) -> Iterator[tuple[Array, Array, Array]]:
    """The sums of each document's scores, the scores divided by them, and ``f``."""
    (scores_,) = operands(dtype, scores)
    if scores_.ndim != 2 or len(scores_) != sum(lengths) or not 0 < chosen <= scores_.shape[1]:
        raise LayoutError(
            f"scores must be [{sum(lengths)}, E] with at least {chosen} experts, got {list(scores_.shape)}"
        )
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        s = scores_[end - length : end]
        best = np.argsort(-s, axis=1, kind="stable")[:, :chosen]
        hits = np.bincount(best.reshape(-1), minlength=s.shape[1])
        sums = s.sum(1, keepdims=True)
        yield sums, s / sums, hits * (s.shape[1] / (chosen * len(s)))
