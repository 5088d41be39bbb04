"""Log-probabilities of targets and the entropy of their distributions: the oracle of losses over documents."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packing_core.reference.arithmetic import WorkingDtype, operands, plain
from packing_core.reference.loss import checked_targets, log_sum_exp

Float64 = npt.NDArray[np.float64]


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
        logits: ``[T, V]``.
        targets: ``[T]`` the class that row t predicts, or ``ignore_index`` for none.

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


def _log_softmax(
    logits: npt.ArrayLike, targets: npt.ArrayLike, temperature: float, ignore_index: int, dtype: WorkingDtype
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Log-probabilities of the rows that have a target, which rows these are, and the targets."""
    (logits,) = operands(dtype, logits)
    targets = checked_targets(logits, targets, ignore_index)
    rows = np.flatnonzero(targets != ignore_index)
    x = logits[rows] / temperature
    return x - log_sum_exp(x), rows, targets
