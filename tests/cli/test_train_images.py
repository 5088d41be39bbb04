"""``crosspack train`` of records with images: from a file and the images beside it to a folder."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crosspack.cli import tasks, traincommand
from crosspack.cli.trainoptions import TrainOptions
from crosspack.reading.places import Place, Row
from packing_core.errors import LayoutError, PackingError, UnsupportedError
from tests.cli.console import done, run

USER, ASSISTANT = "w5 w6 w7", "w8 w9"


def chat(*shown: str, question: str = USER, answer: str = ASSISTANT) -> dict[str, Any]:
    """A record about the images at these paths."""
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": list(shown)}


RECORDS = [chat("a.png"), chat("a.png", "b.png"), chat(), chat("b.png", answer="w10 w11"), chat("b.png", "a.png")]


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny LLaVA and its processor."""
    from tests.torch_backend.processors import tiny_processor
    from tests.torch_backend.vision_models import vision_model

    folder = tmp_path_factory.mktemp("llava")
    vision_model("llava").save_pretrained(folder)
    tiny_processor("llava").save_pretrained(folder)
    return folder


@pytest.fixture
def data(write: Any, tmp_path: Path) -> Any:
    """Writes records to a file beside which lie the images a.png and b.png."""
    from tests.torch_backend.processors import picture

    def made(records: list[dict[str, Any]]) -> Path:
        path: Path = write("data/records.jsonl", records)
        for number, name in enumerate(("a.png", "b.png")):
            picture(number).save(path.parent / name)
        (path.parent / "torn.png").write_text("no image")
        return path

    return made


def error_of(*arguments: object) -> str:
    """The last line on standard error of a command that is refused; transformers shows its progress before it."""
    result = run(*arguments)
    assert result.exit_code == 2 and "Traceback" not in result.output, result.output
    return result.stderr.strip().splitlines()[-1]


def options(start: Path, path: Path, *more: object) -> tuple[object, ...]:
    rows = ("--capacity", 64, "--batch-size", 2, "--steps", 2, "--device", "cpu", "--lr", 1e-2)
    return ("train", "--model", start, "--data", path, *rows, *more)


def test_images_beside_the_file_are_trained_and_audited(start: Path, data: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = data(RECORDS)
    result = done(*options(start, path, "--eval-data", path, "--output", tmp_path / "out"))
    assert "5 records, next tokens of documents with images" in " ".join(result.output.split())
    assert "audit: exact" in result.output
    about = json.loads((tmp_path / "out" / "crosspack.json").read_text())
    assert about["task"] == "sft" and about["skipped"] == [] and "eval_loss" in about["steps"][-1]
    before, after = (load_file(folder / "model.safetensors") for folder in (start, tmp_path / "out"))
    moved = {name for name in before if not before[name].equal(after[name])}
    assert any("vision_tower" in name for name in moved) and any("language_model" in name for name in moved)
    assert (tmp_path / "out" / "processor_config.json").is_file()


def test_a_first_row_of_one_document_does_not_end_the_audit(start: Path, data: Any) -> None:
    path = data([chat("a.png", "b.png", "a.png"), chat(), chat()])
    result = " ".join(done(*options(start, path, "--batch-size", 1, "--seed", 1)).output.split())
    assert "audit: exact" in result and "2 documents in 1 row" in result
    result = " ".join(
        done(*options(start, data([chat("a.png", "b.png", "a.png")] * 2), "--batch-size", 1)).output.split()
    )
    assert "the batch, the best of 2, has no trained document behind another one" in result


def of_task(task: str, *shown: str) -> dict[str, Any]:
    """A record of a task of TRL's about the images at these paths."""
    answers = {
        name: [{"role": "assistant", "content": words}] for name, words in (("chosen", "w8"), ("rejected", "w9 w4"))
    }
    more = {"dpo": answers, "kto": {"completion": answers["chosen"], "label": len(shown) > 1}, "grpo": {}}
    return {"prompt": [{"role": "user", "content": USER}], "images": list(shown), **more[task]}


@pytest.mark.parametrize("task", ["dpo", *(pytest.param(x, marks=pytest.mark.slow) for x in ("kto", "grpo"))])
def test_other_tasks_train_on_images_too(task: str, start: Path, data: Any, tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text(
        "def even(completion_ids, **_):\n    return [sum(x) % 7 for x in completion_ids]\n"
    )
    more: tuple[object, ...] = ("--on-error", "skip", "--output", tmp_path / "out")
    if task == "grpo":
        more += ("--reward", f"{tmp_path / 'scores.py'}:even", "--set", "max_completion_length=4")
        more += ("--set", "num_generations=2")
    shown = (("a.png",), ("b.png", "a.png"), ("torn.png",), ("b.png",), ("a.png",))
    path = data([of_task(task, *images) for images in shown])
    given = ("train", "--task", task, "--model", start, "--data", path, "--device", "cpu", "--batch-size", 4)
    given += ("--steps", 1)
    result = done(*given, *more)
    assert "audit: exact" in result.output
    about = json.loads((tmp_path / "out" / "crosspack.json").read_text())
    assert len(about["skipped"]) == 1 and "records.jsonl:3: image 0 cannot be decoded" in about["skipped"][0]
    refused = error_of(*given, *more[2:], "--overwrite")
    assert "records.jsonl:3: image 0 cannot be decoded (UnidentifiedImageError" in refused


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (chat("a.png", question="<image> w5"), r"records\.jsonl:2: LlavaProcessor raised "),
        (
            {
                "messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "w5"}]}],
                "images": ["a.png", "b.png"],
            },
            r"records\.jsonl:2 has 1 places for images and 2 images: they must agree",
        ),
        (
            chat("a.png", "b.png", "a.png", "b.png"),
            r"records\.jsonl:2 has \d+ tokens, 64 of them of images, and --capacity is 64: raise --capacity",
        ),
        ({"messages": [], "videos": ["a.mp4"]}, r"records\.jsonl:2 has a video: run the processor on it first"),
        ({"images": ["a.png"]}, r"records\.jsonl:2 has images: --task sft reads messages, or prompt and completion"),
    ],
)
def test_errors_name_the_file_and_the_line(record: dict[str, Any], says: str, start: Path, data: Any) -> None:
    assert re.search(says, error_of(*options(start, data([RECORDS[0], record]))))


