"""``crosspack train --task``: the trainers of TRL and transformers, packed, from a file to a folder."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crosspack.cli import tasks
from crosspack.cli.settings import read_settings
from crosspack.cli.train import Examples
from packing_core.errors import PackingError
from packing_core.training.options import Options
from packing_core.training.tasks import TaskJob
from tests.cli.conftest import LLAMA
from tests.cli.console import one_line, run

ANSWERS = ["The quick brown fox.", "Pack my box with five dozen liquor jugs.", "How daft!", "zebras jump"]
PAIRS = [
    {"prompt": f"question {i % 3}:", "chosen": " " + ANSWERS[i % 4], "rejected": " " + ANSWERS[(i + 1) % 4]}
    for i in range(8)
]
RECORDS: dict[str, list[dict[str, Any]]] = {
    "dpo": PAIRS,
    "reward": PAIRS,
    "kto": [{"prompt": x["prompt"], "completion": x["chosen"], "label": i % 2 == 0} for i, x in enumerate(PAIRS)],
    "grpo": [{"prompt": x["prompt"]} for x in PAIRS],
    "classify": [{"text": text, "label": ["animals", "boxes"][i % 2]} for i, text in enumerate(ANSWERS * 2)],
    "mlm": [{"text": text} for text in ANSWERS * 4],
}
BERT = {"model_type": "bert", "intermediate_size": 48, "hidden_size": 32, "num_hidden_layers": 1}
REWARD = "def longer(completions, **_):\n    return [float(len(x)) for x in completions]\n"


@pytest.fixture
def weights(tokenizer, tmp_path) -> Path:
    """A folder with a small Llama and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    folder = tmp_path / "start"
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(**LLAMA | special | {"vocab_size": len(tokenizer)})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def options(task: str, model: Path, write: Any, *more: object) -> tuple[object, ...]:
    data = write("records.jsonl", RECORDS[task])
    return ("train", "--task", task, "--model", model, "--data", data, "--device", "cpu", "--batch-size", 4, *more)


