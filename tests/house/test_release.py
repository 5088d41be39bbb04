"""Contents of a release: wheel and sdist, versions, pinned actions, and each extra alone in an environment."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest

from packing_core.extras import MINIMUM
from tests.environments import ROOT, Environment, build

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
RELEASE = runpy.run_path(str(ROOT / ".ci/release.py"))
TINY_LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
"""
# What works with one extra and without the others.
ALONE = {
    "torch": """
import torch, crosspack
logits = torch.randn(1, 7, 9, requires_grad=True)
batch = crosspack.PackedCollator()([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [1, 2, 3]}])
targets = crosspack.next_token_targets(batch["labels"])
total, weight = crosspack.packed_cross_entropy(logits, targets)
total.backward()
assert int(weight) == 5
""",
    "hf": TINY_LLAMA
    + """
import crosspack
crosspack.patch(model)
model(**crosspack.PackedCollator(model)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])).loss.backward()
assert crosspack.audit(model).verdict == "exact"
""",
    "jax": """
import numpy as np, optax, crosspack, jax_backend
from flax import nnx
config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
decoder = jax_backend.DecoderConfig.from_hf(config | {"num_attention_heads": 4, "num_key_value_heads": 2})
step = jax_backend.make_train_step(jax_backend.Decoder(decoder, rngs=nnx.Rngs(0)), optax.adamw(1e-3))
state, metrics = step(step.init(), jax_backend.to_batch(crosspack.pack([np.arange(9), np.arange(5)], 16)))
assert metrics["weight_sum"] == 12
""",
    "plot": """
import crosspack.cli.figures
from packing_core.extras import require
require("matplotlib.figure", extra="plot").Figure(layout="constrained").savefig("picture.png")
""",
    "test": """
import sys
from crosspack.cli import main
sys.argv = ["crosspack", "conform", "--backend", "reference", "--requirement", "ISO-01"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
""",
}
# A command that lacks an extra -> what it says to install.
LACKING = {
    "train --output run": "'crosspack[torch]'",
    "pack --data text.jsonl --output packed": "'crosspack[hf]'",
    "report --data text.jsonl": "'crosspack[hf]'",
    "bench --model . --data text.jsonl": "'crosspack[torch]'",
    "audit llama": "'crosspack[hf]'",
    "conform --backend reference": "'crosspack[test]'",
}


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("build"))


