"""The models of a training job: loaded by name or made by a config, and adapters that are trained in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from packing_core.errors import PackingError, first_line
from packing_core.extras import require
from packing_core.training.job import TrainJob, is_hub_name


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
        return transformers.AutoModelForCausalLM.from_pretrained(
            job.model, config=_settled(config, job), dtype=dtype, use_safetensors=True, **arguments
        )
    except PackingError:
        raise
    except Exception as error:  # files of the folder may hold anything, and so may what reading them raises
        raise PackingError(f"--model {job.model}: {first_line(error)}") from error


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
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(config, name, 0.0)
    return config


def with_adapters(model: nn.Module, rank: int, seed: int) -> Any:
    """The model frozen, with low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) on all its linear layers.

    The output layer has none. Weights of lower precision have float32 adapters.
    """
    peft = require("peft", extra="hf")
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)
