"""A whole data set with images or audio as packed rows.

Examples -> one pass through the processor, which keeps their tokens and positions and no pixels -> a plan ->
:class:`PackedMediaDataset`. A row reads the images of its own documents again when it is asked for, so memory holds
those of the rows in flight: a ``DataLoader`` with workers decodes them ahead, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from torch.utils.data import Dataset

from packing_core import PackedDataset, plan
from packing_core.batches.columns import Documents, read_examples
from packing_core.errors import LayoutError, PackingError
from packing_core.hints import hinted
from torch_backend.collate.vision import Loss, VisionDocument, VisionReader, VisionRows, place_of, rows_of

OnError = Literal["raise", "skip"]


class PackedMediaDataset(Dataset[VisionRows]):
    """Rows of packed documents with images or audio, which ``PackedCollator(model, processor=...)`` takes as features.

    Every example is processed twice: once here, for its tokens, and once when its row is asked for.

    Args:
        examples: a ``datasets.Dataset`` or any sequence of examples, as ``PackedCollator`` takes them.
        capacity: tokens of a row; the tokens of images count like any others.
        model, processor, loss: as of ``PackedCollator``.
        on_error: what to do with an example that cannot be used: raise, or leave it out and list it in ``skipped``.
        plan_options: ``overflow``, ``seed`` and the other options of ``packing_core.plan``.

    Attributes:
        plan: the PackPlan, whose documents are the examples without the skipped ones.
        numbers: int64 [D], the number of the example that each document is.
        skipped: number of an example -> why it was left out.

    Raises:
        PackingError: an example cannot be used, under ``on_error="raise"``; the message has its number.
    """

    @hinted(plan)
    def __init__(
        self,
        examples: Any,
        capacity: int,
        model: Any,
        processor: Any,
        *,
        loss: Loss = "all",
        on_error: OnError = "raise",
        **plan_options: Any,
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise PackingError(f'on_error is {on_error!r}: pass "raise" or "skip"')
        self.reader = VisionReader(model, processor, loss=loss)
        self.examples = examples
        overflow = plan_options.get("overflow", "error")
        documents, self.numbers, self.skipped = read_all(self.reader, examples, capacity, overflow, on_error)
        self.rows = PackedDataset(
            documents,
            capacity,
            pad_id=self.reader.pad_id(0),
            **plan_options,
        )

    @property
    def plan(self) -> Any:
        """The PackPlan."""
        return self.rows.plan

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[VisionRows]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, row: int) -> VisionRows:
        batch = self.rows[row]

        def document(source: int) -> VisionDocument:
            return read_again(self.reader, self.examples, int(self.numbers[source]), self.rows.sequences[source])

        return rows_of(batch, document)


def read_all(
    reader: VisionReader, examples: Any, capacity: int, overflow: str, on_error: OnError = "raise"
) -> tuple[Documents, np.ndarray[Any, np.dtype[np.int64]], dict[int, str]]:
    """Reads the tokens and positions of all examples; their images are not kept.

    Returns:
        the documents, the number of the example that each is, and why others were skipped.

    Raises:
        PackingError: an example cannot be used, or under ``on_error="skip"`` none can.
    """
    columns: list[Mapping[str, Any]] = []
    numbers: list[int] = []
    skipped: dict[int, str] = {}
    for number in range(len(examples)):
        where = place_of(example := examples[number], number)
        try:
            document = reader.read(example, where)
            reader.check_length(document, capacity, overflow, where)
        except PackingError as error:
            if on_error == "raise":
                raise
            skipped[number] = str(error)
            continue
        columns.append(document.columns)
        numbers.append(number)
    if not columns:
        why = f", the first because {next(iter(skipped.values()))}" if skipped else ""
        raise PackingError(f"none of the {len(examples):,} examples can be used{why}")
    return read_examples(columns), np.array(numbers, np.int64), skipped


def read_again(reader: VisionReader, examples: Any, number: int, tokens: Any) -> VisionDocument:
    """Reads an example whose tokens are known, for its images.

    Raises:
        LayoutError: it has other tokens than when its row was planned.
    """
    where = place_of(example := examples[number], number)
    document = reader.read(example, where)
    if not np.array_equal(document.columns["input_ids"], np.asarray(tokens)):
        raise LayoutError(
            f"{where} has other tokens than when its row was planned: let the processor make the same of an "
            "example each time, without random sizes"
        )
    return document


PackedVisionDataset = PackedMediaDataset  # its name in 0.3
