"""``crosspack train`` of records with audio: from a file and the clips beside it to a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.console import done
from tests.cli.test_train_images import error_of, options

TURNS = [{"role": "user", "content": "w5 w6 w7"}, {"role": "assistant", "content": "w8 w9"}]


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Qwen2-Audio and its processor."""
    from tests.torch_backend.audio_models import audio_model
    from tests.torch_backend.audio_processors import PROCESSORS

    folder = tmp_path_factory.mktemp("qwen2_audio")
    audio_model("qwen2_audio").save_pretrained(folder)
    PROCESSORS["qwen2_audio"]().save_pretrained(folder)
    return folder


@pytest.fixture
def data(write: Any) -> Any:
    """Writes records to a file beside which lie the clips a.wav and b.wav, of other rates, and one that is torn."""
    from tests.torch_backend.audio_processors import sound, wav

    def made(*clips: list[str]) -> Path:
        path: Path = write("data/records.jsonl", [{"messages": TURNS, "audios": names} for names in clips])
        (path.parent / "a.wav").write_bytes(wav(sound(0.3)))
        (path.parent / "b.wav").write_bytes(wav(sound(0.5, 1), rate=22_050))
        (path.parent / "torn.wav").write_text("no sound")
        return path

    return made


def test_clips_beside_the_file_are_trained_and_audited(start: Path, data: Any, tmp_path: Path) -> None:
    path = data(["a.wav"], ["a.wav", "b.wav"], [], ["b.wav"], ["torn.wav"])
    result = done(*options(start, path, "--on-error", "skip", "--output", tmp_path / "out"))
    assert "audit: exact" in result.output
    about = json.loads((tmp_path / "out" / "crosspack.json").read_text())
    (skipped,) = about["skipped"]
    assert "records.jsonl:5: clip 0 cannot be decoded" in skipped


def test_what_cannot_be_trained_is_refused_by_its_line(start: Path, data: Any) -> None:
    path = data(["a.wav"], ["absent.wav"])
    assert "records.jsonl:2: clip 0 cannot be decoded (FileNotFoundError" in error_of(*options(start, path))
    assert "has audios, which --task dpo does not read" in error_of(
        *("train", "--task", "dpo", "--model", start, "--data", preferences(path), "--device", "cpu")
    )


def preferences(path: Path) -> Path:
    """Writes a record of a preference with a clip."""
    made = path.with_name("pairs.jsonl")
    made.write_text(json.dumps({"prompt": "w4", "chosen": "w5", "rejected": "w6", "audios": ["a.wav"]}) + "\n")
    return made
