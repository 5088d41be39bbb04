"""enable_packing with sentence-transformers' trainers: losses and gradients are those of its padded columns."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import torch_backend
from packing_core.errors import LayoutError, PackingError, UnsupportedError, UnsupportedModelError
from tests.torch_backend.graphs import compiled as compiled
from tests.torch_backend.graphs import graphs as graphs
from tests.torch_backend.models import error
from tests.torch_backend.sentence_trainers import (
    FAMILIES,
    LOSSES,
    PAIRS,
    TOLERANCE,
    TRIPLETS,
    Step,
    arguments,
    assert_same_step,
    embedder,
    embedding_trainer,
    folder,
    packed,
    rows,
    text,
    tokenizer,
)
from tests.torch_backend.steps.test_packed_calls import possible as possible
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.patch import state_of
from torch_backend.steps.dynamic_compile import COMPILED, RECORDED
from torch_backend.trainers.enable_packing import disable_packing, enable_packing

st = pytest.importorskip("sentence_transformers", reason="the trainers are those of sentence-transformers")
datasets = pytest.importorskip("datasets", reason="trainers take their data as datasets")
peft = pytest.importorskip("peft", reason="adapters are PEFT's")

from sentence_transformers.base.losses import column_merging_disabled  # noqa: E402
from sentence_transformers.base.modules import Router, Transformer  # noqa: E402
from sentence_transformers.cross_encoder import losses as pair_losses  # noqa: E402
from sentence_transformers.sentence_transformer import evaluation, losses, modules  # noqa: E402
from sentence_transformers.sparse_encoder import losses as sparse_losses  # noqa: E402
from sentence_transformers.sparse_encoder.modules import SpladePooling  # noqa: E402


@pytest.mark.parametrize("name", LOSSES)
def test_losses_call_the_model_once_for_all_columns(tmp_path: Any, name: str) -> None:
    loss, data, calls = LOSSES[name]
    ours, theirs = (embedding_trainer(tmp_path, embedder(tmp_path), loss, data()) for _ in range(2))
    for each in (ours, theirs) if name == "layers" else ():
        each.model[0].model.config.output_hidden_states = True
    assert_same_step(ours, theirs, calls)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_that_of_padded_columns(tmp_path: Any, family: str) -> None:
    def trainer() -> Any:
        loss = losses.MultipleNegativesRankingLoss
        options = {"eval_dataset": TRIPLETS(count=6), "gradient_accumulation_steps": 2}
        return embedding_trainer(tmp_path, embedder(tmp_path, family), loss, TRIPLETS(count=30), **options)

    ours, theirs = packed(trainer()), trainer()
    for each in (ours, theirs):
        each.train()
    got, want = ([log["loss"] for log in t.state.log_history if "loss" in log] for t in (ours, theirs))
    assert len(got) == 3 and got == pytest.approx(want, rel=1e-6)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-7)
    assert "3 of the last batch ran as one packed row" in str(torch_backend.explain(ours))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "lasttoken", "weightedmean", ("cls", "mean")])
def test_pooling_reads_what_it_read_and_no_prompt(tmp_path: Any, pooling: Any, side: str) -> None:
    prompts = {"anchor": "w1 w2 w3 ", "positive": "w4 "}
    ours, theirs = (
        embedding_trainer(
            tmp_path,
            embedder(tmp_path, "modernbert", pooling, side=side),
            losses.TripletLoss,
            TRIPLETS(),
            prompts=prompts,
        )
        for _ in range(2)
    )
    # Rotary angles are float32 in either, and those of left padding are of other positions.
    assert_same_step(ours, theirs, tolerance=1e-6 if side == "left" else TOLERANCE)


def reranker(path: Any, loss: Any, data: Any, family: str = "xlm-roberta") -> Any:
    where = folder(path, family, transformers.AutoModelForSequenceClassification)
    model = st.CrossEncoder(where, num_labels=1).double()
    return st.CrossEncoderTrainer(model, arguments(st.CrossEncoderTrainingArguments, path), data, loss=loss(model))


def lists(count: int = 6) -> Any:
    rng = np.random.default_rng(1)
    of = [{"query": text(rng), "docs": [text(rng) for _ in range(n)], "labels": [1] + [0] * (n - 1)} for n in (3, 5, 2)]
    return datasets.Dataset.from_list(of * (count // 3))


PAIR_LOSSES = {
    "binary": (pair_losses.BinaryCrossEntropyLoss, partial(PAIRS, label=lambda rng: float(rng.integers(2)))),
    "list net": (pair_losses.ListNetLoss, lists),
    "lambda": (pair_losses.LambdaLoss, lists),
    "negatives": (partial(pair_losses.MultipleNegativesRankingLoss, num_negatives=2), partial(rows, "query", "answer")),
}


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_rerankers_score_pairs_and_lists(tmp_path: Any, name: str) -> None:
    loss, data = PAIR_LOSSES[name]
    for family in ("xlm-roberta", "modernbert") if name == "lambda" else ("bert",):
        ours, theirs = (reranker(tmp_path, loss, data(), family) for _ in range(2))
        assert_same_step(ours, theirs, None)
        pairs = [("w1 w2", "w3"), ("w4", "w5 w6 w7 w8 w9")]
        assert np.allclose(ours.model.predict(pairs), theirs.model.predict(pairs), rtol=1e-7)


def splade(path: Any) -> Any:
    transformer = Transformer(folder(path, "bert", transformers.AutoModelForMaskedLM), transformer_task="fill-mask")
    return st.SparseEncoder(modules=[transformer, SpladePooling("max")]).double()


@pytest.mark.parametrize("cached", [False, True])
def test_sparse_encoders_and_their_regulariser(tmp_path: Any, cached: bool) -> None:
    def trainer() -> Any:
        model = splade(tmp_path)
        kind, more = (
            (sparse_losses.CachedSpladeLoss, {"mini_batch_size": 3}) if cached else (sparse_losses.SpladeLoss, {})
        )
        inner = sparse_losses.SparseMultipleNegativesRankingLoss(model)
        loss = kind(model, inner, document_regularizer_weight=0.03, query_regularizer_weight=0.05, **more)
        args = arguments(st.SparseEncoderTrainingArguments, tmp_path)
        return st.SparseEncoderTrainer(model, args, TRIPLETS(), loss=loss)

    ours, theirs = trainer(), trainer()
    assert_same_step(ours, theirs, None if cached else 1)
    texts = ["w1 w2 w3", "w4"]
    assert torch.allclose(ours.model.encode(texts).to_dense(), theirs.model.encode(texts).to_dense())


def test_two_encoders_behind_a_router(tmp_path: Any) -> None:
    def trainer() -> Any:
        ways = {
            name: [*embedder(tmp_path / name, family).children()][:2]
            for name, family in (("query", "bert"), ("document", "modernbert"))
        }
        width = min(way[0].get_embedding_dimension() for way in ways.values())
        for way in ways.values():
            way.append(modules.Dense(way[0].get_embedding_dimension(), width, init_weight=torch.eye(width)))
        model = st.SentenceTransformer(modules=[Router.for_query_document(ways["query"], ways["document"])]).double()
        mapping = {"anchor": "query", "positive": "document", "negative": "document"}
        return embedding_trainer(tmp_path, model, losses.TripletLoss, TRIPLETS(), router_mapping=mapping)

    ours, theirs = trainer(), trainer()
    for each in (ours, theirs):
        torch.manual_seed(1)
        for p in each.model.parameters():
            nn.init.normal_(p, std=0.05)
    assert_same_step(ours, theirs, 2)  # one for each encoder
    report = torch_backend.audit(ours)
    assert report.verdict == "exact" and report.rows == 2, str(report)
    encoders = [module.model for module in ours.model.modules() if isinstance(module, Transformer)]
    assert [state_of(each) is not None for each in encoders] == [True, True]
    disable_packing(ours)
    assert [state_of(each) for each in encoders] == [None, None]


def test_adapters_on_the_encoder(tmp_path: Any) -> None:
    def trainer() -> Any:
        model = embedder(tmp_path)
        model.add_adapter(peft.LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights=False))
        return embedding_trainer(tmp_path, model.double(), losses.MultipleNegativesRankingLoss, TRIPLETS())

    torch.manual_seed(5)
    ours = trainer()
    torch.manual_seed(5)
    theirs = trainer()
    theirs.model.load_state_dict(ours.model.state_dict())
    assert_same_step(ours, theirs)
    assert all("lora" in name for name in Step(ours).gradients)


def test_several_datasets_with_losses_and_samplers_of_their_own(tmp_path: Any) -> None:
    def trainer() -> Any:
        data = datasets.DatasetDict(triplets=TRIPLETS(count=12), pairs=PAIRS(count=12))
        kinds = {"triplets": losses.MultipleNegativesRankingLoss, "pairs": losses.CoSENTLoss}
        options = {"batch_sampler": "no_duplicates", "multi_dataset_batch_sampler": "round_robin", "max_steps": 4}
        return embedding_trainer(tmp_path, embedder(tmp_path), kinds, data, eval_dataset=data, **options)

    ours, theirs = packed(trainer()), trainer()
    for each in (ours, theirs):
        each.train()
    got, want = ([log["loss"] for log in t.state.log_history if "loss" in log] for t in (ours, theirs))
    assert len(got) == 4 and got == pytest.approx(want, rel=1e-6)
    found, truth = ours.evaluate(), theirs.evaluate()
    for name in ("eval_triplets_loss", "eval_pairs_loss"):
        assert found[name] == pytest.approx(truth[name], rel=1e-7), name


def test_evaluators_and_encode_run_packed(tmp_path: Any) -> None:
    texts = [text(np.random.default_rng(i), high=20) for i in range(8)]

    def trainer() -> Any:
        judge = evaluation.EmbeddingSimilarityEvaluator(texts[:4], texts[4:], [0.1, 0.9, 0.4, 0.6])
        return embedding_trainer(tmp_path, embedder(tmp_path), losses.TripletLoss, TRIPLETS(), evaluator=judge)

    ours, theirs = packed(trainer()), trainer()
    found, truth = ours.evaluate(), theirs.evaluate()
    assert found["eval_spearman_cosine"] == pytest.approx(truth["eval_spearman_cosine"])
    assert found["eval_pearson_cosine"] == pytest.approx(truth["eval_pearson_cosine"])
    assert np.allclose(ours.model.encode(["", "w1", "w2 w3"]), theirs.model.encode(["", "w1", "w2 w3"]), atol=1e-9)
    assert state_of(causal_lm(ours.model)).choices  # it did run packed
    ours.model.save_pretrained(str(tmp_path / "saved"))
    again = st.SentenceTransformer(str(tmp_path / "saved")).double()
    assert np.allclose(again.encode(texts), theirs.model.encode(texts), atol=1e-6)


@pytest.mark.parametrize("texts", [("", "w1"), ("w1", "w2"), ("w1 w2 w3", "w4 w5 w6")], ids=["empty", "one", "equal"])
def test_empty_texts_texts_of_one_token_and_equal_lengths(tmp_path: Any, texts: tuple[str, str]) -> None:
    data = datasets.Dataset.from_list([{"anchor": texts[0], "positive": f"{texts[1]} w{i}"} for i in range(4)])
    loss = losses.MultipleNegativesRankingLoss
    assert_same_step(*(embedding_trainer(tmp_path, embedder(tmp_path), loss, data) for _ in range(2)))
    decoder = packed(embedding_trainer(tmp_path, embedder(tmp_path, "qwen3"), loss, data))
    if "" not in texts:
        assert math.isfinite(float(Step(decoder).loss))
    else:
        with pytest.raises(LayoutError, match="row 0 of the batch has no token: leave empty documents out"):
            Step(decoder)


def test_a_stream_of_texts(tmp_path: Any) -> None:
    loss = losses.MultipleNegativesRankingLoss
    data = [TRIPLETS().to_iterable_dataset() for _ in range(2)]
    ours, theirs = (embedding_trainer(tmp_path, embedder(tmp_path), loss, each) for each in data)
    assert_same_step(ours, theirs)


def test_what_cannot_be_packed_is_refused_by_name_and_changes_nothing(tmp_path: Any) -> None:
    static = st.SentenceTransformer(modules=[modules.StaticEmbedding(tokenizer().backend_tokenizer, embedding_dim=8)])
    trainer = embedding_trainer(tmp_path, static, losses.MultipleNegativesRankingLoss, TRIPLETS())
    with pytest.raises(UnsupportedModelError, match="runs no transformers model, so nothing in it is padded"):
        enable_packing(trainer)
    model = embedder(tmp_path)
    width = model[0].get_embedding_dimension()
    convolved = st.SentenceTransformer(modules=[model[0], modules.CNN(width, width, [3]), modules.Pooling(width)])
    with pytest.raises(UnsupportedModelError, match="convolutions over tokens, which read padding too"):
        enable_packing(embedding_trainer(tmp_path, convolved, losses.TripletLoss, TRIPLETS()))
    trainer = embedding_trainer(tmp_path, model, losses.TripletLoss, TRIPLETS())
    with pytest.raises(PackingError, match="texts of each batch into one row of their length, so capacity=64 has no"):
        enable_packing(trainer, 64)
    with pytest.raises(UnsupportedError, match="shares no prefixes"):
        enable_packing(trainer, share_prefix=True)
    args = arguments(st.SentenceTransformerTrainingArguments, tmp_path)
    made = st.SentenceTransformerTrainer(model_init=lambda: embedder(tmp_path), args=args, train_dataset=TRIPLETS())
    with pytest.raises(UnsupportedError, match="makes another model by model_init"):
        enable_packing(made)
    assert state_of(model[0].model) is None and "forward" not in vars(model[0])
    with pytest.raises(UnsupportedError, match="nobody tried packing in ThirdTrainer of sentence-transformers"):
        enable_packing(type("ThirdTrainer", (), {"__module__": "sentence_transformers"})())


def test_disabling_gives_an_audited_trainer_back(tmp_path: Any) -> None:
    trainer = embedding_trainer(tmp_path, embedder(tmp_path).float(), losses.TripletLoss, TRIPLETS())
    before = dict(vars(trainer)), dict(vars(trainer.model[0])), vars(trainer.accelerator.dataloader_config).copy()
    enable_packing(trainer)
    assert torch_backend.audit(trainer).verdict == torch_backend.audit(trainer.model).verdict == "exact"
    disable_packing(trainer)
    assert (vars(trainer), vars(trainer.model[0]), vars(trainer.accelerator.dataloader_config)) == before
    assert state_of(trainer.model[0].model) is None


def test_a_column_that_a_loss_calls_without_gradients_runs_by_itself(tmp_path: Any) -> None:
    class Frozen(nn.Module):
        """The positives are targets."""

        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, features: Any, labels: Any) -> Any:
            with torch.no_grad():
                targets = self.model(features[1])["sentence_embedding"]
            anchors = self.model(features[0])["sentence_embedding"]
            again = self.model(dict(features[0]))["sentence_embedding"]
            return (anchors - targets).square().sum() + (again * targets).sum()

    assert_same_step(*(embedding_trainer(tmp_path, embedder(tmp_path), Frozen, PAIRS()) for _ in range(2)), calls=None)


def test_the_rows_that_the_library_makes_under_flash_attention_are_padded_columns_again(tmp_path: Any) -> None:
    loss = losses.MultipleNegativesRankingLoss
    ours, theirs = (embedding_trainer(tmp_path, embedder(tmp_path), loss, TRIPLETS()) for _ in range(2))
    ours.model[0].data_collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    ours.model[0].can_flatten_inputs = True
    assert_same_step(ours, theirs)
    disable_packing(ours)
    assert ours.model[0].can_flatten_inputs


@pytest.mark.parametrize("options", [{"memory": "full"}, {"fast": False}])
def test_memory_and_the_plain_step(tmp_path: Any, options: Any) -> None:
    loss = losses.MultipleNegativesRankingLoss
    ours, theirs = (embedding_trainer(tmp_path, embedder(tmp_path), loss, TRIPLETS()) for _ in range(2))
    assert_same_step(packed(ours, **options), theirs)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"])
def test_layers_are_not_compiled_where_a_cached_loss_repeats_dropout(tmp_path: Any, kind: str, dropout: float) -> None:
    model = embedder(tmp_path)
    model[0].model.config.hidden_dropout_prob = dropout
    losses_of_data = {"some": getattr(losses, kind)}
    trainer = packed(embedding_trainer(tmp_path, model, losses_of_data, datasets.DatasetDict(some=TRIPLETS())))
    repeats = kind.startswith("Cached") and dropout > 0
    assert ("a cached loss repeats the dropout" in str(torch_backend.explain(trainer))) == repeats


@pytest.mark.parametrize("loss", ["multiple negatives", "cached", "gist"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_compiled_layers_and_graphs_train_as_plain_ones(
    compiled: Any, possible: None, tmp_path: Any, family: str, loss: str
) -> None:
    def trainer() -> Any:
        return embedding_trainer(tmp_path, embedder(tmp_path, family), LOSSES[loss][0], TRIPLETS(count=40), max_steps=8)

    ours, theirs = packed(trainer()), packed(trainer(), fast=False)
    for each in (ours, theirs):
        each.train()
    got, want = ([log["loss"] for log in t.state.log_history if "loss" in log] for t in (ours, theirs))
    assert len(got) == 8 and got == pytest.approx(want, rel=1e-6)
    parts = ours.packed_step.parts
    assert parts["layers"] == COMPILED and compiled.calls > 0
    assert parts["graph"] == RECORDED and compiled.replayed > 0


def test_cached_losses_repeat_dropout_on_rows(tmp_path: Any) -> None:
    def trainer(loss: Any) -> Any:
        model = embedder(tmp_path)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
        return embedding_trainer(tmp_path, model, loss, TRIPLETS())

    cached = packed(trainer(partial(losses.CachedMultipleNegativesRankingLoss, mini_batch_size=4)))
    plain = trainer(losses.MultipleNegativesRankingLoss)
    torch_backend.unpad(plain.model, verify=False)
    with column_merging_disabled():  # the same rows, one for each column
        want = Step(plain)
    got = Step(cached)
    assert error(got.loss, want.loss) <= TOLERANCE
    scale = max(float(g.abs().max()) for g in want.gradients.values())
    for name, gradient in want.gradients.items():
        assert float((got.gradients[name] - gradient).abs().max()) <= TOLERANCE * scale, name


def test_holes_in_a_column_are_refused(tmp_path: Any, caplog: Any) -> None:
    trainer = packed(embedding_trainer(tmp_path, embedder(tmp_path), losses.TripletLoss, TRIPLETS()))
    collate = trainer.data_collator.collator

    def with_hole(features: Any) -> Any:
        batch = collate(features)
        batch["anchor_attention_mask"][:, 1] = 0
        return batch

    trainer.data_collator.collator = with_hole
    with caplog.at_level(logging.ERROR), pytest.raises(LayoutError, match="leaves out tokens inside row"):
        Step(trainer)
