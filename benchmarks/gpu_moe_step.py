"""The training step of models with experts, cut to a few layers: sections of ``python -m benchmarks.gpu_moe``.

Models train in full, or by adapters of rank 16 on attention and experts. Rules and figures are those of
:mod:`.gpu_step`. All shapes run at the shorter rows first, ours and ``grouped_mm`` before the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch

from benchmarks.clock import DEVICE, QUICK, TOY
from benchmarks.gpu_step import Contender, Loss, ours_alone, ours_compiled, race, stock, stock_liger
from benchmarks.gpu_trainers import TRAINER, measure
from benchmarks.report import Result
from benchmarks.shapes import SHAPES as MODELS
from benchmarks.shapes import config
from benchmarks.workload import Shape

ROWS = (256,) if TOY else (8_192,) if QUICK else (8_192, 16_384)
WHOLE_LAYERS = 2 if TOY else 24  # of gpt-oss-20b
OURS = Contender("ours, compiled and captured", ours_compiled, "fixed", captured=True)
RECOMPUTED = Contender(
    "ours, compiled and captured, layers recomputed", partial(ours_compiled, memory="full"), "fixed", captured=True
)
TOY_RUNS = {"ours", "padded, grouped_mm"}


@dataclass(frozen=True)
class Experts:
    """A model with experts.

    Attributes:
        layers, lora_layers: of the step, in full and with adapters.
        products: matrices of a token's width x an expert's in an expert.
        attention: what transformers runs on each document alone.
    """

    name: str
    layers: int = 2
    lora_layers: int = 2
    products: int = 3
    attention: str = "sdpa"

    @property
    def shape(self) -> str:
        return self.name.partition(",")[0]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Experts, those that a token visits, the width of a token and that inside an expert."""
        whole = config(self.shape)
        inner = getattr(whole, "moe_intermediate_size", None) or whole.intermediate_size
        return getattr(whole, MODELS[self.shape].count), whole.num_experts_per_tok, whole.hidden_size, inner

    def make_experts(self) -> Any:
        """The experts of one layer, with random weights."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config(self.shape, layers=MODELS[self.shape].few))
        experts = next(m for m in model.modules() if hasattr(m, "_apply_gate")).to_empty(device=DEVICE)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        return experts

    @cache  # noqa: B019  one shape a process, so that what is right for it is computed once
    def step(self, rows: Sequence[int], lora: bool, whole: int | None = None) -> Shape:
        """The training step: a model of some or ``whole`` layers; the checked one has fewer layers and experts."""
        layers = whole or (self.lora_layers if lora else self.layers)
        make, name = partial(config, self.shape, layers=layers), f"{self.name}, {layers} layers{', LoRA' * lora}"
        return Shape(name, make, rows, lora=lora, steps=4, attention=self.attention, adapters=adapted_model)


SHAPES = [
    Experts("Qwen3-30B-A3B", 6, 12),
    Experts("gpt-oss-20b", 4, 8, attention="eager"),
    Experts("Qwen3.5-35B-A3B", 4, 8),
    Experts("DeepSeek-V3, 64 experts", 2, 3),
]
PEFT = Experts("Qwen3-30B-A3B, PEFT's layer")


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


def with_experts(name: str, prepare: Callable[[Any], Loss]) -> Callable[[Any], Loss]:
    """As ``prepare``, with the experts on the implementation of that name, which a patch leaves alone."""

    def prepared(model: Any) -> Loss:
        model.set_experts_implementation(available(name))
        for module in model.modules():
            if hasattr(module, "_apply_gate"):
                module.forward = partial(type(module).forward, module)  # a patch keeps forwards that others set
        return prepare(model)

    return prepared


@cache
def stock_attention() -> str | None:
    """Flash-attn-4 where it is installed, else the shape's."""
    from importlib.util import find_spec

    return "flash_attention_4" if not TOY and find_spec("flash_attn") and find_spec("flash_attn.cute") else None


def contenders() -> list[Contender]:
    """Ours, and the best stock step."""
    stock_on, grouped = stock_attention(), with_experts("grouped_mm", stock)
    # Liger's experts would stand in place of grouped_mm, and are tuned for minutes (0.8.5).
    liger = with_experts("grouped_mm", partial(stock_liger, swiglu=False))
    return [
        OURS,
        Contender("stock packed, grouped_mm", grouped, "stock", stock_on),
        Contender("stock packed, grouped_mm, Liger", liger, "stock", stock_on),
        Contender("ours", ours_alone),
        Contender("padded, grouped_mm", grouped, "padded", capacities=ROWS[:1]),
    ]


def run_step(shapes: Sequence[Experts], lora: bool = False) -> Iterator[Result]:
    racing = [c for c in contenders() if not TOY or c.name in TOY_RUNS]
    for rows in ROWS:
        these = [replace(c, capacities=(rows,)) for c in racing if not c.capacities or rows in c.capacities]
        for shape in shapes:
            yield from race(shape.step(ROWS, lora), these)


def run_adapted_step(shapes: Sequence[Experts]) -> Iterator[Result]:
    yield from run_step(shapes, lora=True)


def run_trainer(shapes: Sequence[Experts]) -> Iterator[Result]:
    """``Trainer`` after ``enable_packing`` on the same rows, in full and with adapters."""
    for shape, lora in product(shapes, (False, True)):
        yield from measure(shape.step(ROWS, lora), TRAINER, ROWS[0], epochs=1, repeat=1)


def run_whole(shapes: Sequence[Experts]) -> Iterator[Result]:
    """All layers of gpt-oss-20b with adapters: the memory of one card."""
    for shape in shapes:
        if shape.name.startswith("gpt-oss"):
            racing = [replace(c, capacities=ROWS[:1]) for c in (RECOMPUTED, OURS)]
            yield from race(shape.step(ROWS, lora=True, whole=WHOLE_LAYERS), racing)
