"""The perturbation test of the board: changes one document of a packed batch and looks whether another one moves.

Documents -> a stack's batches -> the model's logits -> each document's logits and loss, found in the batch by its
tokens. The same for the documents with one of them changed. What moves in the others is contamination.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from packing_core.budget import FLOAT32
from packing_core.errors import first_line
from torch_backend.auditing.compare import (
    Computation,
    gradients_error,
    next_token_loss,
    relative_error,
    replaced,
    run,
)

Batch = dict[str, Any]
MakeBatches = Callable[[list[list[int]]], list[Batch]]
IGNORED = -100


@dataclass(frozen=True)
class Cell:
    """One stack with one class of models.

    Attributes:
        verdict: ``exact``, ``contaminated``, ``differs`` (no document moves another, and yet they are not what they are
            alone), ``refused`` or ``not run``.
        logits, loss: how far the others move, of the largest value, at most.
        gradients: difference from each document alone, of the worst parameter.
        reason: of ``refused`` and ``not run``.
    """

    verdict: str
    logits: float = 0.0
    loss: float = 0.0
    gradients: float = 0.0
    reason: str = ""

    def text(self) -> str:
        """Returns the cell as the table shows it, without its reason."""
        if self.verdict == "contaminated":
            moved = [f"{name} {value:.2g}" for name, value in (("logits", self.logits), ("loss", self.loss))]
            return "contaminated: " + ", ".join(m for m, v in zip(moved, (self.logits, self.loss)) if v > FLOAT32)
        if self.verdict == "differs":
            return f"differs: gradients {self.gradients:.2g}"
        return self.verdict


def judge(model: nn.Module, documents: Sequence[Tensor], make: MakeBatches, alone: Computation) -> Cell:
    """Runs the perturbation test, and compares the gradients with those of each document alone.

    Args:
        model: takes the batches but their ``labels``, and returns ``logits`` [B, S, V].
        documents: int64 [L] each, no two alike.
        make: token lists to the model's arguments, with ``labels`` as Hugging Face's losses read them (not shifted).
        alone: of the same weights, from :func:`each_alone`.
    """
    try:
        right, losses, loss = packed(model, documents, make)
        gradients = run(model, right, loss).gradients
        moved = {"logits": 0.0, "loss": 0.0}
        with torch.no_grad():
            for changed in range(len(documents)):
                others = [replaced(model, d) if i == changed else d for i, d in enumerate(documents)]
                logits, changed_losses, _ = packed(model, others, make)
                for i in range(len(documents)):
                    if i != changed:
                        moved["logits"] = max(moved["logits"], relative_error(logits[i], right[i].detach()))
                        moved["loss"] = max(moved["loss"], relative_error(changed_losses[i], losses[i].detach()))
    except Exception as error:  # a stack may raise anything, and what it says is the result
        model.zero_grad()
        return failed(error)
    off = gradients_error(gradients, alone.gradients)[0]
    leaks = max(moved.values()) > FLOAT32
    verdict = "contaminated" if leaks else "differs" if off > FLOAT32 else "exact"
    return Cell(verdict, moved["logits"], moved["loss"], off)


def failed(error: Exception) -> Cell:
    """Returns the cell of what was raised: a module that is missing means that the stack was not run."""
    verdict = "not run" if isinstance(error, ModuleNotFoundError) else "refused"
    return Cell(verdict, reason=f"{type(error).__name__}: {first_line(error)}"[:240])


def each_alone(model: nn.Module, documents: Sequence[Tensor]) -> Computation:
    """Runs each document on its own: the reference."""
    logits = [model(input_ids=document[None], use_cache=False).logits[0] for document in documents]
    return run(model, logits, next_token_loss(logits, list(documents)))


def packed(
    model: nn.Module, documents: Sequence[Tensor], make: MakeBatches
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Returns each document's logits [L, V] and summed loss, and the loss of the batch, a mean over its labels."""
    lists = [document.tolist() for document in documents]
    logits: dict[int, Tensor] = {}
    losses: dict[int, Tensor] = {}
    counted = 0
    for batch in make(lists):
        labels = torch.as_tensor(batch.pop("labels"))
        rows = torch.as_tensor(batch["input_ids"]).tolist()
        output = model(**batch).logits
        for row, tokens in enumerate(rows):
            shifted = cross_entropy(output[row, :-1], labels[row, 1:], ignore_index=IGNORED, reduction="none")
            counted += int((labels[row, 1:] != IGNORED).sum())
            for i, document in enumerate(lists):
                start = _find(document, tokens)
                if start is not None:
                    end = start + len(document)
                    logits[i] = output[row, start:end]
                    losses[i] = shifted[max(start - 1, 0) : end - 1].sum()
    if len(logits) != len(lists):
        raise LookupError(f"{len(lists) - len(logits)} of {len(lists)} documents are not in the batch")
    ordered = [losses[i] for i in range(len(lists))]
    return [logits[i] for i in range(len(lists))], ordered, torch.stack(ordered).sum() / counted


def _find(document: list[int], tokens: list[int]) -> int | None:
    starts = range(len(tokens) - len(document) + 1)
    return next((start for start in starts if tokens[start : start + len(document)] == document), None)
