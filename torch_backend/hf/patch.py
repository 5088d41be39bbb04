"""A patched model: the list of edits that make it train packed rows, and the entry that carries the segments.

    model(**batch), model.forward(**batch) -> _run_model   -> the model's own forward
    decoder(...)                           -> _run_decoder -> the decoder's own forward

Both modules get another forward (:mod:`.override`). Hooks would be simpler, but a wrapper that calls
``model.forward(...)``, as PEFT did up to 0.20, passes them by.

A packed batch -> the entry of the model makes its :class:`PackedForward` (:mod:`.patched`) -> the entry of the decoder
puts it where the attention mask goes -> every layer receives it as an argument -> the registered attention function and
the overridden layers use it -> the decoder's entry checks that every layer that ran did. A batch without boundaries
takes the path it took before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from packing_core.batches.keys import BatchKey
from packing_core.batches.marks import LENGTHS, NUMBERS
from packing_core.errors import UnsupportedModelError
from torch_backend.context_parallel.group import AUTO, ContextGroup, context_group, draws_of_rank
from torch_backend.hf import router
from torch_backend.hf.anatomy.families import media_keys
from torch_backend.hf.anatomy.model import Anatomy, anatomy_of
from torch_backend.hf.anatomy.structure import (
    DATA_PARALLEL,
    STATE,
    causal_lm,
    has_compiled_layers,
    refuse_replaced_layers,
    refuse_sharding_inside,
)
from torch_backend.hf.attention import KIND, AttentionName, compares_names, kind_of, under_own_name
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
    require_entry,
    run_inside,
    running,
)
from torch_backend.hf.float8 import to_bfloat16
from torch_backend.hf.forward import CARRIED, PackedForward
from torch_backend.hf.index_loss import with_index_loss
from torch_backend.hf.inputs import arguments as inputs
from torch_backend.hf.inputs.boundaries import is_packed, take_tokens
from torch_backend.hf.inputs.context import refuse_context, with_loss_over_ranks
from torch_backend.hf.latents import latent_edits
from torch_backend.hf.override import Attribute, Edit, LayerOverride, original_class
from torch_backend.hf.patched import Patched

Model = TypeVar("Model", bound=nn.Module)
_ENTRY = "_crosspack_entry"  # the attribute of a model and of its decoder that holds the state
# A Trainer takes the columns out of its data that the signature of forward does not name, and these mark documents:
# a collator that reads them gets them so, and with any other one the model raises.
_MARKS = (*LENGTHS, *BatchKey.CUMULATIVE, *NUMBERS)
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
        fresh.install(_edits_of(fresh))
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


# -- edits -----------------------------------------------------------------------------------------------------------


def _edits_of(state: Patched) -> Iterator[Edit]:
    """The edits of a model, each made when those before it are applied."""
    anatomy = state.anatomy
    attention, own = anatomy.attention, anatomy.own
    if anatomy.route == "attention":
        by_name = () if own else (state.decoder, *attention.values())
        yield from map(AttentionName, {id(m.config): m.config for m in by_name}.values())
        yield from (Attribute(layer, KIND, kind_of(layer)) for layer in attention.values())
        if own:
            yield from own_attention.edits(state.decoder, own.values())
        if hasattr(state.root, _GENERATE):
            yield Attribute(state.root, _GENERATE, partial(_init_continuous_batching, state.root, state.suspend))
    if anatomy.indexers:
        yield from (LayerOverride(indexer, select_inside) for indexer in anatomy.indexers)
        yield from latent_edits(attention.values())
    if anatomy.route != "documents" and (anatomy.mixers or anatomy.indexers):
        around = {id(edit.layer) for edit in state.experts}
        yield from mixer_edits(state.decoder, anatomy.mixers.values(), around)
    yield from state.experts
    yield from (LayerOverride(rotary, frequencies_per_document) for rotary in anatomy.rotaries.values())
    for name, layer in attention.items():
        if name not in anatomy.mixers and (name not in own or own_attention.keeps_its_forward(layer)):
            if (reason := why_own_rotation(layer)) is None:
                yield LayerOverride(layer, rotated_by_triton, rotation_attributes)
            else:
                state.own_rotation[name] = reason
                if compares_names(original_class(layer).forward):
                    yield LayerOverride(layer, under_own_name)
    both = [(state.root, _run_model), (state.decoder, _run_decoder)]
    for module, forward in [(state.root, _run_both)] if state.root is state.decoder else both:
        yield Attribute(module, _ENTRY, state)
        yield LayerOverride(module, forward, takes=_MARKS)
    yield from state.rows.edits()
    if media_keys(state.root.config):
        yield from media_edits(state.root)
    if anatomy.both_ways is not None:
        between = state.root.base_model  # it would make masks [S, S] of every batch, for layers that read none
        yield Hook(between.register_forward_pre_hook, _hand_over, with_kwargs=True)
    for layer in anatomy.layers.values():
        if layer is not state.decoder:
            yield Hook(layer.register_forward_pre_hook, _reach, as_it_is=True)


# -- calls -----------------------------------------------------------------------------------------------------------


def _run_model(root: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    """A call of the model; ``call`` is its own forward."""
    if getattr(root, "_is_replica", False):
        raise UnsupportedModelError(DATA_PARALLEL)
    state: Patched = root.__dict__[_ENTRY]
    args, kwargs = inputs.as_keywords(state.root_names, args, kwargs)
    state.guard.poll()
    state.guard.waits = state.root.training
    kwargs, expected = take_tokens(kwargs), None
    if state.unpadding is not None:
        expected, kwargs = state.unpadding.take_out(kwargs)
    whole = state.context is not None and is_packed(kwargs)
    if whole:
        kwargs = state.with_count(state.cut(kwargs))
    share: Any = kwargs.get(BatchKey.SHARE)
    forward, kwargs = state.forward_of(state.root, state.root_names, kwargs)
    if forward is None:
        return run_inside(state, None, call, *args, **kwargs)
    kwargs = state.rows.begin(forward, kwargs)
    forward.blank = blank_media(state.root, state.decoder, kwargs)
    call = by_loss_function(state.root, call)
    forward.added_up = share.ranks if whole else 1
    call = router.over_ranks(state.root, call, share, kwargs)
    arguments, real = router.with_any_token(state.root, kwargs, share)
    with nullcontext() if share is None or not state.root.training else draws_of_rank(share):
        output = run_inside(state, forward, call, *args, **arguments)
    if not forward.handed_over:
        raise UnsupportedModelError(
            f"{type(state.root).__name__} does not call its decoder {type(state.decoder).__name__}: "
            "its documents would see each other"
        )
    output = state.rows.end(forward, output)
    output = router.without_padding_alone(state.root, output, real)
    output = router.with_document_loss(state.root, forward, kwargs, output)
    output = with_index_loss(state.root, forward, output)
    if whole and kwargs.get("labels") is not None:
        output = with_loss_over_ranks(output, share)
    return output if expected is None else state.unpadding.put_back(expected, output, share)


def _run_decoder(decoder: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    """A call of the decoder; ``call`` is its own forward."""
    state: Patched = decoder.__dict__[_ENTRY]
    args, kwargs = inputs.as_keywords(state.decoder_names, args, kwargs)
    if (outer := running(state)) is not None:
        return _run_layers(state, outer.forward, call, args, kwargs)
    kwargs = take_tokens(kwargs)
    forward, kwargs = state.forward_of(state.decoder, state.decoder_names, kwargs)  # a loss calls the decoder itself
    if forward is not None and not state.shifted:  # Liger's forwards call a decoder and its next-token loss alone
        require_entry(state.root)
    return run_inside(state, forward, _run_layers, state, forward, call, args, kwargs)


def _run_both(root: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    """A call of a model that is its own decoder."""
    return _run_model(root, partial(_run_decoder, root, call), *args, **kwargs)


def _run_layers(
    state: Patched, forward: PackedForward | None, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if forward is None:
        return call(*args, **kwargs)
    if forward.shared_row is not None:
        kwargs = forward.shared_row.shrink(kwargs)
    run, runner = partial(_run_packed, state, call, args), state.runner  # which a failure takes away in another thread
    output = run(forward, kwargs) if runner is None or args else runner(run, forward, kwargs)
    if forward.shared_row is not None:
        output = forward.shared_row.grow(output)
    return state.rows.pooled(forward, output)


def _run_packed(
    state: Patched, call: Call, args: tuple[Any, ...], forward: PackedForward, kwargs: dict[str, Any]
) -> Any:
    kwargs = _handed_over(state, forward, kwargs)
    if state.anatomy.route == "documents":
        output = run_per_document(state.decoder, forward, call, args, kwargs)
    else:
        output = call(*args, **kwargs)
    _check(state, forward)
    forward.router_logits = getattr(output, "router_logits", None)
    return output


def _handed_over(state: Patched, forward: PackedForward, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the decoder with the PackedForward where its layers receive it."""
    router.refuse_per_document(state.root, state.anatomy.mixers.values(), kwargs)
    if state.shifted:
        router.require_mask(state.root, kwargs)
    refuse_sharding_inside(state.root, state.divided)
    state.resume()
    forward.handed_over = True
    forward.reached.clear()
    if state.anatomy.head == "next token" or "use_cache" in state.decoder_names:
        kwargs["use_cache"] = False  # a cache of a row of several documents could not be used
    if state.anatomy.route == "documents":
        kwargs["attention_mask"] = None
        if state.anatomy.head == "next token" or kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = None
        return kwargs
    inputs.check_recomputed(state.decoder)
    if state.compiles and (forward.segments.parents is None or state.why_no_compiled_forest(state.compiled) is None):
        state.prepare(forward)
    kwargs["attention_mask"] = forward
    if state.anatomy.mixers:  # some layers pass on what they do not know, some only the argument of fused kernels
        kwargs |= dict.fromkeys(CARRIED, forward)
    return kwargs


def _check(state: Patched, forward: PackedForward) -> None:
    """Every attention and mixer layer that ran must have used the segments."""
    if torch.compiler.is_compiling():
        return
    state.expert_choices = forward.experts or state.expert_choices
    for kind, requests in forward.tower_requests.items():
        state.tower_requests[kind] |= requests
    if not forward.choices and has_compiled_layers(state.decoder):
        return  # they leave no record
    state.choices = forward.choices
    layers = state.anatomy.layers.items()
    lost = sorted(name for name, layer in layers if id(layer) in forward.reached.difference(forward.choices))
    if lost or not forward.choices:
        which = ", ".join(lost[:3]) + ("..." if len(lost) > 3 else "") if lost else "every layer"
        raise UnsupportedModelError(
            f"{type(state.root).__name__} did not hand the segments to {which}: its documents would see each other"
        )


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
