"""The record of a run's steps: what each did, which was the best, and how long ago that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from packing_core.training.schedule import Run


@dataclass(frozen=True)
class StepRecord:
    """The record of one optimizer step of one run.

    Attributes:
        run: ``packed``, ``padded`` or ``grouped``.
        step: 0-based.
        loss: sum of the cross-entropies of the step's targets over their number, before the update.
        tokens: real tokens.
        slots: tokens that the model computed, padding included.
        seconds: wall time, from building the first batch to the end of the update on the device.
        eval_loss: sum of the cross-entropies of the evaluation's targets over their number, after the update; None
            where there was no evaluation.
        grad_norm: of the gradients of ``loss``, before clipping; None where the backend does not measure it.
    """

    run: Run
    step: int
    loss: float
    tokens: int
    slots: int
    seconds: float
    eval_loss: float | None = None
    grad_norm: float | None = None


def best_record(records: Sequence[StepRecord]) -> StepRecord | None:
    """Returns the first record with the lowest evaluation loss; None without an evaluation."""
    evaluated = [record for record in records if record.eval_loss is not None]
    return min(evaluated, key=lambda record: record.eval_loss or 0.0, default=None)


def without_progress(records: Sequence[StepRecord]) -> int:
    """Returns the number of evaluations since the best one."""
    best = best_record(records)
    return sum(record.eval_loss is not None and record.step > best.step for record in records) if best else 0
