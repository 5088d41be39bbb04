"""``crosspack train --task embed``, ``late`` and ``rerank``: trainers of sentence-transformers, from file to folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from crosspack.cli.train import Examples
from tests.cli.conftest import LLAMA
from tests.cli.console import done, one_line, run

pytest.importorskip("sentence_transformers", reason="the trainers are those of sentence-transformers")

TEXTS = [
    "The quick brown fox.",
    "Pack my box with five dozen liquor jugs.",
    "How daft!",
    "zebras jump",
    "a",
    "lazy dog",
]
PAIRS = [{"anchor": text, "positive": text[: 1 + len(text) // 2]} for text in TEXTS]
SCORED = [
    {"query": text, "document": other, "label": float(i == j)}
    for i, text in enumerate(TEXTS)
    for j, other in enumerate(TEXTS[:4])
]
# task, records
RECORDS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "pairs": ("embed", PAIRS),
    "triplets": ("embed", [{**pair, "negative": "jugs"} for pair in PAIRS]),
    "tokens": ("late", [{**pair, "negative": "jugs"} for pair in PAIRS]),
    "similarities": (
        "embed",
        [{"sentence1": x, "sentence2": y, "score": i / 6} for i, (x, y) in enumerate(zip(TEXTS, TEXTS[::-1]))],
    ),
    "labels": ("rerank", SCORED),
    "scores": ("rerank", [{**each, "label": 4 * each["label"] - 2} for each in SCORED]),
    "lists": (
        "rerank",
        [
            {"query": text, "documents": TEXTS[: 2 + i % 3], "labels": [int(i == j) for j in range(2 + i % 3)]}
            for i, text in enumerate(TEXTS)
        ],
    ),
}
BERT = {"model_type": "bert", "intermediate_size": 48, "hidden_size": 32, "num_hidden_layers": 1}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture
def encoder(tokenizer, tmp_path) -> Path:
    """A folder with a small BERT and a tokenizer that pads."""
    import torch
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 64}
    AutoModel.from_config(AutoConfig.for_model(**BERT, **NO_DROPOUT, **sizes)).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    (tmp_path / "bert" / "chat_template.jinja").unlink()
    return tmp_path / "bert"


def train(kind: str, model: Path, write: Any, *more: object) -> tuple[object, ...]:
    task, records = RECORDS[kind]
    data = write("records.jsonl", records)
    options = ("--device", "cpu", "--batch-size", 4, "--lr", 1e-3, "--warmup", 0, *more)
    return ("train", "--task", task, "--model", model, "--data", data, "--eval-data", data, *options)


def figures(folder: Path, name: str) -> list[float]:
    return [step[name] for step in json.loads((folder / "crosspack.json").read_text())["steps"] if name in step]


@pytest.mark.parametrize("kind", RECORDS)
def test_losses_are_those_of_padded_batches_and_the_library_loads_the_model(
    kind, encoder, write, tmp_path, monkeypatch
):
    import sentence_transformers

    from torch_backend.job import retrieval

    packed, padded = tmp_path / "packed", tmp_path / "padded"
    # Adam divides rounding by itself, and the loss of similarities multiplies cosines, and so their gradients, by 20.
    options = ("--epochs", 2, "--optim", "sgd", "--lr", 0.05 / 20 if kind == "similarities" else 0.05)
    result = done(*train(kind, encoder, write, *options, "--output", packed))
    assert "audit: exact" in result.output
    monkeypatch.setattr(retrieval, "enable_packing", lambda trainer, **_: trainer)
    monkeypatch.setattr(retrieval, "disable_packing", lambda trainer: trainer)
    done(*train(kind, encoder, write, *options, "--output", padded))
    for name in ("loss", "eval_loss"):
        assert figures(packed, name) == pytest.approx(figures(padded, name), rel=1e-5)
    assert len(set(figures(packed, "loss"))) > 2
    name = "eval_spearman_cosine" if kind == "similarities" else "eval_mrr@10"
    assert figures(packed, name) or figures(packed, f"eval_{'maxsim' if kind == 'tokens' else 'cosine'}_mrr@10")
    if kind == "tokens":
        models = [sentence_transformers.MultiVectorEncoder(str(x)) for x in (packed, padded, encoder)]
        outputs = [np.concatenate(model.encode(TEXTS, convert_to_numpy=True)) for model in models]
    elif RECORDS[kind][0] == "embed":
        outputs = [sentence_transformers.SentenceTransformer(str(x)).encode(TEXTS) for x in (packed, padded, encoder)]
    else:
        pairs = [(text, TEXTS[0]) for text in TEXTS]
        outputs = [sentence_transformers.CrossEncoder(str(x)).predict(pairs) for x in (packed, padded, encoder)]
    assert outputs[0] == pytest.approx(outputs[1], rel=1e-4, abs=1e-5)
    assert outputs[0].shape != outputs[2].shape or abs(outputs[0] - outputs[2]).max() > 1e-3  # it was trained


def best(scores: Any, relevant: Any) -> tuple[float, float]:
    """nDCG@10 and MRR@10 of queries [Q, D], whose every document has its score and whether it is relevant."""
    gains, ranks = [], []
    for row, good in zip(scores, relevant, strict=True):
        best = np.asarray(good)[np.argsort(-np.asarray(row))][:10]
        discount = 1 / np.log2(np.arange(2, 2 + len(best)))
        gains.append((best * discount).sum() / discount[: min(10, sum(good))].sum())
        ranks.append(1 / (1 + best.argmax()) if best.any() else 0)
    return float(np.mean(gains)), float(np.mean(ranks))


@pytest.mark.parametrize(("kind", "named"), [("triplets", "SentenceTransformer"), ("tokens", "MultiVectorEncoder")])
def test_anchors_are_ranked_among_all_positives_and_negatives_of_the_file(kind, named, encoder, write, tmp_path):
    import sentence_transformers

    done(*train(kind, encoder, write, "--steps", 1, "--lr", 1e-6, "--output", tmp_path / "out"))
    model = getattr(sentence_transformers, named)(str(tmp_path / "out"))
    documents = list(dict.fromkeys([pair["positive"] for pair in PAIRS] + ["jugs"]))
    scores = model.similarity(model.encode(TEXTS), model.encode(documents)).cpu().numpy()
    by = "maxsim" if kind == "tokens" else "cosine"
    relevant = [[document == pair["positive"] for document in documents] for pair in PAIRS]
    (ndcg,), (mrr,) = (figures(tmp_path / "out", f"eval_{by}_{name}@10") for name in ("ndcg", "mrr"))
    assert (ndcg, mrr) == pytest.approx(best(scores, relevant))
    assert 0.2 < mrr < 1


@pytest.mark.parametrize("kind", ["labels", "scores", "lists"])
def test_documents_are_ranked_for_each_query(kind, encoder, write, tmp_path):
    from sentence_transformers import CrossEncoder

    done(*train(kind, encoder, write, "--steps", 1, "--lr", 1e-6, "--output", tmp_path / "out"))
    model = CrossEncoder(str(tmp_path / "out"))
    scores, relevant = [], []
    for i, text in enumerate(TEXTS):
        documents = TEXTS[: 2 + i % 3] if kind == "lists" else TEXTS[:4]
        if i < len(documents):
            scores.append(model.predict([(text, document) for document in documents]))
            relevant.append([document == text for document in documents])
    (ndcg,), (mrr,) = (figures(tmp_path / "out", f"eval_{name}@10") for name in ("ndcg", "mrr"))
    assert (ndcg, mrr) == pytest.approx(best(scores, relevant))
    assert mrr < 1
    assert type(model.activation_fn).__name__ == ("Identity" if kind == "scores" else "Sigmoid")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["triplets", "lists"])
def test_adapters_are_written_alone_or_added_and_the_best_are_kept(kind, encoder, write, tmp_path):
    import sentence_transformers

    # The second step makes it worse, so the best weights are those of the first one.
    chosen = ("--lora", 4, "--steps", 2, "--lr", 3.0, "--eval-every", 1, "--keep-best")
    alone, merged = tmp_path / "alone", tmp_path / "merged"
    done(*train(kind, encoder, write, *chosen, "--output", alone))
    done(*train(kind, encoder, write, *chosen, "--merge-lora", "--output", merged))
    assert (alone / "adapter_config.json").is_file() and not (merged / "adapter_config.json").exists()
    losses = figures(alone, "eval_loss")
    assert losses[-1] == pytest.approx(min(losses)) and losses[-2] > min(losses)
    if kind == "triplets":
        outputs = [sentence_transformers.SentenceTransformer(str(x)).encode(TEXTS) for x in (alone, merged)]
    else:
        pairs = [(text, TEXTS[0]) for text in TEXTS]
        outputs = [sentence_transformers.CrossEncoder(str(x)).predict(pairs) for x in (alone, merged)]
    assert outputs[0] == pytest.approx(outputs[1], rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
def test_a_run_that_was_killed_goes_on(adapters, encoder, write, tmp_path, monkeypatch):
    out = ("--epochs", 2, "--save-every", 1, "--decay", "constant", *(["--lora", 4] if adapters else []))
    done(*train("triplets", encoder, write, *out, "--output", tmp_path / "whole"))
    monkeypatch.setattr(Examples, "report", lambda *_: sys.exit("the machine went down"))
    assert run(*train("triplets", encoder, write, *out, "--steps", 3, "--output", tmp_path / "out")).exit_code == 1
    monkeypatch.undo()
    done(*train("triplets", encoder, write, *out, "--output", tmp_path / "out", "--resume"))
    assert figures(tmp_path / "out", "loss")[-1] == pytest.approx(figures(tmp_path / "whole", "loss")[-1], rel=1e-5)
    assert not (tmp_path / "out" / "checkpoints").exists()


@pytest.mark.slow
def test_a_decoder_pools_its_last_token(tokenizer, write, tmp_path):
    import torch
    from sentence_transformers import SentenceTransformer
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**LLAMA | {"vocab_size": len(tokenizer), "max_position_embeddings": 64})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    more = ("--gradient-checkpointing", "--steps", 1, "--output", tmp_path / "out")
    done(*train("pairs", tmp_path / "llama", write, *more))
    model = SentenceTransformer(str(tmp_path / "out"))
    assert model[1].pooling_mode == "lasttoken"
    text = "zebras " * 20  # fits without the chat template, in which the library puts it
    assert len(tokenizer(text)["input_ids"]) <= 64
    long = write("long.jsonl", [*PAIRS, {"anchor": text, "positive": "a"}])
    said = run("train", "--task", "embed", "--model", tmp_path / "llama", "--data", long, "--device", "cpu")
    assert "tokens in one text and the model takes 64" in said.stderr


PAIR, SCORE, LIST = (RECORDS[kind][1][0] for kind in ("pairs", "labels", "lists"))
WRONG = {
    "embed": [
        ({**PAIR, "positive": 3}, ":7: positive is 3: --task embed reads a text"),
        ({"sentence1": "a", "sentence2": "b", "score": "high"}, ":7: score is 'high': --task embed reads a number"),
        ({**PAIR, "negative": "fox"}, ":7 has anchor, positive, negative, and the first record of --data anchor, pos"),
        ({**PAIR, "anchor": ""}, ":7 has a text without tokens: leave it out, or pass --on-error skip"),
        ({**PAIR, "anchor": "zebras " * 80}, ":7 has 241 tokens in one text and the model takes 64: pass --overflow"),
        ({"anchor": "a"}, ":7 has anchor: --task embed reads anchor and positive and negative, or anchor and positive"),
    ],
    "rerank": [
        ({**SCORE, "label": None}, ":25 has query, document, label: --task rerank reads query and document and label"),
        ({**SCORE, "label": float("nan")}, ":25: label is nan: --task rerank reads a number"),
        ({**LIST, "documents": "fox"}, ":25: documents is 'fox': --task rerank reads a list of texts"),
        ({**LIST, "documents": []}, ":25: documents is []: --task rerank reads a list of texts"),
        ({**LIST, "labels": [1, "no"]}, ":25: labels is [1, 'no']: --task rerank reads a list of numbers"),
        ({**LIST, "labels": [1]}, ":25 has 1 label and 2 documents: give each document a label"),
        (LIST, ":25 has query, documents, labels, and the first record of --data query, document, label: give all"),
    ],
}


@pytest.mark.parametrize("task", WRONG)
def test_a_record_that_cannot_be_used_is_named_or_left_out(task, encoder, write):
    good = PAIRS if task == "embed" else SCORED
    command = ("train", "--task", task, "--model", encoder, "--device", "cpu", "--steps", 1)
    for record, says in WRONG[task]:
        said = run(*command, "--data", write("bad.jsonl", [*good, record]))
        assert said.exit_code == 2 and f"bad.jsonl{says}" in " ".join(said.stderr.split())
    bad = write("bad.jsonl", [*good, *(record for record, _ in WRONG[task] if "zebras" not in str(record))])
    assert "left out" in done(*command, "--data", bad, "--on-error", "skip").output
    if task == "embed":
        long = write("long.jsonl", [*good, WRONG[task][4][0]])
        done(*command, "--data", long, "--overflow", "truncate")
        done(*command, "--data", long, "--overflow", "drop")


def test_data_and_models_that_cannot_be_trained_are_refused(encoder, write, monkeypatch, tmp_path):
    def said(kind: str, records: list[dict[str, Any]], model: Path = encoder, *more: object) -> str:
        data = write("records.jsonl", records)
        task = RECORDS[kind][0]
        result = run("train", "--task", task, "--model", model, "--data", data, "--device", "cpu", *more)
        assert result.exit_code == 2, result.output
        return result.stderr

    assert "--task rerank: label is 1 throughout" in said("labels", [{**each, "label": True} for each in SCORED])
    assert "--batch-size 1 leaves a pair alone" in said("pairs", PAIRS, encoder, "--batch-size", 1)
    assert f"--tokenizer {tmp_path}: --task embed reads that" in said("pairs", PAIRS, encoder, "--tokenizer", tmp_path)
    assert "--task embed has no --neftune-alpha" in said("pairs", PAIRS, encoder, "--neftune-alpha", 1)
    assert "trains a projection of tokens too, and has no --lora" in said("tokens", PAIRS, encoder, "--lora", 4)
    assert "positive is 3: --task late reads a text" in said("tokens", [{"anchor": "a", "positive": 3}])
    from sentence_transformers import SentenceTransformer

    SentenceTransformer(modules=[SentenceTransformer(str(encoder))[0]]).save_pretrained(str(tmp_path / "unpooled"))
    assert "unpooled has no pooling: add" in said("pairs", PAIRS, tmp_path / "unpooled")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    data = write("pairs.jsonl", PAIRS)
    missing = run("train", "--task", "embed", "--model", encoder, "--data", data, "--device", "cpu")
    assert "sentence-transformers is not installed: pip install 'crosspack[retrieval]'" in missing.stderr


def test_prompts_are_trained_and_evaluated_and_count_as_tokens(encoder, write, tmp_path):
    triplets = RECORDS["triplets"][1]
    joined = [{**each, "anchor": "fox jumps " + each["anchor"]} for each in triplets]
    runs = {"plain": (triplets, ()), "joined": (joined, ())}
    runs["prompted"] = triplets, ("--set", 'prompts={anchor: "fox jumps "}')
    for name, (records, more) in runs.items():
        data = write(f"{name}.jsonl", records)
        command = ("--data", data, "--eval-data", data, "--device", "cpu", "--steps", 1, "--output", tmp_path / name)
        done("train", "--task", "embed", "--model", encoder, *command, *more)
    for name in ("eval_loss", "eval_cosine_mrr@10"):
        want = figures(tmp_path / "joined", name)
        assert figures(tmp_path / "prompted", name) == pytest.approx(want, rel=1e-5)
        assert figures(tmp_path / "plain", name) != pytest.approx(want, rel=1e-3)
    long = run(*train("triplets", encoder, write, "--set", f"prompts={'fox ' * 62}"))
    assert "tokens in one text and the model takes" in long.stderr


def test_queries_and_documents_have_limits_of_their_own(encoder, write, tmp_path):
    from sentence_transformers import MultiVectorEncoder

    model = MultiVectorEncoder(str(encoder))
    model[0].query_length = 8
    model.save_pretrained(str(tmp_path / "late"))
    records = [{"anchor": "a", "positive": "zebras " * 9}, {"anchor": "fox", "positive": "jugs"}]
    command = ("train", "--task", "late", "--model", tmp_path / "late", "--device", "cpu", "--steps", 1)
    done(*command, "--data", write("pairs.jsonl", records))
    swapped = write("swapped.jsonl", [{"anchor": x["positive"], "positive": x["anchor"]} for x in records])
    said = run(*command, "--data", swapped)
    assert said.exit_code == 2 and "tokens in one text and the model takes 8: pass --overflow" in said.stderr
    done(*command, "--data", swapped, "--overflow", "truncate")


def test_columns_are_read_under_other_names(encoder, write):
    data = write("named.jsonl", [{"title": pair["anchor"], "body": pair["positive"]} for pair in PAIRS])
    command = ("train", "--task", "embed", "--model", encoder, "--data", data, "--device", "cpu", "--steps", 1)
    done(*command, "--column", "anchor=title", "--column", "positive=body")
    assert "--task embed has no --capacity: leave it out" in one_line(run(*command, "--capacity", 64))


def test_a_count_that_fails_leaves_the_models_limit_as_it_was():
    from torch_backend.job.retrieval import Embeddings

    def fails(texts: list[str], prompt: str | None) -> None:
        raise ValueError("no tokenizer")

    task = Embeddings.__new__(Embeddings)
    task.job, task.columns = SimpleNamespace(arguments={}), ("anchor",)
    task.model = SimpleNamespace(max_seq_length=7, preprocess=fails)
    with pytest.raises(ValueError, match="no tokenizer"):
        task._lengths([{"anchor": "a"}])
    assert task.model.max_seq_length == 7
