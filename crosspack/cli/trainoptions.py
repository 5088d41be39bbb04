"""The options of ``crosspack train``, in groups: what is trained, how, where, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from crosspack.cli.options import DataOptions, ModelOptions, OrderOptions, TokenOptions, Workers, filled
from crosspack.cli.records import read_columns
from crosspack.cli.reporting import Service
from crosspack.cli.runfile import take_file
from packing_core.training.job import Strategy
from packing_core.training.options import Optimizer, Options
from packing_core.training.rates import Decay
from packing_core.training.tasks import TaskName


@dataclass(frozen=True)
class RecordOptions(DataOptions, TokenOptions):
    """Selects the records that are trained, and what is read of them."""

    column: Annotated[
        list[str] | None,
        typer.Option(help="The column that holds what is read as NAME: prompt=question. Once for each."),
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Train on the first documents alone, as many as this.")] = (
        None
    )
    workers: Workers = None
    on_error: Annotated[
        Literal["stop", "skip"], typer.Option(help="A record that cannot be used: stop, or leave it out.")
    ] = "stop"

    @property
    def named_columns(self) -> tuple[tuple[str, str], ...]:
        return read_columns(self.column, ("text", "prompt", "completion", "messages", "input_ids"))


@dataclass(frozen=True)
class EvaluationOptions:
    """Says what is evaluated, when, and what follows from it."""

    eval_data: Annotated[
        list[str] | None, typer.Option(help="Documents to evaluate on, packed: whatever --data takes.")
    ] = None
    eval_split: Annotated[
        str | None, typer.Option(help="Which split of --eval-data. Default: validation, where it has splits.")
    ] = None
    eval_every: Annotated[int, typer.Option(min=0, help="Steps between evaluations; 0 for one at the end.")] = 0
    keep_best: Annotated[
        bool, typer.Option("--keep-best", help="Write the weights with the lowest evaluation loss, not the last ones.")
    ] = False
    early_stopping: Annotated[
        int, typer.Option(min=0, help="End after so many evaluations without a lower loss; 0 for never.")
    ] = 0
    sample: Annotated[
        list[str] | None, typer.Option(help="A prompt that the model continues after each evaluation, and at the end.")
    ] = None


@dataclass(frozen=True)
class StepOptions:
    """Says what an optimizer step holds, how many there are, and how they are computed."""

    rows_per_step: Annotated[int, typer.Option(min=1, help="Packed rows in an optimizer step.")] = 4
    batch_size: Annotated[
        int, typer.Option(min=1, help="Examples, or rows of --task classify and mlm, in a step of another --task.")
    ] = 8
    padded_batch: Annotated[int, typer.Option(min=1, help="Documents in a padded batch of --compare.")] = 8
    epochs: Annotated[int, typer.Option(min=1)] = 1
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after this many steps. Default: all epochs.")] = None
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Compute activations again in the backward pass.")
    ] = False
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile layers. Default: where it is possible.")
    ] = None
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Repeat to the bit on a GPU too.")] = False


@dataclass(frozen=True)
class LossOptions:
    """Decides the losses, beside the data and the model: :class:`packing_core.training.options.Options`."""

    lr: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Peak rate of AdamW. Default: 2e-5, 2e-4 with --lora, 3e-3 for random weights.",
        ),
    ] = None
    decay: Annotated[Decay, typer.Option(help="Learning-rate schedule, by transformers' name.")] = "cosine"
    optim: Annotated[Optimizer | None, typer.Option(help="Optimizer, by transformers' name. Default: fused AdamW.")] = (
        None
    )
    neftune_alpha: Annotated[
        float | None, typer.Option(min=0.0, help="NEFTune: noise on embeddings in training, of this size.")
    ] = None
    warmup: Annotated[float, typer.Option(min=0.0, max=1.0, help="Fraction of steps used for warm-up.")] = 0.05
    weight_decay: Annotated[float, typer.Option(min=0.0)] = 0.0
    clip: Annotated[float, typer.Option(min=0.0, help="Largest gradient norm; 0 leaves the gradient.")] = 1.0
    precision: Annotated[
        Literal["float32", "bfloat16", "float8"] | None, typer.Option(help="Of the forward pass. Default: as --dtype.")
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of the weights and of the optimizer's states.")
    ] = "float32"
    master_weights: Annotated[
        bool, typer.Option("--master-weights", help="Float32 weights and states in the optimizer of bfloat16 weights.")
    ] = False
    lora: Annotated[int, typer.Option(min=0, help="Train low-rank adapters of this rank; 0 trains the weights.")] = 0
    lora_alpha: Annotated[
        float | None, typer.Option(min=0.0, help="Scale of the adapters, times their rank. Default: twice the rank.")
    ] = None
    lora_dropout: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Share of the adapters' inputs that is dropped.")
    ] = None
    lora_targets: Annotated[
        str | None, typer.Option(help="Layers with adapters: q_proj,v_proj. Default: all but the output layer.")
    ] = None
    set: Annotated[
        list[str] | None, typer.Option(help="A further argument of the --task's trainer: beta=0.2, adam_beta2=0.95.")
    ] = None

    def losses(self, seed: int, *, pretrained: bool, settings: Mapping[str, Any]) -> Options:
        """Returns the options of a job; a rate and a precision that are not named follow from what is trained.

        Args:
            settings: attributes of Options that ``--set`` names, in place of those here.
        """
        usual = 2e-4 if self.lora else 2e-5 if pretrained else 3e-3
        rate, precision = usual if self.lr is None else self.lr, self.precision or self.dtype
        return filled(Options, self, lr=rate, precision=precision, seed=seed, **settings)


@dataclass(frozen=True)
class PlaceOptions:
    """Selects a backend's trainer, its processes and devices."""

    backend: Annotated[str, typer.Option(help="Which installed trainer runs it: torch, jax, ...")] = "torch"
    nproc: Annotated[int, typer.Option(min=1, help="Processes on this machine that train together.")] = 1
    strategy: Annotated[
        Strategy,
        typer.Option(help="Of several processes: all weights on each, sharded by FSDP2, or by DeepSpeed's ZeRO."),
    ] = "ddp"
    context_parallel: Annotated[
        int,
        typer.Option(min=1, help="Processes over which the documents of each row are cut, for rows too long for one."),
    ] = 1
    mesh: Annotated[
        str | None, typer.Option(help="Devices of one process: data=2,fsdp=4 (cuts weights), tensor=2, context=2.")
    ] = None


