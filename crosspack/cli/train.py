"""``crosspack train``: fine-tune a causal language model on packed documents, and compare that with padding.

Options become a TrainJob (``job``), the backend's trainer runs it, and its TrainResult becomes tables, a picture and
files. The model is written by the backend; the tokenizer and everything else of the output folder are written here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from crosspack.cli import launch, options
from crosspack.cli.checks import check_contradictions, check_output, read_mesh, used_options
from crosspack.cli.console import OUT, figures, warn
from crosspack.cli.figures import compare_figure
from crosspack.cli.listing import digest
from crosspack.cli.models import SMALL_LLAMA, check_name, model_source, special_tokens
from crosspack.cli.options import EncodedRecords, check_data
from crosspack.cli.outputs import writing
from crosspack.cli.progress import TrainProgress, counted
from crosspack.cli.reporting import Service, check_service, reporting, scalars
from crosspack.cli.runfile import RUN_FILE, as_yaml, effective, take_file
from crosspack.cli.tables import comparison_table, lengths_table, padding, rate, saving_line, steps_table
from crosspack.encoding.text import Policy
from crosspack.reading.files import File
from packing_core.errors import ContaminationError, PackingError, plural
from packing_core.extras import loaded, registered, require
from packing_core.planning.pieces import Overflow
from packing_core.planning.plan import plan as make_plan
from packing_core.training.checkpoints import FOLDER, check_resume, has_checkpoint, remove_checkpoints, remove_older
from packing_core.training.job import (
    GROUP,
    Options,
    StepRecord,
    TrainJob,
    TrainResult,
    check_honoured,
)
from packing_core.training.schedule import Corpus, Schedule

SUMMARY, PICTURE = "crosspack.json", "compare.png"
RESULTS = (
    PICTURE,
    RUN_FILE,
    "*.json",
    "*.safetensors",
    "tokenizer*",
    "*.jinja",
)  # what the files of a result are called
BUSY = 0.7  # of the processor time that an idle machine gives


def train(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            is_eager=True,
            callback=take_file,
            help="A YAML file of options, `run.yaml` of an earlier run for example. The command line wins over it.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A folder, a hub name, or a config.json (random weights). Default: a small random Llama."),
    ] = None,
    data: options.Data = None,
    split: options.Split = "train",
    tokenizer: options.TokenizerName = None,
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
    backend: Annotated[str, typer.Option(help="Which installed trainer runs it: torch, jax, ...")] = "torch",
    device: Annotated[str, typer.Option(help="What the backend calls the device; auto takes the fastest.")] = "auto",
    attention: Annotated[str, typer.Option(help="Attention implementation of the packed run.")] = "auto",
    capacity: options.Capacity = 2048,
    overflow: options.OverflowPolicy = "error",
    packing: options.Packing = "mixed",
    rows_per_step: Annotated[int, typer.Option(min=1, help="Packed rows in an optimizer step.")] = 4,
    padded_batch: Annotated[int, typer.Option(min=1, help="Documents in a padded batch of --compare.")] = 8,
    epochs: Annotated[int, typer.Option(min=1)] = 1,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after this many steps. Default: all epochs.")] = None,
    lr: Annotated[
        float | None,
        typer.Option(min=0.0, help="Peak learning rate of AdamW. Default: 2e-5, and 3e-3 for random weights."),
    ] = None,
    decay: Annotated[Literal["cosine", "linear", "constant"], typer.Option(help="Learning-rate schedule.")] = "cosine",
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
    gradient_checkpointing: Annotated[bool, typer.Option("--gradient-checkpointing")] = False,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile layers. Default: where it is possible.")
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="Processes on this machine that train together.")] = 1,
    strategy: Annotated[
        Literal["ddp", "fsdp"], typer.Option(help="Of several processes: all weights on each, or sharded weights.")
    ] = "ddp",
    mesh: Annotated[
        str | None, typer.Option(help="Devices of one process: data=2,fsdp=4 (weights are cut over fsdp).")
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
    entry = registered(GROUP, backend)
    resume = resume or (launch.restarted() and output is not None and has_checkpoint(output))
    check_contradictions(context.params)
    built_from, model_folder = model_source(model)
    if lora and not isinstance(built_from, str):
        raise PackingError("--lora adapts the weights of a --model, and random weights are not kept: leave --lora out")
    check_name("--tokenizer", tokenizer)
    records = check_data(data, split, tokenizer or model_folder)  # before the frameworks, which take long to import
    if eval_data:
        check_data(eval_data, eval_split, option="--eval-data")
    check_service(report_to)
    if lr is None:
        lr = 2e-5 if isinstance(built_from, str) else 3e-3
    precision = precision or dtype
    as_file = as_yaml(settled := effective(context, lr=lr, precision=precision))
    # Several processes would have to agree on whether there is anything left to do.
    alone = nproc == launch.world_size() == 1
    made = digest([settled, records.state(), _state(built_from)]) if alone else None
    check_output(output, compare=compare, overwrite=overwrite, resume=resume, save_every=save_every, run=made)
    training = Options(lr, decay, warmup, weight_decay, clip, precision, seed, dtype, master_weights, lora)
    if resume and output is not None:
        check_resume(output, training, built_from if isinstance(built_from, str) else None)
    run = loaded(entry, extra=backend)
    check_honoured(run, backend, used_options(context.params))
    require("transformers", extra="hf")
    if compare:
        require("matplotlib.figure", extra="plot")
    if nproc > 1 and launch.world_size() == 1:
        raise typer.Exit(_launched(nproc, as_file, context.params))
    leads = launch.rank() == 0
    OUT.quiet = OUT.quiet or not leads

    source = EncodedRecords.open(
        data, split, tokenizer or model_folder, Policy(loss, bos, eos), trust_remote_code=trust_remote_code
    )
    encoder = source.encoder
    if model is None:
        built_from = SMALL_LLAMA | special_tokens(encoder.tokenizer)
    corpus = Corpus.collect(counted(OUT, "documents read", source.documents(capacity, overflow)))
    lengths = corpus.documents.lengths
    plans = tuple(
        make_plan(lengths, capacity, overflow=overflow, strategy=packing, seed=seed + epoch) for epoch in range(epochs)
    )
    pad = encoder.tokenizer.pad_token_id
    pad_id = 0 if pad is None else pad
    schedule = Schedule(corpus, plans, rows_per_step, padded_batch, seed=seed, limit=steps, pad_id=pad_id)
    name = model or "a small Llama, random weights"
    OUT.print(f"[bold]{escape(name)}[/] on {source.describe()}", highlight=False)
    OUT.print(lengths_table(lengths, trained=corpus.n_trained))
    OUT.print(steps_table(schedule))
    OUT.print(saving_line(schedule), highlight=False)
    evaluation = None
    if eval_data:
        held_out = replace(source, records=check_data(eval_data, eval_split, option="--eval-data"))
        evaluation = _evaluation(held_out, capacity, overflow, pad_id)

    with ExitStack() as stack:
        kept = checkpoints = None
        if output is not None:
            if leads:
                kept = stack.enter_context(
                    writing(output, SUMMARY, names=RESULTS, overwrite=overwrite or resume, run=made)
                )
                if kept.finished:
                    figures(json.loads((output / SUMMARY).read_text()))
                    OUT.print(f"model: {output}, complete already: pass --overwrite to train again", highlight=False)
                    return
                kept.clear()
            checkpoints = output / FOLDER
        log = stack.enter_context(reporting(report_to if leads else "none", output, settled))
        progress = stack.enter_context(TrainProgress(OUT, len(schedule)))

        def on_step(record: StepRecord) -> None:
            progress.step(record)
            log(scalars(record, training.learning_rate(record.step, len(schedule))), record.step + 1)

        result = run(
            TrainJob(
                model=built_from,
                schedule=schedule,
                options=training,
                evaluation=evaluation,
                eval_every=eval_every,
                compile=compile,
                strategy=strategy,
                mesh=read_mesh(mesh),
                runs=("padded", "grouped", "packed") if compare else ("packed",),
                device=device,
                attention=attention,
                gradient_checkpointing=gradient_checkpointing,
                deterministic=deterministic,
                trust_remote_code=trust_remote_code,
                output=output if kept is None else kept.partial,
                checkpoints=checkpoints,
                save_every=save_every,
                resume=resume,
                on_step=on_step,
                on_phase=progress.phase,
            )
        )
        progress.stop()
        if not result.audit.exact:  # nothing is published
            raise ContaminationError(f"audit: documents that are packed together see each other: {result.audit.line}")
        OUT.print(f"attention: {result.attention} on {result.device}", highlight=False)
        warn_if_busy(result.cpu)
        if compare:
            OUT.print(comparison_table(result))
            folder = kept.partial if kept else Path("runs")
            compare_figure(result, schedule, folder / PICTURE, title=f"{name}, {result.device}")
            OUT.print(f"picture: {(output or folder) / PICTURE}", highlight=False)
        else:
            OUT.print(_outcome(result.records["packed"]), highlight=False)
        about = _about(result, backend)
        if kept is not None:
            (kept.partial / "README.md").unlink(missing_ok=True)  # of peft, an empty form
            encoder.tokenizer.save_pretrained(kept.partial)
            _write_run(about, kept.partial)
            (kept.partial / RUN_FILE).write_text(as_file)
            kept.publish()
            if checkpoints is not None:  # those of a run that was overwritten, or what a killed one left
                (remove_older if resume or save_every else remove_checkpoints)(checkpoints)
            OUT.print(f"model: {output}", highlight=False)
        elif output is None and not compare:
            OUT.print("nothing is kept: pass --output to keep the model")
    if leads:
        figures(about)
    OUT.print(f"audit: [green]exact[/]: {result.audit.line}", highlight=False)


def _state(model: str | dict[str, Any] | None) -> Any:
    """Returns the state of a model's files, which changes when they do; the model itself if it is no folder."""
    if not isinstance(model, str) or not Path(model).is_dir():
        return model
    return [File(str(path)).state() for path in sorted(Path(model).iterdir()) if path.is_file()]


