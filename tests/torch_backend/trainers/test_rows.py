"""enable_packing packs the whole training set: which rows a trainer is given, on which rank, in which epoch."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from packing_core import Cost, plan
from packing_core.errors import CapacityError, PackingError, UnsupportedError
from tests.processes import limited
from tests.torch_backend.row_trainers import build, enabled, held, lengths_of, numbered
from tests.torch_backend.trainers.test_trainer import CAPACITY, datasets, differences, documents, llama, sft
from torch_backend import PackedCollator, pack_dataset
from torch_backend.trainers.dataloader import rows_of
from torch_backend.trainers.epoch_rows import EpochRows, RowBatches


@pytest.mark.parametrize("size", [1, 8])
def test_rows_are_full_whatever_the_batch_size(tmp_path, size) -> None:
    """Documents of 200 tokens and less fill 14% of rows of 2,048 if only the 8 of a batch are packed."""
    data = numbered(400, 200)
    batches = list(enabled(build(tmp_path, data, size=size), 2048).get_train_dataloader())
    slots = sum(batch["input_ids"].numel() for batch in batches)
    assert sum(length for _, length in held(batches)) / slots > 0.97
    assert sum((batch["labels"] != -100).sum() for batch in batches) / slots > 0.95


def test_every_epoch_holds_every_document_once_beside_other_neighbours(tmp_path) -> None:
    data = numbered()
    trainer = enabled(build(tmp_path, data))
    loader = trainer.get_train_dataloader()
    epochs = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        epochs.append(held(loader))
        assert sorted(epochs[-1]) == lengths_of(data)
        assert len(loader) == 10, "20 rows of 40 tokens, two at a time"
    assert epochs[0] != epochs[1] != epochs[2]
    again = enabled(build(tmp_path, data)).get_train_dataloader()
    assert held(again) == epochs[0]
    assert held(enabled(build(tmp_path, data, seed=1)).get_train_dataloader()) != epochs[0]
    assert held(enabled(build(tmp_path, data, data_seed=42, seed=1)).get_train_dataloader()) == epochs[0]


def test_steps_and_epochs_count_rows(tmp_path) -> None:
    trainer = enabled(build(tmp_path, numbered(), size=3, max_steps=-1, num_train_epochs=2))
    trainer.train()
    assert trainer.state.max_steps == trainer.state.global_step == 2 * 4, "20 rows are 7 batches, two a step"
    assert trainer.state.epoch == 2
    assert trainer.num_examples(trainer.get_train_dataloader()) == 20
    dropping = enabled(build(tmp_path, numbered(), size=3, dataloader_drop_last=True))
    assert len(dropping.get_train_dataloader()) == len(list(dropping.get_train_dataloader())) == 6


def test_sequential_sampling_alone_keeps_the_order_of_the_documents(tmp_path) -> None:
    for strategy in ("group_by_length", "batch_rebalance", "random", "sequential"):
        trainer = enabled(build(tmp_path, numbered(), train_sampling_strategy=strategy))
        found = held(trainer.get_train_dataloader())
        assert sorted(found) == lengths_of(numbered())
        assert (found == lengths_of(numbered())) == (strategy == "sequential")


@pytest.mark.parametrize("order", ["random", "curriculum"])
def test_a_run_that_resumes_inside_an_epoch_equals_one_that_was_not_stopped(tmp_path, order) -> None:
    def run(folder: Path, resume: str | None = None) -> torch.nn.Module:
        options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 7}
        trainer = build(folder, documents(60), lr_scheduler_type="linear", **options)
        enabled(trainer, order=order)
        assert order == "curriculum" or len(trainer.get_train_dataloader()) == 9, (
            "five steps an epoch: step 7 is inside the second one"
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model

    whole = run(tmp_path)
    assert differences(whole, run(tmp_path, str(tmp_path / "checkpoint-7"))) == 0.0


def test_a_run_goes_on_with_another_number_of_ranks_between_epochs_alone(tmp_path) -> None:
    """Rows are dealt by the number of ranks, so inside an epoch some documents would be lost and others doubled."""

    def resumed(step: int, **options) -> None:
        folder = tmp_path / f"checkpoint-{step}"
        state = json.loads((folder / "trainer_state.json").read_text())
        note = state["stateful_callbacks"]["crosspack.rows"]["attributes"]
        assert note["ranks"] == 1
        note |= {"ranks": 2, "rows": two}
        (folder / "trainer_state.json").write_text(json.dumps(state))
        enabled(build(tmp_path, documents(60), max_steps=8, **options)).train(resume_from_checkpoint=str(folder))

    def rows(ranks: int, **options) -> str:
        made = EpochRows(documents(60), ["input_ids", "labels"], CAPACITY, **options)
        made.ranks = ranks
        return made.identity

    two = rows(2)
    assert two != rows(1)
    assert rows(2, in_order=True) != rows(1, in_order=True), "two ranks cut a row in two, so that each has eleven"
    enabled(build(tmp_path, documents(60), max_steps=7, save_strategy="steps", save_steps=1)).train()
    with pytest.raises(UnsupportedError, match="2 steps into an epoch whose rows were dealt to 2 ranks, and 1 rank"):
        resumed(7)
    resumed(5)


def test_rows_of_equal_cost_are_dealt_to_the_ranks_and_refused_where_they_have_no_effect(tmp_path) -> None:
    lengths = np.random.default_rng(0).lognormal(2, 1.2, 300).clip(2, CAPACITY).astype(int).tolist()
    data = datasets.Dataset.from_dict({"input_ids": [[d % 90 + 3] * n for d, n in enumerate(lengths)]})

    def rows(**options):
        made = rows_of(enabled(build(tmp_path, data), **options))
        made.ranks, made.rule = 8, replace(made.rule, cost=Cost(tokens=1, squares=0.1))
        return made.dealt(0)

    mixed, even = rows(), rows(equal_cost=True)
    assert even.imbalance < 0.99 * mixed.imbalance and even.plan.n_rows == mixed.plan.n_rows
    with pytest.raises(PackingError, match="train_sampling_strategy=.*, so equal_cost=True has no effect"):
        enabled(build(tmp_path, data, train_sampling_strategy="sequential"), equal_cost=True)
    with pytest.raises(PackingError, match='leave it or order="curriculum" out'):
        enabled(build(tmp_path, data), equal_cost=True, order="curriculum")


# What is said at the call.


def test_a_document_longer_than_the_capacity_is_an_error_at_the_call(tmp_path) -> None:
    data = datasets.Dataset.from_dict({"input_ids": [[5] * 8] * 50 + [[6] * 41]})
    trainer = build(tmp_path, data)
    with pytest.raises(CapacityError, match='document 50 has 41 tokens and capacity is 40: pass overflow="split"'):
        enabled(trainer)
    assert trainer.model.config._attn_implementation == "sdpa", "a refused trainer keeps the model that it had"
    for overflow, tokens in (("split", 441), ("truncate", 440), ("drop", 400)):
        batches = list(enabled(trainer, overflow=overflow).get_train_dataloader())
        assert sum(length for _, length in held(batches)) == tokens


def test_without_a_capacity_the_trainer_or_the_model_gives_it(tmp_path, caplog) -> None:
    trainer = enabled(build(tmp_path, numbered()), None)
    assert "rows of 2048 tokens, after LlamaConfig.max_position_embeddings" in caplog.text
    assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape[1] == 2048
    trainer = enabled(sft(llama(), tmp_path, documents(), max_length=48, bf16=False), None)
    assert "rows of 48 tokens, after SFTConfig.max_length" in caplog.text
    assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape[1] == 48


def test_what_becomes_of_the_steps_is_told_once(tmp_path, caplog) -> None:
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 3e-5}
    enabled(build(tmp_path, [{"input_ids": [5] * 10}] * 96, **options), 60)
    assert [record.getMessage() for record in caplog.records] == [
        "enable_packing: 96 documents, in 16 rows of 60 tokens, 100.0% full; a step of 8 rows has 48 documents and had "
        "8, an epoch has 2 steps and had 12. The learning rate stays 3e-05: raise it for the larger steps, or take "
        "per_device_train_batch_size=1 and gradient_accumulation_steps=1, the nearest to the steps before"
    ]
    caplog.clear()
    enabled(build(tmp_path, [{"input_ids": [5] * 10}] * 96, **options | dict.fromkeys(list(options)[:2], 1)), 60)
    assert "raise it for the larger steps, or take a smaller capacity" in caplog.text, "one row a step is the least"
    caplog.clear()
    with caplog.at_level("INFO", logger="torch_backend.trainers.dataloader"):
        enabled(build(tmp_path, [{"input_ids": [5] * 40}] * 96, **options), 60)
    assert [record.levelname for record in caplog.records if "an epoch has 12 steps" in record.message] == ["INFO"]


def test_rows_that_stay_empty_are_warned_of(tmp_path, caplog) -> None:
    enabled(build(tmp_path, numbered()))
    assert not [record for record in caplog.records if "a smaller capacity leaves" in record.message]
    enabled(build(tmp_path, numbered()), 2048)
    assert "60 documents, in 1 row of 2,048 tokens, 37.9% full: a smaller capacity leaves less padding" in caplog.text


class OwnSampler(transformers.Trainer):
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Unknown(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict:
        return numbered()[index]


def test_where_only_a_batch_can_be_packed_it_says_so_and_how_full_rows_get(tmp_path, caplog) -> None:
    trainer = enabled(build(tmp_path, numbered(), kind=OwnSampler))
    assert "packs the 2 documents of each batch and not the whole data set, because OwnSampler has a" in caplog.text
    assert sorted(held([next(iter(trainer.get_train_dataloader()))])) == lengths_of(numbered())[:2]
    assert "full, because PackedCollator packs inside a batch, here of 2 documents: pack the whole" in caplog.text
    enabled(build(tmp_path, Unknown()))
    assert "because a Unknown does not tell its lengths: pass a datasets.Dataset or a list" in caplog.text
    enabled(build(tmp_path, numbered().with_transform(dict)))
    assert "because its examples are made on access (set_transform)" in caplog.text


def test_a_packed_collator_without_a_capacity_stays_and_takes_rows_of_a_list(tmp_path) -> None:
    trainer = build(tmp_path, [{"input_ids": ids} for ids in numbered()["input_ids"]])
    collator = trainer.data_collator = PackedCollator(trainer.model, bucket=8)
    loader = enabled(trainer).get_train_dataloader()
    assert trainer.data_collator is collator and len(loader) == 10 and sorted(held(loader)) == lengths_of(numbered())


def test_rows_that_are_packed_already_stay_unless_a_capacity_is_given(tmp_path) -> None:
    rows = pack_dataset(numbered(), 80)
    assert len(enabled(build(tmp_path, rows), None).get_train_dataloader().dataset) == len(rows)
    assert sorted(held(enabled(build(tmp_path, rows), 40).get_train_dataloader())) == lengths_of(numbered())


def test_another_dataset_has_to_be_enabled_again(tmp_path) -> None:
    trainer = enabled(build(tmp_path, numbered()))
    trainer.train_dataset = numbered(10)
    with pytest.raises(
        PackingError, match=r"train_dataset was exchanged after enable_packing\(trainer\): call it again"
    ):
        trainer.get_train_dataloader()
    assert sorted(held(enabled(trainer).get_train_dataloader())) == lengths_of(numbered(10))
    trainer.train_dataset = pack_dataset(numbered(), CAPACITY)
    assert len(enabled(trainer, None).get_train_dataloader().dataset) == 20


@pytest.mark.parametrize("streamed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["data set", "stream"])
def test_a_run_goes_on_inside_an_epoch_with_the_rows_that_it_had(tmp_path, streamed) -> None:
    """With rows of another capacity the steps before hold other documents: 28% of the tokens were never trained."""
    data = documents(60)

    def trainer(capacity: int = CAPACITY, data=data, **options):
        given = data.to_iterable_dataset() if streamed else data
        return enabled(build(tmp_path, given, max_steps=8, save_strategy="steps", save_steps=1, **options), capacity)

    def resumed(step: int, *given, **options) -> None:
        trainer(*given, **options).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))

    place = "7 steps" if streamed else "2 steps"
    trainer().train()
    with pytest.raises(
        UnsupportedError, match=rf"{place} into an epoch whose rows hold 40 tokens, and rows of 64 would"
    ):
        resumed(7, 64)
    with pytest.raises(UnsupportedError, match=r"resume with capacity=40"):
        resumed(5, 64)
    with pytest.raises(UnsupportedError, match=rf"{place} into an epoch whose steps hold 4 rows, and steps of 2 would"):
        resumed(7, size=1)
    with pytest.raises(UnsupportedError, match=rf"{place} into an epoch whose rows are of other data or options, and"):
        resumed(7, data_seed=5)
    others = [documents(59), data.shuffle(1), data.map(lambda x: {"input_ids": x["input_ids"][::-1]})]
    others += [] if streamed else [data.map(lambda x: {"labels": x["input_ids"]})]
    for other in others:
        with pytest.raises(UnsupportedError, match="rows hold other documents, or in another order"):
            resumed(7, data=other)
    resumed(7, data=documents(60).shuffle(1), ignore_data_skip=True)
    resumed(7, learning_rate=1e-4)
    if not streamed:
        resumed(5, data_seed=5)


# Workers, ranks and streams.


@limited()
def test_workers_give_the_same_rows_in_every_epoch(tmp_path) -> None:
    options = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 2}
    loaders = [enabled(build(tmp_path, numbered(), **x)).get_train_dataloader() for x in (options, {})]
    for epoch in range(2):
        for loader in loaders:
            loader.set_epoch(epoch)
        assert held(loaders[0]) == held(loaders[1])


def test_rows_are_pickled_without_their_tokens_and_plans(tmp_path) -> None:
    numbered(1000).save_to_disk(tmp_path)
    rows = EpochRows(datasets.load_from_disk(tmp_path), ["input_ids"], CAPACITY)
    wanted = rows[5 + len(rows)]
    assert len(pickled := pickle.dumps(rows)) < 5_000
    assert pickle.loads(pickled)[5 + len(rows)].input_ids.tolist() == wanted.input_ids.tolist()


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_epoch_has_as_many_rows(ranks) -> None:
    """Random draws of documents that leave room in every row would make more rows or fewer."""
    lengths = np.random.default_rng(0).integers(11, 21, 3000)
    rows = EpochRows([{"input_ids": [5] * n} for n in lengths.tolist()], ["input_ids"], CAPACITY)
    rows.ranks = ranks
    assert len({plan(lengths, CAPACITY, seed=seed).n_rows for seed in range(4)}) > 1
    assert {rows.dealt(epoch).plan.n_rows for epoch in range(4)} == {len(rows)}
    assert len(rows) % ranks == 0 and len(rows) <= 1.005 * plan(lengths, CAPACITY, strategy="best_fit").n_rows + ranks


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_batches_belong_to_the_ranks_in_turn_and_are_alike_on_all(ranks) -> None:
    rows = EpochRows(numbered(600), ["input_ids"], CAPACITY)
    rows.ranks = ranks
    batches = list(RowBatches(rows, 2))
    assert len(batches) == len(RowBatches(rows, 2)) and len(batches) % ranks == 0
    assert sorted(number for batch in batches for number in batch) == list(range(len(rows)))
    for step in range(0, len(batches), ranks):
        assert len({len(batch) for batch in batches[step : step + ranks]}) == 1
    assert rows.dealt(0).imbalance < 1.05


def test_a_stream_is_packed_as_its_documents_come(tmp_path) -> None:
    stream = numbered(400).to_iterable_dataset()
    with pytest.raises(ValueError, match="max_steps"):
        enabled(build(tmp_path, stream, max_steps=-1))
    batches = list(enabled(build(tmp_path, stream)).get_train_dataloader())
    assert sorted(held(batches)) == lengths_of(numbered(400))
    assert sum(n for _, n in held(batches)) / sum(batch["input_ids"].numel() for batch in batches) > 0.9
    trainer = enabled(build(tmp_path, numbered().to_iterable_dataset()))
    trainer.train()
    assert trainer.state.global_step == 3


@pytest.mark.parametrize(
    "accumulated", [4, pytest.param(16, marks=pytest.mark.slow)], ids=["a short step", "no whole step"]
)
def test_a_stream_trains_each_document_once_in_the_steps_of_an_epoch_and_resumes_in_any(tmp_path, accumulated) -> None:
    """20 rows are 10 batches of 2; transformers takes no step before it has seen all that it accumulates."""
    data = numbered()
    options = {"gradient_accumulation_steps": accumulated, "save_strategy": "steps", "save_steps": 1}
    per_epoch = -(-10 // accumulated)

    def trained(checkpoint: int = 0, **more):
        trainer = enabled(build(tmp_path, data.to_iterable_dataset(), max_steps=3 * per_epoch, **options | more))
        steps: list[list[tuple[int, int]]] = [[]]
        step = trainer.training_step

        def recorded(model, inputs, *args):
            steps[-1] += held([inputs])
            return step(model, inputs, *args)

        class Steps(transformers.TrainerCallback):
            def on_step_end(self, *_, **__) -> None:
                steps.append([])

        trainer.training_step = recorded
        trainer.add_callback(Steps())
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{checkpoint}") if checkpoint else None)
        return steps[:-1], trainer.model

    steps, model = trained()
    for first in range(0, len(steps), per_epoch):
        assert sorted(chain.from_iterable(steps[first : first + per_epoch])) == lengths_of(data)
    assert steps[0] != steps[per_epoch], "each epoch is packed again"
    for checkpoint in range(1, len(steps)):
        workers = {"dataloader_num_workers": checkpoint % 2, "dataloader_persistent_workers": bool(checkpoint % 2)}
        with limited():
            rest, resumed = trained(checkpoint, **workers, save_strategy="no")
        assert rest == steps[checkpoint:]
        assert differences(model, resumed) < 1e-6


@pytest.mark.parametrize("own", [True, False], ids=["a loss function", "a model without the step's targets"])
def test_a_stream_gives_no_batch_of_padding_to_a_loss_that_is_not_divided_by_the_targets_of_its_step(
    tmp_path, own
) -> None:
    """20 rows are 10 batches of 2: an epoch lacks two of its last step, in which a mean would be 0 / 0."""
    trainer = build(tmp_path, numbered().to_iterable_dataset(), max_steps=5, gradient_accumulation_steps=4)
    if own:
        trainer.compute_loss_func = mean_of_batch
    else:
        trainer.model_accepts_loss_kwargs = False
    enabled(trainer)
    step, trained = trainer.training_step, []

    def recorded(model, inputs, *args):
        trained.append(bool((inputs["labels"] != -100).any()))
        return step(model, inputs, *args)

    trainer.training_step = recorded
    trainer.train()
    assert len(trained) >= 20 and all(trained)
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())


def mean_of_batch(outputs, labels, num_items_in_batch=None):
    targets = labels[:, 1:].flatten()
    losses = torch.nn.functional.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), targets, reduction="none")
    return losses.sum() / (targets != -100).sum()
