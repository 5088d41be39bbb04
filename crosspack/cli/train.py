"""``crosspack train``: fine-tune a causal language model on packed documents, and compare that with padding.

The options (:mod:`.trainoptions`) -> a TrainCommand (:mod:`.traincommand`), checked before any framework is imported ->
its data, read and printed as a plan -> a job, which the backend's trainer runs -> its result as tables, a
picture and files. The model is written by the backend, everything else of the output folder here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from crosspack.cli import launch
from crosspack.cli.checks import read_mesh
from crosspack.cli.console import OUT, figures
from crosspack.cli.documents import documents_together
from crosspack.cli.figures import compare_figure
from crosspack.cli.models import SMALL_LLAMA, model_config, special_tokens
from crosspack.cli.options import EncodedRecords, filled
from crosspack.cli.outputs import Output
from crosspack.cli.progress import TrainProgress
from crosspack.cli.reporting import Service, reporting, scalars
from crosspack.cli.runfile import RUN_FILE
from crosspack.cli.speed import of_run
from crosspack.cli.tables import (
    cap_line,
    comparison_table,
    few_steps_line,
    lengths_table,
    outcome_line,
    saved_line,
    saving_line,
    steps_table,
    warn_if_busy,
)
from crosspack.cli.tasks import read_examples, remove_saved, warn_of_skipped
from crosspack.cli.traincommand import PICTURE, SUMMARY, TrainCommand
from crosspack.cli.trainoptions import TrainOptions
from crosspack.encoding.kinds import as_numbers
from crosspack.encoding.layouts import media_in
from crosspack.reading.files import masked
from crosspack.reading.places import Row
from packing_core.errors import PackingError, first_line, naming, plural
from packing_core.extras import require
from packing_core.planning.cost import cost_of
from packing_core.planning.epochs import plan_steps
from packing_core.planning.plan import PackPlan
from packing_core.planning.plan import plan as make_plan
from packing_core.planning.rule import RowRule
from packing_core.training.checkpoints import FOLDER, remove_checkpoints, remove_older
from packing_core.training.job import Audit, TrainJob, TrainResult, is_hub_name
from packing_core.training.records import StepRecord
from packing_core.training.schedule import Corpus, Schedule
from packing_core.training.tasks import TaskJob, TaskResult


@dataclass(frozen=True)
class Steps:
    """Packed documents, by steps.

    Attributes:
        model: that of the command; a config that knows the tokenizer, if none was named.
        not_evaluated: documents of the evaluation that are left out, without a trained token.
        prompts: the token ids of ``--sample``.
        skipped: why records were left out, under ``--on-error skip``.
        uncapped: the rows of an epoch without ``--max-segments``, where there is one.
        samples: what the model made of the prompts, which the run fills.
    """

    command: TrainCommand
    source: EncodedRecords
    model: str | Mapping[str, Any]
    schedule: Schedule
    evaluation: Schedule | None
    not_evaluated: int
    prompts: tuple[tuple[int, ...], ...] = ()
    skipped: list[str] = field(default_factory=list)
    uncapped: PackPlan | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def read(command: TrainCommand) -> Steps:
        """Reads and encodes all documents, and packs them into the rows of every step."""
        options = command.options
        rule, seed, lenient = options.row_rule(), options.seed, options.on_error == "skip"
        source = EncodedRecords.of(
            command.records,
            command.tokenizer,
            options.policy,
            trust_remote_code=options.trust_remote_code,
            lenient=lenient,
        )
        skipped: list[str] = []
        reasons = skipped if lenient else None
        corpus = Corpus.collect(
            documents_together(source, rule, limit=options.limit, skipped=reasons, workers=options.workers)
        )
        model: Any = command.model
        if options.model is None:
            model = SMALL_LLAMA | special_tokens(source.encoder.tokenizer)
        cost = cost_of([model_config(options.model) if options.model else model]) if options.equal_cost else None
        keys = as_numbers(corpus.keys) if corpus.keys is not None and options.order == "sorted" else corpus.keys
        rule = replace(rule, keys=keys, cost=cost)

        def planned(epoch: int, rule: RowRule) -> PackPlan:
            lengths = corpus.documents.lengths
            if rule.equal_cost:
                return plan_steps(lengths, rule, options.rows_per_step, seed=seed, epoch=epoch)
            return make_plan(lengths, rule, seed=seed + epoch)

        plans = tuple(planned(epoch, rule) for epoch in range(options.epochs))
        uncapped = None if rule.max_segments is None else planned(0, replace(rule, max_segments=None))
        schedule = Schedule(
            corpus,
            plans,
            options.rows_per_step,
            options.padded_batch,
            seed=seed,
            limit=options.steps,
            pad_id=source.pad_id,
        )
        evaluation, left_out = None, source.encoder.left_out
        if command.held_out is not None:
            evaluation = _evaluation(replace(source, records=command.held_out), rule, options.workers)
        not_evaluated, source.encoder.left_out = source.encoder.left_out - left_out, left_out
        chats = bool(options.sample) and source.holds_chats()
        prompts = tuple(source.encoder.prompt(text, chat=chats) for text in options.sample or ())
        return Steps(command, source, model, schedule, evaluation, not_evaluated, prompts, skipped, uncapped)

    def show(self) -> None:
        """Prints what will be trained on, and in which steps."""
        schedule, held_out = self.schedule, self.command.held_out
        OUT.print(f"[bold]{escape(self.command.options.name)}[/] on {self.source.describe()}")
        OUT.print(lengths_table(schedule.corpus.documents.lengths, trained=schedule.corpus.n_trained))
        OUT.print(steps_table(schedule))
        OUT.print(saving_line(schedule))
        if self.uncapped is not None and (cap := self.command.options.max_segments) is not None:
            OUT.print(cap_line(schedule.plans[0], self.uncapped, cap))
        if (few := few_steps_line(schedule)) is not None:
            OUT.print(few, style="yellow")
        warn_of_skipped(self.skipped)
        if self.evaluation is not None and held_out is not None:
            corpus, (rows,) = self.evaluation.corpus, self.evaluation.plans
            lost = self.not_evaluated
            OUT.print(
                f"evaluation on {escape(held_out.name)}: {plural(len(corpus.documents), 'document')} in "
                f"{plural(rows.n_rows, 'row')}, {corpus.n_trained:,} trained tokens"
                + (f"; left out, nothing to evaluate: {plural(lost, 'document')}" if lost else "")
            )

    def train(self, trainer: Callable[[TrainJob], TrainResult], kept: Output | None, stack: ExitStack) -> Audit:
        """Trains, with progress on the console and figures to ``--report-to``, and reports the result.

        Raises:
            ContaminationError: documents that are packed together see each other.
        """
        command, options, steps = self.command, self.command.options, len(self.schedule)
        service: Service = options.report_to if launch.rank() == 0 else "none"
        log = stack.enter_context(reporting(service, options.output, command.settled))
        progress = stack.enter_context(TrainProgress(OUT, steps))

        def on_step(record: StepRecord) -> None:
            progress.step(record)
            log(scalars(record, command.losses.learning_rate(record.step, steps)), record.step + 1)

        def on_sample(done: int, number: int, ids: list[int]) -> None:
            prompt = (options.sample or ())[number]
            text = self.source.encoder.tokenizer.decode(ids, skip_special_tokens=True)
            self.samples.append({"steps": done, "prompt": prompt, "continuation": text})
            OUT.print(f"after step {done:,}: {prompt} -> {text}", markup=False)

        job = filled(
            TrainJob,
            options,
            **command.settled_job(kept) | {"model": self.model},
            schedule=self.schedule,
            evaluation=self.evaluation,
            mesh=read_mesh(options.mesh),
            runs=("padded", "grouped", "packed") if options.compare else ("packed",),
            prompts=self.prompts,
            on_step=on_step,
            on_sample=on_sample,
        )
        result = trainer(job)
        progress.stop()
        audit = result.audit.checked()  # or nothing is published
        self.report(result, kept)
        return audit

    def report(self, result: TrainResult, kept: Output | None) -> None:
        """Prints a result and publishes the files of the output folder."""
        options, packed = self.command.options, result.records["packed"]
        OUT.print(f"attention: {result.attention} on {result.device}")
        warn_if_busy(result.cpu)
        if options.compare:
            OUT.print(comparison_table(result))
            folder = kept.partial if kept else Path("runs")
            compare_figure(result, self.schedule, folder / PICTURE, title=f"{options.name}, {result.device}")
            OUT.print(f"picture: {(options.output or folder) / PICTURE}")
        else:
            OUT.print(outcome_line(packed))
            OUT.print(saved_line(self.schedule, packed))
        about = {"backend": options.backend, **asdict(result)}
        about["runs"] = about.pop("records")
        if self.samples:
            about["samples"] = self.samples
        if kept is not None:
            about |= of_run(kept.partial / "config.json", self.schedule.plans[0])
            self.source.encoder.tokenizer.save_pretrained(kept.partial)
        publish(self.command, about, kept, self._remove_checkpoints)

    def _remove_checkpoints(self, folder: Path) -> None:
        """Removes those of a run that was overwritten, or that a killed one left."""
        if self.command.resume or self.command.options.save_every:
            remove_older(folder / FOLDER, self.command.options.keep_checkpoints)
        else:
            remove_checkpoints(folder / FOLDER)


@dataclass(frozen=True)
class Examples:
    """The examples of a task."""

    command: TrainCommand
    records: list[Row]
    held_out: list[Row]

    @staticmethod
    def read(command: TrainCommand) -> Examples:
        """Reads all records, each with the columns of the task."""
        options, held_out = command.options, command.held_out
        records = read_examples(options, command.records, options.limit)
        return Examples(command, records, [] if held_out is None else read_examples(options, held_out))

    def show(self) -> None:
        """Prints what will be trained on."""
        command = self.command
        assert command.task is not None
        OUT.print(
            f"[bold]{escape(command.options.name)}[/] on {escape(command.records.name)}: "
            f"{plural(len(self.records), 'record')}, {command.task.trains}"
        )

    def train(self, trainer: Callable[[TaskJob], TaskResult], kept: Output | None, stack: ExitStack) -> Audit:
        """Trains, and reports the result."""
        command, options = self.command, self.command.options
        job = filled(
            TaskJob,
            options,
            **command.settled_job(kept),
            tokenizer=str(command.tokenizer),
            records=self.records,
            held_out=self.held_out,
            arguments={"report_to": options.report_to, **command.arguments},
            images=options.task == "sft" or any(media_in(record) for record in [*self.records, *self.held_out]),
            rewards=command.rewards,
        )
        result = trainer(job)
        self.report(result, kept)
        return result.audit

    def report(self, result: TaskResult, kept: Output | None) -> None:
        """Prints a result and publishes the files of the output folder."""
        options = self.command.options
        losses = [step["loss"] for step in result.steps if "loss" in step]
        OUT.print(
            f"{plural(len(losses), 'step')} on {result.device} in {result.seconds:,.1f} s, "
            f"{result.examples / result.seconds:,.1f} examples/s, loss {losses[0]:.4f} to {losses[-1]:.4f}"
        )
        warn_of_skipped(result.skipped)
        about = {"task": options.task, "backend": options.backend, **asdict(result)}
        publish(self.command, about, kept, lambda folder: remove_saved(folder / FOLDER))


def _evaluation(source: EncodedRecords, rule: RowRule, workers: int | None) -> Schedule:
    """The documents to evaluate on, packed; with as many rows at once as there are processes."""
    limits = RowRule(rule.capacity, rule.overflow, rule.context, rule.min_piece, rule.max_segments)
    corpus = Corpus.collect(documents_together(source, limits, workers=workers), option="--eval-data")
    rows = make_plan(corpus.documents.lengths, limits)
    return Schedule(corpus, (rows,), launch.world_size(), pad_id=source.pad_id)


def publish(
    command: TrainCommand, about: Mapping[str, Any], kept: Output | None, remove_checkpoints: Callable[[Path], None]
) -> None:
    """Writes what stands beside a model, puts the result in place of an earlier one, and prints the figures.

    Args:
        remove_checkpoints: removes what the run no longer needs from the folder, once it is complete.
    """
    if kept is not None:
        (kept.partial / "README.md").unlink(missing_ok=True)  # of peft and TRL, an empty form
        (kept.partial / SUMMARY).write_text(json.dumps({"crosspack": version("crosspack"), **about}, indent=1))
        (kept.partial / RUN_FILE).write_text(masked(command.run_file))
        kept.publish()
        remove_checkpoints(kept.folder)
        OUT.print(f"model: {kept.folder}")
        if command.options.push_to_hub:
            OUT.print(f"pushed to {push(kept.folder, command.options.push_to_hub)}")
    if launch.rank() == 0:
        figures(about)


def report_finished(kept: Output) -> None:
    """Reports the result of an earlier run of the same options, data and model."""
    figures(json.loads((kept.folder / SUMMARY).read_text()))
    OUT.print(f"model: {kept.folder}, complete already: pass --overwrite to train again")


_KEPT_HERE = [f"{FOLDER}/*", "tensorboard/*", ".crosspack*"]


def create_repository(name: str | None, output: Path | None) -> None:
    """Makes the repository of ``--push-to-hub``, before any work, as the hub may refuse the name or the token.

    Raises:
        PackingError: there is no output to push, no token, or the hub refuses.
    """
    if name is None:
        return
    if output is None:
        raise PackingError("--push-to-hub pushes the folder of the run: pass --output too")
    if not is_hub_name(name):
        raise PackingError(f"--push-to-hub {name}: pass a name on the hub, `owner/name`")
    hub: Any = require("huggingface_hub", extra="hf")
    if hub.get_token() is None:
        raise PackingError("--push-to-hub needs a token of the hub: run `hf auth login`, or set HF_TOKEN")
    with naming(f"--push-to-hub {name}"):
        hub.HfApi().create_repo(name, exist_ok=True)


def push(folder: Path, name: str) -> str:
    """Uploads the folder of a run without its checkpoints; returns where it is.

    Raises:
        PackingError: the hub refuses; the folder is there all the same.
    """
    hub: Any = require("huggingface_hub", extra="hf")
    try:
        uploaded = hub.HfApi().upload_folder(
            repo_id=name, folder_path=folder, ignore_patterns=_KEPT_HERE, commit_message="Train with crosspack"
        )
    except Exception as error:  # of the network and of the hub, by several libraries
        raise PackingError(
            f"--push-to-hub {name}: {first_line(error)}: the model is in {folder}; push it by "
            f"`hf upload {name} {folder}`"
        ) from error
    return str(getattr(uploaded, "repo_url", uploaded))


GROUPS = {
    "Data": (
        "data eval_data capacity overflow loss",
        "split eval_split column tokenizer limit workers on_error context min_piece max_segments packing order "
        "order_by equal_cost bos eos",
    ),
    "Model": ("model task lora dtype", "lora_alpha lora_dropout lora_targets merge_lora attention trust_remote_code"),
    "Steps": (
        "rows_per_step batch_size epochs steps lr gradient_checkpointing",
        "optim decay warmup weight_decay clip neftune_alpha precision master_weights set reward early_stopping compile "
        "seed deterministic",
    ),
    "Machine": ("nproc", "backend device strategy context_parallel mesh"),
    "Results": (
        "output overwrite resume save_every compare config",
        "keep_checkpoints keep_best sample push_to_hub report_to eval_every padded_batch",
    ),
}


def train(command_line: typer.Context, options: TrainOptions) -> None:
    """Fine-tune a causal language model on packed documents; --compare measures it against padding."""
    command = TrainCommand.of(command_line, options)
    trainer = command.trainer()
    if options.nproc > 1 and launch.world_size() == 1:
        raise typer.Exit(launch.start_again(command_line, command.run_file))
    OUT.quiet = OUT.quiet or launch.rank() > 0
    if launch.rank() == 0:
        create_repository(options.push_to_hub, options.output)
    run = Steps.read(command) if command.task is None else Examples.read(command)
    run.show()
    if options.output is None and not options.compare:
        OUT.print("nothing will be kept: pass --output to keep the model")
    with ExitStack() as stack:
        kept = command.output(stack)
        if kept is not None and kept.finished:
            report_finished(kept)
            return
        audit = run.train(trainer, kept, stack)
    OUT.print(f"audit: [green]exact[/]: {escape(audit.line)}")
