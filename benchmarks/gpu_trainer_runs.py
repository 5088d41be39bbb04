"""The contenders of ``benchmarks.gpu_trainers``: the lines that people write, on the same packed rows.

A shape and a capacity -> random weights and :class:`Run`, the rows and a clock -> a contender trains -> figures. The
first epochs warm up (they compile, find the shapes and record), the next ones are timed as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.gpu_clock import DEVICE, TOY, Result, failed, highest_gib, seconds_left, synchronize
from benchmarks.gpu_workload import LONGEST, Shape, documents, make_model, tight, with_adapters
from packing_core import PackedDataset
from torch_backend import PackedCollator, enable_packing, explain, make_train_step, patch
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.steps.cuda_graph import CapturedStep, compile_layers
from torch_backend.steps.memory import LEVELS

LEARNING_RATE = 1e-5
WARM_UP = 14  # steps at least, in two or more whole epochs


@dataclass
class Run:
    """The data of a contender, and its clock."""

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
            self.warm, self.warm_peak = now, highest_gib()
            if not TOY:
                torch.cuda.reset_peak_memory_stats()
        if step == self.steps:
            self.ended = now


# -- the contenders ----------------------------------------------------------------------------------------------------


def stock_trainer(run: Run, model: Any) -> None:
    """Rows with restarting positions, which transformers turns into a mask that keeps documents apart."""
    _run_trainer(run, model, StockRows(run.rows), packed=False)


def packed_trainer(run: Run, model: Any, *, liger: bool = False, memory: Any = None) -> None:
    _run_trainer(run, model, run.rows, packed=True, liger=liger, memory=memory)


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


def sft(
    run: Run,
    model: Any,
    *,
    packed: bool = True,
    fast: bool = True,
    checkpointing: bool = False,
    packing: bool = True,
    memory: Any = None,
    liger: bool = False,
) -> None:
    """TRL packs the documents in rows of the same length, or leaves it to Crosspack; checkpointing is its default."""
    import datasets
    import trl

    documents = datasets.Dataset.from_dict({"input_ids": [document.tolist() for document in run.documents]})
    with TemporaryDirectory() as folder:
        options = _options(run) if packing else _options(run) | {"train_sampling_strategy": "random"}
        arguments = trl.SFTConfig(
            folder, **options, packing=packing, max_length=run.rows.plan.capacity, bf16=not TOY,
            gradient_checkpointing=checkpointing, use_liger_kernel=liger,
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            model, arguments, train_dataset=documents, processing_class=tokenizer(), callbacks=[_clock(run)]
        )
        if packed:
            enable_packing(trainer, verify=False, fast=fast, memory=memory)
        run.row_count = len(trainer.get_train_dataloader())
        arguments.max_steps, arguments.logging_steps = run.steps, run.row_count
        _train(run, trainer, packed)


CONTENDERS: dict[str, Callable[[Run, Any], None]] = {
    "make_train_step": train_step,
    "Trainer, enable_packing": packed_trainer,
    "by hand: causal_lm_loss, compile_layers, CapturedStep": recipe,
    "SFTTrainer(packing=True), enable_packing": partial(sft, fast=True),
    "SFTTrainer(packing=False), enable_packing": partial(sft, packing=False),
    "SFTTrainer(packing=True), enable_packing, checkpointing": partial(sft, fast=True, checkpointing=True),
    **{f'SFTTrainer(packing=True), enable_packing(memory="{level}")': partial(sft, memory=level) for level in LEVELS},
    'Trainer, enable_packing(memory="full")': partial(packed_trainer, memory="full"),
    "Trainer(use_liger_kernel=True), enable_packing": partial(packed_trainer, liger=True),
    "SFTTrainer(packing=True, use_liger_kernel=True), enable_packing": partial(sft, liger=True),
    "SFTTrainer(packing=True), enable_packing(fast=False)": partial(sft, fast=False),
    "SFTTrainer(packing=True), enable_packing(fast=False), checkpointing": partial(sft, fast=False, checkpointing=True),
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


def _run_trainer(run: Run, model: Any, rows: Any, *, packed: bool, liger: bool = False, memory: Any = None) -> None:
    from transformers import Trainer, TrainingArguments

    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, **_options(run), remove_unused_columns=False, use_liger_kernel=liger)
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[_clock(run)])
        if packed:
            enable_packing(trainer, verify=False, memory=memory)
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
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            run.tick(state.global_step)

    return Clock()


def _train(run: Run, trainer: Any, packed: bool) -> None:
    run.began = time.perf_counter()
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    run.first_loss, run.last_loss = losses[0], losses[-1]  # means over an epoch
    if packed and hasattr(trainer, "packed_step"):
        run.note += "; ".join(note for note in explain(trainer).notes if "of the step" in note)
    trainer.accelerator.free_memory()


def tokenizer() -> Any:
    """SFTTrainer takes one, also for data that are tokenised."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def measure(
    shape: Shape, name: str, capacity: int, epochs: int, repeat: int, contenders: Mapping[str, Any] = CONTENDERS
) -> Iterator[Result]:
    """The figures of one contender; ``repeat``: of the documents, for epochs of more steps."""
    section, case = f"training, {shape.name}", f"rows of {capacity:,}"
    if seconds_left() < 0:
        yield Result(section, case, name, None, "real tokens/s", "not run: out of time")
        return
    docs = documents() * repeat
    run = Run(docs, PackedDataset(docs, tight(docs, capacity)), epochs)
    if not TOY:
        torch.cuda.reset_peak_memory_stats()
    model = make_model(replace(shape, lora=False), None, few=TOY)
    if shape.lora:
        model = (shape.adapters or with_adapters)(model)
    try:
        contenders[name](run, model)
    except Exception as failure:
        yield failed(section, case, name, "real tokens/s", failure)
        return
    finally:
        del model
    tokens = sum(map(len, docs)) * epochs
    figures = {
        "real tokens/s": tokens / (run.ended - run.warm),
        "ms per step": (run.ended - run.warm) / (run.row_count * epochs) * 1e3,
        "GiB at most, whole run": max(run.warm_peak, highest_gib()),
        "GiB at most, after the warm-up": highest_gib(),
        "first step, s": run.first_step,
        "warm-up, s": run.warm - run.began,
        "first loss": run.first_loss,
        "last loss": run.last_loss,
    }
    for unit, value in figures.items():
        yield Result(section, case, name, value, unit, run.note)
