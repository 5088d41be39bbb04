"""The calls of patched models that run on a thread, and the hooks and checks that depend on them.

What a call carries from the model to its decoder and its head belongs to the call, not to the model, because threads
may share a model. It stands in :data:`THREAD`, a :class:`threading.local`, which torch.compile can trace, unlike a
context variable. Layers do not compute with it: recomputation runs on other threads, so they receive the segments as an
argument, and say what they run for functions inside that get none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from packing_core.errors import UnsupportedError, UnsupportedModelError
from torch_backend.hf.forward import PackedForward
from torch_backend.hf.override import is_reached

Call = Callable[..., Any]


@dataclass(frozen=True)
class Running:
    """One call of a patched model.

    Attributes:
        patched: whose call it is.
        forward: of its batch; None if it is not packed.
        outer: the call that this one runs inside, of whatever model.
    """

    patched: Any
    forward: PackedForward | None
    outer: Running | None


class _Thread(threading.local):
    """Holds what runs on this thread.

    Set in ``__init__``: where a class has a default, torch.compile (2.11) reads the default and not the thread's value.

    Attributes:
        call: the innermost call of a patched model.
        layer: the packed forward of the decoder layer that runs, for the experts in it.
        segments: those of the recurrent layer that runs, for a scan in it (:mod:`.edits.stand_ins`).
        padded: the models whose calls stay padded (:mod:`.unpadding`).
    """

    def __init__(self) -> None:
        self.call: Running | None = None
        self.layer: PackedForward | None = None
        self.segments: Any = None
        self.padded: tuple[nn.Module, ...] = ()


THREAD = _Thread()


def run_with(name: str, value: Any, call: Call, /, *args: Any, **kwargs: Any) -> Any:
    """``call(*args, **kwargs)``, while an attribute of :data:`THREAD` has another value."""
    outer = getattr(THREAD, name)
    setattr(THREAD, name, value)
    try:
        return call(*args, **kwargs)
    finally:
        setattr(THREAD, name, outer)


def running(patched: object) -> Running | None:
    """The innermost call of a patched model that runs on this thread, None between its calls."""
    call = THREAD.call
    while call is not None and call.patched is not patched:
        call = call.outer
    return call


def current_forward() -> PackedForward | None:
    """The packed forward of the innermost call on this thread; None outside of packed calls."""
    return None if THREAD.call is None else THREAD.call.forward


def run_inside(patched: Any, forward: PackedForward | None, call: Call, /, *args: Any, **kwargs: Any) -> Any:
    """``call(*args, **kwargs)``, in which :func:`current_forward` is ``forward``."""
    return run_with("call", Running(patched, forward, THREAD.call), call, *args, **kwargs)


def lead_to_entry(wrapper: nn.Module, root: nn.Module) -> None:
    """Let modules around a model that keep its own ``forward`` as theirs call the entry, as PEFT's AdaptionPrompt does.

    They took the method before the patch, so it would pass the entry by.
    """
    for module in wrapper.modules():
        if module is root:
            return
        own = module.__dict__.get("forward")
        if getattr(own, "__self__", None) is root and getattr(own, "__name__", None) == "forward":
            module.__dict__["forward"] = root.forward


@dataclass
class Hook:
    """A forward hook, or a hook before it, that runs in packed calls alone.

    Attributes:
        register: the method of a module that registers it.
        run: ``run(forward, module, *of_the_call)``, with the packed forward before the arguments of every such hook;
            not a closure, so that the model can be pickled.
        with_kwargs: whether it gets, and returns, the keywords of the call too.
        as_it_is: whether ``run`` is registered itself, as any hook, and asks for the packed forward: a compiled layer
            would be guarded on what this reads.
        handle: by which it is removed.
    """

    register: Callable[..., Any]
    run: Callable[..., Any]
    with_kwargs: bool = False
    as_it_is: bool = False
    handle: Any = None

    def apply(self) -> None:
        options = {"with_kwargs": True} if self.with_kwargs else {}
        self.handle = self.register(self.run if self.as_it_is else partial(_in_packed_calls, self.run), **options)

    def undo(self) -> None:
        self.handle.remove()


def _in_packed_calls(run: Callable[..., Any], module: nn.Module, *of_the_call: Any) -> Any:
    forward = current_forward()
    return None if forward is None else run(forward, module, *of_the_call)


def require_entry(root: nn.Module) -> None:
    """Raise if somebody replaced the forward of a patched model, so that its head would read rows for documents."""
    if not is_reached(root):
        raise UnsupportedModelError(
            f"forward of {type(root).__name__} was replaced after patch(model), so packed batches do not pass its "
            "entry: call crosspack.patch(model) again"
        )


def refuse_transforms() -> None:
    """Raise inside torch.func.grad, vmap and their like, which packed operations with a backward of their own lack."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise UnsupportedError(
            "packed batches cannot run inside transforms of torch.func (grad, vjp, jvp, vmap): take gradients by "
            "loss.backward() or torch.autograd.grad, also of torch.func.functional_call, or pass documents unpacked"
        )
