"""Behaviour shared by all backends: learning rates, records, the identity of a run and its checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import numpy as np
import pytest

from crosspack.cli.tables import computed_tokens, loss_difference, padding, rate
from crosspack.encoding.text import EncodedDocument
from packing_core.errors import PackingError
from packing_core.planning.plan import plan
from packing_core.training import timing
from packing_core.training.checkpoints import check_resume, newest_checkpoint, save_checkpoint
from packing_core.training.job import TrainJob
from packing_core.training.options import Options
from packing_core.training.schedule import Corpus, Schedule
from packing_core.training.timing import in_turn


@pytest.fixture
def job(tmp_path) -> TrainJob:
    documents = [EncodedDocument(np.arange(n, dtype=np.int32), np.ones(n, bool)) for n in (5, 3, 4, 4, 7, 2, 6)]
    corpus = Corpus.collect(iter(documents))
    schedule = Schedule(corpus, (plan(corpus.documents.lengths, 8),), rows_per_step=1, padded_batch=2)
    return TrainJob(model={"model_type": "llama"}, schedule=schedule, output=tmp_path / "run")


def test_a_record_says_what_its_step_did_and_is_reported(job):
    seen = []
    record = dataclasses.replace(job, on_step=seen.append).record("packed", 0, 2.5, 0.1)
    assert seen == [record]
    assert (record.tokens, record.slots) == (job.schedule.steps[0].n_tokens, 8)


def test_a_gradient_that_is_no_number_ends_the_run(job):
    with pytest.raises(PackingError, match=r"the gradient norm of step 1 \(packed\) is inf: lower --lr"):
        job.record("packed", 1, 2.0, 0.1, grad_norm=math.inf)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_the_run(job, loss):
    with pytest.raises(PackingError, match=rf"the loss of step 1 \(packed\) is {loss}: lower --lr"):
        job.record("packed", 1, loss, 0.1)


def test_contenders_take_their_steps_in_turn_and_in_changing_order():
    taken = []

    def contender(name, steps):
        for step in range(steps):
            taken.append((name, step))
            yield
        return name.upper()

    outcomes = in_turn({"a": contender("a", 3), "b": contender("b", 2), "c": contender("c", 3)})
    assert taken == [("a", 0), ("b", 0), ("c", 0), ("c", 1), ("b", 1), ("a", 1), ("a", 2), ("c", 2)]
    assert outcomes == {"a": "A", "b": "B", "c": "C"} and list(outcomes) == ["a", "b", "c"]


def test_the_clock_says_what_the_steps_got_of_the_processors(monkeypatch):
    now, processor = [0.0], [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.time, "process_time", lambda: processor[0])
    clock = timing.Clock(threads=2)
    assert clock.cpu is None
    for wall, used in ((2.0, 4.0), (6.0, 4.0)):  # alone, and then on a busy machine
        with clock.timed():
            now[0] += wall
            processor[0] += used
        assert clock.seconds == wall
        now[0] += 100.0  # between steps nothing counts
    assert clock.cpu == 8.0 / (8.0 * 2)


def write_nothing(folder):
    (folder / "weights").write_text("w")


def test_the_newest_checkpoint_returns_with_its_records(job):
    records = [job.record("packed", step, 2.0 - step / 8, 0.1) for step in range(3)]
    save_checkpoint(job, records[:2], write_nothing)
    save_checkpoint(job, records, write_nothing)
    folder, restored = newest_checkpoint(job)
    assert restored == records
    assert (folder / "weights").read_text() == "w"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("damage", ["changed", "shorter", "gone"])
def test_a_checkpoint_that_was_damaged_is_refused(job, damage):
    """1,000 overwritten bytes of weights trained on as NaN."""
    save_checkpoint(job, [job.record("packed", 0, 2.0, 0.1)], write_nothing)
    folder, _ = newest_checkpoint(job)
    if damage == "gone":
        (folder / "weights").unlink()
    else:
        (folder / "weights").write_text("x" if damage == "changed" else "")
    with pytest.raises(PackingError, match="weights (was changed since it was written|is not there in whole)"):
        newest_checkpoint(job)


@pytest.mark.parametrize("name", ["../../victim", "/etc/hostname", "link/victim"])
def test_a_state_that_somebody_prepared_deletes_nothing_outside(job, tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_text("v")
    records = [job.record("packed", step, 2.0, 0.1) for step in range(2)]
    save_checkpoint(job, records[:1], write_nothing)
    folder, _ = newest_checkpoint(job)
    (folder / "link").symlink_to(tmp_path)
    state = json.loads((folder / "state.json").read_text())
    state["files"] = {name: 1}
    (folder / "state.json").write_text(json.dumps(state))
    for touch in (lambda: newest_checkpoint(job), lambda: save_checkpoint(job, records, write_nothing)):
        with pytest.raises(PackingError, match="nothing was changed"):
            touch()
    assert victim.read_text() == "v" and (folder / "weights").exists()


def test_an_interrupted_save_leaves_the_checkpoint_before_it(job):
    records = [job.record("packed", step, 2.0, 0.1) for step in range(2)]
    save_checkpoint(job, records[:1], write_nothing)

    def interrupted(folder):
        write_nothing(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(job, records, interrupted)
    assert newest_checkpoint(job)[1] == records[:1]
    save_checkpoint(job, records, write_nothing)
    assert newest_checkpoint(job)[1] == records


def test_a_checkpoint_of_another_run_is_refused_and_says_what_differs(job):
    save_checkpoint(job, [job.record("packed", 0, 2.0, 0.1)], write_nothing)
    other = dataclasses.replace(job, options=Options(weight_decay=0.5, seed=3))
    says = "was written with another --weight-decay, --seed: pass the options it was started with"
    with pytest.raises(PackingError, match=says):
        newest_checkpoint(other)
    with pytest.raises(PackingError, match=says):  # before any data is read
        check_resume(job.output, other.options, None)
    with pytest.raises(PackingError, match="was written with another --model"):
        check_resume(job.output, job.options, "another-model")
    check_resume(job.output, job.options, None)
    documents = job.schedule.corpus.documents
    replanned = dataclasses.replace(job.schedule, plans=(plan(documents.lengths, 9),))
    says = "was written with another --capacity, --overflow, --context, --min-piece, --max-segments, --rows-per-step, "
    with pytest.raises(PackingError, match=says):
        newest_checkpoint(dataclasses.replace(job, schedule=replanned))


def limited(job: TrainJob, steps: int, **options) -> TrainJob:
    return dataclasses.replace(job, options=Options(**options), schedule=dataclasses.replace(job.schedule, limit=steps))


def test_a_run_is_extended_where_its_finished_steps_stay_what_they_were(job):
    constant = {"decay": "constant", "warmup": 0.0}
    first = limited(job, 2, **constant)
    records = [first.record("packed", step, 2.0, 0.1) for step in range(2)]
    save_checkpoint(first, records, write_nothing)
    assert newest_checkpoint(limited(job, 4, **constant))[1] == records


def test_a_run_whose_learning_rates_would_change_is_not_extended(job):
    first = limited(job, 3)  # a cosine that ends at step 3
    save_checkpoint(first, [first.record("packed", step, 2.0, 0.1) for step in range(3)], write_nothing)
    says = "had other learning rates.*pass the --steps.*--decay constant and --warmup 0"
    with pytest.raises(PackingError, match=says):
        newest_checkpoint(limited(job, 4))


def test_resuming_nothing_is_an_error(job):
    with pytest.raises(
        PackingError, match=re.escape("has no checkpoint: start it without --resume, with --save-every N")
    ):
        newest_checkpoint(job)
    with pytest.raises(PackingError, match="--resume needs --output"):
        newest_checkpoint(dataclasses.replace(job, output=None))
    with pytest.raises(PackingError, match="--save-every needs --output"):
        save_checkpoint(dataclasses.replace(job, output=None), [], write_nothing)


def test_rates_leave_the_first_step_out_and_padding_counts_all(job):
    records = [job.record("padded", step, 2.0, 10.0 if step == 0 else 0.5) for step in range(3)]
    records.append(job.record("padded", 0, 2.0, 100.0))  # something else ran
    assert rate(records) == sorted(record.tokens / record.seconds for record in records[1:])[1]
    assert rate(records[:1]) == records[0].tokens / 10.0
    assert padding(records) == 1 - sum(r.tokens for r in records) / sum(r.slots for r in records)
    others = [dataclasses.replace(record, loss=record.loss + 0.25 * record.step) for record in records]
    assert loss_difference(records, others) == 0.5


def test_every_padded_batch_is_as_long_as_its_longest_document():
    # [3 1] [2 5] [4] -> 2 * 3 + 2 * 5 + 1 * 4
    computed = computed_tokens(plan([3, 1, 2, 5, 4], 8), batches=(2,), seed=0)
    assert computed["batches of 2, sorted"] == 2 * 5 + 2 * 3 + 1
