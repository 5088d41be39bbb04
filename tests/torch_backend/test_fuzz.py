"""``python -m tests.fuzz``: its cases repeat, hold, and find a patch that leaks."""

from __future__ import annotations

import torch_backend
from packing_core.errors import UnsupportedModelError
from tests import fuzz
from torch_backend.hf import attention

FAMILIES = ["llama", "qwen3", "gemma2", "mamba2", "gpt2", "mistral", "cohere2", "gpt_oss"]


def numbers(kind: str, count: int) -> list[int]:
    """The first numbers of cases of a kind, of models those of the families above."""
    found: list[int] = []
    seed = 0
    while len(found) < count:
        own, case = fuzz.case_of(seed)
        if own == kind and case.get("family", FAMILIES[0]) in FAMILIES:
            found.append(seed)
        seed += 1
    return found


def run(*seeds: int) -> fuzz.Tally:
    tally = fuzz.Tally()
    for seed in seeds:
        fuzz.run_case(seed, tally)
    return tally


def test_random_models_and_a_random_trainer_are_exact():
    tally = run(*numbers("models", 6), *numbers("trainers", 1))
    assert tally.findings == [] and tally.cases["trainers"] == 1 and tally.cases["models"] >= 4


def test_a_case_follows_from_its_number_alone():
    (number,) = numbers("models", 1)
    first, second = fuzz.case_of(number), fuzz.case_of(number)
    assert first == second != fuzz.case_of(number + 1)
    tally = fuzz.Tally()
    fuzz.run_case(number, tally, kinds=["trainers"])
    fuzz.run_case(number, tally, families=["another"])
    assert tally == fuzz.Tally()


def test_a_patch_that_leaks_is_found(monkeypatch):
    attend = attention.run

    def leaking(*args, **options):
        out = attend(*args, **options)
        return out + 0.1 * out.roll(1, dims=0)

    monkeypatch.setattr(attention, "run", leaking)
    findings = run(*numbers("models", 8)).findings
    assert len(findings) >= 4
    assert all("is off by" in finding["error"] for finding in findings)


def test_another_error_is_a_finding_and_a_refusal_is_none(monkeypatch):
    (number,) = numbers("models", 1)
    monkeypatch.setattr(torch_backend, "patch", lambda model, **options: 1 / 0)
    assert "ZeroDivisionError" in run(number).findings[0]["error"]

    def refuse(model, **options):
        raise UnsupportedModelError("no such model")

    monkeypatch.setattr(torch_backend, "patch", refuse)
    tally = run(number)
    assert not tally.findings and tally.refused == {"no such model": 1}
