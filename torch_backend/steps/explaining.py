"""Describes the parts of a training step as :func:`torch_backend.explain` shows them: what runs, and at which level.

:mod:`.eligibility` says why a part is not fast; here is how the parts read.
"""

from __future__ import annotations

from torch import nn

from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.attention import DecoderLayer
from torch_backend.hf.foreign_kernels import has_ligers_forward, library_in, replaced_modules
from torch_backend.hf.patch import state_of
from torch_backend.steps.cuda_graph import layers_of
from torch_backend.steps.eligibility import level_inside
from torch_backend.steps.memory import in_checkpoint_wrappers, level_layers, level_of, plain_layers_move_inputs


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
