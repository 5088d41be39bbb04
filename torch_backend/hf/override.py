"""Forwards of modules: what they name, how one instance gets another, and copies in which names mean something else.

``override(layer, forward)`` swaps the class of one instance for a subclass whose calls go to ``forward``, as FSDP2 and
``torch.nn.utils.parametrize`` do; edits of a patch replace a forward in no other way. Setting an attribute
``layer.forward`` would be simpler, but accelerate's hooks save and restore that attribute in an order of their own, and
the closures that it needs can be neither pickled nor copied.

A layer can come with a ``forward`` attribute, which hides the class's. If accelerate set it, the forward that it calls
is in ``_old_forward``, and that one is replaced. Any other is treated as the layer's own forward.

Modeling files of transformers call rotations, convolutions and scans by global names. Rebinding such a name would
change every model of the family, so one layer's packed calls run a copy of the forward over a copy of its module's
namespace (:func:`rebound`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial, wraps
from itertools import count
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

from torch import nn

_ACTIVE, _ATTRIBUTES = "_crosspack_active", "_crosspack_attributes"
OUTER = "_crosspack_outer_forward"  # the forward that the instance had of its own
_ORIGINAL, _PARTS = "_crosspack_original", "_crosspack_parts"
STANDS_FOR = "_crosspack_kind"  # in a class that a module has for a while: the class that it has otherwise

# forward(layer, call, *args, **kwargs), where call(*args, **kwargs) is the layer's own forward
Forward = Callable[..., Any]
Prepare = Callable[[type[nn.Module]], Mapping[str, Any]]
_copies = count()
_FEATURES = ("get_image_features", "get_video_features", "get_audio_features")  # to which forwards hand their **kwargs


# -- what a forward names ----------------------------------------------------------------------------------------------


def forward_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the arguments that a module's forward takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def keywords_named(model: nn.Module) -> frozenset[str]:
    """Returns the keywords that a forward in a model names, or a method to which forwards hand their ``**kwargs``."""
    kinds = {type(module) for module in model.modules()}
    functions = [getattr(kind, method, None) for kind in kinds for method in ("forward", *_FEATURES)]
    return frozenset(name for f in functions if f is not None for name in inspect.signature(f).parameters)


def names(forward: Callable[..., Any]) -> set[str]:
    """All global and attribute names in the code of a forward, under all that decorates it, and of functions in it."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return set() if code is None else set(_names(code))


def called(forward: Callable[..., Any]) -> dict[str, Any]:
    """Everything that can be called among the globals that a forward names; functions, not modules around them."""
    namespace: dict[str, Any] = getattr(inspect.unwrap(forward), "__globals__", {})
    values = {name: as_function(namespace.get(name)) for name in names(forward)}
    return {name: value for name, value in values.items() if callable(value)}


def as_function(value: Any) -> Any:
    """Returns the function in a module that the library ``kernels`` made of it, which hides its parameters."""
    if not isinstance(value, nn.Module):
        return value
    contents = [cell.cell_contents for cell in type(value).forward.__closure__ or ()]
    return next((x for x in contents if inspect.isfunction(x)), value)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


# -- another forward for one layer -------------------------------------------------------------------------------------


def _nothing(original: type[nn.Module]) -> Mapping[str, Any]:
    return {}


