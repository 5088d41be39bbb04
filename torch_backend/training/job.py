"""The torch trainer behind ``crosspack train``: a TrainJob goes in, a TrainResult comes out.

Every run builds the model anew from the same source and seed; the packed one is patched. One generator trains all
kinds, and runs that are compared take their steps in turn, so that other load on the machine slows all of them alike.
Each batch of a step adds ``loss sum / trained tokens of the step`` to the loss, so nothing depends on how the step's
documents were arranged. Weights and optimizer states leave and enter as safetensors only.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from packing_core.errors import PackingError, first_line, plural
from packing_core.extras import require
from packing_core.training.checkpoints import newest_checkpoint, save_checkpoint
from packing_core.training.job import Audit, StepRecord, TrainJob, TrainResult, is_hub_name
from packing_core.training.schedule import Run
from packing_core.training.timing import Clock, in_turn
from torch_backend.auditing.model import AuditReport, verify
from torch_backend.collate import Batch, PackedCollator
from torch_backend.hf.explain import explain
from torch_backend.losses.cross_entropy import next_token_targets, packed_cross_entropy
from torch_backend.patching import patch, unpatch
from torch_backend.segments import to_device

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
_RANDOM = "random."  # prefix of the generators' states among the optimizer's tensors


def train(job: TrainJob) -> TrainResult:
    """Run the job; see ``packing_core.training.job``.

    Raises:
        PackingError: the model cannot be loaded, cannot be packed without contamination, or does not fit the data.
    """
    device = device_of(job.device)
    if job.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    clock = Clock(torch.get_num_threads())
    memory = {run: Memory(device) for run in job.runs}
    finished = in_turn({run: _run(job, run, device, clock, memory[run]) for run in job.runs})
    packed = finished["packed"]
    assert packed.audit is not None
    return TrainResult(
        records={run: done.records for run, done in finished.items()},
        audit=packed.audit,
        device=_device_name(device),
        attention=packed.attention,
        peak_bytes={run: counted.peak for run, counted in memory.items() if counted.peak},
        cpu=clock.cpu if device.type == "cpu" else None,
    )


def build_model(job: TrainJob) -> Any:
    """The job's model in float32 on the CPU: its own safetensors, or random weights that follow from the seed.

    Raises:
        PackingError: the folder or hub name has no such model, no safetensors, or needs code of its own to run.
    """
    transformers = require("transformers", extra="hf")
    torch.manual_seed(job.options.seed)
    arguments: dict[str, Any] = {"trust_remote_code": job.trust_remote_code}
    try:
        if not isinstance(job.model, str):
            config = transformers.AutoConfig.for_model(**job.model)
            return transformers.AutoModelForCausalLM.from_config(_settled(config, job), **arguments).float()
        if not Path(job.model).is_dir() and not is_hub_name(job.model):
            raise PackingError(f"--model {job.model}: no such folder or file, and not a hub name (`owner/name`)")
        config = transformers.AutoConfig.from_pretrained(job.model, **arguments)
        return transformers.AutoModelForCausalLM.from_pretrained(
            job.model, config=_settled(config, job), dtype=torch.float32, use_safetensors=True, **arguments
        )
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, PackingError):
            raise
        raise PackingError(f"--model {job.model}: {first_line(error)}") from error


def _settled(config: Any, job: TrainJob) -> Any:
    """The config without what a model's author may not decide here: kernels from the hub, and noise in a comparison."""
    if not job.trust_remote_code:
        config._attn_implementation = None
    if len(job.runs) > 1:  # runs are compared loss by loss
        for name, value in config.to_dict().items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(config, name, 0.0)
    return config


@dataclass(frozen=True)
class _Finished:
    """What one run leaves: its records and, of the packed one, how it was judged and served."""

    records: list[StepRecord]
    audit: Audit | None = None
    attention: str = ""


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


def _run(
    job: TrainJob, run: Run, device: torch.device, clock: Clock, memory: Memory
) -> Generator[None, None, _Finished]:
    """Train one run, a step per ``next``, from the initial weights or the newest checkpoint; write the packed one."""
    with memory.counted():
        model, optimizer, records, report = _begin(job, run, device)
    for step in range(len(records), len(job.schedule)):
        yield
        with memory.counted(), clock.timed():
            loss = _step(job, step, model, optimizer, batches(job, step, run, device))
        records.append(job.record(run, step, loss, clock.seconds))
        if job.save_every and (step + 1) % job.save_every == 0:
            save_checkpoint(job, records, lambda folder: _save(folder, model, optimizer))
    if run != "packed":
        return _Finished(records)
    served = sorted({layer.serves for layer in explain(model).layers if layer.serves})
    if job.output is not None:
        unpatch(model).save_pretrained(job.output)
    return _Finished(records, _audit(report), ", ".join(served) or job.attention)


