"""``python -m tests.fuzz``: its cases repeat, hold, and find a patch that leaks."""

from __future__ import annotations

import numpy as np
import pytest

import torch_backend
from tests import fuzz

FAMILIES = ["llama", "qwen3", "gemma2", "mamba2", "gpt2"]


def run(seed: int, kind: str) -> fuzz.Tally:
    tally = fuzz.Tally()
    fuzz.run_case(seed, (kind,), FAMILIES, tally)
    return tally


@pytest.mark.parametrize("seed", range(6))
def test_random_models_are_exact(seed):
    assert run(seed, "models").findings == []


def test_a_random_trainer_is_exact():
    tally = run(1, "trainers")
    assert tally.findings == [] and tally.cases["trainers"] == 1


def test_a_case_follows_from_its_number():
    first, second = (fuzz.model_case(np.random.default_rng(5), FAMILIES) for _ in range(2))
    assert first == second != fuzz.model_case(np.random.default_rng(6), FAMILIES)


def test_a_patch_that_leaks_is_found(monkeypatch):
    patch = torch_backend.patch

    def leaking(model, **options):
        patch(model, **options)
        embeddings = model.get_input_embeddings()
        embeddings.register_forward_hook(lambda module, args, out: out + 0.1 * out.roll(1, dims=-2))
        return model

    monkeypatch.setattr(torch_backend, "patch", leaking)
    findings = [finding for seed in range(8) for finding in run(seed, "models").findings]
    assert len(findings) >= 4
    assert all("is off by" in finding["error"] for finding in findings)


def test_another_error_is_a_finding_and_a_refusal_is_none(monkeypatch):
    monkeypatch.setattr(torch_backend, "patch", lambda model, **options: 1 / 0)
    assert "ZeroDivisionError" in run(0, "models").findings[0]["error"]
    monkeypatch.undo()
    tally = fuzz.Tally()
    fuzz.run_case(0, ("models",), ["bert"], tally)
    assert not tally.findings and sum(tally.refused.values()) + sum(tally.not_built.values()) == 1
