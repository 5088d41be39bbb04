"""Training data with images as packed rows inside a ``Trainer`` or an ``SFTTrainer``.

The trainer's collator, called with one example at a time -> tokens, labels and image tensors as the trainer makes them
(:class:`OneByOne`) -> the lengths of all documents -> the rows of every epoch (:class:`VisionEpochRows`), which read
the images of their documents again when they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from packing_core.batches.columns import Documents
from packing_core.planning.rule import RowRule
from torch_backend.collate import PackedCollator, call_on_copies
from torch_backend.collate.vision import VisionDocument, VisionReader, VisionRows, rows_of
from torch_backend.collate.vision_dataset import read_again, read_all
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.trainers.epoch_rows import EpochRows
from torch_backend.trainers.replaced import name_of

TRIED = 8  # examples that show whether a collator makes images


class OneByOne:
    """A trainer's collator with the columns that the trainer hands to it; its batches hold one example each."""

    def __init__(self, collator: Any, columns: Sequence[str] | None) -> None:
        self.collator = collator
        self.columns = None if columns is None else frozenset(columns)
        self.name = name_of(collator)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """The collator's batch."""
        kept = self.columns
        seen = [x if kept is None else {name: value for name, value in x.items() if name in kept} for x in examples]
        batch: Mapping[str, Any] = call_on_copies(self.collator, seen)
        return batch


def collator_of_images(trainer: Any, examples: Sequence[Any]) -> PackedCollator | None:
    """A collator that packs what the trainer's makes of examples with images; None if it makes none of them.

    Raises:
        UnsupportedModelError: the model is not known to be exact with packed images.
    """
    if getattr(causal_lm(trainer.model).config, "vision_config", None) is None:
        return None
    columns = trainer._signature_columns if trainer.args.remove_unused_columns else None
    collate = OneByOne(trainer.data_collator, columns)
    for example in [x for x in examples if isinstance(x, Mapping)][:TRIED]:
        try:
            batch = collate([dict(example)])
        except Exception:  # the collator is called again, and its error reported, where packing is planned
            return None
        if any(name.startswith("pixel_values") and batch[name] is not None for name in batch):
            collator, processor = PackedCollator(trainer.model), getattr(trainer, "processing_class", None)
            processor = processor if hasattr(processor, "image_processor") else None
            collator.vision = VisionReader(trainer.model, processor, collate=collate)
            collator.pad_id = collator.vision.pad_id(collator.pad_id)
            return collator
    return None


class VisionEpochRows(EpochRows):
    """The rows of every epoch, each with the images of its documents.

    Args:
        source: a sequence of examples.
        reader: reads them.
        rule, options: as of :class:`EpochRows`.
    """

    def __init__(self, source: Any, reader: VisionReader, rule: RowRule, **options: Any) -> None:
        super().__init__(source, (), rule, **options)
        self.reader = reader

    @cached_property
    def documents(self) -> Documents:
        """The documents' tokens and positions; their images are not kept."""
        return read_all(self.reader, self.source, self.rule.capacity, self.rule.overflow)[0]

    def __getitems__(self, numbers: Sequence[int]) -> VisionRows:  # type: ignore[override]
        return rows_of(super().__getitems__(numbers), self._document)

    def _document(self, number: int) -> VisionDocument:
        return read_again(self.reader, self.source, number, self.documents.input_ids[number])

    def __getstate__(self) -> dict[str, Any]:  # reading all images again would be dear for a spawned worker
        return {**vars(self), "_epochs": {}}
