"""Input made to take all memory or all time is refused by place, whatever its format."""

from __future__ import annotations

import copy
import gzip
import json
import lzma
import signal
import tracemalloc
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import crosspack
from crosspack.encoding import text
from crosspack.encoding.text import Encoder, Policy
from crosspack.reading import Records
from crosspack.reading.places import BadRecord
from crosspack.reading.records import read_pieces
from packing_core.errors import PackingError

LIMIT = 1000
SHORT, LONG = "word", "x" * 3000


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def table(texts: list[str], path: Path) -> None:
    content = pa.table({"text": texts})
    if path.suffix == ".parquet":
        pq.write_table(content, path)
    else:
        with pa.ipc.new_file(path, content.schema) as out:
            out.write_table(content)


def written(folder: Path, name: str, texts: list[str]) -> Path:
    path = folder / name
    match "".join(path.suffixes):
        case ".jsonl":
            path.write_bytes(lines(texts))
        case ".jsonl.gz":
            path.write_bytes(gzip.compress(lines(texts)))
        case ".jsonl.xz":
            path.write_bytes(lzma.compress(lines(texts[:2])) + b"\0" * 8 + lzma.compress(lines(texts[2:])))
        case ".txt":
            path.write_text("\n".join(texts))
        case ".json":
            path.write_text(json.dumps([{"text": text} for text in texts]))
        case ".csv":
            path.write_text("text\n" + "\n".join(texts))
        case _:
            table(texts, path)
    return path


def items(records: Records, size: int) -> list[Any]:
    """Every item with its place, read in pieces of ``size`` bytes."""
    stretches = records.stretches(size)
    return [item for stretch in stretches for piece in read_pieces(stretch, size) for item in piece.items]


@pytest.mark.parametrize("size", [64, 1 << 20])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.txt", "a.json", "a.parquet", "a.arrow"])
def test_a_record_too_long_is_one_that_cannot_be_read_and_the_others_are_read(tmp_path, name, size):
    path = written(tmp_path, name, [SHORT, LONG, SHORT, "last"])
    found = items(crosspack.read(path, max_record=LIMIT), size)
    assert [item["text"] for item in found if not isinstance(item, BadRecord)] == [SHORT, SHORT, "last"]
    (bad,) = [item for item in found if isinstance(item, BadRecord)]
    assert found.index(bad) == 1 and bad.reason.startswith("it takes more than 1000 bytes: split it, or pass a larger")
    places = [item.where.removeprefix(str(path)) for item in found]
    assert places == {".json": [":1"] * 4}.get(path.suffix, places), places
    kind = "[{}]" if path.suffix in (".parquet", ".arrow") else ":{}"
    first = 0 if kind == "[{}]" else 1
    assert path.suffix == ".json" or places == [kind.format(first + n) for n in range(4)]
    assert [item["text"] for item in items(crosspack.read(path), size)] == [SHORT, LONG, SHORT, "last"]


@pytest.mark.parametrize(("texts", "line"), [([SHORT, LONG], 3), ([SHORT, '"never closed', *[SHORT] * 400], 3)])
def test_nothing_can_be_found_after_a_record_of_csv_that_does_not_end(tmp_path, texts, line):
    path = written(tmp_path, "a.csv", texts)
    with pytest.raises(PackingError, match=f"a.csv:{line}: the record that begins here, or its quote, has no end"):
        items(crosspack.read(path, max_record=LIMIT), 1 << 20)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv", "a.txt", "a.json"])