def test_a_model_and_data_that_do_not_go_together_are_refused(start: Path, data: Any, tmp_path: Path) -> None:
    from tests.torch_backend.processors import tiny_tokenizer

    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    refused = error_of(*options(start, data(RECORDS), "--tokenizer", tmp_path / "tokenizer"))
    assert f"records have images or audio, and {tmp_path / 'tokenizer'} has no processor of them, only " in refused
    texts = data([{"text": "w5 w6 w7"}] * 2)
    refused = error_of("train", "--model", start, "--data", texts, "--device", "cpu")
    assert f"--model {start} takes images (llava), and none of the records of --data has any" in refused
    path = data(RECORDS)
    assert "--task sft trains a model that is there: pass --model" in error_of("train", "--data", path)
    assert "--task sft has no --compare: leave it out" in error_of(*options(start, path, "--compare"))
    workers = "--task sft has no --workers: pass --set dataloader_num_workers=N: workers of the loader make batches"
    assert workers in error_of(*options(start, path, "--workers", 2))
    pairs = data([{"chosen": "w5", "rejected": "w6", "images": ["a.png"]}])
    reward = error_of("train", "--task", "reward", "--model", start, "--data", pairs)
    assert "records.jsonl:1 has images, which --task reward does not read: leave that out, or build the" in reward


