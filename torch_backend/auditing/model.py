"""``audit(model)``: packed documents against each document alone, and a probe that changes some of them.

A model -> a tiny random clone of the same kind on the same device, in the same dtype, as it is or patched -> the same
documents run packed and one by one (:mod:`.proof`) -> an :class:`AuditReport`. The clone has every layer kind, head
width and window kind of the model, and the documents cross its windows, chunks and original positions. Dropout is off,
and so is a router's auxiliary loss: it is a statistic of all tokens, reported by itself.

A trainer is audited on its own batches, see :mod:`torch_backend.auditing.trainer`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, overload

import torch
from torch import nn

from packing_core.errors import ContaminationError, PackingError, UnsupportedModelError, first_line
from torch_backend.auditing.compare import MOVED
from torch_backend.auditing.proof import CUT, LONG, SHORT, RowLayout, measure, measure_itself
from torch_backend.auditing.tiny import tiny_config, tiny_model
from torch_backend.hf.anatomy.additions import additions
from torch_backend.hf.anatomy.heads import head_of
from torch_backend.hf.anatomy.model import anatomy_of
from torch_backend.hf.anatomy.placement import execution_device
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.attention import stands_over, unregistered
from torch_backend.hf.patch import Patched, context_of, install, state_of, unpatch

if TYPE_CHECKING:
    from torch_backend.auditing.trainer import TrainerReport

# What was audited, in words.
AS_IT_IS, PATCHED, ONCE_PATCHED = "as it is", "patched", "once patched"

_verdicts: dict[tuple[Any, ...], AuditReport] = {}


class HasComputeLoss(Protocol):
    """Protocol of trainers here; ``transformers.Trainer`` and its subclasses satisfy it."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class AuditReport:
    """Figures of an audit; each is max error / max |reference|.

    Attributes:
        model, implementation, device, dtype: what was audited; route: how its segments travel, if patched.
        audited: "as it is", which is unpatched, on rows with restarting ``position_ids``; "patched"; or "once patched"
            of an unpatched model whose clone was patched for the audit.
        logits: packed against alone, worst over documents; of a model without a head, its last hidden states.
        loss: of the packed loss against the mean over the targets of all documents.
        gradients: of the parameter that is worst by what its own may be, worst_parameter: its name.
        leak: how far documents moved when every token of the documents beside them was replaced.
        gradient_leak: how far the gradients of their loss moved.
        moved: how far the replaced documents moved, at least; the probe is void unless they did.
        noise: how far the packed run moves when it is simply repeated.
        allowed_logits, allowed_loss, allowed_gradients: twice what rounding does to the same documents when they run
            alone (in float32: every weight exchanged for the next number), and a floor of 16 epsilons of float32, or of
            one epsilon of a narrower dtype. A parameter's rounding is its own, its floor is of the largest gradient.
        allowed_leak, allowed_gradient_leak: twice the noise; where rounding depends on the other tokens of a batch, as
            in experts, also twice what it does among rows that cannot see each other.
        router_loss: how far padding moves a router's auxiliary loss; None if the model's config does not ask for this
            loss. It is no part of the verdict.
        refused: why the model was refused, None if it was not.
        ranks: over how many ranks the packed documents were cut; 1 where each lies on one.
        additions: modules, hooks and forwards that the model's config does not make. A clone has none of them, so a
            short row ran through the model itself as well; its figures stand here where they are larger than allowed.
    """

    model: str
    implementation: str
    device: str
    dtype: str
    route: str = ""
    audited: str = PATCHED
    logits: float = float("nan")
    loss: float = float("nan")
    gradients: float = float("nan")
    worst_parameter: str = ""
    leak: float = float("nan")
    gradient_leak: float = float("nan")
    moved: float = float("nan")
    noise: float = float("nan")
    allowed_logits: float = float("nan")
    allowed_loss: float = float("nan")
    allowed_gradients: float = float("nan")
    allowed_leak: float = float("nan")
    allowed_gradient_leak: float = float("nan")
    router_loss: float | None = None
    refused: str | None = None
    ranks: int = 1
    additions: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """``exact``, ``contaminated`` or ``refused``."""
        if self.refused is not None:
            return "refused"
        equal = all(found <= allowed for found, allowed in self._judged.values())
        return "exact" if equal and self.moved > max(MOVED, 2 * self.leak) else "contaminated"

    @property
    def _judged(self) -> dict[str, tuple[float, float]]:
        names = "logits", "loss", "gradients", "leak", "gradient_leak"
        return {name: (getattr(self, name), getattr(self, f"allowed_{name}")) for name in names}

    def to_json(self) -> str:
        """The verdict and every figure, as a JSON object."""
        return json.dumps({"verdict": self.verdict, **asdict(self)})

    def __str__(self) -> str:
        over = f", documents cut over {self.ranks} ranks" if self.ranks > 1 else ""
        name = f"{self.model} {self.audited} ({self.implementation}, {self.dtype} on {self.device}{over})"
        if self.refused is not None:
            return f"{name}: refused, {self.refused}"
        figures = ", ".join(
            f"{name.replace('_', ' ')} {found:.1e} of {allowed:.0e}" for name, (found, allowed) in self._judged.items()
        )
        router = "" if self.router_loss is None else f"; router loss, not judged: {self.router_loss:.1e}"
        return (
            f"{name}: {self.verdict}; {figures} allowed, noise {self.noise:.1e}, worst gradient "
            f"{self.worst_parameter}{router}"
        )


