"""``audit(trainer)``: what a trainer trains on packed rows against each of its documents alone, by its own loss.

A built trainer -> the first batch of its own dataloader and collator with two trained documents in a row -> the
documents that the collator was given, found again in its rows -> ``compute_loss`` and backward on the batch and on
every document alone, with the trainer's adapters and precision -> a :class:`TrainerReport`. Nothing has to be patched,
and nothing is changed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from packing_core.batches.marks import PER_TOKEN
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.budget import FLOAT32, NARROW, noticed
from packing_core.errors import UnsupportedError, plural
from torch_backend.auditing.compare import (
    averaged,
    exchanged,
    gradients_error,
    refuse_several_devices,
    run,
    without_dropout,
)
from torch_backend.auditing.scored import EmbeddedStep, ScoredStep
from torch_backend.auditing.trainer_batches import (
    LEAK,
    LOSS,
    NOTHING,
    TrainerStep,
    alone_with,
    batches_and_features,
    images_of,
    is_placeholder,
    pieces_of,
    places_of,
)
from torch_backend.collate import Batch
from torch_backend.collate.image_tensors import Images
from torch_backend.hf.anatomy.heads import labels_documents, trains_first_token
from torch_backend.hf.anatomy.structure import causal_lm, in_mode, with_values
from torch_backend.hf.float8 import describe_float8
from torch_backend.hf.inputs.boundaries import is_packed
from torch_backend.hf.inputs.sentence_trainers import COLUMNS, PAIRS, sentence_trainer
from torch_backend.hf.inputs.trl_trainers import distils, kind_of
from torch_backend.hf.patch import context_of
from torch_backend.hf.router import no_router_loss
from torch_backend.ops.divisor import Divisor

_MANY = 2**30  # times the targets: what a count of so many divides is nothing
_NOTHING = 1e-6  # of a loss
Place = tuple[int, slice]  # row and tokens of a document


@dataclass(frozen=True)
class TrainerReport:
    """Figures of an audit on the trainer's own batches; differences are relative to the documents alone.

    Attributes:
        trainer, model, device, dtype: what was audited; the dtype is that of the computation.
        documents: how many the batches held, in how many ``rows``.
        targets: trained tokens of the documents alone; counted: what the trainer divides by, None if by nothing.
        loss: packed against the documents alone.
        cosine: of the two gradients; gradients: the worst parameter's max error / max, worst_parameter: its name.
        leak: how far the gradient of the other documents' loss moves when every token of one document is replaced; of
            trainers that score answers, how far the scores or log-probabilities of the others move.
        moved: how far the gradient of that document's own loss moves, or its scores; the probe is void unless it does.
        noise: how far the packed gradient moves when it is simply taken again.
        tolerance: what loss, 1 - cosine and leak may be, and in float32 gradients too: 1e-4, below float32 2e-2.
        ranks: over how many ranks documents were cut.
        products: which layers multiply in float8, by which recipe; empty if none does.
        batches: how many were read to choose one.
        isolated: whether no trained document of that one follows another document in its row, or it has one document
            alone, so that ``leak`` says little.
    """

    trainer: str
    model: str
    device: str
    dtype: str
    documents: int
    rows: int
    targets: int
    counted: int | None
    loss: float
    cosine: float
    gradients: float
    worst_parameter: str
    leak: float
    moved: float
    noise: float
    tolerance: float
    ranks: int = 1
    products: str = ""
    batches: int = 1
    isolated: bool = False

    @property
    def verdict(self) -> str:
        """``exact`` or ``contaminated``."""
        judged = [self.loss, 1 - self.cosine, self.leak]
        if self.tolerance == FLOAT32:
            judged.append(self.gradients)
        exact = all(x <= self.tolerance for x in judged) and noticed(self.moved, self.leak)
        return "exact" if exact else "contaminated"

    def to_json(self) -> str:
        """The verdict and every figure, as a JSON object."""
        return json.dumps({"verdict": self.verdict, **asdict(self)})

    def __str__(self) -> str:
        where = f"{self.dtype} on {self.device}, {plural(self.documents, 'document')} in {plural(self.rows, 'row')}"
        where += f" cut over {self.ranks} ranks" if self.ranks > 1 else ""
        sees = self.leak > self.tolerance
        verdict = self.verdict if sees or self.verdict == "exact" else f"{self.verdict}, in its loss and not by a leak"
        return (
            f"{self.trainer} on {self.model} ({where}): {verdict}; loss {self.loss:.1e}, "
            f"gradient cosine {self.cosine:.6f}, worst {self.gradients:.1e} ({self.worst_parameter}), "
            f"leak {self.leak:.1e}, noise {self.noise:.1e}, tolerance {self.tolerance:.0e}"
            f"{self.products and '; '}{self.products}{self._isolation}"
        )

    @property
    def _isolation(self) -> str:
        if not self.isolated:
            return ""
        batch = "the batch" if self.batches == 1 else f"the batch, the best of {self.batches},"
        return f"; {batch} has no trained document behind another one, which it could see"


def audit_trainer(trainer: Any) -> TrainerReport:
    """Compare what a trainer computes on a batch of its own with each of its documents alone.

    It is the first of 64 batches in which a trained document follows another one in its row. If none has such a row,
    the report says so, and compares loss and gradients of the first one that trains something. Of trainers that score
    documents it is the first one whose gradients are not 0, of 8 batches of TRL's.

    Dropout is off and a router's auxiliary loss is left out, because both are defined over the whole batch. Parameters,
    gradients, logged metrics and the random state are as before when it returns. Of DPO, KTO, reward, GRPO and RLOO
    trainers of TRL the padded or packed forwards are compared with forwards of single answers, of those of
    sentence-transformers with forwards of single texts (:mod:`.scored`).
    Under context parallelism every rank of the group calls this and gets the same report; each runs its part of the
    packed batches, and every document alone.

    Args:
        trainer: a ``transformers.Trainer`` or a subclass, before ``train()``; patched or not. One with ``model_init``
            is judged on a model that this makes, because ``train()`` trains such a one.

    Raises:
        LayoutError: a document that the collator was given is not in its rows as it was, or it is given rows of
            ``pack_dataset`` without the lengths of their documents.
        PackingError: there is no batch, or nothing is trained in the first ones.
        UnsupportedError: the trainer runs on several devices, but for those of one group of context parallelism, before
            ``train()`` has sharded its model; or it trains a classifier or a masked language model, or its
            rows hold cut documents without boundaries.
    """
    refuse_cut_documents(trainer.args)
    refuse_several_devices(trainer)
    kind = sentence_trainer(trainer)
    if kind is not None and kind not in (*COLUMNS, PAIRS):
        raise UnsupportedError(
            f"audit(trainer) does not judge the loss of {type(trainer).__name__}: use audit(trainer.model)"
        )
    if (
        kind is None
        and kind_of(trainer) is None
        and (labels_documents(trainer.model) or trains_first_token(trainer.model))
    ):
        raise UnsupportedError(
            f"{type(trainer).__name__} trains a classifier or a masked language model, and audit(trainer) judges "
            "losses of next tokens and of answers: use audit(trainer.model)"
        )
    if distils(trainer):
        raise UnsupportedError(
            f"audit(trainer) does not judge the loss of {type(trainer).__name__}: use audit(trainer.model) and "
            "audit(trainer.teacher_model)"
        )
    with torch.random.fork_rng(), _model_of_train(trainer), as_before(trainer):
        of_documents = ScoredStep if kind_of(trainer) is not None else _RowsStep
        steps: type[TrainerStep] = of_documents if kind is None else EmbeddedStep
        context, root, half = context_of(trainer.model), causal_lm(trainer.model), _half(trainer)
        tolerance = NARROW if half else FLOAT32
        step, batches = steps.first_that_shows(trainer, tolerance)
        return TrainerReport(
            trainer=type(trainer).__name__,
            model=type(root).__name__,
            device=trainer.args.device.type,
            dtype=half or "float32",
            tolerance=tolerance,
            ranks=1 if context is None else context.ranks,
            products=describe_float8(root) or "",
            batches=batches,
            **step.measure(),
        )


def refuse_cut_documents(arguments: Any) -> None:
    """Raise UnsupportedError if a trainer's arguments let TRL join all documents and cut rows out of them.

    Nothing in such rows tells where a document begins, so they can be neither packed exactly nor audited.
    """
    packs = getattr(arguments, "packing", False) or getattr(arguments, "eval_packing", False)
    if packs and getattr(arguments, "packing_strategy", None) == "wrapped":
        raise UnsupportedError(
            'packing_strategy="wrapped" cuts documents anywhere and marks no boundary, so its rows are contaminated: '
            'pass packing_strategy="bfd_split" or "bfd" to the trainer\'s arguments and build it again'
        )


class _RowsStep(TrainerStep):
    """One batch of a trainer, and where its documents lie in it."""

    def __init__(self, trainer: Any, tolerance: float, batch: Batch, features: list[Any]) -> None:
        super().__init__(trainer, tolerance, batch)
        self.context = context_of(trainer.model)
        self.places = places_of([p for f in features for p in pieces_of(f)], batch["input_ids"].cpu().numpy())
        self.images = images_of(features, len(self.places))
        self.documents = [self._alone(*each) for each in zip(self.places, self.images, strict=True)]
        self.targets = [_targets(inputs) for inputs in self.documents]
        _, counted = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
        self.counted = None if counted is None else int(counted)
        self.trained = [place for place, targets in zip(self.places, self.targets, strict=True) if targets]
        # What leaks, leaks forward. A document of one token has no loss that shows that it was replaced.
        longer = [place for place in self.places if place[1].stop - place[1].start > 1]
        self.followed = [a for a in longer if any(a[0] == b[0] and a[1].start < b[1].start for b in self.trained)]

    @classmethod
    def steps(cls, trainer: Any, tolerance: float) -> Iterator[_RowsStep]:
        return (cls(trainer, tolerance, *each) for each in batches_and_features(trainer))

    @property
    def shows(self) -> int:
        """Returns LEAK only if a trained document stands behind another one in its row."""
        return LEAK if self.followed else LOSS if self.trained else NOTHING

    def packed(self) -> tuple[float, dict[str, Tensor]]:
        return self._run(self.batch, self.counted)

    def probe(self) -> dict[str, Any]:
        changed = min(self.followed or self.trained, key=lambda place: (place[1].start, place[0]))
        other = {"input_ids": self._replaced(changed)}

        others = [place for place in self.trained if place != changed]

        def moves(trained: list[Place]) -> float:
            """Returns how far the gradient of the loss of some documents moves when the one is replaced."""
            inputs = self._only(trained)
            before, after = (self._sum(x, self._of_targets())[1] for x in (inputs, inputs | other))
            return gradients_error(after, before)[0]

        return {
            "documents": len(self.places),
            "rows": len(self.batch["input_ids"]),
            "targets": sum(self.targets),
            "counted": self.counted,
            "leak": moves(others) if others else 0.0,
            "moved": moves([changed]),
            "isolated": self.shows == LOSS,
        }

    def alone(self) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients of the documents one by one, divided by all their targets once."""
        total, loss = sum(self.targets), 0.0
        gradients: dict[str, Tensor] = {}
        for inputs, targets in zip(self.documents, self.targets, strict=True):
            if targets:
                share = targets / total
                terms = {"count": [(total, 1.0)], "mean": [(total, share)]}.get(
                    self.divides, [(total, 1.0), (total * _MANY, share - 1.0)]
                )
                part, found = self._sum(inputs, terms)
                loss += part
                _add(gradients, found)
        return loss, gradients

    @cached_property
    def divides(self) -> str:
        """Names what the trainer divides its loss by: the "count" it receives, a "mean" of its own, or "both".

        Both has a loss with a penalty beside it, which the count does not divide.
        """
        total = sum(self.targets)
        with torch.no_grad():
            inputs = self.documents[int(np.argmax(self.targets))]
            once, rest = (float(self._loss(inputs, count)) for count in (total, total * _MANY))
        if abs(once - rest) <= _NOTHING * abs(once):
            return "mean"
        return "count" if abs(rest) <= _NOTHING * abs(once) else "both"

    def _of_targets(self) -> list[tuple[int | None, float]]:
        """The runs whose sum is the loss of the targets, without a penalty of all tokens or weights beside it."""
        if self.divides != "both" or self.counted is None:
            return [(self.counted, 1.0)]
        return [(self.counted, 1.0), (self.counted * _MANY, -1.0)]

    def _sum(self, inputs: Batch, terms: Iterable[tuple[int | None, float]]) -> tuple[float, dict[str, Tensor]]:
        """Sums losses and gradients over runs, each with a count of targets and a weight."""
        loss, gradients = 0.0, dict[str, Tensor]()
        for count, weight in terms:
            part, found = self._run(inputs, count, weight)
            loss += part
            _add(gradients, found)
        return loss, gradients

    def _run(self, inputs: Batch, count: int | None, weight: float = 1.0) -> tuple[float, dict[str, Tensor]]:
        model: nn.Module = self.trainer.model
        found = run(model, (), self._loss(inputs, count) * weight)
        if self.context is None:
            return float(found.loss), found.gradients
        if is_packed(inputs):  # a part on every rank
            loss = Divisor(self.context.group).average(found.loss)
            return float(loss), averaged(model, found.gradients, self.context)
        ranks = self.context.ranks  # by which the trainer multiplies a loss that the ranks average
        return float(found.loss) / ranks, {name: gradient / ranks for name, gradient in found.gradients.items()}

    def _loss(self, inputs: Batch, count: int | None) -> Tensor:
        trainer = self.trainer
        counted = None if self.counted is None or count is None else torch.tensor(count, device=trainer.args.device)
        with trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
            loss: Tensor = trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=counted)
        return loss

    def _alone(self, place: Place, images: Images) -> Batch:
        """The document as a batch of its own: every tensor per token, its images, none of the marks."""
        row, tokens = place
        shape = self.batch["input_ids"].shape
        inputs: Batch = {
            name: x[row : row + 1, tokens].clone()
            for name, x in self.batch.items()
            if isinstance(x, Tensor) and x.shape[:2] == shape and name not in PER_TOKEN
        }
        if "shift_labels" in inputs:
            inputs["shift_labels"][:, -1] = IGNORE_INDEX
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return inputs | alone_with(self.trainer.model, inputs["input_ids"], images)

    def _only(self, trained: list[Place]) -> Batch:
        """The batch with labels of the ``trained`` documents alone: their own, or all next tokens if they have none."""
        batch, ids = dict(self.batch), self.batch["input_ids"]
        for name, first in (("labels", 1), ("shift_labels", 0)):  # where the label of the second token stands
            if isinstance(batch.get(name), Tensor):
                batch[name] = batch[name].clone()
                for (row, tokens), targets in zip(self.places, self.targets, strict=True):
                    if (row, tokens) not in trained:
                        batch[name][row, tokens] = IGNORE_INDEX
                    elif not targets:
                        next_tokens = ids[row, tokens][1:]
                        batch[name][row, tokens][first : first + len(next_tokens)] = next_tokens
        return batch

    def _replaced(self, place: Place) -> Tensor:
        """The rows with every token of a document exchanged for another one of the batch, but those of its images."""
        ids: Tensor = self.batch["input_ids"].clone()
        kept = is_placeholder(self.trainer.model, ids) if any(self.images) else torch.zeros_like(ids, dtype=torch.bool)
        own = ids[place[0], place[1]]
        ids[place[0], place[1]] = torch.where(kept[place[0], place[1]], own, exchanged(own, torch.unique(ids[~kept])))
        return ids


