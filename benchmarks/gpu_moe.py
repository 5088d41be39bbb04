"""Mixtures of experts on one GPU: the layer, and the layer with adapters. For the step see :mod:`.gpu_moe_step`.

    python -m benchmarks.gpu_moe                                  # all of it; without a GPU tiny, to see that it runs
    python -m benchmarks.gpu_moe --only layer --budget 240        # one section; ends within 240 seconds
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
float64, one expert at a time; the largest is of the gradient that the note names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import collected, parsed, parser, survived
from benchmarks.gpu_clock import (
    DEVICE,
    QUICK,
    TOY,
    Result,
    ending_within,
    free,
    gated,
    gpu_ms,
    graph_ms,
    matrix_rate,
    peak_gib,
    set_limit,
    waits,
    wall_ms,
    wanted,
)
from benchmarks.gpu_moe_shapes import PEFT, SHAPES, Experts, adapted, available
from benchmarks.gpu_moe_step import run_adapted_step, run_step, run_trainer, run_whole
from benchmarks.gpu_workload import DTYPE
from torch_backend.hf.edits.experts import kernel_edits
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
    yield from layers(PEFT, PEFT_TOKENS, f"experts with adapters, {PEFT.name}", lora=True)


def layers(shape: Experts, tokens: int, section: str, lora: bool = False) -> Iterator[Result]:
    """Every implementation on the same case."""
    held = cache(lambda: make_case(shape, tokens, lora))  # made when the first contender wants it
    label = f"{tokens:,} tokens, {tokens * shape.top_k // shape.experts:,} per expert"
    for name in filter(wanted, IMPLEMENTATIONS):
        found: dict[str, float] = {}
        figures, note = gated(
            partial(_of, held, worst, name, found),
            LIMIT,
            partial(_of, held, timed, name, shape, tokens),
        )
        free()
        if found:
            note = f"{note}, of {max(found, key=lambda n: found[n])}"
        if not figures:
            yield Result(section, label, name, None, "ms forward and backward", note)
            continue
        figures["error of the result"] = found.pop("result")
        figures["largest error of a gradient"] = max(found.values())
        for unit, value in figures.items():
            yield Result(section, label, name, value, unit, note)


def _of(held: Callable[[], Case], measure: Callable[..., Any], *arguments: Any) -> Any:
    return measure(held(), *arguments)


def make_case(shape: Experts, tokens: int, lora: bool, dtype: torch.dtype = DTYPE) -> Case:
    """Random weights, tokens and routing; the same every time."""
    torch.manual_seed(0)
    module = shape.make_experts().to(dtype)
    if lora:
        module = adapted(module)
    width, device = shape.width, DEVICE
    x = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    # As after some training: no expert is as popular as another.
    logits = torch.randn(tokens, shape.experts, device=device) + 0.5 * torch.randn(shape.experts, device=device)
    values, indices = logits.topk(shape.top_k)
    weights = values.softmax(-1).to(dtype).requires_grad_()
    out = torch.randn(tokens, width, device=device, dtype=dtype)
    return Case(module, x, indices, weights, out, [p for p in module.parameters() if p.requires_grad])


def timed(case: Case, name: str, shape: Experts, tokens: int) -> dict[str, float]:
    case = chosen_for(case, name)
    forward, both = _milliseconds(case.forward), _milliseconds(case.both)
    products = 2 * tokens * shape.top_k * shape.products * shape.width * shape.inner
    full = case.trained[0].ndim == 3
    rate = products * (3 if full else 2) / both * 1e3
    return {
        "ms forward": forward,
        "ms forward and backward": both,
        **_in_a_graph(case),
        "GiB at most": peak_gib(case.both),
        "useful TFLOP/s": rate / 1e12,
        "share of the measured matrix rate": rate / matrix_rate(),
        "waits": float(waits(case.both)),
    }


def _in_a_graph(case: Case) -> dict[str, float]:
    """Milliseconds without gaps between launches, as in a captured step; nothing for a contender that reads."""
    try:
        return {"ms in a CUDA graph": graph_ms(case.both)}
    except RuntimeError:
        return {}


def _milliseconds(call: Callable[[], object]) -> float:
    first = wall_ms(call, 1)
    return gpu_ms(call, max(1, min(10, int(300 / first))))


def chosen_for(case: Case, name: str) -> Case:
    """The case on an implementation by its name in transformers; ours as in a packed call of a patched model."""
    if name == OURS:
        for module in case.module.modules():
            is_stock = LAYOUT not in module.__dict__ and hasattr(module, "_apply_gate")
            if is_stock or type(module).__name__ == "ParamWrapper":
                for edit in kernel_edits(module):
                    edit.apply()
        tokens = len(case.x)
        return replace(case, packed=PackedForward(PackedMetadata.from_lengths([tokens], device=DEVICE), (1, tokens)))
    for module in case.module.modules():  # ours was the contender before
        if original_class(module) is not type(module):
            restore(module)
            module.__dict__.pop(LAYOUT, None)
    experts = next(m for m in case.module.modules() if hasattr(m, "_apply_gate"))
    experts.config._experts_implementation = available(name)
    return case


def worst(case: Case, name: str, found: dict[str, float]) -> float:
    """The largest error against float64, of all in ``found``."""
    result, gradients = chosen_for(case, name).both()
    free()
    found |= errors(case, result.detach(), gradients)
    return max(found.values())


def errors(case: Case, result: Tensor, gradients: list[Tensor]) -> dict[str, float]:
    """Relative errors by name. Each expert in float64 by itself: its share of the result, and its gradients.

    Gradients of weights are compared expert by expert, so that float64 takes the memory of one.
    """
    module = next(m for m in case.module.modules() if hasattr(m, "_apply_gate"))
    names = [name for name, _ in module.named_parameters()]
    factors = _adapters(case.module)
    right = {"result": torch.zeros_like(result, dtype=torch.float64)}
    right["tokens"] = torch.zeros_like(right["result"])
    right["routing weights"] = torch.zeros_like(case.weights, dtype=torch.float64)
    missed: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=result.device, dtype=torch.float64))
    whole: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=result.device, dtype=torch.float64))
    trained = dict(zip([id(p) for p in case.trained], gradients[2:]))
    for expert in range(module.num_experts):
        token, slot = torch.where(case.indices == expert)
        weight = {name: _leaf(getattr(module, name)[expert]) for name in names}
        leaves = {name: (_leaf(of_a(expert)), _leaf(of_b(expert))) for name, (of_a, of_b, _) in factors.items()}
        used = dict(weight)
        for name, (a, b) in leaves.items():
            delta = factors[name][2] * (b @ a)  # [out, in]
            used[name] = used[name] + (delta.T if module.is_transposed else delta)
        x, share = _leaf(case.x[token]), _leaf(case.weights[token, slot])
        product = _one_expert(module, x, used) * share[:, None]
        found = dict(
            zip(
                ["x", "share", *weight, *((n, i) for n in leaves for i in (0, 1))],
                torch.autograd.grad(
                    (product * case.out[token].double()).sum(),
                    [x, share, *weight.values(), *(leaf for pair in leaves.values() for leaf in pair)],
                ),
            )
        )
        right["result"].index_add_(0, token, product.detach())
        right["tokens"].index_add_(0, token, found["x"])
        right["routing weights"][token, slot] = found["share"]
        for name in names:
            if (gradient := trained.get(id(getattr(module, name)))) is not None:
                missed[name] += (gradient[expert].double() - found[name]).square().sum()
                whole[name] += found[name].square().sum()
        for name, parts in factors.items():
            for i, factor in enumerate(parts[:2]):
                gradient = factor(expert, trained)
                missed[f"{name}.lora_{'AB'[i]}"] += (gradient.double() - found[name, i]).square().sum()
                whole[f"{name}.lora_{'AB'[i]}"] += found[name, i].square().sum()
    measured = {"result": result, "tokens": gradients[0], "routing weights": gradients[1]}
    errors = {n: float((measured[n].double() - right[n]).norm() / right[n].norm()) for n in right}
    errors |= {n: float((missed[n] / whole[n]).sqrt()) for n in missed}
    return {n: e if e == e else float("inf") for n, e in errors.items()}


def _leaf(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_()


def _one_expert(module: Any, x: Tensor, weight: dict[str, Tensor]) -> Tensor:
    """[n, D] through one expert of transformers' layout, in the dtype of its arguments."""

    def product(x: Tensor, name: str) -> Tensor:
        w = weight[name]
        y = x @ (w if module.is_transposed else w.T)
        return y + weight[f"{name}_bias"] if module.has_bias else y

    inner = product(x, "gate_up_proj" if module.has_gate else "up_proj")
    return product(module._apply_gate(inner) if module.has_gate else module.act_fn(inner), "down_proj")


