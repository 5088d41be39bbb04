"""What ``--data`` accepts, and what is said about the rest."""

from __future__ import annotations

import re

import pytest

from crosspack.cli.corpus import standard_library_records
from crosspack.cli.records import open_records
from packing_core.errors import PackingError

TEXTS = [{"text": "one"}, {"text": "two"}, {"text": "three"}]


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.parquet", "data.arrow"])
def test_a_file_of_each_format_gives_its_rows_in_order_and_more_than_once(write, name):
    path = write(name.replace(".json", ".jsonl") if name == "data.json" else name, TEXTS)
    if name == "data.json":
        path = path.rename(path.with_name(name))
    records = open_records(str(path))
    assert [dict(record) for record in records] == TEXTS
    assert [dict(record) for record in records] == TEXTS


def test_a_folder_gives_the_rows_of_its_files(write):
    first = write("folder/train-0.parquet", TEXTS[:1])
    write("folder/train-1.parquet", TEXTS[1:])
    assert [dict(record) for record in open_records(str(first.parent))] == TEXTS


def test_split_chooses_among_the_files_of_a_folder(write):
    write("folder/train.jsonl", TEXTS[:2])
    path = write("folder/test.jsonl", TEXTS[2:])
    assert [dict(record) for record in open_records(str(path.parent), split="test")] == TEXTS[2:]
    with pytest.raises(PackingError, match=r"--data .*folder: .*validation"):
        open_records(str(path.parent), split="validation")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("missing.jsonl", "--data missing.jsonl: no such file or folder, and not a hub name (`owner/name`)"),
        ("./missing", "--data ./missing: no such file or folder, and not a hub name (`owner/name`)"),
        ("a/b/c", "--data a/b/c: no such file or folder, and not a hub name (`owner/name`)"),
    ],
)
def test_what_is_nowhere_is_said_in_one_line(data, says):
    with pytest.raises(PackingError, match=f"^{re.escape(says)}$"):
        open_records(data)


def test_an_unknown_format_names_the_known_ones(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("text\none\n")
    with pytest.raises(PackingError, match=r"cannot read \.csv; it reads \.jsonl, \.json, \.parquet, \.arrow"):
        open_records(str(path))


def test_a_broken_file_is_one_line_that_names_it(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "one"}\n{"text": \n')
    with pytest.raises(PackingError, match=r"^.*data\.jsonl:2: it is not JSON, Expecting value") as caught:
        list(open_records(str(path)))
    assert "\n" not in str(caught.value)


SOURCE = '''"""What the module is for, in enough words."""
import never_installed_anywhere

class Public:
    """A class that somebody documented well."""

    def method(self, a, *, b=2):
        """Do the thing that methods do, at length."""

    def _hidden(self):
        """Documented as well as the others, yet private."""

    def short(self):
        """Return it."""

def copy():
    """Do the thing that methods do, at length."""
'''


@pytest.fixture
def library(tmp_path):
    for name in ("pack/__init__.py", "pack/_private.py", "test/case.py", "pack/twin.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(SOURCE)
    return tmp_path


def test_docstrings_become_questions_and_answers_without_importing_anything(library):
    records = list(standard_library_records(library))
    assert [record["prompt"] for record in records] == [
        "Question: What is the module pack for?\nAnswer:",
        "Question: What is the class pack.Public?\nAnswer:",
        "Question: What does pack.Public.method(self, a, *, b=2) do?\nAnswer:",
    ]
    assert records[0]["completion"] == " What the module is for, in enough words."


def test_the_standard_library_has_about_four_thousand_documents():
    records = list(standard_library_records())
    assert 3000 < len(records) < 6000
    assert len({record["completion"] for record in records}) == len(records)
