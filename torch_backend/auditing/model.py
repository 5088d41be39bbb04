"""``audit(model)``: packed against every document alone, and one document changed while the others are watched.

A trainer is audited on its own batches, see :mod:`torch_backend.auditing.trainer`.

A model -> a tiny random clone of the same kind on the same device, in the same dtype, with the same implementation ->
the same documents run packed and one by one -> an :class:`AuditReport`. The clone has every layer kind, head width and
window kind of the model, and the documents cross its windows, chunks and original positions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, overload

import torch
from torch import Tensor, nn

from packing_core.errors import ContaminationError, UnsupportedModelError
from torch_backend.auditing.tiny import tiny_config, tiny_model
from torch_backend.collate import PackedCollator
from torch_backend.hf.attention import unregistered
from torch_backend.hf.patch import Patched, causal_lm, install, state_of
from torch_backend.losses.cross_entropy import next_token_targets, packed_cross_entropy

if TYPE_CHECKING:
    from torch_backend.auditing.trainer import TrainerReport

# Two rows of at most 64 tokens; the second is padded. Some are beyond every limit of the tiny config.
LENGTHS = (5, 19, 33, 7, 40, 1, 2, 18)
CAPACITY = 64
FIRST_TOKEN, LAST_TOKEN = 4, 90  # tokens that mean nothing special in a tiny model's vocabulary
CHANGED = 2  # the document of which the perturbation probe replaces every token
TOLERANCE = 1e-4
LEAK = 0.02  # at most what rounding may do to the others; a leak of a whole document moves them by their own size
MOVED = 0.1


_verdicts: dict[tuple[Any, ...], AuditReport] = {}


class HasComputeLoss(Protocol):
    """What makes an object a trainer here; ``transformers.Trainer`` and its subclasses have it."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class AuditReport:
    """What was measured; every figure is max error / max |reference|.

    Attributes:
        model, implementation, device, dtype: what was audited; route: how its segments travel.
        logits: packed against alone, worst over documents.
        loss: of the packed loss against the mean over the targets of all documents.
        gradients: worst over parameters, worst_parameter: its name.
        leak: how far other documents moved when every token of one was replaced.
        moved: how far that document itself moved; the probe is void unless it did.
        noise: how far the packed run moves when it is simply repeated.
        tolerance: what logits, loss, gradients and leak may be: 1e-4, and below float32 twice what the dtype itself
            costs the same documents when they run alone.
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
    refused: str | None = None

    @property
    def verdict(self) -> str:
        """``exact``, ``contaminated`` or ``refused``."""
        if self.refused is not None:
            return "refused"
        equal = max(self.logits, self.loss, self.gradients) <= self.tolerance
        apart = self.leak <= min(self.tolerance, LEAK) and self.moved > MOVED
        return "exact" if equal and apart else "contaminated"

    def to_json(self) -> str:
        return json.dumps({"verdict": self.verdict, **asdict(self)})

    def __str__(self) -> str:
        name = f"{self.model} ({self.implementation}, {self.dtype} on {self.device})"
        if self.refused is not None:
            return f"{name}: refused, {self.refused}"
        return (
            f"{name}: {self.verdict}; logits {self.logits:.1e}, loss {self.loss:.1e}, gradients {self.gradients:.1e} "
            f"({self.worst_parameter}), leak {self.leak:.1e}, noise {self.noise:.1e}, tolerance {self.tolerance:.0e}"
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
        model: a transformers causal language model or a wrapper of one; it is not touched. If it is patched, the clone
            is patched with the same implementation. Or a trainer, judged as it is on its own batches; it need not be
            patched, and the other arguments do not apply (see :mod:`torch_backend.auditing.trainer`).
        implementation: of attention; that of ``model``'s patch if None, or "auto".
        tolerance: what errors may be, relative to the largest reference value.

    Raises:
        UnsupportedModelError: no tiny clone can be made of the model.
        PackingError: the trainer's batches cannot be judged.
    """
    if not isinstance(model, nn.Module):
        from torch_backend.auditing.trainer import audit_trainer

        return audit_trainer(model)
    root = causal_lm(model)
    state = state_of(root)
    if implementation is None:
        implementation = state.implementation if state is not None else "auto"
    parameter = next(p for p in root.parameters() if p.is_floating_point())
    dtype, device = parameter.dtype, parameter.device
    about = {
        "model": type(root).__name__,
        "implementation": implementation if isinstance(implementation, str) else "/".join(implementation),
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
    }
    try:
        about["route"] = Patched(root, implementation).route
    except UnsupportedModelError as refusal:
        return AuditReport(**about, refused=str(refusal))
    with full_float32():
        clone = _clone(root).to(device).train()
        documents = _documents(clone)
        exact = _alone(clone, documents)
        clone.to(dtype)
        alone = exact if dtype == torch.float32 else _alone(clone, documents)
        try:
            install(clone, implementation)
            packed = _packed(clone, documents)
            with torch.no_grad():
                again = _packed(clone, documents)
                probe = _packed(clone, [_replaced(clone, d) if i == CHANGED else d for i, d in enumerate(documents)])
        except UnsupportedModelError as refusal:
            return AuditReport(**about, refused=str(refusal))
    logits, loss, gradients, worst = _compare(packed, exact)
    moves = [relative_error(p, b) for p, b in zip(probe.logits, packed.logits, strict=True)]
    return AuditReport(
        **about,
        logits=logits,
        loss=loss,
        gradients=gradients,
        worst_parameter=worst,
        leak=max(move for i, move in enumerate(moves) if i != CHANGED),
        moved=moves[CHANGED],
        noise=max(relative_error(b, a) for b, a in zip(again.logits, packed.logits, strict=True)),
        tolerance=max(TOLERANCE, 2 * max(_compare(alone, exact)[:3])) if tolerance is None else tolerance,
    )


