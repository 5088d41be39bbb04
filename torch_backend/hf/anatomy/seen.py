"""Notices what was changed in a model since it was patched: its modules, and the settings that decide how it is packed.

A patch finds the parts of a model once and edits them. Settings that a packed call uses are read in that call. The rest
is compared here, by identity, which takes microseconds: where anything differs, the patch looks at the model again.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import nn

# Attributes of layers and rotary modules by which they are packed: the config that names the attention, the kind of
# frequencies, and of Llama 4 whether a layer counts positions along the row.
READ_ONCE = ("config", "rope_type", "attn_temperature_tuning", "use_rope")
CHANGED = (
    "a module of this model, or a setting that decides how it is packed, was exchanged after crosspack.patch(model), "
    "and its documents could see each other: call crosspack.patch(model) again"
)


class Seen:
    """A model as a patch found it.

    Args:
        root: the outermost transformers model.
        facts: what follows from its classes and configs.
        parts: the modules that are edited.
    """

    def __init__(self, root: nn.Module, facts: tuple[Any, ...], parts: Iterable[nn.Module]) -> None:
        self.facts, self.parts = facts, tuple(parts)
        self.configs = tuple(c for part in self.parts if (c := getattr(part, "config", None)) is not None)
        rotaries = [module for module in root.modules() if "rope_type" in vars(module)]
        watched = {id(module): module for module in (root, *self.parts, *rotaries)}
        configs = {id(config): config for config in (getattr(root, "config", None), *self.configs)}
        self.settings = [(config, _public(config)) for config in configs.values()]
        self.settings += [(m, {n: vars(m)[n] for n in READ_ONCE if n in vars(m)}) for m in watched.values()]
        self.children = [(m, len(m._modules), _children(m, root)) for m in root.modules() if _holds(m, watched)]

    def unchanged(self) -> bool:
        """Returns whether every setting and every module is still the same object."""
        settings = ((vars(of), before) for of, before in self.settings)
        children = ((module._modules, before) for module, _, before in self.children)
        return all(len(module._modules) == count for module, count, _ in self.children) and all(
            now.get(name) is value for now, before in chain(settings, children) for name, value in before.items()
        )

    def agrees(self, other: Seen) -> bool:
        """Returns whether both models take the same edits."""
        return self.facts == other.facts and _same(self.parts, other.parts) and _same(self.configs, other.configs)


def _public(config: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if not name.startswith("_")}


def _children(module: nn.Module, root: Any) -> dict[str, nn.Module | None]:
    """The modules directly inside, without the output layer, which a loss may exchange during a call."""
    output = root.get_output_embeddings()
    return {name: child for name, child in module._modules.items() if child is not output or child is None}


def _holds(module: nn.Module, watched: dict[int, nn.Module]) -> bool:
    """Returns whether a watched module is inside a module."""
    return any(id(inner) in watched for inner in module.modules() if inner is not module)


def _same(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))
