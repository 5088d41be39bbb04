"""One forward whose routing is recorded or replayed, and its layers when they run again in the backward.

Inside a context the routers run another forward (``route``), which finds the forward that they belong to on its thread.
A layer under gradient checkpointing runs again in the backward, after the context has ended and on any thread. The
function that is checkpointed therefore carries its forward along (:class:`Carried`), and overrides the routers again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from packing_core.batches.keys import BatchKey
from packing_core.errors import UnsupportedModelError
from torch_backend.context_parallel.exchange import own_tokens, whole_tokens
from torch_backend.context_parallel.share import RankShare
from torch_backend.hf.entry import running
from torch_backend.hf.override import override, restore
from torch_backend.hf.patch import state_of
from torch_backend.hf.routing.choice import TopK, choose, observe
from torch_backend.ops.reduction import document_tokens
from torch_backend.segments import host_lengths, to_device

_USERS = "_crosspack_routing_users"


class _Current(threading.local):
    """Holds the forward whose routers run on this thread, and whether a checkpoint that knows of it runs them."""

    def __init__(self) -> None:
        self.call: RoutedCall | None = None
        self.carried = self.again = False


_thread = _Current()
_lock = threading.Lock()


def begin(call: RoutedCall) -> None:
    """A forward begins on this thread."""
    _thread.call = call


def end(*, complete: bool) -> None:
    """The forward on this thread ended, ``complete`` or by an error."""
    call, _thread.call = _thread.call, None
    if call is not None and complete:
        call.end()


class RoutedCall:
    """One forward of the decoder.

    Attributes:
        session: the context that records or replays it (:mod:`.contexts`).
        shape: rows and their length.
        mask: the attention mask of an unpacked batch, or None.
        indices: of each router that ran, int64 [N, K], the experts of the tokens at ``places``.
        places: int64 [N], where the real tokens stand in the batch, document by document; with ``lengths`` empty until
            a router runs. In a batch that is cut over ranks, where those that this rank holds stand among its tokens.
        lengths: of the documents.
        part: what this rank holds of a batch that is cut over ranks; None for all of it.
        of_batch: int64, where the real tokens of such a batch stand in the whole, document by document.
        documents: of the record, that are replayed.
        gradients: whether the forward is one that a backward may follow.
    """

    def __init__(self, session: Any, shape: tuple[int, int], mask: Any) -> None:
        self.session, self.shape, self.mask = session, shape, mask
        self.indices: dict[str, Tensor] = {}
        self.places = torch.empty(0, dtype=torch.long)
        self.lengths: list[int] = []
        self.part: RankShare | None = None
        self.of_batch = self.places
        self.documents: list[Tensor] = []
        self.gradients = torch.is_grad_enabled()

    def route(self, router: nn.Module, run: Callable[[], Any]) -> Any:
        """Run one router, whose own forward is ``run``."""
        session, name = self.session, self.session.names[id(router)]
        if _thread.again:
            return choose(run, session.choices[name], self.places, self.indices[name])
        if name in self.indices:
            raise UnsupportedModelError(
                f"{name} of {session.name} routes several times in one forward: train it without routing replay"
            )
        if session.replays:
            return self._replay(name, router, run)
        output, session.choices[name], indices = self._observe(name, run)
        self.indices[name] = indices[self.places]
        return output

    def _replay(self, name: str, router: nn.Module, run: Callable[[], Any]) -> Any:
        session = self.session
        if _is_checkpointed(self.gradients) and not _thread.carried:
            raise UnsupportedModelError(
                f"{name} of {session.name} runs inside torch.utils.checkpoint and would not take the same experts "
                "again in the backward: checkpoint its layers by model.gradient_checkpointing_enable()"
            )
        if name not in session.choices:
            if is_parametrized(router):  # its parameter would be cached without a gradient
                raise UnsupportedModelError(
                    f"{name} of {session.name} has an adapter, and the record does not say how it chooses: fill in the "
                    "choices of a record that record_routing(model) made"
                )
            with torch.no_grad():
                _, choice, _ = self._observe(name, run)
            session.check_experts(name, choice)
            session.choices[name] = choice
        choice = session.choices[name]
        if not self.lengths:
            self._find_tokens(next(self.session.decoder.parameters()).device)
        if not self.documents:
            self.documents = session.take(self.lengths)
        number = session.record.routers.index(name)
        taken = torch.cat([document[:, number, : choice.top_k] for document in self.documents])
        self.indices[name] = self._own(taken.to(self.places.device).long())
        return choose(run, choice, self.places, self.indices[name])

    def _observe(self, name: str, run: Callable[[], Any]) -> tuple[Any, TopK, Tensor]:
        """A router's output, how it chose, and the experts of all tokens [T, K]."""
        output, choice, indices = observe(run)
        if choice is None or indices is None:
            raise UnsupportedModelError(
                f"{name} of {self.session.name} does not choose its experts by topk, so its choice cannot be replayed: "
                "train it without routing replay"
            )
        if not self.lengths:
            self._find_tokens(indices.device)
        tokens = self.shape[0] * self.shape[1]
        if len(indices) != tokens:
            raise UnsupportedModelError(
                f"{name} of {self.session.name} routed {len(indices):,} of {tokens:,} tokens at once, so its choice "
                "cannot be told document by document"
            )
        return output, choice, indices

    def _find_tokens(self, device: torch.device) -> None:
        """Set ``places`` and ``lengths``. The segments of a packed call are known when its layers run, not before."""
        patched = state_of(self.session.root)
        outer = None if patched is None else running(patched)
        if patched is not None and outer is not None and outer.forward is not None:
            if patched.anatomy.route == "documents":
                raise UnsupportedModelError(
                    f"the layers of {self.session.name} run per document, so its routers do not see the tokens of a "
                    "packed batch in their order: record and replay unpacked batches"
                )
            self.part = part = outer.forward.part
            if part is None:
                lengths, documents = host_lengths(outer.forward.segments), outer.forward.numbers
            else:
                lengths, documents = tuple(part.plan.lengths.tolist()), part.documents
            documents = documents or tuple((number,) for number in range(len(lengths)))
            places, counts = document_tokens({BatchKey.LENGTHS: lengths, BatchKey.DOCUMENTS: documents})
            self.places, self.lengths = to_device(torch.from_numpy(places), device), counts.tolist()
            if part is not None:
                self.of_batch = self.places
                held = np.flatnonzero(np.isin(part.tokens, places))
                self.places = to_device(torch.from_numpy(held), device)
        elif isinstance(self.mask, Tensor) and self.mask.shape == self.shape:
            self.places = self.mask.flatten().nonzero().flatten().to(device)
            self.lengths = self.mask.bool().sum(1).tolist()
        else:
            rows, length = self.shape
            self.places, self.lengths = torch.arange(rows * length, device=device), [length] * rows

    def end(self) -> None:
        """Check that all routers ran; add the documents to the record."""
        session = self.session
        if missing := [name for name in session.routers if name not in self.indices]:
            raise UnsupportedModelError(
                f"{missing[0]} of {session.name} did not run in a forward: train it without routing replay"
            )
        if session.replays:
            return
        top_k = max(chosen.shape[1] for chosen in self.indices.values())
        filled = [
            F.pad(self.indices[name], (0, top_k - self.indices[name].shape[1]), value=-1) for name in session.routers
        ]
        session.record.documents += self._whole(torch.stack(filled, 1)).to(torch.int16).split(self.lengths)

    def _own(self, x: Tensor) -> Tensor:
        """Values of all real tokens, document by document -> those of the tokens at ``places``."""
        if self.part is None:
            return x
        batch = x.new_zeros(int(self.part.plan.lengths.sum()), *x.shape[1:]).index_copy(0, self.of_batch, x)
        return own_tokens(batch, self.part)[self.places]

    def _whole(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`_own`, by what all ranks hold."""
        if self.part is None:
            return x
        held = x.new_zeros(len(self.part.tokens), *x.shape[1:]).index_copy(0, self.places, x)
        return whole_tokens(held, self.part)[self.of_batch]


def route(router: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _thread.call is None:
        return call(*args, **kwargs)
    return _thread.call.route(router, partial(call, *args, **kwargs))


@contextmanager
def overridden(routers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the routers run :func:`route`. A backward may enter while a forward is inside, on another thread."""
    routers = list(routers)
    with _lock:
        for router in routers:
            users = router.__dict__.get(_USERS, 0)
            if users == 0:
                override(router, route)
            router.__dict__[_USERS] = users + 1
    try:
        yield
    finally:
        with _lock:
            for router in routers:
                router.__dict__[_USERS] -= 1
                if router.__dict__[_USERS] == 0:
                    del router.__dict__[_USERS]
                    restore(router)


def checkpointed(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Checkpoint a function that runs inside a forward which is recorded or replayed."""
    if _thread.call is None:
        return checkpoint(function, *args, **kwargs)
    return checkpoint(Carried(_thread.call, function), *args, **kwargs)


class Carried:
    """A checkpointed function with the call that it belongs to. It runs in the forward, and again in the backward."""

    def __init__(self, call: RoutedCall, function: Callable[..., Any]) -> None:
        self.call, self.function, self.ran = call, function, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = _thread.call, _thread.carried, _thread.again
        _thread.call, _thread.carried, _thread.again = self.call, True, self.ran
        self.ran = True
        try:
            with overridden(self.call.session.routers.values()):
                return self.function(*args, **kwargs)
        finally:
            _thread.call, _thread.carried, _thread.again = before


def _is_checkpointed(gradients: bool) -> bool:
    """Returns whether torch.utils.checkpoint runs, in a forward with gradients: its function will run again."""
    if gradients and not torch.is_grad_enabled():
        return True  # the reentrant one
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__qualname__.startswith("_checkpoint_hook")
