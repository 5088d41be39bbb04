"""Explains which parts of a training step are fast, and why a model, or batches like the first one, cannot have others.

Each ``why_`` function returns a reason that users read after "not compiled:" or "no CUDA graph:", or None. The last
functions describe parts as :func:`torch_backend.explain` shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from packing_core.batches.keys import BatchKey
from packing_core.errors import UnsupportedModelError
from torch_backend.hf.anatomy.expert_layouts import makes_weights
from torch_backend.hf.anatomy.layers import find_experts
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.attention import DecoderLayer
from torch_backend.hf.blank_images import blank_media
from torch_backend.hf.edits.packed_experts import why_experts_read
from torch_backend.hf.foreign_kernels import has_ligers_forward, library_in, replaced_modules, unknown_part
from torch_backend.hf.forward import RowChoice
from torch_backend.hf.patch import state_of
from torch_backend.hf.patched import Patched
from torch_backend.hf.quantised import why_weights_stay
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.steps import cuda_graph as captured
from torch_backend.steps.cuda_graph import layers_of
from torch_backend.steps.fixed_shapes import FixedShapes
from torch_backend.steps.graph_collectives import why_not_recorded
from torch_backend.steps.memory import (
    Level,
    draws_random_numbers,
    in_checkpoint_wrappers,
    level_layers,
    level_of,
    plain_layers_move_inputs,
)

Batch = Mapping[str, Any]
HOOKS_READ = "hooks of its parameters read gradients"


def fast_loss_refused(model: nn.Module, batch: Batch) -> str | None:
    """Explains why the loss of a model needs logits; None if it does not."""
    try:
        causal_lm_loss(model, batch)
    except UnsupportedModelError as refusal:
        return str(refusal)
    return None


def why_not_compiled(model: nn.Module, batch: Batch | None = None) -> str | None:
    """Explains why the layers of a model cannot be compiled, None if they can; without a batch, by the model alone."""
    if any(isinstance(module, OptimizedModule) or module._compiled_call_impl for module in model.modules()):
        return "it is compiled already"
    state = state_of(causal_lm(model))
    if state is not None and (part := unknown_part(layers_of(state.decoder))) is not None:
        return f"{part} stands in them, which torch.compile may run wrongly: leave it out"
    config = causal_lm(model).config.get_text_config()
    if level_of(model) != "none" and getattr(config, "altup_coef_clip", None) is not None:
        return "its layers clip weights in each forward, which a compiled layer that recomputes would find changed"
    if state is not None and state.context is not None:  # pieces of documents that are cut over ranks
        return _why_not_here(state)
    return _why_not_fixed(model, batch)


def why_not_captured(model: nn.Module, batch: Batch, *, insists: bool = False) -> str | None:
    """Explains why forward and backward of a model cannot be recorded as a CUDA graph, None if they can.

    Args:
        insists: whether the caller wants one for shared prefixes too, which batches of one capacity alone can have.
    """
    if (reason := why_not_recorded(model)) is not None:
        return reason
    if (state := state_of(causal_lm(model))) is not None and state.rows.needs_lengths:
        return "its head reads documents, of which each batch has another number"
    if reads_gradients(model.parameters()):
        return HOOKS_READ
    if has_parents(batch) and not insists:
        return "rows with shared prefixes run at any length: pass capture=True where they have one capacity"
    if holds_images(batch):
        return "its batches hold images, whose number and sizes differ"
    if state is not None and blank_media(state.root, state.decoder, batch):
        return "ranks whose rows have no image run the vision tower on a blank one, which reads sizes back"
    reason = _why_not_fixed(model, batch)
    if reason is None and has_parents(batch) and state is not None:
        reason = state.why_no_compiled_forest(())
    return reason or why_experts_read(model)


def reads_gradients(parameters: Iterable[nn.Parameter]) -> bool:
    """Returns whether parameters have hooks on their gradients, whose Python code a CUDA graph would not run again."""
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)


def why_not_recomputed(model: nn.Module, *, compiled: bool) -> str | None:
    """Explains why a graph cannot record how layers recompute, None if it can or they keep everything."""
    if in_checkpoint_wrappers(model):
        return "checkpoint wrappers around layers read the random state"
    if not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return None
    if compiled and level_inside(model) != "none":
        return None
    plain = "gradient checkpointing of layers that are not compiled"
    return f"{'dropout or noise in layers that recompute' if compiled else plain} reads the random state"


def why_mixers_wait(model: nn.Module) -> str | None:
    """Explains why the recurrent layers that ran cannot run in fixed shapes: they read lengths back."""
    state = state_of(causal_lm(model))
    choices = () if state is None else state.choices.values()
    other = next((choice for choice in choices if isinstance(choice, RowChoice) and not choice.fixed), None)
    return None if other is None else f"of a recurrent layer, what runs is {other}"


def _why_not_fixed(model: nn.Module, batch: Batch | None) -> str | None:
    """Explains why batches cannot have shapes that do not depend on their documents."""
    root = causal_lm(model)
    state: Patched | None = state_of(root)
    if state is None:
        return "the model is not patched"
    if state.context is not None:
        return "its documents are cut over ranks, into other pieces in every batch"
    if (reason := _why_not_here(state)) is not None:
        return reason
    if state.layers_need_lengths:
        return "its layers need the lengths of documents on the host, which differ from batch to batch"
    if any(makes_weights(module) for module in find_experts(root).values()):
        return "the weights of its experts are made in every call, from 4 bits for example"
    marked = batch is not None and batch.get("attention_mask") is not None
    if getattr(root.config.get_text_config(), "output_router_logits", False) and not marked:
        return "its router's auxiliary loss would count the padding that fixed shapes need"
    if batch is not None and not FixedShapes.takes(batch):
        return "batches do not carry the lengths of their documents (packed_lengths)"
    return None


def _why_not_here(state: Patched) -> str | None:
    """Explains why neither layers nor graphs are compiled for where the weights of a model are, and what they are."""
    if state.device.type != captured.DEVICE:
        return f"the model computes on {state.device.type}"
    if (reason := why_weights_stay(state.root)) is not None:
        return reason
    if len({parameter.device for parameter in state.root.parameters()}) > 1:
        return "its weights lie on several devices"
    return None


def level_inside(model: nn.Module) -> Level:
    """Returns the level at which compiled layers recompute by themselves."""
    return "none" if draws_random_numbers(model) else level_of(model)


def has_parents(batch: Batch | None) -> bool:
    """Returns whether segments of a batch, and of others like it, may continue others."""
    return batch is not None and batch.get(BatchKey.PARENTS) is not None


def holds_images(batch: Batch) -> bool:
    """Returns whether a batch has tensors of images, videos or audio, which a tower runs in shapes of their own."""
    return any(name.startswith(("pixel_values", "input_features")) for name in batch)


def loss_without_logits(model: nn.Module) -> str:
    """Describes the fast loss of a model."""
    liger = has_ligers_forward(causal_lm(model))
    return "without logits" + (", in place of Liger's forward of the model" if liger else "")


def compiled_layers(model: nn.Module, *, any_length: bool = False, pieces: bool = False, whole: bool = False) -> str:
    """Describes the compiled layers of a model.

    Args:
        any_length: whether they run rows of any length.
        pieces: whether they run pieces of documents that are cut over ranks.
        whole: whether they run documents that lie on one rank each as on one rank.
    """
    lengths = ", for rows of any length" if any_length else ""
    named, kernels = named_level(model, inside=level_inside(model) != "none"), _in_place_of_kernels(model)
    if pieces and level_of(model) == "selective":
        reason = 'its layers exchange between graphs, among whose operations memory="selective" cannot choose'
        if not whole:
            return plain_layers(model, reason)
        return f"compiled where no document straddles ranks{named}{kernels}, else not: {reason}"
    around = ""
    if pieces:
        as_one = "as on one rank where no document straddles ranks, else " if whole else ""
        around = f", {as_one}around what exchanges between ranks"
        if level_of(model) == "offload":
            around += ", with the inputs of layers on the device"
        if level_of(model) == "attention":
            around += ", keeping what triton and flash4 attention return"
    return f"compiled{lengths}{named}{kernels}{around}"


def plain_layers(model: nn.Module, reason: str) -> str:
    """Describes the layers of a model that are not compiled, and why they are not."""
    return f"not compiled: {reason}{named_level(model)}"


def named_level(model: nn.Module, *, inside: bool = False) -> str:
    """Names the level of memory of a model, with a comma in front; nothing for ``"none"``.

    Args:
        inside: whether compiled layers recompute by themselves.
    """
    level = level_of(model)
    if level == "none":
        return ", recomputed by checkpoint wrappers" if in_checkpoint_wrappers(model) else ""
    layers = getattr(state_of(causal_lm(model)), "decoder", model)
    recompute, all_of_them = len(level_layers(layers)), sum(isinstance(m, DecoderLayer) for m in layers.modules())
    share = "" if recompute == all_of_them else f" in {recompute} of {all_of_them} layers"
    stay = level == "offload" and not inside and not plain_layers_move_inputs(model)
    where = ", with the inputs of layers on the device" if stay else ""
    return f', memory="{level}"{share}{where}'


def _in_place_of_kernels(model: nn.Module) -> str:
    """Names the modules that compiled layers run without the kernels of a library."""
    state = state_of(causal_lm(model))
    if state is None or not (found := replaced_modules(layers_of(state.decoder))):
        return ""
    names = sorted({name.rpartition(".")[2] for name, module in state.decoder.named_modules() if module in found})
    library = library_in(next(iter(found)))
    return f", {', '.join(names)} by plain operations in place of {library}'s kernels, which torch.compile runs wrongly"
