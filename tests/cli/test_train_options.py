"""Options of ``crosspack train``: files of options, evaluation, where figures go, what is refused by name."""

from __future__ import annotations

import json
import re
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from crosspack.cli import checks, runfile
from crosspack.cli import train as train_command
from crosspack.cli.trainoptions import LossOptions
from crosspack.reading.yaml_text import load_yaml
from packing_core.planning.cost import Cost
from tests.cli.console import losses, one_line, run, words


def test_a_file_of_options_takes_the_place_of_defaults_and_the_command_line_wins(small, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("rows-per-step: 2\nsteps: 3\ndecay: constant\nwarmup: 0\nlr: 2e-3\ndtype: bfloat16\nbos: null\n")
    options = ("train", "--config", file, *small[1:-2])
    first = run(*options, "--steps", 2, "--output", tmp_path / "first")
    assert first.exit_code == 0, first.output
    assert len(losses(tmp_path / "first")) == 2
    written = tmp_path / "first" / "run.yaml"
    assert {"lr: 0.002", "steps: 2", "rows-per-step: 2", 'dtype: "bfloat16"', "eos: null", 'packing: "mixed"'} <= set(
        written.read_text().splitlines()
    )
    again = run("train", "--config", written, "--output", tmp_path / "again")
    assert again.exit_code == 0, again.output
    assert losses(tmp_path / "again") == losses(tmp_path / "first")
    assert (tmp_path / "again" / "run.yaml").read_text() == written.read_text().replace("first", "again")


def test_a_file_of_options_holds_every_text():
    texts = ["fox", "\u00e9", "\U0001f98a.jsonl", "a\udc80", "\x7f\x85\ufeff", r"\ud83e\udd8a", 'a\n\t"b"', "no", "1e5"]
    written = runfile.as_yaml({"data": texts, "lr": 1e-05, "eos": None, "resume": True})
    assert written.isascii()
    assert load_yaml(written) | {"lr": 1e-05} == {"data": texts, "lr": 1e-05, "eos": None, "resume": True}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("learning-rate: 1", "the command has no option --learning-rate: is it lr?"),
        ("nonsense: 1", "the command has no option --nonsense: see its --help"),
        ("lr: 1\nsteps: 2\nlr: 2", "line 1: lr is there twice: keep one of them"),
        ("resume: true", "the command has no option --resume"),
        ("steps: [1, 2]", "steps is a list: an option takes one value"),
        ("- steps", "it must hold a line `option: value` for each option"),
        ("steps: none", "Invalid value for '--steps'"),
        ("a: b: c", "mapping values are not allowed here"),
    ],
)
def test_a_file_that_says_nothing_to_the_command_is_refused(content, says, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(content)
    assert says in one_line(run("train", "--config", file))
    assert "No such file" in one_line(run("train", "--config", tmp_path / "absent.yaml"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dtype", "bfloat16", "--precision", "float32"], "--dtype bfloat16 computes in bfloat16 and --precision is"),
        (["--master-weights"], "--master-weights keeps float32 copies of bfloat16 weights: pass --dtype bfloat16 too"),
        (["--lora", "4"], "--lora adapts the weights of a --model, and random weights are not kept"),
        (["--eval-every", "4"], "--eval-every and --eval-split need --eval-data"),
        (["--eval-data", "absent.jsonl"], "--eval-data absent.jsonl: no such file or folder"),
        (["--compile", "--compare"], "--compare runs no compiled layers: leave --compile out"),
        (["--strategy", "fsdp"], "--strategy fsdp shards weights over processes: pass --nproc, or start it with torch"),
        (
            ["--strategy", "zero2"],
            "--strategy zero2 shards weights over processes: pass --nproc, or start it with torch",
        ),
        (["--nproc", "8"], "--rows-per-step 4 leaves some of 8 processes without a row in every step: pass 8 or more"),
        (
            ["--mesh", "fsdp=8"],
            "--rows-per-step 4 leaves some of 8 devices without a row in every step: pass 8 or more",
        ),
        (["--mesh", "data=5,tensor=2"], "--rows-per-step 4 leaves some of 5 groups of devices without a row in every"),
        (["--context-parallel", "2"], "--context-parallel 2 does not divide 1 process: every process belongs to one"),
        (["--nproc", "6", "--context-parallel", "4"], "--context-parallel 4 does not divide 6 processes"),
        (
            ["--nproc", "16", "--context-parallel", "2"],
            "--rows-per-step 4 leaves some of 8 groups of 2 processes without a row in every step: pass 8 or more",
        ),
        (["--nproc", "2", "--compare"], "--compare measures one process: pass it without --nproc and torchrun"),
        (["--batch-size", "8"], "--task sft has no --batch-size: pass --rows-per-step in its place"),
        (["--compile"], "--compile is not possible, because the model computes on cpu: leave --compile out"),
        (["--set", "lr_scheduler_type=absent"], "--decay absent is not served: pass one of cosine, linear"),
        (["--set", "adam_beta2=high"], "--set adam_beta2 is 'high': pass a number"),
        (["--set", "adam_beta=0.9"], "--set adam_beta: --task sft reads optim, lr_scheduler_type, "),
        (["--set", "adam_beta=0.9"], " alone: is it adam_beta2?"),
        (["--set", "dataset_num_proc=2"], "alone: call crosspack.enable_packing(trainer) in a script of SFTTrainer"),
        (["--set", "max_length=64"], "--set max_length: pass --capacity in its place"),
        (["--set", "optim=sgd", "--optim", "sgd"], "--set optim and --optim are the same: keep one of them"),
        (["--set", "neftune_noise_alpha=-1"], "--set neftune_noise_alpha is -1: pass a number of 0 or more"),
        (["--keep-best"], "--keep-best goes by evaluations: pass --eval-data and --eval-every"),
        (["--early-stopping", "2"], "--early-stopping goes by evaluations: pass --eval-data and --eval-every"),
        (["--keep-checkpoints", "2"], "--keep-checkpoints 2 needs --save-every, which makes them"),
        (
            ["--set", "optim=lion_8bit", "--save-every", "2", "--output", "out"],
            "--optim lion_8bit keeps states that checkpoints do not hold: leave --save-every",
        ),
        (
            ["--optim", "lion_8bit", "--save-every", "2", "--output", "out"],
            "--optim lion_8bit keeps states that checkpoints do not hold: leave --save-every",
        ),
        (["--push-to-hub", "me/mine"], "--push-to-hub pushes the folder of the run: pass --output too"),
        (["--push-to-hub", "a b/c", "--output", "out"], "--push-to-hub a b/c: pass a name on the hub, `owner/name`"),
        (["--report-to", "wandb"], "--report-to wandb: it is not installed: pip install wandb, or pass none"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(small, arguments, says):
    assert says in one_line(run(*small, *arguments))


def test_zero_without_deepspeed_is_refused_by_name(small, monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    says = "--strategy zero3: DeepSpeed is not installed: pip install deepspeed, or pass --strategy fsdp"
    assert says in one_line(run(*small, "--nproc", 2, "--strategy", "zero3"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--save-every", 2, "--output", "out"], "--strategy zero2 writes no checkpoints, because DeepSpeed's hold"),
        (["--resume", "--output", "out"], "--strategy zero2 writes no checkpoints"),
        (["--dtype", "bfloat16"], "--strategy zero2 keeps float32 copies of bfloat16 weights: pass --master-weights"),
        (["--precision", "float8"], "--strategy zero2 computes in the dtype of the weights: pass --dtype bfloat16"),
        (["--precision", "bfloat16"], "--strategy zero2 computes in the dtype of the weights: pass --dtype bfloat16"),
        (
            ["--context-parallel", 2],
            "--context-parallel 2 cuts documents over processes, which --strategy zero2 does not",
        ),
    ],
)
def test_what_zero_does_otherwise_than_one_process_is_refused(small, arguments, says, monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: "there")
    assert says in one_line(run(*small, "--nproc", 2, "--strategy", "zero2", *arguments))


@pytest.mark.parametrize(
    ("option", "arguments"),
    [
        ("--compile", ["--no-compile"]),
        ("--precision float8", ["--precision", "float8"]),
        ("--nproc or torchrun", ["--nproc", "2"]),
        ("--nproc or torchrun", ["--nproc", "2", "--context-parallel", "2"]),
        ("--optim, --neftune-alpha or --set", ["--neftune-alpha", "5"]),
        ("--keep-best, --early-stopping or --sample", ["--sample", "fox"]),
    ],
)
def test_a_backend_without_an_option_refuses_it_by_name(small, option, arguments):
    assert f"--backend jax has no {option}: leave it out, or pass another --backend" in one_line(
        run(*small, "--backend", "jax", *arguments)
    )


def test_evaluation_and_the_plan_are_printed_and_kept(small, tmp_path):
    out = tmp_path / "out"
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text('{"prompt": "lazy dog", "completion": " fox fox fox"}\n' * 3 + '{"text": ""}\n')
    result = run(
        *small, "--eval-data", held_out, "--eval-every", 2, "--steps", 3, "--rows-per-step", 1, "--output", out
    )
    assert result.exit_code == 0, result.output
    text = words(result)
    assert "held-out.jsonl: 3 documents in 1 row, " in text and "packing saves about " in text
    assert text.count("left out, nothing to") == 1 and "left out, nothing to evaluate: 1 document" in text
    for line in ("after step 2: evaluation loss ", "after step 3: evaluation loss ", ", evaluation loss "):
        assert line in text
    found = [record["eval_loss"] for record in json.loads((out / "crosspack.json").read_text())["runs"]["packed"]]
    assert found[0] is None and found[2] < found[1] < np.log(320) + 1
    refused = run(*small, "--eval-data", held_out, "--capacity", 2, "--overflow", "split", "--eval-split", "test")
    assert "--eval-split test is of a folder or a hub data set, and this is neither" in one_line(refused)


def test_a_family_that_cannot_recompute_is_refused_by_the_option_that_asks_for_it(small, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"model_type": "openai-gpt", "vocab_size": 2048, "n_embd": 8, "n_layer": 1, "n_head": 1})
    )
    refused = one_line(run(*small, "--model", config, "--gradient-checkpointing"))
    assert "OpenAIGPTLMHeadModel cannot recompute" in refused
    assert refused.endswith("--gradient-checkpointing is not possible: leave --gradient-checkpointing out")


class Calls(list):
    """Notes every call of a stand-in for a library."""

    def called(self, name):
        return lambda *args, **kwargs: self.append((name, args, kwargs))


@pytest.fixture
def installed(monkeypatch):
    """Put a stand-in in the place of a library, with the calls that the library has."""

    def install(name: str, **members) -> None:
        module = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace(name=name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)

    return install


def figures_of(folder: Path) -> list[dict]:
    return json.loads((folder / "crosspack.json").read_text())["runs"]["packed"]


@pytest.mark.parametrize("service", ["wandb", "trackio", "tensorboard"])
def test_figures_of_each_step_are_reported(small, service, installed, tmp_path):
    calls, out = Calls(), tmp_path / "mine"

    class Writer:
        def __init__(self, log_dir=None) -> None:
            calls.append(("folder", (log_dir,), {}))

        def __getattr__(self, name):
            return calls.called(name)

    if service == "wandb":
        log = types.SimpleNamespace(log=calls.called("log"), finish=calls.called("finish"))
        installed("wandb", init=lambda **options: calls.append(("init", (), options)) or log)
    elif service == "trackio":
        installed("trackio", **{name: calls.called(name) for name in ("init", "log", "finish")})
    else:
        installed("tensorboardX", SummaryWriter=Writer)
    result = run(*small, "--report-to", service, "--steps", 2, "--eval-data", small[4], "--output", out)
    assert result.exit_code == 0, result.output
    if service == "tensorboard":
        seen = {(args[0], args[2]): args[1] for name, args, _ in calls if name == "add_scalar"}
        assert calls[0] == ("folder", (str(out / "tensorboard"),), {}) and calls[-1][0] == "close"
    else:
        seen = {(key, of["step"]): value for n, args, of in calls if n == "log" for key, value in args[0].items()}
        assert calls[0][2]["project"] == "crosspack" and calls[0][2]["name"] == "mine"
        assert calls[0][2]["config"]["lr"] == 0.01 and calls[-1][0] == "finish"
    for number, record in enumerate(figures_of(out), start=1):
        assert seen["train/loss", number] == record["loss"]
        assert seen["train/grad_norm", number] == record["grad_norm"] > 0
        assert seen["train/tokens_per_second", number] == record["tokens"] / record["seconds"]
    assert seen["eval/loss", 2] == figures_of(out)[1]["eval_loss"] and ("eval/loss", 1) not in seen
    assert seen["train/learning_rate", 1] == 0.01


def test_adapters_of_a_model_with_weights_are_written_as_peft_reads_them(small, model, tmp_path):
    start, out = tmp_path / "weights", tmp_path / "out"
    assert run(*small, "--steps", 1, "--output", start).exit_code == 0
    options = ("train", "--model", start, *small[3:])
    result = run(*options, "--lora", 2, "--steps", 2, "--output", out)
    assert result.exit_code == 0, result.output
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(start)
    assert (out / "adapter_model.safetensors").exists() and not (out / "README.md").exists()


@pytest.mark.parametrize(("order", "column"), [("grouped", "topic"), ("sorted", "day"), ("curriculum", None)])
def test_rows_are_trained_in_the_order_of_a_column(order, column, tmp_path):
    records = [{"text": f"number {i} of a topic", "topic": "ab"[i % 2], "day": i * 7 % 40} for i in range(40)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = ("train", "--data", data, "--capacity", 64, "--rows-per-step", 1, "--steps", 1)
    by = [] if column is None else ["--order-by", column]
    result = run(*options, "--order", order, *by, "--output", tmp_path / order)
    assert result.exit_code == 0, result.output
    assert f'order: "{order}"' in (tmp_path / order / "run.yaml").read_text()
    del records[7]["topic"]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    refused = one_line(run(*options, "--order", "grouped", "--order-by", "topic"))
    assert "data.jsonl:8 has no topic, by which --order-by orders: give every record a number or a text" in refused


def test_the_rows_of_a_step_cost_the_same_by_the_model_and_a_run_resumes_in_them(small, model, tmp_path, monkeypatch):
    made, seen = train_command.plan_steps, []
    monkeypatch.setattr(train_command, "plan_steps", lambda *a, **of: seen.append((a, of)) or made(*a, **of))
    more = "--equal-cost --rows-per-step 3 --epochs 2 --save-every 1 --decay constant --warmup 0"
    options = (*small, *more.split())
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    result = run(*options, "--steps", 4, "--output", whole)
    assert result.exit_code == 0, result.output
    assert "with at most" not in words(result)
    assert [(arguments[2], of["epoch"]) for arguments, of in seen] == [(3, 0), (3, 1)]
    assert seen[0][0][1].cost == Cost.from_config(json.loads(model.read_text()))
    assert run(*options, "--steps", 2, "--output", parts).exit_code == 0
    assert run(*options, "--steps", 4, "--output", parts, "--resume").exit_code == 0
    assert losses(parts) == losses(whole) and len(losses(whole)) == 4


def test_the_fill_that_a_cap_on_documents_costs_is_printed(small):
    result = run(*small, "--max-segments", 1, "--steps", 1)
    assert re.search(
        r"with at most 1 document a row: (\d+) rows, \d+\.\d% full; without --max-segments \d+, \d+\.\d% full",
        words(result),
    ), result.output


def test_records_that_cannot_be_used_are_left_out_and_counted_on_request(small, tmp_path):
    path = tmp_path / "broken.jsonl"
    good = '{"prompt": "lazy dog", "completion": " fox fox fox"}\n'
    path.write_text("not JSON\n" + good * 4 + '{"body": "fox"}\n')
    broken = ["--data", path, "--steps", 1]
    assert "broken.jsonl:1" in one_line(run(*small, *broken))
    result = run(*small, *broken, "--on-error", "skip", "--sample", "lazy dog", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "left out 2 records that cannot be used, the first: " in words(result)
    assert "after step 1: lazy dog -> " in words(result)
    (sample,) = json.loads((tmp_path / "out" / "crosspack.json").read_text())["samples"]
    assert (sample["steps"], sample["prompt"]) == (1, "lazy dog")


def test_columns_of_other_names_are_read_where_they_are_named(small, tmp_path):
    path = tmp_path / "qa.jsonl"
    path.write_text('{"question": "lazy dog", "answer": " fox fox fox", "text": "zebras"}\n' * 4)
    named = ["--data", path, "--eval-data", path, "--steps", 1, "--column", "prompt=question"]
    at = small.index("--data")
    small = (*small[:at], *small[at + 2 :])
    result = run(*small, *named, "--column", "completion=answer")
    assert result.exit_code == 0 and "evaluation loss" in words(result), result.output
    assert "qa.jsonl:1 has no reply, only question" in one_line(run(*small, *named, "--column", "completion=reply"))
    assert "--column chosen=a: chosen is not read: name one of text, " in one_line(run(*small, "--column", "chosen=a"))
    assert "--column text: pass what is read and the column that holds it" in one_line(run(*small, "--column", "text"))


class Hub(BaseHTTPRequestHandler):
    """A stand-in for the hub: takes a repository, says that files are sent in a commit, and keeps the commit."""

    asked: ClassVar[list[tuple[str, str]]] = []
    refuses = False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        self.asked.append((self.path, body))
        if self.refuses:
            self.send_response(403)
            self.end_headers()
            return
        answer: dict[str, object] = {"url": "http://localhost/me/mine", "id": "me/mine", "name": "me/mine"}
        if "/preupload/" in self.path:
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            answer = {"files": [{**file, "shouldIgnore": False} for file in files]}
        elif "/commit/" in self.path:
            answer = {"commitUrl": "http://localhost/me/mine/commit/1", "commitOid": "1", "pullRequestUrl": None}
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("localhost", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(Hub, "asked", [])
    monkeypatch.setattr(constants, "ENDPOINT", f"http://localhost:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    yield Hub
    server.shutdown()
    server.server_close()


def test_the_folder_of_a_run_is_pushed_to_the_hub_without_its_checkpoints(small, hub, monkeypatch, tmp_path):
    out = tmp_path / "out"
    pushed = [*small, "--steps", 2, "--save-every", 1, "--push-to-hub", "me/mine", "--output", out]
    result = run(*pushed)
    assert result.exit_code == 0, result.output
    paths = [path for path, _ in hub.asked]
    assert paths[0] == "/api/repos/create" and paths[-1] == "/api/models/me/mine/commit/main"
    files = {json.loads(line)["value"].get("path") for line in hub.asked[-1][1].splitlines()} - {None}
    assert {"model.safetensors", "config.json", "tokenizer.json", "run.yaml", "crosspack.json"} <= files
    assert not any(name.startswith("checkpoints") for name in files)
    monkeypatch.setattr(Hub, "refuses", True)
    refused = run(*pushed, "--overwrite")
    assert "--push-to-hub me/mine: " in one_line(refused) and "step 1" not in refused.output


@pytest.mark.parametrize(("lora", "lr", "says"), [(0, None, 2e-5), (8, None, 2e-4), (8, 1e-3, 1e-3)])
def test_adapters_have_a_learning_rate_of_their_own_by_default(lora, lr, says):
    assert LossOptions(lora=lora, lr=lr).losses(0, pretrained=True, settings={}).lr == says


def test_a_run_of_few_steps_says_so_before_it_trains(small):
    warned = words(run(*small))
    assert "of 4 rows may be too few to learn from: for 50, pass --epochs" in warned
    assert "too few" not in words(run(*small, "--steps", 1))  # which says how many are wanted


def test_float8_is_refused_where_the_device_has_none(small):
    said = one_line(run(*small, "--precision", "float8", "--device", "cpu"))
    assert said.startswith("crosspack: --precision float8 is not possible, because the model computes on cpu")
