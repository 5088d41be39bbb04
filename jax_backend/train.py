"""The JAX trainer behind ``crosspack train --backend jax``: a TrainJob goes in, a TrainResult comes out.

Each run starts from the same weights, and runs that are compared take their steps in turn. Packed rows have one
shape, so a run compiles once; padded batches are cut to a few lengths and compiled before the clock starts, which
favours them. Data flows ``Schedule -> numpy batches -> TrainStep``.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_backend import weights
from jax_backend.attention import IMPLEMENTATIONS, ORDER
from jax_backend.auditing import audit
from jax_backend.batches import to_batch
from jax_backend.checkpoint import restore_state, save_state
from jax_backend.model import Decoder, DecoderConfig
from jax_backend.train_step import TrainState, TrainStep, make_train_step
from packing_core.batch import IGNORE_INDEX
from packing_core.errors import PackingError, UnsupportedError
from packing_core.extras import require
from packing_core.training.checkpoints import newest_checkpoint, save_checkpoint
from packing_core.training.job import Audit, StepRecord, TrainJob, TrainResult
from packing_core.training.schedule import PaddedBatch, Run
from packing_core.training.timing import in_turn

STATE = "orbax"
LENGTH_STEP = 32  # padded batches are lengthened to a multiple of this, so that few shapes are compiled


def train(job: TrainJob) -> TrainResult:
    """Run the job; see ``packing_core.training.job``.

    Raises:
        PackingError: the model cannot be loaded, the flax decoder does not compute it, or it does not fit the data.
    """
    device = _device(job.device)
    with jax.default_device(device):
        model = build_model(job)
        job.check_vocabulary(model.config.vocab_size)
        train_step = make_train_step(model, _optimizer(job))  # one for all runs, which then share what is compiled
        records = in_turn({run: _Loop(job, run, train_step).run() for run in job.runs})
        job.on_phase("auditing the packed model")
        verdict = audit(model if len(job.runs) > 1 else build_model(job))  # a single run was given the model's weights
        return TrainResult(
            records=records,
            audit=Audit(verdict.exact, verdict.line),
            device=f"{device.device_kind} ({device.platform}), jax {jax.__version__}",
            attention=job.attention if job.attention != "auto" else ORDER[device.platform][0],
        )


def build_model(job: TrainJob) -> Decoder:
    """The decoder that the job names, its float32 weights loaded or drawn from ``options.seed``."""
    options: dict[str, Any] = {
        "dtype": jnp.dtype(job.options.precision),
        "param_dtype": jnp.float32,
        "remat": job.gradient_checkpointing,
        "implementation": None if job.attention == "auto" else job.attention,
    }
    if job.attention not in ("auto", *IMPLEMENTATIONS):
        raise PackingError(f"--attention {job.attention}: pass auto or one of {', '.join(IMPLEMENTATIONS)}")
    if job.trust_remote_code:
        raise UnsupportedError("--trust-remote-code: the JAX backend never runs code of a model's folder, leave it out")
    if not isinstance(job.model, str):
        return Decoder(DecoderConfig.from_hf(job.model), rngs=nnx.Rngs(job.options.seed), **options)
    folder = Path(job.model)
    if not folder.is_dir():
        hub = require("huggingface_hub", extra="hf", distribution="huggingface_hub")
        try:
            folder = Path(hub.snapshot_download(job.model, allow_patterns=["*.json", "*.safetensors"]))
        except Exception as error:  # the hub's client raises its own, requests' and OSError kinds
            raise PackingError(f"--model {job.model}: neither a folder nor reachable on the hub ({error})") from error
    return weights.load(folder, **options)


class _Loop:
    """One run from the first step, or from the newest checkpoint, to the last."""

    def __init__(self, job: TrainJob, run: Run, train_step: TrainStep) -> None:
        self.job = job
        self.run_name = run
        self.step = train_step

    def run(self) -> Generator[None, None, list[StepRecord]]:
        job = self.job
        records: list[StepRecord] = []
        if job.resume:
            folder, records = newest_checkpoint(job)
            state = restore_state(folder / STATE, self.step)
        else:
            state = self.step.init(donate=len(job.runs) == 1)  # each of several runs starts from the same weights
        self._compile(state)
        for number in range(len(records), len(job.schedule)):
            yield
            begin = time.perf_counter()
            state, metrics = self._take(state, number)
            loss = float(metrics["loss"])  # waits for the device
            records.append(job.record(self.run_name, number, loss, time.perf_counter() - begin))
            if job.save_every and len(records) % job.save_every == 0:
                save_checkpoint(job, records, partial(_save, state=state))
        if job.output is not None and self.run_name == "packed":
            weights.save(self.step.model(state), job.output)
        return records

    def _take(self, state: TrainState, number: int) -> tuple[TrainState, dict[str, jax.Array]]:
        first, *others = self._batches(number)
        sums = self.step.accumulate(state, None, first)
        for batch in others:
            sums = self.step.accumulate(state, sums, batch)
        return self.step.update(state, sums)

    def _batches(self, number: int) -> Iterator[dict[str, np.ndarray]]:
        schedule = self.job.schedule
        if self.run_name == "packed":
            return (to_batch(row) for row in schedule.packed(number))
        return (_padded(batch, schedule.padded_batch) for batch in schedule.padded(number, self.run_name))

    def _compile(self, state: TrainState) -> None:
        """Compile every batch shape of the run ahead of its first step."""
        self.job.on_phase(f"compiling the {self.run_name} step")
        seen: set[tuple[int, ...]] = set()
        for number in range(len(self.job.schedule)):
            for batch in self._batches(number):
                if (shape := batch["input_ids"].shape) not in seen:
                    seen.add(shape)
                    sums = self.step.accumulate(state, None, batch)
        jax.block_until_ready(sums)


def _save(folder: Path, state: TrainState) -> None:
    save_state(folder / STATE, state)


def _optimizer(job: TrainJob) -> optax.GradientTransformation:
    options = job.options
    rates = jnp.asarray([job.learning_rate(step) for step in range(len(job.schedule))], jnp.float32)
    adamw = optax.adamw(lambda count: rates[count], b1=0.9, b2=0.999, eps=1e-8, weight_decay=options.weight_decay)
    return optax.chain(optax.clip_by_global_norm(options.clip), adamw) if options.clip else adamw


def _padded(batch: PaddedBatch, rows: int) -> dict[str, np.ndarray]:
    """Documents padded to one of a few lengths and to the full number of rows: each row is one segment."""
    length = -(-batch.input_ids.shape[1] // LENGTH_STEP) * LENGTH_STEP
    grown = ((0, rows - len(batch.input_ids)), (0, length - batch.input_ids.shape[1]))
    segment_ids = np.pad(batch.attention_mask, grown).astype(np.int32)
    targets = np.pad(batch.targets[:, 1:], (grown[0], (0, grown[1][1] + 1)), constant_values=IGNORE_INDEX)
    return {
        "input_ids": np.pad(batch.input_ids, grown),
        "segment_ids": segment_ids,
        "position_ids": np.broadcast_to(np.arange(length, dtype=np.int32), segment_ids.shape) * segment_ids,
        "targets": np.maximum(targets, 0),
        "loss_weights": (targets != IGNORE_INDEX).astype(np.float32),
    }


def _device(name: str) -> jax.Device:
    """The device that ``--device`` names: ``auto``, a platform, or a platform and a number."""
    if name == "auto":
        return jax.devices()[0]
    platform, _, number = name.partition(":")
    try:
        return jax.devices({"cuda": "gpu"}.get(platform, platform))[int(number or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        found = ", ".join(f"{device.platform}:{device.id}" for device in jax.devices())
        raise PackingError(f"--device {name}: jax finds {found}") from error