def override(layer: nn.Module, forward: Forward, prepare: Prepare = _nothing, takes: tuple[str, ...] = ()) -> None:
    """Send the calls of a layer to ``forward(layer, call, *args, **kwargs)``.

    Args:
        layer: its class becomes a subclass of the same name, module and signature.
        forward: a function of a module, not a closure, so that the layer can be pickled.
        prepare: likewise; makes attributes of the instance from its class, again after unpickling.
        takes: names of keywords that the signature has besides those of the layer's own forward.
    """
    original = original_class(layer)
    subclass = _subclass(original, forward, prepare, takes)  # type: ignore[arg-type] # a class is hashable
    name = "_old_forward" if "_old_forward" in layer.__dict__ else "forward"
    own, before = layer.__dict__.get(name), type(layer)
    layer.__class__ = subclass
    if not is_reached(layer):  # else it was wrapped while it was overridden before, as accelerate does for autocast
        if not _is_method_of(own, before):
            layer.__dict__[OUTER] = own
        layer.__dict__[name] = MethodType(subclass.forward, layer)
    layer.__dict__[_ACTIVE] = True
    layer.__dict__[_ATTRIBUTES] = attributes = dict(prepare(original))
    layer.__dict__.update(attributes)


def restore(layer: nn.Module) -> None:
    """Take :func:`override` back. What others wrapped around the layer in the meantime keeps working."""
    original = original_class(layer)
    for name in (*layer.__dict__[_ATTRIBUTES], _ATTRIBUTES, _ACTIVE):
        del layer.__dict__[name]
    for name in ("_old_forward", "forward"):
        if _is_method_of(layer.__dict__.get(name), type(layer)):
            if OUTER in layer.__dict__:
                layer.__dict__[name] = layer.__dict__.pop(OUTER)
            elif name == "_old_forward":
                layer.__dict__[name] = MethodType(original.forward, layer)
            else:
                del layer.__dict__[name]
    if _ORIGINAL in type(layer).__dict__:
        layer.__class__ = original
    # Otherwise FSDP has subclassed our class in the meantime; without _ACTIVE its calls pass through.


def original_class(layer: nn.Module) -> type[nn.Module]:
    """The class that a layer has without :func:`override`."""
    originals = (c.__dict__[_ORIGINAL] for c in type(layer).__mro__ if _ORIGINAL in c.__dict__)
    return next(originals, type(layer))


def added_forward(layer: nn.Module) -> Any:
    """The forward that was set on the instance, before :func:`override` or over it; None if there is none.

    Accelerate's hooks do not count.
    """
    own = layer.__dict__.get("_old_forward", layer.__dict__.get("forward"))
    behind = layer.__dict__.get(OUTER) if _ACTIVE in layer.__dict__ else None
    return behind if own is None or _is_method_of(own, type(layer)) else own


def has_own_forward(layer: nn.Module) -> bool:
    """Returns whether the instance had a forward before :func:`override`, which hides its class's."""
    return OUTER in layer.__dict__ if _ACTIVE in layer.__dict__ else added_forward(layer) is not None


def is_reached(layer: nn.Module) -> bool:
    """Returns whether calls of an overridden layer reach its override, and no other forward was set since.

    Wrappers that say what they wrap (``functools.wraps``, accelerate's) leave the override in force.
    """
    own = wrapped = layer.__dict__.get("_old_forward", layer.__dict__.get("forward"))
    while wrapped is not None and getattr(wrapped, "__func__", wrapped) is not type(layer).forward:
        wrapped = getattr(wrapped, "__wrapped__", None)
    return own is None or wrapped is not None


@cache
def _subclass(
    original: type[nn.Module], forward: Forward, prepare: Prepare, takes: tuple[str, ...] = ()
) -> type[nn.Module]:
    """One for all layers of a class, so that equal layers share their compiled graphs."""

    @wraps(original.forward)
    def dispatch(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        outer = self.__dict__.get(OUTER)
        call = partial(original.forward, self) if outer is None else outer
        if _ACTIVE not in self.__dict__:
            return call(*args, **kwargs)
        return forward(self, call, *args, **kwargs)

    if takes:
        dispatch.__signature__ = _with_keywords(inspect.signature(original.forward), takes)  # type: ignore[attr-defined]
    attributes = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": _reduce,
        "forward": dispatch,
        _ORIGINAL: original,
        _PARTS: (original, forward, prepare, takes),
    }
    subclass: type[nn.Module] = type(original.__name__, (original,), attributes)
    return subclass


