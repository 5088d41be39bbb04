"""A call of ``crosspack train``, checked before any framework is imported.

The options of the command -> a :class:`TrainCommand`, of whose data the first records were read, and all that
might be trained where some may have images -> its job, when the data are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from crosspack.cli import launch
from crosspack.cli.checks import (
    check_examples,
    check_kept,
    check_optimizer,
    check_output,
    check_pipes,
    check_read,
    check_rows,
    used_options,
)
from crosspack.cli.console import OUT
from crosspack.cli.listing import digest
from crosspack.cli.models import model_source, tokenizer_source
from crosspack.cli.options import check_data
from crosspack.cli.outputs import Output, writing
from crosspack.cli.reporting import check_service
from crosspack.cli.runfile import RUN_FILE, as_yaml, effective
from crosspack.cli.settings import of_sft, read_settings
from crosspack.cli.tasks import UNREAD, have_images, open_examples, reward_function, saved
from crosspack.cli.trainoptions import TrainOptions
from crosspack.reading.files import File
from crosspack.reading.records import Records
from packing_core.errors import PackingError
from packing_core.extras import loaded, registered, require
from packing_core.training import tasks
from packing_core.training.checkpoints import FOLDER, check_resume, has_checkpoint
from packing_core.training.job import GROUP, check_honoured
from packing_core.training.options import Options

SUMMARY, PICTURE = "crosspack.json", "compare.png"
# what the files of a result are called
RESULTS = (PICTURE, RUN_FILE, "*.json", "*.safetensors", "tokenizer*", "*.jinja")
_OF_TASKS = frozenset({"batch_size", "reward"})  # options that --task sft without images does not read


@dataclass(frozen=True)
class TrainCommand:
    """A call of ``crosspack train``, checked.

    Attributes:
        task: what is trained on examples by a trainer of its own; None trains the next tokens of packed documents.
        tokenizer: a folder or hub name; None trains one on the data.
        arguments: further fields of the arguments of the task's trainer.
        records: the data, of which the first records have been looked at, or all if the model may take images.
        resume: whether the run goes on from a checkpoint.
        settled: every option with its value, by name, as ``run_file`` holds them.
        run_file: the contents of the run's ``run.yaml``.
        digest: of the options and the files that the run reads; None where several processes would have to agree on
            whether there is anything left to do, and of a task.
    """

    options: TrainOptions
    task: tasks.Task | None
    entry: Any
    model: str | dict[str, Any]
    tokenizer: str | None
    losses: Options
    arguments: Mapping[str, Any]
    rewards: Sequence[Callable[..., Any]]
    records: Records
    held_out: Records | None
    resume: bool
    settled: Mapping[str, Any]
    run_file: str
    digest: str | None

    @classmethod
    def of(cls, context: typer.Context, options: TrainOptions) -> TrainCommand:
        """Checks the options of the command; imports no framework, which take long.

        Raises:
            PackingError: options contradict each other, name what is not there, or a folder is in use.
            UnsupportedError: an option has no effect on the task.
        """
        check_pipes(options)
        model = model_source(options.model)
        tokenizer = tokenizer_source(options.model, options.tokenizer)
        arguments = read_settings(options.set)
        check_service(options.report_to)
        check_kept(options)
        pretrained = isinstance(model, str)
        if options.lora and not pretrained:
            raise PackingError(
                "--lora adapts the weights of a --model, and random weights are not kept: leave --lora out"
            )
        on_examples = options.task != "sft" or have_images(options)
        task = tasks.TASKS[options.task] if on_examples else None
        entry = registered(GROUP if task is None else tasks.GROUP, options.backend)
        output = options.output
        resume = options.resume or (launch.restarted() and output is not None and has_checkpoint(output))
        check_read(context, options, _OF_TASKS if task is None else UNREAD.difference(task.reads))
        if task is None:
            check_rows(options)
        else:
            check_examples(options)
        settings = of_sft(arguments, options) if task is None else {}
        losses = options.losses(options.seed, pretrained=pretrained, settings=settings)
        if task is None:
            check_optimizer(options, losses.optim)
        records, held_out = _opened(options, task, tokenizer)
        settled = effective(context, lr=losses.lr, precision=losses.precision)
        alone = options.nproc == launch.world_size() == 1 and task is None
        run = None
        if alone:
            files = [read.state() for read in (records, held_out) if read is not None]
            run = digest([settled, [*files, _state(model), _state(tokenizer)]])
        check_output(options, resume=resume, run=run)
        if resume and output is not None and task is None:
            check_resume(output, losses, model if isinstance(model, str) else None)
        elif resume and output is not None and not saved(output / FOLDER):
            raise PackingError(f"--resume: {output} has no checkpoint: start it without --resume, with --save-every N")
        return cls(
            options=options,
            task=task,
            entry=entry,
            model=model,
            tokenizer=tokenizer,
            losses=losses,
            arguments=arguments,
            rewards=[reward_function(text) for text in options.reward or ()],
            records=records,
            held_out=held_out,
            resume=resume,
            settled=settled,
            run_file=as_yaml(settled),
            digest=run,
        )

    def trainer(self) -> Callable[[Any], Any]:
        """Imports the backend's trainer and what the run draws with.

        Raises:
            UnsupportedError: the trainer would ignore an option that is in use.
            MissingExtraError: a library is not installed.
        """
        backend = self.options.backend
        trainer: Callable[[Any], Any] = loaded(self.entry, extra=backend)
        if self.task is None:
            check_honoured(trainer, backend, used_options(self.options))
        require("transformers", extra="hf")
        if self.options.compare:
            require("matplotlib.figure", extra="plot")
        return trainer

    def output(self, stack: ExitStack) -> Output | None:
        """Takes the output folder until the stack is closed; None without one, and on every rank but the first."""
        folder = self.options.output
        if folder is None or launch.rank() > 0:
            return None
        overwrite = self.options.overwrite or self.resume
        output = writing(folder, SUMMARY, names=RESULTS, overwrite=overwrite, run=self.digest, checkpoints=True)
        kept = stack.enter_context(output)
        if not kept.finished:
            kept.clear()
        return kept

    def settled_job(self, kept: Output | None) -> dict[str, Any]:
        """Returns the fields of a job of any task that are not options of the same name."""
        output = self.options.output
        return {
            "model": self.model,
            "options": self.losses,
            "output": output if kept is None else kept.partial,
            "checkpoints": None if output is None else output / FOLDER,
            "resume": self.resume,
            "on_phase": lambda line: OUT.print(line, style="dim"),
        }


def _opened(options: TrainOptions, task: tasks.Task | None, tokenizer: str | None) -> tuple[Records, Records | None]:
    """Opens the data and those to evaluate on, if there are any."""
    if task is not None:
        records = open_examples(options, options.data, options.split, "--data")
        if not options.eval_data:
            return records, None
        return records, open_examples(options, options.eval_data, options.eval_split, "--eval-data")
    more = () if options.order_by is None else (options.order_by,)
    lenient, policy = options.on_error == "skip", options.policy
    records = check_data(options.data, options.split, tokenizer, policy=policy, more=more, lenient=lenient)
    if not options.eval_data:
        return records, None
    return records, check_data(options.eval_data, options.eval_split, option="--eval-data", policy=policy)


def _state(model: str | dict[str, Any] | None) -> Any:
    """Returns the state of a model's or a tokenizer's files, which changes when they do; itself if it is no folder."""
    if not isinstance(model, str) or not Path(model).is_dir():
        return model
    return [File(str(path)).state() for path in sorted(Path(model).iterdir()) if path.is_file()]
