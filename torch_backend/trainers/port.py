"""The port of a trainer: how one kind of somebody else's trainer takes packed documents.

The arguments of ``enable_packing`` -> a :class:`PackingRequest` -> the :class:`TrainerPort` of the trainer's kind
(:func:`torch_backend.trainers.enable_packing.port_of`) -> :meth:`~TrainerPort.plan`, which refuses before anything is
changed -> :meth:`~TrainerPort.install`, which changes the trainer through :class:`.changes.Changes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from packing_core.errors import PackingError, UnsupportedError, naming
from packing_core.extras import require
from packing_core.planning.cost import Cost
from packing_core.planning.pieces import Overflow
from packing_core.planning.rule import RowRule
from torch_backend.hf.anatomy.structure import causal_lm, with_values
from torch_backend.hf.explaining import SHARERS
from torch_backend.hf.float8 import Precision, check_float8, to_bfloat16, to_float8
from torch_backend.hf.inputs.prefixes import Sharing
from torch_backend.hf.override import original_class
from torch_backend.hf.patch import state_of
from torch_backend.patching import patch, unpatch
from torch_backend.steps.dynamic_compile import run_plain_layers
from torch_backend.steps.memory import Level, Memory, check_level, hold_level, release_level
from torch_backend.trainers.changes import Changes

require("transformers", extra="hf")

from transformers import PreTrainedModel  # noqa: E402

LIMITS = ("overflow", "context", "min_piece", "max_segments")
ORDERS = ("order", "keys", "weights", "equal_cost")
_DEFAULTS = {"capacity": None} | {entry.name: entry.default for entry in fields(RowRule) if entry.name != "capacity"}


@dataclass(frozen=True)
class PackingRequest:
    """The arguments of :func:`torch_backend.enable_packing`.

    Attributes:
        rows: those that decide the rows, except the ones that have their defaults.
        implementation, verify, fast, memory, share_prefix, precision: as there.
    """

    rows: Mapping[str, Any]
    implementation: str | Sequence[str] = "auto"
    verify: bool = True
    fast: bool = True
    memory: Memory | None = None
    share_prefix: Sharing = "auto"
    precision: Precision | None = None

    @staticmethod
    def changed(**rows: Any) -> dict[str, Any]:
        """Returns the options of rows that have not their defaults."""
        return {
            name: value
            for name, value in rows.items()
            if type(value) is not type(_DEFAULTS[name]) or value != _DEFAULTS[name]
        }

    @property
    def capacity(self) -> int | None:
        """Tokens of a row, as far as they were given."""
        return self.rows.get("capacity")

    @property
    def overflow(self) -> Overflow:
        """The policy for documents that are longer than a row."""
        return self.rows.get("overflow", "error")

    def rule(self, capacity: int, cost: Cost | None = None) -> RowRule:
        """Returns the rule by which documents become rows of ``capacity`` tokens."""
        return RowRule(**{**self.rows, "capacity": capacity}, cost=cost)

    def refuse(self, why: str, *names: str, way_out: str = "leave it out") -> None:
        """
        Raises:
            PackingError: an option of rows is set, or one of ``names``, which has no effect because of ``why``.
        """
        for name, value in self.rows.items():
            if name in names or not names:
                number = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else repr(value)
                raise PackingError(f"{why}, so {name}={number} has no effect: {way_out}", option=name)

    def refuse_order(self, why: str) -> None:
        """
        Raises:
            PackingError: an order or ``equal_cost`` is set, which has no effect because of ``why``.
        """
        self.refuse(why, *ORDERS, way_out="leave it out, or give the documents in that order")


class TrainerPort:
    """Packing in one trainer."""

    def __init__(self, trainer: Any, request: PackingRequest) -> None:
        self.trainer = trainer
        self.request = request
        self.name = type(trainer).__name__

    def plan(self) -> None:
        """Decide how the trainer takes packed documents; nothing of it is changed.

        Raises:
            PackingError: its model, data or arguments rule packing out, or an option has no effect.
        """
        raise NotImplementedError

    def install(self, changes: Changes) -> None:
        """Patch the trainer's models and change the trainer as planned."""
        raise NotImplementedError

    @staticmethod
    def models(trainer: Any) -> list[Any]:
        """Returns the models of a trainer of the port's kind that it patches."""
        return models_of(trainer)

    @classmethod
    def uninstall(cls, trainer: Any) -> None:
        """Unpatch the models of a trainer whose changes were taken back."""
        for model in cls.models(trainer):
            run_plain_layers(model)
            release_level(model)
            unpatch(model)

    def check_options(self, *, has_rows: bool, shares: bool = False) -> None:
        """
        Args:
            has_rows: whether the fast step trains rows here.
            shares: whether documents may share their common beginnings.

        Raises:
            PackingError: the model cannot have the requested level of memory, or the requested precision, or cannot
                share prefixes as requested.
        """
        if self.request.share_prefix is True and not shares:
            raise UnsupportedError(f"{self.name} shares no prefixes: {SHARERS}")
        if self.request.precision is not None:
            if getattr(self.trainer, "is_deepspeed_enabled", False):
                raise UnsupportedError(f"precision={self.request.precision!r} is not served under DeepSpeed: use FSDP2")
            check_float8(self.trainer.model, self.request.precision)
        if self.request.memory is not None:
            check_level(self.trainer.model, self.request.memory)
        if self.request.memory == "auto" and not has_rows:
            raise UnsupportedError(
                'memory="auto" follows from rows that the fast step trains, and here it trains none: name a level, '
                'memory="full" for example'
            )

    def refuse_virtual_tokens(self) -> None:
        """
        Raises:
            UnsupportedError: adapters put virtual tokens before a row, which each of its documents would need.
        """
        for model in self.models(self.trainer):
            for adapter in (getattr(model, "peft_config", None) or {}).values():
                if getattr(adapter, "is_prompt_learning", False):
                    raise UnsupportedError(
                        f"{self.name} trains a {adapter.peft_type} adapter, whose virtual tokens every document of a "
                        "row would need: use LoRA"
                    )

    def patch(self, models: Sequence[Any], changes: Changes, mesh: Any) -> None:
        """Patch models of the trainer, and set the memory of the trained one; also of those that it makes later.

        Models that the trained one is compared with multiply as it does; a teacher keeps its precision.

        Raises:
            UnsupportedModelError: one of them cannot be made exact; then none is patched.
        """
        trainer, request = self.trainer, self.request
        options: Any = {"implementation": request.implementation, "verify": request.verify, "mesh": mesh}
        patched = [model for model in models if state_of(causal_lm(model)) is None]
        teacher = getattr(trainer, "teacher_model", None)
        try:
            for model in models:
                patch(model, **options)
                if request.precision is None or model is teacher:
                    to_bfloat16(model)  # of an earlier call
                else:
                    to_float8(model, request.precision)
        except PackingError:
            for model in patched:
                unpatch(model)
            raise
        level: Level | None = "none" if request.memory == "auto" else request.memory
        if level is not None:
            hold_level(trainer.model, level)
            for name in ("activation_checkpointing", "gradient_checkpointing"):  # train() would set its own over it
                if hasattr(trainer.args, name):
                    changes.set(name, False, of=trainer.args)
        for name in ("_load_from_checkpoint", "_load_best_model"):
            changes.wrap(name, _load_renamed, trainer)
        if trainer.model_init is not None:  # train() makes another model
            changes.wrap("call_model_init", _patched_model_init, level, request.precision, options)


