"""Calls of the public functions that launch Triton kernels, with every option and every kind of head.

Only shapes, dtypes, strides and options matter: :mod:`.compiling` compiles what they launch and starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from packing_core.reference import ExpertActivation
from tests.torch_backend.compiling import Device
from torch_backend.ops import linear_cross_entropy
from torch_backend.ops.attention import attention
from torch_backend.ops.attention.selected_triton import Channels, document_attention, document_probabilities
from torch_backend.ops.attention.selection_scores import best_scores, index_scores
from torch_backend.ops.attention.triton import TRITON
from torch_backend.ops.conv import short_convolution
from torch_backend.ops.experts import Adapter, experts
from torch_backend.ops.linear_divergence import LinearLogits, linear_divergence
from torch_backend.ops.linear_logprobs import linear_logprobs
from torch_backend.ops.mxfp4 import dequantize
from torch_backend.ops.norm import gated_rms_norm, rms_norm, rms_norm_gradients, unit_rows
from torch_backend.ops.rope import QKNorm, apply_rope
from torch_backend.ops.scan.gated_delta.delta_rule import gated_delta_rule, gated_delta_rule_with_states
from torch_backend.ops.scan.kimi_delta.operators import kimi_delta_rule, kimi_delta_rule_with_states
from torch_backend.ops.scan.selective.operators import diagonal_scan, diagonal_scan_with_states
from torch_backend.segments import PackedMetadata

Options = dict[str, Any]
LENGTHS = (5, 60, 35)
TOKENS = sum(LENGTHS)
OTHER_LENGTHS = (7, 70, 33, 6)  # 16 divides their sum neither, for which Triton compiles kernels of their own
SEGMENTS: dict[str, Callable[[], PackedMetadata]] = {
    "documents": lambda: PackedMetadata.from_lengths(LENGTHS),
    "last tokens": lambda: PackedMetadata.of_last_tokens((1, 9), (13, 19), device="cpu"),
    "spans": lambda: PackedMetadata.from_lengths((9,)).with_spans(torch.tensor([-1, 0, 0, 0] + 5 * [-1])),
    "prefixes": lambda: PackedMetadata.from_lengths((17, 9, 8), parents=(-1, 0, 0)),
}


@contextmanager
def on_documents(lengths: tuple[int, ...]) -> Iterator[None]:
    """Lets the functions below run on documents of these lengths."""
    before = LENGTHS
    _set_lengths(lengths)
    try:
        yield
    finally:
        _set_lengths(before)


def _set_lengths(lengths: tuple[int, ...]) -> None:
    globals().update(LENGTHS=lengths, TOKENS=sum(lengths))


def new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype).requires_grad_()


def backward(*outputs: torch.Tensor) -> None:
    torch.autograd.backward(outputs, [torch.zeros_like(x) for x in outputs])


def of_attention(
    dtype: torch.dtype, device: Device, *, segments: str = "documents", width: int = 64, value_width: int = 0,
    heads: int = 2, group: int = 2, sinks: bool = False, alibi: bool = False, heads_first: bool = False, **options: Any,
) -> None:  # fmt: skip
    packed = SEGMENTS[segments]()
    keys = packed if packed.keys is None else packed.keys
    shapes = (
        (packed.tokens, heads * group, width),
        (keys.tokens, heads, width),
        (keys.tokens, heads, value_width or width),
    )
    q, k, v = (new(dtype, h, t, d).transpose(0, 1) if heads_first else new(dtype, t, h, d) for t, h, d in shapes)
    if sinks:
        options["sinks"] = new(dtype, heads * group)
    if alibi:
        options["alibi_slopes"] = torch.zeros(heads * group)
    TRITON.supports = TRITON.refuses  # a trial would read results
    backward(attention(q, k, v, packed, implementation="triton", **options))


def of_selected(
    dtype: torch.dtype, device: Device, *, width: int = 192, value_dim: int = 128, values_at: int = 0, heads: int = 16,
    kv_heads: int = 1, groups: int = 1, block: int = 1, sinks: bool = False,
) -> None:  # fmt: skip
    q, kv = new(dtype, TOKENS, heads, width), new(dtype, TOKENS, kv_heads, max(width, values_at + value_dim))
    channels, sink = Channels(value_dim, values_at, 0.5, block), new(dtype, heads) if sinks else None
    chosen = torch.zeros(TOKENS, groups, 16, dtype=torch.int32)
    backward(document_attention(q, kv, chosen, channels, sinks=sink))
    if groups == 1:
        document_probabilities(q, kv, chosen, channels, sinks=sink)


def of_scores(dtype: torch.dtype, device: Device, *, heads: int = 4, width: int = 128, block: int = 1) -> None:
    with torch.no_grad():
        shapes = (TOKENS, heads, width), (TOKENS // block, width), (TOKENS, heads)
        q, k, weights = (new(dtype, *shape) for shape in shapes)
        index_scores(q, k, weights, 0, block)
        if block > 1:
            best_scores(q, new(dtype, TOKENS, width), 0, block)


def of_values(dtype: torch.dtype, device: Device) -> None:
    """Makes the values of weights in MXFP4, whose sizes do not follow the tokens."""
    blocks, scales = (torch.zeros(2, 64, columns, dtype=torch.uint8) for columns in (48, 3))
    dequantize(blocks, scales, dtype)


def of_delta_rule(
    dtype: torch.dtype, device: Device, *, width: int = 128, value_width: int = 0, shared: int = 2, heads: int = 4,
    beta: bool = True, corrects: bool = True, skip: bool = False, states: bool = False,
) -> None:  # fmt: skip
    packed = SEGMENTS["documents"]()
    q, k = (new(dtype, TOKENS, shared, width) for _ in range(2))
    v = new(dtype, TOKENS, heads, value_width or width)
    g, strength = new(torch.float32, TOKENS, heads), new(dtype, TOKENS, heads) if beta else None
    if states:
        initial = new(torch.float32, len(LENGTHS), heads, width, value_width or width)
        backward(*gated_delta_rule_with_states(q, k, v, g, strength, packed, initial=initial, corrects=corrects))
    else:
        skipped = new(torch.float32, heads) if skip else None
        backward(gated_delta_rule(q, k, v, g, strength, packed, corrects=corrects, skip=skipped))


def of_kimi_rule(dtype: torch.dtype, device: Device, *, width: int = 128, heads: int = 2, states: bool = False) -> None:
    q, k, v = (new(dtype, TOKENS, heads, width) for _ in range(3))
    g, beta, packed = new(torch.float32, TOKENS, heads, width), new(dtype, TOKENS, heads), SEGMENTS["documents"]()
    if states:
        initial = new(torch.float32, len(LENGTHS), heads, width, width)
        backward(*kimi_delta_rule_with_states(q, k, v, g, beta, packed, initial=initial))
    else:
        backward(kimi_delta_rule(q, k, v, g, beta, packed))


def of_diagonal_scan(
    dtype: torch.dtype, device: Device, *, channels: int = 96, numbers: int = 16, states: bool = False
) -> None:
    u, B, C = new(dtype, TOKENS, channels), new(dtype, TOKENS, numbers), new(dtype, TOKENS, numbers)
    g, A, packed = new(torch.float32, TOKENS, channels), new(torch.float32, channels, numbers), SEGMENTS["documents"]()
    if states:
        initial = new(torch.float32, len(LENGTHS), channels, numbers)
        backward(*diagonal_scan_with_states(u, g, A, B, C, packed, initial=initial))
    else:
        backward(diagonal_scan(u, g, A, B, C, packed))


def of_convolution(
    dtype: torch.dtype, device: Device, *, taps: int = 4, bias: bool = False, silu: bool = False,
    transposed: bool = False,
) -> None:  # fmt: skip
    x = new(dtype, 96, TOKENS).T if transposed else new(dtype, TOKENS, 96)
    packed, weight = SEGMENTS["documents"](), new(dtype, 96, taps)
    backward(short_convolution(x, weight, packed, bias=new(dtype, 96) if bias else None, silu=silu))


def of_norm(
    dtype: torch.dtype, device: Device, *, width: int = 128, gated: bool = False, silu: bool = False,
    tile: bool = False, rows: tuple[int, ...] = (4,),
) -> None:  # fmt: skip
    x = new(dtype, TOKENS, *rows, width)
    if tile:
        weight = torch.zeros(width)
        rms_norm(x, weight, eps=1e-6), rms_norm_gradients(x, weight, x, eps=1e-6)
    elif gated:
        backward(gated_rms_norm(x, new(dtype, width), new(dtype, TOKENS, *rows, width), eps=1e-6, silu=silu))
    else:
        backward(unit_rows(x))


def of_rope(
    dtype: torch.dtype, device: Device, *, width: int = 128, angles: int = 64, heads: int = 4, inplace: bool = False,
    norm: str = "", **options: Any,
) -> None:  # fmt: skip
    q, k = new(dtype, TOKENS, heads, width), new(dtype, TOKENS, 2, width)
    if options.get("heads_first"):
        q, k = q.transpose(0, 1), k.transpose(0, 1)
    if inplace:
        q, k = q * 1, k * 1
    if norm:
        each = (heads * width, 2 * width) if norm == "over heads" else (width, width)
        options["norm"] = QKNorm(*(new(dtype, n) for n in each), over_heads=norm == "over heads")
    cos, sin = (torch.zeros(TOKENS, angles) for _ in range(2))
    backward(*apply_rope(q, k, cos, sin, inplace=inplace, **options))


def of_cross_entropy(
    dtype: torch.dtype, device: Device, *, entries: int = 1_024, bias: bool = False, weights: bool = False,
    gradient: bool = True, **options: Any,
) -> None:  # fmt: skip
    powers = device.capability == 90 and dtype == torch.bfloat16 and not bias
    linear_cross_entropy._takes_powers = lambda *_: powers  # which asks torch for the device
    hidden, weight = new(dtype, TOKENS, 128), new(dtype, entries, 128)
    options["bias"] = new(dtype, entries) if bias else None
    options["weights"] = torch.zeros(TOKENS) if weights else None
    with torch.set_grad_enabled(gradient):
        loss, _ = linear_cross_entropy.linear_cross_entropy(
            hidden, weight, torch.zeros(TOKENS, dtype=torch.int64), **options
        )
    if gradient:
        backward(loss)


def of_logprobs(
    dtype: torch.dtype, device: Device, *, entries: int = 1_024, ids: int = 1, bias: bool = False, **options: Any
) -> None:
    hidden, weight = new(dtype, TOKENS, 128), new(dtype, entries, 128)
    options["bias"] = new(dtype, entries) if bias else None
    backward(*linear_logprobs(hidden, weight, torch.zeros(TOKENS, ids, dtype=torch.int64), **options))


def of_divergence(
    dtype: torch.dtype, device: Device, *, beta: float = 0.0, entries: int = 1_024, **options: Any
) -> None:
    student, teacher = (
        LinearLogits(new(dtype, TOKENS, width), new(dtype, entries, width), **options) for width in (128, 256)
    )
    backward(linear_divergence(student, teacher, beta=beta)[0])


def of_experts(
    dtype: torch.dtype, device: Device, *, tokens: int = 512, width: int = 256, inner: int = 256, count: int = 4,
    top_k: int = 2, bias: bool = False, rank: int = 0, kind: Options | None = None, transposed: bool = False,
    **options: Any,
) -> None:  # fmt: skip
    activation = ExpertActivation(**kind or {})
    outer = 2 * inner if activation.gated else inner
    if transposed:
        up, down = new(dtype, count, width, outer).mT, new(dtype, count, inner, width).mT
    else:
        up, down = new(dtype, count, outer, width), new(dtype, count, width, inner)
    if bias:
        options |= {"up_bias": new(dtype, count, outer), "down_bias": new(dtype, count, width)}
    if rank:
        options |= {
            f"{name}_adapter": Adapter(new(dtype, count, rank, k), new(dtype, count, n, rank), 0.5)
            for name, n, k in (("up", outer, width), ("down", width, inner))
        }
    x, indices = new(dtype, tokens, width), torch.zeros(tokens, top_k, dtype=torch.int64)
    y = experts(
        x, indices, new(torch.float32, tokens, top_k), up, down, activation=activation,
        **{"implementation": "triton"} | options,
    )  # fmt: skip
    backward(y)


CLAMPED = {"name": "silu", "alpha": 1.702, "limit": 7.0, "offset": 1.0}
EXPERTS_OF_128 = {"width": 2_048, "inner": 768, "count": 8, "top_k": 8}  # per expert the tokens of a row

# Of each function: options with all values of each, first the default ones. With the first of each line and those of
# QUICK, every kernel is launched.
OPTIONS: dict[str, list[Options]] = {
    "of_attention": [
        {"segments": segments, **options}
        for segments in ("prefixes", "documents", "last tokens", "spans")
        for options in ({}, {"window": 6, "softcap": 1.5, "sinks": True, "alibi": True}, {"causal": False})
        if options.get("causal", True) or segments == "documents"
    ]
    + [{"window": 6, "causal": False}, {"softcap": 1.5}, {"sinks": True, "group": 1}, {"alibi": True, "group": 8}]
    + [
        {"segments": "documents", "heads_first": True, "heads": heads, "group": group}
        for heads, group in ((2, 2), (1, 2), (1, 1))
    ],
    "of_selected": [
        {},
        {"width": 64, "value_dim": 64, "values_at": 64, "heads": 32, "kv_heads": 2, "groups": 2, "block": 16},
        {"width": 64, "value_dim": 64, "values_at": 64, "heads": 16, "kv_heads": 2, "sinks": True},
    ],
    "of_scores": [{}, {"block": 16}],
    "of_values": [{}],
    "of_delta_rule": [
        {},
        {"beta": False},
        {"states": True, "shared": 4},
        {"beta": False, "skip": True, "shared": 1},
        {"corrects": False, "shared": 4},
        {"corrects": False, "skip": True, "heads": 8},
        {"beta": False, "states": True},
        {"corrects": False, "states": True, "shared": 1},
        {"width": 32, "shared": 1},
        {"width": 32, "corrects": False},
        {"width": 16, "beta": False, "skip": True},
    ],
    "of_kimi_rule": [{}, {"states": True, "width": 32}],
    "of_diagonal_scan": [{}, {"states": True, "numbers": 1}, {"states": True, "channels": 7}],
    "of_convolution": [
        {"silu": True, "bias": True},
        {"transposed": True, "taps": 3},
        {"silu": True, "taps": 2},
        {"bias": True, "transposed": True},
    ],
    "of_norm": [
        {},
        {"gated": True, "silu": True},
        {"gated": True, "width": 96, "rows": ()},
        {"tile": True, "rows": ()},
    ],
    "of_rope": [
        {"norm": "per head"},
        {},
        {"interleaved": True, "angles": 32, "inplace": True},
        {"norm": "over heads", "heads_first": True, "angles": 16},
        {"norm": "per head", "interleaved": True, "heads": 1, "width": 96, "angles": 48},
        {"heads_first": True},
    ],
    "of_cross_entropy": [
        {},
        {"softcap": 30.0, "weights": True},
        {"gradient": False, "weights": True},
        {"bias": True, "gradient": False, "softcap": 30.0},
        {"bias": True, "weights": True},
    ],
    "of_logprobs": [{}, {"entropy": True, "softcap": 30.0, "ids": 3}, {"entropy": True, "bias": True}],
    "of_divergence": [{}, {"beta": 1.0, "softcap": 30.0}, {"beta": 0.5}],
    "of_experts": [
        {"bias": True, "rank": 16},
        {},
        {"kind": CLAMPED, "bias": True, "interleaved": True, "transposed": True},
        {"kind": CLAMPED, "rank": 3, "interleaved": True},
        {"kind": {"name": "relu2", "gated": False}, "top_k": 1, "rank": 16},
        {"kind": {"name": "gelu_tanh"}, "transposed": True, "bias": True, "rank": 16, "tile": 256},
        {"implementation": "grouped_mm", "bias": True, "tokens": 2_048},
        {"implementation": "grouped_mm", "kind": CLAMPED, "rank": 16, "interleaved": True},
    ],
}
# What launches the kernels that the first options do not, and views whose strides are no constants along any axis.
QUICK: list[tuple[str, Options]] = [
    ("of_attention", {}),
    ("of_attention", {"heads_first": True}),
    ("of_scores", {"block": 16}),
    ("of_norm", {"gated": True, "width": 96, "rows": ()}),
    ("of_delta_rule", {"beta": False}),
    ("of_delta_rule", {"width": 32, "corrects": False}),
    ("of_cross_entropy", {"bias": True}),
    ("of_experts", {"implementation": "grouped_mm", "tokens": 2_048}),
    ("of_experts", {"bias": True, "rank": 16, "transposed": True}),
    ("of_convolution", {"silu": True, "bias": True, "transposed": True}),
]
# Shapes whose tiles take most shared memory, each in the dtypes that have tiles of their own.
SIZES: dict[str, list[Options]] = {
    "of_attention": [
        {"width": 128, "group": 8},
        {"width": 256},
        {"width": 512, "group": 8, "segments": "spans"},
    ],
    "of_selected": [{"width": 576, "value_dim": 512, "heads": 128}],
    "of_scores": [{"heads": 64}],
    "of_delta_rule": [
        {"heads": 192},  # so many that the tiles are others
        {"width": 256},
        {"corrects": False, "width": 256, "shared": 4},
        {"corrects": False, "width": 256, "heads": 192},
        {"corrects": False, "width": 64, "heads": 192, "states": True},
    ],
    "of_kimi_rule": [{"width": 256}, {"heads": 192}],
    "of_diagonal_scan": [{}, {"numbers": 128}],
    "of_convolution": [{"silu": True, "bias": True}],
    "of_norm": [{"gated": True, "silu": True}, {"width": 4_096}, {"width": 4_096, "tile": True, "rows": ()}],
    "of_rope": [{"norm": "over heads", "heads": 32}, {"norm": "per head", "width": 256, "angles": 128}],
    "of_cross_entropy": [{"entries": 32_768}, {"entries": 32_768, "bias": True}],
    "of_logprobs": [{"entries": 32_768, "entropy": True}],
    "of_divergence": [{"entries": 32_768, "beta": 0.5, "softcap": 30.0}],
    "of_experts": [
        {**EXPERTS_OF_128, "tokens": 128, "rank": 64},
        {**EXPERTS_OF_128, "tokens": 64, "rank": 16},
        {**EXPERTS_OF_128, "tokens": 16},
        {**EXPERTS_OF_128, "tokens": 128, "kind": {"name": "relu2", "gated": False}},
    ],
}


def run_case(device: Device, name: str, dtype: str, options: Options) -> None:
    """Calls one of the functions above."""
    globals()[name](getattr(torch, dtype), device, **options)
