"""Padded calls of a patched model, run as one packed row: what a trainer computes on padded batches becomes packed.

A call with ``input_ids`` and ``attention_mask`` [B, S] -> :meth:`Unpadding.take_out` takes the padding out, [1, T] ->
the packed forward of :mod:`torch_backend.hf.patch` -> :meth:`Unpadding.put_back` puts every output per token back where
it stood, [B, S] or, where outputs predict the next token, [B, S - 1]. The caller sees the shapes that it knows, and
zeros at padding. So a loss that reads rows of a padded batch, whatever it does with them, stays as it is.

Only calls that ask for it are changed: those with ``document_lengths``, which a collator adds, and those with TRL's
``fused_lm_head=True``; all that are padded after ``torch_backend.unpad(model)``, except those that ask for something
that a packed row does not have (a cache, attention weights). Generation and every other call run as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from packing_core.batches.keys import BatchKey
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import LayoutError, PackingError, UnsupportedModelError
from torch_backend.context_parallel.exchange import whole_tokens
from torch_backend.context_parallel.share import RankShare
from torch_backend.hf.anatomy.families import M_ROPE, PIXELS
from torch_backend.hf.anatomy.model import is_encoder
from torch_backend.hf.anatomy.structure import causal_lm, with_values
from torch_backend.hf.entry import THREAD
from torch_backend.hf.inputs.arguments import CACHES
from torch_backend.hf.inputs.boundaries import is_packed
from torch_backend.hf.inputs.no_cache import NoCache
from torch_backend.hf.inputs.padded_images import DocumentPositions, image_keys
from torch_backend.hf.inputs.prefixes import Prefixes, Sharing
from torch_backend.hf.patch import state_of
from torch_backend.hf.patched import Patched
from torch_backend.hf.shared_rows import SHARED_ROW, RowIds
from torch_backend.segments import to_device

LENGTHS = "document_lengths"  # key of a batch: real tokens of each row, a tuple of ints on the host
IDS = f"ids_of_{LENGTHS}"  # key of a batch: the ids of its real tokens on the host, RowIds
SCORED = "fused_lm_head"  # argument by which TRL's trainers ask a model for log-probabilities
OUTPUTS_OVER_RANKS = (
    "a padded call runs packed, and its documents are cut over ranks, of which none has the outputs of whole ones: "
    "only log-probabilities of labels (TRL's fused_lm_head=True) are gathered. Call a model that is patched without a "
    "mesh"
)
_OF_DOCUMENTS = ("pooler_output",)  # outputs that are one for each document already
_OF_IMAGES = ("image_hidden_states", "video_hidden_states")  # outputs that are one for each image
_OF_CACHES = ("rope_deltas",)  # outputs for calls with a cache alone
_FLAT = ("router_logits",)  # outputs [T, ...] of all tokens, without an axis of rows
_NOT_OF_THE_MODEL = ("margin",)  # what RewardTrainer hands on to the model with the rest of its batch


def unpad_calls(model: nn.Module, *, always: bool = False, share_prefix: Sharing = False) -> None:
    """Run the padded calls of a patched model packed, in place; calling it again changes the options alone.

    Args:
        share_prefix: compute a common beginning of a call's documents once; ``"auto"`` where it saves a tenth of the
            work or more and the model can.
        always: every call with an ``attention_mask`` [B, S] and without a cache, and not only those that ask for it.
    """
    state = state_of(causal_lm(model))
    assert state is not None
    if state.unpadding is None:
        state.unpadding = Unpadding(state.root)
    state.unpadding.always |= always
    if share_prefix is not False:
        state.unpadding.prefixes = Prefixes(state, share_prefix)


def padded_calls(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, this thread's calls of a model stay padded; without effect on one whose calls are."""
    return with_values([(THREAD, "padded", (*THREAD.padded, causal_lm(model)))])


class LengthsCollator:
    """Calls another collator and adds the lengths of rows to its batches, with which no forward waits for the device.

    With ``ids``, they have the token ids on the host too, which shared prefixes are found by.
    """

    def __init__(self, collator: Callable[[Any], Mapping[str, Any]], *, ids: bool = False) -> None:
        self.collator = collator
        self.ids = ids

    def __call__(self, features: Any) -> dict[str, Any]:
        return with_lengths(self.collator(features), ids=self.ids)


