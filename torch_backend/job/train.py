"""The torch trainer behind ``crosspack train``: a TrainJob goes in, a TrainResult comes out.

Every run builds the model anew from the same source and seed, and trains it by a ``transformers.Trainer``
(:mod:`.trainer`); the packed one is audited and patched. Runs that are compared follow each other, the packed one
first, so that nothing is trained unless it is exact. A run has the device to itself; the rate of its median step is
compared.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

import torch

from packing_core.errors import PackingError, naming, plural
from packing_core.extras import require
from packing_core.training.checkpoints import best_checkpoint, newest_checkpoint
from packing_core.training.job import ZERO, Audit, TrainJob, TrainResult, honours
from packing_core.training.memory_model import GIB, MemoryModel
from packing_core.training.records import StepRecord
from packing_core.training.schedule import Run
from packing_core.training.timing import Clock
from torch_backend.auditing.model import verify, verify_additions
from torch_backend.hf.anatomy.structure import causal_lm, with_values
from torch_backend.hf.explaining import explain
from torch_backend.hf.float8 import to_float8
from torch_backend.job import states
from torch_backend.job.models import audit_of, build_model, with_adapters, write_model
from torch_backend.job.ranks import Process, Ranks, context_mesh, shard, whole_weights
from torch_backend.job.trainer import job_trainer
from torch_backend.patching import patch
from torch_backend.steps.memory import set_level

require("transformers", extra="hf")

from transformers.integrations import unset_hf_deepspeed_config  # noqa: E402


@dataclass(frozen=True)
class _Finished:
    """Results of one run: its records and memory; of the packed one, its audit and which attention ran."""

    records: list[StepRecord]
    peak_bytes: int
    audit: Audit | None = None
    attention: str = ""


@honours(
    "--dtype bfloat16",
    "--precision float8",
    "--lora",
    "--lora-alpha, --lora-dropout, --lora-targets or --merge-lora",
    "--eval-data",
    "--compile",
    "--nproc or torchrun",
    "--context-parallel",
    "--optim, --neftune-alpha or --set",
    "--keep-best, --early-stopping or --sample",
)
def train(job: TrainJob) -> TrainResult:
    """Run the job; see ``packing_core.training.job``.

    Raises:
        PackingError: the model cannot be loaded, cannot be packed without contamination, or does not fit the data.
    """
    ranks = Ranks.from_environment()
    if ranks.world == 1:
        job = replace(job, strategy="ddp")  # nothing to shard
    device = device_of(job.device, ranks.local)
    process = Process(device, ranks, Clock(torch.get_num_threads()))
    if job.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    with ranks.joined(device, high_priority=job.context_parallel > 1):
        packed_first = sorted(job.runs, key=lambda run: run != "packed")
        finished = {run: _train(job, run, process) for run in packed_first}
    packed = finished["packed"]
    assert packed.audit is not None
    how = job.strategy + (f", rows cut over {job.context_parallel}" if job.context_parallel > 1 else "")
    spread = f", {ranks.world} processes ({how})" if ranks.world > 1 else ""
    return TrainResult(
        records={run: finished[run].records for run in job.runs},
        audit=packed.audit,
        device=device_name(device) + spread,
        attention=packed.attention,
        peak_bytes={run: finished[run].peak_bytes for run in job.runs if finished[run].peak_bytes},
        cpu=process.clock.cpu if device.type == "cpu" else None,
    )


def _train(job: TrainJob, run: Run, process: Process) -> _Finished:
    """Train one run from the initial weights or the newest checkpoint; write the packed one."""
    release(process.device)
    memory = Memory(process.device)
    with memory.counted(), TemporaryDirectory() as folder:
        model, audit = _prepared(job, run, process)
        checkpoint, records = newest_checkpoint(job) if job.resume else (None, [])
        if checkpoint is not None:
            states.load_weights(checkpoint, model)
        if job.strategy == "fsdp":
            shard(model, process)
        with with_values([(model.config, "use_cache", False)]):  # as Trainer sets it, and not to be written
            trainer = job_trainer(job, run, model, process, records=records, checkpoint=checkpoint, folder=folder)
            if len(records) < len(job.schedule) and not job.stops_after(records):
                trainer.train()
                trainer.sample()
            best = best_checkpoint(job, records) if job.keep_best and run == "packed" else None
            if best is not None:
                job.on_phase(f"taking the weights of {best.name}, which had the lowest evaluation loss")
                states.load_weights(best, model)
        if job.strategy in ZERO:  # or the next model of this process would be partitioned while it is made
            unset_hf_deepspeed_config()
    attention = ""
    if run == "packed":
        implementations = sorted({layer.serves for layer in explain(model).layers if layer.serves})
        attention = ", ".join(implementations) or job.attention
        if job.output is not None:
            sharded = job.strategy in ("fsdp", "zero3")
            weights = whole_weights(states.changing(model)) if sharded else None  # which all ranks gather
            if process.ranks.rank == 0:
                write_model(job, model, weights)
    return _Finished(records, memory.peak, audit, attention)


def _prepared(job: TrainJob, run: Run, process: Process) -> tuple[Any, Audit | None]:
    """The model of a run on its device, and the audit of the packed one, which is patched."""
    job.on_phase(f"building the model ({run})")
    model = build_model(job).to(process.device)
    audit = None
    if run == "packed":
        job.on_phase("patching and auditing it")
        audit = audit_of(verify(model, job.attention))
        mesh = context_mesh(process, job.context_parallel)
        patch(model, implementation=job.attention, verify=False, mesh=mesh)
    if job.options.lora:
        model = with_adapters(model, job.options)
    if job.options.precision == "float8":
        to_float8(model, "float8")
        if run == "packed":
            verify_additions(model)
    if job.gradient_checkpointing:
        set_level(model, "full")
    if run == "packed":
        job.on_phase(memory_line(model, job, process.ranks, process.device))
    return model, audit


def device_of(name: str, local: int = 0) -> torch.device:
    """The device that ``--device`` names; auto is the GPU if there is one. ``local`` picks one of several GPUs."""
    if name in ("auto", "cuda") and torch.cuda.is_available():
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    with naming(f"--device {name}", (RuntimeError, AssertionError)):
        device = torch.device("cpu" if name == "auto" else name)
        torch.empty(1, device=device)
    return device


def device_name(device: torch.device) -> str:
    """The device as people call it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {plural(torch.get_num_threads(), 'thread')}"