@dataclass(frozen=True)
class ResultOptions:
    """Says what becomes of the run: the output folder, checkpoints, and where figures go."""

    output: Annotated[Path | None, typer.Option(help="Folder for the model, the picture and checkpoints.")] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that --output holds.")] = False
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint in --output.")] = False
    save_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints; 0 for none.")] = 0
    keep_checkpoints: Annotated[int, typer.Option(min=1, help="How many of the newest checkpoints stay.")] = 1
    compare: Annotated[
        bool, typer.Option("--compare", help="Train padded too, from the same weights on the same documents per step.")
    ] = False
    merge_lora: Annotated[bool, typer.Option("--merge-lora", help="Write weights with the adapters added.")] = False
    push_to_hub: Annotated[
        str | None, typer.Option(help="Upload --output to the hub at the end, under this name: owner/name.")
    ] = None
    report_to: Annotated[Service, typer.Option(help="Where figures of each step go.")] = "none"


@dataclass(frozen=True)
class TrainOptions(
    ResultOptions,
    PlaceOptions,
    LossOptions,
    StepOptions,
    EvaluationOptions,
    OrderOptions,
    RecordOptions,
    ModelOptions,
):
    """All options of ``crosspack train``."""

    config: Annotated[
        Path | None,
        typer.Option(
            is_eager=True,
            callback=take_file,
            help="A YAML file of options, `run.yaml` of an earlier run for example. The command line wins over it.",
        ),
    ] = None
    task: Annotated[
        TaskName,
        typer.Option(
            help="Next tokens of documents and answers, preferences, rewards, a policy, classes, masked tokens, pairs."
        ),
    ] = "sft"
    reward: Annotated[
        list[str] | None, typer.Option(help="Of --task grpo: a function that scores completions, FILE.py:NAME.")
    ] = None
