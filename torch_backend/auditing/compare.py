"""Computations shared by all audits: random documents, a model's results on them, and differences of results.

Documents run alone -> :class:`Computation` (outputs, loss, gradients) <- the same documents run packed. All
differences are max |got - want| / max |want|; what they may be is :mod:`packing_core.budget`'s. Of documents that are
cut over ranks, every rank gets outputs and gradients as one process has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from packing_core.batches.keys import BatchKey
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.budget import Difference, worst_gradient
from packing_core.errors import UnsupportedError
from torch_backend.context_parallel.exchange import whole_tokens
from torch_backend.context_parallel.group import ContextGroup
from torch_backend.context_parallel.share import RankShare
from torch_backend.hf.anatomy.random_draws import is_random_setting
from torch_backend.hf.anatomy.structure import execution_device, with_values
from torch_backend.hf.patch import context_of, cut_over_ranks
from torch_backend.losses.cross_entropy import next_token_targets, packed_cross_entropy
from torch_backend.ops.divisor import Divisor

FIRST_TOKEN, LAST_TOKEN = 4, 90  # tokens that mean nothing special in a tiny model's vocabulary


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


def exchanged(ids: Tensor, known: Tensor) -> Tensor:
    """Returns the ids with each one exchanged for another one of ``known``, which is sorted and holds them all."""
    return known[(torch.searchsorted(known, ids) + max(len(known) // 2, 1)) % len(known)]


def next_token_loss(logits: Sequence[Tensor], documents: Sequence[Tensor]) -> Tensor:
    """The mean over the targets of all documents, from the logits [L, V] of each."""
    pairs = zip(logits, documents, strict=True)
    sums = [packed_cross_entropy(x[None], next_token_targets(d[None])) for x, d in pairs]
    loss, weight = (torch.stack(column).sum() for column in zip(*sums, strict=True))
    return loss / weight


def run(model: nn.Module, outputs: Sequence[Tensor], loss: Tensor) -> Computation:
    """Runs the backward of ``loss``; the model's gradients, which were empty, are taken and left empty."""
    if loss.requires_grad:
        loss.backward()
    gradients = {name: p.grad.detach().float().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Computation([x.detach().float() for x in outputs], loss.detach(), gradients)


def difference(got: Tensor | None, want: Tensor) -> Difference:
    """Compares two tensors, of which the first may be missing."""
    largest = float(want.abs().max())
    if got is None or not bool(torch.isfinite(got).all()):
        return Difference(float("inf"), largest)
    return Difference(float((got.double() - want.double()).abs().max()), largest)


def differences(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, Difference]:
    """Compares tensors by name, such as gradients by parameter."""
    return {name: difference(got.get(name), x) for name, x in want.items()}


def relative_error(got: Tensor | None, want: Tensor, scale: float = 0.0) -> float:
    """Returns max |got - want| / max |want|; see :meth:`packing_core.budget.Difference.relative`."""
    return difference(got, want).relative(scale)


def outputs_error(got: Computation, want: Computation, documents: slice = slice(None)) -> float:
    """Returns the error of the worst document, of all or some."""
    return max(relative_error(*pair) for pair in zip(got.outputs[documents], want.outputs[documents], strict=True))


def gradients_error(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> tuple[float, str]:
    """Returns the worst parameter's error, and its name."""
    return worst_gradient(differences(got, want))


def without_dropout(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, no dropout of a model is on, neither a module's nor one that its code reads from a number."""
    return with_values(
        (module, name, 0.0)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
        and (is_random_setting(name) or (name == "p" and "Dropout" in type(module).__name__))
    )


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


def whole_outputs(model: nn.Module, batch: Mapping[str, Any], outputs: Tensor) -> Tensor:
    """Outputs [T, ...] of the rank's part of a packed batch as those of the whole batch [B * S, ...], on every rank.

    Gradients that are averaged over ranks are those of one process, if every rank takes the same loss of the result.
    """
    share: RankShare = cut_over_ranks(model, batch)[BatchKey.SHARE]
    return whole_tokens(outputs, share)


def averaged(model: nn.Module, gradients: Mapping[str, Tensor], context: ContextGroup) -> dict[str, Tensor]:
    """Returns the mean over ranks of a model's gradients; a rank without one of a parameter counts as zero."""
    average = Divisor(context.group).average
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: average(gradients[name] if name in gradients else torch.zeros_like(p)) for name, p in trained.items()}


def refuse_several_devices(trainer: Any) -> None:
    """Raise if a rank of a trainer has parts of the model or batches of its own.

    Raises:
        UnsupportedError
    """
    context = context_of(trainer.model)
    if context is not None:
        if trainer.args.world_size > context.ranks or any(isinstance(p, DTensor) for p in trainer.model.parameters()):
            raise UnsupportedError(
                f"audit {type(trainer).__name__} on one group of {context.ranks} ranks, before train() shards its model"
            )
        return
    shards = any(getattr(trainer, kind, False) for kind in ("is_deepspeed_enabled", "is_fsdp_enabled"))
    if shards or trainer.args.world_size > 1 or trainer.args.n_gpu > 1:
        raise UnsupportedError(
            f"{type(trainer).__name__} spreads its model or its batches over devices: "
            "audit it in one process that sees one"
        )
