"""Batches of a trainer: read, judged by the trainer's own loss, their documents found in the collator's rows.

:func:`batches` -> a :class:`TrainerStep` of each, until one :attr:`~TrainerStep.shows` what leaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from packing_core import PackedBatch
from packing_core.batches.columns import READ, documents_of
from packing_core.errors import LayoutError, PackingError, UnsupportedError
from torch_backend.auditing.compare import cosine, gradients_error
from torch_backend.collate import Batch, call_on_copies
from torch_backend.collate.image_tensors import Images
from torch_backend.collate.packed_dataset import refuse_lost_lengths
from torch_backend.collate.vision import VisionRows
from torch_backend.hf.anatomy.audio import FEATURES
from torch_backend.hf.anatomy.structure import causal_lm, with_values
from torch_backend.hf.anatomy.vision import kinds_of_tokens, vision_of
from torch_backend.hf.blank_images import takes_media
from torch_backend.hf.inputs.padded_images import image_keys

NOTHING, LOSS, LEAK = range(3)  # what a batch can show; of a loss alone if no trained document has another in its row


class TrainerStep:
    """One batch of a trainer, whose own loss is compared on the batch as it is and on each document alone.

    Attributes:
        smallest_loss: a smaller loss is compared with this much.
        unit: what messages call its documents; way_out: what they say of batches whose gradients are all 0.
        at_most: batches that are looked at.
    """

    smallest_loss = 0.0
    unit = "documents"
    way_out = ", as where all labels are -100: audit it with documents that have labels"
    at_most: ClassVar[int] = 64

    def __init__(self, trainer: Any, tolerance: float, batch: Batch) -> None:
        self.trainer = trainer
        self.tolerance = tolerance
        self.batch = batch

    @classmethod
    def first_that_shows(cls, trainer: Any, tolerance: float) -> tuple[Self, int]:
        """Returns the first batch that can show a leak, or else a loss, and how many batches were looked at.

        Raises:
            PackingError: none trains anything.
        """
        steps = enumerate(islice(cls.steps(trainer, tolerance), cls.at_most), 1)
        count, best = next(steps)
        while best.shows < LEAK and (following := next(steps, None)) is not None:
            count, step = following
            if best.shows == NOTHING or step.shows > best.shows:  # a batch of no use does not keep its gradients
                best = step
        if not best.trains:
            read = f"{count} batches" if count > 1 else "batch"
            raise PackingError(
                f"nothing is trained in the first {read} of {type(trainer).__name__}, because every gradient of its "
                f"{cls.unit} is 0{cls.way_out}"
            )
        return best, count

    @classmethod
    def steps(cls, trainer: Any, tolerance: float) -> Iterator[Self]:
        """Yields the trainer's batches on its device."""
        return (cls(trainer, tolerance, dict(trainer._prepare_inputs(batch))) for batch in batches(trainer))

    @property
    def shows(self) -> int:
        """Returns what the batch can show: NOTHING, LOSS or LEAK."""
        return LEAK if self.trains else NOTHING

    @property
    def trains(self) -> bool:
        """Returns whether the documents alone have any gradient."""
        return any(bool(g.any()) for g in self.truth[1].values())

    @cached_property
    def truth(self) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients of the documents, each in a forward of its own without padding."""
        return self.alone()

    def alone(self) -> tuple[float, dict[str, Tensor]]:
        """Computes ``truth``."""
        raise NotImplementedError

    def packed(self) -> tuple[float, dict[str, Tensor]]:
        """Returns loss and gradients of the batch as it is, packed or not."""
        raise NotImplementedError

    def probe(self) -> dict[str, Any]:
        """Replaces one document, and returns ``leak`` and ``moved``, and the counts of a report."""
        raise NotImplementedError

    def compared(self, packed: dict[str, Tensor], again: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, Any]:
        """Compares the gradients of the batch, and of its repetition, with those of each document alone."""
        gradients, worst = gradients_error(packed, truth)
        noise, _ = gradients_error(again, packed)
        return {"cosine": cosine(packed, truth), "gradients": gradients, "worst_parameter": worst, "noise": noise}

    def measure(self) -> dict[str, Any]:
        """Returns the figures of a :class:`~torch_backend.auditing.trainer.TrainerReport`."""
        true_loss, truth = self.truth
        (loss, packed), (_, again) = self.packed(), self.packed()
        difference = abs(loss - true_loss) / max(abs(true_loss), self.smallest_loss)
        return {"counted": None, "loss": difference, **self.compared(packed, again, truth), **self.probe()}


def _flat(features: Any) -> list[Any]:
    """Returns the features of a batch; those of a row that is a list of documents one by one."""
    return [x for each in features for x in (each if isinstance(each, list) else [each])]


def batches_and_features(trainer: Any) -> Iterator[tuple[Batch, list[Any]]]:
    """Yields the batches of the trainer's own dataloader, on its device, and what its collator was given for them."""
    collator, seen = trainer.data_collator, []

    def recorded(features: Any) -> Any:
        rows = rows_with_images(collator, features)
        seen.append(_flat(features) if rows is None else [rows])
        return call_on_copies(collator, features if rows is None else rows)

    for number, batch in enumerate(batches(trainer, (trainer, "data_collator", recorded))):
        if number >= len(seen):
            raise PackingError(
                f"the dataloader of {type(trainer).__name__} does not call its data_collator, so nothing says which "
                "documents a row holds: audit its model, audit(trainer.model)"
            )
        refuse_lost_lengths(seen[number], f"example of {type(trainer).__name__}", trainer.train_dataset)
        yield dict(trainer._prepare_inputs(dict(batch))), seen[number]
        seen[number] = []


