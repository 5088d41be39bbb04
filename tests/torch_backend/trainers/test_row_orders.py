"""Orders of training and documents longer than a row, in the rows of a trainer."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from packing_core import plan
from packing_core.errors import PackingError, UnsupportedError
from tests.torch_backend.row_trainers import build, enabled, held, lengths_of, numbered
from tests.torch_backend.trainers.test_trainer import CAPACITY, datasets, documents
from torch_backend import pack_dataset
from torch_backend.trainers.callbacks import SameRows
from torch_backend.trainers.dataloader import rows_of
from torch_backend.trainers.epoch_rows import EpochRows


def ordered(tmp_path, **options) -> list[tuple[int, int]]:
    data = numbered()
    data = data.add_column("topic", ["abc"[d % 3] for d in range(len(data))])
    return held(enabled(build(tmp_path, data), **options).get_train_dataloader())


def test_rows_follow_the_curriculum_and_the_groups_of_a_column(tmp_path) -> None:
    found = ordered(tmp_path, order="curriculum")
    assert sorted(found) == lengths_of(numbered())
    octaves = [(length - 1).bit_length() for _, length in found]
    late = sum(
        length
        for octave, (_, length), before in zip(octaves, found, np.maximum.accumulate(octaves), strict=True)
        if octave < before
    )
    assert late <= 5 * CAPACITY, "one row of each octave moves on"
    found = ordered(tmp_path, order="grouped", keys="topic")
    assert sorted(found) == lengths_of(numbered())
    changes = sum(a % 3 != b % 3 for (a, _), (b, _) in pairwise(found))
    assert changes < 26, "of 59 neighbours, two thirds differ at random, 39"
    found = ordered(tmp_path, order="weighted", keys="topic", weights={"a": 8, "b": 1, "c": 1})
    assert sum(document % 3 == 0 for document, _ in found[:15]) >= 10


def test_an_order_that_has_no_effect_or_no_column_is_refused(tmp_path) -> None:
    with pytest.raises(PackingError, match='the training data have no "topic", which keys names, only input_ids'):
        enabled(build(tmp_path, numbered()), order="grouped", keys="topic")
    lacking = build(tmp_path, [{"input_ids": [5, 6], "topic": "a"}, {"input_ids": [5, 6]}])
    with pytest.raises(PackingError, match='training example 1 has no "topic", which keys names, only input_ids'):
        enabled(lacking, order="grouped", keys="topic")
    rows = pack_dataset(numbered(), CAPACITY)
    rows = rows.add_column("topic", ["ab"[row % 2] for row in range(len(rows))])
    says = 'keys="topic" gives 20 training examples a key, which hold 60 documents: pass the documents as examples'
    with pytest.raises(PackingError, match=says):
        enabled(build(tmp_path, rows), order="grouped", keys="topic")
    with pytest.raises(PackingError, match="keys is a list: pass the name of the column that holds each"):
        enabled(build(tmp_path, numbered()), order="grouped", keys=["a"] * 60)
    with pytest.raises(
        PackingError, match="a stream gives its documents as they come, so order='curriculum' has no effect"
    ):
        enabled(build(tmp_path, numbered().to_iterable_dataset(), max_steps=2), order="curriculum")
    with pytest.raises(PackingError, match="the training data are rows already, so order='curriculum' has no effect"):
        enabled(build(tmp_path, pack_dataset(numbered(), CAPACITY)), None, order="curriculum")


def test_limits_that_have_no_effect_are_refused(tmp_path) -> None:
    rows = build(tmp_path, pack_dataset(numbered(), CAPACITY))
    with pytest.raises(PackingError, match="the training data are rows already, so max_segments=3 has no effect"):
        enabled(rows, None, max_segments=3)
    made = numbered().with_transform(lambda batch: batch)
    with pytest.raises(PackingError, match="the documents of each batch .*, so overflow='truncate' has no effect"):
        enabled(build(tmp_path, made), None, overflow="truncate")
    enabled(build(tmp_path, made), CAPACITY, overflow="truncate")
    with pytest.raises(PackingError, match='keys has no effect under order="random"'):
        enabled(build(tmp_path, numbered()), keys="input_ids")


@pytest.mark.parametrize("overflow", ["overlap", "restart"])
@pytest.mark.parametrize("streamed", [False, True])
def test_pieces_with_context_train_every_token_once(tmp_path, overflow, streamed) -> None:
    """Token t of document d is 1000 d + t; a first token is trained by no piece, after a restart nor is the next."""
    lengths = [90, 12, 41, 7]
    data = datasets.Dataset.from_dict({"input_ids": [[1000 * d + t for t in range(n)] for d, n in enumerate(lengths)]})
    options = {"overflow": overflow, "context": 8, "min_piece": 5, "max_segments": 2}
    given = data.to_iterable_dataset() if streamed else data
    trainer = enabled(build(tmp_path, given, max_steps=2), **options)
    trained = torch.cat([b["labels"][b["labels"] != -100] for b in trainer.get_train_dataloader()]).tolist()
    pieces = plan(lengths, CAPACITY, **options)
    wanted = [
        1000 * d + t
        for d, start, n, skipped in zip(pieces.source, pieces.start, pieces.length, pieces.untrained, strict=True)
        for t in range(start + max(skipped, 1), start + n)
    ]
    assert len(set(trained)) == len(trained)
    assert sorted(trained) == sorted(wanted)
    assert max(map(len, (b["packed_documents"] for b in trainer.get_train_dataloader()))) <= 2 * 2


def test_a_note_that_names_no_rows_goes_on_over_as_many_ranks(caplog: pytest.LogCaptureFixture) -> None:
    """Checkpoints of before rows were compared, and those of other trainers, which have no note."""
    callback = SameRows(EpochRows(documents(60), ["input_ids", "labels"], CAPACITY))
    args = SimpleNamespace(gradient_accumulation_steps=1, world_size=1, train_batch_size=2)

    def resume(**note: int) -> None:
        state = SimpleNamespace(global_step=7, stateful_callbacks={"crosspack.rows": {"attributes": note}})
        callback.on_train_begin(args, state, None, train_dataloader=range(5))

    resume()
    assert "the checkpoint does not name its rows, as that of a run without packing: its 7 steps" in caplog.text
    caplog.clear()
    resume(ranks=1)
    assert not caplog.text
    with pytest.raises(UnsupportedError, match="2 steps into an epoch whose rows were dealt to 2 ranks, and 1 rank"):
        resume(ranks=2)


def test_a_trainer_that_was_given_no_rows_has_none() -> None:
    assert rows_of(SimpleNamespace()) is None
    assert rows_of(SimpleNamespace(get_train_dataloader=list)) is None
