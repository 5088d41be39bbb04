"""Shared prefixes in a collator: whether a model can run them, and whether a batch gains by them.

``share_prefix`` and the model -> :func:`sharing`, once per collator. A batch's documents -> :func:`pack_shared` -> rows
in which a common beginning stands once.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

from torch import nn

from packing_core import Cost, PackedBatch, pack_tree
from packing_core.batches.trees import LEAST_SAVED, LONG, SHORTEST, part_saved
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
    reason = None if share_prefix is False else _why_not(model, masking, always=share_prefix == "auto")
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


def pack_shared(documents: Ragged, capacity: int, share_prefix: Sharing, cost: Cost, **options: Any) -> PackedBatch:
    """Pack documents, and share their common beginnings if they gain by it; see :class:`~.PackedCollator`.

    Every batch has parents, so that batches of one run have one form.
    """
    options = {"overflow": "repeat", **options}
    packed = pack_tree(documents, capacity, shortest=SHORTEST if share_prefix is True else LONG, **options)
    if share_prefix is True:
        return packed
    assert packed.parents is not None
    if part_saved(packed.lengths, packed.parents, documents.lengths, cost) < LEAST_SAVED:
        longer_than_any = int(documents.lengths.sum())
        return pack_tree(documents, capacity, shortest=longer_than_any, **options)
    return packed


def _why_not(model: Any, masking: Any, *, always: bool) -> str | None:
    """Explains why a model cannot run shared prefixes; with ``always``, whether or not it is in training now."""
    if masking is not None:
        return "a masked language model sees what comes after a token"
    if not isinstance(model, nn.Module):
        return None
    from torch_backend.hf.anatomy.model import anatomy_of
    from torch_backend.hf.anatomy.structure import causal_lm
    from torch_backend.hf.inputs.forests import why_no_attention, why_no_forest, why_not_in_training
    from torch_backend.hf.patch import state_of

    root = causal_lm(model)
    try:
        anatomy, state = anatomy_of(root), state_of(root)
        reason = why_no_forest(anatomy) or (why_not_in_training(root) if always else None)
        if reason is None and state is not None:
            reason = why_no_attention(state.device, state.implementation)
    except UnsupportedModelError as refusal:
        return str(refusal)
    return None if reason is None else f"{type(root).__name__} cannot run shared prefixes: {reason}"
