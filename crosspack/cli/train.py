"""``crosspack train``: fine-tune a causal language model on packed documents, and compare that with padding.

The options -> a TrainCommand (:mod:`.traincommand`), checked before any framework is imported -> the documents and the
steps, printed as a plan -> a TrainJob, which the backend's trainer runs -> its TrainResult as tables, a picture and
files. The model is written by the backend; the tokenizer and everything else of the output folder are written here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from crosspack.cli import launch, options
from crosspack.cli.checks import read_mesh, used_options
from crosspack.cli.console import OUT, warn
from crosspack.cli.hub import create_repository
from crosspack.cli.images import have_images
from crosspack.cli.outputs import Output, writing
from crosspack.cli.progress import TrainProgress
from crosspack.cli.reporting import Service, reporting, scalars
from crosspack.cli.runfile import RUN_FILE, take_file
from crosspack.cli.tables import cap_line, lengths_table, saving_line, steps_table
from crosspack.cli.tasks import train_task
from crosspack.cli.traincommand import Steps, TrainCommand
from crosspack.cli.trainresult import PICTURE, SUMMARY, report, report_finished
from packing_core.errors import ContaminationError, plural
from packing_core.extras import loaded, require
from packing_core.training.checkpoints import FOLDER
from packing_core.training.job import Strategy, TrainJob, TrainResult, check_honoured
from packing_core.training.options import Optimizer
from packing_core.training.rates import Decay
from packing_core.training.records import StepRecord
from packing_core.training.tasks import TaskName

RESULTS = (
    PICTURE,
    RUN_FILE,
    "*.json",
    "*.safetensors",
    "tokenizer*",
    "*.jinja",
)  # what the files of a result are called
GROUPS = {
    "Data": (
        "data eval_data capacity overflow loss",
        "split eval_split column tokenizer limit on_error context min_piece max_segments packing order order_by "
        "equal_cost bos eos",
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
Trainer = Callable[[TrainJob], TrainResult]


def train(
    command_line: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            is_eager=True,
            callback=take_file,
            help="A YAML file of options, `run.yaml` of an earlier run for example. The command line wins over it.",
        ),
    ] = None,
    task: Annotated[
        TaskName,
        typer.Option(
            help="Next tokens of documents and answers, preferences, rewards, a policy, classes, masked tokens, pairs."
        ),
    ] = "sft",
    model: Annotated[
        str | None,
        typer.Option(help="A folder, a hub name, or a config.json (random weights). Default: a small random Llama."),
    ] = None,
    data: options.Data = None,
    split: options.Split = "train",
    column: Annotated[
        list[str] | None,
        typer.Option(help="The column that holds what is read as NAME: prompt=question. Once for each."),
    ] = None,
    tokenizer: options.TokenizerName = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Train on the first documents alone, as many as this.")
    ] = None,
    eval_data: Annotated[
        list[str] | None, typer.Option(help="Documents to evaluate on, packed: whatever --data takes.")
    ] = None,
    eval_split: Annotated[
        str | None, typer.Option(help="Which split of --eval-data. Default: validation, where it has splits.")
    ] = None,
    eval_every: Annotated[int, typer.Option(min=0, help="Steps between evaluations; 0 for one at the end.")] = 0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Train padded too, from the same weights on the same documents per step.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Folder for the model, the picture and checkpoints.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that --output holds.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint in --output.")] = False,
    save_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints; 0 for none.")] = 0,
    keep_checkpoints: Annotated[int, typer.Option(min=1, help="How many of the newest checkpoints stay.")] = 1,
    keep_best: Annotated[
        bool, typer.Option("--keep-best", help="Write the weights with the lowest evaluation loss, not the last ones.")
    ] = False,
    early_stopping: Annotated[
        int, typer.Option(min=0, help="End after so many evaluations without a lower loss; 0 for never.")
    ] = 0,
    sample: Annotated[
        list[str] | None, typer.Option(help="A prompt that the model continues after each evaluation, and at the end.")
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(help="Upload --output to the hub at the end, under this name: owner/name.")
    ] = None,
    on_error: Annotated[
        Literal["stop", "skip"], typer.Option(help="A record that cannot be used: stop, or leave it out.")
    ] = "stop",
    backend: Annotated[str, typer.Option(help="Which installed trainer runs it: torch, jax, ...")] = "torch",
    device: Annotated[str, typer.Option(help="What the backend calls the device; auto takes the fastest.")] = "auto",
    attention: Annotated[str, typer.Option(help="Attention implementation of the packed run.")] = "auto",
    capacity: options.Capacity = 2048,
    overflow: options.OverflowPolicy = "error",
    context: options.Context = None,
    min_piece: options.MinPiece = 1,
    max_segments: options.MaxSegments = None,
    packing: options.Packing = "mixed",
    order: options.OrderOfTraining = "random",
    order_by: options.OrderBy = None,
    equal_cost: options.EqualCost = False,
    rows_per_step: Annotated[int, typer.Option(min=1, help="Packed rows in an optimizer step.")] = 4,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Examples, or rows of --task classify and mlm, in a step of another --task.")
    ] = 8,
    padded_batch: Annotated[int, typer.Option(min=1, help="Documents in a padded batch of --compare.")] = 8,
    epochs: Annotated[int, typer.Option(min=1)] = 1,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after this many steps. Default: all epochs.")] = None,
    lr: Annotated[
        float | None,
        typer.Option(min=0.0, help="Peak learning rate of AdamW. Default: 2e-5, and 3e-3 for random weights."),
    ] = None,
    decay: Annotated[Decay, typer.Option(help="Learning-rate schedule, by transformers' name.")] = "cosine",
    optim: Annotated[
        Optimizer | None, typer.Option(help="Optimizer, by transformers' name. Default: fused AdamW.")
    ] = None,
    neftune_alpha: Annotated[
        float | None, typer.Option(min=0.0, help="NEFTune: noise on embeddings in training, of this size.")
    ] = None,
    warmup: Annotated[float, typer.Option(min=0.0, max=1.0, help="Fraction of steps used for warm-up.")] = 0.05,
    weight_decay: Annotated[float, typer.Option(min=0.0)] = 0.0,
    clip: Annotated[float, typer.Option(min=0.0, help="Largest gradient norm; 0 leaves the gradient.")] = 1.0,
    precision: Annotated[
        Literal["float32", "bfloat16"] | None, typer.Option(help="Of the forward pass. Default: as --dtype.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of the weights and of the optimizer's states.")
    ] = "float32",
    master_weights: Annotated[
        bool, typer.Option("--master-weights", help="Float32 weights and states in the optimizer of bfloat16 weights.")
    ] = False,
    lora: Annotated[int, typer.Option(min=0, help="Train low-rank adapters of this rank; 0 trains the weights.")] = 0,
    lora_alpha: Annotated[
        float | None, typer.Option(min=0.0, help="Scale of the adapters, times their rank. Default: twice the rank.")
    ] = None,
    lora_dropout: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Share of the adapters' inputs that is dropped.")
    ] = None,
    lora_targets: Annotated[
        str | None, typer.Option(help="Layers with adapters: q_proj,v_proj. Default: all but the output layer.")
    ] = None,
    merge_lora: Annotated[bool, typer.Option("--merge-lora", help="Write weights with the adapters added.")] = False,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Compute activations again in the backward pass.")
    ] = False,
    reward: Annotated[
        list[str] | None, typer.Option(help="Of --task grpo: a function that scores completions, FILE.py:NAME.")
    ] = None,
    set: Annotated[
        list[str] | None, typer.Option(help="A further argument of the --task's trainer: beta=0.2, adam_beta2=0.95.")
    ] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile layers. Default: where it is possible.")
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="Processes on this machine that train together.")] = 1,
    strategy: Annotated[
        Strategy,
        typer.Option(help="Of several processes: all weights on each, sharded by FSDP2, or by DeepSpeed's ZeRO."),
    ] = "ddp",
    context_parallel: Annotated[
        int,
        typer.Option(min=1, help="Processes over which the documents of each row are cut, for rows too long for one."),
    ] = 1,
    mesh: Annotated[
        str | None, typer.Option(help="Devices of one process: data=2,fsdp=4 (cuts weights), tensor=2, context=2.")
    ] = None,
    report_to: Annotated[Service, typer.Option(help="Where figures of each step go.")] = "none",
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Repeat to the bit on a GPU too.")] = False,
    seed: options.Seed = 0,
    loss: options.LossOn = "completion",
    bos: options.Bos = None,
    eos: options.Eos = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Fine-tune a causal language model on packed documents; --compare measures it against padding."""
    given = {name: value for name, value in locals().items() if name != "command_line"}
    if task != "sft" or have_images(data, split):
        train_task(command_line, {**command_line.params, **given})
        return
    command = TrainCommand.of(command_line, given)
    trainer = _trainer(command)
    if nproc > 1 and launch.world_size() == 1:
        raise typer.Exit(launch.start_again("train", command.given, command.run_file))
    OUT.quiet = OUT.quiet or launch.rank() > 0
    if launch.rank() == 0:
        create_repository(push_to_hub, output)
    prepared = Steps.read(command)
    _print_plan(command, prepared)
    with ExitStack() as stack:
        kept = _output(command, stack)
        if kept is not None and kept.finished:
            report_finished(kept)
            return
        result = _run(command, prepared, trainer, kept, stack)
        report(command, prepared, result, kept)
    OUT.print(f"audit: [green]exact[/]: {result.audit.line}", highlight=False)


