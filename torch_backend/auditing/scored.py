"""``audit(trainer)`` for trainers whose loss reads each document: TRL's (DPO, KTO, rewards, GRPO, RLOO) and embeddings.

A built trainer -> a batch of its own dataloader, with completions that it generates itself -> its own
``compute_loss`` and backward, once as it is, patched or not, and once with every row of every padded call in a forward
of its own, without padding -> the figures of a :class:`~torch_backend.auditing.trainer.TrainerReport`. Then every token
of one document is replaced, and what the model says of the others must not move. Nothing is changed in the trainer.
Losses of sentence-transformers compare the texts of a batch with each other: each runs alone in an encoder.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from packing_core.batches.keys import BatchKey
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import UnsupportedError
from torch_backend.auditing.compare import averaged, exchanged, run
from torch_backend.auditing.trainer_batches import (
    TrainerStep,
    batches,
    images_of_rows,
    is_placeholder,
)
from torch_backend.collate import Batch
from torch_backend.collate.image_tensors import Images
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.inputs.padded_images import image_keys
from torch_backend.hf.inputs.sentence_trainers import transformers_in
from torch_backend.hf.inputs.trl_trainers import generates
from torch_backend.hf.patch import context_of
from torch_backend.hf.unpadding import IDS, LENGTHS, Padded, lengths_of, padded_calls

SMALLEST_LOSS = 1.0  # a smaller loss is compared with this much: advantages, whose mean is 0, cancel in it
_MARKS = ("position_ids", *BatchKey.ALL)
_ROWS = "input_ids"
_HIDDEN = ("last_hidden_state", "hidden_states")  # outputs per token, whatever the head


class ScoredStep(TrainerStep):
    """One batch of a trainer whose loss reads each document.

    Attributes:
        calls: of the model in ``compute_loss``; rows: of the first one, as its decoder saw them.
    """

    smallest_loss = SMALLEST_LOSS
    way_out = ": give it answers that differ"
    at_most = 8  # which a policy trainer completes

    def __init__(self, trainer: Any, tolerance: float, batch: Batch) -> None:
        super().__init__(trainer, tolerance, batch)
        self.root = causal_lm(trainer.model)
        self.calls: list[Batch] = []
        self.rows = 0

    @classmethod
    def steps(cls, trainer: Any, tolerance: float) -> Iterator[ScoredStep]:
        """Yields the batches that reach ``compute_loss``; where all rewards are equal, with unequal advantages."""
        trainer.state, trainer._logs = copy.deepcopy(trainer.state), copy.deepcopy(getattr(trainer, "_logs", None))
        for batch in batches(trainer):
            if generates(trainer):
                trainer._buffered_inputs, trainer.current_gradient_accumulation_steps = None, 1
            inputs = dict(trainer._prepare_inputs(batch))
            advantages = inputs.get("advantages")
            if advantages is not None and not bool(advantages.any()):
                inputs["advantages"] = torch.linspace(-1, 1, len(advantages), device=advantages.device)
            yield cls(trainer, tolerance, inputs)

    def alone(self) -> tuple[float, dict[str, Tensor]]:
        models = self.trainer.model, getattr(self.trainer, "ref_model", None)
        with one_row_per_call(model for model in models if model is not None):
            return self._run()

    def packed(self) -> tuple[float, dict[str, Tensor]]:
        def call(model: nn.Module, args: tuple[Any, ...], kwargs: Batch) -> None:
            self.calls.append(dict(kwargs))

        def rows(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self.rows = self.rows or (len(args[0]) if args[0].ndim > 1 else 1)

        with (
            self.trainer.model.register_forward_pre_hook(call, with_kwargs=True, prepend=True),
            self.root.get_input_embeddings().register_forward_pre_hook(rows),
        ):
            return self._run()

    def compared(self, packed: dict[str, Tensor], again: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, Any]:
        figures = super().compared(packed, again, truth)
        if max(figures["gradients"], 1 - figures["cosine"]) > self.tolerance and self._cancel(truth, packed):
            figures |= {"gradients": 0.0, "cosine": 1.0}  # the rounding of terms that cancel, as of two equal answers
        return figures

    def _run(self) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients of the trainer's own loss."""
        trainer, model = self.trainer, self.trainer.model
        with trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
            loss: Tensor = trainer.compute_loss(model, dict(self.batch))
        found, context = run(model, (), loss), context_of(model)
        return float(found.loss), found.gradients if context is None else averaged(model, found.gradients, context)

    def _cancel(self, *gradients: dict[str, Tensor]) -> bool:
        """Returns whether gradients are nothing beside those of the same answers under unequal weights."""

        def weigh(model: nn.Module, args: Any, output: Any) -> None:
            for x in output.values():
                if isinstance(x, Tensor) and x.requires_grad and x.ndim:
                    weights = torch.linspace(0.5, 1.5, len(x), device=x.device)
                    x.register_hook(lambda g, w=weights: g * w.view(-1, *[1] * (g.ndim - 1)).to(g.dtype))

        with self.trainer.model.register_forward_hook(weigh):
            _, terms = self.alone()
        *largest, of_terms = (max(float(g.abs().max()) for g in each.values()) for each in (*gradients, terms))
        return max(largest) <= self.tolerance * of_terms

    def probe(self) -> dict[str, Any]:
        """Moves of scores are relative to their largest deviation from the mean among all documents.

        The document that is replaced is the one that moves most among those that others follow, because what leaks in a
        packed row leaks forward.
        """
        call = self.calls[0]
        ids, mask, labels = call[_ROWS], call["attention_mask"].bool(), call.get("labels")
        if call.get("pixel_values") is not None:
            mask = mask & ~is_placeholder(self.root, ids)
        other = torch.where(mask, exchanged(ids, torch.unique(ids[mask])), ids)
        before = self._answers(call)
        others = {name: x for name, x in call.items() if name != IDS}  # they are those of the collator
        scored = torch.ones_like(before, dtype=torch.bool) if labels is None else labels[:, 1:] != IGNORE_INDEX
        spread = (before[scored] - before[scored].mean()).abs().max()

        def moves(replaced: Tensor) -> Tensor:
            """Returns how far each document [B] moves when those that ``replaced`` [B] marks are replaced."""
            after = self._answers({**others, _ROWS: torch.where(replaced[:, None], other, ids)})
            return (after - before).masked_fill(~scored, 0.0).abs().amax(1) / spread

        everyone = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        changed, isolated = torch.zeros_like(everyone), len(ids) == 1
        changed[moves(everyone)[: None if isolated else -1].argmax()] = True
        moved = moves(changed)
        targets = len(ids) if labels is None else int((labels[:, 1:] != IGNORE_INDEX).sum())
        counts = {"documents": len(ids), "rows": self.rows, "targets": targets, "isolated": isolated}
        return counts | {"leak": 0.0 if isolated else float(moved[~changed].max()), "moved": float(moved[changed])}

    def _answers(self, call: Batch) -> Tensor:
        """Returns the model's scores of each document: log-probabilities [B, S - 1], or scores [B, 1]."""
        with torch.no_grad(), self.trainer.compute_loss_context_manager(), self.trainer.accelerator.autocast():
            output = self.trainer.model(**call)
        scored: Tensor | None = getattr(output, "log_probs", None)
        return (output.logits if scored is None else scored).detach().float()


