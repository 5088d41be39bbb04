"""A run's options, statuses, exit status and report, by running it."""

import re
from collections import Counter

import pytest

from conformance.spec import requirements
from tests.conformance.stacks import HERE, run


def only(*ids):
    return [f"--requirement={name}" for name in ids]


def status(outcome, name, requirement):
    return outcome.report["backends"][name]["requirements"][requirement]["status"]


MUTANTS = "tests.conformance.mutants"
WRONG = (*(f"{HERE}:{name}" for name in ("Boastful", "NarrowHeads", "Crashing", "Malformed")),
         f"{MUTANTS}:MaskLeaksOneToken", f"{MUTANTS}:SoftcapIgnoredUndeclared")  # fmt: skip


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """A run of backends that are right, and declare less than the suite knows."""
    names = [f"--backend={HERE}:{name}" for name in ("Modest", "Unpromising")]
    asked = only("MASK-05", "DTYPE-01", "MASK-04", "LOSS-12", "ISO-09")
    return run(tmp_path_factory.mktemp("narrow"), *names, *asked)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """A run of backends that are wrong, each in its own way."""
    names = [f"--backend={name}" for name in WRONG]
    return run(tmp_path_factory.mktemp("wrong"), *names, *only("ISO-01", "MASK-04", "MASK-05", "GRAD-03"))


def test_a_run_fails_with_any_backend(narrow, wrong):
    assert (narrow.code, wrong.code) == (0, 1)


def test_a_right_backend_passes_and_the_report_says_how_closely(tmp_path):
    outcome = run(tmp_path, "--backend=reference", *only("ISO-01", "GRAD-01", "LAY-01"))
    assert outcome.code == 0
    entry = outcome.report["backends"]["reference"]["requirements"]["GRAD-01"]
    assert entry["status"] == "pass" and 0 < entry["worst"] < 1 and entry["passed"] == 1
    assert outcome.report["requirements"]["GRAD-01"]["level"] == "operation"
    assert outcome.report["backends"]["reference"]["requirements"]["GRAD-02"] == {
        "status": "not run", "passed": 0, "failed": 0, "unsupported": 0, "worst": None,
        "reasons": ["left out by the selection of this run"],
    }  # fmt: skip


def test_a_mutant_fails_with_a_message_that_says_what_and_where(wrong):
    name = f"{MUTANTS}:MaskLeaksOneToken"
    assert f"ISO-01: {requirements()['ISO-01'].text}\n{name}: segment 0 changed, and" in wrong.output
    assert status(wrong, name, "ISO-01") == status(wrong, name, "GRAD-03") == "fail"
    assert re.search(f"{name}: .* times its error budget away from the oracle", wrong.output)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nobody", "registered are"),
        ("no.such.module:thing", "No module named 'no'"),
        (f"{HERE}:Missing", "no attribute 'Missing'"),
        (f"{HERE}:run", "TypeError"),
        ("reference:other", "reference offers reference"),
        (f"{HERE}:nowhere", "cannot run here: tests.conformance.stacks:nowhere:elsewhere: needs an accelerator"),
        ("builtins:dict", "offers no backend"),
    ],
)
def test_a_backend_that_was_asked_for_and_cannot_load_fails(tmp_path, name, said):
    outcome = run(tmp_path, f"--backend={name}", "--backend=reference", *only("LAY-04"))
    assert outcome.code == 4
    assert f"backend {name!r} was asked for and" in outcome.output and said in outcome.output


def test_what_cannot_run_here_is_printed_with_its_reason(tmp_path):
    outcome = run(tmp_path, f"--backend={HERE}:partly", *only("LAY-04"))
    assert outcome.code == 0
    assert f"{HERE}:partly:elsewhere: NOT RUN: needs an accelerator" in outcome.output
    assert outcome.report["not_run"] == {f"{HERE}:partly:elsewhere": "needs an accelerator"}


@pytest.mark.parametrize(("given", "taken"), [({}, 1), ({"OMP_NUM_THREADS": "3"}, 3)], ids=["without", "given"])
def test_a_process_has_one_thread_unless_the_caller_says_otherwise(tmp_path, monkeypatch, given, taken):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    outcome = run(tmp_path, f"--backend={HERE}:threads", *only("LAY-04"))
    assert list(outcome.report["backends"]) == [f"{HERE}:threads:{taken}"]