@overload
def audit(
    model: nn.Module,
    *,
    patched: bool | None = None,
    implementation: str | Sequence[str] | None = None,
    tolerance: float | None = None,
    mesh: Any = None,
) -> AuditReport: ...


@overload
def audit(model: HasComputeLoss) -> TrainerReport: ...


def audit(
    model: Any,
    *,
    patched: bool | None = None,
    implementation: str | Sequence[str] | None = None,
    tolerance: float | None = None,
    mesh: Any = None,
) -> AuditReport | TrainerReport:
    """Measure whether documents that are packed together see each other.

    Args:
        model: a transformers model or a wrapper of one; it is not touched. Or a trainer, judged as it is on its own
            batches with the model that it will train; it need not be patched, and the other arguments do not apply (see
            :mod:`torch_backend.auditing.trainer`).
        patched: None judges a patched model as patched, and any other as it is, on rows with restarting
            ``position_ids`` and no other mark. True judges what :func:`torch_backend.patch` would make of it, and False
            what it was before. The report's ``audited`` says which it was.
        implementation: of a patched model's attention; that of ``model``'s patch if None, or "auto".
        tolerance: what every error may be, relative to the largest reference value, instead of what rounding allows.
        mesh: of a model that is judged patched, the ranks over which its documents are cut, as in
            :func:`torch_backend.patch`; those of ``model``'s patch if None. All of them call this, compare documents
            that lie on several ranks with each document alone, and get the same report.

    Raises:
        UnsupportedModelError: no tiny clone can be made of the model, or something was added to it after it was
            patched, which packed batches refuse until it is patched again.
        PackingError: ``implementation`` is given for a model that is judged unpatched, or the trainer's batches cannot
            be judged.
    """
    if hasattr(model, "compute_loss"):
        from torch_backend.auditing.trainer import audit_trainer

        return audit_trainer(model)
    root = causal_lm(model)
    context = context_of(root) if patched is not False else None
    options: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
    if context is not None:
        options = {"mesh": context.mesh, "context_method": context.method} | options
    report = _audit(root, patched, implementation, tolerance, CUT if options else LONG, options)
    return _with_additions(root, report, implementation or report.implementation, options)


def _audit(
    root: Any,
    patched: bool | None,
    implementation: str | Sequence[str] | None,
    tolerance: float | None,
    rows: RowLayout,
    context: Mapping[str, Any] = MappingProxyType({}),
) -> AuditReport:
    """The report on a clone, patched with the options of context parallelism, if any."""
    state = state_of(root)
    if patched is None:
        patched = state is not None or bool(context)
    if context and not patched:
        raise PackingError("mesh cuts the documents of patched models: leave patched=False out")
    if implementation is not None and not patched:
        raise PackingError(
            f"implementation={implementation!r} is an attention of patched models, and {type(root).__name__} is judged "
            "as it is: pass patched=True to judge what crosspack.patch would make of it"
        )
    if implementation is None:
        implementation = state.implementation if state is not None else "auto"
    dtype, device = _dtype(root), execution_device(root)
    about: dict[str, Any] = {
        "model": type(root).__name__,
        "implementation": implementation if isinstance(implementation, str) else "/".join(implementation),
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "ranks": context["mesh"].size() if context else 1,
        "audited": AS_IT_IS if not patched else ONCE_PATCHED if state is None else PATCHED,
    }
    if not patched:
        about["implementation"] = unregistered(root.config._attn_implementation) or "its own attention"
        if head_of(root) == "document":
            return AuditReport(**about, refused="it gives one output per row, however many documents the row holds")
    else:
        try:
            about["route"] = Patched(anatomy_of(root), implementation).anatomy.route
        except UnsupportedModelError as refusal:
            return AuditReport(**about, refused=str(refusal))
    with torch.inference_mode(False), torch.enable_grad(), full_float32():  # whatever the caller's mode is
        clone = _clone(root, max(rows.lengths), patched=patched).to(device).train()
        patch = (lambda model: install(model, implementation, **context)) if patched else None
        try:
            return AuditReport(**about, **measure(clone, dtype, rows, tolerance, patch))
        except UnsupportedModelError as refusal:
            return AuditReport(**about, refused=str(refusal))
        except Exception as error:  # stock models may raise anything for packed rows; what they say is the result
            if patched:
                raise
            return AuditReport(**about, refused=f"it raises {type(error).__name__}: {first_line(error)}")


