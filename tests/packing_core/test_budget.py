"""The error budget accepts what an honest implementation does, and nothing much worse."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from conformance.draws import round_to
from conformance.judge import Judge, Rejected
from packing_core import budget
from packing_core.protocol import DTYPES, Backend

EXACT = np.array([1.0, 2.0, -3.0, 0.5])


def worst(result, rounded=EXACT, dtype="float32", scale=3.0):
    return budget.over_budget(result, EXACT, rounded, scale=scale, dtype=dtype).max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exact_result_and_its_rounding_pass(dtype):
    draw = np.random.default_rng(0)
    exact = draw.standard_normal(100)
    assert budget.over_budget(exact, exact, exact, scale=1.0, dtype=dtype).max() == 0
    rounded = round_to(dtype, exact)
    assert budget.over_budget(rounded, exact, exact, scale=np.abs(exact).max(), dtype=dtype).max() < 1


def test_the_budget_is_twice_the_error_of_the_rounded_reference_plus_the_floor():
    rounded = EXACT + [0, 0, 0.5, 0]
    floor = budget.FLOOR["float32"] * 2.0**-23 * 3.0
    assert worst(EXACT + [1.0 + floor, 0, 0, 0], rounded) == pytest.approx(1.0)
    assert worst(EXACT + [1.01, 0, 0, 0], rounded) > 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_beyond_every_budget(bad):
    assert worst(np.array([1.0, bad, -3.0, 0.5])) == np.inf


def test_an_error_without_any_budget_fails():
    zero = np.zeros(3)
    over = budget.over_budget(np.array([0.0, 1e-30, 0.0]), zero, zero, scale=0.0, dtype="float32")
    assert over.tolist() == [0.0, np.inf, 0.0]


def test_epsilon_is_the_distance_from_one_to_the_next_number():
    for dtype in DTYPES:
        just_above = 1 + budget.EPSILON[dtype]
        assert round_to(dtype, np.array([just_above]))[0] == just_above
        assert round_to(dtype, np.array([1 + budget.EPSILON[dtype] / 4]))[0] == 1


@pytest.mark.parametrize(("name", "excused"), [("q", True), ("output", False)])
def test_noise_that_a_backward_declares_excuses_its_gradients_and_no_forward(name, excused):
    atomic = replace(Backend.capabilities, dtypes=("float32",), atomic_backward=True)
    backend = type("Noisy", (Backend,), {"capabilities": atomic})()
    runs = itertools.cycle([0.0, 1e-6, -1e-6])

    def call(arguments):
        return {name: arguments["q"] + next(runs)}

    def isolated():
        ids, q = np.array([[1, 1, 2, 2]]), np.ones((1, 4, 1, 2))
        judge = Judge(backend, method="attention", required=True)
        judge.isolated(call, {"q": q}, ids, change=("q",), dtype="float32", backward=True)

    if excused:
        isolated()
    else:
        with pytest.raises(Rejected, match="output of other segments moved"):
            isolated()


def test_each_gradient_is_judged_by_its_own_rounding() -> None:
    want = [np.float32([1.0, -1.0]), np.float32([1e-9])]
    rounded = [np.float32([1.0 + 1e-7, -1.0]), np.float32([-4e-8])]

    def judged(weight: list[float], bias: list[float]) -> tuple[float, float, str]:
        differences = [
            dict(zip(("weight", "bias"), map(budget.difference, arrays, want), strict=True))
            for arrays in ((np.float32(weight), np.float32(bias)), rounded)
        ]
        return budget.worst_by_bound(differences[0], 2e-6, differences[1])

    error, allowed, _ = judged([1.0, -1.0], [3e-8])
    assert error <= allowed
    error, allowed, name = judged([1.0 + 1e-5, -1.0], [1e-9])
    assert error > allowed and name == "weight"
    assert judged([1.0, -1.0], [np.nan])[0] == float("inf")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_floor_of_a_precision_is_the_same_for_the_suite_and_the_audits(dtype: str) -> None:
    assert budget.floor_of(budget.EPSILON[dtype]) == budget.FLOOR[dtype] * budget.EPSILON[dtype]
    assert budget.floor_of(2.0**-52) == budget.floor_of(budget.EPSILON["float32"])
