"""The rules about the arguments of a patched model: modalities, masks, positions, labels.

The arguments of one forward -> ``check_*`` -> nothing, or a PackingError before the forward runs. A batch that carries
its segments must be one that packing keeps exact; one that does not must not look packed (:mod:`.unmarked`). Rules
about values go through a :class:`~.guard.Guard`, so they are the same on every device and no batch waits for them.
What the segments themselves must be is in :mod:`.boundaries`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from packing_core.batches.keys import BatchKey
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import CapacityError, LayoutError, PackingError, UnsupportedModelError
from torch_backend.hf.anatomy.audio import FEATURES, require_encoder
from torch_backend.hf.anatomy.families import EXACT_KEYS, M_ROPE, PIXELS, exact_in_encoders
from torch_backend.hf.inputs.boundaries import PAGED_CACHE, check_no_restart
from torch_backend.hf.inputs.guard import Guard
from torch_backend.segments import PackedMetadata, to_device

# Arguments that have a rule of their own, and those that say nothing about single documents; of every family.
_RULED = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels", *BatchKey.ALL)
HARMLESS = frozenset((*_RULED, "num_items_in_batch", "logits_to_keep", "cache_position"))
CACHES = (PAGED_CACHE, "past_key_values", "cache_params", "layer_past", "mems", "state")
READ = frozenset((*HARMLESS, *CACHES)).union(*EXACT_KEYS.values())  # keywords that transformers' code is known to read

Labels = Literal["next", "token", "document"]
UNPACKED = "pack text alone, and give the model such documents unpacked: one to a row, without cu_seq_lens_q"


def as_keywords(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with positional arguments passed by name, so that no rule overlooks one."""
    named = dict(zip(names, args, strict=False))
    if named.keys() & kwargs.keys():
        return args, dict(kwargs)  # the call raises the TypeError
    return args[len(named) :], {**named, **kwargs}


def tokens_of(kwargs: Mapping[str, Any]) -> Tensor:
    """Returns the tensor that gives a batch's rows and tokens: ``input_ids`` [B, S] or ``inputs_embeds`` [B, S, D].

    Raises:
        LayoutError: there is neither, or it has another shape.
    """
    for name, shape in (("input_ids", "[B, S]"), ("inputs_embeds", "[B, S, D]")):
        value = kwargs.get(name)
        if isinstance(value, Tensor):
            if value.ndim != shape.count(",") + 1:
                raise LayoutError(f"{name} must be {shape}, got {list(value.shape)}")
            return value
    raise LayoutError("the batch has neither input_ids nor inputs_embeds: pass one of them")


def check_arguments(model: nn.Module, kwargs: Mapping[str, Any], guard: Guard) -> None:
    """Refuse what would be ignored, or not be exact, in a packed batch: caches, modalities, unknown tensors.

    Args:
        model: the model that is called; ``config.model_type`` is its family.
        kwargs: all its arguments.
        guard: see :meth:`Guard.check`.

    Raises:
        UnsupportedModelError: names the argument, the model and the way out.
    """
    config: Any = model.config
    family, name = config.model_type, type(model).__name__
    exact = EXACT_KEYS.get(family, frozenset()) | exact_in_encoders(config)
    given = [key for key, value in kwargs.items() if not is_flag(value)]
    for key in given:
        if key in CACHES:
            raise UnsupportedModelError(
                f"a packed batch came with {key}: prefix tuning and caches cannot be packed, because every document "
                "would need the prefix; use LoRA, or train unpacked"
            )
        if key == "loss_weights":
            raise UnsupportedModelError(
                f'a packed batch came with loss_weights (weighting="document"), which the loss of {name} does not '
                'count: train by crosspack.make_train_step(model, optimizer), or pack with weighting="token"'
            )
        if key not in HARMLESS and key not in exact:
            raise UnsupportedModelError(
                f"a packed batch came with {key}, and {name} is not known to be exact with it: {UNPACKED}"
            )
    if FEATURES in given:
        require_encoder(model)
    positions = kwargs.get("position_ids")
    if family in M_ROPE and not (isinstance(positions, Tensor) and positions.ndim == 3):
        seen = [key for key in given if key in PIXELS]
        if seen:
            raise UnsupportedModelError(
                f"a packed batch came with {seen[0]} and without position_ids [3, B, S]: {name} gives images and "
                "videos positions on three axes, and would number the row as if it were one document. Compute them "
                "for each document in the collator, model.model.get_rope_index(...), and concatenate the results"
            )


