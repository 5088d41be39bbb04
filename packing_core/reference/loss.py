"""Cross-entropy as a pair of sums: the oracle for every packed loss.

A packed loss is a sum over targets and the weight it is divided by, kept apart until all rows, microbatches and ranks
have been added up: a mean of means is wrong as soon as their target counts differ.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packing_core.errors import LayoutError
from packing_core.reference.arithmetic import Array, WorkingDtype, operands, plain
from packing_core.reference.layout import check_shape


def cross_entropy(
    logits: npt.ArrayLike,
    targets: npt.ArrayLike,
    *,
    weights: npt.ArrayLike | None = None,
    ignore_index: int = -100,
    dtype: WorkingDtype = "float64",
) -> tuple[float, float]:
    """Weighted negative log-likelihood: ``sum_t w_t (log sum_v exp(l_tv) - l_t,target)`` over rows that have a target.

    Args:
        logits: ``[T, V]``.
        targets: ``[T]`` the class that row t predicts (already shifted), or ``ignore_index`` for none. Across a segment
            boundary there is no target.
        weights: ``[T]`` weight of each target; default 1.
        ignore_index: the value that marks "no target".
        dtype: working dtype that every operation is rounded to.

    Returns:
        ``(loss_sum, weight_sum)``; the mean loss is their quotient, taken once over everything that is averaged.

    Raises:
        LayoutError: shapes contradict each other, or a target is not a class.
    """
    logits, targets, weights = _checked(logits, targets, weights, ignore_index, dtype)
    rows = np.flatnonzero(targets != ignore_index)
    logits, weights = logits[rows], weights[rows]
    picked = logits[np.arange(rows.size), targets[rows]]
    return float((weights * (log_sum_exp(logits)[:, 0] - picked)).sum()), float(weights.sum())


def cross_entropy_vjp(
    logits: npt.ArrayLike,
    targets: npt.ArrayLike,
    *,
    dloss: float = 1.0,
    weights: npt.ArrayLike | None = None,
    ignore_index: int = -100,
    dtype: WorkingDtype = "float64",
) -> dict[str, npt.NDArray[np.float64]]:
    """The gradient of ``loss_sum * dloss`` for ``logits``: ``dloss * w_t * (softmax(l_t) - one_hot(target_t))``.

    Args:
        dloss: gradient of the loss sum; ``1 / weight_sum`` gives the gradient of the mean.
        logits, targets, weights, ignore_index, dtype: as for `cross_entropy`. Weights are data and get no gradient.

    Returns:
        ``{"logits"}``, ``[T, V]``, 0 in rows without a target.

    Raises:
        LayoutError: shapes contradict each other, or a target is not a class.
    """
    logits, targets, weights = _checked(logits, targets, weights, ignore_index, dtype)
    gradient = np.zeros_like(logits)
    rows = np.flatnonzero(targets != ignore_index)
    probability = np.exp(logits[rows] - log_sum_exp(logits[rows]))
    one_hot = targets[rows, None] == np.arange(logits.shape[1])
    gradient[rows] = (probability - one_hot) * (weights[rows, None] * dloss)
    return {"logits": plain(gradient)}


def log_sum_exp(logits: Array) -> Array:
    """``[T, 1]``; the largest logit comes off first, or exp overflows."""
    largest: Array = logits.max(axis=1, keepdims=True)
    total: Array = np.exp(logits - largest).sum(axis=1, keepdims=True)
    return np.log(total) + largest


def _checked(
    logits: npt.ArrayLike,
    targets: npt.ArrayLike,
    weights: npt.ArrayLike | None,
    ignore_index: int,
    dtype: WorkingDtype,
) -> tuple[Array, Array, Array]:
    (logits,) = operands(dtype, logits)
    targets = checked_targets(logits, targets, ignore_index)
    tokens = len(targets)
    (weights,) = operands(dtype, np.ones(tokens) if weights is None else weights)
    check_shape("weights", weights, (tokens,), "[T]")
    return logits, targets, weights


def checked_targets(logits: Array, targets: npt.ArrayLike, ignore_index: int) -> npt.NDArray[np.int64]:
    """``targets`` ``[T]`` of ``logits`` ``[T, V]``.

    Raises:
        LayoutError: the shapes contradict each other, or a target is not a class.
    """
    check_shape("logits", logits, (None, None), "[T, V]")
    tokens, classes = logits.shape
    targets = np.asarray(targets)
    check_shape("targets", targets, (tokens,), "[T]")
    has_target = targets != ignore_index
    wrong = np.flatnonzero(has_target & ((targets < 0) | (targets >= classes)))
    if wrong.size:
        raise LayoutError(
            f"target {targets[wrong[0]]} of row {wrong[0]} is neither one of {classes} classes nor the ignored "
            f"{ignore_index}: pass ignore_index if another value marks rows without a target"
        )
    return targets
