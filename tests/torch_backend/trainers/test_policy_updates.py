"""Updates of GRPOTrainer from recorded rollouts: packed, they are those of the padded trainer, whatever its options."""

from __future__ import annotations

from functools import cache
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from packing_core.errors import LayoutError
from tests.torch_backend.graphs import compiled as compiled
from tests.torch_backend.graphs import graphs as graphs
from tests.torch_backend.preference import arguments, assert_same_training, model_of, packed, tokenizer, trained
from tests.torch_backend.scored_trainers import LORA, datasets, peft, trl
from tests.torch_backend.steps.test_packed_calls import possible as possible
from torch_backend import audit
from torch_backend.steps.dynamic_compile import RECORDED
from torch_backend.trainers.enable_packing import enable_packing

LONGEST, END = 12, 2


def rollouts(count: int = 16) -> dict[str, Any]:
    """Answers to prompts, four for each; every third one is cut off at the longest length."""
    rng = np.random.default_rng(0)
    found, prompt = list[Any](), list[int]()
    for number in range(count):
        prompt = rng.integers(4, 90, rng.integers(2, 8)).tolist() if number % 4 == 0 else prompt
        answer = rng.integers(4, 90, LONGEST if number % 3 == 0 else rng.integers(0, LONGEST)).tolist()
        found.append(
            {
                "prompt_ids": prompt,
                "completion_ids": answer if number % 3 == 0 else [*answer, END],
                "logprobs": (np.log(1 / 96) + rng.normal(0, 0.3, LONGEST)).tolist(),
                "env_mask": (rng.random(LONGEST) < 0.8).astype(int).tolist(),
                "reward": float(rng.normal()),
            }
        )
        for name in ("logprobs", "env_mask"):
            found[-1][name] = found[-1][name][: len(found[-1]["completion_ids"])]
        if number % 5 == 0:
            found[-1]["logprobs"][1] = None  # as vLLM gives a NaN
    return {name: [rollout[name] for rollout in found] for name in found[0]}


