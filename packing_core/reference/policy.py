"""Policy-gradient losses over groups of sampled documents in float64, one document at a time: the oracle.

Rewards and groups -> advantages [documents]; log-probabilities, a list of one array of trained tokens per document ->
the summed loss and what it is divided by.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from packing_core.errors import PackingError

Float64 = npt.NDArray[np.float64]


def advantages(rewards: npt.ArrayLike, groups: npt.ArrayLike, *, kind: str = "grpo", epsilon: float = 1e-4) -> Float64:
    """``"grpo"`` arXiv:2402.03300 section 4.1.2, ``"dr_grpo"`` arXiv:2503.20783, ``"rloo"`` arXiv:2402.14740 (8).

    Args:
        rewards, groups: [documents]; documents of one group have equal numbers. A reward of NaN is none.

    Raises:
        PackingError: an unknown kind.
    """
    rewards, groups = np.asarray(rewards, np.float64), np.asarray(groups)
    found = np.zeros(len(rewards))
    for d, group in enumerate(groups):
        mine = rewards[(groups == group) & ~np.isnan(rewards)]
        if len(mine) == 1 or np.isnan(rewards[d]):
            continue
        if kind == "grpo":
            found[d] = (rewards[d] - mine.mean()) / (mine.std(ddof=1) + epsilon)
        elif kind == "dr_grpo":
            found[d] = rewards[d] - mine.mean()
        elif kind == "rloo":
            found[d] = rewards[d] - (mine.sum() - rewards[d]) / (len(mine) - 1)
        else:
            raise PackingError(f"kind must be grpo, dr_grpo or rloo; got {kind!r}")
    return found


def loss(
    logprobs: Sequence[Float64],
    old: Sequence[Float64],
    advantages: npt.ArrayLike,
    *,
    reference: Sequence[Float64] | None = None,
    beta: float = 0.0,
    clip: tuple[float, float] = (0.2, 0.2),
    delta: float = np.inf,
    ratio: str = "token",
    per: str = "document",
    max_length: int = 1,
) -> tuple[float, float]:
    """The clipped surrogate with a divergence from a reference, as a sum and its divisor.

    arXiv:1707.06347 equation 7 and arXiv:2402.03300 equation 3; ``ratio="sequence"`` arXiv:2507.18071 equation 7;
    ``per="token"`` arXiv:2503.14476; ``per="constant"`` arXiv:2503.20783; ``delta`` arXiv:2505.07291.

    Args:
        logprobs, old, reference: for each document the log-probabilities of its trained tokens.
        advantages: [documents].
    """
    total, divisor = 0.0, 0.0
    for d, advantage in enumerate(np.asarray(advantages, np.float64)):
        tokens = len(logprobs[d])
        log_ratio = np.asarray(logprobs[d], np.float64) - np.asarray(old[d], np.float64)
        if ratio == "sequence" and tokens:
            log_ratio = np.full(tokens, log_ratio.mean())
        elif ratio == "sequence sum":
            log_ratio = np.full(tokens, log_ratio.sum())
        weight = np.exp(log_ratio)
        clipped = np.clip(weight, 1 - clip[0], 1 + clip[1])
        losses = -np.minimum(np.minimum(weight, delta) * advantage, clipped * advantage)
        if reference is not None:
            above = np.asarray(reference[d], np.float64) - np.asarray(logprobs[d], np.float64)
            losses = losses + beta * (np.exp(above) - above - 1)
        total += float(losses.sum()) / (max(1, tokens) if per == "document" else 1)
        divisor += {"document": 1, "token": tokens, "constant": max_length}[per]
    return total, divisor
