"""The study of contamination: its ways train the same targets, exact is padded, and its figures are what they say."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest
import torch
from transformers import BertConfig, BertModel

import crosspack
from benchmarks import does_it_matter, real_embeddings
from benchmarks._matter_figures import interval, tokens_to
from benchmarks._matter_tasks import retrieval
from benchmarks.does_it_matter import INPUTS, Run
from docs.site.charts import RESULTS
from docs.site.study import RUNS
from tests.torch_backend.models import documents

TINY = Namespace(steps=2, width=16, device="cpu", model="", rows=4, evaluations=2, noise_steps=2)


def test_exact_rows_have_the_loss_of_padded_ones_and_contaminated_rows_have_not() -> None:
    task = retrieval(4, 64)
    with torch.no_grad():
        found = {}
        for way in ("padded", "contaminated", "wrapped", "exact"):
            run = Run(task, way, 0, TINY)
            for weights in run.model.parameters():
                weights.mul_(5)  # fresh weights hardly attend
            if way == "exact":
                crosspack.patch(run.model, verify=False)
            loss, targets = run._loss(INPUTS[way], 0)
            found[way] = float(loss), targets
    assert found["exact"] == pytest.approx(found["padded"], rel=1e-5)
    assert abs(found["contaminated"][0] - found["padded"][0]) > 1e-2
    assert abs(found["wrapped"][0] - found["padded"][0]) > 1e-2
    assert found["contaminated"][1] == found["padded"][1] >= found["wrapped"][1]


def test_a_run_that_is_there_is_not_repeated(tmp_path, capsys) -> None:
    output = tmp_path / "runs.jsonl"
    given = ["--task", "retrieval", "--steps", "2", "--width", "16", "--seeds", "1", "--output", str(output)]
    ways = ["--way", "exact", "--way", "contaminated"]
    first = does_it_matter.main([*given, *ways])
    assert len(output.read_text().splitlines()) == 2
    assert does_it_matter.main([*given, *ways]) == first
    assert len(output.read_text().splitlines()) == 2
    record = json.loads(output.read_text().splitlines()[0])
    assert record["gradients"]["exact"]["error"] == 0 < record["gradients"]["contaminated"]["error"]
    assert "retrieval, 1 seeds" in first
    assert "0 minutes are over" not in capsys.readouterr().out


def test_intervals_are_those_of_student_and_tokens_lie_between_evaluations() -> None:
    mean, half = interval([1.0, 2.0, 3.0])  # deviation 1, t of two degrees of freedom 4.303
    assert (mean, half) == (2.0, pytest.approx(4.303 / 3**0.5, abs=2e-3))
    curve = [{"tokens": 100, "loss": 4.0}, {"tokens": 200, "loss": 2.0}, {"tokens": 300, "loss": 1.0}]
    assert tokens_to(curve, 3.0) == 150
    assert tokens_to(curve, 5.0) == 100
    assert tokens_to(curve, 0.5) != tokens_to(curve, 0.5), "it never is"


def test_the_tables_of_the_results_are_those_of_the_runs_that_are_kept(capsys) -> None:
    said = does_it_matter._report([json.loads(line) for line in RUNS.read_text().splitlines()])
    stated = {" ".join(line.split()) for line in RESULTS.read_text().splitlines()}
    rows = [
        " ".join(line.split())
        for line in said.splitlines()
        if line.startswith(("| exact", "| contam", "| wrap", "| pad"))
    ]
    assert len(rows) == 8 and set(rows) <= stated


def test_embeddings_of_a_packed_row_are_those_of_padded_texts_and_contaminated_ones_are_not() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertModel(BertConfig(vocab_size=96, **sizes)).eval()
    texts = [document.tolist() for document in documents((5, 19, 1, 7))]
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(5)  # fresh weights hardly attend
        found = {way: real_embeddings.embeddings(model, texts, way) for way in ("padded", "contaminated")}
        found["exact"] = real_embeddings.embeddings(crosspack.patch(model, verify=False), texts, "exact")
    torch.testing.assert_close(found["exact"], found["padded"], rtol=1e-4, atol=1e-5)
    assert float((found["contaminated"] - found["padded"]).abs().max()) > 1e-2
