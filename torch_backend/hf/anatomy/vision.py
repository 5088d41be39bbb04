"""Describes how a family takes images and audio: which tensors, which tokens stand for them, at which positions.

A model -> :func:`vision_of` -> :class:`Vision`, which holds no weights, so a collator with one pickles into a worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from packing_core.errors import LayoutError, PackingError, UnsupportedModelError
from torch_backend.hf.anatomy.audio import REFUSED_AUDIO, Audio, audio_of, require_encoder
from torch_backend.hf.anatomy.families import (
    EXACT_KEYS,
    M_ROPE,
    PIXELS,
    ROWS_OF_IMAGES,
    BothWays,
    both_ways_of,
    media_keys,
    refusal,
)
from torch_backend.hf.anatomy.structure import causal_lm

SECONDS = "second_per_grid_ts"  # of videos, read by get_rope_index and by nothing else
GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
# Sizes that a processor and a vision tower must agree on: attribute of the image processor, fields of the tower.
_SIZES = {
    "patch_size": ("patch_size",),
    "temporal_patch_size": ("temporal_patch_size",),
    "merge_size": ("spatial_merge_size",),
}


@dataclass(frozen=True)
class Vision:
    """Describes the images, or the audio, of a family.

    Attributes:
        model: the class of the model, for messages.
        keys: the tensors that images and videos come as.
        placeholders: ids of the tokens whose embeddings are replaced by those of images.
        in_rows: whether ``pixel_values`` has the images of each row of tokens in a row of its own.
        merge: tokens of a grid are its patches divided by this; None where there are no grids.
        indexer: an object without weights whose ``get_rope_index`` numbers a document; None without M-RoPE.
        both_ways: the tokens that see each other in both directions; None if attention is causal throughout.
        audio: its clips; None if it takes none.
    """

    model: str
    keys: frozenset[str]
    placeholders: frozenset[int]
    in_rows: bool
    merge: int | None
    indexer: Any
    both_ways: BothWays | None
    audio: Audio | None = None

    def positions(self, ids: Tensor, images: Mapping[str, Tensor], types: Tensor | None) -> Tensor:
        """Returns the positions of one document [3, L], by the family's own ``get_rope_index``.

        Args:
            ids: int64 [L].
            images: the tensors of its images and videos, and ``second_per_grid_ts`` of videos.
            types: int64 [L], 0 for text, 1 for images and 2 for videos; by default as the token ids say.

        Raises:
            LayoutError: images stand side by side without a token between them, which the family numbers as one.
            UnsupportedModelError: frames of a video lie between whole positions, or the pieces of its sound between
                them.
        """
        if types is None:
            types = kinds_of_tokens(self.indexer.config, ids)
        refuse_joined_images(types[None], len(images.get("image_grid_thw", ())))
        options: dict[str, Any] = {name: images[name] for name in (*GRIDS.values(), SECONDS) if name in images}
        if self.audio is None:
            options["mm_token_type_ids"] = types[None]
        else:
            starts = self.indexer.config.vision_start_token_id, self.indexer.config.audio_start_token_id
            if bool(((ids[:-1] == starts[0]) & (ids[1:] == starts[1])).any()):
                raise UnsupportedModelError(
                    "a video has pieces of its sound between its frames, which is not packed: pass both one after the "
                    "other, use_audio_in_video=False"
                )
            options |= {"second_per_grids": options.pop(SECONDS, None), "attention_mask": torch.ones_like(ids)[None]}
            options["audio_seqlens"] = torch.tensor(self.audio.frames(images))
        positions: Tensor = self.indexer.get_rope_index(ids[None], **options)[0][:, 0]
        if not bool((positions == positions.floor()).all()):
            raise UnsupportedModelError(
                "frames of a video lie between whole positions, as those of packed rows are: sample frames at a rate "
                "that the seconds of a grid times position_id_per_seconds make a whole number"
            )
        return positions.long()

    def marks(self, ids: Tensor, types: Tensor | None, where: str) -> Tensor:
        """Marks the tokens of a document that see each other in both directions, bool [L].

        Args:
            ids: int64 [L].
            types: the kinds of the tokens, as the processor gives them; None for those of the placeholders.

        Raises:
            LayoutError: it does not say where the prefix of a document ends.
        """
        assert self.both_ways is not None
        if types is None and not self.both_ways.prefix:
            return torch.isin(ids, torch.tensor(sorted(self.placeholders)))
        marked = None if types is None else torch.isin(types, torch.tensor(self.both_ways.kinds))
        if self.both_ways.prefix and (marked is None or bool(marked.all())):
            raise LayoutError(
                f"{where} has no token after its prefix ({self.both_ways.key}), whose tokens see what follows them and "
                "are not trained: pass prompt and completion, or what the processor returns with suffix="
            )
        assert marked is not None
        return marked

    def check(self, ids: Tensor, images: Mapping[str, Tensor], where: str) -> None:
        """Raises LayoutError if a document's placeholders and its images disagree."""
        audio = set() if self.audio is None else {self.audio.placeholder}
        marked = int(torch.isin(ids, torch.tensor(sorted(self.placeholders - audio))).sum())
        if self.audio is not None:
            clips = {name: x for name, x in images.items() if name in self.audio.keys}
            self.audio.check(int((ids == self.audio.placeholder).sum()), clips, where)
        pixels = [name for name in PIXELS if name in images]
        for name in pixels:
            if not images[name].numel():
                raise LayoutError(f"{where} has {name} without any pixels: leave it out, with its placeholders")
        if self.merge is not None:
            for name in pixels:
                if GRIDS[name] not in images:
                    raise LayoutError(f"{where} has {name} without {GRIDS[name]}: pass both, as the processor does")
            grids = [images[GRIDS[name]] for name in pixels]
            tokens = sum(int(grid.prod(-1).sum()) for grid in grids) // self.merge
            patches = sum(int(grid.prod(-1).sum()) for grid in grids)
            given = sum(len(images[name]) for name in pixels)
            if patches != given:
                raise LayoutError(f"{where} has {given:,} patches of pixels and grids of {patches:,}: they must agree")
            if tokens != marked:
                raise LayoutError(
                    f"{where} has {marked:,} image tokens and images of {tokens:,}: placeholders and images must agree"
                )
        elif bool(marked) != bool(pixels):
            has = f"{marked:,} image tokens and no pixel_values" if marked else "pixel_values and no image tokens"
            raise LayoutError(f"{where} has {has}: placeholders and images must agree")


