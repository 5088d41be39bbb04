"""The torch trainer behind ``crosspack train``: a TrainJob goes in, a TrainResult comes out.

Every run builds the model anew from the same source and seed; the packed one is patched. One generator trains all
kinds, and runs that are compared take their steps in turn, so that other load on the machine slows all of them alike.
All take the step of :func:`torch_backend.make_train_step`, whose loss is the mean over the step's trained tokens, so
nothing depends on how the step's documents were arranged.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from packing_core.errors import PackingError, first_line, plural
from packing_core.planning.balance import Cost
from packing_core.training.checkpoints import newest_checkpoint, save_checkpoint
from packing_core.training.job import Audit, StepRecord, TrainJob, TrainResult, honours
from packing_core.training.schedule import Run
from packing_core.training.timing import Clock, in_turn
from torch_backend.auditing.model import AuditReport, verify
from torch_backend.collate import Batch, PackedCollator
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.explaining import explain
from torch_backend.job import states
from torch_backend.job.memory import Memory, memory_line
from torch_backend.job.models import build_model, with_adapters
from torch_backend.job.ranks import ALONE, Ranks, unwrapped, whole
from torch_backend.job.states import make_optimizer
from torch_backend.patching import patch, unpatch
from torch_backend.steps.fast_backward import Choice
from torch_backend.steps.fixed_shapes import FixedShapes
from torch_backend.steps.train_step import TrainStep


@honours("--dtype bfloat16", "--lora", "--eval-data", "--compile", "--nproc or torchrun")
def train(job: TrainJob) -> TrainResult:
    """Run the job; see ``packing_core.training.job``.

    Raises:
        PackingError: the model cannot be loaded, cannot be packed without contamination, or does not fit the data.
    """
    ranks = Ranks.from_environment()
    device = device_of(job.device, ranks.local)
    if job.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    clock = Clock(torch.get_num_threads())
    memory = {run: Memory(device) for run in job.runs}
    with ranks.joined(device):
        finished = in_turn({run: _run(job, run, device, ranks, clock, memory[run]) for run in job.runs})
    packed = finished["packed"]
    assert packed.audit is not None
    return TrainResult(
        records={run: done.records for run, done in finished.items()},
        audit=packed.audit,
        device=_device_name(device) + (f", {ranks.world} processes ({job.strategy})" if ranks.world > 1 else ""),
        attention=packed.attention,
        peak_bytes={run: counted.peak for run, counted in memory.items() if counted.peak},
        cpu=clock.cpu if device.type == "cpu" else None,
    )


@dataclass(frozen=True)
class _Finished:
    """Results of one run: its records and, of the packed one, its audit and the implementations that ran."""

    records: list[StepRecord]
    audit: Audit | None = None
    attention: str = ""


def _run(
    job: TrainJob, run: Run, device: torch.device, ranks: Ranks, clock: Clock, memory: Memory
) -> Generator[None, None, _Finished]:
    """Train one run, a step per ``next``, from the initial weights or the newest checkpoint; write the packed one."""
    with memory.counted():
        model, optimizer, records, report = _begin(job, run, device, ranks)
        take_step = _train_step(job, model, optimizer)
    for step in range(len(records), len(job.schedule)):
        yield
        with memory.counted(), clock.timed():
            for group in optimizer.param_groups:
                group["lr"] = job.learning_rate(step)
            taken = take_step(list(batches(job, step, run, model, ranks)))
            loss, norm = taken["loss"].item(), taken["grad_norm"].item()
        evaluated = None
        if run == "packed" and job.evaluates_after(step):
            with memory.counted():
                evaluated = take_step.evaluate(evaluation_batches(job, model, ranks))["loss"].item()
        records.append(job.record(run, step, loss, clock.seconds, grad_norm=norm, eval_loss=evaluated))
        if job.save_every and (step + 1) % job.save_every == 0:
            state = states.gathered(unwrapped(model), optimizer, ranks)
            if ranks.rank == 0:
                save_checkpoint(job, records, lambda folder: states.save(folder, *state))  # noqa: B023
    if run != "packed":
        return _Finished(records)
    served = sorted({layer.serves for layer in explain(model).layers if layer.serves})
    if job.output is not None:
        _write(job, unwrapped(model), ranks)
    return _Finished(records, _audit(report), ", ".join(served) or job.attention)


def _begin(
    job: TrainJob, run: Run, device: torch.device, ranks: Ranks
) -> tuple[Any, torch.optim.Optimizer, list[StepRecord], AuditReport | None]:
    """The model, its optimizer, the records of the steps that a checkpoint holds, and the packed run's audit."""
    job.on_phase(f"building the model ({run})")
    model = build_model(job).to(device)
    job.check_vocabulary(model.get_input_embeddings().num_embeddings)
    job.check_positions(getattr(model.config.get_text_config(), "max_position_embeddings", None))
    report = None
    if run == "packed":
        job.on_phase("patching and auditing it")
        report = verify(model, job.attention)
        patch(model, implementation=job.attention, verify=False)
    if job.options.lora:
        model = with_adapters(model, job.options.lora, job.options.seed)
    if job.gradient_checkpointing:
        # transformers 5.23 renamed it, and warns under the old name
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    if run == "packed":
        job.on_phase(memory_line(model, job, ranks, device))
    folder, records = newest_checkpoint(job) if job.resume else (None, [])
    if folder is not None:
        states.load_weights(folder, model)
    model = ranks.wrapped(model, job.strategy, device)
    optimizer = make_optimizer(model, job.options)
    if ranks.rank:
        torch.manual_seed(hash((job.options.seed, ranks.rank, len(records))))  # dropout of its own
    if folder is not None:
        states.load_states(folder, optimizer, ranks)
    return model.train(), optimizer, records, report


