"""Mixtures of experts on one GPU: the layer by shape and contender, full and LoRA, and the tiles of our kernels.

    python -m benchmarks.gpu_experts                     # all of it
    python -m benchmarks.gpu_experts --only layer        # layer, lora, profile, tiles
    python -m benchmarks.gpu_experts --shape qwen3       # shapes whose name contains it
    python -m benchmarks.gpu_experts --tiny              # tiny shapes, also on the CPU, to see that it runs

A layer's time is that of its kernels in a CUDA graph, forward and backward; a contender that reads from the device
cannot be captured and is timed as it runs. Useful operations are those of the products of the (token, expert) pairs:
6 D I forward and twice that backward, of which a frozen weight saves a third. The matrix rate is that of a dense
bfloat16 product in the same run. Errors are against the same layer in float64.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import print_exc
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._report import machine, table, versions
from benchmarks.gpu_clock import (
    DEVICE,
    TOY,
    Result,
    copy_bandwidth,
    device_ms,
    gated,
    matrix_rate,
    peak_gib,
    relative_error,
)
from torch_backend.ops.experts import Adapter, ExpertActivation, experts

LIMIT = 0.02  # relative error of bfloat16, which rounds each of three products in a row to 2^-9
RANK, SCALE = 16, 2.0


@dataclass(frozen=True)
class Shape:
    """A layer of experts: D, I, E, K and T, whether it has gpt-oss's biases and gates."""

    name: str
    width: int
    inner: int
    experts: int
    top_k: int
    tokens: int
    gpt_oss: bool = False

    @property
    def mean(self) -> int:
        return self.tokens * self.top_k // self.experts

    def operations(self, lora: bool) -> float:
        forward = 6 * self.width * self.inner * self.tokens * self.top_k
        return forward * (2 if lora else 3)

    @property
    def activation(self) -> ExpertActivation:
        return ExpertActivation(alpha=1.702, limit=7.0, offset=1.0) if self.gpt_oss else ExpertActivation()


SHAPES = (
    Shape("qwen3-30b", 2048, 768, 128, 8, 1024),
    Shape("qwen3-30b", 2048, 768, 128, 8, 8192),
    Shape("qwen3-30b", 2048, 768, 128, 8, 16384),
    Shape("gpt-oss-20b", 2880, 2880, 32, 4, 8192, gpt_oss=True),
    Shape("qwen3.5-moe", 2048, 512, 256, 8, 8192),
    Shape("deepseek-v3 of 64", 7168, 2048, 64, 8, 4096),
)
PEFT = Shape("peft", 2048, 768, 128, 8, 4096)
TINY = (Shape("tiny", 64, 32, 8, 2, 64), Shape("tiny gpt-oss", 64, 64, 4, 2, 64, gpt_oss=True))


Forward = Callable[["Layer"], Tensor]


class Layer(nn.Module):
    """The weights of a shape as transformers stores them, and an input with its routing."""

    def __init__(self, shape: Shape, *, lora: bool = False, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shape, self.lora = shape, lora
        d, i, e = shape.width, shape.inner, shape.experts

        def parameter(*sizes: int, scale: float, trained: bool) -> nn.Parameter:
            return nn.Parameter((torch.randn(sizes, device=DEVICE) * scale).to(dtype), requires_grad=trained)

        first, second = ((e, d, 2 * i), (e, i, d)) if shape.gpt_oss else ((e, 2 * i, d), (e, d, i))
        self.gate_up_proj = parameter(*first, scale=d**-0.5, trained=not lora)
        self.down_proj = parameter(*second, scale=i**-0.5, trained=not lora)
        if shape.gpt_oss:
            self.gate_up_proj_bias = parameter(e, 2 * i, scale=0.1, trained=not lora)
            self.down_proj_bias = parameter(e, d, scale=0.1, trained=not lora)
        if lora:
            self.up_a, self.up_b = (
                parameter(e, RANK, d, scale=d**-0.5, trained=True),
                parameter(e, 2 * i, RANK, scale=0.1, trained=True),
            )
            self.down_a, self.down_b = (
                parameter(e, RANK, i, scale=i**-0.5, trained=True),
                parameter(e, d, RANK, scale=0.1, trained=True),
            )
        self.x = nn.Parameter(torch.randn(shape.tokens, d, device=DEVICE).to(dtype))
        scores = torch.randn(shape.tokens, e, device=DEVICE).softmax(-1)
        values, self.indices = scores.topk(shape.top_k)
        self.weights = nn.Parameter((values / values.sum(-1, keepdim=True)).to(dtype))
        self.dy = torch.randn(shape.tokens, d, device=DEVICE).to(dtype)
        # what transformers' functions ask of a module
        self.num_experts, self.has_gate, self.has_bias = e, True, shape.gpt_oss
        self.is_transposed, self.is_concatenated = shape.gpt_oss, not shape.gpt_oss
        self.has_post_expert_norm = self._is_expert_parallel = False
        self.act_fn = nn.SiLU()
        self.alpha, self.limit = 1.702, 7.0

    def _apply_gate(self, z: Tensor) -> Tensor:
        if not self.shape.gpt_oss:
            gate, value = z.chunk(2, dim=-1)
            return self.act_fn(gate) * value
        gate, value = z[..., ::2].clamp(max=self.limit), z[..., 1::2].clamp(-self.limit, self.limit)
        return (value + 1) * gate * torch.sigmoid(gate * self.alpha)

    def step(self, forward: Forward) -> dict[str, Tensor]:
        """Output and gradients of one forward and backward."""
        leaves = {name: p for name, p in self.named_parameters() if p.requires_grad}
        y = forward(self)
        return {"y": y, **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), self.dy), strict=True))}