def kinds_of_tokens(config: Any, ids: Tensor) -> Tensor:
    """Returns 0 for text, 1 for images and 2 for videos, as ``ids``; the config is that of an M-RoPE family."""
    return (ids == config.image_token_id).long() + 2 * (ids == getattr(config, "video_token_id", -1)).long()


def refuse_joined_images(types_BS: Tensor, count: int) -> None:
    """Raises LayoutError if the image tokens of documents are not in as many runs as there are images."""
    runs = runs_of_images(types_BS)
    if runs != count:
        raise LayoutError(
            f"there are {count} images in {runs} runs of image tokens: put a token between images, as the family's "
            "chat template does"
        )


def runs_of_images(types_BS: Tensor) -> int:
    """Counts the runs of image tokens in the rows of a batch."""
    shown = torch.cat((types_BS.new_zeros(len(types_BS), 1), types_BS), 1) == 1
    return int((shown[:, 1:] & ~shown[:, :-1]).sum())


def indexer_of(root: nn.Module) -> Any:
    """Returns an object without weights whose ``get_rope_index`` numbers documents as an M-RoPE model does."""
    own: Any = next(module for module in root.modules() if hasattr(type(module), "get_rope_index"))
    indexer: Any = object.__new__(type(own))
    nn.Module.__init__(indexer)
    indexer.config, indexer.spatial_merge_size = own.config, own.config.vision_config.spatial_merge_size
    return indexer


def vision_of(model: nn.Module) -> Vision:
    """Describes how a model takes images or audio.

    Raises:
        UnsupportedModelError: it takes none, or is not known to be exact with packed images.
    """
    root = causal_lm(model)
    config: Any = root.config
    keys = media_keys(config)
    if (reason := refusal(config.model_type, config)) is not None:
        raise UnsupportedModelError(reason)
    if (audio := audio_of(config)) is not None:
        require_encoder(root)
    elif "pixel_values" not in keys:
        why = f" ({REFUSED_AUDIO[config.model_type]})" if config.model_type in REFUSED_AUDIO else ""
        raise UnsupportedModelError(
            f"{type(root).__name__} is not known to be exact with images or audio in packed rows{why}: pack text "
            "alone, without processor=, and give the model documents with images or audio unpacked"
        )
    indexer = indexer_of(root) if config.model_type in M_ROPE else None
    both_ways = both_ways_of(config)
    merge = getattr(config.vision_config, "spatial_merge_size", None) if indexer is not None else None
    return Vision(
        model=type(root).__name__,
        keys=keys,
        placeholders=frozenset(
            number
            for name in (*_PLACEHOLDERS, *(("audio_token_id",) if audio is not None else ()))
            if isinstance(number := getattr(config, name, None), int)
        ),
        in_rows=config.model_type in ROWS_OF_IMAGES,
        merge=None if merge is None else merge**2,
        indexer=indexer,
        both_ways=both_ways,
        audio=audio,
    )


def check_processor(processor: Any, model: nn.Module) -> None:
    """Raises PackingError if a processor is not one for a model: other image tokens, or other sizes of patches."""
    root = causal_lm(model)
    config: Any = root.config
    name, kind = type(processor).__name__, type(root).__name__
    tokenizer = getattr(processor, "tokenizer", None)
    if (audio := audio_of(config)) is not None:
        if audio.encoder == "equal" and hasattr(processor, "nb_max_frames"):  # a feature extractor
            audio.check_bins(processor, name, kind, config.audio_config)
            return
        if tokenizer is None or getattr(processor, "feature_extractor", None) is None:
            raise PackingError(
                f"processor is a {name}, which has no tokenizer and feature_extractor: pass transformers.AutoProcessor"
                ".from_pretrained(...) of the model"
            )
        audio.check_processor(processor, kind, config.audio_config)
        if "pixel_values" not in EXACT_KEYS[config.model_type]:
            return
    if tokenizer is None or getattr(processor, "image_processor", None) is None:
        raise PackingError(
            f"processor is a {name}, which has no tokenizer and image_processor: pass transformers.AutoProcessor"
            ".from_pretrained(...) of the model"
        )
    known = [getattr(config, field, None) for field in _PLACEHOLDERS]
    its = {getattr(processor, "image_token_id", None), getattr(tokenizer, "image_token_id", None)}
    its |= {*(getattr(processor, "image_token_ids", None) or ())}
    if not its & {number for number in known if number is not None}:
        raise PackingError(
            f"{name} marks images by the token {sorted(x for x in its if x is not None)} and {kind} expects "
            f"{sorted(x for x in known if x is not None)}: pass the processor of the model"
        )
    tower = getattr(config, "vision_config", None)
    for field, names in _SIZES.items():
        ours = getattr(processor.image_processor, field, None)
        theirs = next((x for one in names if isinstance(x := getattr(tower, one, None), int)), None)
        if isinstance(ours, int) and theirs is not None and ours != theirs:
            raise PackingError(
                f"the image processor of {name} has {field}={ours} and the tower of {kind} {theirs}: pass the "
                "processor of the model"
            )
