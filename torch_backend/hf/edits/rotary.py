"""Rotary embedding in packed forwards: the Triton rotation, and frequencies that depend on the batch.

Most modeling files of transformers rotate through one function, ``apply_rotary_pos_emb(q, k, cos, sin)``. In a layer's
packed forward that name means :func:`_rotate`; every other call takes the layer's own forward. Which rotation a
modeling file means is found by calling its function.

Frequencies of dynamic NTK and longrope follow from the longest position in the batch, so a short document packed with a
long one would get the long one's. In a packed forward such a rotary module runs once per document length instead.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from torch_backend.context_parallel.share import RankShare
from torch_backend.hf.anatomy.families import ROTATION
from torch_backend.hf.attention import under_own_name
from torch_backend.hf.entry import current_forward
from torch_backend.hf.foreign_kernels import plain_rotation
from torch_backend.hf.forward import forward_among
from torch_backend.hf.override import called, has_own_forward, original_class, rebound
from torch_backend.ops.document_batches import OWN, from_batches, to_batches
from torch_backend.ops.operators import runs_triton
from torch_backend.ops.rope import apply_rope
from torch_backend.ops.rope.reference import rotate
from torch_backend.segments import PackedMetadata, to_device

_ROTATED_FORWARD = "_crosspack_rotated_forward"
_ONE_THREAD = threading.Lock()  # such a module keeps the frequencies of its last call in a buffer
Rotation = Callable[..., tuple[Tensor, Tensor]]


# -- the rotation --------------------------------------------------------------------------------------------------


def why_own_rotation(layer: nn.Module) -> str | None:
    """Explains why an attention layer keeps its own rotation in packed calls; None if Triton's can stand in for it."""
    own = "somebody set a forward on this instance" if has_own_forward(layer) else None
    rotated = own or _rotated_forward(original_class(layer).forward)
    return rotated if isinstance(rotated, str) else None


def rotation_attributes(original: type[nn.Module]) -> dict[str, Any]:
    return {_ROTATED_FORWARD: _rotated_forward(original.forward)}


