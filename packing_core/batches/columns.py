"""Reads the columns of tokenised examples: their documents, their real tokens and their trained tokens.

Examples of a dataset, as mappings or as columns -> :func:`read_examples` or :func:`read_columns` -> :class:`Documents`,
in the form that ``packing_core.pack`` takes. ``PackedCollator``, ``pack_dataset`` and the audit read examples here, so
they agree; a batch's masks of trained tokens mean the same to ``with_boundaries`` (:func:`trained_tokens`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from packing_core.batches.marks import (
    LENGTHS,
    PER_TOKEN,
    FlatSegments,
    first_true,
    is_numbered,
    read_segments,
    refuse_trained_padding,
)
from packing_core.errors import LayoutError
from packing_core.storage.arrays import Bool, Int64, digest, sampled
from packing_core.storage.ragged import Ragged
from packing_core.storage.segment_indexing import offsets_of, ranges

# Masks, 0 where a token is not trained, under the names that TRL and this project give them. All of them must agree.
TRAINED = ("loss_mask", "completion_mask", "assistant_masks")
PROMPT = "prompt_length"  # so many first tokens of a document are not trained
MEDIA = ("pixel_values", "input_features")  # how columns of what processors make of images and clips begin
# Everything that is read beside input_ids and labels; trainers drop columns that the model does not take.
READ = (*TRAINED, PROMPT, *LENGTHS, *PER_TOKEN)


@dataclass(frozen=True)
class Documents:
    """D documents without padding; the fields are arguments of ``packing_core.pack``.

    Attributes:
        input_ids, labels, loss_mask: one sequence per document. Without labels the documents are the labels, and
            without a loss_mask every token may be trained.
        prompt_lengths: int64 [D], or None.
        columns: every other column, one sequence per document.
    """

    input_ids: Ragged
    labels: Ragged | None
    loss_mask: Ragged | None
    prompt_lengths: Int64 | None
    columns: dict[str, Ragged]

    @property
    def digest(self) -> str:
        """Digests the contents of documents from all over the data."""
        sequences = {"input_ids": self.input_ids, "labels": self.labels, "loss_mask": self.loss_mask} | self.columns
        stored = {name: values for name, values in sequences.items() if values is not None}
        return digest(
            (i, 0, {name: values[i] for name, values in stored.items()}) for i in sampled(len(self.input_ids))
        )


def trained_tokens(columns: Mapping[str, Any]) -> Bool | None:
    """Returns the tokens that the masks among ``columns`` train, in their shape; None if there is no mask."""
    masks = [np.asarray(columns[name]) != 0 for name in TRAINED if columns.get(name) is not None]
    return np.logical_and.reduce(masks) if masks else None


def read_columns(columns: Mapping[str, Any]) -> Documents:
    """The documents of N examples.

    Args:
        columns: name -> N values: ``input_ids``, and optionally ``labels`` (unshifted, -100 where nothing is trained),
            ``loss_mask``, ``completion_mask``, ``assistant_masks`` (0 where nothing is trained), ``prompt_length`` (a
            number per document), ``attention_mask`` (0 at padding, which is cut off either end), and
            ``seq_lengths``, ``segment_ids``, ``seq_idx``, ``position_ids`` or a numbered ``attention_mask``, by which
            an example that is a packed row is cut into its documents. Any other column has a value per token.

    Raises:
        LayoutError: columns contradict each other, a document has a hole, or a token of padding is trained by its label
            or mask.
        PackingError: a column is not of flat sequences of numbers.
    """
    prompts = columns.get(PROMPT)
    lengths = {name: Ragged.of(columns[name], name=name) for name in LENGTHS if name in columns}
    ragged = {name: Ragged.of(x, name=name) for name, x in columns.items() if name != PROMPT and name not in LENGTHS}
    _check_sizes(ragged)
    marks = lengths | {name: ragged.pop(name).flat().values for name in PER_TOKEN if name in ragged}
    if "attention_mask" in marks and np.all(marks["attention_mask"] == 1):  # as most tokenisers give it: no padding
        del marks["attention_mask"]
    loss_mask = trained_tokens({name: ragged.pop(name).flat().values for name in TRAINED if name in ragged})
    offsets = offsets_of(ragged["input_ids"].lengths)
    if (mask := marks.get("attention_mask")) is not None:
        _refuse_trained_padding(ragged, loss_mask, np.asarray(mask == 0), offsets)
    if marks:
        segments = _segments(marks, offsets, ragged["input_ids"].flat().values)
        real, offsets = ~segments.padding, offsets_of(segments.documents)
        ragged = {name: Ragged(x.flat().values[real], offsets, name=name) for name, x in ragged.items()}
        loss_mask = None if loss_mask is None else loss_mask[real]
    return Documents(
        input_ids=ragged.pop("input_ids"),
        labels=ragged.pop("labels", None),
        loss_mask=None if loss_mask is None else Ragged(loss_mask, offsets, name="loss_mask"),
        prompt_lengths=None if prompts is None else _prompts(prompts, len(offsets) - 1),
        columns=ragged,
    )


def read_examples(examples: Sequence[Mapping[str, Any]]) -> Documents:
    """The same of a list of examples. None stands for a column that an example does not have.

    Raises:
        LayoutError: as :func:`read_columns`, or an example has no ``input_ids`` or lacks a column of another one.
    """
    for number, example in enumerate(examples):
        if not isinstance(example, Mapping):
            raise LayoutError(f"example {number} is a {type(example).__name__}: pass mappings with input_ids")
        if example.get("input_ids") is None:
            raise LayoutError(f"a feature has no input_ids, only {', '.join(example)}: tokenise before collating")
    names = dict.fromkeys(name for x in examples for name, value in x.items() if value is not None)
    return read_columns({name: [_value(examples, number, name) for number in range(len(examples))] for name in names})


def documents_in(given: Any) -> Documents | None:
    """The documents of a ``datasets.Dataset`` or a list of mappings, by the columns of :func:`read_columns`.

    Tokens of a dataset stay in its Arrow buffers, and :class:`Documents` are themselves. Returns None for anything
    else, such as sequences of tokens.

    Raises:
        LayoutError: as :func:`read_examples`, or an example has tensors of images or clips, which rows do not hold.
    """
    if isinstance(given, Documents):
        return given
    known, names = ("input_ids", "labels", *READ), getattr(given, "column_names", None)
    if isinstance(names, list) and hasattr(given, "with_format") and hasattr(given, "__len__"):
        if "input_ids" not in names:
            raise LayoutError(f"the dataset has no input_ids, only {', '.join(names)}: tokenise it first")
        _refuse_media({name: given.with_format("arrow")[name] for name in names if name.startswith(MEDIA)})
        return arrow_documents(given, [name for name in names if name in known])
    if isinstance(given, list | tuple) and given and isinstance(given[0], Mapping):
        media = {name for x in given if isinstance(x, Mapping) for name in x if name.startswith(MEDIA)}
        _refuse_media({name: [x.get(name) for x in given] for name in media})
        return read_examples(
            [
                {name: example[name] for name in example if name in known} if isinstance(example, Mapping) else example
                for example in given
            ]
        )
    return None


def _refuse_media(columns: Mapping[str, Iterable[Any]]) -> None:
    for name, values in columns.items():
        for number, value in enumerate(values):
            if _holds_something(value.as_py() if hasattr(value, "as_py") else value):
                raise LayoutError(
                    f"example {number} has {name}, which rows of tokens do not hold: pass the examples to "
                    "crosspack.PackedMediaDataset, or leave the column out"
                )


def _holds_something(value: Any) -> bool:
    """Returns whether a value is there and not empty: a number, an array or tensor of any rank, or a list."""
    shape = getattr(value, "shape", None)
    return value is not None and (not isinstance(value, Sized) or (len(value) > 0 if shape is None else 0 not in shape))


def arrow_documents(dataset: Any, names: list[str]) -> Documents:
    """The documents of a ``datasets.Dataset`` by its columns ``names``."""
    arrow = dataset.select_columns(names).with_format("arrow")[:]
    return read_columns({name: arrow[name] for name in names})


def documents_of(example: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The documents of one example: itself without padding, or the pieces that its marks cut it into."""
    return _each(read_examples([example]))


