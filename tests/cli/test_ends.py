"""Commands that end early, or twice: each says what happened in a line, or finds that nothing is left to do."""

from __future__ import annotations

import os
import pickle
import resource
from pathlib import Path
from typing import Any

import pytest

from crosspack.encoding.text import Encoder, Policy
from crosspack.encoding.tokenizer import load_tokenizer
from crosspack.packing.workers import Failed, Processes
from packing_core.errors import PackingError
from packing_core.training.checkpoints import FOLDER
from tests.cli.console import run


def crosspack(*arguments: object, code: int = 0) -> str:
    result = run(*arguments)
    assert result.exit_code == code, result.output + result.stderr
    return " ".join((result.stderr if code else result.output).split())


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with the time of its last change."""
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def pack(data, model, tmp_path) -> list[object]:
    return ["pack", "--data", data, "--tokenizer", model.parent, "--capacity", 64, "--output", tmp_path / "out"]


def test_a_result_that_is_complete_is_not_made_again(pack, tmp_path):
    first = crosspack(*pack, "--json")
    before = files(tmp_path / "out")
    assert crosspack(*pack, "--json") == first and files(tmp_path / "out") == before
    assert "is not empty: pass --overwrite" in crosspack(*pack, "--seed", 1, code=2)
    crosspack(*pack, "--overwrite")
    assert files(tmp_path / "out") != before
    (tmp_path / "out" / "manifest.json").write_text("{}")
    assert "is not empty: pass --overwrite" in crosspack(*pack, code=2)


def test_a_training_that_is_complete_is_not_made_again(small, model, tmp_path):
    (tmp_path / "held-out.jsonl").write_text('{"text": "lazy dog"}\n')
    train = [*small, "--steps", 2, "--eval-data", tmp_path / "held-out.jsonl", "--output", tmp_path / "out"]
    crosspack(*train)
    before = files(tmp_path / "out")
    assert "complete already: pass --overwrite to train again" in crosspack(*train)
    assert files(tmp_path / "out") == before
    assert "is not empty: pass --resume, --overwrite" in crosspack(*train, "--lr", 0.5, code=2)
    for path in (model, model.parent / "tokenizer_config.json", tmp_path / "held-out.jsonl"):
        content, state = path.read_text(), path.stat()
        path.write_text(content.replace("48", "64") + "\n")
        assert "is not empty: pass --resume, --overwrite" in crosspack(*train, code=2)
        path.write_text(content)
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert "complete already" in crosspack(*train)


@pytest.mark.parametrize("restarted", [False, True], ids=["killed", "elastic restart"])
def test_a_training_that_ended_before_its_first_checkpoint_begins_again(small, tmp_path, monkeypatch, restarted):
    out = tmp_path / "out"
    (out / FOLDER / ".crosspack-partial-0").mkdir(parents=True)
    if restarted:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    crosspack(*small, "--steps", 1, "--save-every", 1, "--output", out)
    assert (out / FOLDER / "step-00000001").exists() and not list((out / FOLDER).glob(".crosspack*"))


def test_parts_that_are_joined_are_not_joined_again(pack, tmp_path):
    for part in (1, 2):
        crosspack(*pack, "--part", f"{part}/2")
    merge = ["pack", "--merge", "--output", tmp_path / "out", "--json"]
    first = crosspack(*merge)
    before = files(tmp_path / "out")
    assert crosspack(*merge) == first and files(tmp_path / "out") == before


class PanicException(BaseException):
    """Named as the one of the library ``tokenizers``, which no module exports."""


def test_a_tokenizer_that_panics_is_an_error_of_the_record(tokenizer, monkeypatch):
    encoder = Encoder(tokenizer, Policy())
    rust = encoder._rust

    class Panicking:
        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            if any("bad" in text for text in texts):
                raise PanicException("index out of bounds")
            return rust.encode_batch_fast(texts, **options)

    encoder._rust = Panicking()
    records = [{"text": "fox"}, {"text": "bad fox"}, {"text": "dog"}]
    with pytest.raises(PackingError, match=r"record 1: the tokenizer panicked, .*index out of bounds"):
        list(encoder(records))
    refused: list[Any] = []
    assert len(list(encoder.encoded(records, lambda bad, error: refused.append(bad.reason)))) == 2
    assert refused == ["the tokenizer panicked, index out of bounds"]


def test_a_tokenizer_that_panics_as_it_loads_is_one_line(model, monkeypatch):
    import transformers

    def panic(*args: Any, **options: Any) -> Any:
        raise PanicException("a precompiled map is damaged")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", panic)
    with pytest.raises(PackingError, match=r"the tokenizer panicked, .*a precompiled map is damaged"):
        load_tokenizer(str(model.parent))


def test_a_worker_that_cannot_be_started_is_said_to_be_one(monkeypatch):
    def refuse(self: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", refuse)
    with pytest.raises(PackingError, match=r"a worker process could not be started \(.*unavailable\): pass fewer"):
        Processes(print, 2)


class Unreadable:
    """Can be pickled, and not read again."""

    def __reduce__(self) -> Any:
        return _missing, ()

    def __call__(self, job: Any) -> Any:
        raise AssertionError


def _missing() -> Any:
    raise ModuleNotFoundError("No module named 'elsewhere'")


def test_a_worker_that_cannot_read_its_work_says_why():
    with Processes(Unreadable(), 1) as pool:
        pool.submit(0)
        ((_, result),) = pool.results()
    assert isinstance(result, Failed) and "could not begin" in str(result.error) and "elsewhere" in str(result.error)
    with pytest.raises(ModuleNotFoundError):
        pickle.loads(pickle.dumps(Unreadable()))


def ends_at_once(job: Any) -> Any:
    os._exit(1)
    yield


def test_a_worker_that_dies_is_named_whenever_it_dies():
    with Processes(ends_at_once, 1) as pool:
        pool.submit(0)
        with pytest.raises(PackingError, match="a worker process was killed"):
            list(pool.results())
    with Processes(print, 1) as pool:
        pool._processes[0].kill()
        pool._processes[0].join()
        pool.submit(0)
        with pytest.raises(PackingError, match="a worker process was killed"):
            list(pool.results())


def test_half_written_weights_are_one_line_that_names_them(small, tmp_path):
    crosspack(*small, "--steps", 1, "--output", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    whole = weights.read_bytes()
    for command, share in (("train", 0.0), ("bench", 0.5), ("train", 0.99)):
        weights.write_bytes(whole[: int(share * len(whole))])
        said = crosspack(command, "--model", tmp_path / "model", "--data", small[4], code=2)
        assert str(tmp_path / "model") in said.replace("\n", ""), said


@pytest.mark.parametrize(("more", "room"), [((), 60), (("--save-every", 1), 200)], ids=["model", "checkpoint"])
def test_a_disk_that_fills_up_is_one_line_and_the_run_can_be_repeated(small, tmp_path, more, room):
    """No file may grow beyond the limit: of the model, or of the optimizer's state in a checkpoint."""
    train = [*small, "--steps", 2, "--output", tmp_path / "out", *more]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room << 10, limits[1]))
    try:
        said = crosspack(*train, code=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"--output {tmp_path / 'out'}: " in said and "File too large" in said
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    crosspack(*train)
