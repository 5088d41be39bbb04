"""Losses over pairs of documents, or documents with a verdict, in float64: the oracle for every packed preference loss.

Each function takes one number per pair or per document and returns one loss per pair or per document. Sources of the
formulas are beside each one. The divisor is the number of pairs (documents for KTO) of a whole step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from packing_core.errors import PackingError

Float64 = npt.NDArray[np.float64]


def dpo(
    chosen: npt.ArrayLike,
    rejected: npt.ArrayLike,
    reference_chosen: npt.ArrayLike = 0.0,
    reference_rejected: npt.ArrayLike = 0.0,
    *,
    beta: float = 0.1,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> Float64:
    """Losses [pairs] of log-probabilities [pairs]; references of 0 make it reference-free.

    ``"sigmoid"`` arXiv:2305.18290 equation 7, ``"hinge"`` arXiv:2305.10425, ``"ipo"`` arXiv:2310.12036 equation 17,
    ``"robust"`` arXiv:2403.00409 equation 12.

    Raises:
        PackingError: an unknown kind.
    """
    log_ratio_chosen = np.asarray(chosen, np.float64) - np.asarray(reference_chosen, np.float64)
    log_ratio_rejected = np.asarray(rejected, np.float64) - np.asarray(reference_rejected, np.float64)
    margin = log_ratio_chosen - log_ratio_rejected
    right, flipped = softplus(-beta * margin), softplus(beta * margin)
    losses: dict[str, Any] = {
        "sigmoid": (1 - label_smoothing) * right + label_smoothing * flipped,
        "hinge": np.maximum(0.0, 1 - beta * margin),
        "ipo": (margin - 0.5 / beta) ** 2,
        "robust": ((1 - label_smoothing) * right - label_smoothing * flipped) / (1 - 2 * label_smoothing),
    }
    if kind not in losses:
        raise PackingError(f"kind must be one of {', '.join(losses)}; got {kind!r}")
    return np.asarray(losses[kind])


def orpo(chosen: npt.ArrayLike, rejected: npt.ArrayLike, *, beta: float = 0.1) -> Float64:
    """Losses [pairs] of mean log-probabilities [pairs] (arXiv:2403.07691 equations 4, 6 and 7)."""
    p, q = np.exp(np.asarray(chosen, np.float64)), np.exp(np.asarray(rejected, np.float64))
    odds_ratio = (p / (1 - p)) / (q / (1 - q))
    return np.asarray(-np.log(p) + beta * softplus(-np.log(odds_ratio)))


def simpo(
    chosen: npt.ArrayLike,
    rejected: npt.ArrayLike,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
) -> Float64:
    """Losses [pairs] of mean log-probabilities [pairs] (arXiv:2405.14734 equation 6)."""
    margin = beta * np.asarray(chosen, np.float64) - beta * np.asarray(rejected, np.float64) - gamma
    return np.asarray((1 - label_smoothing) * softplus(-margin) + label_smoothing * softplus(margin))


def kto(
    policy: npt.ArrayLike,
    reference: npt.ArrayLike,
    desirable: npt.ArrayLike,
    baseline: float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float64:
    """Losses [documents] of log-probabilities [documents] (arXiv:2402.01306 equation 8)."""
    reward = np.asarray(policy, np.float64) - np.asarray(reference, np.float64)
    value = np.where(desirable, sigmoid(beta * (reward - baseline)), sigmoid(beta * (baseline - reward)))
    return np.asarray(np.where(desirable, desirable_weight, undesirable_weight) * (1 - value))


def kto_baseline(policy: npt.ArrayLike, reference: npt.ArrayLike) -> float:
    """The mean of ``policy - reference`` over mismatched documents, at least 0 (arXiv:2402.01306 section 4.1)."""
    return max(0.0, float(np.mean(np.asarray(policy, np.float64) - np.asarray(reference, np.float64))))


def reward(
    chosen: npt.ArrayLike, rejected: npt.ArrayLike, *, margin: npt.ArrayLike = 0.0, center_coefficient: float = 0.0
) -> Float64:
    """Losses [pairs] of scores [pairs] (arXiv:2203.02155 equation 1, arXiv:2307.09288 equation 2)."""
    chosen, rejected = np.asarray(chosen, np.float64), np.asarray(rejected, np.float64)
    difference = chosen - rejected - np.asarray(margin, np.float64)
    return np.asarray(softplus(-difference) + center_coefficient * (chosen + rejected) ** 2)


def softplus(x: npt.ArrayLike) -> Any:
    """``log(1 + exp(x)) = -log sigmoid(-x)``, which never overflows."""
    return np.logaddexp(0.0, x)


def sigmoid(x: npt.ArrayLike) -> Any:
    """``1 / (1 + exp(-x))``."""
    return np.exp(-softplus(-np.asarray(x, np.float64)))
