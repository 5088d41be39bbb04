"""Measures whether the composition of rows matters for training: gradient noise and loss curves of rows by three rules.

    python -m benchmarks.composition_training                  # about 20 minutes on one core
    python -m benchmarks.composition_training --set gsm8k      # one set
    python -m benchmarks.composition_training --quick          # a minute, to see that it runs

A step takes the same number of tokens under each rule: some rows of ``best_fit``, as many rows of ``mixed``, or
documents in random order until it has those tokens (``random``, training without packing). Packing is exact, so the
gradient of a step is the sum of the gradients of its documents over the number of its trained tokens, whatever rows
hold them. So the gradient of every document is computed once, alone, and a step of any rule is a sum. Gradients are
kept as count sketches (Charikar, Chen and Farach-Colton 2002), which keep squared norms on average; all rules share the
same sketches.

Gradient noise is the mean over steps of ``|g - G|^2 / |G|^2``, with ``g`` the gradient of a step and ``G`` that of all
documents. The model is a Qwen2 of two layers; its tokenizer is a byte-level BPE of the set. Needs torch, transformers
and tokenizers; no network.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import crosspack
from benchmarks._report import machine, table, versions
from crosspack.encoding.tokenizer import train_tokenizer
from packing_core import plan
from packing_core.batches.stored import IGNORE_INDEX

GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k_train.jsonl"
VOCABULARY = 512
SKETCH = 2048  # entries of the sketch of a gradient
PEAK = 3e-3  # learning rate

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
Rule = Literal["random", "mixed", "best_fit"]


@dataclass(frozen=True)
class Data:
    """Documents and how steps are made of them.

    Attributes:
        documents: token ids, none longer than ``capacity``.
        prompts: [N] tokens at the beginning of each document that are not trained, at least 1.
        held_out: further documents, for the loss.
        rows: rows of ``capacity`` tokens in a step.
    """

    name: str
    documents: list[list[int]]
    prompts: Int64
    held_out: list[dict[str, Any]]
    capacity: int
    rows: int

    @property
    def lengths(self) -> Int64:
        return np.array([len(document) for document in self.documents])

    def features(self, numbers: Int64) -> list[dict[str, Any]]:
        """Makes features for a collator from these documents."""
        return [_feature(self.documents[n], int(self.prompts[n])) for n in numbers.tolist()]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--set", choices=sorted(SETS), action="append", help="only this set; may be repeated")
    options.add_argument("--gsm8k", type=Path, default=GSM8K, help="a .jsonl file of prompt and completion")
    options.add_argument("--documents", type=int, default=1500, help="documents of a set")
    options.add_argument("--steps", type=int, default=60, help="steps of a training run")
    options.add_argument("--seeds", type=int, default=3, help="training runs by each rule")
    options.add_argument("--draws", type=int, default=20, help="orders of rows, or of documents, that noise is over")
    options.add_argument("--quick", action="store_true", help="few documents, steps and seeds")
    chosen = options.parse_args()
    if chosen.quick:
        chosen.documents, chosen.steps, chosen.seeds = 300, 4, 1
    sys.stdout.reconfigure(line_buffering=True)
    torch.set_num_threads(1)
    print(machine())
    print(versions("numpy", "torch", "transformers", "tokenizers"), end="\n\n")
    for name in chosen.set or sorted(SETS):
        begun = time.process_time()
        data = _data(name, chosen.documents, chosen.gsm8k)
        lengths = data.lengths
        print(
            f"{name}: {len(lengths):,} documents, {lengths.sum():,} tokens, mean {lengths.mean():.0f}, longest "
            f"{lengths.max():,}; rows of {data.capacity:,}, {data.rows} a step",
            end="\n\n",
        )
        curves, trained = loss_curves(data, chosen.steps, chosen.seeds)
        states = {"random weights": build(0), f"after {chosen.steps} steps": trained}
        print(gradient_noise(data, states, chosen.draws), end="\n\n")
        print(curves, end="\n\n")
        print(f"{time.process_time() - begun:.0f} s of processor time", end="\n\n")


def steps_by(rule: Rule, data: Data, seed: int) -> list[Int64]:
    """The documents of each whole step of an epoch; steps of all rules have the same tokens on average."""
    lengths = data.lengths
    if rule != "random":
        made = plan(lengths, data.capacity, strategy=rule, seed=seed)
        whole = made.row_offsets[:: data.rows]
        return [made.source[begin:end] for begin, end in pairwise(whole)]
    order = np.random.default_rng(seed).permutation(len(lengths))
    tokens = np.cumsum(lengths[order])
    edges = np.arange(1, tokens[-1] // (data.capacity * data.rows) + 1) * data.capacity * data.rows
    return np.split(order, np.searchsorted(tokens, edges, side="right"))[:-1]


def gradient_noise(data: Data, states: dict[str, nn.Module], draws: int) -> str:
    """A table of the noise of each rule, at each state of the model."""
    lines = []
    for state, model in states.items():
        sketches, trained = document_gradients(model, data)
        full = sketches.sum(axis=0) / trained.sum()
        base = None
        for rule in get_args(Rule):
            noise, counts = [], []
            for seed in range(draws):
                steps = steps_by(rule, data, seed)
                gradients = np.array([sketches[step].sum(axis=0) / trained[step].sum() for step in steps])
                noise.append(((gradients - full) ** 2).sum(axis=1).mean() / (full**2).sum())
                counts.append(deviation(np.array([len(step) for step in steps])))
            base = base or float(np.mean(noise))
            error = np.std(noise) / np.sqrt(draws) / base
            figures = [f"{np.mean(noise):.4f}", f"{np.mean(noise) / base:.3f} ± {error:.3f}", f"{np.mean(counts):.2f}"]
            lines.append([f"{data.name}, {state}", rule, *figures])
    return table(["set, model", "rule", "noise", "ratio to random", "documents per step, deviation"], lines)


def document_gradients(model: nn.Module, data: Data) -> tuple[Float64, Int64]:
    """[N, SKETCH] sketch of the gradient of the summed loss of each document alone, and [N] its trained tokens."""
    parameters = list(model.parameters())
    size = sum(parameter.numel() for parameter in parameters)
    random = torch.Generator().manual_seed(0)
    place = torch.randint(SKETCH, (size,), generator=random)
    sign = torch.randint(2, (size,), generator=random).float() * 2 - 1
    sketches = np.empty((len(data.documents), SKETCH))
    trained = np.empty(len(data.documents), np.int64)
    for n, (document, prompt) in enumerate(zip(data.documents, data.prompts.tolist())):
        ids = torch.tensor(document)
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        loss = nn.functional.cross_entropy(logits[prompt - 1 : -1], ids[prompt:], reduction="sum")
        gradient = torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, parameters)])
        sketches[n] = torch.zeros(SKETCH).index_add_(0, place, gradient * sign).numpy()
        trained[n] = len(document) - prompt
    return sketches, trained


def loss_curves(data: Data, steps: int, seeds: int) -> tuple[str, nn.Module]:
    """A table of losses over training by each rule, and the model of the first ``random`` run."""
    lines = []
    kept = None
    marks = sorted({max(1, steps * quarter // 4) for quarter in (1, 2, 3, 4)})
    for rule in get_args(Rule):
        held_out, jumps = [], []
        for seed in range(seeds):
            model, losses, after = train(data, rule, steps, marks, seed)
            kept = model if kept is None else kept
            held_out.append(after)
            jumps.append(np.std(np.diff(losses[steps // 4 :])) / np.sqrt(2))  # of one step, without the trend
        mean, error = np.mean(held_out, axis=0), np.std(held_out, axis=0)
        cells = [f"{m:.3f} ± {e:.3f}" for m, e in zip(mean, error)]
        lines.append([data.name, rule, *cells, f"{np.mean(jumps):.3f}"])
    assert kept is not None
    header = ["set", "rule", *(f"held-out loss, step {mark}" for mark in marks), "deviation of a step's loss"]
    return table(header, lines), kept


def train(
    data: Data, rule: Rule, steps: int, marks: list[int], seed: int
) -> tuple[nn.Module, list[float], list[float]]:
    """The model, the loss of every step, and the held-out loss after the steps of ``marks``."""
    model = crosspack.patch(build(seed), verify=False)
    collate = crosspack.PackedCollator(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=0.01)
    warm = max(1, steps // 10)
    losses, after = [], []
    for step, numbers in enumerate(_epochs(data, rule, seed), 1):
        for group in optimizer.param_groups:
            group["lr"] = PEAK * min(step / warm, 0.55 + 0.45 * np.cos(np.pi * step / steps))
        loss = model(**collate(data.features(numbers))).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step in marks:
            with torch.no_grad():
                after.append(model(**collate(data.held_out)).loss.item())
        if step == steps:
            break
    return crosspack.unpatch(model), losses, after


def build(seed: int) -> nn.Module:
    """A Qwen2 of two layers with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=VOCABULARY, max_position_embeddings=8192, tie_word_embeddings=True,
        )
    )  # fmt: skip


