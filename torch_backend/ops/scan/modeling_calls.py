"""The scans that modeling files call, by their names, on this project's own kernels.

The arguments of ``torch_chunk_gated_delta_rule`` or ``mamba2_chunk_scan`` [B, S, ...] -> :func:`refused` says whether
the kernels serve them -> :func:`scan` -> :func:`.gated_delta.delta_rule.gated_delta_rule` on the B * S tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_backend.ops import operators
from torch_backend.ops.norm import unit_rows
from torch_backend.ops.scan.chunks import unsupported
from torch_backend.ops.scan.gated_delta.delta_rule import gated_delta_rule
from torch_backend.ops.scan.kimi_delta.operators import kimi_delta_rule
from torch_backend.ops.scan.request import TRIAL_LENGTHS, TRIAL_TOLERANCE
from torch_backend.ops.scan.selective import operators as selective
from torch_backend.ops.trial import current_device, in_own_thread, refusal
from torch_backend.segments import PackedMetadata

logger = logging.getLogger(__name__)


DELTA, KIMI, LINEAR, SELECTIVE = "gated delta rule", "Kimi delta rule", "linear attention", "selective scan"


def refused(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Explains why the kernels do not run a call of the function ``name``, None if they do."""
    found = operands(name, args, kwargs)
    if found is None:
        return "it has no kernel"
    q, v, kind = found
    return refused_kind(kind, v, q.shape[-1], v.shape[-1])


def operands(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, str] | None:
    """Returns what stands for q and v, [B, S, ...], in a call of ``name``, and the kind; None if there is none."""
    form = _FORMS.get(name)
    return None if form is None else form(*args, **kwargs)


def refused_kind(kind: str, like: Tensor, width: int, value_width: int) -> str | None:
    """Explains why the kernels do not run a kind of scan, None if they do.

    Args:
        kind: one of the four.
        like: of the device and dtype of what is scanned.
        width, value_width: of heads of k and of v; of the ``SELECTIVE`` scan, the numbers of a state, and any.
    """
    if kind == SELECTIVE:
        reason = selective.unsupported(like, width)
    else:
        reason = unsupported(like, width, value_width)
    if reason is not None or operators.INTERPRETED:
        return reason
    if torch.compiler.is_compiling():
        # A trial is no part of a graph. Layers are compiled after a packed batch, for which it was made.
        return _FAILED.get((kind, width, value_width))
    return _refused(like.dtype, like.device.index, width, value_width, kind)


