"""The JAX trainer behind ``crosspack train --backend jax``: a TrainJob goes in, a TrainResult comes out.

Each run starts from the same weights, and runs that are compared take their steps in turn. Packed rows have one
shape, so a run compiles once; padded batches are cut to a few lengths and compiled before the clock starts, which
favours them. Data flows ``Schedule -> numpy batches -> TrainStep``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from jax_backend.attention import IMPLEMENTATIONS, ORDER
from jax_backend.auditing import audit
from jax_backend.batches import to_batch
from jax_backend.model import weights
from jax_backend.model.decoder import Decoder, DecoderConfig
from jax_backend.model.lora import add_adapters, save_adapters
from jax_backend.placement import row_axes
from jax_backend.training.checkpoint import restore_state, save_state
from jax_backend.training.objective import cast_weights
from jax_backend.training.train_step import BATCH_KEYS, TrainState, TrainStep, make_train_step
from packing_core.batches.batch import PackedBatch
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import PackingError, UnsupportedError
from packing_core.extras import require
from packing_core.training.checkpoints import newest_checkpoint, save_checkpoint
from packing_core.training.job import Audit, TrainJob, TrainResult, honours
from packing_core.training.records import StepRecord
from packing_core.training.schedule import Run
from packing_core.training.timing import in_turn

STATE = "orbax"
LENGTH_STEP = 32  # padded batches are lengthened to a multiple of this, so that few shapes are compiled


@honours("--dtype bfloat16", "--lora", "--eval-data", "--mesh")
def train(job: TrainJob) -> TrainResult:
    """Run the job; see ``packing_core.training.job``.

    Raises:
        PackingError: the model cannot be loaded, the flax decoder does not compute it, or it does not fit the data.
        ContaminationError: documents that are packed together see each other; nothing was trained.
    """
    devices = _devices(job)
    mesh = Mesh(np.reshape(devices, list(job.mesh.values())), list(job.mesh)) if job.mesh else None
    with jax.default_device(devices[0]):
        train_step, config, model = _begin(job, mesh)
        job.check_vocabulary(config.vocab_size)
        job.on_phase("auditing the packed model")
        verdict = audit(model or _judged(job, config))
        checked = Audit(verdict.exact, verdict.line).checked()
        records = in_turn({run: _Loop(job, run, train_step).run() for run in job.runs})
        peak = (devices[0].memory_stats() or {}).get("peak_bytes_in_use")
        spread = f", {len(devices)} devices ({', '.join(f'{k}={v}' for k, v in job.mesh.items())})" if mesh else ""
        return TrainResult(
            records=records,
            audit=checked,
            device=f"{devices[0].device_kind} ({devices[0].platform}){spread}, jax {jax.__version__}",
            attention=job.attention if job.attention != "auto" else ORDER[devices[0].platform][0],
            peak_bytes={"packed": peak} if peak and len(job.runs) == 1 else {},
        )


def _begin(job: TrainJob, mesh: Mesh | None) -> tuple[TrainStep, DecoderConfig, Decoder | None]:
    """One step for all runs, which then share what is compiled; and the model, unless a run is given its weights."""
    make = partial(build_model, job, mesh)
    model = make() if mesh is None or isinstance(job.model, str) else None  # or made in its shards
    lora = job.options.lora
    # bfloat16 weights that follow float32 ones: all layers compute with what bfloat16 keeps of them
    rounded = jnp.bfloat16 if job.options.master_weights and not lora else None
    trainable = nnx.LoRAParam if lora else nnx.Param
    step = make_train_step(model or make, _optimizer(job), mesh, trainable=trainable, compute_dtype=rounded)
    config = (model or nnx.eval_shape(make)).config
    return step, config, model if len(job.runs) > 1 else None


def _judged(job: TrainJob, config: DecoderConfig) -> Decoder:
    """The job's model anew; over a mesh, which may hold what no device holds, one layer of each kind."""
    if not job.mesh:
        return build_model(job)
    return Decoder(config.shallow, rngs=nnx.Rngs(job.options.seed), **_decoder_options(job))


def _decoder_options(job: TrainJob) -> dict[str, Any]:
    float32 = job.options.dtype == "float32" or (job.options.master_weights and not job.options.lora)
    return {
        "dtype": jnp.dtype(job.options.precision),
        "param_dtype": jnp.float32 if float32 else jnp.bfloat16,
        "remat": job.gradient_checkpointing,
        "implementation": None if job.attention == "auto" else job.attention,
    }


def build_model(job: TrainJob, mesh: Mesh | None = None) -> Decoder:
    """The decoder that the job names, its weights loaded or drawn from ``options.seed``, with adapters if asked for."""
    options = _decoder_options(job) | ({} if mesh is None else {"mesh": mesh})
    if job.attention not in ("auto", *IMPLEMENTATIONS):
        raise PackingError(f"--attention {job.attention}: pass auto or one of {', '.join(IMPLEMENTATIONS)}")
    if job.trust_remote_code:
        raise UnsupportedError("--trust-remote-code: the JAX backend never runs code of a model's folder, leave it out")
    if isinstance(job.model, str):
        model = weights.load(_folder(job.model), **options)
    else:
        model = Decoder(DecoderConfig.from_hf(job.model), rngs=nnx.Rngs(job.options.seed), **options)
    return add_adapters(model, job.options.lora, job.options.seed) if job.options.lora else model


