"""``crosspack train``: fine-tune a causal language model on packed documents, and compare that with padding.

The options (:mod:`.trainoptions`) -> a TrainCommand (:mod:`.traincommand`), checked before any framework is imported ->
its data (:mod:`.trainruns`), printed as a plan -> a job, which the backend's trainer runs -> its result as tables, a
picture and files. The model is written by the backend, everything else of the output folder here.
"""

from __future__ import annotations

from contextlib import ExitStack

import typer
from rich.markup import escape

from crosspack.cli import launch
from crosspack.cli.console import OUT
from crosspack.cli.hub import create_repository
from crosspack.cli.traincommand import TrainCommand
from crosspack.cli.trainoptions import TrainOptions
from crosspack.cli.trainruns import Examples, Steps, report_finished

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
