"""Run by ``torchrun`` in test_context_scored: preference and policy trainers under context parallelism; rank 0 writes.

Argument: the file to write to.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch as mocked

import numpy as np
import torch.distributed as dist
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType, ParallelismConfig
from torch.distributed.device_mesh import init_device_mesh

from tests.torch_backend.preference import text
from tests.torch_backend.test_preference import dpo, peft
from tests.torch_backend.test_reward import reward
from tests.torch_backend.test_scored_trainers import kto, policy
from tests.torch_backend.torchrun import run_cases, weights_of
from tests.torch_backend.torchrun_context_trainer import restarting, straddling
from torch_backend import audit, enable_packing, patch
from torch_backend.context_parallel.share import RankShare

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
MANY = {"loss_type": ["sigmoid", "ipo", "sigmoid_norm"], "use_weighting": True, "ld_alpha": 0.5}
CASES: dict[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {
    "DPO": (preferences, "qwen3", {"include_num_input_tokens_seen": "all"}),
    "DPO, hybrid": (preferences, "qwen3_5_text", {"float64": True}),  # its own rounding is as large as what is allowed
    "DPO, many losses": (preferences, "qwen3", MANY),
    "DPO, adapters": (preferences, "qwen3", LORA),
    "KTO": (kto, "qwen3", {**GRADIENTS, "per_device_train_batch_size": 2}),
}
ON_FOUR = "DPO, two groups"  # as many pairs of a step, a micro-batch of each group after the other
HALVED = {"gradient_accumulation_steps": 2, "per_device_eval_batch_size": 1}


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def on_accelerators() -> Iterator[None]:
    """Accelerate has context parallelism on accelerators alone, so inside these ranks say that they have one."""
    stock = transformers.Trainer.create_accelerator_and_postprocess

    def create(trainer: Any) -> None:
        assert trainer.args.device.type == "cpu"
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        stock(trainer)

    with mocked.object(transformers.Trainer, "create_accelerator_and_postprocess", create):
        yield


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
    make, family, options = CASES["DPO" if name == ON_FOUR else name]
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


def refused(make: Callable[..., Any], told: Any = None, prepared: Any = None, **options: Any) -> Any:
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
AUDITED: dict[str, Callable[[], Any]] = {
    "audit": partial(refused, over, audit),
    "audit, broken": partial(refused, over, broken),
}
REFUSED: dict[str, Callable[[], Any]] = {
    "reward": partial(refused, reward, prepared=with_ranks),
    "GRPO": partial(refused, partial(policy, "GRPO"), prepared=with_ranks),
    "RLOO": partial(refused, partial(policy, "RLOO"), prepared=with_ranks),
    "reference ahead": partial(refused, over, prepared=lambda t: setattr(t, "precompute_ref_logps", True)),
    "router": partial(refused, over, family="qwen3_moe", changes={"router_aux_loss_coef": 0.1}),
    "prefixes": partial(refused, over, share_prefix=True),
    "metrics": partial(refused, over, prepared=lambda t: setattr(t, "compute_metrics", max)),
    "logits": partial(refused, over, lambda t: (t.train(), t.predict(t.eval_dataset))),
    "patched": partial(refused, preferences, prepared=partial(on_mesh, part="model")),
    "patched reference": partial(refused, preferences, prepared=partial(on_mesh, part="ref_model")),
}


def run(name: str) -> Any:
    return {**AUDITED, **REFUSED}[name]() if name in AUDITED or name in REFUSED else train(name)


if __name__ == "__main__":
    on_two = [*CASES, *AUDITED, *REFUSED]
    run_cases(Path(sys.argv[1]), [ON_FOUR] if os.environ["WORLD_SIZE"] == "4" else on_two, run)
