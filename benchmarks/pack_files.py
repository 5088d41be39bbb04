"""``crosspack pack`` on a file of text: MB/s by workers, beside the tokenizer alone and TRL's way, and peak memory.

    python -m benchmarks.pack_files --megabytes 32 --workers 1 2
    python -m benchmarks.pack_files --megabytes 1000 --workers 2 --lines

The text is the Python sources and documents of installed packages, as JSON Lines of 64 to 3,000 characters. The
tokenizer is a byte-level BPE of 32,000 entries trained on it, or with ``--lines`` a split at line ends, which is many
times faster, so that memory can be measured on large files. Peak memory is the sum over a process and its children,
sampled twenty times a second; pages that processes share count once for each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import psutil

CAPACITY = 2048

ALONE = """
import json, sys, time, resource
from transformers import AutoTokenizer
rust = AutoTokenizer.from_pretrained(sys.argv[2]).backend_tokenizer
texts = [json.loads(line)["text"] for line in open(sys.argv[1])]
begin, cpu = time.perf_counter(), time.process_time()
for first in range(0, len(texts), 350):
    rust.encode_batch_fast(texts[first : first + 350], add_special_tokens=False)
print(json.dumps({"wall": time.perf_counter() - begin, "cpu": time.process_time() - cpu}))
"""

TRL = """
import json, sys, time
begin = time.perf_counter()
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import pack_dataset
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
data = load_dataset("json", data_files=sys.argv[1], split="train", cache_dir=sys.argv[4])
def encode(batch):
    return {"input_ids": [ids + [tokenizer.eos_token_id] for ids in tokenizer(batch["text"])["input_ids"]]}
data = data.map(encode, batched=True, remove_columns=data.column_names, num_proc=int(sys.argv[3]))
data = pack_dataset(data, 2048, strategy="bfd")
data.to_parquet(sys.argv[4] + "/packed.parquet")
print(json.dumps({"rows": len(data), "tokens": sum(map(len, data["input_ids"]))}))
"""


def texts() -> Iterator[str]:
    """Stretches of random lengths, the same ones on the same installation, without end."""
    lengths = cycle(np.random.default_rng(0).lognormal(7, 0.9, 1 << 16).clip(64, 3000).astype(int).tolist())
    root = Path(sysconfig.get_paths()["purelib"])
    files = sorted([*root.glob("transformers/models/*/*.py"), *root.glob("numpy/**/*.py"), *root.glob("**/*.md")])
    for file in cycle(files):
        content = file.read_text(errors="replace")
        at = 0
        while at < len(content):
            end = at + next(lengths)
            yield content[at:end]
            at = end


def write_data(path: Path, megabytes: int) -> int:
    """Write the file; returns its bytes."""
    with open(path, "w") as file:
        for text in texts():
            file.write(json.dumps({"text": text}) + "\n")
            if file.tell() >= megabytes * 1_000_000:
                return file.tell()
    raise AssertionError("the texts do not end")


def write_tokenizer(folder: Path, *, lines: bool) -> None:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    from crosspack.encoding.tokenizer import train_tokenizer

    if not lines:
        sample = [text for text, _ in zip(texts(), range(2000), strict=False)]
        train_tokenizer(sample, 32_000).save_pretrained(folder)
        return
    names = {line for text, _ in zip(texts(), range(1000), strict=False) for line in text.split("\n")}
    vocabulary = {name: n for n, name in enumerate(["<unk>", "<eos>", *sorted(names)[:30_000]])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.CharDelimiterSplit("\n")
    PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)


def measured(command: list[str]) -> dict[str, Any]:
    """Run a command: seconds, processor seconds and peak memory in MB with all children, and its last line as JSON."""
    begin = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        seen, ended = _Seen(), threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.pid, seen, ended))
        watcher.start()
        out, _ = process.communicate()
        ended.set()
        watcher.join()
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"{' '.join(command)[:200]} failed: {errors.read()[-2000:]}")
    found = json.loads(out) if out.lstrip().startswith("{\n") else json.loads(out.strip().splitlines()[-1])
    wall = time.perf_counter() - begin
    return {"wall": wall, "cpu": sum(seen.seconds.values()), "peak": seen.peak / 1e6, **found}


@dataclass
class _Seen:
    """Processor seconds of each process when it was last seen, and the most memory of all together."""

    seconds: dict[int, float] = field(default_factory=dict)
    peak: int = 0


def _watch(pid: int, seen: _Seen, ended: threading.Event) -> None:
    while not ended.wait(0.05):
        total = 0
        try:
            process = psutil.Process(pid)
            for each in [process, *process.children(recursive=True)]:
                total += each.memory_info().rss
                seen.seconds[each.pid] = sum(each.cpu_times()[:2])
        except psutil.Error:
            continue
        seen.peak = max(seen.peak, total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--trl", type=int, nargs="*", default=[], help="numbers of processes for datasets.map")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data, tokenizer = folder / "data.jsonl", folder / "tokenizer"
        size = write_data(data, given.megabytes) / 1e6
        write_tokenizer(tokenizer, lines=given.lines)
        print(f"{size:,.0f} MB of JSON Lines", flush=True)
        print(f"{'':24}{'s':>8}{'MB/s':>8}{'CPU s':>8}{'MB/CPU s':>10}{'peak MB':>9}", flush=True)
        if not given.lines:
            _line("tokenizer alone", size, measured([sys.executable, "-c", ALONE, str(data), str(tokenizer)]))
        few = folder / "few.jsonl"
        few.write_text("".join(json.dumps({"text": text}) + "\n" for text, _ in zip(texts(), range(8), strict=False)))
        for count in given.workers:
            options = ["--tokenizer", tokenizer, "--capacity", CAPACITY, "--workers", count, "--json"]
            command = [sys.executable, "-m", "crosspack", "pack", *map(str, options)]
            small = ["--data", str(few), "--block-size", "500", "--output", str(folder / f"few-{count}")]
            start = measured([*command, *small])
            found = measured([*command, "--data", str(data), "--output", str(folder / f"all-{count}")])
            shutil.rmtree(folder / f"all-{count}")
            said = f"efficiency {found['efficiency']:.2%}; {start['wall']:.1f} s, {start['cpu']:.1f} CPU s to start"
            _line(f"crosspack, {count} workers", size, found, said)
        for count in given.trl:
            command = [sys.executable, "-c", TRL, str(data), str(tokenizer), str(count), str(folder / "trl")]
            found = measured(command)
            _line(
                f"TRL, {count} processes", size, found, f"efficiency {found['tokens'] / found['rows'] / CAPACITY:.2%}"
            )


def _line(name: str, size: float, found: dict[str, Any], more: str = "") -> None:
    wall, cpu, peak = found["wall"], found["cpu"], found.get("peak", 0)
    print(f"{name:24}{wall:8.1f}{size / wall:8.2f}{cpu:8.1f}{size / cpu:10.2f}{peak:9.0f}  {more}", flush=True)


if __name__ == "__main__":
    main()
