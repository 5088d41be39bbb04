"""``crosspack report`` warns of data that will train badly, and of nothing in data that will not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from crosspack.cli.concerns import DocumentFigures, concerns, near_empty_steps
from packing_core import plan
from packing_core.training.schedule import EncodedDocument
from tests.cli.console import done, run


def document(first: int, tokens: int, trained: int) -> EncodedDocument:
    """Ids that count from ``first``; the last ``trained`` tokens are trained."""
    mask = np.zeros(tokens, np.bool_)
    mask[tokens - trained :] = True
    return EncodedDocument(np.arange(first, first + tokens, dtype=np.int32), mask)


def found(documents, capacity: int, left_out: tuple[int, ...] = ()) -> dict[str, int]:
    seen = DocumentFigures()
    for one in documents:
        seen.add(one)
    for tokens in left_out:
        seen.leave_out("somewhere", tokens)
    rows = plan(seen.lengths, capacity, overflow="truncate", strategy="sequential", seed=None)
    return {concern.kind: concern.count for concern in concerns(seen, rows)}


GOOD = [document(1000 * d, 100, 40) for d in range(990)]


@pytest.mark.parametrize(
    ("documents", "capacity", "left_out", "wanted"),
    [
        (GOOD, 512, (0,), {}),
        (GOOD, 512, (1, 1, 7), {"one_token": 2, "unanswered": 1}),
        ([*GOOD, *GOOD[:3], GOOD[0]], 512, (), {"repeated": 4}),
        ([*GOOD, document(0, 101, 40)], 512, (), {}),
        ([*GOOD, *(document(-1000 * d, 9, 1) for d in range(1, 6))], 512, (), {"last_token_alone": 5}),
        ([*GOOD, document(-1000, 2, 1)], 512, (), {}),
        ([*GOOD, *(document(-9000 * d, 4000, 2000) for d in range(1, 8))], 4096, (), {"tail": 7}),
        ([*GOOD, *(document(-9000 * d, 4000, 2000) for d in range(1, 30))], 4096, (), {}),
        ([*GOOD, *(document(-9000 * d, 400, 200) for d in range(1, 8))], 500, (), {}),
        (GOOD[:960], 4096, (), {}),
        (GOOD[:961], 4096, (), {"near_empty_steps": 1}),
        ([*GOOD[:480], *(document(-1000 * d, 100, 2) for d in range(1, 41))], 100, (), {"near_empty_steps": 5}),
    ],
    ids=range(12),
)
def test_warnings_are_about_what_is_in_the_data(documents, capacity, left_out, wanted) -> None:
    assert found(documents, capacity, left_out) == wanted


def test_the_capacity_that_is_advised_is_one_that_the_other_documents_fill() -> None:
    seen = DocumentFigures()
    for one in [*GOOD, *(document(-9000 * d, 4000, 2000) for d in range(1, 8))]:
        seen.add(one)
    (tail,) = concerns(seen, plan(seen.lengths, 4096))
    assert "rows of 512 hold all others" in tail.text, "100 tokens leave a fifth of rows of 128 and 256 empty"


def test_pieces_of_a_document_count_by_their_share() -> None:
    rows = plan([1600, 800, 800], 100, overflow="split", strategy="sequential", seed=None)
    assert near_empty_steps(rows, np.array([1600, 800, 800]), np.array([1600, 800, 10])) == 1
    rows = plan([1600, 800], 100, overflow="split", strategy="sequential", seed=None)
    assert near_empty_steps(rows, np.array([1600, 800]), np.array([1600, 120])) == 0


def test_the_report_says_what_is_wrong_and_what_to_do(tmp_path) -> None:
    path = tmp_path / "data.jsonl"
    records = [{"input_ids": list(range(i, i + 20))} for i in range(40)]
    records += [{"input_ids": [5]}, {"input_ids": [5, 6, 7], "labels": [-100] * 3}, records[0]]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = done("report", "--data", path, "--capacity", 64, "--json", "--output", tmp_path / "page.html")
    told = {x["kind"]: x["text"] for x in json.loads(result.stdout)["warnings"]}
    assert list(told) == ["one_token", "unanswered", "repeated"]
    assert told["one_token"].startswith("1 document of one token: nothing predicts it, so nothing is trained; put it")
    assert told["unanswered"].endswith("they are left out; add the answers, or pass --loss all")
    assert "1 document (2.4%) the same as an earlier one" in told["repeated"]
    page = (tmp_path / "page.html").read_text("utf-8")
    assert all(text in page for text in told.values())
    shown = " ".join(run("report", "--data", path, "--capacity", 64).stderr.split())
    assert "crosspack: warning: 1 document of one token" in shown
