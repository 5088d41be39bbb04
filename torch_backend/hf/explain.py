"""``explain(model)``: what serves each layer of a patched model, and why nothing else does.

The requests that the layers made in the last packed forward -> every implementation's answer to them -> a table. Before
the first packed forward only the layers and their routes are known.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from packing_core.errors import UnsupportedError
from torch_backend.hf.mixers import PER_DOCUMENT, Row, row_forward
from torch_backend.hf.patch import causal_lm, state_of
from torch_backend.ops.attention import AttentionRequest, describe, rejections


@dataclass(frozen=True)
class LayerExplanation:
    """One layer.

    Attributes:
        layer: its name in the model.
        route: ``attention`` (segments reach its attention), ``row`` (segments reach the convolution and scan inside it)
            or ``per document`` (it runs on batches of documents).
        serves: the implementation that runs it, None before the first packed forward.
        request: what it asks for, in words; of a mixer, what convolves and scans.
        rejected: implementations that were asked before, each with its reason.
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


def explain(model: nn.Module) -> Explanation:
    """What serves each attention and mixer layer of a patched model.

    Raises:
        UnsupportedError: the model is not patched.
    """
    state = state_of(causal_lm(model))
    if state is None:
        raise UnsupportedError(f"{type(model).__name__} is not patched: call torch_backend.patch(model) first")
    layers = [
        _explain_mixer(name, layer, state.served.get(id(layer)))
        if name in state.mixers
        else _explain(name, state.served.get(id(layer)), state.implementation)
        for name, layer in state.layers.items()
    ]
    return Explanation(layers, state.notes())


def _explain_mixer(name: str, layer: nn.Module, served: Row | str | None) -> LayerExplanation:
    if isinstance(served, Row):
        return LayerExplanation(name, "row", "its own forward on the row", str(served))
    if served is None and row_forward(type(layer)) is not None:
        return LayerExplanation(name, "row")
    return LayerExplanation(name, PER_DOCUMENT, "its own forward on batches of documents")


def _explain(name: str, asked: AttentionRequest | None, implementation: str | tuple[str, ...]) -> LayerExplanation:
    if asked is None:
        return LayerExplanation(name, "attention")
    answers = rejections(asked, implementation)
    serves = next(candidate for candidate, reason in answers.items() if reason is None)
    rejected = {}
    for other, reason in answers.items():
        if reason is None:
            break
        rejected[other] = reason
    return LayerExplanation(name, "attention", serves, describe(asked), rejected)
