"""Checks the options of ``crosspack train``, and reads its data into the steps of a run.

The options of the command -> a :class:`TrainCommand`, checked, of whose data only the first records were read ->
:class:`Steps`: all documents, encoded, and a Schedule of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import typer

from crosspack.cli import launch
from crosspack.cli.checks import check_contradictions, check_output
from crosspack.cli.console import OUT
from crosspack.cli.listing import digest
from crosspack.cli.models import SMALL_LLAMA, check_name, model_config, model_source, special_tokens
from crosspack.cli.options import EncodedRecords, check_data
from crosspack.cli.progress import counted
from crosspack.cli.records import read_columns
from crosspack.cli.reporting import check_service
from crosspack.cli.runfile import as_yaml, effective
from crosspack.cli.settings import of_sft, read_settings
from crosspack.encoding.text import Policy
from crosspack.reading.files import File
from crosspack.reading.records import Records
from packing_core.errors import PackingError, first_line
from packing_core.extras import registered
from packing_core.planning.cost import cost_of
from packing_core.planning.epochs import plan_steps
from packing_core.planning.plan import PackPlan
from packing_core.planning.plan import plan as make_plan
from packing_core.training.checkpoints import check_resume, has_checkpoint
from packing_core.training.job import GROUP
from packing_core.training.options import Options
from packing_core.training.schedule import Corpus, Schedule


@dataclass(frozen=True)
class TrainCommand:
    """A call of ``crosspack train``, checked.

    Attributes:
        given: the parameters of the command.
        entry: where the backend's trainer is.
        model: a folder or hub name, or the contents of a config.
        tokenizer: a folder or hub name; None trains one on the data.
        options: what decides the losses.
        records: the data, of which the first records have been looked at.
        held_out: those to evaluate on.
        resume: whether the run goes on from a checkpoint.
        settled: every option with its value, by name, as ``run_file`` holds them.
        run_file: the contents of the run's ``run.yaml``.
        digest: of the options and the files that the run reads; None where several processes would have to agree on
            whether there is anything left to do.
    """

    given: Mapping[str, Any]
    entry: Any
    model: str | dict[str, Any]
    tokenizer: str | None
    options: Options
    records: Records
    held_out: Records | None
    resume: bool
    settled: Mapping[str, Any]
    run_file: str
    digest: str | None

    @property
    def output(self) -> Path | None:
        found: Path | None = self.given["output"]
        return found

    @property
    def name(self) -> str:
        """Names the model for people."""
        return self.given["model"] or "a small Llama, random weights"

    @classmethod
    def of(cls, context: typer.Context, received: Mapping[str, Any]) -> TrainCommand:
        """Checks the options of the command; imports no framework, which take long.

        Args:
            context: of the command.
            received: the arguments of the command. ``context.params`` has those of all commands too, but may hold paths
                as text: it depends on the version of typer where they are converted.

        Raises:
            PackingError: options contradict each other, name what is not there, or a folder is in use.
        """
        given = {**context.params, **received}
        entry = registered(GROUP, given["backend"])
        output = given["output"]
        resume = given["resume"] or (launch.restarted() and output is not None and has_checkpoint(output))
        check_contradictions(given)
        model, folder = model_source(given["model"])
        if given["lora"] and not isinstance(model, str):
            raise PackingError(
                "--lora adapts the weights of a --model, and random weights are not kept: leave --lora out"
            )
        check_name("--tokenizer", given["tokenizer"])
        tokenizer = given["tokenizer"] or folder
        more = () if given["order_by"] is None else (given["order_by"],)
        lenient = given["on_error"] == "skip"
        policy = _policy(given)
        records = check_data(given["data"], given["split"], tokenizer, policy=policy, more=more, lenient=lenient)
        held_out = None
        if given["eval_data"]:
            held_out = check_data(given["eval_data"], given["eval_split"], option="--eval-data", policy=policy)
        check_service(given["report_to"])
        options = _options(given, model)
        settled = effective(context, lr=options.lr, precision=options.precision)
        alone = given["nproc"] == launch.world_size() == 1
        made = digest([settled, records.state(), _state(model)]) if alone else None
        check_output(
            output,
            compare=given["compare"],
            overwrite=given["overwrite"],
            resume=resume,
            save_every=given["save_every"],
            run=made,
        )
        if resume:
            check_resume(output, options, model if isinstance(model, str) else None)
        return cls(given, entry, model, tokenizer, options, records, held_out, resume, settled, as_yaml(settled), made)


@dataclass(frozen=True)
class Steps:
    """The data of a run.

    Attributes:
        source: the encoded records.
        model: that of the command; a config that knows the tokenizer, if none was named.
        schedule: the documents of each step.
        evaluation: those to evaluate on.
        prompts: the token ids of ``--sample``.
        skipped: why records were left out, under ``--on-error skip``.
        uncapped: the rows of an epoch without ``--max-segments``, where there is one.
        samples: what the model made of the prompts, which the run fills.
    """

    source: EncodedRecords
    model: str | Mapping[str, Any]
    schedule: Schedule
    evaluation: Schedule | None
    prompts: tuple[tuple[int, ...], ...] = ()
    skipped: list[str] = field(default_factory=list)
    uncapped: PackPlan | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def read(command: TrainCommand) -> Steps:
        """Reads and encodes all documents, and packs them into the rows of every step."""
        given = command.given
        capacity, overflow, seed = given["capacity"], given["overflow"], given["seed"]
        limits = {name: given[name] for name in ("overflow", "context", "min_piece", "max_segments")}
        policy = _policy(given)
        lenient = given["on_error"] == "skip"
        source = EncodedRecords.of(
            command.records,
            command.tokenizer,
            policy,
            trust_remote_code=given["trust_remote_code"],
            lenient=lenient,
        )
        tokenizer = source.encoder.tokenizer
        pad_id = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        skipped: list[str] = []
        skip = (lambda _, error: skipped.append(first_line(error))) if lenient else None
        documents = islice(source.documents(capacity, overflow, key=given["order_by"], skip=skip), given["limit"])
        corpus = Corpus.collect(counted(OUT, "documents read", documents))
        known = given["model"] is not None
        model = command.model if known else SMALL_LLAMA | special_tokens(tokenizer)
        cost = cost_of([model_config(given["model"]) if known else model]) if given["equal_cost"] else None

        def planned(epoch: int, **limits: Any) -> PackPlan:
            lengths = corpus.documents.lengths
            if cost is not None:
                step = given["rows_per_step"]
                return plan_steps(lengths, capacity, step, seed=seed, epoch=epoch, cost=cost, **limits)
            ordered = {"strategy": given["packing"], "order": given["order"], "keys": corpus.keys}
            return make_plan(lengths, capacity, seed=seed + epoch, **ordered, **limits)

        plans = tuple(planned(epoch, **limits) for epoch in range(given["epochs"]))
        uncapped = None if given["max_segments"] is None else planned(0, **limits | {"max_segments": None})
        schedule = Schedule(
            corpus,
            plans,
            given["rows_per_step"],
            given["padded_batch"],
            seed=seed,
            limit=given["steps"],
            pad_id=pad_id,
        )
        evaluation = None
        if command.held_out is not None:
            held_out = replace(source, records=command.held_out)
            evaluation = _evaluation(held_out, capacity, limits, pad_id)
        chats = bool(given["sample"]) and source.holds_chats()
        prompts = tuple(source.encoder.prompt(text, chat=chats) for text in given["sample"] or ())
        return Steps(source, model, schedule, evaluation, prompts, skipped, uncapped)


def _policy(given: Mapping[str, Any]) -> Policy:
    """The rules for tokens, and the columns that are read."""
    names = ("text", "prompt", "completion", "messages", "input_ids")
    return Policy(given["loss"], given["bos"], given["eos"], read_columns(given["column"], names))


def _options(given: Mapping[str, Any], model: str | dict[str, Any]) -> Options:
    """Returns what decides the losses; a learning rate and a precision that are not given follow from the model's."""
    lr = given["lr"]
    if lr is None:
        lr = 2e-5 if isinstance(model, str) else 3e-3
    names = ("decay", "warmup", "weight_decay", "clip", "seed", "dtype", "master_weights")
    adapters = ("lora", "lora_alpha", "lora_dropout", "lora_targets")
    more = ("optim", "neftune_alpha")
    chosen = {name: given[name] for name in names + adapters + more} | of_sft(read_settings(given["set"]), given)
    return Options(lr=lr, precision=given["precision"] or given["dtype"], **chosen)


def _state(model: str | dict[str, Any] | None) -> Any:
    """Returns the state of a model's files, which changes when they do; the model itself if it is no folder."""
    if not isinstance(model, str) or not Path(model).is_dir():
        return model
    return [File(str(path)).state() for path in sorted(Path(model).iterdir()) if path.is_file()]


def _evaluation(source: EncodedRecords, capacity: int, limits: Mapping[str, Any], pad_id: int) -> Schedule:
    """The documents to evaluate on, packed; with as many rows at once as there are processes."""
    corpus = Corpus.collect(source.documents(capacity, limits["overflow"]), option="--eval-data")
    rows = make_plan(corpus.documents.lengths, capacity, **limits)
    return Schedule(corpus, (rows,), launch.world_size(), pad_id=pad_id)
