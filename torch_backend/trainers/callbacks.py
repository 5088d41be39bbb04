"""Callbacks that packing adds to a trainer: its noise by document, its losses without waiting, its rows on resuming.

Transformers' loop waits for the GPU twice in a step, so the GPU runs dry while the host makes the next batch: for the
copy of each batch, which is not asked to go on beside it, and for each loss, which ``logging_nan_inf_filter`` looks at
on the host.

The loop finds its place on resuming by counting steps. Which documents a step holds follows from the data, the
capacity, the seed, the rows of a step and, because rows are dealt to ranks at equal cost, the number of ranks. Each
checkpoint notes all of this in the trainer's state, of the data a digest of documents from all over, of a stream one of
its first documents, and a run that goes on compares.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from packing_core.errors import PackingError, UnsupportedError, plural
from packing_core.extras import require
from torch_backend.hf.anatomy.random_draws import NEFTUNE
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.entry import current_forward
from torch_backend.trainers.changes import Changes
from torch_backend.trainers.epoch_rows import EpochRows, RowStream

require("transformers", extra="hf")

from transformers import TrainerCallback  # noqa: E402

logger = logging.getLogger(__name__)

_NOTE = "crosspack.rows"  # in the trainer's state, beside the states of callbacks


class DocumentNoise(TrainerCallback):
    """Adds NEFTune's noise to the embeddings of a patched model while a trainer trains.

    The noise of Jain et al. (https://arxiv.org/abs/2310.05914) is uniform up to ``alpha / sqrt(L * D)`` for a sequence
    of L embeddings of D channels. Transformers takes L from the shape of a batch, which packed is the length of a row.
    """

    def __init__(self, model: nn.Module, alpha: float) -> None:
        self.root = causal_lm(model)
        self.alpha = alpha
        self._hook: Any = None

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.root = self.root if model is None else causal_lm(model)  # model_init may have made another one
        embedding = self.root.get_input_embeddings()
        self._hook = embedding.register_forward_hook(self._add)
        setattr(embedding, NEFTUNE, float(self.alpha))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._hook.remove()
        delattr(self.root.get_input_embeddings(), NEFTUNE)

    def _add(self, module: nn.Module, _: Any, embedded: Tensor) -> Tensor:
        """The embeddings [B, S, D] with noise, in training."""
        if not module.training:
            return embedded
        forward = current_forward()
        rows, tokens, channels = embedded.shape
        if forward is None:
            lengths = torch.full((rows, tokens), tokens, device=embedded.device)
        else:
            segments = forward.segments
            lengths = segments.cu_seqlens.diff()[segments.seq_idx].to(embedded.device).view(rows, tokens)
        size = self.alpha / (lengths * channels).sqrt()
        return embedded + torch.empty_like(embedded).uniform_(-1, 1) * size[..., None].to(embedded.dtype)


def add_noise_by_document(changes: Changes) -> None:
    """Let a trainer's NEFTune follow the lengths of documents."""
    trainer = changes.trainer
    if trainer.neftune_noise_alpha is not None:
        changes.add_callback(DocumentNoise(trainer.model, trainer.neftune_noise_alpha))
        changes.set("neftune_noise_alpha", None)  # or transformers would add its own


def without_waiting(changes: Changes) -> LossFilter:
    """Let a trainer queue its steps ahead of the GPU; losses, logs and updates stay what they are."""
    trainer = changes.trainer
    if trainer.args.dataloader_pin_memory:  # copies of other memory wait in any case
        changes.set("non_blocking", True, of=trainer.accelerator.dataloader_config)
    losses = LossFilter(trainer)
    changes.add_callback(losses)
    return losses


class LossFilter(TrainerCallback):
    """``logging_nan_inf_filter`` on the device.

    The loop adds each step's loss to a sum for its log. With the filter, it adds the mean of that sum in place of a
    loss that is not finite. Here the loss that is handed to the loop is that mean already, and the argument is False
    for as long as the loop would look at it.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.set_aside = False

    def __call__(self, loss: Tensor) -> Tensor:
        """Returns the value that the loop adds for a step of this loss."""
        trainer = self.trainer
        total = getattr(trainer, "_tr_loss", None)  # a variable of the loop in earlier releases of transformers
        if not trainer.args.logging_nan_inf_filter or total is None or total.device != loss.device:
            return loss
        trainer.args.logging_nan_inf_filter = False
        self.set_aside = True
        mean = total / (1 + trainer.state.global_step - trainer._globalstep_last_logged)
        return torch.where(loss.isfinite(), loss, mean.to(loss.dtype))

    def step(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer.training_step``."""
        return self(step(*args, **kwargs))

    def on_pre_optimizer_step(self, args: Any, *_: Any, **__: Any) -> None:
        if self.set_aside:
            args.logging_nan_inf_filter, self.set_aside = True, False

    on_substep_end = on_pre_optimizer_step


class SameLoss(TrainerCallback):
    """Refuses to train or evaluate by another loss than the one for which packing was planned and its batches made."""

    def __init__(self, changes: Changes) -> None:
        self.trainer = changes.trainer
        changes.wrap("evaluation_loop", self.evaluation_loop)
        changes.add_callback(self)
        self.before = self._loss()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Check that the loss is the one of ``enable_packing``.

        Raises:
            PackingError: it was exchanged since.
        """
        for name, value in self._loss().items():
            if value != self.before[name]:
                raise PackingError(f"{name} was exchanged after enable_packing(trainer): call it again")

    def evaluation_loop(self, loop: Any, *args: Any, **options: Any) -> Any:
        """As ``Trainer.evaluation_loop``."""
        self.on_step_begin()
        return loop(*args, **options)

    def _loss(self) -> dict[str, Any]:
        """Returns what packing is planned by: what computes the loss, and whether there are functions that it asks."""
        functions = ("compute_loss_func", "label_smoother")
        there = {name: getattr(self.trainer, name, None) is not None for name in functions}
        return {"compute_loss": self.trainer.compute_loss, **there}


class SameRows(TrainerCallback):
    """Notes in every checkpoint what decides the rows of each step, and checks it on resuming.

    ``ignore_data_skip=True`` begins the data anew and compares nothing.
    """

    def __init__(self, rows: EpochRows | RowStream) -> None:
        self.rows = rows

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        """
        Raises:
            UnsupportedError: the run would go on inside an epoch whose first steps held other rows than here.
        """
        here = self._note(args, train_dataloader)
        saved = state.stateful_callbacks.get(_NOTE, {}).get("attributes", {})
        if "rows" not in saved and saved.get("ranks", here["ranks"]) != here["ranks"]:
            saved = {"rows": None, **saved}  # an older note
        skips_data = not getattr(args, "ignore_data_skip", False)
        if state.global_step and not saved and skips_data:
            logger.warning(
                "the checkpoint does not name its rows, as that of a run without packing: its %s are taken for steps "
                "of these rows, so some documents of the epoch may be trained twice and others not at all. "
                "ignore_data_skip=True begins the data anew",
                plural(state.global_step, "step"),
            )
        before = {**here, **saved}
        inside = state.global_step % before["steps"] if before["steps"] else state.global_step
        same_steps = before["steps"] == here["steps"]
        same_rows = all(before[name] == here[name] for name in ("rows", "rows_per_step", "documents"))
        if state.global_step and skips_data and not same_rows and (inside or not same_steps):
            raise UnsupportedError(_refusal(before, here, inside, between=same_steps and here["steps"] > 0))
        state.stateful_callbacks[_NOTE] = {"args": {}, "attributes": here}
        if isinstance(self.rows, RowStream):
            self.rows.resumed_in = saved.get("epoch", 0) if skips_data else 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if isinstance(self.rows, RowStream):  # before a checkpoint of this step is saved
            state.stateful_callbacks[_NOTE]["attributes"]["epoch"] = self.rows.number

    def _note(self, args: Any, loader: Any) -> dict[str, Any]:
        """Returns the settings that decide the rows of each step; an epoch of a stream has 0 ``steps``, for unknown."""
        epochs = isinstance(self.rows, EpochRows)
        accumulated, ranks = args.gradient_accumulation_steps, getattr(self.rows, "ranks", args.world_size)
        return {
            "ranks": ranks,
            "capacity": self.rows.rule.capacity,
            "rows_per_step": args.train_batch_size * accumulated * ranks,
            "steps": max(-(-len(loader) // accumulated), 1) if epochs else 0,
            "rows": self.rows.identity,
            "documents": self.rows.digest,
        }


def _refusal(before: dict[str, Any], here: dict[str, Any], inside: int, *, between: bool) -> str:
    if before["capacity"] != here["capacity"]:
        was = f"rows hold {plural(before['capacity'], 'token')}"
        now, way = f"rows of {here['capacity']:,}", f"with capacity={before['capacity']}"
    elif before["ranks"] != here["ranks"]:
        was = f"rows were dealt to {plural(before['ranks'], 'rank')}"
        now, way = plural(here["ranks"], "rank"), f"on {plural(before['ranks'], 'rank')}"
    elif before["rows_per_step"] != here["rows_per_step"]:
        was = f"steps hold {plural(before['rows_per_step'], 'row')}"
        now, way = f"steps of {here['rows_per_step']:,}", "with the batch size and accumulation that it had"
    elif before["documents"] != here["documents"]:
        was = "rows hold other documents, or in another order"
        now, way = "those of this run", "with the data that it had, in the same order"
    else:
        was = "rows are of other data or options"
        now, way = "those of this run", "with the data, seed and options that it had"
    place = f"{plural(inside, 'step')} into" if inside else "at the end of"
    return (
        f"the checkpoint is {place} an epoch whose {was}, and {now} would train some documents of it twice and others "
        f"not at all: resume {way}" + (", or from a checkpoint between two epochs" if between else "")
    )