def policy(
    path: Any, given: Any = None, *, adapter: bool = True, sampler: bool = False, masked: bool = False, **options: Any
) -> Any:
    """A trainer of recorded rollouts.

    Args:
        sampler: whether a sampler such as vLLM gave their log-probabilities.
        masked: whether some of their tokens are the environment's.
    """
    given, model = given or rollouts(), model_of("qwen3")
    if not adapter:
        model.save_pretrained(path)
        model.config._name_or_path = str(path)

    def recorded(prompts: list[str], _: Any) -> dict[str, Any]:
        places = [int(prompt) * 4 + number % 4 for number, prompt in enumerate(prompts)]
        kept = {name: x for name, x in given.items() if masked or name != "env_mask"}
        return {name: None if x is None else [x[i] for i in places] for name, x in kept.items()}

    defaults = {"num_iterations": 2, "max_steps": 3, "learning_rate": 0.05, "beta": 0.1, "temperature": 0.8}
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": LONGEST}
    trainer: Any = trl.GRPOTrainer(
        model,
        lambda reward, **_: reward,
        args=arguments(trl.GRPOConfig, path, shuffle_dataset=False, **{**defaults, **sizes, **options}),
        train_dataset=datasets.Dataset.from_list([{"prompt": str(i)} for i in range(len(given["reward"]) // 4)]),
        processing_class=tokenizer(),
        rollout_func=recorded,
        peft_config=peft.LoraConfig(**LORA) if adapter else None,
    )
    if sampler:
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    return trainer


SEQUENCE = {"importance_sampling_level": "sequence"}
CASES: dict[str, dict[str, Any]] = {
    **{kind: {"loss_type": kind} for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")},
    "GSPO": {"loss_type": "grpo", **SEQUENCE, "epsilon": 3e-2, "epsilon_high": 4e-2},
    "luspo": {"loss_type": "luspo", **SEQUENCE, "learning_rate": 0.01},
    "sequence, dapo": SEQUENCE,
    "truncated answers masked": {"mask_truncated_completions": True},
    "truncated answers masked, GSPO": {"mask_truncated_completions": True, "loss_type": "grpo", **SEQUENCE},
    "tokens of an environment": {"masked": True},
    "scaled by the batch": {"scale_rewards": "batch"},
    "not scaled": {"scale_rewards": "none"},
    "normalised objectives": {"multi_objective_aggregation": "normalize_then_sum"},
    "two-sided clipping": {"delta": 1.01},
    "high entropy alone": {"top_entropy_quantile": 0.4},
    "entropy bonus": {"entropy_coef": 0.1},
    "off-policy masked": {"off_policy_mask_threshold": 1e-3},
    "biased KL": {"use_bias_correction_kl": False},
    **{
        f"sampler, {mode}": {
            "sampler": True,
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_max": 0.1,
        }
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    "sampler, off-policy masked": {"sampler": True, "off_policy_mask_threshold": 1e-3},
    "sampler, vespo": {"sampler": True, "loss_type": "vespo", "vllm_importance_sampling_mode": "token_mask"},
}


@cache
def stock(name: str) -> Any:
    with TemporaryDirectory() as folder:
        return trained(policy(folder, **CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_an_update_is_that_of_the_padded_trainer(tmp_path: Any, name: str) -> None:
    """Also in everything that is logged."""
    assert_same_training(packed(policy(tmp_path, **CASES[name])), stock(name))


def test_every_option_changes_the_update() -> None:
    ends = {name: torch.cat([x.flatten() for x in stock(name)[0].values()]) for name in CASES}
    same = [
        (one, other)
        for i, one in enumerate(ends)
        for other in list(ends)[:i]
        if (ends[one] - ends[other]).abs().max() < 1e-4 * ends[other].abs().max()
    ]
    assert same == []


# -- recorded calls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", ""])
@pytest.mark.parametrize("adapter", [True, False], ids=["reference without adapters", "reference model"])
def test_updates_through_recorded_calls_are_those_of_plain_ones(
    compiled: SimpleNamespace, possible: None, tmp_path: Any, adapter: bool, checkpointing: bool
) -> None:
    """Old, reference and policy calls in turn, and two updates of each rollout."""
    options: dict[str, Any] = {"max_steps": 6, "learning_rate": 0.01, "gradient_checkpointing": checkpointing}
    options |= {"adapter": adapter, "sampler": True}
    plain = packed(policy(tmp_path, **options), fast=False)
    assert compiled.calls == compiled.recorded == 0
    trainer = policy(tmp_path, **options)
    assert_same_training(packed(trainer), plain)
    assert trainer.packed_step.parts["graph"] == RECORDED
    # Old, reference and policy calls of 2, 2 and 2 micro-batches, 3, 3 and 6 times, the last ones with a backward: 36.
    assert compiled.replayed >= 26


def test_an_audit_takes_recorded_rollouts(tmp_path: Any) -> None:
    report = audit(enable_packing(policy(tmp_path, sampler=True), verify=False))
    assert report.verdict == "exact" and report.documents == 4, str(report)


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_rewards_of_nan_and_none_move_nothing(tmp_path: Any) -> None:
    """As in the padded trainer: an answer, and a whole group."""
    given = rollouts()
    for place in (1, 4, 5, 6, 7):
        given["reward"][place] = None if place == 1 else float("nan")
    assert_same_training(packed(policy(tmp_path, given)), trained(policy(tmp_path, given)))
    given["reward"] = [float("nan")] * len(given["reward"])
    weights, _ = packed(policy(tmp_path, given, beta=0.0))
    assert not any(x.any() for name, x in weights.items() if name.startswith("gradient"))


def test_answers_that_are_all_masked_move_nothing(tmp_path: Any) -> None:
    given = rollouts()
    given["completion_ids"] = [[*answer[:-1], 5] for answer in given["completion_ids"]]
    weights, _ = packed(policy(tmp_path, given, mask_truncated_completions=True))
    assert not any(x.any() for name, x in weights.items() if name.startswith("gradient"))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("completion_ids", lambda x: [*x[:2], [], *x[3:]], "answer 2 of rollout_func has no token: give at least"),
        ("logprobs", lambda x: None, "rollout_func returned none: return its logprobs, or pass"),
        (
            "logprobs",
            lambda x: [y[:-1] for y in x],
            r"answer 0 of .* has 12 tokens and 11 log-prob.* one for each token",
        ),
    ],
)
def test_rollouts_that_lack_something_are_refused(tmp_path: Any, name: str, change: Any, message: str) -> None:
    given = rollouts()
    given[name] = change(given[name])
    with pytest.raises(LayoutError, match=message):
        packed(policy(tmp_path, given, sampler=True))


def test_rollouts_without_log_probabilities_train_where_nothing_reads_them(tmp_path: Any) -> None:
    given = rollouts()
    right = trained(policy(tmp_path, given))
    assert_same_training(packed(policy(tmp_path, {**given, "logprobs": None})), right)
