"""``audit(trainer)`` for sentence-transformers' trainers, whose losses compare texts of a batch with each other.

A built trainer -> the first batch of its own dataloader -> its own ``compute_loss`` and backward, once as it is, packed
or not, and once with every text in a forward of its own, without padding -> the figures of a
:class:`~torch_backend.auditing.trainer.TrainerReport`. Then every token of one text is replaced, and what the encoder
says of the others must not move.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from packing_core.errors import PackingError
from torch_backend.auditing.compare import exchanged, run
from torch_backend.auditing.scored import hooked, one_row_per_call
from torch_backend.auditing.trainer_batches import ONE_DOCUMENT, TrainerStep, first_of_dataloader
from torch_backend.collate import Batch
from torch_backend.hf.inputs.sentence_trainers import transformers_in
from torch_backend.hf.inputs.unpadding import LENGTHS


class EmbeddedStep(TrainerStep):
    """One batch of a trainer of sentence-transformers.

    Attributes:
        encoders: the modules of the library that run transformers models.
    """

    documents_are = "texts"
    way_out = "texts and labels that differ"

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.inputs: Batch = dict(trainer._prepare_inputs(first_of_dataloader(trainer)))
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
        trainer, batch = self.trainer, {k: x.clone() if isinstance(x, Tensor) else x for k, x in self.inputs.items()}
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
        spread = (values - values.mean()).abs().max()
        pairs = list(zip(before, after, strict=True))
        moves = torch.cat([(y - x).abs().amax(1) / spread for (_, x), (_, y) in pairs])
        replaced = torch.cat([(ids != others).any(1) for (ids, _), (others, _) in pairs])  # in several calls, perhaps
        if replaced.all():
            raise PackingError(ONE_DOCUMENT)
        leak, moved = float(moves[~replaced].max()), float(moves[replaced].min())
        return {"documents": len(moves), "rows": rows, "targets": len(moves), "leak": leak, "moved": moved}

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

        handles = [
            handle
            for encoder in self.encoders
            for handle in (
                encoder.register_forward_pre_hook(before),
                encoder.register_forward_hook(after),
                encoder.model.get_input_embeddings().register_forward_pre_hook(row),
            )
        ]
        with hooked(*handles):
            self._loss()
        return texts, sum(rows)
