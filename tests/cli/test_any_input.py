"""Every input of ``crosspack pack``, records, files and options, ends in a result, or one line and exit status 2.

A few seconds of generated inputs by default, always the same. ``CROSSPACK_EXAMPLES=5000`` draws so many new ones.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from crosspack.cli import options
from crosspack.cli.records import open_records
from tests.cli.console import run

EXAMPLES = int(os.environ.get("CROSSPACK_EXAMPLES", "0"))
generated = settings(
    max_examples=EXAMPLES or 40,
    derandomize=not EXAMPLES,
    database=None,
    suppress_health_check=list(HealthCheck),
)

# what a command line can hold
words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
texts = st.text(st.characters(codec=None), max_size=20) | st.sampled_from(["2024-01-01", "7", "", "a b c d e f g h"])
numbers = st.integers(0, 300) | st.integers(-(2**70), 2**70) | st.floats()
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
tokens = st.lists(st.integers(0, 300), max_size=9) | st.lists(numbers | st.none(), max_size=3)
marks = st.lists(st.integers(-1, 3), max_size=9)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]) | values, "content": texts | values}),
    max_size=4,
)


def column(likely: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly of the right kind, else anything."""
    return likely | likely | likely | values


kinds = [
    {"text": column(texts)},
    {"prompt": column(texts | messages), "completion": column(texts | messages)},
    {"messages": column(messages), "tools": values},
    {
        "input_ids": column(tokens),
        "labels": column(tokens),
        "seq_lengths": column(marks),
        "attention_mask": column(marks),
        "position_ids": column(marks),
        "loss_mask": column(marks),
        "prompt_length": st.integers(-1, 4) | marks,
    },
]
records = st.one_of(
    *(st.fixed_dictionaries({}, optional=kind) for kind in kinds),
    *(st.fixed_dictionaries(kind) for kind in kinds[:2]),
    values,
)


@st.composite
def tokenised(draw: st.DrawFn) -> dict[str, Any]:
    """A row whose columns have one length, and often agree."""
    ids = draw(st.lists(st.integers(0, 300), min_size=1, max_size=9))
    per_token = st.lists(st.integers(0, 2), min_size=len(ids), max_size=len(ids))
    others = ("labels", "attention_mask", "position_ids", "loss_mask", "segment_ids")
    row = draw(st.fixed_dictionaries({}, optional=dict.fromkeys(others, per_token)))
    if draw(st.booleans()):
        row["labels"] = [-100 if draw(st.booleans()) else token for token in ids]
    return {"input_ids": ids, **row}


@st.composite
def files(draw: st.DrawFn) -> tuple[str, bytes]:
    """A name and the bytes of a data file, which may be damaged."""
    rows = draw(st.lists(tokenised() | records, max_size=4))
    suffix = draw(st.sampled_from([".jsonl", ".json", ".parquet", ".arrow", ".txt", ".csv"]))
    content = encoded(rows, suffix)
    if content is None:
        suffix, content = ".jsonl", encoded(rows, ".jsonl") or b""
    if draw(st.integers(0, 3)) == 0:
        content = content[: draw(st.integers(0, len(content)))]
    if content and draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(content) - 1))
        content = content[:at] + draw(st.binary(max_size=3)) + content[at + 1 :]
    name = draw(st.sampled_from(["data", "[a-b]*", "train", "ünï {code}", "test"]))
    return name + suffix, content


def encoded(rows: list[Any], suffix: str) -> bytes | None:
    """The rows in a format; None if the format cannot hold them."""
    if suffix == ".jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    if suffix in (".txt", ".csv"):
        return ("text\n" + "".join(f"{row}\n" for row in rows)).encode(errors="surrogatepass")
    if suffix == ".json":
        return json.dumps(rows, ensure_ascii=False, indent=1).encode(errors="surrogatepass")
    sink = pa.BufferOutputStream()
    try:
        table = pa.Table.from_pylist(rows)
        if suffix == ".parquet":
            pq.write_table(table, sink)
        else:
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
    except (pa.ArrowException, ValueError, TypeError, AttributeError, OverflowError):
        return None
    return sink.getvalue().to_pybytes()


