"""Scans of hybrid layers on packed rows: the delta rules of Qwen3.5 and Kimi, the scans of Mamba-2 and Mamba.

    python -m benchmarks.gpu_scan                       # the sets of the table, and documents of 16 to 8,192 tokens
    python -m benchmarks.gpu_scan --match triton --output results

Milliseconds of kernels, forward alone and forward with backward, in bfloat16. Every contender is compared in the same
run with transformers' plain torch in float32 on each document alone; what is wrong has no figure. ``fla``,
``flash_qla`` and ``mamba_ssm`` take part where they are installed (:mod:`.gpu_scan_peers`), and what they raise stands
in the place of their figure. Without a GPU everything runs tiny, and times mean nothing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from benchmarks import gpu_scan_peers as peers
from benchmarks.gpu import collected, parsed, parser
from benchmarks.gpu_attention import lengths
from benchmarks.gpu_clock import DEVICE, TOY, Result, device_ms, gated, relative_error, wanted
from torch_backend.ops.scan.gated_delta.delta_rule import gated_delta_rule
from torch_backend.ops.scan.kimi_delta.operators import kimi_delta_rule
from torch_backend.ops.scan.selective.operators import selective_scan
from torch_backend.segments import PackedMetadata

LIMIT = 2e-2  # of bfloat16 results, in norm
DTYPE = torch.float32 if TOY else torch.bfloat16
Call = Callable[[list[Tensor], PackedMetadata], Tensor]


def sets() -> dict[str, list[int]]:
    if TOY:
        return {"toy": [5, 70, 7]}
    return {
        "8k, one document": [8_192],
        "8 x 1,024": [1_024] * 8,
        "16k, mean 240": lengths(16_384, 240, 2_048),
    }


def run(sections: str = "") -> Iterator[Result]:
    def compare(section: str, *others: Any) -> Iterator[Result]:
        if re.search(sections, section):
            yield from _compare(section, *others)

    for name, documents in sets().items():
        yield from compare("gated delta rule, 16/32 heads of 128", name, documents, drawn_delta, DELTA, plain_delta)
        yield from compare("Mamba-2 2.7B, 80 heads of 64, state 128", name, documents, drawn_ssd, SSD, plain_ssd)
        yield from compare("Mamba-2 2.7B, from dt", name, documents, drawn_stepped, STEPPED, plain_stepped)
        # The tests compare these two with the recurrence; plain torch takes minutes, or hundreds of GiB. Here peers are
        # compared with ours.
        yield from compare("Kimi delta rule, 32 heads of 128", name, documents, drawn_kimi, KIMI, None)
        yield from compare("Mamba 2.8B, 5,120 channels, state 16", name, documents, drawn_selective, SELECTIVE, None)
    for each in () if TOY else (16, 32, 64, 128, 256, 512, 1_024, 2_048, 8_192):
        documents = [each] * (16_384 // each)
        yield from compare("gated delta rule by length, 16k", f"{each:,}", documents, drawn_delta, DELTA, None)
        yield from compare("Kimi delta rule by length, 16k", f"{each:,}", documents, drawn_kimi, KIMI, None)


def _compare(
    section: str, case: str, documents: list[int], drawn: Callable[[int], list[Tensor]],
    contenders: dict[str, Call], plain: Callable[..., Tensor] | None,
) -> Iterator[Result]:  # fmt: skip
    inputs = [x.to(DEVICE).requires_grad_() for x in drawn(sum(documents))]
    right: list[Tensor] = []
    for name, call in contenders.items():
        if not wanted(name):
            continue
        packed = PackedMetadata.from_lengths(documents, device=DEVICE)
        dout = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(9)).to(DEVICE, DTYPE)

        def forward(call: Call = call, packed: PackedMetadata = packed) -> Tensor:
            return call(inputs, packed)

        def both(call: Call = call, packed: PackedMetadata = packed, dout: Tensor = dout) -> list[Tensor]:
            out = call(inputs, packed)
            # An output that is kept with its graph would keep the next contender from being captured.
            return [out.detach(), *torch.autograd.grad(out, inputs, dout)]

        def check(both: Any = both, dout: Tensor = dout) -> float:
            found = both()
            if not right:
                right.extend(found if plain is None else alone(plain, inputs, dout, documents))
            return max(map(relative_error, found, right))

        def measure(forward: Any = forward, both: Any = both) -> dict[str, float]:
            with torch.no_grad():
                ahead = device_ms(forward)
            return {"forward": ahead, "forward + backward": device_ms(both)}

        figures, note = gated(check, LIMIT, measure)
        if not figures:
            yield Result(section, case, name, None, "ms, forward", note)
        for kind, ms in figures.items():
            yield Result(section, case, name, ms, f"ms, {kind}", note)


def alone(plain: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor, documents: list[int]) -> list[Tensor]:
    """Output and gradients of each document in float32."""
    wide = [x.detach().float() for x in (*inputs, dout)]
    parts = []
    for *document, do in zip(*(x.split(documents) for x in wide), strict=True):
        leaves = [x.clone().requires_grad_() for x in document]
        out = plain(*leaves)
        parts.append([out.detach(), *torch.autograd.grad(out, leaves, do)])
    return [torch.cat(x) for x in zip(*parts, strict=True)]


# -- the gated delta rule: q, k [T, Q, K] of norm 1, v [T, H, V], g, beta [T, H] ---------------------------------------


def drawn_delta(tokens: int) -> list[Tensor]:
    shared, heads, width = (1, 2, 16) if TOY else (16, 32, 128)
    generator = torch.Generator().manual_seed(0)
    q, k = (F.normalize(torch.randn(tokens, shared, width, generator=generator), dim=-1) for _ in range(2))
    v = torch.randn(tokens, heads, width, generator=generator)
    g = -0.3 * torch.rand(tokens, heads, generator=generator)
    beta = torch.rand(tokens, heads, generator=generator)
    return [q.to(DTYPE), k.to(DTYPE), v.to(DTYPE), g, beta.to(DTYPE)]


def plain_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    rule = inspect.unwrap(torch_chunk_gated_delta_rule)
    return rule(*(x[None] for x in (q, k, v)), g=g[None], beta=beta[None])[0][0]


def ours(inputs: list[Tensor], packed: PackedMetadata) -> Tensor:
    return gated_delta_rule(*inputs, packed)


# -- Mamba-2: C, B [T, G, N], x [T, H, P] times its step, g [T, H] -----------------------------------------------------


def drawn_ssd(tokens: int) -> list[Tensor]:
    groups, heads, state, width = (1, 2, 16, 16) if TOY else (1, 80, 128, 64)
    generator = torch.Generator().manual_seed(0)
    c, b = (torch.randn(tokens, groups, state, generator=generator) * state**-0.5 for _ in range(2))
    x = torch.randn(tokens, heads, width, generator=generator)
    g = -0.3 * torch.rand(tokens, heads, generator=generator)
    return [c.to(DTYPE), b.to(DTYPE), x.to(DTYPE), g]


def plain_ssd(c: Tensor, b: Tensor, x: Tensor, g: Tensor) -> Tensor:
    # The scan multiplies x by the step and decays by A times the step: with a step of -g and A = -1, by g. A few heads
    # at a time, for all at once take tens of GiB on a long document.
    scan = inspect.unwrap(mamba2_chunk_scan)
    parts = []
    for few, step in zip(x.split(8, 1), (-g).split(8, 1), strict=True):
        y = scan((few / step[..., None])[None], step[None], -torch.ones_like(step[0]), b[None], c[None], chunk_size=64)
        parts.append((y[0] if isinstance(y, tuple) else y)[0])
    return torch.cat(parts, 1)


def plain_stepped(c: Tensor, b: Tensor, x: Tensor, dt: Tensor) -> Tensor:
    return plain_ssd(c, b, x * dt[..., None], -dt)


def drawn_stepped(tokens: int) -> list[Tensor]:
    c, b, x, g = drawn_ssd(tokens)
    return [c, b, x, -g]


def our_stepped(inputs: list[Tensor], packed: PackedMetadata) -> Tensor:
    c, b, x, dt = inputs  # A is -1
    return gated_delta_rule(c, b, x, -dt, dt, packed, scale=1.0, corrects=False)


def our_ssd(inputs: list[Tensor], packed: PackedMetadata) -> Tensor:
    c, b, x, g = inputs
    return gated_delta_rule(c, b, x, g, None, packed, scale=1.0)


# -- Kimi: a decay per channel; Mamba: x, dt [T, E], B, C [T, N], with x third as in the others ------------------------


def drawn_kimi(tokens: int) -> list[Tensor]:
    heads, width = (2, 16) if TOY else (32, 128)
    generator = torch.Generator().manual_seed(0)
    q, k = (F.normalize(torch.randn(tokens, heads, width, generator=generator), dim=-1) for _ in range(2))
    v = torch.randn(tokens, heads, width, generator=generator)
    g = -0.3 * torch.rand(tokens, heads, width, generator=generator)
    return [q.to(DTYPE), k.to(DTYPE), v.to(DTYPE), g, torch.rand(tokens, heads, generator=generator).to(DTYPE)]


def our_kimi(inputs: list[Tensor], packed: PackedMetadata) -> Tensor:
    return kimi_delta_rule(*inputs, packed)


def drawn_selective(tokens: int) -> list[Tensor]:
    channels, n = (12, 4) if TOY else (5_120, 16)
    generator = torch.Generator().manual_seed(0)
    b, c = (torch.randn(tokens, n, generator=generator).to(DTYPE) for _ in range(2))
    x = torch.randn(tokens, channels, generator=generator).to(DTYPE)
    dt = 0.1 * torch.rand(tokens, channels, generator=generator)
    return [b, c, x, dt, -torch.arange(1.0, n + 1).repeat(channels, 1)]


def our_selective(inputs: list[Tensor], packed: PackedMetadata) -> Tensor:
    b, c, x, dt, rates = inputs
    return selective_scan(x, dt, rates, b, c, packed)


KIMI: dict[str, Call] = {"triton": our_kimi, "fla": peers.kimi_by_fla}
SELECTIVE: dict[str, Call] = {"triton": our_selective}
DELTA: dict[str, Call] = {"triton": ours, "fla": peers.delta_by_fla, "flash_qla": peers.delta_by_flash_qla}
SSD: dict[str, Call] = {"triton": our_ssd}
STEPPED: dict[str, Call] = {"triton": our_stepped, "mamba_ssm": peers.stepped_by_mamba_ssm}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sections", default="", help="only sections whose name this pattern matches")
    chosen = parsed(options, None)
    collected(run(chosen.sections), chosen.output)


if __name__ == "__main__":
    main()
