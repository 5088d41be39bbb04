"""The kinds of edits that a patch makes: each changes one thing about a model, and can undo it.

Those of one module are :class:`~.override.LayerOverride` and :class:`~.override.Attribute`; here are the others.

``undo`` leaves alone what somebody else has changed since ``apply``, so patches, hooks and wrappers can be taken off in
any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch_backend.hf.attention import PREFIX, register, stands_over, unregistered


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
    """A forward hook; ``register`` returns its handle."""

    register: Callable[[], Any]
    handle: Any = None

    def apply(self) -> None:
        self.handle = self.register()

    def undo(self) -> None:
        self.handle.remove()