def _epochs(data: Data, rule: Rule, seed: int) -> Iterator[Int64]:
    epoch = 0
    while True:
        yield from steps_by(rule, data, 1000 * seed + epoch)
        epoch += 1


def _data(name: str, count: int, gsm8k: Path) -> Data:
    texts, capacity, rows = SETS[name](gsm8k)
    texts = [texts[n] for n in np.random.default_rng(0).permutation(len(texts))]
    tokenizer = train_tokenizer((prompt + rest for prompt, rest in texts[: count + count // 20]), VOCABULARY)
    documents, prompts = [], []
    for prompt, rest in texts:
        asked = tokenizer(prompt, add_special_tokens=False).input_ids
        ids = (asked + tokenizer(rest, add_special_tokens=False).input_ids + [tokenizer.eos_token_id])[:capacity]
        if len(asked) < len(ids) and len(ids) > 1:
            documents.append(ids)
            prompts.append(max(1, len(asked)))
        if len(documents) == count + count // 20:
            break
    kept = len(documents) - len(documents) // 21
    held_out = [_feature(ids, prompt) for ids, prompt in zip(documents[kept:], prompts[kept:])]
    return Data(name, documents[:kept], np.array(prompts[:kept]), held_out, capacity, rows)


def _feature(ids: list[int], prompt: int) -> dict[str, Any]:
    return {"input_ids": ids, "labels": [IGNORE_INDEX] * prompt + ids[prompt:]}


def _gsm8k(path: Path) -> tuple[list[tuple[str, str]], int, int]:
    """Questions and trained answers, rows of 2,048."""
    with open(path, encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return [(record["prompt"] + "\n", record["completion"]) for record in records], 2048, 4


def _python(_: Path) -> tuple[list[tuple[str, str]], int, int]:
    """Functions and classes of the standard library, all trained, rows of 4,096: a heavy tail."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests", "lib2to3", "idlelib"}.intersection(path.relative_to(root).parts):
            continue
        try:
            source = path.read_text()
            parsed = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        defined = (n for n in parsed.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef))
        texts.extend(("", ast.get_source_segment(source, node) or "") for node in defined)
    return texts, 4096, 2


def deviation(counts: Int64) -> float:
    """Standard deviation over mean."""
    return float(counts.std() / counts.mean())


SETS = {"gsm8k": _gsm8k, "python": _python}


if __name__ == "__main__":
    main()