@pytest.mark.parametrize(
    "task", ["dpo", "classify", *(pytest.param(x, marks=pytest.mark.slow) for x in ("kto", "reward"))]
)
def test_a_task_trains_and_writes_its_model(task, weights, write, tmp_path):
    result = run(*options(task, weights, write, "--steps", 2, "--output", tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert "audit: exact" in result.output
    about = json.loads((tmp_path / "out" / "crosspack.json").read_text())
    assert about["task"] == task
    assert [step["step"] for step in about["steps"]] == [1, 2]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    if task == "classify":
        assert config["id2label"] == {"0": "animals", "1": "boxes"}
    assert (tmp_path / "out" / "model.safetensors").is_file() and (tmp_path / "out" / "tokenizer.json").is_file()
    assert not (tmp_path / "out" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("merge", [False, True])
def test_adapters_alone_are_written_or_weights_with_them(merge, weights, write, tmp_path):
    chosen = ("--lora", 4, "--lora-alpha", 16, "--lora-targets", "q_proj,v_proj", *(["--merge-lora"] if merge else []))
    result = run(*options("dpo", weights, write, "--steps", 1, *chosen, "--output", tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "model.safetensors").is_file() == merge
    if not merge:
        adapters = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert (adapters["r"], adapters["lora_alpha"], set(adapters["target_modules"])) == (4, 16, {"q_proj", "v_proj"})


def test_a_contaminated_trainer_is_not_trained(weights, write, tmp_path, monkeypatch):
    from torch_backend.job import kinds, tasks

    class Leaks(str):
        verdict = "contaminated"

    monkeypatch.setattr(kinds, "audit_trainer", lambda _: Leaks("loss 1e+00"))
    monkeypatch.setattr(tasks, "_timed", lambda *_: pytest.fail("it was trained"))
    result = run(*options("dpo", weights, write, "--output", tmp_path / "out"))
    assert result.exit_code == 2
    assert "documents that are packed together see each other: loss 1e+00" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_policy_is_trained_by_functions_of_a_file(weights, write, tmp_path):
    (tmp_path / "scores.py").write_text(REWARD)
    short = ("--set", "max_completion_length=8", "--set", "num_generations=2", "--steps", 1, "--lr", 1e-3)
    result = run(*options("grpo", weights, write, "--reward", f"{tmp_path / 'scores.py'}:longer", *short))
    assert result.exit_code == 0, result.output
    assert "nothing will be kept" in result.output
    large = options("grpo", weights, write, "--reward", f"{tmp_path / 'scores.py'}:longer", *short)
    result = run(*large, "--batch-size", 64)
    assert "the training data fill no batch of GRPOTrainer: pass more of them" in result.stderr


@pytest.mark.slow
def test_masked_tokens_are_trained_in_rows(tokenizer, write, tmp_path):
    from transformers import AutoConfig, AutoModelForMaskedLM

    folder = tmp_path / "bert"
    config = AutoConfig.for_model(**BERT, num_attention_heads=2, vocab_size=len(tokenizer), max_position_embeddings=64)
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    tokenizer.add_special_tokens({"mask_token": "<|im_start|>"})
    tokenizer.save_pretrained(folder)
    result = run(*options("mlm", folder, write, "--capacity", 64, "--steps", 2))
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_a_run_that_was_saved_goes_on_and_its_checkpoints_go(weights, write, tmp_path, monkeypatch):
    out = ("--steps", 3, "--save-every", 1, "--output", tmp_path / "out")
    assert "has no checkpoint: start it without --resume" in one_line(
        run(*options("dpo", weights, write, *out, "--resume"))
    )
    monkeypatch.setattr(Examples, "report", lambda *_: sys.exit("the machine went down"))
    assert run(*options("dpo", weights, write, *out)).exit_code == 1
    assert len(list((tmp_path / "out" / "checkpoints").glob("checkpoint-*"))) == 1
    monkeypatch.undo()
    again = run(*options("dpo", weights, write, *out, "--resume"))
    assert again.exit_code == 0, again.output
    assert "step 1 of" not in again.output
    assert not (tmp_path / "out" / "checkpoints").exists()


@pytest.mark.slow
def test_a_task_keeps_its_best_step_ends_early_and_leaves_out_what_cannot_be_used(weights, write, tmp_path):
    held_out = write("held-out.jsonl", PAIRS[:2])
    data = write("bad.jsonl", [*PAIRS, {"prompt": "a", "chosen": "b"}])
    options = ("train", "--task", "dpo", "--model", weights, "--data", data, "--device", "cpu", "--batch-size", 2)
    kept = ("--eval-data", held_out, "--eval-every", 1, "--keep-best", "--early-stopping", 1, "--lr", 10.0)
    other = ("--optim", "sgd", "--neftune-alpha", 5, "--on-error", "skip", "--output", tmp_path / "out")
    result = run(*options, *kept, *other)
    assert result.exit_code == 0, result.output
    assert "left out 1 record that cannot be used, the first: " in " ".join(result.output.split())
    about = json.loads((tmp_path / "out" / "crosspack.json").read_text())
    losses = [step["eval_loss"] for step in about["steps"] if "eval_loss" in step]
    assert losses[-1] == min(losses)  # of the best weights, after the last step


def refused(task: str, weights: Path, write: Any, *more: object) -> str:
    return one_line(run(*options(task, weights, write, *more)))


def test_what_has_no_effect_on_a_task_is_refused_by_name(weights, write, tmp_path):
    assert "--task dpo has no --capacity: leave it out" in refused("dpo", weights, write, "--capacity", 64)
    assert "--task dpo has no --compare: leave it out" in refused("dpo", weights, write, "--compare")
    assert "--task dpo has no --rows-per-step" in refused("dpo", weights, write, "--rows-per-step", 4)  # its default
    assert "--merge-lora adds adapters" in refused("dpo", weights, write, "--merge-lora")
    assert "--task dpo runs on the first visible GPU" in refused("dpo", weights, write, "--device", "cuda:1")
    assert "--task reward scores whole answers" in refused("reward", weights, write, "--overflow", "truncate")
    assert "--task grpo needs --reward FILE.py:FUNCTION" in refused("grpo", weights, write)
    assert "leave it out of --task kto" in refused("kto", weights, write, "--reward", "a.py:b")
    assert "no such folder or file" not in refused("mlm", weights, write, "--overflow", "split")
    absent = refused("grpo", weights, write, "--reward", f"{tmp_path / 'absent.py'}:score")
    assert "pass FILE.py:FUNCTION, a Python file and a function in it" in absent
    assert "--set beta: --task sft reads optim, lr_scheduler_type" in one_line(run("train", "--set", "beta=1"))
    assert "--task sft has no --reward: pass --task grpo too" in one_line(run("train", "--reward", "a.py:b"))
    assert "--task dpo trains a model that is there" in one_line(run("train", "--task", "dpo"))
    assert "--lora-alpha is of adapters" in refused("dpo", weights, write, "--lora-alpha", 4)
    unknown = run(*options("dpo", weights, write, "--set", "max_lenght=1"))
    assert unknown.stderr.splitlines()[-1].endswith(
        "--set max_lenght: DPOConfig has no such argument: is it max_length?"
    )


def test_answers_longer_than_the_model_are_refused_truncated_or_dropped_and_never_cut_unasked(weights, write):
    file = weights / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 64}))
    long = {"prompt": "question:", "chosen": " fox" * 200, "rejected": " dog"}
    data = write("long.jsonl", [long, *PAIRS])
    options = ("train", "--task", "dpo", "--model", weights, "--data", data, "--device", "cpu", "--steps", 1, "--json")
    refused = run(*options)
    assert "record 0 has an answer of" in refused.stderr
    assert "the model takes 64: pass --overflow truncate or drop" in refused.stderr
    assert run(*options, "--overflow", "truncate").exit_code == 0
    assert run(*options, "--overflow", "drop").exit_code == 0


def test_classes_that_are_all_one_are_refused(weights, write):
    alike = write("alike.jsonl", [{"text": text, "label": "fox"} for text in ANSWERS])
    classify = run("train", "--task", "classify", "--model", weights, "--data", alike, "--device", "cpu")
    assert "the only label is 'fox': pass records of two classes or more" in classify.stderr


REFUSED_REWARDS = {
    "def few(completions, **_): return [1.0]": "returned 1 score for 4 completions: return one for each",
    "def few(completions, **_): raise KeyError('answer')": "KeyError: 'answer'",
    "import crosspack as c\ndef few(completions, **_): c.pack([[1] * 9], 4)": "CapacityError: document 0 has 9 tokens",
    "def few(completions, **_): return 1.0": "TypeError: object of type 'float' has no len()",
}


@pytest.mark.parametrize("text", REFUSED_REWARDS)
def test_a_reward_that_fails_or_scores_too_few_is_named(text, tmp_path):
    (tmp_path / "score.py").write_text(text)
    score = tasks.reward_function(f"{tmp_path / 'score.py'}:few")
    with pytest.raises(PackingError) as error:
        score(completions=["a"] * 4, prompts=["b"] * 4)
    assert f"--reward {tmp_path / 'score.py'}:few" in str(error.value) and REFUSED_REWARDS[text] in str(error.value)


def test_values_that_a_trainer_cannot_use_are_errors_of_the_command(weights, write):
    said = run(*options("dpo", weights, write, "--set", "beta=abc"))
    assert said.exit_code == 2 and "--set beta is 'abc': pass a number" in said.stderr
    said = run(*options("dpo", weights, write, "--set", "loss_type=[absent]"))
    assert said.exit_code == 2 and "--task dpo: " in said.stderr and "absent" in said.stderr
    labels = write("labels.jsonl", [{**RECORDS["kto"][0], "label": "good"}])
    kto = run("train", "--task", "kto", "--model", weights, "--data", labels, "--device", "cpu")
    assert "label is 'good': --task kto reads true or false" in one_line(kto)


def test_warmup_is_a_share_of_the_steps_of_every_task(tmp_path):
    from transformers import TrainingArguments

    from torch_backend.job.kinds import task_arguments

    def steps(warmup: float) -> int:
        options = Options(warmup=warmup)
        job = TaskJob(task="mlm", model="", tokenizer="", records=[], options=options)
        return task_arguments(job, TrainingArguments, tmp_path).get_warmup_steps(40)

    assert [steps(warmup) for warmup in (0.0, 0.5, 1.0)] == [0, 20, 40]


def test_a_record_without_the_columns_of_a_task_is_named(weights, write):
    data = write("bad.jsonl", [*PAIRS, {"prompt": "a", "chosen": "b"}])
    said = one_line(run("train", "--task", "dpo", "--model", weights, "--data", data, "--device", "cpu"))
    assert "bad.jsonl:9 has prompt, chosen: --task dpo reads chosen and rejected" in said
    assert "--task reward needs --data, records with chosen and rejected" in one_line(
        run("train", "--task", "reward", "--model", weights)
    )


def test_preferences_have_a_prompt_in_all_records_or_in_none(weights, write):
    alone = {"prompt": None, "chosen": "b", "rejected": "c"}
    for records, number in (([*PAIRS, alone], 9), ([alone, *PAIRS], 2)):
        dpo = ("train", "--task", "dpo", "--model", weights, "--data", write("mixed.jsonl", records), "--device", "cpu")
        said = run(*dpo).stderr
        assert f"mixed.jsonl:{number} has chosen, rejected" in said and "give all the same columns" in said
    result = run(*dpo[:-3], write("mixed.jsonl", [alone] * 8), "--device", "cpu", "--steps", 1)
    assert result.exit_code == 0, result.output


WRONG: tuple[tuple[str, str, Any, str], ...] = (
    ("dpo", "chosen", ["a text"], "a text or messages"),
    ("reward", "rejected", {"role": "user"}, "a text or messages"),
    ("kto", "completion", 3, "a text or messages"),
    ("kto", "label", 2, "true or false"),
    ("grpo", "prompt", "", "a text that is not empty, or messages"),
    ("classify", "label", ["fox"], "a text or a whole number"),
    ("mlm", "text", [1], "a text"),
    ("mlm", "input_ids", [5.5, 6], "a list of whole numbers"),
)


@pytest.mark.parametrize(("task", "column", "value", "reads"), WRONG)
def test_a_value_of_another_kind_is_named_by_its_record_or_left_out(task, column, value, reads, write):
    first = {**RECORDS[task][0], column: value}
    if column == "input_ids":  # the texts of the task come first
        del first["text"]
    for records, number in (([first, *RECORDS[task]], 1), ([*RECORDS[task], first], len(RECORDS[task]) + 1)):
        path = write("data.jsonl", records)
        options = tasks.TrainOptions(task=task, data=[str(path)])
        with pytest.raises(PackingError, match=rf"data\.jsonl:{number}: {column} is .*: --task {task} reads {reads}"):
            tasks.read_examples(options, tasks.open_examples(options, options.data, None, "--data"))
        options = replace(options, on_error="skip")
        examples = tasks.read_examples(options, tasks.open_examples(options, options.data, None, "--data"))
        assert [dict(record) for record in examples] == RECORDS[task]
    options = replace(options, data=[str(write("data.jsonl", [first]))])
    with pytest.raises(
        PackingError, match=r"none of the records of .*data\.jsonl can be used, the first because .*:1: "
    ):
        tasks.read_examples(options, tasks.open_examples(options, options.data, None, "--data"))


def test_documents_without_tokens_are_named_or_left_out():
    from torch_backend.job.kinds import MaskedTokens

    kind: Any = MaskedTokens.__new__(MaskedTokens)
    kind.processor = lambda text: {"input_ids": list(text.encode())}
    kind.job, kind.skipped = SimpleNamespace(on_error="skip"), []
    assert kind.dataset([{"text": "a"}, {"text": ""}])["input_ids"] == [[97]]
    assert kind.skipped == ["example 1 has no tokens"]
    with pytest.raises(
        PackingError, match="^none of the 1 records can be used, the first because example 0 has no tokens$"
    ):
        kind.dataset([{"text": ""}])
    kind.job = SimpleNamespace(on_error="stop")
    with pytest.raises(PackingError, match="example 1 has no tokens: leave it out, or pass --on-error skip"):
        kind.dataset([{"text": "a"}, {"text": ""}])


def test_columns_that_the_first_record_lacks_reach_the_trainer():
    from torch_backend.job.kinds import TaskKind

    records = [{"prompt": "a"}, {"prompt": "b", "answer": 3}]
    dataset: Any = TaskKind.dataset(SimpleNamespace(example=dict), records)  # type: ignore[arg-type]
    assert dataset.to_list() == [{"prompt": "a", "answer": None}, records[1]]
    for value in ("three", [3], 2**70):
        with pytest.raises(PackingError, match='column "answer" cannot be one column .*: give all its values one type'):
            TaskKind.dataset(SimpleNamespace(example=dict), [*records, {"answer": value}])  # type: ignore[arg-type]


def answers(task: str, records: list[dict[str, Any]], *, images: bool) -> Any:
    """The data of a task of TRL's, whose first data set left out a record."""
    from torch_backend.job.kinds import Answers

    kind: Any = Answers.__new__(Answers)
    kind.job = SimpleNamespace(task=task, records=records, on_error="skip", images=images)
    kind.skipped = ["a record of the other data"]
    return kind


@pytest.mark.parametrize("images", [False, True], ids=["texts", "images"])
def test_data_of_which_no_record_can_be_used_say_why(images):
    kind = answers("dpo", PAIRS, images=images)
    with pytest.raises(PackingError, match="none of the 2 records can be used, the first because example 0 has chosen"):
        kind.dataset([{"chosen": "b"}, {"prompt": "c"}])


@pytest.mark.parametrize("images", [False, True], ids=["texts", "images"])
def test_a_prompt_that_is_null_is_none(images):
    records = [{"prompt": None, "chosen": "b", "rejected": "c"}] * 2
    assert "prompt" not in answers("dpo", records, images=images).dataset(records).column_names


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("beta", "pass a field of the trainer's arguments and its value"),
        ("learning_rate=1", "pass --lr in its place"),
        ("a=[1", "--set a=[1:"),
    ],
)
def test_a_setting_that_cannot_be_read_is_refused(text, says):
    with pytest.raises(PackingError) as error:
        read_settings([text])
    assert says in str(error.value)
    with pytest.raises(PackingError, match="given twice"):
        read_settings(["a=1", "a=2"])


def test_settings_are_read_as_yaml():
    assert read_settings(["beta=0.2", "loss-type=[ipo, hinge]", "flag=true"]) == {
        "beta": 0.2,
        "loss_type": ["ipo", "hinge"],
        "flag": True,
    }
