"""Parts of layers by tiles of tokens, in steps on long rows whose layers recompute them anyway.

A model, the level of its memory and the tokens of a row -> the parts of known form, which during the step run by tiles:
MLPs by :func:`torch_backend.ops.tiled_mlp.tiled_mlp`, queries, keys and values by
:func:`torch_backend.ops.tiled_projections.tiled_projections`, each with the norm in front of it, and the experts on our
kernels, which take a tile at a time. Attention and scans need no tiles: their kernels hold nothing that is larger than
their inputs.

A part has the known form if nothing changed it or a module inside (:mod:`torch_backend.hf.anatomy.additions`), and if
it agrees with the tiles on a small input, gradients too. It runs whole otherwise.

A norm in front of such a part hands on its input, and the part normalises a tile of it. Attention gets what its
projections return in place of its input, and the projections hand that on: so its own forward runs, whatever it does
between them and attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.activations import ACT2FN

from packing_core.training.decoder_sizes import Part
from packing_core.training.memory_model import TILE, TILED_FROM
from torch_backend.hf.anatomy.additions import why_changed, why_other_code
from torch_backend.hf.anatomy.data_flow import last_part, only_readers, reads_by
from torch_backend.hf.anatomy.expert_layouts import is_spread
from torch_backend.hf.anatomy.layers import uses_interface
from torch_backend.hf.anatomy.structure import causal_lm, decoder_of, with_values
from torch_backend.hf.attention import DecoderLayer
from torch_backend.hf.experts import LAYOUT, TILE_OF_EXPERTS
from torch_backend.hf.override import STANDS_FOR, names, original_class
from torch_backend.ops.tiled_mlp import tiled_mlp
from torch_backend.ops.tiled_projections import tiled_projections
from torch_backend.ops.tiles import Norm, Projection
from torch_backend.ops.trial import in_own_thread, refusal
from torch_backend.steps.memory import level_of

_OF_MLP = ("gate_proj", "up_proj", "down_proj")
_OF_ATTENTION = ("q_proj", "k_proj", "v_proj")
# classes of activations -> names in ops.tiled_mlp
_ACTIVATIONS = {nn.SiLU: "silu", type(ACT2FN["silu"]): "silu", type(ACT2FN["gelu_pytorch_tanh"]): "gelu_tanh"}

_FORM = "_crosspack_form"  # of a module by tiles: its form as a norm
PROBED = 6  # tokens on which a part is compared with its tiles
_ROUNDINGS = 8.0  # by which a part and its tiles may differ, as a share of each result's norm


class Tiles(NamedTuple):
    """The way in which a part runs by tiles.

    Attributes:
        norm: in front of the part, if its tiles compute that too.
        last: whether its result is only added to what the layer returns.
    """

    norm: nn.Module | None = None
    last: bool = False


Parts = Mapping[nn.Module, Tiles]


def tiled_modules(model: nn.Module, tokens: int, fits_whole: Callable[[int], bool] = lambda _: False) -> Parts:
    """Returns the parts that a step on a row of ``tokens`` computes by tiles; none where it is short or fits without.

    At ``"none"`` layers keep the inner columns of their MLPs, and there is nothing to save; experts keep their first
    product at ``"selective"`` too.
    """
    level = level_of(model)
    if tokens < TILED_FROM or level == "none" or fits_whole(tokens):
        return {}
    return {m: part for m, part in can_be_tiled(model).items() if level != "selective" or LAYOUT not in m.__dict__}


def can_be_tiled(model: nn.Module) -> Parts:
    """Returns the MLPs, attention layers and experts of a patched model that tiles can compute."""
    found: dict[nn.Module, Tiles] = {}
    for layer in causal_lm(model).modules():
        if isinstance(layer, DecoderLayer):
            forward = None if "forward" in layer.__dict__ else original_class(layer).forward
            norms = {} if forward is None else only_readers(forward)
            end = None if forward is None or layer._forward_hooks or why_other_code(layer) else last_part(forward)
            in_front = {getattr(layer, part, None): getattr(layer, norm, None) for part, norm in norms.items()}
            for module in layer.modules():
                if why_not_tiled(module) is None:
                    norm = in_front.get(module)
                    norm = norm if norm is not None and why_no_norm(norm, module) is None else None
                    found[module] = Tiles(norm, last=end is not None and module is getattr(layer, end))
    return found


def tiled_parts(model: nn.Module) -> set[Part]:
    """Returns the parts that tiles can compute in all layers of a decoder, as the formula of memory counts them."""
    layers_of_decoder = [m for m in decoder_of(causal_lm(model)).modules() if isinstance(m, DecoderLayer)]
    inside = {m for layer in layers_of_decoder for m in layer.modules()}  # in front may be a vision tower
    found = {m: part for m, part in can_be_tiled(model).items() if m in inside}
    attention = [m for m in found if hasattr(m, _OF_ATTENTION[0])]
    normed = all(part.norm is not None for m, part in found.items() if LAYOUT not in m.__dict__)
    parts: set[Part] = {"projections"} if normed and len(attention) == len(layers_of_decoder) else set()
    return parts | ({"mlp"} if len(attention) < len(found) else set())


def describe_tiles(model: nn.Module, tokens: int, fits_whole: Callable[[int], bool]) -> str | None:
    """Describes what of a step on ``tokens`` runs by tiles, and what does not and why; None where rows are short."""
    if tokens < TILED_FROM or level_of(model) == "none":
        return None
    if fits_whole(tokens):
        return f"none, because a row of {tokens:,} tokens fits at this level without"
    parts = tiled_modules(model, tokens)
    layers = [m for m in causal_lm(model).named_modules() if isinstance(m[1], DecoderLayer)]
    inside = {f"{at}.{name}": m for at, layer in layers for name, m in layer.named_modules()}
    reasons = {name: why for name, m in inside.items() if _parts_of(m) and (why := why_not_tiled(m)) is not None}
    first = next((f"; whole: {name}, because {why}" for name, why in reasons.items()), "")
    more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    return f"{len(parts)} parts of layers, {TILE:,} tokens at a time{first}{more}"


def _parts_of(module: nn.Module) -> tuple[str, ...]:
    """Names the linear layers of attention or of a gated MLP; none of another module."""
    if uses_interface(original_class(module)):
        return _OF_ATTENTION
    return _OF_MLP if {name for name, _ in module.named_children()} >= {*_OF_MLP} else ()


def why_not_tiled(module: nn.Module) -> str | None:
    """Explains why a module is no MLP, no attention layer and no experts that tiles can compute, None if it is one."""
    if LAYOUT in module.__dict__:
        return "ranks exchange its tokens" if is_spread(module) else None
    kind, parts = original_class(module), _parts_of(module)
    if not parts:
        return "it is no gated MLP"
    if parts == _OF_ATTENTION and not reads_by(kind.forward, _OF_ATTENTION):
        return "it reads its input not by projections alone"
    if parts == _OF_MLP and names(kind.forward) != {*_OF_MLP, "act_fn"}:
        return "it computes something else besides"
    if parts == _OF_MLP and type(module.act_fn) not in _ACTIVATIONS:
        return "its activation has no gradient here"
    layers = [getattr(module, name, None) for name in parts]
    if any(_projection(layer) is None for layer in layers):
        return "its linear layers are not plain, nor plain with adapters"
    inside = [module, *(m for layer in layers for m in layer.modules())]  # type: ignore[union-attr] # or no projection
    changed = (why_changed(m) for m in (inside if parts == _OF_ATTENTION else module.modules()))
    return next(filter(None, changed), None) or _why_otherwise(module)


def why_no_norm(norm: nn.Module, part: nn.Module) -> str | None:
    """Explains why tiles of a part cannot compute the norm in front of it, None if they can."""
    if LAYOUT in part.__dict__:
        return "experts take whole rows"
    if _form_of_norm(norm) is None:
        return "it is no root-mean-square norm of known form"
    if isinstance(norm.weight, DTensor):
        return "ranks hold parts of its weight"
    if (reason := why_changed(norm)) is not None:
        return reason
    first = _projection(getattr(part, _parts_of(part)[0]))
    if first is None or first.weight.dtype != norm.weight.dtype:
        return "its weight has another dtype"
    return _why_otherwise(part, norm)


def tiled(parts: Parts) -> AbstractContextManager[None]:
    """Inside, these MLPs, attention layers and experts run by tiles, with their norms."""
    values: list[tuple[nn.Module, str, Any]] = []

    def swap(module: nn.Module, forward: Any, form: tuple[float, float] | None = None) -> None:
        values.append((module, "__class__", _subclass(type(module), forward, form)))  # type: ignore[arg-type] # hashable

    for module, (norm, last) in parts.items():
        if LAYOUT in module.__dict__:
            values.append((module, TILE_OF_EXPERTS, TILE))
            continue
        if norm is not None:
            swap(norm, _hand_on_input, _form_of_norm(norm))
        if not hasattr(module, _OF_ATTENTION[0]):
            swap(module, _last_mlp if last and not module._forward_hooks else _mlp)
            continue
        swap(module, _attention)
        for name, forward in zip(_OF_ATTENTION, _HAND_ON, strict=True):
            swap(getattr(module, name), forward)
    return with_values(values)


@cache
def _subclass(kind: type[nn.Module], forward: Any, form: tuple[float, float] | None = None) -> type[nn.Module]:
    """One class for all modules of a kind, so that equal layers share their compiled graphs."""
    attributes = {"forward": forward, "__module__": kind.__module__, STANDS_FOR: kind, _FORM: form}
    return type(kind.__name__, (kind,), attributes)


def _plain(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of the class that a module has outside of :func:`tiled`."""
    return getattr(module, STANDS_FOR).forward(module, *args, **kwargs)


