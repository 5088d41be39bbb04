"""Attention over selected keys in Triton, one document at a time: forward, gradient of q, gradients of k and v.

Latent attention projects some queries at a time to the width of its keys, and their outputs back. A key's gradient is
the sum of its shares from all queries that selected it. For some queries at a time, the kernel of q's gradient writes
what the shares are products of, a batched matrix product makes the shares, and the sorted selection says which of them
each key adds, in float32 and in order: no atomics, so results repeat to the bit, and memory grows with the length of
the document.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_backend.ops.attention.reference import scores_attention
from torch_backend.ops.attention.request import AttentionRequest, request_of
from torch_backend.ops.operators import operator, runs_triton, shared_memory
from torch_backend.ops.recomputing import computed_once
from torch_backend.ops.trial import current_device, in_own_thread, refusal
from torch_backend.segments import PackedMetadata

LOG2E = 1.4426950408889634
_QUERIES = 4_096  # projected and attended with at a time
_SHARES = 2**30  # numbers that hold the shares of some queries at a time: 2 GiB in bfloat16
_TOLERANCE = 0.05  # as that of packed attention's trial
_LENGTH, _TOP = 75, 40  # of the trial's document, longer than a tile


def refuses(request: AttentionRequest, rank: int | None, rotated: int) -> str | None:
    """Explains why :func:`document_attention` cannot run, by a trial run once per configuration; None if it can.

    Args:
        request: of the layer's attention.
        rank, rotated: widths of latent attention's compressed vector and of the end of its keys; None and 0 without.
    """
    if not runs_triton(torch.empty(0, dtype=request.dtype, device=request.device)):
        return "needs Triton and a GPU, and bfloat16, float16 or float32"
    if rank is None:
        width, value_dim, values_at, kv_heads = request.head_dim, request.value_dim, request.head_dim, request.kv_heads
    else:
        width, value_dim, values_at, kv_heads = rank + rotated, rank, 0, 1
    if max(width, value_dim) > 768:
        return "keys and values of at most 768 channels"
    sizes = request.heads // kv_heads, min(kv_heads, 2), width, value_dim, values_at
    return _outcome(request.dtype, request.device, *sizes, request.sinks)


class Channels(NamedTuple):
    """Tells where keys and values of a document lie in one tensor [L, K, W], and how their products are scaled.

    Attributes:
        value_dim, values_at: of the values; the keys are the first channels, as many as queries have.
        scale: of the scores.
        block: keys of a block, which are selected together.
    """

    value_dim: int
    values_at: int
    scale: float
    block: int = 1


def document_attention(
    q: Tensor,
    kv: Tensor,
    selected: Tensor,
    channels: Channels,
    *,
    sinks: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Causal attention of one document over selected keys.

    Args:
        q: [L, H, D], or [L, H, n + D - R] with a weight.
        kv: [L, K, W].
        selected: int32 [L, S] or [L, G, S] with G of 1 or K, blocks of keys counted from the document's beginning, each
            once; -1 for none.
        channels: of ``kv``.
        sinks: [H].
        weight: [H, n + Dv, R], of latent attention. The first n channels of a query are projected to the first R of a
            key, which are the values, and the output to Dv.

    Returns:
        [L, H, Dv], dtype of q.
    """
    out: Tensor = _Selected.apply(q, kv.contiguous(), sinks, weight, *_with_ends(selected), channels)
    return out


