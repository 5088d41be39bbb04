"""A small training job for the trainers of every backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from crosspack.encoding.text import EncodedDocument
from packing_core.planning.plan import plan
from packing_core.training.job import TrainJob
from packing_core.training.options import Options
from packing_core.training.records import StepRecord
from packing_core.training.schedule import Corpus, Schedule

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}


def small_job(model: Any, **options: Any) -> TrainJob:
    """Six steps of four rows of 32 tokens, over an epoch's end; the first third of each document is not trained."""
    rng = np.random.default_rng(3)
    documents = []
    for length in rng.integers(2, 30, 40):
        trained = np.arange(length) >= length // 3  # a prompt, as far as there is one
        documents.append(EncodedDocument(rng.integers(0, 64, length).astype(np.int32), trained))
    corpus = Corpus.collect(iter(documents))
    plans = tuple(plan(corpus.documents.lengths, 32, seed=epoch) for epoch in range(2))
    schedule = Schedule(corpus, plans, rows_per_step=4, padded_batch=4, limit=6)
    return TrainJob(model=model, schedule=schedule, options=Options(lr=1e-2, warmup=0.2), **options)


def with_options(job: TrainJob, **options: Any) -> TrainJob:
    return dataclasses.replace(job, options=dataclasses.replace(job.options, **options))


def begun_and_resumed(train: Callable[[TrainJob], Any], job: TrainJob, *, step: int, **resumed: Any) -> Any:
    """Returns the result of a job that ended at a step, as if its process were killed, and was resumed.

    ``resumed`` are the fields of the job that differ when it goes on.
    """

    class Killed(Exception):
        pass

    def kill(record: StepRecord) -> None:
        if record.step == step:
            raise Killed

    with pytest.raises(Killed):
        train(dataclasses.replace(job, on_step=kill))
    return train(dataclasses.replace(job, resume=True, **resumed))


def losses(result: Any, run: str = "packed") -> list[float]:
    return [record.loss for record in result.records[run]]