def _with_keywords(signature: inspect.Signature, names: tuple[str, ...]) -> inspect.Signature:
    parameters = list(signature.parameters.values())
    kind = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, kind, default=None) for name in names if name not in signature.parameters]
    rest = [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    return signature.replace(parameters=[*(p for p in parameters if p not in rest), *added, *rest])


def _reduce(layer: nn.Module, protocol: Any) -> Any:
    """Pickle and copy by the original class: the subclass cannot be imported."""
    prepared = layer.__dict__.get(_ATTRIBUTES, ())
    state = {name: value for name, value in layer.__dict__.items() if name not in prepared and name != _ATTRIBUTES}
    return _new, getattr(type(layer), _PARTS), state


def _new(original: type[nn.Module], forward: Forward, prepare: Prepare, takes: tuple[str, ...] = ()) -> nn.Module:
    subclass = _subclass(original, forward, prepare, takes)  # type: ignore[arg-type] # a class is hashable
    layer: nn.Module = subclass.__new__(subclass)
    layer.__dict__[_ATTRIBUTES] = attributes = dict(prepare(original))
    layer.__dict__.update(attributes)
    return layer


def _is_method_of(value: Any, owner: type) -> bool:
    """Returns whether ``value`` is the class's own ``forward``, bound to an instance."""
    return isinstance(value, MethodType) and value.__func__ is getattr(owner, "forward", None)


# -- copies ------------------------------------------------------------------------------------------------------------


def rebound(forward: Callable[..., Any], values: Mapping[str, Any]) -> Callable[..., Any] | None:
    """A copy of ``forward`` and of what decorates it in which the global names of ``values`` mean these.

    None if a decorator does not hold the function in its closure, as :func:`functools.wraps` leaves it.
    """
    innermost: Any = inspect.unwrap(forward)
    # A module that can be imported by its name, because that is how torch.compile guards the globals of a function.
    module = ModuleType(f"{__name__}.{innermost.__module__}.{next(_copies)}")
    module.__dict__.update(innermost.__globals__, __name__=module.__name__)
    module.__dict__.update(values)
    sys.modules[module.__name__] = module
    return _copied(forward, innermost, module.__dict__)


def _copied(function: Any, innermost: Any, namespace: dict[str, Any]) -> Callable[..., Any] | None:
    inner, cells = getattr(function, "__wrapped__", None), function.__closure__ or ()
    if function is innermost:
        copy = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, cells)
    else:
        replaced = _copied(inner, innermost, namespace)
        if replaced is None or not any(cell.cell_contents is inner for cell in cells):
            return None
        cells = tuple(CellType(replaced) if cell.cell_contents is inner else cell for cell in cells)
        copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# -- edits of one module -----------------------------------------------------------------------------------------------


class Edit(Protocol):
    """One change to a model. ``undo`` leaves alone what somebody else has changed since ``apply``.

    So patches, hooks and wrappers can be taken off in any order. The edits of one module are here;
    :class:`~.attention.AttentionName` is of a config, and :class:`~.entry.Hook` runs in packed calls.
    """

    def apply(self) -> None: ...

    def undo(self) -> None: ...


@dataclass
class LayerOverride:
    """An edit: the forward of a layer is replaced; attributes as of :func:`override`."""

    layer: nn.Module
    forward: Forward
    prepare: Prepare = _nothing
    takes: tuple[str, ...] = ()

    def apply(self) -> None:
        override(self.layer, self.forward, self.prepare, self.takes)

    def undo(self) -> None:
        restore(self.layer)


@dataclass
class Attribute:
    """An edit: a module has an attribute of its own, which hides one of its class.

    Attributes:
        layer: the module.
        name, value: of the attribute.
    """

    layer: nn.Module
    name: str
    value: Any

    def apply(self) -> None:
        self.layer.__dict__[self.name] = self.value

    def undo(self) -> None:
        self.layer.__dict__.pop(self.name, None)