def batches(trainer: Any, *values: tuple[Any, str, Any]) -> Iterator[Any]:
    """Yields what a trainer's dataloader gives, read in this process.

    Args:
        values: object, attribute and value that it has while the dataloader is built and read.

    Raises:
        PackingError: it gives nothing.
    """
    none = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    values += tuple((trainer.args, f"dataloader_{name}", value) for name, value in none.items())
    with with_values(values):
        loader = iter(trainer.get_train_dataloader())
        batch = next(loader, None)
    if batch is None:
        raise PackingError(
            f"the training data fill no batch of {type(trainer).__name__}: pass more of them, or a smaller batch size"
        )
    while batch is not None:
        yield batch
        with with_values(values):
            batch = next(loader, None)


def pieces_of(feature: Any) -> list[NDArray[np.int64]]:
    """Splits a feature into documents at its own boundaries; without any, it is one document."""
    if isinstance(feature, VisionRows):
        feature = feature.batch
    if isinstance(feature, PackedBatch):
        flat, starts = feature.input_ids.reshape(-1), feature.flat_starts
        return [np.asarray(flat[a : a + n], np.int64) for a, n in zip(starts, feature.lengths, strict=True)]
    if not isinstance(feature, Mapping) or "input_ids" not in feature:
        raise LayoutError(
            "the trainer's collator is given features without input_ids, which cannot be audited: tokenise the data set"
        )
    read = {name: feature[name] for name in ("input_ids", *READ) if name in feature}  # others may be one number each
    return [np.asarray(document["input_ids"], np.int64) for document in documents_of(read)]


def places_of(documents: list[NDArray[np.int64]], rows: NDArray[np.int64]) -> list[tuple[int, slice]]:
    """Row and tokens of every document; two equal documents get a place each."""
    rows = np.ascontiguousarray(rows, np.int64)
    text, free = [row.tobytes() for row in rows], np.ones(rows.shape, np.bool_)
    places = []
    for number, document in enumerate(documents):
        wanted = document.tobytes()
        place = next(_free_places(text, wanted, free), None)
        if place is None:
            raise LayoutError(
                f"document {number} of the batch, {len(document):,} tokens, is not in the collator's rows as it was "
                "given: the audit compares whole documents, so let the dataset hold what is trained"
            )
        free[place] = False
        places.append(place)
    return places


