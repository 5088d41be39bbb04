"""What every backend shares: learning rates, records, the identity of a run and its checkpoints."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest

from crosspack.cli.tables import loss_difference, padded_slots, padding, rate
from crosspack.cli.text import Document
from packing_core.errors import PackingError
from packing_core.plan import plan
from packing_core.training.checkpoints import newest_checkpoint, save_checkpoint
from packing_core.training.job import Options, TrainJob, trainer
from packing_core.training.schedule import Corpus, Schedule


@pytest.fixture
def job(tmp_path) -> TrainJob:
    documents = [Document(np.arange(n, dtype=np.int32), np.ones(n, bool)) for n in (5, 3, 4, 4, 7, 2, 6)]
    corpus = Corpus.collect(iter(documents))
    schedule = Schedule(corpus, (plan(corpus.documents.lengths, 8),), rows_per_step=1, padded_batch=2)
    return TrainJob(model={"model_type": "llama"}, schedule=schedule, output=tmp_path / "run")


def test_the_rate_rises_to_its_peak_and_falls_to_zero():
    options = Options(lr=1.0, warmup=0.2, decay="cosine")
    rates = [options.learning_rate(step, 10) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    assert 0 < rates[-1] < 0.05
    assert Options(lr=1.0, warmup=0.0, decay="linear").learning_rate(5, 10) == 0.5
    assert Options(lr=1.0, warmup=0.0, decay="constant").learning_rate(9, 10) == 1.0
    assert Options(lr=1.0, warmup=0.0, decay="cosine").learning_rate(5, 10) == pytest.approx(0.5)


def test_a_record_says_what_its_step_did_and_is_reported(job):
    seen = []
    record = dataclasses.replace(job, on_step=seen.append).record("packed", 0, 2.5, 0.1)
    assert seen == [record]
    assert (record.tokens, record.slots) == (job.schedule.steps[0].n_tokens, 8)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_the_run(job, loss):
    with pytest.raises(PackingError, match=rf"the loss of step 1 \(packed\) is {loss}: lower --lr"):
        job.record("packed", 1, loss, 0.1)


def test_tokens_without_an_embedding_are_refused(job):
    job.check_vocabulary(7)
    with pytest.raises(PackingError, match="the data has token 6 and the model 6 embeddings: pass the model's own"):
        job.check_vocabulary(6)


def test_an_unknown_backend_names_the_installed_ones():
    with pytest.raises(PackingError, match="--backend abacus: the installed ones are jax, torch"):
        trainer("abacus")


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
    other = dataclasses.replace(job, options=Options(lr=0.5, seed=3))
    with pytest.raises(PackingError, match="was written with another lr, seed: pass the options it was started with"):
        newest_checkpoint(other)
    documents = job.schedule.corpus.documents
    replanned = dataclasses.replace(job.schedule, plans=(plan(documents.lengths, 9),))
    with pytest.raises(PackingError, match="was written with another plan"):
        newest_checkpoint(dataclasses.replace(job, schedule=replanned))


def test_resuming_nothing_is_an_error(job):
    with pytest.raises(PackingError, match=re.escape("has no checkpoint; start it with --save-every N")):
        newest_checkpoint(job)
    with pytest.raises(PackingError, match="--resume needs --output"):
        newest_checkpoint(dataclasses.replace(job, output=None))
    with pytest.raises(PackingError, match="--save-every needs --output"):
        save_checkpoint(dataclasses.replace(job, output=None), [], write_nothing)


def test_rates_leave_the_first_step_out_and_padding_counts_all(job):
    records = [job.record("padded", step, 2.0, 10.0 if step == 0 else 0.5) for step in range(3)]
    assert rate(records) == sum(record.tokens for record in records[1:]) / 1.0
    assert rate(records[:1]) == records[0].tokens / 10.0
    assert padding(records) == 1 - sum(r.tokens for r in records) / sum(r.slots for r in records)
    others = [dataclasses.replace(record, loss=record.loss + 0.25 * record.step) for record in records]
    assert loss_difference(records, others) == 0.5


def test_padded_slots_pad_every_batch_to_its_longest():
    # [3 1] [2 5] [4] -> 2 * 3 + 2 * 5 + 1 * 4
    assert padded_slots(np.array([3, 1, 2, 5, 4]), 2) == 20
