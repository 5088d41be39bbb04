"""``audit(trainer)``: what a trainer trains on packed rows against each of its documents alone, by its own loss.

A built trainer -> the first batches of its own dataloader and collator -> the documents that the collator was given,
found again in its rows -> ``compute_loss`` and backward on the batch and on every document alone, with the trainer's
adapters and precision -> a :class:`TrainerReport`. Nothing has to be patched, and nothing is changed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import PackingError, UnsupportedError
from torch_backend.auditing.compare import MOVED, cosine, gradients_error
from torch_backend.auditing.images import alone_with, images_of, is_placeholder
from torch_backend.auditing.ranks import averaged, mean_over, refuse_several_devices
from torch_backend.auditing.scored import ScoredStep, scored_batches
from torch_backend.auditing.trainer_batches import first_batches, pieces_of, places_of
from torch_backend.collate import Batch
from torch_backend.collate.image_tensors import Images
from torch_backend.hf.anatomy.heads import labels_documents, trains_first_token
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.inputs.boundaries import is_packed
from torch_backend.hf.inputs.trl_trainers import kind_of
from torch_backend.hf.patch import context_of
from torch_backend.hf.router import no_router_loss

FLOAT32, HALF = 1e-4, 2e-2  # what figures may be in float32, and where anything is computed in fewer bits
# Keys that say which tokens belong together, of which a document alone has no need.
_MARKS = (
    "position_ids",
    "attention_mask",
    "seq_idx",
    "segment_ids",
    "packed_lengths",
    "packed_documents",
    "packed_parents",
    "packed_images",
    "packed_targets",
)


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

    @property
    def verdict(self) -> str:
        """``exact`` or ``contaminated``."""
        judged = [self.loss, 1 - self.cosine, self.leak]
        if self.tolerance == FLOAT32:
            judged.append(self.gradients)
        noticed = self.moved > max(MOVED, 2 * self.leak)
        return "exact" if all(x <= self.tolerance for x in judged) and noticed else "contaminated"

    def to_json(self) -> str:
        """The verdict and every figure, as a JSON object."""
        return json.dumps({"verdict": self.verdict, **asdict(self)})

    def __str__(self) -> str:
        where = f"{self.dtype} on {self.device}, {self.documents} documents in {self.rows} rows"
        where += f" cut over {self.ranks} ranks" if self.ranks > 1 else ""
        return (
            f"{self.trainer} on {self.model} ({where}): {self.verdict}; loss {self.loss:.1e}, "
            f"gradient cosine {self.cosine:.6f}, worst {self.gradients:.1e} ({self.worst_parameter}), "
            f"leak {self.leak:.1e}, noise {self.noise:.1e}, tolerance {self.tolerance:.0e}"
        )


def audit_trainer(trainer: Any, *, batches: int = 1) -> TrainerReport:
    """Compare what a trainer computes on its own first batches with each of their documents alone.

    Dropout is off and a router's auxiliary loss is left out, because both are defined over the whole batch. Parameters,
    gradients, logged metrics and the random state are as before when it returns. Of DPO, KTO, reward, GRPO and RLOO
    trainers of TRL the padded or packed forwards are compared with forwards of single answers (:mod:`.scored`).
    Under context parallelism every rank of the group calls this and gets the same report; each runs its part of the
    packed batches, and every document alone.

    Args:
        trainer: a ``transformers.Trainer`` or a subclass, before ``train()``; patched or not. One with ``model_init``
            is judged on a model that this makes, because ``train()`` trains such a one.
        batches: how many are compared, each by itself; the report has the worst.

    Raises:
        LayoutError: a document that the collator was given is not in its rows as it was, or it is given rows of
            ``pack_dataset`` without the lengths of their documents.
        PackingError: a batch holds one document only, or nothing is trained in it.
        UnsupportedError: the trainer runs on several devices, but for those of one group of context parallelism, before
            ``train()`` has sharded its model; or it trains a classifier or a masked language model, or its
            rows hold cut documents without boundaries.
    """
    refuse_cut_documents(trainer.args)
    refuse_several_devices(trainer)
    if kind_of(trainer) is None and (labels_documents(trainer.model) or trains_first_token(trainer.model)):
        raise UnsupportedError(
            f"{type(trainer).__name__} trains a classifier or a masked language model, and audit(trainer) judges "
            "losses of next tokens and of answers: audit its model, audit(trainer.model)"
        )
    with torch.random.fork_rng(), _model_of_train(trainer), _as_before(trainer):
        if kind_of(trainer) is not None:
            figures = [ScoredStep(trainer, batch).measure() for batch in scored_batches(trainer, batches)]
        else:
            figures = [_Step(trainer, batch, features).measure() for batch, features in first_batches(trainer, batches)]
        reports = [_report(trainer, found) for found in figures]
    if not reports:
        raise PackingError(
            f"the training data fill no batch of {type(trainer).__name__}: pass more of them, or a smaller batch size"
        )
    return max(reports, key=lambda r: (r.verdict != "exact", r.loss, r.leak))


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


class _Step:
    """One batch of a trainer, and where its documents lie in it."""

    def __init__(self, trainer: Any, batch: Batch, features: list[Any]) -> None:
        self.trainer = trainer
        self.context = context_of(trainer.model)
        self.batch = batch
        self.places = places_of([p for f in features for p in pieces_of(f)], batch["input_ids"].cpu().numpy())
        if len(self.places) < 2:
            raise PackingError("the trainer's first batch holds one document: raise its batch size to audit packing")
        self.images = images_of(features, len(self.places))
        self.alone = [self._alone(*each) for each in zip(self.places, self.images, strict=True)]
        self.targets = [_targets(inputs) for inputs in self.alone]
        if sum(self.targets) == 0:
            raise PackingError(
                "nothing is trained in the trainer's first batch, where all labels are -100: "
                "audit it with documents that have labels"
            )
        _, counted = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
        self.counted = None if counted is None else int(counted)

    def measure(self) -> dict[str, Any]:
        """The figures of a report."""
        truth_loss, truth = self._truth()
        loss, packed = self._run(self.batch, self.counted)
        _, again = self._run(self.batch, self.counted)
        changed = self._changed()
        others, one = self._only(lambda place: place != changed), self._only(lambda place: place == changed)
        _, before = self._run(others, self.counted)
        _, after = self._run({**others, "input_ids": self._replaced(changed)}, self.counted)
        _, own = self._run(one, self.counted)
        _, own_after = self._run({**one, "input_ids": self._replaced(changed)}, self.counted)
        gradients, worst = gradients_error(packed, truth)
        return {
            "documents": len(self.places),
            "rows": len(self.batch["input_ids"]),
            "targets": sum(self.targets),
            "counted": self.counted,
            "loss": abs(loss - truth_loss) / abs(truth_loss),
            "cosine": cosine(packed, truth),
            "gradients": gradients,
            "worst_parameter": worst,
            "leak": gradients_error(after, before)[0],
            "moved": gradients_error(own_after, own)[0],
            "noise": gradients_error(again, packed)[0],
        }

    def _truth(self) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients of the documents one by one, divided by all their targets once."""
        total, divides = sum(self.targets), self._divides()
        loss = 0.0
        gradients: dict[str, Tensor] = {}
        for inputs, targets in zip(self.alone, self.targets, strict=True):
            if targets:
                weight = 1.0 if divides else targets / total
                part, found = self._run(inputs, total, weight)
                loss += part
                gradients |= {name: gradients[name] + g if name in gradients else g for name, g in found.items()}
        return loss, gradients

    def _divides(self) -> bool:
        """Returns whether the trainer divides its loss by the target count it receives, not by its own."""
        inputs = self.alone[int(np.argmax(self.targets))]
        with torch.no_grad():
            once, half = (float(self._loss(inputs, n)) for n in (sum(self.targets), 2 * sum(self.targets)))
        return abs(once - 2 * half) < abs(once - half)

    def _run(self, inputs: Batch, count: int | None, weight: float = 1.0) -> tuple[float, dict[str, Tensor]]:
        model: nn.Module = self.trainer.model
        model.zero_grad(set_to_none=True)
        loss = self._loss(inputs, count) * weight
        loss.backward()
        gradients = {
            name: p.grad.detach().float().clone() for name, p in model.named_parameters() if p.grad is not None
        }
        model.zero_grad(set_to_none=True)
        if self.context is None:
            return float(loss.detach()), gradients
        if is_packed(inputs):  # a part on every rank
            return mean_over(self.context, loss.detach()), averaged(model, gradients, self.context)
        ranks = self.context.ranks  # by which the trainer multiplies a loss that the ranks average
        return float(loss.detach()) / ranks, {name: gradient / ranks for name, gradient in gradients.items()}

    def _loss(self, inputs: Batch, count: int | None) -> Tensor:
        trainer = self.trainer
        counted = None if self.counted is None or count is None else torch.tensor(count, device=trainer.args.device)
        with trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
            loss: Tensor = trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=counted)
        return loss

    def _alone(self, place: tuple[int, slice], images: Images) -> Batch:
        """The document as a batch of its own: every tensor per token, its images, none of the marks."""
        row, tokens = place
        shape = self.batch["input_ids"].shape
        inputs: Batch = {
            name: x[row : row + 1, tokens].clone()
            for name, x in self.batch.items()
            if isinstance(x, Tensor) and x.shape[:2] == shape and name not in _MARKS
        }
        if "shift_labels" in inputs:
            inputs["shift_labels"][:, -1] = IGNORE_INDEX
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return inputs | alone_with(self.trainer.model, inputs["input_ids"], images)

    def _changed(self) -> tuple[int, slice]:
        """A document that others follow in its row: what leaks, leaks forward."""
        rows = [row for row, _ in self.places]
        shared = [place for place in self.places if rows.count(place[0]) > 1] or self.places
        return min(shared, key=lambda place: (place[1].start, place[0]))

    def _only(self, trained: Any) -> Batch:
        """The batch with the labels of the documents that are not ``trained`` taken out."""
        batch = dict(self.batch)
        for name in ("labels", "shift_labels"):
            if isinstance(batch.get(name), Tensor):
                batch[name] = batch[name].clone()
                for row, tokens in self.places:
                    if not trained((row, tokens)):
                        batch[name][row, tokens] = IGNORE_INDEX
        return batch

    def _replaced(self, place: tuple[int, slice]) -> Tensor:
        """The rows with every token of a document exchanged for another one of the batch, but those of its images."""
        ids: Tensor = self.batch["input_ids"].clone()
        kept = is_placeholder(self.trainer.model, ids) if any(self.images) else torch.zeros_like(ids, dtype=torch.bool)
        known, own = torch.unique(ids[~kept]), ids[place[0], place[1]]
        where = torch.searchsorted(known, own)
        other = known[(where + max(len(known) // 2, 1)) % len(known)]
        ids[place[0], place[1]] = torch.where(kept[place[0], place[1]], own, other)
        return ids


def _report(trainer: Any, figures: dict[str, Any]) -> TrainerReport:
    half = _half(trainer)
    return TrainerReport(
        trainer=type(trainer).__name__,
        model=type(causal_lm(trainer.model)).__name__,
        device=trainer.args.device.type,
        dtype=half or "float32",
        tolerance=HALF if half else FLOAT32,
        ranks=1 if (context := context_of(trainer.model)) is None else context.ranks,
        **figures,
    )


def _half(trainer: Any) -> str:
    """The name of the narrower dtype that something is computed in, "" if there is none."""
    mixed = str(getattr(trainer.accelerator, "mixed_precision", "no"))
    if mixed != "no":
        return {"bf16": "bfloat16", "fp16": "float16"}.get(mixed, mixed)
    dtypes = {p.dtype for p in trainer.model.parameters()} - {torch.float32, torch.float64}
    return str(min(dtypes, key=str)).removeprefix("torch.") if dtypes else ""


@contextmanager
def _model_of_train(trainer: Any) -> Iterator[None]:
    """Inside, a trainer has a model as ``train()`` will make it, if it makes one."""
    if getattr(trainer, "model_init", None) is None:
        yield
        return
    before = trainer.model, trainer.model_wrapped
    trainer.model = trainer.model_wrapped = trainer.call_model_init().to(trainer.args.device)
    try:
        yield
    finally:
        trainer.model, trainer.model_wrapped = before


@contextmanager
def _as_before(trainer: Any) -> Iterator[None]:
    """Training mode without dropout and auxiliary losses inside; afterwards model and trainer are as they were."""
    model: nn.Module = trainer.model
    attributes, metrics = dict(trainer.__dict__), copy.deepcopy(getattr(trainer, "_metrics", None))
    loaders = len(trainer.accelerator._dataloaders)
    modes = {module: module.training for module in model.modules()}
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    dropped = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and ("dropout" in name or (name == "p" and "Dropout" in type(module).__name__))
    ]
    try:
        model.train()
        for module, name, _ in dropped:
            setattr(module, name, 0.0)
        if hasattr(trainer, "aux_loss_enabled"):
            trainer.aux_loss_enabled = False
        with no_router_loss(model):
            yield
    finally:
        for module, name, value in dropped:
            setattr(module, name, value)
        for module, mode in modes.items():
            module.training = mode
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        trainer.__dict__.clear()
        trainer.__dict__.update(attributes)
        del trainer.accelerator._dataloaders[loaders:]
        if metrics is not None:
            trainer._metrics = metrics


def _targets(inputs: Batch) -> int:
    shifted = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][:, 1:]
    return int((shifted != IGNORE_INDEX).sum())
