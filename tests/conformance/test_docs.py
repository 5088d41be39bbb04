"""docs/conformance.md is executed: its plug-in passes, its planted leak is named, its models do as it says."""

import re

import pytest

from conformance.spec import requirements
from tests.conformance.stacks import ROOT, run

PAGE = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")


def block(marker, language):
    """The code block under ``<!-- marker -->``."""
    (found,) = re.findall(rf"<!-- {re.escape(marker)} -->\n```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


@pytest.fixture
def plugin(tmp_path):
    package = tmp_path / "mystack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "gate.py").write_text(block("file: mystack/gate.py", "python"))
    return package / "gate.py"


@pytest.mark.slow
def test_the_plugin_is_right_at_first(plugin, tmp_path):
    outcome = run(tmp_path, "--backend=mystack.gate:Stack")
    assert outcome.code == 0, outcome.output
    statuses = outcome.report["backends"]["mystack.gate:Stack"]["requirements"]
    required = [i for i, r in requirements().items() if r.method == "attention" and r.need == "required"]
    assert {statuses[i]["status"] for i in required} == {"pass"}


def test_the_suite_names_the_planted_leak(plugin, tmp_path):
    removed, added = (line[1:] for line in block("change: mystack/gate.py", "diff").splitlines())
    right = plugin.read_text()
    assert removed in right
    plugin.write_text(right.replace(removed, added))
    outcome = run(tmp_path, "--backend=mystack.gate:Stack", "--requirement=ISO-01")
    assert outcome.code == 1
    verdict = outcome.report["backends"]["mystack.gate:Stack"]["requirements"]["ISO-01"]
    assert verdict["status"] == "fail"
    (promised,) = re.findall(r"```text\n(ISO-01: .*?)```", PAGE, re.DOTALL)
    assert promised in outcome.output


@pytest.mark.slow
def test_a_hugging_face_stack_is_judged_as_the_page_says(tmp_path):
    (tmp_path / "mymodel.py").write_text(block("file: mymodel.py", "python"))
    chosen = [f"--requirement={name}" for name in ("LOSS-01", "ISO-08", "LOSS-08")]
    outcome = run(tmp_path, "--backend=mymodel:stock", "--backend=mymodel:patched", *chosen)
    found = {
        name: {i: v["status"] for i, v in backend["requirements"].items() if v["status"] != "not run"}
        for name, backend in outcome.report["backends"].items()
    }
    assert set(found["mymodel:patched"].values()) == {"pass"}, outcome.output
    assert found["mymodel:stock"] == {"LOSS-01": "pass", "ISO-08": "fail", "LOSS-08": "pass"}


def test_commands_and_statuses_of_the_page_exist():
    from crosspack.cli.conform import conform

    options = {"--" + name for name in conform.__annotations__} | {"--n", "--all"}
    assert set(re.findall(r"crosspack conform (--[a-z]+)", PAGE)) <= options
    for group in {name.partition("-")[0] for name in requirements()}:
        assert f" {group}" in PAGE


def judged(folder, module, stack, *chosen):
    """Run a stack of the page; the statuses of what ran, by id."""
    (folder / f"{module}.py").write_text(block(f"file: {module}.py", "python"))
    outcome = run(folder, f"--backend={module}:{stack}", *chosen)
    found = outcome.report["backends"][f"{module}:{stack}"]["requirements"]
    return outcome, {name: verdict["status"] for name, verdict in found.items() if verdict["status"] != "not run"}


@pytest.mark.slow
@pytest.mark.parametrize(("module", "lines"), [("mytorch", 60), ("myjax", 40)])
def test_the_short_adapters_pass(tmp_path, module, lines):
    assert len(block(f"file: {module}.py", "python").splitlines()) <= lines
    ids = ("ISO-01", "ISO-02", "ISO-04", "MASK-01", "MASK-07", "GRAD-01", "GRAD-05", "PAD-01", "PAD-03", "LOSS-05")
    outcome, statuses = judged(tmp_path, module, "Stack", *(f"--requirement={name}" for name in ids))
    assert outcome.code == 0, outcome.output
    absent = {"LOSS-05"} if module == "myjax" else set()
    assert {name for name, status in statuses.items() if status == "pass"} == set(ids) - absent


@pytest.mark.slow
@pytest.mark.parametrize(("stack", "isolated"), [("padding_only", "fail"), ("by_segments", "pass")])
def test_a_flax_model_is_judged_as_the_page_says(tmp_path, stack, isolated):
    ids = ("ISO-08", "ISO-09", "LOSS-12", "TRAIN-05")
    outcome, statuses = judged(tmp_path, "myflax", stack, *(f"--requirement={name}" for name in ids))
    assert statuses == {
        "ISO-08": isolated,
        "ISO-09": isolated,
        "LOSS-12": "pass",
        "TRAIN-05": "pass" if isolated == "pass" else "fail",
    }, outcome.output
