"""The part of a model on top of its decoder: what it predicts, and whether that is defined for several documents a row.

The outermost transformers model -> :func:`head_of` -> what it predicts, or a refusal that names its class.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from packing_core.errors import UnsupportedModelError
from packing_core.extras import require

require("transformers", extra="hf")

from transformers import PreTrainedModel  # noqa: E402
from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: E402

# "next token": logits of the following token. "token": a class for each token. "hidden states": no head.
Head = Literal["next token", "token", "hidden states"]

PER_TOKEN = "ForTokenClassification"
# Heads whose result and labels belong to a row, by the end of their class's name.
PER_ROW = {
    "ForSequenceClassification": "it classifies each row, not each document in it",
    "ForQuestionAnswering": "it predicts one span for each row, not for each document in it",
    "ForMultipleChoice": "it reads each choice as a row",
    "DoubleHeadsModel": "its second head reads one token of each row, not of each document in it",
}
WAY_OUT = "patch its decoder alone (AutoModel), and apply a head of your own to the hidden states of each document"


def head_of(root: Any) -> Head:
    """What a transformers model predicts.

    Raises:
        UnsupportedModelError: its head has no meaning for several documents in a row.
    """
    name = type(root).__name__
    for ending, reason in PER_ROW.items():
        if _is_a(root, ending):
            raise UnsupportedModelError(f"{name} cannot be trained packed, because {reason}: {WAY_OUT}")
    if _is_a(root, PER_TOKEN):
        return "token"
    if root.get_output_embeddings() is not None:
        return "next token"
    if root.base_model is root:
        return "hidden states"
    raise UnsupportedModelError(
        f"{name} cannot be trained packed, because it is no language model, token classifier or decoder: {WAY_OUT}"
    )


def trains_first_token(model: Any) -> bool:
    """Whether the first token of a document has a label: it does if each token is classified, by itself.

    A language model has no prediction for a document's first token, so a collator masks its label. ``model`` may be a
    wrapper of a transformers model, or anything else, for which the answer is False.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return any(_is_a(module, PER_TOKEN) for module in modules if isinstance(module, PreTrainedModel))


def takes_next_token_loss(root: Any) -> bool:
    """Whether a model's ``loss_function`` is transformers' next-token loss, and not one that a user has set."""
    return root.loss_function is ForCausalLMLoss


def _is_a(model: nn.Module, ending: str) -> bool:
    """Whether a class of the model ends so; FSDP2 and users derive from transformers' classes under other names."""
    return any(parent.__name__.endswith(ending) for parent in type(model).__mro__)
