"""Measures a model itself, where it holds what no clone has: adapters, quantised weights, hooks, replaced modules.

One short row and the same documents alone run through the model as training runs it, forward and backward, then the row
with every second document replaced (:mod:`.probe` does the same with a clone). Each run starts from the same buffers,
attributes and random numbers, and all of them are as before when the last one ends. Gradients are taken beside
the model's own, of the parameters of what was added, by which DDP and optimizers see none of it.

A model that ranks share (FSDP, ZeRO-3) runs forward alone: all ranks have to call this, and none has its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from packing_core.budget import by_largest, half_of
from torch_backend.auditing.compare import Computation, differences, outputs_error, without_dropout
from torch_backend.auditing.fingerprint import dtype_of
from torch_backend.auditing.probe import FEW, Probe, projected
from torch_backend.hf.anatomy.structure import execution_device, in_mode, sharding_inside, with_values
from torch_backend.hf.float8 import describe_float8
from torch_backend.hf.router import no_router_loss

_KEPT = 2**20  # numbers in a buffer that is copied: statistics have fewer, and what has more is weights


def measure_itself(model: Any, added: Iterable[nn.Module], *, marked: bool) -> dict[str, float]:
    """Measures what modules that no clone has do to packed documents.

    Args:
        model: is left as it was.
        added: these modules. Their constant weights are moved meanwhile, because what starts from zero does nothing.
        marked: whether the model takes the collator's batches, as in :func:`~.probe.measure`.

    Returns:
        ``logits``, ``gradients``, ``leak``, ``gradient_leak`` and what they may be, and ``moved``. Where rounding or
        random numbers depend on the other tokens of a batch, packed documents may differ from those alone by anything.
        Elsewhere they may by half the digits of the dtype.
    """
    added = list(added)
    with no_router_loss(model), _as_trained(model), _started(added), _renewed(model, added) as renew:
        weights = {} if sharding_inside(model) else _weights(model, added)
        return _Itself(model, weights, renew, marked=marked).figures()


class _Itself(Probe):
    """A probe that leaves the model, and the gradients of its parameters, as they are."""

    def __init__(
        self, model: Any, weights: Mapping[str, nn.Parameter], renew: Callable[[], None], *, marked: bool
    ) -> None:
        super().__init__(model, FEW, marked=marked)
        self.weights = weights
        self.renew = renew
        self.repeats = False  # what draws random numbers or was added may not

    def figures(self) -> dict[str, float]:
        packed, alone = self._packed(), self.compute(self.outputs_alone)
        logits, gradients = outputs_error(packed, alone), by_largest(differences(packed.gradients, alone.gradients))
        half = half_of(epsilon := self._epsilon(packed))
        moves, rounds = self.moves(epsilon)
        free = rounds or (max(logits, gradients) > half and self._draws(packed, half))
        allowed = float("inf") if free else half
        return {
            "logits": logits,
            "allowed_logits": allowed,
            "gradients": gradients,
            "allowed_gradients": allowed,
            **moves,
        }

    def compute(
        self, outputs: Callable[[], list[Tensor]], of: slice = slice(None), *, renew: bool = True
    ) -> Computation:
        if renew:
            self.renew()
        with torch.set_grad_enabled(bool(self.weights)):
            found = outputs()
            loss = projected(found[of])
        taken: Sequence[Tensor | None] = ()
        if loss.requires_grad:
            taken = torch.autograd.grad(loss, list(self.weights.values()), allow_unused=True)
        gradients = {name: g for name, g in zip(self.weights, taken, strict=False) if g is not None}
        return Computation([x.detach() for x in found], loss.detach(), gradients)

    def _packed(self, *, renew: bool = True) -> Computation:
        return self.compute(lambda: self.rows(self.documents)[0], renew=renew)

    def _draws(self, packed: Computation, half: float) -> bool:
        """Returns whether the model draws random numbers, so that no two runs of it are alike."""
        self._packed()
        return outputs_error(self._packed(renew=False), packed) > half

    def _epsilon(self, packed: Computation) -> float:
        """Returns that of the coarsest dtype of outputs, weights, products and autocast."""
        device = packed.outputs[0].device.type
        dtypes = [packed.outputs[0].dtype, dtype_of(self.model)]
        if torch.is_autocast_enabled(device):
            dtypes.append(torch.get_autocast_dtype(device))
        if describe_float8(self.model) is not None:
            dtypes.append(torch.float8_e4m3fn)
        return max(torch.finfo(dtype).eps for dtype in dtypes)


def _weights(model: nn.Module, added: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """Returns the trained parameters of what was added, or of the model where that has none."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)}
    inside = {id(p) for module in added for p in module.parameters()}
    return {name: p for name, p in trained.items() if id(p) in inside} or trained


@contextmanager
def _as_trained(model: nn.Module) -> Iterator[None]:
    """Inside, a model trains without dropout and recomputes nothing; in one that trains, modules keep their modes."""
    recomputing = [m for m in model.modules() if m.__dict__.get("gradient_checkpointing")]
    mode = nullcontext() if model.training else in_mode(model, training=True)
    with with_values((m, "gradient_checkpointing", False) for m in recomputing), mode, without_dropout(model):
        yield


def _started(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Inside, weights of these modules that are all one number are random; shared and quantised ones are left alone."""
    generator = torch.Generator().manual_seed(5)
    plain = {id(p): p for m in modules for p in m.parameters() if type(p) is nn.Parameter and p.is_floating_point()}
    constant = [p for p in plain.values() if p.numel() > 0 and bool((p == p.flatten()[0]).all())]
    return with_values(
        [(p, "data", p.data + 0.3 * torch.randn(p.shape, generator=generator).to(p.data)) for p in constant]
    )


@contextmanager
def _renewed(model: nn.Module, added: Iterable[nn.Module]) -> Iterator[Callable[[], None]]:
    """Gives a function that puts back buffers, the attributes of what was added, and the state of random numbers."""
    device = execution_device(model)
    tables: list[dict[str, Any]] = [module._buffers for module in model.modules()]
    tables += [m.__dict__ for a in added if a is not model for m in a.modules() if "_crosspack_active" not in vars(m)]
    inner = [x for table in tables for name, x in table.items() if isinstance(x, dict) and not name.endswith("_hooks")]
    tables = list({id(table): table for table in (*tables, *inner)}.values())
    before = [dict(table) for table in tables]
    buffers = {id(x): x for m in model.modules() for x in m._buffers.values() if x is not None and x.numel() <= _KEPT}
    values = [(x, x.detach().clone()) for x in buffers.values() if not (x.is_meta or isinstance(x, DTensor))]
    random = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def renew() -> None:
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)
        with torch.no_grad():
            for x, value in values:
                if x.shape != value.shape:  # an observer's, which has none before its first call
                    x.resize_(value.shape)
                if not torch.equal(x, value):
                    x.copy_(value)
        torch.set_rng_state(random[0])
        if random[1] is not None:
            torch.cuda.set_rng_state(random[1], device)

    try:
        yield renew
    finally:
        renew()
