"""Token ids of a packed batch that know their documents: no embedding outside of a patched entry takes them.

Packed rows look like any others to a model that is not patched: it would train on them contaminated, without a word.
So the collators make ``input_ids`` a :class:`PackedTokens`, which holds the number of each token's segment and keeps
it through slices, arithmetic, moves and copies. Wherever such tokens still hold several documents in a row, an
embedding refuses them, and so does a patched model that gets them without their boundaries. The entry of a patched
model takes them as a plain tensor (:func:`plain`), so that nothing behind it pays for this.

Checking the model in the collator or in the trainer would be simpler, but neither knows which model will run the batch:
a trainer may rebuild it, and loops of users are nobody's.

Tokens that leave torch (``numpy()``, ``tolist()``), or that are copied into a tensor that was there before, are plain
again; ``ids.as_subclass(torch.Tensor)`` makes them so on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from packing_core.errors import UnsupportedModelError

NOWHERE = -1  # the segment of padding, and of tokens that were put beside packed ones
_EMBEDDINGS = (F.embedding, F.embedding_bag, torch.embedding, torch.embedding_bag)
# Operations that move the elements of their first argument, by name: segments go the same way.
# fmt: off
_MOVES = frozenset((
    "__getitem__", "select", "narrow", "slice", "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten",
    "ravel", "squeeze", "unsqueeze", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "permute", "t",
    "expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave", "cat", "concat", "concatenate",
    "stack", "hstack", "vstack", "dstack", "chunk", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit",
    "unbind", "index_select", "gather", "take", "take_along_dim", "masked_select", "roll", "flip", "fliplr", "flipud",
    "unfold", "as_strided", "to", "long", "int", "cuda", "cpu", "pin_memory", "contiguous", "clone", "detach", "pad",
    "constant_pad_nd", "pad_sequence", "type_as",
))
# fmt: on
_LOOKUPS = ("__getitem__", "gather", "take", "index_select", "take_along_dim")  # of which tokens may be the index
_FILLS = {"pad": (3, "value"), "constant_pad_nd": (2, "value"), "pad_sequence": (2, "padding_value")}
_VIEWS = (Tensor.data.__get__, Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]


class PackedBatchError(UnsupportedModelError):
    """Tokens of a packed batch reached a model that is not patched."""

    def __init__(self) -> None:
        super().__init__(
            "a packed batch reached a model that is not patched, or that was called past its entry: its documents "
            "would see each other. Call crosspack.patch(model) on the model that runs the batch, also on one that was "
            "rebuilt or replaced after the first was patched, and call model(**batch). With "
            "input_ids.as_subclass(torch.Tensor) embeddings can be made that go with the boundaries, and without "
            "boundaries (cu_seq_lens_q, packed_lengths) a whole row runs as one document"
        )


class PackedTokens(Tensor):
    """Token ids that know to which segment of a packed batch each belongs.

    Attributes:
        ids: the same tokens, plain.
        segments: int32, as many as there are tokens, in the same shape and on the same device: the number of each
            token's segment, -1 at padding and at tokens that do not come from the batch.
    """

    ids: Tensor
    segments: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [*_tensors(args), *_tensors([x for name, x in kwargs.items() if name != "out"])]
            tokens = [x for x in tensors if isinstance(x, PackedTokens)]
            if func in _EMBEDDINGS and any(map(holds_several, tokens)):
                raise PackedBatchError
            result = func(*args, **kwargs)
            if not any(_is_integer(x) for x in _tensors(result)):
                return result
            name = getattr(func, "__name__", "")
            if name in _MOVES or func in _VIEWS:
                if (moved := _segments_moved(func, name, args, kwargs)) is not None:
                    return _known(result, moved)
                if name not in _LOOKUPS:  # tokens say only where to, of which dtype or of which shape
                    return result
                over = [x.segments for x in tokens if x.segments.shape == result.shape]
            elif (
                not isinstance(result, Tensor) or name == "__get__" or name.startswith("new_") or name.endswith("_like")
            ):
                return result
            elif _is_elementwise(result.shape, [x.shape for x in tensors]):
                over = [x.segments for x in tokens if _broadcasts(x.segments.shape, result.shape)]
            else:
                return result
            # of several, those that are not broadcast along the row
            return _known(result, max(over, key=lambda x: x.shape[-1:]).expand(result.shape)) if over else result

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedTokens:
        return memo.setdefault(id(self), packed_tokens(plain(self).clone(), self.segments.clone()))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedTokens({plain(self)!r})"


def packed_tokens(ids: Tensor, segments: Tensor) -> PackedTokens:
    """Token ids that know their segments, in the memory of ``ids``.

    Args:
        ids: integers of any shape.
        segments: integers of the same shape, the number of each token's segment, -1 at padding.
    """
    tokens = ids.as_subclass(PackedTokens)
    tokens.ids, tokens.segments = ids, segments.to(torch.int32)
    return tokens


@torch.compiler.disable
def holds_several(tokens: PackedTokens) -> bool:
    """Returns whether a row, along the last axis, holds tokens of several segments; waits for the device."""
    segments = tokens.segments
    if segments.ndim == 0 or not segments.numel():
        return False
    first = segments.masked_fill(segments < 0, torch.iinfo(segments.dtype).max).amin(-1)
    return bool((segments.amax(-1) > first).any())


def plain(value: Any) -> Any:
    """A tensor without its segments; a mapping whose tensors have none; anything else as it is."""
    if isinstance(value, PackedTokens):
        return value.ids if torch.compiler.is_compiling() else value.as_subclass(Tensor)  # it cannot trace this
    if isinstance(value, Mapping):
        return {name: plain(x) if isinstance(x, PackedTokens) else x for name, x in value.items()}
    return value


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a value, its tuples and lists."""
    if isinstance(value, Tensor):
        return [value]
    return [x for each in value for x in _tensors(each)] if isinstance(value, tuple | list) else []


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _is_elementwise(result: torch.Size, shapes: list[torch.Size]) -> bool:
    """Tells whether every axis of a result is one of the arguments'; ``one_hot`` and ``outer`` build one."""
    if result in shapes:  # ``broadcast_shapes`` takes longer than all of the rest
        return True
    return torch.broadcast_shapes(*(shape for shape in shapes if _broadcasts(shape, result))) == result


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    if shape == to:
        return True
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(reversed(shape), reversed(to), strict=False))


def _segments_moved(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Applies ``func`` to the segments of the tokens that it moves; None if it moves others."""
    moved, *others = args or (kwargs.pop("input", kwargs.pop("tensors", None)),)
    if isinstance(moved, PackedTokens):
        moved = moved.segments
    elif isinstance(moved, tuple | list) and any(isinstance(x, PackedTokens) for x in moved):
        moved = [x.segments if isinstance(x, PackedTokens) else torch.full_like(x, NOWHERE) for x in moved]
    else:
        return None
    if name in _FILLS:
        place, keyword = _FILLS[name]
        others, kwargs = others[: place - 1], {**kwargs, keyword: NOWHERE}
    return func(moved, *others, **kwargs)


def _known(result: Any, segments: Any) -> Any:
    """The integers among the results of an operation as tokens of these segments."""
    if not isinstance(result, Tensor):
        return type(result)(map(_known, result, segments))
    return packed_tokens(result, segments) if type(result) is Tensor and _is_integer(result) else result


torch.serialization.add_safe_globals([PackedTokens])  # torch.load(weights_only=True), which is its default
