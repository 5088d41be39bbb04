"""``audit(model)``: packed against every document alone, and one document changed while the others are watched.

A model -> a tiny random clone of the same kind on the same device, in the same dtype, with the same implementation ->
the same documents run packed and one by one -> an :class:`AuditReport`. The clone has every layer kind, head width and
window kind of the model, and the documents cross its windows, chunks and original positions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from packing_core.errors import ContaminationError, UnsupportedModelError
from torch_backend.data import PackedCollator
from torch_backend.hf import unregistered
from torch_backend.loss import next_token_targets, packed_cross_entropy
from torch_backend.patch import causal_lm, patch, state_of
from torch_backend.tiny import tiny_config, tiny_model

# Two rows of at most 64 tokens; the second is padded. Some are beyond every limit of the tiny config.
LENGTHS = (5, 19, 33, 7, 40, 1, 2, 18)
CAPACITY = 64
PUSHED = 2  # the document whose embeddings the perturbation probe moves, by this many of their standard deviations
PUSH = 30.0
TOLERANCE = 1e-4
LEAK = 0.02  # at most what rounding may do to the others; a leak of a push this large moves them by their whole size
MOVED = 0.1


_verdicts: dict[tuple[Any, ...], AuditReport] = {}


@dataclass(frozen=True)
class AuditReport:
    """What was measured; every figure is max error / max |reference|.

    Attributes:
        model, implementation, device, dtype: what was audited.
        logits: packed against alone, worst over documents.
        loss: of the packed loss against the mean over the targets of all documents.
        gradients: worst over parameters, worst_parameter: its name.
        leak: how far other documents moved when one was pushed.
        moved: how far the pushed document itself moved; the probe is void unless it did.
        noise: how far the packed run moves when it is simply repeated.
        tolerance: what logits, loss, gradients and leak may be: 1e-4, and below float32 twice what the dtype itself
            costs the same documents when they run alone.
        refused: why the model was refused, None if it was not.
    """

    model: str
    implementation: str
    device: str
    dtype: str
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


def audit(
    model: nn.Module, *, implementation: str | Sequence[str] | None = None, tolerance: float | None = None
) -> AuditReport:
    """Measure whether documents that are packed together see each other.

    Args:
        model: a transformers causal language model or a wrapper of one; it is not touched. If it is patched, the clone
            is patched with the same implementation.
        implementation: of attention; that of ``model``'s patch if None, or "auto".
        tolerance: what errors may be, relative to the largest reference value.

    Raises:
        UnsupportedModelError: no tiny clone can be made of the model.
    """
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
    clone = _clone(root).to(device).train()
    documents = _documents(clone)
    exact = _alone(clone, documents)
    clone.to(dtype)
    alone = exact if dtype == torch.float32 else _alone(clone, documents)
    try:
        patch(clone, implementation=implementation, verify=False)
        packed, again = _packed(clone, documents), _packed(clone, documents)
        pushed = _packed(clone, documents, pushed=PUSHED)
    except UnsupportedModelError as refusal:
        return AuditReport(**about, refused=str(refusal))
    logits, loss, gradients, worst = _compare(packed, exact)
    others = [i for i in range(len(documents)) if i != PUSHED]
    return AuditReport(
        **about,
        logits=logits,
        loss=loss,
        gradients=gradients,
        worst_parameter=worst,
        leak=max(_error(pushed.logits[i], packed.logits[i]) for i in others),
        moved=_error(pushed.logits[PUSHED], packed.logits[PUSHED]),
        noise=max(_error(b, a) for b, a in zip(again.logits, packed.logits, strict=True)),
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


@dataclass(frozen=True)
class _Run:
    logits: list[Tensor]  # per document [L, V]
    loss: Tensor
    gradients: dict[str, Tensor]


def _compare(got: _Run, want: _Run) -> tuple[float, float, float, str]:
    """Errors of logits, loss and gradients, and the parameter with the worst gradient."""
    scale = max(float(g.abs().max()) for g in want.gradients.values())
    errors = {name: _error(got.gradients.get(name), value, scale) for name, value in want.gradients.items()}
    worst = max(errors, key=lambda name: errors[name])
    logits = max(_error(g, w) for g, w in zip(got.logits, want.logits, strict=True))
    return logits, _error(got.loss, want.loss), errors[worst], worst


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


def _documents(model: Any) -> list[Tensor]:
    embeddings = model.get_input_embeddings()
    generator = torch.Generator().manual_seed(7)
    vocabulary = min(embeddings.num_embeddings, 90)
    documents = [torch.randint(4, vocabulary, (length,), generator=generator) for length in LENGTHS]
    return [document.to(embeddings.weight.device) for document in documents]


def _alone(model: Any, documents: list[Tensor]) -> _Run:
    logits = [model(input_ids=document[None]).logits for document in documents]
    pairs = [packed_cross_entropy(x, next_token_targets(d[None])) for x, d in zip(logits, documents, strict=True)]
    loss = torch.stack([loss_sum for loss_sum, _ in pairs]).sum() / torch.stack([weight for _, weight in pairs]).sum()
    return _run(model, [x[0] for x in logits], loss)


def _packed(model: Any, documents: list[Tensor], pushed: int = -1) -> _Run:
    collate = PackedCollator(capacity=CAPACITY, strategy="sequential")
    batch = collate([{"input_ids": document.cpu()} for document in documents])
    batch = {k: v.to(documents[0].device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    with _push(model, batch["seq_idx"] == pushed):
        output = model(**batch)
    logits = torch.split(output.logits.flatten(0, 1), list(batch["packed_lengths"]))
    return _run(model, list(logits[: len(documents)]), output.loss)


def _run(model: nn.Module, logits: list[Tensor], loss: Tensor) -> _Run:
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return _Run([x.detach().float() for x in logits], loss.detach(), gradients)


@contextmanager
def _push(model: Any, hit: Tensor) -> Iterator[None]:
    """Inside, the embeddings of the tokens ``hit`` [B, S] lie far from where they were."""

    def move(_module: nn.Module, _args: Any, out: Tensor) -> Tensor:
        shift = torch.randn(out.shape[-1], generator=torch.Generator().manual_seed(11)).to(out)
        return torch.where(hit[..., None], out + PUSH * out.detach().std() * shift, out)

    handle = model.get_input_embeddings().register_forward_hook(move)
    try:
        yield
    finally:
        handle.remove()


def _error(got: Tensor | None, want: Tensor, scale: float = 0.0) -> float:
    """max |got - want| / max |want|; a parameter with next to no gradient is measured against the others' scale."""
    if got is None or not bool(torch.isfinite(got).all()):
        return float("inf")
    largest = max(float(want.abs().max()), 1e-3 * scale)
    return float((got.double() - want.double()).abs().max()) / max(largest, torch.finfo(torch.float32).tiny)
