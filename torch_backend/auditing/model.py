"""``audit(model)``: packed documents against each document alone, and a probe that changes some of them.

A model -> a tiny random clone of the same kind on the same device, in the same dtype, as it is or patched -> the same
documents run packed and one by one (:mod:`.probe`) -> an :class:`AuditReport`. The clone has every layer kind, head
width and window kind of the model, and the documents cross its windows, chunks and original positions. Dropout is off,
and so is a router's auxiliary loss: it is a statistic of all tokens, reported by itself.

A trainer is audited on its own batches, see :mod:`torch_backend.auditing.trainer`.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, overload

import torch
from torch import nn

from packing_core.budget import noticed
from packing_core.errors import ContaminationError, PackingError, UnsupportedModelError, first_line
from packing_core.hints import hinted
from torch_backend.auditing.fingerprint import dtype_of, fingerprint
from torch_backend.auditing.itself import measure_itself
from torch_backend.auditing.probe import CUT, LONG, SHORT, RowLayout, measure
from torch_backend.auditing.tiny import ROOM, tiny_config, tiny_model
from torch_backend.hf.anatomy.additions import Part, added_objects, additions, parts_of
from torch_backend.hf.anatomy.heads import head_of
from torch_backend.hf.anatomy.model import anatomy_of
from torch_backend.hf.anatomy.structure import causal_lm, execution_device, torch_defaults, with_values
from torch_backend.hf.attention import stands_over, unregistered
from torch_backend.hf.float8 import describe_float8
from torch_backend.hf.override import original_class
from torch_backend.hf.patch import context_of, install, state_of, unpatch
from torch_backend.hf.patched import Patched

if TYPE_CHECKING:
    from torch_backend.auditing.trainer import TrainerReport

# What was audited, in words.
AS_IT_IS, PATCHED, ONCE_PATCHED = "as it is", "patched", "once patched"
JUDGED = ("logits", "loss", "gradients", "leak", "gradient_leak")

_verdicts: dict[Hashable, AuditReport] = {}
_own_parts: dict[Hashable, frozenset[Part]] = {}


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
        gradients: of the parameter that comes worst off against its own allowance; worst_parameter: its name.
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
        products: which layers multiply in float8, by which recipe; empty if none does.
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
    products: str = ""

    @property
    def verdict(self) -> str:
        """``exact``, ``contaminated`` or ``refused``."""
        if self.refused is not None:
            return "refused"
        equal = all(found <= allowed for found, allowed in self.judged.values())
        return "exact" if equal and noticed(self.moved, self.leak) else "contaminated"

    @property
    def judged(self) -> dict[str, tuple[float, float]]:
        """Returns each figure of the verdict with what it may be."""
        return {name: (getattr(self, name), getattr(self, f"allowed_{name}")) for name in JUDGED}

    def to_json(self) -> str:
        """The verdict and every figure, as a JSON object."""
        return json.dumps({"verdict": self.verdict, **asdict(self)})

    def __str__(self) -> str:
        over = f", documents cut over {self.ranks} ranks" if self.ranks > 1 else ""
        name = f"{self.model} {self.audited} ({self.implementation}, {self.dtype} on {self.device}{over})"
        if self.refused is not None:
            return f"{name}: refused, {self.refused}"
        figures = ", ".join(
            f"{name.replace('_', ' ')} {found:.1e} of {allowed:.1e}" for name, (found, allowed) in self.judged.items()
        )
        router = "" if self.router_loss is None else f"; router loss, not judged: {self.router_loss:.1e}"
        return (
            f"{name}: {self.verdict}; {figures} allowed, noise {self.noise:.1e}, worst gradient "
            f"{self.worst_parameter}{router}{self.products and '; '}{self.products}"
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


@hinted()
@torch_defaults()
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
        tolerance: the bound of every error, relative to the largest reference value, in place of what rounding allows.
        mesh: of a model that is judged patched, the ranks over which its documents are cut, as in
            :func:`torch_backend.patch`; those of ``model``'s patch if None. All of them call this, compare documents
            that lie on several ranks with each document alone, and get the same report.

    Raises:
        UnsupportedModelError: no tiny clone can be made of the model.
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
    dtype, device = dtype_of(root), execution_device(root)
    about: dict[str, Any] = {
        "model": type(root).__name__,
        "implementation": implementation if isinstance(implementation, str) else "/".join(implementation),
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "ranks": context["mesh"].size() if context else 1,
        "products": describe_float8(root) or "",
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
    plain = torch.autocast(device.type, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), plain, full_float32():  # whatever the caller's mode is
        clone = _clone(root, max(rows.lengths), patched=patched).to(device).train()
        patch = (lambda model: install(model, implementation, **context)) if patched else None
        try:
            return AuditReport(**about, **measure(clone, dtype, rows, tolerance, patch))
        except UnsupportedModelError as refusal:
            return AuditReport(**about, refused=str(refusal))
        except Exception as error:  # stock models may raise anything for packed rows; what they say is the result
            if patched and (
                isinstance(error, PackingError) or original_class(root).__module__.startswith("transformers.")
            ):
                raise
            if patched:
                raise UnsupportedModelError(
                    f"{type(root).__name__} does not run as models of transformers do, so it cannot be proved "
                    f"({type(error).__name__}: {first_line(error)}): let forward(input_ids=...) return logits, or "
                    "last_hidden_state without a head, and get_output_embeddings() the layer that makes logits, or "
                    "pass verify=False to patch it without proof"
                ) from error
            return AuditReport(**about, refused=f"it raises {type(error).__name__}: {first_line(error)}")


def _with_additions(
    root: Any, report: AuditReport, implementation: str | Sequence[str], context: Mapping[str, Any]
) -> AuditReport:
    """The report with the figures of the model itself, where it holds what no clone has."""
    if report.refused is not None or not (added := _additions(root)):
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
    return replace(report, **figures) if _wrong(figures) else report


def _additions(root: Any) -> dict[str, nn.Module]:
    """Finds what a model holds that its config does not make, by name."""
    return additions(root, _own(root))


def _own(root: Any) -> frozenset[Part]:
    """Returns the parts that the config of a model makes."""
    kind = fingerprint(root, "")
    if kind not in _own_parts:
        _own_parts[kind] = parts_of(_clone(root, ROOM, patched=True))
    return _own_parts[kind]


def _itself(root: Any, added: Mapping[str, nn.Module], *, marked: bool) -> dict[str, Any]:
    state = state_of(root)
    unproved = [] if state is None else [(state, "prove", None), (state, "structure", None)]
    try:
        with with_values(unproved), torch.inference_mode(False), torch.enable_grad(), full_float32():
            return measure_itself(root, added.values(), marked=marked)
    except PackingError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(root).__name__} holds {listed(added)}, and does not run on a short packed row to prove it "
            f"({type(error).__name__}: {first_line(error)}): pass verify=False to patch it without proof"
        ) from error


def verify_additions(model: nn.Module) -> None:
    """Prove what a patched model holds beside what its config makes, on the model itself: no clone has it.

    Raises:
        ContaminationError: its packed documents see each other, or are not what they are alone.
        UnsupportedModelError: it does not run on a short packed row.
    """
    root = causal_lm(model)
    added, state = _additions(root), state_of(root)
    if added:
        figures = _itself(root, added, marked=True)
        if text := _wrong(figures):
            raise ContaminationError(
                f"{text.format(type(root).__name__)}. It holds {listed(added)}: each must compute a token from tokens "
                "of its own document alone, at positions of the batch, or leave it out"
            )
    if state is not None:
        state.proved = added_objects(root, _own(root))


@torch_defaults()
def prove_now(root: Any) -> None:
    """Prove what a model that is patched with proof holds by now: weights it had none of, adapters added since.

    Raises:
        ContaminationError, UnsupportedModelError: as :func:`verify` and :func:`verify_additions`.
    """
    state = state_of(root)
    if state is None or execution_device(root).type == "meta":
        return
    if state.proved is None:
        verify(root, state.implementation)
    if state.proved is None or any(x not in state.proved for x in added_objects(root, _own(root))):
        verify_additions(root)


def _wrong(figures: Mapping[str, float]) -> str:
    """Says of figures over their bounds what they mean, with a place for the model's name; nothing if none is."""
    over = [name for name in JUDGED if name in figures and not figures[name] <= figures[f"allowed_{name}"]]
    moved = next((name for name in ("leak", "gradient_leak") if name in over), None)
    if moved is not None:
        what = "they" if moved == "leak" else "gradients of their loss"
        return (
            f"packed documents see each other in {{}}: {what} moved by {figures[moved]:.2g} when the documents beside "
            f"them were replaced, and rounding allows {figures[f'allowed_{moved}']:.2g}"
        )
    if not over:
        return ""
    differs = (f"{n} by {figures[n]:.2g}, where rounding allows {figures[f'allowed_{n}']:.2g}" for n in over)
    return f"packed documents are not what they are alone in {{}}: they differ in {' and in '.join(differs)}"


