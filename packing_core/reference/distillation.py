"""The divergence between two next-token distributions over a vocabulary, in float64: the oracle of distillation."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def divergence(student: npt.ArrayLike, teacher: npt.ArrayLike, *, direction: str = "forward") -> Any:
    """Kullback-Leibler divergence [...] of log-probabilities [..., V] over the whole vocabulary.

    ``"forward"`` is KL(teacher, student) (arXiv:1503.02531), ``"reverse"`` KL(student, teacher) (arXiv:2306.08543).
    """
    p, q = np.asarray(teacher, np.float64), np.asarray(student, np.float64)
    if direction == "reverse":
        p, q = q, p
    return (np.exp(p) * (p - q)).sum(-1)
