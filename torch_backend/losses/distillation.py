"""Distillation: the divergence of a student's next-token distribution from a teacher's, token by token.

The teacher's most likely ids and their log-probabilities (``token_logprobs(teacher, batch, top_k=K)``), the student's
log-probabilities at the same ids (``token_logprobs(student, batch, candidates=ids)``) -> one divergence per token. Both
run on the same packed rows, and neither ever holds [tokens, vocabulary]. Sum the trained tokens, and divide once by
their number over all micro-batches and ranks (:func:`torch_backend.losses.cross_entropy.normalise`).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from packing_core.errors import LayoutError, PackingError


def distillation_loss(
    student: Tensor, teacher: Tensor, *, direction: Literal["forward", "reverse"] = "forward"
) -> Tensor:
    """Kullback-Leibler divergence over K ids and one bucket for all others, per token; to be divided by the tokens.

    ``"forward"``: ``sum_v p_teacher (log p_teacher - log p_student)`` (Hinton et al. 2015, arXiv:1503.02531);
    ``"reverse"``: with the two exchanged (Gu et al. 2023, arXiv:2306.08543). All ids that are not among the K are one
    event, so the result is a lower bound of the divergence over the vocabulary (data processing inequality), and equal
    to it if the K ids are the vocabulary.

    Args:
        student, teacher: [..., K] log-probabilities of the same ids, no id twice. The teacher gets no gradient.

    Returns:
        [...], float32 at least; 0 where both are zeros, as they are where nothing is trained.

    Raises:
        LayoutError: the shapes differ.
    """
    if direction not in ("forward", "reverse"):
        raise PackingError(f"direction must be 'forward' or 'reverse', got {direction!r}")
    if student.shape != teacher.shape or student.ndim < 1:
        raise LayoutError(
            f"student and teacher must be [..., K] of the same ids: {list(student.shape)}, {list(teacher.shape)}"
        )
    untrained = ((student == 0) & (teacher == 0)).all(-1)
    inside = torch.where(untrained[..., None], -1.0, student), torch.where(untrained[..., None], -1.0, teacher.detach())
    (log_s, rest_s), (log_t, rest_t) = (_with_rest(x.to(torch.promote_types(x.dtype, torch.float32))) for x in inside)
    if direction == "reverse":
        (log_s, rest_s), (log_t, rest_t) = (log_t, rest_t), (log_s, rest_s)
    divergence = (log_t.exp() * (log_t - log_s)).sum(-1) + rest_t.exp() * (rest_t - rest_s)
    return torch.where(untrained, 0, divergence)


def _with_rest(logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities, and the log of the remaining probability, at least one rounding error of 1."""
    tiny = torch.finfo(logprobs.dtype).eps
    rest = 1 - logprobs.exp().sum(-1)
    return logprobs, torch.log(rest.clamp(min=tiny))