def test_no_test_executed_fails(tmp_path):
    outcome = run(tmp_path, f"--backend={HERE}:Empty", *only("LAY-01", "ISO-01", "TRAIN-01"))
    assert outcome.code == 1
    assert "FAILED: not one test was executed" in outcome.output
    assert status(outcome, f"{HERE}:Empty", "ISO-01") == "unsupported"


def test_no_test_selected_fails(tmp_path):
    assert run(tmp_path, "--backend=reference", "-k", "nothing_of_this_name").code != 0


def test_an_unknown_requirement_fails(tmp_path):
    outcome = run(tmp_path, "--backend=reference", "--requirement=ISO-99")
    assert outcome.code == 4 and "SPEC.md has no requirement ISO-99" in outcome.output


def test_what_is_not_declared_and_refused_is_unsupported(narrow):
    outcome, name = narrow, f"{HERE}:Modest"
    assert status(outcome, name, "MASK-05") == "unsupported"
    assert outcome.report["backends"][name]["requirements"]["MASK-05"]["reasons"] == ["unsupported: sinks not declared"]
    assert status(outcome, name, "MASK-04") == "pass"
    head = f"{name}: not declared, by method, with the number of requirements left out:\n"
    assert f"{head}  attention  dtype bfloat16 1, dtype float16 1, sinks 1\n" in outcome.output
    assert outcome.report["backends"][name]["undeclared"] == {
        "dtype bfloat16": ["DTYPE-01"], "dtype float16": ["DTYPE-01"], "sinks": ["MASK-05"],
    }  # fmt: skip
    counted = outcome.report["backends"][name]["requirements"]["DTYPE-01"]
    assert (counted["status"], counted["passed"], counted["unsupported"]) == ("pass", 2, 4)


def test_a_promise_that_is_not_made_is_not_tried_and_not_passed(narrow):
    name = f"{HERE}:Unpromising"
    assert status(narrow, name, "LOSS-12") == "unsupported" and status(narrow, name, "ISO-09") == "pass"
    assert narrow.report["backends"][name]["undeclared"] == {"untrained_batches": ["LOSS-12"]}


def test_what_is_declared_and_refused_fails(wrong):
    assert status(wrong, f"{HERE}:Boastful", "MASK-05") == "fail"
    assert "attention is declared and refused: no sinks after all" in wrong.output


@pytest.mark.slow
def test_an_adapter_of_torch_or_jax_that_joins_runs_of_an_id_fails(tmp_path):
    outcome = run(tmp_path, f"--backend={HERE}:joining", *only("ISO-13", "ISO-14"))
    assert outcome.code == 1
    for name in ("torch", "jax"):
        verdicts = [status(outcome, f"{HERE}:joining:{name}", requirement) for requirement in ("ISO-13", "ISO-14")]
        assert verdicts == ["pass", "fail"], outcome.output


def test_what_is_not_declared_and_served_fails(wrong):
    assert status(wrong, f"{MUTANTS}:SoftcapIgnoredUndeclared", "MASK-04") == "fail"
    assert "an answer that it does not declare (softcap not declared): it must raise" in wrong.output


def test_what_is_required_cannot_be_declared_away(wrong):
    assert status(wrong, f"{HERE}:NarrowHeads", "ISO-01") == "fail"
    assert "a backend with attention must serve this: head_dim 64 is not declared" in wrong.output


@pytest.mark.parametrize(
    ("stack", "said"), [("Crashing", "illegal memory access"), ("Malformed", "out has shape (1, 96, 64), not")]
)
def test_what_is_no_answer_fails(wrong, stack, said):
    assert said in wrong.output
    assert status(wrong, f"{HERE}:{stack}", "MASK-04") == "fail"


def test_an_interpreted_backend_runs_a_reduced_selection_and_says_so(tmp_path):
    few = run(tmp_path, f"--backend={HERE}:Interpreted", *only("SHAPE-03", "DTYPE-03"))
    assert "interpreted, reduced selection of 1 out of 4 tests (--thorough for all)" in few.output
    assert status(few, f"{HERE}:Interpreted", "DTYPE-03") == "not run"
    many = run(tmp_path, f"--backend={HERE}:Interpreted", "--thorough", *only("SHAPE-05"))
    assert "reduced" not in many.output and "5 passed" in many.output


