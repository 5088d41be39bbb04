"""``--set NAME=VALUE``: fields of a trainer's arguments that have no option of their own.

The trainers of other tasks take every field. The steps of ``--task sft`` are Crosspack's own, so they take the fields
that have a meaning there, and the others are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from crosspack.reading.yaml_text import load_yaml
from packing_core.errors import PackingError, UnsupportedError, first_line
from packing_core.hints import names_here

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
# fields that decide the losses of --task sft -> the attribute of Options; the others of its fields are settings
_OF_OPTIONS = {
    "optim": "optim",
    "lr_scheduler_type": "decay",
    "lr_scheduler_kwargs": "decay_options",
    "neftune_noise_alpha": "neftune_alpha",
}
_SETTINGS = ("adam_beta1", "adam_beta2", "adam_epsilon")
# further fields that an option of --task sft sets
_OF_SFT = {
    "assistant_only_loss": "--loss completion",
    "completion_only_loss": "--loss completion",
    "dataset_text_field": "a column named text",
    "early_stopping_patience": "--early-stopping",
    "gradient_accumulation_steps": "--rows-per-step",
    "hub_model_id": "--push-to-hub",
    "load_best_model_at_end": "--keep-best",
    "max_length": "--capacity",
    "max_seq_length": "--capacity",
    "per_device_train_batch_size": "--rows-per-step",
    "push_to_hub": "--push-to-hub",
    "save_total_limit": "--keep-checkpoints",
    "torch_compile": "--compile",
    "warmup_ratio": "--warmup",
    "warmup_steps": "--warmup",
}


def meant(name: str, options: Iterable[str]) -> str | None:
    """Returns the option that other trainers and packers call by this name, or the nearest name; None without one.

    >>> meant("learning-rate", ["lr", "limit"]), meant("max_length", ["capacity"]), meant("lmit", ["lr", "limit"])
    ('lr', 'capacity', 'limit')
    """
    options = list(options)
    field = name.replace("-", "_")
    by_option = (BY_OPTION.get(field) or _OF_SFT.get(field, "")).split(" ")[0].removeprefix("--")
    for candidate in (by_option, *(ours.replace("_", "-") for ours in names_here(field))):
        if candidate in options:
            return candidate
    return next(iter(get_close_matches(name.replace("_", "-"), options, n=1)), None)


def of_sft(settings: Mapping[str, Any], options: object) -> dict[str, Any]:
    """The fields of ``--set`` for ``--task sft`` as attributes of Options.

    Raises:
        PackingError: an option sets the same, or a value is of another type.
        UnsupportedError: the steps of this task do not read the field.
    """
    found: dict[str, Any] = {}
    further: dict[str, Any] = {}
    for name, value in settings.items():
        if name in _OF_SFT:
            raise PackingError(f"--set {name}: pass {_OF_SFT[name]} in its place")
        if name in _OF_OPTIONS:
            option = _OF_OPTIONS[name]
            if getattr(options, option, None) not in (None, "cosine"):
                raise PackingError(f"--set {name} and --{option.replace('_', '-')} are the same: keep one of them")
            found[option] = value
        elif name in _SETTINGS:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise PackingError(f"--set {name} is {value!r}: pass a number")
            further[name] = value
        else:
            known = [*_OF_OPTIONS, *_SETTINGS]
            near = get_close_matches(name, known, n=1)
            hint = f"is it {near[0]}?" if near else "call crosspack.enable_packing(trainer) in a script of SFTTrainer"
            raise UnsupportedError(f"--set {name}: --task sft reads {', '.join(known)} alone: {hint}")
    alpha = found.get("neftune_alpha")
    if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, int | float) or alpha < 0):
        raise PackingError(f"--set neftune_noise_alpha is {alpha!r}: pass a number of 0 or more")
    return {**found, **({"settings": further} if further else {})}


def read_settings(options: Sequence[str] | None) -> dict[str, Any]:
    """The fields and values of ``--set``, each value read as YAML.

    >>> read_settings(["beta=0.2", "loss_type=ipo", "neftune_noise_alpha=5"])
    {'beta': 0.2, 'loss_type': 'ipo', 'neftune_noise_alpha': 5}

    Raises:
        PackingError: one is no ``NAME=VALUE``, comes twice, or is what an option sets.
    """
    found: dict[str, Any] = {}
    for text in options or ():
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
