"""Measures whether contamination and cut documents matter: one tiny model, four ways to put the same documents in rows.

    python -m benchmarks.does_it_matter                       # about an hour on two cores
    python -m benchmarks.does_it_matter --minutes 10          # as many runs as fit; run it again to go on
    python -m benchmarks.does_it_matter --steps 4000 --seeds 5 --width 256 --minutes 9 --device cuda    # one GPU
    python -m benchmarks.does_it_matter --tiny                # a minute, to see that it runs

Every run of a seed begins with the same weights and trains the same documents in the same steps, by the same number of
trained tokens but for ``wrapped``, where the first tokens after a cut have no context:

    exact         rows of ``plan``, each document alone (``crosspack.patch``)
    contaminated  the same rows; positions restart, and attention sees the whole row, as in stock flattening
    wrapped       documents end to end, cut at the ends of rows; attention sees the whole row
    padded        a document a row

Two tasks: values of keys to be found again, where other documents have the same keys with other values; and the text of
GSM8K, on which ``--model FOLDER`` fine-tunes trained weights. The held-out metric is always of each document alone.
Each run is a line of ``--output``, and a run that is there already is not repeated. Figures are means over seeds with
the 95% interval of Student's t; differences are paired by seed. After a twentieth of the steps of ``exact``, the
gradients of a few steps at its weights say how far each way is from ``exact``, and how noisy it is.
Needs torch and transformers; no network.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import crosspack
from benchmarks._matter_figures import WAYS, common_seeds, interval, reached_by_all, runs_of, tokens_to
from benchmarks.report import machine, table, versions
from benchmarks.workload import GSM8K
from crosspack.encoding.tokenizer import train_tokenizer
from packing_core import PackedBatch, plan
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.training.schedule import Corpus, EncodedDocument, Schedule

PEAK, PEAK_TRAINED = 3e-3, 2e-5  # learning rates, of random weights and of trained ones
WARMUP = 0.1  # the part of the steps in which the rate rises
KEYS, VALUES = 16, 8  # of the retrieval task
PAIRS = 4, 12  # fewest and most pairs of a document
VOCABULARY = 512  # of the tokenizer of the text

Inputs = tuple[dict[str, Tensor], Tensor]  # arguments of the model, and unshifted targets


def main(arguments: Sequence[str] | None = None) -> str:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--task", choices=("retrieval", "text"), action="append", help="only this; may be repeated")
    options.add_argument("--way", choices=WAYS, action="append", help="only this; may be repeated")
    options.add_argument("--data", type=Path, default=GSM8K, help="a .jsonl file of prompt and completion")
    options.add_argument("--steps", type=int, default=1200)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--width", type=int, default=64, help="hidden size; two layers")
    options.add_argument("--model", default="", help="a folder or hub name whose weights are fine-tuned on the text")
    options.add_argument("--rows", type=int, default=4, help="rows of a step")
    options.add_argument("--held-out", type=int, default=200, help="documents of the held-out metric")
    options.add_argument("--evaluations", type=int, default=20, help="of a run, beside the one before training")
    options.add_argument("--noise-steps", type=int, default=8, help="whose gradients are compared, 2 or more")
    options.add_argument("--minutes", type=float, default=60, help="no run begins that would take longer")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--device", default="cpu")
    options.add_argument("--output", type=Path, default=Path("runs/does_it_matter.jsonl"))
    options.add_argument("--tiny", action="store_true", help="few steps and documents, nothing is kept")
    chosen = options.parse_args(arguments)
    if chosen.tiny:
        chosen.steps, chosen.seeds, chosen.width = (1, 1, 0) if chosen.model else (4, 2, 32)
        chosen.held_out, chosen.noise_steps = min(chosen.held_out, 16), 2
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    torch.set_num_threads(chosen.threads)
    print(machine(), versions("torch", "transformers", "crosspack"), sep="\n")
    settings = {name: getattr(chosen, name) for name in ("steps", "width", "model", "rows", "held_out")}
    records = [] if chosen.tiny else _kept(chosen.output, settings)
    begun = time.perf_counter()
    tasks: dict[str, Task] = {}
    longest = 0.0
    for seed in range(chosen.seeds):
        for name in chosen.task or (("text",) if chosen.model else ("retrieval", "text")):
            for way in chosen.way or WAYS:
                if any((r["task"], r["way"], r["seed"]) == (name, way, seed) for r in records):
                    continue
                if time.perf_counter() - begun + longest > 60 * chosen.minutes:
                    print(f"{chosen.minutes:g} minutes are over: run it again to go on")
                    return _report(records)
                if name not in tasks:
                    tasks[name] = _task(name, chosen)
                started = time.perf_counter()
                run = Run(tasks[name], way, seed, chosen)
                records.append({"task": name, "way": way, "seed": seed, **settings, **run.train()})
                longest = max(longest, time.perf_counter() - started)
                print(f"{name}, {way}, seed {seed}: {records[-1]['curve'][-1]}, {records[-1]['seconds']:.0f} s")
                if not chosen.tiny:
                    chosen.output.parent.mkdir(parents=True, exist_ok=True)
                    with chosen.output.open("a", encoding="utf-8") as kept:
                        kept.write(json.dumps(records[-1]) + "\n")
    return _report(records)


def _kept(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the runs of earlier calls with the same settings."""
    if not path.exists():
        return []
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [record for record in records if all(record.get(name) == value for name, value in settings.items())]