def with_lengths(batch: Mapping[str, Any], *, ids: bool = False) -> dict[str, Any]:
    """Returns a batch with the number of real tokens of each row, as far as it is padded and does not tell them.

    A batch of several inputs, as KTO's, has one tuple for each of them, under the prefix of its ``attention_mask``.
    """
    batch = dict(batch)
    for prefix in [name.removesuffix("attention_mask") for name in batch if name.endswith("attention_mask")]:
        mask, tokens = batch[prefix + "attention_mask"], batch.get(prefix + "input_ids")
        if prefix + LENGTHS not in batch:
            batch[prefix + LENGTHS] = lengths_of(mask)
        if ids and tokens is not None and prefix + IDS not in batch:
            batch[prefix + IDS] = RowIds(tokens[mask != 0].cpu().numpy())
    return batch


def lengths_of(mask: Tensor) -> tuple[int, ...]:
    """Real tokens of each row of an attention mask [B, S] of any dtype."""
    return tuple((mask != 0).sum(1).tolist())


@dataclass(frozen=True)
class Padded:
    """Positions of the tokens of a padded batch [B, S].

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

    def per_token(self, x: Any) -> bool:
        """Returns whether an argument has a value per token: [B, S, ...], [1, S, ...] or 3-axis positions [3, B, S]."""
        if not isinstance(x, Tensor) or x.ndim < 2:
            return False
        forms = [x.shape[:2], x.shape[1:]] if x.ndim == 3 else [x.shape[:2]]
        return any(form in (self.shape, (1, self.shape[1])) for form in forms)

    def row(self, x: Tensor) -> Tensor:
        """[B, S, ...] -> [1, T, ...]; what has one row for all, [1, S, ...], alike; [3, B, S] -> [3, 1, T]."""
        if x.shape[1] != self.shape[1]:
            return torch.cat([self.row(axis)[None] for axis in x])
        return x.expand(*self.shape, *x.shape[2:]).flatten(0, 1).index_select(0, self.places)[None]

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

    def returned(self, name: str, x: Any) -> Any:
        """An output of the model as the caller expects it: values per token go back to their places.

        Raises:
            UnsupportedModelError: it holds something else, which a packed row has in another shape.
        """
        if isinstance(x, tuple | list):  # of layers
            return tuple(self.returned(name, each) for each in x)
        if not isinstance(x, Tensor) or x.ndim == 0:
            return x
        tokens = len(self.places)
        if name in _FLAT and len(x) == tokens:
            return self.back(x[None]).flatten(0, 1)
        if x.ndim > 1 and x.shape[0] == 1 and tokens - 1 <= x.shape[1] <= tokens:
            return self.back(x)
        raise UnsupportedModelError(
            f"a call without padding returned {name} {list(x.shape)}, which is not a value for each of its {tokens:,} "
            f"tokens: leave {name} out, or run this call on a model without crosspack.unpad"
        )


@dataclass(frozen=True)
class PaddedOutput:
    """Form of the output that the caller of a padded call expects from the packed one.

    Attributes:
        padded: where its tokens stand.
        kept: logits of the last tokens alone, as many; None or 0 for all.
        as_tuple: a tuple in place of an output with names.
        caches: a cache, which the packed call does not make.
    """

    padded: Padded
    kept: int | None
    as_tuple: bool
    caches: bool


class Unpadding:
    """Unpads the calls of one patched model at its entry.

    Attributes:
        always: every padded call runs packed, not only those that ask for it.
        prefixes: shares common beginnings of a call's documents; None where nobody asked for it.
        positions: of documents with images.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        self.always = False
        self.prefixes: Prefixes | None = None
        self.positions = DocumentPositions(root)

    def take_out(self, kwargs: dict[str, Any]) -> tuple[PaddedOutput | None, dict[str, Any]]:
        """The arguments of the packed call, and what its caller expects; None and the call's own if it stays padded."""
        root, kwargs = self.root, dict(kwargs)
        NoCache.refuse(kwargs)
        lengths, ids_on_host = kwargs.pop(LENGTHS, None), kwargs.pop(IDS, None)
        for name in [name for name in kwargs if name.endswith(LENGTHS)]:
            del kwargs[name]  # of another input of the same batch
        by_trainer = lengths is not None or bool(kwargs.get(SCORED))
        state = state_of(root)
        if state is None or not self._asks(state, kwargs, by_trainer):
            return None, kwargs
        if state.context is not None and not kwargs.get(SCORED):
            raise UnsupportedModelError(OUTPUTS_OVER_RANKS)
        mask, ids = kwargs["attention_mask"], kwargs["input_ids"]
        if mask.shape != ids.shape:
            raise LayoutError(f"attention_mask must be {list(ids.shape)} as input_ids, got {list(mask.shape)}")
        padded = self.places(mask, lengths or lengths_of(mask))
        for name in _NOT_OF_THE_MODEL:
            kwargs.pop(name, None)
        if (positions := self.positions.of_rows(kwargs)) is not None:
            kwargs["position_ids"] = positions
        row = self._row_of(state, padded, kwargs)
        kept, as_tuple = kwargs.pop("logits_to_keep", None), not _option(root, kwargs, "return_dict", True)
        if as_tuple:
            kwargs["return_dict"] = True  # by whose names the outputs are put back
        expected = PaddedOutput(padded, kept, as_tuple, caches=_caches(root, state, kwargs) and not by_trainer)
        kwargs = {**kwargs, **row, BatchKey.LENGTHS: padded.lengths}
        shared = None if self.prefixes is None else self.prefixes.of(kwargs, ids_on_host)
        return expected, kwargs if shared is None else {**kwargs, SHARED_ROW: shared}

    def places(self, mask: Tensor, lengths: tuple[int, ...]) -> Padded:
        """:meth:`Padded.of`, and the check that documents are consecutive tokens."""
        guard = state_of(self.root).guard  # type: ignore[union-attr]
        guard.check("attention_mask of a padded call", lambda: _interrupted(mask), _hole)
        return Padded.of(mask, lengths)

    def _asks(self, state: Patched, kwargs: Mapping[str, Any], by_trainer: bool) -> bool:
        """Returns whether a call of the model is to run packed."""
        if not (self.always or by_trainer) or self.root in THREAD.padded or is_packed(kwargs):
            return False
        if kwargs.get("input_ids") is None or kwargs.get("attention_mask") is None:
            return False
        return by_trainer or not _needs_padding(state, kwargs)

    def _row_of(self, state: Patched, padded: Padded, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments that hold a value per token, as those of one row, and the labels."""
        images = image_keys(self.root)
        row = {name: padded.row(x) for name, x in kwargs.items() if name not in images and padded.per_token(x)}
        labels = kwargs.get("labels")
        if labels is not None and state.anatomy.head == "document":
            row["labels"] = labels  # of documents, however many
        elif state.shifted and "labels" in row:
            row["labels"] = padded.labels(kwargs["labels"])
        return row

    def put_back(self, expected: PaddedOutput, output: Any, share: RankShare | None = None) -> Any:
        """The output of a packed call as the caller of the padded one expects it, of all ranks if its row was cut."""
        state = state_of(self.root)
        if share is not None:
            for name, value in output.items():
                if isinstance(value, Tensor) and value.ndim > 1:  # the last token predicts nothing
                    output[name] = whole_tokens(value[0], share)[None, :-1]
        as_they_are = {*_OF_DOCUMENTS, *_OF_IMAGES, *_OF_CACHES}
        if state is not None and state.anatomy.head == "document":
            as_they_are.add("logits")
        for name, value in output.items():
            if name not in as_they_are and (returned := expected.padded.returned(name, value)) is not value:
                output[name] = returned
        if expected.kept:
            output["logits"] = output["logits"][:, -expected.kept :]
        if expected.caches:
            output = NoCache.in_place(output)
        return output.to_tuple() if expected.as_tuple else output


def _option(root: Any, kwargs: Mapping[str, Any], name: str, default: bool) -> bool:
    """Returns an option of a call: its own argument, else the model's config."""
    given = kwargs.get(name)
    return bool(getattr(root.config, name, default) if given is None else given)


def _needs_padding(state: Patched, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a call asks for outputs that a packed row does not have, so that it runs padded as before."""
    if any(kwargs.get(name) is not None for name in CACHES) or kwargs.get("use_cache"):
        return True
    if _option(state.root, kwargs, "output_attentions", False) or isinstance(kwargs.get("logits_to_keep"), Tensor):
        return True
    mask, positions = kwargs["attention_mask"], kwargs.get("position_ids")
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return True
    family = state.root.config.model_type
    if family in M_ROPE and (positions is None or positions.ndim == 2):  # the model would number its images by the row
        return any(kwargs.get(name) is not None for name in PIXELS)
    return positions is not None and state.anatomy.numbers_tokens


def _caches(root: Any, state: Patched, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a padded call would have made a cache without being asked for one."""
    wanted = kwargs.get("use_cache") is None and getattr(root.config.get_text_config(), "use_cache", False)
    return bool(wanted) and not is_encoder(root.config, state.anatomy.head)


def _interrupted(mask: Tensor) -> Tensor:
    """[B] whether the real tokens of a row are not consecutive."""
    before = nn.functional.pad(mask[:, :-1], (1, 0))
    return ((mask != 0) & (before == 0)).sum(1) > 1


def _hole(row: int) -> PackingError:
    return LayoutError(
        f"attention_mask leaves out tokens inside row {row}: a document is packed from consecutive tokens, with "
        "padding before and after it alone"
    )
