"""Losses over documents: values worked out by hand, and one result however a step is cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from packing_core.errors import LayoutError, PackingError
from torch_backend import PackedCollator, normalise
from torch_backend.losses.distillation import distillation_loss
from torch_backend.losses.policy import group_advantages, policy_loss
from torch_backend.losses.preference import (
    dpo_loss,
    kto_baseline,
    kto_loss,
    odds_ratio_loss,
    orpo_loss,
    reward_loss,
    simpo_loss,
)

generator = torch.Generator().manual_seed(0)


def logprobs(*shape: int, scale: float = 3.0) -> Tensor:
    return -scale * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.01


def same(found: Tensor, wanted: Any) -> None:
    np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=1e-10, atol=1e-12)


def log_sigmoid(x: float) -> float:
    return math.log(1 / (1 + math.exp(-x)))


def numbers(*values: float) -> list[Tensor]:
    """Values of one pair, or of one document, each."""
    return [torch.tensor([value], dtype=torch.float64) for value in values]


def test_preference_losses_of_one_pair() -> None:
    # log-ratios 2 and 0.5: the margin is 1.5
    pair, smooth = numbers(-3.0, -4.0, -5.0, -4.5), 0.1
    same(dpo_loss(*pair, beta=0.2), [-log_sigmoid(0.3)])
    same(dpo_loss(*pair[:2], beta=0.2), [-log_sigmoid(0.2)])
    both = 0.9 * log_sigmoid(0.3), 0.1 * log_sigmoid(-0.3)
    same(dpo_loss(*pair, beta=0.2, label_smoothing=smooth), [-both[0] - both[1]])
    same(dpo_loss(*pair, beta=0.2, kind="robust", label_smoothing=smooth), [(-both[0] + both[1]) / 0.8])
    same(dpo_loss(*pair, beta=0.2, kind="hinge"), [0.7])
    same(dpo_loss(*pair, beta=0.2, kind="ipo"), [(1.5 - 2.5) ** 2])
    means, scores = numbers(-0.5, -1.0), numbers(1.0, 0.25)
    found = simpo_loss(*means, beta=2.0, gamma=0.4, label_smoothing=smooth)
    same(found, [-0.9 * log_sigmoid(0.6) - 0.1 * log_sigmoid(-0.6)])
    odds = [math.exp(x) / (1 - math.exp(x)) for x in (-0.5, -1.0)]
    same(orpo_loss(*means, beta=0.3), [0.5 - 0.3 * log_sigmoid(math.log(odds[0] / odds[1]))])
    found = reward_loss(*scores, margin=numbers(0.5)[0], center_coefficient=0.1)
    same(found, [-log_sigmoid(0.25) + 0.1 * 1.25**2])
    same(reward_loss(*scores), [-log_sigmoid(0.75)])


def test_the_loss_of_kto_and_its_baseline() -> None:
    policy, reference = (torch.tensor(x, dtype=torch.float64) for x in ([-3.0, -3.0], [-5.0, -5.0]))
    desirable, baseline = torch.tensor([True, False]), torch.tensor(0.5, dtype=torch.float64)
    found = kto_loss(policy, reference, desirable, baseline, beta=0.2, desirable_weight=1.5, undesirable_weight=2.0)
    same(found, [1.5 * (1 - math.exp(log_sigmoid(0.3))), 2 * (1 - math.exp(log_sigmoid(-0.3)))])
    assert kto_baseline(torch.tensor([1.0, 3.0]), torch.tensor([0.5, 0.5])) == 1.5
    assert kto_baseline(reference, policy) == 0


def test_no_gradient_goes_through_the_baseline_of_kto() -> None:
    policy, reference = logprobs(2, 3)
    baseline = torch.tensor(0.3, dtype=policy.dtype, requires_grad=True)
    assert not kto_loss(policy, reference, torch.tensor([True, False, True]), baseline).requires_grad


def test_odds_keep_their_digits_near_certainty() -> None:
    almost = torch.tensor([-1e-6, -0.5, -8.0], dtype=torch.float32)
    odds = [math.exp(x) / (1 - math.exp(x)) for x in (*almost.double().tolist(), -1.0)]
    exact = [-log_sigmoid(math.log(x / odds[3])) for x in odds[:3]]
    np.testing.assert_allclose(odds_ratio_loss(almost, torch.full((3,), -1.0)).numpy(), exact, rtol=1e-5)


def test_half_precision_is_computed_in_float32() -> None:
    half = logprobs(2, 4).bfloat16()
    assert torch.equal(dpo_loss(*half), dpo_loss(*half.float()))


# Three prompts with four, one and three sampled documents; prompts are not trained.
GROUPS = torch.tensor([5, 5, 5, 5, 2, 9, 9, 9])
PROMPT, COMPLETIONS = 2, (3, 7, 1, 4, 6, 2, 5, 0)


def sampled(documents: list[int], capacity: int = 16) -> dict[str, Any]:
    """A batch of some of the documents; the last one has no trained token."""
    features = [
        {"input_ids": [1 + d] * (PROMPT + COMPLETIONS[d]), "labels": [-100] * PROMPT + [1 + d] * COMPLETIONS[d]}
        for d in documents
    ]
    return PackedCollator(capacity=capacity, seed=4)(features)


def on_batch(values: list[Tensor], batch: dict[str, Any]) -> Tensor:
    """Numbers per trained token of each document at their places, NaN everywhere else."""
    out = torch.full(batch["labels"].shape, float("nan"), dtype=torch.float64)
    for d, x in enumerate(values):
        places = batch["labels"] == 1 + d
        if places.any():
            out[places] = x
    return out


ADVANTAGES = {"grpo": (-1.0, 0.0, 1.0), "dr_grpo": (-2.0, 0.0, 2.0), "rloo": (-3.0, 0.0, 3.0)}


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_advantages_compare_documents_of_one_group(kind: Any) -> None:
    rewards, groups = torch.tensor([1.0, 3.0, 5.0, 7.0], dtype=torch.float64), torch.tensor([4, 4, 4, 2])
    low, middle, high = ADVANTAGES[kind]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        found = group_advantages(rewards[order], groups[order], kind=kind)
        wanted = np.array([low, middle, high, 0.0])[order]  # the last is alone in its group
        np.testing.assert_allclose(found, wanted, rtol=1e-3)  # the deviation of a group has 1e-4 beside it
    deviation = group_advantages(torch.tensor([0.0, 2e-4], dtype=torch.float64), torch.zeros(2), kind=kind)[1]
    if kind == "grpo":
        same(deviation, 1e-4 / (math.sqrt(2) * 1e-4 + 1e-4))


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("unscored", [[1], [0, 1, 3], [4], [5, 6, 7]])
def test_rewards_of_nan_are_left_out_of_their_group_alone(kind: Any, unscored: list[int]) -> None:
    rewards = torch.randn(8, generator=generator, dtype=torch.float64)
    scored = torch.tensor([d not in unscored for d in range(8)])
    wanted = group_advantages(rewards[scored], GROUPS[scored], kind=kind)
    found = group_advantages(torch.where(scored, rewards, torch.nan), GROUPS, kind=kind)
    assert not found[~scored].any()
    same(found[scored], wanted)


@pytest.mark.parametrize("name", ["old", "reference"])
def test_what_samplers_give_for_prompts_is_not_read(name: str) -> None:
    """Nor does it reach the gradient."""
    batch, (new, given) = sampled([0, 1, 2]), ([logprobs(n) for n in COMPLETIONS] for _ in range(2))
    found = []
    for elsewhere in (0.0, torch.nan, -torch.inf):
        policy = on_batch(new, batch).nan_to_num(0.0).requires_grad_()
        options = {name: on_batch(given, batch).nan_to_num(elsewhere), "beta": 0.1 if name == "reference" else 0.0}
        total, _ = policy_loss(policy, batch, torch.tensor([1.0, -2.0, 3.0]), **options)
        found.append(torch.cat([total[None], torch.autograd.grad(total, policy)[0].flatten()]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]) and found[0].isfinite().all()


POLICIES: list[dict[str, Any]] = [
    {},
    {"ratio": "sequence", "clip": (3e-1, 4e-1)},
    {"ratio": "sequence sum"},
    {"per": "token"},
    {"per": "constant", "max_length": 7},
]


# Of two documents, with ratios 1.5 and 0.5 of the first one's tokens and 2 of the second one's, and one without tokens.
OF_TWO: list[tuple[dict[str, Any], float, tuple[float, int]]] = [
    ({}, 1.0, ((-1.2 - 0.5) / 2 + 2.0, 3)),
    ({"per": "token"}, 1.0, (-1.2 - 0.5 + 2.0, 3)),
    ({"per": "constant", "max_length": 4}, 1.0, (-1.2 - 0.5 + 2.0, 12)),
    ({"delta": 1.7}, 1.0, ((-1.2 - 0.5) / 2 + 1.7, 3)),
    ({"delta": 1.1}, 1.0, ((-1.1 - 0.5) / 2 + 1.2, 3)),
    ({"ratio": "sequence"}, 1.0, (-math.sqrt(0.75) + 2.0, 3)),
    ({"ratio": "sequence sum"}, 1.0, (-0.75 + 2.0, 3)),
    ({"clip": (0.1, 0.3)}, 1.0, ((-1.3 - 0.5) / 2 + 2.0, 3)),
    ({"clip": (0.1, 0.3)}, -1.0, ((1.5 + 0.9) / 2 - 1.3, 3)),
    ({"beta": 0.5, "per": "token"}, 0.0, (0.5 * sum(x - math.log(x) - 1 for x in (1 / 1.5, 1 / 0.5, 1 / 2)), 3)),
]


@pytest.mark.parametrize(("options", "advantage", "wanted"), OF_TWO, ids=str)
def test_the_policy_loss_of_two_documents_in_any_packing(options: Any, advantage: float, wanted: Any) -> None:
    documents, none = [5, 2, 7], torch.zeros(0, dtype=torch.float64)
    new, old = (
        [torch.tensor(x, dtype=torch.float64).log() for x in y] for y in (([0.3, 0.2], [0.2]), ([0.2, 0.4], [0.1]))
    )
    advantages = torch.tensor([advantage, -advantage, 5.0], dtype=torch.float64)
    for capacity in (5, 16):
        batch = sampled(documents, capacity)
        placed = (on_batch([none, none, x[1], none, none, x[0]], batch).nan_to_num(0.0) for x in (new, old))
        logprobs, before = placed
        given = {"reference": before} if "beta" in options else {}
        same(torch.stack(policy_loss(logprobs, batch, advantages, old=before, **given, **options)), wanted)


def test_without_old_log_probabilities_the_gradient_is_that_of_reinforce() -> None:
    batch = sampled([0, 1, 2])
    new = on_batch([logprobs(n) for n in COMPLETIONS], batch).nan_to_num(0.0).requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    policy_loss(new, batch, advantages, per="token")[0].backward()
    assert new.grad is not None
    for document, advantage in enumerate(advantages):
        assert (new.grad[batch["labels"] == 1 + document] == -advantage).all()
    assert not new.grad[batch["labels"] == -100].any()


def divergence(student: Tensor, teacher: Tensor, direction: str) -> Tensor:
    """KL(teacher, student) of log-probabilities [..., V], or the other way round."""
    p, q = (teacher, student) if direction == "forward" else (student, teacher)
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_distillation_over_the_vocabulary_is_the_divergence_and_that_of_trl(direction: Any) -> None:
    from trl.experimental.gkd import GKDTrainer

    logits = torch.randn(2, 3, 5, 11, generator=generator, dtype=torch.float64)
    student, teacher = logits.log_softmax(-1)
    found = distillation_loss(student, teacher, direction=direction)
    same(found, divergence(student, teacher, direction))
    beta = 0 if direction == "forward" else 1
    trls = GKDTrainer.generalized_jsd_loss(*logits, beta=beta, reduction="sum")
    torch.testing.assert_close(found.sum(), trls)


def test_distillation_over_some_ids_takes_all_others_as_one() -> None:
    logits = torch.randn(2, 6, 11, generator=generator, dtype=torch.float64)
    student, teacher = logits.log_softmax(-1)
    ids = teacher.topk(4, -1).indices
    merged = []
    for x in (student, teacher):
        inside = x.gather(-1, ids)
        merged.append(torch.cat([inside, (1 - inside.exp().sum(-1, keepdim=True)).log()], -1))
    for direction in ("forward", "reverse"):
        found = distillation_loss(student.gather(-1, ids), teacher.gather(-1, ids), direction=direction)
        np.testing.assert_allclose(found, divergence(*merged, direction), rtol=1e-9)
        assert (found <= divergence(student, teacher, direction)).all()


def test_distillation_leaves_out_what_is_not_trained() -> None:
    student = torch.zeros(2, 3, requires_grad=True)
    found = distillation_loss(student, torch.zeros(2, 3))
    found.sum().backward()
    assert not found.any() and student.grad is not None and not student.grad.any()


@pytest.mark.parametrize("options", POLICIES, ids=str)
def test_policy_gradients_do_not_depend_on_how_a_step_is_cut(options: dict[str, Any]) -> None:
    values = [logprobs(n) for n in COMPLETIONS]
    advantages = group_advantages(torch.randn(8, generator=generator, dtype=torch.float64), GROUPS)
    totals = []
    for cut in ([range(8)], [range(3), range(3, 8)], [[d] for d in range(8)]):
        sums = []
        for part in cut:
            documents = list(part)
            batch = sampled(documents)
            new = on_batch(values, batch).nan_to_num(0.0)
            sums.append(torch.stack(policy_loss(new, batch, advantages[documents], old=1.3 * new, **options)))
        totals.append(normalise(*torch.stack(sums).sum(0)))
    torch.testing.assert_close(totals[1:], totals[:1] * 2)


def test_what_has_no_meaning_is_refused() -> None:
    pair, batch, none = logprobs(2, 3), sampled([0, 1]), torch.zeros(2)
    first, fewer, new = pair[0], (pair[0], pair[1, :2]), torch.zeros(batch["labels"].shape)
    smoothed = "label_smoothing is defined for 'sigmoid' and 'robust', not for 'ipo': leave it out"
    unequal = "take one number per pair or document of each"
    refused: list[tuple[type[PackingError], str, Callable[[], Any]]] = [
        (
            PackingError,
            "'hinge', 'ipo', 'robust'; got 'cubic'",
            lambda: dpo_loss(*pair, kind="cubic"),
        ),  # type: ignore[arg-type]
        (PackingError, smoothed, lambda: dpo_loss(*pair, kind="ipo", label_smoothing=0.1)),
        (PackingError, "below 0.5, got 0.5", lambda: dpo_loss(*pair, kind="robust", label_smoothing=0.5)),
        (PackingError, "beta must be above 0", lambda: dpo_loss(*pair, beta=0.0)),
        (LayoutError, "come together", lambda: dpo_loss(*pair, first)),
        (LayoutError, unequal, lambda: dpo_loss(*fewer)),
        (LayoutError, unequal, lambda: simpo_loss(*fewer)),
        (LayoutError, unequal, lambda: orpo_loss(*fewer)),
        (LayoutError, "desirable must be bool", lambda: kto_loss(*pair, first, first[0])),
        (PackingError, "'grpo', 'dr_grpo', 'rloo'; got 'ppo'", lambda: group_advantages(first, first, kind="ppo")),  # type: ignore[arg-type]
        (PackingError, "pass both", lambda: policy_loss(new, batch, none, beta=0.1)),
        (PackingError, "divides by max_length", lambda: policy_loss(new, batch, none, per="constant")),
        (LayoutError, "one per document, got", lambda: policy_loss(new, batch, torch.zeros(3))),
        (LayoutError, "old must be", lambda: policy_loss(new, batch, none, old=torch.zeros(3))),
        (LayoutError, r"must be \[..., K\] of the same ids", lambda: distillation_loss(none, torch.zeros(4))),
    ]
    for error, message, call in refused:
        with pytest.raises(error, match=message):
            call()