def _free_places(text: list[bytes], wanted: bytes, free: NDArray[np.bool_]) -> Iterator[tuple[int, slice]]:
    for row, tokens in enumerate(text):
        at = tokens.find(wanted)
        while at >= 0:
            place = slice(at // 8, (at + len(wanted)) // 8)
            if at % 8 == 0 and free[row, place].all():
                yield row, place
            at = tokens.find(wanted, at + 1)


def rows_with_images(collator: Any, features: Any) -> VisionRows | None:
    """The rows that a collator makes of features with images; None if it makes none of images."""
    reader = getattr(collator, "vision", None)
    if reader is None:
        return None
    rows: VisionRows = reader.rows(
        features, collator.pack, collator.capacity, collator.plan_options.get("overflow", "error")
    )
    return rows


def images_of(features: list[Any], documents: int) -> list[Images]:
    """The images of each document of the features, in their order; none of features that are tokens alone."""
    images_by_document = [
        images for feature in features if isinstance(feature, VisionRows) for images in feature.images
    ]
    return images_by_document or [{} for _ in range(documents)]


def alone_with(model: Any, ids: Tensor, images: Images) -> dict[str, Any]:
    """Returns the inputs of a document [1, L] alone beside its tokens: its images and, in M-RoPE families, token types.

    Positions are left to the model, which numbers a document by itself.
    """
    if not images:
        return {}
    inputs: dict[str, Any] = {name: x.to(ids.device) for name, x in images.items()}
    vision = vision_of(model)
    if vision.audio is not None:
        inputs["attention_mask"] = torch.ones_like(ids)
    elif vision.indexer is not None:
        inputs["mm_token_type_ids"] = kinds_of_tokens(vision.indexer.config, ids)
    return inputs


def is_placeholder(model: Any, ids: Tensor) -> Tensor:
    """Marks the tokens that stand for images, which no other token can replace; bool, as ``ids``."""
    if not takes_media(causal_lm(model).config):
        return torch.zeros_like(ids, dtype=torch.bool)
    return torch.isin(ids, torch.tensor(sorted(vision_of(model).placeholders), device=ids.device))


def images_of_rows(root: Any, kwargs: Mapping[str, Any]) -> list[Images]:
    """The images of each row of a padded call.

    Images and their tokens come in one order. A grid says how many tokens an image has; without grids all images have
    as many.

    Raises:
        UnsupportedError: images differ in their number of tokens, and nothing says which has how many.
    """
    ids_BS: Tensor = kwargs["input_ids"]
    tensors = {name: kwargs[name] for name in image_keys(root) if kwargs.get(name) is not None}
    if "pixel_values_videos" in tensors or tensors.keys() >= {"pixel_values", FEATURES}:
        raise UnsupportedError("the audit cannot tell which videos or clips belong to which answer: audit with images")
    if "pixel_values" not in tensors:
        return [{} for _ in ids_BS]
    vision = vision_of(root)
    tokens_B = is_placeholder(root, ids_BS).sum(1)
    if vision.in_rows:
        shown = tokens_B.tolist()
        return [{name: x[[row]] for name, x in tensors.items()} if shown[row] else {} for row in range(len(shown))]
    if vision.merge is not None:
        patches = tensors["image_grid_thw"].prod(-1)
        ends = (patches // vision.merge).cumsum(0)
        counts = torch.searchsorted(ends, tokens_B.cumsum(0), right=True).diff(prepend=ends.new_zeros(1)).tolist()
        pixels = [int(of_row.sum()) for of_row in patches.split(counts)]
        sizes = {"pixel_values": pixels, "image_grid_thw": counts}
    else:
        units, total = len(tensors["pixel_values"]), int(tokens_B.sum())
        if bool((tokens_B * units % total).any()):
            raise UnsupportedError(
                f"the audit cannot tell which images of {type(root).__name__} belong to which answer, because their "
                "numbers of tokens differ: audit with images of one size"
            )
        sizes = dict.fromkeys(tensors, (tokens_B * units // total).tolist())
    parts = {name: x.split(sizes[name]) for name, x in tensors.items()}
    by_row = [{name: part[row] for name, part in parts.items()} for row in range(len(ids_BS))]
    return [images if len(images["pixel_values"]) else {} for images in by_row]
