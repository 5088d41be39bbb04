"""Compares the ways of running packed documents: stock transformers as people call it, and the patch.

A model (a folder's config, or a family's) -> a tiny random clone of every layer kind -> the same documents packed on
every path and alone -> one :class:`PathResult` a path, which ``crosspack audit`` prints. Nothing has to be patched.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import torch

from packing_core.batches.keys import BatchKey
from packing_core.budget import FLOAT32
from packing_core.errors import PackingError, UnsupportedModelError, first_line
from packing_core.extras import require
from torch_backend.auditing.compare import Computation, gradients_error, outputs_error
from torch_backend.auditing.probe import Probe, RowLayout
from torch_backend.auditing.tiny import all_families, family_config, tiny_config, tiny_model
from torch_backend.packed_tokens import plain
from torch_backend.patching import patch
from torch_backend.stacks.trainers import audit_sft, trainer_paths

# One row without padding; the first two documents fit into tiny windows, the last does not.
ROW = RowLayout((21, 9, 30), 60)
# Of the largest reference value. Rounding alone moves gradients of gemma3n by 2e-4, what leaks in any family by 9e-2.
LIMIT = 10 * FLOAT32

Batch = dict[str, Any]


def _tokens(batch: Batch) -> Batch:
    return {name: plain(batch[name]) for name in ("input_ids", "position_ids")}


# What people pass to an unpatched model, by the name that the table shows.
STOCK: dict[str, Callable[[Batch], Batch]] = {
    "position_ids": _tokens,
    "position_ids, all-ones mask": lambda batch: {
        **_tokens(batch),
        "attention_mask": torch.ones_like(batch["input_ids"]),
    },
    "position_ids, use_cache=False": lambda batch: {**_tokens(batch), "use_cache": False},
    "TRL's keys": lambda batch: {
        **_tokens(batch),
        **{name: batch[name] for name in BatchKey.STOCK},
        "use_cache": False,
    },
}
PATCHED = "patched"
PATHS = (*STOCK, PATCHED)


@dataclass(frozen=True)
class PathResult:
    """One path of one model; the differences are max error / max |each document alone|.

    Attributes:
        path: one of :func:`paths`.
        logits, gradients: the worst document's, the worst parameter's; NaN where the path raises, and the logits of a
            trainer, whose loss need not make any.
        raises: the first line of what it raised, or None.
    """

    path: str
    logits: float = float("nan")
    gradients: float = float("nan")
    raises: str | None = None

    @property
    def verdict(self) -> str:
        """``exact``, ``contaminated`` or ``refused``."""
        if self.raises is not None:
            return "refused"
        measured = [figure for figure in (self.logits, self.gradients) if not isnan(figure)]
        return "exact" if measured and max(measured) <= LIMIT else "contaminated"


def paths(trainer: str | None = None) -> tuple[str, ...]:
    """The paths of a survey, in order.

    Raises:
        PackingError: there is no trainer of that name.
    """
    return PATHS if trainer is None else (*STOCK, *trainer_paths(trainer), PATCHED)


def survey(config: Any, trainer: str | None = None) -> list[PathResult]:
    """Run every path on a tiny random clone of a config's model: CPU, float32, SDPA where the model has it.

    Args:
        config: of a transformers model.
        trainer: also audit this trainer, as people build it and after ``enable_packing``.

    Raises:
        UnsupportedModelError: no tiny clone can be built, or it does not train a single document.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModelError(
            f"{config.model_type} is no causal language model of transformers, and the paths that are compared are "
            "those of causal language models: judge an encoder by crosspack.audit(model); encoder-decoders cannot be "
            "packed"
        )
    try:
        model = tiny_model(tiny_config(config)).train()
        probe = Probe(model, ROW, marked=False)
        wanted = probe.alone()
    except Exception as error:
        raise UnsupportedModelError(f"no tiny clone: {type(error).__name__}: {first_line(error)}") from error
    results = [_measure(path, probe, choose, wanted) for path, choose in STOCK.items()]
    if trainer is not None:
        lists = [document.tolist() for document in probe.documents]
        results += [_measure_trainer(path, config, lists, on) for path, on in trainer_paths(trainer).items()]
    try:
        patch(model, verify=False)
    except UnsupportedModelError as error:
        return [*results, PathResult(PATCHED, raises=first_line(error))]
    return [*results, _measure(PATCHED, probe, dict, wanted)]


def families() -> list[str]:
    """Every model type that ``AutoModelForCausalLM`` knows."""
    require("transformers", extra="hf")
    return all_families()


def config_of(model: str) -> Any:
    """The config of a local folder, a ``config.json`` or a model type that transformers knows.

    Raises:
        PackingError: it is none of them.
    """
    transformers = require("transformers", extra="hf")
    path = Path(model)
    if path.exists():
        try:
            fields = json.loads((path / "config.json" if path.is_dir() else path).read_text())
            return transformers.AutoConfig.for_model(**fields)
        except Exception as error:  # the file may hold anything, and so may what reading it raises
            what = f"{type(error).__name__}: {first_line(error).split(' Should contain')[0]}"  # 500 model types
            raise PackingError(f"{model}: no config that transformers reads ({what})") from error
    try:
        return family_config(model)
    except KeyError:
        raise PackingError(
            f"{model} is neither a folder nor a model type of transformers {transformers.__version__}: "
            "give a folder that save_pretrained wrote, or a type such as llama"
        ) from None


def _measure(path: str, probe: Probe, choose: Callable[[Batch], Batch], wanted: Computation) -> PathResult:
    """A path is judged by its logits and their gradients, under a loss that is right on every path."""
    try:
        found = probe.packed(choose)
    except Exception as error:  # a stock path may raise anything; what it said is the result
        probe.model.zero_grad()
        return PathResult(path, raises=f"{type(error).__name__}: {first_line(error)}")
    return PathResult(path, outputs_error(found, wanted), gradients_error(found.gradients, wanted.gradients)[0])


def _measure_trainer(path: str, config: Any, documents: list[list[int]], enabled: bool) -> PathResult:
    try:
        report = audit_sft(config, documents, enabled)
    except Exception as error:  # as above
        return PathResult(path, raises=f"{type(error).__name__}: {first_line(error)}")
    return PathResult(path, gradients=max(report.gradients, report.loss, report.leak))
