"""Classifies the head of a model: its predictions, and whether they are defined for several documents in a row.

The outermost transformers model -> :func:`head_of` -> what it predicts, or a refusal that names its class.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import UnsupportedModelError
from packing_core.extras import require
from torch_backend.hf.override import names

require("transformers", extra="hf")

from transformers import PreTrainedModel  # noqa: E402
from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: E402

# What the outputs and labels of a model belong to. "next token": logits of the following token. "masked token": of the
# token itself, which its input hides. "token": a class for each token. "document": logits of each document.
# "hidden states": no head.
Head = Literal["next token", "masked token", "token", "document", "hidden states"]

# By the end of a class's name.
ENDINGS: dict[str, Head] = {
    "ForSequenceClassification": "document",
    "ForTokenClassification": "token",
    "ForMaskedLM": "masked token",
}
# Heads whose result and labels belong to a row, by the end of their class's name.
PER_ROW = {
    "ForQuestionAnswering": "it predicts one span for each row, not for each document in it",
    "ForQuestionAnsweringSimple": "it predicts one span for each row, not for each document in it",
    "ForMultipleChoice": "it reads each choice as a row",
    "ForNextSentencePrediction": "it classifies each row, not each document in it, and takes no other labels",
    "ForPreTraining": "one of its heads reads one token of each row, not of each document in it",
    "DoubleHeadsModel": "its second head reads one token of each row, not of each document in it",
}
WAY_OUT = "patch its decoder alone (AutoModel), and apply a head of your own to the hidden states of each document"


def head_of(root: Any) -> Head:
    """Returns the kind of a transformers model's predictions.

    Raises:
        UnsupportedModelError: its head has no meaning for several documents in a row.
    """
    name = type(root).__name__
    head, reason = _by_class(root), next((why for ending, why in PER_ROW.items() if _is_a(root, ending)), None)
    if head is None and root.get_output_embeddings() is not None:
        head = "next token"
    elif head is None and root.base_model is root:
        head = "hidden states"
    if reason is None and head is None:
        reason = "it is no language model, classifier or model without a head"
    if reason is not None or head is None:
        raise UnsupportedModelError(f"{name} cannot be trained packed, because {reason}: {WAY_OUT}")
    return head


def trains_first_token(model: Any) -> bool:
    """Returns whether the first token of a document has a label: it does if each token is classified, by itself.

    A language model has no prediction for a document's first token, so a collator masks its label. ``model`` may be a
    wrapper of a transformers model, or anything else, for which the answer is False.
    """
    return _head_inside(model) in ("token", "masked token")


def predicts_masked(model: Any) -> bool:
    """Returns whether it predicts tokens that its input hides; ``model`` as in :func:`trains_first_token`."""
    return _head_inside(model) == "masked token"


def labels_documents(model: Any) -> bool:
    """Returns whether labels belong to documents and not to tokens; ``model`` as in :func:`trains_first_token`."""
    return _head_inside(model) == "document"


def entries_of(root: Any, head: nn.Module) -> int:
    """Counts the logits of each token of a causal language model with this output layer."""
    return int(getattr(head, "out_features", 0) or root.config.get_text_config().vocab_size)


def targets_among(labels: Tensor, config: Any, *, of_documents: bool) -> Tensor:
    """Marks the targets among labels: -100 marks a class that is missing, and is a number like others in a regression.

    Args:
        labels: of documents, or of tokens.
        config: of the model that takes them.
        of_documents: whether the model classifies documents; only these heads take numbers.
    """
    if of_documents:
        kind = config.problem_type or ("regression" if config.num_labels == 1 else None)
        if kind == "regression" or labels.is_floating_point():
            return torch.ones_like(labels, dtype=torch.bool)
    return labels != IGNORE_INDEX


def reads_last_token(root: Any) -> bool:
    """Returns whether a sequence head reads the last token that is not padding, found by ``pad_token_id``.

    So does a class of one's own whose forward calls that of such a head, ``super().forward``.
    """
    for kind in type(root).__mro__:
        named = names(vars(kind)["forward"]) if "forward" in vars(kind) else {"super", "forward"}
        if {"pad_token_id", "argmax"} <= named:
            return True
        if not {"super", "forward"} <= named:
            return False
    return False


def takes_next_token_loss(root: Any) -> bool:
    """Returns whether a model's ``loss_function`` is transformers' next-token loss, and not one that a user has set."""
    return root.loss_function is ForCausalLMLoss


def _by_class(model: nn.Module) -> Head | None:
    return next((head for ending, head in ENDINGS.items() if _is_a(model, ending)), None)


def _head_inside(model: Any) -> Head | None:
    """The head of the transformers models inside ``model``, where it is known by its class."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    heads = (_by_class(module) for module in modules if isinstance(module, PreTrainedModel))
    return next((head for head in heads if head is not None), None)


def _is_a(model: nn.Module, ending: str) -> bool:
    """Returns whether a class name of the model, or of its bases, ends so; FSDP2 and users derive renamed classes."""
    return any(parent.__name__.endswith(ending) for parent in type(model).__mro__)
