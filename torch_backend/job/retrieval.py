"""Embeddings, late interaction and rerankers by sentence-transformers' own trainers, for ``--task`` of these names.

A TaskJob -> the library's model -> its trainer, built of data sets, the loss that their columns call for, and an
evaluator of the held-out records -> ``enable_packing`` -> the model, written as the library loads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from packing_core.errors import CapacityError, PackingError, UnsupportedError, naming
from packing_core.extras import require
from torch_backend.auditing.model import AuditReport, verify
from torch_backend.hf.anatomy.structure import with_values
from torch_backend.job.kinds import Records, TaskKind, none_of, task_arguments
from torch_backend.job.models import with_adapters
from torch_backend.trainers.enable_packing import disable_packing, enable_packing

_WHOLE = 2**30  # tokens of a text that is not cut
# columns -> what their values are; the others hold texts
_VALUES: dict[str, Any] = {
    "score": float,
    "label": float,
    "labels": lambda values: list(map(float, values)),
    "documents": list,
}


def library(part: str = "") -> Any:
    """Returns sentence-transformers, or a part of it.

    Raises:
        MissingExtraError: it is not installed.
    """
    return require(f"sentence_transformers{part}", extra="retrieval", distribution="sentence-transformers")


class Retrieval(TaskKind):
    """A task of sentence-transformers."""

    fixed: ClassVar[Mapping[str, Any]] = {"remove_unused_columns": False}
    kind = ""  # the library's class of the model, by which those of its trainer are named

    def load(self) -> tuple[Any, Any]:
        """Loads the library's model, with the adapters of the options.

        Raises:
            PackingError: it cannot be loaded, or runs no transformers model; or an option has no effect.
        """
        job = self.job
        if job.tokenizer != job.model:
            raise PackingError(f"--tokenizer {job.tokenizer}: --task {job.task} reads that of --model: leave it out")
        if job.options.neftune_alpha is not None:
            raise UnsupportedError(f"--task {job.task} has no --neftune-alpha: leave it out")
        weights = {"dtype": getattr(torch, job.options.dtype), "use_safetensors": True}
        options = {"model_kwargs": weights, "trust_remote_code": job.trust_remote_code, **self.model_options()}
        torch.manual_seed(job.options.seed)
        with naming(f"--model {job.model}"):
            model = getattr(library(), self.kind)(job.model, device="cpu", **options)
        inner, tokenizer = model.transformers_model, model.tokenizer
        if inner is None:
            raise PackingError(
                f"--model {job.model} runs no transformers model, so nothing in it is padded: nothing to do"
            )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if inner.config.pad_token_id is None:  # a decoder's scores are read before the first of them
            inner.config.pad_token_id = tokenizer.pad_token_id
        if job.options.lora:
            if getattr(model[0], "model", None) is not inner:
                raise UnsupportedError(f"--lora adapts one model, and --model {job.model} routes texts to several")
            model[0].model = with_adapters(model[0].model, job.options, self.adapters)
        return model, model.processor

    def data(self) -> dict[str, Any]:
        """Returns the datasets, loss and evaluator of the trainer.

        Raises:
            PackingError: records have different columns, a text without tokens, or no two labels to tell apart.
            CapacityError: a text, or a query with its document, is longer than the model takes.
        """
        records, held_out = self._usable(self.job.records), self._usable(self.job.held_out)
        built = {"train_dataset": self.dataset(records), "loss": self.loss(records)}
        if held_out:
            built |= {"eval_dataset": self.dataset(held_out), "evaluator": self.evaluator(held_out)}
        return built

    def example(self, record: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _VALUES.get(name, str)(record[name]) for name in self.columns}

    def loss(self, records: Records) -> Any:
        """Returns the library's loss for the columns and labels."""

    def evaluator(self, records: Records) -> Any:
        """Returns the library's evaluator of held-out records; None without one."""

    def texts(self, record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yields the texts of a record as the model takes them, each with the column whose prompt it has."""
        return iter(())

    def trainer(self, folder: Path, common: Mapping[str, Any]) -> Any:
        data, kind = self.data(), getattr(library(), f"{self.kind}TrainingArguments")
        arguments = task_arguments(self.job, kind, folder, **self.fixed)
        if self.columns[-1] in ("positive", "score") and arguments.per_device_train_batch_size < 2:
            raise PackingError(
                f"--batch-size {self.job.batch_size} leaves a pair alone on its process, and the other pairs of a "
                "batch are what it is told apart from: pass at least 2 for each process, or records with a negative"
            )
        trainer = getattr(library(), f"{self.kind}Trainer")(args=arguments, **data, **common)
        if self.job.options.lora:
            # read back as PEFT writes them; the library's own trainer reads adapters under other names
            inner = trainer.model.transformers_model
            trainer._load_from_checkpoint = lambda saved: inner.load_adapter(saved, "default", is_trainable=True)
        return trainer

    def pack(self, trainer: Any, options: Mapping[str, Any]) -> AuditReport:
        report = verify(trainer.model.transformers_model, self.job.attention)
        enable_packing(trainer, **options)
        return report

    def write(self, trainer: Any) -> None:
        """Writes the model as the library loads it: with its adapters alone, unless they are merged."""
        model = disable_packing(trainer).model
        if self.job.merge_lora:
            model[0].model = model[0].model.merge_and_unload()
        model.save_pretrained(str(self.job.output), create_model_card=False)

    def prompt(self, column: str) -> str | None:
        """Returns what ``--set prompts`` puts before the texts of a column."""
        prompts = self.job.arguments.get("prompts") or {}
        return prompts if isinstance(prompts, str) else prompts.get(column)

    def longest(self, column: str) -> int:
        """Returns how many tokens of a text of a column the model takes."""
        return int(self.model.max_seq_length)

    def labels(self, records: Records) -> list[list[float]]:
        """Returns the labels of each record.

        Raises:
            PackingError: no two that are told apart differ.
        """
        name = self.columns[-1]
        labels = [_labels(record, name) for record in records]
        together = labels if name == "labels" else [[label for (label,) in labels]]  # what is told apart
        if all(len(set(compared)) < 2 for compared in together):
            raise PackingError(
                f"--task {self.job.task}: {name} is {labels[0][0]:g} throughout: pass records that differ in it"
            )
        return labels

    def _usable(self, records: Records) -> list[Mapping[str, Any]]:
        """Returns the records whose texts the model takes."""
        job, before, usable = self.job, len(self.skipped), []
        named = self.alike(records)
        for (where, record), lengths in zip(named, self._lengths([x for _, x in named]), strict=True):
            too_long = [(count, longest) for count, longest in lengths if count > longest]
            if not all(count for count, _ in lengths):
                self.skipped.append(f"{where} has a text without tokens")
                if job.on_error == "stop":
                    raise PackingError(f"{self.skipped[-1]}: leave it out, or pass --on-error skip")
            elif not too_long or job.overflow == "truncate":
                usable.append(record)
            elif job.overflow == "error":
                count, longest = max(too_long)
                raise CapacityError(
                    f"{where} has {count:,} tokens in one text and the model takes {longest:,}: pass "
                    "--overflow truncate or drop"
                )
        if records and not usable:
            raise none_of(records, self.skipped[before:])
        return usable

    def _lengths(self, records: Records) -> list[list[tuple[int, int]]]:
        """Counts the tokens of each text, as trained, with prompt and template, beside those that it may have."""
        model, lengths = self.model, [list[tuple[int, int]]() for _ in records]
        inputs: dict[str, list[tuple[int, Any]]] = defaultdict(list)
        for number, record in enumerate(records):
            for name, text in self.texts(record):
                inputs[name].append((number, text))
        limits = {name: self.longest(name) for name in inputs}
        with with_values([(model, "max_seq_length", _WHOLE)]):
            for name, numbered in inputs.items():
                for start in range(0, len(numbered), 256):
                    part = numbered[start : start + 256]
                    mask = model.preprocess([text for _, text in part], prompt=self.prompt(name))["attention_mask"]
                    for (number, _), count in zip(part, mask.sum(1).tolist(), strict=True):
                        lengths[number].append((count, limits[name]))
        return lengths


class Embeddings(Retrieval):
    """Embeddings of texts, on pairs, triplets or scores of similarity.

    Attributes:
        part: of the library, which has its losses and evaluators; their names begin with ``prefix``.
    """

    kind, part, prefix = "SentenceTransformer", ".sentence_transformer", ""
    adapters = "FEATURE_EXTRACTION"

    def load(self) -> tuple[Any, Any]:
        model, processor = super().load()
        if len(model) == 1 and getattr(model[0], "module_output_name", "") == "token_embeddings":
            raise PackingError(
                f"--model {self.job.model} has no pooling: add sentence-transformers' Pooling to its modules"
            )
        return model, processor

    def texts(self, record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        return ((name, record[name]) for name in self.columns if name != "score")

    def loss(self, records: Records) -> Any:
        losses = library(f"{self.part}.losses")
        if self.columns[-1] != "score":
            return getattr(losses, f"{self.prefix}MultipleNegativesRankingLoss")(self.model)
        self.labels(records)
        return losses.CoSENTLoss(self.model)

    def evaluator(self, records: Records) -> Any:
        """Returns the library's evaluator; anchors look for their positives among all positives and negatives."""
        evaluation = library(f"{self.part}.evaluation")
        options: dict[str, Any] = {"batch_size": self.job.batch_size, "write_csv": False}
        if self.columns[-1] == "score":
            pairs = ([record[name] for record in records] for name in self.columns)
            return evaluation.EmbeddingSimilarityEvaluator(*pairs, **options)
        relevant: dict[str, set[str]] = defaultdict(set)
        for record in records:
            relevant[record["anchor"]].add(record["positive"])
        texts = {record[name]: record[name] for name in self.columns[1:] for record in records}
        queries = {anchor: anchor for anchor in relevant}
        options |= {"query_prompt": self.prompt("anchor"), "corpus_prompt": self.prompt("positive")}
        options |= {"accuracy_at_k": [1], "precision_recall_at_k": [10]}
        evaluator = getattr(evaluation, f"{self.prefix}InformationRetrievalEvaluator")
        return evaluator(queries, texts, relevant, **options)


class LateInteraction(Embeddings):
    """Embeddings of the tokens of texts, compared as ColBERT does, on pairs or triplets."""

    kind, part, prefix = "MultiVectorEncoder", ".multi_vector_encoder", "MultiVector"

    def load(self) -> tuple[Any, Any]:
        if self.job.options.lora:  # checkpoints of adapters are read without it
            raise UnsupportedError("--task late trains a projection of tokens too, and has no --lora: leave it out")
        return super().load()

    def longest(self, column: str) -> int:
        own = self.model[0].query_length if column == "anchor" else self.model[0].document_length
        return min(super().longest(column), own or _WHOLE)


class Reranking(Retrieval):
    """Scores of documents for a query, by a ``CrossEncoder`` of one score."""

    # DDP's search for unused parameters does not find what the library's outputs use
    fixed: ClassVar[Mapping[str, Any]] = {"remove_unused_columns": False, "ddp_find_unused_parameters": False}
    kind = "CrossEncoder"
    adapters = "SEQ_CLS"

    def model_options(self) -> dict[str, Any]:
        return {"num_labels": 1}

    def texts(self, record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        return (("query", (record["query"], document)) for document in self._documents(record))

    def loss(self, records: Records) -> Any:
        """Returns the loss of the labels; a reranker of other labels than 0 to 1 gives its raw score."""
        losses, labels = library(".cross_encoder.losses"), self.labels(records)
        if self.columns[-1] == "labels":
            return losses.LambdaLoss(self.model, mini_batch_size=-1)  # one row for a batch, and one call under DDP
        if all(0 <= label <= 1 for (label,) in labels):
            return losses.BinaryCrossEntropyLoss(self.model)
        self.model.activation_fn = torch.nn.Identity()
        return losses.MSELoss(self.model)

    def evaluator(self, records: Records) -> Any:
        """Returns the library's evaluator; None if no query has documents to tell apart.

        A document is relevant to its query from the middle between the least and the greatest label on.
        """
        name = self.columns[-1]
        labels = [label for record in records for label in _labels(record, name)]
        middle = (min(labels) + max(labels)) / 2
        samples: dict[str, dict[str, Any]] = {}
        for record in records:
            sample = samples.setdefault(record["query"], {"query": record["query"], "positive": [], "negative": []})
            for document, label in zip(self._documents(record), _labels(record, name), strict=True):
                sample["positive" if label >= middle else "negative"].append(document)
        kept = [sample for sample in samples.values() if sample["positive"] and sample["negative"]]
        if not kept:
            return None
        evaluation = library(".cross_encoder.evaluation")
        return evaluation.CrossEncoderRerankingEvaluator(kept, batch_size=self.job.batch_size, write_csv=False)

    def _documents(self, record: Mapping[str, Any]) -> list[str]:
        return list(record["documents"]) if "documents" in self.columns else [record["document"]]


def _labels(record: Mapping[str, Any], column: str) -> list[float]:
    return [float(value) for value in (record[column] if column == "labels" else [record[column]])]
