"""Forward hooks that somebody registers on a patched model: they may look at packed rows, and not change them.

No proof has seen such a hook. Most only observe (they record activations, dtypes or times) and return None, so refusing
them all would stop what is exact. A hook's result is known in its call alone, so :func:`watch_hooks` puts a
:class:`WatchedHook` into its place, under the number by which its handle removes it. Patching the model again proves
its hooks and takes the watch from them (:func:`accept_hooks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from packing_core.errors import UnsupportedModelError

Hooks = dict[int, Callable[..., Any]]


class WatchedHook:
    """A hook that raises where it returns something for a packed batch.

    Args:
        hook: as it was registered.
        on_packed: says of a module whether it runs on a packed batch.
    """

    def __init__(self, hook: Callable[..., Any], on_packed: Callable[[nn.Module], bool]) -> None:
        self.hook = hook
        self.on_packed = on_packed

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        found = self.hook(module, *args)
        if found is not None and self.on_packed(module):
            raise UnsupportedModelError(
                f"a hook on {type(module).__name__} was added after crosspack.patch(model) and changes what a packed "
                "batch computes, so documents could see each other in it: call crosspack.patch(model) again, which "
                "proves it"
            )
        return found


def hook_numbers(root: nn.Module) -> set[int]:
    """Returns the numbers of all hooks of a model."""
    return {number for hooks in _hooks_inside(root) for number in hooks}


def accept_hooks(root: nn.Module) -> None:
    """Takes the watch from all hooks of a model."""
    for hooks in _hooks_inside(root):
        for number, hook in hooks.items():
            if isinstance(hook, WatchedHook):
                hooks[number] = hook.hook


def watch_hooks(
    root: nn.Module,
    accepted: set[int],
    on_packed: Callable[[nn.Module], bool],
    is_known: Callable[[Callable[..., Any]], bool],
) -> None:
    """Watches the hooks of a model that are neither accepted nor known, nor watched already."""
    for hooks in _hooks_inside(root):
        for number, hook in hooks.items():
            if number not in accepted and not isinstance(hook, WatchedHook) and not is_known(hook):
                hooks[number] = WatchedHook(hook, on_packed)


def _hooks_inside(root: nn.Module) -> Iterator[Hooks]:
    """The hooks of all modules but the outermost one, whose hooks run before and after a packed call."""
    for module in root.modules():
        if module is not root:
            yield from (module._forward_pre_hooks, module._forward_hooks)