# -- forwards by tiles -------------------------------------------------------------------------------------------------


class _Unnormed(NamedTuple):
    """The input of a norm, in place of its result."""

    x: Tensor
    norm: Norm


class _Projected(NamedTuple):
    """The results of the projections of attention, in place of its input."""

    shape: torch.Size
    q: Tensor
    k: Tensor
    v: Tensor


def _hand_on_input(self: Any, x: Tensor) -> Any:
    if _dtype_of(x) not in (None, self.weight.dtype):
        return _plain(self, x)
    eps, offset = getattr(self, _FORM)
    return _Unnormed(x, Norm(self.weight, eps, offset))


def _last_mlp(self: Any, given: Any) -> Tensor:
    return _mlp(self, given, last=True)


def _mlp(self: Any, given: Any, *, last: bool = False) -> Tensor:
    x, norm = given if isinstance(given, _Unnormed) else (given, None)
    layers = _layers(self, _OF_MLP, x)
    if layers is None:
        plain: Tensor = _plain(self, x if norm is None else norm(x, x.dtype))
        return plain
    x = x if norm is not None else x.to(layers[0].weight.dtype)
    gate, up, down = layers
    activation = _ACTIVATIONS[type(self.act_fn)]
    return tiled_mlp(x, gate, up, down, activation=activation, tile=TILE, norm=norm, last=last)


