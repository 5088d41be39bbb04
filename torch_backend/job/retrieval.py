"""Embeddings and rerankers by sentence-transformers' own trainers, for ``--task embed`` and ``--task rerank``.

A TaskJob -> :func:`load`, the library's model -> :func:`parts`, what its trainer is built of: datasets, the loss that
their columns call for, and an evaluator of the held-out records -> ``enable_packing`` -> :func:`write`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from packing_core.errors import CapacityError, PackingError, UnsupportedError
from packing_core.extras import require
from packing_core.training.tasks import TASKS, TaskJob
from torch_backend.collate.vision import place_of
from torch_backend.job.models import naming, with_adapters

RETRIEVAL = ("embed", "rerank")
_WHOLE = 2**30  # tokens of a text that is not cut


def library(part: str = "") -> Any:
    """Returns sentence-transformers, or a part of it.

    Raises:
        MissingExtraError: it is not installed.
    """
    return require(f"sentence_transformers{part}", extra="retrieval", distribution="sentence-transformers")


def load(job: TaskJob) -> Any:
    """Loads a ``SentenceTransformer`` or a ``CrossEncoder`` of one score, with the adapters of the options.

    Raises:
        PackingError: it cannot be loaded, runs no transformers model, or pools no tokens; or an option has no effect.
    """
    if job.tokenizer != job.model:
        raise PackingError(f"--tokenizer {job.tokenizer}: --task {job.task} reads that of --model: leave it out")
    if job.options.neftune_alpha is not None:
        raise UnsupportedError(f"--task {job.task} has no --neftune-alpha: leave it out")
    embeds = job.task == "embed"
    kind = library().SentenceTransformer if embeds else library().CrossEncoder
    dtype = getattr(torch, job.options.dtype)
    options: dict[str, Any] = {"model_kwargs": {"dtype": dtype, "use_safetensors": True}}
    torch.manual_seed(job.options.seed)
    with naming(f"--model {job.model}"):
        options |= {"trust_remote_code": job.trust_remote_code} | ({} if embeds else {"num_labels": 1})
        model = kind(job.model, device="cpu", **options)
    inner, tokenizer = model.transformers_model, model.tokenizer
    if inner is None:
        raise PackingError(f"--model {job.model} runs no transformers model, so nothing in it is padded: nothing to do")
    if embeds and len(model) == 1 and getattr(model[0], "module_output_name", "") == "token_embeddings":
        raise PackingError(f"--model {job.model} has no pooling: add sentence-transformers' Pooling to its modules")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if inner.config.pad_token_id is None:  # a decoder's scores are read before the first of them
        inner.config.pad_token_id = tokenizer.pad_token_id
    if job.options.lora:
        if getattr(model[0], "model", None) is not inner:
            raise UnsupportedError(f"--lora adapts one model, and --model {job.model} routes texts to several")
        model[0].model = with_adapters(model[0].model, job.options, "FEATURE_EXTRACTION" if embeds else "SEQ_CLS")
    return model


def parts(job: TaskJob, model: Any, skipped: list[str]) -> dict[str, Any]:
    """Returns the datasets, loss and evaluator of the job's trainer; ``skipped`` gets why records are left out.

    Raises:
        PackingError: records have different columns, a text without tokens, or no two labels to tell apart.
        CapacityError: a text, or a query with its document, is longer than the model takes.
    """
    columns = TASKS[job.task].columns_of(job.records[0], place_of(job.records[0], 0), job.task)
    records, held_out = (_usable(job, model, each, columns, skipped) for each in (job.records, job.held_out))
    built: dict[str, Any] = {
        "train_dataset": _dataset(records, columns),
        "loss": _loss(job, model, records, columns),
    }
    if held_out:
        built |= {"eval_dataset": _dataset(held_out, columns), "evaluator": _evaluator(job, held_out, columns)}
    return built


def resumes_adapters(trainer: Any) -> None:
    """Makes a trainer read adapters back as PEFT writes them; the library's own reads them under other names."""
    inner = trainer.model.transformers_model
    trainer._load_from_checkpoint = lambda folder: inner.load_adapter(folder, "default", is_trainable=True)


def write(job: TaskJob, model: Any) -> None:
    """Writes a model, unpatched, as sentence-transformers loads it: with its adapters alone, unless they are merged."""
    if job.merge_lora:
        model[0].model = model[0].model.merge_and_unload()
    model.save_pretrained(str(job.output), create_model_card=False)


def _usable(
    job: TaskJob, model: Any, records: Sequence[Mapping[str, Any]], columns: Sequence[str], skipped: list[str]
) -> list[Mapping[str, Any]]:
    """Returns the records whose texts the model takes."""
    named, usable = [], []
    for number, record in enumerate(records):
        where = place_of(record, number)
        try:
            own = TASKS[job.task].columns_of(record, where, job.task)
            if own != tuple(columns):
                raise PackingError(
                    f"{where} has {', '.join(own)}, and the first record of --data {', '.join(columns)}: give all the "
                    "same columns"
                )
        except PackingError as error:
            if job.on_error == "stop":
                raise
            skipped.append(str(error))
            continue
        named.append((where, record))
    for (where, record), lengths in zip(named, _lengths(job, model, [x for _, x in named], columns), strict=True):
        if not min(lengths):
            skipped.append(f"{where} has a text without tokens: leave it out, or pass --on-error skip")
            if job.on_error == "stop":
                raise PackingError(skipped[-1])
        elif max(lengths) <= model.max_seq_length or job.overflow == "truncate":
            usable.append(record)
        elif job.overflow == "error":
            raise CapacityError(
                f"{where} has {max(lengths):,} tokens in one text and the model takes {model.max_seq_length:,}: pass "
                "--overflow truncate or drop"
            )
    if records and not usable:
        raise PackingError(f"none of the {len(records):,} records can be used{f': {skipped[0]}' if skipped else ''}")
    return usable


