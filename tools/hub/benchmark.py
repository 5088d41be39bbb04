"""Measures the functions of this package beside flash-linear-attention and flash-attn on packed documents.

    python benchmarks/benchmark.py             # documents of mean 260 in 16,384 tokens, bfloat16, one GPU
    python benchmarks/benchmark.py --tiny      # a few tokens; on a CPU with TRITON_INTERPRET=1 and --backend cpu

Prints milliseconds of a forward and a backward, how many times as fast ours is, and how far the outputs differ, by
norm. A peer that is not installed or raises is named; ``kernels-community/fla`` is fetched with ``--fetch``, by the
library ``kernels``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

Inputs = dict[str, torch.Tensor]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--backend", default="cuda", choices=["cuda", "cpu"])
    options.add_argument("--fetch", action="store_true", help="get kernels-community/fla from the Hub")
    options.add_argument("--only", default="", metavar="TEXT", help="functions whose title holds this")
    options.add_argument("--package", type=Path, default=Path(__file__).parents[1], help="where this package is")
    chosen = options.parse_args()
    ours = load(chosen.package / "build" / f"torch-{chosen.backend}")
    device = torch.device("cuda" if chosen.backend == "cuda" else "cpu")
    dtype = torch.bfloat16 if chosen.backend == "cuda" else torch.float32
    tokens, mean = (96, 30) if chosen.tiny else (16_384, 260)
    bounds = boundaries(tokens, mean).to(device)  # one tensor for all calls, as layers share it: both sides keep tables
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, interpreted"
    print(f"{where}, torch {torch.__version__}, {len(bounds) - 1} documents in {tokens:,} tokens, {dtype}\n")
    print(
        "| function | ours, ms | peer | peer, ms | times as fast | outputs differ by |\n|---|---:|---|---:|---:|---:|"
    )
    for name, (make, call, peers) in CASES.items():
        if chosen.only not in name:
            continue
        inputs = make(tokens, 16 if chosen.tiny else 128, device, dtype)
        own = clock(partial(call, ours, bounds, **inputs), inputs, device)
        for title, peer in peers(chosen.fetch):
            if isinstance(peer, str):
                print(f"| {name} | {own:.2f} | {title} | {peer} | | |")
                continue
            compared, times = name, (own, 0.0)
            try:
                times = own, clock(partial(peer, bounds, **inputs), inputs, device)
            except Exception as error:  # whatever it is, the forward may work, and other rows
                print(f"| {name} | {own:.2f} | {title} | {type(error).__name__}: {str(error)[:100]} | | |", flush=True)
                compared, runs = (
                    f"{name}, forward",
                    (partial(call, ours, bounds, **inputs), partial(peer, bounds, **inputs)),
                )
                times = clock(runs[0], inputs, device, forward=True), clock(runs[1], inputs, device, forward=True)
            right, found = (run(bounds, **inputs).detach().float() for run in (peer, partial(call, ours)))
            off, ratio = float((found - right).norm() / right.norm()), times[1] / times[0]
            print(f"| {compared} | {times[0]:.2f} | {title} | {times[1]:.2f} | {ratio:.2f} | {off:.1e} |", flush=True)


def load(variant: Path) -> Any:
    """Imports a built variant under the name that its metadata gives, as the library ``kernels`` does."""
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def boundaries(tokens: int, mean: int) -> torch.Tensor:
    """Returns int32 [N+1], boundaries of documents of lognormal lengths that fill ``tokens``."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(tokens, generator=generator) * 0.9 - 0.405).exp().mul(mean).clamp(2).int()
    ends = lengths.cumsum(0)
    return torch.cat([torch.zeros(1), ends[ends < tokens - 1], torch.tensor([tokens])]).int()