def _with_additions(
    root: Any, report: AuditReport, implementation: str | Sequence[str], context: Mapping[str, Any]
) -> AuditReport:
    """The report with the figures of the model itself, where it holds what no clone has."""
    added = additions(root)
    if report.refused is not None or not added:
        return report
    if report.audited != ONCE_PATCHED:
        return _joined(report, added, _itself(root, added, marked=report.audited == PATCHED))
    install(root, implementation, **context)
    try:
        return _joined(report, added, _itself(root, added, marked=True))
    finally:
        unpatch(root)


def _joined(report: AuditReport, added: Mapping[str, nn.Module], figures: dict[str, Any]) -> AuditReport:
    report = replace(report, additions=tuple(added))
    if figures["leak"] > figures["allowed_leak"] or figures["logits"] > figures["allowed_logits"]:
        return replace(report, **figures)
    return report


def _itself(root: Any, added: Mapping[str, nn.Module], *, marked: bool) -> dict[str, Any]:
    try:
        with torch.inference_mode(False), full_float32():
            return measure_itself(root, added.values(), marked=marked)
    except PackingError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(root).__name__} holds {listed(added)}, and does not run on a short packed row to prove it "
            f"({type(error).__name__}: {first_line(error)}): pass verify=False to patch it without proof"
        ) from error


def verify_additions(model: nn.Module) -> None:
    """Prove what was added to a patched model on the model itself: no clone has it.

    Raises:
        ContaminationError: its packed documents see each other, or are not what they are alone.
        UnsupportedModelError: it does not run on a short packed row.
    """
    root = causal_lm(model)
    added = additions(root)
    if not added or execution_device(root).type == "meta":
        return
    found = _itself(root, added, marked=True)
    if (state := state_of(root)) is not None:
        state.accept_additions()  # the packed calls of the proof do not count
    if found["leak"] > found["allowed_leak"]:
        raise ContaminationError(
            f"packed documents see each other in {type(root).__name__}: they moved by {found['leak']:.1e} when those "
            f"beside them were replaced. It holds {listed(added)}: each must compute a token from tokens of its own "
            "document alone, or leave it out"
        )
    if found["logits"] > found["allowed_logits"]:
        raise ContaminationError(
            f"packed documents are not what they are alone in {type(root).__name__}: they are off by "
            f"{found['logits']:.1e}. It holds {listed(added)}: each must take positions from the batch, not from the "
            "row, or leave it out"
        )


def listed(added: Mapping[str, nn.Module]) -> str:
    """Names what was added to a model."""
    names = list(added)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


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
        _verdicts[kind] = _audit(root, True, implementation, None, SHORT)
    report = _verdicts[kind]
    if report.verdict == "refused":
        raise UnsupportedModelError(str(report.refused))
    if report.verdict != "exact":
        raise ContaminationError(f"packed documents see each other: {report}")
    return report


@contextmanager
def full_float32() -> Iterator[None]:
    """Inside, float32 products on a GPU are not rounded to TensorFloat-32, even if the process allows it."""
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


def _clone(root: Any, positions: int, *, patched: bool) -> Any:
    try:
        config = tiny_config(root.config, positions=positions)
        name = root.config._attn_implementation
        config._attn_implementation = stands_over(root.config) if patched else unregistered(name)
        return tiny_model(config, type(root))
    except Exception as error:
        raise UnsupportedModelError(
            f"no tiny clone of {type(root).__name__} can be made to prove it on ({type(error).__name__}: {error}): "
            "pass verify=False to patch it without proof"
        ) from error


def _dtype(root: nn.Module) -> torch.dtype:
    return next(p.dtype for p in root.parameters() if p.is_floating_point())