def _lengths(job: TaskJob, model: Any, records: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[list[int]]:
    """Counts the tokens of each text of each record, or query with document: as trained, with prompt and template."""
    lengths: list[list[int]] = [[] for _ in records]
    inputs: dict[str, list[tuple[int, Any]]] = defaultdict(list)
    for number, record in enumerate(records):
        for name in columns if job.task == "embed" else ():
            inputs[name].append((number, record[name]))
        for document in _documents(record, columns) if job.task == "rerank" else ():
            inputs["query"].append((number, (record["query"], document)))
    inputs.pop("score", None)
    longest, model.max_seq_length = model.max_seq_length, _WHOLE
    for name, numbered in inputs.items():
        for start in range(0, len(numbered), 256):
            part = numbered[start : start + 256]
            mask = model.preprocess([text for _, text in part], prompt=_prompt(job, name))["attention_mask"]
            for (number, _), count in zip(part, mask.sum(1).tolist(), strict=True):
                lengths[number].append(count)
    model.max_seq_length = longest
    return lengths


def _prompt(job: TaskJob, column: str) -> str | None:
    """Returns what ``--set prompts`` puts before the texts of a column."""
    prompts = job.arguments.get("prompts") or {}
    return prompts if isinstance(prompts, str) else prompts.get(column)


def _documents(record: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    return list(record["documents"]) if "documents" in columns else [record["document"]]


def _labels(record: Mapping[str, Any], column: str) -> list[float]:
    value = record[column]
    return [float(each) for each in (value if column == "labels" else [value])]


def _dataset(records: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Any:
    kinds: dict[str, Any] = {"score": float, "label": float, "labels": lambda x: list(map(float, x)), "documents": list}
    rows = [{name: kinds.get(name, str)(record[name]) for name in columns} for record in records]
    return require("datasets", extra="hf").Dataset.from_list(rows)


def _loss(job: TaskJob, model: Any, records: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Any:
    """Returns the library's loss for columns and labels; a reranker of other labels than 0 to 1 gives its raw score."""
    losses, of_pairs = library(".sentence_transformer.losses"), library(".cross_encoder.losses")
    name = columns[-1]
    if name in ("positive", "negative"):
        return losses.MultipleNegativesRankingLoss(model)
    labels = [_labels(record, name) for record in records]
    together = labels if name == "labels" else [[label for (label,) in labels]]  # what is told apart
    if all(len(set(each)) < 2 for each in together):
        raise PackingError(f"--task {job.task}: {name} is {labels[0][0]:g} throughout: pass records that differ in it")
    if name == "score":
        return losses.CoSENTLoss(model)
    if name == "labels":
        return of_pairs.LambdaLoss(model, mini_batch_size=-1)  # one row for a batch, and one call under DDP
    if all(0 <= label <= 1 for (label,) in labels):
        return of_pairs.BinaryCrossEntropyLoss(model)
    model.activation_fn = torch.nn.Identity()
    return of_pairs.MSELoss(model)


def _evaluator(job: TaskJob, records: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Any:
    """Returns the library's evaluator of held-out records; None if no query has documents to tell apart.

    Anchors look for their positives among the positives and negatives of all records. A document is relevant to its
    query from the middle between the least and the greatest label on.
    """
    evaluation = library(".sentence_transformer.evaluation")
    options: dict[str, Any] = {"batch_size": job.batch_size, "write_csv": False}
    if columns[-1] == "score":
        pairs = ([record[name] for record in records] for name in columns)
        return evaluation.EmbeddingSimilarityEvaluator(*pairs, **options)
    if job.task == "embed":
        relevant: dict[str, set[str]] = defaultdict(set)
        for record in records:
            relevant[record["anchor"]].add(record["positive"])
        texts = {record[name]: record[name] for name in columns[1:] for record in records}
        queries = {anchor: anchor for anchor in relevant}
        options |= {"query_prompt": _prompt(job, "anchor"), "corpus_prompt": _prompt(job, "positive")}
        options |= {"accuracy_at_k": [1], "precision_recall_at_k": [10]}
        return evaluation.InformationRetrievalEvaluator(queries, texts, relevant, **options)
    labels = [label for record in records for label in _labels(record, columns[-1])]
    middle = (min(labels) + max(labels)) / 2
    samples: dict[str, dict[str, Any]] = {}
    for record in records:
        query, documents = record["query"], _documents(record, columns)
        sample = samples.setdefault(query, {"query": query, "positive": [], "negative": []})
        for document, label in zip(documents, _labels(record, columns[-1]), strict=True):
            sample["positive" if label >= middle else "negative"].append(document)
    kept = [sample for sample in samples.values() if sample["positive"] and sample["negative"]]
    return library(".cross_encoder.evaluation").CrossEncoderRerankingEvaluator(kept, **options) if kept else None