def _task(name: str, chosen: argparse.Namespace) -> Task:
    if name == "retrieval":
        return retrieval(chosen.held_out, 128)
    tokenizer = AutoTokenizer.from_pretrained(chosen.model) if chosen.model else None
    return text(chosen.data, chosen.held_out, 512, tokenizer)


# -- the data ----------------------------------------------------------------------------------------------------------


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
    draw: Callable[[np.random.Generator, int], Iterator[EncodedDocument]]


def retrieval(held_out: int, capacity: int) -> Task:
    """Pairs of a key and a value, each one token, then every key again in another order, followed by its pair.

    Only the pairs that follow a key are trained. Other documents have the same keys with other values, so a model that
    sees them may take a wrong one.
    """

    def draw(random: np.random.Generator, count: int) -> Iterator[EncodedDocument]:
        for _ in range(count):
            size = int(random.integers(PAIRS[0], PAIRS[1] + 1))
            keys = random.permutation(KEYS)[:size]
            pairs = KEYS + keys * VALUES + random.integers(0, VALUES, size)
            again = random.permutation(size)
            asked = np.stack([keys[again], pairs[again]], axis=1).reshape(-1)
            answers = np.append(np.zeros(size, np.bool_), np.arange(2 * size) % 2 == 1)
            yield EncodedDocument(np.append(pairs, asked).astype(np.int32), answers)

    return Task(KEYS + KEYS * VALUES, capacity, Corpus.collect(draw(np.random.default_rng(10**6), held_out)), draw)


def text(data: Path, held_out: int, capacity: int, tokenizer: Any = None) -> Task:
    """Questions and answers of GSM8K, of which the answers are trained.

    Args:
        tokenizer: of a trained model; by default a byte-level BPE of the training part.
    """
    with data.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    order = np.random.default_rng(10**6).permutation(len(records))
    evaluated, trained = order[:held_out], order[held_out:]
    if tokenizer is None:
        some = (f"{records[n]['prompt']}\n{records[n]['completion']}" for n in islice(trained.tolist(), 2000))
        tokenizer = train_tokenizer(some, VOCABULARY)

    @cache
    def document(number: int) -> EncodedDocument:
        prompt = tokenizer(records[number]["prompt"] + "\n", add_special_tokens=False)["input_ids"]
        answer = tokenizer(records[number]["completion"], add_special_tokens=False)["input_ids"]
        ids = np.array([*prompt, *answer, tokenizer.eos_token_id], np.int32)[:capacity]
        return EncodedDocument(ids, np.arange(len(ids)) >= len(prompt))

    def draw(random: np.random.Generator, count: int) -> Iterator[EncodedDocument]:
        for number in islice(_endless(random, trained), count):
            if document(number).has_target:
                yield document(number)

    return Task(len(tokenizer), capacity, Corpus.collect(map(document, evaluated.tolist())), draw)


def _endless(random: np.random.Generator, numbers: np.ndarray) -> Iterator[int]:
    while True:
        yield from random.permutation(numbers).tolist()


# -- training ----------------------------------------------------------------------------------------------------------


