"""The rules about batches without segments, which must not look packed: their row would run as one document.

The arguments of one forward -> marks of documents that no model reads, a mask or positions that number documents -> a
PackingError before the forward runs, or through a :class:`~.guard.Guard` later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from packing_core.batches.keys import BatchKey
from packing_core.batches.marks import LENGTHS, NUMBERS, OTHER_NAMES
from packing_core.errors import LayoutError, PackingError
from torch_backend.hf.inputs.arguments import CACHES, READ, is_flag, place_of
from torch_backend.hf.inputs.boundaries import PAGED_CACHE, WAY_OUT
from torch_backend.hf.inputs.guard import Guard

_OTHER_MARKS = {*LENGTHS, *NUMBERS, *OTHER_NAMES} - set(BatchKey.ALL)


def refuse_other_marks(kwargs: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise for marks of documents that no model reads: under them the row would run as one document.

    Args:
        kwargs: all arguments of the model.
        names: of the arguments that the model's own forward has.

    Raises:
        LayoutError: names the argument and the way out.
    """
    for name in kwargs.keys() & (_OTHER_MARKS - set(names)):
        if kwargs[name] is not None:
            renamed = f"rename it to {OTHER_NAMES[name]}, and " if name in OTHER_NAMES else ""
            raise LayoutError(
                f"the batch marks its documents by {name}, which a model does not read: {renamed}wrap the collator, "
                "crosspack.with_boundaries(collator), which turns it into the boundaries that a patched model takes"
            )


def refuse_unread(kwargs: Mapping[str, Any], reads: Collection[str], model: str) -> None:
    """Raise for keywords that only ``**kwargs`` catches: if one marks documents, the row would run as one document.

    Args:
        kwargs: all arguments of the model.
        reads: keywords that the model's own forwards name.
        model: its name.

    Raises:
        LayoutError: names the keyword and the way out.
    """
    for name, value in kwargs.items():
        if name not in reads and name not in READ and not is_flag(value):
            raise LayoutError(
                f"{model} was called with {name}, which nothing in it reads: leave it out of the batch. If it says "
                f"where documents lie, the row would run as one document: {WAY_OUT}"
            )


def check_unmarked(kwargs: Mapping[str, Any], guard: Guard) -> None:
    """Raise for a batch that looks packed and does not carry its segments.

    It does if it has a part of the metadata, a mask of segment numbers, or positions that restart inside a row. A batch
    with a cache is not looked at: its positions and masks are those of generation. Neither are positions beside a mask
    that already says which token sees which.

    Raises (now or later, see :class:`Guard`):
        LayoutError: what marks the batch, and the way out.
    """
    parts = [key for key in BatchKey.ALL if kwargs.get(key) is not None]
    if parts and kwargs.get(PAGED_CACHE) is None:
        raise LayoutError(f"the batch has {parts[0]} but no cu_seq_lens_q: {WAY_OUT}")
    if any(kwargs.get(key) is not None for key in CACHES):
        return
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if isinstance(positions, Tensor) and positions.ndim == 1:  # the same for all rows
        positions = positions[None]
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.dtype != torch.bool:
        width = mask.shape[1]

        def numbered(i: int) -> PackingError:
            return LayoutError(
                f"attention_mask is neither 0 nor 1 at {place_of(i, width)}, as if it numbered the documents of a row, "
                f"but the batch carries no segments: {WAY_OUT}"
            )

        def numbers() -> Tensor:  # floating-point masks may hold weights up to 1, or what is added to scores
            return mask > 1 if mask.is_floating_point() else (mask != 0) & (mask != 1)

        guard.check("attention_mask", numbers, numbered)
    if isinstance(positions, Tensor) and positions.ndim in (2, 3) and _says_nothing_of_segments(mask, positions):

        def restarting(i: int) -> PackingError:
            place = place_of(i, positions.shape[-1] - 1, ahead=1)
            return LayoutError(
                f"position_ids restart inside a row ({place}) but the batch carries no segments: {WAY_OUT}"
            )

        guard.check("position_ids", lambda: _restarts(positions, mask), restarting)


def _says_nothing_of_segments(mask: Any, positions: Tensor) -> bool:
    """Returns whether positions alone divide the row: there is no mask, or one of padding."""
    return mask is None or (isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] == positions.shape[-1])


def _restarts(positions: Tensor, mask: Tensor | None) -> Tensor:
    """bool [B, S - 1]: where the token after this one, neither of them padding, starts a document anew."""
    if positions.ndim == 2 or len(positions) == 4:  # the text's own positions stand before the three axes
        return _counts_anew(positions if positions.ndim == 2 else positions[0], mask)
    # Inside a document one axis at least stays or grows, at the end of an image or of a video frame too. The time of
    # text after a video may fall, but not to 0, and only the first token of a document is at 0 on all axes.
    before, after = positions[..., :-1], positions[..., 1:]
    anew = (after < before).all(0) | ((after[0] == 0) & (before[0] > 0))
    anew = anew | ((after == 0).all(0) & (positions != 0).any(0).any(1, keepdim=True))
    return anew if mask is None else anew & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)


def _counts_anew(positions: Tensor, mask: Tensor | None) -> Tensor:
    """bool [B, S - 1]: where positions [B, S] return to 0, or to the first one of their row, and count on from there.

    Positions that only repeat (0, 0, 1, 1) or fall (3, 2, 1, 0) start no document. One of a single token repeats a
    position too (0, 0, 1, 2), so a repetition starts one where the whole row consists of documents that count by one.
    """
    real = torch.ones_like(positions) if mask is None else mask
    positions, real = torch.broadcast_tensors(positions, real != 0)
    before, after, both = positions[:, :-1], positions[:, 1:], real[:, :-1] & real[:, 1:]
    first = positions.gather(1, real.int().argmax(1, keepdim=True))
    returns, counts = (after <= before) & ((after == 0) | (after == first)), after == before + 1
    grows_next = nn.functional.pad((both & (after > before))[:, 1:], (0, 1))
    only_documents = (returns | counts | ~both).all(1, keepdim=True) & (counts & both).any(1, keepdim=True)
    return both & returns & (only_documents | ((after < before) & grows_next))
