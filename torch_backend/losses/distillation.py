"""Distillation: the divergence of a student's next-token distribution from a teacher's, token by token.

Over the whole vocabulary: the teacher runs without gradients, then the student on the same batch, and
:func:`causal_lm_divergence` compares their hidden states through both output layers, a chunk of logits at a time.

Over some ids, where the teacher ran elsewhere: its most likely ids and their log-probabilities
(``token_logprobs(teacher, batch, top_k=K)``), the student's at the same ids (``token_logprobs(student, batch,
candidates=ids)``) -> :func:`distillation_loss` of each token, to be summed over the trained ones.

Neither ever holds [tokens, vocabulary]. Divide once by the tokens of all micro-batches and ranks
(:func:`torch_backend.losses.cross_entropy.normalise`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import LayoutError, PackingError
from torch_backend.hf.anatomy.heads import entries_of
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.patch import cut_over_ranks
from torch_backend.losses.causal_lm import LOSS_WEIGHTS, Shortcut, call_with_shortcut, loss_in
from torch_backend.losses.next_tokens import next_tokens_of
from torch_backend.losses.output_layer import Tail, linear_logits, output_layer_divergence
from torch_backend.ops.divisor import quotient
from torch_backend.ops.linear_divergence import check_divergence


def causal_lm_divergence(
    student: nn.Module, teacher: nn.Module, batch: Mapping[str, Any], *, beta: float = 0.0, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns the summed divergence of a student's next tokens from a teacher's, and the number of its targets.

    Args:
        student, teacher: causal language models as :func:`torch_backend.losses.causal_lm.causal_lm_loss` takes them,
            over one vocabulary, patched if the batch is packed. The teacher gets no gradient; it may have another size,
            dtype and device, and should be in ``eval()``.
        batch: as there, with its ``loss_weights``. Predictions of labels that are not -100 are compared.
        beta: 0 for the forward divergence KL(teacher || student), 1 for the reverse one, between them for the
            generalised Jensen-Shannon divergence
            (:func:`torch_backend.ops.linear_divergence.linear_divergence`).
        temperature: divides the logits of both.

    Returns:
        Two float32 scalars, to be divided once per step as those of ``causal_lm_loss``.

    Raises:
        LayoutError: the batch has no labels, or has them shifted; or the vocabularies differ in size; or the two are
            not cut over the same ranks.
        PackingError: beta is not from 0 to 1, or the temperature not above 0.
        UnsupportedModelError: as ``causal_lm_loss`` does, and for output layers that are not plain linear ones.
    """
    total, weight, _ = divergence_and_entropy(student, teacher, batch, beta=beta, temperature=temperature)
    return total, weight


@torch.compiler.disable  # as token_logprobs
def divergence_and_entropy(
    student: nn.Module, teacher: nn.Module, batch: Mapping[str, Any], *, beta: float, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`causal_lm_divergence`, and the summed entropy of the student's distributions, without gradient."""
    if not temperature > 0:
        raise PackingError(f"temperature must be above 0, got {temperature}")
    if batch.get("shift_labels") is not None:
        raise LayoutError("causal_lm_divergence takes labels as they stand with the tokens: leave shift_labels out")
    entries = [entries_of(root, root.get_output_embeddings()) for root in map(causal_lm, (student, teacher))]
    check_divergence(entries[0], entries[1], beta)
    device = next(teacher.parameters()).device
    moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items() if name != LOSS_WEIGHTS}
    batch_of_teacher, batch_of_student = cut_over_ranks(teacher, moved), cut_over_ranks(student, batch)
    weights_of_targets = batch_of_student.pop(LOSS_WEIGHTS, None)

    def of_teacher(shortcut: Shortcut, hidden: Tensor, tail: Tail, labels: Tensor, _: Tensor | None) -> Any:
        """A loss of 0, and the logits of trained tokens, not made yet."""
        predicting, _, _ = next_tokens_of(batch_of_teacher).trained(hidden, labels, None)
        return hidden.new_zeros(()), linear_logits(shortcut.head, predicting, tail.at_temperature(temperature))

    def of_student(shortcut: Shortcut, hidden: Tensor, tail: Tail, labels: Tensor, _: Tensor | None) -> Any:
        """The mean divergence from these; the number of targets, their weight and the entropy."""
        pairs = next_tokens_of(batch_of_student)
        hidden, targets, weights = pairs.trained(hidden, labels, weights_of_targets)
        tail = tail.at_temperature(temperature)
        per_token, entropies = output_layer_divergence(shortcut.head, hidden, tail, logits, beta=beta)
        counted = targets.flatten() != IGNORE_INDEX
        weights = counted.to(per_token.dtype) * (1 if weights is None else weights.flatten())
        loss = quotient((torch.where(counted, per_token, 0) * weights).sum(), counted.sum())
        return loss, (counted.sum(), weights.sum(), torch.where(counted, entropies, 0).sum())

    call = partial(call_with_shortcut, caller="causal_lm_divergence")
    with torch.no_grad():
        _, logits = call(teacher, batch_of_teacher, of_teacher)
    output, (count, weight, entropy) = call(student, batch_of_student, of_student)
    return loss_in(output) * count, weight, entropy


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
