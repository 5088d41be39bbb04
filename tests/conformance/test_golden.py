"""Golden data is valid under its schema, is what its sources give, and reads without this repository's code."""

import json

import jsonschema
import numpy as np
import pytest

from conformance import golden

KINDS = tuple(golden.generate())


def content(kind):
    return json.loads((golden.CASES / f"{kind}.json").read_text(encoding="utf-8"))


def schema():
    return json.loads((golden.CASES / "schema.json").read_text(encoding="utf-8"))


def assert_same(found, expected, where=""):
    """Equal values; floats to 1e-12, because a matrix product may add up in another order on another machine."""
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for name in expected:
            assert_same(found[name], expected[name], f"{where}.{name}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-12), where
    else:
        assert found == expected, where


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_are_what_their_sources_give(kind):
    assert_same(content(kind), golden.generate()[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_follow_the_schema(kind):
    jsonschema.Draft202012Validator(schema()).validate(content(kind))


def test_every_file_is_generated():
    assert {path.stem for path in golden.CASES.glob("*.json")} == {*KINDS, "schema"}


def test_the_schema_is_one_and_rejects_what_it_does_not_know():
    jsonschema.Draft202012Validator.check_schema(schema())
    wrong = content("plans")
    wrong["cases"][0]["capacty"] = 8
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content("plans") | {"kind": "masks"}, schema())


@pytest.mark.parametrize("kind", ["attention", "rope", "scan", "losses"])
def test_inputs_are_exact_in_every_working_dtype(kind):
    inputs = {"attention": ("q", "k", "v", "dout"), "rope": ("x", "dout"), "losses": ("logits",)}.get(
        kind, ("x", "dt", "A", "B", "C", "dy")
    )
    for case in content(kind)["cases"]:
        for name in inputs:
            units = np.array(case[name]) * 64
            assert (units == np.round(units)).all() and np.abs(units).max() <= 128


def test_golden_plans_stand_every_document_once_and_fit():
    for case in content("plans")["cases"]:
        lengths, capacity = case["lengths"], case["capacity"]
        assert sorted(d for row in case["rows"] for d in row) == list(range(len(lengths)))
        assert max(sum(lengths[d] for d in row) for row in case["rows"]) <= capacity


def test_golden_plans_tell_the_strategies_apart():
    rows = {}
    for case in content("plans")["cases"]:
        filled = sorted(sum(case["lengths"][d] for d in row) for row in case["rows"])
        rows.setdefault(case["strategy"], []).append(filled)
    assert rows["best_fit"] != rows["first_fit"] != rows["sequential"]
