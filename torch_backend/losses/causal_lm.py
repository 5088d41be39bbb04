"""The loss of a transformers causal language model on a batch, without all of its logits.

The model is called as usual, through its outermost wrapper, so DDP, FSDP, PEFT, autocast and every hook do their part.
During the call, two parts of the causal language model inside are replaced. Its output layer returns a short stand-in
for the logits. Its loss function computes the loss from the hidden states (:mod:`.output_layer`), and this becomes the
``loss`` of the model's output:

    model(**batch) -> decoder -> hidden states -+-> stand-in for the logits -> scale, softcap -> loss function -> loss
                                                +------------------------------------------------^

The hidden states bypass the model's own scale and softcap, so these have to be known. The stand-in is a vector of known
values: in the first call, what comes out of it tells which of the scales and softcaps in the config are applied, and a
model that does anything else to its logits is refused. So is one whose logits are read once the loss is made, by a
wrapper, a hook or a subclass: a penalty on the stand-in would be none on the logits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import LayoutError, PackingError, UnsupportedModelError
from torch_backend.hf.anatomy.heads import entries_of, takes_next_token_loss
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.entry import refuse_transforms
from torch_backend.hf.foreign_kernels import has_ligers_forward, own_forward, without_library_arguments
from torch_backend.hf.inputs.boundaries import is_packed
from torch_backend.hf.inputs.forests import TAKES_PARENTS
from torch_backend.hf.patch import cut_over_ranks, state_of
from torch_backend.losses.next_tokens import next_tokens_of
from torch_backend.losses.output_layer import Tail, output_layer_loss
from torch_backend.ops.divisor import quotient
from torch_backend.packed_tokens import PackedBatchError

WAY_OUT = "use its logits, packed_cross_entropy(...)"
PROBE = 64.0  # the largest logit of the stand-in: beyond every softcap in use

LOSS_WEIGHTS = "loss_weights"  # of a batch: [B, S] float32, at the tokens of the labels
# A shortcut is in the model itself, so the threads that share a model take turns with it.
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_locks_made = threading.Lock()


class _ShortcutCalls(threading.local):
    """Marks that this thread calls a model through a shortcut; calls by other threads do not take it."""

    def __init__(self) -> None:
        self.inside = False
        self.before_loss = False  # of the call that takes a shortcut


_thread = _ShortcutCalls()


def _lock_of(root: nn.Module) -> threading.RLock:
    with _locks_made:
        return _locks.setdefault(root, threading.RLock())


# What each model does to its logits, and the forward and config for which this was measured.
_tails: WeakKeyDictionary[nn.Module, tuple[Tail, Hashable]] = WeakKeyDictionary()


def causal_lm_loss(
    model: nn.Module, batch: Mapping[str, Any], *, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The summed next-token loss and the summed weight of its targets.

    Args:
        model: a transformers causal language model or a wrapper of one (DDP, FSDP, PEFT, a compiled or prepared model),
            patched if the batch is packed. Pass the outermost wrapper, because this is what gets called.
        batch: keyword arguments of the model, with ``labels`` int64 [B, S], unshifted; may carry the weights as
            ``loss_weights``, as batches of rows with ``weighting="document"`` do.
        weights: [B, S] weight of the target that stands at the same place as the label's token; 1 if None.

    Returns:
        Two float32 scalars, to be divided once per step (:func:`torch_backend.losses.cross_entropy.normalise`). A term
        that the model adds to its loss (a router's auxiliary loss under ``output_router_logits``) is part of the first
        scalar, multiplied by the number of targets. After the division it has the coefficient that the model gives it,
        averaged over the batches of the step in proportion to their targets. Where documents are cut over ranks, both
        are of the targets of this rank.

    Raises:
        LayoutError: the batch has no labels, or weights are given twice.
        UnsupportedModelError: the batch is packed and the model is not patched; the logits are not those of one output
            layer, a scale and a softcap; the loss does not come from ``loss_function``; or ZeRO-3 partitions the output
            layer.
    """
    arguments = dict(batch)
    if arguments.get(LOSS_WEIGHTS) is not None and weights is not None:
        raise LayoutError("the batch has loss_weights, and weights were passed: pass one of them")
    if weights is not None:
        arguments[LOSS_WEIGHTS] = weights
    arguments = cut_over_ranks(model, arguments)
    output, (_, weight, count) = _call_for_loss(model, arguments, arguments.pop(LOSS_WEIGHTS, None))
    return loss_in(output) * count, weight


