"""Packed attention: every implementation on sets of short, middling and long documents, plain and with options.

Options are what layers have beyond a causal mask: sinks, softcap, windows, ALiBi, narrow values. Every implementation
that takes a layer is compared in the same run, forward and backward, with each document alone in float32: by torch's
own attention or, of a layer with options, by our call of it. What fails that has no figure. Rates are over useful
operations, 2 (D + Dv) per visible pair and head forward and 2.5 times that backward, so work on masked pairs counts as
none. Of layers with options, milliseconds and memory of forward and backward are measured;
``torch_backend.ops.attention.order`` records the order that follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.clock import DEVICE, DTYPE, QUICK, TOY, device_ms, gpu_ms, peak_gib, relative_error
from benchmarks.harness import Figures, measured, wanted
from benchmarks.report import Result
from torch_backend.ops.attention import IMPLEMENTATIONS, AttentionRequest, attention, load, rejections, select
from torch_backend.ops.attention.order import order
from torch_backend.segments import PackedMetadata

LIMIT = 1.5e-2  # of bfloat16 results, in norm
LONG_RUN = 50.0  # milliseconds beyond which neither launch gaps nor the state of the cache matter
AUTO = "auto without flash-attn"
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

    def request(self, documents: Documents) -> AttentionRequest:
        return AttentionRequest(
            tokens=sum(documents), heads=self.heads, kv_heads=self.kv_heads, head_dim=self.width,
            value_dim=self.value_width, dtype=DTYPE, device=DEVICE, segments=len(documents),
            max_seqlen=max(documents), window=self.window,
            softcap=self.softcap, sinks=self.sinks, alibi=self.alibi, scale=self.width**-0.5,
        )  # fmt: skip

    @property
    def plain(self) -> bool:
        return self.window is None and self.softcap is None and not self.sinks and not self.alibi

    def attend(self, leaves: Sequence[Tensor], packed: PackedMetadata, implementation: str) -> Tensor:
        q, k, v, *sinks = leaves
        slopes = slopes_of(self.heads) if self.alibi else None
        options: dict[str, Any] = {"window": self.window, "softcap": self.softcap, "alibi_slopes": slopes}
        return attention(q, k, v, packed, implementation=implementation, sinks=sinks[0] if sinks else None, **options)

    def alone(self, leaves: Sequence[Tensor]) -> Tensor:
        """One document, by torch's own attention or, with options, by our call of it."""
        if not self.plain:
            return self.attend(leaves, PackedMetadata.from_lengths([len(leaves[0])], device=DEVICE), "sdpa")
        q, k, v = (x.transpose(0, 1)[None] for x in leaves)
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)


@cache
def slopes_of(heads: int) -> Tensor:
    """The slopes of ALiBi, float32 [heads], made once so that no clock counts it."""
    return 2.0 ** -torch.linspace(1, 8, heads, device=DEVICE)


@dataclass
class Call:
    """The operands of a call of a layer on documents, the same every time, and the gradient of its output."""

    layer: Layer
    documents: Documents

    def __post_init__(self) -> None:
        layer, tokens = self.layer, sum(self.documents)
        generator = torch.Generator(device=DEVICE).manual_seed(0)
        shapes = (
            (layer.heads, layer.width), (layer.kv_heads, layer.width),
            (layer.kv_heads, layer.value_width), (layer.heads, layer.value_width),
        )  # fmt: skip
        *inputs, self.dout = (torch.randn(tokens, *s, device=DEVICE, generator=generator).to(DTYPE) for s in shapes)
        sinks = [torch.linspace(-1, 2, layer.heads, device=DEVICE).to(DTYPE)] * layer.sinks
        self.leaves = [x.requires_grad_() for x in (*inputs, *sinks)]
        self.packed = PackedMetadata.from_lengths(self.documents, device=DEVICE)

    def in_float32(self) -> Call:
        self.leaves, self.dout = [x.detach().float().requires_grad_() for x in self.leaves], self.dout.float()
        return self

    def forward(self, implementation: str) -> Tensor:
        return self.layer.attend(self.leaves, self.packed, implementation)

    def both(self, implementation: str) -> list[Tensor]:
        """The output and the gradients."""
        out = self.forward(implementation)
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.dout)]

    def error(self, implementation: str) -> float:
        return max(map(relative_error, self.both(implementation), right(self.layer, self.documents)))

    def rates(self, implementation: str) -> Figures:
        with torch.no_grad():
            ahead = device_ms(partial(self.forward, implementation))
        both = device_ms(partial(self.both, implementation))
        pairs = sum(n * (n + 1) / 2 for n in self.documents)
        useful = 2.0 * self.layer.heads * (self.layer.width + self.layer.value_width) * pairs
        return {
            "TFLOP/s, forward": useful / ahead / 1e9,
            "TFLOP/s, forward + backward": 3.5 * useful / both / 1e9,
        }

    def costs(self, implementation: str) -> Figures:
        both = partial(self.both, implementation)
        memory, ms = peak_gib(both), gpu_ms(both, 1)
        return {"ms": ms if ms > LONG_RUN else device_ms(both), "GiB at most": memory}


