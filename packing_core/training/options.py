"""The options of a training job that decide its losses, checked against each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from packing_core.errors import PackingError
from packing_core.training.rates import Decay, check_schedule, share_of_peak

# transformers' names of optimizers, those that its Trainer makes from parameter groups alone
Optimizer = Literal[
    "adamw_torch_fused",
    "adamw_torch",
    "adafactor",
    "sgd",
    "adagrad",
    "rmsprop",
    "adamw_8bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "lion_32bit",
    "lion_8bit",
    "paged_lion_8bit",
    "ademamix",
    "stable_adamw",
]
ADAMW = ("adamw_torch_fused", "adamw_torch")
RESUMABLE = (*ADAMW, "adafactor", "sgd", "adagrad", "rmsprop")  # the states of others are not plain tensors


@dataclass(frozen=True)
class Options:
    """The options that decide the losses, besides the data and the model.

    Attributes:
        lr: peak learning rate of AdamW (betas 0.9 and 0.999, eps 1e-8).
        decay: the schedule of the rate, by transformers' name; ``cosine`` and ``linear`` fall to zero.
        decay_options: of the schedule, ``lr_scheduler_kwargs`` of transformers.
        warmup: share of the steps over which the rate rises linearly to its peak.
        weight_decay: decoupled weight decay.
        clip: the gradient is scaled down to this norm; 0 leaves it.
        precision: what the forward computes in; weights in bfloat16 compute in bfloat16. ``float8`` is bfloat16 but
            for the products of attention and MLPs.
        seed: initial weights, dropout and the order of documents.
        dtype: of the trained weights, and of the optimizer's states.
        master_weights: with ``dtype="bfloat16"``, the optimizer keeps float32 copies of the weights and float32 states,
            and rounds to bfloat16 after each step.
        optim: the optimizer, by transformers' name; None is fused AdamW.
        settings: further fields of transformers' ``TrainingArguments`` that decide the losses: AdamW's betas
            and epsilon.
        neftune_alpha: size of NEFTune's noise on embeddings (Jain et al. 2023, arXiv:2310.05914); None adds none.
        lora: rank of low-rank adapters, trained in place of the weights; 0 trains the weights.
        lora_alpha: what the adapters are scaled by, times the rank; None is twice the rank.
        lora_dropout: share of the adapters' inputs that is dropped; None is 0.
        lora_targets: names of the layers that have adapters, with commas between; None is every linear layer but the
            output layer.

    Raises:
        PackingError: two of them contradict each other, or a number is negative or not finite.
    """

    lr: float = 1e-3
    decay: Decay = "cosine"
    decay_options: Mapping[str, Any] | None = None
    warmup: float = 0.05
    weight_decay: float = 0.0
    clip: float = 1.0
    precision: Literal["float32", "bfloat16", "float8"] = "float32"
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    master_weights: bool = False
    optim: Optimizer | None = None
    settings: Mapping[str, Any] | None = None
    neftune_alpha: float | None = None
    lora: int = 0
    lora_alpha: float | None = None
    lora_dropout: float | None = None
    lora_targets: str | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "warmup", "weight_decay", "clip", "neftune_alpha", "lora_alpha", "lora_dropout"):
            if (value := getattr(self, name)) is not None and not 0 <= value < math.inf:
                raise PackingError(f"--{name.replace('_', '-')} {value}: pass a finite number from 0 on")
        check_schedule(self.decay, self.decay_options)
        if self.optim is not None and self.optim not in get_args(Optimizer):
            raise PackingError(f"--optim {self.optim} is not served: pass one of {', '.join(get_args(Optimizer))}")
        if self.optim not in (None, *ADAMW) and self.master_weights:
            raise PackingError(f"--master-weights keeps copies for AdamW: leave --optim {self.optim} out")
        of_adapters = {"--lora-alpha": self.lora_alpha, "--lora-dropout": self.lora_dropout}
        for option, value in (of_adapters | {"--lora-targets": self.lora_targets}).items():
            if value is not None and not self.lora:
                raise PackingError(f"{option} is of adapters, and none are trained: pass --lora RANK too")
        if self.dtype == "bfloat16" and self.precision == "float32":
            raise PackingError(
                "--dtype bfloat16 computes in bfloat16 and --precision is float32: leave one of them out"
            )
        if self.master_weights and self.dtype == "float32":
            raise PackingError("--master-weights keeps float32 copies of bfloat16 weights: pass --dtype bfloat16 too")

    def learning_rate(self, step: int, steps: int) -> float:
        """The rate of 0-based ``step`` of ``steps``."""
        share = share_of_peak(self.decay, step, steps, warmup=self.warmup, lr=self.lr, options=self.decay_options)
        return self.lr * share