def loss_and_router_loss(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The summed next-token loss, the number of its targets, and the auxiliary loss of the model's router.

    Args:
        model, batch: see :func:`causal_lm_loss`; the batch or the model's config asks for ``output_router_logits``.

    Returns:
        Four float32 scalars. The third is what the model adds to its mean loss, the auxiliary loss times its own
        coefficient; the last is that loss itself. Gradients of all pass through the output of the model, as its
        wrappers want.
    """
    output, (total, count, _) = _call_for_loss(model, cut_over_ranks(model, batch), None)
    return total, count, loss_in(output) - quotient(total, count), output["aux_loss"]


@torch.compiler.disable  # it exchanges modules; a compiled model inside is compiled all the same
def _call_for_loss(
    model: nn.Module, batch: Mapping[str, Any], weights: Tensor | None
) -> tuple[Any, tuple[Tensor, Tensor, Tensor]]:
    """The output of the model, with its loss, and the sum that this is of, the weight and the number of its targets."""
    pairs = next_tokens_of(batch)

    def mean(shortcut: Shortcut, hidden: Tensor, tail: Tail, labels: Tensor, shift_labels: Tensor | None) -> Any:
        if shift_labels is None:
            hidden, targets, of_targets = pairs.trained(hidden, labels, weights)
        else:
            targets = shift_labels.to(hidden.device)
            of_targets = None if weights is None else weights.to(hidden.device)
        total, weight = output_layer_loss(
            shortcut.head, hidden, targets, weights=of_targets, tail=tail, entries=shortcut.entries
        )
        count = (targets != IGNORE_INDEX).sum()
        return quotient(total, count), (total, weight, count)

    return call_with_shortcut(model, batch, mean, caller="causal_lm_loss")


def loss_in(output: Any) -> Tensor:
    """Returns the loss of what a model or its wrapper returned: a mapping, a tuple that it begins, or itself."""
    if isinstance(output, Mapping) and "loss" not in output:
        raise UnsupportedModelError(f"the model returned {', '.join(output)} and no loss: {WAY_OUT}")
    loss: Tensor = (
        output["loss"] if isinstance(output, Mapping) else output if isinstance(output, Tensor) else output[0]
    )
    return loss


# (shortcut, hidden states [B, S, D], tail of the logits, labels [B, S] that the model was given, shifted ones or None)
# -> a scalar, which the model takes for its loss, and what the caller wants
Measure = Callable[["Shortcut", Tensor, Tail, Tensor, Tensor | None], tuple[Tensor, Any]]


def call_with_shortcut(model: nn.Module, batch: Mapping[str, Any], measure: Measure, *, caller: str) -> tuple[Any, Any]:
    """Call the model while a :class:`Shortcut` stands in for its output layer and its loss function.

    Args:
        model, batch: see :func:`causal_lm_loss`.
        measure: computes the loss from the hidden states.
        caller: the function whose user reads the errors.

    Returns:
        The model's output, and what ``measure`` returned beside the loss.

    Raises: see :func:`causal_lm_loss`.
    """
    if batch.get("labels") is None:
        raise LayoutError(f"{caller} takes a batch with labels, got {', '.join(batch)}")
    root = causal_lm(model)
    with _lock_of(root):
        return _called_with_shortcut(model, root, batch, measure, caller)


def _called_with_shortcut(
    model: nn.Module, root: Any, batch: Mapping[str, Any], measure: Measure, caller: str
) -> tuple[Any, Any]:
    head = root.get_output_embeddings()
    name = type(root).__name__
    if head is None:
        raise UnsupportedModelError(f"{name} has no output layer: {caller} takes causal language models")
    if not takes_next_token_loss(root):
        raise UnsupportedModelError(f"{name} has a loss function of its own: {WAY_OUT}")
    known_of = id(root.__dict__.get("forward")), *Tail.candidates(root.config)
    tail, of = _tails.get(root, (None, None))
    state = state_of(root)
    if is_packed(batch):
        refuse_transforms()
        if state is None:
            raise PackedBatchError
    if state is not None:
        state.require_fit()  # with its own output layer, through which a proof of what was added goes
    shortcut = Shortcut(root, head, tail if of == known_of else None, measure)
    # The first call compares values, which a compiled model cannot do.
    eager = nullcontext() if shortcut.tail is not None else torch.compiler.set_stance("force_eager")
    if has_ligers_forward(root):
        batch = without_library_arguments(batch)
    with eager, own_forward(root), _installed(root, shortcut):
        try:
            output = model(**{**batch, "use_cache": False})
        except (PackingError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if shortcut.hidden is None or shortcut.done:
                raise
            raise UnsupportedModelError(f"{name} does not make its loss by loss_function: {WAY_OUT}") from error
    if not shortcut.done:
        raise UnsupportedModelError(f"{name} does not make its loss from its output layer by loss_function: {WAY_OUT}")
    assert shortcut.tail is not None
    _tails[root] = shortcut.tail, known_of
    return output, shortcut.result


class _StandIn(Tensor):
    """Stand-in for the logits, which may be scaled until the loss is made, and from then on only handed on."""

    _HANDED_ON = frozenset(("__get__", "clone", "detach", "to", "float", "size", "dim", "is_floating_point", "view_as"))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (_thread.before_loss or function.__name__ in cls._HANDED_ON):
            raise UnsupportedModelError(
                f"a wrapper, a hook or a subclass of the model reads its logits beside its loss: {WAY_OUT}"
            )
        return super().__torch_function__(function, types, args, kwargs or {})


class Shortcut(nn.Module):
    """Replaces the output layer during one call, and keeps its input for :meth:`loss_function`."""

    def __init__(self, root: Any, head: nn.Module, tail: Tail | None, measure: Measure) -> None:
        super().__init__()
        self.head = head  # a submodule, so that whatever walks through the model in the call still finds it
        self.measure = measure
        self.stock_loss = root.loss_function
        self.model = type(root).__name__
        self.entries = entries_of(root, head)
        self.candidates = Tail.candidates(root.config)
        self.tail = tail
        self.hidden: Tensor | None = None
        self.result: Any = None
        self.done = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # modeling files ask an output layer for its weight's dtype or device
            return getattr(super().__getattr__("head"), name)

    def forward(self, hidden: Tensor) -> Tensor:
        """Keep the hidden states [B, S, D]; return a stand-in for the logits, [1, 1, V]."""
        if not _thread.inside:
            logits: Tensor = self.head(hidden)
            return logits
        if self.hidden is not None:
            raise UnsupportedModelError(f"{self.model} calls its output layer more than once: {WAY_OUT}")
        self.hidden = hidden
        return self._probe()

    def loss_function(
        self, logits: Tensor, labels: Tensor, *args: Any, shift_labels: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Computes the model's loss; replaces transformers' ``ForCausalLMLoss``."""
        if not _thread.inside:
            stock: Tensor = self.stock_loss(logits, labels, *args, shift_labels=shift_labels, **kwargs)
            return stock
        if self.hidden is None or self.done:
            raise UnsupportedModelError(f"{self.model} does not make one loss of one output layer: {WAY_OUT}")
        if self.tail is None:
            self.tail = self._tail_of(logits)
        loss, self.result = self.measure(self, self.hidden, self.tail, labels, shift_labels)
        self.done, _thread.before_loss = True, False
        return loss

    setattr(loss_function, TAKES_PARENTS, True)

    def _probe(self) -> Tensor:
        assert self.hidden is not None
        values = torch.linspace(-PROBE, PROBE, self.entries, device=self.hidden.device, dtype=torch.float32)
        return values[None, None] if torch.compiler.is_compiling() else values[None, None].as_subclass(_StandIn)

    def _tail_of(self, logits: Tensor) -> Tail:
        """Returns the operations that turned the stand-in into ``logits``."""
        tolerance = 8 * torch.finfo(torch.float32).eps * float(logits.abs().max())
        for tail in self.candidates:
            wanted = tail(self._probe())
            if logits.shape == wanted.shape and torch.allclose(logits.float(), wanted, rtol=0, atol=tolerance):
                return tail
        raise UnsupportedModelError(f"{self.model} does more to its logits than a scale and a softcap: {WAY_OUT}")


@contextmanager
def _installed(root: Any, shortcut: Shortcut) -> Iterator[None]:
    """Inside, ``root`` computes its loss by ``shortcut``."""
    places = ((module, name) for module in root.modules() for name, child in module._modules.items())
    found = next((place for place in places if place[0]._modules[place[1]] is shortcut.head), None)
    if found is None:
        raise UnsupportedModelError(f"{shortcut.model} does not hold its output layer as a module: {WAY_OUT}")
    parent, place = found
    before = root.__dict__.get("_loss_function")
    parent._modules[place] = shortcut
    root.loss_function = shortcut.loss_function
    _thread.inside = _thread.before_loss = True
    try:
        yield
    finally:
        _thread.inside = _thread.before_loss = False
        parent._modules[place] = shortcut.head
        if before is None:
            del root._loss_function
        else:
            root._loss_function = before
