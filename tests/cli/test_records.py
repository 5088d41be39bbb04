"""Records that ``--data`` accepts, and the messages about the rest."""

from __future__ import annotations

import os
import re
from threading import Thread

import pyarrow
import pytest

from crosspack.cli.records import open_records
from crosspack.reading import objects, read
from crosspack.reading.corpus import standard_library_records
from packing_core.errors import PackingError

TEXTS = [{"text": "one"}, {"text": "two"}, {"text": "three"}]


def test_what_has_no_splits_is_read_without_one_and_refused_with_one(tmp_path):
    """As data to evaluate on, whose split is validation where there are several."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "one"}\n')
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = Thread(target=pipe.write_text, args=(path.read_text(),))
    writer.start()
    for data in (str(path), str(tmp_path / "*.jsonl"), path.as_uri(), str(pipe)):
        assert [dict(record) for record in open_records(data, split=None, option="--eval-data")] == TEXTS[:1]
        assert len(list(read(data))) == 1
        with pytest.raises(PackingError, match="split='test' is of a folder or a hub data set, and this is neither"):
            read(data, split="test")
    writer.join()
    with pytest.raises(PackingError, match="split='test' is of a folder or a hub data set"):
        read(None, split="test")
    with pytest.raises(
        PackingError, match="no file is of --eval-split validation, their names say none: pass another --eval-split"
    ):
        open_records(str(tmp_path), split=None, option="--eval-data")


def test_an_unknown_format_names_the_known_ones(tmp_path):
    path = tmp_path / "data.xlsx"
    path.write_text("x")
    with pytest.raises(PackingError, match=r"cannot read \.xlsx; it reads \.jsonl, \.json, \.parquet, \.arrow, \.csv"):
        open_records(str(path))


@pytest.mark.parametrize("line_end", ["", "\n", "\r\n"])
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": ', "Expecting value at column 9, where it ends"),
        ('{"text": "one"', "Expecting ',' delimiter at column 15, where it ends"),
        ('{"text": "one', "it ends at column 13, inside the string that begins at column 10"),
        ('{"text": one}', "Expecting value at column 10"),
    ],
)
def test_a_line_that_is_cut_off_is_said_to_end_where_it_does(tmp_path, line, says, line_end):
    path = tmp_path / "data.jsonl"
    path.write_bytes(f'{{"text": "one"}}\n{line}{line_end}'.encode())
    with pytest.raises(PackingError, match=f"^{re.escape(f'{path}:2: it is not JSON, {says}')}$"):
        list(open_records(str(path)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"text": "a"}\n\n[1]\n', ":3: a record is an object with named columns, not a list"),
        (b'{"text": "a"}\nnull\n', ":2: a record is an object with named columns, not null"),
        (b'{"text": "a"}\n"b"\n', ":2: a record is an object with named columns, not a string"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', ":2: it is not UTF-8"),
        (b'{"text": ' + b"9" * 5000 + b"}", ":1: Exceeds the limit"),
        (b"[" * 100_000, ":1: maximum recursion depth exceeded"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path, text, says):
    path = tmp_path / "data.jsonl"
    path.write_bytes(text)
    with pytest.raises(PackingError, match=re.escape(f"{path}{says}")):
        list(open_records(str(path)))


@pytest.mark.parametrize(
    "text",
    [
        '[{"text": "one"}, {"text": "two"},\n{"text": "three"}]\n',
        '{\n "text": "one"}\n{"text": "two"} {"text": "three"}',
        '\ufeff {"text": "one"}\r\n{"text": "two"}\r\n{"text": "three"}\r\n',
    ],
)
@pytest.mark.parametrize("block", [1, 7, 1 << 16])
def test_json_is_a_list_of_objects_or_objects_one_after_the_other(tmp_path, monkeypatch, text, block):
    monkeypatch.setattr(objects, "_BLOCK", block)
    path = tmp_path / "data.json"
    path.write_text(text, newline="")
    assert [dict(record) for record in open_records(str(path))] == TEXTS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[{"text": "one"},\n{"text": "two"}', ":2: the file ends inside the list of records"),
        ('[{"text": "one"}]\n{"text": "two"}', ":2: something follows the list of records"),
        ('[{"text": "one"},\n{"text": two}]', ":2: the record that begins here is not JSON"),
        ('[{"text": "one"},\n{"text": "tw', ":2: the record that begins here is not JSON"),
        ("[1]", ":1: a record is an object with named columns, not a number"),
    ],
)
@pytest.mark.parametrize("block", [1, 1 << 16])
def test_a_place_in_json_that_is_no_record_is_named(tmp_path, monkeypatch, text, says, block):
    monkeypatch.setattr(objects, "_BLOCK", block)
    path = tmp_path / "data.json"
    path.write_text(text)
    with pytest.raises(PackingError, match=re.escape(f"{path}{says}")):
        list(open_records(str(path)))


def test_text_stays_as_it_is_whatever_it_looks_like(write):
    texts = ["2024-01-01", "2024-01-01T00:00:00Z", "7", "1e5", "true", "null", ""]
    for name in ("data.jsonl", "[0]*{a}?.jsonl", "data.parquet"):
        path = write(name, [{"prompt": "when", "completion": text} for text in texts])
        assert [record["completion"] for record in open_records(str(path))] == texts


def test_an_arrow_file_is_read_as_an_arrow_stream_is(tmp_path):
    table = pyarrow.table(
        {"input_ids": [[1, 2], [3], None, []], "labels": [[1, 2], None, [3], [None]], "other": [{}] * 4}
    )
    with pyarrow.ipc.new_file(tmp_path / "data.arrow", table.schema) as out:
        out.write_table(table.slice(1))
    rows = [dict(row) for row in open_records(str(tmp_path / "data.arrow"), columns=["input_ids", "labels"])]
    assert [list(row) for row in rows] == [["input_ids", "labels"]] * 3
    assert [None if row["input_ids"] is None else list(row["input_ids"]) for row in rows] == [[3], None, []]
    assert [row["labels"] for row in rows] == [None, [3], [None]]


HEADER = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {}\n---\n"


def test_a_readme_says_which_files_of_the_folder_are_read(write):
    folder = write("folder/a/train.jsonl", TEXTS[:1]).parents[1]
    write("folder/b/train.jsonl", TEXTS[1:])
    (folder / "README.md").write_text(HEADER.format("b/*.jsonl"))
    assert [dict(record) for record in open_records(str(folder))] == TEXTS[1:]
    with pytest.raises(PackingError, match="README.md has the splits train: pass one of them as split"):
        open_records(str(folder), split="test")
    (folder / "README.md").write_text(HEADER.format("c/*"))
    with pytest.raises(PackingError, match=r"README.md names c/\*, and there is no"):
        open_records(str(folder))
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: en\n  data_files: a/*\n- config_name: de\n  data_files: b/*\n---\n"
    )
    with pytest.raises(PackingError, match="README.md has the configurations en, de, and no files for"):
        open_records(str(folder))
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_dir: a\n---\n")
    with pytest.raises(PackingError, match="README.md has the configurations default, and no files for"):
        open_records(str(folder))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    assert [dict(record) for record in open_records(str(folder))] == TEXTS


@pytest.mark.parametrize(
    "pattern", ["../secret.jsonl", "{tmp}/secret.jsonl", "https://example.com/secret.jsonl", "a/../../secret.jsonl"]
)
def test_a_readme_cannot_point_outside_of_its_folder(write, tmp_path, pattern):
    write("secret.jsonl", [{"text": "secret"}])
    folder = write("folder/train.jsonl", TEXTS).parent
    (folder / "README.md").write_text(HEADER.format(pattern.format(tmp=tmp_path)))
    with pytest.raises(PackingError, match=r"README.md names .*secret.jsonl, outside of the folder"):
        open_records(str(folder))


def test_a_link_that_leaves_the_folder_is_refused_and_the_hubs_cache_is_not(write, tmp_path):
    secret = write("secret.jsonl", [{"text": "secret"}])
    folder = write("folder/train-0.jsonl", TEXTS).parent
    (folder / "train-1.jsonl").symlink_to(secret)
    with pytest.raises(PackingError, match=r"train-1.jsonl is a link to a file outside of the folder: pass that file"):
        open_records(str(folder))
    blob = write("cache/blobs/abc.jsonl", TEXTS)
    snapshot = tmp_path / "cache/snapshots/123"
    snapshot.mkdir(parents=True)
    (snapshot / "train.jsonl").symlink_to(blob)
    assert [dict(record) for record in open_records(str(snapshot))] == TEXTS


def test_a_folder_with_a_script_or_several_formats_is_one_line(write, tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/scripts.py").write_text("raise SystemExit")
    with pytest.raises(
        PackingError,
        match=r"scripts: the folder holds no \.jsonl, \.json, \.parquet, \.arrow",
    ):
        open_records(str(tmp_path / "scripts"))
    folder = write("folder/a.jsonl", TEXTS).parent
    write("folder/b.parquet", TEXTS)
    with pytest.raises(PackingError, match=r"folder: it holds \.jsonl and \.parquet files: pass those of one format"):
        open_records(str(folder))


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-00000-of-00001.jsonl", "train"),
        ("data/my_train_2.jsonl", "train"),
        ("dev.jsonl", "validation"),
        ("test/data-00000-of-00001.jsonl", "test"),
        ("train_sft-00000-of-00001.jsonl", "train_sft"),
    ],
)
def test_a_split_is_what_names_say(write, name, split):
    folder = write("folder/" + name, TEXTS).parents[name.count("/")]
    write("folder/trainset.jsonl", [{"text": "of no split"}])
    assert [dict(record) for record in open_records(str(folder), split=split)] == TEXTS
    other = "validation" if split == "train" else "train"
    with pytest.raises(PackingError, match=f"no file is of split='{other}', its files are of {split}"):
        open_records(str(folder), split=other)


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
    (library / "pack/broken.py").write_bytes(b"def \x00(")
    records = list(standard_library_records(library))
    assert [record["prompt"] for record in records] == [
        "Question: What is the module pack for?\nAnswer:",
        "Question: What is the class pack.Public?\nAnswer:",
        "Question: What does pack.Public.method(self, a, *, b=2) do?\nAnswer:",
    ]
    assert records[0]["completion"] == " What the module is for, in enough words."
