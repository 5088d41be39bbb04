"""Rearranges rows around the head of a model that is not a language model.

    the model's arguments -> begin -> a head for documents gets one document in each row; the rest waits
    its inner model       -> restore -> runs on the packed rows -> by_document -> hidden states, a document in each row
    the model's output    -> end -> its loss as a share of the step's

A head for tokens reads the packed rows as they are. Encoders with a pooler (``BertModel``) pool each document's first
token, with a head or without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from packing_core.errors import LayoutError, UnsupportedModelError
from torch_backend.hf.anatomy.heads import reads_last_token, targets_among
from torch_backend.hf.anatomy.model import Anatomy
from torch_backend.hf.attention import PreTrainedModel
from torch_backend.hf.entry import Hook
from torch_backend.hf.forward import PackedForward
from torch_backend.hf.override import forward_names
from torch_backend.ops.divisor import part_of_mean

NO_LOGITS = ("labels", "output_attentions", "output_hidden_states", "return_dict")  # what stays where it is


class HeadRows:
    """The head of one patched model.

    Raises:
        UnsupportedModelError: the head needs a padding token, and the config has none.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        self.root, self.decoder, self.head = root, decoder, head = anatomy.root, anatomy.decoder, anatomy.head
        self.per_document = anatomy.route == "documents"
        self.body = root.base_model if isinstance(root.base_model, PreTrainedModel) else decoder
        pooler = getattr(decoder, "pooler", None)
        self.pooler: nn.Module | None = pooler if isinstance(pooler, nn.Module) else None
        self.last = head == "document" and reads_last_token(root)
        if self.last and self.pad_id is None:
            raise UnsupportedModelError(
                f"{type(root).__name__} finds the last token of a document by the padding after it, and its config "
                "names none: set model.config.pad_token_id"
            )

    @property
    def pad_id(self) -> int | None:
        """The token of padding; read in each call, because trainers set it on the config of a patched model."""
        return getattr(self.root.config.get_text_config(), "pad_token_id", None)

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """The modules that are edited."""
        return (self.body,) if self.pooler is None else (self.body, self.pooler)

    @property
    def needs_lengths(self) -> bool:
        """Returns whether the lengths of documents are needed on the host."""
        return self.head == "document" or self.pooler is not None

    def edits(self) -> Iterator[Hook]:
        """The hooks inside the model."""
        if self.pooler is not None and not self.per_document:  # else see pooled; before hidden states become rows
            if (encoder := getattr(self.decoder, "encoder", None)) is not None:
                yield Hook(encoder.register_forward_hook, _keep_encoded)
            yield Hook(self.pooler.register_forward_pre_hook, _pool)
            yield Hook(self.pooler.register_forward_hook, _keep_pooled)
        if self.head == "document":
            yield Hook(self.body.register_forward_pre_hook, _restore, with_kwargs=True)
            yield Hook(self.body.register_forward_hook, _by_document)

    def begin(self, forward: PackedForward, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the model, as its head shall see them.

        Raises:
            LayoutError: there is not one label for each document, or a document is split.
        """
        labels = kwargs.get("labels")
        if self.head != "next token":
            count = kwargs.pop("num_items_in_batch", None)
            if count is not None and isinstance(labels, Tensor):
                documents = self.head == "document"
                forward.share = targets_among(labels, self.root.config, of_documents=documents).sum() / count
        if self.head != "document":
            return kwargs
        rows = forward.documents
        if isinstance(labels, Tensor) and (labels.ndim == 0 or len(labels) != len(rows)):
            raise LayoutError(
                f"labels have shape {list(labels.shape)} and the batch holds {len(rows)} documents: this model takes "
                "one label for each document, in source order, as PackedCollator(model) gives them"
            )
        if self.last:
            rows.keep_last(kwargs.get("input_ids"), self.pad_id)
        seen = {name: x for name, x in kwargs.items() if not isinstance(x, Tensor) or name in NO_LOGITS}
        forward.waiting = {"attention_mask": None, **{name: x for name, x in kwargs.items() if name not in seen}}
        names = forward_names(self.root)
        return seen | {name: x for name, x in rows.arguments(kwargs, self.pad_id).items() if name in names}

    def end(self, forward: PackedForward, output: Any) -> Any:
        """The output of the model, its loss divided by the targets of the whole step if it was told their number.

        What a model pools in its own forward, as CLIP's do, is one token of each row, and left out.
        """
        if self.pooler is None and getattr(output, "pooler_output", None) is not None:
            output["pooler_output"] = None
        if forward.share is None or output is None:
            return output
        share = forward.share
        if isinstance(output, tuple):
            return part_of_mean(output[0], share), *output[1:]
        if output.loss is not None:
            output.loss = part_of_mean(output.loss, share)
        return output

    def pooled(self, forward: PackedForward, output: Any) -> Any:
        """The output of a decoder, its documents pooled if its own forward did not pool them."""
        after = self.per_document or forward.pools_after
        if after and self.pooler is not None and not isinstance(output, tuple):
            output["pooler_output"] = self.pooler(forward.documents.first(output.last_hidden_state))
        return output


# -- hooks in packed calls ---------------------------------------------------------------------------------------------


def _restore(forward: PackedForward, body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments that waited while the head got rows of documents."""
    names = forward_names(body) if forward.waiting else ()
    named = dict(zip(names, args, strict=False)) | kwargs
    return args[len(names) :], named | {name: x for name, x in forward.waiting.items() if name in names}


def _by_document(forward: PackedForward, body: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if isinstance(output, tuple):
        return forward.documents.hidden(output[0]), *output[1:]
    output.last_hidden_state = forward.documents.hidden(output.last_hidden_state)
    return output


def _keep_encoded(forward: PackedForward, encoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    forward.encoded = output[0]


def _pool(forward: PackedForward, pooler: nn.Module, args: tuple[Any, ...]) -> Any:
    """The first token of each document where a pooler takes [B, S, D], or the first token of each row [B, D]."""
    if forward.pools_after:
        return None
    if args[0].ndim == 3:
        return forward.documents.first(args[0]), *args[1:]
    assert forward.encoded is not None
    return forward.documents.first(forward.encoded)[:, 0], *args[1:]


def _keep_pooled(forward: PackedForward, pooler: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if forward.pools_after:
        forward.pooled = output