def scan(name: str, packed: PackedMetadata, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes the function ``name`` with its state restarted at every segment; the states returned are None."""
    return _SCANS[name](packed, *args, **kwargs)


def delta_rule(
    rule: Callable[..., Tensor],
    packed: PackedMetadata,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """Calls ``rule(packed, q, k, v, g, beta)`` on the B * S tokens with the arguments of modeling files.

    q, k [B, S, Q, K] and v [B, S, H, V], beta [B, S, H]; g too, or [B, S, H, K] for Kimi's rule.
    """
    q, k = (unit_rows(x) if use_qk_l2norm_in_kernel else x for x in (query, key))
    q, k, v, g, beta = (x.flatten(0, 1) for x in (q, k, value, g, beta))
    out = rule(packed, q, k, v, g, beta)
    return out.view(value.shape).to(query.dtype), None


def mamba2(
    ssd: Callable[..., Tensor],
    packed: PackedMetadata,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *unused: Any,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **others: Any,
) -> Tensor:
    """Calls ``ssd(packed, x, dt, A, B, C, D)`` on the B * S tokens with the arguments of modeling files.

    x [B, S, H, P], dt [B, S, H], A, D and dt_bias [H], B and C [B, S, G, N]: Dao and Gu 2024, section 5. The kernel's
    dt has its bias and its softplus.
    """
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    x, step, b, c = (y.flatten(0, 1) for y in (hidden_states, step, B, C))
    return ssd(packed, x, step, A, b, c, D).view(hidden_states.shape)


def _ssd(packed: PackedMetadata, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> Tensor:
    return gated_delta_rule(C, B, x, dt * A.float(), dt, packed, scale=1.0, corrects=False, skip=D)


def _form_of_rule(kind: str, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **others: Any) -> Any:
    return query, value, kind


def _form_of_mamba2(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Any, **others: Any
) -> Any:
    return C, hidden_states, LINEAR


# Of a call: what stands for q, what for v, and the kind of its recurrence.
_FORMS: dict[str, Callable[..., tuple[Tensor, Tensor, str]]] = {
    "torch_chunk_gated_delta_rule": partial(_form_of_rule, DELTA),
    "chunk_kimi_delta_attention": partial(_form_of_rule, KIMI),
    "mamba2_chunk_scan": _form_of_mamba2,
}


_FAILED: dict[tuple[str, int, int], str] = {}  # trials, by kind and widths, whatever the dtype


@cache
def _refused(dtype: torch.dtype, device: int, width: int, value_width: int, kind: str) -> str | None:
    reason = refusal(partial(_errors, dtype, device, width, value_width, kind), TRIAL_TOLERANCE)
    if reason is not None:
        _FAILED[kind, width, value_width] = reason
        logger.warning("the Triton kernels of scans do not run here, which costs speed: %s", reason)
    return reason


@in_own_thread
def _errors(dtype: torch.dtype, device: int, width: int, value_width: int, kind: str) -> list[float]:
    """Compares the kernels on two documents with the recurrence on each: the output and every gradient."""
    generator = torch.Generator().manual_seed(0)
    tokens, place = sum(TRIAL_LENGTHS), torch.device("cuda", device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=generator)

    g = -0.1 * torch.rand(tokens, 2, width, generator=generator)
    kernels: Callable[..., Tensor]
    truth: Callable[..., Tensor]
    if kind == SELECTIVE:
        kernels, truth = _selective_on_kernels, _selective_recurrence
        inputs = [
            normal(2),
            -g[..., 0],
            -1 - torch.arange(2.0 * width).view(2, width) / width,
            normal(width),
            normal(width),
        ]
    else:
        kernels, truth = _on_kernels, _recurrence
        inputs = [*(F.normalize(normal(2, width), dim=-1) for _ in range(2)), normal(2, value_width)]
        inputs += [g if kind == KIMI else g[..., 0]]
        inputs += [] if kind == LINEAR else [torch.rand(tokens, 2, generator=generator)]
    inputs = [x.to(dtype) for x in inputs]
    dout = normal(*inputs[0 if kind == SELECTIVE else 2].shape[1:]).to(dtype)
    with current_device(place):
        packed = PackedMetadata.from_lengths(TRIAL_LENGTHS, device=place)
        found = _out_and_gradients(partial(kernels, packed), [x.to(place) for x in inputs], dout.to(place))
        right = _out_and_gradients(truth, [x.double() for x in inputs], dout.double())
        pairs = zip((x.double().cpu() for x in found), right, strict=True)
        return [float((a - b).norm() / b.norm()) for a, b in pairs]


def _selective_on_kernels(packed: PackedMetadata, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    return selective.selective_scan(x, dt, A, B, C, packed)


def _selective_recurrence(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    out = []
    for t in range(len(x)):
        if t in (0, TRIAL_LENGTHS[0]):
            state = torch.zeros_like(A)
        state = state * (dt[t][:, None] * A).exp() + (dt[t] * x[t])[:, None] * B[t]
        out.append((state * C[t]).sum(1))
    return torch.stack(out)


def _on_kernels(
    packed: PackedMetadata, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None
) -> Tensor:
    if g.ndim == 3:
        assert beta is not None
        return kimi_delta_rule(q, k, v, g, beta, packed)
    return gated_delta_rule(q, k, v, g, beta, packed)


_SCANS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": partial(delta_rule, _on_kernels),
    "chunk_kimi_delta_attention": partial(delta_rule, _on_kernels),
    "mamba2_chunk_scan": partial(mamba2, _ssd),
}


def _recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None) -> Tensor:
    out = []
    for start, stop in ((0, TRIAL_LENGTHS[0]), (TRIAL_LENGTHS[0], sum(TRIAL_LENGTHS))):
        state = q.new_zeros(v.shape[1], q.shape[2], v.shape[2])
        for t in range(start, stop):
            state = state * g[t].exp().reshape(len(state), -1, 1)
            new = v[t] if beta is None else (v[t] - (state * k[t][..., None]).sum(1)) * beta[t][:, None]
            state = state + k[t][..., None] * new[:, None]
            out.append((state * q[t][..., None]).sum(1) * q.shape[2] ** -0.5)
    return torch.stack(out)


def _out_and_gradients(function: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    return [x.detach() for x in (out, *torch.autograd.grad(out, inputs, dout))]
