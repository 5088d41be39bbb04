"""``patch(model)`` and ``unpatch(model)``: the edits of :mod:`torch_backend.hf.patch`, then a proof of them.

This module composes the edits and the audit. The edits do not import the audit, and the audit applies the edits to a
clone, so neither imports the other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from packing_core.errors import ContaminationError, PackingError
from packing_core.hints import hinted
from torch_backend.auditing.model import prove_now, verify_additions
from torch_backend.auditing.model import verify as verify_kind
from torch_backend.hf.anatomy.structure import causal_lm, execution_device, torch_defaults
from torch_backend.hf.edits.rotary import rounded_frequencies
from torch_backend.hf.entry import lead_to_entry
from torch_backend.hf.patch import install, refuse_context_of, state_of, unpatch
from torch_backend.hf.unpadding import unpad_calls

logger = logging.getLogger(__name__)
__all__ = ["patch", "unpad", "unpatch"]

Model = TypeVar("Model", bound=nn.Module)


@hinted()
@torch_defaults()
def patch(
    model: Model,
    *,
    implementation: str | Sequence[str] = "auto",
    verify: bool = True,
    mesh: Any = None,
    context_method: str = "auto",
) -> Model:
    """Make a model train packed batches exactly; everything else it does stays as it was, to the bit.

    Args:
        model: a transformers model (causal or masked language model, classifier, encoder), or anything that wraps one
            (PEFT, DDP, a compiled module).
        implementation: of attention, as in :func:`torch_backend.attention`.
        verify: prove it on a tiny clone of the model before returning (see :func:`torch_backend.audit`), and on a short
            row of the model itself, forward and backward, if it holds what its config does not make: adapters,
            quantised or parametrised weights, hooks, replaced modules and forwards. Parts that
            are added later, and a model that is on the meta device now, are proved at their next packed call.
        mesh: one dimension of a ``DeviceMesh``, as in ``mesh["cp"]``, over whose ranks the documents of each batch are
            cut (context parallelism). All these ranks pass the same batch; each runs its part of the tokens. The
            model's ``loss`` is that of the whole batch on every rank. Its gradients are those of one process once they
            are averaged over ranks, as DDP and FSDP do. A model that is patched again without a mesh keeps its mesh.
        context_method: how the attention of documents on several ranks communicates: "keys" sends each piece the
            earlier keys and values of its document, "heads" (Ulysses) exchanges them so that each rank has all of a
            document's tokens for some of the heads, "auto" takes whichever sends less, layer by layer.

    Returns:
        ``model`` itself, patched in place. Patching again with another implementation changes it. A warning
        is logged if a cast of the whole model has rounded its rotary frequencies.

    Raises:
        UnsupportedModelError: the model, or an option of it, cannot be made exact, or its documents cannot be cut; the
            model is left as it was.
        ContaminationError: the proof failed; the model is left as it was, or unpatched where it was patched before.
        PackingError: ``mesh`` has more than one dimension, or ``context_method`` is unknown.
    """
    root = causal_lm(model)
    state = state_of(root)
    proves = verify and execution_device(root).type != "meta"
    try:
        if proves:
            verify_kind(root, implementation)
    except ContaminationError:
        unpatch(root)
        raise
    fresh = install(model, implementation, mesh=mesh, context_method=context_method)
    fresh.prove = prove_now if verify else None
    try:
        if proves:
            verify_additions(root)
    except PackingError:
        unpatch(root)
        raise
    if model is not root:
        lead_to_entry(model, root)
    if state is None and (rounded := rounded_frequencies(root)):
        _warn_of_rounding(rounded)
    if fresh is not state and fresh.adds_softcap:
        logger.warning("%s: %s", type(root).__name__, fresh.adds_softcap)
    return model


def _warn_of_rounding(rounded: Mapping[str, torch.dtype]) -> None:
    dtype = next(iter(rounded.values()))
    logger.warning(
        "rotary frequencies are in %s (%s): casting the whole model rounded them, so angles are off by up to 0.4 at "
        "position 1,000 in bfloat16, packed or not. from_pretrained(..., dtype=%s) and from_config(..., dtype=%s) keep "
        "them in float32",
        *(dtype, ", ".join(rounded), dtype, dtype),
    )


@hinted()
def unpad(model: Model, *, implementation: str | Sequence[str] = "auto", verify: bool = True) -> Model:
    """:func:`patch` a model, and run its padded calls packed: for libraries that pad and know nothing of packing.

    A call with ``input_ids`` and an ``attention_mask`` [B, S] takes the padding out, runs one packed row, and returns
    what the caller expects: values per token at their places [B, S, ...] with zeros at padding, and values per document
    as they are. The number of real tokens is read from the device once per call. These run padded as before:
    calls without such a mask, calls that ask for a cache or for attention weights, images of M-RoPE models without
    positions, and every call after :func:`unpatch`. Where a padded call would make a cache without being asked for one,
    ``past_key_values`` raises when it is read.

    Args:
        model: anything that holds a transformers model, such as a ``SentenceTransformer`` or ``CrossEncoder``.
        implementation, verify: as in :func:`patch`.

    Returns:
        ``model`` itself, changed in place.

    Raises:
        UnsupportedModelError, ContaminationError: as :func:`patch`.
    """
    refuse_context_of(model, "unpad(model)")
    patch(model, implementation=implementation, verify=verify)
    unpad_calls(model, always=True)
    return model
