"""Images in padded calls that run packed: which arguments are theirs, and positions on three axes.

The rows of a padded batch -> the family's own ``get_rope_index``, on the host, as the model itself calls it for padded
batches -> positions [3, B, S], which are taken out of the padding like every value per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_backend.hf.anatomy.families import EXACT_KEYS, M_ROPE
from torch_backend.hf.anatomy.vision import GRIDS, PIXELS, indexer_of, kinds_of_tokens, refuse_joined_images
from torch_backend.segments import to_device

_TYPES = frozenset(("mm_token_type_ids", "token_type_ids"))


def image_keys(root: Any) -> frozenset[str]:
    """Returns the arguments of a model that hold images, and no value per token, whatever their shapes are."""
    return EXACT_KEYS.get(root.config.model_type, frozenset()) - _TYPES


def positions_of_rows(root: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The positions [3, B, S] of a padded batch with images; None where the family counts tokens, or they are given.

    Raises:
        LayoutError: images stand side by side without a token between them, which the family numbers as one.
    """
    given = kwargs.get("position_ids")
    if root.config.model_type not in M_ROPE or (isinstance(given, Tensor) and given.ndim == 3):
        return None
    if all(kwargs.get(name) is None for name in PIXELS):
        return None
    ids_BS, mask_BS = kwargs["input_ids"].cpu(), kwargs["attention_mask"].cpu()
    indexer, types_BS = indexer_of(root), kwargs.get("mm_token_type_ids")
    types_BS = kinds_of_tokens(indexer.config, ids_BS) if types_BS is None else types_BS.cpu()
    grids = {name: grid.cpu() for name in GRIDS.values() if (grid := kwargs.get(name)) is not None}
    refuse_joined_images(types_BS, len(grids.get("image_grid_thw", ())))
    found = indexer.get_rope_index(ids_BS, mm_token_type_ids=types_BS, attention_mask=mask_BS, **grids)[0]
    return to_device(found.to(torch.int64), kwargs["input_ids"].device)
