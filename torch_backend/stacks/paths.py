"""Compares the ways of running packed documents: stock transformers as people call it, and the patch.

A model (a folder's config, or a family's) -> a tiny random clone of every layer kind -> the same documents packed on
every path and alone -> one :class:`PathResult` a path, which ``crosspack audit`` prints. Nothing has to be patched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from packing_core.batches.keys import BatchKey
from packing_core.budget import FLOAT32
from packing_core.errors import PackingError, UnsupportedModelError, first_line
from packing_core.extras import require
from torch_backend.auditing.compare import gradients_error, outputs_error
from torch_backend.auditing.probe import Probe, RowLayout
from torch_backend.auditing.tiny import all_families, family_config, tiny_config, tiny_model
from torch_backend.auditing.trainer import TrainerReport, audit_trainer
from torch_backend.packed_tokens import plain
from torch_backend.patching import patch
from torch_backend.trainers.enable_packing import enable_packing

CAPACITY = 64
_SFT = "SFTTrainer(packing=True)"
# path of the table -> whether enable_packing is called
TRAINERS = {"trl": {_SFT: False, f"{_SFT}, enable_packing": True}}


def trainer_paths(name: str) -> dict[str, bool]:
    """Returns the paths of a trainer in the table, and of each whether ``enable_packing`` is called.

    Raises:
        PackingError: there is no trainer of that name.
    """
    if name not in TRAINERS:
        raise PackingError(f"--trainer {name}: there is {', '.join(TRAINERS)}")
    return TRAINERS[name]


def audit_sft(config: Any, documents: list[list[int]], enabled: bool) -> TrainerReport:
    """Audits TRL's ``SFTTrainer`` over documents, whose errors pass through."""
    datasets, trl = require("datasets", extra="hf"), require("trl", extra="hf")
    with TemporaryDirectory() as folder, _quiet():
        arguments = trl.SFTConfig(
            folder,
            packing=True,
            max_length=CAPACITY,
            per_device_train_batch_size=1,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            disable_tqdm=True,
        )
        data, tokenizer = datasets.Dataset.from_dict({"input_ids": documents}), placeholder_tokenizer()
        model = tiny_model(tiny_config(config))
        trainer = trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
        return audit_trainer(enable_packing(trainer, verify=False) if enabled else trainer)


def placeholder_tokenizer() -> Any:
    """Makes the tokenizer that a trainer needs to be built; the documents are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(4)}, unk_token="<3>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<0>", bos_token="<1>", eos_token="<2>", unk_token="<3>"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Datasets of three documents need no progress bars."""
    datasets = require("datasets", extra="hf")
    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not shown:
            datasets.enable_progress_bars()


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

    def of_outputs(choose: Callable[[Batch], Batch]) -> dict[str, Any]:
        """A path is judged by its logits and their gradients, under a loss that is right on every path."""
        try:
            packed = probe.packed(choose)
        finally:
            model.zero_grad()
        gradients, _ = gradients_error(packed.gradients, wanted.gradients)
        return {"logits": outputs_error(packed, wanted), "gradients": gradients}

    def of_trainer(enabled: bool) -> dict[str, Any]:
        report = audit_sft(config, [document.tolist() for document in probe.documents], enabled)
        return {"gradients": max(report.gradients, report.loss, report.leak)}

    results = [_result(path, of_outputs, choose) for path, choose in STOCK.items()]
    if trainer is not None:
        results += [_result(path, of_trainer, enabled) for path, enabled in trainer_paths(trainer).items()]
    try:
        patch(model, verify=False)
    except UnsupportedModelError as error:
        return [*results, PathResult(PATCHED, raises=first_line(error))]
    return [*results, _result(PATCHED, of_outputs, dict)]


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


def _result(path: str, measure: Callable[[Any], dict[str, Any]], of: Any) -> PathResult:
    try:
        return PathResult(path, **measure(of))
    except Exception as error:  # a stock path may raise anything; what it said is the result
        return PathResult(path, raises=f"{type(error).__name__}: {first_line(error)}")