@cache
def right(layer: Layer, documents: Documents) -> list[Tensor]:
    """Output and gradients in float32, of each document alone."""
    call = Call(layer, documents).in_float32()
    inputs, sinks = call.leaves[:3], call.leaves[3:]
    results = []
    for *parts, dout in zip(*(x.detach().split(documents) for x in (*inputs, call.dout)), strict=True):
        leaves = [*(x.requires_grad_() for x in parts), *sinks]
        out = layer.alone(leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    columns = list(zip(*results, strict=True))
    return [torch.cat(x) for x in columns[:4]] + [torch.stack(x).sum(0) for x in columns[4:]]


LLAMA = Layer(4, 2, 32, 32) if TOY else Layer(32, 8, 128, 128)
QWEN = Layer(4, 2, 16, 16) if TOY else Layer(14, 2, 64, 64)
WIDE = {
    "32 heads of 512 over 4": Layer(4, 2, 64, 64) if TOY else Layer(32, 4, 512, 512),  # Gemma 4, whole documents
    "16 heads of 256 over 8": Layer(4, 2, 32, 32) if TOY else Layer(16, 8, 256, 256),  # Gemma 3
    "16 heads of 192, values of 128": Layer(4, 4, 24, 16) if TOY else Layer(16, 16, 192, 128),  # latent attention
}
# in the order of importance
WITH_OPTIONS = {
    "gpt_oss, sinks": Layer(64, 8, 64, 64, sinks=True),
    "gpt_oss, sinks and window 128": Layer(64, 8, 64, 64, sinks=True, window=128),
    "gemma2, softcap": Layer(16, 8, 256, 256, softcap=50.0),
    "gemma2, softcap and window 4,096": Layer(16, 8, 256, 256, softcap=50.0, window=4_096),
    "mistral, window 4,096": Layer(32, 8, 128, 128, window=4_096),
    "mpt, ALiBi": Layer(32, 32, 128, 128, alibi=True),
    "deepseek, values of 128": Layer(16, 16, 192, 128),
}
if TOY:
    WITH_OPTIONS = {
        "sinks and window": Layer(4, 2, 16, 16, sinks=True, window=8),
        "softcap": Layer(4, 2, 16, 16, softcap=2.0),
        "ALiBi": Layer(4, 4, 16, 16, alibi=True),
        "narrow values": Layer(4, 4, 24, 16),
    }


def lengths(total: int, mean: float, longest: int) -> Documents:
    """Lognormal document lengths that add up to ``total``."""
    generator, drawn, left = np.random.default_rng(0), list[int](), total
    while left:
        length = int(np.clip(generator.lognormal(np.log(mean) - 0.28, 0.75), min(16, mean), longest))
        drawn.append(min(length, left))
        left -= drawn[-1]
    return tuple(drawn)


SETS: dict[str, Documents] = {
    "16k short": lengths(16_384, 260, 2_048),
    "16k middling": lengths(16_384, 1_500, 8_192),
    "16k one": (16_384,),
    "64k short": lengths(65_536, 260, 2_048),
    "64k middling": lengths(65_536, 1_500, 8_192),
}
SETS_WITH_OPTIONS = {"16k one": SETS["16k one"], "32k one": (32_768,)}
SETS_WITH_OPTIONS |= {name: SETS[name] for name in ("16k short", "16k middling")}
if QUICK:
    SETS, SETS_WITH_OPTIONS = {"16k short": SETS["16k short"]}, {"one of 2k": (2_048,)}
if TOY:
    SETS, SETS_WITH_OPTIONS = {"toy": (5, 20, 7)}, {"one of 20": (20,), "short": (5, 20, 7)}


def run() -> Iterator[Result]:
    # what takes long to compile comes last
    names = ("sdpa",) if TOY else ("triton", "varlen", "flash4", "xformers", "sdpa", "flex")
    for name, documents in SETS.items():
        case = f"{name} ({len(documents)}, mean {sum(documents) / len(documents):,.0f})"
        yield from compare("attention", case, LLAMA, documents, names)
    for name in filter(SETS.__contains__, ("16k short", "64k short")):
        yield from compare("attention, 14 heads of 64 over 2", name, QWEN, SETS[name], names)


def run_wide() -> Iterator[Result]:
    """Wide heads, by our kernels and by torch's attention; few others take them."""
    for heads, layer in WIDE.items():
        for name in ("toy", "16k short", "16k middling"):
            if name in SETS:
                yield from compare(
                    f"attention, {heads}", name, layer, SETS[name], ("sdpa",) if TOY else ("triton", "sdpa")
                )


def compare(section: str, case: str, layer: Layer, documents: Documents, names: Sequence[str]) -> Iterator[Result]:
    call = Call(layer, documents)
    for name in names:
        yield from measured(
            section, case, name, "TFLOP/s, forward", partial(call.rates, name), partial(call.error, name), LIMIT
        )
    right.cache_clear()


def run_options() -> Iterator[Result]:
    """Every implementation that serves a layer, and what "auto" takes where flash-attn is not installed."""
    section = "attention with options, forward + backward"
    for name, documents in SETS_WITH_OPTIONS.items():
        for options, layer in WITH_OPTIONS.items():
            case, request, call = f"{options}, {name}", layer.request(documents), Call(layer, documents)
            names = [name for name in IMPLEMENTATIONS if name != "reference" and wanted(name)]
            names.sort(key=lambda name: name == "flex")  # which compiles for long
            refused = rejections(request, names)
            others = tuple(name for name in order(request, load) if not name.startswith("flash"))
            contenders = {f"{AUTO}: {auto}": auto for auto in [select(request, others)] if wanted(AUTO)}
            contenders |= {name: name for name, why in refused.items() if why is None}
            for contender, implementation in contenders.items():
                costs, error = partial(call.costs, implementation), partial(call.error, implementation)
                yield from measured(section, case, contender, "ms", costs, error, LIMIT)
            if documents == next(iter(SETS_WITH_OPTIONS.values())):
                yield from (Result(section, case, name, None, "ms", why) for name, why in refused.items() if why)
            right.cache_clear()
