"""The steps of a run: packed and padded runs see the same documents and targets in each."""

from __future__ import annotations

import numpy as np
import pytest

from crosspack.cli.tables import duration, epoch_line, saved_line, saving_line
from crosspack.encoding.text import EncodedDocument
from packing_core.errors import PackingError
from packing_core.planning.plan import plan
from packing_core.training.records import StepRecord
from packing_core.training.schedule import Corpus, Schedule


def corpus(*documents: tuple[list[int], list[int]]) -> Corpus:
    return Corpus.collect(
        iter(EncodedDocument(np.array(ids, np.int32), np.array(trained, bool)) for ids, trained in documents)
    )


@pytest.fixture
def many() -> Corpus:
    rng = np.random.default_rng(5)
    documents = []
    for number in range(60):
        ids = number * 100 + np.arange(rng.integers(2, 40))
        trained = rng.random(len(ids)) < 0.7
        trained[-1] = True
        documents.append((ids.tolist(), trained.tolist()))
    return corpus(*documents)


def targets_by_document(input_ids, targets):
    """Sorted token and target of every place that has a target; tokens name their document and position."""
    return sorted(zip(input_ids[targets != -100].tolist(), targets[targets != -100].tolist(), strict=True))


@pytest.mark.parametrize("run", ["padded", "grouped"])
def test_padded_and_packed_steps_train_the_same_targets(many, run):
    schedule = Schedule(many, (plan(many.documents.lengths, 64),), rows_per_step=3, padded_batch=4)
    for step in range(len(schedule)):
        packed = [pair for b in schedule.packed(step) for pair in targets_by_document(b.input_ids, b.targets)]
        padded = [pair for b in schedule.padded(step, run) for pair in targets_by_document(b.input_ids, b.targets)]
        assert sorted(packed) == sorted(padded)
        assert len(packed) == schedule.trained_tokens[step]


def test_slots_count_what_is_computed(many):
    plans = tuple(plan(many.documents.lengths, 64, seed=seed) for seed in range(2))
    schedule = Schedule(many, plans, rows_per_step=3)
    assert sum(schedule.trained_tokens) == 2 * many.n_trained, "every target of every epoch is trained"
    assert len(schedule) == sum(-(-made.n_rows // 3) for made in plans)
    schedule = Schedule(many, (plan(many.documents.lengths, 64),), rows_per_step=3, padded_batch=4)
    for step in range(len(schedule)):
        assert schedule.slots(step, "packed") == sum(batch.input_ids.size for batch in schedule.packed(step))
        for run in ("padded", "grouped"):
            assert schedule.slots(step, run) == sum(batch.input_ids.size for batch in schedule.padded(step, run))
    padded, grouped, packed = (
        sum(schedule.slots(step, run) for step in range(len(schedule))) for run in ("padded", "grouped", "packed")
    )
    assert packed < grouped < padded


def test_a_padded_batch_is_drawn_out():
    # documents 1 2 3 | 4 5 with the first document's prompt of one token; both in one row of 5
    made = corpus(([1, 2, 3], [0, 1, 1]), ([4, 5], [1, 1]))
    schedule = Schedule(made, (plan([3, 2], 5),), padded_batch=2, pad_id=9)
    (batch,) = schedule.padded(0, "grouped")
    assert batch.input_ids.tolist() == [[1, 2, 3], [4, 5, 9]]
    assert batch.attention_mask.tolist() == [[True, True, True], [True, True, False]]
    assert batch.targets.tolist() == [[-100, 2, 3], [-100, 5, -100]]
    made = corpus(([1, 9], [1, 1]), ([4, 5, 6], [1, 1, 1]))  # the pad token is also a trained one
    (batch,) = Schedule(made, (plan([2, 3], 5),), padded_batch=2, pad_id=9).padded(0, "grouped")
    assert batch.targets.tolist() == [[-100, 5, 6], [-100, 9, -100]]


def test_split_documents_are_padded_as_the_pieces_that_are_packed(many):
    made = plan(many.documents.lengths, 16, overflow="split")
    schedule = Schedule(many, (made,), rows_per_step=3, padded_batch=4)
    assert sum(schedule.trained_tokens) < many.n_trained  # a piece's first token is no target
    assert sum(int((b.targets != -100).sum()) for s in range(len(schedule)) for b in schedule.padded(s, "padded")) == (
        sum(schedule.trained_tokens)
    )


def test_steps_without_anything_to_train_are_left_out_or_refused(many):
    # a prompt of four tokens split over two rows of two: only the last row has a target
    made = corpus(([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 1]))
    schedule = Schedule(made, (plan([6], 2, overflow="split", seed=None),), rows_per_step=1)
    assert schedule.trained_tokens == [1]
    made = corpus(([1, 2, 3, 4], [0, 0, 0, 1]))
    with pytest.raises(PackingError, match="no row of 2 tokens has one to train on, because prompts fill them: raise"):
        len(Schedule(made, (plan([4], 2, overflow="truncate", seed=None),)))
    with pytest.raises(PackingError, match="no document has a token to train on: check --data"):
        Corpus.collect(iter(()))
    made = plan(many.documents.lengths, 64)
    assert len(Schedule(many, (made,), rows_per_step=1, limit=3)) == 3
    for option in ("rows_per_step", "padded_batch"):
        with pytest.raises(PackingError, match=f"--{option.replace('_', '-')} is 0: pass 1 or more"):
            Schedule(many, (made,), **{option: 0})


def test_random_batches_follow_from_the_seed(many):
    made = plan(many.documents.lengths, 64)
    first, same, other = (Schedule(many, (made,), padded_batch=4, seed=seed) for seed in (0, 0, 1))

    def ids(schedule):
        return [batch.input_ids.tolist() for batch in schedule.padded(0, "padded")]

    assert ids(first) == ids(same) != ids(other)


def test_the_end_of_a_run_says_what_an_epoch_takes_packed_and_padded():
    # documents of 3 and 1 tokens: two rows of 4 hold them, a batch of all four pads them to 12
    made = corpus(*[([1, 2, 3], [0, 1, 1])] * 2, *[([4], [1])] * 2)
    schedule = Schedule(made, (plan([3, 3, 1, 1], 4),), padded_batch=4)
    records = [StepRecord("packed", step, 1.0, 4, 4, seconds) for step, seconds in enumerate((60.0, 2.0))]
    assert saved_line(schedule, records) == (  # at 2 tokens a second, because the first step warms up
        "an epoch takes about 4.0 s (at this speed); in padded batches of 4 it would take about 6.0 s: "
        "packing saves 2.0 s (33%)"
    )
    assert (duration(7200), duration(90)) == ("2.0 h", "1.5 min")


def test_rows_that_are_not_full_are_said_to_take_longer():
    hour = 3600
    assert epoch_line(4 * hour, 10 * hour, 8, "at the speed of runs/mine") == (
        "an epoch takes about 4.0 h (at the speed of runs/mine); in padded batches of 8 it would take about 10.0 h: "
        "packing saves 6.0 h (60%)"
    )
    longer = "packing takes longer, because its rows are not full: lower --capacity"
    assert epoch_line(4 * hour, hour, 8, "estimated").endswith(f"it would take about 1.0 h: {longer}")
    few = corpus(*[([1, 2, 3], [0, 1, 1])] * 2)
    schedule = Schedule(few, (plan([3, 3], 64),), padded_batch=2)
    assert saving_line(schedule) == f"an epoch computes 64 tokens; padded batches of 2 would compute 6: {longer}"
    record = StepRecord("packed", 0, 1.0, 64, 64, 32.0)
    assert saved_line(schedule, [record]).endswith(longer)
