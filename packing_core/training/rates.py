"""Learning rates by transformers' names of schedules: the step goes in, the share of the peak rate comes out.

The rate rises linearly to its peak while a run warms up, and follows a function of its schedule afterwards. All of it
is known before the run begins, so every backend trains at the same rates, and a run that is resumed can compare them.
A schedule that reacts to evaluations (``reduce_lr_on_plateau``) has no such function.

Source of the formulas: transformers, ``optimization.py``, ``get_scheduler``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from packing_core.errors import PackingError

Decay = Literal[
    "cosine",
    "linear",
    "constant",
    "constant_with_warmup",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]


class _Place(NamedTuple):
    """A step of a run: steps since the warm-up, of how many, the steps of the warm-up, and the peak rate."""

    step: int
    steps: int
    warmup: int
    lr: float

    @property
    def done(self) -> float:
        return self.step / max(1, self.steps)


def share_of_peak(
    decay: str, step: int, steps: int, *, warmup: float, lr: float, options: Mapping[str, Any] | None = None
) -> float:
    """Returns the rate of 0-based ``step`` of ``steps``, over the peak rate."""
    rising = math.ceil(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    place = _Place(step - rising, steps - rising, rising, lr or 1.0)  # any share of a peak of 0 is 0
    return _SCHEDULES[decay](place, **(options or {}))


def check_schedule(decay: str, options: Mapping[str, Any] | None) -> None:
    """Raises PackingError for a schedule that is not served, and for options that it does not have or needs."""
    if decay not in _SCHEDULES:
        raise PackingError(f"--decay {decay} is not served: pass one of {', '.join(get_args(Decay))}")
    if options is not None and not isinstance(options, Mapping):
        raise PackingError("--set lr_scheduler_kwargs: pass a mapping, lr_scheduler_kwargs='{num_cycles: 2}'")
    known = list(inspect.signature(_SCHEDULES[decay]).parameters)[1:]
    for name, value in (options or {}).items():
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise PackingError(f"--set lr_scheduler_kwargs: --decay {decay} has no {name}: {has}")
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if name != "decay_type" and not number:
            raise PackingError(f"--set lr_scheduler_kwargs: {name} is {value!r}: pass a number")
    given = (options or {}).keys()
    if decay == "cosine_with_min_lr" and len(given & {"min_lr", "min_lr_rate"}) != 1:
        raise PackingError(
            "--decay cosine_with_min_lr needs its lowest rate: pass --set lr_scheduler_kwargs='{min_lr_rate: 0.1}', or "
            "min_lr in its place"
        )
    if decay == "warmup_stable_decay" and "num_decay_steps" not in given:
        raise PackingError(
            "--decay warmup_stable_decay needs the steps over which it falls: pass --set "
            "lr_scheduler_kwargs='{num_decay_steps: 100}'"
        )
    if (kind := (options or {}).get("decay_type", "cosine")) not in ("linear", "cosine", "1-sqrt"):
        raise PackingError(f"--set lr_scheduler_kwargs: decay_type is {kind!r}: pass linear, cosine or 1-sqrt")


def _constant(at: _Place) -> float:
    return 1.0


def _linear(at: _Place) -> float:
    return 1 - at.done


def _cosine(at: _Place, num_cycles: float = 0.5) -> float:
    return max(0.0, 0.5 * (1 + math.cos(math.pi * num_cycles * 2 * at.done)))


def _restarts(at: _Place, num_cycles: float = 1) -> float:
    return max(0.0, 0.5 * (1 + math.cos(math.pi * (num_cycles * at.done % 1))))


def _minimum(
    at: _Place, min_lr: float | None = None, min_lr_rate: float | None = None, num_cycles: float = 0.5
) -> float:
    lowest = min_lr_rate if min_lr is None else min_lr / at.lr
    assert lowest is not None  # check_schedule
    falling = 0.5 * (1 + math.cos(math.pi * num_cycles * 2 * at.done))
    return max(0.0, falling * (1 - lowest) + lowest)


def _polynomial(at: _Place, lr_end: float = 1e-7, power: float = 1.0) -> float:
    return float(((at.lr - lr_end) * (1 - at.done) ** power + lr_end) / at.lr)


def _inverse_sqrt(at: _Place, timescale: float | None = None) -> float:
    scale = timescale or at.warmup or 10_000
    return math.sqrt(scale / (at.step + scale))


def _stable(
    at: _Place,
    num_decay_steps: float = 0,
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    falling = at.step - (at.steps - num_decay_steps)
    if falling < 0:
        return 1.0
    done = falling / max(1, num_decay_steps)
    left = {
        "linear": 1 - done,
        "cosine": 0.5 * (1 + math.cos(math.pi * num_cycles * 2 * done)),
        "1-sqrt": 1 - math.sqrt(done),
    }[decay_type]
    return max(0.0, left * (1 - min_lr_ratio) + min_lr_ratio)


_SCHEDULES: dict[str, Callable[..., float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "constant_with_warmup": _constant,
    "cosine_with_restarts": _restarts,
    "cosine_with_min_lr": _minimum,
    "polynomial": _polynomial,
    "inverse_sqrt": _inverse_sqrt,
    "warmup_stable_decay": _stable,
}
