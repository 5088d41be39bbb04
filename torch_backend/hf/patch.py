"""A patched model: the list of edits that make it train packed rows, and the entry that carries the segments.

A packed batch -> the entry of the model (:mod:`.entry`) makes its :class:`PackedForward` (:mod:`.batch_reader`) -> the
entry of the decoder puts it where the attention mask goes -> every layer receives it as an argument -> the registered
attention function and the overridden layers use it -> the decoder's entry checks that every layer that ran did. A batch
without boundaries takes the path it took before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from packing_core.batches.keys import BatchKey
from packing_core.errors import UnsupportedModelError
from torch_backend.context_parallel.group import AUTO, ContextGroup, context_group, draws_of_rank
from torch_backend.hf import router
from torch_backend.hf.anatomy.families import media_keys
from torch_backend.hf.anatomy.model import Anatomy, anatomy_of
from torch_backend.hf.anatomy.structure import (
    STATE,
    causal_lm,
    has_compiled_layers,
    refuse_replaced_layers,
    refuse_sharding_inside,
)
from torch_backend.hf.attention import KIND, AttentionName, kind_of, register, softcap_of
from torch_backend.hf.batch_reader import BatchReader
from torch_backend.hf.blank_images import blank_media, media_edits
from torch_backend.hf.edits import own_attention
from torch_backend.hf.edits.clips import by_loss_function
from torch_backend.hf.edits.indexers import select_inside
from torch_backend.hf.edits.mixers import mixer_edits, run_per_document
from torch_backend.hf.edits.rotary import (
    frequencies_per_document,
    rotated_by_triton,
    rotation_attributes,
    why_own_rotation,
)
from torch_backend.hf.entry import (
    Call,
    Hook,
    current_forward,
    entry_edits,
    require_entry,
    run_inside,
    running,
)
from torch_backend.hf.experts import ExpertsChoice
from torch_backend.hf.float8 import to_bfloat16
from torch_backend.hf.forward import CARRIED, AttentionChoice, Choice, PackedForward
from torch_backend.hf.index_loss import with_index_loss
from torch_backend.hf.inputs import arguments as inputs
from torch_backend.hf.inputs.boundaries import is_packed, take_tokens
from torch_backend.hf.inputs.context import refuse_context, with_loss_over_ranks
from torch_backend.hf.latents import latent_edits
from torch_backend.hf.override import Attribute, Edit, LayerOverride, is_reached
from torch_backend.ops.attention import AttentionRequest

Model = TypeVar("Model", bound=nn.Module)
_GENERATE = "init_continuous_batching"  # of a model: generate_batch, which takes few attention implementations by name


def install(
    model: nn.Module, implementation: str | Sequence[str] = "auto", *, mesh: Any = None, context_method: str = AUTO
) -> Patched:
    """Apply the edits to a model, in place; a model that has them already gets those of another ``implementation``.

    Args:
        model: a transformers model, or what wraps one.
        implementation: of attention.
        mesh: over whose ranks documents are cut; None for one rank, or for those of the last call.
        context_method: how attention crosses these ranks.

    Returns:
        The state that it leaves on the model, which is that of before if nothing had to change.

    Raises:
        UnsupportedModelError: the model, or an option of it, cannot be made exact; the model is left as it was.
    """
    root = causal_lm(model)
    state = state_of(root)
    wanted = implementation if isinstance(implementation, str) else tuple(implementation)
    context = None if state is None else state.context  # those who patch again for another reason name no mesh
    if mesh is not None:
        context = _context_of(anatomy_of(root), mesh, context_method)
    same = state is not None and state.implementation == wanted and state.context == context
    if state is None or not (same and state.in_force and state.still_fits()):
        refuse_replaced_layers(root)
        fresh = Patched(anatomy_of(root), wanted, context)
        if state is not None:
            fresh.unpadding = state.unpadding
            state.remove()
        fresh.install()
        state = fresh
    return state


def _context_of(anatomy: Anatomy, mesh: Any, method: str) -> ContextGroup | None:
    """The group of ranks over which documents of a model are cut, None for one rank."""
    group = context_group(mesh, anatomy.decoder.config, method=method, recurrent=bool(anatomy.mixers))
    if group is not None:
        refuse_context(anatomy)
    return group


def unpatch(model: Model) -> Model:
    """Take back what :func:`torch_backend.patch` did, and ``precision="float8"``; an unpatched model stays as it is."""
    root = causal_lm(model)
    state = state_of(root)
    if state is not None:
        state.remove()
        to_bfloat16(root)
    return model


def state_of(root: nn.Module) -> Patched | None:
    """Returns the state that :func:`install` left on a model, None if it is not patched."""
    return root.__dict__.get(STATE)


def context_of(model: nn.Module) -> ContextGroup | None:
    """Returns the ranks over which the documents of a model are cut; None where each lies on one."""
    state = state_of(causal_lm(model))
    return None if state is None else state.context


def refuse_context_of(model: nn.Module, what: str) -> None:
    """Raise if the documents of a model are cut over ranks, which ``what`` does not know.

    Raises:
        UnsupportedModelError
    """
    if context_of(model) is not None:
        raise UnsupportedModelError(
            f"{what} does not compute over ranks that hold parts of documents, and the model was patched with a mesh: "
            "train by crosspack.make_train_step(model, optimizer), or call crosspack.unpatch(model) and patch(model)"
        )


def cut_over_ranks(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of a packed batch if the model was patched with a mesh, else the batch as it is.

    For losses of this project, which count the ``loss_weights`` of the part.
    """
    state = state_of(causal_lm(model))
    return dict(batch) if state is None else state.cut(batch, weighted=True)


