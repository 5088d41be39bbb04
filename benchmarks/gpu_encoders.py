"""Encoders in the shape of ModernBERT-base: masked language models and classes of documents, padded and packed.

    python -m benchmarks.gpu_encoders                        # bfloat16 weights, fused AdamW
    python -m benchmarks.gpu_encoders --task classes --match "packed|compiled"
    python -m benchmarks.gpu_encoders --budget 400           # begin no contender after so many seconds
    python -m benchmarks.gpu_encoders --tiny                 # every contender on the CPU; its times mean nothing

Documents have lognormal lengths of mean 128, 512 at most. Every contender makes the same steps of 128 documents: packed
into one row of 512-token multiples, or padded in the stock model. Padded to 512 tokens, 24% of a batch is real; sorted
by length and padded in four micro-batches, 61%. Both run eager and compiled, and with flash-attention 2, which takes
padding out for attention; sorted ones with flash-attention 4 as well. Masked language models compute logits of masked
tokens alone (``sparse_prediction``), in every contender. Figures are real tokens per second, padding not counted. A
contender that fails, as one whose package is not installed does, is a line in the table.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

if "--tiny" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported

import numpy as np
import torch
from torch import Tensor

import torch_backend
from benchmarks.gpu import collected, parsed, parser, survived
from benchmarks.gpu_clock import DEVICE, TOY, Result, free, highest_gib, seconds_left, synchronize, wanted
from benchmarks.gpu_workload import DTYPE

SECTION = "encoders" if not TOY else "encoders, toy"
DOCUMENTS = 8 if TOY else 128  # of a step
MEAN, LONGEST, SPREAD = (12, 32, 0.8) if TOY else (128, 512, 0.8)
STEPS, WARM_UP = (1, 2) if TOY else (20, 6)
MASKED, CLASSES, PAD, MASK, FIRST = 0.3, 4, 0, 1, 4
BY_LENGTH = 4  # micro-batches of a step whose documents are sorted
STOCK = {
    "padded, eager": "sdpa",
    "padded, compiled": "sdpa",
    "padded by length, eager": "sdpa",
    "padded by length, compiled": "sdpa",
    "padded, flash_attention_2": "flash_attention_2",
    "padded by length, flash_attention_2": "flash_attention_2",
    "padded by length, flash_attention_4": "flash_attention_4",
}
TASKS = {"masked": "masked LM", "classes": "classes of documents"}
PACKED = ("packed, make_train_step", "packed, make_train_step(compile=False)", "packed, plain loop")
Batch = dict[str, Any]
Step = Callable[[list[Batch]], Any]
Collate = Callable[[list[dict[str, Any]]], list[Batch]]


def config() -> Any:
    """ModernBERT-base, or something tiny with the same kinds of layers."""
    from transformers import ModernBertConfig

    ids = {"pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    sizes = {**sizes, "vocab_size": 96} if TOY else {}
    return ModernBertConfig(**ids, **sizes, num_labels=CLASSES, sparse_prediction=True, classifier_pooling="mean")


def build(task: str, attention: str = "sdpa") -> Any:
    import transformers

    torch.manual_seed(0)
    auto = transformers.AutoModelForMaskedLM if task == "masked LM" else transformers.AutoModelForSequenceClassification
    with torch.device(DEVICE):
        return auto.from_config(config(), attn_implementation=attention, dtype=DTYPE).train()


def steps(task: str) -> list[list[dict[str, Any]]]:
    """The documents of every step, with labels per token or per document."""
    generator = np.random.default_rng(0)
    vocabulary = config().vocab_size

    def document() -> dict[str, Any]:
        length = int(np.clip(generator.lognormal(np.log(MEAN) - SPREAD**2 / 2, SPREAD), 4, LONGEST))
        ids = generator.integers(FIRST, vocabulary, length)
        if task != "masked LM":
            return {"input_ids": ids, "labels": int(ids[0]) % CLASSES}
        hidden = generator.random(length) < MASKED
        return {"input_ids": np.where(hidden, MASK, ids), "labels": np.where(hidden, ids, -100)}

    return [[document() for _ in range(DOCUMENTS)] for _ in range(WARM_UP + STEPS)]


def padded(documents: list[dict[str, Any]], longest: int) -> Batch:
    """A batch of one document in each row, padded to ``longest`` tokens."""

    def rows(values: list[Any], fill: int) -> Tensor:
        return torch.stack([torch.from_numpy(np.pad(x, (0, longest - len(x)), constant_values=fill)) for x in values])

    ids, labels = [x["input_ids"] for x in documents], [x["labels"] for x in documents]
    mask = rows([np.ones(len(x), np.int64) for x in ids], 0)
    by_token = isinstance(labels[0], np.ndarray)
    target = rows(labels, -100) if by_token else torch.tensor(labels)
    return {"input_ids": rows(ids, PAD), "attention_mask": mask, "labels": target}


def whole(documents: list[dict[str, Any]]) -> list[Batch]:
    """A step as one batch of fixed size, which is compiled once."""
    return [padded(documents, LONGEST)]


def by_length(documents: list[dict[str, Any]]) -> list[Batch]:
    """A step as micro-batches of documents of similar lengths, each padded to its longest."""
    ordered, size = sorted(documents, key=lambda x: len(x["input_ids"])), DOCUMENTS // BY_LENGTH
    parts = [ordered[i : i + size] for i in range(0, DOCUMENTS, size)]
    return [padded(part, len(part[-1]["input_ids"])) for part in parts]


def packer(model: Any) -> Collate:
    """Packs a step into one row, whose length is the same in every step where documents allow it."""
    capacity = -(-int(DOCUMENTS * MEAN * 1.15) // LONGEST) * LONGEST
    collate = torch_backend.PackedCollator(model, capacity=capacity, max_seqlen=LONGEST, bucket=DOCUMENTS)
    return lambda documents: [collate(documents)]


def plain(model: Any) -> Step:
    """Forward, backward and update, as a loop has them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=not TOY)

    def step(batches: list[Batch]) -> Any:
        total = 0.0
        for batch in batches:
            given = {k: x.to(DEVICE, non_blocking=True) if isinstance(x, Tensor) else x for k, x in batch.items()}
            loss = model(**given).loss / len(batches)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def contender(name: str, task: str) -> tuple[Step, Collate]:
    """A step, and what makes its batches."""
    if name in STOCK:
        model, sorts = build(task, STOCK[name]), "by length" in name
        compiled = torch.compile(model, dynamic=sorts) if "compiled" in name and not TOY else model
        return plain(compiled), by_length if sorts else whole
    model = torch_backend.patch(build(task), verify=False)
    if name != PACKED[-1]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=not TOY)
        compiles: Any = "auto" if name == PACKED[0] else False
        step: Step = torch_backend.make_train_step(model, optimizer, compile=compiles)
        return step, packer(model)
    return plain(model), packer(model)