def states_bytes(model: torch.nn.Module, job: TrainJob) -> tuple[int, int]:
    """Bytes of the weights, and of what training adds: gradients, AdamW's two moments, float32 copies of weights."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = sum(p.numel() * p.element_size() for p in trained)
    moments = sum(p.numel() for p in trained) * 3 * 4 if job.options.master_weights else 2 * gradients
    return weights, gradients + moments


def memory_line(model: Any, job: TrainJob, ranks: Ranks, device: torch.device) -> str:
    """Compares the memory that a process of the job needs with the memory of the device."""
    weights, others = states_bytes(model, job)
    weights //= ranks.world if job.strategy in ("fsdp", "zero3") else 1
    others //= ranks.world if job.strategy in ("fsdp", "zero2", "zero3") else 1
    line = f"memory: {(weights + others) / GIB:.2f} GiB of weights, gradients and optimizer states"
    with suppress(PackingError):  # of families whose memory the formula does not know
        itemsize = 4 if job.options.precision == "float32" else 2
        formula = MemoryModel.from_config(causal_lm(model).config, fixed=0, gradients=0, itemsize=itemsize)
        level = "full" if job.gradient_checkpointing else "none"
        line += f", and about {formula.bytes(level, job.schedule.plans[0].capacity) / GIB:.2f} GiB of activations"
    if device.type == "cuda":
        free, total = (size / GIB for size in torch.cuda.mem_get_info(device))
        line += f"; {free:.1f} of {total:.1f} GiB are free"
    return line


def release(device: torch.device) -> None:
    """Give back what is no longer used: patched models hold themselves in cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Memory:
    """Device memory of one contender while others stay in memory beside it; 0 where the device does not count.

    Attributes:
        peak: the most that it had at one time.
    """

    def __init__(self, device: torch.device) -> None:
        self.peak = 0
        self._device = device
        self._own = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what the block allocates."""
        if self._device.type != "cuda":
            yield
            return
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        self.peak = max(self.peak, self._own + torch.cuda.max_memory_allocated(self._device) - before)
        self._own += torch.cuda.memory_allocated(self._device) - before