def stream_documents(examples: Iterable[Mapping[str, Any]], at_once: int) -> Iterator[dict[str, Any]]:
    """The documents of examples that come one after the other, as ``packing_core.stream`` takes them.

    Args:
        at_once: how many examples are read together.
    """
    source = iter(examples)
    while chunk := list(islice(source, at_once)):
        yield from _each(read_examples(chunk))


def _each(read: Documents) -> list[dict[str, Any]]:
    columns = {
        "input_ids": read.input_ids,
        "labels": read.labels,
        "loss_mask": read.loss_mask,
        PROMPT: read.prompt_lengths,
        **read.columns,
    }
    return [{name: x[d] for name, x in columns.items() if x is not None} for d in range(len(read.input_ids))]


def _value(examples: Sequence[Mapping[str, Any]], number: int, name: str) -> Any:
    """A column of one example; without a mask it has no padding, and without lengths it is one document.

    Nothing else may be absent in some examples: without labels, masks or prompts all of their tokens would be trained.
    """
    example = examples[number]
    if example.get(name) is not None:
        return example[name]
    if name == "attention_mask":
        return np.ones(len(example["input_ids"]), np.int64)
    if name in LENGTHS:
        return [len(example["input_ids"])]
    other = next(i for i, x in enumerate(examples) if x.get(name) is not None)
    raise LayoutError(f"example {number} has no {name}, which example {other} has: give it to all of them or to none")


