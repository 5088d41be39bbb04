"""Log-probabilities of targets, the entropy of their distributions, and cross-entropy: the oracle of every packed loss.

A packed loss is a sum over targets and the weight it is divided by, kept apart until all rows, microbatches and ranks
have been added up: a mean of means is wrong as soon as their target counts differ.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packing_core.errors import LayoutError
from packing_core.reference.arithmetic import Array, WorkingDtype, log_softmax, operands, plain
from packing_core.reference.layout import check_shape
from packing_core.storage.arrays import Float64, Int64


def cross_entropy(
    logits: npt.ArrayLike,
    targets: npt.ArrayLike,
    *,
    weights: npt.ArrayLike | None = None,
    ignore_index: int = -100,
    dtype: WorkingDtype = "float64",
) -> tuple[float, float]:
    """Weighted negative log-likelihood: ``-sum_t w_t log p_t(target)`` over rows that have a target.

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
    log_p, rows, targets = _log_softmax(logits, targets, 1.0, ignore_index, dtype)
    weights = _weights(weights, len(targets), dtype)[rows]
    picked = log_p[np.arange(rows.size), targets[rows]]
    return float(-(weights * picked).sum()), float(weights.sum())


def cross_entropy_vjp(
    logits: npt.ArrayLike,
    targets: npt.ArrayLike,
    *,
    dloss: float = 1.0,
    weights: npt.ArrayLike | None = None,
    ignore_index: int = -100,
    dtype: WorkingDtype = "float64",
) -> dict[str, Float64]:
    """The gradient of ``loss_sum * dloss`` for ``logits``: ``dloss * w_t * (softmax(l_t) - one_hot(target_t))``.

    Args:
        dloss: gradient of the loss sum; ``1 / weight_sum`` gives the gradient of the mean.
        logits, targets, weights, ignore_index, dtype: as for `cross_entropy`. Weights are data and get no gradient.

    Returns:
        ``{"logits"}``, ``[T, V]``, 0 in rows without a target.
    """
    dlogprobs = -_weights(weights, len(np.asarray(logits)), dtype) * dloss
    return token_logprobs_vjp(logits, targets, dlogprobs, ignore_index=ignore_index, dtype=dtype)


def token_logprobs(
    logits: npt.ArrayLike,
    targets: npt.ArrayLike,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    dtype: WorkingDtype = "float64",
) -> tuple[Float64, Float64]:
    """``x_target - log sum_v exp(x_v)`` with ``x = logits / temperature``, and ``-sum_v p_v log p_v``.

    Args:
        logits, targets, ignore_index, dtype: as for `cross_entropy`.

    Returns:
        ``[T]`` and ``[T]``, 0 in rows without a target.

    Raises:
        LayoutError: shapes contradict each other, or a target is not a class.
    """
    log_p, rows, targets = _log_softmax(logits, targets, temperature, ignore_index, dtype)
    logprobs, entropy = np.zeros(len(targets)), np.zeros(len(targets))
    logprobs[rows] = plain(log_p[np.arange(rows.size), targets[rows]])
    entropy[rows] = plain(-(np.exp(log_p) * log_p).sum(axis=1))
    return logprobs, entropy


def token_logprobs_vjp(
    logits: npt.ArrayLike,
    targets: npt.ArrayLike,
    dlogprobs: npt.ArrayLike,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    dtype: WorkingDtype = "float64",
) -> dict[str, Float64]:
    """The gradient of ``sum_t dlogprobs_t logprobs_t`` for ``logits``: ``(one_hot(target) - softmax) / temperature``.

    Args:
        logits, targets, temperature, ignore_index, dtype: as for `token_logprobs`.
        dlogprobs: ``[T]``.

    Returns:
        ``{"logits"}``, ``[T, V]``, 0 in rows without a target.
    """
    log_p, rows, targets = _log_softmax(logits, targets, temperature, ignore_index, dtype)
    (dlogprobs,) = operands(dtype, dlogprobs)
    one_hot = targets[rows, None] == np.arange(log_p.shape[1])
    gradient = np.zeros((len(targets), log_p.shape[1]))
    gradient[rows] = plain((one_hot - np.exp(log_p)) * (dlogprobs[rows, None] / temperature))
    return {"logits": gradient}


def _weights(weights: npt.ArrayLike | None, tokens: int, dtype: WorkingDtype) -> Array:
    (checked,) = operands(dtype, np.ones(tokens) if weights is None else weights)
    check_shape("weights", checked, (tokens,), "[T]")
    return checked


def _log_softmax(
    logits: npt.ArrayLike, targets: npt.ArrayLike, temperature: float, ignore_index: int, dtype: WorkingDtype
) -> tuple[Array, Int64, Int64]:
    """Log-probabilities of the rows that have a target, which rows these are, and the targets."""
    (logits,) = operands(dtype, logits)
    check_shape("logits", logits, (None, None), "[T, V]")
    tokens, classes = logits.shape
    targets = np.asarray(targets)
    check_shape("targets", targets, (tokens,), "[T]")
    rows = np.flatnonzero(targets != ignore_index)
    wrong = rows[(targets[rows] < 0) | (targets[rows] >= classes)]
    if wrong.size:
        raise LayoutError(
            f"target {targets[wrong[0]]} of row {wrong[0]} is neither one of {classes} classes nor the ignored "
            f"{ignore_index}: pass ignore_index if another value marks rows without a target"
        )
    return log_softmax(logits[rows] / temperature), rows, targets
