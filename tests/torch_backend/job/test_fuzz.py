"""``python -m tests.fuzz``: its cases repeat, hold, and find a patch that leaks."""

from __future__ import annotations

from itertools import count, islice

import torch_backend
from packing_core.errors import UnsupportedModelError
from tests import fuzz
from torch_backend.hf import attention

FAMILIES = ["llama", "qwen3", "gemma2", "mamba2", "gpt2", "mistral", "cohere2", "gpt_oss"]


def numbers(few: int) -> list[int]:
    """The first numbers of cases of the families above."""
    return list(islice((seed for seed in count() if fuzz.case_of(seed)["family"] in FAMILIES), few))


def run(*seeds: int) -> fuzz.Tally:
    tally = fuzz.Tally()
    for seed in seeds:
        fuzz.run_case(seed, tally)
    return tally


def test_random_models_are_exact():
    tally = run(*numbers(6))
    assert tally.findings == [] and tally.cases >= 4


def test_a_patch_that_leaks_is_found(monkeypatch):
    attend = attention.run

    def leaking(*args, **options):
        out = attend(*args, **options)
        return out + 0.1 * out.roll(1, dims=0)

    monkeypatch.setattr(attention, "run", leaking)
    findings = run(*numbers(8)).findings
    assert len(findings) >= 4
    assert all("is off by" in finding["error"] for finding in findings)


def test_another_error_is_a_finding_and_a_refusal_is_none(monkeypatch):
    (number,) = numbers(1)
    monkeypatch.setattr(torch_backend, "patch", lambda model, **options: 1 / 0)
    assert "ZeroDivisionError" in run(number).findings[0]["error"]

    def refuse(model, **options):
        raise UnsupportedModelError("no such model")

    monkeypatch.setattr(torch_backend, "patch", refuse)
    tally = run(number)
    assert not tally.findings and tally.refused == {"no such model": 1}
