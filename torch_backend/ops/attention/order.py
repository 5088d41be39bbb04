"""The order in which "auto" tries the implementations: measured, by device, options of the request and document length.

    request -> its column (what it has) and its kind (how long its documents are)
            -> the recorded order of its device (benchmarks/RESULTS.md); on a device without a record, the order in
               which batches of the request's shape ran forward and backward, timed once per job, kept and logged
            -> the same order with every last resort at its end

A last resort is an implementation that serves the request by building score matrices: its time and memory traffic
follow the square of a document even where its memory does not. ``reference`` holds whole score matrices and is never
tried by "auto": ``sdpa`` serves everything that it serves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from torch_backend.ops.attention.request import AttentionInputs, AttentionRequest, Implementation
from torch_backend.ops.trial import current_device, decided_by_one_rank, in_own_thread
from torch_backend.segments import PackedMetadata

logger = logging.getLogger(__name__)

CPU = ("sdpa",)
# Everything that may serve on CUDA; the order where nothing was recorded and nothing may be timed.
CUDA = ("flash4", "flash3", "triton", "varlen", "flash2", "flex", "xformers", "sdpa")
# Kinds of documents by their mean tokens, or by the window where that is smaller, since a query then sees as few keys
# as in a short document: (fewer than, length of the documents that stand for the kind when it is timed). Among short
# ones tiles of few tokens win, among others the fastest pipeline.
KINDS = ((768, 256), (float("inf"), 2_048))
# Columns of the record. A request belongs to the first one whose condition it meets.
COLUMNS: dict[str, Callable[[AttentionRequest], bool]] = {
    "sinks": lambda request: request.sinks,
    "softcap": lambda request: request.softcap is not None,
    "alibi": lambda request: request.alibi,
    "values": lambda request: request.value_dim != request.head_dim,  # narrower or wider than keys
    "window": lambda request: request.window is not None and request.window < request.max_seqlen,
    "plain": lambda request: True,
}
_SHORT = ("triton", "flash4", "flash3", "varlen", "flash2", "flex", "xformers", "sdpa")
_LONG = ("flash4", "flash3", "triton", "varlen", "flash2", "flex", "xformers", "sdpa")
# compute capability -> column -> the order for each kind
RECORDED = {(9, 0): dict.fromkeys(COLUMNS, (_SHORT, _LONG))}
_REPEATS = 3  # of a timed call
_TOKENS = 16_384
_timed: dict[AttentionRequest, tuple[str, ...]] = {}


def order(request: AttentionRequest, load: Callable[[str], Implementation]) -> tuple[str, ...]:
    """Names of implementations, the one to try first at the front.

    Args:
        request: its device, shape, options and mean segment length (padding counted) decide.
        load: the implementation of a name.
    """
    names = _by_speed(request, load) if request.device.type == "cuda" else CPU
    return tuple(sorted(names, key=lambda name: last_resort(load(name), request) is not None))


def last_resort(implementation: Implementation, request: AttentionRequest) -> str | None:
    """Explains why ``implementation`` is tried after all others that support ``request``, as a clause; else None."""
    reason = getattr(implementation, "last_resort", None)
    return None if reason is None else reason(request)


def _by_speed(request: AttentionRequest, load: Callable[[str], Implementation]) -> tuple[str, ...]:
    mean = request.tokens / request.segments
    capability = torch.cuda.get_device_capability(request.device)
    if capability in RECORDED:
        column = next(name for name, has in COLUMNS.items() if has(request))
        return RECORDED[capability][column][_kind(min(mean, request.window or mean))]
    if request.compiling or torch.are_deterministic_algorithms_enabled():
        return CUDA  # a trace cannot time, and two runs may not differ in what they time
    length = KINDS[_kind(mean)][1]
    trial = replace(
        request,
        tokens=_TOKENS,
        segments=_TOKENS // length,
        max_seqlen=length,
        host_lengths=True,
        key_tokens=None,
        parents=False,
        both_ways=False,
    )
    if trial not in _timed:
        if torch.cuda.is_current_stream_capturing():
            return CUDA
        question = f"{replace(trial, device=torch.device('cuda'))} on {capability}"
        answer = decided_by_one_rank(question, lambda: " ".join(_rank(trial, load)))
        _timed[trial] = tuple(answer.split())
    return _timed[trial]


def _kind(tokens: float) -> int:
    return next(i for i, (bound, _) in enumerate(KINDS) if tokens < bound)


def _rank(trial: AttentionRequest, load: Callable[[str], Implementation]) -> tuple[str, ...]:
    """Sorts the names that pass the trial by their time, the others after them; last resorts are not timed."""
    contenders = {name: load(name) for name in CUDA if last_resort(load(name), trial) is None}
    serving = {name: each for name, each in contenders.items() if each.supports(trial) is None}
    times = {name: milliseconds(implementation, trial) for name, implementation in serving.items()}
    ranked = tuple(sorted(times, key=times.__getitem__))
    found = ", ".join(f"{name} {times[name]:.2f}" for name in ranked)
    logger.info("packed attention, ms for documents of %d tokens on %s: %s", trial.max_seqlen, trial.device, found)
    return ranked + tuple(name for name in CUDA if name not in times)


@in_own_thread
def milliseconds(implementation: Implementation, trial: AttentionRequest) -> float:
    """GPU time of one forward, and backward if the request has one, on random data of the trial's shape."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=trial.device, dtype=trial.dtype, requires_grad=trial.requires_grad)

    with current_device(trial.device), torch.set_grad_enabled(trial.requires_grad):
        packed = PackedMetadata.from_lengths([trial.max_seqlen] * trial.segments, device=trial.device)
        q, k = (drawn(trial.tokens, heads, trial.head_dim) for heads in (trial.heads, trial.kv_heads))
        v = drawn(trial.tokens, trial.kv_heads, trial.value_dim)
        sinks = drawn(trial.heads) if trial.sinks else None
        slopes = torch.rand(trial.heads, device=trial.device) if trial.alibi else None

        def run() -> None:
            out = implementation(AttentionInputs(q, k, v, packed, sinks, slopes), trial)
            if trial.requires_grad:
                torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

        run()  # compiles
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_REPEATS):
            run()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / _REPEATS
