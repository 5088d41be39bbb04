"""Padded calls of a patched model, run as one packed row: what a trainer computes on padded batches becomes packed.

A call with ``input_ids`` and ``attention_mask`` [B, S] -> a hook on the model takes the padding out, [1, T] -> the
packed forward of :mod:`torch_backend.hf.patch` -> a hook puts every output per token back where it stood, [B, S] or,
where outputs predict the next token, [B, S - 1]. The caller sees the shapes that it knows and zeros at padding. So a
loss that reads rows of a padded batch, whatever it does with them, stays as it is.

Only calls that ask for it are changed: those with ``document_lengths``, which a collator adds, and those with TRL's
``fused_lm_head=True``; all that are padded after ``torch_backend.unpad(model)``. Generation and every other call run as
before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import LayoutError, PackingError
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.inputs.arguments import CACHES, as_keywords, forward_names
from torch_backend.hf.inputs.boundaries import is_packed
from torch_backend.hf.patch import state_of
from torch_backend.segments import to_device

LENGTHS = "document_lengths"  # key of a batch: real tokens of each row, a tuple of ints on the host
SCORED = "fused_lm_head"  # argument by which TRL's trainers ask a model for log-probabilities
_STATE = "_crosspack_unpadding"
# Trainers of TRL that compute their loss from padded calls: of answers in pairs, of single ones, of completions.
PAIRS, SINGLE, GENERATING = ("DPOTrainer", "RewardTrainer"), ("KTOTrainer",), ("GRPOTrainer", "RLOOTrainer")
_OTHER_FORMULA = ("GMPOTrainer",)  # subclasses of them in TRL that change the formula of the loss alone
_OF_DOCUMENTS = ("pooler_output",)  # outputs that are one for each document already
_NOT_OF_THE_MODEL = ("margin",)  # what RewardTrainer hands on to the model with the rest of its batch


def kind_of(trainer: Any) -> str | None:
    """The name of the trainer of TRL in ``PAIRS``, ``SINGLE`` or ``GENERATING`` that this one is or derives from.

    TRL's own subclasses (``trl.experimental``) call models in ways of their own and are not among them, except those
    that carry the name of the class itself or change its formula alone.
    """
    for base in type(trainer).__mro__:
        if base.__module__.split(".")[0] == "trl" and base.__name__ not in _OTHER_FORMULA:
            return base.__name__ if base.__name__ in (*PAIRS, *SINGLE, *GENERATING) else None
    return None


def unpad_calls(model: nn.Module, *, always: bool = False) -> None:
    """Run the padded calls of a patched model packed, in place; calling it again changes ``always`` alone.

    Args:
        always: every call with an ``attention_mask`` [B, S] and without a cache, and not only those that ask for it.
    """
    root = causal_lm(model)
    if _STATE not in root.__dict__:
        root.__dict__[_STATE] = _Unpadding(root)
    if always:
        root.__dict__[_STATE].always = True
        root.__dict__["forward"] = _ThroughHooks(root)


@contextmanager
def padded_calls(model: nn.Module) -> Iterator[None]:
    """Inside, the calls of a model stay padded; without effect on one whose calls are."""
    unpadding = causal_lm(model).__dict__.get(_STATE)
    if unpadding is None:
        yield
        return
    unpadding.active = False
    try:
        yield
    finally:
        unpadding.active = True


class LengthsCollator:
    """Calls another collator and adds the number of real tokens of each row, as far as its batches are padded.

    With them no forward waits for the device. A batch of several inputs, as KTO's, has one tuple for each of them,
    under the prefix of its ``attention_mask``.
    """

    def __init__(self, collator: Callable[[Any], Mapping[str, Any]]) -> None:
        self.collator = collator

    def __call__(self, features: Any) -> dict[str, Any]:
        batch = dict(self.collator(features))
        for name in [name for name in batch if name.endswith("attention_mask")]:
            batch[name.removesuffix("attention_mask") + LENGTHS] = lengths_of(batch[name])
        return batch


def lengths_of(mask: Tensor) -> tuple[int, ...]:
    """Real tokens of each row of an attention mask [B, S]."""
    return tuple(mask.sum(1).tolist())


@dataclass(frozen=True)
class Padded:
    """Where the tokens of a padded batch [B, S] stand.

    Attributes:
        shape: (B, S).
        lengths: real tokens of each row, positive.
        places: [T] their positions in the flattened batch, ascending.
    """

    shape: tuple[int, int]
    lengths: tuple[int, ...]
    places: Tensor

    @classmethod
    def of(cls, mask: Tensor, lengths: tuple[int, ...]) -> Padded:
        """Read a mask [B, S]; ``lengths`` are its sums, so that the device is not asked.

        Raises:
            LayoutError: a row has no token.
        """
        if min(lengths) < 1:
            raise LayoutError(f"row {lengths.index(min(lengths))} of the batch has no token: leave empty documents out")
        places = torch.nonzero_static(mask.flatten(), size=sum(lengths))[:, 0]
        return cls((mask.shape[0], mask.shape[1]), lengths, places)

    def row(self, x: Tensor) -> Tensor:
        """[B, S, ...] -> [1, T, ...]"""
        return x.flatten(0, 1).index_select(0, self.places)[None]

    def labels(self, x: Tensor) -> Tensor:
        """Labels [B, S] -> [1, T], with -100 for the first token of each document, which nothing predicts."""
        starts = to_device(torch.tensor([0, *accumulate(self.lengths[:-1])]), x.device)
        return self.row(x).index_fill(1, starts, IGNORE_INDEX)

    def back(self, x: Tensor) -> Tensor:
        """[1, T, ...] -> [B, S, ...], and [1, T - 1, ...] -> [B, S - 1, ...]; 0 at padding."""
        rows, width = self.shape
        places, missing = self.places[: x.shape[1]], len(self.places) - x.shape[1]
        out = x.new_zeros(rows * width, *x.shape[2:]).index_put((places,), x[0])
        return out.unflatten(0, self.shape)[:, : width - missing]

    def returned(self, x: Any) -> Any:
        """An output of the model as the caller expects it: values per token go back to their places."""
        tokens = len(self.places)
        per_token = isinstance(x, Tensor) and x.ndim > 1 and x.shape[0] == 1 and tokens - 1 <= x.shape[1] <= tokens
        return self.back(x) if per_token else x


class _ThroughHooks:
    """``model.forward`` for libraries that call it in place of the model, which would pass all hooks by."""

    def __init__(self, root: Any) -> None:
        self.root = root

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(MethodType(type(self.root).forward, self.root))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unpadding = self.root.__dict__[_STATE]
        if not unpadding.in_hooks:
            return self.root(*args, **kwargs)
        unpadding.in_hooks = False
        return type(self.root).forward(self.root, *args, **kwargs)


class _Unpadding:
    """The two hooks of one model."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.names = forward_names(root)
        self.padded: Padded | None = None
        self.active = True
        self.always = False
        self.in_hooks = False  # whether the hooks of the running call have begun, and its forward has not
        root.register_forward_pre_hook(self._take_out, with_kwargs=True, prepend=True)  # before the hook of the patch
        root.register_forward_hook(self._put_back, always_call=True)

    def _take_out(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.padded, self.in_hooks = None, True
        args, kwargs = as_keywords(self.names, args, kwargs)
        lengths = kwargs.pop(LENGTHS, None)
        for name in [name for name in kwargs if name.endswith(LENGTHS)]:
            del kwargs[name]  # of another input of the same batch
        every = self.always and not any(kwargs.get(name) is not None for name in CACHES)
        asked = self.active and (every or lengths is not None or kwargs.get(SCORED))
        mask, ids, state = kwargs.get("attention_mask"), kwargs.get("input_ids"), state_of(root)
        if not asked or state is None or is_packed(kwargs) or ids is None or mask is None:
            return args, kwargs
        if mask.shape != ids.shape:
            raise LayoutError(f"attention_mask must be {list(ids.shape)} as input_ids, got {list(mask.shape)}")
        state.guard.check("attention_mask of a padded call", lambda: _interrupted(mask), _hole, wait=root.training)
        self.padded = padded = Padded.of(mask, lengths or lengths_of(mask))
        for name in _NOT_OF_THE_MODEL:
            kwargs.pop(name, None)
        labels = kwargs.get("labels")
        row = {name: padded.row(x) for name, x in kwargs.items() if isinstance(x, Tensor) and x.shape[:2] == ids.shape}
        if labels is not None and labels.shape == ids.shape:
            row["labels"] = padded.labels(labels) if state.shifted else padded.row(labels)
        return args, {**kwargs, **row, "packed_lengths": padded.lengths}

    def _put_back(self, root: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        padded, self.padded, self.in_hooks = self.padded, None, False
        if padded is None or output is None:
            return None
        state = state_of(root)
        of_documents = ("logits", *_OF_DOCUMENTS) if state is not None and state.head == "document" else _OF_DOCUMENTS
        for name, value in output.items():
            if name not in of_documents and (returned := padded.returned(value)) is not value:
                output[name] = returned
        return output


def _interrupted(mask: Tensor) -> Tensor:
    """[B] whether the real tokens of a row are not consecutive."""
    before = nn.functional.pad(mask[:, :-1], (1, 0))
    return ((mask != 0) & (before == 0)).sum(1) > 1


def _hole(row: int) -> PackingError:
    return LayoutError(
        f"attention_mask leaves out tokens inside row {row}: a document is packed from consecutive tokens, with "
        "padding before and after it alone"
    )
