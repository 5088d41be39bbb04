"""The kinds of edits that a patch makes: each changes one thing about a model, and can undo it.

Those of one module are :class:`~.override.LayerOverride` and :class:`~.override.Attribute`; here are the others.

``undo`` leaves alone what somebody else has changed since ``apply``, so patches, hooks and wrappers can be taken off in
any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import nn

from torch_backend.hf.attention import PREFIX, register, stands_over, unregistered
from torch_backend.hf.entry import current_forward


class Edit(Protocol):
    """One change to a model."""

    def apply(self) -> None: ...

    def undo(self) -> None: ...


@dataclass
class AttentionName:
    """A config names the packed attention function instead of the implementation that it had.

    Attributes:
        before: that implementation, over: the one that unpacked calls run.
    """

    config: Any
    before: str = ""
    over: str = ""

    def apply(self) -> None:
        self.before, self.over = unregistered(self.config._attn_implementation), stands_over(self.config)
        self.config._attn_implementation_internal = register(self.over)

    def undo(self) -> None:
        if self.in_force:
            self.config._attn_implementation_internal = self.before

    @property
    def in_force(self) -> bool:
        """Returns whether the config still names the packed function."""
        return bool(self.config._attn_implementation == PREFIX + self.over)


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
