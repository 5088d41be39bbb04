"""The GPU benchmark has no figure for what is wrong, late or broken, and writes what it has after every contender."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time

import pytest
import torch

from benchmarks import gpu, gpu_clock, gpu_moe, gpu_options, gpu_preference, gpu_step, gpu_trees, gpu_vision
from benchmarks.gpu_clock import Result, gated
from benchmarks.gpu_step import Contender, Shape
from tests.processes import run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its toy sizes are for machines without a GPU")


@pytest.fixture(autouse=True)
def _no_deadline_and_all_contenders(monkeypatch):
    monkeypatch.setattr(gpu_clock, "_deadline", float("inf"))
    monkeypatch.setattr(gpu_clock, "_match", re.compile(""))


def leaking(model):
    """A row as one long document."""

    def loss(batch):
        ids, labels = batch["input_ids"], batch["labels"]
        return model(input_ids=ids, labels=labels, use_cache=False).loss

    return loss


def test_a_contender_whose_documents_see_each_other_has_no_figure():
    shape = Shape("toy", gpu_step.qwen2, (256,))
    right, wrong = Contender("stock", gpu_step.stock, "stock"), Contender("leaking", leaking, "stock")
    results = list(gpu_step.race(shape, [right, wrong]))
    figures = {r.contender: r for r in results if r.unit == "real tokens/s"}
    assert figures["stock"].value > 0
    assert figures["leaking"].value is None and figures["leaking"].note.startswith("WRONG: error")


def test_after_the_budget_nothing_is_begun():
    gpu_clock.set_budget(-1)
    assert gated(pytest.fail, 1.0, pytest.fail) == ({}, "not run: out of time")


def test_a_contender_that_does_not_end_is_interrupted(monkeypatch):
    monkeypatch.setattr(gpu_clock, "_limit", 0.05)
    figures, note = gated(lambda: 0.0, 1.0, lambda: time.sleep(60))
    assert figures == {} and note == "TimeoutError: no end after 0 s"
    monkeypatch.setattr(gpu_clock, "_limit", 60.0)
    gpu_clock.set_budget(0.05)
    assert gated(lambda: time.sleep(60), 1.0, pytest.fail)[1].startswith("TimeoutError")


@pytest.mark.slow
def test_a_budget_ends_a_process_that_nothing_interrupts():
    code = """
import signal
from benchmarks.gpu_clock import ending_within
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
with ending_within(0.5):
    signal.sigwait([signal.SIGUSR1])