def _check_sizes(columns: Mapping[str, Ragged]) -> None:
    sizes = columns["input_ids"].lengths
    for name, column in columns.items():
        if len(column) != len(sizes):
            raise LayoutError(
                f"there are {len(column):,} {name} and {len(sizes):,} input_ids: give one for each example"
            )
        if (example := first_true(column.lengths != sizes)) is not None:
            raise LayoutError(
                f"example {example} has {column.lengths[example]:,} {name} and {sizes[example]:,} input_ids: "
                "a column has one value for each token"
            )


def _refuse_trained_padding(
    columns: Mapping[str, Ragged], loss_mask: Bool | None, masked: Bool, offsets: Int64
) -> None:
    """Raises LayoutError if a token of padding is trained; without labels and masks none is."""
    if "labels" not in columns and loss_mask is None:
        return
    labels = columns["labels" if "labels" in columns else "input_ids"].flat().values

    def place(token: int) -> str:
        example = int(np.searchsorted(offsets, token, side="right")) - 1
        return f"token {token - int(offsets[example])} of example {example}"

    refuse_trained_padding(labels, masked & (True if loss_mask is None else loss_mask), place)


def _segments(marks: Mapping[str, Any], offsets: Int64, tokens: Any) -> FlatSegments:
    """The documents and the padding of examples; an example without boundaries is one document."""
    unmarked = marks.keys() == {"attention_mask"} and not is_numbered(marks["attention_mask"])
    one_each = {"position_ids": ranges(np.diff(offsets))} if unmarked else {}
    every_token = np.ones(offsets[-1], np.bool_)
    all_marks = {**marks, **one_each}
    segments = read_segments(all_marks, offsets, tokens=tokens, needed=every_token, row_name="example")
    real = np.diff(offsets_of(~segments.padding)[offsets])
    if (example := first_true(real == 0)) is not None:
        raise LayoutError(f"example {example} has no tokens but padding: drop it")
    if "position_ids" in marks:
        odd = marks["position_ids"][~segments.padding] != ranges(segments.documents)
        if (token := first_true(odd)) is not None:
            place = np.flatnonzero(~segments.padding)[token]
            raise LayoutError(
                f"position_ids of example {np.searchsorted(offsets, place, side='right') - 1} do not count 0, 1, 2 "
                "from the start of each document, as those of packed rows do: leave the column out, or wrap a collator "
                "that hands them through, with_boundaries(collator)"
            )
    return segments


def _prompts(given: Any, documents: int) -> Int64:
    """One prompt length per document, from a number or a list of them per example."""
    values = given.to_pylist() if hasattr(given, "to_pylist") else given
    prompts = np.concatenate([np.atleast_1d(np.asarray(value)) for value in values])
    if len(prompts) != documents:
        entries = "1 entry" if len(prompts) == 1 else f"{len(prompts):,} entries"
        raise LayoutError(f"{PROMPT} has {entries} and there are {documents:,} documents: give each document one")
    return prompts