def _adapters(module: Any) -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], float]]:
    """Returns functions by parameter with an adapter: one expert's A [r, in] and B [out, r], or their gradients."""
    found = {}
    for wrapper in module.modules():
        name = getattr(wrapper, "parameter_name", None)
        if name is not None:
            a, b = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
            experts = wrapper.num_experts

            def part_a(expert: int, of: Any = None, a: Tensor = a, n: int = experts) -> Tensor:
                return (a if of is None else of[id(a)]).reshape(n, -1, a.shape[-1])[expert]

            def part_b(expert: int, of: Any = None, b: Tensor = b, n: int = experts) -> Tensor:
                return (b if of is None else of[id(b)]).reshape(b.shape[0], -1, n)[:, :, expert]

            found[name] = (part_a, part_b, wrapper.scaling["default"])
    return found


SECTIONS: dict[str, Callable[[Sequence[Experts]], Iterator[Result]]] = {
    "layer": run_layer,
    "lora": run_lora,
    "step": run_step,
    "step-lora": run_adapted_step,
    "trainer": run_trainer,
    "whole": run_whole,
}


def run() -> Iterator[Result]:
    """All sections, the most important first."""
    for section in SECTIONS.values():
        yield from section(SHAPES)


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    options.add_argument("--shapes", nargs="+", default=[""], metavar="NAME", help="only shapes whose name begins so")
    options.add_argument("--limit", type=float, metavar="SECONDS", help="the most that a contender may take")
    chosen = parsed(options, arguments)
    shapes = [shape for shape in SHAPES if shape.name.startswith(tuple(chosen.shapes))]
    if chosen.limit:
        set_limit(chosen.limit)
    with ending_within(chosen.budget):
        found = (result for name in chosen.only for result in survived(name, SECTIONS[name](shapes)))
        return collected(found, chosen.output, "moe")


if __name__ == "__main__":
    main()
