"""``--report-to``: figures of a run go to TensorBoard, Weights & Biases or Trackio while it trains.

Records come in, scalars go out under the names that these show together: ``train/loss``, ``eval/loss`` and so on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from packing_core.errors import MissingExtraError
from packing_core.training.records import StepRecord

Service = Literal["tensorboard", "wandb", "trackio", "none"]
Log = Callable[[Mapping[str, float], int], None]
PROJECT = "crosspack"


def check_service(service: Service) -> None:
    """Raise MissingExtraError unless the library of ``--report-to`` is installed; nothing is imported."""
    modules, _ = _SERVICES[service]
    if modules and not any(map(find_spec, modules)):
        raise MissingExtraError(f"--report-to {service}: it is not installed: pip install {modules[0]}, or pass none")


@contextmanager
def reporting(service: Service, folder: Path | None, config: Mapping[str, Any]) -> Iterator[Log]:
    """Yields a function that logs scalars with the number of their step, until the block ends.

    Args:
        folder: the output of the run; TensorBoard's files go to ``tensorboard`` in it, and below ``runs`` without it.
    """
    _, start = _SERVICES[service]
    log, finish = start(folder, dict(config))
    try:
        yield log
    finally:
        finish()


def scalars(record: StepRecord, learning_rate: float) -> dict[str, float]:
    """Returns the scalars of a step; the packed run is ``train``, those it is compared with have their own names."""
    group = "train" if record.run == "packed" else record.run
    found = {
        f"{group}/loss": record.loss,
        f"{group}/learning_rate": learning_rate,
        f"{group}/tokens": float(record.tokens),
        f"{group}/tokens_per_second": record.tokens / record.seconds,
    }
    measured = {f"{group}/grad_norm": record.grad_norm, "eval/loss": record.eval_loss}
    return found | {name: value for name, value in measured.items() if value is not None}


def _tensorboard(folder: Path | None, config: dict[str, Any]) -> tuple[Log, Callable[[], None]]:
    module = "torch.utils.tensorboard" if find_spec("tensorboard") else "tensorboardX"
    writer = import_module(module).SummaryWriter(None if folder is None else str(folder / "tensorboard"))
    writer.add_text("options", "\n".join(f"    {name}: {value}" for name, value in config.items()))

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(folder: Path | None, config: dict[str, Any]) -> tuple[Log, Callable[[], None]]:
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    run = import_module("wandb").init(project=project, name=folder and folder.name, config=config)
    return lambda values, step: run.log(dict(values), step=step), run.finish


def _trackio(folder: Path | None, config: dict[str, Any]) -> tuple[Log, Callable[[], None]]:
    trackio = import_module("trackio")
    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    trackio.init(project=project, name=folder and folder.name, config=config)
    return lambda values, step: trackio.log(dict(values), step=step), trackio.finish


# service -> the modules of which one must be installed, and what begins to log there
_SERVICES: dict[str, tuple[tuple[str, ...], Callable[..., tuple[Log, Callable[[], None]]]]] = {
    "tensorboard": (("tensorboard", "tensorboardX"), _tensorboard),
    "wandb": (("wandb",), _wandb),
    "trackio": (("trackio",), _trackio),
    "none": ((), lambda folder, config: (lambda values, step: None, lambda: None)),
}
