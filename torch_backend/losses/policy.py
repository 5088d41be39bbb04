"""Losses of policy gradients over groups of sampled documents: GRPO, RLOO, Dr. GRPO, DAPO and GSPO.

Rewards [documents] and their groups -> :func:`group_advantages` -> with the log-probabilities [B, S] of
``token_logprobs`` -> :func:`policy_loss` -> (loss sum, weight sum), divided once over all micro-batches and ranks
(:func:`torch_backend.losses.cross_entropy.normalise`). Advantages compare the documents of a group, so they are made of
whole groups before these are cut into micro-batches. After that, no cut makes a difference.

===========  ============================  ===================  ====================
method       ``group_advantages(kind=)``   ``ratio``            ``per``
===========  ============================  ===================  ====================
GRPO         ``"grpo"``                    ``"token"``          ``"document"``
DAPO         ``"grpo"``                    ``"token"``          ``"token"``
Dr. GRPO     ``"dr_grpo"``                 ``"token"``          ``"constant"``
GSPO         ``"grpo"``                    ``"sequence"``       ``"document"``
RLOO         ``"rloo"``                    ``"sequence sum"``   ``"document"``
===========  ============================  ===================  ====================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import LayoutError, PackingError
from packing_core.planning.pieces import choice
from torch_backend.ops.reduction import reduce, spread

AdvantageKind = Literal["grpo", "dr_grpo", "rloo"]
Ratio = Literal["token", "sequence", "sequence sum"]
Per = Literal["document", "token", "constant"]
EPSILON = 1e-4  # added to a group's standard deviation, as TRL adds it


def group_advantages(rewards: Tensor, groups: Tensor, *, kind: AdvantageKind = "grpo") -> Tensor:
    """Compares the reward of each document with those of the other samples of its prompt.

    - ``"grpo"``: ``(r - mean) / (std + 1e-4)`` of the group, with the unbiased standard deviation (Shao et al. 2024,
      arXiv:2402.03300, section 4.1.2);
    - ``"dr_grpo"``: ``r - mean`` (Liu et al. 2025, arXiv:2503.20783, section 3.2);
    - ``"rloo"``: ``r`` minus the mean of the group's other documents (Ahmadian et al. 2024, arXiv:2402.14740, equation
      8).

    A group of one document has an advantage of 0. A reward of NaN is none: as in TRL, its document has an advantage of
    0, and the others of its group are compared without it. Groups must be whole: what another rank or micro-batch holds
    of a group is not seen.

    Args:
        rewards: [documents].
        groups: [documents] integers, equal for documents of one group, in any order.

    Returns:
        [documents], float32 at least, without gradient.
    """
    choice("kind", kind, get_args(AdvantageKind))
    if rewards.ndim != 1 or rewards.shape != groups.shape:
        raise LayoutError(f"rewards and groups are [documents], got {list(rewards.shape)} and {list(groups.shape)}")
    rewards = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))
    scored = ~rewards.isnan()
    same = (groups[:, None] == groups[None, :]) & scored
    count = same.sum(1)

    def mean(values: Tensor, divisor: Tensor) -> Tensor:
        return torch.where(same, values, 0).sum(1) / divisor.clamp(min=1)

    above = torch.where(scored, rewards - mean(rewards, count), 0)
    if kind == "rloo":
        return above * count / (count - 1).clamp(min=1)
    if kind == "dr_grpo":
        return above
    return above / (mean(above.square(), count - 1).sqrt() + EPSILON)


def kl_estimate(logprobs: Tensor, reference: Tensor) -> Tensor:
    """An unbiased estimate of KL(policy, reference) from each sampled token: ``exp(d) - d - 1``, ``d`` the difference.

    ``d = reference - logprobs``; Schulman 2020 (http://joschu.net/blog/kl-approx.html), k3; never negative.
    """
    difference = reference.detach() - logprobs
    return torch.expm1(difference) - difference


def policy_loss(
    logprobs: Tensor,
    batch: Mapping[str, Any],
    advantages: Tensor,
    *,
    old: Tensor | None = None,
    reference: Tensor | None = None,
    beta: float = 0.0,
    clip: tuple[float, float] = (0.2, 0.2),
    delta: float | None = None,
    ratio: Ratio = "token",
    per: Per = "document",
    max_length: int | None = None,
    where: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of a packed batch as a sum and what to divide it by.

    Each token's loss is ``-min(w A, clip(w, 1 - low, 1 + high) A) + beta KL`` (Schulman et al. 2017, arXiv:1707.06347,
    equation 7; Shao et al. 2024, arXiv:2402.03300, equation 3). Its ratio ``w`` is

    - ``"token"``: ``exp(logprobs - old)`` of the token;
    - ``"sequence"``: the exponential of the mean of that over the document (GSPO, Zheng et al. 2025, arXiv:2507.18071,
      equation 7);
    - ``"sequence sum"``: of the sum, the probability ratio of the whole document (RLOO).

    Args:
        logprobs: [B, S], at the tokens' own places, as ``token_logprobs`` gives them.
        batch: the packed batch that they are of.
        advantages: [documents] in source order, or [B, S].
        old: [B, S] under the policy that sampled the documents; None if that is this policy: all ratios are 1 and have
            a gradient.
        reference: [B, S] under the reference model, for the divergence from it.
        beta: the coefficient of that divergence.
        clip: how far below and above 1 the ratio may go.
        delta: ratios are at most this even where the clip leaves them (two-sided clipping, arXiv:2505.07291).
        per: what is divided by. ``"document"``: each document's mean over its tokens counts once; ``"token"``: each
            token counts once (DAPO, arXiv:2503.14476); ``"constant"``: as if each document had ``max_length`` tokens.
        max_length: for ``"constant"``, the same in all micro-batches.
        where: bool [B, S], the tokens that count; ``batch["labels"] != -100`` if None. What ``old`` and ``reference``
            have elsewhere is not read.

    Returns:
        Two scalars, float32 at least: the sum of losses, and the number of documents, of tokens, or of documents times
        ``max_length``. A document without a token that counts adds nothing to the first; it is a document all the same.

    Raises:
        LayoutError: shapes contradict each other.
        PackingError: an unknown choice, ``beta`` without ``reference``, or ``"constant"`` without ``max_length``.
    """
    choice("ratio", ratio, get_args(Ratio))
    choice("per", per, get_args(Per))
    if (beta != 0) != (reference is not None):
        raise PackingError(f"beta is {beta} and reference is {'' if reference is not None else 'not '}given: pass both")
    if (per == "constant") != (max_length is not None):
        raise PackingError('per="constant" divides by max_length: pass it, and pass it for nothing else')
    shape = batch["input_ids"].shape
    for name, x in (("logprobs", logprobs), ("old", old), ("reference", reference)):
        if x is not None and x.shape != shape:
            raise LayoutError(f"{name} must be [B, S] as the batch, {list(shape)}, got {list(x.shape)}")
    where = (batch["labels"] != IGNORE_INDEX if where is None else where).to(logprobs.device)
    if advantages.shape != shape:
        advantages = spread(advantages, batch)
    advantages = advantages.detach().to(logprobs)
    old, reference = (x if x is None else torch.where(where, x, logprobs).detach() for x in (old, reference))
    log_ratio = logprobs - (logprobs.detach() if old is None else old)
    if ratio != "token":
        how: Literal["mean", "sum"] = "mean" if ratio == "sequence" else "sum"
        log_ratio = spread(reduce(log_ratio, batch, how, where=where), batch)
    weight = torch.exp(log_ratio)
    clipped = weight.clamp(1 - clip[0], 1 + clip[1])
    weight = weight if delta is None else weight.clamp(max=delta)
    losses = -torch.minimum(weight * advantages, clipped * advantages)
    if reference is not None:
        losses = losses + beta * kl_estimate(logprobs, reference)
    by_document = reduce(losses, batch, "mean" if per == "document" else "sum", where=where)
    if per == "token":
        return by_document.sum(), reduce(torch.ones_like(losses), batch, "sum", where=where).sum()
    return by_document.sum(), by_document.new_tensor(float(len(by_document) * (max_length or 1)))
