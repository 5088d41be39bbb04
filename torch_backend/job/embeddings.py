"""Embeddings of texts from pairs: the texts of a batch run as one packed row, and the others of a batch are negatives.

Pairs, tokenised -> :class:`PairCollator`, padded ids of all texts of a batch -> the encoder, whose padded calls run
packed (``unpad``) -> the mean of each text's hidden states -> :func:`contrastive_loss`. Mean pooling is what
sentence-transformers gives to a model that it did not write itself, so it reads the output as it was trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packing_core.errors import CapacityError, PackingError
from packing_core.extras import require

require("transformers", extra="hf")

from transformers import Trainer  # noqa: E402

COLUMNS = ("anchor", "positive", "negative")
SCALE = 20.0  # of cosines in the softmax, that of sentence-transformers' MultipleNegativesRankingLoss


def contrastive_loss(embeddings: Tensor, texts: int) -> Tensor:
    """Computes the mean cross-entropy of finding each anchor's positive among all positives and negatives of a batch.

    Source: van den Oord et al. 2018 (InfoNCE, arXiv:1807.03748), with cosines times :data:`SCALE` as logits.

    Args:
        embeddings: [texts * B, D]: all anchors, then all positives, then all negatives if there are any.
        texts: texts of an example, 2 or 3.

    Returns:
        A scalar.
    """
    normalised = F.normalize(embeddings.float(), dim=-1)
    anchors, others = normalised.tensor_split([len(normalised) // texts])
    logits = SCALE * anchors @ others.T
    return F.cross_entropy(logits, torch.arange(len(anchors), device=logits.device))


def mean_of_tokens(hidden: Tensor, mask: Tensor) -> Tensor:
    """Averages hidden states [B, S, D] over the tokens of a mask [B, S]; returns [B, D]."""
    weights = mask[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def tokenized(
    records: Sequence[Mapping[str, Any]], tokenizer: Any, *, longest: int, overflow: str
) -> list[dict[str, list[int]]]:
    """Tokenises the texts of each record; each has the columns of the first one.

    Args:
        records: with the columns ``anchor``, ``positive`` and, in all or none, ``negative``.
        tokenizer: of the model.
        longest: tokens that the model takes.
        overflow: what to do with a longer text: ``error``, ``truncate`` it, or ``drop`` its record.

    Raises:
        PackingError: some records have a negative and some have none.
        CapacityError: a text is too long.
    """
    columns = [name for name in COLUMNS if records[0].get(name) is not None]
    examples = []
    for number, record in enumerate(records):
        if (record.get("negative") is not None) != ("negative" in columns):
            has = "no" if "negative" in columns else "a"
            raise PackingError(
                f"record {number} has {has} negative, other than those before it: give all records one, or none"
            )
        cut = {"truncation": True, "max_length": longest} if overflow == "truncate" else {}
        texts = {name: list(tokenizer(record[name], **cut)["input_ids"]) for name in columns}
        most = max(map(len, texts.values()))
        if most <= longest:
            examples.append(texts)
        elif overflow == "error":
            raise CapacityError(
                f"record {number} has a text of {most:,} tokens and the model takes {longest:,}: pass --overflow "
                "truncate or drop"
            )
    return examples


class PairCollator:
    """Pads all texts of a batch together: anchors, then positives, then negatives.

    Args:
        tokenizer: of the model, which pads.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Returns ``input_ids`` and ``attention_mask`` int64 [texts * B, S]."""
        columns = [name for name in COLUMNS if name in features[0]]
        texts = [{"input_ids": feature[name]} for name in columns for feature in features]
        padded: dict[str, Tensor] = dict(self.tokenizer.pad(texts, return_tensors="pt", padding=True))
        return {name: padded[name] for name in ("input_ids", "attention_mask")}


class EmbeddingTrainer(Trainer):
    """A Trainer whose loss is :func:`contrastive_loss` over the texts of a batch.

    Args:
        texts: of an example, 2 or 3.
    """

    def __init__(self, *args: Any, texts: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.texts = texts

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Returns the loss of a batch, and the outputs of the model if they are asked for."""
        outputs = model(**inputs)
        embeddings = mean_of_tokens(outputs.last_hidden_state, inputs["attention_mask"])
        loss = contrastive_loss(embeddings, self.texts)
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> tuple[Any, None, None]:
        """Returns the loss of an evaluation batch."""
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            return self.compute_loss(model, inputs).detach(), None, None
