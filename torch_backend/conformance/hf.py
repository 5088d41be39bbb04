"""Adapts any transformers model, collator and Trainer to a conformance backend, however packed and patched.

The model is its own oracle: packed, in the named dtype, against itself in float64 with one document per batch. Data
flows documents -> the collator -> the model, exactly as in training; only the boundaries are read off the collator's
batch, to know which logits belong to which document.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import TrainingArguments

from packing_core.batches.keys import BatchKey
from packing_core.errors import UnsupportedError
from packing_core.protocol import (
    ADAMW_EPSILON,
    Array,
    Backend,
    Batch,
    Capabilities,
    Decoder,
    Document,
    Gradients,
    require_declared,
)
from torch_backend.collate import with_boundaries


class HuggingFaceStack(Backend):
    """A model and a collator, and with ``trainer`` the class that trains them.

    Args:
        model: makes a causal language model, patched or not, without dropout and with 64 words or more; the same
            weights each time. A trainer gets one of its own, because trainers change a model's settings.
        collator: what the stack packs with: features with ``input_ids`` and ``labels`` in, the model's arguments out,
            all documents in one batch. It marks boundaries in any way that `torch_backend.with_boundaries` reads.
        trainer: ``transformers.Trainer`` or a subclass; None leaves the trainer level out.
        dtypes: the working dtypes that the stack is meant for.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        collator: Callable[[list[dict[str, list[int]]]], Mapping[str, Any]],
        *,
        trainer: Any = None,
        dtypes: tuple[str, ...] = ("float32",),
    ) -> None:
        self._make = model
        self._collator = collator
        self._trainer = trainer
        self._model = model()
        self._weights = copy.deepcopy(self._model.state_dict())
        self._device = next(self._model.parameters()).device
        config: Any = self._model.config
        self.capabilities = Capabilities(
            dtypes=dtypes,
            options=frozenset({"adamw"}),
            own_model=True,
            words=getattr(config, "vocab_size", 64),
            longest=getattr(config, "max_position_embeddings", None) or 1024,
        )
        self.description = f"{type(self._model).__name__} on {self._device}, torch {torch.__version__}"

    def collate(self, documents: Sequence[Document], capacity: int) -> Batch:
        if sum(len(document.input_ids) for document in documents) > capacity:
            raise UnsupportedError("the collator has no capacity: it makes one batch of all documents")
        native = dict(self._collator([_feature(document) for document in documents]))
        carried = with_boundaries(dict)(native)
        numbers = carried[BatchKey.NUMBERS].numpy()
        mask: Any = native.get("attention_mask")
        real = np.asarray(mask) != 0 if isinstance(mask, Tensor) and mask.ndim == 2 else np.ones(numbers.shape, bool)
        starts = real & (np.diff(numbers, axis=1, prepend=-1) != 0)
        return Batch(
            input_ids=native["input_ids"].numpy(),
            segment_ids=np.where(real, starts.cumsum(axis=1), 0),
            position_ids=np.asarray(native.get("position_ids", carried["position_ids"])),
            labels=native["labels"].numpy(),
            native=native,
        )

    def forward(self, decoder: Decoder, batch: Batch, *, dtype: str) -> Array:
        with torch.no_grad():
            return _numpy(self._run(decoder, batch, dtype).logits)

    def gradients(self, decoder: Decoder, batch: Batch, *, dtype: str) -> tuple[float, Gradients]:
        self._model.zero_grad()
        loss = self._run(decoder, batch, dtype).loss
        loss.backward()
        return loss.item(), {name: _numpy(p.grad) for name, p in self._model.named_parameters() if p.grad is not None}

    def train(
        self,
        decoder: Decoder,
        steps: Sequence[Sequence[Sequence[Document]]],
        *,
        capacity: int,
        learning_rate: float,
        dtype: str,
        optimizer: str = "sgd",
        ranks: int = 1,
    ) -> tuple[list[float], dict[str, Array]]:
        if self._trainer is None or ranks != 1:
            raise UnsupportedError("no trainer was given" if self._trainer is None else "it trains on one rank")
        if dtype not in ("float32", "float64"):
            raise UnsupportedError(f"it trains in float32, not in {dtype}")
        model = self._make().to(getattr(torch, dtype))
        model.load_state_dict(self._weights)
        losses: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            settings = TrainingArguments(
                output_dir=folder,
                max_steps=len(steps),
                per_device_train_batch_size=1,  # a microbatch is one item of the data set
                gradient_accumulation_steps=len(steps[0]),
                learning_rate=learning_rate,
                lr_scheduler_type="constant",
                optim={"sgd": "sgd", "adamw": "adamw_torch"}[optimizer],
                weight_decay=0.0,
                adam_epsilon=ADAMW_EPSILON,
                max_grad_norm=0.0,
                remove_unused_columns=False,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=self._device.type == "cpu",
            )
            trainer = _recording(self._trainer, losses)(
                model=model,
                args=settings,
                train_dataset=[[_feature(document) for document in documents] for step in steps for documents in step],
                data_collator=lambda microbatches: self._collator(microbatches[0]),
            )
            trainer.train()
        per_step = np.reshape(losses, (len(steps), -1)).sum(axis=1)
        return per_step.tolist(), {name: _numpy(p) for name, p in model.named_parameters()}

    def _run(self, decoder: Decoder, batch: Batch, dtype: str) -> Any:
        """The model's output for a batch of its own collator, with the weights that it came with."""
        config = decoder.config
        require_declared(
            self,
            dtype=dtype,
            options=["drawn_batches"] * (batch.native is None)
            + ["sliding_window"] * (config.sliding_window is not None)
            + ["dynamic_rope"] * (config.dynamic_rope_factor is not None),
        )
        self._model.to(getattr(torch, dtype)).load_state_dict(self._weights)
        inputs = {name: x.to(self._device) if isinstance(x, Tensor) else x for name, x in batch.native.items()}
        return self._model.train()(**inputs)


def _recording(trainer: Any, losses: list[float]) -> Any:
    """The trainer, with every microbatch's share of its step's mean loss kept, and with the data in order."""

    class Recording(trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    return Recording


def _feature(document: Document) -> dict[str, list[int]]:
    return {"input_ids": document.input_ids.tolist(), "labels": document.labels.tolist()}


def _numpy(x: Tensor) -> Array:
    return x.detach().double().cpu().numpy()
