"""Trainer features around a packed step: NEFTune noise, evaluation, data loader and a custom loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from packing_core.errors import KeywordError, LayoutError, PackingError, UnsupportedError, UnsupportedModelError
from tests.torch_backend.hf.test_document_heads import classifier
from tests.torch_backend.hf.test_encoders import encoder
from tests.torch_backend.models import error
from tests.torch_backend.trainers.test_enable_packing import enabled
from tests.torch_backend.trainers.test_replaced_collator import IDS, pads, plain
from tests.torch_backend.trainers.test_trainer import CAPACITY, arguments, datasets, llama, tiny_tokenizer
from torch_backend import StreamedRows, enable_packing, pack_dataset

FLAT = transformers.DataCollatorWithFlattening()
LABELS = [[token % 3 for token in ids] for ids in IDS]


# Noise.


def test_the_noise_of_neftune_follows_the_length_of_each_document(tmp_path: Any) -> None:
    built = enabled(plain(tmp_path, None, neftune_noise_alpha=5.0, max_steps=1), capacity=CAPACITY)
    embedding, batches, embedded = built.model.get_input_embeddings(), [], []
    weights = embedding.weight.detach().clone()
    collator = built.data_collator
    built.data_collator = lambda rows: batches.append(collator(rows)) or batches[-1]
    first = built.model.model.layers[0]
    hook = first.register_forward_pre_hook(lambda _, args: embedded.append(args[0].detach().clone()))
    built.train()
    hook.remove()
    batch = batches[0]
    noise = (embedded[0] - weights[batch["input_ids"]]).abs().flatten(0, 1).split(batch["packed_lengths"])
    assert len({len(document) for document in noise}) > 3
    for document in noise:
        largest = 5.0 / (len(document) * weights.shape[1]) ** 0.5
        assert 0.9 * largest < float(document.max()) <= largest * 1.0001
    ids = torch.tensor([IDS[0]])
    assert torch.equal(embedding.train()(ids), embedding.weight[ids]), "the noise ends with the training"


# Evaluation.


def with_evaluation(path: Any, model: Any, data: Any, collator: Any) -> Any:
    def metrics(prediction: Any) -> dict[str, Any]:
        return {"logits": np.asarray(prediction.predictions), "labels": np.asarray(prediction.label_ids)}

    args = arguments(transformers.TrainingArguments, path, per_device_eval_batch_size=7)
    options = {"data_collator": collator, "train_dataset": data, "eval_dataset": data, "compute_metrics": metrics}
    return transformers.Trainer(model, args, **options)


def generating(path: Any, collator: Any) -> Any:
    args = arguments(transformers.Seq2SeqTrainingArguments, path, predict_with_generate=True, generation_max_length=24)
    data = datasets.Dataset.from_dict({"input_ids": IDS, "labels": IDS, "attention_mask": [[1] * len(x) for x in IDS]})
    options = {"train_dataset": data, "eval_dataset": data.select(range(8)), "processing_class": tiny_tokenizer()}
    options["compute_metrics"] = lambda found: {"tokens": found.predictions, "labels": found.label_ids}
    return transformers.Seq2SeqTrainer(llama(), args, data_collator=collator, **options)


def test_an_evaluation_that_generates_is_the_one_without_packing(tmp_path: Any) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    stock, packed = (generating(tmp_path, transformers.DataCollatorForSeq2Seq(tokenizer)) for _ in range(2))
    enabled(packed, capacity=CAPACITY)
    assert "packed_lengths" in next(iter(packed.get_train_dataloader()))
    for found, right in (
        (packed.evaluate(), stock.evaluate()),
        (packed.predict(packed.eval_dataset).metrics, stock.predict(stock.eval_dataset).metrics),
    ):
        for name in [name for name in right if name.endswith(("_tokens", "_labels"))]:
            assert np.array_equal(found[name], right[name]), name
        (loss,) = (name for name in right if name.endswith("_loss"))
        assert found[f"{loss}_per_batch"] == right[loss] == pytest.approx(found[loss], rel=1e-6)  # of one batch


@pytest.mark.parametrize("what", ["tokens", "next token"])
def test_predictions_have_a_row_for_each_document(tmp_path: Any, what: str) -> None:
    tokens = what == "tokens"
    data = datasets.Dataset.from_dict({"input_ids": IDS[:20], "labels": LABELS[:20] if tokens else IDS[:20]})
    collator = transformers.DataCollatorForTokenClassification(tiny_tokenizer()) if tokens else pads

    def make() -> Any:
        return classifier("qwen3", auto=transformers.AutoModelForTokenClassification) if tokens else llama()

    stock = with_evaluation(tmp_path, make(), data, collator).predict(data)
    packed = enabled(with_evaluation(tmp_path, make(), data, collator), capacity=CAPACITY)
    found = packed.predict(data)
    assert found.predictions.shape == stock.predictions.shape and found.label_ids.shape == stock.label_ids.shape
    for number, ids in enumerate(IDS[:20]):
        pair = [torch.from_numpy(each.predictions[number, : len(ids)]) for each in (found, stock)]
        assert error(*pair) <= 1e-5
        assert (found.predictions[number, len(ids) :] == -100).all()
        skipped = 0 if tokens else 1
        assert (found.label_ids[number, skipped:] == stock.label_ids[number, skipped:]).all()
    if tokens:
        packed.compute_metrics = None
        unlabelled = packed.predict(data.remove_columns("labels"))
        assert unlabelled.label_ids is None
        assert error(torch.from_numpy(unlabelled.predictions), torch.from_numpy(found.predictions)) <= 1e-6


@pytest.mark.parametrize(("what", "by_batch"), [("next token", False), ("next token", True), ("class", True)])
def test_inputs_for_metrics_have_a_row_for_each_document(tmp_path: Any, what: str, by_batch: bool) -> None:
    model = llama() if what == "next token" else classifier("qwen3")
    labels = IDS[:20] if what == "next token" else [len(ids) % 3 for ids in IDS[:20]]
    data, found = datasets.Dataset.from_dict({"input_ids": IDS[:20], "labels": labels}), []
    collator = pads if what == "next token" else transformers.DataCollatorWithPadding(tiny_tokenizer())
    built = with_evaluation(tmp_path, model, data, collator)
    built.args.include_for_metrics, built.args.batch_eval_metrics = ["inputs"], by_batch

    def metrics(prediction: Any, compute_result: bool = True) -> dict[str, float]:
        rows = prediction.inputs["input_ids"] if by_batch else prediction.inputs
        found.extend([token for token in row if token != -100] for row in np.asarray(rows).tolist())
        assert len(rows) == len(prediction.predictions)
        if by_batch:
            assert torch.equal(prediction.inputs["attention_mask"].bool(), rows.as_subclass(torch.Tensor) != -100)
            assert prediction.inputs.keys() == {"input_ids", "labels", "position_ids", "attention_mask"}
        return {}

    built.compute_metrics = metrics
    enabled(built, capacity=CAPACITY).evaluate()
    assert found == IDS[:20]


# Counts of tokens.


@pytest.mark.parametrize(("with_tokenizer", "boundaries"), [(True, False), (True, True), (False, True)])
def test_tokens_seen_without_padding_are_those_of_documents(
    tmp_path: Any, with_tokenizer: bool, boundaries: bool
) -> None:
    documents = [ids[:-1] + [2] for ids in IDS]  # which end as tokenizers end them that pad with the same token
    data = datasets.Dataset.from_dict({"input_ids": documents, "labels": documents})
    counts = {"include_num_input_tokens_seen": "non_padding", "max_steps": -1}
    built = plain(tmp_path, FLAT if boundaries else None, data=data, **counts)
    built.args.num_train_epochs = 1
    if with_tokenizer:
        built.processing_class = SimpleNamespace(pad_token_id=2, save_pretrained=lambda folder: None)
    enabled(built, **({} if boundaries else {"capacity": CAPACITY})).train()
    assert built.state.num_input_tokens_seen == sum(map(len, documents))


# Data that train nothing.


@pytest.mark.parametrize("packed", [False, True])
def test_rows_that_fill_no_batch_and_are_dropped_are_refused_before_training(tmp_path: Any, packed: bool) -> None:
    options = {"per_device_train_batch_size": 4, "dataloader_drop_last": True}
    data = {"input_ids": IDS[:3], "labels": IDS[:3]}
    rows = pack_dataset(datasets.Dataset.from_dict(data), CAPACITY) if packed else data
    built = enabled(plain(tmp_path, None, data=rows, **options), **({} if packed else {"capacity": CAPACITY}))
    before = [weight.clone() for weight in built.model.parameters()]
    with pytest.raises(PackingError, match="fill no batch of 4 rows on each of 1 ranks, and dataloader_drop_last=True"):
        built.train()
    assert all(map(torch.equal, before, built.model.parameters()))


def test_what_trains_nothing_or_no_documents_is_refused(tmp_path: Any) -> None:
    ignored = datasets.Dataset.from_dict({"input_ids": IDS, "labels": [[-100] * len(ids) for ids in IDS]})
    for data, collator in ((ignored, None), (ignored.to_iterable_dataset(), None), (ignored, FLAT)):
        built = plain(tmp_path, collator, data=data, max_steps=20)
        with pytest.raises(LayoutError, match=r"no token of the (training data|first \d+ rows) is trained"):
            enabled(built, **({} if collator else {"capacity": CAPACITY})).train()
    masked = encoder("bert", transformers.AutoModelForMaskedLM)
    with pytest.raises(LayoutError, match="no labels, which BertForMaskedLM needs.*DataCollatorForLanguageModeling"):
        enabled(plain(tmp_path, None, masked, {"input_ids": IDS}), capacity=CAPACITY)
    answering = encoder("bert", transformers.AutoModelForQuestionAnswering)
    spans = {"input_ids": IDS, "start_positions": [0] * 100, "end_positions": [1] * 100}
    with pytest.raises(UnsupportedModelError, match="BertForQuestionAnswering .* predicts one span for each row"):
        enabled(plain(tmp_path, None, answering, spans), capacity=CAPACITY)
    empty = datasets.Dataset.from_dict({"input_ids": []})
    with pytest.raises(PackingError, match="neither a train_dataset nor an eval_dataset with examples"):
        enabled(plain(tmp_path, None, data=empty), capacity=CAPACITY)
    with pytest.raises(UnsupportedError, match="predict_with_generate=True continues each example .* pass a data_coll"):
        enabled(generating(tmp_path, FLAT))


# Data loaders.


class OwnLoader(transformers.Trainer):
    """Makes its batches itself."""

    collate: Any = staticmethod(pads)

    def get_train_dataloader(self) -> Any:
        collate = self.collate or self.data_collator
        data = self.train_dataset.select_columns(["input_ids", "labels"])
        return self.accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=4, collate_fn=collate))


def test_a_data_loader_that_pads_is_not_taken_for_one_that_packs(tmp_path: Any) -> None:
    built = enabled(plain(tmp_path, pads, kind=OwnLoader))
    with pytest.raises(PackingError, match="OwnLoader.get_train_dataloader collates by pads, whose batches are not"):
        built.train()


def test_a_data_loader_that_asks_the_trainer_for_its_collator_packs(tmp_path: Any) -> None:
    built = enabled(plain(tmp_path, pads, kind=type("Asks", (OwnLoader,), {"collate": None})))
    assert enabled(built) is built
    built.train()
    assert built.state.global_step == 3


@pytest.mark.parametrize("capacity", [CAPACITY, None])
def test_a_collator_that_is_exchanged_afterwards_is_refused(tmp_path: Any, capacity: int | None) -> None:
    """Both where rows are packed ahead, and where the collator packed each batch."""
    built = plain(tmp_path, pads if capacity else FLAT)
    enabled(built, capacity=capacity)
    built.data_collator = pads
    with pytest.raises(PackingError, match=r"pads makes no packed batches.*call enable_packing\(trainer\) again"):
        built.train()
    enabled(built, capacity=CAPACITY).train()


# Options.


def test_unknown_options_name_the_right_ones(tmp_path: Any) -> None:
    data = datasets.Dataset.from_dict({"input_ids": IDS})
    for call in (
        lambda: enable_packing(plain(tmp_path, None), max_length=8),
        lambda: pack_dataset(data, max_seq_length=8),
        lambda: StreamedRows(IDS, max_length=8),
    ):
        with pytest.raises(KeywordError, match=r"^\w+\(\) has no argument 'max_\w*length': pass capacity=$"):
            call()
    with pytest.raises(KeywordError, match=r"pack_dataset\(\) has no argument 'nonsense'"):
        pack_dataset(data, 32, nonsense=1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([{"input_ids": [5, 6]}], r"this is a list: convert it by datasets.Dataset.from_list"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_dict({"input_ids": IDS})}), "choose one split"),
        (datasets.Dataset.from_dict({"input_ids": IDS}).to_iterable_dataset(), "use crosspack.stream"),
        (datasets.Dataset.from_dict({"input_ids": []}), "the dataset is empty"),
    ],
)
def test_pack_dataset_says_what_it_takes(data: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        pack_dataset(data, 32)
