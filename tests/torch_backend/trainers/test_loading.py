"""PackedRows and StreamedRows in a DataLoader as it is: every document once, in one order, and a resume on any number
of workers and ranks."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from packing_core import LayoutError, PackedDataset, PackingError, Ragged, stream
from tests.processes import limited
from torch_backend import PackedCollator, PackedRows, StreamedRows

LENGTHS = np.random.default_rng(0).integers(1, 17, 60)
SOURCE = [np.arange(n) + 1000 * i + 1 for i, n in enumerate(LENGTHS)]
OPTIONS = {"buffer": 12, "seed": 3}


@pytest.fixture
def stateful():
    return pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No ranks, and an end to workers that hang."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with limited():
        yield


def loader(rows: StreamedRows, workers: int = 0, **options) -> DataLoader:
    more = {"timeout": 60} if workers else {}
    return DataLoader(rows, batch_size=None, num_workers=workers, **more, **options)


def streamed(shard=(0, 1), source=SOURCE, batch_size=2) -> StreamedRows:
    return StreamedRows(source, 20, batch_size=batch_size, shard=shard, **OPTIONS)


def ids(batches) -> list[list[int]]:
    return [row for batch in batches for row in batch["input_ids"].tolist()]


def documents(batches) -> list[tuple[int, ...]]:
    """The tokens of every segment that is not padding."""
    found = []
    for batch in batches:
        flat = batch["input_ids"].flatten().tolist()
        offsets = batch["cu_seq_lens_q"].tolist()
        found += [tuple(flat[a:b]) for a, b in pairwise(offsets) if b > a and flat[a]]
    return sorted(found)


WHOLE = [row.input_ids[0].tolist() for row in stream(SOURCE, 20, **OPTIONS)]
EVERY = sorted(tuple(document.tolist()) for document in SOURCE)


def test_batches_are_what_the_collator_makes_of_the_rows_of_the_stream() -> None:
    batches = list(loader(streamed()))
    assert ids(batches) == WHOLE
    expected = [PackedCollator()(rows) for rows in stream(SOURCE, 20, **OPTIONS).batches(2)]
    for batch, wanted in zip(batches, expected, strict=True):
        assert batch.keys() == wanted.keys()
        for name, value in wanted.items():
            same = torch.equal(batch[name], value) if isinstance(value, torch.Tensor) else plain(batch[name], value)
            assert same, name


def plain(found, wanted) -> bool:
    """Equal but for tuples, which a loader turns into lists."""
    return json.dumps(found, default=repr) == json.dumps(wanted, default=repr)


@pytest.mark.parametrize("batch_size", [1, None])
def test_the_loaders_own_batch_of_one_is_the_batch(batch_size) -> None:
    assert ids(DataLoader(streamed(), batch_size=batch_size)) == WHOLE
    with pytest.raises(LayoutError, match="the DataLoader joins 2 of them: pass batch_size to StreamedRows"):
        next(iter(DataLoader(streamed(), batch_size=2)))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_give_the_same_batches_in_the_same_order(method) -> None:
    batches = list(loader(streamed(), 2, multiprocessing_context=method))
    assert ids(batches) == WHOLE and documents(batches) == EVERY
    rows = PackedRows(PackedDataset(SOURCE, 20, seed=1))
    made = list(DataLoader(rows, batch_size=3, num_workers=2, multiprocessing_context=method, timeout=60))
    assert documents(made) == EVERY and [len(batch["input_ids"]) for batch in made[:-1]] == [3] * (len(made) - 1)


def test_a_pickled_copy_begins_with_the_epoch_of_the_original_and_counts_for_itself() -> None:
    rows = streamed()
    rows.set_epoch(2)
    copied = pickle.loads(pickle.dumps(rows))
    second = ids(loader(copied))
    assert second != WHOLE and ids(loader(copied)) != second
    assert ids(loader(rows)) == second


def test_a_row_of_padding_behind_another_row_is_cut_from_it() -> None:
    source = [np.arange(1, 1 + n) for n in (14, 12, 11)]
    rank = StreamedRows(source, 20, batch_size=2, shard=(1, 2), seed=0)
    [batch] = loader(rank)
    assert batch["input_ids"].shape == (2, 20) and not batch["input_ids"][1].any()
    assert 20 in np.cumsum(batch["packed_lengths"]) and 20 in batch["cu_seq_lens_q"]


def test_the_ranks_of_a_job_are_found(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert streamed(shard=None).shard == (1, 4)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_an_epoch_packs_anew_and_all_workers_agree_on_it(workers, persistent) -> None:
    rows = streamed()
    made = loader(rows, workers, persistent_workers=persistent)
    first = list(made)
    next(iter(made))  # one that is broken off counts
    third = list(made)
    rows.set_epoch(0)
    again = list(made)
    assert ids(first) == ids(again) != ids(third)
    assert documents(third) == documents(first) == EVERY
    assert ids(third) == of_epoch(2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_where_it_stopped(stateful, workers) -> None:
    def made():
        return stateful.StatefulDataLoader(streamed(), batch_size=None, num_workers=workers)

    for steps in (0, 1, 4, 7):
        stopped = made()
        reading = iter(stopped)
        before = [next(reading) for _ in range(steps)]
        state = json.loads(json.dumps(stopped.state_dict(), default=repr)) if not workers else stopped.state_dict()
        rest = list(reading)
        continued = made()
        continued.load_state_dict(state)
        assert ids(continued) == ids(rest)
        assert ids(before) + ids(rest) == WHOLE


def resumed(steps=5, epoch=0) -> tuple[StreamedRows, list[list[int]]]:
    """A data set into which a state was loaded, and the rows that are left of the epoch."""
    rows = streamed()
    rows.set_epoch(epoch)
    reading = iter(loader(rows))
    for _ in range(steps):
        next(reading)
    again = streamed()
    again.load_state_dict(rows.state_dict())
    return again, ids(reading)


def of_epoch(epoch) -> list[list[int]]:
    expected = stream(SOURCE, 20, **OPTIONS)
    expected.start_epoch(epoch)
    return [row.input_ids[0].tolist() for row in expected]


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (2, True)])
def test_a_loaded_position_is_that_of_one_iteration(workers, persistent) -> None:
    rows, rest = resumed()
    state = rows.state_dict()
    made = loader(rows, workers, persistent_workers=persistent)
    assert ids(made) == rest
    if workers:
        with pytest.raises(PackingError, match="made in workers, which alone know their positions: take state_dict"):
            rows.state_dict()
    assert [ids(made), ids(made)] == [of_epoch(1), of_epoch(2)]
    rows.set_epoch(5)
    later = streamed()
    later.load_state_dict(rows.state_dict())
    assert ids(loader(later, workers)) == of_epoch(5)
    if persistent:
        another, left = resumed(3)
        rows.load_state_dict(another.state_dict())
        with pytest.raises(PackingError, match="a state was loaded after the workers had started"):
            ids(made)
        assert ids(loader(rows, workers)) == left
    rows.load_state_dict(state)
    assert ids(loader(rows, workers)) == rest


def test_a_stateful_loader_whose_data_set_was_resumed_saves_its_own_position(stateful) -> None:
    rows, rest = resumed()
    reading = iter(made := stateful.StatefulDataLoader(rows, batch_size=None, num_workers=2))
    first = ids([next(reading), next(reading)])
    later = streamed()
    later.load_state_dict(made.state_dict())
    assert first + ids(loader(later, 2)) == rest
    assert ids(reading) == rest[len(first) :] and ids(made) == of_epoch(1)


def test_an_epoch_is_chosen_without_leaving_a_loaded_position_out() -> None:
    rows, rest = resumed(epoch=4)
    with pytest.raises(
        PackingError, match=r"set_epoch\(0\) would leave out the position .* of epoch 4: call set_epoch"
    ):
        rows.set_epoch(0)
    rows.set_epoch(4)
    assert ids(loader(rows)) == rest
    rows.set_epoch(4)
    assert ids(loader(rows)) == of_epoch(4)
    rows, rest = resumed(epoch=4)
    assert [ids(loader(rows)), ids(loader(rows))] == [rest, of_epoch(5)], "the epoch after a resumed one is the next"


def test_a_refused_state_is_not_taken_for_resumed() -> None:
    rows, _ = resumed()
    rows.source = SOURCE[:-1:-1]
    for _ in range(2):
        with pytest.raises(PackingError, match="source"):
            ids(loader(rows))


def test_sources_of_datasets_and_generators() -> None:
    from datasets import Dataset

    plain = Dataset.from_dict({"input_ids": [document.tolist() for document in SOURCE]})
    for source in (plain, plain.to_iterable_dataset(num_shards=2), (document for document in SOURCE)):
        assert documents(loader(streamed(source=source))) == EVERY
    streaming = streamed(source=plain.to_iterable_dataset(num_shards=2))
    assert documents(loader(streaming, 1)) == EVERY
    with pytest.raises(PackingError, match="gives each of 2 workers documents of its own: pass num_workers=1"):
        list(loader(streaming, 2))
    with pytest.raises(PackingError, match="a generator, which can be read once"):
        streamed(source=(document for document in SOURCE)).state_dict()


def test_states_of_some_steps_only_are_refused(stateful) -> None:
    made = stateful.StatefulDataLoader(streamed(), batch_size=None, num_workers=1, snapshot_every_n_steps=4)
    reading = iter(made)
    next(reading)
    with pytest.raises(PackingError, match="1 steps old: make the loader with snapshot_every_n_steps=1"):
        streamed().load_state_dict(made.state_dict())


def test_rows_of_a_data_set_come_from_mapped_files(tmp_path) -> None:
    Ragged.of(SOURCE).save(tmp_path)
    rows = PackedRows(PackedDataset(Ragged.open(tmp_path), 20), PackedCollator(padding_free=True))
    batches = list(DataLoader(rows, batch_size=4, shuffle=True))
    assert documents(batches) == EVERY
    assert sum(batch["input_ids"].numel() for batch in batches) == LENGTHS.sum()
