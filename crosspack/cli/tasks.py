"""``crosspack train --task``: preferences, rewards, policies, classes, masked tokens and images, by their own trainers.

The options -> a :class:`TaskCommand`, checked before any framework is imported -> all records, each with the columns of
the task -> a TaskJob, which the backend trains -> its TaskResult as lines and files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from crosspack.cli import launch
from crosspack.cli.checks import check_keeping, check_output
from crosspack.cli.console import OUT, figures, warn
from crosspack.cli.hub import create_repository, push
from crosspack.cli.images import with_whole_paths
from crosspack.cli.models import check_name
from crosspack.cli.options import option_of_split
from crosspack.cli.outputs import Output, writing
from crosspack.cli.progress import counted
from crosspack.cli.records import join, open_records, read_columns, weighted
from crosspack.cli.reporting import check_service
from crosspack.cli.runfile import RUN_FILE, as_yaml, effective
from crosspack.cli.settings import read_settings
from crosspack.encoding.layouts import images_in
from crosspack.reading import Records
from crosspack.reading.places import BadRecord, Row
from packing_core.errors import PackingError, UnsupportedError, first_line, plural
from packing_core.extras import loaded, registered, require
from packing_core.training.checkpoints import FOLDER
from packing_core.training.options import Options
from packing_core.training.tasks import GROUP, TASKS, Task, TaskJob, TaskName, TaskResult

SUMMARY = "crosspack.json"
RESULTS = (RUN_FILE, "*.json", "*.safetensors", "tokenizer*", "*.jinja")  # what the files of a result are called

# Parameters of the command that every task reads.
_READ = frozenset(
    (
        *("config", "task", "set", "model", "data", "split", "tokenizer", "limit", "eval_data", "eval_split"),
        *("eval_every", "output", "overwrite", "resume", "save_every", "backend", "device", "attention", "batch_size"),
        *("epochs", "steps", "lr", "decay", "warmup", "weight_decay", "clip", "precision", "dtype", "lora"),
        *("lora_alpha", "lora_dropout", "lora_targets", "merge_lora", "gradient_checkpointing", "nproc", "report_to"),
        *("reward", "seed", "trust_remote_code", "verbose", "quiet", "as_json", "optim", "neftune_alpha"),
        *("keep_checkpoints", "keep_best", "early_stopping", "push_to_hub", "on_error", "column"),
    )
)


@dataclass(frozen=True)
class TaskCommand:
    """A call of ``crosspack train --task``, checked.

    Attributes:
        given: the parameters of the command.
        name, task: which task.
        entry: where the backend's function is.
        records, held_out: the data, of which the first record has been looked at.
        options: what decides the losses, as far as every task has it.
        arguments: further fields of the trainer's arguments.
        rewards: functions that score completions.
        run_file: the contents of the run's ``run.yaml``.
    """

    given: Mapping[str, Any]
    name: TaskName
    task: Task
    entry: Any
    records: Records
    held_out: Records | None
    options: Options
    arguments: Mapping[str, Any]
    rewards: Sequence[Callable[..., Any]]
    run_file: str

    @classmethod
    def of(cls, context: typer.Context, given: Mapping[str, Any]) -> TaskCommand:
        """Checks the options; imports no framework.

        Raises:
            PackingError: an option is missing or contradicts another, or names what is not there.
            UnsupportedError: an option has no effect on the task.
        """
        name: TaskName = given["task"]
        task = TASKS[name]
        entry = registered(GROUP, given["backend"])
        _check_effect(context, given, name)
        if given["model"] is None or Path(given["model"]).is_file():
            raise PackingError(f"--task {name} trains a model that is there: pass --model, a folder or a hub name")
        check_name("--model", given["model"])
        check_name("--tokenizer", given["tokenizer"])
        if (name == "grpo") != bool(given["reward"]):
            raise PackingError(
                "--task grpo needs --reward FILE.py:FUNCTION, which scores completions"
                if name == "grpo"
                else f"--reward scores the completions of --task grpo: leave it out of --task {name}"
            )
        if given["overflow"] not in ("error", "truncate", "drop"):
            raise PackingError(f"--task {name} keeps documents whole: pass --overflow truncate or drop")
        if not given["eval_data"] and (given["eval_every"] or given["eval_split"]):
            raise PackingError("--eval-every and --eval-split need --eval-data, the records to evaluate on")
        check_keeping(given)
        arguments = read_settings(given["set"])
        check_service(given["report_to"])
        check_output(
            given["output"],
            compare=False,
            overwrite=given["overwrite"],
            resume=given["resume"],
            save_every=given["save_every"],
            run=None,
        )
        if given["resume"] and not _checkpoints(given["output"] / FOLDER):
            raise PackingError(
                f"--resume: {given['output']} has no checkpoint: start it without --resume, with --save-every N"
            )
        names = ("decay", "warmup", "weight_decay", "clip", "seed", "dtype", "optim", "neftune_alpha")
        adapters = ("lora", "lora_alpha", "lora_dropout", "lora_targets")
        options = Options(
            lr=2e-5 if given["lr"] is None else given["lr"],
            precision=given["precision"] or given["dtype"],
            **{option: given[option] for option in names + adapters},
        )
        columns = read_columns(given["column"])
        held_out = None
        if given["eval_data"]:
            held_out = _open(name, given["eval_data"], given["eval_split"], "--eval-data", columns)
        return cls(
            given=given,
            name=name,
            task=task,
            entry=entry,
            records=_open(name, given["data"], given["split"], "--data", columns),
            held_out=held_out,
            options=options,
            arguments=arguments,
            rewards=[_function(text) for text in given["reward"] or ()],
            run_file=as_yaml(effective(context, lr=options.lr, precision=options.precision)),
        )


def train_task(context: typer.Context, given: Mapping[str, Any]) -> None:
    """Runs ``crosspack train`` for a task other than the next token of text.

    Args:
        context: of the command.
        given: its parameters.
    """
    command = TaskCommand.of(context, given)
    run: Callable[[TaskJob], TaskResult] = loaded(command.entry, extra=given["backend"])
    require("transformers", extra="hf")
    if given["nproc"] > 1 and launch.world_size() == 1:
        raise typer.Exit(launch.start_again("train", given, command.run_file))
    OUT.quiet = OUT.quiet or launch.rank() > 0
    if launch.rank() == 0:
        create_repository(given["push_to_hub"], given["output"])
    records = _read(command, command.records)
    held_out = _read(command, command.held_out) if command.held_out is not None else []
    OUT.print(
        f"[bold]{escape(given['model'])}[/] on {escape(command.records.name)}: {plural(len(records), 'record')}, "
        f"{command.task.trains}",
        highlight=False,
    )
    if given["output"] is None and launch.rank() == 0:
        OUT.print("nothing will be kept: pass --output to keep the model")
    with ExitStack() as stack:
        kept = None
        if given["output"] is not None and launch.rank() == 0:
            overwrite = given["overwrite"] or given["resume"]
            kept = stack.enter_context(writing(given["output"], SUMMARY, names=RESULTS, overwrite=overwrite))
            kept.clear()
        result = run(_job(command, records, held_out, kept))
        _report(command, result, kept)
    OUT.print(f"audit: [green]exact[/]: {escape(result.audit.line)}", highlight=False)


def _job(command: TaskCommand, records: list[Row], held_out: list[Row], kept: Output | None) -> TaskJob:
    given = command.given
    same = ("device", "attention", "gradient_checkpointing", "trust_remote_code", "eval_every", "save_every", "resume")
    more = ("merge_lora", "capacity", "overflow", "epochs", "steps", "batch_size", "model", "loss", "on_error")
    kept_of_run = ("keep_checkpoints", "keep_best", "early_stopping")
    return TaskJob(
        task=command.name,
        tokenizer=given["tokenizer"] or given["model"],
        records=records,
        held_out=held_out,
        images=command.name == "sft" or any(images_in(record) for record in [*records, *held_out]),
        options=command.options,
        arguments={"report_to": given["report_to"], **command.arguments},
        rewards=command.rewards,
        checkpoints=None if given["output"] is None else given["output"] / FOLDER,
        output=None if kept is None else kept.partial,
        on_phase=lambda line: OUT.print(line, style="dim", highlight=False),
        **{name: given[name] for name in same + more + kept_of_run},
    )


def _report(command: TaskCommand, result: TaskResult, kept: Output | None) -> None:
    """Prints a result and publishes the files of the output folder."""
    trained = [step for step in result.steps if "loss" in step]
    rate, first, last = result.examples / result.seconds, trained[0]["loss"], trained[-1]["loss"]
    OUT.print(
        f"{plural(len(trained), 'step')} on {result.device} in {result.seconds:,.1f} s, {rate:,.1f} examples/s, "
        f"loss {first:.4f} to {last:.4f}",
        highlight=False,
    )
    if result.skipped:
        warn(f"left out {plural(len(result.skipped), 'record')} that cannot be used, the first: {result.skipped[0]}")
    about = {"task": command.name, "backend": command.given["backend"], **asdict(result)}
    if kept is not None:
        (kept.partial / "README.md").unlink(missing_ok=True)  # of peft and TRL, an empty form
        (kept.partial / SUMMARY).write_text(json.dumps({"crosspack": version("crosspack"), **about}, indent=1))
        (kept.partial / RUN_FILE).write_text(command.run_file)
        kept.publish()
        _remove_checkpoints(kept.folder / FOLDER)
        OUT.print(f"model: {kept.folder}", highlight=False)
        if command.given["push_to_hub"]:
            OUT.print(f"pushed to {push(kept.folder, command.given['push_to_hub'])}", highlight=False)
    if launch.rank() == 0:
        figures(about)


def _checkpoints(home: Path) -> list[Path]:
    """The trainer's checkpoints below ``home``."""
    return [folder for folder in home.glob("checkpoint-*") if (folder / "trainer_state.json").is_file()]


