"""Losses over pairs of documents, or over documents with a verdict: DPO and its variants, ORPO, SimPO, KTO, rewards.

Log-probabilities per document (``reduce(token_logprobs(...).logprobs, batch, "sum")``), or the scores of a reward head,
-> one loss per pair or per document. Nothing here takes a mean. The caller adds the losses up and divides once, by the
number of pairs (documents for KTO) of the whole step on all ranks:

    losses = dpo_loss(chosen, rejected, reference_chosen, reference_rejected)
    normalise(losses.sum(), pairs).backward()      # pairs: of this rank, over all micro-batches of the step

So it makes no difference how pairs are cut into micro-batches. A mean per micro-batch, averaged, weighs the pairs of a
small one more.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from packing_core.errors import LayoutError, PackingError
from packing_core.planning.pieces import choice
from torch_backend.ops.divisor import Divisor, quotient

DPOKind = Literal["sigmoid", "hinge", "ipo", "robust"]


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor | None = None,
    reference_rejected: Tensor | None = None,
    *,
    beta: float = 0.1,
    kind: DPOKind = "sigmoid",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Direct preference optimisation, one loss per pair; to be divided by the number of pairs.

    With the margin ``m = (chosen - rejected) - (reference_chosen - reference_rejected)`` and smoothing ``s``:

    - ``"sigmoid"``: ``-(1 - s) log sigmoid(beta m) - s log sigmoid(-beta m)`` (Rafailov et al. 2023, arXiv:2305.18290,
      equation 7; smoothing: Mitchell 2023, "A note on DPO with noisy preferences", equation 3);
    - ``"hinge"``: ``max(0, 1 - beta m)`` (SLiC, Zhao et al. 2023, arXiv:2305.10425, with the margin of DPO);
    - ``"ipo"``: ``(m - 1 / (2 beta))^2`` (Azar et al. 2023, arXiv:2310.12036, equation 17);
    - ``"robust"``: ``(-(1 - s) log sigmoid(beta m) + s log sigmoid(-beta m)) / (1 - 2 s)`` (Chowdhury et al. 2024,
      arXiv:2403.00409, equation 12).

    Args:
        chosen, rejected: [pairs] log-probability of each document's trained tokens under the model: their sum, for
            ``"ipo"`` by custom their mean.
        reference_chosen, reference_rejected: the same under the reference model; both None for no reference.
        label_smoothing: the share of pairs whose labels are taken to be flipped, below one half.

    Raises:
        LayoutError: the shapes differ, or one of the references is missing.
        PackingError: an option outside of its range.
    """
    choice("kind", kind, get_args(DPOKind))
    if label_smoothing and kind not in ("sigmoid", "robust"):
        raise PackingError(f"label_smoothing is defined for 'sigmoid' and 'robust', not for {kind!r}: leave it out")
    _check_smoothing(label_smoothing)
    _check_positive("beta", beta)
    if (reference_chosen is None) != (reference_rejected is None):
        raise LayoutError("reference_chosen and reference_rejected come together, or neither for a reference-free loss")
    _check_shapes(
        chosen=chosen, rejected=rejected, reference_chosen=reference_chosen, reference_rejected=reference_rejected
    )
    margin = _wide(chosen) - _wide(rejected)
    if reference_chosen is not None and reference_rejected is not None:
        margin = margin - (_wide(reference_chosen) - _wide(reference_rejected))
    if kind == "hinge":
        return torch.relu(1 - beta * margin)
    if kind == "ipo":
        return (margin - 1 / (2 * beta)).square()
    right, flipped = -F.logsigmoid(beta * margin), -F.logsigmoid(-beta * margin)
    if kind == "robust":
        return ((1 - label_smoothing) * right - label_smoothing * flipped) / (1 - 2 * label_smoothing)
    return (1 - label_smoothing) * right + label_smoothing * flipped


def odds_ratio_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """The odds-ratio term of ORPO, one per pair: ``-log sigmoid(log odds(chosen) - log odds(rejected))``.

    ``odds = p / (1 - p)`` with ``log p`` the mean log-probability of a document's trained tokens (Hong et al. 2024,
    arXiv:2403.07691, equations 4 and 7).

    Args:
        chosen, rejected: [pairs] means, below 0. A mean of 0 (a probability of 1) has infinite odds.
    """
    _check_shapes(chosen=chosen, rejected=rejected)
    return -F.logsigmoid(_log_odds(_wide(chosen)) - _log_odds(_wide(rejected)))


def orpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """ORPO, one loss per pair: ``-chosen + beta * odds_ratio_loss``; to be divided by the number of pairs.

    Hong et al. 2024 (arXiv:2403.07691), equation 6. The first term is the mean loss of the chosen document's tokens, so
    every pair has the same weight. TRL divides it by the tokens of a batch instead, by which long documents weigh more.

    Args:
        chosen, rejected: [pairs] means over the trained tokens.
    """
    return beta * odds_ratio_loss(chosen, rejected) - _wide(chosen)


def simpo_loss(
    chosen: Tensor, rejected: Tensor, *, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0
) -> Tensor:
    """SimPO, one loss per pair: ``-log sigmoid(beta (chosen - rejected) - gamma)``; to be divided by the pairs.

    Meng et al. 2024 (arXiv:2405.14734), equation 6; smoothed as :func:`dpo_loss`.

    Args:
        chosen, rejected: [pairs] means over the trained tokens.
        gamma: the target margin of the rewards.
    """
    _check_positive("beta", beta)
    _check_smoothing(label_smoothing)
    _check_shapes(chosen=chosen, rejected=rejected)
    margin = beta * (_wide(chosen) - _wide(rejected)) - gamma
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def kto_loss(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    baseline: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO, one loss per document; to be divided by the number of documents.

    ``w_d (1 - sigmoid(beta (r - z)))`` for a desirable document and ``w_u (1 - sigmoid(beta (z - r)))`` for another,
    with ``r = policy - reference`` and the baseline ``z`` (Ethayarajh et al. 2024, arXiv:2402.01306, equation 8).

    Args:
        policy, reference: [documents] sums over the trained tokens.
        desirable: bool [documents].
        baseline: scalar, of :func:`kto_baseline`; no gradient goes through it.
    """
    _check_positive("beta", beta)
    _check_shapes(policy=policy, reference=reference, desirable=desirable)
    if desirable.dtype != torch.bool:
        raise LayoutError(f"desirable must be bool [documents], got {desirable.dtype}")
    above = beta * (_wide(policy) - _wide(reference) - baseline.detach())
    weight = undesirable_weight + (desirable_weight - undesirable_weight) * desirable.to(above.dtype)
    return weight * torch.sigmoid(torch.where(desirable, -above, above))


@torch.no_grad()
def kto_baseline(policy: Tensor, reference: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """The baseline of KTO: the mean of ``policy - reference`` over mismatched documents of all ranks, at least 0.

    Ethayarajh et al. 2024 (arXiv:2402.01306), section 4.1. It estimates a divergence over the documents of one call, so
    pass those of all micro-batches of the step at once if it is not to depend on how the step was cut.

    Args:
        policy, reference: [documents] sums over the trained tokens of documents with another's completion.
        group: the ranks that hold different documents; the default group if None.
    """
    _check_shapes(policy=policy, reference=reference)
    difference = _wide(policy) - _wide(reference)
    sums = torch.stack([difference.sum(), difference.new_tensor(float(len(difference)))])
    return quotient(*Divisor(group).total(sums)).clamp(min=0)


def reward_loss(
    chosen: Tensor, rejected: Tensor, *, margin: Tensor | None = None, center_coefficient: float = 0.0
) -> Tensor:
    """Bradley-Terry, one loss per pair: ``-log sigmoid(chosen - rejected - margin)``; to be divided by the pairs.

    Ouyang et al. 2022 (arXiv:2203.02155), equation 1; the margin is that of Llama 2 (arXiv:2307.09288, equation 2).
    ``center_coefficient * (chosen + rejected)^2`` keeps scores around 0 (Eisenstein et al. 2023, arXiv:2312.09244).

    Args:
        chosen, rejected: [pairs] scores of a reward head.
        margin: [pairs].
    """
    _check_shapes(chosen=chosen, rejected=rejected, margin=margin)
    chosen, rejected = _wide(chosen), _wide(rejected)
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    return center_coefficient * (chosen + rejected).square() - F.logsigmoid(difference)


def _log_odds(logprob: Tensor) -> Tensor:
    """``log p - log(1 - p)``, without losing ``1 - p`` near p = 1."""
    near_one = logprob > -0.693
    small, large = torch.where(near_one, logprob, -1.0), torch.where(near_one, -1.0, logprob)
    return logprob - torch.where(near_one, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check_shapes(**given: Tensor | None) -> None:
    shapes = {name: list(x.shape) for name, x in given.items() if x is not None}
    if any(len(shape) != 1 or shape != next(iter(shapes.values())) for shape in shapes.values()):
        raise LayoutError(f"losses over documents take one number per pair or document of each, got {shapes}")


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise PackingError(f"{name} must be above 0, got {value}")


def _check_smoothing(value: float) -> None:
    if not 0 <= value < 0.5:
        raise PackingError(f"label_smoothing must be at least 0 and below 0.5, got {value}")