def test_paths_are_those_from_the_file_and_all_else_stays(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("")
    part = {"type": "image", "image": "a.png"}
    record = {
        "messages": [{"role": "user", "content": [part, {"type": "text", "text": "a.png"}]}],
        "images": ["a.png", "/b.png", "https://c.org/d.png", {"bytes": b"1", "path": "e.png"}, {"path": "f.png"}],
        "text": "a.png",
    }
    found = tasks.with_whole_paths(Row(record, Place(str(tmp_path / "data.jsonl"), "line"), 4))
    assert found.where == f"{tmp_path / 'data.jsonl'}:5" and found["text"] == "a.png"
    assert found["messages"][0]["content"] == [
        {**part, "image": str(tmp_path / "a.png")},
        {"type": "text", "text": "a.png"},
    ]
    assert found["images"] == [
        str(tmp_path / "a.png"),
        "/b.png",
        "https://c.org/d.png",
        {"bytes": b"1", "path": "e.png"},
        {"path": str(tmp_path / "f.png")},
    ]
    elsewhere = Row(record, Place("owner/name", "row"), 0)
    assert tasks.with_whole_paths(elsewhere) is elsewhere


def test_chats_in_the_format_of_openai_train_as_those_with_a_column_of_images(start: Path, data: Any) -> None:
    def written(question: str, *shown: str) -> dict[str, Any]:
        parts = [{"type": "image_url", "image_url": {"url": name}} for name in shown]
        turns = [{"role": "user", "content": [*parts, {"type": "input_text", "text": question}]}]
        return {"messages": [*turns, {"role": "assistant", "content": [{"type": "output_text", "text": ASSISTANT}]}]}

    shown = (("a.png",), ("b.png", "a.png"), ())
    columns = [chat(*names) for names in shown]
    parts = [written(USER, *names) for names in shown]
    results = [" ".join(done(*options(start, data(records))).output.split()) for records in (columns, parts)]
    assert all("audit: exact" in result for result in results)
    losses = [re.findall(r"loss [\d.]+ to [\d.]+", result) for result in results]
    assert losses[0] and losses[0] == losses[1]


def test_what_stands_beside_a_chat_belongs_to_it(start: Path, data: Any) -> None:
    def read(*records: dict[str, Any], on_error: str = "stop") -> list[Row]:
        options = TrainOptions(task="sft", data=[str(data([*records]))], on_error=on_error)
        return tasks.read_examples(options, tasks.open_examples(options, options.data, None, "--data"))

    tools = [{"type": "function", "function": {"name": "w4"}}]
    (record,) = read(chat("a.png") | {"system": "w10", "tools": json.dumps(tools)})
    assert (
        record["messages"][0] == {"role": "system", "content": "w10"} and record["messages"][1:] == chat()["messages"]
    )
    assert record["tools"] == tools and record.where.endswith("records.jsonl:1") and len(record["images"]) == 1
    said = chat("a.png")
    said["messages"][1]["train"] = False
    unmarked = chat("a.png")
    unmarked["messages"][0]["weight"] = 0
    assert [record.number for record in read(said, unmarked, on_error="skip")] == [1]
    for wrong, says in (
        (said, r"records\.jsonl:1: message 1 says that it is not trained, which chats with images cannot say: end"),
        (chat("a.png") | {"tools": "{"}, r"records\.jsonl:1: tools is a string that is not JSON"),
        (
            {"prompt": "w4", "completion": "w5", "system": "w6"},
            r"records\.jsonl:1 has a system beside a prompt of text",
        ),
    ):
        with pytest.raises(PackingError, match=says):
            read(wrong)


def test_images_are_looked_for_in_all_records_for_a_model_that_may_take_them(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def downloaded(name: str, file: str) -> str:
        if name == "owner/absent":
            raise OSError("no such file on the hub")
        return str(tmp_path / name.removeprefix("owner/") / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", downloaded)

    def shown_in(*data: str, **options: Any) -> bool:
        return tasks.have_images(TrainOptions(data=list(data), **options))

    plain = [{"text": "a"}] * 150
    first, second = write("plain.jsonl", plain), write("later.jsonl", [*plain, {"text": "a", "image": "a.png"}])
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "config.json").write_bytes(b'{"thinker_config": {"vision_config": {}}, "\xe4": 0}')
    for model in (str(tmp_path / "shown"), "owner/shown"):
        assert not shown_in(str(first), model=model)
        assert shown_in(f"{first}:0.5", f"{second}:0.5", model=model)
        assert shown_in(str(second), model=model, limit=151) and not shown_in(str(second), model=model, limit=150)
    for other in (None, str(tmp_path / "text"), str(tmp_path), "owner/text", "owner/absent"):
        assert not shown_in(str(second), model=other)
        assert shown_in(str(write("first.jsonl", [{"text": "a", "image": "a.png"}])), model=other)
    assert not shown_in("absent.jsonl") and not tasks.have_images(TrainOptions(data=None))
    chats = [{"chat": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}]}]
    assert shown_in(str(write("chats.jsonl", [{"text": "a"}, *chats])), column=["messages=chat"])


BESIDE = ({"audio": "a.wav"}, {"videos": ["a.mp4"]}, {"images": ["a.png"], "audios": ["a.wav"]})


@pytest.mark.parametrize("task", ["dpo", "kto", "grpo"])
@pytest.mark.parametrize("beside", BESIDE, ids=["audio", "videos", "images and audios"])
def test_media_that_a_task_does_not_read_are_refused_by_the_record(task: str, beside: Any, write: Any) -> None:
    path = write("data.jsonl", [of_task(task, "a.png"), of_task(task) | beside])
    options = TrainOptions(task=task, data=[str(path)])
    name = [*beside][-1]
    with pytest.raises(
        UnsupportedError, match=rf"data\.jsonl:2 has {name}, which --task {task} does not read: leave that"
    ):
        tasks.read_examples(options, tasks.open_examples(options, options.data, None, "--data"))
    options = replace(options, on_error="skip")
    kept = tasks.read_examples(options, tasks.open_examples(options, options.data, None, "--data"))
    assert [record.number for record in kept] == [0]


@pytest.mark.parametrize(
    "shown", [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "image", "image": "a.png"}]
)
@pytest.mark.parametrize("turns", ["prompt", "completion", "rejected"])
def test_images_of_preferences_stand_in_their_column_alone(shown: Any, turns: str) -> None:
    from torch_backend.job.kinds import _with_images

    record = {"prompt": "w5", turns: [{"role": "user", "content": [shown]}], "images": []}
    with pytest.raises(LayoutError, match="example 2 has images in its messages: put them into"):
        _with_images(record, "example 2")


def test_what_is_wrong_with_the_options_is_said_before_all_records_are_read(
    start: Path, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traincommand, "have_images", lambda options: pytest.fail("the records were read"))
    command = ("train", "--data", data([chat()]), "--model")
    assert "no such folder or file" in error_of(*command, "./nope")
    assert "--tokenizer ./nope: no such" in error_of(*command, start, "--tokenizer", "./nope")
    assert "--set" in error_of(*command, start, "--set", "learning_rate")
    assert "--merge-lora adds adapters" in error_of(*command, start, "--merge-lora")
    assert "--keep-best goes by evaluations" in error_of(*command, start, "--keep-best")


def test_an_image_behind_many_texts_is_trained(start: Path, data: Any) -> None:
    result = " ".join(done(*options(start, data([chat()] * 120 + [chat("a.png")]))).output.split())
    assert "121 records, next tokens of documents with images" in result and "audit: exact" in result
