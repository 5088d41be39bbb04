"""``audit(model)``: packed documents against each document alone, and a probe that changes one of them.

A model -> a tiny random clone of the same kind on the same device, in the same dtype, with the same implementation ->
the same documents run packed and one by one -> an :class:`AuditReport`. The clone has every layer kind, head width and
window kind of the model, and the documents cross its windows, chunks and original positions. Dropout is off, and so is
a router's auxiliary loss: it is a statistic of all tokens, reported by itself.

A trainer is audited on its own batches, see :mod:`torch_backend.auditing.trainer`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, overload

import torch
from torch import Tensor, nn

from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import ContaminationError, UnsupportedModelError
from torch_backend.auditing.compare import (
    MOVED,
    Run,
    gradients_error,
    labels_of,
    next_token_loss,
    outputs_error,
    random_documents,
    relative_error,
    replaced,
    run,
)
from torch_backend.auditing.tiny import tiny_config, tiny_model
from torch_backend.collate import PackedCollator
from torch_backend.hf.anatomy.heads import head_of
from torch_backend.hf.anatomy.model import anatomy_of
from torch_backend.hf.anatomy.placement import execution_device
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.attention import stands_over
from torch_backend.hf.patch import Patched, install, state_of
from torch_backend.hf.router import asks_for_router_loss, no_router_loss
from torch_backend.losses.cross_entropy import packed_cross_entropy

if TYPE_CHECKING:
    from torch_backend.auditing.trainer import TrainerReport

# Two rows of at most 64 tokens; the second is padded. Some are beyond every limit of the tiny config.
LENGTHS = (5, 19, 33, 7, 40, 1, 2, 18)
CAPACITY = 64
CHANGED = 2  # the document whose tokens the probe replaces
TOLERANCE = 1e-4
LEAK = 0.02  # at most what rounding may do to the others; a leak of a whole document moves them by their own size


_verdicts: dict[tuple[Any, ...], AuditReport] = {}


class HasComputeLoss(Protocol):
    """What makes an object a trainer here; ``transformers.Trainer`` and its subclasses have it."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class AuditReport:
    """What was measured; every figure is max error / max |reference|.

    Attributes:
        model, implementation, device, dtype: what was audited; route: how its segments travel.
        logits: packed against alone, worst over documents; of a model without a head, its last hidden states.
        loss: of the packed loss against the mean over the targets of all documents.
        gradients: worst over parameters, worst_parameter: its name.
        leak: how far other documents moved when every token of one was replaced.
        moved: how far that document itself moved; the probe is void unless it did.
        noise: how far the packed run moves when it is simply repeated.
        tolerance: what logits, loss, gradients and leak may be: 1e-4, and below float32 twice what the dtype itself
            costs the same documents when they run alone.
        router_loss: how far padding moves a router's auxiliary loss; None if the model's config does not ask for this
            loss. It is no part of the verdict.
        refused: why the model was refused, None if it was not.
    """

    model: str
    implementation: str
    device: str
    dtype: str
    route: str = ""
    logits: float = float("nan")
    loss: float = float("nan")
    gradients: float = float("nan")
    worst_parameter: str = ""
    leak: float = float("nan")
    moved: float = float("nan")
    noise: float = float("nan")
    tolerance: float = float("nan")
    router_loss: float | None = None
    refused: str | None = None

    @property
    def verdict(self) -> str:
        """``exact``, ``contaminated`` or ``refused``."""
        if self.refused is not None:
            return "refused"
        equal = max(self.logits, self.loss, self.gradients) <= self.tolerance
        isolated = self.leak <= min(self.tolerance, LEAK) and self.moved > max(MOVED, 2 * self.leak)
        return "exact" if equal and isolated else "contaminated"

    def to_json(self) -> str:
        """The verdict and every figure, as a JSON object."""
        return json.dumps({"verdict": self.verdict, **asdict(self)})

    def __str__(self) -> str:
        name = f"{self.model} ({self.implementation}, {self.dtype} on {self.device})"
        if self.refused is not None:
            return f"{name}: refused, {self.refused}"
        router = "" if self.router_loss is None else f"; router loss, not judged: {self.router_loss:.1e}"
        return (
            f"{name}: {self.verdict}; logits {self.logits:.1e}, loss {self.loss:.1e}, gradients {self.gradients:.1e} "
            f"({self.worst_parameter}), leak {self.leak:.1e}, noise {self.noise:.1e}, tolerance {self.tolerance:.0e}"
            f"{router}"
        )


