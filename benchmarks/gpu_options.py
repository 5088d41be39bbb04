"""Packed attention of layers that have more than a causal mask: sinks, softcap, windows, ALiBi, narrow values.

Milliseconds and peak memory of forward and backward, for every implementation that serves and for what "auto" takes
where flash-attn is not installed; ``torch_backend.ops.attention.order`` records the order that follows. Every result is
compared with the float32 run of ``sdpa``, which tests hold to the oracle; what fails that has no figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_attention import LIMIT, lengths
from benchmarks.gpu_clock import DEVICE, QUICK, TOY, Result, device_ms, gated, gpu_ms, peak_gib, relative_error, wanted
from torch_backend.ops.attention import IMPLEMENTATIONS, AttentionRequest, attention, load, rejections, select
from torch_backend.ops.attention.order import order
from torch_backend.segments import PackedMetadata

AUTO = "auto without flash-attn"
_LONG_RUN = 50.0  # milliseconds beyond which neither launch gaps nor the state of the cache matter
_DTYPE = torch.float32 if TOY else torch.bfloat16
Documents = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """An attention layer: heads of queries and of keys, widths of keys and of values, and its options."""

    heads: int
    kv_heads: int
    width: int
    value_width: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False

    def options(self) -> dict[str, Any]:
        sinks = torch.linspace(-1, 2, self.heads, device=DEVICE).to(_DTYPE).requires_grad_() if self.sinks else None
        slopes = 2.0 ** -torch.linspace(1, 8, self.heads, device=DEVICE) if self.alibi else None
        return {"window": self.window, "softcap": self.softcap, "sinks": sinks, "alibi_slopes": slopes}

    def request(self, documents: Documents) -> AttentionRequest:
        return AttentionRequest(
            tokens=sum(documents), heads=self.heads, kv_heads=self.kv_heads, head_dim=self.width,
            value_dim=self.value_width, dtype=_DTYPE, device=DEVICE, segments=len(documents),
            max_seqlen=max(documents), window=self.window,
            softcap=self.softcap, sinks=self.sinks, alibi=self.alibi, scale=self.width**-0.5,
        )  # fmt: skip


# in the order of importance
LAYERS = {
    "gpt_oss, sinks": Layer(64, 8, 64, 64, sinks=True),
    "gpt_oss, sinks and window 128": Layer(64, 8, 64, 64, sinks=True, window=128),
    "gemma2, softcap": Layer(16, 8, 256, 256, softcap=50.0),
    "gemma2, softcap and window 4,096": Layer(16, 8, 256, 256, softcap=50.0, window=4_096),
    "mistral, window 4,096": Layer(32, 8, 128, 128, window=4_096),
    "mpt, ALiBi": Layer(32, 32, 128, 128, alibi=True),
    "deepseek, values of 128": Layer(16, 16, 192, 128),
}
if TOY:
    LAYERS = {
        "sinks and window": Layer(4, 2, 16, 16, sinks=True, window=8),
        "softcap": Layer(4, 2, 16, 16, softcap=2.0),
        "ALiBi": Layer(4, 4, 16, 16, alibi=True),
        "narrow values": Layer(4, 4, 24, 16),
    }


def sets() -> dict[str, Documents]:
    if TOY:
        return {"one of 20": (20,), "short": (5, 20, 7)}
    if QUICK:
        return {"one of 2k": (2_048,)}
    return {
        "one of 16k": (16_384,),
        "one of 32k": (32_768,),
        "16k short": tuple(lengths(16_384, 260, 2_048)),
        "16k middling": tuple(lengths(16_384, 1_500, 8_192)),
    }


def run() -> Iterator[Result]:
    for name, documents in sets().items():
        for has, layer in LAYERS.items():
            yield from compare(f"{has}, {name}", layer, documents)


def compare(case: str, layer: Layer, documents: Documents) -> Iterator[Result]:
    section = "attention with options, forward + backward"
    request = layer.request(documents)
    names = tuple(name for name in IMPLEMENTATIONS if name != "reference" and wanted(name))
    reasons = rejections(request, sorted(names, key=lambda name: name == "flex"))  # which compiles for long
    for name, reason in reasons.items():
        if reason is not None and documents == next(iter(sets().values())):
            yield Result(section, case, name, None, "ms", reason)
    contenders = {name: name for name, reason in reasons.items() if reason is None}
    if wanted(AUTO):
        others = tuple(name for name in order(request, load) if not name.startswith("flash"))
        contenders = {AUTO: select(request, others), **contenders}
    for contender, name in contenders.items():
        figures, note = measured(layer, documents, name)
        if contender == AUTO:
            note = f"{name}, {note}"
        for unit in figures or {"ms": 0.0}:
            yield Result(section, case, contender, figures.get(unit), unit, note)
    _right.cache_clear()


def measured(layer: Layer, documents: Documents, implementation: str) -> tuple[dict[str, float], str]:
    inputs, cotangent, options = _inputs(layer, documents)
    leaves = [*inputs, *(x for x in options.values() if isinstance(x, Tensor) and x.requires_grad)]
    packed = PackedMetadata.from_lengths(documents, device=DEVICE)

    def both() -> tuple[Tensor, ...]:
        out = attention(*inputs, packed, implementation=implementation, **options)
        return out, *torch.autograd.grad(out, leaves, cotangent)

    def measure() -> dict[str, float]:
        memory, ms = peak_gib(both), gpu_ms(both, 1)
        return {"ms": ms if ms > _LONG_RUN else device_ms(both), "GiB at most": memory}

    return gated(lambda: max(map(relative_error, both(), _right(layer, documents))), LIMIT, measure)


def _inputs(layer: Layer, documents: Documents) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    shapes = (
        (layer.heads, layer.width), (layer.kv_heads, layer.width),
        (layer.kv_heads, layer.value_width), (layer.heads, layer.value_width),
    )  # fmt: skip
    q, k, v, dout = (
        torch.randn(sum(documents), *shape, device=DEVICE, generator=generator).to(_DTYPE) for shape in shapes
    )
    return [x.requires_grad_() for x in (q, k, v)], dout, layer.options()


@cache
def _right(layer: Layer, documents: Documents) -> tuple[Tensor, ...]:
    """Output and gradients in float32."""
    inputs, cotangent, options = _inputs(layer, documents)
    inputs = [x.detach().float().requires_grad_() for x in inputs]
    if options["sinks"] is not None:
        options["sinks"] = options["sinks"].detach().float().requires_grad_()
    leaves = [*inputs, *(x for x in options.values() if isinstance(x, Tensor) and x.requires_grad)]
    packed = PackedMetadata.from_lengths(documents, device=DEVICE)
    out = attention(*inputs, packed, implementation="sdpa", **options)
    return out.detach(), *torch.autograd.grad(out, leaves, cotangent.float())
