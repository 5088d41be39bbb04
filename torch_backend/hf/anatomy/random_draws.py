"""Finds what of a model draws random numbers in its forward: dropout, noise of routers, code that always draws.

A model -> the first such part by name. Documents that share a prefix would share what is drawn for it, and a layer that
recomputes, or a graph that records it, has to draw the same again. All of them ask :func:`find_draw`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

from torch_backend.hf.override import called, names

_SETTINGS = ("drop", "jitter", "noise")  # in names of numbers: how much of a layer is random
_DRAWS = {"bernoulli", "exponential_", "gumbel_softmax", "multinomial", "normal", "poisson", "rand", "rand_like"}
_DRAWS |= {"randint", "randint_like", "randn", "randn_like", "randperm"}
_DRAWS |= {"bernoulli_", "cauchy_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"}

NEFTUNE = "neftune_noise_alpha"  # set on an embedding, to whose output a hook adds noise in training


def is_random_setting(name: str) -> bool:
    """Returns whether a number of this name says how much of a layer is random."""
    return any(word in name for word in _SETTINGS)


def find_draw(root: Any, *, ever: bool = False, inside: bool = False) -> str | None:
    """Names what of a model draws random numbers now, or with ``ever`` what would in training; None if nothing does.

    Code that draws is judged by the settings that it names, and draws always if it names none, as PhiMoE's router does.
    With ``inside`` the noise on embeddings is left out, which no layer draws again.
    """
    if not (root.training or ever):
        return None
    waiting = [root]  # named_modules() takes several times as long, which every call of a model would wait for
    while waiting:
        waiting += filter(None, (module := waiting.pop())._modules.values())
        if (module.training or ever) and (drawn := _drawn_by(module)) is not None:
            kind, detail = drawn
            return f"{kind} ({next(name for name, each in root.named_modules() if each is module)}{detail})"
    if not inside and _is_on(noise := _noise_of_embeddings(root)):
        return f"noise (of embeddings, {NEFTUNE}={noise:g})"
    config: Any = root.config
    for name, value in vars(config.get_text_config()).items():
        if is_random_setting(name) and "classifier" not in name and _is_on(value):
            return f"{_kind(name)} (config.{name}={value:g})"
    return None


def _noise_of_embeddings(root: Any) -> Any:
    try:
        return getattr(root.get_input_embeddings(), NEFTUNE, None)
    except NotImplementedError:  # of a model that does not say which they are, on which nobody can set it either
        return None


def _drawn_by(module: nn.Module) -> tuple[str, str] | None:
    """Names the kind of what a module draws, and the setting that says so."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return ("dropout", f", p={module.p:g}") if module.p > 0 else None
    settings, code = _settings_of(type(module))  # type: ignore[arg-type] # a class is hashable
    for name in settings:
        value = module.__dict__.get(name, getattr(module.__dict__.get("config"), name, None))
        if _is_on(value):
            return _kind(name), f".{name}={value:g}"
    return None if code is None else ("noise", f": {code}")


@cache
def _settings_of(kind: type[nn.Module]) -> tuple[tuple[str, ...], str | None]:
    """Returns the random settings that the forward of a class names, and the code in it that draws without one."""
    settings, alone = dict[str, None](), None
    for function in _functions(kind, kind.forward, set()):
        words = names(function)
        settings |= dict.fromkeys(filter(is_random_setting, sorted(words)))
        if words & _DRAWS and not any(map(is_random_setting, words)):
            alone = function.__name__
    return tuple(settings), alone


def _functions(kind: type[nn.Module], function: Callable[..., Any], seen: set[Any]) -> Iterator[Callable[..., Any]]:
    """A forward, and the methods and the functions outside of torch that it names, and so on."""
    if not isinstance(function, FunctionType) or function in seen or function.__module__.startswith("torch."):
        return
    seen.add(function)
    yield function
    for inner in (*called(function).values(), *(getattr(kind, name, None) for name in names(function))):
        yield from _functions(kind, inner, seen)


def _is_on(value: Any) -> bool:
    return isinstance(value, float) and value > 0


def _kind(setting: str) -> str:
    return "dropout" if "drop" in setting else "noise"