@contextmanager
def one_row_per_call(models: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, models run every row of a padded call by itself, without its padding."""
    with ExitStack() as stack:
        for model in {id(model): model for model in models}.values():
            stack.enter_context(padded_calls(model))
            stack.enter_context(divided(causal_lm(model)))
        yield


@contextmanager
def divided(root: Any) -> Iterator[None]:
    """Inside, a transformers model runs the rows of a padded call one by one."""
    stock, own = root.forward, "forward" in root.__dict__

    def forward(*args: Any, **kwargs: Any) -> Any:
        ids, mask = kwargs.get(_ROWS), kwargs.get("attention_mask")
        if any(kwargs.get(mark) is not None for mark in _MARKS):
            raise UnsupportedError(
                f"the trainer calls {type(root).__name__} on rows that it has packed itself, not on padded answers: "
                "the audit cannot tell which tokens its loss takes for one answer"
            )
        if args or ids is None or mask is None or mask.shape != ids.shape or kwargs.get("past_key_values") is not None:
            return stock(*args, **kwargs)
        for name in (LENGTHS, IDS):  # of all rows together
            kwargs.pop(name, None)
        per_token = root.get_output_embeddings() is not None
        images = images_of_rows(root, kwargs)
        rest = {name: x for name, x in kwargs.items() if name not in image_keys(root)}
        outputs = [_alone(stock, rest, row, per_token, images[row]) for row in range(len(ids))]
        joined = {name: _joined([output[name] for output in outputs]) for name in outputs[0]}
        return type(outputs[0])(**{name: x for name, x in joined.items() if x is not None})

    root.forward = forward
    try:
        yield
    finally:
        if own:
            root.forward = stock
        else:
            del root.forward


def _joined(values: list[Any]) -> Any:
    """Returns outputs of single rows as those of a batch; None for what is none of a row."""
    if isinstance(values[0], tuple):  # of layers
        return tuple(map(_joined, map(list, zip(*values, strict=True))))
    return torch.cat(values) if isinstance(values[0], Tensor) and values[0].ndim else None


def _alone(stock: Any, kwargs: Batch, row: int, per_token: bool, images: Images) -> Any:
    """One row of a call without its padding; outputs per token, if the model has such, where the row has them."""
    mask = kwargs["attention_mask"][row : row + 1]
    padded = Padded.of(mask, lengths_of(mask))
    alone = {
        name: padded.row(x[row : row + 1]) if isinstance(x, Tensor) and x.shape[:2] == kwargs[_ROWS].shape else x
        for name, x in kwargs.items()
        if name not in ("attention_mask", "margin")
    }
    output = stock(**alone, **images)
    for name, value in output.items():
        if not (per_token or name in _HIDDEN):
            continue
        if (returned := padded.returned(name, value)) is not value:
            output[name] = returned
    return output


class EmbeddedStep(TrainerStep):
    """One batch of a trainer of sentence-transformers.

    Attributes:
        encoders: the modules of the library that run transformers models.
    """

    unit = "texts"
    way_out = ": give it texts and labels that differ"

    def __init__(self, trainer: Any, tolerance: float, batch: Batch) -> None:
        super().__init__(trainer, tolerance, batch)
        self.encoders = transformers_in(trainer.model)

    def alone(self) -> tuple[float, dict[str, Tensor]]:
        with one_row_per_call(encoder.model for encoder in self.encoders):
            return self._run(own_columns=True)

    def packed(self) -> tuple[float, dict[str, Tensor]]:
        return self._run()

    def _loss(self, *, own_columns: bool = False) -> Tensor:
        """The trainer's own loss, with the same random numbers each time.

        Args:
            own_columns: each column by itself, of which the lengths are left out.
        """
        torch.manual_seed(0)
        before = random.getstate()
        random.seed(0)
        trainer, batch = self.trainer, {k: x.clone() if isinstance(x, Tensor) else x for k, x in self.batch.items()}
        if own_columns:
            batch = {name: x for name, x in batch.items() if not name.endswith(LENGTHS)}
        try:
            with trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
                loss: Tensor = trainer.compute_loss(trainer.model, batch)
        finally:
            random.setstate(before)
        return loss

    def _run(self, *, own_columns: bool = False) -> tuple[float, dict[str, Tensor]]:
        result = run(self.trainer.model, (), self._loss(own_columns=own_columns))
        return float(result.loss), result.gradients

    def probe(self) -> dict[str, Any]:
        """Moves are relative to the largest deviation from the mean among the values of all texts."""
        (before, rows), (after, _) = self._outputs(replace=False), self._outputs(replace=True)
        values = torch.cat([x.flatten() for _, x in before])
        spread = (values - values.mean() if len(values) > 1 else values).abs().max()
        pairs = list(zip(before, after, strict=True))
        moves = torch.cat([(y - x).abs().amax(1) / spread for (_, x), (_, y) in pairs])
        replaced = torch.cat([(ids != others).any(1) for (ids, _), (others, _) in pairs])  # in several calls, perhaps
        isolated = bool(replaced.all())
        leak, moved = 0.0 if isolated else float(moves[~replaced].max()), float(moves[replaced].min())
        counts = {"documents": len(moves), "rows": rows, "targets": len(moves), "isolated": isolated}
        return counts | {"leak": leak, "moved": moved}

    @torch.no_grad()
    def _outputs(self, *, replace: bool) -> tuple[list[tuple[Tensor, Tensor]], int]:
        """Tokens [B, S] and values [B, N] of the texts of each call of an encoder, and how many rows ran.

        Args:
            replace: every token of the first text of the first call, in the trainer's own tensors.
        """
        texts, rows = list[tuple[Tensor, Tensor]](), list[int]()

        def before(encoder: Any, args: tuple[Any, ...]) -> None:
            if replace and not texts:
                ids, real = args[0]["input_ids"], args[0]["attention_mask"].bool()
                ids[0, real[0]] = exchanged(ids[0, real[0]], torch.unique(ids[real]))

        def after(encoder: Any, args: tuple[Any, ...], output: Any) -> None:
            value, mask = output[encoder.module_output_name].float(), args[0]["attention_mask"]
            real = value * mask[..., None] if value.ndim == 3 else value
            texts.append((args[0]["input_ids"].clone(), real.flatten(1)))

        def row(embedding: Any, args: tuple[Tensor, ...]) -> None:
            rows.append(len(args[0]))

        with ExitStack() as hooks:
            for encoder in self.encoders:
                hooks.enter_context(encoder.register_forward_pre_hook(before))
                hooks.enter_context(encoder.register_forward_hook(after))
                hooks.enter_context(encoder.model.get_input_embeddings().register_forward_pre_hook(row))
            self._loss()
        return texts, sum(rows)
