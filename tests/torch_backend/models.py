"""Tiny models and the two ways to run the same documents: each alone, which is the truth, and packed."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_backend import PackedCollator, patch
from torch_backend.auditing.tiny import family_config, tiny_config, tiny_model

# Row 1: | 5 | 19 | 33 | 7 |   row 2: | 40 | 1 | 2 | 18 | 3 of padding |
LENGTHS = (5, 19, 33, 7, 40, 1, 2, 18)
CAPACITY = 64


# Arguments of a trainer: three steps of plain SGD on the CPU, everything logged.
PLAIN_SGD: dict[str, Any] = {
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "logging_steps": 1,
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
}

# Models that run by another route than the others of their family: here, the decoder by batches of documents.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {"falcon_alibi": ("falcon", {"alibi": True})}

_config = cache(family_config)


def tiny(family: str, seed: int = 0, **changes: Any) -> Any:
    """A fresh tiny model of the family, in train mode."""
    family, option = VARIANTS.get(family, (family, {}))
    changes = option | changes
    return tiny_model(tiny_config(_config(family), head_dim=16, changes=changes), seed=seed).train()


def in_float64(model: Any) -> Any:
    """The model in float64, with experts that take it: what is left is no rounding of the model's own."""
    if any("experts" in name for name, _ in model.named_modules()):
        model.set_experts_implementation("eager")
    return model.double()


def patched(family: str = "llama", **changes: Any) -> Any:
    """A tiny model, patched without the proof."""
    return patch(tiny(family, **changes), verify=False)


def traces(model: Any) -> Any:
    """Copies what a patch changes: attributes and hooks of modules, and the config."""
    modules = [(sorted(m.__dict__), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return copy.deepcopy([model.config._attn_implementation, model.config.to_dict(), modules])


def documents(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 90, (length,), generator=generator) for length in lengths]


def collate(docs: list[Tensor], **options: Any) -> dict[str, Any]:
    """Two rows of 64 by default; capacity=None for one row without padding."""
    options = {"capacity": CAPACITY, "strategy": "sequential", **options}
    return PackedCollator(**options)([{"input_ids": document} for document in docs])


def batch_of(**changes: Any) -> dict[str, Any]:
    """The rows of :func:`collate`, with other arguments."""
    return {**collate(documents()), **changes}


def ones() -> Tensor:
    """A mask of the rows without padding."""
    return torch.ones(2, 64, dtype=torch.long)


def with_mask(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with its padding marked, which is token 0 and in no document."""
    return {**batch, "attention_mask": (batch["input_ids"] != 0).long()}


@dataclass
class Run:
    logits: list[Tensor]  # per document [L, V]
    loss: Tensor
    gradients: dict[str, Tensor]


def alone(model: Any, docs: list[Tensor], **kwargs: Any) -> Run:
    """Every document in a batch of its own; the loss is the mean over all their targets."""
    logits = [model(input_ids=document[None], **kwargs).logits[0] for document in docs]
    losses = [F.cross_entropy(x[:-1], d[1:], reduction="sum") for x, d in zip(logits, docs, strict=True) if len(d) > 1]
    loss = torch.stack(losses).sum() / sum(len(document) - 1 for document in docs)
    return run_of(model, logits, loss)


def packed(model: Any, docs: list[Tensor], batch: dict[str, Any] | None = None, **kwargs: Any) -> Run:
    batch = collate(docs) if batch is None else batch
    output = model(**batch, **kwargs)
    per_document = torch.split(output.logits.flatten(0, 1), list(batch["packed_lengths"]))[: len(docs)]
    return run_of(model, list(per_document), output.loss)


def run_of(model: Any, logits: list[Tensor], loss: Tensor) -> Run:
    found = {}
    if loss.requires_grad:
        found = gradients(model, loss)
        model.zero_grad()
    return Run([x.detach() for x in logits], loss.detach(), found)


def error(got: Tensor, want: Tensor) -> float:
    """max |got - want| / max |want|; infinite if it is not a number, which max() of several errors would pass over."""
    relative = float(((got - want).abs().max() / want.abs().max().clamp_min(1e-6)).detach())
    return math.inf if math.isnan(relative) else relative


def assert_same(got: Run, want: Run, tolerance: float = 1e-5) -> None:
    """Logits of every document, the loss and every gradient agree."""
    assert len(got.logits) == len(want.logits)
    for i, (g, w) in enumerate(zip(got.logits, want.logits, strict=True)):
        assert error(g, w) <= tolerance, f"logits of document {i}"
    assert error(got.loss, want.loss) <= tolerance, "loss"
    assert got.gradients.keys() == want.gradients.keys()
    for name in want.gradients:
        assert error(got.gradients[name], want.gradients[name]) <= tolerance, f"gradient of {name}"


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Returns the gradients of a loss by the names of the parameters that have one."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Every gradient agrees within 1e-5 of the largest of all."""
    scale = max(float(gradient.abs().max()) for gradient in want.values())
    assert found.keys() == want.keys()
    for name, gradient in want.items():
        assert float((found[name] - gradient).abs().max()) <= 1e-5 * scale, name


def leaves(docs: list[Tensor], run: Run) -> list[Tensor]:
    """Everything a run produced, for comparisons to the bit."""
    return [*run.logits, run.loss, *run.gradients.values()]
