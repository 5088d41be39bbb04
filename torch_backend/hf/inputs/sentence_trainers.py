"""The trainers of sentence-transformers, and what of their losses is packed."""

from __future__ import annotations

from typing import Any

# whose losses call the model on each column of a batch
COLUMNS = "SentenceTransformerTrainer", "SparseEncoderTrainer", "MultiVectorEncoderTrainer"
PAIRS = "CrossEncoderTrainer"  # whose losses make the pairs that they call the model on


def transformers_in(model: Any) -> list[Any]:
    """Returns the modules of a model of sentence-transformers that run a transformers model."""
    from sentence_transformers.base.modules import Transformer

    return [module for module in model.modules() if isinstance(module, Transformer)]


def sentence_trainer(trainer: Any) -> str | None:
    """Returns which trainer of sentence-transformers this one is or derives from; None if it is another's."""
    for base in type(trainer).__mro__:
        if base.__module__.split(".")[0] == "sentence_transformers":
            return base.__name__
    return None
