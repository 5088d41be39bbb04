"""In which order "auto" asks the implementations: measured, per device and by how long documents are.

A request -> the recorded order of its device (benchmarks/RESULTS.md) or, on a device without one, the order in which
batches of the request's shape ran, forward and backward; that is timed once per process, kept and logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from torch_backend.ops.attention.request import AttentionRequest, Implementation
from torch_backend.ops.trial import apart, on
from torch_backend.segments import PackedMetadata

logger = logging.getLogger(__name__)

CPU = ("sdpa", "reference")
# Everything that may serve on CUDA; the order where nothing was recorded and nothing may be timed.
CUDA = ("flash4", "flash3", "triton", "varlen", "flash2", "flex", "xformers", "sdpa", "reference")
# Kinds of documents by mean tokens of a segment: (fewer than, what stands for the kind when it is timed). Among short
# ones tiles of few tokens win, among others the fastest pipeline; of very long ones torch's own attention, called once
# for each length, is among these.
KINDS = ((768, 256), (8_192, 2_048), (float("inf"), 16_384))
# compute capability -> the order for each kind
RECORDED = {
    (9, 0): (
        ("triton", "flash4", "flash3", "varlen", "flash2", "flex", "xformers", "sdpa", "reference"),
        ("flash4", "flash3", "triton", "varlen", "flash2", "flex", "xformers", "sdpa", "reference"),
        ("flash4", "flash3", "sdpa", "triton", "flex", "varlen", "flash2", "xformers", "reference"),
    ),
}
_TOKENS = 16_384
_timed: dict[AttentionRequest, tuple[str, ...]] = {}


def order(request: AttentionRequest, load: Callable[[str], Implementation]) -> tuple[str, ...]:
    """Names of implementations, the one to ask first at the front.

    Args:
        request: whose device, shape and mean segment length (padding counted) decide.
        load: the implementation of a name.
    """
    if request.device.type != "cuda":
        return CPU
    kind = next(i for i, (bound, _) in enumerate(KINDS) if request.tokens < bound * request.segments)
    length = KINDS[kind][1]
    capability = torch.cuda.get_device_capability(request.device)
    if capability in RECORDED:
        return RECORDED[capability][kind]
    if request.compiling or torch.are_deterministic_algorithms_enabled():
        return CUDA  # a trace cannot time, and two runs may not differ in what they time
    trial = replace(request, tokens=_TOKENS, segments=_TOKENS // length, max_seqlen=length, host_lengths=True)
    if trial not in _timed:
        if torch.cuda.is_current_stream_capturing():
            return CUDA
        _timed[trial] = _rank(trial, load)
    return _timed[trial]


def _rank(trial: AttentionRequest, load: Callable[[str], Implementation]) -> tuple[str, ...]:
    """The names that serve the trial by their time, the others after them."""
    serving = [name for name in CUDA if name != "reference" and load(name).supports(trial) is None]
    times = {name: milliseconds(load(name), trial) for name in serving}
    ranked = tuple(sorted(times, key=times.__getitem__))
    found = ", ".join(f"{name} {times[name]:.2f}" for name in ranked)
    logger.info("packed attention, ms for documents of %d tokens on %s: %s", trial.max_seqlen, trial.device, found)
    return ranked + tuple(name for name in CUDA if name not in times)


@apart
def milliseconds(implementation: Implementation, trial: AttentionRequest, repeat: int = 3) -> float:
    """GPU time of one forward, and backward if the request has one, on random data of the trial's shape."""
    with on(trial.device), torch.set_grad_enabled(trial.requires_grad):
        return _milliseconds(implementation, trial, repeat)


def _milliseconds(implementation: Implementation, trial: AttentionRequest, repeat: int) -> float:
    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=trial.device, dtype=trial.dtype, requires_grad=trial.requires_grad)

    packed = PackedMetadata.from_lengths([trial.max_seqlen] * trial.segments, device=trial.device)
    q, k = (drawn(trial.tokens, heads, trial.head_dim) for heads in (trial.heads, trial.kv_heads))
    v = drawn(trial.tokens, trial.kv_heads, trial.value_dim)
    sinks = drawn(trial.heads) if trial.sinks else None
    slopes = torch.rand(trial.heads, device=trial.device) if trial.alibi else None

    def run() -> None:
        out = implementation(q, k, v, packed, trial, sinks=sinks, alibi_slopes=slopes)
        if trial.requires_grad:
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    run()  # compiles
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeat):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeat
