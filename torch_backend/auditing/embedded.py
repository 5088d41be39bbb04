"""``audit(trainer)`` for sentence-transformers' trainers, whose losses compare texts of a batch with each other.

A built trainer -> the first batch of its own dataloader -> its own ``compute_loss`` and backward, once as it is, packed
or not, and once with every text in a forward of its own, without padding -> the figures of a
:class:`~torch_backend.auditing.trainer.TrainerReport`. Then every token of one text is replaced, and what the encoder
says of the others must not move.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from packing_core.errors import PackingError
from torch_backend.auditing.compare import against_truth, exchanged, run
from torch_backend.auditing.scored import divided
from torch_backend.auditing.trainer_batches import ONE_DOCUMENT, first_of_dataloader
from torch_backend.collate import Batch
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.inputs.sentence_trainers import transformers_in
from torch_backend.hf.inputs.unpadding import LENGTHS, padded_calls


class EmbeddedStep:
    """One batch of a trainer of sentence-transformers.

    Attributes:
        encoders: the modules of the library that run transformers models.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.inputs: Batch = dict(trainer._prepare_inputs(first_of_dataloader(trainer)))
        self.encoders = transformers_in(trainer.model)

    def measure(self) -> dict[str, Any]:
        """The figures of a report: what the class TrainerReport calls them."""
        with self._one_text_per_call():
            true_loss, truth = self._run(own_columns=True)
        if not any(bool(g.any()) for g in truth.values()):
            raise PackingError(
                f"{type(self.trainer).__name__}: nothing is trained in the first batch, because every gradient of its "
                "texts is 0: give it texts and labels that differ"
            )
        loss, gradients = self._run()
        _, again = self._run()
        documents, rows, leak, moved = self._probe()
        return {
            "documents": documents,
            "rows": rows,
            "targets": documents,
            "counted": None,
            "loss": abs(loss - true_loss) / abs(true_loss),
            "leak": leak,
            "moved": moved,
            **against_truth(gradients, again, truth),
        }

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

    def _probe(self) -> tuple[int, int, float, float]:
        """Returns the numbers of texts and of rows, and how far the others and the first text move when it is replaced.

        Relative to the largest deviation from the mean among the values of all texts.
        """
        (before, rows), (after, _) = self._outputs(replace=False), self._outputs(replace=True)
        values = torch.cat([x.flatten() for _, x in before])
        spread = (values - values.mean()).abs().max()
        pairs = list(zip(before, after, strict=True))
        moves = torch.cat([(y - x).abs().amax(1) / spread for (_, x), (_, y) in pairs])
        replaced = torch.cat([(ids != others).any(1) for (ids, _), (others, _) in pairs])  # in several calls, perhaps
        if replaced.all():
            raise PackingError(ONE_DOCUMENT)
        return len(moves), rows, float(moves[~replaced].max()), float(moves[replaced].min())

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
        try:
            self._loss()
        finally:
            for handle in handles:
                handle.remove()
        return texts, sum(rows)

    @contextmanager
    def _one_text_per_call(self) -> Iterator[None]:
        """Inside, encoders run every row of a padded call by itself, without its padding."""
        with ExitStack() as stack:
            for model in {id(encoder.model): encoder.model for encoder in self.encoders}.values():
                stack.enter_context(padded_calls(model))
                stack.enter_context(divided(causal_lm(model)))
            yield