def _begin(
    job: TrainJob, run: Run, device: torch.device
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
    optimizer = _optimizer(model, job)
    records: list[StepRecord] = []
    if job.resume:
        folder, records = newest_checkpoint(job)
        _load(folder, model, optimizer)
    if job.gradient_checkpointing:
        # transformers 5.23 renamed it, and warns under the old name
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    return model.train(), optimizer, records, report


def _audit(report: AuditReport | None) -> Audit:
    assert report is not None
    return Audit(
        exact=report.verdict == "exact",
        line=f"max relative error against each document alone: logits {report.logits:.0e}, loss {report.loss:.0e}, "
        f"gradients {report.gradients:.0e} (tolerance {report.tolerance:.0e}); perturbing one document changes the "
        f"others by {f'{report.leak:.0e}' if report.leak else '0 (no leak)'}",
    )


def _step(job: TrainJob, step: int, model: Any, optimizer: torch.optim.Optimizer, batches: Iterable[Batch]) -> float:
    """One optimizer step; returns the loss per trained token before the update."""
    trained = job.schedule.trained_tokens[step]
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    for batch in batches:
        labels = batch.pop("labels")
        with torch.autocast(device.type, torch.bfloat16, enabled=job.options.precision == "bfloat16"):
            logits = model(**batch, use_cache=False).logits
        loss_sum, _ = packed_cross_entropy(logits, next_token_targets(labels))
        loss = loss_sum / trained
        loss.backward()
        total += loss.detach()
    if job.options.clip:
        nn.utils.clip_grad_norm_(model.parameters(), job.options.clip)
    for group in optimizer.param_groups:
        group["lr"] = job.learning_rate(step)
    optimizer.step()
    optimizer.zero_grad()
    return total.item()


def batches(job: TrainJob, step: int, run: Run, device: torch.device) -> Iterator[Batch]:
    """The model's arguments and ``labels`` int64 [B, S], unshifted, -100 where nothing is trained."""
    if run == "packed":
        collate = PackedCollator()
        for row in job.schedule.packed(step):
            batch = collate(row)
            yield {name: to_device(v, device) if isinstance(v, Tensor) else v for name, v in batch.items()}
        return
    for padded in job.schedule.padded(step, run):
        arrays = {"input_ids": padded.input_ids, "attention_mask": padded.attention_mask, "labels": padded.targets}
        yield {name: to_device(torch.from_numpy(array).long(), device) for name, array in arrays.items()}


def _optimizer(model: nn.Module, job: TrainJob) -> torch.optim.Optimizer:
    """AdamW; weight decay acts on matrices, not on norms and biases."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": job.options.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=job.options.lr, fused=True)


def _save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write weights, optimizer state and random generators to ``folder``, as safetensors."""
    safetensors = require("safetensors.torch", extra="hf")
    safetensors.save_model(model, str(folder / WEIGHTS))
    state = {
        f"{number}.{key}": value.contiguous()
        for number, values in optimizer.state_dict()["state"].items()
        for key, value in values.items()
    }
    state[f"{_RANDOM}cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state[f"{_RANDOM}cuda"] = torch.cuda.get_rng_state()
    safetensors.save_file(state, str(folder / OPTIMIZER))


def _load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read what ``_save`` wrote."""
    safetensors = require("safetensors.torch", extra="hf")
    safetensors.load_model(model, str(folder / WEIGHTS))
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in safetensors.load_file(str(folder / OPTIMIZER)).items():
        if name == f"{_RANDOM}cpu":
            torch.set_rng_state(value)
        elif name == f"{_RANDOM}cuda":
            torch.cuda.set_rng_state(value)
        else:
            number, _, key = name.partition(".")
            state.setdefault(int(number), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def device_of(name: str) -> torch.device:
    """The device that ``--device`` names; auto is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise PackingError(f"--device {name}: {first_line(error)}") from error
    return device


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {plural(torch.get_num_threads(), 'thread')}"
