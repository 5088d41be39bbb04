"""The probe: the same documents through one model, each alone and packed, and packed with every second one replaced.

A clone and documents -> each alone, in float32 and as rounding changes it -> packed -> every second document replaced,
under a loss of the others alone -> the figures of an :class:`~torch_backend.auditing.model.AuditReport`. A figure and
what it may be belong together: twice what rounding does to the documents alone, and a floor
(:mod:`packing_core.budget`). When documents are replaced, rounding is the same before and after, so the others' outputs
may not move by a bit more than the model's own repetition moves them, and the gradients of their loss by no more than
the order of their sums does, whatever the dtype is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from packing_core import budget
from packing_core.batches.keys import BatchKey
from packing_core.batches.stored import IGNORE_INDEX
from torch_backend.auditing.compare import (
    Computation,
    averaged,
    differences,
    labels_of,
    next_token_loss,
    outputs_error,
    random_documents,
    relative_error,
    replaced,
    run,
    whole_outputs,
)
from torch_backend.collate import PackedCollator
from torch_backend.hf.anatomy.families import both_ways_of
from torch_backend.hf.anatomy.heads import head_of
from torch_backend.hf.anatomy.structure import with_values
from torch_backend.hf.override import forward_names
from torch_backend.hf.patch import context_of
from torch_backend.hf.router import asks_for_router_loss, no_router_loss
from torch_backend.losses.cross_entropy import packed_cross_entropy
from torch_backend.packed_tokens import plain


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
SECOND = slice(1, None, 2)  # every second document, of those whose others are replaced


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
        probe = Probe(clone, rows, marked=patch is not None)
        exact = probe.alone()
        if dtype == torch.float32:
            with _neighbours(clone):
                rounded = probe.alone()
        else:
            clone.to(dtype)
            rounded = probe.alone()
        if patch is not None:
            patch(clone)
        packed, epsilon = probe.packed(), torch.finfo(dtype).eps
        figures = _against_alone(packed, exact, epsilon, rounded)
        if figures["gradients"] > figures["allowed_gradients"]:  # narrow sums round by their length, too
            figures = _against_alone(packed, exact, epsilon, rounded, probe.alone(copies=len(probe.documents)))
        figures |= probe.moves(epsilon, packed)[0]
    if tolerance is not None:
        figures |= {name: tolerance for name in figures if name.startswith("allowed")}
    router = patch is not None and asks_for_router_loss(clone, {})
    return {**figures, "router_loss": probe.router_error() if router else None}


def _against_alone(packed: Computation, exact: Computation, epsilon: float, *rounded: Computation) -> dict[str, Any]:
    """Compares what is packed with the documents alone, which are ``rounded`` in one arrangement or several."""
    floor = budget.floor_of(epsilon)
    gradients, allowed, worst = budget.worst_by_bound(
        differences(packed.gradients, exact.gradients),
        floor,
        *(differences(each.gradients, exact.gradients) for each in rounded),
    )
    return {
        "logits": outputs_error(packed, exact),
        "loss": relative_error(packed.loss, exact.loss),
        "gradients": gradients,
        "worst_parameter": worst,
        "allowed_logits": budget.FACTOR * outputs_error(rounded[0], exact) + floor,
        "allowed_loss": budget.FACTOR * relative_error(rounded[0].loss, exact.loss) + floor,
        "allowed_gradients": allowed,
    }


def _moved(after: Computation, before: Computation) -> tuple[float, float]:
    """Returns how far every second document moved, and the gradients of their loss by the largest of all."""
    moved = differences(after.gradients, before.gradients)
    return outputs_error(after, before, SECOND), budget.by_largest(moved)


def _neighbours(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, every weight is the next number of its dtype above or below: what rounding does to float32 at least."""
    values = []
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)  # torch.manual_seed would seed GPUs too
        for data, p in [(p.data, p) for p in model.parameters() if p.is_floating_point()]:
            above = torch.rand(data.shape).to(data.device) < 0.5
            ends = torch.where(above, torch.inf, -torch.inf).to(data.dtype)
            values.append((p, "data", torch.nextafter(data, ends)))
    return with_values(values)


