"""The speed of training steps for ``crosspack report``: a stated GPU or a measured run in, hours of rows out."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from crosspack.cli.tables import duration
from packing_core.errors import PackingError, plural
from packing_core.planning.cost import Cost
from packing_core.planning.packplan import PackPlan
from packing_core.storage.arrays import Float64


class Gpu(NamedTuple):
    """Dense bfloat16 operations per second, as the maker states them, and GiB, of the larger card of a name."""

    per_second: float
    gib: float


GPUS = {
    "a100": Gpu(312e12, 80),
    "h100": Gpu(989e12, 80),
    "h200": Gpu(989e12, 141),
    "b200": Gpu(2250e12, 180),
    "l4": Gpu(121e12, 24),
    "rtx4090": Gpu(165e12, 24),
}
PER_SLOT = "operations_per_token"  # of a forward of the run's own rows, in its summary
UTILISATION = 0.4  # of it that training of such models reaches
_LLAMA = {"vocab_size": 128_256, "head_dim": 128, "num_key_value_heads": 8}
SHAPES: dict[str, dict[str, int]] = {
    "llama-1b": _LLAMA
    | {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 8192}
    | {"head_dim": 64},
    "llama-8b": _LLAMA
    | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14_336},
    "llama-70b": _LLAMA
    | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28_672},
}


@dataclass(frozen=True)
class Speed:
    """The speed at which a model trains.

    Training takes three times the operations of the forward (``Cost.operations``).

    Attributes:
        cost: the operations of the model's forward.
        per_second: operations of training a second.
        about: what the speed is of, for a page and ``--json``.
        step: tokens with padding of a step of the measured run; None for a speed that was not measured.
    """

    cost: Cost
    per_second: float
    about: dict[str, Any]
    step: float | None = None

    @staticmethod
    def stated(shape: str, gpu: str, config: Any = None) -> Speed:
        """Estimates the speed of a model on a GPU: ``UTILISATION`` times what its maker states.

        Args:
            shape: one of ``SHAPES``, or the name of the model that ``config`` is of.
        """
        about = {"shape": shape, "gpu": gpu, "utilisation": UTILISATION}
        return Speed(Cost.operations(config or SHAPES[shape]), GPUS[gpu].per_second * UTILISATION, about)

    @staticmethod
    def measured(folder: Path, rows: PackPlan) -> Speed:
        """Takes the speed of a run of ``crosspack train --output``: its median step but the first, and its model.

        Args:
            rows: packed rows of the data, which cost as much by the token as those of a run that does not say what
                its own cost.

        Raises:
            PackingError: the folder holds no such run, or its model does not say its sizes.
        """
        try:
            summary = json.loads((folder / "crosspack.json").read_text(encoding="utf-8"))
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            steps = summary["runs"]["packed"]
            seconds = [step["seconds"] / step["slots"] for step in steps[1:] or steps]
            per_slot, device = float(np.median(seconds)), str(summary["device"])
            step = float(np.median([step["slots"] for step in steps]))
            own = float(summary.get(PER_SLOT, 0.0))
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise PackingError(
                f"--run {folder} is not the output of a run that trained weights ({type(error).__name__}: {error}): "
                "pass the folder that crosspack train --output wrote"
            ) from None
        if not 0 < per_slot < float("inf"):
            raise PackingError(f"--run {folder} says that its steps took no time: train a few more steps")
        cost = Cost.operations(config)
        per_second = 3 * (own or per_token(rows, cost)) / per_slot
        about = {"run": str(folder), "device": device, "tokens_per_second": 1 / per_slot}
        return Speed(cost, per_second, about, step)

    def hours(self, forward: float) -> float:
        """Hours of training that takes so many operations in the forward."""
        return 3 * forward / self.per_second / 3600

    def of_rows(self, rows: PackPlan) -> float:
        """Hours of one epoch of packed rows."""
        return self.hours(float(operations(rows, self.cost).sum()))

    def of_row(self, rows: PackPlan) -> dict[str, float]:
        """Seconds that the mean row takes, and the most expensive one."""
        seconds = self._of_rows(rows)
        return {"mean": float(seconds.mean()), "most": float(seconds.max())}

    def of_step(self, rows: PackPlan) -> dict[str, float]:
        """Seconds that the mean step takes, and the most expensive one, of as many tokens as the run's; {} without one.

        ``rows`` is how many of them make such a step, 1 or more. They run one after the other on one device.
        """
        if self.step is None:
            return {}
        count = max(1, round(self.step / rows.capacity))
        seconds = np.add.reduceat(self._of_rows(rows), np.arange(0, rows.n_rows, count))
        whole = seconds[: rows.n_rows // count] if rows.n_rows >= count else seconds
        return {"rows": count, "mean": float(whole.mean()), "most": float(whole.max())}

    def _of_rows(self, rows: PackPlan) -> Float64:
        """Seconds that each row takes."""
        return 3600 * self.hours(1.0) * operations(rows, self.cost)


def of_run(config: Path, rows: PackPlan) -> dict[str, float]:
    """The entry of a run's summary that says what its rows cost; none where its model does not say its sizes."""
    with suppress(OSError, ValueError, PackingError):
        return {PER_SLOT: per_token(rows, Cost.operations(json.loads(config.read_text(encoding="utf-8"))))}
    return {}


def said_of(time: dict[str, Any]) -> str:
    """The time that rows take, and steps of as many tokens as those of a measured run, if there is one."""
    taken = {"a row": time["row_seconds"]}
    if "step_seconds" in time:
        taken[f"a step of {plural(time['step_seconds']['rows'], 'row')}"] = time["step_seconds"]
    return ", ".join(
        f"{what} takes {duration(seconds['mean'])} on average and {duration(seconds['most'])} at most"
        for what, seconds in taken.items()
    )


def per_token(rows: PackPlan, cost: Cost) -> float:
    """Operations of the forward by the token, padding included."""
    return float(operations(rows, cost).sum()) / (rows.n_rows * rows.capacity)


def operations(rows: PackPlan, cost: Cost) -> Float64:
    """Operations of the forward of each packed row; padding costs what tokens do, and has no attention."""
    return cost.of_rows(rows) + cost.tokens * (rows.capacity - rows.row_tokens)