def check_recomputed(decoder: nn.Module) -> None:
    """Refuse reentrant checkpoints around layers that read keys and values of earlier ones.

    Such a layer gets them past its arguments, and a reentrant checkpoint makes them without gradients.

    Raises:
        UnsupportedModelError: the gradients of these keys and values would be lost.
    """
    config: Any = decoder.config
    if not getattr(config, "num_kv_shared_layers", 0) or not (decoder.training and torch.is_grad_enabled()):
        return
    for layer in decoder.modules():
        call = getattr(layer, "_gradient_checkpointing_func", None)
        if getattr(layer, "gradient_checkpointing", False) and getattr(call, "keywords", {}).get("use_reentrant"):
            raise UnsupportedModelError(
                f"layers of {type(decoder).__name__} read keys and values of earlier ones, whose gradients a reentrant "
                'checkpoint loses: pass gradient_checkpointing_kwargs={"use_reentrant": False}, or a level of memory'
            )


def check_packed(
    kwargs: Mapping[str, Any],
    packed: PackedMetadata,
    guard: Guard,
    *,
    labels: Labels,
    entries: int | None,
    renumbered: bool,
    axes: bool,
) -> None:
    """Check mask, positions and labels of a batch against its segments.

    Args:
        kwargs: all arguments of the model.
        packed: the segments.
        guard: see :meth:`Guard.check`.
        labels: what they belong to: the next token, as language-model heads take them, the token, or the document.
        entries: logits of each token, where labels are those of the next.
        renumbered: whether every document will run at positions 0, 1, 2, ..., or on from a prefix, whatever
            ``position_ids`` says.
        axes: whether positions may have several axes, [3, B, S].

    Raises:
        LayoutError: one of them contradicts the segments, or has another shape than the batch.
        UnsupportedModelError: the model cannot take such positions packed.
    """
    rows, row_length = tokens_of(kwargs).shape[:2]
    shape = (rows, row_length)
    check_mask(kwargs.get("attention_mask"), packed, guard, shape=shape)
    positions = kwargs.get("position_ids")
    check_positions(positions, packed, guard, shape=shape, renumbered=renumbered, axes=axes)
    for name, ahead in {"labels": 0, "shift_labels": 1}.items() if labels != "document" else ():
        moved = ahead if labels == "next" else None
        check_labels(kwargs.get(name), packed, guard, name=name, shape=shape, ahead=moved, entries=entries)