def _attention(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    x, norm = hidden_states if isinstance(hidden_states, _Unnormed) else (hidden_states, None)
    layers = _layers(self, _OF_ATTENTION, x)
    if layers is None:
        return _plain(self, x if norm is None else norm(x, x.dtype), *args, **kwargs)
    x = x if norm is not None else x.to(layers[0].weight.dtype)
    q, k, v = tiled_projections(x, layers, tile=TILE, norm=norm)
    return _plain(self, _Projected(x.shape, q, k, v), *args, **kwargs)


def _handing_on(name: str) -> Any:
    def forward(self: Any, x: Any) -> Any:
        return getattr(x, name) if isinstance(x, _Projected) else _plain(self, x)

    return forward


_HAND_ON = tuple(map(_handing_on, ("q", "k", "v")))


def _layers(module: nn.Module, parts: tuple[str, ...], x: Tensor) -> list[Projection] | None:
    """The linear layers of a part in the dtype in which they compute with ``x``; None if tiles cannot compute them."""
    found = [_projection(getattr(module, name)) for name in parts]
    layers = [layer for layer in found if layer is not None]
    if len(layers) < len(found):
        return None
    if (dtype := _dtype_of(x)) is None:  # as autocast casts them, once for all tiles
        dtype = torch.get_autocast_dtype(x.device.type)
        return [layer.to(dtype) for layer in layers]
    return layers if all(layer.weight.dtype == dtype for layer in layers) else None


def _dtype_of(x: Tensor) -> torch.dtype | None:
    """The dtype in which a linear layer computes with ``x``; None if that is autocast's."""
    return None if torch.is_autocast_enabled(x.device.type) else x.dtype


# -- what modules are --------------------------------------------------------------------------------------------------


def _projection(layer: Any) -> Projection | None:
    """A linear layer as tiles take it, None if it does something else."""
    if getattr(layer, STANDS_FOR, type(layer)) is nn.Linear:
        return None if isinstance(layer.weight, DTensor) else Projection(layer.weight, layer.bias)
    base = getattr(layer, "base_layer", None)
    if type(base) is not nn.Linear or not hasattr(layer, "lora_A") or len(layer.active_adapters) != 1:
        return None
    name = layer.active_adapters[0]
    if layer.disable_adapters or layer.merged or name not in layer.lora_A or name in getattr(layer, "lora_variant", ()):
        return None  # variants compute otherwise: DoRA, KaSA and others
    a, b = layer.lora_A[name], layer.lora_B[name]
    plain = type(a) is nn.Linear and type(b) is nn.Linear and a.bias is None and b.bias is None
    drops = not isinstance(layer.lora_dropout[name], nn.Identity)
    if not plain or drops or a.weight.dtype != base.weight.dtype or isinstance(base.weight, DTensor):
        return None
    return Projection(base.weight, base.bias, a.weight, b.weight, float(layer.scaling[name]))


def _form_of_norm(norm: nn.Module) -> tuple[float, float] | None:
    """The small constant of a root-mean-square norm and from where its weight counts; None if it is another module."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weight = getattr(norm, "weight", None)
    if not isinstance(eps, float) or not isinstance(weight, Tensor) or weight.ndim != 1:
        return None
    offset = _offset_of(type(norm)) if len(list(norm.parameters())) == 1 else None  # type: ignore[arg-type]
    return None if offset is None else (eps, offset)


@cache
def _offset_of(kind: type[nn.Module]) -> float | None:
    """From where the weight of a class of norms counts, found by calling it; None if it is no such norm."""
    norm: Any = kind.__new__(kind)
    nn.Module.__init__(norm)
    norm.eps = norm.variance_epsilon = eps = 0.25
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 8, generator=generator), torch.rand(8, generator=generator)
    norm.weight = nn.Parameter(weight)
    with torch.no_grad():
        try:
            found = norm(x)
        except (AttributeError, TypeError, RuntimeError):
            return None
        right = {offset: Norm(weight, eps, offset)(x, x.dtype) for offset in (0.0, 1.0)}
    return next((offset for offset, y in right.items() if torch.allclose(found, y, atol=1e-6)), None)


# -- proofs ------------------------------------------------------------------------------------------------------------


def _why_otherwise(part: nn.Module, norm: nn.Module | None = None) -> str | None:
    """Explains why a part, behind a norm if there is one, does not agree with its tiles; None if it does.

    A verdict stands until a module inside is exchanged or gets another setting.
    """
    modules = [m for m in (part, norm) if m is not None for m in m.modules()]
    state = [(id(m), type(m), {n: x for n, x in vars(m).items() if isinstance(x, _SETTING)}) for m in modules]
    verdicts = _verdicts.setdefault(part, {})
    if verdicts.get(norm is None, (None,))[0] != state:
        verdicts[norm is None] = state, _tried(part, norm)
    return verdicts[norm is None][1]


_FLOAT32 = torch.empty(0)  # in which norms compute, whatever the dtype of a model is
_SETTING = float | str | FunctionType | BuiltinFunctionType | partial
_verdicts: WeakKeyDictionary[nn.Module, dict[bool, tuple[Any, str | None]]] = WeakKeyDictionary()


def _tried(part: nn.Module, norm: nn.Module | None) -> str | None:
    layers = [_projection(getattr(part, name)) for name in _parts_of(part)]
    weights = [layer.weight for layer in layers if layer is not None]
    if any(w.is_meta or w.ndim != 2 or not w.untyped_storage().size() for w in weights):
        return None  # its weights are not here now, as those that FSDP1 holds in parts
    why = refusal(
        partial(_errors, part, norm, layers), _ROUNDINGS * max(torch.finfo(w.dtype).eps for w in (weights[0], _FLOAT32))
    )
    return None if why is None else f"tiles do not compute the same: {why}"


@in_own_thread
def _errors(part: Any, norm: Any, layers: list[Any]) -> list[float]:
    """The errors of results and gradients for a few tokens, as shares of the norm of each."""
    weight = layers[0].weight
    x = torch.randn(PROBED, weight.shape[1], generator=torch.Generator().manual_seed(0))
    x[::2, ::7] *= 8.0
    x = x.mul(torch.tensor([[1.0], [1.0], [0.1], [0.1], [2.0], [2.0]])).to(weight)[None].requires_grad_()
    form = None if norm is None else Norm(norm.weight, *_form_of_norm(norm))  # type: ignore[misc] # why_no_norm asked
    normed = x if norm is None else norm(x)
    if _parts_of(part) == _OF_MLP:
        activation = _ACTIVATIONS[type(part.act_fn)]
        whole, tiles = [part(normed)], [tiled_mlp(x, *layers, activation=activation, tile=TILE, norm=form)]
    else:
        whole = [getattr(part, name)(normed) for name in _OF_ATTENTION]
        tiles = [*tiled_projections(x, layers, tile=TILE, norm=form)]
    trained = [t for layer in layers for t in layer[2:4] if t is not None and t.requires_grad]
    leaves = [x, *trained, *([norm.weight] if norm is not None and norm.weight.requires_grad else [])]
    dys = [y.detach().roll(1, -1) for y in whole]
    of_x, *of_weights = zip(*(torch.autograd.grad(ys, leaves, dys) for ys in (whole, tiles)), strict=True)
    pairs = [*zip(whole, tiles, strict=True), of_x, *((a.flatten(), b.flatten()) for a, b in of_weights)]
    return [
        float(((a - b).double().norm(dim=-1) / a.double().norm(dim=-1).clamp(min=1e-30)).detach().max())
        for a, b in pairs
    ]
