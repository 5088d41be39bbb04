"""Time and memory of ``pack_dataset`` beside ``trl.pack_dataset``, and how full the rows of a Trainer get.

    python -m benchmarks.pack_dataset              # 200,000 and 1,000,000 documents: some minutes, 4 GiB of disk
    python -m benchmarks.pack_dataset --count 200000
    python -m benchmarks.pack_dataset --fill       # GSM8K in a Trainer, by batch size

Documents are lognormal, of 250 tokens on average, int32, in Arrow chunks of 1,000 as ``datasets`` writes them, in a
file that is memory-mapped, or in memory. Each figure is of a fresh process that has imported both libraries. Memory
is the peak of the resident set over what the process had with the dataset open; pages of mapped files are in it. TRL
packs 1,000 documents at a time (its default) and gives rows without labels; ours packs all of them and adds labels,
unless labels=False leaves them to the collator.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._report import machine, table, versions

CAPACITY = 2048
WITHOUT = "crosspack, labels=False"
GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k_train.jsonl"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--count", type=int, nargs="*", default=[200_000, 1_000_000])
    packers = ["crosspack", WITHOUT, "trl"]
    options.add_argument("--packers", nargs="+", choices=packers, default=packers, help="ratios are to the first")
    options.add_argument("--fill", action="store_true", help="how full the rows of a Trainer get on GSM8K")
    options.add_argument("--data", type=Path, default=GSM8K, help="prompts and completions for --fill")
    options.add_argument("--one", nargs=3, metavar=("PACKER", "WHERE", "FOLDER"), help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.one:
        print(json.dumps(measure(*chosen.one)))
        return
    print(machine())
    print(versions("datasets", "pyarrow", "trl", "transformers"), end="\n\n")
    if chosen.fill:
        lines = [
            [name, str(size), f"{steps:,}", f"{real:.1%}", f"{trained:.1%}"]
            for name, size, steps, real, trained in fill(chosen.data)
        ]
        print(table(["rows of 1,024", "batch", "steps", "real tokens", "trained tokens"], lines))
        return
    header = ["", "seconds", "ratio", "peak MiB", "rows", "efficiency"]
    for count in chosen.count:
        with tempfile.TemporaryDirectory() as folder:
            tokens = write(count, Path(folder))
            for where in ("file", "memory"):
                found = {packer: in_fresh_process(packer, where, folder) for packer in chosen.packers}
                lines = []
                for packer, x in found.items():
                    ratio = x["seconds"] / found[chosen.packers[0]]["seconds"]
                    full = f"{tokens / (x['rows'] * CAPACITY):.4f}"
                    name = f"{count:,} documents in {'a file' if where == 'file' else 'memory'}, {packer}"
                    lines.append(
                        [name, f"{x['seconds']:.2f}", f"{ratio:.1f}", f"{x['peak']:,}", f"{x['rows']:,}", full]
                    )
                print(table(header, lines), end="\n\n", flush=True)


def write(count: int, folder: Path) -> int:
    """Save a dataset of ``count`` documents to the folder; returns their tokens."""
    import pyarrow as pa
    from datasets import Dataset

    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(250) - 0.9**2 / 2, 0.9, count), 1, CAPACITY).astype(np.int64)
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
    ids = pa.array(random.integers(0, 50_000, offsets[-1], dtype=np.int32))
    whole = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), ids)})
    Dataset(pa.Table.from_batches(whole.to_batches(max_chunksize=1000))).save_to_disk(folder)
    return int(offsets[-1])


def in_fresh_process(packer: str, where: str, folder: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.pack_dataset", "--one", packer, where, folder]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def measure(packer: str, where: str, folder: str) -> dict[str, Any]:
    """Seconds, MiB and rows of one packer, in this process."""
    import datasets
    import trl

    import torch_backend.trainers.hf_dataset as ours

    datasets.disable_progress_bars()
    data = datasets.load_from_disk(folder, keep_in_memory=where == "memory")
    before = peak()
    begin = time.perf_counter()
    if packer == "crosspack":
        rows = ours.pack_dataset(data, CAPACITY)
    elif packer == WITHOUT:
        rows = ours.pack_dataset(data, CAPACITY, labels=False)
    else:
        rows = trl.pack_dataset(data, CAPACITY)
    seconds = time.perf_counter() - begin
    result = {"seconds": seconds, "peak": peak() - before, "rows": len(rows)}
    for file in rows.cache_files:
        Path(file["filename"]).unlink()
    return result


def peak() -> int:
    """MiB of the largest resident set so far; ``getrusage`` would count that of the parent process too."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10


def fill(path: Path) -> Iterator[tuple[str, int, int, float, float]]:
    """Yields who makes the batches, their size, the steps of an epoch, and the shares of real and of trained tokens.

    Padded, packed batch by batch, and packed as a whole.
    """
    import datasets
    import transformers

    from crosspack.encoding.tokenizer import train_tokenizer
    from torch_backend import PackedCollator, enable_packing

    records = [json.loads(line) for line in path.read_text().split("\n") if line]
    texts = [(record["prompt"], record["completion"]) for record in records]
    tokenizer = train_tokenizer((a + b for a, b in texts), 8192)
    prompts, answers = (tokenizer(list(x), add_special_tokens=False)["input_ids"] for x in zip(*texts, strict=True))
    pairs = [(a, [*b, tokenizer.eos_token_id]) for a, b in zip(prompts, answers, strict=True)]
    data = datasets.Dataset.from_dict(
        {"input_ids": [a + b for a, b in pairs], "labels": [[-100] * len(a) + b for a, b in pairs]}
    )
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        pad_token_id=tokenizer.pad_token_id,
    )

    def trainer(size: int) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder, per_device_train_batch_size=size, use_cpu=True, report_to=[]
            )
            pad = transformers.DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100)
            model = transformers.LlamaForCausalLM(config)
            return transformers.Trainer(model, arguments, train_dataset=data, data_collator=pad)

    for size in (1, 8, 64):
        padded, by_batch, whole = trainer(size), trainer(size), enable_packing(trainer(size), capacity=1024)
        by_batch.data_collator = PackedCollator(by_batch.model, capacity=1024)
        for name, each in (("padded", padded), ("PackedCollator", by_batch), ("enable_packing", whole)):
            slots = real = trained = steps = 0
            for batch in each.get_train_dataloader():
                steps += 1
                slots += batch["input_ids"].numel()
                real += int((batch["input_ids"] != tokenizer.pad_token_id).sum())
                trained += int((batch["labels"] != -100).sum())
            yield name, size, steps, real / slots, trained / slots


if __name__ == "__main__":
    main()