@pytest.fixture(autouse=True)
def loaded(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(options, "load_tokenizer", lambda name, trust_remote_code: tokenizer)
    monkeypatch.setattr(options, "check_tokenizer", lambda name: None)


def outcome(*arguments: object) -> bool:
    """Returns whether the command succeeded; fails unless it did, or ended with one line and status 2."""
    result = run("pack", *arguments)
    if result.exit_code == 0:
        return True
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip("\n").split("\n")
    assert line.startswith("crosspack: ") and len(line) > 30, line
    event(line.split(": ")[-1][:40])
    return False


@generated
@given(
    file=files(),
    overflow=st.sampled_from(["error", "truncate", "split", "drop"]),
    loss=st.sampled_from(["completion", "all"]),
)
def test_any_file(file, overflow, loss):
    with TemporaryDirectory() as folder:
        path, out = Path(folder, file[0]), Path(folder, "out")
        path.write_bytes(file[1])
        done = outcome(
            *("--data", path, "--tokenizer", "t", "--output", out),
            *("--capacity", 16, "--overflow", overflow, "--loss", loss),
        )
        assert out.exists() == done
        assert path.read_bytes() == file[1]
        if done:
            rows = list(open_records(str(out)))
            tokens = json.loads((out / "manifest.json").read_text())["tokens"]
            assert sum(len(row["input_ids"]) for row in rows) == tokens
            assert all((row["labels"] != -100).any() for row in rows)


configs = st.fixed_dictionaries({"config_name": texts, "data_files": st.sampled_from(["*", "../*", "[", ""]) | values})
headers = texts | (st.lists(configs, max_size=2) | values).map(lambda value: json.dumps({"configs": value}))
names_of_files = st.sampled_from(["a.jsonl", "train.jsonl", "test/b.jsonl", "c.parquet", "folder.py", "d.json"])


@generated
@given(
    readme=st.none() | texts | st.builds("---\n{}\n---".format, headers),
    names=st.lists(names_of_files, max_size=3),
    split=st.sampled_from(["train", "test"]) | texts,
)
def test_any_folder(readme, names, split):
    with TemporaryDirectory() as folder:
        data = Path(folder, "folder")
        data.mkdir()
        for name in names:
            (data / name).parent.mkdir(exist_ok=True)
            script = name == "folder.py"
            content = b"raise SystemExit" if script else encoded([{"text": "a b c"}], Path(name).suffix)
            (data / name).write_bytes(content or b"")
        if readme is not None:
            (data / "README.md").write_bytes(readme.encode(errors="surrogatepass"))
        outcome("--data", data, f"--split={split}", "--tokenizer", "t", "--output", Path(folder, "out"))


PLACES = [".", "..", "file", "file/below", "link", "a" * 300, "out"]


@generated
@given(
    capacity=st.integers(1, 40) | st.integers(1, 1 << 24),
    block=st.integers(1, 99) | st.integers(1, 1 << 40),
    rows=st.integers(1, 4) | st.integers(1, 2**70),
    seed=st.integers(0, 9) | st.integers(-(2**70), 2**70),
    format=st.sampled_from(["parquet", "arrow"]),
    flags=st.lists(st.sampled_from(["--bos", "--no-bos", "--eos", "--no-eos"]), max_size=2),
    output=words.map(lambda text: text.replace("/", "_")) | st.sampled_from(PLACES),
    data=words | st.sampled_from(["file", ".", "data.jsonl", "data.jsonl/x"]),
)
def test_any_options(capacity, block, rows, seed, format, flags, output, data):
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_HUB_OFFLINE", "1")
        patched.setattr("crosspack.reading.records.is_hub_name", lambda name: False)
        patched.chdir(folder)
        Path("file").write_text("mine")
        Path("link").symlink_to("nowhere")
        Path("data.jsonl").write_text('{"text": "a b c d e f g h i j"}\n' * 9)
        given = f"--tokenizer=t --capacity={capacity} --block-size={block} --workers=1 --rows-per-file={rows}"
        more = f"--seed={seed} --format={format} --overflow=split"
        outcome(f"--output={output}", f"--data={data}", *given.split(), *more.split(), *flags)
        assert Path("file").read_text() == "mine"
