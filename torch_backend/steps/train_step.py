"""``make_train_step(model, optimizer)``: one optimizer step over packed batches, as fast as the model allows.

Microbatches -> their targets are counted over all microbatches and ranks -> each adds the gradients of its summed loss,
divided by that number (:mod:`.fast_backward`) -> clipping -> optimizer -> schedule -> metrics. So neither the size of
microbatches nor their distribution over ranks makes a difference.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from packing_core.batches.keys import BatchKey
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import LayoutError, UnsupportedError, UnsupportedModelError
from torch_backend.hf.anatomy.heads import labels_documents, targets_among, trains_first_token
from torch_backend.hf.anatomy.structure import causal_lm, execution_device, in_mode
from torch_backend.hf.float8 import Precision, to_float8
from torch_backend.hf.index_loss import index_coefficient
from torch_backend.hf.patch import context_of, cut_over_ranks, state_of
from torch_backend.losses.causal_lm import LOSS_WEIGHTS, causal_lm_loss
from torch_backend.ops.divisor import Divisor, part_of_mean, quotient
from torch_backend.segments import to_device
from torch_backend.steps.checks import check_numbers, check_optimizer, check_ranks, check_trainable, warn_of_other_ranks
from torch_backend.steps.eligibility import fast_loss_refused
from torch_backend.steps.fast_backward import (
    Batch,
    Choice,
    Gradients,
    StepInputs,
    run_layers,
)
from torch_backend.steps.fixed_shapes import FixedShapes
from torch_backend.steps.graph_collectives import Counts
from torch_backend.steps.memory import Memory, check_level, set_level
from torch_backend.steps.memory_fit import FittedLevel, StepMemory, tokens_of
from torch_backend.steps.tiled_layers import tiled, tiled_modules

_SHARDED = (FullyShardedDataParallel, FSDPModule)
_DATA_PARALLEL = (DistributedDataParallel, *_SHARDED)


class Metrics(TypedDict):
    """Results of a step. Tensors are scalars on the model's device; reading them waits for it.

    Attributes:
        loss: mean over all targets of the step, in all microbatches and on all ranks, before the update.
        tokens: the number of these targets.
        grad_norm: of the gradients of ``loss``, before clipping.
        learning_rate: of the first parameter group, in this step.
    """

    loss: Tensor
    tokens: Tensor
    grad_norm: Tensor
    learning_rate: float | Tensor


class Evaluation(TypedDict):
    """Results of an evaluation, as scalars on the model's device.

    Attributes:
        loss: mean over all targets, float64.
        tokens: the number of these targets.
    """

    loss: Tensor
    tokens: Tensor


class TrainStep:
    """``metrics = step(batch)``; see :func:`make_train_step`.

    Args:
        fixed: shapes that the data are known to need, so that no later batch needs others.
        fitted: chooses the level of memory, or checks it.

    Attributes:
        parts: "loss", "layers" and "graph": what of the step is fast, and why the rest is not; known after a step. On
            a GPU also "memory": the longest row that fits at each level; and after a long row "tiles".
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any = None,
        max_grad_norm: float | None,
        autocast: torch.dtype | None,
        compile: Choice,
        capture: Choice,
        group: dist.ProcessGroup | None = None,
        fixed: FixedShapes | None = None,
        fitted: FittedLevel | None = None,
    ) -> None:
        if any(base.__name__ == "DeepSpeedEngine" for base in type(model).__mro__):
            raise UnsupportedError(
                "make_train_step cannot train a DeepSpeedEngine, which runs backward() and optimizer.step() itself: "
                "use a Trainer with enable_packing(trainer), or wrap the model in DDP or FSDP2"
            )
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.max_grad_norm = max_grad_norm
        self.divisor = Divisor(group)
        self.device = execution_device(causal_lm(model))
        self.wrappers = wrappers_of(model)
        self._counts = Counts(group, self.divisor.ranks)
        self._gathers = self.divisor.ranks > 1 and any(isinstance(each, _SHARDED) for each in self.wrappers)
        if (ranks := self.divisor.ranks) > 1 and not self.wrappers:
            raise UnsupportedError(
                f"{ranks} ranks would train {type(model).__name__} apart, because nothing reduces its gradients: "
                "wrap it first, DistributedDataParallel(model) or fully_shard(model), or pass the group of ranks that "
                "hold different documents"
            )
        if (context := context_of(model)) is not None:
            check_ranks(context.group, group, self.wrappers[0] if self.wrappers else None)
        if self.wrappers and dist.is_initialized():
            warn_of_other_ranks(group, self.wrappers[0])
        self._precision: Callable[[], AbstractContextManager[Any]] = lambda: torch.autocast(
            self.device.type, autocast, enabled=autocast is not None
        )
        self._labels_documents = labels_documents(model)
        self._first_token = 0 if trains_first_token(model) or self._labels_documents else 1
        self._takes_count = _takes_count(causal_lm(model))
        self._memory, self._fitted = StepMemory(model, optimizer, autocast), fitted
        self._new_gradients = partial(
            Gradients,
            model,
            self._backward,
            self._choose,
            compile=compile,
            capture=capture,
            fixed=fixed,
            fits_whole=self._memory.fits_whole,
        )
        self._gradients = self._new_gradients()

    @property
    def parts(self) -> dict[str, str]:
        memory = self._memory.describe()
        return dict(self._gradients.parts) | ({} if memory is None else {"memory": memory})

    def __call__(self, batch: Batch | Sequence[Batch]) -> Metrics:
        """Take one optimizer step.

        Args:
            batch: keyword arguments of the model with ``labels``, as a packed collator makes them, or a sequence of
                such microbatches. Tensors may be on the host; if they are, counting targets waits for nothing.

        Raises:
            LayoutError: there is no microbatch, or one has no labels; under FSDP all ranks raise if one does.
            UnsupportedError: documents are cut over ranks, and a batch does not say where they begin.
        """
        microbatches = [self._part(each) for each in ([batch] if isinstance(batch, Mapping) else batch)]
        labelled = bool(microbatches) and all(each.get("labels") is not None for each in microbatches)
        if self._gathers:
            microbatches = self._counts.evened(microbatches if labelled else [], self._emptied)
        elif not labelled:
            raise LayoutError("a step takes a batch with labels, or a list of at least one")
        check_trainable(self.model)  # it may have been frozen since
        memory = replace(self._memory, accumulates=len(microbatches) > 1)
        if self._fitted is not None and self._fitted.fit(memory, max(map(tokens_of, microbatches))):
            self._gradients = self._new_gradients()
        tokens = self._total(self._count, microbatches)
        weighted = any(LOSS_WEIGHTS in each for each in microbatches)
        weight = self._total(self._weight, microbatches) if weighted else tokens
        self.optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float32, device=self.device)
        for number, each in enumerate(microbatches):
            given = self._on_device(each)
            last = number == len(microbatches) - 1
            with accumulating(self.wrappers, last=last), memory.naming_the_level(each):
                loss += self._gradients(StepInputs(given, weight), last=last)
        norm = self._clip()
        rate = self.optimizer.param_groups[0]["lr"]
        rate = rate.clone() if isinstance(rate, Tensor) else float(rate)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        loss = self.divisor.average(loss)
        return {"loss": loss, "tokens": tokens, "grad_norm": norm, "learning_rate": rate}

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Evaluation:
        """The loss of batches as a step counts it: over all their targets, in all batches and on all ranks.

        The model runs in evaluation mode and is left unchanged. Under FSDP, and under DDP with buffers, each forward
        waits for the other ranks, so a rank with fewer batches runs its last one again without counting it.

        Raises:
            LayoutError: ranks wait for each other, and one has no batch; on all of them.
        """
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # of losses and of weights, number of targets
        prepared, why_logits = self._gradients.prepared, self._gradients.why_logits
        with in_mode(self.model, training=False):
            for batch, counts in self._counts.together(batches) if self._waits else zip(batches, repeat(True)):
                inputs = self._on_device(self._part(batch))
                if not prepared:
                    prepared, why_logits = True, self._choose(inputs, forward=False)
                parts = tiled_modules(self.model, tokens_of(inputs), self._gradients.fits_whole)
                with self._precision(), tiled(parts):
                    loss = self._loss_sum(inputs, why_logits)
                if counts:
                    sums += torch.stack([loss.double(), self._weight(inputs).double(), self._count(inputs).double()])
        loss, weight, tokens = self.divisor.total(sums)
        return {"loss": quotient(loss, weight), "tokens": tokens.long()}

    def _part(self, batch: Batch) -> Batch:
        """Returns what this rank runs of a batch."""
        part = cut_over_ranks(self.model, batch)
        if context_of(self.model) is not None and part.get(BatchKey.SHARE) is None:
            raise UnsupportedError(
                "the batch does not say where its documents begin, so it is not cut over ranks, and each of them would "
                "count all of its targets: collate it with PackedCollator(model), even if it is one document"
            )
        return part

    def _count(self, batch: Batch) -> Tensor:
        """Counts the targets of a batch."""
        return to_device(self._targets(batch).sum(), self.device)

    def _weight(self, batch: Batch) -> Tensor:
        """Adds up the weights of a batch's targets: their number, unless the batch carries weights."""
        weights = batch.get(LOSS_WEIGHTS)
        if weights is None:
            return self._count(batch)
        counted = self._targets(batch).to(weights.device)
        first = self._first_token if batch.get("shift_labels") is None else 0
        return to_device((weights[..., first:] * counted).sum(), self.device)

    def _targets(self, batch: Batch) -> Tensor:
        """Marks the tokens that are targets."""
        shifted = batch.get("shift_labels")
        labels: Tensor = batch["labels"][..., self._first_token :] if shifted is None else shifted
        return targets_among(labels, causal_lm(self.model).config, of_documents=self._labels_documents)

    def _backward(self, inputs: StepInputs) -> Tensor:
        """Forward and backward of a microbatch; its part of the loss, times the number of ranks."""
        with self._precision():
            loss_sum = self._loss_sum(inputs.batch, self._gradients.why_logits)
        loss = self.divisor.mean(loss_sum, inputs.targets)
        loss.backward()
        return loss.detach()

    @property
    def _waits(self) -> bool:
        """Returns whether ranks wait for each other in the forward of an evaluation."""
        ddp = (each for each in self.wrappers if isinstance(each, DistributedDataParallel))
        return self._gathers or (self.divisor.ranks > 1 and any(each.will_sync_module_buffers() for each in ddp))

    def _emptied(self, batch: Batch) -> Batch:
        """Returns a microbatch without its targets.

        Raises:
            LayoutError: every label is a target, as in a regression; on the other ranks as well.
        """
        names = [name for name in ("labels", "shift_labels") if batch.get(name) is not None]
        empty = {**batch, **{name: torch.full_like(batch[name], IGNORE_INDEX) for name in names}}
        if bool(self._targets(empty).any()):
            raise LayoutError(
                "ranks have different numbers of microbatches, and each forward of a sharded model waits for all "
                "ranks: pass the same number on every rank, because labels that are scores cannot be left empty"
            )
        return empty

    def _on_device(self, batch: Batch) -> dict[str, Any]:
        return {name: to_device(x, self.device) if isinstance(x, Tensor) else x for name, x in batch.items()}

    def _loss_sum(self, batch: Batch, why_logits: str | None) -> Tensor:
        return causal_lm_loss(self.model, batch)[0] if why_logits is None else self._own_loss(batch)

    def _own_loss(self, batch: Batch) -> Tensor:
        """The loss that the model computes, a mean over its targets, as a sum."""
        count = self._targets(batch).sum()
        more = {"num_items_in_batch": count.clamp(min=1)} if self._takes_count else {}
        loss = self.model(**{**batch, "use_cache": False, **more})[0]
        return part_of_mean(loss, count)

    def _choose(self, batch: Batch, forward: bool) -> str | None:
        with self._precision():
            reason = fast_loss_refused(self.model, batch)
            if LOSS_WEIGHTS in batch and (reason is not None or self._adds_loss()):
                raise UnsupportedError(
                    'rows with weighting="document" need the loss without logits, which is not to be had here: '
                    f'{reason or "a router or indexers add a loss that has no weights"}. Pack with weighting="token"'
                )
            if reason is not None and forward:
                run_layers(self.model, batch)
        return reason

    def _adds_loss(self) -> bool:
        root = causal_lm(self.model)
        return bool(getattr(root.config, "output_router_logits", False)) or bool(index_coefficient(root))

    def _clip(self) -> Tensor:
        """The norm of the gradients of all ranks, which are clipped to ``max_grad_norm``."""
        limit = self.max_grad_norm
        outer = self.wrappers[0] if self.wrappers else None
        if isinstance(outer, FullyShardedDataParallel):
            norm = outer.clip_grad_norm_(float("inf") if limit is None else limit)
        else:
            parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
            norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])  # type: ignore[misc]
            if isinstance(norm, DTensor):
                norm = norm.full_tensor()
            if limit is not None:
                nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    def _total(self, number: Callable[[Batch], Tensor], microbatches: Sequence[Batch]) -> Tensor:
        """Adds up a number of each microbatch over all of them and over the ranks."""
        return self.divisor.total(torch.stack([number(each) for each in microbatches]).sum())