def test_a_line_without_end_takes_no_memory(tmp_path, name):
    path = tmp_path / name
    with (gzip.open if path.suffix == ".gz" else open)(path, "wb") as file:
        file.write(b'[{"a": "' if path.suffix == ".json" else b'"')
        for _ in range(32):
            file.write(b"x" * (1 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(PackingError, match=r"it takes more than 1 MB"):
            list(crosspack.read(path, max_record=1 << 20))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_record_of_json_or_a_whole_text_has_the_same_limit(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"},\n{"text": "' + "x" * (1 << 22))
    with pytest.raises(PackingError, match=r"a\.json:2: the record that begins here has no end: it takes more than"):
        list(crosspack.read(path, max_record=LIMIT))
    (tmp_path / "a.txt").write_text("x" * 1001)
    with pytest.raises(PackingError, match=r"a\.txt:1: it takes more than 1000 bytes"):
        list(crosspack.read(tmp_path / "a.txt", sample_by="document", max_record=LIMIT))
    assert len(list(crosspack.read(tmp_path / "a.txt", sample_by="document", max_record=1001))) == 1


def test_a_file_that_grows_beyond_measure_is_refused(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=9) as file:
        for _ in range(70):
            file.write(b" " * (1 << 20))
    with pytest.raises(PackingError, match=r"a\.jsonl\.gz: it grows to more than 200 times its size"):
        list(crosspack.read(tmp_path / "a.jsonl.gz"))


def test_a_dictionary_of_a_gigabyte_is_refused(tmp_path):
    stream = bytearray(lzma.compress(lines([SHORT])))
    # A block's header: its size, flags, the filter's id (0x21), 1, the size of the dictionary, padding, a checksum.
    size = 4 * (stream[12] + 1)
    stream[16] = 37  # 1.5 GB
    stream[12 + size - 4 : 12 + size] = zlib.crc32(stream[12 : 12 + size - 4]).to_bytes(4, "little")
    (tmp_path / "a.jsonl.xz").write_bytes(bytes(stream))
    with pytest.raises(PackingError, match=r"a\.jsonl\.xz: Memory usage limit exceeded"):
        list(crosspack.read(tmp_path / "a.jsonl.xz"))


@pytest.mark.parametrize("use", ["config_name: *a40", "config_name: x\n  <<: *a40"], ids=["named", "merged"])
def test_aliases_of_aliases_end(tmp_path, use):
    (tmp_path / "data.jsonl").write_bytes(lines([SHORT]))
    opening, closing = ("{<<: [", "]}") if "<<" in use else ("[", "]")
    levels = [f"a0: &a0 {'{x: 1}' if '<<' in use else '[x]'}"]
    levels += [f"a{n}: &a{n} {opening}*a{n - 1}, *a{n - 1}{closing}" for n in range(1, 41)]
    header = "\n".join([*levels, "configs:", f"- {use}", "  data_files: data.jsonl"])
    (tmp_path / "README.md").write_text(f"---\n{header}\n---\n")
    with pytest.raises(
        PackingError, match=r"README\.md cannot be read: its aliases stand for more than 100,000 values"
    ):
        list(crosspack.read(tmp_path))


def test_an_alias_that_stands_for_little_is_read(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(lines([SHORT]))
    header = "files: &files data.jsonl\nconfigs:\n- config_name: default\n  data_files: *files"
    (tmp_path / "README.md").write_text(f"---\n{header}\n---\n")
    assert len(list(crosspack.read(tmp_path))) == 1
    (tmp_path / "README.md").write_text("---\na: &a [*a]\nconfigs: [*a]\n---\n")
    with pytest.raises(PackingError, match=r"README\.md cannot be read"):
        list(crosspack.read(tmp_path))


CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# A text that is made anew each time: of one that is known beforehand only references would add up.
WRITING = "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'abcdef' * (99 + b % 2) }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "limits", "says"),
    [
        (ENDLESS, {"seconds": 0.3}, r"record 1: the chat template runs for more than 0\.3 seconds"),
        (WRITING, {"growth": 32 << 20}, "record 1: the chat template takes more than 32 MB of memory"),
    ],
)
def test_a_chat_template_that_does_not_end_is_refused(tokenizer, monkeypatch, template, limits, says):
    monkeypatch.setattr(text, "limited", partial(text.limited, **limits))
    tokenizer = copy.deepcopy(tokenizer)
    good = tokenizer.chat_template
    tokenizer.chat_template = "{% if messages[0]['content'] == 'a' %}" + template + "{% endif %}" + good
    other = {"messages": [{**CHAT["messages"][0], "content": "other"}, CHAT["messages"][1]]}
    encoder = Encoder(tokenizer, Policy())
    with pytest.raises(PackingError, match=says):
        list(encoder([other, CHAT]))
    refused: list[Any] = []
    found = list(encoder.encoded([other, CHAT, other], lambda bad, error: refused.append(bad)))
    assert (len(found), len(refused)) == (2, 1)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_chat_template_may_not_write_more_than_a_record_may_hold(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{{ 'x' * 67108865 }}"
    with pytest.raises(PackingError, match="record 0: the chat template wrote more than 64 MB"):
        list(Encoder(tokenizer, Policy())([CHAT]))