def ours(implementation: str) -> Forward:
    def forward(layer: Layer) -> Tensor:
        up, down = layer.gate_up_proj, layer.down_proj
        options: dict[str, Any] = {}
        if layer.shape.gpt_oss:
            up, down = up.mT, down.mT
            options = {"up_bias": layer.gate_up_proj_bias, "down_bias": layer.down_proj_bias, "interleaved": True}
        if layer.lora:
            options["up_adapter"] = Adapter(layer.up_a, layer.up_b, SCALE)
            options["down_adapter"] = Adapter(layer.down_a, layer.down_b, SCALE)
        return experts(
            layer.x, layer.indices, layer.weights, up, down,
            activation=layer.shape.activation, implementation=implementation, **options,
        )  # fmt: skip

    return forward


def stock(name: str) -> Forward:
    """A function of transformers; adapters are added to the weights before it, as peft does."""

    def forward(layer: Layer) -> Tensor:
        from transformers.integrations import moe

        function = eager if name == "eager" else moe.ALL_EXPERTS_FUNCTIONS[name]
        if not layer.lora:
            return function(layer, layer.x, layer.indices, layer.weights)
        merged = _Merged(layer)
        return function(merged, layer.x, layer.indices, layer.weights)

    return forward


class _Merged:
    """A layer whose weights have their adapters added up."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        up, down = layer.up_b @ layer.up_a, layer.down_b @ layer.down_a
        if layer.shape.gpt_oss:
            up, down = up.mT, down.mT
        self.gate_up_proj = layer.gate_up_proj + SCALE * up
        self.down_proj = layer.down_proj + SCALE * down

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def eager(layer: Any, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """One expert after the other, its tokens found on the host, as the modeling files do it."""
    out = torch.zeros_like(x)
    for e in indices.unique().tolist():
        token, choice = torch.where(indices == e)
        up, down = layer.gate_up_proj[e], layer.down_proj[e]
        z = x[token] @ (up if layer.is_transposed else up.t())
        if layer.has_bias:
            z = z + layer.gate_up_proj_bias[e]
        y = layer._apply_gate(z) @ (down if layer.is_transposed else down.t())
        if layer.has_bias:
            y = y + layer.down_proj_bias[e]
        out.index_add_(0, token, (y * weights[token, choice, None]).to(out.dtype))
    return out


def contenders(shape: Shape) -> dict[str, Forward]:
    found = {"ours, triton": ours("triton"), "ours, grouped_mm": ours("grouped_mm")}
    if TOY:
        found = {"ours, plain": ours("plain")}
    found |= {"grouped_mm": stock("grouped_mm"), "eager": stock("eager")}
    copies = 6 * shape.tokens * shape.top_k * shape.width * shape.inner  # bytes of weights, one copy per choice
    if copies < 8e9:
        found["batched_mm"] = stock("batched_mm")
    return found


def run_layer(shapes: Sequence[Shape], *, lora: bool = False) -> Iterator[Result]:
    for shape in shapes:
        yield from _race(shape, lora)


def _race(shape: Shape, lora: bool) -> Iterator[Result]:
    layer = Layer(shape, lora=lora)
    right = _exact(layer)
    case = f"{shape.name}, {shape.tokens} tokens, {shape.mean} per expert{', LoRA' if lora else ''}"

    def measure(forward: Forward) -> dict[str, float]:
        ms = device_ms(lambda: layer.step(forward))
        rate = shape.operations(lora) / ms * 1e3
        made = peak_gib(lambda: layer.step(forward))
        return {"ms": ms, "TFLOP/s": rate / 1e12, "% of dense": 100 * rate / matrix_rate(), "GiB": made}

    def error(forward: Forward) -> float:
        found = layer.step(forward)
        return max(relative_error(found[part], value) for part, value in right.items())

    for name, forward in contenders(shape).items():
        figures, note = gated(partial(error, forward), LIMIT, partial(measure, forward))
        yield from _results("lora" if lora else "layer", case, name, figures, note)
        if not TOY:
            torch.cuda.empty_cache()


def _results(section: str, case: str, name: str, figures: dict[str, float], note: str) -> Iterator[Result]:
    units: dict[str, float | None] = dict(figures) or {"ms": None}
    for unit, value in units.items():
        yield Result(section, case, name, value, unit, note)


def _exact(layer: Layer) -> dict[str, Tensor]:
    """Output and gradients in float64, those of the weights only where they fit."""
    wide = Layer(layer.shape, lora=layer.lora, dtype=torch.bfloat16).double()
    wide.dy = layer.dy.double()
    if not layer.lora and wide.gate_up_proj.nbytes > 8e9:
        wide.gate_up_proj.requires_grad_(False)
        wide.down_proj.requires_grad_(False)
    found = wide.step(ours("plain"))
    return {name: value.detach() for name, value in found.items()}


def run_profile(shapes: Sequence[Shape]) -> Iterator[Result]:
    """Milliseconds of each kernel of a forward and backward, in the order of their sums."""
    if TOY:
        return
    from torch.profiler import ProfilerActivity, profile

    for shape in (*shapes, PEFT):
        layer = Layer(shape, lora=shape is PEFT)
        for implementation in ("triton", "grouped_mm"):
            forward = ours(implementation)
            layer.step(forward)
            with profile(activities=[ProfilerActivity.CUDA]) as record:
                for _ in range(3):
                    layer.step(forward)
                torch.cuda.synchronize()
            events = sorted(record.key_averages(), key=lambda event: -event.self_device_time_total)
            for event in events[:12]:
                name = event.key[:60]
                yield Result(
                    "profile", f"{shape.name}, {shape.tokens} tokens, {implementation}", name,
                    event.self_device_time_total / 3e3, "ms", f"{event.count / 3:g} calls",
                )  # fmt: skip


def run_tiles(shapes: Sequence[Shape]) -> Iterator[Result]:
    """Each product of a layer by tile, beside ``grouped_mm`` of torch on gathered rows."""
    if TOY:
        return
    from benchmarks.gpu_experts_tiles import sweep

    yield from sweep(shapes)


SECTIONS: dict[str, Callable[[Sequence[Shape]], Iterator[Result]]] = {
    "layer": run_layer,
    "lora": lambda shapes: run_layer([*shapes[1:2], PEFT] if not TOY else shapes, lora=True),
    "profile": lambda shapes: run_profile(shapes[1:2]),
    "tiles": lambda shapes: run_tiles(shapes[:4]),
}


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    options.add_argument("--shape", default="", help="shapes whose name contains it")
    options.add_argument("--tiny", action="store_true", help="tiny shapes")
    options.add_argument("--output", type=Path, help="folder for gpu_experts.json")
    chosen = options.parse_args(arguments)
    begin, found = time.perf_counter(), list[Result]()
    about = f"{machine()}\n{versions('torch', 'triton', 'transformers', 'peft')}"
    if not TOY:
        about += f"\n{torch.cuda.get_device_name()}, {matrix_rate() / 1e12:.0f} TFLOP/s dense, "
        about += f"{copy_bandwidth() / 1e12:.2f} TB/s"
    print(about, flush=True)
    shapes = [shape for shape in (TINY if chosen.tiny or TOY else SHAPES) if chosen.shape in shape.name]
    for section in chosen.only:
        try:
            for result in SECTIONS[section](shapes):
                value = "none" if result.value is None else f"{result.value:.3f} {result.unit}"
                print(f"{section}: {result.case}: {result.contender}: {value}  {result.note}", flush=True)
                found.append(result)
        except Exception:  # the other sections still run
            print_exc()
    for section in chosen.only:
        print(f"\n{section}\n{_table([r for r in found if r.section == section])}", flush=True)
    print(f"{time.perf_counter() - begin:.0f} s")
    if chosen.output:
        chosen.output.mkdir(parents=True, exist_ok=True)
        (chosen.output / "gpu_experts.json").write_text(json.dumps([r.as_dict() for r in found], indent=1))
    return found


def _table(results: list[Result]) -> str:
    units = list(dict.fromkeys(r.unit for r in results))
    lines = []
    for case, name in dict.fromkeys((r.case, r.contender) for r in results):
        mine = [r for r in results if (r.case, r.contender) == (case, name)]
        cells = {r.unit: "" if r.value is None else f"{r.value:.3g}" for r in mine}
        lines.append([case, name, *(cells.get(unit, "") for unit in units), mine[-1].note])
    return table(["case", "contender", *units, "note"], lines)


if __name__ == "__main__":
    main()
