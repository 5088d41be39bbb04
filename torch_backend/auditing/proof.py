"""Measures a model for an audit: the same documents through a clone, each alone and packed, and the bounds.

A clone and documents -> each alone, in float32 and as rounding changes it -> packed -> the probe: packed with every
second document replaced, under a loss of the others alone -> the figures of an
:class:`~torch_backend.auditing.model.AuditReport`. A figure and what it may be belong together: twice what rounding
does to the documents alone, and a floor (:mod:`.compare`). In the probe rounding is the same before and after, so the
others' outputs may not move by a bit more than the model's own repetition moves them, and the gradients of their loss
by no more than the order of their sums does, whatever the dtype is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from packing_core.batches.stored import IGNORE_INDEX
from torch_backend.auditing.compare import (
    ROUNDINGS,
    SMALL,
    Computation,
    floor_of,
    gradients_and_allowed,
    labels_of,
    next_token_loss,
    outputs_error,
    random_documents,
    relative_error,
    replaced,
    run,
)
from torch_backend.auditing.ranks import averaged, whole_outputs
from torch_backend.collate import PackedCollator
from torch_backend.hf.anatomy.families import both_ways_of
from torch_backend.hf.anatomy.heads import head_of
from torch_backend.hf.inputs.arguments import forward_names
from torch_backend.hf.patch import context_of
from torch_backend.hf.router import asks_for_router_loss, no_router_loss
from torch_backend.losses.cross_entropy import packed_cross_entropy


@dataclass(frozen=True)
class RowLayout:
    """Documents of these lengths, next fit in rows of ``capacity`` tokens; the last row ends in padding."""

    lengths: tuple[int, ...]
    capacity: int


# | 5 | 19 | 33 | 7 |  | 40 | 1 | 2 | 18 | 3 of padding |: some are beyond every limit of a tiny config.
SHORT = RowLayout((5, 19, 33, 7, 40, 1, 2, 18), 64)
# In the first row documents begin at tokens 64, 128 and 256, where kernels and scans begin a chunk, and one is longer
# than 256. In the second row no document begins at a chunk.
LONG = RowLayout((5, 19, 33, 7, 64, 128, 320, 1, 2, 13, 40, 50, 150, 2, 70), 592)
# The document of 320 is longer than the share of one of two ranks or more, so it has pieces on several.
CUT = RowLayout((5, 19, 320, 7, 1, 2, 33, 9), 400)
# For a model itself, which may be large: one row that ends in padding.
FEW = RowLayout((5, 1, 7, 2), 18)


def measure(
    clone: Any, dtype: torch.dtype, rows: RowLayout, tolerance: float | None, patch: Callable[[Any], Any] | None
) -> dict[str, Any]:
    """The figures of a report, from a clone in float32.

    Args:
        clone: unpatched; it is changed.
        dtype: to compute in.
        rows: which documents.
        tolerance: what every figure may be, instead of what rounding allows.
        patch: makes the clone take the collator's batches. None gives the clone as it is what stock packing gives: rows
            with restarting ``position_ids``.
    """
    with no_router_loss(clone):
        proof = _Proof(clone, rows, marked=patch is not None)
        exact = proof.alone()
        if dtype == torch.float32:
            with _neighbours(clone):
                rounded = proof.alone()
        else:
            clone.to(dtype)
            rounded = proof.alone()
        if patch is not None:
            patch(clone)
        packed = proof.packed()
        figures = _against_alone(packed, exact, rounded, dtype) | _probe(proof, packed, dtype)
    if tolerance is not None:
        figures |= {name: tolerance for name in figures if name.startswith("allowed")}
    router = patch is not None and asks_for_router_loss(clone, {})
    return {**figures, "router_loss": proof.router_error() if router else None}


def measure_itself(model: Any, added: Iterable[nn.Module], *, marked: bool) -> dict[str, float]:
    """Measures a model itself, without gradients: what modules that no clone has do to packed documents.

    Args:
        model: runs in evaluation, and is left as it was.
        added: the modules that no clone has. Their constant weights are moved meanwhile, because what starts from zero
            does nothing yet.
        marked: whether it takes the collator's batches, as in :func:`measure`.

    Returns:
        ``logits``, ``leak`` and what they may be, and ``moved``. The logits may be off by half the digits of the dtype,
        and by anything where rounding depends on the other tokens of a batch.
    """
    with torch.no_grad(), no_router_loss(model), _evaluating(model), _started(added):
        proof = _Proof(model, FEW, marked=marked)
        documents = [replaced(model, d) if not i % 2 else d for i, d in enumerate(proof.documents)]
        (packed, _), (again, _), (after, _) = map(proof.rows, (proof.documents, proof.documents, documents))
        alone, rows = proof.outputs_alone(), [proof.outputs_of_rows(replace=value) for value in (True, False)]
    dtype = packed[0].dtype
    noise, rounding = _worst(again, packed), _worst(*(x[1::2] for x in rows))
    floor = floor_of(dtype) if rounding else 0.0
    return {
        "logits": _worst(packed, alone),
        "allowed_logits": float("inf") if rounding else torch.finfo(dtype).eps ** 0.5,
        "leak": _worst(after[1::2], packed[1::2]),
        "allowed_leak": ROUNDINGS * max(noise, rounding) + floor,
        "moved": min(map(relative_error, after[::2], packed[::2])),
    }


def _worst(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    return max(map(relative_error, got, want))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _started(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, weights of these modules that are all one number are random; those that ranks share are left alone."""
    generator = torch.Generator().manual_seed(5)
    weights = {id(p): p for m in modules for p in m.parameters() if p.is_floating_point() and p.numel() > 0}
    whole = [p for p in weights.values() if not isinstance(p, DTensor)]
    before = [(p, p.data) for p in whole if bool((p == p.flatten()[0]).all())]
    for p, data in before:
        p.data = data + 0.3 * torch.randn(data.shape, generator=generator).to(data)
    try:
        yield
    finally:
        for p, data in before:
            p.data = data