def _write(job: TrainJob, model: Any, ranks: Ranks) -> None:
    """Write the trained model by rank 0; of a sharded one, all ranks gather the weights."""
    assert job.output is not None
    if job.strategy == "fsdp":
        weights = {name: whole(x).cpu() for name, x in states.changing(model).items()}
        if ranks.rank:
            return
        model = build_model(job)
        if job.options.lora:
            model = with_adapters(model, job.options.lora, job.options.seed)
        model.load_state_dict(weights, strict=False)
    if ranks.rank == 0:
        unpatch(model).save_pretrained(job.output)


def _audit(report: AuditReport | None) -> Audit:
    assert report is not None
    return Audit(
        exact=report.verdict == "exact",
        line=f"max relative error against each document alone: logits {report.logits:.0e} (allowed "
        f"{report.allowed_logits:.0e}), loss {report.loss:.0e} ({report.allowed_loss:.0e}), gradients "
        f"{report.gradients:.0e} ({report.allowed_gradients:.0e}); perturbing one document changes the others by "
        f"{f'{report.leak:.0e}' if report.leak else '0 (no leak)'}",
    )


def _train_step(job: TrainJob, model: Any, optimizer: torch.optim.Optimizer) -> TrainStep:
    """The step of a run. Runs that are compared differ in their rows alone: none is compiled or captured."""
    plain = len(job.runs) > 1 or job.deterministic
    fast: Choice = False if plain else "auto"
    compile = fast if job.compile is None else job.compile
    mixed = job.options.dtype == "float32" and job.options.precision == "bfloat16"
    autocast = torch.bfloat16 if mixed else None
    clip, plans = job.options.clip or None, job.schedule.plans
    longest, counts = max(plan.length.max() for plan in plans), np.hstack([np.diff(plan.row_offsets) for plan in plans])
    fixed = FixedShapes.of_rows(longest, counts)
    return TrainStep(
        model, optimizer, max_grad_norm=clip, autocast=autocast, compile=compile, capture=fast, fixed=fixed
    )


def batches(
    job: TrainJob, step: int, run: Run, model: nn.Module | None = None, ranks: Ranks = ALONE
) -> Iterator[Batch]:
    """The model's arguments and ``labels`` int64 [B, S], unshifted, -100 where nothing is trained; on the host."""
    if run == "packed":
        rows = job.schedule.packed(step, rank=ranks.rank, ranks=ranks.world, cost=_cost(model))
        yield from map(PackedCollator(unwrapped(model)), rows)
        return
    for padded in job.schedule.padded(step, run):
        arrays = {"input_ids": padded.input_ids, "attention_mask": padded.attention_mask, "labels": padded.targets}
        yield {name: torch.from_numpy(array).long() for name, array in arrays.items()}


def evaluation_batches(job: TrainJob, model: nn.Module, ranks: Ranks) -> Iterator[Batch]:
    """The rows of the evaluation, one at a time."""
    assert job.evaluation is not None
    collate = PackedCollator(unwrapped(model))
    for step in range(len(job.evaluation)):
        yield from map(collate, job.evaluation.packed(step, rank=ranks.rank, ranks=ranks.world))


def _cost(model: nn.Module | None) -> Cost | None:
    """Returns the cost of a row in the model, as far as its config gives it."""
    try:
        return None if model is None else Cost.from_config(causal_lm(model).config.get_text_config())
    except PackingError:
        return None


def device_of(name: str, local: int = 0) -> torch.device:
    """The device that ``--device`` names; auto is the GPU if there is one. ``local`` picks one of several GPUs."""
    if name in ("auto", "cuda") and torch.cuda.is_available():
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    try:
        device = torch.device("cpu" if name == "auto" else name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise PackingError(f"--device {name}: {first_line(error)}") from error
    return device


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {plural(torch.get_num_threads(), 'thread')}"
