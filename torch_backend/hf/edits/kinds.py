"""The kinds of edits that a patch makes: each changes one thing about a model, and can undo it.

``undo`` leaves alone what somebody else has changed since ``apply``, so patches, hooks and wrappers can be taken off in
any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import nn

from torch_backend.hf.attention import KIND, PREFIX, kind_of, register, stands_over, unregistered
from torch_backend.hf.edits.override import restore
from torch_backend.hf.edits.rotary import override_rotation

_GENERATE = "init_continuous_batching"


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
class AttentionKind:
    """An attention layer carries the name of its kind, which compiled layers read."""

    layer: nn.Module

    def apply(self) -> None:
        self.layer.__dict__[KIND] = kind_of(self.layer)

    def undo(self) -> None:
        self.layer.__dict__.pop(KIND, None)


@dataclass
class LayerOverride:
    """A layer whose forward is replaced.

    Attributes:
        layer: the module.
        start: makes the override, see :mod:`.override`.
        stop: what else ``start`` did is undone by it.
    """

    layer: nn.Module
    start: Callable[[nn.Module], Any]
    stop: Callable[[nn.Module], Any] | None = None

    def apply(self) -> None:
        self.start(self.layer)

    def undo(self) -> None:
        if self.stop is not None:
            self.stop(self.layer)
        restore(self.layer)


@dataclass
class Hook:
    """A forward hook; ``register`` returns its handle."""

    register: Callable[[], Any]
    handle: Any = None

    def apply(self) -> None:
        self.handle = self.register()

    def undo(self) -> None:
        self.handle.remove()


@dataclass
class Rotation:
    """The rotary embedding of an attention layer, where it has the standard form.

    Attributes:
        name, layer: of the model.
        kept: takes the reason, by name, where the layer keeps its own rotation.
    """

    name: str
    layer: nn.Module
    kept: dict[str, str]

    def apply(self) -> None:
        reason = override_rotation(self.layer)
        if reason is not None:
            self.kept[self.name] = reason

    def undo(self) -> None:
        if self.kept.pop(self.name, None) is None:
            restore(self.layer)


@dataclass
class ContinuousBatching:
    """``generate_batch`` accepts a few attention implementations by name, so it gets the name from before the patch.

    Attributes:
        root: the model.
        suspend: puts the names back.
    """

    root: Any
    suspend: Callable[[], None]

    def apply(self) -> None:
        if hasattr(self.root, _GENERATE):
            self.root.__dict__[_GENERATE] = partial(_init_continuous_batching, self.root, self.suspend)

    def undo(self) -> None:
        self.root.__dict__.pop(_GENERATE, None)


def _init_continuous_batching(root: Any, suspend: Callable[[], None], *args: Any, **kwargs: Any) -> Any:
    suspend()
    return getattr(type(root), _GENERATE)(root, *args, **kwargs)