def _evaluation(source: EncodedRecords, capacity: int, overflow: Overflow, pad_id: int) -> Schedule:
    """The documents to evaluate on, packed; with as many rows at once as there are processes."""
    corpus = Corpus.collect(source.documents(capacity, overflow), option="--eval-data")
    rows = make_plan(corpus.documents.lengths, capacity, overflow=overflow)
    OUT.print(
        f"evaluation on {escape(source.records.name)}: {plural(len(corpus.documents), 'document')} in "
        f"{plural(rows.n_rows, 'row')}, {corpus.n_trained:,} trained tokens",
        highlight=False,
    )
    return Schedule(corpus, (rows,), launch.world_size(), pad_id=pad_id)


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


def _launched(processes: int, run_file: str, given: Mapping[str, Any]) -> int:
    """Start the same run as several processes; its exit status."""
    flags = ("resume", "overwrite", "verbose", "quiet")
    with TemporaryDirectory() as folder:
        path = Path(folder, RUN_FILE)
        path.write_text(run_file)
        chosen = [f"--{flag}" for flag in flags if given[flag]] + ["--json"] * given["as_json"]
        return launch.start(processes, ["train", "--config", str(path), *chosen])


def _write_run(content: dict[str, Any], output: Path) -> None:
    (output / SUMMARY).write_text(json.dumps({"crosspack": version("crosspack"), **content}, indent=1))
