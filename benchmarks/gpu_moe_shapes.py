"""The shapes of the benchmark of experts: four models with random weights, and the layer that PEFT's issue measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from benchmarks.gpu_clock import DEVICE, TOY
from benchmarks.gpu_workload import Shape

VOCABULARY = 199


@dataclass(frozen=True)
class Experts:
    """A model with experts.

    Attributes:
        config: number of layers, number of experts -> the config of the model.
        experts, top_k: how many there are, and how many a token visits.
        width, inner: of a token, and inside an expert.
        layers, lora_layers: of the step, in full and with adapters.
        products: matrices of width x inner in an expert.
        attention: what transformers runs on each document alone.
        kinds: layers of the checked model, which has one of each kind.
    """

    name: str
    config: Callable[[int, int], Any]
    experts: int
    top_k: int
    width: int
    inner: int
    layers: int = 2
    lora_layers: int = 2
    products: int = 3
    attention: str = "sdpa"
    kinds: int = 2

    def make_experts(self) -> Any:
        """The experts of one layer, with random weights."""
        config = self.config(self.kinds, self.experts)
        with torch.device("meta"):
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_config(config)
        experts = next(m for m in model.modules() if hasattr(m, "_apply_gate")).to_empty(device=DEVICE)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        return experts

    @cache  # noqa: B019  one shape a process, so that what is right for it is computed once
    def step(self, rows: Sequence[int], lora: bool, whole: int | None = None) -> Shape:
        """The training step: a model of some or ``whole`` layers; the checked one has fewer layers and experts."""
        layers = whole or (self.lora_layers if lora else self.layers)

        def make(few: bool) -> Any:
            return self.config(self.kinds if few or TOY else layers, min(self.experts, 16) if few else self.experts)

        name = f"{self.name}, {layers} layers{', LoRA' if lora else ''}"
        return Shape(name, make, rows, lora=lora, steps=4, attention=self.attention, adapters=adapted_model)


def available(name: str) -> str:
    """The name, if transformers has an implementation of experts of that name."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if name != "eager" and name not in ALL_EXPERTS_FUNCTIONS:
        raise LookupError(f"transformers has no experts implementation {name!r}")
    return name


def adapted(experts: Any) -> Any:
    """Experts under PEFT, with adapters of rank 16 on both projections; the weights themselves do not train."""
    from peft import LoraConfig, get_peft_model

    class Alone(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = experts

        def forward(self, *arguments: Any) -> Any:
            return self.experts(*arguments)

    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=16, target_modules=[], target_parameters=parameters, init_lora_weights=False)
    return get_peft_model(Alone(), config).to(experts.down_proj.dtype)


def adapted_model(model: Any) -> Any:
    """The model under PEFT, with adapters of rank 16 on attention and on both projections of the experts."""
    from peft import LoraConfig, get_peft_model

    attention = ["q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
    config = LoraConfig(
        r=16, target_modules=attention, target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        init_lora_weights=False,
    )  # fmt: skip
    return get_peft_model(model, config).to(model.dtype)


_TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY,
}  # fmt: skip


def gpt_oss(layers: int, experts: int) -> Any:
    from transformers import GptOssConfig

    tiny = {k: v for k, v in _TINY.items() if k != "moe_intermediate_size"} if TOY else {}
    return GptOssConfig(
        num_hidden_layers=layers, num_local_experts=experts, num_experts_per_tok=2 if TOY else 4, **tiny
    )


def qwen3(layers: int, experts: int) -> Any:
    from transformers import Qwen3MoeConfig

    size = _TINY if TOY else {"vocab_size": 151_936, "head_dim": 128}
    return Qwen3MoeConfig(
        num_hidden_layers=layers, num_experts=experts, num_experts_per_tok=2 if TOY else 8, norm_topk_prob=True,
        tie_word_embeddings=False, **size,
    )  # fmt: skip


def qwen35(layers: int, experts: int) -> Any:
    from transformers import Qwen3_5MoeTextConfig

    tiny: dict[str, Any] = {}
    if TOY:
        tiny = {k: v for k, v in _TINY.items() if k != "intermediate_size"} | {
            "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        }  # fmt: skip
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4)
    return Qwen3_5MoeTextConfig(
        num_hidden_layers=layers, layer_types=kinds, num_experts=experts, num_experts_per_tok=2 if TOY else 8, **tiny
    )


def deepseek(layers: int, experts: int) -> Any:
    """One dense layer first; sigmoid routing in groups; a shared expert."""
    from transformers import DeepseekV3Config

    groups: dict[str, Any] = {"n_group": 2, "topk_group": 1} if TOY else {"n_group": 8, "topk_group": 4}
    tiny: dict[str, Any] = {}
    if TOY:
        tiny = {k: v for k, v in _TINY.items() if k != "head_dim"} | {
            "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8, "v_head_dim": 16,
        }  # fmt: skip
    return DeepseekV3Config(
        num_hidden_layers=layers, first_k_dense_replace=1, n_routed_experts=experts, n_shared_experts=1,
        num_experts_per_tok=2 if TOY else 8, tie_word_embeddings=True, **groups, **tiny,
    )  # fmt: skip


def _shape(name: str, config: Any, experts: int, top_k: int, width: int, inner: int, **others: Any) -> Experts:
    if TOY:
        experts, top_k, width, inner = 8, 2, 64, 32
    return Experts(name, config, experts, top_k, width, inner, **others)


SHAPES = [
    _shape("Qwen3-30B-A3B", qwen3, 128, 8, 2_048, 768, layers=6, lora_layers=12),
    _shape("gpt-oss-20b", gpt_oss, 32, 4, 2_880, 2_880, layers=4, lora_layers=8, attention="eager"),
    _shape("Qwen3.5-35B-A3B", qwen35, 256, 8, 2_048, 512, layers=4, lora_layers=8, kinds=4),
    _shape("DeepSeek-V3, 64 experts", deepseek, 64, 8, 7_168, 2_048, layers=2, lora_layers=3),
]
PEFT = _shape("PEFT's layer", qwen3, 128, 8, 2_048, 768)