def _remove_checkpoints(home: Path) -> None:
    """Removes the trainer's checkpoints below ``home``, and ``home`` if nothing else is in it."""
    for folder in _checkpoints(home):
        shutil.rmtree(folder)
    (home / "README.md").unlink(missing_ok=True)  # of TRL, an empty form
    if home.is_dir() and not any(home.iterdir()):
        home.rmdir()


def _check_effect(context: typer.Context, given: Mapping[str, Any], name: TaskName) -> None:
    """Raise UnsupportedError for an option that is not at its default and that the task does not read."""
    read = _READ.union(TASKS[name].reads)
    for parameter in context.command.params:
        option = str(parameter.name)
        if option in given and option not in read and given[option] != parameter.default:
            raise UnsupportedError(f"--task {name} has no {parameter.opts[0]}: leave it out")


def _open(
    name: TaskName, data: Sequence[str] | None, split: str | None, option: str, named: Sequence[tuple[str, str]]
) -> Records:
    """Opens the records, and looks at the first of each data set.

    Raises:
        PackingError: it is nowhere, empty, or has not the columns of the task.
    """
    if not data:
        columns = ", or ".join(" and ".join(columns) for columns in TASKS[name].columns)
        raise PackingError(f"--task {name} needs --data, records with {columns}")
    sources = []
    for text in data:
        path, weight = weighted(text)
        try:
            records = open_records(path, split=split)
        except PackingError as error:
            raise type(error)(str(error).replace("--data", option)) from error
        first = next((record for record in records.items() if isinstance(record, Row)), None)
        if first is None:
            raise PackingError(f"{option} {records.name} has no records: check the file and {option_of_split(option)}")
        TASKS[name].columns_of(_renamed(first, named), first.where, name)
        sources.append((records, weight))
    return join(sources)


