"""One packed forward of a model: the segments of its batch, and what each layer chose to run.

A batch's boundaries -> :class:`PackedForward`, made once per call -> every layer, as an argument -> ``record``. The
object travels where the attention mask would, and to layers that take no mask under the names that they pass on
(``packed``, ``seq_idx``). Gradient checkpointing therefore sees it again with the arguments of a layer, on whatever
thread the backward runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from packing_core.batches.keys import BatchKey
from packing_core.errors import UnsupportedModelError
from torch_backend.context_parallel.rank_attention import MethodChoice
from torch_backend.context_parallel.share import RankShare
from torch_backend.hf.document_rows import DocumentRows
from torch_backend.hf.shared_rows import SharedRow
from torch_backend.ops.attention import AttentionRequest
from torch_backend.ops.attention.index_loss import IndexFactors
from torch_backend.ops.attention.selected import LongDocuments
from torch_backend.ops.document_batches import FINE, PerBatch, per_document
from torch_backend.ops.forests import along_documents, documents
from torch_backend.ops.scan import TRITON, ScanChoice
from torch_backend.segments import PackedMetadata

TRITON_SCAN = ScanChoice(TRITON, "scan by Triton")


@dataclass(frozen=True)
class AttentionChoice:
    """An attention layer: the implementation that ran, its request, and how it crossed ranks; None if it did not.

    ``long`` says which documents saw selected keys, which run by themselves, and by what; None without.
    """

    implementation: str
    request: AttentionRequest
    crossing: MethodChoice | None = None
    long: str | None = None


@dataclass(frozen=True)
class RowChoice:
    """A recurrent layer that ran on the whole row.

    Attributes:
        triton: whether its convolution ran in Triton; otherwise it ran on batches of documents. None if it has none.
        scan: what its scan ran on; None if it has none.
        crossing: how its scan crossed ranks; None if it did not.
    """

    triton: bool | None
    scan: ScanChoice | None
    crossing: str | None = None

    @property
    def fixed(self) -> bool:
        """Returns whether it reads nothing back, in shapes that do not depend on documents."""
        return self.triton is not False and (self.scan is None or self.scan.fixed)

    def __str__(self) -> str:
        parts = [] if self.scan is None else [self.scan.words]
        if self.triton is not None:
            parts.insert(0, f"convolution by {'Triton' if self.triton else 'plain torch on batches of documents'}")
        return "; ".join(filter(None, (", ".join(parts), self.crossing)))


@dataclass(frozen=True)
class DocumentsChoice:
    """A layer that ran as a whole on batches of documents of similar length.

    Attributes:
        reason: why it could not run on the row.
        crossing: how it crossed ranks; None if it did not.
    """

    reason: str
    crossing: str | None = None


Choice = AttentionChoice | RowChoice | DocumentsChoice


class PackedForward(BlockMask):
    """The segments of one call of a patched decoder, and what was chosen for it.

    Transformers passes a 4-D mask to every layer unchanged. This class subclasses BlockMask rather than Tensor, so
    nothing casts, splits or detaches it on the way.

    Attributes:
        segments: of the B * S tokens.
        implementation: of attention, as the user named it.
        sizes: padded lengths per octave of layers that run on batches of documents, see ``ops.documents``.
        choices: what each layer chose, by ``id``; shared by the copies on other devices.
        reached: ids of the layers that ran; shared likewise.
        handed_over: whether the decoder has put it in place.
        prepared: whether everything is derived that compiled layers read.
        numbers: of each document's segments, in source order; None if the batch does not say.
        waiting: arguments of the model that wait for its inner model, while the head gets rows of documents.
        over_ranks: whether the batch is cut over ranks; ``segments`` are then the pieces that this one holds.
        part: what this rank holds of the batch then; None for all of it.
        added_up: over how many ranks the losses of the model are added up, so that each adds its part of a router's.
            The loss of a batch that was cut before the call weighs it by the rank's targets, and is one.
        context: the share of this rank, where layers run as between ranks, because a document lies on several; None
            where they run as on one rank.
        method: how attention crosses ranks then, as the user named it.
        encoded: the last hidden states [B, S, D], for a pooler that gets the first token of each row alone.
        pools_after: whether the pooler runs on the documents after the decoder, whose own forward may not pool them.
        pooled: what the pooler then returned inside the decoder, which nothing reads.
        real: bool [B * S], whether a token is not padding; None if the batch does not say, or nothing asks.
        experts: what each module of experts chose, by ``id``; shared by the copies.
        selected: what an indexer selected for one layer; None where that reaches attention otherwise.
        shared_row: the documents of the row whose common beginnings the layers compute once; None without.
        layers_of_spans: the kind of layers in which spans of the segments see both ways; None for all.
        image_sizes: sizes and grids of the images on the host, by the name of the argument, as the batch carries them.
        tower_requests: the attention requests of the layers of towers, by the kind of tower, that left a record.
        long: the documents above the budget of the model's indexers; None where all of them see all of their keys.
        index_losses: the loss of each document by attention layer, by ``id``, shared by the copies; None if no config
            asks for it. scored: what the scores of the layer's indexer were made of, until its attention runs.
        blank: the media whose tower has yet to run, on a blank image or clip (:mod:`.blank_images`).
        router_logits: of the decoder's output, if it has them.
        share: of the step's targets that are in this batch, None where it was not asked for.
    """

    dtype = torch.bool  # what layers ask a mask for

    def __init__(
        self,
        segments: PackedMetadata,
        shape: tuple[int, int],
        implementation: str | tuple[str, ...] = "auto",
        *,
        sizes: int = FINE,
        numbers: tuple[tuple[int, ...], ...] | None = None,
        share: RankShare | None = None,
        crosses: bool = False,
        method: str = "auto",
    ) -> None:
        self.segments = segments
        self.over_ranks, self.part = share is not None, share
        self.context = share if crosses else None
        self.added_up = 1
        self.method = method
        self.numbers = numbers
        self.waiting: dict[str, Any] = {}
        self.share: Tensor | None = None
        self.router_logits: tuple[Tensor | None, ...] | None = None
        self.shared_row: SharedRow | None = None
        self.long: LongDocuments | None = None
        self.selected: Tensor | None = None
        self.index_losses: dict[int, Tensor] | None = None
        self.scored: IndexFactors | None = None
        self.encoded: Tensor | None = None
        self.pooled: Tensor | None = None
        self.layers_of_spans: str | None = None
        self.real: Tensor | None = None
        self.experts: dict[int, Any] = {}
        self.image_sizes: dict[str, Tensor] = {}
        self.tower_requests: dict[str, set[AttentionRequest]] = defaultdict(set)
        self.implementation = implementation
        self.sizes = sizes
        self.choices: dict[int, Choice] = {}
        self.reached: set[int] = set()
        self.handed_over = self.prepared = self.pools_after = False
        self.blank: tuple[str, ...] = ()
        self._shape = (shape[0], 1, shape[1], shape[1])
        self._copies: dict[torch.device, PackedForward] = {}  # and itself, if there are any: else no cycle

    @cached_property
    def documents(self) -> DocumentRows:
        """The documents as rows; their lengths are known on the host."""
        return DocumentRows(self.segments, self.numbers)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def ndim(self) -> int:
        return 4

    def is_floating_point(self) -> bool:
        """Returns False, so that layers join what they selected by ``&``, as to a mask of booleans."""
        return False

    def unsqueeze(self, dim: int) -> PackedForward:
        """Itself, as in the arithmetic below: a mask of ones and zeros, of which OpenAI-GPT makes one to add."""
        return self

    def __rsub__(self, other: float) -> PackedForward:
        return self

    def __mul__(self, other: float) -> PackedForward:
        return self

    def to(self, device: Any = None, **_: Any) -> PackedForward:
        """The same forward on another device, for models that are spread over several; one copy per device."""
        if device is None or isinstance(device, torch.dtype):
            return self
        device = torch.empty(0, device=device).device  # with its index
        if device == self.segments.device:
            return self
        if device not in self._copies:
            if self.over_ranks:
                raise UnsupportedModelError(
                    "context parallelism takes a model on one device, and this one is on several: "
                    "load it without device_map"
                )
            self._copies.setdefault(self.segments.device, self)
            moved = self._copies[device] = copy(self)  # which shares what layers record
            moved.segments, moved.prepared, moved.selected = self.segments.to(device), False, None
            moved.__dict__.pop("documents", None)
            moved.long = None if self.long is None else self.long.to(device)
            moved.real = None if self.real is None else self.real.to(device)
        return self._copies[device]

    def __eq__(self, other: object) -> Any:
        """No value of a mask: Qwen3-Next of transformers 5.0 asks whether its mask holds ones alone."""
        return torch.zeros((), dtype=torch.bool) if isinstance(other, int) else self is other

    __hash__ = object.__hash__

    def __getitem__(self, index: Any) -> PackedForward:
        """Itself. Gemma 4 selects the queries of its last layers: all of them, or those of ``logits_to_keep``.

        Indexers get the mask of the only head, ``mask[:, 0]``.
        """
        parts = index if isinstance(index, tuple) else (index,)
        full = [
            p.indices(n) == (0, n, 1) if isinstance(p, slice) else (p, n) == (0, 1)
            for p, n in zip(parts, self._shape, strict=False)
        ]
        if not all(full):
            raise UnsupportedModelError("a packed forward computes all logits: leave logits_to_keep out")
        return self

    def __and__(self, other: PackedForward) -> PackedForward:
        """This forward with what an indexer selected, for a layer that joins it to its mask and hands on that alone."""
        return other

    def selecting(self, selected: Tensor) -> PackedForward:
        """A copy of this forward for one layer, whose indexer selected so."""
        of_layer = copy(self)
        of_layer.selected = selected
        return of_layer

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer that was handed this object in place of a cache."""
        return key, value

    def record(self, layer: nn.Module, choice: Choice) -> None:
        """Remember what a layer chose. Compiled layers leave no record: a graph would be guarded on the layer's id."""
        if not torch.compiler.is_compiling():
            self.choices[id(layer)] = choice

    def per_document(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        mask: Callable[[Tensor], Any],
    ) -> Any:
        """``function(*args, **kwargs)`` as if every document were in a batch of its own.

        Args:
            function: causal along the second axis of its tensors [B, S, ...].
            args, kwargs: of the call; this object among them is the attention mask.
            mask: makes the mask of a batch of documents [n, L, ...].
        """
        made = PerBatch(mask)
        args = tuple(made if isinstance(value, PackedForward) else value for value in args)
        kwargs = {
            name: made if isinstance(value, PackedForward) else value
            for name, value in kwargs.items()
            if name not in CARRIED
        }
        return per_document(self.segments, function, args, kwargs, sizes=self.sizes)

    def over_documents(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)`` of segments that continue others, where ``function`` knows documents alone.

        It runs on the path to every segment as a document of its own, in one row, and each segment's output is taken
        from the path that ends with it. The gradient of a shared token is the sum over its documents, in float32.

        Args:
            function: takes tensors [B, S, ...], and returns such.
            args, kwargs: of the call; this object among them becomes that of the documents.
        """
        packed = documents(self.segments).packed
        whole = PackedForward(packed, (1, packed.tokens), self.implementation, sizes=self.sizes)
        whole.choices, whole.reached = self.choices, self.reached
        args = tuple(whole if value is self else value for value in args)
        kwargs = {name: whole if value is self else value for name, value in kwargs.items()}
        shape = (self._shape[0], self._shape[2])
        return along_documents(self.segments, function, args, kwargs, shape=shape)

    def __repr__(self) -> str:
        return f"PackedForward({list(self._shape)}, {self.segments.tokens} tokens)"

    __str__ = __repr__


# Keywords under which the object travels beside the mask: layers pass on some of what they do not know.
CARRIED = ("packed", BatchKey.NUMBERS)


def forward_among(values: Iterable[Any]) -> PackedForward | None:
    """The PackedForward among the arguments of a call, None if the call is not packed."""
    return next((value for value in values if isinstance(value, PackedForward)), None)
