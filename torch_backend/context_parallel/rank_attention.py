"""Packed attention of one rank's tokens, whose straddling documents lie on other ranks too.

    keys    every piece fetches the earlier keys and values of its document, those inside its window alone, and its
            queries run as the last tokens of that longer segment; those that begin documents run meanwhile
    heads   (Ulysses, Jacobs et al. 2023, https://arxiv.org/abs/2309.14509) straddling documents are turned from some
            tokens of all heads to all tokens of some heads, and run whole

:func:`choose_method` takes the one that sends fewer bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from packing_core.errors import UnsupportedError
from torch_backend.context_parallel.exchange import heads_of, lengthened, to_heads, to_tokens, with_earlier_tokens
from torch_backend.context_parallel.share import KeyLayout, RankShare
from torch_backend.segments import PackedMetadata

KEYS, HEADS = "keys", "heads"
METHODS = (KEYS, HEADS)
AT_ONCE = 16_384  # queries of a piece, beside which the exchange takes few percent of the time
# Causal attention of [T, H, D] tokens in segments, of one device; the last argument holds what there is per head.
Attend = Callable[[Tensor, Tensor, Tensor, PackedMetadata, Tensor | None], Tensor]


@dataclass(frozen=True)
class MethodChoice:
    """The way in which a layer's attention crosses ranks, and what each way would send.

    Attributes:
        method: "keys" or "heads".
        sent: the numbers that leave a rank in a forward, over all ranks, by method; None where it cannot run.
    """

    method: str
    sent: dict[str, int | None]

    def __str__(self) -> str:
        if not self.sent[KEYS]:
            return "no document straddles ranks"
        names = {KEYS: "earlier keys and values", HEADS: "heads"}
        sent = (f"{names[name]}: {'not possible' if n is None else format(n, ',')}" for name, n in self.sent.items())
        return f"straddling documents exchange {names[self.method]} (numbers sent: {', '.join(sent)})"


NOT_CROSSED = MethodChoice(KEYS, {KEYS: 0, HEADS: None})  # of a batch whose documents all lie on one rank each


def choose_method(share: RankShare, q: Tensor, k: Tensor, v: Tensor, window: int | None, method: str) -> MethodChoice:
    """Chooses by the numbers that leave the ranks in a forward; the same on every rank.

    Keys send ``K (D + Dv)`` for every pair of a token and another rank that needs it. Heads send, for every straddling
    token, ``(H + K) D + (K + H) Dv`` times the part of the ranks that are others, ``(W - 1) / W``.

    Raises:
        UnsupportedError: ``method`` is "heads", and the heads do not divide by the ranks.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    of_keys = share.tokens_sent(window) * kv_heads * (k.shape[2] + v.shape[2])
    sent: dict[str, int | None] = {KEYS: of_keys, HEADS: None}
    if heads % share.ranks == 0 and kv_heads % share.ranks == 0:
        straddling = int(share.plan.lengths[share.plan.straddling].sum())
        each = (heads + kv_heads) * (k.shape[2] + v.shape[2])
        sent[HEADS] = straddling * each * (share.ranks - 1) // share.ranks
    if method == HEADS and sent[HEADS] is None:
        raise UnsupportedError(
            f'context_method="heads" needs heads that divide by the {share.ranks} ranks, and a layer has {heads} with '
            f'{kv_heads} of keys: pass context_method="keys"'
        )
    if method != "auto":
        return MethodChoice(method, sent)
    of_heads = sent[HEADS]
    return MethodChoice(HEADS if of_heads is not None and of_heads < of_keys else KEYS, sent)


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    share: RankShare,
    attend: Attend,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    method: str = KEYS,
) -> Tensor:
    """Attention of the rank's tokens, each of which sees the earlier tokens of its document on all ranks.

    Args:
        q, k, v: [T, H, D], [T, K, D], [T, K, Dv] of the rank's tokens.
        attend: packed causal attention on one device.
        window: visible keys per query, as ``attend`` has it.
        sinks: [H].
        method: of ``METHODS``.

    Returns:
        [T, H, Dv].
    """
    if not share.straddles:
        return attend(q, k, v, share.segments, sinks)
    if method == HEADS:
        return _by_heads(q, k, v, share, attend, sinks)
    layout = share.earlier(window)
    (k, v), fetched, wait = with_earlier_tokens(layout, share.group, k, v)
    if runs_at_once(layout):
        wait()
        keys, values = lengthened(layout, fetched, k, v, whole=True)
        return attend(q, keys, values, layout.queries, sinks)
    # gradients of both parts of a split are joined in one copy; those of two slices would be padded, then added
    (first_q, last_q), (first_k, _), (first_v, _) = (x.split([layout.first, len(x) - layout.first]) for x in (q, k, v))
    parts = []
    if layout.beginning is not None:  # meanwhile the others arrive
        parts.append(attend(first_q, first_k, first_v, layout.beginning, sinks))
    wait()
    if layout.continuing is not None:
        keys, values = lengthened(layout, fetched, k, v)
        parts.append(attend(last_q, keys, values, layout.continuing, sinks))
    return torch.cat(parts)


def runs_at_once(layout: KeyLayout) -> bool:
    """Returns whether all pieces of a rank run after the exchange, because most of its tokens wait for that anyway.

    Then the results, which attention keeps for its backward, need not be put together in a second place.
    """
    waiting = 0 if layout.continuing is None else layout.continuing.tokens
    return layout.longest >= AT_ONCE and layout.first <= waiting


def _by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    share: RankShare,
    attend: Attend,
    sinks: Tensor | None,
) -> Tensor:
    layout, ranks = share.whole, share.ranks
    tq, tk, tv = (to_heads(layout, share.group, x.index_select(0, layout.straddling), ranks) for x in (q, k, v))
    of_heads = None if sinks is None else heads_of(sinks, 0, share.rank, ranks)
    out = to_tokens(layout, share.group, attend(tq, tk, tv, layout.segments_received, of_heads), share.rank)
    if layout.segments_alone is not None:
        q, k, v = (x.index_select(0, layout.alone) for x in (q, k, v))
        out = torch.cat([attend(q, k, v, layout.segments_alone, sinks), out])
    return out.index_select(0, layout.inverse)
