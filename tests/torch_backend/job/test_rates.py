"""Learning rates by transformers' names of schedules, compared with those of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler
from transformers.training_args import OptimizerNames

from packing_core.errors import PackingError
from packing_core.training.options import Optimizer, Options
from packing_core.training.rates import share_of_peak

STEPS, WARMUP = 40, 0.2  # 8 steps
CASES = {
    "cosine": {},
    "linear": {},
    "constant_with_warmup": {},
    "cosine_with_restarts": {"num_cycles": 3},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "polynomial": {"lr_end": 1e-4, "power": 2.0},
    "inverse_sqrt": {},
    "warmup_stable_decay": {"num_decay_steps": 10, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
}


@pytest.mark.parametrize("decay", CASES)
def test_rates_after_the_warm_up_are_those_of_transformers(decay):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    scheduler = get_scheduler(decay, optimizer, 8, STEPS, CASES[decay] or None)
    for step in range(STEPS):
        if step >= 8:
            ours = share_of_peak(decay, step, STEPS, warmup=WARMUP, lr=1e-2, options=CASES[decay])
            assert 1e-2 * ours == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9), step
        optimizer.step()
        scheduler.step()


def test_the_first_steps_rise_to_the_peak():
    rates = [Options(lr=1.0, decay="polynomial", warmup=0.2).learning_rate(step, 10) for step in range(3)]
    assert rates == [0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    "decay", [{"decay": "polynomial"}, {"decay": "cosine_with_min_lr", "decay_options": {"min_lr": 0}}]
)
def test_a_rate_of_0_stays_0(decay):
    assert [Options(lr=0.0, warmup=0.2, **decay).learning_rate(step, 10) for step in range(10)] == [0.0] * 10


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"decay": "reduce_lr_on_plateau"}, "--decay reduce_lr_on_plateau is not served: pass one of cosine, linear"),
        ({"decay": "linear", "decay_options": {"power": 2}}, "--decay linear has no power: it has none"),
        ({"decay": "polynomial", "decay_options": {"power": "2"}}, "power is '2': pass a number"),
        ({"decay": "polynomial", "decay_options": {"power": float("nan")}}, "power is nan: pass a number"),
        ({"decay": "cosine_with_min_lr"}, "needs its lowest rate: pass --set lr_scheduler_kwargs='{min_lr_rate"),
        ({"decay": "warmup_stable_decay"}, "needs the steps over which it falls"),
        ({"decay_options": "num_cycles"}, "--set lr_scheduler_kwargs: pass a mapping"),
        ({"optim": "galore_adamw"}, "--optim galore_adamw is not served: pass one of adamw_torch_fused, "),
        (
            {"optim": "sgd", "dtype": "bfloat16", "precision": "bfloat16", "master_weights": True},
            "--master-weights keeps copies for AdamW: leave --optim sgd out",
        ),
        ({"lr": float("nan")}, "--lr nan: pass a finite number from 0 on"),
        ({"lr": -1e-3}, "--lr -0.001: pass a finite number from 0 on"),
        ({"clip": -1.0}, "--clip -1.0: pass a finite number from 0 on"),
        ({"weight_decay": float("inf")}, "--weight-decay inf: pass a finite number"),
        ({"warmup": float("nan")}, "--warmup nan"),
        ({"lora": 2, "lora_dropout": float("nan")}, "--lora-dropout nan"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16 computes in bfloat16 and --precision is float32"),
        ({"master_weights": True}, "--master-weights keeps float32 copies of bfloat16 weights: pass --dtype"),
    ],
)
def test_what_no_optimizer_or_schedule_could_follow_is_refused_by_name(options, says):
    with pytest.raises(PackingError) as error:
        Options(**options)
    assert says in str(error.value)


def test_every_optimizer_has_the_name_that_transformers_gives_it():
    assert set(Optimizer.__args__) <= {name.value for name in OptimizerNames}
