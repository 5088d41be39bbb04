"""``crosspack train``: fine-tune a causal language model on packed documents, and compare that with padding.

Options become a TrainJob (``job``), the backend's trainer runs it, and its TrainResult becomes tables, a picture and
files. The model is written by the backend; the tokenizer and everything else of the output folder are written here.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from crosspack.cli import options
from crosspack.cli.console import OUT, figures, warn
from crosspack.cli.figures import compare_figure
from crosspack.cli.options import Source, check_data
from crosspack.cli.outputs import check, writing
from crosspack.cli.progress import TrainProgress, counted
from crosspack.cli.tables import comparison_table, lengths_table, padding, rate, steps_table
from crosspack.cli.text import Policy
from packing_core.errors import ContaminationError, PackingError, plural
from packing_core.extras import loaded, registered, require
from packing_core.plan import plan as make_plan
from packing_core.training.checkpoints import FOLDER, check_resume, remove_checkpoints
from packing_core.training.job import GROUP, Options, TrainJob, TrainResult, is_hub_name
from packing_core.training.schedule import Corpus, Schedule

RUN_FILE, PICTURE = "crosspack.json", "compare.png"
RESULTS = (PICTURE, "*.json", "*.safetensors", "tokenizer*", "*.jinja")  # what the files of a result are called
BUSY = 0.7  # of the processor time that an idle machine gives

# The model that is trained from random weights when none is named: small enough for two cores.
SMALL_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}


def train(
    model: Annotated[
        str | None,
        typer.Option(help="A folder, a hub name, or a config.json (random weights). Default: a small random Llama."),
    ] = None,
    data: options.Data = None,
    split: options.Split = "train",
    tokenizer: options.TokenizerName = None,
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
    strategy: options.Strategy = "best_fit",
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
    precision: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the forward pass.")] = "float32",
    gradient_checkpointing: Annotated[bool, typer.Option("--gradient-checkpointing")] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Repeat to the bit on a GPU too.")] = False,
    seed: options.Seed = 0,
    loss: options.LossOn = "completion",
    bos: options.Bos = None,
    eos: options.Eos = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Fine-tune a causal language model on packed documents; --compare measures it against padding."""
    entry = registered(GROUP, backend)
    _check_output(output, compare=compare, overwrite=overwrite, resume=resume, save_every=save_every)
    built_from, model_folder = model_source(model)
    check_name("--tokenizer", tokenizer)
    check_data(data, split, tokenizer or model_folder)  # before the frameworks, which take long to import
    if lr is None:
        lr = 2e-5 if isinstance(built_from, str) else 3e-3
    training = Options(lr, decay, warmup, weight_decay, clip, precision, seed)
    if resume and output is not None:
        check_resume(output, training, built_from if isinstance(built_from, str) else None)
    run = loaded(entry, extra=backend)
    require("transformers", extra="hf")
    if compare:
        require("matplotlib.figure", extra="plot")

    source = Source.open(
        data, split, tokenizer or model_folder, Policy(loss, bos, eos), trust_remote_code=trust_remote_code
    )
    encoder = source.encoder
    if model is None:
        built_from = SMALL_LLAMA | special_tokens(encoder.tokenizer)
    corpus = Corpus.collect(counted(OUT, "documents read", source.documents(capacity, overflow)))
    lengths = corpus.documents.lengths
    plans = tuple(
        make_plan(lengths, capacity, overflow=overflow, strategy=strategy, seed=seed + epoch) for epoch in range(epochs)
    )
    pad = encoder.tokenizer.pad_token_id
    schedule = Schedule(
        corpus, plans, rows_per_step, padded_batch, seed=seed, limit=steps, pad_id=0 if pad is None else pad
    )
    name = model or "a small Llama, random weights"
    OUT.print(f"[bold]{escape(name)}[/] on {source.describe()}", highlight=False)
    OUT.print(lengths_table(lengths, trained=corpus.n_trained))
    OUT.print(steps_table(schedule))

    with ExitStack() as stack:
        kept = checkpoints = None
        if output is not None:
            kept = stack.enter_context(writing(output, RUN_FILE, names=RESULTS, overwrite=overwrite or resume))
            checkpoints = output / FOLDER
        with TrainProgress(OUT, len(schedule)) as progress:
            result = run(
                TrainJob(
                    model=built_from,
                    schedule=schedule,
                    options=training,
                    runs=("padded", "grouped", "packed") if compare else ("packed",),
                    device=device,
                    attention=attention,
                    gradient_checkpointing=gradient_checkpointing,
                    deterministic=deterministic,
                    trust_remote_code=trust_remote_code,
                    output=None if kept is None else kept.partial,
                    checkpoints=checkpoints,
                    save_every=save_every,
                    resume=resume,
                    on_step=progress.step,
                    on_phase=progress.phase,
                )
            )
        OUT.print(f"attention: {result.attention} on {result.device}", highlight=False)
        warn_if_busy(result.cpu)
        if compare:
            OUT.print(comparison_table(result))
            folder = kept.partial if kept else Path("runs")
            compare_figure(result, schedule, folder / PICTURE, title=f"{name}, {result.device}")
            OUT.print(f"picture: {(output or folder) / PICTURE}", highlight=False)
        else:
            records = result.records["packed"]
            OUT.print(
                f"{plural(len(records), 'step')}, {rate(records):,.0f} real tokens/s (median step), "
                f"{padding(records):.1%} padding, loss {records[0].loss:.4f} to {records[-1].loss:.4f}",
                highlight=False,
            )
        about = _about(result, backend)
        if kept is not None:
            encoder.tokenizer.save_pretrained(kept.partial)
            _write_run(about, kept.partial)
            kept.publish()
            if checkpoints is not None and not (resume or save_every):
                remove_checkpoints(checkpoints)  # of the run that was overwritten
            OUT.print(f"model: {output}", highlight=False)
        elif not compare:
            OUT.print("nothing is kept: pass --output to keep the model")
    figures(about)
    if not result.audit.exact:
        raise ContaminationError(f"audit: documents that are packed together see each other: {result.audit.line}")
    OUT.print(f"audit: [green]exact[/]: {result.audit.line}", highlight=False)