def _trainer(command: TrainCommand) -> Trainer:
    """Imports the backend's trainer and what the run draws with.

    Raises:
        UnsupportedError: the trainer would ignore an option that is in use.
        MissingExtraError: a library is not installed.
    """
    trainer: Trainer = loaded(command.entry, extra=command.given["backend"])
    check_honoured(trainer, command.given["backend"], used_options(command.given))
    require("transformers", extra="hf")
    if command.given["compare"]:
        require("matplotlib.figure", extra="plot")
    return trainer


def _print_plan(command: TrainCommand, steps: Steps) -> None:
    """Prints what will be trained on, and in which steps."""
    lengths = steps.schedule.corpus.documents.lengths
    OUT.print(f"[bold]{escape(command.name)}[/] on {steps.source.describe()}", highlight=False)
    OUT.print(lengths_table(lengths, trained=steps.schedule.corpus.n_trained))
    OUT.print(steps_table(steps.schedule))
    OUT.print(saving_line(steps.schedule), highlight=False)
    if (free := steps.uncapped) is not None:
        OUT.print(cap_line(steps.schedule.plans[0], free, command.given["max_segments"]), highlight=False)
    if steps.skipped:
        warn(f"left out {plural(len(steps.skipped), 'record')} that cannot be used, the first: {steps.skipped[0]}")
    if steps.evaluation is not None and command.held_out is not None:
        corpus, (rows,) = steps.evaluation.corpus, steps.evaluation.plans
        OUT.print(
            f"evaluation on {escape(command.held_out.name)}: {plural(len(corpus.documents), 'document')} in "
            f"{plural(rows.n_rows, 'row')}, {corpus.n_trained:,} trained tokens",
            highlight=False,
        )