def rotated_by_triton(layer: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call of an attention layer, with the Triton rotation if it is packed."""
    if forward_among((*args, *kwargs.values())) is None:
        return under_own_name(layer, call, *args, **kwargs)
    return layer.__dict__[_ROTATED_FORWARD](layer, *args, **kwargs)


def _rotated_forward(forward: Callable[..., Any]) -> Callable[..., Any] | str:
    """``forward`` with the Triton rotation, or the reason why :func:`apply_rope` cannot stand in for its own."""
    original: Rotation | None = called(forward).get(ROTATION)
    return f"it does not call {ROTATION}" if original is None else _rotated_by(forward, original)


@cache
def _rotated_by(forward: Callable[..., Any], original: Rotation) -> Callable[..., Any] | str:
    """As :func:`_rotated_forward`, of a forward that calls ``original``; Liger may replace that at any time."""
    plain = plain_rotation(original)
    if (interleaved := interleaving(plain or original)) is not None:
        plain = partial(_rotate, plain or original, interleaved)
    if plain is None:
        return f"its {ROTATION} has a form of its own"
    return rebound(forward, {ROTATION: plain}) or "a decorator hides its forward"


def _rotate(
    original: Rotation, interleaved: bool, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    """Stands in for ``apply_rotary_pos_emb``: q, k [B, H, S, D] and full-width angles [B, S, R]."""
    if rest or named or not runs_triton(q) or not (q.ndim == k.ndim == 4 and cos.ndim == 3):
        return original(q, k, cos, sin, *rest, **named)
    half = cos.shape[-1] // 2
    return apply_rope(q, k, cos[..., :half], sin[..., :half], heads_first=True, interleaved=interleaved)


@cache
def interleaving(original: Rotation) -> bool | None:
    """Returns whether a modeling file's rotation pairs neighbours (True) or halves (False); None for neither.

    It is called with angles as the standard rotary modules make them, the R/2 angles of a token twice in a row, and
    heads wider than R.
    """
    try:
        parameters = list(inspect.signature(original).parameters)
        if parameters[:4] != ["q", "k", "cos", "sin"] or not set(parameters[4:]) <= {"position_ids", "unsqueeze_dim"}:
            return None
        for partly in (True, False):
            generator = torch.Generator().manual_seed(0)
            q, k = (torch.randn(2, h, 5, 12 if partly else 8, dtype=torch.float64, generator=generator) for h in (2, 1))
            angle = torch.randn(2, 5, 4, dtype=torch.float64, generator=generator)
            cos, sin = (torch.cat((x, x), -1) for x in (angle.cos(), angle.sin()))
            try:
                rotated = original(q, k, cos, sin)
            except RuntimeError:
                continue  # it cannot turn a part of a head; no such model has one
            for interleaved in (False, True):
                right = [
                    rotate(x.transpose(1, 2), angle.cos(), angle.sin(), interleaved=interleaved).transpose(1, 2)
                    for x in (q, k)
                ]
                if all(x.shape == y.shape and torch.allclose(x, y) for x, y in zip(rotated, right, strict=True)):
                    return interleaved
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None
    return None


# -- frequencies in half precision -----------------------------------------------------------------------------------


def rounded_frequencies(model: nn.Module) -> dict[str, torch.dtype]:
    """Rotary frequencies of ``model`` in half precision, by the buffer's name.

    Transformers keeps them in float32 whatever dtype a model is loaded or made in. Only a cast of the whole model
    rounds them, and the rotation, which computes in float32, cannot undo that.
    """
    return {
        name: x.dtype
        for name, x in model.named_buffers()
        if name.endswith("inv_freq") and x.is_floating_point() and x.dtype.itemsize < 4
    }


# -- frequencies that depend on the batch --------------------------------------------------------------------------


def frequencies_per_document(rotary: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call of a rotary module, which chooses frequencies per document in packed calls.

    Its decoder calls it by itself and passes it no mask, so it takes the packed forward of its thread.
    """
    forward = current_forward()
    with nullcontext() if torch.compiler.is_compiling() else _ONE_THREAD:
        if forward is None:
            return call(*args, **kwargs)
        if forward.context is not None:
            return _of_pieces(rotary, call, forward.context, args, kwargs)
        return _of_documents(rotary, call, forward.segments, args, kwargs)


def _of_documents(
    rotary: nn.Module, call: Callable[..., Any], packed: PackedMetadata, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The angles of a batch's tokens, from one call for the documents of each length; text alone, so that positions on
    several axes [A, B, S] are as long."""
    positions = next(x for x in (*args, *kwargs.values()) if _is_positions(x))
    angles = []
    for batch in to_batches(packed, positions.flatten(-2).movedim(-1, 0), sizes=OWN):
        of_length = batch.movedim((0, 1), (-2, -1))
        own, named = tree_map(lambda x, new=of_length: new if _is_positions(x) else x, (args, kwargs))
        angles.append(_from_scratch(rotary, call, *own, **named))

    def joined(*parts: Tensor) -> Tensor:
        tokens_first = [part.movedim((-3, -2), (0, 1)) for part in parts]
        whole = from_batches(packed, tokens_first, sizes=OWN).unflatten(0, positions.shape[-2:])
        return whole.movedim((0, 1), (-3, -2))

    return tree_map(joined, *angles)


def _is_positions(x: Any) -> bool:
    """Returns whether an argument of a rotary module holds positions; of hidden states it reads dtype and device."""
    return isinstance(x, Tensor) and not x.is_floating_point()


def _of_pieces(
    rotary: nn.Module, call: Callable[..., Any], share: RankShare, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The angles of a rank's tokens [1, T], with the frequencies of whole documents, by the length of these.

    The frequencies follow from the largest position of a call, so each call has the document's last position too.
    """
    lengths = torch.tensor(share.document_lengths).repeat_interleave(torch.tensor(share.lengths))
    order, angles = [], []
    for length in sorted(set(share.document_lengths)):
        tokens = to_device((lengths == length).nonzero()[:, 0], share.device)

        def of_length(x: Any, tokens: Tensor = tokens, length: int = length) -> Any:
            if not _is_positions(x):
                return x
            return torch.cat([x.index_select(-1, tokens), x.new_full((*x.shape[:-1], 1), length - 1)], -1)

        named = {name: of_length(x) for name, x in kwargs.items()}
        of_tokens = _from_scratch(rotary, call, *map(of_length, args), **named)
        order.append(tokens)
        angles.append([x[..., :-1, :] for x in of_tokens])
    inverse = torch.cat(order).argsort()
    return tuple(torch.cat(parts, -2).index_select(-2, inverse) for parts in zip(*angles, strict=True))


def _from_scratch(rotary: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``call`` without what the module remembers of longer documents."""
    for name in list(rotary.__dict__):
        if name.endswith("max_seq_len_cached"):
            setattr(rotary, name, 0)
    return call(*args, **kwargs)