class Run:
    """One model, trained in one way.

    Args:
        task: the documents.
        way: one of ``WAYS``.
        seed: decides the weights, the documents and their rows.
        chosen: the command line.
    """

    def __init__(self, task: Task, way: str, seed: int, chosen: argparse.Namespace) -> None:
        self.task, self.way, self.device, self.steps = task, way, chosen.device, chosen.steps
        self.peak = PEAK_TRAINED if chosen.model else PEAK
        torch.manual_seed(seed)
        self.model = _trained(chosen.model) if chosen.model else _random(task, chosen.width)
        self.model.to(self.device)
        self.rows, self.evaluations, self.noise_steps = chosen.rows, chosen.evaluations, chosen.noise_steps
        random = np.random.default_rng(seed)
        mean = task.held_out.documents.lengths.mean()
        count = int(1.1 * (self.steps + self.noise_steps) * self.rows * task.capacity / mean) + 8
        corpus = Corpus.collect(task.draw(random, count))
        made = plan(corpus.documents.lengths, task.capacity, seed=seed)
        self.schedule = Schedule(corpus, (made,), self.rows, padded_batch=10**6, seed=seed)

    def train(self) -> dict[str, Any]:
        """Trains, and returns the curve of the held-out metric and what the gradients say."""
        inputs, model, begin = INPUTS[self.way], self.model, time.perf_counter()
        if self.way == "exact":
            crosspack.patch(model, verify=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.peak, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        curve: list[dict[str, float]] = [{"tokens": 0, **self._evaluate()}]
        found: dict[str, Any] = {"curve": curve}
        every, trained = max(1, self.steps // self.evaluations), 0
        for step in range(self.steps):
            loss, targets = self._loss(inputs, step)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            trained += targets
            if (step + 1) % every == 0:
                curve.append({"tokens": trained, **self._evaluate()})
            if step + 1 == every and self.way == "exact":
                found["gradients"] = self._gradients()
        return found | {"seconds": time.perf_counter() - begin}

    def _rate(self, step: int) -> float:
        warm = WARMUP * self.steps
        left = max(0.0, (step - warm) / max(1, self.steps - warm))
        return min(1.0, (step + 1) / warm) * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * min(1.0, left))))

    def _loss(self, inputs: Callable[[Schedule, int], Iterator[Inputs]], step: int) -> tuple[Tensor, int]:
        """The mean loss of a step's targets, and their number."""
        total, count = torch.zeros((), device=self.device), 0
        for arguments, targets in inputs(self.schedule, step):
            logits = self.model(**{name: _on(value, self.device) for name, value in arguments.items()}).logits
            shifted = targets[:, 1:].to(self.device)
            total = total + nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), shifted.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
            )
            count += int((shifted != IGNORE_INDEX).sum())
        return total / count, count

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Mean loss and accuracy of the targets of the held-out documents, each of them alone."""
        corpus = self.task.held_out
        made = plan(corpus.documents.lengths, self.task.capacity, seed=None)
        loss, right, count = 0.0, 0, 0
        for arguments, targets in _padded(Schedule(corpus, (made,), made.n_rows, padded_batch=50), 0):
            logits = self.model(**{name: _on(value, self.device) for name, value in arguments.items()}).logits[:, :-1]
            shifted = targets[:, 1:].to(self.device)
            real = shifted != IGNORE_INDEX
            loss += float(nn.functional.cross_entropy(logits[real].float(), shifted[real], reduction="sum"))
            right += int((logits.argmax(-1) == shifted)[real].sum())
            count += int(real.sum())
        return {"loss": round(loss / count, 5), "accuracy": round(right / count, 5)}

    def _gradients(self) -> dict[str, dict[str, float]]:
        """Returns each way's distance from the gradient of ``exact`` at these weights, and its noise over steps."""
        ways = ("exact", "contaminated", "wrapped")
        sums: dict[str, Any] = dict.fromkeys(ways, 0.0)
        squares, errors = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
        for step in range(self.steps, self.steps + self.noise_steps):
            exact = self._gradient(INPUTS["exact"], step)
            crosspack.unpatch(self.model)
            for way in ways:
                gradient = exact if way == "exact" else self._gradient(INPUTS[way], step)
                sums[way] = sums[way] + gradient
                squares[way] += float(gradient.norm()) ** 2
                errors[way] += float((gradient - exact).norm() / exact.norm())
            crosspack.patch(self.model, verify=False)
        found = {}
        for way in ways:
            of_mean = float((sums[way] / self.noise_steps).norm()) ** 2
            noise = (squares[way] - self.noise_steps * of_mean) / (self.noise_steps - 1) / of_mean
            found[way] = {"error": errors[way] / self.noise_steps, "noise": noise}
        return found

    def _gradient(self, inputs: Callable[[Schedule, int], Iterator[Inputs]], step: int) -> Tensor:
        self.model.zero_grad()
        self._loss(inputs, step)[0].backward()
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])


