"""Trainers of sentence-transformers with tiny models, and a step of each against padded columns."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.torch_backend.hf.test_encoders import encoder
from tests.torch_backend.models import error, gradients
from torch_backend.trainers.enable_packing import enable_packing

st = pytest.importorskip("sentence_transformers", reason="the trainers are those of sentence-transformers")
datasets = pytest.importorskip("datasets", reason="trainers take their data as datasets")

from sentence_transformers.base.modules import Transformer  # noqa: E402
from sentence_transformers.sentence_transformer import losses, modules  # noqa: E402

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{i}" for i in range(55)]
FAMILIES = ("bert", "roberta", "xlm-roberta", "modernbert", "qwen3")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOLERANCE = 1e-9  # in float64


def tokenizer(*, marks: bool = True, side: str = "right") -> Any:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if marks:
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, padding_side=side, model_max_length=48, **names
    )


def folder(path: Any, family: str = "bert", auto: Any = transformers.AutoModel, **options: Any) -> str:
    decoder = family == "qwen3"
    changes = {"pad_token_id": 0} | ({} if decoder or family == "modernbert" else NO_DROPOUT)
    if auto is transformers.AutoModelForSequenceClassification:
        changes |= {"num_labels": 1}
    torch.manual_seed(0)
    where = str(path / family)
    if dist.is_initialized():  # the test wrote it: of ranks, not all can
        return where
    encoder(family, auto, **changes).save_pretrained(where)
    tokenizer(marks=not decoder, **{"side": "left"} if decoder else {}, **options).save_pretrained(where)
    return where


def embedder(path: Any, family: str = "bert", pooling: Any = None, *, side: str | None = None) -> Any:
    transformer = Transformer(folder(path, family))
    if side is not None:
        transformer.tokenizer.padding_side = side
    pooling = pooling or ("lasttoken" if family == "qwen3" else "mean")
    width = transformer.get_embedding_dimension()
    pool = modules.Pooling(width, pooling, include_prompt=side is None)
    return st.SentenceTransformer(modules=[transformer, pool, modules.Normalize()]).double()


def text(rng: Any, low: int = 1, high: int = 30) -> str:
    return " ".join(rng.choice(WORDS, rng.integers(low, high)))


def rows(*columns: str, count: int = 10, label: Any = None) -> Any:
    rng = np.random.default_rng(0)
    found: list[Any] = [{name: text(rng, high=4 + 8 * i) for i, name in enumerate(columns)} for _ in range(count)]
    for each in found if label is not None else ():
        each["label"] = label(rng)
    return datasets.Dataset.from_list(found)


TRIPLETS = partial(rows, "anchor", "positive", "negative")
PAIRS = partial(rows, "first", "second", label=lambda rng: float(rng.random()))
MARGINS = partial(TRIPLETS, label=lambda rng: float(rng.random()))


def arguments(kind: Any, path: Any, **options: Any) -> Any:
    given = {"per_device_train_batch_size": 4, "max_steps": 3, "learning_rate": 1e-3, "report_to": [], "seed": 3}
    return kind(str(path / "run"), save_strategy="no", logging_steps=1, disable_tqdm=True, **{**given, **options})


def embedding_trainer(path: Any, model: Any, loss: Any, data: Any, **options: Any) -> Any:
    own = {name: options.pop(name) for name in ("eval_dataset", "evaluator") if name in options}
    args = arguments(st.SentenceTransformerTrainingArguments, path, **options)
    loss = {name: each(model) for name, each in loss.items()} if isinstance(loss, dict) else loss(model)
    return st.SentenceTransformerTrainer(model, args, data, loss=loss, **own)


class Step:
    """Loss and gradients of a trainer's first batch, and the model's calls in it."""

    def __init__(self, trainer: Any) -> None:
        calls: list[Any] = []
        encoders = [module.model for module in trainer.model.modules() if isinstance(module, Transformer)]
        handles = [
            each.get_input_embeddings().register_forward_hook(lambda _, args, __: calls.append(args[0].shape))
            for each in encoders
        ]
        trainer.model.train()
        torch.manual_seed(0)
        random.seed(0)  # of the layers that AdaptiveLayerLoss draws
        batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        loss = trainer.compute_loss(trainer.model, batch)
        self.gradients, self.loss, self.calls = gradients(trainer.model, loss), loss.detach(), calls
        for handle in handles:
            handle.remove()


def packed(trainer: Any, **options: Any) -> Any:
    return enable_packing(trainer, verify=False, **options)


def assert_same_step(ours: Any, theirs: Any, calls: int | None = 1, tolerance: float = TOLERANCE) -> None:
    got, want = Step(ours if hasattr(ours, "packed_step") else packed(ours)), Step(theirs)
    assert error(got.loss, want.loss) <= tolerance
    scale = max(float(g.abs().max()) for g in want.gradients.values())
    assert got.gradients.keys() == want.gradients.keys() and scale > 0
    for name, gradient in want.gradients.items():
        assert float((got.gradients[name] - gradient).abs().max()) <= tolerance * scale, name
    assert all(shape[0] == 1 for shape in got.calls)  # rows without padding
    assert calls is None or len(got.calls) == calls <= len(want.calls)


LOSSES = {
    "multiple negatives": (losses.MultipleNegativesRankingLoss, TRIPLETS, 1),
    "cached": (partial(losses.CachedMultipleNegativesRankingLoss, mini_batch_size=2), TRIPLETS, None),
    "gist": (lambda model: losses.GISTEmbedLoss(model, model), TRIPLETS, None),
    "cosent": (losses.CoSENTLoss, PAIRS, 1),
    "cosine": (losses.CosineSimilarityLoss, PAIRS, 1),
    "matryoshka": (
        lambda model: losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [16, 8]),
        TRIPLETS,
        1,
    ),
    "layers": (
        lambda model: losses.AdaptiveLayerLoss(model, losses.MultipleNegativesRankingLoss(model)),
        TRIPLETS,
        1,
    ),
    "triplet": (losses.TripletLoss, TRIPLETS, 1),
    "margins": (losses.MarginMSELoss, MARGINS, 1),
}