def _read(command: TaskCommand, records: Records) -> list[Row]:
    """All records, each with the columns that the task reads; of the training data as many as ``--limit`` says.

    Raises:
        PackingError: a record has not the columns, or it has images and the task does not read them.
    """
    limit = command.given["limit"] if records is command.records else None
    found: list[Row] = []
    skipped: list[str] = []
    named = read_columns(command.given["column"])
    for item in counted(OUT, "records read", records.items()):
        if limit is not None and len(found) == limit:
            break
        try:
            if isinstance(item, BadRecord):
                raise item.error()
            item = _renamed(item, named)
            command.task.columns_of(item, item.where, command.name)
        except PackingError as error:
            if command.given["on_error"] == "stop":
                raise
            skipped.append(first_line(error))
            continue
        if command.task.images:
            item = with_whole_paths(item)
        elif (images := images_in(item)) is not None:
            raise UnsupportedError(
                f"{item.where} has {images}, which --task {command.name} does not read: leave them out, or build the "
                "trainer yourself and pass it to crosspack.enable_packing"
            )
        found.append(item)
    if skipped:
        warn(f"left out {plural(len(skipped), 'record')} that cannot be used, the first: {skipped[0]}")
    return found


def _renamed(record: Row, named: Sequence[tuple[str, str]]) -> Row:
    """A record with the columns of ``--column`` under the names that the task reads.

    Raises:
        PackingError: it has not the column.
    """
    for _, column in named:
        if column not in record:
            raise PackingError(f"{record.where} has no {column}, only {', '.join(record)}: check --column")
    return Row({**record, **{name: record[column] for name, column in named}}, record.place, record.number)


def _function(text: str) -> Callable[..., Any]:
    """The function that ``FILE.py:NAME`` names.

    Raises:
        PackingError: there is no such file or function, or the file fails.
    """
    path, _, name = text.rpartition(":")
    spec = spec_from_file_location(Path(path).stem, path) if Path(path).is_file() else None
    if spec is None or spec.loader is None:
        raise PackingError(f"--reward {text}: pass FILE.py:FUNCTION, a Python file and a function in it")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file may hold anything
        raise PackingError(f"--reward {text}: {type(error).__name__}: {first_line(error)}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise PackingError(f"--reward {text}: {path} has no function {name}")
    return found
