"""The data of ``benchmarks.does_it_matter``: documents to train on and held-out ones, with what of them is trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from crosspack.encoding.tokenizer import train_tokenizer
from packing_core.training.schedule import Corpus, Document

KEYS, VALUES = 16, 8  # of the retrieval task
PAIRS = 4, 12  # fewest and most pairs of a document
VOCABULARY = 512  # of the tokenizer of the text


@dataclass(frozen=True)
class Task:
    """Documents of one kind.

    Attributes:
        vocabulary: number of token ids.
        capacity: tokens of a row.
        held_out: documents that are never trained.
        draw: as many new documents as asked for, from a random generator.
    """

    vocabulary: int
    capacity: int
    held_out: Corpus
    draw: Callable[[np.random.Generator, int], Iterator[Document]]


def retrieval(held_out: int, capacity: int) -> Task:
    """Pairs of a key and a value, each one token, then every key again in another order, followed by its pair.

    Only the pairs that follow a key are trained. Other documents have the same keys with other values, so a model that
    sees them may take a wrong one.
    """

    def draw(random: np.random.Generator, count: int) -> Iterator[Document]:
        for _ in range(count):
            size = int(random.integers(PAIRS[0], PAIRS[1] + 1))
            keys = random.permutation(KEYS)[:size]
            pairs = KEYS + keys * VALUES + random.integers(0, VALUES, size)
            again = random.permutation(size)
            asked = np.stack([keys[again], pairs[again]], axis=1).reshape(-1)
            answers = np.append(np.zeros(size, np.bool_), np.arange(2 * size) % 2 == 1)
            yield Document(np.append(pairs, asked).astype(np.int32), answers)

    return Task(KEYS + KEYS * VALUES, capacity, Corpus.collect(draw(np.random.default_rng(10**6), held_out)), draw)


def text(data: Path, held_out: int, capacity: int, tokenizer: Any = None) -> Task:
    """Questions and answers of GSM8K, of which the answers are trained.

    Args:
        tokenizer: of a trained model; by default a byte-level BPE of the training part.
    """
    with data.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    order = np.random.default_rng(10**6).permutation(len(records))
    held, trained = order[:held_out], order[held_out:]
    if tokenizer is None:
        some = (f"{records[n]['prompt']}\n{records[n]['completion']}" for n in islice(trained.tolist(), 2000))
        tokenizer = train_tokenizer(some, VOCABULARY)

    @cache
    def document(number: int) -> Document:
        prompt = tokenizer(records[number]["prompt"] + "\n", add_special_tokens=False)["input_ids"]
        answer = tokenizer(records[number]["completion"], add_special_tokens=False)["input_ids"]
        ids = np.array([*prompt, *answer, tokenizer.eos_token_id], np.int32)[:capacity]
        return Document(ids, np.arange(len(ids)) >= len(prompt))

    def draw(random: np.random.Generator, count: int) -> Iterator[Document]:
        for number in islice(_endless(random, trained), count):
            found = document(number)
            if found.has_target:
                yield found

    return Task(len(tokenizer), capacity, Corpus.collect(map(document, held.tolist())), draw)


def _endless(random: np.random.Generator, numbers: np.ndarray) -> Iterator[int]:
    while True:
        yield from random.permutation(numbers).tolist()