def wrappers_of(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of a model that reduce gradients over ranks, the outermost first."""
    return [module for module in model.modules() if isinstance(module, _DATA_PARALLEL)]


def accumulating(wrappers: Sequence[nn.Module], *, last: bool) -> AbstractContextManager[Any]:
    """Delays gradient reduction to the last microbatch, where nothing is recorded and the wrapper can wait."""
    for module in wrappers:
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last, recurse=False)
    outer: Any = wrappers[0] if wrappers else None
    if last or outer is None or isinstance(outer, FSDPModule) or getattr(outer, "static_graph", False):
        return nullcontext()
    waiting: AbstractContextManager[Any] = outer.no_sync()
    return waiting


def make_train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    scheduler: Any = None,
    max_grad_norm: float | None = None,
    autocast: torch.dtype | None = None,
    compile: Choice = "auto",
    capture: Choice = "auto",
    group: dist.ProcessGroup | None = None,
    memory: Memory | None = None,
    precision: Precision | None = None,
) -> TrainStep:
    """Build the training step of a model: batch in, metrics out.

    The loss is the mean over every target of the step, however many microbatches it is cut into and however many ranks
    share it. If the step has no target at all, its loss and gradients are 0, and the optimizer still takes its step:
    weight decay and momentum act, and the schedule advances.

    On a GPU, a model whose batches :class:`torch_backend.PackedCollator` makes with a capacity runs with the loss that
    holds no logits, compiled layers, and forward and backward as a CUDA graph. Where a part cannot be fast it runs as
    usual; ``step.parts`` and ``torch_backend.explain(step)`` say why.

    Args:
        model: a patched transformers model, or a wrapper of one (DDP, FSDP, PEFT); in training mode.
        optimizer: any that steps from gradients alone, over the model's parameters.
        scheduler: what ``step()`` is called on after every optimizer step, a ``torch.optim.lr_scheduler`` for example.
        max_grad_norm: gradients are clipped to this norm, above 0; None leaves them as they are.
        autocast: ``torch.bfloat16`` runs forward passes under ``torch.autocast``; None in the dtype of the weights.
        compile: layers one by one. True raises ``UnsupportedError`` at the first step where it is not possible.
        capture: forward and backward as a CUDA graph. As with ``compile``. What a graph cannot see must not change
            after the first steps: hooks, dropout rates and whatever else is no parameter and not in the batch.
        group: the ranks that hold different tokens; the default group if None. Every rank passes at least one
            microbatch; under FSDP a rank that has fewer than others runs its last one again, without targets. The ranks
            of a context-parallel mesh are among them, and pass the same microbatches.
        memory: what each layer keeps between forward and backward: everything (``"none"``); the results of attention,
            scans and narrow products (``"selective"``); its input and the result of attention (``"attention"``); its
            input (``"full"``, as gradient checkpointing does); its input, on the host (``"offload"``). The rest is
            recomputed. ``"auto"`` takes the fastest level at which the longest microbatch fits, and prints it. None
            leaves the model as it is set, for example by ``gradient_checkpointing_enable``.
        precision: ``"float8"`` lets the linear layers of attention and MLPs multiply in float8, by torchao's recipe
            ``rowwise_with_gw_hp``; ``"float8:rowwise"`` and ``"float8:tensorwise"`` by others, in which the documents
            of a row share scales (docs/contract.md). Weights keep their dtype, and ``unpatch`` takes it back. None
            leaves the layers as they are.

    Raises:
        PackingError: ``memory`` is no level, ``precision`` no recipe; ``max_grad_norm`` is not above 0, or ``autocast``
            another dtype.
        UnsupportedModelError: ``model`` holds no transformers model or one that is not patched, or DataParallel stands
            around it; or its weights cannot be cast to float8.
        UnsupportedError: there are several ranks, and nothing reduces the model's gradients over them; ``model`` is a
            DeepSpeedEngine, wholly frozen or trained in float16; ``memory`` is ``"auto"``, and documents are cut over
            ranks; the optimizer is another model's or the scheduler another optimizer's; or a ``step()`` of theirs
            needs an argument, as those of LBFGS and ReduceLROnPlateau do; or the device has no products of float8.

    >>> import torch_backend  # doctest: +SKIP
    >>> step = torch_backend.make_train_step(model, torch.optim.AdamW(model.parameters()), max_grad_norm=1.0)
    >>> for batch in loader:
    ...     metrics = step(batch)
    """
    step = TrainStep(
        model,
        optimizer,
        scheduler=scheduler,
        max_grad_norm=max_grad_norm,
        autocast=autocast,
        compile=compile,
        capture=capture,
        group=group,
        fitted=FittedLevel(chooses=memory == "auto"),
    )
    if state_of(root := causal_lm(model)) is None:
        raise UnsupportedModelError(
            f"{type(root).__name__} is not patched, so the documents of its packed batches would see each other: call "
            "crosspack.patch(model) before make_train_step"
        )
    check_optimizer(model, optimizer, scheduler)
    check_numbers(model, max_grad_norm, autocast)
    if memory is not None:
        check_level(model, memory)
    if precision is not None:
        to_float8(model, precision)
    if memory is not None and memory != "auto":
        set_level(model, memory)
    return step


def _takes_count(root: Any) -> bool:
    """Returns whether the model passes ``num_items_in_batch`` to its loss, by the rule of transformers' Trainer."""
    if hasattr(root, "accepts_loss_kwargs"):
        return bool(root.accepts_loss_kwargs)
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(root.forward).parameters.values())
