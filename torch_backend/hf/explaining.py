"""``explain(model)``: the implementation that runs each layer of a patched model, and why the others were rejected.

What the layers chose in the last packed forward -> every implementation's answer to the same request -> a table. Before
the first packed forward only the layers and their routes are known.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from packing_core.errors import UnsupportedError
from torch_backend.hf.anatomy.audio import FEATURES, audio_of
from torch_backend.hf.anatomy.families import EXACT_KEYS
from torch_backend.hf.anatomy.layers import find_experts
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.edits.mixers import why_not_on_the_row
from torch_backend.hf.edits.packed_experts import reasons_against
from torch_backend.hf.float8 import describe_float8
from torch_backend.hf.forward import AttentionChoice, Choice, DocumentsChoice, RowChoice
from torch_backend.hf.patch import state_of
from torch_backend.hf.patched import Patched
from torch_backend.ops.attention import TRIED_LAST, describe, rejections
from torch_backend.ops.experts import describe as describe_experts
from torch_backend.ops.experts import rejections as rejected_experts


@dataclass(frozen=True)
class LayerExplanation:
    """One layer.

    Attributes:
        layer: its name in the model.
        route: ``attention`` (segments reach its attention), ``row`` (segments reach the convolution and scan inside
            it), ``experts`` (tokens are routed, padding to none) or ``per document`` (it runs on batches of documents).
        serves: the implementation that runs it, None before the first packed forward.
        request: what the layer needs, in words; of a mixer, what convolves and scans.
        rejected: implementations that come before it in the order, or last because of what they cost, each with the
            reason.
    """

    layer: str
    route: str
    serves: str | None = None
    request: str = ""
    rejected: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Explanation:
    """All layers, in order; ``notes`` say what holds for the whole model."""

    layers: list[LayerExplanation]
    notes: list[str]

    def __str__(self) -> str:
        lines = []
        for layer in self.layers:
            serves = layer.serves or "not run packed yet"
            rejected = "".join(f"\n    not {name}: {reason}" for name, reason in layer.rejected.items())
            lines.append(f"{layer.layer}: {layer.route} -> {serves}  {layer.request}{rejected}")
        return "\n".join([*lines, *self.notes])


SHARERS = (  # of common beginnings
    "TRL's DPO, KTO, GRPO, GMPO and RLOO trainers do so; elsewhere use PackedCollator(model, share_prefix=True) and "
    "make_train_step"
)


def explain(model: Any) -> Explanation:
    """Explains which implementation runs each attention and mixer layer of a patched model, and why.

    Args:
        model: a patched model; or a trainer after ``enable_packing``, or what ``make_train_step`` returned, whose notes
            also say which parts of its training step are fast, and why the others are not.

    Raises:
        UnsupportedError: the model is not patched, or the trainer not enabled.
    """
    if not isinstance(model, nn.Module):
        return _explain_step(model)
    state = state_of(causal_lm(model))
    if state is None:
        raise UnsupportedError(f"{type(model).__name__} is not patched: call crosspack.patch(model) first")
    layers = [
        _explain_mixer(name, layer, state.choices.get(id(layer)), state.anatomy.route == "documents")
        if name in state.anatomy.mixers
        else explain_attention(name, state.choices.get(id(layer)), state.implementation)
        for name, layer in state.anatomy.layers.items()
    ]
    return Explanation(layers + _explain_experts(state), _notes(state))


def _explain_experts(state: Patched) -> list[LayerExplanation]:
    """Every module of experts, those last that keep the implementation that they name."""
    found, kept = [], reasons_against(state.decoder)
    for name, module in find_experts(state.decoder).items():
        choice = state.expert_choices.get(id(module))
        if name in kept or state.anatomy.route == "documents":
            reason = kept.get(name, "the decoder runs per document")
            own = getattr(getattr(module, "config", None), "_experts_implementation", None)
            found.append(LayerExplanation(name, "experts", str(own), rejected={"crosspack": reason}))
        elif choice is None:
            found.append(LayerExplanation(name, "experts"))
        else:
            answers = rejected_experts(choice.request)
            rejected = {other: reason for other, reason in answers.items() if reason is not None}
            found.append(
                LayerExplanation(name, "experts", choice.implementation, describe_experts(choice.request), rejected)
            )
    return found


def _notes(state: Patched) -> list[str]:
    """Returns the notes on the whole model for users."""
    notes = [f"route {state.anatomy.route}: {state.anatomy.why}"]
    if (budget := state.anatomy.budget) is not None:
        notes.append(
            f"documents of at most {budget:,} tokens select all of their keys, so attention is dense; a batch with "
            "longer ones runs with layers that are not compiled, and without a CUDA graph"
        )
    if state.anatomy.rotaries:
        notes.append("rotary frequencies depend on the longest position and are chosen per document")
    for reason in sorted(set(state.own_rotation.values())):
        layers = [name for name, why in state.own_rotation.items() if why == reason]
        which = layers[0] if len(layers) == 1 else f"{layers[0]} and {len(layers) - 1} more"
        notes.append(f"the rotary embedding is the modeling file's own in {which}: {reason}")
    if FEATURES in EXACT_KEYS.get(state.root.config.model_type, ()):
        audio = audio_of(state.root.config)
        notes += [] if audio is None else [audio.description]
    if state.adds_softcap:
        notes.append(state.adds_softcap)
    if (float8 := describe_float8(state.root)) is not None:
        notes.append(float8)
    if state.needs_lengths:
        notes.append(
            "segment lengths are needed on the host: PackedCollator carries them, and for another collator's "
            "batches they are read from cu_seq_lens_q once per forward"
        )
    return notes


def _explain_step(trainer: Any) -> Explanation:
    """A trainer, which keeps its step as ``packed_step`` and how it packs as ``packing_plan``, or a training step."""
    plan = getattr(trainer, "packing_plan", None)
    step = getattr(trainer, "packed_step", trainer)
    if (own := getattr(step, "explanation", None)) is not None:
        found: Explanation = own()
        return found
    parts = getattr(step, "parts", None)
    if plan is None and parts is None:
        raise UnsupportedError(
            f"explain takes a patched model, a trainer after enable_packing or a step of make_train_step, "
            f"got a {type(trainer).__name__}"
        )
    found = explain(step.model)
    notes = [] if plan is None else [f"trains {plan}", f"no prefix is shared: {SHARERS}"]
    if parts is None:
        notes.append("the training step is the trainer's own: fast=False")
    else:
        notes += [f"{part} of the step: {what}" for part, what in parts.items()]
    return replace(found, notes=[*found.notes, *notes])


def _explain_mixer(name: str, layer: nn.Module, choice: Choice | None, whole_decoder: bool) -> LayerExplanation:
    if isinstance(choice, RowChoice):
        rejected = {} if choice.scan is None else dict(choice.scan.rejected)
        return LayerExplanation(name, "row", "its own forward on the row", str(choice), rejected)
    reason, crossing = (choice.reason, choice.crossing) if isinstance(choice, DocumentsChoice) else (None, None)
    if choice is None and not whole_decoder:
        reason = why_not_on_the_row(layer)
        if reason is None:
            return LayerExplanation(name, "row")
    rejected = {} if reason is None else {"row": reason}
    on_documents = "its own forward on batches of documents"
    return LayerExplanation(name, "per document", on_documents, crossing or "", rejected)


def explain_attention(name: str, choice: Choice | None, implementation: str | tuple[str, ...]) -> LayerExplanation:
    """Explains an attention layer by what it chose; before it ran, nothing but its route is known."""
    if not isinstance(choice, AttentionChoice):
        return LayerExplanation(name, "attention")
    answers = rejections(choice.request, implementation)
    tried = list(answers).index(choice.implementation)
    rejected = {
        other: reason
        for place, (other, reason) in enumerate(answers.items())
        if reason is not None and (place < tried or reason.startswith(TRIED_LAST))
    }
    request = describe(choice.request)
    request = "; ".join([request, *(str(each) for each in (choice.crossing, choice.long) if each is not None)])
    return LayerExplanation(name, "attention", choice.implementation, request, rejected)
