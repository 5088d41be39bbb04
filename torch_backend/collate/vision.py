"""Examples with images to documents: token ids, what is trained, positions, and the tensors of the images.

A raw or processed example -> :class:`VisionReader`, which runs the processor and checks its result ->
:class:`VisionDocument`. The documents' columns are packed like any others; their image tensors stay beside the rows
(:class:`VisionRows`), and :meth:`VisionReader.emit` puts them into the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from packing_core import PackedBatch
from packing_core.batches.columns import TRAINED, trained_tokens
from packing_core.batches.joining import concatenate
from packing_core.batches.keys import BatchKey
from packing_core.batches.marks import refuse_trained_padding
from packing_core.batches.media import as_turn, tools_of
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import CapacityError, LayoutError, PackingError, UnsupportedError, first_line
from packing_core.storage.arrays import as_int64
from torch_backend.collate.image_tensors import Images, join_images, sizes_of
from torch_backend.collate.pictures import CHATS, LEAVE_OUT, has_media, pictures_of, turns_of
from torch_backend.collate.sounds import clips_of
from torch_backend.hf.anatomy.audio import FEATURES

if TYPE_CHECKING:  # a collator is used where transformers is not installed, too
    from torch_backend.hf.anatomy.vision import Vision

Loss = Literal["all", "assistant"]
Media = Mapping[str, Sequence[Any]]  # the images and clips of an example, by their kind
Pack = Callable[[Sequence[Mapping[str, Any]]], PackedBatch]
_SECONDS = ("second_per_grid_ts", "video_second_per_grid")  # of videos, by which their frames are numbered
# Columns with the three axes of a document's positions, less those of text: 0 at text and in padding.
AXES = ("_axis_0", "_axis_1", "_axis_2")
MARKED = "_both_ways"  # a column: 1 at tokens that see each other in both directions, 0 at others and in padding
RAW = (
    *(*CHATS, "text", "tools", "sampling_rate"),
    *("images", "image", "videos", "video", "audios", "audio"),
)
_TYPES = ("mm_token_type_ids", "token_type_ids")
# What a processor says of the characters of its text, and no model reads.
_OF_CHARACTERS = ("offset_mapping", "text_replacement_offsets")
_WITHOUT_SPECIAL = {"add_special_tokens": False}  # chat templates write them


@dataclass(frozen=True)
class VisionDocument:
    """One document: its columns as ``read_examples`` takes them, [L] each, and the tensors of its images."""

    columns: dict[str, Any]
    images: Images


@dataclass(frozen=True)
class VisionRows:
    """Packed rows, and the images of each of their segments; what a ``PackedMediaDataset`` gives."""

    batch: PackedBatch
    images: tuple[Images, ...]

    def __len__(self) -> int:
        return len(self.batch)


class VisionReader:
    """Reads examples with images for one model.

    Args:
        model: the model.
        processor: makes tokens and image tensors of raw examples. None takes processed examples alone. A feature
            extractor makes features of clips beside ``input_ids``, where the encoder takes clips of one length.
        loss: what is trained of ``messages``: every text token, or the assistant's turns, which the chat template has
            to mark by ``{% generation %}``. Of ``prompt`` and ``completion`` it is the completion.
        collate: makes a batch of one example in place of the processor, such as the collator of a trainer; its labels
            are kept as they are.
    """

    def __init__(
        self,
        model: Any,
        processor: Any = None,
        *,
        loss: Loss = "all",
        collate: Callable[[list[Any]], Mapping[str, Any]] | None = None,
    ) -> None:
        from torch_backend.hf.anatomy.vision import check_processor, vision_of

        if not isinstance(model, nn.Module):
            raise PackingError("processor= needs the model, by which documents get their positions: pass it first")
        if loss not in get_args(Loss):
            raise PackingError(f'loss is {loss!r}: pass "all" or "assistant"')
        self.vision: Vision = vision_of(model)
        if processor is not None:
            check_processor(processor, model)
        self.processor = processor
        self.extractor = getattr(processor, "feature_extractor", processor)
        self.loss = loss
        self.collate = collate
        self.name = getattr(collate, "name", type(processor or collate).__name__)

    @property
    def kinds(self) -> tuple[str, ...]:
        """``image``, ``audio`` or both."""
        shown = () if "pixel_values" not in self.vision.keys else ("image",)
        return shown if self.vision.audio is None else (*shown, "audio")

    @property
    def _rate(self) -> dict[str, Any]:
        """Returns what tells a processor the rate of clips, which :mod:`.sounds` has resampled."""
        return {"sampling_rate": self.extractor.sampling_rate} if "audio" in self.kinds else {}

    def pad_id(self, default: int) -> int:
        """Returns the token that fills padding, which the processor's tokeniser knows better than some configs."""
        known = getattr(getattr(self.processor, "tokenizer", None), "pad_token_id", None)
        return default if known is None else int(known)

    def read(self, example: Mapping[str, Any], where: str) -> VisionDocument:
        """The document of an example.

        Args:
            example: ``messages``, ``prompt`` and ``completion`` or ``text``, with ``images`` or ``image``, and the
                ``tools`` of a chat; or what the processor makes of them, ``input_ids`` and the tensors of the images.
            where: what messages call the example.

        Raises:
            PackingError: the example cannot be used; the message says where and why.
        """
        if not isinstance(example, Mapping):
            raise LayoutError(f"{where} is a {type(example).__name__}: pass a mapping")
        try:
            return self._checked(self._processed(example, where), where)
        except PackingError:
            raise
        except Exception as error:
            raise PackingError(
                f"{where} cannot be read ({type(error).__name__}: {first_line(error)}): {LEAVE_OUT} (messages are "
                "turns with role and content, prompt and completion likewise or both strings, input_ids integers)"
            ) from error

    def rows(self, features: Any, pack: Pack, capacity: int | None, overflow: str) -> VisionRows:
        """The rows of features: :class:`VisionRows`, or examples that ``pack`` packs under ``overflow``."""
        if isinstance(features, VisionRows):
            return features
        if len(features) and isinstance(features[0], VisionRows):
            joined = concatenate([rows.batch for rows in features])
            return VisionRows(joined, tuple(images for rows in features for images in rows.images))
        documents = []
        for number, example in enumerate(features):
            documents.append(self.read(example, place_of(example, number)))
            self.check_length(documents[-1], capacity, overflow, place_of(example, number))
        return rows_of(pack([document.columns for document in documents]), documents.__getitem__)

    def check_length(self, document: VisionDocument, capacity: int | None, overflow: str, where: str) -> None:
        """Raises CapacityError if a row cannot hold a document's images, which are never cut."""
        ids = torch.as_tensor(document.columns["input_ids"])
        if not document.images or capacity is None or len(ids) <= capacity or overflow == "drop":
            return
        shown = torch.isin(ids, torch.tensor(sorted(self.vision.placeholders))).nonzero()[:, 0]
        if overflow == "truncate" and int(shown[-1]) < capacity:
            return
        one, smaller = ("clip", "shorter") if self.vision.audio is not None else ("image", "smaller")
        cuts = (
            "" if overflow == "error" else f', and overflow="{overflow}" would cut {one}s or part them from their text'
        )
        raise CapacityError(
            f"{where} has {len(ids):,} tokens, {len(shown):,} of them of {one}s, and capacity is {capacity:,}{cuts}: "
            f'raise capacity, make {one}s {smaller}, or pass overflow="drop"',
            option="overflow capacity",
        )

    def emit(self, batch: dict[str, Any], rows: VisionRows) -> dict[str, Any]:
        """A collated batch with the images of its rows, and what its family takes beside them.

        That is positions on three axes (M-RoPE), or the kinds of tokens of which some see each other both ways.
        """
        if (marked := batch.pop(MARKED, None)) is not None and (both_ways := self.vision.both_ways) is not None:
            first = both_ways.kinds[0]  # 0 or 1; the other tokens are of the other kind, and so is padding
            batch[both_ways.key] = marked if first else 1 - marked
        axes = [batch.pop(name) for name in AXES if name in batch]
        if axes:
            batch["position_ids"] = batch["position_ids"] + torch.stack(axes)
        count = len(batch["input_ids"])
        numbers = rows.batch.rows.tolist() if count == len(rows.batch) else [0] * rows.batch.n_segments
        images = join_images(rows.images, numbers, count, in_rows=self.vision.in_rows)
        sizes = sizes_of(images)
        if (audio := self.vision.audio) is not None and (clips := {x: images[x] for x in images if x in audio.keys}):
            images, sizes = images | audio.cropped(clips), (*sizes, *audio.sizes(rows.images))
        if images and (labels := batch.get("labels")) is not None:
            batch[BatchKey.TARGETS] = int((labels != IGNORE_INDEX).sum())
        return batch | images | ({BatchKey.IMAGES: sizes} if sizes else {})

    def _processed(self, example: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        if self.collate is not None:
            return self._called(where, self.collate, [dict(example)])
        if example.get("input_ids") is not None:
            return {name: value for name, value in example.items() if name not in RAW} | self._heard(example, where)
        return self._process(example, where)

    # -- raw examples --------------------------------------------------------------------------------------------------

    def _process(self, example: Mapping[str, Any], where: str) -> dict[str, Any]:
        if self.processor is None:
            raise LayoutError(f"{where} has no input_ids, only {', '.join(example)}: pass processor=, or process it")
        turns = turns_of(example)
        if has_media(example, turns, "video"):
            raise UnsupportedError(
                f"{where} has a video: run the processor on it first, and pass input_ids with pixel_values_videos"
            )
        media = self._media(example, turns, where)
        if self._of_one_length and (media["audio"] or getattr(self.processor, "tokenizer", None) is None):
            raise UnsupportedError(
                f"{where} has text, and no processor of {self.vision.model} writes tokens beside clips that are read "
                "already: pass input_ids, with the audio tokens of every clip, beside audio"
            )
        if example.get("messages") is not None:
            return self._messages(_with_media(example["messages"], media, where), tools_of(example, where), where)
        if example.get("prompt") is not None and example.get("completion") is not None:
            tools = None if isinstance(example["prompt"], str) else tools_of(example, where)
            return self._completion(example["prompt"], example["completion"], media, tools, where)
        if example.get("text") is not None:
            return self._tokens(example["text"], media, where)
        raise LayoutError(
            f"{where} has neither messages, prompt and completion, text nor input_ids, only {', '.join(example)}"
        )

    def _media(self, example: Mapping[str, Any], turns: Sequence[Any], where: str) -> dict[str, list[Any]]:
        """The decoded images of an example and its clips, by their kinds."""
        for other in {"image", "audio"} - {*self.kinds}:
            if has_media(example, turns, other):
                raise UnsupportedError(
                    f"{where} has {other}, which {self.vision.model} does not take packed: leave it out"
                )
        read = {"image": pictures_of, "audio": self._clips}
        return {kind: read[kind](example, where) for kind in self.kinds}

    def _clips(self, example: Mapping[str, Any], where: str) -> list[Any]:
        extractor = self.extractor
        seconds = getattr(self.processor, "max_audio_len", None)
        longest = extractor.n_samples if self.vision.audio is not None and self.vision.audio.cuts else None
        longest = longest if seconds is None else seconds * extractor.sampling_rate
        return clips_of(example, where, extractor.sampling_rate, None if self._of_one_length else longest)

    @property
    def _of_one_length(self) -> bool:
        """Returns whether the encoder takes clips of one length, into which longer ones are cut."""
        return self.vision.audio is not None and self.vision.audio.encoder == "equal"

    def _heard(self, example: Mapping[str, Any], where: str) -> dict[str, Tensor]:
        """The features [clips, bins, frames] of an example's clips beside its tokens, as Voxtral's processor has it."""
        if not self._of_one_length or self.extractor is None or example.get(FEATURES) is not None:
            return {}
        options = {**self._rate, "padding": True, "truncation": False, "return_tensors": "pt"}
        options["pad_to_multiple_of"] = self.extractor.n_samples
        heard = [self._called(where, self.extractor, clip, **options)[FEATURES] for clip in self._clips(example, where)]
        width = self.extractor.nb_max_frames
        return {FEATURES: torch.cat([x[0].unflatten(1, (-1, width)).transpose(0, 1) for x in heard])} if heard else {}

    def _messages(self, messages: list[dict[str, Any]], tools: Any, where: str) -> dict[str, Any]:
        marks = self.loss == "assistant"
        found = self._called(
            where,
            self.processor.apply_chat_template,
            [messages],
            tools=tools,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            return_assistant_tokens_mask=marks,
            processor_kwargs={**_WITHOUT_SPECIAL, **self._rate},
        )
        if marks and not np.asarray(found["assistant_masks"]).any():
            raise PackingError(
                f"{where}: the chat template marks no turn of the assistant by {{% generation %}}: pass such a "
                'template, loss="all", or prompt and completion',
                option="loss",
            )
        return found

    def _completion(self, prompt: Any, completion: Any, media: Media, tools: Any, where: str) -> dict[str, Any]:
        if not isinstance(prompt, str):
            turns = _with_media(prompt, media, where)
            parts = [part for turn in turns for part in turn["content"]]
            media = {kind: [part[kind] for part in parts if part["type"] == kind] for kind in media}
            write = partial(self.processor.apply_chat_template, tools=tools, tokenize=False)
            answer = _with_media(completion, dict.fromkeys(media, ()), where)
            whole = self._called(where, write, [*turns, *answer])
            prompt = self._called(where, write, turns, add_generation_prompt=True)
            if not whole.startswith(prompt):
                raise PackingError(
                    f"{where}: the chat template writes the prompt differently when a completion follows: pass strings"
                )
            completion = whole[len(prompt) :]
        columns = self._tokens(prompt, media, where)
        ids = self.processor.tokenizer(completion, **_WITHOUT_SPECIAL)["input_ids"]
        before = len(np.asarray(columns["input_ids"]).reshape(-1))
        kind = int(self.vision.both_ways is not None and self.vision.both_ways.prefix)  # 1 follows a prefix
        for name, values in {"input_ids": ids, **dict.fromkeys(_TYPES, [kind] * len(ids))}.items():
            if name in columns:
                columns[name] = np.append(np.asarray(columns[name]).reshape(-1), np.array(values, np.int64))
        for name in ("attention_mask", "labels"):
            columns.pop(name, None)
        return {**columns, "completion_mask": np.arange(before + len(ids)) >= before}

    def _tokens(self, text: str, media: Media, where: str) -> dict[str, Any]:
        options: dict[str, Any] = {}
        for kind, items in media.items():
            mark = getattr(self.processor, f"{kind}_token", None)
            if mark is not None and text.count(mark) != len(items):
                raise LayoutError(
                    f"{where} has {text.count(mark)} placeholders {mark} and {len(items)} {kind}s: they must agree"
                )
            if items:
                options |= {"images": [items]} if kind == "image" else {"audio": items, **self._rate}
        return self._called(where, self.processor, text=[text], **options, return_tensors="pt", **_WITHOUT_SPECIAL)

    def _called(self, where: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The result of another library's function, whose errors say where."""
        try:
            found = function(*args, **options)
        except PackingError as error:
            raise error.reworded(f"{where}: {error}") from error
        except Exception as error:
            raise PackingError(f"{where}: {self.name} raised {type(error).__name__}: {first_line(error)}") from error
        return dict(found) if isinstance(found, Mapping) else found

    # -- processed examples --------------------------------------------------------------------------------------------

    def _checked(self, found: Mapping[str, Any], where: str) -> VisionDocument:
        """The document of a processor's result for one example."""
        found = {name: value for name, value in found.items() if value is not None and name not in _OF_CHARACTERS}
        ids = np.asarray(found.pop("input_ids"))
        ids = as_int64(ids[0] if ids.ndim == 2 and len(ids) == 1 else ids, f"input_ids of {where}")
        if not len(ids):
            raise LayoutError(f"{where} has no tokens: leave it out")
        timed = [found.pop(name) for name in _SECONDS if name in found and self.vision.indexer is not None]
        columns: dict[str, Any] = {"input_ids": ids}
        images: dict[str, Tensor] = {}
        for name, value in found.items():
            if name in self.vision.keys:
                images[name] = self._tensor(name, value)
            elif (column := np.asarray(value)).size == len(ids) and column.shape in (ids.shape, (1, len(ids))):
                columns[name] = column.reshape(-1)
            else:
                raise UnsupportedError(
                    f"{where} has {name} of shape {list(column.shape)}, which {self.vision.model} is not known to be "
                    f"exact with in packed rows: leave it out, or pass the processor of the model"
                )
        images = images if any(name.startswith(("pixel_values", FEATURES)) for name in images) else {}
        columns = _without_padding(columns, where)
        kinds = {name: columns.pop(name, None) for name in _TYPES}
        ids_L = torch.from_numpy(columns["input_ids"])
        self.vision.check(ids_L, images, where)
        prefix = np.zeros(len(ids_L), np.bool_)
        if (both_ways := self.vision.both_ways) is not None:
            types = kinds[both_ways.key]
            marked = self.vision.marks(ids_L, None if types is None else torch.as_tensor(types).long(), where).numpy()
            columns[MARKED] = marked.astype(np.int64)
            prefix = marked if both_ways.prefix else prefix
        if self.collate is None:  # image tokens are never trained, nor those of a prefix that see what follows
            trained = trained_tokens(columns)
            columns = {name: column for name, column in columns.items() if name not in TRAINED}
            shown = np.isin(columns["input_ids"], list(self.vision.placeholders)) | prefix
            columns["loss_mask"] = ~shown if trained is None else trained & ~shown
        if self.vision.indexer is not None:
            seconds = {"second_per_grid_ts": torch.as_tensor(timed[0])} if timed else {}
            columns |= self._axes(ids_L, {**images, **seconds}, kinds[_TYPES[0]], where)
        return VisionDocument(columns, images)

    def _tensor(self, name: str, value: Any) -> Tensor:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
        if tensor.dtype == torch.float64:
            tensor = tensor.float()
        rows_of_images = {"pixel_values": 5, "pixel_attention_mask": 4}.get(name)
        return tensor[None] if self.vision.in_rows and tensor.ndim + 1 == rows_of_images else tensor

    def _axes(self, ids: Tensor, images: Images, types: Any, where: str) -> dict[str, NDArray[np.int64]]:
        positions = torch.arange(len(ids)).expand(3, -1)
        if images:
            given = None if types is None else torch.as_tensor(types).long()
            positions = self._called(where, self.vision.positions, ids, images, given)
        text = torch.arange(len(ids))
        return {name: (axis - text).numpy() for name, axis in zip(AXES, positions, strict=True)}


def rows_of(batch: PackedBatch, document: Callable[[int], VisionDocument]) -> VisionRows:
    """Rows with the images of their segments; ``document`` gives that of a source."""
    return VisionRows(batch, tuple(document(source).images for source in batch.sources.tolist()))


def place_of(example: Any, number: int) -> str:
    """Names an example for errors: by its attribute ``where``, such as a file and a line, or by its number."""
    return str(getattr(example, "where", f"example {number}"))


def _with_media(messages: Any, media: Media, where: str) -> Any:
    """Messages whose content is a list of parts, with the images and clips of the example in them.

    Those without a place stand before the text of the first user's message, as in TRL.
    """
    for kind, items in media.items():
        messages = _with_pictures(messages, items, where, kind)
    return messages


def _with_pictures(messages: Any, pictures: Sequence[Any], where: str, kind: str) -> list[dict[str, Any]]:
    left, turns, placed = list(pictures), [], False
    marked = any(part.get("type") == kind for turn in messages for part in _parts(turn))
    for turn in messages:
        parts = [dict(part) for part in _parts(turn)]
        if turn.get("role") == "user" and not marked and not placed:
            parts, placed = [{"type": kind} for _ in left] + parts, True
        turns.append({**turn, "content": parts})
    places = [part for turn in turns for part in turn["content"] if part.get("type") == kind]
    if len(places) != len(left):
        raise LayoutError(f"{where} has {len(places)} places for {kind}s and {len(left)} {kind}s: they must agree")
    for part, picture in zip(places, left, strict=True):
        part.clear()
        part.update({"type": kind, kind: picture})
    return turns


def _parts(turn: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = as_turn(turn).get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{name: value for name, value in part.items() if value is not None} for part in content or ()]


def _without_padding(columns: dict[str, Any], where: str) -> dict[str, Any]:
    """Columns of the real tokens, which the attention mask marks."""
    mask = columns.pop("attention_mask", None)
    if mask is None or np.all(mask == 1):
        return columns
    real = np.flatnonzero(mask)
    if not len(real) or real[-1] - real[0] + 1 != len(real):
        raise LayoutError(f"{where} has an attention_mask with a hole, or of zeros: it marks padding at either end")
    if "labels" in columns:
        refuse_trained_padding(columns["labels"], mask == 0, f"token {{}} of {where}".format)
    return {name: column[real] for name, column in columns.items()}
