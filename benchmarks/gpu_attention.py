"""Packed attention: every implementation on sets of short, middling and long documents.

Rates are over useful operations, 2 (D + Dv) per visible pair and head forward and 2.5 times that backward, so work on
masked pairs counts as none. Every implementation is compared with the float32 run of the project's plain one, document
by document, forward and backward, in the same run; what fails that has no figure.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_clock import DEVICE, QUICK, TOY, Result, device_ms, gated, relative_error, wanted
from torch_backend.ops.attention import attention
from torch_backend.segments import PackedMetadata

LIMIT = 1.5e-2  # of bfloat16 results, in norm
Shape = tuple[int, int, int, int]  # heads of queries, of keys and values, columns of a key, of a value
LLAMA: Shape = (4, 2, 32, 32) if TOY else (32, 8, 128, 128)
QWEN: Shape = (4, 2, 16, 16) if TOY else (14, 2, 64, 64)
WIDE: dict[str, Shape] = {
    "32 heads of 512 over 4": (4, 2, 64, 64) if TOY else (32, 4, 512, 512),  # Gemma 4, layers of whole documents
    "16 heads of 256 over 8": (4, 2, 32, 32) if TOY else (16, 8, 256, 256),  # Gemma 3
    "16 heads of 192, values of 128": (4, 4, 24, 16) if TOY else (16, 16, 192, 128),  # latent attention
}
# what takes long to compile comes last
IMPLEMENTATIONS = ("sdpa",) if TOY else ("triton", "varlen", "flash4", "xformers", "sdpa", "flex")


def lengths(total: int, mean: float, longest: int) -> list[int]:
    """Lognormal document lengths that add up to ``total``."""
    generator = np.random.default_rng(0)
    found: list[int] = []
    while (left := total - sum(found)) > 0:
        drawn = int(np.clip(generator.lognormal(np.log(mean) - 0.28, 0.75), min(16, mean), longest))
        found.append(min(drawn, left))
    return found


def sets() -> dict[str, list[int]]:
    if TOY:
        return {"toy": [5, 20, 7]}
    if QUICK:
        return {"16k short": lengths(16_384, 260, 2_048)}
    return {
        "16k short": lengths(16_384, 260, 2_048),
        "16k middling": lengths(16_384, 1_500, 8_192),
        "16k one": [16_384],
        "64k short": lengths(65_536, 260, 2_048),
        "64k middling": lengths(65_536, 1_500, 8_192),
    }


def run() -> Iterator[Result]:
    for name, documents in sets().items():
        case = f"{name} ({len(documents)}, mean {sum(documents) / len(documents):,.0f})"
        yield from compare("attention", case, LLAMA, documents)
    for name in ("16k short", "64k short"):
        if name in sets():
            yield from compare("attention, 14 heads of 64 over 2", name, QWEN, sets()[name])


def run_wide() -> Iterator[Result]:
    """Wide heads, by our kernels and by torch's attention; few others take them."""
    for heads, shape in WIDE.items():
        for name in ("toy", "16k short", "16k middling"):
            if name in sets():
                names = ("sdpa",) if TOY else ("triton", "sdpa")
                yield from compare(f"attention, {heads}", name, shape, sets()[name], names)


def compare(
    section: str, case: str, shape: Shape, documents: list[int], names: tuple[str, ...] = IMPLEMENTATIONS
) -> Iterator[Result]:
    inputs, cotangent = _inputs(shape, documents)
    right = _right(inputs, cotangent, documents)
    for name in filter(wanted, names):
        packed = PackedMetadata.from_lengths(documents, device=DEVICE)

        def forward(name: str = name, packed: PackedMetadata = packed) -> Tensor:
            return attention(*inputs, packed, implementation=name)

        def both(name: str = name, packed: PackedMetadata = packed) -> tuple[Tensor, ...]:
            out = attention(*inputs, packed, implementation=name)
            return out, *torch.autograd.grad(out, inputs, cotangent)

        def measure() -> dict[str, float]:
            with torch.no_grad():
                ahead = device_ms(forward)
            return {"forward": ahead, "forward + backward": device_ms(both)}

        figures, note = gated(lambda: max(map(relative_error, both(), right)), LIMIT, measure)
        if not figures:
            yield Result(section, case, name, None, "TFLOP/s, forward", note)
        for kind, ms in figures.items():
            operations = useful(shape, documents) * (1 if kind == "forward" else 3.5)
            yield Result(section, case, name, operations / ms / 1e9, f"TFLOP/s, {kind}", note)


def useful(shape: Shape, documents: list[int]) -> float:
    heads, _, width, values = shape
    return 2.0 * heads * (width + values) * sum(n * (n + 1) / 2 for n in documents)


def _inputs(shape: Shape, documents: list[int]) -> tuple[list[Tensor], Tensor]:
    heads, kv_heads, width, values = shape
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    dtype = torch.float32 if TOY else torch.bfloat16
    q, k, v, dout = (
        torch.randn(sum(documents), h, columns, device=DEVICE, generator=generator).to(dtype)
        for h, columns in ((heads, width), (kv_heads, width), (kv_heads, values), (heads, values))
    )
    return [x.requires_grad_() for x in (q, k, v)], dout


def _right(inputs: list[Tensor], cotangent: Tensor, documents: list[int]) -> list[Tensor]:
    """Output and gradients in float32, each document alone, by torch's own attention."""
    leaves = [x.detach().float().requires_grad_() for x in inputs]
    group = leaves[0].shape[1] // leaves[1].shape[1]
    outputs, gradients = [], []
    for q, k, v, dout in zip(*(x.split(documents) for x in (*leaves, cotangent.float())), strict=True):
        heads_first = [x.detach().transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
        wide = [heads_first[0], *(x.repeat_interleave(group, 1) for x in heads_first[1:])]
        out = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
        found = torch.autograd.grad(out, heads_first, dout.transpose(0, 1)[None])
        outputs.append(out[0].transpose(0, 1).detach())
        gradients.append([x[0].transpose(0, 1) for x in found])
    return [torch.cat(outputs), *(torch.cat(x) for x in zip(*gradients, strict=True))]