def _output(command: TrainCommand, stack: ExitStack) -> Output | None:
    """Takes the output folder until the stack is closed; None without one, and on every rank but the first."""
    folder = command.output
    if folder is None or launch.rank() > 0:
        return None
    overwrite = command.given["overwrite"] or command.resume
    kept = stack.enter_context(writing(folder, SUMMARY, names=RESULTS, overwrite=overwrite, run=command.digest))
    if not kept.finished:
        kept.clear()
    return kept


def _run(command: TrainCommand, steps: Steps, trainer: Trainer, kept: Output | None, stack: ExitStack) -> TrainResult:
    """Trains, with progress on the console and figures to ``--report-to``.

    Raises:
        ContaminationError: documents that are packed together see each other.
    """
    given, options = command.given, command.options
    service: Service = given["report_to"] if launch.rank() == 0 else "none"
    log = stack.enter_context(reporting(service, command.output, command.settled))
    progress = stack.enter_context(TrainProgress(OUT, len(steps.schedule)))

    def on_step(record: StepRecord) -> None:
        progress.step(record)
        log(scalars(record, options.learning_rate(record.step, len(steps.schedule))), record.step + 1)

    def on_sample(done: int, number: int, ids: list[int]) -> None:
        text = steps.source.encoder.tokenizer.decode(ids, skip_special_tokens=True)
        steps.samples.append({"steps": done, "prompt": given["sample"][number], "continuation": text})
        OUT.print(f"after step {done:,}: {given['sample'][number]} -> {text}", highlight=False, markup=False)

    job = TrainJob(
        model=steps.model,
        schedule=steps.schedule,
        options=options,
        evaluation=steps.evaluation,
        eval_every=given["eval_every"],
        compile=given["compile"],
        strategy=given["strategy"],
        context_parallel=given["context_parallel"],
        mesh=read_mesh(given["mesh"]),
        runs=("padded", "grouped", "packed") if given["compare"] else ("packed",),
        device=given["device"],
        attention=given["attention"],
        gradient_checkpointing=given["gradient_checkpointing"],
        merge_lora=given["merge_lora"],
        deterministic=given["deterministic"],
        trust_remote_code=given["trust_remote_code"],
        output=command.output if kept is None else kept.partial,
        checkpoints=None if command.output is None else command.output / FOLDER,
        save_every=given["save_every"],
        keep_checkpoints=given["keep_checkpoints"],
        keep_best=given["keep_best"],
        early_stopping=given["early_stopping"],
        prompts=steps.prompts,
        resume=command.resume,
        on_step=on_step,
        on_sample=on_sample,
        on_phase=progress.phase,
    )
    result = trainer(job)
    progress.stop()
    if not result.audit.exact:  # nothing is published
        raise ContaminationError(f"audit: documents that are packed together see each other: {result.audit.line}")
    return result
