"""Training by the lines that people write: Trainer and SFTTrainer, as they are and packed, make_train_step, the recipe.

    python -m benchmarks.gpu_trainers                       # Qwen2-0.5B shape, rows of 16,384, bfloat16, fused AdamW
    python -m benchmarks.gpu_trainers --capacity 65536
    python -m benchmarks.gpu_trainers --repeat 10 --epochs 1  # 70 steps an epoch and not 7
    python -m benchmarks.gpu_trainers --match make_train_step --output results
    python -m benchmarks.gpu_trainers --tiny                # every contender on the CPU in seconds; times mean nothing

Every contender trains random weights on the same packed rows, one row a step: 480 documents of mean 243 and at most
2,048 tokens, in the fewest rows, evened out so that the rows are full. The first epochs warm up (they compile, find the
shapes and record), the next ones are timed as a whole. Tokens per second count real tokens. Memory is the most that
was allocated over the whole run, and over the timed epochs alone. Losses are printed so that contenders can be
compared; that they are exact is tested elsewhere (``benchmarks.gpu --only step``, ``tests/torch_backend``).
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if "--tiny" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.gpu import as_table, header, in_one_line, survived, write
from benchmarks.gpu_clock import DEVICE, TOY, Result, set_match, synchronize, wanted
from benchmarks.gpu_workload import LONGEST, Shape, documents, make_model, qwen2, tight
from packing_core import PackedDataset
from torch_backend import PackedCollator, enable_packing, explain, make_train_step, patch
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.training.captured import CapturedStep, compile_layers

SECTION = "training, Qwen2-0.5B" if not TOY else "training, toy"
LEARNING_RATE = 1e-5
WARM_UP = 14  # steps at least, in two or more whole epochs


@dataclass
class Run:
    """What a contender trains on, and its clock."""

    documents: Sequence[Any]
    rows: PackedDataset
    epochs: int
    began: float = 0.0
    first_step: float = 0.0
    warm: float = 0.0
    ended: float = 0.0
    warm_peak: float = 0.0
    first_loss: float = 0.0
    last_loss: float = 0.0
    note: str = ""

    def __post_init__(self) -> None:
        self.row_count = len(self.rows)

    @property
    def steps(self) -> int:
        return self.row_count * (self.warm_up + self.epochs)

    @property
    def warm_up(self) -> int:
        """Epochs before the timed ones."""
        return max(2, -(-WARM_UP // self.row_count))

    def tick(self, step: int) -> None:
        """Called after every step; ``step`` counts from 1. It waits for the GPU three times in all."""
        warm = self.row_count * self.warm_up
        if step not in (1, warm, self.steps):
            return
        synchronize()
        now = time.perf_counter()
        if step == 1:
            self.first_step = now - self.began
        if step == warm:
            self.warm, self.warm_peak = now, _peak()
            if not TOY:
                torch.cuda.reset_peak_memory_stats()
        if step == self.steps:
            self.ended = now


# -- the contenders ----------------------------------------------------------------------------------------------------


def stock_trainer(run: Run, model: Any) -> None:
    """Rows with restarting positions, which transformers turns into a mask that keeps documents apart."""
    _run_trainer(run, model, StockRows(run.rows), packed=False)


def packed_trainer(run: Run, model: Any) -> None:
    _run_trainer(run, model, run.rows, packed=True)


def train_step(run: Run, model: Any) -> None:
    patch(model, verify=False).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    step = make_train_step(model, optimizer, max_grad_norm=1.0)
    loader = DataLoader(run.rows, batch_size=1, collate_fn=PackedCollator(model), pin_memory=not TOY)
    _loop(run, loader, lambda batch: step(batch)["loss"])
    run.note = "; ".join(f"{part}: {what}" for part, what in step.parts.items())


def recipe(run: Run, model: Any) -> None:
    """The whole step as one graph, the optimizer included, by hand; it neither clips nor schedules."""
    patch(model, verify=False).train()
    collator = PackedCollator(model, max_seqlen=LONGEST, bucket=max(16, -(-run.rows.plan.capacity // 64)))
    loader = DataLoader(run.rows, batch_size=1, collate_fn=collator, pin_memory=not TOY)
    rate = torch.tensor(LEARNING_RATE, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=not TOY)

    def train(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        total, weight = causal_lm_loss(model, batch)
        (total / weight).backward()
        optimizer.step()
        return (total / weight).detach()

    first = {name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in next(iter(loader)).items()}
    with torch.no_grad():
        causal_lm_loss(model, first)
    compile_layers(model, backend="aot_eager" if TOY else "inductor")
    _loop(run, loader, CapturedStep(train, enabled=not TOY))


def sft(run: Run, model: Any, *, packed: bool = True, fast: bool = True, checkpointing: bool = False) -> None:
    """TRL packs the documents by itself, in rows of the same length; checkpointing is its default."""
    import datasets
    import trl

    documents = datasets.Dataset.from_dict({"input_ids": [document.tolist() for document in run.documents]})
    with TemporaryDirectory() as folder:
        arguments = trl.SFTConfig(
            folder, **_options(run), packing=True, max_length=run.rows.plan.capacity, bf16=not TOY,
            gradient_checkpointing=checkpointing,
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            model, arguments, train_dataset=documents, processing_class=_tokenizer(), callbacks=[_clock(run)]
        )
        run.row_count = len(trainer.train_dataset)
        arguments.max_steps, arguments.logging_steps = run.steps, run.row_count
        if packed:
            enable_packing(trainer, verify=False, fast=fast)
        _train(run, trainer, packed)


CONTENDERS: dict[str, Callable[[Run, Any], None]] = {
    "make_train_step": train_step,
    "Trainer, enable_packing": packed_trainer,
    "by hand: causal_lm_loss, compile_layers, CapturedStep": recipe,
    "SFTTrainer(packing=True), enable_packing": partial(sft, fast=True),
    "SFTTrainer(packing=True), enable_packing, checkpointing": partial(sft, fast=True, checkpointing=True),
    "SFTTrainer(packing=True), enable_packing(fast=False)": partial(sft, fast=False),
    "SFTTrainer(packing=True), stock SDPA": partial(sft, packed=False),
    "Trainer, stock SDPA": stock_trainer,
}


class StockRows(Dataset[Any]):
    """The same rows as a stock model takes them: without padding, positions that restart, no target at a start."""

    def __init__(self, rows: PackedDataset) -> None:
        self.rows, self.collate = rows, PackedCollator(padding_free=True)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        batch = self.collate(self.rows[index])
        return {name: batch[name][0] for name in ("input_ids", "labels", "position_ids")}


# -- measuring ---------------------------------------------------------------------------------------------------------


def _loop(run: Run, loader: Any, step: Callable[[Any], torch.Tensor]) -> None:
    run.began = time.perf_counter()
    for number, batch in enumerate(chain.from_iterable(repeat(loader, run.warm_up + run.epochs)), start=1):
        loss = step(batch)
        if number == 1:
            run.first_loss = float(loss)
        run.tick(number)
    run.last_loss = float(loss)


def _run_trainer(run: Run, model: Any, rows: Any, *, packed: bool) -> None:
    from transformers import Trainer, TrainingArguments

    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, **_options(run), remove_unused_columns=False)
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[_clock(run)])
        if packed:
            enable_packing(trainer, verify=False)
        _train(run, trainer, packed)


def _options(run: Run) -> dict[str, Any]:
    """Arguments of every trainer."""
    return {
        "max_steps": run.steps,
        "per_device_train_batch_size": 1,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "logging_steps": run.row_count,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": TOY,
        "train_sampling_strategy": "sequential",
    }


def _clock(run: Run) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            run.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            run.tick(state.global_step)

    return Clock()


def _train(run: Run, trainer: Any, packed: bool) -> None:
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    run.first_loss, run.last_loss = losses[0], losses[-1]  # means over an epoch
    if packed and hasattr(trainer, "packed_step"):
        run.note += "; ".join(note for note in explain(trainer).notes if "of the step" in note)
    trainer.accelerator.free_memory()


def _tokenizer() -> Any:
    """SFTTrainer takes one, also for data that are tokenised."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def measure(name: str, capacity: int, epochs: int, repeat: int) -> Iterator[Result]:
    docs = documents() * repeat
    run = Run(docs, PackedDataset(docs, tight(docs, capacity)), epochs)
    if not TOY:
        torch.cuda.reset_peak_memory_stats()
    model = make_model(Shape("trainers", qwen2, (capacity,)), "sdpa", few=TOY)
    case = f"rows of {capacity:,}"
    try:
        CONTENDERS[name](run, model)
    except Exception as failure:  # a contender that fails is a line in the table
        reason = str(failure).strip().splitlines()[0][:160] if str(failure) else ""
        yield Result(SECTION, case, name, None, "real tokens/s", f"{type(failure).__name__}: {reason}")
        return
    finally:
        del model
    tokens = sum(map(len, docs)) * epochs
    figures = {
        "real tokens/s": tokens / (run.ended - run.warm),
        "ms per step": (run.ended - run.warm) / (run.row_count * epochs) * 1e3,
        "GiB at most, whole run": max(run.warm_peak, _peak()),
        "GiB at most, after the warm-up": _peak(),
        "first step, s": run.first_step,
        "warm-up, s": run.warm - run.began,
        "first loss": run.first_loss,
        "last loss": run.last_loss,
    }
    for unit, value in figures.items():
        yield Result(SECTION, case, name, value, unit, run.note)


