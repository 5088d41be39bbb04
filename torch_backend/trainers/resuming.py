"""Refuses to resume a Trainer inside an epoch whose first steps held other rows than they would hold here.

Transformers finds its place by counting steps. Which documents a step holds follows from the data, the capacity, the
seed, the rows of a step and, because rows are dealt to ranks at equal cost, the number of ranks. Each checkpoint notes
all of this in the trainer's state, of the data a digest of documents from all over, of a stream one of its first
documents, and a run that goes on compares. ``ignore_data_skip=True`` begins the data anew and compares nothing.
"""

from __future__ import annotations

import logging
from typing import Any

from packing_core.errors import UnsupportedError, plural
from packing_core.extras import require
from torch_backend.trainers.epoch_rows import EpochRows, RowStream

require("transformers", extra="hf")

from transformers import TrainerCallback  # noqa: E402

logger = logging.getLogger(__name__)

_NOTE = "crosspack.rows"  # in the trainer's state, beside the states of callbacks


class SameRows(TrainerCallback):
    """Notes in every checkpoint what decides the rows of each step, and checks it on resuming.

    Args:
        rows: what the trainer trains on.
    """

    def __init__(self, rows: EpochRows | RowStream) -> None:
        self.rows = rows

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        """
        Raises:
            UnsupportedError: the run would go on inside an epoch whose first steps held other rows than here.
        """
        here = self._note(args, train_dataloader)
        saved = state.stateful_callbacks.get(_NOTE, {}).get("attributes", {})
        if "rows" not in saved and saved.get("ranks", here["ranks"]) != here["ranks"]:
            saved = {"rows": None, **saved}  # an older note
        skips_data = not getattr(args, "ignore_data_skip", False)
        if state.global_step and not saved and skips_data:
            logger.warning(
                "the checkpoint does not name its rows, as that of a run without packing: its %s are taken for steps "
                "of these rows, so some documents of the epoch may be trained twice and others not at all. "
                "ignore_data_skip=True begins the data anew",
                plural(state.global_step, "step"),
            )
        before = {**here, **saved}
        inside = state.global_step % before["steps"] if before["steps"] else state.global_step
        same_steps = before["steps"] == here["steps"]
        same_rows = all(before[name] == here[name] for name in ("rows", "rows_per_step", "documents"))
        if state.global_step and skips_data and not same_rows and (inside or not same_steps):
            raise UnsupportedError(_refusal(before, here, inside, between=same_steps and here["steps"] > 0))
        state.stateful_callbacks[_NOTE] = {"args": {}, "attributes": here}

    def _note(self, args: Any, loader: Any) -> dict[str, Any]:
        """Returns the settings that decide the rows of each step; an epoch of a stream has 0 ``steps``, for unknown."""
        epochs = isinstance(self.rows, EpochRows)
        documents: Any = getattr(self.rows, "documents", None) if epochs else self.rows
        accumulated, ranks = args.gradient_accumulation_steps, getattr(self.rows, "ranks", args.world_size)
        return {
            "ranks": ranks,
            "capacity": self.rows.capacity,
            "rows_per_step": args.train_batch_size * accumulated * ranks,
            "steps": max(-(-len(loader) // accumulated), 1) if epochs else 0,
            "rows": self.rows.identity,
            "documents": None if documents is None else documents.digest,
        }


def _refusal(before: dict[str, Any], here: dict[str, Any], inside: int, *, between: bool) -> str:
    if before["capacity"] != here["capacity"]:
        was = f"rows hold {plural(before['capacity'], 'token')}"
        now, way = f"rows of {here['capacity']:,}", f"with capacity={before['capacity']}"
    elif before["ranks"] != here["ranks"]:
        was = f"rows were dealt to {plural(before['ranks'], 'rank')}"
        now, way = plural(here["ranks"], "rank"), f"on {plural(before['ranks'], 'rank')}"
    elif before["rows_per_step"] != here["rows_per_step"]:
        was = f"steps hold {plural(before['rows_per_step'], 'row')}"
        now, way = f"steps of {here['rows_per_step']:,}", "with the batch size and accumulation that it had"
    elif before["documents"] != here["documents"]:
        was = "rows hold other documents, or in another order"
        now, way = "those of this run", "with the data that it had, in the same order"
    else:
        was = "rows are of other data or options"
        now, way = "those of this run", "with the data, seed and options that it had"
    place = f"{plural(inside, 'step')} into" if inside else "at the end of"
    return (
        f"the checkpoint is {place} an epoch whose {was}, and {now} would train some documents of it twice and others "
        f"not at all: resume {way}" + (", or from a checkpoint between two epochs" if between else "")
    )


def refuse_other_rows(trainer: Any, rows: Any) -> None:
    """Let a trainer check on resuming that its steps hold the rows that they held before."""
    trainer.remove_callback(SameRows)
    if isinstance(rows, EpochRows | RowStream):
        trainer.add_callback(SameRows(rows))
