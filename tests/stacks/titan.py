"""A tiny Llama in torchtitan's trainer on the CPU, for which it has no device type of its own.

``python -m torchtitan.train --module tests.stacks.titan --config tiny`` names :func:`tiny`; :func:`on_the_cpu` comes
before torchtitan is imported.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

WIDTH, HEADS, KEYS, LAYERS, CAPACITY = 32, 4, 2, 2, 64


def on_the_cpu() -> None:
    """Let torchtitan see the CPU as the accelerator, whose memory it does not measure."""
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    from torchtitan.components import metrics
    from torchtitan.distributed import utils

    peak = SimpleNamespace(max_reserved_gib=0, max_reserved_pct=0, max_active_gib=0, max_active_pct=0)
    peak.num_alloc_retries = peak.num_ooms = 0
    monitor = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: peak, reset_peak_stats=lambda: None)
    metrics.build_device_memory_monitor = lambda: monitor
    utils.set_pg_timeouts = lambda timeout, parallel_dims: None  # needs torch.distributed.set_timeout, new after 2.13


def tiny() -> Any:
    """Returns the configuration of one step in float32."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import TrainingConfig
    from torchtitan.models import llama3
    from torchtitan.trainer import Trainer

    spec = llama3.model_registry("debugmodel", attn_backend="varlen")
    spec.model = model(spec.model.vocab_size)
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=0.01),
        training=TrainingConfig(
            seq_len=CAPACITY, steps=1, max_norm=1e9, mixed_precision_param="float32", disable_cuda_graphs=True
        ),
    )


def model(vocabulary: int) -> Any:
    """Returns the configuration of the model, whose attention is varlen."""
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm

    return llama3.Llama3Model.Config(
        dim=WIDTH,
        vocab_size=vocabulary,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=WIDTH, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=WIDTH, out_features=vocabulary, param_init=llama3._output_linear_init(WIDTH)),
        layers=llama3._build_llama3_layers(
            n_layers=LAYERS,
            dim=WIDTH,
            n_heads=HEADS,
            n_kv_heads=KEYS,
            hidden_dim=2 * WIDTH,
            fuse_qkv=False,
            rope=ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=CAPACITY, theta=10000),
            attn_backend="varlen",
        ),
    )


def transformers_config(vocabulary: int) -> Any:
    """Returns the same model as transformers describes it."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        max_position_embeddings=CAPACITY,
        rms_norm_eps=1e-5,
    )