def measure(name: str, task: str) -> Iterator[Result]:
    try:
        step, collate = contender(name, task)
        given = steps(task)
        batches = [collate(documents) for documents in given]
        for batch in batches[:WARM_UP]:
            first = step(batch)
        if not TOY:
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        began = time.perf_counter()
        for batch in batches[WARM_UP:]:
            step(batch)
        synchronize()
        seconds = time.perf_counter() - began
    except Exception as failure:  # a contender that fails is a line in the table
        reason = str(failure).strip().splitlines()[0][:120] if str(failure) else ""
        yield Result(SECTION, task, name, None, "tokens/s", f"{type(failure).__name__}: {reason}")
        return
    tokens = sum(len(document["input_ids"]) for documents in given[WARM_UP:] for document in documents)
    loss = first["loss"] if isinstance(first, dict) else first
    yield Result(SECTION, task, name, tokens / seconds, "tokens/s")
    yield Result(SECTION, task, name, highest_gib(), "GiB at most")
    yield Result(SECTION, task, name, float(loss), "loss after the warm-up")


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__)
    options.add_argument("--task", choices=TASKS, nargs="+", default=list(TASKS))
    options.add_argument("--tiny", action="store_true", help="on the CPU, to see that everything runs")
    chosen = parsed(options, arguments)
    return collected(_run([TASKS[name] for name in chosen.task]), chosen.output)


def _run(tasks: Sequence[str]) -> Iterator[Result]:
    for task, name in product(tasks, filter(wanted, (*PACKED, *STOCK))):
        if seconds_left() > 0:
            yield from survived(name, measure(name, task))
            free()


if __name__ == "__main__":
    main()
