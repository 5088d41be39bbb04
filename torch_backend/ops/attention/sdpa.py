"""Packed attention on ``torch.nn.functional.scaled_dot_product_attention``, on any device and without a T x T mask.

Documents of similar length run as padded causal batches (without a causal mask, documents of one length), so the cost
follows the sum of squared lengths. Within a batch there are these ways:

    plain                                     -> torch's function on whole documents
    window that the documents exceed          -> torch's function on blocks of queries over two blocks of keys
    softcap, sinks, ALiBi, no fused kernel    -> score matrices, a block of queries at a time, again in the backward
    queries after longer key segments         -> the same
    spans that see both ways                  -> the same, each query over all keys of its window and after it
    float32 on a GPU, unless TF32 is allowed  -> the same

Segments that continue others (shared prefixes) run as the documents that they make, :mod:`.forest`.

The first two rely on torch's fused kernels and the others compute a bounded number of scores at a time, so memory grows
with the length of a document and not with its square.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from torch_backend.ops.attention.forest import over_documents
from torch_backend.ops.attention.reference import keys_ahead, scores_attention, segments_of
from torch_backend.ops.attention.request import AttentionInputs, AttentionRequest
from torch_backend.ops.document_batches import FINE, OWN, map_documents

_SMALLEST_BLOCK = 32
# Scores that are computed at a time: 256 MiB in float32; on the CPU 16 MiB, which its caches hold. Their softmax and
# its gradient take a few times as much.
_SCORES, _SCORES_ON_CPU = 2**26, 2**22
_MASK = 2**26  # entries of the largest mask
_ALIGNMENT = 8  # channels; torch's fused kernels take heads of such widths in every dtype
# All but cuDNN's. Where the output's gradient is contiguous with heads before tokens, as slicing the output makes it,
# its gradients are wrong by more than their size (torch 2.11 on an H200; a GPU test holds it).
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Sdpa:
    host_lengths = both_ways = True
    more_keys = True
    parents = True

    def supports(self, request: AttentionRequest) -> str | None:
        return None if request.host_lengths else "needs the segment lengths on the host"

    def last_resort(self, request: AttentionRequest) -> str | None:
        windowed = request.window is not None and request.window < request.max_seqlen
        scores = has_no_kernel(request) or (windowed and _window_has_no_blocks(request))
        return "it builds score matrices" if scores or request.key_tokens is not None else None

    def __call__(self, inputs: AttentionInputs, request: AttentionRequest) -> Tensor:
        q, k, v, packed, sinks, alibi_slopes = inputs
        if packed.keys is not None:
            scored = partial(_scored, request=request, sinks=sinks, alibi_slopes=alibi_slopes)
            return torch.cat(
                [scored(*(x[None] for x in each), first_query=at)[0] for each, at in segments_of(q, k, v, packed)]
            )
        if packed.parents is not None:
            return over_documents(self, inputs, request)
        if has_no_kernel(request):
            run = partial(_scored, request=request, sinks=sinks, alibi_slopes=alibi_slopes)
        elif request.window is not None:
            run = partial(_windowed, request=request)
        else:
            run = partial(fused, request=request)
        ahead = keys_ahead(packed)
        of_tokens = (q, k, v) if ahead is None else (q, k, v, ahead)
        # A token sees the padding after its document unless attention is causal: then there must be no padding.
        return map_documents(packed, run, *of_tokens, sizes=FINE if request.causal else OWN)


SDPA = Sdpa()


def has_no_kernel(request: AttentionRequest) -> bool:
    """Returns whether torch's function lacks an option of the request, or has no fused kernel for it."""
    if request.softcap is not None or request.sinks or request.alibi or request.both_ways:
        return True
    if request.device.type == "cpu":
        return request.dropout > 0
    if request.device.type != "cuda":
        return False
    return request.dtype == torch.float64 or (request.dtype == torch.float32 and not _takes_tf32())


@torch.compiler.assume_constant_result
def _takes_tf32() -> bool:
    """Returns whether the process multiplies float32 matrices in TF32 on a GPU.

    torch's only fused kernel for float32 makes a product of three in TF32, whose sums the tensor cores cut: two to
    three times the error of float32, which shows where scores are in the thousands. So it runs only for those who take
    TF32 anyway.
    """
    return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"


def _window_has_no_blocks(request: AttentionRequest) -> bool:
    """Returns whether a window fits no blocks: they look back only, and have a mask of 2 * window^2 entries."""
    return request.window is not None and (not request.causal or 2 * request.window**2 > _MASK)


