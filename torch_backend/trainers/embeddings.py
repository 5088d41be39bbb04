"""``enable_packing`` for sentence-transformers' trainers of embeddings, sparse and late ones among them, and rerankers.

A built trainer -> its transformers models are patched, and all their padded calls run packed, those of evaluators and
``encode`` among them (:mod:`torch_backend.hf.unpadding`) -> where a loss calls the model on each column of a
batch (anchor, positive, negatives), the first of these calls runs all columns as one row (:class:`ColumnRows`). Pooling
and the modules behind it, losses, samplers and the loop are the library's own. Losses that call the model on parts of a
batch, as the cached ones do, have a row for each part.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from packing_core.batches.keys import BatchKey
from packing_core.errors import UnsupportedError, UnsupportedModelError
from packing_core.extras import is_older
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.inputs.sentence_trainers import COLUMNS, PAIRS, sentence_trainer, transformers_in
from torch_backend.hf.patch import state_of
from torch_backend.hf.unpadding import LENGTHS, LengthsCollator, Padded, unpad_calls
from torch_backend.trainers.callbacks import without_waiting
from torch_backend.trainers.changes import Changes
from torch_backend.trainers.over_ranks import context_mesh
from torch_backend.trainers.port import TrainerPort
from torch_backend.trainers.preference import PreferenceStep, why_not_layers

MINIMUM = "6.2"  # of sentence-transformers
_OF_COLUMNS = ("prompt_length",)  # what pooling alone reads, of each column by itself
_OUTPUTS = ("token_embeddings", "all_layer_embeddings", "sentence_embedding")  # by an earlier call on the same column


class EmbeddingPort(TrainerPort):
    """Packing in a trainer of sentence-transformers."""

    def plan(self) -> None:
        trainer, kind = self.trainer, sentence_trainer(self.trainer)
        if kind not in (*COLUMNS, PAIRS):
            raise UnsupportedError(f"nobody tried packing in {self.name} of sentence-transformers: leave it unpacked")
        if is_older(version("sentence-transformers"), MINIMUM):
            raise UnsupportedError(f"{self.name} is packed from sentence-transformers {MINIMUM} on: upgrade it")
        if trainer.model_init is not None:
            raise UnsupportedError(
                f"train() of {self.name} makes another model by model_init, whose calls would not be packed: pass "
                "model= and enable packing again for each run"
            )
        self.modules = transformers_in(trainer.model)
        if not self.modules:
            raise UnsupportedModelError(
                f"the {type(trainer.model).__name__} of {self.name} runs no transformers model, so nothing in it is "
                "padded: leave it unpacked"
            )
        if any(expansion and not expansion["attend"] for expansion in (x.query_expansion for x in self.modules)):
            raise UnsupportedModelError(
                f"{self.name} scores tokens that extend a query and that attention leaves out, and packing would give "
                'it zeros for them: pass "attend": True in query_expansion, or leave it unpacked'
            )
        if any(type(module).__name__ == "CNN" for module in trainer.model.modules()):
            raise UnsupportedModelError(
                f"{self.name} trains convolutions over tokens, which read padding too: leave it unpacked"
            )
        self.of_modules = list({id(module.model): module.model for module in self.modules}.values())
        why_whole = "embeddings and scores are those of whole ones: leave cp_size out"
        context_mesh(trainer, lambda: why_whole, self.of_modules)
        self.check_options(has_rows=False)
        self.request.refuse(
            f"{self.name} puts the texts of each batch into one row of their length",
            way_out="leave it out, and set per_device_train_batch_size",
        )
        self.refuse_virtual_tokens()

    def install(self, changes: Changes) -> None:
        trainer = self.trainer
        self.patch(self.of_modules, changes, None)
        for model in self.of_modules:
            unpad_calls(model, always=True)
        refused = (why_not_layers(trainer) or _why_not_repeated(trainer)) if self.request.fast else "fast=False"
        rows = ColumnRows() if sentence_trainer(trainer) in COLUMNS else None
        step = PreferenceStep(self.of_modules, refused, "second route", "the trainer's own", columns=rows)
        changes.set("packed_step", step)
        changes.wrap("training_step", without_waiting(changes).step)
        for module in self.modules:
            changes.set("can_flatten_inputs", False, of=module)  # the library's own rows, under FlashAttention
        if rows is not None:
            changes.set("dispatch_batches", False, of=trainer.accelerator.dataloader_config)
            changes.set("data_collator", _ColumnLengths(trainer.data_collator))
            changes.wrap("collect_features", rows.collect_features)
            changes.wrap("compute_loss", rows.compute_loss)
            for module in self.modules:
                if module.model_forward_params is not None:
                    named = {*module.model_forward_params, BatchKey.LENGTHS}
                    changes.set("model_forward_params", named, of=module)
                changes.wrap("forward", rows.forward, module, of=module)

    @staticmethod
    def models(trainer: Any) -> list[Any]:
        return [module.model for module in transformers_in(trainer.model)]


class ColumnRows:
    """Runs the columns of a batch as one packed row where a loss calls the model on each of them.

    A column is known by its ``input_ids``. Its values per token are computed at the call of the first column, and
    wait for its own call. A call that is not like that one (without gradients, with other options) runs by itself.

    Attributes:
        columns: of the last row.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[dict[str, Any], tuple[int, ...]]] = {}
        self.outputs: dict[int, tuple[Any, dict[str, Any]]] = {}
        self.columns = 0

    def __str__(self) -> str:
        if not self.columns:
            return "no batch was trained yet whose loss calls the model on whole columns"
        return f"{self.columns} of the last batch ran as one packed row"

    def collect_features(self, stock: Any, inputs: dict[str, Any]) -> Any:
        """As ``collect_features`` of the trainer; the columns, whose lengths are known, wait for their calls."""
        lengths = {name.removesuffix(LENGTHS): inputs.pop(name) for name in list(inputs) if name.endswith(LENGTHS)}
        features, labels = stock(inputs)
        prefixes = {id(value): name.removesuffix("input_ids") for name, value in inputs.items()}
        for column in features:
            key = id(column.get("input_ids"))
            of_column = lengths.get(prefixes.get(key, ""))
            if of_column is not None and column["attention_mask"].shape == column["input_ids"].shape:
                self.waiting[key] = column, of_column
        return features, labels

    def compute_loss(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        """As ``compute_loss`` of the trainer, whose loss pads no columns to each other's width."""
        from sentence_transformers.base.losses import column_merging_disabled

        try:
            with column_merging_disabled():
                return stock(*args, **kwargs)
        finally:
            self.waiting, self.outputs = {}, {}

    def forward(self, stock: Any, module: Any, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """As ``Transformer.forward`` of sentence-transformers."""
        key, mode = id(features.get("input_ids")), (module, module.training, torch.is_grad_enabled())
        if key in self.waiting and not kwargs:
            self._run(stock, module, key, mode)
        ran_in, output = self.outputs.pop(key, (None, {}))
        if ran_in != mode or kwargs:
            output = stock({name: x for name, x in features.items() if name not in _OUTPUTS}, **kwargs)
        features.update(output)
        return features

    def _run(self, stock: Any, module: Any, first: int, mode: Any) -> None:
        """Run the columns that wait and go the way of the first one."""
        like = _constants(self.waiting[first][0])
        keys = [key for key, (column, _) in self.waiting.items() if like is not None and _constants(column) == like]
        columns = [self.waiting.pop(key) for key in keys]
        if len(columns) < 2:
            self.waiting.pop(first, None)
            return
        state = state_of(causal_lm(module.model))
        assert state is not None and state.unpadding is not None and like is not None
        placed = [state.unpadding.places(column["attention_mask"], lengths) for column, lengths in columns]
        tokens = like[1]
        row: dict[str, Any] = {
            name: torch.cat([padded.row(column[name]) for padded, (column, _) in zip(placed, columns)], 1)
            for name in tokens
        }
        row |= dict(like[0]) | {BatchKey.LENGTHS: tuple(n for padded in placed for n in padded.lengths)}
        inputs = set(row)
        output = {name: x for name, x in stock(row).items() if name not in inputs}
        ends = [0, *accumulate(len(padded.places) for padded in placed)]
        documents = [0, *accumulate(len(padded.lengths) for padded in placed)]
        parts = zip(keys, placed, pairwise(ends), pairwise(documents), strict=True)
        for key, padded, part, among in parts:
            self.outputs[key] = mode, {name: _part(x, padded, part, among) for name, x in output.items()}
        self.columns = len(keys)


class _ColumnLengths(LengthsCollator):
    """Tells the lengths of each column, to a trainer that asks its collator for the names of labels."""

    def __init__(self, collator: Any) -> None:
        super().__init__(collator)
        self.valid_label_columns = collator.valid_label_columns


def _why_not_repeated(trainer: Any) -> str | None:
    """Explains why compiled layers would not repeat the dropout of calls without gradients in those with them."""
    losses = trainer.loss.values() if isinstance(trainer.loss, dict) else [trainer.loss]
    kinds = {base.__name__ for loss in losses for module in loss.modules() for base in type(module).__mro__}
    drops = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in trainer.model.modules())
    for module in transformers_in(trainer.model):
        drops |= any("dropout" in name and bool(p) for name, p in causal_lm(module.model).config.to_dict().items())
    if drops and any(name.startswith("Cached") for name in kinds):
        return "a cached loss repeats the dropout of calls without gradients, and compiled layers may draw another"
    return None


def _constants(column: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[str, ...]] | None:
    """Returns what the tokens of a column have in common, and the names of values per token; None if it has others."""
    shape = column["input_ids"].shape
    rest = {name: x for name, x in column.items() if name not in _OF_COLUMNS}
    tokens = tuple(sorted(name for name, x in rest.items() if isinstance(x, Tensor) and x.shape == shape))
    constants = tuple(sorted((name, x) for name, x in rest.items() if name not in tokens))
    return None if any(isinstance(x, Tensor) for _, x in constants) else (constants, tokens)


def _part(x: Any, padded: Padded, tokens: tuple[int, int], documents: tuple[int, int]) -> Any:
    """Returns a column's part of an output of a row: at the places of its tokens, or for its documents."""
    if isinstance(x, tuple | list):  # of layers
        return tuple(_part(each, padded, tokens, documents) for each in x)
    if x.ndim < 3:
        return x[slice(*documents)]
    return padded.back(x[:, slice(*tokens)])