# -- the patched model ---------------------------------------------------------------------------------------------


class Patched(BatchReader):
    """One patched model: its layers, the edits, and the hooks.

    Attributes:
        expert_choices: what each module of experts chose in the last packed forward, by id; for ``explain`` alone.
        own_rotation: attention layers that keep their modeling file's rotation, each with the reason.
        unpadding: runs padded calls packed (:mod:`.unpadding`); None where nobody asked for it.
        runner: ``output = runner(run, forward, kwargs)`` runs the layers of a packed call in place of ``run(forward,
            kwargs)``, faster (:mod:`torch_backend.steps.dynamic_compile`); None where nobody does.
        choices: what each layer chose in the last packed forward, by id; for ``explain`` alone.
        tower_requests: the attention requests of each tower, by its kind, in all packed forwards.
    """

    def __init__(
        self, anatomy: Anatomy, implementation: str | Sequence[str], context: ContextGroup | None = None
    ) -> None:
        super().__init__(anatomy, implementation, context)
        self.expert_choices: dict[int, ExpertsChoice] = {}
        self.own_rotation: dict[str, str] = {}
        self.edits: list[Edit] = []
        self.suspended = False
        self.unpadding: Any = None
        self.runner: Any = None
        self.choices: dict[int, Choice] = {}
        self.tower_requests: dict[str, set[AttentionRequest]] = defaultdict(set)

    def install(self) -> None:
        """Apply all edits, or none if one of them raises."""
        try:
            for edit in self._edits():
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

    def _edits(self) -> Iterator[Edit]:
        anatomy = self.anatomy
        attention, own = anatomy.attention, anatomy.own
        if anatomy.route == "attention":
            by_name = () if own else (self.decoder, *attention.values())
            yield from map(AttentionName, {id(m.config): m.config for m in by_name}.values())
            yield from (Attribute(layer, KIND, kind_of(layer)) for layer in attention.values())
            if own:
                yield from own_attention.edits(self.decoder, own.values())
            if hasattr(self.root, _GENERATE):
                yield Attribute(self.root, _GENERATE, partial(_init_continuous_batching, self.root, self.suspend))
        if anatomy.indexers:
            yield from (LayerOverride(indexer, select_inside) for indexer in anatomy.indexers)
            yield from latent_edits(attention.values())
        if anatomy.route != "documents" and (anatomy.mixers or anatomy.indexers):
            around = {id(edit.layer) for edit in self.experts}
            yield from mixer_edits(self.decoder, anatomy.mixers.values(), around)
        yield from self.experts
        yield from (LayerOverride(rotary, frequencies_per_document) for rotary in anatomy.rotaries.values())
        for name, layer in attention.items():
            if name not in anatomy.mixers and (name not in own or own_attention.keeps_its_forward(layer)):
                if (reason := why_own_rotation(layer)) is None:
                    yield LayerOverride(layer, rotated_by_triton, rotation_attributes)
                else:
                    self.own_rotation[name] = reason
        yield from entry_edits(self)
        yield from self.rows.edits()
        if media_keys(self.root.config):
            yield from media_edits(self.root)
        if anatomy.both_ways is not None:
            between = self.root.base_model  # it would make masks [S, S] of every batch, for layers that read none
            yield Hook(between.register_forward_pre_hook, _hand_over, with_kwargs=True)
        for layer in anatomy.layers.values():
            if layer is not self.decoder:
                yield Hook(layer.register_forward_pre_hook, _reach, as_it_is=True)

    def suspend(self) -> None:
        """Put the attention names back until the next packed forward."""
        for name in self._attention_names():
            name.undo()
        self.suspended = True

    def _resume(self) -> None:
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
    def _compiles(self) -> bool:
        """Returns whether compiled layers run, among them layers without attention, which make no requests."""
        alone = self.context is None and not (self.anatomy.attention or self.layers_need_lengths)
        return bool(self.compiled) or (alone and has_compiled_layers(self.decoder))

    @property
    def requests(self) -> list[AttentionRequest]:
        """The attention requests of the layers in the last packed forward that left a record."""
        return [choice.request for choice in self.choices.values() if isinstance(choice, AttentionChoice)]

    # -- calls ------------------------------------------------------------------------------------------------------

    def run_model(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the model; ``call`` is its own forward."""
        args, kwargs = inputs.as_keywords(self.root_names, args, kwargs)
        self.guard.poll()
        self.guard.waits = self.root.training
        kwargs, expected = take_tokens(kwargs), None
        if self.unpadding is not None:
            expected, kwargs = self.unpadding.take_out(kwargs)
        whole = self.context is not None and is_packed(kwargs)
        if whole:
            kwargs = self.with_count(self.cut(kwargs))
        share: Any = kwargs.get(BatchKey.SHARE)
        forward, kwargs = self.forward_of(self.root, self.root_names, kwargs)
        if forward is None:
            return run_inside(self, None, call, *args, **kwargs)
        kwargs = self.rows.begin(forward, kwargs)
        forward.blank = blank_media(self.root, self.decoder, kwargs)
        call = by_loss_function(self.root, call)
        forward.added_up = share.ranks if whole else 1
        call = router.over_ranks(self.root, call, share, kwargs)
        arguments, real = router.with_any_token(self.root, kwargs, share)
        with nullcontext() if share is None or not self.root.training else draws_of_rank(share):
            output = run_inside(self, forward, call, *args, **arguments)
        if not forward.handed_over:
            raise UnsupportedModelError(
                f"{type(self.root).__name__} does not call its decoder {type(self.decoder).__name__}: "
                "its documents would see each other"
            )
        output = self.rows.end(forward, output)
        output = router.without_padding_alone(self.root, output, real)
        output = router.with_document_loss(self.root, forward, kwargs, output)
        output = with_index_loss(self.root, forward, output)
        if whole and kwargs.get("labels") is not None:
            output = with_loss_over_ranks(output, share)
        return output if expected is None else self.unpadding.put_back(expected, output, share)

    def run_decoder(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the decoder; ``call`` is its own forward."""
        args, kwargs = inputs.as_keywords(self.decoder_names, args, kwargs)
        if (outer := running(self)) is not None:
            return self._run_layers(outer.forward, call, args, kwargs)
        kwargs = take_tokens(kwargs)
        forward, kwargs = self.forward_of(self.decoder, self.decoder_names, kwargs)  # a loss calls the decoder itself
        if forward is not None and not self.shifted:  # Liger's forwards call a decoder and its next-token loss alone
            require_entry(self.root)
        return run_inside(self, forward, self._run_layers, forward, call, args, kwargs)

    def _run_layers(
        self, forward: PackedForward | None, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if forward is None:
            return call(*args, **kwargs)
        if forward.shared_row is not None:
            kwargs = forward.shared_row.shrink(kwargs)
        run = partial(self._run_packed, call, args)
        output = run(forward, kwargs) if self.runner is None or args else self.runner(run, forward, kwargs)
        if forward.shared_row is not None:
            output = forward.shared_row.grow(output)
        return self.rows.pooled(forward, output)

    def _run_packed(self, call: Call, args: tuple[Any, ...], forward: PackedForward, kwargs: dict[str, Any]) -> Any:
        kwargs = self._handed_over(forward, kwargs)
        if self.anatomy.route == "documents":
            output = run_per_document(self.decoder, forward, call, args, kwargs)
        else:
            output = call(*args, **kwargs)
        self._check(forward)
        forward.router_logits = getattr(output, "router_logits", None)
        return output

    def _handed_over(self, forward: PackedForward, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the decoder with the PackedForward where its layers receive it."""
        router.refuse_per_document(self.root, self.anatomy.mixers.values(), kwargs)
        if self.shifted:
            router.require_mask(self.root, kwargs)
        refuse_sharding_inside(self.root, self.divided)
        self._resume()
        forward.handed_over = True
        forward.reached.clear()
        if self.anatomy.head == "next token" or "use_cache" in self.decoder_names:
            kwargs["use_cache"] = False  # a cache of a row of several documents could not be used
        if self.anatomy.route == "documents":
            kwargs["attention_mask"] = None
            if self.anatomy.head == "next token" or kwargs.get("position_ids") is not None:
                kwargs["position_ids"] = None
            return kwargs
        inputs.check_recomputed(self.decoder)
        if self._compiles and (forward.segments.parents is None or self.why_no_compiled_forest(self.compiled) is None):
            self.prepare(forward)
        kwargs["attention_mask"] = forward
        if self.anatomy.mixers:  # some layers pass on what they do not know, some only the argument of fused kernels
            kwargs |= dict.fromkeys(CARRIED, forward)
        return kwargs

    def _check(self, forward: PackedForward) -> None:
        """Every attention and mixer layer that ran must have used the segments."""
        if torch.compiler.is_compiling():
            return
        self.expert_choices = forward.experts or self.expert_choices
        for kind, requests in forward.tower_requests.items():
            self.tower_requests[kind] |= requests
        if not forward.choices and has_compiled_layers(self.decoder):
            return  # they leave no record
        self.choices = forward.choices
        layers = self.anatomy.layers.items()
        lost = sorted(name for name, layer in layers if id(layer) in forward.reached.difference(forward.choices))
        if lost or not forward.choices:
            which = ", ".join(lost[:3]) + ("..." if len(lost) > 3 else "") if lost else "every layer"
            raise UnsupportedModelError(
                f"{type(self.root).__name__} did not hand the segments to {which}: its documents would see each other"
            )

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


def _reach(layer: nn.Module, args: tuple[Any, ...]) -> None:
    if not torch.compiler.is_compiling() and (forward := current_forward()) is not None:
        forward.reached.add(id(layer))


def _hand_over(
    forward: PackedForward, between: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "attention_mask": forward}


def _init_continuous_batching(root: Any, suspend: Callable[[], None], *args: Any, **kwargs: Any) -> Any:
    """As the model's own, under the attention implementation that it had before the patch."""
    suspend()
    return getattr(type(root), _GENERATE)(root, *args, **kwargs)
