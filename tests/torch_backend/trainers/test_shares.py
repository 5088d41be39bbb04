"""Data that are one rank's share already, and loaders that deal to ranks again: every document once, or refused."""

from __future__ import annotations

import json
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from torch.utils.data import DataLoader

import crosspack
from packing_core import PackedDataset, PackingError, mix, stream
from packing_core.streaming.sources import share_of
from tests.packing_core.test_stream import segments
from tests.torch_backend.row_trainers import build, enabled
from torch_backend import PackedRows, StreamedRows
from torch_backend.trainers import dataloader

accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")
datasets = pytest.importorskip("datasets", reason="pip install datasets")

from datasets.distributed import split_dataset_by_node  # noqa: E402

DOCUMENTS = [
    [number + 3] * length for number, length in enumerate(np.random.default_rng(0).integers(2, 17, 60).tolist())
]
WHOLE = datasets.Dataset.from_dict({"input_ids": DOCUMENTS})
STREAM = WHOLE.to_iterable_dataset(num_shards=4)


def _part(rank: int, path):
    path = path / "data.jsonl"
    path.write_text("".join(json.dumps({"input_ids": document}) + " " * 1000 + "\n" for document in DOCUMENTS))
    return crosspack.read(path).part(rank, 2)


MARKED = {
    "split_dataset_by_node": lambda rank, _: split_dataset_by_node(STREAM, rank, 2),
    "map after it": lambda rank, _: split_dataset_by_node(STREAM, rank, 2).map(lambda x: x),
    "read(...).part": _part,
    "a mixture": lambda rank, path: mix([_part(rank, path)], [1.0], stop="once"),
}
UNMARKED = {
    "a stream's shard": lambda rank, _: STREAM.shard(2, rank),
    "a data set's shard": lambda rank, _: WHOLE.shard(2, rank),
    "every second one": lambda rank, _: WHOLE.shard(2, rank, contiguous=False),
    "split_dataset_by_node of a data set": lambda rank, _: split_dataset_by_node(WHOLE, rank, 2),
    "a list": lambda rank, _: [{"input_ids": document} for document in DOCUMENTS[rank::2]],
}


@pytest.mark.parametrize("kind", MARKED)
def test_a_share_is_not_dealt_again_and_is_packed_as_it_is_where_that_is_asked_for(kind, tmp_path) -> None:
    shares = [MARKED[kind](rank, tmp_path) for rank in range(2)]
    assert [share_of(share) or share_of(stream(share, 20)._source) for share in shares] == [(0, 2), (1, 2)]
    for make in (stream, StreamedRows):
        with pytest.raises(
            PackingError, match=r"is share \(1, 2\) of a data set already, and shard=\(1, 2\) would lose some"
        ):
            make(shares[1], 20, shard=(1, 2))
    rows = chain(*(stream(share, 20, shard=(0, 1)) for share in shares))
    assert sorted(segments(rows)) == sorted(map(tuple, DOCUMENTS))


def test_data_that_are_no_share_are_told_from_those_that_are() -> None:
    for source in (DOCUMENTS, WHOLE, STREAM, mix([DOCUMENTS], [1.0]), stream(DOCUMENTS, 20)._source):
        assert share_of(source) is None
    accelerates = accelerate.data_loader.IterableDatasetShard(STREAM, num_processes=2, process_index=1)
    assert share_of(accelerates) == (1, 2)


@pytest.mark.parametrize("kind", ["split_dataset_by_node", "map after it", *UNMARKED])
def test_enable_packing_refuses_data_that_each_rank_has_a_share_of(kind, tmp_path, monkeypatch) -> None:
    make = (MARKED | UNMARKED)[kind]
    seen: list = []

    def of_ranks(value):
        seen.append(value)
        return seen

    monkeypatch.setattr(dataloader, "_of_ranks", of_ranks)
    trainers = [build(tmp_path, make(rank, tmp_path), max_steps=2) for rank in range(2)]
    enabled(trainers[0])
    for _ in trainers:  # both ranks see what both have
        with pytest.raises(PackingError, match="the training data differ between ranks.* pass the same, whole data"):
            enabled(trainers[1])
    seen.clear()
    for data in (WHOLE, WHOLE):
        enabled(build(tmp_path, data, max_steps=2))


@pytest.mark.parametrize("batch_size", [None, 1])
@pytest.mark.parametrize(
    "options",
    [{"dispatch_batches": False}, {"dispatch_batches": True, "put_on_device": True}, {"use_stateful_dataloader": True}],
    ids=str,
)
def test_accelerate_does_not_deal_streamed_rows_again(batch_size, options) -> None:
    accelerate.Accelerator(cpu=True)
    for rank in range(2):
        loader = DataLoader(StreamedRows(DOCUMENTS, 20, shard=(rank, 2)), batch_size=batch_size)
        prepared = accelerate.data_loader.prepare_data_loader(loader, num_processes=2, process_index=rank, **options)
        with pytest.raises(
            PackingError, match="accelerate would deal them again and lose the rest: leave its DataLoader"
        ):
            list(prepared)
        prepared.end()
    alone = DataLoader(StreamedRows(DOCUMENTS, 20), batch_size=batch_size)
    prepared = accelerate.Accelerator(cpu=True).prepare(alone)
    assert sum(int((batch["input_ids"] > 0).sum()) for batch in prepared) == sum(map(len, DOCUMENTS))


@pytest.mark.parametrize(
    "rows", [StreamedRows(DOCUMENTS, 20), PackedRows(PackedDataset(DOCUMENTS, 20))], ids=["streamed", "packed"]
)
def test_packed_batches_as_training_data_are_answered_by_what_takes_documents(rows) -> None:
    trainer = SimpleNamespace(train_dataset=rows)
    options = SimpleNamespace(capacity=None)
    with pytest.raises(
        PackingError, match="batches that are packed already, and enable_packing packs documents itself: pass"
    ):
        dataloader.pack_training_data(trainer, SimpleNamespace(capacity=None), options)
