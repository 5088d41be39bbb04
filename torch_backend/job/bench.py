"""Times a model for ``crosspack bench`` with torch: padded, packed by stock transformers, and patched.

A TrainJob -> the model, once per way -> logits of a few rows with several documents against each document alone ->
optimizer steps, which the ways take in turn so that other load on the machine slows all of them alike -> one Measured
per way, with the rate of its median step. A way is exact if its logits are as near to those of the documents alone in
float32 as the documents alone are in the precision that is timed, rounding counted twice.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from itertools import cycle
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packing_core.budget import FACTOR, FLOAT32, Difference
from packing_core.errors import PackingError, UnsupportedModelError
from packing_core.training.job import Measured, TrainJob
from packing_core.training.timing import Clock, in_turn
from torch_backend.auditing.compare import difference
from torch_backend.collate import Batch, PackedCollator
from torch_backend.job.models import build_model
from torch_backend.job.train import Memory, device_of, release
from torch_backend.job.trainer import padded_batches
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.losses.cross_entropy import next_token_targets, normalise, packed_cross_entropy
from torch_backend.packed_tokens import plain
from torch_backend.patching import patch
from torch_backend.segments import to_device

OURS = "crosspack"
# What each way passes to the model besides the batch. Most people leave use_cache at its default, under which stock
# transformers does not look for segments.
WAYS: dict[str, dict[str, Any]] = {
    "padded": {"use_cache": False},
    "stock packed": {},
    "stock packed, use_cache=False": {"use_cache": False},
    OURS: {"use_cache": False},
}
JUDGED = 3  # rows whose logits are compared, each of two documents at least
_FLOOR = FLOAT32 / 10  # of the largest logit: rounding of float32 itself


def race(job: TrainJob, seconds: float) -> Iterator[Measured]:
    """Measure every way; see the module's docstring.

    Args:
        job: its schedule has one row a step; ``options`` decide precision and seed.
        seconds: of optimizer steps per way, after one step to warm up.

    Raises:
        PackingError: the model cannot be loaded or does not fit the data.
    """
    device, clock = device_of(job.device), Clock(torch.get_num_threads())
    yield from in_turn({way: _Contender(job, way, device).measure(seconds, clock) for way in WAYS}).values()


class _Contender:
    """One way to run the model of a job."""

    model: Any

    def __init__(self, job: TrainJob, way: str, device: torch.device) -> None:
        self.job, self.way, self.device = job, way, device

    def measure(self, seconds: float, clock: Clock) -> Generator[None, None, Measured]:
        """Trains a step per ``next``; what fails, out of memory say, is a Measured too."""
        job, memory = self.job, Memory(self.device)
        self.model = build_model(job)
        job.on_phase(f"{self.way}: comparing its logits with each document alone")
        try:
            with memory.counted():
                self.model = self.model.to(self.device).train()
                judged, difference, allowed = self.judge()
                release(self.device)
            memory.peak = 0  # of training alone
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=job.options.lr, fused=True)
            rates: list[float] = []
            timed = 0.0
            for count, step in enumerate(cycle(range(len(job.schedule)))):
                yield
                with memory.counted(), clock.timed():
                    for batch in self.inputs(step):
                        with self.precision():
                            value = self.loss(batch)
                        value.backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    _wait(self.device)
                if count == 0:
                    continue  # it warms up
                rates.append(int(job.schedule.steps[step].length.sum()) / clock.seconds)
                timed += clock.seconds
                if timed > seconds:
                    break
        except (ImportError, PackingError, RuntimeError, ValueError) as reason:
            return Measured(self.way, failure=" ".join(str(reason).split())[:160])
        return Measured(
            self.way,
            tokens_per_second=median(rates),  # what is compiled or allocated for a new length does not come again
            peak_bytes=memory.peak or None,
            judged=judged,
            difference=difference,
            allowed=allowed,
            cpu=clock.cpu if self.device.type == "cpu" else None,
        )

    def judge(self) -> tuple[int, float, float]:
        """Compares logits of rows with those of their documents alone, and leaves the model patched.

        A row of one document shows nothing: whatever a way does between documents, it does not do there.

        Returns:
            How many rows were compared, how far the worst is off, and how far it may be.
        """
        schedule = self.job.schedule
        steps = [step for step, plan in enumerate(schedule.steps) if len(plan.length) > 1][:JUDGED]
        truths = [self.alone(step) for step in steps]
        if self.way == OURS:
            patch(self.model, implementation=self.job.attention)
        judged = []
        for step, (alone, allowed) in zip(steps, truths, strict=True):
            with torch.no_grad(), self.precision():
                logits = self.logits(next(self.inputs(step)))
            order = schedule.batches(step, "padded")[0].tolist() if self.way == "padded" else range(len(alone))
            judged.append((_difference(logits, [alone[document] for document in order]), allowed))
        difference, allowed = max(judged, key=lambda pair: pair[0] - pair[1], default=(float("nan"), 0.0))
        return len(judged), difference, allowed

    def precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.job.options.precision == "bfloat16")

    def inputs(self, step: int) -> Iterator[Batch]:
        """The batches of a step; stock packing gets what users give it: restarting positions, no mask, no segments."""
        schedule, packed = self.job.schedule, map(PackedCollator(), self.job.schedule.packed(step))
        for batch in padded_batches(schedule, step, "padded") if self.way == "padded" else packed:
            if self.way.startswith("stock"):
                batch = {name: plain(batch[name]) for name in ("input_ids", "position_ids", "labels")}
            yield {name: to_device(x, self.device) if isinstance(x, Tensor) else x for name, x in batch.items()}

    def alone(self, step: int) -> tuple[list[Tensor], float]:
        """Logits of a step's documents on the host, each alone, in float32, and how far a run of them may be off."""
        batch = self.job.schedule.alone(step)
        rows = zip(batch.input_ids.astype(np.int64), batch.lengths.tolist(), strict=True)
        ids = [to_device(torch.from_numpy(row[:length])[None], self.device) for row, length in rows]

        def logits() -> list[Tensor]:
            return [self.model(input_ids=document, use_cache=False).logits[0].float().cpu() for document in ids]

        with torch.no_grad():
            exact = logits()
            with self.precision():
                return exact, FACTOR * _difference(logits(), exact) + _FLOOR

    def logits(self, batch: Batch) -> list[Tensor]:
        """Per document of the batch, in its order."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = self.model(**inputs, **WAYS[self.way]).logits.float().cpu()
        if self.way == "padded":
            return [row[mask.bool()] for row, mask in zip(logits, batch["attention_mask"].cpu(), strict=True)]
        starts = (batch["position_ids"].flatten() == 0).nonzero().flatten().tolist()
        ends = [*starts[1:], logits.shape[1]]
        return [logits[0, start:end] for start, end in zip(starts, ends, strict=True)]

    def loss(self, batch: Batch) -> Tensor:
        """Computes the mean loss of a batch; ours without logits, where the family's loss allows that."""
        if self.way == OURS:
            try:
                return normalise(*causal_lm_loss(self.model, batch))
            except UnsupportedModelError:
                pass
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = self.model(**inputs, **WAYS[self.way]).logits
        return normalise(*packed_cross_entropy(logits, next_token_targets(batch["labels"])))


def _difference(logits: list[Tensor], right: list[Tensor]) -> float:
    """The largest, as a share of the largest logit; infinite where something is not a number."""
    pairs = [difference(x, y) for x, y in zip(logits, right, strict=False)]  # padding is last
    return Difference(max(pair.error for pair in pairs), max(pair.largest for pair in pairs)).relative()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
