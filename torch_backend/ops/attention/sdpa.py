"""Packed attention on ``torch.nn.functional.scaled_dot_product_attention``, on any device and without a T x T mask.

Documents of similar length run as padded causal batches, so the cost follows the sum of squared lengths. A sliding
window runs on blocks of queries over two blocks of keys, so it follows length times window. What the torch function has
no argument for (softcap, sinks, ALiBi) runs on the score matrices of the same batches.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_backend.ops.attention.reference import scores_attention
from torch_backend.ops.attention.request import AttentionRequest
from torch_backend.ops.documents import map_documents
from torch_backend.segments import PackedMetadata

_SMALLEST_BLOCK = 32


class Sdpa:
    host_lengths = True
    fixed_shapes = False

    def supports(self, request: AttentionRequest) -> str | None:
        if not request.host_lengths:
            return "needs the segment lengths on the host"
        if not request.causal:
            return "batches documents with their padding at the end, which only causal attention does not see"
        return None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        packed: PackedMetadata,
        request: AttentionRequest,
        *,
        sinks: Tensor | None,
        alibi_slopes: Tensor | None,
    ) -> Tensor:
        if request.softcap is not None or request.sinks or request.alibi:
            run = partial(scores_attention, request=request, sinks=sinks, alibi_slopes=alibi_slopes)
        elif request.window is not None:
            run = partial(_windowed, request=request)
        else:
            run = partial(_causal, request=request)
        return map_documents(packed, run, q, k, v)


SDPA = Sdpa()


def _causal(q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest, mask: Tensor | None = None) -> Tensor:
    """[n, L, H, D], [n, S, K, D], [n, S, K, Dv] -> [n, L, H, Dv]; ``mask`` [L, S] of visible keys, causal if None."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=request.dropout,
        is_causal=mask is None,
        scale=request.scale,
        enable_gqa=request.heads != request.kv_heads,
    )
    return out.transpose(1, 2)


def _windowed(q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest) -> Tensor:
    """The first block of queries over its own keys, each later one over its own block of keys and the one before."""
    window = request.window
    assert window is not None
    n, length = q.shape[:2]
    if window >= length:
        return _causal(q, k, v, request)
    block = max(window, _SMALLEST_BLOCK)
    blocks = -(-length // block)
    q, k, v = (
        F.pad(x, (0, 0, 0, 0, 0, blocks * block - length)).view(n, blocks, block, *x.shape[2:]) for x in (q, k, v)
    )
    places = torch.arange(block, device=q.device)
    first = _causal(q[:, 0], k[:, 0], v[:, 0], request, _visible(places, places, window))
    if blocks == 1:
        return first[:, :length]
    before_and_own_k, before_and_own_v = (torch.cat([x[:, :-1], x[:, 1:]], 2).flatten(0, 1) for x in (k, v))
    visible = _visible(places + block, torch.arange(2 * block, device=q.device), window)
    later = _causal(q[:, 1:].flatten(0, 1), before_and_own_k, before_and_own_v, request, visible)
    return torch.cat([first, later.reshape(n, -1, *later.shape[2:])], 1)[:, :length]


def _visible(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    distance = queries[:, None] - keys
    return (distance >= 0) & (distance < window)