@overload
def audit(
    model: nn.Module, *, implementation: str | Sequence[str] | None = None, tolerance: float | None = None
) -> AuditReport: ...


@overload
def audit(model: HasComputeLoss) -> TrainerReport: ...


def audit(
    model: Any, *, implementation: str | Sequence[str] | None = None, tolerance: float | None = None
) -> AuditReport | TrainerReport:
    """Measure whether documents that are packed together see each other.

    Args:
        model: a transformers model or a wrapper of one; it is not touched. If it is patched, the clone is patched with
            the same implementation. Or a trainer, judged as it is on its own batches; it need not be patched, and the
            other arguments do not apply (see :mod:`torch_backend.auditing.trainer`).
        implementation: of attention; that of ``model``'s patch if None, or "auto".
        tolerance: what errors may be, relative to the largest reference value.

    Raises:
        UnsupportedModelError: no tiny clone can be made of the model.
        PackingError: the trainer's batches cannot be judged.
    """
    if hasattr(model, "compute_loss"):
        from torch_backend.auditing.trainer import audit_trainer

        return audit_trainer(model)
    root = causal_lm(model)
    state = state_of(root)
    if implementation is None:
        implementation = state.implementation if state is not None else "auto"
    dtype, device = _dtype(root), execution_device(root)
    about: dict[str, Any] = {
        "model": type(root).__name__,
        "implementation": implementation if isinstance(implementation, str) else "/".join(implementation),
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
    }
    try:
        about["route"] = Patched(anatomy_of(root), implementation).anatomy.route
    except UnsupportedModelError as refusal:
        return AuditReport(**about, refused=str(refusal))
    with torch.inference_mode(False), torch.enable_grad(), full_float32():  # whatever the caller's mode is
        clone = _clone(root).to(device).train()
        try:
            return AuditReport(**about, **_measure(clone, dtype, implementation, tolerance))
        except UnsupportedModelError as refusal:
            return AuditReport(**about, refused=str(refusal))


def verify(model: nn.Module, implementation: str | Sequence[str]) -> AuditReport:
    """The report on models of this kind when they are patched, which is exact; measured once per kind and process.

    Raises:
        UnsupportedModelError: the patch refuses the model.
        ContaminationError: the patched clone is not exact.
    """
    root = causal_lm(model)
    where = execution_device(root).type, _dtype(root)
    kind = (type(root), root.config.to_json_string(), str(implementation), *where)
    if kind not in _verdicts:
        _verdicts[kind] = audit(root, implementation=implementation)
    report = _verdicts[kind]
    if report.verdict == "refused":
        raise UnsupportedModelError(str(report.refused))
    if report.verdict != "exact":
        raise ContaminationError(f"packed documents see each other: {report}")
    return report


@contextmanager
def full_float32() -> Iterator[None]:
    """Inside, float32 products on a GPU are not rounded to TensorFloat-32, whatever the process has allowed."""
    backends: Any = torch.backends
    products = (backends.cuda.matmul, backends.cudnn.conv)
    before = [product.fp32_precision for product in products]
    try:
        for product in products:
            product.fp32_precision = "ieee"
        yield
    finally:
        for product, precision in zip(products, before, strict=True):
            product.fp32_precision = precision


def _clone(root: Any) -> Any:
    try:
        config = tiny_config(root.config)
        config._attn_implementation = stands_over(root.config)
        return tiny_model(config, type(root))
    except Exception as error:
        raise UnsupportedModelError(
            f"no tiny clone of {type(root).__name__} can be made to prove it on ({type(error).__name__}: {error}): "
            "pass verify=False to patch it without proof"
        ) from error


def _dtype(root: nn.Module) -> torch.dtype:
    return next(p.dtype for p in root.parameters() if p.is_floating_point())


