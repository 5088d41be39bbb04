"""Reports the result of ``crosspack train``: tables, a picture, and the files of the output folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from crosspack.cli import launch
from crosspack.cli.console import OUT, figures, warn
from crosspack.cli.figures import compare_figure
from crosspack.cli.hub import push
from crosspack.cli.outputs import Output
from crosspack.cli.runfile import RUN_FILE
from crosspack.cli.speed import of_run
from crosspack.cli.tables import comparison_table, padding, rate, saved_line
from crosspack.cli.traincommand import Steps, TrainCommand
from packing_core.errors import plural
from packing_core.training.checkpoints import FOLDER, remove_checkpoints, remove_older
from packing_core.training.job import TrainResult
from packing_core.training.records import StepRecord

SUMMARY, PICTURE = "crosspack.json", "compare.png"
BUSY = 0.7  # of the processor time that an idle machine gives


def report(command: TrainCommand, steps: Steps, result: TrainResult, kept: Output | None) -> None:
    """Prints a result and publishes the files of the output folder."""
    OUT.print(f"attention: {result.attention} on {result.device}", highlight=False)
    warn_if_busy(result.cpu)
    if command.given["compare"]:
        OUT.print(comparison_table(result))
        folder = kept.partial if kept else Path("runs")
        compare_figure(result, steps.schedule, folder / PICTURE, title=f"{command.name}, {result.device}")
        OUT.print(f"picture: {(command.output or folder) / PICTURE}", highlight=False)
    else:
        OUT.print(_outcome(result.records["packed"]), highlight=False)
        OUT.print(saved_line(steps.schedule, result.records["packed"]), highlight=False)
    about = _about(result, command.given["backend"])
    about |= {"samples": steps.samples} if steps.samples else {}
    if kept is not None:
        about |= of_run(kept.partial / "config.json", steps.schedule.plans[0])
        _publish(command, steps, about, kept)
    elif command.output is None and not command.given["compare"]:
        OUT.print("nothing is kept: pass --output to keep the model")
    if launch.rank() == 0:
        figures(about)


def _publish(command: TrainCommand, steps: Steps, about: Mapping[str, Any], kept: Output) -> None:
    """Writes what stands beside the model, and puts the result in place of an earlier one."""
    (kept.partial / "README.md").unlink(missing_ok=True)  # of peft, an empty form
    steps.source.encoder.tokenizer.save_pretrained(kept.partial)
    (kept.partial / SUMMARY).write_text(json.dumps({"crosspack": version("crosspack"), **about}, indent=1))
    (kept.partial / RUN_FILE).write_text(command.run_file)
    kept.publish()
    # those of a run that was overwritten, or what a killed one left
    if command.resume or command.given["save_every"]:
        remove_older(kept.folder / FOLDER, command.given["keep_checkpoints"])
    else:
        remove_checkpoints(kept.folder / FOLDER)
    OUT.print(f"model: {kept.folder}", highlight=False)
    if command.given["push_to_hub"]:
        OUT.print(f"pushed to {push(kept.folder, command.given['push_to_hub'])}", highlight=False)


def report_finished(kept: Output) -> None:
    """Reports the result of an earlier run of the same options, data and model."""
    figures(json.loads((kept.folder / SUMMARY).read_text()))
    OUT.print(f"model: {kept.folder}, complete already: pass --overwrite to train again", highlight=False)


def _outcome(records: list[StepRecord]) -> str:
    """Summarises a run without ``--compare`` in a line."""
    eval_loss = records[-1].eval_loss
    evaluated = "" if eval_loss is None else f", evaluation loss {eval_loss:.4f}"
    return (
        f"{plural(len(records), 'step')}, {rate(records):,.0f} real tokens/s (median step), "
        f"{padding(records):.1%} padding, loss {records[0].loss:.4f} to {records[-1].loss:.4f}{evaluated}"
    )


def warn_if_busy(cpu: float | None) -> None:
    """Warn that speeds are unreliable if the steps got much less processor time than their threads could use."""
    if cpu is not None and cpu < BUSY:
        warn(
            f"the steps got {cpu:.0%} of the processor time that their threads could use, so the machine is busy and "
            "speeds are unreliable (losses are not): run it again when nothing else runs"
        )


def _about(result: TrainResult, backend: str) -> dict[str, Any]:
    """Collects the entries on a run for crosspack.json and ``--json``."""
    return {
        "backend": backend,
        "device": result.device,
        "attention": result.attention,
        "cpu": result.cpu,
        "peak_bytes": result.peak_bytes,
        "audit": asdict(result.audit),
        "runs": {run: [asdict(record) for record in records] for run, records in result.records.items()},
    }