@pytest.fixture
def environment(archives, tmp_path):
    """Makes an environment with an extra, or with what Crosspack needs anyway."""

    def make(*extras: str) -> Environment:
        needed = [
            *PROJECT["dependencies"],
            *(need for extra in extras for need in PROJECT["optional-dependencies"][extra]),
        ]
        made = Environment(tmp_path / "env", archives[0], needed)
        rows = [{"input_ids": list(range(1, 2 + n))} for n in range(40)]
        (made.folder / "ids.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (made.folder / "text.jsonl").write_text('{"text": "some words"}\n' * 9)
        return made

    return make


@pytest.mark.slow
def test_wheel_and_sdist_hold_the_packages_and_nothing_else(archives) -> None:
    for archive in archives:
        assert not RELEASE["content_faults"](RELEASE["names_in"](archive))


@pytest.mark.slow
def test_a_wheel_with_a_test_or_without_the_licence_is_refused(archives) -> None:
    names = {name for name in RELEASE["names_in"](archives[0]) if not name.endswith("LICENSE")} - {"crosspack/py.typed"}
    faults = RELEASE["content_faults"](names | {"tests/test_x.py", "crosspack/__pycache__/x.pyc"})
    assert sorted(faults) == [
        "crosspack/__pycache__/x.pyc does not belong here",
        "crosspack/py.typed is missing",
        "tests/test_x.py does not belong here",
        "the licence is missing",
    ]


@pytest.mark.slow
def test_every_command_without_extras_says_what_to_install(environment) -> None:
    bare = environment()
    for command, extra in LACKING.items():
        done = bare.run("-m", "crosspack", *command.split())
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode == 2 and f"pip install {extra}" in said and "Traceback" not in said, (command, said)
    doctor = bare.run("-m", "crosspack", "doctor")
    assert doctor.returncode == 0 and "missing" in doctor.stdout, doctor.stderr
    packed = bare.run(
        "-c", "import crosspack; print(crosspack.__version__, crosspack.pack([[1, 2], [3]], 8).n_segments)"
    )
    assert packed.stdout.split() == [PROJECT["version"], "2"], packed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("extra", ALONE)
def test_an_extra_alone_is_enough_for_its_part(extra, environment) -> None:
    done = environment(extra).run("-c", ALONE[extra])
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_an_environment_lacks_what_was_not_asked_for(environment) -> None:
    done = environment("plot").run("-c", "import matplotlib, torch")
    assert "No module named 'torch'" in done.stderr


def test_the_version_is_the_same_wherever_it_is_repeated() -> None:
    version = PROJECT["version"]
    assert RELEASE["version_faults"](f"v{version}") in ([], [f"CHANGELOG.md has no section [{version}] with a date"])
    assert RELEASE["version_faults"]("v9.9.9")[0] == f"the tag is v9.9.9, pyproject.toml has {version}"


def test_actions_are_pinned_by_commit() -> None:
    used = [line for path in WORKFLOWS for line in re.findall(r"uses: (.*)", path.read_text())]
    assert len(used) > 6
    for action in used:
        assert action.startswith("./") or re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", action), action


def test_a_change_of_pages_alone_skips_the_tests_of_code() -> None:
    (pattern,) = re.findall(r"^  PAGES: (.*)$", (ROOT / ".github/workflows/ci.yml").read_text(), flags=re.MULTILINE)
    pages = ["README.md", "docs/torch.md", "benchmarks/RESULTS.md", "docs/images/rows.svg", ".github/CODEOWNERS"]
    code = ["conformance/SPEC.md", "docs/make_models.py", "crosspack/__init__.py", "pyproject.toml", "unknown"]
    assert [name for name in pages + code if re.search(pattern, name)] == pages


def test_a_workflow_runs_targets_that_exist_on_cached_downloads() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for path in WORKFLOWS:
        text = path.read_text()
        for target in re.findall(r"run: make ([\w-]+)", text):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), (path.name, target)
        if path.name != "release.yml":  # what is published is built from fresh downloads
            assert text.count("cache: pip") == text.count("actions/setup-python@")


def test_supported_versions_are_those_of_the_project() -> None:
    page = (ROOT / "docs/releases.md").read_text()
    rows = dict(re.findall(r"^\| (\w+) \| ([\d.]+) \|", page, flags=re.MULTILINE))
    assert {name: rows[name] for name in MINIMUM} == dict(MINIMUM)
    assert rows["Python"] == PROJECT["requires-python"].removeprefix(">=")
    tested = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert f"| Python | {rows['Python']} | {', '.join(tested)} |" in page
    matrix = re.search(r"python: \[(.*)\]", (ROOT / ".github/workflows/ci.yml").read_text())
    assert matrix and re.findall(r"[\d.]+", matrix[1]) == tested
    pins = dict(re.findall(r"^(\w+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    for name in ("torch", "transformers", "jax"):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        assert pins[name] in row or pins[name].rpartition(".")[0] in row, row


def test_the_citation_has_the_date_of_the_release(tmp_path, monkeypatch) -> None:
    version, faults = PROJECT["version"], RELEASE["version_faults"]
    for name, text in {
        "pyproject.toml": f'[project]\nversion = "{version}"\n',
        "CHANGELOG.md": f"# Changelog\n\n## [{version}] - 2026-01-02\n",
        "CITATION.cff": f"title: Crosspack\nversion: {version}\ndate-released: 2026-01-01\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setitem(faults.__globals__, "ROOT", tmp_path)
    assert faults(f"v{version}") == ["CITATION.cff has another date than 2026-01-02"]