def clock(run: Callable[[], torch.Tensor], inputs: Inputs, device: torch.device, *, forward: bool = False) -> float:
    """Returns the milliseconds of a forward and a backward, the best of five rounds after one that compiles.

    Args:
        run: returns the output.
        inputs: gets no gradients in the end.
        device: of the inputs.
        forward: leave the backward out.
    """

    def once() -> float:
        begin = time.perf_counter()
        for _ in range(5 if device.type == "cuda" else 1):
            out = run()
            if not forward:
                out.backward(torch.ones_like(out))
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / (5 if device.type == "cuda" else 1) * 1e3

    once()
    best = min(once() for _ in range(5 if device.type == "cuda" else 1))
    for tensor in inputs.values():
        tensor.grad = None
    return best


def _draw(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()


def _attention_inputs(tokens: int, width: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    heads = {"q": 16, "k": 4, "v": 4}
    return {name: _draw(tokens, count, width, device=device, dtype=dtype) for name, count in heads.items()}


def _attention(ours: Any, bounds: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    longest = int(bounds.diff().max())
    out: torch.Tensor = ours.flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest, causal=True)
    return out


def _attention_peers(fetch: bool) -> list[tuple[str, Any]]:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return [("flash-attn", "not installed")]

    def peer(bounds: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        longest = int(bounds.diff().max())
        out: torch.Tensor = flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest, causal=True)
        return out

    return [("flash-attn", peer)]


def _delta_inputs(tokens: int, width: int, device: torch.device, dtype: torch.dtype, heads: int = 8) -> Inputs:
    q, k = (_draw(1, tokens, heads, width, device=device, dtype=dtype) for _ in range(2))
    v = _draw(1, tokens, 16, width, device=device, dtype=dtype)
    g = -_draw(1, tokens, 16, device=device, dtype=torch.float32).detach().abs()
    beta = _draw(1, tokens, 16, device=device, dtype=dtype).detach().sigmoid()
    return {"q": q, "k": k, "v": v, "g": g.requires_grad_(), "beta": beta.requires_grad_()}


def _delta(function: Any, bounds: torch.Tensor, **x: torch.Tensor) -> torch.Tensor:
    options = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": bounds}
    out: torch.Tensor = function(x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], **options)[0]
    return out


def _our_delta(ours: Any, bounds: torch.Tensor, **x: torch.Tensor) -> torch.Tensor:
    return _delta(ours.chunk_gated_delta_rule, bounds, **x)


def _delta_peers(fetch: bool) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = [("fla", "not installed")]
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as installed
    except ImportError:
        pass
    else:
        found = [("fla", partial(_delta, installed))]
    if fetch:
        from kernels import get_kernel

        fetched = get_kernel("kernels-community/fla", version=2).layers.chunk_gated_delta_rule()
        found.append(("kernels-community/fla", partial(_delta, fetched)))
    return found


def _convolution_inputs(tokens: int, width: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    x = _draw(1, tokens, 32 * width, device=device, dtype=dtype)
    return {"x": x, "weight": _draw(32 * width, 4, device=device, dtype=dtype)}


def _convolution(ours: Any, bounds: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = ours.causal_conv1d_fn(x.transpose(1, 2), weight, activation="silu", cu_seqlens=bounds)
    return out.transpose(1, 2)


def _convolution_peers(fetch: bool) -> list[tuple[str, Any]]:
    try:
        from fla.modules.causal_conv1d import causal_conv1d
    except ImportError:
        return [("fla", "not installed")]

    def peer(bounds: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = causal_conv1d(x, weight, activation="silu", backend="triton", cu_seqlens=bounds)[0]
        return out

    return [("fla", peer)]


CASES: dict[str, tuple[Any, Any, Any]] = {
    "attention": (_attention_inputs, _attention, _attention_peers),
    "gated delta rule, 8 heads of q, 16 of v": (_delta_inputs, _our_delta, _delta_peers),
    "gated delta rule, 16 heads": (partial(_delta_inputs, heads=16), _our_delta, _delta_peers),
    "convolution, 4,096 channels": (_convolution_inputs, _convolution, _convolution_peers),
}


if __name__ == "__main__":
    main()
