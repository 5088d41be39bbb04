"""Preference, reward and policy trainers under context parallelism: the steps of one process, and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch as mocked

import numpy as np
import pytest
import torch.distributed as dist
from accelerate.utils import ParallelismConfig
from torch.distributed.device_mesh import init_device_mesh

from tests.torch_backend.context_parallel.test_context_trainer import restarting, straddling
from tests.torch_backend.preference import text
from tests.torch_backend.ranks import on_ranks, refused
from tests.torch_backend.scored_trainers import dpo, kto, peft, policy, reward
from tests.torch_backend.wrappers import assert_same_weights, on_accelerators, weights_of
from torch_backend import audit, enable_packing, patch
from torch_backend.context_parallel.share import RankShare

pytestmark = pytest.mark.slow  # starts processes that train

GRADIENTS: dict[str, Any] = {"max_steps": 2, "gradient_accumulation_steps": 4, "logging_steps": 1, "max_grad_norm": 0.5}
LAYERS = {"qwen3": "Qwen3DecoderLayer", "qwen3_5_text": "Qwen3_5DecoderLayer", "qwen3_moe": "Qwen3MoeDecoderLayer"}


def few_long_pairs(count: int) -> Any:
    """Pairs of a long and a short answer: two ranks cut the long one of a single pair."""
    import datasets

    rng = np.random.default_rng(2)
    lengths = [(50, 60), (4, 6)]
    rows = [
        {
            "prompt": text(rng, 2, 10),
            "chosen": f" {text(rng, *lengths[i % 2])} w2",
            "rejected": f" {text(rng, *lengths[1 - i % 2])} w2",
        }
        for i in range(count)
    ]
    return datasets.Dataset.from_list(rows)


def preferences(folder: str, family: str = "qwen3", **options: Any) -> Any:
    """A DPOTrainer that trains a pair in each micro-batch and evaluates five, of which the last batch has one."""
    given: dict[str, Any] = {
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 2,
        "data": few_long_pairs(8),
        "eval_dataset": few_long_pairs(5),
    }
    return dpo(folder, family, **{**GRADIENTS, **given, **options})


LORA = {"ref_model": False, "peft_config": peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])}
COUNTED = {"include_num_input_tokens_seen": "all"}
MANY = {"loss_type": ["sigmoid", "ipo", "sigmoid_norm"], "use_weighting": True, "ld_alpha": 0.5, **COUNTED}
CASES: dict[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {
    "DPO, hybrid": (preferences, "qwen3_5_text", {"float64": True}),  # its own rounding is as large as what is allowed
    "DPO, many losses": (preferences, "qwen3", MANY),
    "DPO, adapters": (preferences, "qwen3", LORA),
    "KTO": (kto, "qwen3", {**GRADIENTS, "per_device_train_batch_size": 2}),
}
ON_FOUR = "DPO, two groups"  # as many pairs of a step, a micro-batch of each group after the other
HALVED = {"gradient_accumulation_steps": 2, "per_device_eval_batch_size": 1}


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def built(make: Callable[..., Any], folder: str, family: str = "qwen3", **options: Any) -> Any:
    """A trainer over all ranks, whose model FSDP2 shards and whose rows each pair of ranks cuts (``cp_size``)."""
    if ranks() == 1:
        return make(folder, family, **options)
    layers: Sequence[str] = [LAYERS[family]]
    given = {
        "parallelism_config": ParallelismConfig(cp_size=2, dp_shard_size=ranks() // 2),
        "fsdp": True,
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": layers},
    }
    with on_accelerators():
        return make(folder, family, **{**given, **options})


def untimed(logs: dict[str, float]) -> dict[str, float]:
    """Returns what is logged, apart from times."""
    return {key: x for key, x in logs.items() if not any(word in key for word in ("runtime", "per_second"))}


def train(name: str) -> dict[str, Any]:
    """Trains two steps: what is logged, the weights, and an evaluation."""
    make, family, options = CASES.get(name, (preferences, "qwen3", COUNTED))
    if name == ON_FOUR:
        options = {**options, "eval_dataset": few_long_pairs(6)}  # of five, two groups would evaluate one twice
    if ranks() == 4:
        options = {**options, **HALVED}
    with TemporaryDirectory() as folder, straddling() as straddled:
        trainer = enable_packing(built(make, folder, family, **options), verify=False)
        trainer.train()
        evaluated = trainer.evaluate() if trainer.eval_dataset is not None else {}
    return {
        "straddled": straddled,
        "logs": [untimed(entry) for entry in trainer.state.log_history],
        "evaluated": untimed(evaluated),
        "weights": weights_of(trainer.model),
    }


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_and_log_as_one_process_does(name: str) -> None:
    many, one = on_ranks(train, name), train(name)
    assert any(many["straddled"]) and not one["straddled"]
    assert_same_weights(many["weights"], one["weights"])
    assert len(many["logs"]) == len(one["logs"]) and "num_tokens" in one["logs"][0]
    for found, expected in zip([*many["logs"], many["evaluated"]], [*one["logs"], one["evaluated"]], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=5e-6)  # rewards are differences of sums of some 200


def test_two_groups_of_two_ranks_train_as_one_process_does() -> None:
    """TRL takes the means of entropies and logits over the tokens of a micro-batch of all groups: those are others."""
    many, one = on_ranks(train, ON_FOUR, ranks=4), train(ON_FOUR)
    assert any(many["straddled"]) and not one["straddled"]
    assert_same_weights(many["weights"], one["weights"])
    compared = ("loss", "grad", "num_", "total", "train_loss", "eval_loss")
    for found, expected in zip(many["logs"], one["logs"], strict=True):
        names = [name for name in expected if name.startswith((*compared, "rewards/", "logps/"))]
        assert len(names) > 1
        assert [found[name] for name in names] == pytest.approx([expected[name] for name in names], rel=1e-5, abs=5e-6)


def packed(make: Callable[..., Any], told: Any = None, prepared: Any = None, **options: Any) -> Any:
    """Packs a trainer that cannot be trained over ranks."""
    with TemporaryDirectory() as folder:
        given = {"share_prefix": options.pop("share_prefix", "auto")}
        trainer = make(folder, **options)
        if prepared is not None:
            prepared(trainer)
        enable_packing(trainer, verify=False, **given)
        return None if told is None else str(told(trainer))


def broken(trainer: Any) -> Any:
    """Audits a trainer whose positions count from 0 in every piece."""
    with mocked.object(RankShare, "positions", property(restarting)):
        return audit(trainer)


def on_mesh(trainer: Any, part: str) -> None:
    patch(getattr(trainer, part), mesh=init_device_mesh("cpu", (2,)), verify=False)


def with_ranks(trainer: Any) -> None:
    """Replaces the setting of accelerate, which TRL's config refuses and a YAML file of accelerate's sets."""
    trainer.get_cp_size = lambda: 2


over = partial(built, preferences)
AUDITED = {"exact": partial(packed, over, audit), "contaminated": partial(packed, over, broken)}
CUT = "UnsupportedError: context parallelism (cp_size=2) cuts documents over ranks, and "
PATCHED = "UnsupportedModelError: enable_packing(trainer) without ParallelismConfig(cp_size=...) does not compute over"
REFUSED: dict[str, Callable[[], Any]] = {
    f"{CUT}a reward model scores each of them at its last token, on a model that is not causal": partial(
        packed, reward, prepared=with_ranks
    ),
    f"{CUT}GRPOTrainer generates them, so the ranks of a group would have different ones: leave cp_size out": partial(
        packed, partial(policy, "GRPO"), prepared=with_ranks
    ),
    f"{CUT}TRL computed the reference's log-probabilities when the trainer was built": partial(
        packed, over, prepared=lambda trainer: setattr(trainer, "precompute_ref_logps", True)
    ),
    f"{CUT}TRL computes a router's loss on the tokens of one rank: pass router_aux_loss_coef=0.0": partial(
        packed, over, family="qwen3_moe", changes={"router_aux_loss_coef": 0.1}
    ),
    "UnsupportedError: documents that are cut over ranks share no prefixes: pack without shared prefixes": partial(
        packed, over, share_prefix=True
    ),
    "UnsupportedError: documents are cut over 2 ranks, and no rank has the logits of whole ones": partial(
        packed, over, lambda trainer: (trainer.train(), trainer.predict(trainer.eval_dataset))
    ),
    PATCHED: partial(packed, preferences, prepared=partial(on_mesh, part="model")),
    f"{PATCHED} ": partial(packed, preferences, prepared=partial(on_mesh, part="ref_model")),
}


def on_rank(name: str) -> Any:
    return (AUDITED | REFUSED)[name]()


@pytest.mark.parametrize("verdict", AUDITED)
def test_an_audit_of_a_trainer_tells_what_is_exact(verdict: str) -> None:
    assert re.search(rf"in 1 row cut over 2 ranks\): {verdict}", on_ranks(on_rank, verdict))


@pytest.mark.parametrize("text", REFUSED)
def test_trainers_that_need_whole_documents_are_refused(text: str) -> None:
    assert all(error.startswith(text) for error in refused(on_rank, text))
