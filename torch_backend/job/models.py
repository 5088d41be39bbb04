"""The model of a training job, for every task: loaded or made by a config, audited, given adapters, written.

A ModelJob -> :func:`build_model` or :func:`load_model` -> :func:`with_adapters` -> a trainer, which is audited
(:func:`audit_of`) -> :func:`write_model`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from packing_core.errors import PackingError, naming
from packing_core.extras import require
from packing_core.training.job import Audit, ModelJob, TrainJob, is_hub_name
from packing_core.training.options import Options
from torch_backend.auditing.model import AuditReport
from torch_backend.auditing.trainer import TrainerReport
from torch_backend.hf.anatomy.random_draws import is_random_setting
from torch_backend.patching import unpatch


def load_model(job: ModelJob, auto: str, **options: Any) -> Any:
    """The job's model on the CPU, in ``options.dtype``: its own safetensors, and what they lack by the seed.

    Args:
        auto: the class of transformers that loads it.

    Raises:
        PackingError: there is no such model, no safetensors, or it needs code of its own to run.
    """
    transformers = require("transformers", extra="hf")
    torch.manual_seed(job.options.seed)
    options |= {"dtype": getattr(torch, job.options.dtype), "trust_remote_code": job.trust_remote_code}
    load = getattr(transformers, auto).from_pretrained
    if job.options.lora and not job.merge_lora and getattr(options.get("config"), "quantization_config", None):
        from torch_backend.hf.mxfp4 import is_mxfp4, load_mxfp4

        load = load_mxfp4 if is_mxfp4(options["config"]) else load
    with naming(f"--model {job.model}"):
        return load(job.model, use_safetensors=True, **options)


def build_model(job: TrainJob) -> Any:
    """The causal language model of a job on the CPU, in ``options.dtype``: loaded, or random weights by the seed.

    Raises:
        PackingError: as :func:`load_model`, or the model does not fit the data.
    """
    transformers = require("transformers", extra="hf")
    arguments: dict[str, Any] = {"trust_remote_code": job.trust_remote_code}
    with naming(f"--model {job.model}"):
        if isinstance(job.model, str):
            if not Path(job.model).is_dir() and not is_hub_name(job.model):
                raise PackingError(f"--model {job.model}: no such folder or file, and not a hub name (`owner/name`)")
            config = transformers.AutoConfig.from_pretrained(job.model, **arguments)
            _refuse_images_alone(job.model, config, transformers)
            model = load_model(job, "AutoModelForCausalLM", config=_settled(config, job))
        else:
            config = _settled(transformers.AutoConfig.for_model(**job.model), job)
            torch.manual_seed(job.options.seed)
            model = transformers.AutoModelForCausalLM.from_config(config, **arguments)
            model = _in_dtype(model, getattr(torch, job.options.dtype))
    job.check_vocabulary(model.get_input_embeddings().num_embeddings)
    job.check_positions(getattr(model.config.get_text_config(), "max_position_embeddings", None))
    return model


def _refuse_images_alone(model: str, config: Any, transformers: Any) -> None:
    """Raises PackingError for a vision-language model that transformers has no language model of text alone of."""
    families = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if hasattr(config, "vision_config") and config.model_type not in families and not hasattr(config, "auto_map"):
        raise PackingError(
            f"--model {model} takes images ({config.model_type}), and none of the records of --data has any: "
            "pass records with images, or a language model of text"
        )


def _in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with its parameters in ``dtype``; its buffers, rotary frequencies among them, stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _settled(config: Any, job: TrainJob) -> Any:
    """The config without what a model's author may not decide here: kernels from the hub, and noise in a comparison."""
    if not job.trust_remote_code:
        config._attn_implementation = None
    if len(job.runs) > 1:  # runs are compared loss by loss
        for name, value in config.to_dict().items():
            if isinstance(value, float) and is_random_setting(name):
                setattr(config, name, 0.0)
    return config


def with_adapters(model: nn.Module, options: Options, task_type: str = "CAUSAL_LM") -> Any:
    """The model frozen, with the low-rank adapters of ``options`` (LoRA, Hu et al. 2021, arXiv:2106.09685).

    By default all linear layers but the output layer have adapters. Weights of lower precision have float32 adapters.

    Args:
        task_type: peft's name of the task, by which it knows which heads are trained whole.

    Raises:
        PackingError: no layer has one of the names of ``lora_targets``.
    """
    peft = require("peft", extra="hf")
    torch.manual_seed(options.seed)
    targets = options.lora_targets
    config = peft.LoraConfig(
        r=options.lora,
        lora_alpha=2 * options.lora if options.lora_alpha is None else options.lora_alpha,
        lora_dropout=options.lora_dropout or 0.0,
        target_modules="all-linear" if targets is None else [name.strip() for name in targets.split(",")],
        task_type=task_type,
    )
    with naming(f"--lora-targets {targets}", ValueError):
        return peft.get_peft_model(model, config)


def audit_of(report: AuditReport | TrainerReport) -> Audit:
    """The verdict of a report, and the line that says how it was reached; nothing is trained unless it is exact.

    Raises:
        ContaminationError: documents that are packed together see each other.
    """
    line = str(report)
    if isinstance(report, AuditReport):
        line = (
            f"max relative error against each document alone: logits {report.logits:.0e} (allowed "
            f"{report.allowed_logits:.0e}), loss {report.loss:.0e} ({report.allowed_loss:.0e}), gradients "
            f"{report.gradients:.0e} ({report.allowed_gradients:.0e}); perturbing one document changes the others by "
            f"{f'{report.leak:.0e}' if report.leak else '0 (no leak)'}"
        )
    return Audit(report.verdict == "exact", line).checked()


def shared_arguments(options: Options) -> dict[str, Any]:
    """The fields of ``TrainingArguments`` that every task gets alike."""
    return {
        "max_grad_norm": options.clip,
        "seed": options.seed % 2**32,  # numpy's generator takes no other
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "neftune_noise_alpha": options.neftune_alpha,
    }


def write_model(job: ModelJob, model: Any, weights: dict[str, Any] | None = None) -> None:
    """Writes a trained model, unpatched, as ``from_pretrained`` reads it, or its adapters as peft does.

    Args:
        weights: of a sharded model, gathered.
    """
    model = unpatch(model)
    if job.merge_lora:
        model = model.merge_and_unload()
    model.save_pretrained(job.output, state_dict=weights)