def warn_if_busy(cpu: float | None) -> None:
    """Warn that speeds are unreliable if the steps got much less processor time than their threads could use."""
    if cpu is not None and cpu < BUSY:
        warn(
            f"the steps got {cpu:.0%} of the processor time that their threads could use, so the machine is busy and "
            "speeds are unreliable (losses are not): run it again when nothing else runs"
        )


def _about(result: TrainResult, backend: str) -> dict[str, Any]:
    """What crosspack.json and ``--json`` say of a run."""
    return {
        "backend": backend,
        "device": result.device,
        "attention": result.attention,
        "cpu": result.cpu,
        "audit": asdict(result.audit),
        "runs": {run: [asdict(record) for record in records] for run, records in result.records.items()},
    }


def _check_output(output: Path | None, *, compare: bool, overwrite: bool, resume: bool, save_every: int) -> None:
    """Refuse contradictory options and any folder that somebody still needs."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise PackingError("crosspack train runs in one process: start it without torchrun or accelerate launch")
    if compare and (resume or save_every):
        raise PackingError("--compare measures whole runs: pass it without --resume and --save-every")
    if output is None:
        if resume or save_every:
            raise PackingError("--resume and --save-every need --output, the folder of the run")
        return
    if not resume:
        check(output, overwrite=overwrite, ways="--resume, --overwrite")


def model_source(model: str | None) -> tuple[str | dict[str, Any], str | None]:
    """What the trainer builds the model from, and the folder or hub name whose tokenizer belongs to it."""
    if model is None:
        return SMALL_LLAMA, None  # the tokenizer is not known yet
    check_name("--model", model)
    path = Path(model)
    if not path.is_file():
        return model, model
    try:
        config = json.loads(path.read_text())
        config["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise PackingError(f"--model {model}: a file must be a config.json with a model_type") from error
    return config, str(path.parent) if (path.parent / "tokenizer_config.json").is_file() else None


def check_name(option: str, name: str | None) -> None:
    """Raise unless ``name`` is a file, a folder or can be a hub name; before a framework is imported."""
    if name is not None and not Path(name).exists() and not is_hub_name(name):
        raise PackingError(f"{option} {name}: no such folder or file, and not a hub name (`owner/name`)")


def special_tokens(tokenizer: Any) -> dict[str, Any]:
    """What a config says of its tokenizer."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {"vocab_size": len(tokenizer), **{name: getattr(tokenizer, name) for name in names}}


def _write_run(content: dict[str, Any], output: Path) -> None:
    (output / RUN_FILE).write_text(json.dumps({"crosspack": version("crosspack"), **content}, indent=1))