def _folder(name: str) -> Path:
    """The folder that ``--model`` names, downloaded if it is a hub name."""
    if Path(name).is_dir():
        return Path(name)
    hub = require("huggingface_hub", extra="hf", distribution="huggingface_hub")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # the hub's client raises its own, requests' and OSError kinds
        raise PackingError(f"--model {name}: neither a folder nor reachable on the hub ({error})") from error


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
            seconds = time.perf_counter() - begin
            evaluated = None
            if self.run_name == "packed" and job.evaluates_after(number):
                evaluated = float(self.step.evaluate(state, self._evaluation())["loss"])
            norm = float(metrics["grad_norm"])
            records.append(job.record(self.run_name, number, loss, seconds, grad_norm=norm, eval_loss=evaluated))
            if job.save_every and len(records) % job.save_every == 0:
                save_checkpoint(job, records, partial(_save, state=state))
        if job.output is not None and self.run_name == "packed":
            self._write(state, job.output)
        return records

    def _write(self, state: TrainState, output: Path) -> None:
        job, model = self.job, self.step.model(state)
        if job.options.lora:
            save_adapters(model, output, str(job.model))
            return
        if job.options.dtype == "bfloat16":
            nnx.update(model, cast_weights(nnx.state(model, nnx.Param), jnp.bfloat16))
        weights.save(model, output)

    def _take(self, state: TrainState, number: int) -> tuple[TrainState, dict[str, jax.Array]]:
        first, *others = self._batches(number)
        sums = self.step.accumulate(state, None, first)
        for batch in others:
            sums = self.step.accumulate(state, sums, batch)
        return self.step.update(state, sums)

    def _batches(self, number: int) -> Iterator[dict[str, np.ndarray]]:
        schedule = self.job.schedule
        if self.run_name == "packed":
            return self._side_by_side(schedule.packed(number))
        return (_padded(batch, schedule.padded_batch) for batch in schedule.padded(number, self.run_name))

    def _evaluation(self) -> Iterator[dict[str, np.ndarray]]:
        held_out = self.job.evaluation
        assert held_out is not None
        return self._side_by_side(row for number in range(len(held_out)) for row in held_out.packed(number))

    def _side_by_side(self, rows: Iterator[PackedBatch]) -> Iterator[dict[str, np.ndarray]]:
        """As many rows a microbatch as devices that hold rows of their own, the last ones filled up with padding."""
        devices = math.prod(self.job.mesh[name] for name in row_axes(self.job.mesh))
        arrays = ({name: array for name, array in to_batch(row).items() if name in BATCH_KEYS} for row in rows)
        while together := list(islice(arrays, devices)):
            joined = {name: np.concatenate([row[name] for row in together]) for name in BATCH_KEYS}
            missing = devices - len(together)
            yield {name: np.pad(array, ((0, missing), (0, 0))) for name, array in joined.items()}

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
    """AdamW; weight decay acts on matrices, not on norms and biases."""
    options = job.options
    rates = jnp.asarray([job.learning_rate(step) for step in range(len(job.schedule))], jnp.float32)
    adamw = optax.adamw(
        lambda count: rates[count],
        b1=0.9,
        b2=0.999,
        eps=1e-8,
        weight_decay=options.weight_decay,
        mask=partial(jax.tree_util.tree_map_with_path, _is_matrix),
    )
    return optax.chain(optax.clip_by_global_norm(options.clip), adamw) if options.clip else adamw


def _is_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
    """Returns whether a weight of one layer has two axes; scanned layers have one more in front."""
    return leaf.ndim - any(getattr(key, "key", None) == "blocks" for key in path) >= 2


def _padded(batch: PackedBatch, rows: int) -> dict[str, np.ndarray]:
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


def _devices(job: TrainJob) -> list[jax.Device]:
    """The devices that ``--device`` (``auto``, a platform, or a platform and a number) and ``--mesh`` name."""
    platform, _, number = job.device.partition(":")
    wanted = math.prod(job.mesh.values())
    try:
        found = jax.devices() if platform == "auto" else jax.devices({"cuda": "gpu"}.get(platform, platform))
        first = int(number or 0)
        devices = found[first : first + wanted]
    except (RuntimeError, ValueError) as error:
        raise PackingError(f"--device {job.device}: jax finds {_names(jax.devices())}") from error
    if len(devices) < wanted:
        asked = f"--mesh {','.join(f'{k}={v}' for k, v in job.mesh.items())}" if job.mesh else f"--device {job.device}"
        raise PackingError(f"{asked}: jax finds {_names(jax.devices())}")
    return devices


def _names(devices: list[jax.Device]) -> str:
    return ", ".join(f"{device.platform}:{device.id}" for device in devices)
