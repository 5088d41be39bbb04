"""Imports load only the modules they declare; held in fresh processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import processes

FRAMEWORKS = [
    "torch",
    "jax",
    "transformers",
    "pyarrow",
    "triton",
    "flax",
    "optax",
    "datasets",
    "matplotlib",
    "tokenizers",
]

BLOCK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""

REPORT = "\nimport sys; print('loaded:', sorted(set({names!r}) & set(sys.modules)))"


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return processes.run([sys.executable, "-c", code])


@pytest.mark.parametrize(
    "code",
    [
        "import packing_core",
        "import crosspack; crosspack.pack; dir(crosspack)",
        "import torch_backend; dir(torch_backend)",
        "import jax_backend; dir(jax_backend)",
        "import conformance",
        "import packing_core; packing_core.pack([[1, 2], [3]], 8)",
    ],
)
def test_an_import_loads_no_framework(code: str) -> None:
    result = run_python(code + REPORT.format(names=FRAMEWORKS))
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith("loaded: []")


def test_the_core_works_where_no_framework_is_installed() -> None:
    code = BLOCK.format(names=FRAMEWORKS) + "import crosspack; print(crosspack.pack([[1, 2], [3]], 8).input_ids.shape)"
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "(1, 8)"


def test_the_console_command_shows_its_help_without_a_framework() -> None:
    code = (
        "import sys; sys.argv = ['crosspack', '--help']\n"
        "from crosspack.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
    )
    result = run_python(code + REPORT.format(names=FRAMEWORKS))
    assert result.returncode == 0, result.stderr
    assert "train" in result.stdout
    assert result.stdout.strip().endswith("loaded: []")


def test_the_probe_itself_sees_a_framework_that_is_loaded() -> None:
    result = run_python("import pyarrow" + REPORT.format(names=FRAMEWORKS))
    assert "'pyarrow'" in result.stdout


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("import crosspack; crosspack.patch(None)", "torch"),
        ("import jax_backend; jax_backend.segment_attention", "jax"),
    ],
)
def test_a_missing_extra_is_one_line_that_says_what_to_install(code: str, extra: str) -> None:
    result = run_python(BLOCK.format(names=[extra]) + code)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last == f"packing_core.errors.MissingExtraError: {extra} is not installed: pip install 'crosspack[{extra}]'"


def test_the_console_command_says_a_missing_extra_in_one_line(tmp_path) -> None:
    argv = ["crosspack", "train", "--output", str(tmp_path)]
    code = BLOCK.format(names=["torch", "transformers"]) + (
        f"import sys; sys.argv = {argv!r}\nfrom crosspack.cli import main\nmain()"
    )
    result = run_python(code)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "pip install 'crosspack[" in result.stderr.replace("\n", " ")