def test_parts_are_all_tests_and_neighbouring_backends_take_different_ones(tmp_path):
    names = ["reference", f"{HERE}:Unpromising"]

    def passed(*options):
        outcome = run(tmp_path, *(f"--backend={name}" for name in names), *only("DET-02", "LAY-01", "LAY-02"), *options)
        assert outcome.code == 0, outcome.output
        assert ("each backend was judged by one test in 2" in outcome.output) == bool(options)
        found = [outcome.report["backends"][name]["requirements"].items() for name in names]
        return [Counter({i: verdict["passed"] for i, verdict in verdicts}) for verdicts in found]

    whole, one, two = passed(), passed("--part=1/2"), passed("--part=2/2")
    assert [a + b for a, b in zip(one, two, strict=True)] == [+count for count in whole]
    assert +one[0] == +two[1] and +one[1] == +two[0] and one[0] != one[1]
    assert run(tmp_path, "--part=3/2", report=False).code == 4


def test_a_part_may_hold_a_test_of_each_requirement(tmp_path):
    """On a backend that must serve it; the reference is the oracle, and is right in any case."""
    names, ids = ["reference", f"{HERE}:Unpromising", f"{HERE}:Modest"], ("DET-02", "LAY-01", "LAY-02", "ISO-01")
    chosen = [*(f"--backend={name}" for name in names), *only(*ids), "--part=7/7"]
    part, each = run(tmp_path, *chosen), run(tmp_path, *chosen, "--each")

    def passed(outcome, requirement, *by):
        return any(status(outcome, name, requirement) == "pass" for name in by)

    assert not all(passed(part, requirement, *names) for requirement in ids)
    assert all(passed(each, requirement, *names[1:]) for requirement in ids)
    assert passed(each, "ISO-01", names[1]), "Modest declares less of attention"


@pytest.mark.slow
def test_workers_hand_over_the_same_report(tmp_path):
    options = ["--backend=reference", f"--backend={HERE}:Interpreted", *only("ISO-01", "MASK-02", "SHAPE-03", "LAY-05")]
    alone, shared = run(tmp_path, *options), run(tmp_path, *options, "-n", "2", "--dist", "loadgroup")
    assert alone.code == shared.code == 0
    assert alone.report == shared.report
    line = "interpreted, reduced selection of"
    assert line in alone.output and line in shared.output


def test_a_worker_gets_all_tests_of_a_method(tmp_path):
    options = ["--backend=reference", *only("GRAD-01", "GRAD-02", "GRAD-03", "LAY-04", "DET-02"), "-vv"]
    outcome = run(tmp_path, *options, "-n", "2", "--dist", "loadgroup")
    by_worker = re.findall(r"\[(gw\d)\].* PASSED \S*test_(\w+).py", outcome.output)
    assert len(by_worker) == 5 and len({worker for worker, file in by_worker if file == "gradients"}) == 1


def test_one_failing_test_among_workers_fails_the_run(tmp_path):
    outcome = run(tmp_path, "--backend=tests.conformance.mutants:WindowOffByOne", *only("MASK-02", "LAY-01"), "-n", "2")
    assert outcome.code == 1
    assert status(outcome, "tests.conformance.mutants:WindowOffByOne", "MASK-02") == "fail"


MODEL_LEVEL = only("ISO-08", "REP-03", "REP-05", "GRAD-09", "LOSS-07", "TRAIN-01", "DTYPE-08")


def test_a_model_of_its_own_is_its_own_oracle_and_one_that_leaks_is_rejected(tmp_path):
    outcome = run(tmp_path, f"--backend={HERE}:OwnModel", f"--backend={HERE}:LeakyOwnModel", *MODEL_LEVEL)
    assert outcome.code == 1
    own = outcome.report["backends"][f"{HERE}:OwnModel"]["requirements"].values()
    assert Counter(each["status"] for each in own if each["status"] != "not run") == {"pass": 7}, outcome.output
    assert status(outcome, f"{HERE}:LeakyOwnModel", "ISO-08") == "fail"
    assert status(outcome, f"{HERE}:LeakyOwnModel", "REP-03") == "fail"
