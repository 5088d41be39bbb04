"""``--set NAME=VALUE``: fields of a trainer's arguments that have no option of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crosspack.reading.yaml_text import load_yaml
from packing_core.errors import PackingError, first_line

# fields that an option sets
BY_OPTION = {
    "bf16": "--precision bfloat16",
    "eval_steps": "--eval-every",
    "gradient_checkpointing": "--gradient-checkpointing",
    "learning_rate": "--lr",
    "max_grad_norm": "--clip",
    "max_steps": "--steps",
    "num_train_epochs": "--epochs",
    "output_dir": "--output",
    "per_device_train_batch_size": "--batch-size",
    "report_to": "--report-to",
    "save_steps": "--save-every",
    "seed": "--seed",
    "use_cpu": "--device cpu",
    "weight_decay": "--weight-decay",
}


def read_settings(given: Sequence[str] | None) -> dict[str, Any]:
    """The fields and values of ``--set``, each value read as YAML.

    >>> read_settings(["beta=0.2", "loss_type=ipo", "neftune_noise_alpha=5"])
    {'beta': 0.2, 'loss_type': 'ipo', 'neftune_noise_alpha': 5}

    Raises:
        PackingError: one is no ``NAME=VALUE``, comes twice, or is what an option sets.
    """
    found: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name.isidentifier():
            raise PackingError(f"--set {text}: pass a field of the trainer's arguments and its value, beta=0.2")
        if name in BY_OPTION:
            raise PackingError(f"--set {name}: pass {BY_OPTION[name]} in its place")
        if name in found:
            raise PackingError(f"--set {name} is given twice: keep one of them")
        try:
            found[name] = load_yaml(value)
        except PackingError as error:
            raise PackingError(f"--set {text}: {first_line(error)}") from error
    return found
