"""Images in padded calls that run packed: which arguments are theirs, and positions on three axes.

The rows of a padded batch -> :class:`DocumentPositions`, by the family's own ``get_rope_index`` on the host ->
positions [3, B, S], which are taken out of the padding like every value per token.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_backend.hf.anatomy.families import NUMBERED_BY_KINDS, PIXELS, media_keys
from torch_backend.hf.anatomy.vision import (
    GRIDS,
    indexer_of,
    kinds_of_tokens,
    refuse_joined_images,
    runs_of_images,
)
from torch_backend.segments import to_device

DOCUMENTS = 1_024  # whose positions are kept
_known: OrderedDict[tuple[Any, ...], Tensor] = OrderedDict()
_lock = threading.Lock()


def image_keys(root: Any) -> frozenset[str]:
    """Returns the arguments of a model that hold images, and no value per token, whatever their shapes are."""
    return media_keys(root.config)


class DocumentPositions:
    """Numbers the rows of a model's padded batches with images, each document once for all calls that read it.

    A trainer runs a batch through its policy and its reference, and a policy trainer through the model that generated
    it; documents come in other batches then. Models that number alike share what is known.
    """

    def __init__(self, root: Any) -> None:
        self.axes = root.config.model_type in NUMBERED_BY_KINDS
        self.indexer: Any = indexer_of(root) if self.axes else None
        self.family = _numbering_of(self.indexer) if self.axes else ""

    def of_rows(self, kwargs: Mapping[str, Any]) -> Tensor | None:
        """The positions [3, B, S] of a padded batch; None where the family counts tokens, or they are given.

        Raises:
            LayoutError: images stand side by side without a token between them, which the family numbers as one.
        """
        given = kwargs.get("position_ids")
        if not self.axes or (isinstance(given, Tensor) and given.ndim == 3):
            return None
        if all(kwargs.get(name) is None for name in PIXELS):
            return None
        ids_BS, mask_BS = kwargs["input_ids"].cpu(), kwargs["attention_mask"].cpu() != 0
        types_BS = kwargs.get("mm_token_type_ids")
        types_BS = kinds_of_tokens(self.indexer.config, ids_BS) if types_BS is None else types_BS.cpu()
        grids = {name: grid.cpu() for name in GRIDS.values() if (grid := kwargs.get(name)) is not None}
        images = grids.get("image_grid_thw", ids_BS.new_zeros(0, 3))
        refuse_joined_images(types_BS, len(images))
        if "video_grid_thw" in grids:  # some families number their frames apart
            whole = {"mm_token_type_ids": types_BS, "attention_mask": mask_BS.long(), **grids}
            found = self.indexer.get_rope_index(ids_BS, **whole)[0].long()
            return to_device(found, kwargs["input_ids"].device)
        found, first = torch.zeros(3, *ids_BS.shape, dtype=torch.int64), 0
        for row, (ids, types, mask) in enumerate(zip(ids_BS, types_BS, mask_BS, strict=True)):
            ids, types = ids[mask], types[mask]
            last = first + runs_of_images(types[None])
            found[:, row, mask] = self._of_document(ids, types, images[first:last])
            first = last
        return to_device(found, kwargs["input_ids"].device)

    def _of_document(self, ids: Tensor, types: Tensor, grids: Tensor) -> Tensor:
        """The positions [3, L] of one document with images of these grids, or without any."""
        key = (self.family, *(x.numpy().tobytes() for x in (ids, types, grids)))
        with _lock:
            if key in _known:
                _known.move_to_end(key)
                return _known[key]
        given = {"image_grid_thw": grids} if len(grids) else {}
        found: Tensor = self.indexer.get_rope_index(ids[None], mm_token_type_ids=types[None], **given)[0][:, 0].long()
        with _lock:
            _known[key] = found
            while len(_known) > DOCUMENTS:
                _known.popitem(last=False)
        return found


def _numbering_of(indexer: Any) -> str:
    """Describes what the positions of a document depend on beside the document."""
    config = indexer.config
    ids = sorted((name, value) for name, value in config.to_dict().items() if name.endswith(("_token_id", "_index")))
    seen = [each for each in ids if each[0].startswith(("image", "video", "vision"))]
    return f"{type(indexer)} {seen} {config.vision_config.to_json_string()}"
