"""The loss of a trained model: each document alone, the same documents packed by stock transformers, and patched.

    python -m benchmarks.real_weights HuggingFaceTB/SmolLM2-135M-Instruct gsm8k_train.jsonl

Every document is ``prompt``, a newline, ``completion`` and the end-of-text token; all tokens but the first are targets.
Stock packing is ``DataCollatorWithFlattening``, whose ``position_ids`` start anew in every document, and
``model(**batch)``. Float32, SDPA, on the CPU; a minute for 135 million weights. The model is a folder or a hub name,
whose weights transformers downloads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening

import crosspack
from benchmarks.report import machine, table, versions

Document = dict[str, list[int]]


def encoded(data: Path, tokenizer: Any, count: int) -> list[Document]:
    """Returns the first ``count`` records of a JSONL file as token ids."""
    with data.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in islice(lines, count)]
    texts = (f"{record['prompt']}\n{record['completion']}" for record in records)
    return [{"input_ids": [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]} for text in texts]


@torch.no_grad()
def losses(model: Any, documents: Sequence[Document]) -> Iterator[tuple[str, float]]:
    """Yields each way to compute the mean loss of all targets, and that loss."""
    alone, targets = 0.0, 0
    for document in documents:
        ids = torch.tensor([document["input_ids"]])
        alone += float(model(input_ids=ids, labels=ids).loss) * (ids.numel() - 1)
        targets += ids.numel() - 1
    yield "each document alone", alone / targets
    flat = DataCollatorWithFlattening(return_tensors="pt")(documents)
    yield "stock, flattened, plain loop", float(model(**flat).loss)
    yield "stock, flattened, `use_cache=False`", float(model(**flat, use_cache=False).loss)
    patched = crosspack.patch(model)
    batch = crosspack.PackedCollator(patched)(documents)
    yield "`crosspack.patch(model)`", float(patched(**batch).loss)


def main(arguments: Sequence[str] | None = None) -> list[tuple[str, float]]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", help="a folder or a hub name")
    options.add_argument("data", type=Path, help="a .jsonl file with prompt and completion")
    options.add_argument("--documents", type=int, default=10)
    chosen = options.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    documents = encoded(chosen.data, AutoTokenizer.from_pretrained(chosen.model), chosen.documents)
    figures = list(losses(model, documents))
    tokens = sum(len(document["input_ids"]) for document in documents)
    print(machine(), versions("torch", "transformers"), sep="\n")
    print(f"{chosen.model}: {len(documents)} documents, {tokens - len(documents):,} targets\n")
    print(table(["", "loss"], [[name, f"{loss:.6f}"] for name, loss in figures]))
    return figures


if __name__ == "__main__":
    main()
