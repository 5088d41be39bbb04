"""Computations shared by all audits: random documents, a model's results on them, and differences of results.

Documents run alone -> :class:`Computation` (outputs, loss, gradients) <- the same documents run packed. All
differences are max |got - want| / max |want|.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from packing_core.batches.stored import IGNORE_INDEX
from torch_backend.hf.anatomy.placement import execution_device
from torch_backend.losses.cross_entropy import next_token_targets, packed_cross_entropy

FIRST_TOKEN, LAST_TOKEN = 4, 90  # tokens that mean nothing special in a tiny model's vocabulary
# Of the largest gradient. A smaller one is compared with this much, because it may be a difference of terms as large as
# the largest, and float32 rounds these by 1e-7.
SMALL = 1e-2
# What a figure may be, as in conformance/numerics.py: twice what rounding does to the documents alone, and so many
# epsilons of the dtype. The order of a sum shows in float32; narrower dtypes are summed in float32.
ROUNDINGS = 2.0
FLOOR = 16.0
FLOOR_BELOW_FLOAT32 = 1.0
MOVED = 0.01  # at least what a probe must do to its own document, and twice what it does to another


@dataclass(frozen=True)
class Computation:
    """One computation.

    Attributes:
        outputs: logits or hidden states of each document, [L, ...].
        loss: over all documents.
        gradients: of that loss, by parameter; empty without a backward.
    """

    outputs: list[Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]


def random_documents(model: Any, lengths: Sequence[int]) -> list[Tensor]:
    """Documents of the given lengths, int64 [L] each, on the device of the model's embedding; always the same ones."""
    generator = torch.Generator().manual_seed(7)
    documents = [torch.randint(*_tokens(model), (length,), generator=generator) for length in lengths]
    return [document.to(execution_device(model)) for document in documents]


def labels_of(model: Any, head: str, documents: Sequence[Tensor]) -> list[Tensor]:
    """Labels of the documents for a model's head: [L] per token, or a scalar or [C] per document.

    A language model's are its tokens, and a model without a head has none: both get the tokens.
    """
    config = model.config
    if head == "token":
        return [document % config.num_labels for document in documents]
    if head == "masked token":
        return [
            replaced(model, d).where(torch.arange(len(d), device=d.device) % 3 == 0, IGNORE_INDEX) for d in documents
        ]
    if head != "document":
        return list(documents)
    classes, numbers = config.num_labels, [document.sum() for document in documents]
    kind = config.problem_type or ("regression" if classes == 1 else "single_label_classification")
    if kind == "single_label_classification":
        return [number % classes for number in numbers]
    vectors = [(number + torch.arange(classes, device=number.device)) % 2 * 1.0 for number in numbers]
    return [vector[0] for vector in vectors] if classes == 1 else vectors


def replaced(model: Any, document: Tensor) -> Tensor:
    """The document with every token exchanged for another one."""
    first, end = _tokens(model)
    return (document - first + (end - first) // 2) % (end - first) + first


def next_token_loss(logits: Sequence[Tensor], documents: Sequence[Tensor]) -> Tensor:
    """The mean over the targets of all documents, from the logits [L, V] of each."""
    pairs = zip(logits, documents, strict=True)
    sums = [packed_cross_entropy(x[None], next_token_targets(d[None])) for x, d in pairs]
    loss, weight = (torch.stack(column).sum() for column in zip(*sums, strict=True))
    return loss / weight


def run(model: nn.Module, outputs: Sequence[Tensor], loss: Tensor) -> Computation:
    """The backward of ``loss``; the model's gradients are taken and left empty."""
    if loss.requires_grad:
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Computation([x.detach().float() for x in outputs], loss.detach(), gradients)


def relative_error(got: Tensor | None, want: Tensor, scale: float = 0.0) -> float:
    """max |got - want| / max |want|; infinite if ``got`` is missing or not finite.

    Args:
        scale: of the gradients of all parameters; one far below it is compared with ``SMALL`` times the scale.
    """
    if got is None or not bool(torch.isfinite(got).all()):
        return float("inf")
    largest = max(float(want.abs().max()), SMALL * scale)
    return float((got.double() - want.double()).abs().max()) / max(largest, torch.finfo(torch.float32).tiny)


def outputs_error(got: Computation, want: Computation) -> float:
    """The worst document's."""
    return max(relative_error(g, w) for g, w in zip(got.outputs, want.outputs, strict=True))


def gradients_error(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> tuple[float, str]:
    """The worst parameter's, and its name."""
    scale = max(float(g.abs().max()) for g in want.values())
    errors = {name: relative_error(got.get(name), g, scale) for name, g in want.items()}
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def floor_of(dtype: torch.dtype) -> float:
    """Returns the error allowed relative to the largest value, where rounding happens to make none."""
    return (FLOOR if dtype == torch.float32 else FLOOR_BELOW_FLOAT32) * torch.finfo(dtype).eps


def gradients_and_allowed(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], rounded: Mapping[str, Tensor], floor: float
) -> tuple[float, float, str]:
    """Returns the error largest relative to its parameter's bound, that bound, and the parameter's name.

    A parameter may be off by twice what rounding does to itself, and by ``floor`` of the largest gradient of all: one
    whose gradient is zero in exact arithmetic, and all rounding in any other, decides on nothing but itself.
    """
    scale = max(float(g.abs().max()) for g in want.values())
    worst = 0.0, 0.0, ""
    for name, gradient in want.items():
        error = relative_error(got.get(name), gradient, scale)
        largest = max(float(gradient.abs().max()), SMALL * scale, torch.finfo(torch.float32).tiny)
        allowed = ROUNDINGS * relative_error(rounded.get(name), gradient, scale) + floor * scale / largest
        if not worst[2] or error * worst[1] > worst[0] * allowed:
            worst = error, allowed, name
    return worst


def cosine(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    """Returns the cosine of two sets of gradients, each as one vector."""

    def product(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
        return sum(float((a[name].double() * b[name].double()).sum()) for name in a.keys() & b.keys())

    return product(got, want) / max(product(got, got) * product(want, want), 1e-60) ** 0.5


def _tokens(model: Any) -> tuple[int, int]:
    """The first token that documents use, and the one after the last."""
    embedding = model.get_input_embeddings()  # perhaps somebody's own, which need not say how many it knows
    vocabulary = getattr(embedding, "num_embeddings", None) or model.config.get_text_config().vocab_size
    return min(FIRST_TOKEN, vocabulary // 2), min(LAST_TOKEN, vocabulary)
