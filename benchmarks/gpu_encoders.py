"""Encoders in the shape of ModernBERT-base: masked language models and classes of documents, padded and packed.

    python -m benchmarks.gpu_encoders                        # bfloat16 weights, fused AdamW
    python -m benchmarks.gpu_encoders --match "packed"
    python -m benchmarks.gpu_encoders --tiny                 # every contender on the CPU; its times mean nothing

Documents have lognormal lengths of mean 128, 512 at most. Every contender makes the same steps of 128 documents: padded
to the longest of the step, in the stock model (eager, compiled, and with flash-attention 2, which takes padding out for
attention), or packed into one row of 512-token multiples. Masked language models compute logits of masked tokens alone
(``sparse_prediction``), in every contender. Figures are real tokens per second, padding not counted.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

if "--tiny" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported

import numpy as np
import torch
from torch import Tensor

import torch_backend
from benchmarks.gpu import as_table, header, in_one_line, survived, write
from benchmarks.gpu_clock import DEVICE, TOY, Result, set_match, synchronize, wanted
from benchmarks.gpu_workload import DTYPE

SECTION = "encoders" if not TOY else "encoders, toy"
DOCUMENTS = 8 if TOY else 128  # of a step
MEAN, LONGEST, SPREAD = (12, 32, 0.8) if TOY else (128, 512, 0.8)
STEPS, WARM_UP = (1, 2) if TOY else (20, 6)
MASKED, CLASSES, PAD, MASK, FIRST = 0.3, 4, 0, 1, 4
STOCK = {"padded, eager": "sdpa", "padded, compiled": "sdpa", "padded, flash_attention_2": "flash_attention_2"}
PACKED = ("packed, make_train_step", "packed, plain loop")
Step = Callable[[dict[str, Any]], Any]


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


def padded(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of one document in each row, to the longest."""
    longest = max(len(x["input_ids"]) for x in documents)

    def rows(values: list[Any], fill: int) -> Tensor:
        return torch.stack([torch.from_numpy(np.pad(x, (0, longest - len(x)), constant_values=fill)) for x in values])

    ids, labels = [x["input_ids"] for x in documents], [x["labels"] for x in documents]
    mask = rows([np.ones(len(x), np.int64) for x in ids], 0)
    by_token = isinstance(labels[0], np.ndarray)
    target = rows(labels, -100) if by_token else torch.tensor(labels)
    return {"input_ids": rows(ids, PAD), "attention_mask": mask, "labels": target}


def packer(model: Any) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """Packs a step into one row, whose length is the same in every step where documents allow it."""
    capacity = -(-int(DOCUMENTS * MEAN * 1.15) // LONGEST) * LONGEST
    return torch_backend.PackedCollator(model, capacity=capacity, max_seqlen=LONGEST, bucket=DOCUMENTS)


def plain(model: Any) -> Step:
    """Forward, backward and update, as a loop has them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=not TOY)

    def step(batch: dict[str, Any]) -> Any:
        batch = {k: x.to(DEVICE, non_blocking=True) if isinstance(x, Tensor) else x for k, x in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def contender(name: str, task: str) -> tuple[Step, Callable[[list[dict[str, Any]]], dict[str, Any]]]:
    """A step, and what makes its batches."""
    if name in STOCK:
        model = build(task, STOCK[name])
        return plain(torch.compile(model, dynamic=True) if "compiled" in name and not TOY else model), padded
    model = torch_backend.patch(build(task), verify=False)
    if name == PACKED[0]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=not TOY)
        step: Step = torch_backend.make_train_step(model, optimizer)
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
    yield Result(SECTION, task, name, 0.0 if TOY else torch.cuda.max_memory_allocated() / 2**30, "GiB at most")
    yield Result(SECTION, task, name, float(loss), "loss after the warm-up")


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--match", default="", metavar="PATTERN", help="only contenders whose name it matches")
    options.add_argument("--output", type=Path, help="folder for gpu.json")
    options.add_argument("--tiny", action="store_true", help="on the CPU, to see that everything runs")
    chosen = options.parse_args(arguments)
    set_match(chosen.match)
    about = header()
    print(about, flush=True)
    results: list[Result] = []
    for task in ("masked LM", "classes of documents"):
        for name in (*PACKED, *STOCK):
            if not wanted(name):
                continue
            found = list(survived(name, measure(name, task)))
            results += found
            print(f"{task}, {name}: {in_one_line(found)}", flush=True)
            if chosen.output:
                write(chosen.output, about, results)
            gc.collect()
            if not TOY:
                torch.cuda.empty_cache()
    print(f"\n{as_table(results)}")
    return results


if __name__ == "__main__":
    main()