class Probe:
    """The same documents through one model: each alone, or packed. What is compared depends on the model's head.

    Args:
        model: takes the collator's batches if ``marked``, else rows with restarting ``position_ids``.
        rows: which documents.

    Attributes:
        repeats: whether a second run gives to the bit what the first one gave, as on the CPU.
    """

    def __init__(self, model: Any, rows: RowLayout, *, marked: bool) -> None:
        self.model = model
        self.marked = marked
        self.capacity = rows.capacity
        self.head = head_of(model)
        self.documents = random_documents(model, rows.lengths)
        self.labels = labels_of(model, self.head, self.documents)
        both_ways = both_ways_of(model.config)
        self.prefix = both_ways.key if both_ways is not None and both_ways.prefix else None
        self.repeats = self.documents[0].device.type == "cpu"

    def alone(self, *, copies: int = 1) -> Computation:
        """Runs each document alone, or in a batch of so many copies, which compute the same in longer sums."""
        batches = [document.expand(copies, -1) for document in self.documents]
        if self.head == "document":
            pairs = zip(batches, self.labels, strict=True)
            found = [self.model(input_ids=ids, labels=label.expand(copies, *label.shape)) for ids, label in pairs]
            return run(self.model, [x.logits[0] for x in found], torch.stack([x.loss for x in found]).mean())
        found = [self.model(input_ids=ids, **self._kinds(ids)) for ids in batches]
        outputs = [output for each in found for output in self._outputs(each)]
        return run(self.model, outputs[::copies], self._loss(outputs, copies))

    def outputs_alone(self) -> list[Tensor]:
        found = [self.model(input_ids=document[None], **self._kinds(document[None])) for document in self.documents]
        return [output.logits[0] if self.head == "document" else self._outputs(output)[0] for output in found]

    def packed(self, choose: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> Computation:
        """Runs them in rows, of which the last ends in padding.

        Args:
            choose: what the model is called with, of the collator's batch, where its loss is made of its outputs here;
                None calls it as ``marked`` says, for its own loss.
        """
        outputs, loss = self.rows(self.documents, choose)
        own = choose is None and self.head != "hidden states"
        return self._over_ranks(run(self.model, outputs, loss if own else self._loss(outputs)))

    def moves(self, epsilon: float, packed: Computation | None = None) -> tuple[dict[str, float], bool]:
        """Measures how far documents move when those beside them are replaced.

        Nothing moves in most models, to the bit. Where rounding depends on the other tokens (products of experts are as
        long as the number of their tokens), it also does among the rows of a batch that cannot see each other, and what
        it does there is allowed twice, and the floor.

        Args:
            epsilon: of the dtype of the computation.
            packed: another run of the same rows, whose outputs count among the noise.

        Returns:
            Figures of a report, and whether rounding depends on the other tokens.
        """
        before, after = self._others(), self._others(replace=True)
        again = before if self.repeats else self._others()
        noise, noise_of_gradients = _moved(again, before)
        if packed is not None:
            noise = max(outputs_error(before, packed), outputs_error(again, before))
        leak, gradient_leak = _moved(after, before)
        rounding = rounding_of_gradients = floor = 0.0
        if leak or gradient_leak:
            moves = [_moved(*(self._apart(shape, replace=each) for each in (True, False))) for shape in self._shapes]
            rounding, rounding_of_gradients = (max(column) for column in zip(*moves, strict=True))
            floor = budget.floor_of(epsilon) if rounding or rounding_of_gradients else 0.0
        figures = {
            "leak": leak,
            "gradient_leak": gradient_leak,
            "moved": min(map(relative_error, after.outputs[::2], before.outputs[::2])),
            "allowed_leak": budget.moves_allowed(noise, rounding, floor, epsilon),
            "allowed_gradient_leak": budget.moves_allowed(noise_of_gradients, rounding_of_gradients, floor, epsilon),
        }
        return figures if packed is None else figures | {"noise": noise}, bool(floor)

    def compute(self, outputs: Callable[[], list[Tensor]], of: slice) -> Computation:
        """Runs the model, and the backward of a loss of the documents ``of`` alone."""
        found = outputs()
        return self._over_ranks(run(self.model, found, projected(found[of])))

    def _others(self, *, replace: bool = False) -> Computation:
        """As :meth:`packed`, under a loss of every second document; ``replace`` exchanges every token of the others."""
        documents = [replaced(self.model, d) if replace and not i % 2 else d for i, d in enumerate(self.documents)]
        return self.compute(lambda: self.rows(documents)[0], SECOND)

    def _apart(self, shape: tuple[int, int], *, replace: bool) -> Computation:
        """As :meth:`_others`, of documents of one length, each in a row of an unpacked batch."""
        rows, length = shape
        ids = torch.stack(random_documents(self.model, [length] * rows))
        if replace:
            ids[::2] = replaced(self.model, ids[::2])

        def outputs() -> list[Tensor]:
            output = self.model(input_ids=ids, **self._kinds(ids))
            return list(output.logits if self.head == "document" else self._outputs(output))

        return self.compute(outputs, SECOND)

    def _over_ranks(self, found: Computation) -> Computation:
        """Returns what one process computes, from what each rank computes of its part of the documents."""
        context = context_of(self.model)
        if context is None:
            return found
        return replace(found, gradients=averaged(self.model, found.gradients, context))

    @property
    def _shapes(self) -> tuple[tuple[int, int], ...]:
        """Unpacked batches [B, S] that show whether rounding depends on the tokens of other rows.

        Experts may round by their number of tokens, and happen not to in one batch: four times as many tokens as a row
        has, as many, and several counts so small that experts get one, whose product is one of a matrix and a vector.
        """
        return ((16, self.capacity // 4), (4, self.capacity // 4), *((rows, 1) for rows in (4, 5, 8, 12)))

    def rows(
        self, documents: list[Tensor], choose: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    ) -> tuple[list[Tensor], Any]:
        """Outputs of each document, and the model's loss, if it has one."""
        batch = self._batch(documents, self.capacity)
        lengths = batch[BatchKey.LENGTHS]
        choose = choose or (dict if self.marked else self._unmarked)
        output = self.model(**choose(batch))
        if self.head == "document":
            return list(output.logits), output.loss
        outputs = self._outputs(output).flatten(0, 1)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if context_of(self.model) is not None:
            outputs = whole_outputs(self.model, batch, outputs)
        return list(outputs.split(lengths)[: len(documents)]), loss

    @torch.no_grad()
    def router_error(self) -> float:
        """Measures how far padding moves the auxiliary loss."""
        batches = [self._batch(self.documents, capacity) for capacity in (self.capacity, None)]
        for batch in batches:
            batch["attention_mask"] = _laid_out([torch.ones_like(d) for d in self.documents], batch, 0)
        padded, unpadded = (self.model(**batch).aux_loss for batch in batches)
        return relative_error(padded, unpadded)

    def _outputs(self, output: Any) -> Tensor:
        name = "last_hidden_state" if self.head == "hidden states" else "logits"
        found: Tensor = output[name] if isinstance(output, Mapping) else getattr(output, name)
        return found

    def _loss(self, outputs: list[Tensor], copies: int = 1) -> Tensor:
        """The mean over the targets of all documents, or something that depends on every hidden state."""
        documents, labels = ([x for x in each for _ in range(copies)] for each in (self.documents, self.labels))
        if self.head == "next token":
            return next_token_loss(outputs, documents)
        if self.head in ("token", "masked token"):
            loss, weight = packed_cross_entropy(torch.cat(outputs), torch.cat(labels))
            return loss / weight
        return projected(outputs)

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
        return plain({name: batch[name] for name in names if name in batch})


def projected(outputs: list[Tensor]) -> Tensor:
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
