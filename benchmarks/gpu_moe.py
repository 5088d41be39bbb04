"""Mixtures of experts on one GPU: the layer, and the layer with adapters. For the step see :mod:`.gpu_moe_step`.

    python -m benchmarks.gpu_moe                                  # all of it; without a GPU tiny, to see that it runs
    python -m benchmarks.gpu_moe --only layer --budget 240        # one section; nothing is measured after 240 seconds
    python -m benchmarks.gpu_moe --only step --match 'grouped_mm' # some contenders
    python -m benchmarks.gpu_moe --only step --limit 90           # the most seconds that a contender may take
    python -m benchmarks.gpu_moe --shapes Qwen3 gpt-oss           # shapes whose name begins so
    python -m benchmarks.gpu_moe --output results                 # where moe.json goes, renewed with every figure

- ``layer``: the experts alone, at the tokens of one row. Routing is drawn once per shape and the same for all.
- ``lora``: experts with adapters of rank 16 on both projections, trained alone; 128 experts of 2,048 x 768, 4,096
  tokens, 8 experts each.
- ``step``: optimizer steps of models cut to a few layers, by the rules of ``benchmarks.gpu_step``.
- ``step-lora``: the same with adapters of rank 16 on attention and experts.
- ``trainer``: ``Trainer`` after ``enable_packing``, both in full and with adapters, by the rules of
  ``benchmarks.gpu_trainers``.
- ``whole``: the step with adapters, on all layers of gpt-oss-20b, for its memory.

Useful FLOPs of a layer are those of the products of each token with the experts that it visits: two products forward,
and per product its input's gradient and, where weights train, theirs. Errors are relative, in the 2-norm, against
float64 by transformers' loop over experts; the largest is of the gradient that the note names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.clock import (
    DEVICE,
    DTYPE,
    QUICK,
    TOY,
    gpu_ms,
    graph_ms,
    header,
    matrix_rate,
    peak_gib,
    relative_error,
    waits,
)
from benchmarks.gpu_moe_step import (
    PEFT,
    SHAPES,
    Experts,
    adapted,
    available,
    run_adapted_step,
    run_step,
    run_trainer,
    run_whole,
)
from benchmarks.harness import NOTE, Figures, in_turn, measured, parsed, parser
from benchmarks.report import Result, collected
from torch_backend.hf.anatomy.expert_layouts import layout_of
from torch_backend.hf.edits.packed_experts import kernel_edits
from torch_backend.hf.entry import run_with
from torch_backend.hf.experts import LAYOUT
from torch_backend.hf.forward import PackedForward
from torch_backend.hf.override import original_class, restore
from torch_backend.segments import PackedMetadata

LIMIT = 1e-4 if TOY else 0.1  # of what is wrong; what bfloat16 rounds is a figure
OURS = "crosspack"
IMPLEMENTATIONS = (OURS, "grouped_mm", "sonicmoe", "batched_mm", "eager")
ROWS = (64,) if TOY else (8_192,) if QUICK else (8_192, 16_384)
PEFT_TOKENS = 64 if TOY else 4_096


# -- the layer ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """The experts of one layer, some tokens and where they go.

    Attributes:
        module: transformers' experts.
        x: [T, D]; requires a gradient.
        indices, weights: [T, K]; the weights require a gradient.
        out: the gradient of the result, [T, D].
        trained: the parameters that train.
        packed: the packed forward that the layer is told of, in which ours runs; None for others.
    """

    module: Any
    x: Tensor
    indices: Tensor
    weights: Tensor
    out: Tensor
    trained: list[Tensor]
    packed: PackedForward | None = None

    def forward(self) -> Tensor:
        return run_with("layer", self.packed, self.module, self.x, self.indices, self.weights)

    def both(self) -> tuple[Tensor, list[Tensor]]:
        """The result; gradients of tokens, routing weights and what trains."""
        result = self.forward()
        return result, list(torch.autograd.grad(result, [self.x, self.weights, *self.trained], self.out))


def run_layer(shapes: Sequence[Experts]) -> Iterator[Result]:
    for shape in shapes:
        for tokens in ROWS:
            yield from layers(shape, tokens, f"experts of {shape.name}")


def run_lora(_: Sequence[Experts]) -> Iterator[Result]:
    yield from layers(PEFT, PEFT_TOKENS, "experts with adapters, PEFT's layer", lora=True)


def layers(shape: Experts, tokens: int, section: str, lora: bool = False) -> Iterator[Result]:
    """Every implementation on the same case."""
    experts, top_k, *_ = shape.sizes
    label = f"{tokens:,} tokens, {tokens * top_k // experts:,} per expert"
    case = cache(lambda: make_case(shape, tokens, lora))  # made when the first contender wants it
    right = cache(lambda: exact(case()))
    for name in IMPLEMENTATIONS:
        errors: dict[str, float] = {}

        def check(name: str = name, errors: dict[str, float] = errors) -> float:
            exact = right()  # before the module is changed
            result, gradients = chosen_for(case(), name).both()
            trained = [part for part, p in case().module.named_parameters() if p.requires_grad]
            parts = zip(["result", "tokens", "routing weights", *trained], [result, *gradients], exact, strict=True)
            errors |= {part: relative_error(x, y.to(DEVICE)) for part, x, y in parts}
            return max(errors.values())

        def measure(name: str = name, errors: dict[str, float] = errors) -> Figures:
            worst = max(errors, key=lambda part: errors[part])
            of_result = {"error of the result": errors.pop("result")}
            of_gradients = {"largest error of a gradient": max(errors.values()), NOTE: f"of {worst}"}
            return timed(case(), name, shape, tokens) | of_result | of_gradients

        yield from measured(section, label, name, "ms forward and backward", measure, check, LIMIT)


def make_case(shape: Experts, tokens: int, lora: bool, dtype: torch.dtype = DTYPE) -> Case:
    """Random weights, tokens and routing; the same every time."""
    torch.manual_seed(0)
    module = shape.make_experts().to(dtype)
    if lora:
        module = adapted(module)
    experts, top_k, width, _ = shape.sizes
    x = torch.randn(tokens, width, device=DEVICE, dtype=dtype, requires_grad=True)
    # As after some training: no expert is as popular as another.
    logits = torch.randn(tokens, experts, device=DEVICE) + 0.5 * torch.randn(experts, device=DEVICE)
    values, indices = logits.topk(top_k)
    weights = values.softmax(-1).to(dtype).requires_grad_()
    out = torch.randn(tokens, width, device=DEVICE, dtype=dtype)
    return Case(module, x, indices, weights, out, [p for p in module.parameters() if p.requires_grad])


def timed(case: Case, name: str, shape: Experts, tokens: int) -> dict[str, Any]:
    case, (_, top_k, width, inner) = chosen_for(case, name), shape.sizes
    forward, both = gpu_ms(case.forward), gpu_ms(case.both)
    products = 2 * tokens * top_k * shape.products * width * inner
    rate = products * (3 if case.trained[0].ndim == 3 else 2) / both * 1e3
    figures = {"ms forward": forward, "ms forward and backward": both}
    with suppress(RuntimeError):  # without gaps between launches, as in a captured step; not of one that reads
        figures["ms in a CUDA graph"] = graph_ms(case.both)
    return figures | {
        "GiB at most": peak_gib(case.both),
        "useful TFLOP/s": rate / 1e12,
        "share of the measured matrix rate": rate / matrix_rate(),
        "waits": float(waits(case.both)),
    }


def chosen_for(case: Case, name: str) -> Case:
    """The case on an implementation by its name in transformers; ours as in a packed call of a patched model."""
    experts: Any = next(m for m in case.module.modules() if hasattr(m, "_apply_gate"))
    if name == OURS:
        layout = layout_of(experts)
        assert not isinstance(layout, str), layout
        for module in case.module.modules():
            is_stock = LAYOUT not in module.__dict__ and hasattr(module, "_apply_gate")
            if is_stock or type(module).__name__ == "ParamWrapper":
                for edit in kernel_edits(module, layout):
                    edit.apply()
        tokens = len(case.x)
        return replace(case, packed=PackedForward(PackedMetadata.from_lengths([tokens], device=DEVICE), (1, tokens)))
    for module in case.module.modules():  # ours was the contender before
        if original_class(module) is not type(module):
            restore(module)
            module.__dict__.pop(LAYOUT, None)
    experts.config._experts_implementation = available(name)
    return case


def exact(case: Case) -> list[Tensor]:
    """The result and the gradients in float64, by transformers' loop over experts, kept on the host.

    Experts that train are taken one at a time: in float64 those of a large layer and their gradients do not fit.
    """
    if not all(p.requires_grad for p in case.module.parameters()):
        return [x.float().cpu() for x in in_float64(case)]
    result, dx, dweights = (torch.zeros_like(x, dtype=torch.float64) for x in (case.out, case.x, case.weights))
    of_experts = [torch.zeros(p.shape) for p in case.trained]
    for number in range(len(case.trained[0])):
        tokens, places = torch.where(case.indices == number)
        if not len(tokens):
            continue
        module, weights = one_expert(case.module, number), case.weights[tokens, places][:, None]
        indices, trained = torch.zeros_like(tokens)[:, None], list(module.parameters())
        part = in_float64(Case(module, case.x[tokens], indices, weights, case.out[tokens], trained))
        result.index_add_(0, tokens, part[0])
        dx.index_add_(0, tokens, part[1])
        dweights[tokens, places] = part[2][:, 0]
        for whole, gradient in zip(of_experts, part[3:], strict=True):
            whole[number] = gradient[0]
    return [*(x.float().cpu() for x in (result, dx, dweights)), *of_experts]


def one_expert(experts: Any, number: int) -> Any:
    """A module with the weights of one of transformers' experts alone, which it shares."""
    module = copy(experts)
    parameters = {name: p.detach()[number : number + 1] for name, p in experts.named_parameters()}
    module._parameters = {name: torch.nn.Parameter(p) for name, p in parameters.items()}
    module.num_experts = 1
    return module


def in_float64(case: Case) -> list[Tensor]:
    """The result and the gradients in float64, by transformers' loop over experts."""
    leaves = [x.detach().double().requires_grad_() for x in (case.x, case.weights)]
    module = deepcopy(case.module).double()
    trained = [p for p in module.parameters() if p.requires_grad]
    twin = Case(module, leaves[0], case.indices, leaves[1], case.out.double(), trained)
    result, gradients = chosen_for(twin, "eager").both()
    return [result.detach(), *gradients]


SECTIONS: dict[str, Callable[[Sequence[Experts]], Iterator[Result]]] = {
    "layer": run_layer,
    "lora": run_lora,
    "step": run_step,
    "step-lora": run_adapted_step,
    "trainer": run_trainer,
    "whole": run_whole,
}


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__, [*SECTIONS])
    options.add_argument("--shapes", nargs="+", default=[""], metavar="NAME", help="only shapes whose name begins so")
    chosen = parsed(options, arguments)
    shapes = [shape for shape in SHAPES if shape.name.startswith(tuple(chosen.shapes))]
    return collected(in_turn(chosen.only, SECTIONS, shapes), header(), chosen.output, "moe")


if __name__ == "__main__":
    main()
