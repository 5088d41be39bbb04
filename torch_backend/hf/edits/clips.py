"""Audio encoders that know where clips end: no clip of a packed call is padded to 30 seconds, or to the longest.

    a packed call with input_features -> a hook in front of the model embeds its tokens, runs the encoder, and puts the
    encoded clips where their tokens stand -> the model goes on from inputs_embeds

The encoder of Whisper's kind (``row``) runs on one row of all clips. The convolutions see of each clip what they see of
it alone: the frames behind its end that the processor gave it, and zeros in front of its first. Position embeddings
count in each clip, attention runs inside clips, and frames are averaged two by two inside them.

Encoders with windows keep their own forward. They take boundaries of windows, which are made on the host here and carry
their call, so that each layer attends to all windows at once. Where clips of different length would see different
padding, each length runs by itself.

How many frames each clip has is carried by batches of our collators, which have checked their placeholders; of others
both are read from the device, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from packing_core.errors import LayoutError
from torch_backend.hf.anatomy.audio import FEATURES, FRAMES, LONGEST, Audio, audio_of
from torch_backend.hf.anatomy.families import PIXELS, SPELL_OUT_LOSS
from torch_backend.hf.attention import PACKED, TOWER_SEGMENTS, AttentionName, DecoderLayer
from torch_backend.hf.edits.towers import (
    BOUNDARIES,
    CALL,
    TowerCall,
    attend_at_once,
    compiles,
    layer_attributes,
    tower_layers,
)
from torch_backend.hf.entry import Hook
from torch_backend.hf.forward import PackedForward
from torch_backend.hf.override import Edit, LayerOverride
from torch_backend.ops.conv.clip_rows import ClipRows, convolve_clips
from torch_backend.segments import PackedMetadata, to_device


def clip_edits(root: Any) -> Iterator[Edit]:
    """The edits of a model's audio encoder; none if it takes no audio packed."""
    audio, model = audio_of(root.config), root.base_model
    if audio is None or model is root:  # of old versions, whose batches with clips are refused
        return
    tower = model.audio_tower
    if audio.encoder == "row":
        yield AttentionName(tower.config)
        yield LayerOverride(tower, _on_row, takes=(PACKED,))
    elif audio.encoder == "windows" and "flash" not in (tower.config._attn_implementation or ""):
        yield AttentionName(tower.config)
        yield from (LayerOverride(layer, _all_windows, layer_attributes) for layer in tower_layers(tower))
    yield Hook(model.register_forward_pre_hook, partial(_embed_clips, audio), with_kwargs=True)