def _against_alone(packed: Computation, exact: Computation, rounded: Computation, dtype: torch.dtype) -> dict[str, Any]:
    floor = floor_of(dtype)
    gradients, allowed, worst = gradients_and_allowed(packed.gradients, exact.gradients, rounded.gradients, floor)
    return {
        "logits": outputs_error(packed, exact),
        "loss": relative_error(packed.loss, exact.loss),
        "gradients": gradients,
        "worst_parameter": worst,
        "allowed_logits": ROUNDINGS * outputs_error(rounded, exact) + floor,
        "allowed_loss": ROUNDINGS * relative_error(rounded.loss, exact.loss) + floor,
        "allowed_gradients": allowed,
    }


def _probe(proof: _Proof, packed: Computation, dtype: torch.dtype) -> dict[str, float]:
    """Measures how far documents move when those beside them are replaced.

    Nothing moves in most models, to the bit. Where rounding depends on the other tokens (products of experts are as
    long as the number of their tokens), it also does among the rows of a batch that cannot see each other, and what it
    does there is allowed twice, and the floor.
    """
    before, after = proof.unchanged(), proof.unchanged(replace=True)
    again = before if proof.on_cpu else proof.unchanged()  # the CPU repeats itself to the bit
    noise = max(outputs_error(before, packed), outputs_error(again, before))
    leak, gradient_leak = _moved(after, before)
    rounding = rounding_of_gradients = floor = 0.0
    if leak or gradient_leak:
        rounding, rounding_of_gradients = _moved(proof.rows_apart(replace=True), proof.rows_apart())
        floor = floor_of(dtype) if rounding or rounding_of_gradients else 0.0
    return {
        "leak": leak,
        "gradient_leak": gradient_leak,
        "moved": min(map(relative_error, after.outputs[::2], before.outputs[::2])),
        "noise": noise,
        "allowed_leak": ROUNDINGS * max(noise, rounding) + floor,
        "allowed_gradient_leak": ROUNDINGS * max(_moved(again, before)[1], rounding_of_gradients) + floor,
    }


def _moved(after: Computation, before: Computation) -> tuple[float, float]:
    """Outputs of every second document, and the gradients of their loss by the largest of all."""
    outputs = max(map(relative_error, after.outputs[1::2], before.outputs[1::2]))
    scale = max(float(gradient.abs().max()) for gradient in before.gradients.values())
    moves = [relative_error(after.gradients.get(name), g, scale / SMALL) for name, g in before.gradients.items()]
    return outputs, max(moves)


@contextmanager
def _neighbours(model: nn.Module) -> Iterator[None]:
    """Inside, every weight is the next number of its dtype above or below: what rounding does to float32 at least."""
    before = [(p, p.data) for p in model.parameters() if p.is_floating_point()]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)  # torch.manual_seed would seed GPUs too
        for p, data in before:
            above = torch.rand(data.shape).to(data.device) < 0.5
            p.data = torch.nextafter(data, torch.where(above, torch.inf, -torch.inf).to(data.dtype))
    try:
        yield
    finally:
        for p, data in before:
            p.data = data


