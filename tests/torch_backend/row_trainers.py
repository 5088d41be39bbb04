"""Trainers on rows of numbered documents, and which documents the rows hold."""

from __future__ import annotations

import numpy as np
import transformers

from tests.torch_backend.trainers.test_trainer import CAPACITY, arguments, datasets, llama
from torch_backend.trainers.enable_packing import enable_packing


def numbered(count: int = 60, longest: int = 24) -> datasets.Dataset:
    """Document d is the token d + 3, 2 to ``longest`` times."""
    lengths = np.random.default_rng(0).integers(2, longest + 1, count)
    return datasets.Dataset.from_dict({"input_ids": [[d + 3] * n for d, n in enumerate(lengths.tolist())]})


def build(tmp_path, data, *, kind=transformers.Trainer, size: int = 2, **options):
    given = arguments(transformers.TrainingArguments, tmp_path)
    given.per_device_train_batch_size = size
    for name, value in options.items():
        setattr(given, name, value)
    return kind(llama(), given, train_dataset=data)


def enabled(trainer, capacity: int | None = CAPACITY, **options):
    return enable_packing(trainer, capacity=capacity, verify=False, **options)


def held(batches) -> list[tuple[int, int]]:
    """(document, tokens) of every segment in some batches."""
    found = []
    for batch in batches:
        for ids in batch["input_ids"].flatten().split(batch["packed_lengths"]):
            assert (ids == ids[0]).all()
            if ids[0]:
                found.append((int(ids[0]) - 3, len(ids)))
    return found


def lengths_of(data) -> list[tuple[int, int]]:
    return [(d, len(ids)) for d, ids in enumerate(data["input_ids"])]
