"""Reads a trainer and plans how it will train packed documents; refuses one that cannot be made exact.

The class and arguments of a built trainer, examples of its data, its collator (:mod:`.replaced`) and the lengths of all
documents (:mod:`.dataloader`) -> a :class:`PackingPlan`. Nothing of the trainer is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np

from packing_core import PackedBatch
from packing_core.batches.columns import MEDIA, READ
from packing_core.batches.keys import BatchKey
from packing_core.batches.marks import MARKS, is_numbered
from packing_core.batches.media import KINDS
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import LayoutError, PackingError, UnsupportedError, UnsupportedModelError, first_line
from packing_core.planning.pieces import CUTS
from torch_backend.auditing.trainer import refuse_cut_documents
from torch_backend.collate import Batch, BoundaryCollator, PackedCollator
from torch_backend.collate.document_labels import LABELS, NAMES
from torch_backend.collate.packed_dataset import is_packed_dataset, refuse_lost_lengths
from torch_backend.collate.pictures import CHATS, has_media, turns_of
from torch_backend.collate.vision import VisionReader, VisionRows
from torch_backend.hf.anatomy.heads import head_of, predicts_masked
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.trainers.dataloader import is_stream, made_on_access, pack_training_data
from torch_backend.trainers.epoch_rows import EpochRows, RowStream
from torch_backend.trainers.over_ranks import context_mesh, why_not_rows
from torch_backend.trainers.own_loss import TrainerLoss
from torch_backend.trainers.port import PackingRequest
from torch_backend.trainers.replaced import OwnCollator, Replaced, ReplacingCollator, name_of

_MEDIA = {"vision_config", "audio_config", "encoder_config"}  # of models that take images or audio
_COLUMNS = (*MEDIA, *KINDS)  # how columns of media begin
COMPARED = 64  # examples of each dataset that the present collator and packing are compared on before training
# Families that DeepSpeed 0.19.8 splits over ranks and whose modeling files then raise, packed or not: they reshape by
# the numbers of heads of the whole model.
_NOT_SPLIT = ("bloom", "falcon", "mamba2", "mpt")


@dataclass(frozen=True)
class PackingPlan:
    """Plan for training a trainer on packed documents.

    Attributes:
        collator: makes its batches.
        rows: what it trains on; None if its own batches are packed one by one, or its data are rows already.
        before: the name of the collator that the trainer had.
        mesh: the ranks over which documents are cut; None where each lies on one.
    """

    collator: PackedCollator | BoundaryCollator
    rows: EpochRows | RowStream | None
    before: str
    mesh: Any = None

    def __str__(self) -> str:
        return self._rows if self.mesh is None else f"{self._rows}, cut over {self.mesh.size()} ranks"

    @property
    def _rows(self) -> str:
        data = "the documents of each batch" if self.rows is None else str(self.rows)
        if isinstance(self.collator, BoundaryCollator):
            return f"rows as {self.before} packs them, with their boundaries"
        vision = self.collator.vision
        own = isinstance(self.collator, ReplacingCollator) or (vision is not None and vision.collate is not None)
        return f"{data}, by {'PackedCollator in place of ' if own else ''}{self.before}"


def inspect(trainer: Any, loss: TrainerLoss, request: PackingRequest) -> PackingPlan:
    """Plan the packing of a trainer as it was requested.

    Raises:
        UnsupportedError, LayoutError, CapacityError, PackingError: as ``enable_packing``, but for the model's.
    """
    refuse_cut_documents(trainer.args)
    head_of(causal_lm(trainer.model))
    for kind, data in _datasets(trainer).items():
        if is_packed_dataset(data):
            refuse_lost_lengths(islice(iter(data), 1), f"{kind} example", data)
    mesh = context_mesh(trainer, partial(why_not_rows, trainer, loss, fast=request.fast))
    _refuse_split_model(trainer)
    trainer._set_signature_columns_if_needed()
    before = name_of(trainer.data_collator)
    collator = _packing_collator(trainer, loss, request)
    if generates_in_evaluation(trainer) and not isinstance(collator, ReplacingCollator):
        raise UnsupportedError(
            f"predict_with_generate=True continues each example of an evaluation batch, and {before} makes rows of "
            "several documents: pass a data_collator that pads, or leave it out and call model.generate"
        )
    _refuse_untrained(trainer, collator)
    if not isinstance(collator, PackedCollator):
        return PackingPlan(collator, None, before, mesh)
    if collator.labels_documents and request.overflow in CUTS:
        raise PackingError(
            f'overflow="{request.overflow}" cuts documents, and the model classifies whole ones: pass '
            'overflow="truncate" or "drop"',
            option="overflow",
        )
    if request.overflow in ("overlap", "restart") and (collator.labels_every_token or collator.masking is not None):
        raise PackingError(
            f'overflow="{request.overflow}" shows tokens twice, and the model would train their labels twice: pass '
            'overflow="split", "truncate" or "drop"',
            option="overflow",
        )
    return PackingPlan(*pack_training_data(trainer, collator, request), before, mesh)


def generates_in_evaluation(trainer: Any) -> bool:
    """Returns whether a trainer generates from the batches of its evaluation (transformers' ``Seq2SeqTrainer``)."""
    return bool(getattr(trainer.args, "predict_with_generate", False))


def _refuse_split_model(trainer: Any) -> None:
    """Raise if DeepSpeed would split a model over ranks that cannot run split."""
    config, family = getattr(trainer.args, "hf_deepspeed_config", None), causal_lm(trainer.model).config.model_type
    size = 0 if config is None else config.get_value("tensor_parallel.autotp_size", 0)
    if size > 1 and family in _NOT_SPLIT:
        raise UnsupportedModelError(
            f"DeepSpeed's tensor parallelism cannot split {family}, whose forward reshapes by the numbers of heads of "
            f"the whole model, packed or not: leave out autotp_size={size}, and use ZeRO or DDP"
        )


def _packing_collator(trainer: Any, loss: TrainerLoss, request: PackingRequest) -> PackedCollator | BoundaryCollator:
    """The trainer's collator if it packs, with boundaries, else one that packs and trains the same tokens."""
    collator = trainer.data_collator
    ours = isinstance(collator, PackedCollator | BoundaryCollator)
    examples = [] if ours else _sample(trainer)
    if not (ours or examples):
        raise PackingError(
            f"{type(trainer).__name__} has neither a train_dataset nor an eval_dataset with examples: pass one, "
            "because its examples show whether its collator packs and what it trains"
        )
    if (of_images := None if ours else _collator_of_images(trainer, examples)) is not None:
        of_images.marks_padding |= loss.own  # which may read the mask
        return of_images
    own = OwnCollator(trainer, READ)
    packs = ours or _packs(trainer, own, *examples[0])
    packs_documents = packs and not (isinstance(collator, PackedCollator) and collator.capacity is None)
    if packs_documents:
        request.refuse(f"{name_of(collator)} packs by itself")
    if ours:
        return collator
    if packs:
        wrapped = BoundaryCollator(collator, trainer.model)
        for _, example in examples:
            _check_documents(wrapped, own.seen(example))
        return wrapped
    masks = getattr(collator, "mlm", False) and type(collator).__name__ == "DataCollatorForLanguageModeling"
    if masks and predicts_masked(trainer.model):
        return _masking_collator(trainer)
    compared = [(place, example) for place, example in examples if isinstance(example, Mapping)]
    if not compared:
        return PackedCollator(trainer.model)
    replaced = Replaced(OwnCollator(trainer), trainer.model, _columns_read(trainer))
    replaced.inspect(compared)
    replacing = ReplacingCollator(trainer.model, replaced)
    if replaced.gives_mask and loss.own:
        replacing.marks_padding = True  # which that loss may read
    return replacing


def _collator_of_images(trainer: Any, examples: Sequence[tuple[str, Any]]) -> PackedCollator | None:
    """A collator that packs what the trainer's makes of examples with images or audio; None if it makes none of them.

    Where the examples have none, one is looked for in all data that have columns of media or chats.

    Raises:
        UnsupportedModelError: the model is not known to be exact with packed images, or audio.
    """
    if not _MEDIA & set(causal_lm(trainer.model).config.to_dict()):
        return None
    collate = OwnCollator(trainer)
    rare = (x for data in _datasets(trainer).values() for x in islice(_with_media(data), 1))
    for example in chain((x for _, x in examples if isinstance(x, Mapping)), rare):
        try:
            batch = collate([dict(example)])
        except Exception:  # the collator is called again, and its error reported, where packing is planned
            return None
        if any(name.startswith(MEDIA) and batch[name] is not None for name in batch):
            collator, processor = PackedCollator(trainer.model), getattr(trainer, "processing_class", None)
            processor = processor if hasattr(processor, "tokenizer") else None
            collator.vision = VisionReader(trainer.model, processor, collate=collate)
            collator.pad_id = collator.vision.pad_id(collator.pad_id)
            return collator
    return None


def _with_media(data: Any) -> Iterator[Any]:
    """The examples of data that hold images, clips or videos, or their tensors; none of streams or made on access."""
    names = getattr(data, "column_names", None) or CHATS
    if is_stream(data) or made_on_access(data):
        return
    if not any(name in CHATS or name.startswith(_COLUMNS) for name in names):
        return
    for example in map(data.__getitem__, range(len(data))):
        if not isinstance(example, Mapping):
            return
        tensors = any(example[name] is not None for name in example if name.startswith(MEDIA))
        if tensors or any(has_media(example, turns_of(example), kind) for kind in KINDS):
            yield example


def _refuse_untrained(trainer: Any, collator: PackedCollator | BoundaryCollator) -> None:
    """Raise if the training data lack labels that the model needs, or have none that is trained."""
    data, packs = trainer.train_dataset, PackedCollator(trainer.model)
    if not hasattr(data, "__len__") or len(data) == 0 or getattr(collator, "masking", None) is not None:
        return
    vision = getattr(collator, "vision", None)
    for number, example in enumerate(data):
        if isinstance(collator, BoundaryCollator) and not isinstance(example, Mapping | PackedBatch):
            if (np.asarray(collator([example])["labels"]) != IGNORE_INDEX).any():  # a row that its collator alone reads
                return
            continue
        if isinstance(example, PackedBatch | VisionRows):
            batch = example if isinstance(example, PackedBatch) else example.batch
        elif vision is not None:
            batch = packs.pack([vision.read(example, f"training example {number}").columns])
        elif isinstance(collator, ReplacingCollator):
            batch = packs.pack([collator.replaced.example(example)])
        else:
            batch = packs.pack([{name: example[name] for name in ("input_ids", *NAMES, *READ) if name in example}])
        labels: Any = batch.targets
        if packs.labels_documents or packs.labels_every_token:
            labels = batch.per_document.get(LABELS) if packs.labels_documents else batch.labels
        if labels is None:
            way = ", or pass data_collator=DataCollatorForLanguageModeling(tokenizer)"
            way = f"add a column labels{way if predicts_masked(trainer.model) else ''}"
            model = type(causal_lm(trainer.model)).__name__
            raise LayoutError(f"the training data have no labels, which {model} needs: {way}")
        if labels.dtype.kind == "f" or (labels != IGNORE_INDEX).any():
            return
    raise LayoutError(
        "no token of the training data is trained, by its labels and masks, so every step would have the loss 0: "
        "give -100 to the labels of prompts alone"
    )


def _columns_read(trainer: Any) -> list[str]:
    """The columns that say what is trained and where documents are."""
    ignored = {"completion_mask"} if getattr(trainer, "completion_only_loss", None) is False else set()
    return [name for name in READ if name not in ignored]


def _masking_collator(trainer: Any) -> PackedCollator:
    """Packs documents, whose tokens the trainer's collator for masked language models then hides as before."""
    if trainer.data_collator.whole_word_mask:
        raise PackingError(
            "whole_word_mask=True reads the words of padded examples: leave it out, or hide tokens in the data set, "
            "with a column labels that is -100 at all others"
        )
    return PackedCollator(trainer.model, masking=trainer.data_collator)


def _datasets(trainer: Any) -> dict[str, Any]:
    """The training and the evaluation data, by what messages call them."""
    evaluation: Any = getattr(trainer, "eval_dataset", None)
    return {
        "training": getattr(trainer, "train_dataset", None),
        **(evaluation if isinstance(evaluation, dict) else {"evaluation": evaluation}),
    }


def _sample(trainer: Any) -> list[tuple[str, Any]]:
    """Examples from all over the training and the evaluation data, each with what messages call it."""
    sample = []
    for kind, data in _datasets(trainer).items():
        if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
            first = range(min(COMPARED // 8, len(data)))
            spread = np.linspace(0, len(data) - 1, min(COMPARED, len(data))).astype(int).tolist()
            sample += [(f"{kind} example {number}", data[number]) for number in sorted({*first, *spread})]
        elif data is not None:
            sample += [(f"{kind} example {number}", x) for number, x in enumerate(islice(iter(data), COMPARED))]
    for where, example in sample:
        if isinstance(example, Mapping) and np.size(example.get("input_ids", 0)) == 0:
            raise PackingError(f"{where} is empty: leave empty documents out, dataset.filter(lambda x: x['input_ids'])")
    return sample


def _packs(trainer: Any, collator: OwnCollator, where: str, first: Any) -> bool:
    """Returns whether the collator packs documents into one row, judged by a batch of one example given twice."""
    if isinstance(first, PackedBatch):
        return False
    example = collator.seen(first)
    has = example if isinstance(example, Mapping) else {}
    try:
        batch = dict(collator([first, first]))
    except Exception as error:
        if "input_ids" in has:
            raise
        raise _no_tokens(trainer, where, first, f"{collator.name} raised {first_line(error)}") from error
    if "input_ids" not in batch:
        raise _no_tokens(trainer, where, first, f"{collator.name} returned {', '.join(batch) or 'nothing'}")
    if len(batch["input_ids"]) < 2:
        return True
    marks = {name for name in MARKS if batch.get(name) is not None and name not in has}
    if marks - {"attention_mask", "position_ids"}:
        return True
    if is_numbered(batch.get("attention_mask")) and not is_numbered(has.get("attention_mask")):
        return True
    return "position_ids" in marks and _count_documents(BoundaryCollator(dict)(batch)) > len(batch["input_ids"])


def _no_tokens(trainer: Any, where: str, example: Any, happened: str) -> LayoutError:
    """The error of a batch without input_ids: the data lack them, the trainer removes them, or the collator does."""
    columns = ", ".join(example) if isinstance(example, Mapping) else f"a {type(example).__name__}"
    kind, _, _ = where.partition(" example ")
    text = isinstance(example, Mapping) and isinstance(example.get("input_ids"), str)
    if text or not (isinstance(example, Mapping) and "input_ids" in example):
        columns = "text under that name" if text else columns
        return LayoutError(
            f"the {kind} data have no input_ids, only {columns}: tokenise them first, so that every example has "
            f"input_ids, a list of token ids ({happened})"
        )
    if "input_ids" not in OwnCollator(trainer).seen(example):
        return LayoutError(
            f"the trainer removes input_ids from the {kind} data, because forward of {type(trainer.model).__name__} "
            "has no argument of that name: add it, or pass remove_unused_columns=False"
        )
    return LayoutError(
        f"the collator makes no input_ids of {where}, which has {columns} ({happened}): let it return token ids [B, S]"
    )


def _count_documents(batch: Batch) -> int:
    """Segments of a batch with boundaries that are not padding."""
    starts = np.cumsum((0, *batch[BatchKey.LENGTHS][:-1]))
    mask = batch.get("attention_mask")
    return len(starts) if mask is None else int((np.asarray(mask).reshape(-1)[starts] != 0).sum())


def _check_documents(collator: BoundaryCollator, example: Any) -> None:
    """A collator that packs must mark the documents of an example that it is given twice."""
    packed_row = isinstance(example, Mapping) and "input_ids" in example and "seq_lengths" in example
    documents = 2 * (np.count_nonzero(np.asarray(example["seq_lengths"])) if packed_row else 1)
    marked = _count_documents(collator([example, example]))
    if marked < documents:
        raise LayoutError(
            f"{name_of(collator.collator)} puts {documents} documents into rows and marks {marked}: let it emit "
            "cu_seq_lens_q, seq_lengths or position_ids that restart at each document"
        )