def _measure(
    clone: Any, dtype: torch.dtype, implementation: str | Sequence[str], tolerance: float | None
) -> dict[str, Any]:
    """The figures of a report, from an unpatched clone in float32."""
    with no_router_loss(clone):
        proof = _Proof(clone)
        exact = proof.alone()
        clone.to(dtype)
        alone = exact if dtype == torch.float32 else proof.alone()
        install(clone, implementation)
        packed = proof.packed()
        with torch.no_grad():
            again, probe = proof.packed(), proof.packed(changed=CHANGED)
    logits, loss, gradients, worst = _errors(packed, exact)
    moves = [relative_error(p, b) for p, b in zip(probe.outputs, packed.outputs, strict=True)]
    return {
        "logits": logits,
        "loss": loss,
        "gradients": gradients,
        "worst_parameter": worst,
        "leak": max(move for i, move in enumerate(moves) if i != CHANGED),
        "moved": moves[CHANGED],
        "noise": outputs_error(again, packed),
        "tolerance": max(TOLERANCE, 2 * max(_errors(alone, exact)[:3])) if tolerance is None else tolerance,
        "router_loss": proof.router_error() if asks_for_router_loss(clone, {}) else None,
    }


def _errors(got: Run, want: Run) -> tuple[float, float, float, str]:
    """Of outputs, loss and gradients, and the parameter with the worst gradient."""
    return (
        outputs_error(got, want),
        relative_error(got.loss, want.loss),
        *gradients_error(got.gradients, want.gradients),
    )


class _Proof:
    """The same documents through one model: each alone, or packed. What is compared depends on the model's head."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.head = head_of(model)
        self.documents = random_documents(model, LENGTHS)
        self.labels = labels_of(model, self.head, self.documents)

    def alone(self) -> Run:
        if self.head == "document":
            pairs = zip(self.documents, self.labels, strict=True)
            found = [self.model(input_ids=document[None], labels=label[None]) for document, label in pairs]
            return run(self.model, [x.logits[0] for x in found], torch.stack([x.loss for x in found]).mean())
        outputs = [self._outputs(self.model(input_ids=document[None]))[0] for document in self.documents]
        return run(self.model, outputs, self._loss(outputs))

    def packed(self, changed: int | None = None) -> Run:
        """In two rows, of which the second ends in padding; with every token of document ``changed`` replaced."""
        documents = [replaced(self.model, d) if i == changed else d for i, d in enumerate(self.documents)]
        batch = self._batch(documents, CAPACITY)
        output = self.model(**batch)
        if self.head == "document":
            return run(self.model, list(output.logits), output.loss)
        outputs = list(self._outputs(output).flatten(0, 1).split(batch["packed_lengths"])[: len(documents)])
        return run(self.model, outputs, self._loss(outputs) if self.head == "hidden states" else output.loss)

    @torch.no_grad()
    def router_error(self) -> float:
        """How far padding moves the auxiliary loss."""
        batches = [self._batch(self.documents, capacity) for capacity in (CAPACITY, None)]
        for batch in batches:
            batch["attention_mask"] = _laid_out([torch.ones_like(d) for d in self.documents], batch, 0)
        padded, unpadded = (self.model(**batch).aux_loss for batch in batches)
        return relative_error(padded, unpadded)

    def _outputs(self, output: Any) -> Tensor:
        found: Tensor = output.last_hidden_state if self.head == "hidden states" else output.logits
        return found

    def _loss(self, outputs: list[Tensor]) -> Tensor:
        """The mean over the targets of all documents, or something that depends on every hidden state."""
        if self.head == "next token":
            return next_token_loss(outputs, self.documents)
        if self.head in ("token", "masked token"):
            loss, weight = packed_cross_entropy(torch.cat(outputs), torch.cat(self.labels))
            return loss / weight
        direction = torch.randn(outputs[0].shape[-1], generator=torch.Generator().manual_seed(11))
        return (torch.cat(outputs).float() @ direction.to(outputs[0].device)).square().mean()

    def _batch(self, documents: list[Tensor], capacity: int | None) -> dict[str, Any]:
        collate = PackedCollator(capacity=capacity, strategy="sequential")
        batch = collate([{"input_ids": document.cpu()} for document in documents])
        batch = {name: x.to(documents[0].device) if isinstance(x, Tensor) else x for name, x in batch.items()}
        if self.head == "hidden states":
            del batch["labels"]
        elif self.head == "document":
            batch["labels"] = torch.stack(self.labels)
        elif self.head != "next token":
            batch["labels"] = _laid_out(self.labels, batch, IGNORE_INDEX)
        return batch


def _laid_out(values: list[Tensor], batch: dict[str, Any], padding: int) -> Tensor:
    """[B, S]: the values [L] of each document where the document stands. Padding is at the end of the last row."""
    rows = torch.full_like(batch["input_ids"], padding)
    flat = torch.cat(values)
    rows.view(-1)[: len(flat)] = flat
    return rows
