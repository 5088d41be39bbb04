"""A Trainer that resumes inside an epoch on another number of ranks: refused, because its rows were dealt otherwise.

Rows are dealt to ranks at equal cost, so which rows the first steps of an epoch held depends on how many ranks there
were. Each checkpoint notes the number in the trainer's state, and a run that goes on from it compares.
"""

from __future__ import annotations

from typing import Any

from packing_core.errors import UnsupportedError, plural
from packing_core.extras import require
from torch_backend.trainers.epoch_rows import EpochRows

require("transformers", extra="hf")

from transformers import TrainerCallback  # noqa: E402

_NOTE = "crosspack.rows"  # in the trainer's state, beside the states of callbacks


class SameRanks(TrainerCallback):
    """Notes in every checkpoint over how many ranks the rows of an epoch are dealt, and checks it on resuming.

    Args:
        rows: what the trainer trains on.
    """

    def __init__(self, rows: EpochRows) -> None:
        self.rows = rows

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        """
        Raises:
            UnsupportedError: the run would go on inside an epoch whose first steps held other rows than here.
        """
        ranks, saved = self.rows.ranks, state.stateful_callbacks.get(_NOTE, {}).get("attributes", {})
        before = saved.get("ranks", ranks)
        steps = -(-len(train_dataloader) // args.gradient_accumulation_steps)
        inside = state.global_step % max(steps, 1)
        if inside and before != ranks and not self.rows.options["in_order"]:
            raise UnsupportedError(
                f"the checkpoint is {plural(inside, 'step')} into an epoch whose rows were dealt to "
                f"{plural(before, 'rank')}, and {plural(ranks, 'rank')} would train some documents of it twice and "
                f"others not at all: resume on {plural(before, 'rank')}, or from a checkpoint between two epochs"
            )
        state.stateful_callbacks[_NOTE] = {"args": {}, "attributes": {"ranks": ranks}}


def refuse_other_ranks(trainer: Any, rows: Any) -> None:
    """Let a trainer check on resuming that as many ranks train ``rows`` as before."""
    trainer.remove_callback(SameRanks)
    if isinstance(rows, EpochRows):
        trainer.add_callback(SameRanks(rows))
