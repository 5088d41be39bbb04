"""``crosspack inspect``: a packed row's documents, where they stand, what carries loss, and their text."""

from __future__ import annotations

import json

import pytest

from tests.cli.console import one_line, run

RECORDS = [
    {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, 7, -100, 9], "seq_lengths": [3, 2]},
    {"input_ids": [4] * 40, "labels": [4] * 40, "seq_lengths": [40]},
]


@pytest.fixture
def packed(tmp_path, tokenizer):
    (tmp_path / "train-00000.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    text = "The quick brown fox\njumps over the lazy dog."
    ids = tokenizer(text)["input_ids"]
    chat = {"input_ids": ids, "labels": [-100] * 3 + ids[3:], "seq_lengths": [len(ids)]}
    (tmp_path / "train-00001.jsonl").write_text(json.dumps(chat) + "\n")
    return tmp_path


def test_the_documents_of_a_row_with_their_places_and_loss(packed) -> None:
    found = json.loads(run("inspect", packed, "--json").stdout)
    assert (found["row"], found["tokens"], found["trained"]) == (0, 5, 2)
    assert [(d["begin"], d["tokens"], d["trained"]) for d in found["documents"]] == [(0, 3, 1), (3, 2, 1)]
    runs = [[(r["loss"], r["positions"], r["input_ids"]) for r in d["runs"]] for d in found["documents"]]
    assert runs == [[(False, [0, 1], [5, 6]), (True, [2, 2], [7])], [(False, [0, 0], [8]), (True, [1, 1], [9])]]


def test_without_a_tokenizer_token_ids_are_shown_in_80_columns(packed) -> None:
    lines = run("inspect", packed, "--row", 1).output.splitlines()
    assert "token ids, because there is no tokenizer: pass --tokenizer" in lines
    assert "document 0: tokens 0 to 39 of the row, positions 0 to 39, 39 with loss" in lines
    assert "  no loss  4" in lines
    assert max(map(len, lines[1:])) <= 80 and sum(line.count("4 4") for line in lines) > 1


def test_with_the_tokenizer_of_the_folder_the_text_is_shown(packed, tokenizer) -> None:
    tokenizer.save_pretrained(packed / "tokenizer")
    output = run("inspect", packed, "--row", 2).output
    assert "fox\\njumps over" in output and "  loss     " in output
    (document,) = json.loads(run("inspect", packed, "--row", 2, "--json").stdout)["documents"]
    assert "".join(r["text"] for r in document["runs"]) == "The quick brown fox\njumps over the lazy dog."


def test_what_cannot_be_shown_is_one_line(packed, tmp_path) -> None:
    result = run("inspect", packed, "--row", 3)
    assert result.exit_code == 2 and "has 3 rows, counted from 0" in one_line(result)
    (tmp_path / "text.jsonl").write_text('{"text": "one"}\n')
    result = run("inspect", tmp_path / "text.jsonl")
    assert result.exit_code == 2 and "hold no token ids: pack it with `crosspack pack`" in one_line(result)
    assert run("inspect", packed, "--row", -1).exit_code == 2
    assert run("inspect", tmp_path / "absent.jsonl").exit_code == 2
    assert one_line(run("inspect", packed, "--split", "dev")).endswith("pass another --split")