def check_mask(mask: Any, packed: PackedMetadata, guard: Guard, *, shape: tuple[int, int]) -> None:
    """Accept no mask, or one [B, S] of ones and zeros that is 0 on whole segments alone (padding)."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.shape != shape:
        form = list(mask.shape) if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise LayoutError(
            f"beside cu_seq_lens_q attention_mask must be None or {list(shape)}, got {form}: who sees whom follows "
            "from the boundaries alone. Leave the mask out, or the boundaries to use it"
        )

    def find() -> Tensor:
        flat = to_device(mask, packed.device).flatten()
        starts = packed.cu_seqlens.index_select(0, packed.seq_idx)
        return (flat != flat.index_select(0, starts)) | ((flat != 0) & (flat != 1))

    def error(i: int) -> PackingError:
        return LayoutError(
            f"attention_mask contradicts the boundaries at {place_of(i, shape[1])}: beside cu_seq_lens_q it may hold "
            "ones, and zeros on whole segments of padding; packed attention would ignore anything else"
        )

    guard.check("attention_mask beside boundaries", find, error)


def check_positions(
    positions: Any,
    packed: PackedMetadata,
    guard: Guard,
    *,
    shape: tuple[int, int],
    renumbered: bool,
    axes: bool,
) -> None:
    """Accept no positions, [B, S], or [3, B, S] and [4, B, S] where the model takes them; see :func:`check_packed`."""
    if positions is None:
        return
    form = tuple(positions.shape) if isinstance(positions, Tensor) else type(positions).__name__
    if form not in (shape, (3, *shape), (4, *shape)):
        raise LayoutError(f"position_ids must be {list(shape)}, or several axes of it as in M-RoPE, got {form}")
    if positions.ndim == 3 and not axes:
        raise UnsupportedModelError(
            f"a packed batch came with position_ids on {len(positions)} axes, but the packed documents of this model "
            f"have positions on a single one; {UNPACKED}"
        )
    if not renumbered:
        if positions.ndim == 2:
            check_no_restart(positions, packed, guard)
        return

    def error(i: int) -> PackingError:
        return LayoutError(
            f"position_ids are not those of a document of its own at {place_of(i, shape[1])}: this call runs every "
            "document at positions 0, 1, 2, ..., counted on where it continues a shared prefix; leave position_ids out"
        )

    def find() -> Tensor:
        return to_device(positions, packed.device).flatten() != packed.position_ids

    guard.check("position_ids beside boundaries", find, error)


def check_table(packed: PackedMetadata, position_ids: Tensor, positions: range | None, model: str) -> None:
    """Check that every document has a learned position for each token. Positions are read for long segments alone.

    Args:
        packed: the segments; a long one may be padding, so it proves nothing by itself.
        position_ids: of all tokens.
        positions: those that the ``model`` has learned vectors for; None without a table.

    Raises:
        CapacityError: a document is longer.
    """
    if positions is None or packed.max_seqlen <= len(positions) or not packed.readable:
        return
    if packed.lengths is not None and max(packed.lengths) <= len(positions):
        return
    if (last := int(position_ids.max())) >= positions.stop:
        raise CapacityError(
            f"a document has {last + 1 - positions.start:,} tokens and {model} learned positions for "
            f"{len(positions):,}: cut documents when they are tokenised, or pack with capacity={len(positions)} and "
            'overflow="split", "truncate" or "drop"',
            option="overflow capacity",
        )


def check_labels(
    labels: Any,
    packed: PackedMetadata,
    guard: Guard,
    *,
    name: str,
    shape: tuple[int, int],
    ahead: int | None,
    entries: int | None,
) -> None:
    """Accept no labels, or one of the vocabulary per token [B, S], none of which the document before would predict.

    ``ahead`` says by how many tokens they are already moved towards the token that predicts them; None if they are not
    those of the next token, so that nothing can cross a boundary. The label of a row's first token is dropped by the
    shift. A fused loss would read another row's logit for a label that is none of the ``entries``.
    """
    if labels is None:
        return
    if not isinstance(labels, Tensor) or labels.shape != shape:
        form = list(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise LayoutError(f"{name} must be {list(shape)}, one per token as in input_ids, got {form}")
    if ahead is None:
        return
    starts, dropped = packed.cu_seqlens[1:-1], 1 - ahead

    def find() -> Tensor:
        roots = torch.ones_like(starts, dtype=torch.bool)
        # the first token of a segment with a parent is predicted by the parent's last
        if packed.parent_index is not None:
            roots = packed.parent_index[1:] < 0
        elif packed.parents is not None:
            parents = torch.tensor(packed.parents[1:])
            roots[: len(parents)] = to_device(parents < 0, roots.device)
        # moved ahead, a label of a row's first token stands at the last token before
        crosses = starts < packed.tokens if ahead else starts % shape[1] != 0
        on_device = to_device(labels, packed.device)
        first = on_device.flatten().index_select(0, (starts - ahead).clamp(max=labels.numel() - 1))
        trained = roots & crosses & (first != IGNORE_INDEX)
        if entries is None:
            return trained
        shifted = on_device[:, dropped:].flatten()
        return torch.cat([trained, ((shifted < 0) | (shifted >= entries)) & (shifted != IGNORE_INDEX)])

    def error(i: int) -> PackingError:
        if i < len(starts):
            return LayoutError(
                f"{name} train the first token of segment {i + 1}, which the last token of segment {i} would predict: "
                f"set it to {IGNORE_INDEX}, or wrap the collator, crosspack.with_boundaries(collator), which does"
            )
        i -= len(starts)
        label, where = int(labels[:, dropped:].flatten()[i]), place_of(i, shape[1] - dropped, dropped)
        return LayoutError(
            f"{name} holds {label} at {where}, and the model has logits for 0 to {(entries or 0) - 1}: label what is "
            f"not trained {IGNORE_INDEX}"
        )

    guard.check(name, find, error)


def refuse_without_carrier(module: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise where segments reach packed attention beside its mask: the model around it is not patched.

    Its config was copied from a patched model, and with it the name of the attention. Families whose layers do not hand
    unknown arguments to attention cannot be caught here.

    Raises:
        UnsupportedModelError
    """
    parts = [key for key in BatchKey.ALL if kwargs.get(key) is not None]
    if parts and kwargs.get(PAGED_CACHE) is None and getattr(module, "is_causal", True):
        raise UnsupportedModelError(
            f"{type(module).__name__} was given {parts[0]}, but its model is not patched and would let documents see "
            f"each other: its config, copied from a patched model, names {module.config._attn_implementation!r}. Call "
            "crosspack.patch on this model too"
        )


def is_flag(value: Any) -> bool:
    """Returns whether a value is None or a single number or word, which cannot say where documents lie."""
    return value is None or isinstance(value, (bool, int, float, str))


def check_vocabulary(model: Any, ids: Any, guard: Guard) -> None:
    """Check tokens that are cut over ranks: the rank that holds one without an embedding would fail, and others wait.

    Args:
        model: the model that is called.
        ids: [B, S] of the whole batch.
        guard: see :meth:`Guard.check`.

    Raises:
        LayoutError: a token has no row in the model's embedding.
    """
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if not isinstance(ids, Tensor) or rows is None:
        return

    def error(i: int) -> PackingError:
        return LayoutError(
            f"input_ids holds {int(ids.flatten()[i])} at {place_of(i, ids.shape[-1])}, and {type(model).__name__} has "
            f"embeddings for 0 to {rows - 1}: take the tokenizer of the model, and its pad_token_id for padding"
        )

    guard.check("tokens of the vocabulary", lambda: ((ids < 0) | (ids >= rows)).flatten(), error)


def place_of(i: int, width: int, ahead: int = 0) -> str:
    """Describes the position of the i-th element of a batch."""
    return f"row {i // width}, token {i % width + ahead}"
