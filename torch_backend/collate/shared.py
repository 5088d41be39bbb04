"""Shared prefixes in a collator: whether a model can run them, and whether a batch gains by them.

``share_prefix`` and the model -> :func:`sharing`, once per collator. A batch's documents -> :func:`pack_shared` -> rows
in which a common beginning stands once.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

from torch import nn

from packing_core import PackedBatch, pack_tree
from packing_core.batches.trees import LEAST_SAVED, LONG, SHORTEST
from packing_core.errors import PackingError, UnsupportedError, UnsupportedModelError
from packing_core.storage.ragged import Ragged

logger = logging.getLogger(__name__)

Sharing = bool | Literal["auto"]


def sharing(share_prefix: Any, model: Any, masking: Any) -> Sharing:
    """``share_prefix`` as it holds for a model; ``"auto"`` becomes False where the model cannot run shared prefixes.

    Raises:
        UnsupportedError: ``share_prefix=True``, and the model cannot.
        PackingError: ``share_prefix`` is neither a bool nor ``"auto"``.
    """
    if share_prefix not in (True, False, "auto"):
        raise PackingError(f'share_prefix is {share_prefix!r}: pass True, False or "auto"')
    reason = None if share_prefix is False else _why_not(model, masking)
    if reason is None:
        answer: Sharing = share_prefix
        return answer
    if share_prefix is True:
        raise UnsupportedError(
            f'share_prefix=True is not possible, because {reason}: pass share_prefix=False, or "auto", which then '
            "shares nothing"
        )
    logger.info("no prefix is shared: %s", reason)
    return False


def pack_shared(documents: Ragged, capacity: int, share_prefix: Sharing, **options: Any) -> PackedBatch:
    """Pack documents, and share their common beginnings if they gain by it; see :class:`~.PackedCollator`.

    Every batch has parents, so that batches of one run have one form.
    """
    options = {"overflow": "repeat", **options}
    packed = pack_tree(documents, capacity, shortest=SHORTEST if share_prefix is True else LONG, **options)
    if share_prefix is True:
        return packed
    whole = int(documents.lengths.sum())
    if packed.n_tokens > (1 - LEAST_SAVED) * whole:
        return pack_tree(documents, capacity, shortest=whole, **options)  # longer than any beginning
    return packed


def _why_not(model: Any, masking: Any) -> str | None:
    if masking is not None:
        return "a masked language model sees what comes after a token"
    if not isinstance(model, nn.Module):
        return None
    from torch_backend.hf.anatomy.model import anatomy_of
    from torch_backend.hf.anatomy.structure import causal_lm
    from torch_backend.hf.inputs.forests import why_no_forest

    root = causal_lm(model)
    try:
        reason = why_no_forest(anatomy_of(root))
    except UnsupportedModelError as refusal:
        return str(refusal)
    return None if reason is None else f"{type(root).__name__} cannot run shared prefixes: {reason}"