def _embed_clips(
    audio: Audio, forward: PackedForward, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A hook: the call with embedded clips in place of their features."""
    features = kwargs.get(FEATURES)
    if features is None or kwargs.get("input_ids") is None:
        return None
    ids = kwargs["input_ids"]
    embedded = model.get_input_embeddings()(ids)
    mask = None if audio.mask is None else kwargs.get(audio.mask)
    placeholders = ids == audio.placeholder
    if len(forward.image_sizes.get(FRAMES, ())) != len(features):  # of somebody else's collator
        _read_back(audio, forward, frames_of(forward, features, mask), placeholders)
    clips = encode_clips(audio, model, forward, features, mask).to(embedded.device, embedded.dtype)
    places = torch.nonzero_static(placeholders.flatten(), size=len(clips))[:, 0]  # masked_scatter's backward would wait
    embedded = embedded.flatten(0, 1).index_copy(0, places, clips).view_as(embedded)
    kept = {name: x for name, x in kwargs.items() if name not in audio.keys}
    shown = any(kwargs.get(name) is not None for name in PIXELS)  # whose places a thinker finds by their tokens
    return args, {**kept, "input_ids": ids if shown else None, "inputs_embeds": embedded}


def _read_back(audio: Audio, forward: PackedForward, frames: list[int], placeholders: Tensor) -> None:
    """Give a packed forward what our collators' batches carry of clips of so many frames, by where their tokens lie.

    Raises:
        LayoutError: there are more or fewer placeholders, or a clip has none.
    """
    counts = np.array([audio.tokens(count) for count in frames])
    if not counts.all():
        raise LayoutError(f"clip {int(counts.argmin())} of the batch is too short for a single token: leave it out")
    places, total = placeholders.flatten().nonzero()[:, 0], int(counts.sum())
    if len(places) != total:
        raise LayoutError(
            f"the batch has {len(places):,} audio tokens and clips of {total:,}: placeholders and clips must agree"
        )
    firsts = torch.from_numpy(np.cumsum(counts) - counts).to(places.device)
    records = forward.segments.seq_idx[places[firsts]].tolist()
    longest: dict[int, int] = {}
    for record, count in zip(records, frames, strict=True):
        longest[record] = max(count, longest.get(record, 0))
    sizes = {FRAMES: frames, LONGEST: [longest[record] for record in records]}
    forward.image_sizes |= {name: torch.tensor(numbers, device="cpu") for name, numbers in sizes.items()}


def encode_clips(audio: Audio, model: Any, forward: PackedForward, features: Tensor, mask: Tensor | None) -> Tensor:
    """Encodes clips [N, bins, frames]; [tokens, D], as the decoder takes them."""
    if audio.encoder == "row":
        call = ClipCall(forward, frames_of(forward, features, mask), features.shape[-1], features.device)
        encoded: Tensor = model.audio_tower(features, **{PACKED: call})
        projected: Tensor = model.multi_modal_projector(encoded)
        return projected
    features = features.to(model.audio_tower.dtype)  # of which some families expect features
    if audio.encoder == "equal":
        clips: Tensor = model.get_audio_features(features, return_dict=True).pooler_output
        return clips.flatten(0, -2)
    frames = frames_of(forward, features, mask)
    longest = frames_of(forward, features, mask, LONGEST)
    lengths: dict[int, list[int]] = {}
    for number, count in enumerate(longest):  # a last chunk sees what fills it up, as in its record alone
        lengths.setdefault(min(count, audio.chunk), []).append(number)
    parts: list[Tensor] = [features] * len(frames)
    for numbers in lengths.values():
        of_length = [frames[number] for number in numbers]
        chosen = slice(None) if len(numbers) == len(frames) else torch.tensor(numbers, device=features.device)
        spans = [span for count in of_length for span in audio.spans(count)]
        boundaries = _boundaries(WindowCall(forward, spans, features.device))
        options = {BOUNDARIES: boundaries, "max_seqlen": max(spans), "return_dict": True}
        assert mask is not None
        clips = model.get_audio_features(features[chosen], mask[chosen], **options).pooler_output
        for number, part in zip(numbers, clips.split([audio.tokens(count) for count in of_length]), strict=True):
            parts[number] = part
    return torch.cat(parts)


def frames_of(forward: PackedForward, features: Tensor, mask: Tensor | None, name: str = FRAMES) -> list[int]:
    """The frames of each clip: those that the batch carries, else those that the mask marks."""
    carried = forward.image_sizes.get(name)
    if carried is not None and len(carried) == len(features):
        return [int(count) for count in carried.tolist()]
    return [features.shape[-1]] * len(features) if mask is None else [int(x) for x in mask.sum(-1).tolist()]


def by_loss_function(root: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that spells out its loss, with that loss by ``loss_function``, which losses without logits replace."""
    return partial(_loss_by_function, root, call) if root.config.model_type in SPELL_OUT_LOSS else call


def _loss_by_function(
    root: Any, call: Callable[..., Any], *args: Any, labels: Tensor | None = None, **kwargs: Any
) -> Any:
    output = call(*args, **kwargs)
    if labels is None:
        return output
    logits = output[0] if isinstance(output, tuple) else output["logits"]
    count = {name: kwargs[name] for name in ("num_items_in_batch",) if name in kwargs}
    loss = root.loss_function(
        logits=logits, labels=labels, vocab_size=root.config.get_text_config().vocab_size, **count
    )
    if isinstance(output, tuple):
        return loss, *output
    output["loss"] = loss
    return output


# -- Whisper's kind ----------------------------------------------------------------------------------------------------


def _on_row(tower: Any, call: Callable[..., Any], features: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The call of an encoder, which runs the clips of a packed call as segments of one row."""
    clips = kwargs.pop(PACKED, None)
    return call(features, *args, **kwargs) if clips is None else encode_row(tower, features, clips)


class ClipCall(TowerCall):
    """One packed call of an encoder whose clips lie in one row; its blocks receive it under the keyword ``packed``.

    Attributes:
        rows: where the frames lie.
        boundaries: int32 [clips + 1] of the clips behind the convolutions, the key of their segments.
    """

    kind = "audio"

    def __init__(self, forward: PackedForward, frames: Sequence[int], width: int, device: torch.device) -> None:
        super().__init__(forward, torch.zeros(0, 3, dtype=torch.int64), device)
        self.rows = ClipRows(frames, width)
        ends = torch.tensor([0, *np.cumsum(self.rows.halves).tolist()], dtype=torch.int32)
        self.boundaries = to_device(ends, device)
        segments = PackedMetadata.from_lengths(self.rows.halves, device=device)
        self.segments[id(self.boundaries)] = self.boundaries, segments


def encode_row(tower: Any, features: Tensor, clips: ClipCall) -> Tensor:
    """Encodes clips [N, bins, T] as one row; [tokens, D], those of each clip in turn."""
    rows = clips.rows
    device, dtype = tower.conv1.weight.device, tower.conv1.weight.dtype
    places, pairs = (to_device(torch.from_numpy(x), device) for x in (rows.places, rows.pairs))
    first, second = ((each.weight, each.bias) for each in (tower.conv1, tower.conv2))
    hidden = convolve_clips(features.to(device, dtype), rows, first, second)
    if tower.conv1._forward_hooks and torch.is_grad_enabled():  # enable_input_require_grads, for adapters
        hidden.requires_grad_()
    hidden = (hidden + tower.embed_positions.weight.index_select(0, places)).to(hidden.dtype)
    hidden = nn.functional.dropout(hidden, p=tower.dropout, training=tower.training)[None].clone()
    segments = clips.segments_between(clips.boundaries, hidden.shape[1], device)
    options = {PACKED: clips, BOUNDARIES: clips.boundaries, TOWER_SEGMENTS: segments, "attention_mask": None}
    for layer in tower.layers:
        if not (tower.training and tower.layerdrop > 0.0 and torch.rand([]) < tower.layerdrop):
            hidden = layer(hidden, **options)
    hidden = hidden[0]
    pooled: Tensor = (hidden.index_select(0, pairs) + hidden.index_select(0, pairs + 1)) / 2
    normed: Tensor = tower.layer_norm(pooled)
    return normed


# -- encoders with windows ---------------------------------------------------------------------------------------------


class WindowCall(TowerCall):
    """One packed call of an encoder with windows, which carries it by the boundaries of its windows.

    So it does not keep the boundaries.
    """

    kind = "audio"

    def __init__(self, forward: PackedForward, spans: Sequence[int], device: torch.device) -> None:
        super().__init__(forward, torch.zeros(0, 3, dtype=torch.int64), device)
        self.windows = PackedMetadata.from_lengths(list(spans), device=device)

    def segments_between(self, boundaries: Tensor, patches: int, device: torch.device) -> PackedMetadata:
        return self.windows.to(device)


def _boundaries(call: WindowCall) -> Tensor:
    """int32 [spans + 1] boundaries that carry their call; checkpoints keep it by the tensor."""
    ends = call.windows.cu_seqlens.clone()
    setattr(ends, CALL, call)
    return ends


def _all_windows(layer: nn.Module, call: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The call of an attention layer, of all windows of a packed call at once."""
    if (windows := getattr(kwargs.get(BOUNDARIES), CALL, None)) is not None:
        kwargs[PACKED] = windows
    return attend_at_once(layer, call, hidden_states, *args, **kwargs)


def encoder_blocks(root: Any) -> list[nn.Module]:
    """Returns the blocks of a model's audio encoder that can be compiled."""
    audio = audio_of(root.config)
    if audio is None or audio.encoder == "equal":
        return []
    encoder = root.base_model.audio_tower
    if audio.encoder == "windows" and not all(map(compiles, tower_layers(encoder))):
        return []
    return [module for module in encoder.modules() if isinstance(module, DecoderLayer)]