@torch.no_grad()
def document_probabilities(
    q: Tensor,
    kv: Tensor,
    selected: Tensor,
    channels: Channels,
    *,
    sinks: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """The softmax of each query over what it selected, summed over heads; the arguments of :func:`document_attention`.

    Returns:
        [L, S * block] in float32, 0 where nothing was selected.
    """
    (chosen, ends), kv = _with_ends(selected), kv.contiguous()
    own = _projected_channels(q, kv, weight, channels.value_dim)
    parts = []
    for rows in _slices(0, len(q), _QUERIES):
        queries = _projected(q[rows], weight, own).contiguous()
        parts.append(_probabilities(queries, kv, sinks, chosen[rows], ends[rows], rows.start, *channels))
    return torch.cat(parts)


def _with_ends(selected: Tensor) -> tuple[Tensor, Tensor]:
    """The selection [L, G, S], and one more than the last place of each query that has a block."""
    chosen = selected.view(len(selected), -1, selected.shape[-1]).contiguous()
    numbers = torch.arange(1, chosen.shape[-1] + 1, dtype=torch.int32, device=chosen.device)
    return chosen, ((chosen >= 0) * numbers).amax(-1)


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        sinks: Tensor | None,
        weight: Tensor | None,
        selected: Tensor,
        ends: Tensor,
        channels: Channels,
    ) -> Tensor:
        own = _projected_channels(q, kv, weight, channels.value_dim)
        parts: list[Tensor] = []
        outs = []
        for rows in _slices(0, len(q), _QUERIES):
            queries = _projected(q[rows], weight, own).contiguous()
            out, lse = _forward(queries, kv, sinks, selected[rows], ends[rows], rows.start, *channels)
            parts += out, lse
            outs.append(out if weight is None else torch.einsum("lhr,hvr->lhv", out, weight[:, own:]))
        ctx.save_for_backward(q, kv, sinks, weight, selected, ends, *parts)
        ctx.channels, ctx.own = channels, own
        return torch.cat(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, sinks, weight, selected, ends, *parts = ctx.saved_tensors
        (value_dim, values_at, _, block), own = ctx.channels, ctx.own
        heads, (_, kv_heads, both) = q.shape[1], kv.shape
        group, width = heads // kv_heads, both if weight is not None else q.shape[2]
        dq, dkv = torch.empty_like(q), torch.zeros_like(kv, dtype=torch.float32)
        dsinks, dweight = (None if x is None else torch.zeros_like(x, dtype=torch.float32) for x in (sinks, weight))
        # a power of two: kernels are compiled once for numbers and addresses that 16 divides, and again for others
        at_once = 1 << max(0, (_SHARES // (kv_heads * selected.shape[2] * block * both)).bit_length() - 1)
        factors = q.new_zeros(min(len(q), at_once, _QUERIES), kv_heads, 2 * group, both)
        for number, part in enumerate(_slices(0, len(q), _QUERIES)):
            for rows in _slices(part.start, part.stop, at_once):
                out, lse = (x[rows.start - part.start : rows.stop - part.start] for x in parts[2 * number :][:2])
                used, gradient = factors[: rows.stop - rows.start], dout[rows]
                if weight is not None:
                    gradient = torch.einsum("lhv,hvr->lhr", gradient, weight[:, own:])
                used[:, :, :group, :width] = _projected(q[rows], weight, own).unflatten(1, (kv_heads, group))
                used[:, :, group:, values_at : values_at + value_dim] = gradient.unflatten(1, (kv_heads, group))
                dqueries, delta = _backward(
                    used, kv, selected[rows], ends[rows], out, lse, dkv, rows.start, width, *ctx.channels
                )
                if dsinks is not None:
                    dsinks -= ((sinks.float() * LOG2E - lse).exp2() * delta).sum(0)
                if dweight is None:
                    dq[rows] = dqueries
                    continue
                latent = dqueries[..., :value_dim]
                dq[rows, :, :own] = torch.einsum("lhr,hnr->lhn", latent, weight[:, :own])
                dq[rows, :, own:] = dqueries[..., value_dim:]
                dweight[:, :own] += torch.einsum("lhn,lhr->hnr", q[rows, :, :own], latent)
                dweight[:, own:] += torch.einsum("lhv,lhr->hvr", dout[rows], out)
        dsinks, dweight = (None if d is None else d.to(x.dtype) for d, x in ((dsinks, sinks), (dweight, weight)))
        return dq, dkv.to(kv.dtype), dsinks, dweight, None, None, None


def _projected_channels(q: Tensor, kv: Tensor, weight: Tensor | None, value_dim: int) -> int:
    return 0 if weight is None else q.shape[2] + value_dim - kv.shape[2]


def _projected(q: Tensor, weight: Tensor | None, own: int) -> Tensor:
    if weight is None:
        return q
    return torch.cat([torch.einsum("lhn,hnr->lhr", q[..., :own], weight[:, :own]), q[..., own:]], -1)


def _slices(start: int, stop: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


# Launchers


@computed_once
def _launch_forward(
    q: Tensor, kv: Tensor, sinks: Tensor | None, selected: Tensor, ends: Tensor, start: int, *options: Any
) -> tuple[Tensor, Tensor]:
    from torch_backend.ops.attention import selected_kernels as kernels

    channels = Channels(*options)
    out, lse = _forward_outputs(q, kv, sinks, selected, ends, start, channels.value_dim)
    constants = _constants(q.shape[1], q.shape[2], kv, selected, channels, backward=False)
    kernels.forward[_programs(kv, len(q), constants),](
        q, kv, selected, ends, sinks, out, lse, start, channels.scale, SINKS=sinks is not None, **constants
    )
    return out, lse


def _launch_probabilities(
    q: Tensor, kv: Tensor, sinks: Tensor | None, selected: Tensor, ends: Tensor, start: int, *options: Any
) -> Tensor:
    from torch_backend.ops.attention import selected_kernels as kernels

    channels = Channels(*options)
    constants = _constants(q.shape[1], q.shape[2], kv, selected, channels, backward=False)
    programs = _programs(kv, len(q), constants)
    sums = q.new_zeros(programs, selected.shape[2] * channels.block, dtype=torch.float32)
    kernels.probabilities[programs,](
        q, kv, selected, ends, sinks, sums, start, channels.scale, SINKS=sinks is not None, **constants
    )
    return sums.view(len(q), -1, sums.shape[1]).sum(1)


def _launch_backward(
    factors: Tensor,
    kv: Tensor,
    selected: Tensor,
    ends: Tensor,
    out: Tensor,
    lse: Tensor,
    dkv: Tensor,
    start: int,
    width: int,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    from torch_backend.ops.attention import selected_kernels as kernels

    (count, heads), (_, kv_heads, both), channels = lse.shape, kv.shape, Channels(*options)
    groups, places, stop = selected.shape[1], selected.shape[2] * channels.block, start + count
    dq, delta = _backward_outputs(factors, kv, selected, ends, out, lse, dkv, start, width)
    weights = factors.new_empty(count * kv_heads, factors.shape[2], places)
    constants = _constants(heads, width, kv, selected, channels, backward=True)
    kernels.backward[_programs(kv, count, constants),](
        factors, kv, selected, ends, out, lse, dq, delta, weights, start, channels.scale, **constants
    )
    shares = torch.bmm(weights.transpose(1, 2), factors.flatten(0, 1))
    order, starts = _by_keys(selected, start, channels.block)
    kernels.add_shares[stop * kv_heads,](
        shares, order, starts, dkv, stop,
        KV_HEADS=kv_heads, GROUPS=groups, WIDTH=both, PLACES=places, BLOCK_W=_power_of_two(both), ROWS=8,
    )  # fmt: skip
    return dq, delta


def _by_keys(selected: Tensor, start: int, block: int) -> tuple[Tensor, Tensor]:
    """The places of a selection [C, G, S] sorted by key, and where those of each key begin, [G, 1 + stop] and the end.

    Queries are ``start`` to ``stop``. The first entry of a group is of places without a key.
    """
    count, groups, _ = selected.shape
    device, stop = selected.device, start + count
    keys = (selected.unsqueeze(-1) * block + torch.arange(block, dtype=torch.int32, device=device)).flatten(2)
    queries = torch.arange(start, stop, dtype=torch.int32, device=device).view(-1, 1, 1)
    keys = torch.where((keys >= 0) & (keys <= queries), keys + 1, 0)
    keys += torch.arange(groups, dtype=torch.int32, device=device).view(-1, 1) * (stop + 1)
    by_keys, order = keys.flatten().sort(stable=True)
    numbers = torch.arange(groups * (stop + 1) + 1, dtype=torch.int32, device=device)
    return order, torch.searchsorted(by_keys, numbers, out_int32=True)


def _forward_outputs(
    q: Tensor, kv: Tensor, sinks: Tensor | None, selected: Tensor, ends: Tensor, start: int, value_dim: int, *_: Any
) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:2], value_dim), q.new_empty(q.shape[:2], dtype=torch.float32)


def _probability_outputs(
    q: Tensor, kv: Tensor, sinks: Tensor | None, selected: Tensor, ends: Tensor, start: int, *options: Any
) -> Tensor:
    return q.new_empty(len(q), selected.shape[2] * Channels(*options).block, dtype=torch.float32)


def _backward_outputs(
    factors: Tensor, kv: Tensor, selected: Tensor, ends: Tensor, out: Tensor, lse: Tensor, dkv: Tensor, start: int,
    width: int, *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return factors.new_empty(*lse.shape, width), torch.empty_like(lse)


_OPTIONS = "int value_dim, int values_at, float scale, int block"
_forward = operator(
    "selected_attention_forward(Tensor q, Tensor kv, Tensor? sinks, Tensor selected, Tensor ends, int start, "
    f"{_OPTIONS}) -> (Tensor, Tensor)",
    _launch_forward,
    _forward_outputs,
)
_probabilities = operator(
    "selected_attention_probabilities(Tensor q, Tensor kv, Tensor? sinks, Tensor selected, Tensor ends, int start, "
    f"{_OPTIONS}) -> Tensor",
    _launch_probabilities,
    _probability_outputs,
)
_backward = operator(
    "selected_attention_backward(Tensor factors, Tensor kv, Tensor selected, Tensor ends, Tensor out, Tensor lse, "
    f"Tensor(a!) dkv, int start, int width, {_OPTIONS}) -> (Tensor, Tensor)",
    _launch_backward,
    _backward_outputs,
)


def _programs(kv: Tensor, queries: int, constants: dict[str, Any]) -> int:
    return queries * kv.shape[1] * -(-constants["GROUP"] // constants["BLOCK_M"])


def _constants(
    heads: int, width: int, kv: Tensor, selected: Tensor, channels: Channels, *, backward: bool
) -> dict[str, Any]:
    group, (value_dim, values_at, _, block) = heads // kv.shape[1], channels
    main = max(16, 1 << (width.bit_length() - 1))
    rest = max(16, _power_of_two(width - main)) if width > main else 0
    large = kv.dtype != torch.float32 and shared_memory(kv.device) >= 200 * 1024
    wide = large and max(main, value_dim) > 256
    # measured on an H200 for 576 and 512 channels: 141 and 525 ms; with 32 keys and two stages 222 and 670 ms
    tile = {"BLOCK_M": min(max(16, _power_of_two(group)), 64 if large else 16), "BLOCK_N": 64 if large else 16}
    tile |= {"num_warps": 8 if wide else 4, "num_stages": 2 if large and not (wide and backward) else 1}
    return tile | {
        "HEADS": heads, "GROUP": group, "GROUPS": selected.shape[1], "HEAD_DIM": width, "VALUE_DIM": value_dim,
        "WIDTH": kv.shape[2], "VALUES_AT": values_at, "TOP": selected.shape[2], "SIZE": block,
        "SHARED": values_at == 0 and value_dim == main, "BLOCK_D": main, "BLOCK_R": rest,
        "BLOCK_E": max(16, _power_of_two(value_dim)),
    }  # fmt: skip


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


# The trial


@cache
def _outcome(*configuration: Any) -> str | None:
    return refusal(partial(_errors, *configuration), _TOLERANCE)


@in_own_thread
def _errors(
    dtype: torch.dtype,
    device: torch.device,
    group: int,
    kv_heads: int,
    width: int,
    value_dim: int,
    values_at: int,
    with_sinks: bool,
) -> list[float]:
    """The errors of the output and of each gradient, as shares of its largest value."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    heads, scale = group * kv_heads, width**-0.5
    visible = torch.rand(_LENGTH, _LENGTH, generator=generator).argsort(-1).argsort(-1) < _TOP
    visible |= torch.eye(_LENGTH, dtype=torch.bool)
    visible = visible.tril().to(device)
    places = torch.where(visible, torch.arange(_LENGTH, device=device), -1).sort(-1, descending=True).values.int()
    leaves = [normal(_LENGTH, heads, width), normal(_LENGTH, kv_heads, max(width, values_at + value_dim))]
    leaves += [normal(heads)] if with_sinks else []
    leaves, dout = [x.requires_grad_() for x in leaves], normal(_LENGTH, heads, value_dim)

    def tried(q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        return document_attention(q, kv, places, Channels(value_dim, values_at, scale), sinks=sinks)

    def plain(q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        q, k, v = (x.float() for x in (q, kv[..., :width], kv[..., values_at : values_at + value_dim]))
        request = request_of(q, k, v, PackedMetadata.from_lengths([_LENGTH], device=device), scale=scale)
        sinks = None if sinks is None else sinks.float()
        return scores_attention(q, k, v, request=request, sinks=sinks, visible=visible).to(dtype)

    with current_device(device):
        outs = [run(*leaves) for run in (tried, plain)]
        results = [[out.detach(), *torch.autograd.grad(out, leaves, dout)] for out in outs]
        pairs = zip(*results, strict=True)
        return [float((x - y).float().abs().max() / y.float().abs().max()) for x, y in pairs]