"""
    ended = run([sys.executable, "-c", code], limit=120)
    assert ended.returncode == 1 and "Timeout" in ended.stderr


def test_figures_are_printed_and_written_as_they_come(tmp_path, capsys):
    def slow():
        yield Result("one", "case", "ours", 1.5, "ms", "error 1e-3")
        yield Result("one", "case", "ours", 3.0, "GiB", "error 1e-3")
        printed = capsys.readouterr().out.splitlines()[-1]
        assert printed.endswith("one, case, ours: 1.5 ms; error 1e-3; 3 GiB;")
        assert len(json.loads((tmp_path / "gpu.json").read_text())["results"]) == 2
        yield Result("one", "case", "theirs", None, "ms", "broken")
        assert capsys.readouterr().out.splitlines()[-1].endswith("one, case, theirs: broken;")

    assert len(gpu.collected(slow(), tmp_path)) == 3


def test_what_fails_says_why_and_what_is_near_enough_is_measured():
    def broken() -> float:
        raise RuntimeError("no kernel\nlong trace")

    assert gated(broken, 1.0, pytest.fail) == ({}, "RuntimeError: no kernel")
    assert gated(lambda: float("nan"), 1.0, pytest.fail)[0] == {}
    assert gated(lambda: 0.1, lambda: 0.2, lambda: {"ms": 3.0}) == ({"ms": 3.0}, "error 1.0e-01")


def test_a_section_that_breaks_off_leaves_the_others_their_turn_and_its_results(monkeypatch, tmp_path, capsys):
    def broken():
        yield Result("one", "case", "ours", 1.5, "ms")
        raise ValueError("out of something")

    monkeypatch.setattr(gpu_step, "run", broken)
    monkeypatch.setattr(gpu_step, "run_others", lambda: iter([Result("two", "case", "ours", 2.0, "ms")]))
    gpu.main(["--only", "step", "others", "--output", str(tmp_path)])
    written = json.loads((tmp_path / "gpu.json").read_text())["results"]
    assert [r["value"] for r in written] == [1.5, None, 2.0]
    assert written[1]["note"] == "ValueError: out of something"
    assert "| case, ms |" in capsys.readouterr().out


def test_attention_with_options_has_time_and_memory_of_what_serves_and_of_what_auto_takes():
    results = list(gpu_options.compare("toy", gpu_options.LAYERS["softcap"], next(iter(gpu_options.sets().values()))))
    figures = {(r.contender, r.unit): r for r in results if r.value is not None}
    for contender in ("sdpa", gpu_options.AUTO):
        assert figures[contender, "ms"].value > 0 and figures[contender, "GiB at most"].value == 0
    assert figures[gpu_options.AUTO, "ms"].note.startswith("sdpa, error")
    refused = {r.contender: r.note for r in results if r.value is None}
    assert refused["varlen"] == "no softcap" and not set(refused) & {"sdpa", gpu_options.AUTO}


def test_a_wrong_attention_with_options_has_no_figure(monkeypatch):
    monkeypatch.setattr(gpu_options, "LIMIT", -1.0)
    layer, documents = gpu_options.LAYERS["ALiBi"], (5, 20)
    figures, note = gpu_options.measured(layer, documents, "sdpa")
    assert figures == {} and note.startswith("WRONG: error")


@pytest.mark.slow
def test_preference_trainers_are_compared_on_the_same_pairs_at_equal_memory():
    trained = "^(enable_packing|stock, sdpa, random), micro-batches of 2$"
    results = gpu_preference.main(["--shape", "0.5B", "--match", trained])
    figures = {(r.contender.partition(",")[0], r.unit): r.value for r in results}
    assert figures["stock", "pairs/s"] > 0 and figures["enable_packing", "pairs/s"] > 0
    assert figures["stock", "mean loss"] == pytest.approx(figures["enable_packing", "mean loss"], rel=1e-5)

    def of(contender, pairs, memory):
        units = {"pairs/s": pairs, "GiB at most": memory}
        return [Result("preference", "4B", contender, value, unit) for unit, value in units.items()]

    found = (
        of("stock, a", 2.0, 40.0) + of("stock, b", 1.0, 20.0) + of("packed, a", 5.0, 39.0) + of("packed, b", 8.0, 50)
    )
    text = gpu_preference.verdict("4B", found)
    assert "stock, a: 2.00 pairs/s" in text
    assert "2.50 times as fast within its memory: packed, a" in text
    assert "4.00 times as fast whatever its memory: packed, b" in text


@pytest.mark.slow
def test_shared_prefixes_are_compared_on_the_same_answers():
    case = "8 x 512 after 512"
    results = gpu_trees.main(["--case", case, "--no-dpo"])
    figures = {(r.contender, r.unit): r.value for r in results}
    losses = [figures[name, "first loss"] for name in gpu_trees.contenders()]
    assert len(losses) == 4 and losses == pytest.approx([losses[0]] * 4, abs=1e-4)
    assert figures["shared", "tokens computed"] < figures["unshared", "tokens computed"]
    wrong = [
        dataclasses.replace(r, value=9.0) if r.contender == "shared" and r.unit == "first loss" else r for r in results
    ]
    lines = gpu_trees.verdict(case, wrong)
    assert len(lines) == 4 and sum("WRONG" in line for line in lines) == 2


@pytest.mark.slow
def test_experts_that_are_wrong_have_no_figure(monkeypatch):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def unweighted(module, tokens, indices, weights):
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, tokens, indices, torch.ones_like(weights) * weights.mean())

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "unweighted", unweighted)
    monkeypatch.setattr(gpu_moe, "IMPLEMENTATIONS", ("grouped_mm", "crosspack", "unweighted"))
    for shape, lora in ((gpu_moe.SHAPES[1], False), (gpu_moe.PEFT, True)):
        results = list(gpu_moe.layers(shape, 64, "experts", lora=lora))
        figures = {r.contender: r for r in results if r.unit == "ms forward and backward"}
        assert figures["grouped_mm"].value > 0 and figures["crosspack"].value > 0
        assert figures["unweighted"].value is None and figures["unweighted"].note.startswith("WRONG: error")


def test_gradients_of_every_weight_and_adapter_of_experts_are_compared():
    for shape, lora, names in (
        (gpu_moe.SHAPES[1], False, {"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"}),
        (gpu_moe.PEFT, True, {f"{p}.lora_{x}" for p in ("gate_up_proj", "down_proj") for x in "AB"}),
    ):
        case = gpu_moe.make_case(shape, 64, lora)
        result, gradients = gpu_moe.chosen_for(case, "eager").both()
        errors = gpu_moe.errors(case, result.detach(), gradients)
        assert set(errors) == {"result", "tokens", "routing weights"} | names
        assert max(errors.values()) < 1e-5
        broken = [gradients[0], gradients[1], *(2 * gradient for gradient in gradients[2:])]
        wrong = gpu_moe.errors(case, result.detach(), broken)
        assert all(wrong[name] == pytest.approx(1, rel=1e-3) for name in names)


@pytest.mark.slow
def test_images_train_to_the_loss_of_padded_batches_and_a_difference_shows():
    results = gpu_vision.main(["--case", "OCR", "--images", "32"])
    losses = {r.contender: r.value for r in results if r.unit == "first loss"}
    assert len(losses) == 5 and max(losses.values()) == pytest.approx(min(losses.values()), rel=1e-5)
    assert gpu_vision.verdict("OCR", results)[0].startswith("OCR: losses agree")
    assert any(r.contender == "2 workers" and r.value > 0 for r in results)
    wrong = [dataclasses.replace(r, value=2 * r.value) if r.contender == gpu_vision.PACKED else r for r in results]
    assert gpu_vision.verdict("OCR", wrong)[0].startswith("OCR: losses DIFFER")