def fused(q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest, mask: Tensor | None = None) -> Tensor:
    """torch's function in a form that its fused kernels take.

    Args:
        q, k, v: [n, L, H, D], [n, S, K, D], [n, S, K, Dv].
        request: causal (where there is no mask), dropout and scale are read.
        mask: bool [L, S], the visible keys.

    Returns:
        [n, L, H, Dv].
    """
    grouped, value_width = q.shape[2] != k.shape[2], v.shape[3]
    if grouped and q.is_cuda and (mask is not None or q.dtype == torch.float32):
        # of the CUDA kernels only flash-attention takes groups, and it takes neither
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        grouped = False
    width = -(-max(q.shape[3], value_width) // _ALIGNMENT) * _ALIGNMENT
    q, k, v = (F.pad(x, (0, width - x.shape[3])) if x.shape[3] < width else x for x in (q, k, v))
    with sdpa_kernel(_KERNELS):
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            dropout_p=request.dropout,
            is_causal=request.causal and mask is None,
            scale=request.scale,
            enable_gqa=grouped,
        )
    return out[..., :value_width].transpose(1, 2)


def _windowed(q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest) -> Tensor:
    """The first block of queries over its own keys, each later one over its own block of keys and the one before."""
    window = request.window
    assert window is not None
    n, length = q.shape[:2]
    if window >= length:
        return fused(q, k, v, request)
    if _window_has_no_blocks(request):
        return _scored(q, k, v, request=request)
    block = max(window, _SMALLEST_BLOCK)
    blocks = -(-length // block)
    q, k, v = (
        F.pad(x, (0, 0, 0, 0, 0, blocks * block - length)).view(n, blocks, block, *x.shape[2:]) for x in (q, k, v)
    )
    places = torch.arange(block, device=q.device)
    first = fused(q[:, 0], k[:, 0], v[:, 0], request, _visible(places, places, window))
    if blocks == 1:
        return first[:, :length]
    before_and_own_k, before_and_own_v = (torch.cat([x[:, :-1], x[:, 1:]], 2).flatten(0, 1) for x in (k, v))
    visible = _visible(places + block, torch.arange(2 * block, device=q.device), window)
    later = fused(q[:, 1:].flatten(0, 1), before_and_own_k, before_and_own_v, request, visible)
    return torch.cat([first, later.reshape(n, -1, *later.shape[2:])], 1)[:, :length]


def _visible(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    distance = queries[:, None] - keys
    return (distance >= 0) & (distance < window)


def _scored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ahead: Tensor | None = None,
    *,
    request: AttentionRequest,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    first_query: int = 0,
) -> Tensor:
    """:func:`scores_attention` of whole documents, block by block; the backward computes a block's scores again.

    Args:
        q, k, v: [n, L, H, D], [n, S, K, D], [n, S, K, Dv].
        ahead, request, sinks, alibi_slopes, first_query: as :func:`scores_attention` takes them.

    Returns:
        [n, L, H, Dv].
    """
    length = k.shape[1]
    reach = length if request.window is None else min(length, max(request.window, _SMALLEST_BLOCK))
    # Blocks follow from the length of a document alone, so its bits do not depend on how many documents there are.
    scores_of_a_query = request.heads * (length if request.both_ways else min(length, 3 * reach))
    at_once = _SCORES_ON_CPU if q.device.type == "cpu" else _SCORES
    queries = min(reach, _power_of_two(at_once // scores_of_a_query))
    documents = max(1, at_once // (scores_of_a_query * queries))
    # The gradients of a key, a sink and a slope are sums over blocks, and are summed in float32.
    exact, dtype = torch.promote_types(q.dtype, torch.float32), q.dtype
    k, v = k.to(exact), v.to(exact)
    sinks, alibi_slopes = (None if x is None else x.to(exact) for x in (sinks, alibi_slopes))

    def block(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ahead: Tensor | None,
        sinks: Tensor | None,
        slopes: Tensor | None,
        first: int,
    ) -> Tensor:
        k, v = k.to(dtype), v.to(dtype)
        scored = partial(scores_attention, request=request, sinks=sinks, alibi_slopes=slopes)
        return scored(q, k, v, first_query=first, ahead=ahead)

    def run(q: Tensor, k: Tensor, v: Tensor, ahead: Tensor | None = None) -> Iterator[Tensor]:
        for start in range(first_query, length, queries):
            stop = min(start + queries, length)
            low = max(0, start - reach + 1)
            high = stop if request.causal else min(length, stop + reach - 1)
            if ahead is not None:
                high = length  # only the device knows where spans end
            asking = slice(start - first_query, stop - first_query)
            yield checkpoint(
                block, q[:, asking], k[:, low:high], v[:, low:high], None if ahead is None else ahead[:, asking],
                sinks, alibi_slopes, start - low,
                use_reentrant=False, preserve_rng_state=request.dropout > 0,
            )  # fmt: skip

    several = zip(*(x.split(documents) for x in (q, k, v, ahead) if x is not None), strict=True)
    return torch.cat([torch.cat(list(run(*each)), 1) for each in several])


def _power_of_two(n: int) -> int:
    """The largest that is not above n, at least 1."""
    return 1 << max(n, 1).bit_length() - 1
