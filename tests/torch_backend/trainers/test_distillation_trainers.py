"""enable_packing with GKDTrainer, GOLDTrainer and DistillationTrainer: an update is that of TRL's own padded loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from packing_core.errors import UnsupportedError
from tests.torch_backend.preference import (
    arguments,
    assert_same_training,
    model_of,
    text,
    tokenizer,
    trained,
)
from tests.torch_backend.scored_trainers import datasets, peft, trl
from torch_backend import audit, disable_packing, explain
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.patch import state_of
from torch_backend.trainers.enable_packing import enable_packing

gkd = pytest.importorskip("trl.experimental.gkd", reason="TRL 1.16 has them")
gold = pytest.importorskip("trl.experimental.gold", reason="TRL 1.16 has them")

LARGER = {"hidden_size": 96, "intermediate_size": 48, "num_hidden_layers": 3}


def examples(count: int = 8) -> Any:
    """Prompts of 2 to 9 words and answers of 2 to 29; one answer is empty, of whose tokens none is trained."""
    rng, rows = np.random.default_rng(0), []
    for i in range(count):
        prompt, answer = rng.integers(4, 90, rng.integers(2, 10)), rng.integers(4, 90, 0 if i == 1 else 2 + 27 * i % 28)
        rows.append(
            {
                "prompt": " ".join(f"w{word}" for word in prompt),
                "input_ids": [*prompt, *answer],
                "completion_mask": [0] * len(prompt) + [1] * len(answer),
            }
        )
    return datasets.Dataset.from_list(rows)


def off_policy(path, home=gkd, family="qwen3", adapter=False, data=None, kind=None, **options):
    """A trainer of answers from the data, or of generated ones with ``lmbda=1.0``."""
    name = "GKD" if home is gkd else "GOLD"
    options = {"lmbda": 0.0, "max_length": 64, **options}
    if home is gold:
        options = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_completion_length": 12, **options}
    return (kind or getattr(home, f"{name}Trainer"))(
        model_of(family),
        model_of("llama", seed=1, **LARGER),
        args=arguments(getattr(home, f"{name}Config"), path, **options),
        train_dataset=examples() if data is None else data,
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(r=2, target_modules=["q_proj"]) if adapter else None,
    )


def on_policy(path, family="qwen3", kind=None, **options):
    rng = np.random.default_rng(0)
    defaults = {"max_completion_length": 12, "per_device_train_batch_size": 2, "temperature": 0.8}
    return (kind or trl.DistillationTrainer)(
        model_of(family),
        model_of("llama", seed=1, **LARGER),
        args=arguments(trl.DistillationConfig, path, **{**defaults, **options}),
        train_dataset=datasets.Dataset.from_list([{"prompt": text(rng, 2, 10)} for _ in range(8)]),
        processing_class=tokenizer(),
    )


def packed(trainer):
    """The training of a packed trainer; no padding reaches its models outside of generation."""
    enable_packing(trainer, verify=False)
    seen = []
    for model in (trainer.model, trainer.teacher_model):
        causal_lm(model).base_model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append((args[0] if args else kwargs["input_ids"], kwargs)),
            with_kwargs=True,
        )
    found = trained(trainer)
    calls = [ids for ids, kwargs in seen if kwargs.get("past_key_values") is None]
    assert calls and all(len(ids) == 1 for ids in calls)
    return found


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "falcon_alibi"])
def test_an_update_of_gkd_is_that_of_its_padded_loss(tmp_path, family, beta) -> None:
    options = {"family": family, "beta": beta, "temperature": 0.7}
    assert_same_training(packed(off_policy(tmp_path, **options)), trained(off_policy(tmp_path, **options)))


def test_answers_that_gkd_generates_are_its_own(tmp_path) -> None:
    options = {"lmbda": 1.0, "max_new_tokens": 12, "beta": 0.3}
    assert_same_training(packed(off_policy(tmp_path, **options)), trained(off_policy(tmp_path, **options)))


def test_an_update_of_gold_has_its_temperature(tmp_path) -> None:
    options = {"home": gold, "beta": 0.5, "temperature": 0.7}
    assert_same_training(packed(off_policy(tmp_path, **options)), trained(off_policy(tmp_path, **options)))


@pytest.mark.parametrize("options", [{"beta": 0.5}, {"family": "gemma2"}, {"per_device_train_batch_size": 4}])
def test_an_update_of_the_distillation_trainer_is_that_of_its_padded_loss(tmp_path, options) -> None:
    """Its metrics too, the entropy among them."""
    assert_same_training(packed(on_policy(tmp_path, **options)), trained(on_policy(tmp_path, **options)))


def test_adapters_are_trained_alone(tmp_path) -> None:
    found, _ = packed(off_policy(tmp_path, adapter=True))
    truth, _ = trained(off_policy(tmp_path, adapter=True))
    assert all("lora" in name for name in found)
    assert_same_training((found, []), (truth, []))


@pytest.mark.parametrize("split", [(1, 8), (2, 4), (8, 1)])
def test_a_step_does_not_depend_on_its_micro_batches(tmp_path, split) -> None:
    """Tokens of a step weigh the same, as in one micro-batch of all."""

    def step(size, count):
        return off_policy(tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=count)

    truth, _ = trained(step(8, 1))
    found, _ = packed(step(*split))
    assert_same_training((found, []), (truth, []))


def test_a_step_of_empty_answers_trains_nothing(tmp_path) -> None:
    """TRL's padded loss of it is 0 / 0."""
    prompts = datasets.Dataset.from_list(
        [{**row, "completion_mask": [0] * len(row["input_ids"])} for row in examples()]
    )
    weights, logs = packed(off_policy(tmp_path, data=prompts))
    assert logs[0]["loss"] == 0 and all(w.isfinite().all() for w in weights.values())


def test_evaluation_is_the_trainers_own_and_packing_can_be_taken_back(tmp_path) -> None:
    ours, theirs = off_policy(tmp_path), off_policy(tmp_path)
    for trainer in (ours, theirs):
        trainer.model.eval()
    enable_packing(ours)
    assert "layers of the teacher" in str(explain(ours))
    found, truth = (trainer.evaluate(examples(4))["eval_loss"] for trainer in (ours, theirs))
    assert abs(found - truth) < 1e-5
    disable_packing(ours)
    assert all(state_of(causal_lm(model)) is None for model in (ours.model, ours.teacher_model))
    assert "compute_loss" not in vars(ours)


def test_what_packing_would_change_is_refused(tmp_path) -> None:
    class Mine(gkd.GKDTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    with pytest.raises(UnsupportedError, match=r"Mine.compute_loss is not TRL's"):
        enable_packing(off_policy(tmp_path, kind=Mine))
    with pytest.raises(UnsupportedError, match="GKDTrainer shares no prefixes"):
        enable_packing(off_policy(tmp_path), share_prefix=True)
    with pytest.raises(UnsupportedError, match=r"audit\(trainer.teacher_model\)"):
        audit(off_policy(tmp_path))
    aligned = off_policy(tmp_path, home=gold)
    aligned.use_uld_loss = True
    with pytest.raises(UnsupportedError, match="aligns the tokens of two tokenisers"):
        enable_packing(aligned)
    alone = on_policy(tmp_path)
    alone.teacher_model = None
    with pytest.raises(UnsupportedError, match="DistillationTrainer has no teacher_model"):
        enable_packing(alone)
    assert state_of(causal_lm(alone.model)) is None