def _patched_model_init(
    call_model_init: Any, level: Level | None, precision: Precision | None, options: Any, trial: Any = None
) -> Any:
    """As ``Trainer.call_model_init``; the model that it makes is patched."""
    model = patch(call_model_init(trial), **options)
    if precision is not None:
        to_float8(model, precision)
    if level is not None:
        hold_level(model, level)
    return model


def _load_renamed(load: Any, trainer: Any, *args: Any, **options: Any) -> None:
    """As ``Trainer``'s, which looks for the model's own names in a checkpoint and leaves out all other weights.

    ``save_pretrained`` gives other names to those of many families, of experts and of images for example. They are read
    by ``from_pretrained``, in float32, which narrower parameters take without another rounding.
    """
    model, warn = trainer.model, trainer._issue_warnings_after_load
    results: list[Any] = []
    with with_values([(trainer, "_issue_warnings_after_load", results.append)]):
        load(*args, **options)
    for result in results:
        if result.unexpected_keys and isinstance(model, PreTrainedModel):
            folder = args[0] if args else options.get("resume_from_checkpoint", trainer.state.best_model_checkpoint)
            kind: Any = original_class(model)
            way_out = f"it has weights under other names than {kind.__name__}, so from_pretrained must take its folder"
            with naming(f"{folder} cannot be read", way_out=way_out, with_kind=True):
                saved = kind.from_pretrained(folder, dtype=torch.float32)
            result = model.load_state_dict(saved.state_dict(), strict=False)
        warn(result)


def models_of(trainer: Any) -> list[Any]:
    """Returns the models of a trainer: the one that it trains, and the reference or teacher if there is one."""
    others = (getattr(trainer, name, None) for name in ("ref_model", "teacher_model"))
    return [model for model in (trainer.model, *others) if model is not None]