def _peak() -> float:
    return 0.0 if TOY else torch.cuda.max_memory_allocated() / 2**30


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--capacity", type=int, default=256 if TOY else 16_384, help="tokens of a row")
    options.add_argument("--epochs", type=int, default=1 if TOY else 4, help="timed, after the warm-up")
    options.add_argument("--repeat", type=int, default=1, help="of the documents, for epochs of more steps")
    options.add_argument("--match", default="", metavar="PATTERN", help="only contenders whose name it matches")
    options.add_argument("--output", type=Path, help="folder for gpu.json")
    options.add_argument("--tiny", action="store_true", help="on the CPU, to see that everything runs")
    chosen = options.parse_args(arguments)
    set_match(chosen.match)
    about = header()
    print(about, flush=True)
    results: list[Result] = []
    for name in filter(wanted, CONTENDERS):
        found = list(survived(name, measure(name, chosen.capacity, chosen.epochs, chosen.repeat)))
        results += found
        print(f"{name}: {in_one_line(found)}", flush=True)
        if chosen.output:
            write(chosen.output, about, results)
        torch._dynamo.reset()
        gc.collect()
        if not TOY:
            torch.cuda.empty_cache()
    print(f"\n{as_table(results)}")
    return results


if __name__ == "__main__":
    main()