def _add(total: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    total |= {name: total[name] + g if name in total else g for name, g in more.items()}


def _half(trainer: Any) -> str:
    """The name of the narrower dtype that something is computed in, "" if there is none."""
    mixed = str(getattr(trainer.accelerator, "mixed_precision", "no"))
    if mixed != "no":
        return {"bf16": "bfloat16", "fp16": "float16"}.get(mixed, mixed)
    dtypes = {p.dtype for p in trainer.model.parameters()} - {torch.float32, torch.float64}
    return str(min(dtypes, key=str)).removeprefix("torch.") if dtypes else ""


def _model_of_train(trainer: Any) -> AbstractContextManager[None]:
    """Inside, a trainer has a model as ``train()`` will make it, if it makes one."""
    if getattr(trainer, "model_init", None) is None:
        return nullcontext()
    model = trainer.call_model_init().to(trainer.args.device)
    return with_values((trainer, name, model) for name in ("model", "model_wrapped"))


@contextmanager
def as_before(trainer: Any) -> Iterator[None]:
    """Training mode without dropout and auxiliary losses inside; afterwards model and trainer are as they were."""
    model: nn.Module = trainer.model
    attributes, metrics = dict(trainer.__dict__), copy.deepcopy(getattr(trainer, "_metrics", None))
    loaders, even = len(trainer.accelerator._dataloaders), trainer.accelerator.even_batches
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    try:
        model.zero_grad(set_to_none=True)
        if hasattr(trainer, "aux_loss_enabled"):
            trainer.aux_loss_enabled = False
        with in_mode(model, training=True), without_dropout(model), no_router_loss(model):
            yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        trainer.__dict__.clear()
        trainer.__dict__.update(attributes)
        del trainer.accelerator._dataloaders[loaders:]
        trainer.accelerator.even_batches = even  # which those of sentence-transformers set
        if metrics is not None:
            trainer._metrics = metrics


def _targets(inputs: Batch) -> int:
    shifted = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][:, 1:]
    return int((shifted != IGNORE_INDEX).sum())
