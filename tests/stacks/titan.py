"""A tiny Llama and a tiny Qwen3.5 in torchtitan's trainer on the CPU, for which it has no device type of its own.

``python -m torchtitan.train --module tests.stacks.titan --config tiny`` names :func:`tiny`, ``--config hybrid``
:func:`hybrid`; :func:`prepare` comes before torchtitan is imported.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

VOCABULARY, WIDTH, HEADS, KEYS, LAYERS, CAPACITY = 64, 32, 4, 2, 2, 64
HYBRID = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


def prepare() -> None:
    """Make torchtitan run on the CPU, and its hybrid's reference in transformers run plain torch."""
    on_the_cpu()
    sys.modules["fla"] = None  # type: ignore[assignment] # not importable: its kernels, which transformers binds, need a GPU
    import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    del sys.modules["fla"]


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
    """Returns the configuration of one step of a Llama in float32."""
    from torchtitan.models import llama3

    spec = llama3.model_registry("debugmodel", attn_backend="varlen")
    spec.model = model(VOCABULARY)
    return _one_step(spec)


def hybrid() -> Any:
    """Returns the configuration of one step of a Qwen3.5 in float32: a gated delta net, then attention."""
    from torchtitan.components.tokenizer import MultiModalTokenizer
    from torchtitan.models import qwen3_5

    spec = qwen3_5.model_registry("debugmodel", attn_backend="varlen")
    spec.model = hybrid_model()
    names = MultiModalTokenizer.TOKEN_FIELDS
    return _one_step(spec, tokenizer=MultiModalTokenizer.Config(**{f"{name}_token": "<pad>" for name in names}))


def _one_step(spec: Any, **options: Any) -> Any:
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import TrainingConfig
    from torchtitan.trainer import Trainer

    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=0.01),
        training=TrainingConfig(
            seq_len=CAPACITY, steps=1, max_norm=1e9, mixed_precision_param="float32", disable_cuda_graphs=True
        ),
        **options,
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


def hybrid_model() -> Any:
    """Returns the configuration of the hybrid, whose vision encoder is not called."""
    from torchtitan.models import qwen3_5
    from torchtitan.models.common import Embedding, Linear

    vocabulary, width = HYBRID["vocab_size"], HYBRID["hidden_size"]
    rotary = HYBRID["head_dim"] // 4
    layers = qwen3_5._build_qwen35_layers(
        rope=qwen3_5.MRoPE.Config(dim=rotary, max_seq_len=CAPACITY, theta=10000.0, mrope_section=[2, 1, 1]),
        attn_backend="varlen",
        n_layers=HYBRID["num_hidden_layers"],
        dim=width,
        n_heads=HYBRID["num_attention_heads"],
        n_kv_heads=HYBRID["num_key_value_heads"],
        head_dim=HYBRID["head_dim"],
        rotary_dim=rotary,
        hidden_dim=HYBRID["intermediate_size"],
        n_key_heads=HYBRID["linear_num_key_heads"],
        n_value_heads=HYBRID["linear_num_value_heads"],
        key_head_dim=HYBRID["linear_key_head_dim"],
        value_head_dim=HYBRID["linear_value_head_dim"],
        full_attention_interval=2,
    )
    layers[0].delta_net.param_init["A_log"] = lasting
    vision = {"dim": 16, "ffn_dim": 16, "num_layers": 1, "num_heads": 2, "out_hidden_size": width}
    patches = {"patch_size": 4, "temporal_patch_size": 1, "spatial_merge_size": 1, "num_position_embeddings": 16}
    return qwen3_5.Qwen35Model.Config(
        vocab_size=vocabulary,
        dim=width,
        norm=qwen3_5._offset_norm(width),
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=width, param_init=qwen3_5._EMBEDDING_INIT
        ),
        lm_head=Linear.Config(
            in_features=width, out_features=vocabulary, param_init=qwen3_5._output_linear_init(width)
        ),
        layers=layers,
        vision_encoder=qwen3_5._qwen35_vision_encoder_config(**vision, **patches),
    )


def lasting(weight: Any) -> None:
    """Set decays so slow that a state of the document before would show, where torchtitan's forget it in a token."""
    weight.data.uniform_(0.05, 0.5).log_()


def transformers_hybrid_config() -> Any:
    """Returns the hybrid as transformers describes it."""
    from transformers.models.qwen3_5 import Qwen3_5TextConfig

    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    return Qwen3_5TextConfig(
        **HYBRID,
        layer_types=["linear_attention", "full_attention"],
        max_position_embeddings=CAPACITY,
        rope_parameters=rope,
        tie_word_embeddings=False,
    )