class _Proof:
    """The same documents through one model: each alone, or packed. What is compared depends on the model's head."""

    def __init__(self, model: Any, rows: RowLayout, *, marked: bool) -> None:
        self.model = model
        self.marked = marked
        self.capacity = rows.capacity
        self.head = head_of(model)
        self.documents = random_documents(model, rows.lengths)
        self.labels = labels_of(model, self.head, self.documents)
        both_ways = both_ways_of(model.config)
        self.prefix = both_ways.key if both_ways is not None and both_ways.prefix else None
        self.on_cpu = self.documents[0].device.type == "cpu"

    def alone(self) -> Computation:
        if self.head == "document":
            pairs = zip(self.documents, self.labels, strict=True)
            found = [self.model(input_ids=document[None], labels=label[None]) for document, label in pairs]
            return run(self.model, [x.logits[0] for x in found], torch.stack([x.loss for x in found]).mean())
        found = [self.model(input_ids=document[None], **self._kinds(document[None])) for document in self.documents]
        outputs = [self._outputs(output)[0] for output in found]
        return run(self.model, outputs, self._loss(outputs))

    def outputs_alone(self) -> list[Tensor]:
        found = [self.model(input_ids=document[None], **self._kinds(document[None])) for document in self.documents]
        return [output.logits[0] if self.head == "document" else self._outputs(output)[0] for output in found]

    def packed(self) -> Computation:
        """In rows, of which the last ends in padding."""
        outputs, loss = self.rows(self.documents)
        return self._over_ranks(run(self.model, outputs, self._loss(outputs) if self.head == "hidden states" else loss))

    def unchanged(self, *, replace: bool = False) -> Computation:
        """As :meth:`packed`, under a loss of every second document; ``replace`` exchanges every token of the others."""
        documents = [replaced(self.model, d) if replace and not i % 2 else d for i, d in enumerate(self.documents)]
        outputs, _ = self.rows(documents)
        return self._over_ranks(run(self.model, outputs, _projected(outputs[1::2])))

    def _over_ranks(self, found: Computation) -> Computation:
        """Returns what one process computes, from what each rank computes of its part of the documents."""
        context = context_of(self.model)
        if context is None:
            return found
        return replace(found, gradients=averaged(self.model, found.gradients, context))

    def rows_apart(self, *, replace: bool = False) -> Computation:
        """As :meth:`unchanged`, of documents of one length, each in a row of an unpacked batch."""
        outputs = self.outputs_of_rows(replace=replace)
        return run(self.model, outputs, _projected(outputs[1::2]))

    def outputs_of_rows(self, *, replace: bool) -> list[Tensor]:
        # Twice as many tokens: with as many, experts that round by their number of tokens can happen not to.
        ids = torch.stack(random_documents(self.model, [self.capacity // 4] * 16))
        if replace:
            ids[::2] = replaced(self.model, ids[::2])
        output = self.model(input_ids=ids, **self._kinds(ids))
        return list(output.logits if self.head == "document" else self._outputs(output))

    def rows(self, documents: list[Tensor]) -> tuple[list[Tensor], Any]:
        """Outputs of each document, and the model's loss, if it has one."""
        batch = self._batch(documents, self.capacity)
        lengths = batch["packed_lengths"]
        output = self.model(**(batch if self.marked else self._unmarked(batch)))
        if self.head == "document":
            return list(output.logits), output.loss
        outputs = self._outputs(output).flatten(0, 1)
        if context_of(self.model) is not None:
            outputs = whole_outputs(self.model, batch, outputs)
        return list(outputs.split(lengths)[: len(documents)]), getattr(output, "loss", None)

    @torch.no_grad()
    def router_error(self) -> float:
        """Measures how far padding moves the auxiliary loss."""
        batches = [self._batch(self.documents, capacity) for capacity in (self.capacity, None)]
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
        return _projected(outputs)

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
        for name in self._kinds(documents[0]):
            batch[name] = _laid_out([self._kinds(document)[name] for document in documents], batch, 1)
        return batch

    def _kinds(self, ids: Tensor) -> dict[str, Tensor]:
        """The kinds of the tokens [..., L] of documents, for a model that takes a prefix alone: of four tokens here."""
        if self.prefix is None:
            return {}
        places = torch.arange(ids.shape[-1], device=ids.device).expand(ids.shape)
        return {self.prefix: (places >= min(4, ids.shape[-1] // 2)).long()}

    def _unmarked(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns the inputs of stock packing: tokens, labels, and restarting positions if the model takes any."""
        names = ["input_ids", "labels", *self._kinds(batch["input_ids"])]
        if "position_ids" in forward_names(self.model):
            names.append("position_ids")
        return {name: batch[name] for name in names if name in batch}


def _projected(outputs: list[Tensor]) -> Tensor:
    """Something that depends on every output [..., D] of the documents."""
    flat = torch.cat([x.reshape(-1, x.shape[-1]) for x in outputs]).float()
    direction = torch.randn(flat.shape[-1], generator=torch.Generator().manual_seed(11))
    return (flat @ direction.to(flat.device)).square().mean()


def _laid_out(values: list[Tensor], batch: dict[str, Any], padding: int) -> Tensor:
    """[B, S]: the values [L] of each document where the document stands. Padding is at the end of the last row."""
    rows = torch.full_like(batch["input_ids"], padding)
    flat = torch.cat(values)
    rows.view(-1)[: len(flat)] = flat
    return rows
