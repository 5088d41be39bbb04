"""Recurrent layers of one rank's tokens, whose straddling documents lie on other ranks too.

    convolve_pieces  a short convolution fetches the few earlier tokens that it looks back
    scan_by_heads    a scan, whose heads do not mix, is turned from some tokens of all heads to all tokens of some heads
    run_whole        any other layer runs straddling documents as a whole, each on one rank
    scan_whole       and so does a scan whose heads do not divide by the ranks

Scans whose states fade by gates alone hand their states on instead (:mod:`.states`). Those of delta rules could too,
but what a piece makes of a state is a matrix then, which no kernel of the libraries returns. Turning heads costs more
bytes and leaves every scan as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_backend.context_parallel.exchange import (
    all_to_all,
    divides,
    heads_of,
    lengthened,
    to_heads,
    to_tokens,
    with_earlier_tokens,
)
from torch_backend.context_parallel.share import RankShare
from torch_backend.segments import PackedMetadata

HEADS = "straddling documents exchange heads"
WHOLE = "straddling documents run whole, each on one rank"


def convolve_pieces(
    x: Tensor, share: RankShare, width: int, convolve: Callable[[Tensor, PackedMetadata], Tensor]
) -> Tensor:
    """A causal convolution of the rank's tokens.

    Args:
        x: [T, C].
        width: tokens that an output depends on, its own included.
        convolve: the convolution of [M, C] tokens in segments.

    Returns:
        [T, C].
    """
    if not share.straddles:
        return convolve(x, share.segments)
    layout = share.earlier(width)
    (x,), fetched, wait = with_earlier_tokens(layout, share.group, x)
    wait()
    (x,) = lengthened(layout, fetched, x, whole=True)
    return convolve(x, layout.extended).index_select(0, layout.own_of_extended)


def scan_by_heads(
    share: RankShare,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    scan: Callable[[PackedMetadata, tuple[Any, ...], dict[str, Any]], Any],
) -> Any:
    """A scan of the rank's tokens, straddling documents by heads, which :func:`heads_divide` allows.

    Args:
        args, kwargs: of the scan; tensors [1, T, H, ...] hold tokens, where fewer heads serve several, and the others
            [H, ...] heads.
        scan: of tokens in segments; returns [1, M, H, ...], or a tuple that begins with it.

    Returns:
        What ``scan`` returns, for the rank's tokens.
    """
    if not share.straddles:
        return scan(share.segments, args, kwargs)
    layout, ranks = share.whole, share.ranks
    tokens = len(share.tokens)

    def by_heads(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.ndim:
            return x
        if not _holds_tokens(x, tokens):
            return heads_of(x, 0, share.rank, ranks)
        return to_heads(layout, share.group, x[0].index_select(0, layout.straddling), ranks)[None]

    def alone(x: Any) -> Any:
        return x.index_select(1, layout.alone) if isinstance(x, Tensor) and _holds_tokens(x, tokens) else x

    def run(change: Callable[[Any], Any], segments: PackedMetadata) -> Tensor:
        found = scan(segments, tuple(map(change, args)), {name: change(x) for name, x in kwargs.items()})
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out[0]

    out = to_tokens(layout, share.group, run(by_heads, layout.segments_received), share.rank)
    if layout.segments_alone is not None:
        out = torch.cat([run(alone, layout.segments_alone), out])
    return _as_returned(out.index_select(0, layout.inverse)[None], kwargs)


def _as_returned(out: Tensor, kwargs: dict[str, Any]) -> Any:
    """The output as scans return it that are called with such keywords; those of delta rules return a state too."""
    return (out, None) if "initial_state" in kwargs or "use_qk_l2norm_in_kernel" in kwargs else out


def heads_divide(share: RankShare, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether each rank can take a part of the heads of a scan, called as :func:`scan_by_heads` is."""
    tokens, ranks = len(share.tokens), share.ranks
    values = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    heads = max(x.shape[2] for x in values if _holds_tokens(x, tokens))
    of_each = [x.shape[2] if _holds_tokens(x, tokens) else x.shape[0] if x.ndim else heads for x in values]
    return heads % ranks == 0 and all(divides(own, ranks) and heads % own == 0 for own in of_each)


def scan_whole(share: RankShare, args: tuple[Any, ...], kwargs: dict[str, Any], scan: Callable[..., Any]) -> Any:
    """A scan of the rank's tokens, each straddling document as a whole on one rank: see :func:`scan_by_heads`."""

    def on_documents(packed: PackedMetadata, values: list[Any]) -> Tensor:
        found = scan(packed, tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True)))
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out

    return _as_returned(run_whole(share, [*args, *kwargs.values()], on_documents), kwargs)


def _holds_tokens(x: Tensor, tokens: int) -> bool:
    return x.ndim >= 3 and x.shape[0] == 1 and x.shape[1] == tokens


def run_whole(share: RankShare, values: list[Any], layer: Callable[[PackedMetadata, list[Any]], Tensor]) -> Tensor:
    """A layer of the rank's tokens that runs straddling documents as a whole, each on one rank.

    Args:
        values: of the call; tensors [1, T, ...] hold tokens.
        layer: runs on documents in segments, with their values; returns [1, M, ...].

    Returns:
        [1, T, ...].
    """
    if not share.straddles:
        return layer(share.segments, values)
    layout, group, tokens = share.owned, share.group, len(share.tokens)

    def gathered(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[:2] != (1, tokens):
            return x
        received = all_to_all(x[0].index_select(0, layout.straddling), layout.send, layout.receive, group)
        whole = torch.cat([x[0].index_select(0, layout.alone), received.index_select(0, layout.order)])
        # A rank without a document runs a token whose output nobody uses, so that its parameters have gradients.
        return (whole if len(whole) else torch.cat([whole, x[0, :1]]))[None]

    segments = layout.segments or PackedMetadata.from_lengths([1], device=share.device)
    out = layer(segments, [gathered(x) for x in values])[0]
    alone, rest = out[: len(layout.alone)], out[len(layout.alone) :][: len(layout.order)]
    returned = all_to_all(rest.index_select(0, layout.back), layout.receive, layout.send, group)
    return torch.cat([alone, returned]).index_select(0, layout.inverse)[None]
