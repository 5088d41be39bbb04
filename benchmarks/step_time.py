"""Compares the time of a step that ``crosspack report --run`` predicts with the step that is measured.

    python -m benchmarks.step_time --device cuda             # two minutes on one GPU
    python -m benchmarks.step_time --tiny                    # on the CPU, to see that it runs

One calibration run at the smallest capacity, then runs of the same model on the same documents at larger ones, with
documents whose lengths have a heavy tail. The prediction knows the calibration run and the documents alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._report import machine, table, versions

SIZES = {
    "large": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
}
VOCABULARY = 32_000


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="auto")
    options.add_argument("--capacity", type=int, nargs="+", default=[4096, 16_384, 32_768])
    options.add_argument("--tokens", type=int, default=32_768, help="of a step, in rows of every capacity")
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--tiny", action="store_true", help="a small model, capacities and steps")
    chosen = options.parse_args(arguments)
    if chosen.tiny:
        chosen.capacity, chosen.tokens, chosen.steps = [128, 512], 512, 4
    print(machine(), versions("torch", "transformers", "crosspack"), sep="\n", end="\n\n")
    with tempfile.TemporaryDirectory() as made:
        _compare(Path(made), chosen)


def _compare(folder: Path, chosen: argparse.Namespace) -> None:
    capacities = sorted(chosen.capacity)
    model, data = _model(folder, tiny=chosen.tiny), _data(folder, capacities[-1], chosen.tokens * chosen.steps)
    lines = []
    for capacity in capacities:
        output = folder / f"run-{capacity}"
        given = ["--data", data, "--capacity", capacity, "--overflow", "split", "--loss", "all"]
        more = [
            "--rows-per-step",
            max(1, chosen.tokens // capacity),
            "--steps",
            chosen.steps,
            "--device",
            chosen.device,
        ]
        dtype = [] if chosen.tiny else ["--dtype", "bfloat16"]
        _crosspack("train", "--model", model, *given, *more, *dtype, "--no-compile", "--output", output)
        steps = json.loads((output / "crosspack.json").read_text())["runs"]["packed"][1:]
        measured = float(np.median([step["seconds"] for step in steps]))
        found = _crosspack("report", *given, "--run", folder / f"run-{capacities[0]}", "--json")
        predicted = json.loads(found)["time"]["step_seconds"]["mean"]
        off = f"{predicted / measured - 1:+.1%}" if capacity > capacities[0] else "calibration"
        lines.append([f"{capacity:,}", f"{measured * 1e3:,.1f}", f"{predicted * 1e3:,.1f}", off])
    print(table(["capacity", "measured, ms a step", "predicted, ms", "off"], lines))


def _model(folder: Path, *, tiny: bool) -> Path:
    """A config of a Llama with a tokenizer beside it, whose ids the documents have."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w2").save_pretrained(folder)
    sizes: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY}
    sizes |= SIZES["tiny" if tiny else "large"] | {"max_position_embeddings": 65_536, "tie_word_embeddings": True}
    path = folder / "config.json"
    path.write_text(json.dumps(sizes))
    return path


def _data(folder: Path, longest: int, tokens: int) -> Path:
    """Documents of random ids that fill the steps, with lognormal lengths up to ``longest``."""
    random = np.random.default_rng(0)
    path, written = folder / "data.jsonl", 0
    with path.open("w", encoding="utf-8") as file:
        while written < 1.1 * tokens:
            size = int(np.clip(random.lognormal(np.log(longest / 16), 1.3), 2, longest))
            file.write(json.dumps({"input_ids": random.integers(3, VOCABULARY, size).tolist()}) + "\n")
            written += size
    return path


def _crosspack(*arguments: Any) -> str:
    command = [sys.executable, "-m", "crosspack", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