def verify(model: nn.Module, implementation: str | Sequence[str]) -> AuditReport:
    """The report on models of this kind when they are patched, which is exact; measured once per kind and process.

    Raises:
        UnsupportedModelError: the patch refuses the model.
        ContaminationError: the patched clone is not exact.
    """
    root = causal_lm(model)
    parameter = next(p for p in root.parameters() if p.is_floating_point())
    kind = (type(root), root.config.to_json_string(), str(implementation), parameter.device.type, parameter.dtype)
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


@dataclass(frozen=True)
class _Run:
    logits: list[Tensor]  # per document [L, V]
    loss: Tensor
    gradients: dict[str, Tensor]


def _compare(got: _Run, want: _Run) -> tuple[float, float, float, str]:
    """Errors of logits, loss and gradients, and the parameter with the worst gradient."""
    scale = max(float(g.abs().max()) for g in want.gradients.values())
    errors = {name: relative_error(got.gradients.get(name), value, scale) for name, value in want.gradients.items()}
    worst = max(errors, key=lambda name: errors[name])
    logits = max(relative_error(g, w) for g, w in zip(got.logits, want.logits, strict=True))
    return logits, relative_error(got.loss, want.loss), errors[worst], worst


def _clone(root: Any) -> Any:
    try:
        config = tiny_config(root.config)
        config._attn_implementation = unregistered(root.config._attn_implementation)
        return tiny_model(config, type(root))
    except Exception as error:
        raise UnsupportedModelError(
            f"no tiny clone of {type(root).__name__} can be made to prove it on ({type(error).__name__}: {error}): "
            "pass verify=False to patch it without proof"
        ) from error


def _tokens(model: Any) -> tuple[int, int]:
    """The first token that documents use, and the one after the last."""
    vocabulary = model.get_input_embeddings().num_embeddings
    return min(FIRST_TOKEN, vocabulary // 2), min(LAST_TOKEN, vocabulary)


def _documents(model: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    documents = [torch.randint(*_tokens(model), (length,), generator=generator) for length in LENGTHS]
    return [document.to(model.get_input_embeddings().weight.device) for document in documents]


def _replaced(model: Any, document: Tensor) -> Tensor:
    first, end = _tokens(model)
    return (document - first + (end - first) // 2) % (end - first) + first


def _alone(model: Any, documents: list[Tensor]) -> _Run:
    logits = [model(input_ids=document[None]).logits for document in documents]
    pairs = [packed_cross_entropy(x, next_token_targets(d[None])) for x, d in zip(logits, documents, strict=True)]
    loss = torch.stack([loss_sum for loss_sum, _ in pairs]).sum() / torch.stack([weight for _, weight in pairs]).sum()
    return _run(model, [x[0] for x in logits], loss)


def _packed(model: Any, documents: list[Tensor]) -> _Run:
    collate = PackedCollator(capacity=CAPACITY, strategy="sequential")
    batch = collate([{"input_ids": document.cpu()} for document in documents])
    output = model(**{k: v.to(documents[0].device) if isinstance(v, Tensor) else v for k, v in batch.items()})
    logits = torch.split(output.logits.flatten(0, 1), list(batch["packed_lengths"]))
    return _run(model, list(logits[: len(documents)]), output.loss)


def _run(model: nn.Module, logits: list[Tensor], loss: Tensor) -> _Run:
    if loss.requires_grad:
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return _Run([x.detach().float() for x in logits], loss.detach(), gradients)


def relative_error(got: Tensor | None, want: Tensor, scale: float = 0.0) -> float:
    """max |got - want| / max |want|; a parameter with next to no gradient is measured against the others' scale."""
    if got is None or not bool(torch.isfinite(got).all()):
        return float("inf")
    largest = max(float(want.abs().max()), 1e-3 * scale)
    return float((got.double() - want.double()).abs().max()) / max(largest, torch.finfo(torch.float32).tiny)
