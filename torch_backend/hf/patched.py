"""The state of a patched model: the edits that it has, and how it makes a :class:`PackedForward` of a batch.

The arguments of a call -> checks (:mod:`.inputs`) -> the segments on the device, cut over ranks where the model has a
mesh -> :class:`PackedForward`. Compiled layers find there what their graphs read, made beforehand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from packing_core.batches.keys import BatchKey
from packing_core.errors import UnsupportedModelError
from torch_backend.context_parallel.group import ContextGroup
from torch_backend.context_parallel.share import RankShare
from torch_backend.hf.anatomy.additions import Structure
from torch_backend.hf.anatomy.heads import entries_of, targets_among
from torch_backend.hf.anatomy.layers import block_of
from torch_backend.hf.anatomy.model import Anatomy, anatomy_of
from torch_backend.hf.anatomy.structure import STATE, execution_device, has_compiled_layers, why_not_adapters
from torch_backend.hf.attention import AttentionName, register, softcap_of
from torch_backend.hf.edits.head_rows import HeadRows
from torch_backend.hf.edits.mixers import why_not_on_the_row
from torch_backend.hf.edits.packed_experts import experts_edits
from torch_backend.hf.entry import refuse_transforms
from torch_backend.hf.experts import ExpertsChoice
from torch_backend.hf.forward import AttentionChoice, Choice, PackedForward
from torch_backend.hf.index_loss import trains_indexers
from torch_backend.hf.inputs import arguments as inputs
from torch_backend.hf.inputs.boundaries import PAGED_CACHE, is_packed, take_metadata
from torch_backend.hf.inputs.context import cut_batch
from torch_backend.hf.inputs.forests import OVER_RANKS, check_forest, refuse, why_not_these
from torch_backend.hf.inputs.guard import Guard
from torch_backend.hf.inputs.spans import add_spans
from torch_backend.hf.inputs.unmarked import check_unmarked, refuse_other_marks, refuse_unread
from torch_backend.hf.override import Edit, forward_names, is_reached, keywords_named
from torch_backend.hf.router import asks_for_router_loss, why_not_over_ranks
from torch_backend.hf.shared_rows import SHARED_ROW
from torch_backend.ops import scan as scans
from torch_backend.ops.attention import AttentionRequest, candidates, compiles_parents, needs_host_lengths, prepare
from torch_backend.ops.attention.selected import LongDocuments
from torch_backend.ops.operators import runs_triton
from torch_backend.packed_tokens import plain

CHANGED = (
    "a module of this model, or a setting that decides how it is packed, was exchanged after crosspack.patch(model), "
    "and its documents could see each other: call crosspack.patch(model) again"
)


class Patched:
    """One patched model: its layers, its edits, and the reading of its batches.

    Args:
        anatomy: of the model.
        implementation: of attention, as the user named it.
        context: the ranks over which documents are cut; None for one rank.

    Attributes:
        rows: the edits of the model's head, which knows what a batch's labels are of.
        experts: the modules that are overridden for routed experts, each with what overrides it.
        divided: the mixers that run per document, by name.
        compiled: the attention requests of compiled layers, see ``steps.cuda_graph.compile_layers``.
        crosses: whether layers run as between ranks in batches too whose documents lie on one rank each.
        facts, parts: what of the model the edits rest on, and the modules and configs that they change.
        structure: the model as a packed call last found that they fit; None before the first one.
        prove: proves what a packed call finds added, and what could not be proved before; None without proof.
        proved: the classes, functions and hooks that were added and proved; None before the first proof.
        choices: what each layer chose in the last packed forward, by id; for ``explain`` alone.
        expert_choices: what each module of experts chose in the last packed forward, by id; for ``explain`` alone.
        own_rotation: attention layers that keep their modeling file's rotation, each with the reason.
        tower_requests: the attention requests of each tower, by its kind, in all packed forwards.
        unpadding: runs padded calls packed (:mod:`.unpadding`); None where nobody asked for it.
        runner: ``output = runner(run, forward, kwargs)`` runs the layers of a packed call in place of ``run(forward,
            kwargs)``, faster (:mod:`torch_backend.steps.dynamic_compile`); None where nobody does.
    """

    def __init__(
        self, anatomy: Anatomy, implementation: str | Sequence[str], context: ContextGroup | None = None
    ) -> None:
        self.anatomy = anatomy
        self.context = context
        self.root, self.decoder = anatomy.root, anatomy.decoder
        self.implementation = implementation if isinstance(implementation, str) else tuple(implementation)
        candidates(self.device, implementation)  # an unknown name raises here
        self.rows = HeadRows(anatomy)
        self.experts = list(experts_edits(self.decoder, anatomy.experts)) if anatomy.experts else []
        mixers = anatomy.mixers.items()
        self.divided = {name: m for name, m in mixers if anatomy.route == "documents" or why_not_on_the_row(m)}
        self.compiled: set[AttentionRequest] = set()
        self.crosses = False
        self.guard = Guard()
        self.root_names, self.decoder_names = forward_names(self.root), forward_names(self.decoder)
        self.reads = keywords_named(self.root)
        self.shifted = anatomy.head == "next token"
        self.facts, self.parts = _grounds(anatomy, self.rows)
        self.structure: Structure | None = None
        self.prove: Callable[[nn.Module], None] | None = None
        self.proved: tuple[Any, ...] | None = None
        self.choices: dict[int, Choice] = {}
        self.expert_choices: dict[int, ExpertsChoice] = {}
        self.own_rotation: dict[str, str] = {}
        self.tower_requests: dict[str, set[AttentionRequest]] = defaultdict(set)
        self.unpadding: Any = None
        self.runner: Any = None
        self.edits: list[Edit] = []
        self.suspended = False

    def install(self, edits: Iterable[Edit]) -> None:
        """Apply all edits, each made when those before it are applied, or none if one of them raises."""
        try:
            for edit in edits:
                edit.apply()
                self.edits.append(edit)
        except BaseException:
            self._undo()
            raise
        self.root.__dict__[STATE] = self

    def remove(self) -> None:
        """Undo all edits, the last one first."""
        self._undo()
        del self.root.__dict__[STATE]

    def _undo(self) -> None:
        while self.edits:
            self.edits.pop().undo()

    def suspend(self) -> None:
        """Put the attention names back until the next packed forward."""
        for name in self._attention_names():
            name.undo()
        self.suspended = True

    def resume(self) -> None:
        """Undo :meth:`suspend`, and raise if somebody set another attention implementation since the patch."""
        for name in self._attention_names():
            if self.suspended:
                name.apply()
            if not name.in_force:
                raise UnsupportedModelError(
                    f"the attention implementation was set to {name.config._attn_implementation!r} after patch(model), "
                    "so segments would not reach the layers: call patch(model) again"
                )
        self.suspended = False

    @property
    def in_force(self) -> bool:
        """Returns whether the patch is active: no other attention implementation or forward was set since."""
        names = self.suspended or all(name.in_force for name in self._attention_names())
        return names and is_reached(self.root) and is_reached(self.decoder)

    def _attention_names(self) -> list[AttentionName]:
        return [edit for edit in self.edits if isinstance(edit, AttentionName)]

    @property
    def compiles(self) -> bool:
        """Returns whether compiled layers run, among them layers without attention, which make no requests."""
        alone = self.context is None and not (self.anatomy.attention or self.layers_need_lengths)
        return bool(self.compiled) or (alone and has_compiled_layers(self.decoder))

    @property
    def requests(self) -> list[AttentionRequest]:
        """The attention requests of the layers in the last packed forward that left a record."""
        return [choice.request for choice in self.choices.values() if isinstance(choice, AttentionChoice)]

    @property
    def adds_softcap(self) -> str | None:
        """Describes how unpacked calls differ from those before the patch; None if they do not."""
        changed = (
            f"attention softcap {softcap_of(edit.config)}: transformers' {edit.before} leaves it out, or raises. "
            f"Packed and unpacked calls apply it, as attn_implementation={edit.over!r} does, so outputs differ from "
            "those before the patch"
            for edit in self._attention_names()
            if edit.over != edit.before
        )
        return next(changed, None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for name in self._attention_names():
            register(name.over)  # in the process that loads a pickled model

    # -- batches -------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Returns the device of the model's computation."""
        return execution_device(self.root)

    def still_fits(self) -> bool:
        """Returns whether the edits are still those that this model needs."""
        anatomy = anatomy_of(self.root)
        facts, parts = _grounds(anatomy, HeadRows(anatomy))
        return facts == self.facts and list(map(id, parts)) == list(map(id, self.parts))

    def require_fit(self) -> None:
        """Raise where the model was changed since it was patched, so that its documents could see each other.

        Raises:
            UnsupportedModelError, or what :attr:`prove` raises of what was added.
        """
        if not torch.compiler.is_compiling() and (self.structure is None or not self.structure.unchanged()):
            if not self.still_fits():
                raise UnsupportedModelError(CHANGED)
            if self.prove is not None:
                self.prove(self.root)
            self.structure = Structure(self.root)
        if (reason := why_not_adapters(self.root, self.decoder)) is not None:
            raise UnsupportedModelError(f"{type(self.root).__name__} cannot be trained packed, because {reason}")

    def forward_of(
        self, module: nn.Module, names: tuple[str, ...], kwargs: dict[str, Any]
    ) -> tuple[PackedForward | None, dict[str, Any]]:
        """The PackedForward of a batch and the other arguments; None if the batch has no boundaries.

        Args:
            module: the model or its decoder, whichever was called; names: of its forward's parameters.
            kwargs: all its arguments.
        """
        self.guard.waits, shared = module.training, kwargs.pop(SHARED_ROW, None)
        refuse_other_marks(kwargs, names)
        if self.context is not None and shared is not None:
            refuse(self.root, OVER_RANKS)
        kwargs = self.cut(kwargs)
        of_share = kwargs.get(BatchKey.SHARE) is not None
        if not (of_share or is_packed(kwargs)):
            if PAGED_CACHE not in kwargs:  # transformers' continuous batching, whose attention reads the rest
                refuse_unread(kwargs, self.reads, type(module).__name__)
            check_unmarked(kwargs, self.guard)
            return None, kwargs
        refuse_transforms()
        self.require_fit()
        if of_share:
            return self._forward_of_share(names, kwargs)
        tokens, numbers = inputs.tokens_of(kwargs), kwargs.get(BatchKey.DOCUMENTS)
        within = kwargs.pop(BatchKey.WITHIN, None)
        sizes = kwargs.get(BatchKey.IMAGES) or ()
        inputs.check_arguments(module, kwargs, self.guard)
        segments = take_metadata(kwargs, tokens=tokens, host_lengths=self.needs_lengths, guard=self.guard)
        if segments.parents is not None:
            refused = self.why_no_compiled_forest(self.compiled) if self.compiled else None
            check_forest(self.anatomy, kwargs, compiled=refused)
        inputs.check_packed(
            kwargs,
            segments,
            self.guard,
            labels="document" if self.rows.head == "document" else "next" if self.shifted else "token",
            entries=self._entries,
            renumbered=self.anatomy.numbers_tokens or segments.parents is not None or shared is not None,
            axes=self.anatomy.takes_axes,
        )
        rows, row_length = tokens.shape[:2]
        if self.anatomy.numbering is not None:
            kwargs["position_ids"] = self.anatomy.numbering(kwargs.get("input_ids"), segments).view(rows, row_length)
        elif kwargs.get("position_ids") is None:
            kwargs["position_ids"] = segments.position_ids.view(rows, row_length)
        inputs.check_table(segments, kwargs["position_ids"], self.anatomy.positions, type(self.root).__name__)
        if "use_cache" in names:  # a model above the decoder may make a cache for it
            kwargs["use_cache"] = False
        if shared is not None:
            refuse(self.root, why_not_these(self.root, kwargs))  # the model was asked when the row was made
            segments, row_length = shared.segments, shared.segments.tokens
        forward = PackedForward(
            segments, (rows, row_length), self.implementation, sizes=self.anatomy.sizes, numbers=numbers
        )
        budget, forward.index_losses = self._budget, {} if trains_indexers(self.anatomy) else None
        if budget is not None and (within is None or within > budget):
            forward.long = LongDocuments.of(segments, budget, numbers, block=block_of(self.anatomy.indexers[0]))
        add_spans(self.root, kwargs, forward, self.guard)
        if self.experts and shared is None and (mask := kwargs.get("attention_mask")) is not None:
            forward.real = mask.reshape(-1) != 0
        forward.shared_row = shared
        forward.image_sizes = {name: torch.tensor(of_images, device="cpu") for name, of_images in sizes}
        return forward, kwargs

    def cut(self, batch: Mapping[str, Any], *, weighted: bool = False) -> dict[str, Any]:
        """This rank's part of a packed batch, which is checked as a whole; a batch that is cut already as it is.

        Args:
            batch: keyword arguments of the model.
            weighted: whether the caller counts ``loss_weights``; the loss of a model does not, so they raise.
        """
        kwargs = plain(batch)
        if self.context is None or kwargs.get(BatchKey.SHARE) is not None or not is_packed(kwargs):
            return dict(batch)
        if kwargs.get(BatchKey.PARENTS) is not None:
            refuse(self.root, OVER_RANKS)
        routed = asks_for_router_loss(self.root, kwargs)
        if routed and (reason := why_not_over_ranks(self.root)) is not None:
            raise UnsupportedModelError(
                f"{type(self.root).__name__} does not compute the loss of its router over ranks, because {reason}: "
                "leave output_router_logits out"
            )
        weights = kwargs.pop("loss_weights", None) if weighted else None
        tokens, self.guard.waits = inputs.tokens_of(kwargs), self.root.training
        inputs.check_arguments(self.root, kwargs, self.guard)
        metadata = dict(kwargs)
        segments = take_metadata(metadata, tokens=tokens, host_lengths=True, guard=self.guard)
        inputs.check_vocabulary(self.root, kwargs.get("input_ids"), self.guard)
        # frequencies that follow from the largest position of a document are those of its length
        dynamic = bool(self.anatomy.rotaries)
        inputs.check_packed(
            kwargs, segments, self.guard, labels="next", entries=self._entries, renumbered=dynamic, axes=False
        )
        positions = kwargs.get("position_ids")
        positions = segments.position_ids if positions is None else positions
        inputs.check_table(segments, positions, self.anatomy.positions, type(self.root).__name__)
        if weights is not None:
            kwargs["loss_weights"] = weights
        return cut_batch(kwargs, segments.to(self.device), self.context, masked=routed)

    @property
    def _entries(self) -> int | None:
        return entries_of(self.root, self.root.get_output_embeddings()) if self.shifted else None

    def with_count(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments with the number of targets on all ranks, by which the model divides its sum."""
        targets = kwargs.get("shift_labels")
        if targets is None or kwargs.get("num_items_in_batch") is not None:
            return kwargs
        share: RankShare = kwargs[BatchKey.SHARE]
        count = targets_among(targets, self.root.config, of_documents=False).sum()
        dist.all_reduce(count, group=share.group)
        return {**kwargs, "num_items_in_batch": count.clamp(min=1)}

    def _forward_of_share(
        self, names: tuple[str, ...], kwargs: dict[str, Any]
    ) -> tuple[PackedForward | None, dict[str, Any]]:
        """:meth:`forward_of` of a batch that was cut over ranks."""
        share: RankShare = kwargs.pop(BatchKey.SHARE)
        if self.context is None or share.group is not self.context.group:
            raise UnsupportedModelError(
                "the batch was cut over ranks, and the model that runs it was patched without their mesh: call "
                'crosspack.patch(model, mesh=mesh["cp"])'
            )
        shape = tuple(kwargs["position_ids"].shape)
        if "use_cache" in names:
            kwargs["use_cache"] = False
        forward = PackedForward(
            share.segments,
            (shape[0], shape[1]),
            self.implementation,
            sizes=self.anatomy.sizes,
            share=share,
            crosses=self.crosses or share.straddles,
            method=self.context.method,
        )
        return forward, kwargs

    # -- what the layers need -----------------------------------------------------------------------------------------

    @property
    def needs_lengths(self) -> bool:
        """Returns whether something in the model needs the segments' lengths on the host, whatever the batch."""
        return self.context is not None or self.rows.needs_lengths or self.layers_need_lengths

    @property
    def layers_need_lengths(self) -> bool:
        """As :attr:`needs_lengths`, apart from the model's head, which reads them outside of the layers."""
        if self.anatomy.rotaries or getattr(self.decoder.config, "attention_chunk_size", None):
            return True
        if self.divided:
            return True
        if not runs_triton(torch.empty(0, device=self.device)):
            return True  # the short convolution and, on the CPU, attention run on batches of documents
        return all(needs_host_lengths(name) for name in candidates(self.device, self.implementation))

    @property
    def _budget(self) -> int | None:
        """The longest document that attends to all of its keys without scores; indexers that train score every one."""
        return 0 if trains_indexers(self.anatomy) else self.anatomy.budget

    def selects(self, batch: Mapping[str, Any]) -> bool:
        """Returns whether a packed batch has documents that are longer than the budget of the model's indexers."""
        lengths: Sequence[int] = batch.get(BatchKey.LENGTHS) or ()
        documents, budget = batch.get(BatchKey.DOCUMENTS) or ((n,) for n in range(len(lengths))), self._budget
        return budget is not None and any(lengths[number] > budget for each in documents for number in each)

    def prepare(self, forward: PackedForward) -> None:
        """Derive what compiled layers read of the segments, and drop what their graphs must not contain."""
        forward.prepared = True
        segments, shared = forward.segments, forward.segments.parents is not None
        if self.rows.needs_lengths and not (self.layers_need_lengths or forward.pools_after):
            forward.documents  # noqa: B018  made while the lengths are known
        if not (shared or self.layers_need_lengths):
            segments.hide_values()
        segments.round_longest(forward.shape[-1])  # a graph may contain it
        # Compiled layers are guarded on what was derived. The checks of a batch derive more, and while a CUDA graph is
        # recorded none is made: then layers may be compiled again in the recording, where it can fail.
        segments.forget()
        for request in self.compiled:
            prepare(segments, request, self.implementation)
        if shared:
            segments.hide_values()  # lists of shared prefixes are made from them
        if self.anatomy.mixers:
            segments.seq_idx, segments.position_ids  # noqa: B018  made once, not in every graph
            scans.prepare(segments)

    def why_no_compiled_forest(self, requests: Iterable[AttentionRequest]) -> str | None:
        """Explains why compiled layers that make these requests cannot run shared prefixes; None if they can."""
        if self.anatomy.mixers:
            return "recurrent layers hand states on from level to level, of which each batch has others"
        if self.layers_need_lengths:
            return "layers need the lengths of documents on the host"
        if not all(compiles_parents(request, self.implementation) for request in requests):
            return "no attention with lists that are made before serves them"
        return None


def _grounds(anatomy: Anatomy, rows: HeadRows) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """List what the edits of a model rest on: facts, and the modules and configs that are changed."""
    parts = anatomy.decoder, *rows.parts, *anatomy.layers.values(), *anatomy.rotaries.values()
    return (anatomy.head, anatomy.route, anatomy.sizes), (*parts, *(getattr(part, "config", None) for part in parts))
