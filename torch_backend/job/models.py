"""The models of a training job: loaded by name or made by a config, and adapters that are trained in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from packing_core.errors import PackingError, first_line
from packing_core.extras import require
from packing_core.training.job import TrainJob, is_hub_name
from packing_core.training.options import Options
from torch_backend.hf.anatomy.random_draws import is_random_setting
from torch_backend.patching import unpatch


def build_model(job: TrainJob) -> Any:
    """The job's model on the CPU, in ``options.dtype``: its own safetensors, or random weights by the seed.

    Raises:
        PackingError: the folder or hub name has no such model, no safetensors, or needs code of its own to run.
    """
    transformers = require("transformers", extra="hf")
    torch.manual_seed(job.options.seed)
    arguments: dict[str, Any] = {"trust_remote_code": job.trust_remote_code}
    dtype = getattr(torch, job.options.dtype)
    try:
        if not isinstance(job.model, str):
            config = transformers.AutoConfig.for_model(**job.model)
            model = transformers.AutoModelForCausalLM.from_config(_settled(config, job), **arguments)
            return _in_dtype(model, dtype)
        if not Path(job.model).is_dir() and not is_hub_name(job.model):
            raise PackingError(f"--model {job.model}: no such folder or file, and not a hub name (`owner/name`)")
        config = transformers.AutoConfig.from_pretrained(job.model, **arguments)
        _refuse_images_alone(job.model, config, transformers)
        return transformers.AutoModelForCausalLM.from_pretrained(
            job.model, config=_settled(config, job), dtype=dtype, use_safetensors=True, **arguments
        )
    except PackingError:
        raise
    except Exception as error:  # files of the folder may hold anything, and so may what reading them raises
        raise PackingError(f"--model {job.model}: {first_line(error)}") from error


def _refuse_images_alone(model: str, config: Any, transformers: Any) -> None:
    """Raises PackingError for a vision-language model that transformers has no language model of text alone of."""
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if hasattr(config, "vision_config") and config.model_type not in known and not hasattr(config, "auto_map"):
        raise PackingError(
            f"--model {model} takes images ({config.model_type}), and none of the first records of --data has any: "
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
    try:
        return peft.get_peft_model(model, config)
    except ValueError as error:
        raise PackingError(f"--lora-targets {targets}: {first_line(error)}") from error


def write_model(model: Any, folder: Path, weights: dict[str, Any] | None = None, *, merge_lora: bool = False) -> None:
    """Writes a trained model, unpatched, as ``from_pretrained`` reads it, or its adapters as peft does.

    Args:
        weights: of a sharded model, gathered.
        merge_lora: add the adapters to the weights and write those.
    """
    model = unpatch(model)
    if merge_lora:
        model = model.merge_and_unload()
    model.save_pretrained(folder, state_dict=weights)