def listed(added: Mapping[str, nn.Module]) -> str:
    """Names what was added to a model."""
    names = list(added)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def verify(model: nn.Module, implementation: str | Sequence[str]) -> AuditReport:
    """The report on models of this kind when they are patched, which is exact; measured once per fingerprint.

    Raises:
        UnsupportedModelError: the patch refuses the model.
        ContaminationError: the patched clone is not exact.
    """
    root = causal_lm(model)
    kind = fingerprint(root, implementation)
    if kind not in _verdicts:
        _verdicts[kind] = _audit(root, True, implementation, None, SHORT)
    report = _verdicts[kind]
    if report.verdict == "refused":
        raise UnsupportedModelError(str(report.refused))
    if report.verdict != "exact":
        text = _wrong(asdict(report)) or "the proof of {} replaced documents, and their outputs stayed as they were"
        raise ContaminationError(f"{text.format(type(root).__name__)}. {report}")
    return report


def full_float32() -> AbstractContextManager[None]:
    """Inside, float32 products on a GPU are not rounded to TensorFloat-32, even if the process allows it."""
    backends: Any = torch.backends
    return with_values((product, "fp32_precision", "ieee") for product in (backends.cuda.matmul, backends.cudnn.conv))


def _clone(root: Any, positions: int, *, patched: bool) -> Any:
    try:
        config = tiny_config(root.config, positions=positions)
        name = root.config._attn_implementation
        config._attn_implementation = stands_over(root.config) if patched else unregistered(name)
        if (experts := getattr(root.config, "_experts_implementation", None)) is not None:
            config._experts_implementation = experts  # some take no float64
        return tiny_model(config, type(root))
    except Exception as error:
        raise UnsupportedModelError(
            f"no tiny clone of {type(root).__name__} can be made to prove it on ({type(error).__name__}: {error}): "
            "pass verify=False to patch it without proof"
        ) from error