def _random(task: Task, width: int) -> nn.Module:
    """A Llama of two layers."""
    config = LlamaConfig(
        vocab_size=task.vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def _trained(name: str) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="sdpa")
    return model


def _on(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _tensors(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(batch.input_ids.astype(np.int64)), torch.from_numpy(batch.targets.astype(np.int64))


def _exact(schedule: Schedule, step: int) -> Iterator[Inputs]:
    rows = schedule.rows(step)
    arguments = crosspack.PackedCollator()(rows)
    arguments.pop("labels", None)
    yield arguments, _tensors(rows)[1]


def _contaminated(schedule: Schedule, step: int) -> Iterator[Inputs]:
    rows = schedule.rows(step)
    ids, targets = _tensors(rows)
    positions = torch.from_numpy(rows.position_ids.astype(np.int64))
    yield {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids)}, targets


def _wrapped(schedule: Schedule, step: int) -> Iterator[Inputs]:
    rows = schedule.rows(step)
    ids, targets = _tensors(rows)
    real = torch.from_numpy(rows.attention_mask.copy())
    pad = -int(real.sum()) % rows.capacity  # of the last row
    flat = [nn.functional.pad(x[real], (0, pad), value=fill) for x, fill in ((ids, 0), (targets, IGNORE_INDEX))]
    wrapped, wanted = (x.reshape(-1, rows.capacity) for x in flat)
    yield {"input_ids": wrapped, "attention_mask": torch.ones_like(wrapped)}, wanted


def _padded(schedule: Schedule, step: int) -> Iterator[Inputs]:
    for batch in schedule.padded(step, "padded"):
        ids = torch.from_numpy(batch.input_ids.astype(np.int64))
        mask = torch.from_numpy(batch.attention_mask.astype(np.int64))
        yield {"input_ids": ids, "attention_mask": mask}, torch.from_numpy(batch.targets.astype(np.int64))


INPUTS: dict[str, Callable[[Schedule, int], Iterator[Inputs]]] = {
    "exact": _exact,
    "contaminated": _contaminated,
    "wrapped": _wrapped,
    "padded": _padded,
}


def _report(records: list[dict[str, Any]]) -> str:
    """Prints the tables of each task, over the seeds that every way has."""
    said = []
    for task in dict.fromkeys(record["task"] for record in records):
        runs = runs_of(records, task)
        ways, seeds = common_seeds(runs)
        if not seeds or "exact" not in ways:
            continue
        worst = reached_by_all(runs)
        lines = []
        for way in ways:
            last = [runs[way, seed]["curve"][-1] for seed in seeds]
            base = [runs["exact", seed]["curve"][-1] for seed in seeds]
            cells = [_said([x[name] for x in last], digits) for name, digits in (("loss", 4), ("accuracy", 3))]
            cells.append(_said([x["loss"] - y["loss"] for x, y in zip(last, base, strict=True)], 4))
            cells.append(_said([tokens_to(runs[way, seed]["curve"], worst) for seed in seeds], 0))
            of_way = [runs["exact", seed]["gradients"].get(way) for seed in seeds]
            cells += [_said([g[name] for g in of_way], 2) if all(of_way) else "as exact" for name in ("error", "noise")]
            lines.append([way, *cells])
        header = ["way", "held-out loss", "accuracy", "loss above exact", f"tokens to {worst:.3f}", "gradient error"]
        said.append(f"\n{task}, {len(seeds)} seeds\n\n{table([*header, 'gradient noise'], lines)}")
    print("\n".join(said))
    return "\n".join(said)


def _said(values: Sequence[float], digits: int) -> str:
    mean, half = interval(values)
    return f"{mean:,.{digits}f}" + ("" if np.isnan(half) else f" ± {half:,.{digits}f}")


if __name__ == "__main__":
    main()
